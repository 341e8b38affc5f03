"""Two rounds of GPFL as TsingZ0/GPFL performs them (clientgp.py 80-102, servergp.py 240-284).

With a = ReLU(A c + b) and LN(a) = (a - mean) / sqrt(var + 1e-5) * scale + shift, CoV(z, c) = ReLU(z (1 + LN_gamma) + LN_beta).
Loss: cross-entropy of the head on CoV(z, p), cross-entropy of the cosines of CoV(z, g) with the embeddings, and lambda |CoV(z, g)
- received embedding of y| over the batch; g is the mean of the received embeddings, p that over the client's samples. The
gradient is taken by complex steps, and mu times a parameter is added but for the model's.
"""

import numpy as np

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.authors.source import written_from
from tests.whole_rounds.world import (
    CLASSES,
    COHORTS,
    HEAD,
    KNOWN,
    LATE,
    NEW,
    TRAIN,
    WIDTH,
    Library,
    check,
    data,
    epochs,
    near,
    order_key,
    rows,
    task,
    test_key,
    unpack,
    view,
)

RATE, BATCH, SERVER, LAMBDA, MU = 0.1, 6, 0.7, 0.3, 0.05
MODEL, EMBEDDING = 27, CLASSES * WIDTH
LAYER = WIDTH * WIDTH + 3 * WIDTH
ALL = MODEL + EMBEDDING + 2 * LAYER
PERSONAL = np.r_[HEAD, np.zeros(ALL - MODEL, bool)]


def relu(a):
    return np.where(a.real > 0, a, 0)


def normal(layer, condition):
    """Leaves in the library's order: bias, kernel, scale, shift."""
    bias, kernel = layer[:WIDTH], layer[WIDTH : WIDTH + WIDTH**2].reshape(WIDTH, WIDTH)
    scale, shift = layer[-2 * WIDTH : -WIDTH], layer[-WIDTH:]
    a = relu(kernel @ condition + bias)
    return (a - a.mean()) / np.sqrt(np.mean((a - a.mean()) ** 2) + 1e-5) * scale + shift


def cov(v, z, condition):
    gamma, beta = np.split(v[MODEL + EMBEDDING :], 2)
    return relu(z * (1 + normal(gamma, condition)) + normal(beta, condition))


def entropy(logits, y):
    shifted = logits - logits.real.max(1, keepdims=True)
    return np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y])


def length(z):
    return np.sqrt(np.sum(z**2, -1, keepdims=True))


def value(v, batch, received, share):
    x, y = batch
    body, bias, head = unpack(v[:MODEL])
    z, embedding = np.tanh(x @ body), v[MODEL : MODEL + EMBEDDING].reshape(CLASSES, WIDTH)
    generic = cov(v, z, received.mean(0))
    size = length(generic)
    unit = np.where(size.real > 0, generic / np.where(size.real > 0, size, 1), 0)
    total = entropy(cov(v, z, share @ received) @ head + bias, y) + entropy(unit @ (embedding / length(embedding)).T, y)
    return total + LAMBDA * np.sqrt(np.sum((generic - received[y]) ** 2))


def gradient(v, *arguments):
    steps = 1e-30j * np.eye(ALL)
    return np.array([value(v + step, *arguments).imag / 1e-30 for step in steps])


def train(v, batches, share, where):
    received = v[MODEL : MODEL + EMBEDDING].reshape(CLASSES, WIDTH).copy()
    for batch in batches:
        slope = gradient(v, batch, received, share) + MU * np.where(np.arange(ALL) >= MODEL, v, 0)
        v = v - RATE * np.where(where, slope, 0)
    return v


def share_of(i, name):
    return np.bincount(view(i, name)[1], minlength=CLASSES) / len(view(i, name)[1])


@written_from(
    "TsingZ0/GPFL", "ed7a7fe", "system/flcore/clients/clientgp.py:68-126", "system/flcore/servers/servergp.py:240-284"
)
def test_two_rounds_of_gpfl():
    options = {"lr": RATE, "embedding_weight": LAMBDA, "decay": MU, "epochs": 1, "batch_size": BATCH}
    library = Library(fm.gpfl(task(), **options, new_client_epochs=2), server_lr=SERVER)
    v, own, shares, everywhere = library.w, {}, {}, np.ones(ALL, bool)
    assert len(v) == ALL
    for number, cohort in enumerate(COHORTS):
        trained = {}
        for i in cohort:
            shares[i] = share_of(i, "train")
            start = np.where(PERSONAL, own.get(i, v), v)
            trained[i] = train(start, epochs(order_key(number, i), i, "train", BATCH), shares[i], everywhere)
        mean = np.average([trained[i] for i in cohort], 0, [TRAIN[i] for i in cohort])
        v, own = np.where(PERSONAL, v, v + SERVER * (mean - v)), own | trained
        kept = {"personal": rows(own, v)[:, PERSONAL], "memory": rows(shares, np.zeros(CLASSES))}
        check((library.first, library.last)[number], number + 1, model=v, **kept)
    embedding = v[MODEL : MODEL + EMBEDDING].reshape(CLASSES, WIDTH)
    for i in (KNOWN, LATE):
        near(library.tested(i), np.r_[np.where(PERSONAL, own[i], v), shares[i] @ embedding])
    # It predicts with the head on the features that are modulated for the client.
    predictor = library.algorithm.personalize(test_key(), library.last, data().client(KNOWN)["test_support"], KNOWN)
    (x, _), mine = view(KNOWN, "test"), np.where(PERSONAL, own[KNOWN], v)
    body, bias, head = unpack(mine[:MODEL])
    logits = cov(mine, np.tanh(x @ body), shares[KNOWN] @ embedding) @ head + bias
    near(library.algorithm.predict(predictor, x), logits)
    share = share_of(NEW, "test_support")
    batches = epochs(tagged(test_key(), "order"), NEW, "test_support", BATCH, 2)
    near(library.tested(NEW), np.r_[train(v, batches, share, PERSONAL), share @ embedding])
