"""What the tests of single algorithms share: full-batch options, gradients of one client, and plain runs."""

import jax
import jax.numpy as jnp

from fedjax_meta.task import Batch
from tests import problems

KEY = jax.random.key(3)
FULL = {"batch_size": 128, "cohort_size": 7, "devices": 1}
"""Every client takes part and every step is a full gradient, so that a round can be written out by hand."""


def batch(client, view="train"):
    size, start = (int(part[view][client]) for part in (problems.data().size, problems.data().start))
    return Batch(*(jnp.asarray(part[start : start + size]) for part in (problems.data().x, problems.data().y)), jnp.ones(size))


def buffered():
    """The problem's task, one leaf of which is no parameter but a buffer."""
    everything = jax.tree.map(lambda _: True, problems.task().init(KEY))
    everything["body"]["b"] = False
    return problems.task()._replace(trainable=lambda variables: everything)


def loss(variables, client, view="train"):
    return problems.task().loss(variables, batch(client, view), KEY)[0]


def gradient(variables, client, view="train"):
    return jax.grad(loss)(variables, client, view)


def step(variables, rate, change):
    return jax.tree.map(lambda v, c: v - rate * c, variables, change)


def of(tree, client):
    return jax.tree.map(lambda leaf: leaf[client], tree)


def start(algorithm):
    return algorithm.init(KEY, problems.data())


def run(algorithm, count, state=None, data=None):
    data = problems.data() if data is None else data
    state = algorithm.init(KEY, data) if state is None else state
    one = jax.jit(algorithm.round)
    for _ in range(count):
        state, _ = one(jax.random.fold_in(KEY, state.round), state, data)
    return state


def personalized(algorithm, state, client, view="test_support", of_client=None):
    """Variables with which `client` (or a stranger with the samples of `of_client`) tests."""
    support = problems.data().client(client if client is not None else of_client)[view]
    return algorithm.personalize(KEY, state, support, client)
