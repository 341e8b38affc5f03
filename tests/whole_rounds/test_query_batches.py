"""One round whose query views hold several batches of unequal size, in numbers that differ between clients.

With a batch size all query batches count equally (the code behind FedMeta-Per), also a last one of few samples; without one, all
samples do, although more than `CHUNK` of them are never in memory together. Support views are one batch, so that no order
matters.
"""

import jax
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import multistep
from fedjax_meta.data import CHUNK
from tests.whole_rounds import test_fedmeta, test_mamlpp
from tests.whole_rounds.world import CLASSES, INPUTS, cut, flat, gradient, hessian_times, loss, near, task

SUPPORT, QUERY, BATCH, STEPS, ALPHA, BETA = np.array([30, 12, 25]), np.array([101, 230, 97]), 40, 3, 0.3, 0.2


def samples():
    rng = np.random.default_rng(8)
    for i, size in enumerate(SUPPORT + QUERY):
        # Later samples have other classes than earlier ones, so that a batch is not like another.
        x = rng.normal(0.3 * i, 1, (size, INPUTS)) + np.linspace(0, 2, size)[:, None]
        yield x, np.minimum(np.arange(size) * CLASSES // size + rng.integers(0, 2, size), CLASSES - 1)


SAMPLES = list(samples())


def support(i):
    return tuple(part[: SUPPORT[i]] for part in SAMPLES[i])


def query(i, batch_size):
    whole = tuple(part[SUPPORT[i] :] for part in SAMPLES[i])
    return [whole] if batch_size is None else cut(whole, batch_size)


def one_round(method):
    """(the initial model, the model after a round of all clients, the query loss of each client)."""
    zero, both = np.zeros_like(SUPPORT), SUPPORT + QUERY
    views = {"train": (zero, both), "support": (zero, SUPPORT), "query": (SUPPORT, both)}
    data = fm.from_clients(SAMPLES, num_classes=CLASSES, views=views)
    algorithm = fm.federate(method, fm.Federation(cohort_size=3, devices=1))
    start = jax.jit(algorithm.init)(jax.random.key(3), data)
    after, info = jax.jit(algorithm.round)(jax.random.key(4), start, data)
    return flat(start.model), flat(after.model), np.asarray(info.metrics["loss"])[np.argsort(info.ids)]


def averaged(of_clients):
    return np.average(of_clients, 0, QUERY)


def test_the_query_views_hold_several_batches_of_unequal_size():
    sizes = [[len(y) for _, y in query(i, BATCH)] for i in range(3)]
    assert sizes == [[40, 40, 21], [40] * 5 + [30], [40, 40, 17]] and min(QUERY) > CHUNK
    w = np.sin(np.arange(27.0))
    for i in range(3):
        ways = [np.mean([gradient(w, b) for b in query(i, size)], 0) for size in (BATCH, None)]
        assert np.max(np.abs(ways[0] - ways[1])) > 1e-3
        assert np.max(np.abs(ways[0] - gradient(w, query(i, BATCH)[0]))) > 1e-3


@pytest.mark.parametrize("batch_size", [BATCH, None])
@pytest.mark.parametrize("estimator", [fm.meta.exact, fm.meta.first_order], ids=lambda one: one.__name__)
def test_a_round_of_fedmeta(estimator, batch_size):
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "inner_steps": STEPS, "outer_optimizer": optax.sgd}
    start, after, found = one_round(fm.fedmeta(task(), **options, batch_size=batch_size, estimator=estimator))
    models, losses = [], []
    for i in range(3):
        steps, batches = [support(i)] * STEPS, query(i, batch_size)
        phi, _ = test_fedmeta.adapted(start, ALPHA, steps)
        exact, _ = test_fedmeta.meta_gradient(start, ALPHA, steps, batches)
        first = np.mean([gradient(phi, batch) for batch in batches], 0)
        models.append(start - BETA * (exact if estimator is fm.meta.exact else first))
        losses.append(np.mean([loss(phi, batch) for batch in batches]))
    near(after, averaged(models))
    near(found, losses)


def test_a_round_of_mamlpp():
    """The query counts after every step, and has no batches: all of its samples count equally."""
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "inner_steps": STEPS, "outer_optimizer": optax.sgd}
    weights = test_mamlpp.importance(0)
    start, after, found = one_round(fm.mamlpp(task(), **options, step_weights=multistep.annealed(test_mamlpp.ROUNDS)))
    theta, rates, models, losses = start[:27], start[27:].reshape(3, STEPS), [], []
    assert STEPS == test_mamlpp.STEPS
    for i in range(3):
        (asked,) = query(i, None)
        path, cotangent, slopes = test_mamlpp.adapted(theta, rates, support(i)), np.zeros(27), np.zeros((3, STEPS))
        for t in range(STEPS, 0, -1):
            cotangent = cotangent + weights[t - 1] * gradient(path[t], asked)
            step = gradient(path[t - 1], support(i))
            slopes[:, t - 1] = [-np.sum((cotangent * step)[leaf == test_mamlpp.LEAF]) for leaf in range(3)]
            cotangent = cotangent - hessian_times(path[t - 1], rates[:, t - 1][test_mamlpp.LEAF] * cotangent, support(i))
        models.append(start - BETA * np.r_[cotangent, slopes.ravel()])
        losses.append(np.sum(weights * [loss(phi, asked) for phi in path[1:]]))
    near(after, averaged(models))
    near(found, losses)


def test_reptile_tells_the_loss_of_all_query_batches():
    """Its model does not depend on the query; only the loss that it reports does."""
    method = fm.fedmeta(
        task(),
        inner_lr=ALPHA,
        outer_lr=BETA,
        inner_steps=STEPS,
        outer_optimizer=optax.sgd,
        batch_size=BATCH,
        estimator=fm.meta.reptile_gradient,
    )
    start, _, found = one_round(method)
    fitted = [test_fedmeta.adapted(start, ALPHA, [support(i)] * STEPS)[0] for i in range(3)]
    losses = [np.mean([loss(fitted[i], batch) for batch in query(i, BATCH)]) for i in range(3)]
    near(found, losses)
