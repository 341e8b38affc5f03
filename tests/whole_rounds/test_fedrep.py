"""Two rounds of FedAvg and methods that differ in which leaves are trained, averaged or kept: FedPer, FedRep and others.

FedRep (Collins et al., arXiv 2102.07078, algorithm 1, momentum 0.5): a client first trains its own head, then the body that the
server sent, each by its optimiser started afresh; the server takes the mean of the bodies weighted by samples. The head of a new
client is the initial one, fine-tuned on its support view.
"""

import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.whole_rounds.world import (
    BODY,
    HEAD,
    KNOWN,
    LATE,
    NEW,
    NOTHING,
    TRAIN,
    Library,
    N,
    check,
    client_key,
    descend,
    epochs,
    momentum_sgd,
    near,
    order_key,
    rows,
    task,
    test_key,
    two_rounds,
)

RATE, HEAD_RATE, BATCH, SERVER = 0.15, 0.25, 4, 0.7


@pytest.mark.parametrize(
    ("method", "personal"),
    [(fm.fedavg, NOTHING), (fm.fedper, HEAD), (fm.local_only, ~NOTHING)],
    ids=["fedavg", "fedper", "local"],
)
def test_two_rounds_of_fedavg_and_fedper(method, personal):
    options = {"lr": RATE, "epochs": 2, "batch_size": BATCH, "finetune_epochs": 1, "new_client_epochs": 3, "finetune": "head"}
    library = Library(method(task(), **options), server_lr=SERVER)

    def client(round_, i, w, memory):
        return descend(w, RATE, epochs(order_key(round_, i), i, "train", BATCH, 2)), None

    after = two_rounds(library.w, client, TRAIN, personal=personal, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, own, _ = after[number]
        check(state, number + 1, model=w, personal=rows(own, library.w)[:, personal])
    w, own, _ = after[-1]
    for i, tag, count in ((KNOWN, "known", 1), (LATE, "known", 1), (NEW, "new", 3)):
        batches = epochs(tagged(tagged(test_key(), tag), "order"), i, "test_support", BATCH, count)
        near(library.tested(i), descend(np.where(personal, own.get(i, w), w), RATE, batches, HEAD))


@pytest.mark.parametrize("personal", ["none", "head"])
def test_two_rounds_of_fedprox(personal):
    """Steps along grad f(w) + mu (w - w^t), w^t the model that the client received, its own head included."""
    pull, own_leaves = 1.5, HEAD if personal == "head" else NOTHING
    options = {"lr": RATE, "prox_weight": pull, "epochs": 2, "batch_size": BATCH, "personal": personal}
    library = Library(fm.fedprox(task(), **options), server_lr=SERVER)

    def client(round_, i, w, memory):
        return descend(w, RATE, epochs(order_key(round_, i), i, "train", BATCH, 2), pull=pull, anchor=w), None

    w, own, _ = two_rounds(library.w, client, TRAIN, personal=own_leaves, server_lr=SERVER)[-1]
    check(library.last, 2, model=w, personal=rows(own, library.w)[:, own_leaves])
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), np.where(own_leaves, own.get(i, w), w))


def test_two_rounds_of_lg_fedavg():
    """The body stays with its client, the head is averaged: FedPer turned round."""
    library = Library(fm.lg_fedavg(task(), lr=RATE, epochs=2, batch_size=BATCH, finetune_epochs=1, finetune="head"))

    def client(round_, i, w, memory):
        return descend(w, RATE, epochs(order_key(round_, i), i, "train", BATCH, 2)), None

    w, own, _ = two_rounds(library.w, client, TRAIN, personal=BODY)[-1]
    check(library.last, 2, model=w, personal=rows(own, library.w)[:, BODY])
    batches = epochs(tagged(test_key(), "order"), KNOWN, "test_support", BATCH)
    near(library.tested(KNOWN), descend(np.where(BODY, own[KNOWN], w), RATE, batches, HEAD))


def test_two_rounds_of_fedbabu():
    """The head never moves in training; a test fine-tunes everything. Clients count equally."""
    library = Library(fm.fedbabu(task(), lr=RATE, epochs=2, batch_size=BATCH, finetune_lr=HEAD_RATE, finetune_epochs=2))

    def client(round_, i, w, memory):
        return momentum_sgd(w, RATE, epochs(order_key(round_, i), i, "train", BATCH, 2), BODY, momentum=0.9), None

    w = two_rounds(library.w, client, [1] * N)[-1][0]
    check(library.last, 2, model=w)
    for i, tag in ((KNOWN, "known"), (NEW, "new")):
        batches = epochs(tagged(tagged(test_key(), tag), "order"), i, "test_support", BATCH, 2)
        near(library.tested(i), momentum_sgd(w, HEAD_RATE, batches, ~NOTHING, momentum=0.9))


def test_two_rounds_of_fedrep():
    passes = {"head_epochs": 2, "body_epochs": 3, "finetune_epochs": 1, "new_client_epochs": 2}
    method = fm.fedrep(task(), lr=RATE, head_lr=HEAD_RATE, batch_size=BATCH, **passes)
    library = Library(method, server_lr=SERVER)

    def client(round_, i, w, memory):
        head_order = tagged(tagged(client_key(round_, i), "head"), "order")
        w = momentum_sgd(w, HEAD_RATE, epochs(head_order, i, "train", BATCH, 2), HEAD)
        return momentum_sgd(w, RATE, epochs(order_key(round_, i), i, "train", BATCH, 3), BODY), None

    after = two_rounds(library.w, client, TRAIN, personal=HEAD, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, own, _ = after[number]
        check(state, number + 1, model=w, personal=rows(own, library.w)[:, HEAD])
    w, own, _ = after[-1]
    for i, tag, count in ((KNOWN, "known", 1), (LATE, "known", 1), (NEW, "new", 2)):
        batches = epochs(tagged(tagged(test_key(), tag), "order"), i, "test_support", BATCH, count)
        near(library.tested(i), momentum_sgd(np.where(HEAD, own.get(i, w), w), HEAD_RATE, batches, HEAD))
