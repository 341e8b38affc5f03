"""Methods that look inside the model: MOON, FedPAC, kNN-Per."""

from itertools import combinations

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.authors.source import differs, written_from
from tests.whole_rounds.test_fedpac import pulled_gradient
from tests.whole_rounds.test_losses import contrast_gradient
from tests.whole_rounds.world import (
    BODY,
    CLASSES,
    COHORTS,
    HEAD,
    KNOWN,
    NOTHING,
    TEST_KEY,
    TRAIN,
    Library,
    agree,
    check,
    client_key,
    data,
    epochs,
    features,
    gradient,
    momentum_sgd,
    near,
    order_key,
    probabilities,
    rows,
    task,
    two_rounds,
    view,
)

BATCH = 4


@written_from(
    "QinbinLi/MOON",
    "8fcba3c",
    "main.py:268-318",
    "main.py:494-514",
    "main.py:537-552",
)
def test_moon():
    """mu CE([cos(z, z_glob), cos(z, z_prev)] / tau, 0) beside cross-entropy, by SGD with momentum 0.9 and decay `reg`.

    There is no earlier model in a client's first round: their pool is empty, so that the second term is a constant.
    """
    rate = 0.1
    library = Library(fm.moon(task(), lr=rate, contrast_weight=2.0, temperature=0.6, epochs=2, batch_size=BATCH))

    def client(round_, i, sent, last):
        def slope(w, batch):
            return gradient(w, batch) + (0 if last is None else contrast_gradient(w, batch, sent, last))

        batches = epochs(order_key(round_, i), i, "train", BATCH, 2)
        w = momentum_sgd(sent, rate, batches, ~NOTHING, slope, momentum=0.9, decay=1e-5)
        return w, w

    agree(library, two_rounds(library.w, client, TRAIN), blank=0 * library.w)


# ------------------------------------------------------------------------------------------------------------------- FedPAC

RATE, HEAD_RATE, SGD = 0.05, 0.1, {"momentum": 0.5, "decay": 5e-4}
PULL = 0.8
"""Of `pulled_gradient`."""


def extracted(w, samples):
    """(v, h [K, d]): v = (1/n) sum_k (p_k trace(F_k'F_k / n_k) - p_k^2 |mu_k|^2), h_k = p_k mu_k."""
    x, y = samples
    z, v, h = features(w, x), 0.0, np.zeros((CLASSES, 4))
    for k in set(y.tolist()):
        of_class, p = z[y == k], np.mean(y == k)
        h[k] = p * of_class.mean(0)
        v += p * np.trace(of_class.T @ of_class / len(of_class)) - p**2 * np.sum(of_class.mean(0) ** 2)
    return v / len(y), h


def head_weights(i, v, h):
    """argmin of a'Pa on the simplex, P = diag(v) + [trace sum_k (h_i - h_j)(h_i - h_l)'], below 1e-3 set to 0; over their sum."""
    apart = (h[i] - h).reshape(len(v), -1)
    p, best = np.diag(v) + apart @ apart.T, (np.inf, None)
    for size in range(1, len(v) + 1):
        for some in map(list, combinations(range(len(v)), size)):
            a = np.zeros(len(v))
            a[some] = np.linalg.solve(p[np.ix_(some, some)], np.ones(size))
            a = a / a.sum()
            if a.min() >= 0 and a @ p @ a < best[0]:
                best = a @ p @ a, a
    a = np.where(best[1] > 1e-3, best[1], 0)
    return a / a.sum()


@written_from(
    "JianXu95/FedPAC",
    "5770f4f",
    "methods/fedpac.py:126-160",
    "methods/fedpac.py:187-256",
    "tools.py:22-58",
    "tools.py:61-91",
    "tools.py:94-150",
    "running.py:198-242",
)
def test_fedpac():
    """One head epoch at rate 0.1, then the body; centroids of the trained features; heads by quadratic programmes.

    Their round stops with a KeyError where no client of it has a class (methods/fedpac.py:105-107); here the last centroid or,
    before there is one, the client's own mean stands for it, as for a class in their line 241.
    """
    options = {"lr": RATE, "head_lr": HEAD_RATE, "alignment": PULL, "epochs": 2, "head_epochs": 1, "batch_size": BATCH}
    library = Library(fm.fedpac(task(), **options))
    w, own, centroids = library.w, {}, {}
    for number, cohort in enumerate(COHORTS):
        trained, sent, means = {}, [], []
        for i in cohort:
            start, (x, y) = np.where(HEAD, own.get(i, w), w), view(i, "train")
            sent.append(extracted(start, (x, y)))
            z = features(start, x)
            mine = {k: z[y == k].mean(0) for k in set(y.tolist())}
            targets = np.stack([centroids.get(k, mine.get(k, np.zeros(4))) for k in range(CLASSES)])
            head_order = epochs(tagged(tagged(client_key(number, i), "head"), "order"), i, "train", BATCH, 1)
            moved = momentum_sgd(start, HEAD_RATE, head_order, HEAD, **SGD)
            slope = pulled_gradient(targets) if number > 0 else gradient
            body_order = epochs(order_key(number, i), i, "train", BATCH, 2)
            trained[i] = momentum_sgd(moved, RATE, body_order, BODY, slope, **SGD)
            z = features(trained[i], x)
            means.append({k: (np.sum(y == k), z[y == k].mean(0)) for k in set(y.tolist())})
        v, h = (np.array(part) for part in zip(*sent, strict=True))
        stacked = np.stack([trained[j] for j in cohort])
        for place, i in enumerate(cohort):
            own[i] = np.where(HEAD, head_weights(place, v, h) @ stacked, trained[i])
        w = np.where(HEAD, w, np.average(stacked, 0, [TRAIN[i] for i in cohort]))
        for k in {k for of_client in means for k in of_client}:
            held = [of_client[k] for of_client in means if k in of_client]
            centroids[k] = sum(n * mean for n, mean in held) / sum(n for n, _ in held)
        state = (library.first, library.last)[number]
        extra = np.r_[
            np.ravel([centroids.get(k, np.zeros(4)) for k in range(CLASSES)]), [k in centroids for k in range(CLASSES)]
        ]
        check(state, number + 1, model=w, personal=rows(own, library.w)[:, HEAD], extra=extra)


# ------------------------------------------------------------------------------------------------------------------ kNN-Per


@pytest.mark.parametrize("scale", [0.2, 1.0])
@written_from("omarfoq/knn-per", "ee17520", "client.py:520-554", "datastore.py:60-67", "client.py:488-518")
def test_knn_per(scale):
    """exp(-|z - z_k|^2 / (d sigma)) of the k nearest by class, over their sum, mixed with the model's probabilities."""
    neighbours, mixing = 5, 0.3
    method = fm.knn_per(task(), neighbours=neighbours, scale=scale, mixing=mixing, lr=0.1, batch_size=BATCH)
    library = Library(method)
    support = data().client(KNOWN)["train"]
    variables = library.algorithm.personalize(TEST_KEY, library.last, support, KNOWN)
    (stored, labels), (x, _) = view(KNOWN, "train"), view(KNOWN, "test_support")
    w = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(library.last.model)])
    apart = np.sum((features(w, x)[:, None] - features(w, stored)[None]) ** 2, -1)
    expected = (1 - mixing) * probabilities(w, x)
    for row, distance in enumerate(apart):
        nearest = np.argsort(distance)[:neighbours]
        similar = np.exp(-distance[nearest] / (4 * scale))
        votes = np.array([similar[labels[nearest] == k].sum() for k in range(CLASSES)]) / similar.sum()
        expected[row] += mixing * votes
    near(np.exp(library.algorithm.predict(variables, x)), expected)
    differs(expected, probabilities(w, x), 0.05)
