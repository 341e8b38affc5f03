"""Two rounds of FedALA (Zhang et al., arXiv 2212.01197, algorithm 1).

From its second round on, a client starts from v + (g - v) W in its higher layers, v its last local model and g the global
one, and from g below. W = clip(W - eta grad, 0, 1), by the chain rule grad = (g - v) * grad f, on a random share of its
samples, in passes: until the last `window` mean losses have a standard deviation below the tolerance, the first time; one
pass after that.
"""

from functools import cache

import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.whole_rounds.world import (
    HEAD,
    KNOWN,
    LATE,
    NEW,
    TRAIN,
    Library,
    N,
    batches_of,
    check,
    client_key,
    descend,
    epochs,
    gradient,
    loss,
    near,
    order_key,
    rows,
    task,
    test_key,
    two_rounds,
    view,
)

RATE, ETA, SHARE, BATCH, SERVER, WINDOW, TOLERANCE, MOST = 0.2, 2.0, 0.7, 4, 0.7, 3, 4e-4, 60


@cache
def _sample():
    return lambda view, key: view.epochs(key, BATCH, share=SHARE)


def initialised(w, memory, key, i, name, passes_taken, by_last=False):
    """(where training starts, W)."""
    least = WINDOW + by_last
    if memory is None:
        return w, np.ones(HEAD.sum())
    v, weights, converged = np.split(memory, [15, 30])
    batches = batches_of(tagged(key, "ala"), i, name, _sample())
    assert sum(len(y) for _, y in batches) == np.ceil(SHARE * len(view(i, name)[1]) - 1e-9)

    def blend(weights):
        start = w.copy()
        start[HEAD] = v + (w[HEAD] - v) * weights
        return start

    means = []
    while len(means) < (1 if converged[0] else MOST) and (len(means) < least or np.std(means[-WINDOW:]) >= TOLERANCE):
        losses = []
        for batch in batches:
            losses.append(loss(blend(weights), batch))
            slope = (w[HEAD] - v) * gradient(blend(weights), batch)[HEAD]
            weights = np.clip(weights - ETA * slope, 0, 1)
        means.append(losses[-1] if by_last else np.mean(losses))
    passes_taken.append(len(means))
    return blend(weights), weights


@pytest.mark.parametrize("by_last", [False, True])
def test_two_rounds_and_their_tests(by_last):
    options = {"lr": RATE, "weight_lr": ETA, "sample_share": SHARE, "window": WINDOW, "tolerance": TOLERANCE}
    options["converged_by"] = "last_batch" if by_last else "mean"
    library = Library(fm.fedala(task(), **options, most_passes=MOST, epochs=2, batch_size=BATCH), server_lr=SERVER)
    passes = []

    def client(round_, i, w, memory):
        start, weights = initialised(w, memory, client_key(round_, i), i, "train", passes, by_last)
        w = descend(start, RATE, epochs(order_key(round_, i), i, "train", BATCH, 2))
        return w, np.r_[w[HEAD], weights, float(memory is not None)]

    after = two_rounds(library.w, client, TRAIN, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, _, own = after[number]
        check(state, number + 1, model=w, memory=rows(own, np.zeros(31)))
    w, _, own = after[-1]
    # Both clients of two rounds learned weights until they converged.
    assert len(passes) == 2 and all(WINDOW < count < MOST for count in passes), passes
    assert N - len(own) == 1 and np.any((own[KNOWN][15:30] > 0) & (own[KNOWN][15:30] < 1))
    for i in (KNOWN, LATE):
        near(library.tested(i), initialised(w, own[i], test_key(), i, "test_support", passes, by_last)[0])
    assert passes[2] == 1 < passes[3]
    near(library.tested(NEW), w)
