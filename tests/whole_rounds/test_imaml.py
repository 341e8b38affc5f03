"""Two rounds of iMAML (Rajeswaran et al., arXiv 1909.04630, algorithms 1 and 2) in federated form.

Client i takes steps phi = phi - alpha (grad f(phi; batch of A_i) + lambda (phi - w)). With H the Hessian over all of A_i at
phi, and b the mean over the batches of B_i of grad f(phi; batch), its meta-gradient solves (I + H / lambda) g = b. After k
steps of conjugate gradient, g minimises x'Mx/2 - b'x, M = I + H / lambda, over the space that b, Mb, ..., M^{k-1} b span.
"""

import importlib

import jax
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import implicit
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch
from tests.whole_rounds.world import (
    HEAD,
    KNOWN,
    LATE,
    NEW,
    NOTHING,
    QUERY_SIZES,
    Library,
    check,
    cut,
    descend,
    epochs,
    flat,
    gradient,
    hessian,
    loss,
    near,
    order_key,
    rows,
    task,
    test_key,
    two_rounds,
    view,
)

ALL = ~NOTHING
ALPHA, BETA, PULL, BATCH, PASSES, SERVER = 0.2, 0.3, 2.0, 4, 2, 0.6


def in_krylov_space(matrix, b, size):
    """argmin of x'Mx/2 - b'x in span(b, Mb, ...)."""
    space = np.linalg.qr(np.stack([np.linalg.matrix_power(matrix, k) @ b for k in range(size)], 1))[0]
    return space @ np.linalg.solve(space.T @ matrix @ space, space.T @ b)


def rule(solve, *, where=ALL, last=False, damping=0.0):
    """A client's round, for an inner problem on the entries `where`; with `last`, the pull comes once, after the steps."""

    def client(round_, i, w, memory):
        support = epochs(jax.random.fold_in(order_key(round_, i), 0), i, "support", BATCH, PASSES)
        phi = descend(w, ALPHA, support, where, pull=0.0 if last else PULL, anchor=w)
        if last:
            phi = phi - ALPHA * PULL * np.where(where, phi - w, 0)
        b = np.mean([gradient(phi, batch) for batch in cut(view(i, "query"), BATCH)], 0)
        h = hessian(phi, view(i, "support"))
        assert np.linalg.eigvalsh(h)[0] > -PULL
        g = b.copy()
        g[where] = solve((1 + damping) * np.eye(where.sum()) + h[np.ix_(where, where)] / PULL, b[where])
        g[~where] = b[~where] - h[np.ix_(~where, where)] @ g[where] / PULL
        return w - BETA * g, None

    return client


@pytest.mark.parametrize("personal", [NOTHING, HEAD], ids=["nothing personal", "head"])
@pytest.mark.parametrize(
    ("cg", "solve"),
    [
        ({"cg_steps": 60, "tolerance": 1e-14}, np.linalg.solve),
        ({"cg_steps": 3}, lambda matrix, b: in_krylov_space(matrix, b, 3)),
    ],
    ids=["solved", "three steps"],
)
def test_two_rounds_and_their_tests(cg, solve, personal):
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "prox_weight": PULL, "inner_epochs": PASSES, "batch_size": BATCH}
    method = fm.imaml(task(), **options, **cg, outer_optimizer=optax.sgd, personal="head" if personal.any() else "none")
    library = Library(method, server_lr=SERVER)

    after = two_rounds(library.w, rule(solve), QUERY_SIZES, personal=personal, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, own, _ = after[number]
        check(state, number + 1, model=w, personal=rows(own, library.w)[:, personal])
    w, own, _ = after[-1]

    def tested(start, i):
        batches, phi, losses = epochs(tagged(test_key(), "order"), i, "test_support", BATCH, PASSES), start, []
        for batch in batches:
            losses.append(loss(phi, batch) + PULL / 2 * np.sum((phi - start) ** 2))
            phi = descend(phi, ALPHA, [batch], pull=PULL, anchor=start)
        return phi, np.mean(losses)

    for i in (KNOWN, LATE):
        near(library.tested(i), tested(np.where(personal, own[i], w), i)[0])
    tries = [tested(np.where(personal, own[i], w), NEW) for i in sorted(own)]
    near(library.tested(NEW), min(tries, key=lambda tried: tried[1])[0])


@pytest.mark.parametrize(
    ("options", "case"),
    [
        ({"adapts": "head"}, {"where": HEAD}),
        ({"proximal": "last"}, {"last": True}),
        ({"damping": 0.5, "warm_start": "gradient"}, {"damping": 0.5}),
    ],
    ids=lambda value: "",
)
def test_two_rounds_of_other_inner_problems(options, case):
    options = {
        "inner_lr": ALPHA,
        "outer_lr": BETA,
        "prox_weight": PULL,
        "inner_epochs": PASSES,
        "batch_size": BATCH,
        **options,
    }
    method = fm.imaml(task(), **options, cg_steps=60, tolerance=1e-14, outer_optimizer=optax.sgd, test_prox_weight=0.7)
    library = Library(method)
    w = two_rounds(library.w, rule(np.linalg.solve, **case), QUERY_SIZES)[-1][0]
    check(library.last, 2, model=w)
    batches = epochs(tagged(test_key(), "order"), KNOWN, "test_support", BATCH, PASSES)
    near(library.tested(KNOWN), descend(w, ALPHA, batches, case.get("where"), pull=0.7, anchor=w))


def test_options_of_the_solver_reach_it(monkeypatch):
    other = {"prox_weight": 3.5, "cg_steps": 7, "tolerance": 0.25, "damping": 0.125, "warm_start": "gradient"}
    other |= {"operator": "imaml_dev", "proximal": "last", "outer": "last_chunk", "negative_curvature": "continue"}
    given, module = {}, importlib.import_module("fedjax_meta.methods.imaml")
    monkeypatch.setattr(module, "fedmeta", lambda task, **options: given.update(options) or fm.fedmeta(task))
    fm.imaml(task(), **other)
    assert given["estimator"].keywords == other


def test_the_solver_stops_at_its_tolerance():
    """The smallest k at which |b - M x_k| is at most the tolerance times |b|."""
    given, (x, y), (u, v) = task().init(jax.random.key(1)), view(0, "train"), view(0, "test_support")
    matrix, b = np.eye(27) + hessian(flat(given), (x, y)) / PULL, gradient(flat(given), (u, v))
    gaps = [np.linalg.norm(b - matrix @ in_krylov_space(matrix, b, k)) / np.linalg.norm(b) for k in range(1, 6)]

    @jax.jit
    def estimate(tolerance):
        estimator = implicit.implicit_gradient(fm.meta.sgd(0.0), prox_weight=PULL, cg_steps=20, tolerance=tolerance)
        batches = Batch(x, y, np.ones(len(y))), Batch(u, v, np.ones(len(v)))
        return estimator(lambda params, batch: task().loss(params, batch, None)[0], given, *batches)

    for tolerance in (0.5, 0.05):
        first, result = 1 + int(np.argmax(np.array(gaps) <= tolerance)), estimate(tolerance)
        assert int(result.info.cg_steps) == first
        near(flat(result.gradient), in_krylov_space(matrix, b, first))
        near(result.info.residual, gaps[first - 1])
