"""Shared by the tests of single methods: full-batch options, gradients of one client, and plain runs.

Compiled programs are cached: compilation is most of what these tests cost.
"""

import inspect
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_meta as fm
from fedjax_meta.federation import OPTIONS, Federation
from fedjax_meta.rounds import federate
from fedjax_meta.task import Batch
from tests import problems

KEY = jax.random.key(3)
FULL = {"batch_size": 128, "cohort_size": 7, "devices": 1}
"""Every client takes part and every step is a full gradient, so that a round can be written out by hand."""

made = {}
"""What each algorithm of `build` was built from."""


def split(name, options):
    """(the options of a method, those of its federation); a name that both have belongs to the method."""
    takes = inspect.signature(fm.METHODS[name]).parameters
    federation = {key: value for key, value in options.items() if key in OPTIONS and key not in takes}
    return {key: value for key, value in options.items() if key not in federation}, federation


@cache
def build(name, task=None, federation=None, **options):
    """A method of the registry in a federation; the same algorithm for the same arguments.

    Options may be those of the method and, unless `federation` is given, those of `Federation`.
    """
    task = problems.task() if task is None else task
    of_method, of_federation = split(name, options)
    if federation is not None and of_federation:
        raise TypeError(f"{', '.join(of_federation)} must stand in the federation that is given")
    algorithm = federate(fm.METHODS[name](task, **of_method), federation or Federation(**of_federation))
    made[algorithm] = (name, task, federation, options)
    return algorithm


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


@cache
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
def gradient_on(variables, batch):
    """The gradient of the problem's loss over any batch."""
    return jax.grad(_loss)(variables, batch)


@jax.jit
def step(variables, rate, change):
    return jax.tree.map(lambda v, c: v - rate * c, variables, change)


@jax.jit
def plus(a, scale, b):
    return jax.tree.map(lambda x, y: x + scale * y, a, b)


def mean(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def of(tree, client):
    return jax.tree.map(lambda leaf: leaf[client], tree)


@cache
def start(algorithm):
    return jax.jit(algorithm.init)(KEY, problems.data())


@cache
def _round(name, task, federation, static):
    def one_round(rates, *arguments):
        of_method, of_federation = split(name, dict(static) | rates)
        return federate(fm.METHODS[name](task, **of_method), federation or Federation(**of_federation)).round(*arguments)

    return jax.jit(one_round)


@cache
def compiled(algorithm):
    """Its round. Rates and weights are traced, so that algorithms that differ in nothing else share one program."""
    if algorithm not in made:
        return jax.jit(algorithm.round)
    name, task, federation, options = made[algorithm]
    rates = {key: value for key, value in options.items() if isinstance(value, float) and key != "noise"}
    static = frozenset((key, value) for key, value in options.items() if key not in rates)
    return partial(_round(name, task, federation, static), rates)


def run(algorithm, count, state=None, data=None):
    """`count` rounds, from the algorithm's first state unless another is given."""
    if state is None:
        state = start(algorithm) if data is None else jax.jit(algorithm.init)(KEY, data)
    for _ in range(count):
        key = jax.random.fold_in(KEY, state.round)
        state, _ = compiled(algorithm)(key, state, problems.data() if data is None else data)
    return state


@cache
def _personalize(algorithm, view, known):
    def personalize(state, client):
        return algorithm.personalize(KEY, state, problems.data().client(client)[view], client if known else None)

    return jax.jit(personalize)


def personalized(algorithm, state, client, view="test_support", of_client=None):
    """Variables with which `client` tests; without one, those of a new client with the samples of `of_client`."""
    return _personalize(algorithm, view, client is not None)(state, of_client if client is None else client)
