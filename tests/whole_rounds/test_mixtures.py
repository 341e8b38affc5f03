"""Two rounds of methods whose clients keep a whole model of their own: Ditto, pFedMe and APFL.

Ditto (arXiv 2012.04221, algorithm 1): beside FedAvg, v = v - eta (grad f(v) + lambda (v - w^t)) on the same batches.
pFedMe (arXiv 2006.08848, algorithm 1): on each of R batches, K steps theta = theta - eta_p (grad f(theta) + lambda
(theta - w_i)), then w_i = w_i - eta lambda (w_i - theta); the server moves by beta towards the plain mean of the w_i.
APFL (arXiv 2003.13461, algorithm 1): once a round alpha = clip(alpha - eta <v - w, grad f(v bar)>), v bar = alpha v +
(1 - alpha) w; then on each batch w = w - eta grad f(w) and v = v - eta alpha grad f(v bar), both from the w and v
before the step.
"""

import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.whole_rounds.world import (
    KNOWN,
    LATE,
    NEW,
    TRAIN,
    Library,
    N,
    check,
    descend,
    endless,
    epochs,
    gradient,
    near,
    order_key,
    rows,
    task,
    test_key,
    two_rounds,
)

RATE, BATCH, SERVER = 0.15, 4, 0.7


def support(i, count):
    return epochs(tagged(test_key(), "order"), i, "test_support", BATCH, count)


def test_two_rounds_of_ditto():
    own_rate, pull = 0.1, 1.5
    options = {"lr": RATE, "personal_lr": own_rate, "prox_weight": pull, "epochs": 2, "personal_epochs": 3}
    library = Library(fm.ditto(task(), **options, batch_size=BATCH), server_lr=SERVER)

    def client(round_, i, w, v):
        v = w if v is None else v
        key = order_key(round_, i)
        v = descend(v, own_rate, epochs(key, i, "train", BATCH, 3), pull=pull, anchor=w)
        return descend(w, RATE, epochs(key, i, "train", BATCH, 2)), v

    after = two_rounds(library.w, client, TRAIN, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, _, own = after[number]
        check(state, number + 1, model=w, memory=rows(own, 0 * w))
    w, _, own = after[-1]
    for i in (KNOWN, LATE):
        near(library.tested(i), own[i])
    near(library.tested(NEW), descend(w, own_rate, support(NEW, 3), pull=pull, anchor=w))


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_two_rounds_of_pfedme(decay):
    rate, eta, pull, inner, batches = 0.04, 0.03, 6.0, 3, 5
    options = {"lr": rate, "outer_lr": eta, "prox_weight": pull, "inner_steps": inner, "local_rounds": batches}
    method = fm.pfedme(task(), **options, weight_decay=decay, batch_size=BATCH, test_epochs=2)
    library = Library(method, server_lr=SERVER)

    def towards(theta, centre, batch):
        for _ in range(inner):
            theta = theta - rate * (gradient(theta, batch) + pull * (theta - centre) + decay * theta)
        return theta

    def client(round_, i, w, memory):
        theta = w
        for batch in endless(order_key(round_, i), i, "train", BATCH, batches):
            theta = towards(theta, w, batch)
            w = w - eta * pull * (w - theta)
        return w, None

    after = two_rounds(library.w, client, [1] * N, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        check(state, number + 1, model=after[number][0])
    w = after[-1][0]
    for i in (KNOWN, LATE, NEW):
        theta = w
        for batch in support(i, 2):
            theta = towards(theta, w, batch)
        near(library.tested(i), theta)


def test_two_rounds_of_apfl():
    share, share_lr = 0.4, 0.3
    options = {"lr": RATE, "share": share, "share_lr": share_lr, "epochs": 2, "new_client_epochs": 3}
    library = Library(fm.apfl(task(), **options, batch_size=BATCH), server_lr=SERVER)

    def both(w, v, alpha, batches, moves_w=True):
        for batch in batches:
            step = alpha * gradient(alpha * v + (1 - alpha) * w, batch)
            w, v = w - RATE * moves_w * gradient(w, batch), v - RATE * step
        return w, v

    def client(round_, i, w, memory):
        v, alpha = (w, share) if memory is None else (memory[:-1], memory[-1])
        batches = epochs(order_key(round_, i), i, "train", BATCH, 2)
        slope = (v - w) @ gradient(alpha * v + (1 - alpha) * w, batches[0])
        alpha = np.clip(alpha - share_lr * slope, 0, 1)
        w, v = both(w, v, alpha, batches)
        return w, np.r_[v, alpha]

    after = two_rounds(library.w, client, [1] * N, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, _, own = after[number]
        check(state, number + 1, model=w, memory=rows(own, np.zeros(len(w) + 1)))
    w, _, own = after[-1]
    # alpha moves in the second round alone, where v and w differ.
    assert own[LATE][-1] == share and abs(own[KNOWN][-1] - share) > 1e-3
    for i in (KNOWN, LATE):
        near(library.tested(i), own[i][-1] * own[i][:-1] + (1 - own[i][-1]) * w)
    v = both(w, w, share, support(NEW, 3), moves_w=False)[1]
    near(library.tested(NEW), share * v + (1 - share) * w)
