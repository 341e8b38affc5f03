"""Two rounds of methods whose model has a batch norm, by the network in NumPy of `tests.authors.normed`.

A pass in training mode moves the running mean and variance of the model that is passed, whichever of its leaves take the step.
Own models keep theirs. A meta-gradient moves none: after it, the adapted model passes once over the query view.
"""

import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.authors.normed import ENDS, NONE, PLACES, STATISTICS, descend, normed_task, step
from tests.whole_rounds.world import (
    KNOWN,
    LATE,
    NEW,
    QUERY_SIZES,
    TRAIN,
    Library,
    N,
    agree,
    client_key,
    endless,
    epochs,
    near,
    order_key,
    test_key,
    two_rounds,
    view,
)

RATE, BATCH = 0.2, 9
"""No client has a batch of one sample, whose variance is 0."""
OF_HEAD = ENDS[5] <= PLACES


def order(round_, i, count=2):
    return epochs(order_key(round_, i), i, "train", BATCH, count)


def support(i, count=1, tag=None):
    key = test_key() if tag is None else tagged(test_key(), tag)
    return epochs(tagged(key, "order"), i, "test_support", BATCH, count)


def moved(w, rate, batch, where=~NONE, pull=0.0, anchor=0.0):
    """A step of the entries of a mask, with the running statistics along with it."""
    gradient, after = step(w, batch)
    gradient = gradient + pull * (w - anchor)
    return np.where(STATISTICS, after, w - rate * np.where(where, gradient, 0))


def test_ditto():
    pull, own_rate = 1.5, 0.1
    library = Library(fm.ditto(normed_task(), lr=RATE, personal_lr=own_rate, prox_weight=pull, epochs=2, batch_size=BATCH))

    def personal(v, anchor, batches):
        for batch in batches:
            v = moved(v, own_rate, batch, pull=pull, anchor=anchor)
        return v

    def client(round_, i, w, v):
        return descend(w, RATE, order(round_, i)), personal(w if v is None else v, w, order(round_, i))

    after = two_rounds(library.w, client, TRAIN, personal=NONE)
    agree(library, after, personal=NONE, blank=0 * library.w)
    w, _, own = after[-1]
    near(library.tested(LATE), own[LATE])
    near(library.tested(NEW), personal(w, w, support(NEW, 2)))


@pytest.mark.parametrize("steps", ["together", "in_turn"])
def test_apfl(steps):
    """The mixture has the running statistics of v, which move with the mixture's passes."""
    share, share_lr = 0.4, 0.3
    options = {"lr": RATE, "share": share, "share_lr": share_lr, "epochs": 2, "batch_size": BATCH, "steps": steps}
    library = Library(fm.apfl(normed_task(), **options))

    def mixed(v, w, alpha):
        return np.where(STATISTICS, v, alpha * v + (1 - alpha) * w)

    def both(w, v, alpha, batches):
        for batch in batches:
            gradient, after = step(mixed(v, w, alpha), batch)
            w, v = moved(w, RATE, batch), np.where(STATISTICS, after, v - RATE * alpha * gradient)
        return w, v

    def in_turn(w, v, alpha, batches):
        for number, batch in enumerate(batches):
            w = moved(w, RATE, batch)
            gradient, after = step(mixed(v, w, alpha), batch)
            v = np.where(STATISTICS, after, v - RATE * alpha * gradient)
            if number == 0:
                # alpha dF/dv + (1 - alpha) dF/dw, F the loss of the mixture of weights.
                slope = np.where(STATISTICS, 0, v - w) @ ((alpha**2 + (1 - alpha) ** 2) * gradient) + 0.02 * alpha
                alpha = np.clip(alpha - share_lr * slope, 0, 1)
        return w, v, alpha

    def client(round_, i, w, memory):
        v, alpha = (w, share) if memory is None else (memory[:-1], memory[-1])
        batches = order(round_, i)
        if steps == "in_turn":
            w, v, alpha = in_turn(w, v, alpha, batches)
        else:
            slope = np.where(STATISTICS, 0, v - w) @ step(mixed(v, w, alpha), batches[0])[0]
            alpha = np.clip(alpha - share_lr * slope, 0, 1)
            w, v = both(w, v, alpha, batches)
        return w, np.r_[v, alpha]

    after = two_rounds(library.w, client, [1] * N, personal=NONE)
    agree(library, after, personal=NONE, blank=np.zeros(len(library.w) + 1))
    w, _, own = after[-1]
    for i in (KNOWN, LATE):
        near(library.tested(i), mixed(own[i][:-1], w, own[i][-1]))


@pytest.mark.parametrize("keeps", [False, True], ids=["reset to the server's", "kept"])
def test_pfedme(keeps):
    """Running statistics of w_i are those of theta; where w_i is kept, they are interpolated like parameters."""
    rate, eta, pull, inner = 0.04, 0.03, 6.0, 3
    options = {"lr": rate, "outer_lr": eta, "prox_weight": pull, "inner_steps": inner, "local_rounds": 3}
    library = Library(fm.pfedme(normed_task(), **options, batch_size=BATCH, keep_local=keeps))

    def towards(theta, centre, batch):
        for _ in range(inner):
            theta = moved(theta, rate, batch, pull=pull, anchor=centre)
        return theta

    def client(round_, i, w, memory):
        theta, own = w, memory if keeps and memory is not None else w
        for batch in endless(order_key(round_, i), i, "train", BATCH, 3):
            theta = towards(theta, own, batch)
            own = np.where(STATISTICS & (not keeps), theta, own - eta * pull * (own - theta))
        return own, own

    after = two_rounds(library.w, client, [1] * N, personal=NONE)
    agree(library, after, personal=NONE, blank=0 * library.w if keeps else None)
    w, _, own = after[-1]
    near(library.tested(LATE), own[LATE] if keeps else towards(w, w, support(LATE)[0]))


def test_fedrep():
    """Both phases pass in training mode: the running statistics of the shared body move while the head trains, too."""
    passes = {"head_epochs": 1, "body_epochs": 2, "new_client_epochs": 2}
    method = fm.fedrep(normed_task(), lr=RATE, head_lr=0.3, batch_size=BATCH, optimizer=optax.sgd, **passes)
    library = Library(method)

    def client(round_, i, w, memory):
        for batch in epochs(tagged(tagged(client_key(round_, i), "head"), "order"), i, "train", BATCH):
            w = moved(w, 0.3, batch, OF_HEAD)
        for batch in order(round_, i):
            w = moved(w, RATE, batch, ~OF_HEAD)
        return w, None

    after = two_rounds(library.w, client, TRAIN, personal=OF_HEAD)
    agree(library, after, personal=OF_HEAD)
    w = after[-1][0]
    for batch in support(NEW, 2, "new"):
        w = moved(w, 0.3, batch, OF_HEAD)
    near(library.tested(NEW), w)


def test_fedmeta_of_first_order():
    alpha, beta = 0.3, 0.2
    options = {"inner_lr": alpha, "outer_lr": beta, "outer_optimizer": optax.sgd, "batch_size": None, "inner_steps": 2}
    library = Library(fm.fedmeta_fomaml(normed_task(), **options))

    def adapted(w, batch):
        for _ in range(2):
            w = w - alpha * step(w, batch)[0]
        return w

    def client(round_, i, w, memory):
        gradient, after = step(adapted(w, view(i, "support")), view(i, "query"))
        return np.where(STATISTICS, after, w - beta * gradient), None

    after = two_rounds(library.w, client, QUERY_SIZES, personal=NONE)
    agree(library, after, personal=NONE)
    near(library.tested(KNOWN), adapted(after[-1][0], view(KNOWN, "test_support")))
