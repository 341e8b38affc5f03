"""A network with a batch norm and its gradient in NumPy: dense, batch norm, ELU, dense; leaves in the library's order."""

from functools import cache

import numpy as np

import fedjax_meta as fm

SHAPES = ((4,), (4,), (4,), (4,), (4,), (4, 3), (3,), (3, 4))
"""Running mean and variance; shift and scale of the batch norm; bias and kernel of the first layer and of the head."""
ENDS = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
PLACES = np.arange(ENDS[-1])
STATISTICS, BATCH_NORM = ENDS[1] > PLACES, ENDS[3] > PLACES
AFFINE, NONE = BATCH_NORM & ~STATISTICS, PLACES < 0
EPSILON, MOMENTUM = 1e-5, 0.1


@cache
def normed_task():
    network = fm.models.Network((3,), 3, hidden=(4,), normed=("fc1",), activation="elu", norm="before")
    return fm.models.from_linen(network, (3,), layers=network.layers, features="features", head="head")


def unpack(w):
    return [part.reshape(shape) for part, shape in zip(np.split(w, ENDS[:-1]), SHAPES, strict=True)]


def pack(*leaves):
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def step(w, batch):
    """(gradient, w with its running statistics moved by one batch) in training mode."""
    x, y = batch
    mean, var, shift, scale, b1, k1, b2, k2 = unpack(w)
    a = x @ k1.T + b1
    m, v, n = a.mean(0), a.var(0), len(y)
    normal = (a - m) / np.sqrt(v + EPSILON)
    h = normal * scale + shift
    z = np.where(h > 0, h, np.expm1(np.minimum(h, 0)))
    logits = z @ k2.T + b2
    e = np.exp(logits - logits.max(1, keepdims=True))
    dl = (e / e.sum(1, keepdims=True) - np.eye(3)[y]) / n
    dh = dl @ k2 * np.where(h > 0, 1, np.exp(np.minimum(h, 0)))
    dn = dh * scale
    da = (dn - dn.mean(0) - normal * (dn * normal).mean(0)) / np.sqrt(v + EPSILON)
    gradient = pack(0 * mean, 0 * var, dh.sum(0), (dh * normal).sum(0), da.sum(0), da.T @ x, dl.sum(0), dl.T @ z)
    # PyTorch moves the running variance towards the unbiased one.
    moved = mean + MOMENTUM * (m - mean), var + MOMENTUM * (v * n / (n - 1) - var)
    return gradient, np.r_[moved[0], moved[1], w[ENDS[1] :]]


def descend(w, rate, batches):
    """SGD, the running statistics along with it."""
    for batch in batches:
        gradient, w = step(w, batch)
        w = w - rate * gradient
    return w
