"""FedALA in the authors' two repositories, whose ALA.py is the same file, and whose batches are not."""

import numpy as np

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.authors.source import differs, written_from
from tests.whole_rounds.test_fedala import _sample as sampled
from tests.whole_rounds.world import (
    HEAD,
    TRAIN,
    Library,
    agree,
    batches_of,
    client_key,
    descend,
    epochs,
    gradient,
    loss,
    order_key,
    task,
    two_rounds,
)

RATE, ETA, SHARE, BATCH = 0.2, 2.0, 0.7, 4
"""SHARE and BATCH are those of `sampled`."""
WINDOW, THRESHOLD, MOST = 3, 4e-4, 60


def initialised(sent, memory, batches, rule):
    """(hat Theta, W): W = clip(W - eta grad * (g - v), 0, 1) on each batch, in passes until the losses stand still."""
    v, weights, once = memory[: HEAD.sum()], memory[HEAD.sum() : -1], memory[-1]
    start, losses = sent.copy(), []

    def blend():
        start[HEAD] = v + (sent[HEAD] - v) * weights
        return start

    while True:
        of_pass = []
        for batch in batches:
            of_pass.append(loss(blend(), batch))
            weights = np.clip(weights - ETA * gradient(blend(), batch)[HEAD] * (sent[HEAD] - v), 0, 1)
        losses.append(of_pass[-1] if rule == "last batch" else np.mean(of_pass))
        enough = len(losses) > WINDOW if rule == "last batch" else len(losses) >= WINDOW
        if once or (enough and np.std(losses[-WINDOW:]) < THRESHOLD) or len(losses) == MOST:
            return blend(), weights, len(losses)


def client_of(rule, passes):
    def client(round_, i, sent, memory):
        start, weights = sent, np.ones(HEAD.sum())
        if memory is not None:
            batches = batches_of(tagged(client_key(round_, i), "ala"), i, "train", sampled())
            start, weights, count = initialised(sent, memory, batches, rule)
            passes.append(count)
        w = descend(start, RATE, epochs(order_key(round_, i), i, "train", BATCH, 1))
        return w, np.r_[w[HEAD], weights, float(memory is not None)]

    return client


def library(**more):
    options = {"lr": RATE, "weight_lr": ETA, "sample_share": SHARE, "window": WINDOW, "tolerance": THRESHOLD}
    return Library(fm.fedala(task(), **options, most_passes=MOST, batch_size=BATCH, **more))


CODE = ("system/utils/ALA.py:70-74", "system/utils/ALA.py:85-159", "system/flcore/clients/clientALA.py:39-57")


@written_from("TsingZ0/FedALA", "a7a9b21", *CODE, "system/flcore/servers/serverALA.py:90-123")
@written_from("TsingZ0/PFLlib", "d832e76", "system/utils/ALA.py:70-159", "system/flcore/clients/clientala.py:31-44")
def test_fedala():
    """The step of W, the blend, training and the mean, with `converged_by="last_batch"`: their recorded loss is that of the last
    batch of a pass, and they ask for more than `num_pre_loss` of them.
    """
    passes = []
    ours = library(converged_by="last_batch")
    after = two_rounds(ours.w, client_of("last batch", passes), TRAIN)
    agree(ours, after, blank=np.zeros(31))
    assert all(WINDOW < count < MOST for count in passes) and len(passes) == 2


@written_from("TsingZ0/FedALA", "a7a9b21", "system/utils/ALA.py:142-153")
def test_the_mean_loss_of_a_pass_stops_elsewhere():
    """By default the losses that must stand still are means over a pass: the paper speaks of the loss, not of a batch."""
    last, mean = [], []
    w = library().w
    theirs, ours = two_rounds(w, client_of("last batch", last), TRAIN), two_rounds(w, client_of("mean", mean), TRAIN)
    assert last != mean
    differs(theirs[-1][0], ours[-1][0], 1e-5)
    agree(library(), ours, blank=np.zeros(31))
