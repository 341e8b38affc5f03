"""Small problems with known answers, asymmetric and of unequal size: a symmetric one hides sign errors."""

import inspect
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.federation import OPTIONS

T = TypeVar("T")

SIZES = np.array([24, 61, 30, 97, 44, 33, 70])

TRIED_WITH = {"fedgp": {"capacity": 24, "gibbs_steps": 2, "draws": 4, "test_draws": 4}, "fedbn": {"lr": 0.1}}
"""Options by method where a test runs over all methods: small costs, rates that show in a few rounds; a test's own come first."""

NEED_BATCH_NORM = ("mtfl", "mtfl_fedavg_adam", "fedbn")
"""Methods about batch norms, which need a task that has one."""

FIRST = frozenset({builder.__module__: name for name, builder in reversed(fm.METHODS.items())}.values())
"""One method of each file."""

VARIED = FIRST | {"fedper", "fedavg_ft", "fedrep", "fedadam", "fedmeta_per_metasgd", "mtfl", "reptile"}
"""One method of each file, and those of the same files that go other ways: the contract tests of the ordinary suite."""


def _init(key):
    body, head = jax.random.split(key)
    return {
        "body": {"w": jax.random.normal(body, (5, 4)) / 2, "b": jnp.zeros(4)},
        "head": {"w": jax.random.normal(head, (4, 3)) / 2, "b": jnp.zeros(3)},
    }


def _features(variables, x):
    return jnp.tanh(x @ variables["body"]["w"] + variables["body"]["b"][None])


def _head(variables, features):
    return features @ variables["head"]["w"] + variables["head"]["b"][None]


def _made_once(make: Callable[[], T]) -> Callable[[], T]:
    """`make`, called once in each precision: what is made in float64 does not fit a program that is traced in float32."""
    made = cache(lambda precise: make())
    return wraps(make)(lambda: made(jax.config.jax_enable_x64))


@_made_once
def task() -> fm.Task:
    """A two-layer classifier of 3 classes from 5 inputs; smooth, so that derivatives of any order exist."""
    base = fm.classification(_init, lambda variables, x: _head(variables, _features(variables, x)), layers=("body", "head"))
    return base._replace(features=_features, head=_head)


@_made_once
def normed_task() -> fm.Task:
    """The like with a batch norm, for systems that treat its leaves apart."""
    network = fm.models.Network((5,), 3, hidden=(4,), normed=("fc1",), activation="elu", norm="before")
    return fm.models.from_linen(network, (5,), layers=network.layers, features="features", head="head")


def task_of(name: str) -> fm.Task:
    """The task that a method can learn."""
    return normed_task() if name in NEED_BATCH_NORM else task()


@_made_once
def data() -> fm.FederatedData:
    """7 clients of unequal size with train, support, query, test, test_support and test_query views."""
    return clients_of(SIZES)


def clients_of(sizes: Iterable[int]) -> fm.FederatedData:
    """Clients of these sizes with samples like those of `data`."""
    rng = np.random.default_rng(0)
    clients = []
    for i, size in enumerate(sizes):
        x = rng.normal(0.2 * i, 1, (size, 5))
        y = np.argmax(x @ rng.normal(size=(5, 3)) + 0.3 * rng.normal(size=(size, 3)), axis=1)
        y[:3] = 0, 1, 2
        clients.append((x, y))
    return fm.from_clients(clients, num_classes=3)


def sampled(ordinary=FIRST, without=(), *, grouped: bool = False) -> list:
    """Parameters for all methods but `without`: the ordinary suite runs those of `ordinary`, the long tier the others.

    Grouped, the tests of a method run in one process, with those of other files that are grouped so.
    """

    def marks(name):
        return [pytest.mark.long] * (name not in ordinary) + [pytest.mark.xdist_group(name)] * grouped

    return [pytest.param(name, marks=marks(name)) for name in fm.METHODS if name not in without]


def chosen(params: Iterable[tuple], ordinary: Callable[..., bool]) -> list:
    """Parameters of which the ordinary suite runs those for which `ordinary(*values)` is true, the long tier the others."""
    return [pytest.param(*values, marks=[pytest.mark.long] * (not ordinary(*values))) for values in params]


def build(builder, of=None, **options) -> fm.Algorithm:
    """An algorithm from a builder or its name; options that the builder does not take are the federation's."""
    if isinstance(builder, str):
        builder, options = fm.METHODS[builder], TRIED_WITH.get(builder, {}) | options
    takes = inspect.signature(builder).parameters
    own = {name: value for name, value in options.items() if name in takes or name not in OPTIONS}
    federation = {name: value for name, value in options.items() if name not in own}
    return fm.federate(builder(task() if of is None else of, **own), fm.Federation(**federation))


def forms(tree):
    """Shape and dtype of every leaf."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def leaves_equal(a, b) -> bool:
    """Whether two trees are the same, bit for bit."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def finite(tree) -> bool:
    """Whether every number of a tree is finite. In NumPy, like `distance`: JAX would compile each operation for each shape."""
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return all(bool(np.all(np.isfinite(leaf))) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))


def at(tree, places):
    """Some rows of every leaf, in NumPy."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(places)], tree)


def distance(a, b) -> float:
    """Largest absolute difference between two trees; NaN where one of them has a NaN."""
    gaps = jax.tree.map(lambda x, y: np.max(np.abs(np.asarray(x, float) - np.asarray(y, float)), initial=0), a, b)
    return float(np.max(jax.tree.leaves(gaps), initial=0))
