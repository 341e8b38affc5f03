"""What the tests of single algorithms share: full-batch options, gradients of one client, and plain runs.

Whatever compiles is kept: most of what these tests cost is compilation.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_meta as fm
from fedjax_meta.task import Batch
from tests import problems

KEY = jax.random.key(3)
FULL = {"batch_size": 128, "cohort_size": 7, "devices": 1}
"""Every client takes part and every step is a full gradient, so that a round can be written out by hand."""


@cache
def build(name, task=None, **options):
    """An algorithm of the registry; the same one for the same options."""
    task = problems.task() if task is None else task
    algorithm = fm.ALGORITHMS[name](task, **options)
    made[algorithm] = (name, task, options)
    return algorithm


made = {}
"""What each algorithm was built from."""


def batch(client, view="train"):
    size, start = (int(part[view][client]) for part in (problems.data().size, problems.data().start))
    return Batch(*(jnp.asarray(part[start : start + size]) for part in (problems.data().x, problems.data().y)), jnp.ones(size))


@cache
def padded(client, view="train"):
    """The same samples in a batch of one size for all clients, so that a gradient is compiled once."""
    size, start = (int(part[view][client]) for part in (problems.data().size, problems.data().start))
    x, y = np.zeros((FULL["batch_size"], 5)), np.zeros(FULL["batch_size"], np.int32)
    x[:size], y[:size] = problems.data().x[start : start + size], problems.data().y[start : start + size]
    return Batch(x, y, (np.arange(len(y)) < size).astype(float))


def buffered():
    """The problem's task, one leaf of which is no parameter but a buffer."""
    everything = jax.tree.map(lambda _: True, problems.task().init(KEY))
    everything["body"]["b"] = False
    return problems.task()._replace(trainable=lambda variables: everything)


@jax.jit
def _loss(variables, samples):
    return problems.task().loss(variables, samples, KEY)[0]


_gradient = jax.jit(jax.grad(_loss))


def loss(variables, client, view="train"):
    return _loss(variables, padded(client, view))


def gradient(variables, client, view="train"):
    return _gradient(variables, padded(client, view))


@jax.jit
def step(variables, rate, change):
    return jax.tree.map(lambda v, c: v - rate * c, variables, change)


def of(tree, client):
    return jax.tree.map(lambda leaf: leaf[client], tree)


@cache
def start(algorithm):
    return jax.jit(algorithm.init)(KEY, problems.data())


@cache
def _round(name, task, static):
    def one_round(rates, *arguments):
        return fm.ALGORITHMS[name](task, **dict(static), **rates).round(*arguments)

    return jax.jit(one_round)


def compiled(algorithm):
    """Its round. Rates and weights are traced, so that algorithms that differ in nothing else share one program."""
    name, task, options = made[algorithm]
    rates = {key: value for key, value in options.items() if isinstance(value, float) and key != "noise"}
    static = frozenset((key, value) for key, value in options.items() if key not in rates)
    return partial(_round(name, task, static), rates)


def run(algorithm, count, state=None, data=None):
    if state is None:
        state = start(algorithm) if data is None else jax.jit(algorithm.init)(KEY, data)
    for _ in range(count):
        key = jax.random.fold_in(KEY, state.round)
        state, _ = compiled(algorithm)(key, state, problems.data() if data is None else data)
    return state


@cache
def _personalize(algorithm, view, stranger):
    def personalize(state, client):
        return algorithm.personalize(KEY, state, problems.data().client(client)[view], None if stranger else client)

    return jax.jit(personalize)


def personalized(algorithm, state, client, view="test_support", of_client=None):
    """Variables with which `client` (or a stranger with the samples of `of_client`) tests."""
    return _personalize(algorithm, view, client is None)(state, of_client if client is None else client)
