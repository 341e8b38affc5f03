"""The same small classifiers in each framework: 5 inputs, a body of 4 with a batch norm and dropout or without, 3 classes."""

from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import fedjax_meta as fm

SPLIT = {"features": "features", "head": "head", "layers": ("fc1", "head")}


class Linen(nn.Module):
    normed: bool

    def setup(self):
        self.fc1, self.head = nn.Dense(4), nn.Dense(3)
        if self.normed:
            self.norm, self.drop = nn.BatchNorm(momentum=0.9), nn.Dropout(0.25)

    def features(self, x, *, train=False, weight=None):
        z = self.fc1(x)
        if self.normed:
            mask = None if weight is None else weight[:, None] > 0
            z = self.drop(self.norm(z, use_running_average=not train, mask=mask), deterministic=not train)
        return jnp.tanh(z)

    def __call__(self, x, *, train=False, weight=None):
        return self.head(self.features(x, train=train, weight=weight))


class NNX(nnx.Module):
    def __init__(self, rngs, normed):
        self.fc1, self.head = nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs) if normed else None
        self.drop = nnx.Dropout(0.25, rngs=rngs) if normed else None

    def features(self, x, weight=None):
        z = self.fc1(x)
        if self.norm is not None:
            # The statistics of nnx.BatchNorm are float32 and do not take others.
            z = self.drop(self.norm(z.astype(jnp.float32), mask=None if weight is None else weight[:, None] > 0))
        return jnp.tanh(z)

    def __call__(self, x, weight=None):
        return self.head(self.features(x, weight))


class Equinox(eqx.Module):
    fc1: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: Callable  # a function among the leaves

    def __init__(self, key):
        body, head = jax.random.split(key)
        self.activation = jnp.tanh
        self.fc1, self.head = eqx.nn.Linear(5, 4, key=body), eqx.nn.Linear(4, 3, key=head)

    def features(self, x):
        return self.activation(self.fc1(x))

    def __call__(self, x):
        return self.head(self.features(x))


class NormedEquinox(eqx.Module):
    fc1: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key, mode="batch"):
        body, head = jax.random.split(key)
        self.fc1, self.head = eqx.nn.Linear(5, 4, key=body), eqx.nn.Linear(4, 3, key=head)
        self.norm, self.drop = eqx.nn.BatchNorm(4, axis_name="batch", momentum=0.9, mode=mode), eqx.nn.Dropout(0.25)

    def features(self, x, state, *, key=None):
        z, state = self.norm(self.fc1(x), state)
        return jnp.tanh(self.drop(z, key=key)), state

    def __call__(self, x, state, *, key=None):
        z, state = self.features(x, state, key=key)
        return self.head(z), state


def own_init(key):
    body, head = jax.random.split(key)
    return {
        "fc1": {"w": jax.random.normal(body, (5, 4)) / 2},
        "head": {"w": jax.random.normal(head, (4, 3)) / 2},
        "seen": jnp.zeros(4),
        "steps": jnp.zeros((), jnp.int32),
    }


def _own_body(variables, x):
    return jnp.tanh(x @ variables["fc1"]["w"] - variables["seen"])


def own_head(variables, z):
    return z @ variables["head"]["w"]


def own_apply(variables, x, *, train, key, weight):
    z = _own_body(variables, x)
    if not train:
        return own_head(variables, z), variables
    mean = jnp.sum(jnp.where(weight[:, None] > 0, z, 0), 0) / jnp.maximum(jnp.sum(weight), 1)
    kept = jax.random.bernoulli(key, 0.75, z.shape) / 0.75
    updated = {**variables, "seen": 0.9 * variables["seen"] + 0.1 * mean, "steps": variables["steps"] + 1}
    return own_head(variables, kept * z), updated


def own_trainable(variables):
    return {name: jax.tree.map(lambda _, name=name: name in ("fc1", "head"), tree) for name, tree in variables.items()}


def plain(**options):
    """Each framework's task without buffers and dropout."""
    return {
        "linen": fm.from_linen(Linen(normed=False), (5,), **SPLIT, **options),
        "nnx": fm.from_nnx(lambda rngs: NNX(rngs, normed=False), (5,), **SPLIT, **options),
        "equinox": fm.from_equinox(Equinox, (5,), **SPLIT, **options),
        "own": fm.from_functions(
            lambda key: {name: tree for name, tree in own_init(key).items() if name in ("fc1", "head")},
            lambda variables, x, *, train, key, weight: (own_head(variables, jnp.tanh(x @ variables["fc1"]["w"])), variables),
            (5,),
            features=lambda variables, x: jnp.tanh(x @ variables["fc1"]["w"]),
            head=own_head,
            layers=("fc1", "head"),
            **options,
        ),
    }


def normed():
    """Each framework's task with running statistics and dropout."""
    return {
        "linen": fm.from_linen(Linen(normed=True), (5,), **SPLIT),
        "nnx": fm.from_nnx(lambda rngs: NNX(rngs, normed=True), (5,), **SPLIT),
        "equinox": fm.from_equinox(eqx.nn.make_with_state(NormedEquinox), (5,), **SPLIT),
        "own": fm.from_functions(
            own_init,
            own_apply,
            (5,),
            trainable=own_trainable,
            features=_own_body,
            head=own_head,
            layers=("fc1", "head"),
        ),
    }
