"""Two rounds of FedPAC (Xu, Tong, Huang, arXiv 2306.11867, algorithm 1), with v, h and quadratic programmes of equation 11.

Before training, client i takes the mean features mu_k of its classes, p_k = n_k / n, and

    h_i = (p_1 mu_1, ..., p_K mu_K),   v_i = (1/n) (sum_k p_k E|z|^2_k - sum_k p_k^2 |mu_k|^2).

It trains its head, then the extractor with lambda times the mean of |z - c_y|^2 / d, by SGD with momentum 0.5 and weight
decay 5e-4. The centroid of a class is the mean of the trained features over all samples of the cohort. Head i becomes sum_j
a_j head_j, where a minimises sum_j a_j^2 v_j + |h_i - sum_j a_j h_j|^2 on the simplex.
"""

from itertools import combinations

import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.whole_rounds.world import (
    BODY,
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
    client_key,
    epochs,
    features,
    gradient,
    momentum_sgd,
    near,
    order_key,
    pack,
    rows,
    task,
    test_key,
    view,
)

RATE, HEAD_RATE, BATCH, PULL, SERVER = 0.05, 0.1, 4, 0.8, 0.7
EPOCHS, HEAD_EPOCHS = 2, 2
SGD = {"momentum": 0.5, "decay": 5e-4}


def class_means(w, samples):
    """(n_k, mu_k, E|z|^2_k), 0 for a class without samples."""
    x, y = samples
    z, member = features(w, x), np.eye(CLASSES)[y]
    number = member.sum(0)
    safe = np.maximum(number, 1)
    return number, member.T @ z / safe[:, None], member.T @ np.sum(z**2, 1) / safe


def profile(w, samples):
    """(v, h)."""
    number, mu, square = class_means(w, samples)
    n, p = number.sum(), number / number.sum()
    return (p @ square - p**2 @ np.sum(mu**2, 1)) / n, (p[:, None] * mu).ravel()


def programme(i, v, h):
    """argmin over the simplex of sum_j a_j^2 v_j + |h_i - sum_j a_j h_j|^2, by trying every set of positive weights."""
    count, best = len(v), (np.inf, None)
    matrix, linear = np.diag(v) + h @ h.T, h @ h[i]
    for size in range(1, count + 1):
        for some in map(list, combinations(range(count), size)):
            # Stationary on the face: M a - linear = mu 1, sum a = 1.
            kkt = np.block([[matrix[np.ix_(some, some)], -np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            a = np.zeros(count)
            a[some] = np.linalg.solve(kkt, np.r_[linear[some], 1])[:-1]
            value = a**2 @ v + np.sum((h[i] - a @ h) ** 2)
            if a.min() >= 0 and value < best[0]:
                best = value, a
    a = np.where(best[1] < 1e-3, 0, best[1])
    return a / a.sum()


def pulled_gradient(targets):
    """The gradient of the loss plus PULL times the mean of |z - target|^2 / d."""

    def slope(w, batch):
        x, y = batch
        z = features(w, x)
        dz = 2 * PULL * (z - targets[y]) / (WIDTH * len(y))
        return gradient(w, batch) + pack(x.T @ (dz * (1 - z**2)), np.zeros(CLASSES), np.zeros((WIDTH, CLASSES)))

    return slope


def test_the_alignment_gradient_is_a_slope():
    w, batch, targets = np.sin(np.arange(27.0)), view(0, "train"), np.cos(np.arange(12.0)).reshape(3, 4)
    term = lambda w: PULL * np.mean(np.mean((features(w, batch[0]) - targets[batch[1]]) ** 2, 1))  # noqa: E731
    slope = [(term(w + 1e-5 * e) - term(w - 1e-5 * e)) / 2e-5 for e in np.eye(27)]
    near(pulled_gradient(targets)(w, batch) - gradient(w, batch), slope, 1e-8)


@pytest.mark.parametrize("collaborate", [True, False])
def test_two_rounds_and_their_tests(collaborate):
    options = {"lr": RATE, "head_lr": HEAD_RATE, "alignment": PULL, "epochs": EPOCHS, "head_epochs": HEAD_EPOCHS}
    library = Library(fm.fedpac(task(), **options, batch_size=BATCH, collaborate=collaborate), server_lr=SERVER)
    w, own, centroids, known, shared = library.w, {}, np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES), []
    for number, cohort in enumerate(COHORTS):
        trained, sent, sums = {}, [], []
        for i in cohort:
            start, samples = np.where(HEAD, own.get(i, w), w), view(i, "train")
            sent.append(profile(start, samples))
            targets = np.where(known[:, None] > 0, centroids, class_means(start, samples)[1])
            head_order = tagged(tagged(client_key(number, i), "head"), "order")
            y = momentum_sgd(start, HEAD_RATE, epochs(head_order, i, "train", BATCH, HEAD_EPOCHS), HEAD, **SGD)
            # There are no centroids in the first round, and in the second none of class 2: a client's own mean stands for it.
            slope = pulled_gradient(targets) if known.any() else gradient
            trained[i] = momentum_sgd(y, RATE, epochs(order_key(number, i), i, "train", BATCH, EPOCHS), BODY, slope, **SGD)
            count, mu, _ = class_means(trained[i], samples)
            sums.append((count, count[:, None] * mu))
        weights = [TRAIN[i] for i in cohort]
        mean = np.average([trained[i] for i in cohort], 0, weights)
        v, h = (np.array(part) for part in zip(*sent, strict=True))
        for place, i in enumerate(cohort):
            a = programme(place, v, h) if collaborate else np.eye(len(cohort))[place]
            shared.append(a)
            own[i] = np.where(HEAD, a @ np.stack([trained[j] for j in cohort]), trained[i])
        w = np.where(HEAD, w, w + SERVER * (mean - w))
        counts, totals = (sum(part) for part in zip(*sums, strict=True))
        held = counts > 0
        centroids[held], known = totals[held] / counts[held, None], np.maximum(known, held)
        state = (library.first, library.last)[number]
        extra = np.r_[centroids.ravel(), known]
        check(state, number + 1, model=w, personal=rows(own, library.w)[:, HEAD], extra=extra)
        assert known.tolist() == [1, 1, number]
    # Somebody gets a true mixture, and the programmes differ.
    assert not collaborate or max(np.sort(a)[-2] for a in shared) > 0.05
    for i in (KNOWN, LATE):
        near(library.tested(i), np.where(HEAD, own[i], w))
    batches = epochs(tagged(test_key(), "order"), NEW, "test_support", BATCH, HEAD_EPOCHS)
    near(library.tested(NEW), momentum_sgd(w, HEAD_RATE, batches, HEAD, **SGD))
