"""Two rounds of Per-FedAvg (Fallah et al., arXiv 2002.07948, algorithm 1).

tau times, on three batches D, D', D'' of the train view:

    phi = w - alpha grad f(w; D),  g = grad f(phi; D'),  w = w - beta (g - alpha h),

where h is 0 (FO), [grad f(w + delta g; D'') - grad f(w - delta g; D'')] / (2 delta) (HF), or H(w; D'') g. The server takes
the plain mean. In a test, a client takes one step over its support view.
"""

from functools import cache

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.methods.perfedavg import independent_batches
from tests.whole_rounds.world import (
    HEAD,
    KNOWN,
    LATE,
    NEW,
    NOTHING,
    Library,
    N,
    batches_of,
    check,
    gradient,
    hessian_times,
    loss,
    near,
    order_key,
    rows,
    task,
    two_rounds,
    view,
)

ALPHA, BETA, STEPS, BATCH, SERVER, DELTA = 0.3, 0.2, 3, 4, 0.8, 1e-3


@cache
def _number(n):
    return lambda view, key: independent_batches(key, view, BATCH)[n]


def three_batches(round_, i, step):
    key = jax.random.fold_in(order_key(round_, i), step)
    three = [batches_of(key, i, "train", _number(n))[0] for n in range(3)]
    if len(view(i, "train")[1]) >= 3 * BATCH:
        assert len(np.unique(np.concatenate([x for x, _ in three]), axis=0)) == 3 * BATCH
    return three


def difference(w, g, batch):
    return (gradient(w + DELTA * g, batch) - gradient(w - DELTA * g, batch)) / (2 * DELTA)


@pytest.mark.parametrize(
    ("build", "second_order"),
    [
        (fm.perfedavg_fo, lambda w, g, batch: 0 * g),
        (fm.perfedavg, difference),
        (fm.perfedavg_exact, hessian_times),
    ],
    ids=["FO", "HF", "product"],
)
def test_two_rounds_and_their_tests(build, second_order):
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "local_steps": STEPS, "batch_size": BATCH}
    library = Library(build(task(), **options), server_lr=SERVER)
    after = written_out(library, second_order, NOTHING)
    w, _, _ = after[-1]
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), w - ALPHA * gradient(w, view(i, "test_support")))


def test_two_rounds_with_personal_leaves():
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "local_steps": STEPS, "batch_size": BATCH}
    library = Library(fm.perfedavg_exact(task(), **options, personal="head", test_steps=2), server_lr=SERVER)
    w, own, _ = written_out(library, hessian_times, HEAD)[-1]

    def tested(start, i):
        samples = view(i, "test_support")
        second = start - ALPHA * gradient(start, samples)
        return second - ALPHA * gradient(second, samples), loss(start, samples) + loss(second, samples)

    for i in (KNOWN, LATE):
        near(library.tested(i), tested(np.where(HEAD, own[i], w), i)[0])
    tries = [tested(np.where(HEAD, own[i], w), NEW) for i in sorted(own)]
    near(library.tested(NEW), min(tries, key=lambda tried: tried[1])[0])


def written_out(library, second_order, personal):
    """Both rounds by hand, compared with the library's states."""

    def client(round_, i, w, memory):
        for step in range(STEPS):
            first, second, third = three_batches(round_, i, step)
            g = gradient(w - ALPHA * gradient(w, first), second)
            w = w - BETA * (g - ALPHA * second_order(w, g, third))
        return w, None

    after = two_rounds(library.w, client, [1] * N, personal=personal, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, own, _ = after[number]
        check(state, number + 1, model=w, personal=rows(own, library.w)[:, personal])
    return after
