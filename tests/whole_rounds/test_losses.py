"""Two rounds of methods with a loss of their own: MOON, FedEM and Fed-RoD.

MOON (Li, He, Song, arXiv 2103.16257, algorithm 1): cross-entropy + mu mean(-log(e^{s+/tau} / (e^{s+/tau} + e^{s-/tau}))), s+
and s- the cosines of z with the features under the model that the server sent and under the client's last one.
FedEM (Marfoq et al., arXiv 2108.10252, algorithm 1): with the M models that the server sent, q_sm ~ pi_m e^{-l_sm}; each model
descends mean_s q_sm l_sm, the shares pi become the mean of q over the train view, and the server averages each model.
Fed-RoD (Chen and Chao, arXiv 2107.00778): the generic model descends cross-entropy of logits + gamma log n_c, n_c the client's
class counts; on its features, held fixed, a personal head that starts at 0 descends cross-entropy of both heads' summed logits.
"""

from functools import partial

import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.authors.source import written_from
from tests.whole_rounds.world import (
    CLASSES,
    HEAD,
    KNOWN,
    LATE,
    NEW,
    TRAIN,
    WIDTH,
    Library,
    check,
    epochs,
    features,
    gradient,
    momentum_sgd,
    near,
    order_key,
    pack,
    probabilities,
    rows,
    task,
    test_key,
    two_rounds,
    view,
)

RATE, BATCH, SERVER = 0.1, 4, 0.7
WEIGHT, TEMPERATURE = 2.0, 0.6


def cosine(z, other):
    """(cosines, their slopes with respect to z)."""
    norms = np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(other, axis=1, keepdims=True)
    value = np.sum(z * other, 1, keepdims=True) / (norms[0] * norms[1])
    return value, other / (norms[0] * norms[1]) - value * z / norms[0] ** 2


def contrast(w, batch, towards, away):
    s_plus, s_minus = (cosine(features(w, batch[0]), features(model, batch[0]))[0] for model in (towards, away))
    return WEIGHT * np.mean(-np.log(1 / (1 + np.exp((s_minus - s_plus) / TEMPERATURE))))


def contrast_gradient(w, batch, towards, away):
    x, y = batch
    z = features(w, x)
    (s_plus, up), (s_minus, down) = (cosine(z, features(model, x)) for model in (towards, away))
    dz = WEIGHT / (TEMPERATURE * len(y)) * (down - up) / (1 + np.exp((s_plus - s_minus) / TEMPERATURE))
    return pack(x.T @ (dz * (1 - z**2)), np.zeros(CLASSES), np.zeros((WIDTH, CLASSES)))


def test_the_contrast_gradient_is_a_slope():
    (w, towards, away), batch = (np.sin(np.arange(27.0) + a) for a in (0, 1, 2)), view(0, "train")
    ends = [[contrast(w + step * e, batch, towards, away) for step in (1e-5, -1e-5)] for e in np.eye(27)]
    near(contrast_gradient(w, batch, towards, away), [(a - b) / 2e-5 for a, b in ends], 1e-8)


def test_two_rounds_of_moon():
    options = {"lr": RATE, "contrast_weight": WEIGHT, "temperature": TEMPERATURE, "epochs": 2, "batch_size": BATCH}
    library = Library(fm.moon(task(), **options, finetune_epochs=1, finetune="head"), server_lr=SERVER)
    everything, sgd = np.ones(27, bool), {"momentum": 0.9, "decay": 1e-5}

    def client(round_, i, w, last):
        away = w if last is None else last

        def slope(y, batch):
            return gradient(y, batch) + contrast_gradient(y, batch, w, away)

        batches = epochs(order_key(round_, i), i, "train", BATCH, 2)
        trained = momentum_sgd(w, RATE, batches, everything, slope, **sgd)
        return trained, trained

    after = two_rounds(library.w, client, TRAIN, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        w, _, last = after[number]
        check(state, number + 1, model=w, memory=rows(last, 0 * w))
    w = after[-1][0]
    for i in (KNOWN, NEW):
        batches = epochs(tagged(test_key(), "order"), i, "test_support", BATCH)
        near(library.tested(i), momentum_sgd(w, RATE, batches, HEAD, **sgd))


@pytest.mark.parametrize("keep", [False, True])
@written_from("omarfoq/FedEM", "996fadd", "client.py:91-116", "learners/learner.py:173-194")
def test_two_rounds_of_fedem(keep):
    """As in the paper; or as in omarfoq/FedEM at 996fadd, whose clients keep their optimisers, here with momentum 0.6."""
    count, steps, momentum = 3, 4, 0.6 if keep else 0.0
    options = {"optimizer": partial(optax.sgd, momentum=momentum), "keep_optimizer": True} if keep else {}
    options |= {"lr": RATE, "epochs": 2, "batch_size": BATCH, "test_steps": steps}
    library = Library(fm.fedem(task(), components=count, **options), server_lr=SERVER)
    parts = [slice(0, 12), slice(12, 15), slice(15, 27)]

    def apart(flat):
        """[M, 27] from the library's order, leaf after leaf."""
        return np.concatenate([flat[count * p.start : count * p.stop].reshape(count, -1) for p in parts], 1)

    def joined(models):
        return np.concatenate([models[:, p].ravel() for p in parts])

    def shares_of(models, pi, batch):
        likelihood = np.stack([probabilities(w, batch[0])[np.arange(len(batch[1])), batch[1]] for w in models], 1)
        return pi * likelihood / np.sum(pi * likelihood, 1, keepdims=True)

    blank = np.r_[np.full(count, 1 / count), np.zeros(27 * count if keep else 0)]

    def client(round_, i, flat, memory):
        start, memory = apart(flat), blank if memory is None else memory
        pi, slots = memory[:count], apart(memory[count:]) if keep else np.zeros((count, 27))
        models = start
        for batch in epochs(order_key(round_, i), i, "train", BATCH, 2):
            q = shares_of(start, pi, batch)
            slots = momentum * slots + np.stack([gradient(w, batch, q[:, m]) for m, w in enumerate(models)])
            models = models - RATE * slots
        return joined(models), np.r_[shares_of(start, pi, view(i, "train")).mean(0), joined(slots) if keep else []]

    after = two_rounds(library.w, client, TRAIN, personal=np.zeros(27 * count, bool), server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        flat, _, pi = after[number]
        check(state, number + 1, model=flat, memory=rows(pi, 0 * blank))
    flat, _, pi = after[-1]
    for i in (KNOWN, LATE):
        near(library.tested(i), np.r_[flat, pi[i][:count]])
    new = np.full(count, 1 / count)
    for _ in range(steps):
        new = shares_of(apart(flat), new, view(NEW, "test_support")).mean(0)
    near(library.tested(NEW), np.r_[flat, new])


def test_two_rounds_of_fedrod():
    exponent, personal = 0.7, np.arange(42) >= 27
    options = {"lr": RATE, "balance": exponent, "epochs": 2, "batch_size": BATCH}
    library = Library(fm.fedrod(task(), **options), server_lr=SERVER)
    assert not library.w[27:].any()

    def slopes(both, batch, offset):
        w, extra, (x, y) = both[:27], both[27:], batch
        z, together = features(w, x), np.r_[w[:12], w[12:] + extra]
        dl = (probabilities(together, x) - np.eye(CLASSES)[y]) / len(y)
        return np.r_[gradient(w, batch, offset=offset), dl.sum(0), (z.T @ dl).ravel()]

    def client(round_, i, both, memory):
        counts = np.bincount(view(i, "train")[1], minlength=CLASSES)
        offset = np.array([exponent * np.log(count) if count else -np.inf for count in counts])
        batches = epochs(order_key(round_, i), i, "train", BATCH, 2)
        step = partial(slopes, offset=offset)
        return momentum_sgd(both, RATE, batches, np.ones(42, bool), step, momentum=0.9), None

    after = two_rounds(library.w, client, TRAIN, personal=personal, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        both, own, _ = after[number]
        check(state, number + 1, model=both, personal=rows(own, library.w)[:, personal])
    both, own, _ = after[-1]
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), np.where(personal, own.get(i, both), both))


def test_two_rounds_of_fedrod_with_a_hypernetwork():
    """The personal head is out relu(hidden s + bias), s the client's class shares; it keeps s, and all else is averaged."""
    width = 4
    library = Library(fm.fedrod(task(), lr=RATE, epochs=2, batch_size=BATCH, classes=CLASSES, hyper_width=width))
    hyper = library.w[27 + CLASSES :]
    assert not library.w[27 : 27 + CLASSES].any()
    assert not hyper[:width].any() and hyper[width : 4 * width].all() and not hyper[4 * width :].any()

    personal = np.isin(np.arange(len(library.w)), 27 + np.arange(CLASSES))

    def shares(samples):
        return np.bincount(samples[1], minlength=CLASSES) / len(samples[1])

    def head(both):
        share, bias, hidden, out = np.split(both[27:], np.cumsum([CLASSES, width, 3 * width]))
        before = hidden.reshape(width, CLASSES) @ share + bias
        return out.reshape(15, width) @ np.maximum(before, 0), out.reshape(15, width), before, share

    def client(round_, i, both, memory):
        samples = view(i, "train")
        counts = np.bincount(samples[1], minlength=CLASSES)
        offset = np.array([np.log(count) if count else -np.inf for count in counts])

        def slopes(both, batch):
            extra, out, before, share = head(both)
            w, (x, y) = both[:27], batch
            z, together = features(w, x), np.r_[w[:12], w[12:] + extra]
            dl = (probabilities(together, x) - np.eye(CLASSES)[y]) / len(y)
            slope = np.r_[dl.sum(0), (z.T @ dl).ravel()]
            back = (out.T @ slope) * (before > 0)
            further = np.r_[back, np.outer(back, share).ravel(), np.outer(slope, np.maximum(before, 0)).ravel()]
            return np.r_[gradient(w, batch, offset=offset), np.zeros(CLASSES), further]

        batches = epochs(order_key(round_, i), i, "train", BATCH, 2)
        begun = both.copy()
        begun[personal] = shares(samples)
        return momentum_sgd(begun, RATE, batches, ~personal, slopes, momentum=0.9), None

    both, own, _ = two_rounds(library.w, client, TRAIN, personal=personal)[-1]
    check(library.last, 2, model=both, personal=rows(own, library.w)[:, personal])
    assert KNOWN in own and NEW not in own
    for i in (KNOWN, LATE, NEW):
        kept = own[i][personal] if i in own else shares(view(i, "test_support"))
        near(library.tested(i), np.r_[both[:27], head(np.r_[both[:27], kept, both[27 + CLASSES :]])[0]])
