"""Two rounds of Reptile (arXiv 1803.02999, algorithm 2) and of Per-FedAvg-Reptile (Xia and Cui, UserUpdate), written out.

Reptile: phi_i is w after E passes over the train view in batches; the server moves w by epsilon mean(phi_i - w), and a client
its personal entries by epsilon (phi_i - w). Per-FedAvg-Reptile: a pass is cut into tau_out parts of tau_in minibatches; after
each part w = w + alpha (phi - w), and the server takes the plain mean.
"""

from functools import cache

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from fedjax_meta.methods.reptile import part_of_epoch
from tests.whole_rounds.world import (
    HEAD,
    KNOWN,
    LATE,
    NEW,
    NOTHING,
    TRAIN,
    Library,
    N,
    batches_of,
    check,
    descend,
    epochs,
    loss,
    near,
    order_key,
    rows,
    task,
    test_key,
    two_rounds,
    view,
)

RATE, BATCH, PASSES, EPSILON = 0.2, 4, 2, 0.7
BOTH = pytest.mark.parametrize("personal", [NOTHING, HEAD], ids=["nothing personal", "head"])


def compare(library, client, adapted, personal):
    """Two rounds by hand and by the library, and the tests: `adapted(start, i) -> (what i tests with, its score)`."""
    after = two_rounds(library.w, client, [1] * N, personal=personal)
    for number, state in enumerate((library.first, library.last)):
        w, own, _ = after[number]
        check(state, number + 1, model=w, personal=rows(own, library.w)[:, personal])
    w, own, _ = after[-1]
    for i in (KNOWN, LATE):
        near(library.tested(i), adapted(np.where(personal, own[i], w), i)[0])
    tries = [adapted(np.where(personal, own[i], w), NEW) for i in sorted(own)]
    near(library.tested(NEW), min(tries, key=lambda tried: tried[1])[0])


@BOTH
def test_reptile(personal):
    options = {"inner_lr": RATE, "outer_lr": EPSILON, "inner_epochs": PASSES, "batch_size": BATCH}
    library = Library(fm.reptile(task(), **options, personal="head" if personal.any() else "none"))

    def client(round_, i, w, memory):
        phi = descend(w, RATE, epochs(jax.random.fold_in(order_key(round_, i), 0), i, "train", BATCH, PASSES))
        return w + EPSILON * (phi - w), None

    def adapted(start, i):
        phi, losses = start, []
        for batch in epochs(tagged(test_key(), "order"), i, "test_support", BATCH, PASSES):
            losses.append(loss(phi, batch))
            phi = descend(phi, RATE, [batch])
        return phi, np.mean(losses)

    compare(library, client, adapted, personal)


@cache
def _part(outer, inner, number):
    return lambda view, key: part_of_epoch(key, view, outer, inner, number)


@BOTH
def test_perfedavg_reptile(personal):
    outer, inner, alpha, steps = 3, 2, 0.4, 2
    options = {"inner_lr": RATE, "interpolation": alpha, "outer_batches": outer, "inner_batches": inner, "test_steps": steps}
    library = Library(fm.perfedavg_reptile(task(), **options, personal="head" if personal.any() else "none"))

    def client(round_, i, w, memory):
        key = order_key(round_, i)
        parts = [batches_of(key, i, "train", _part(outer, inner, number)) for number in range(outer)]
        # One pass, cut as numpy.array_split cuts.
        sizes = [[len(part) for part in np.array_split(np.zeros(n), inner)] for n in cut_sizes(TRAIN[i], outer)]
        assert [[len(y) for _, y in part] for part in parts] == sizes
        passed = np.concatenate([x for part in parts for x, _ in part])
        assert np.array_equal(np.sort(passed, 0), np.sort(view(i, "train")[0], 0))
        for part in parts:
            w = w + alpha * (descend(w, RATE, part) - w)
        return w, None

    def adapted(start, i):
        samples = view(i, "test_support")
        path = [start]
        for _ in range(steps):
            path.append(descend(path[-1], RATE, [samples]))
        return path[-1], np.mean([loss(phi, samples) for phi in path[:-1]])

    compare(library, client, adapted, personal)


def cut_sizes(size, parts):
    return [len(part) for part in np.array_split(np.zeros(size), parts)]
