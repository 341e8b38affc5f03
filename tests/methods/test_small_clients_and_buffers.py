"""Clients of one sample, and models with buffers: what the newer methods do with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from tests import problems

KEY = jax.random.key(3)
WITH_BUFFERS = ("afl", "anil", "fedas", "fedcac", "feddyn", "fednova", "fedproto", "mamlpp", "pfedsim", "qfedavg")
WITHOUT = ("cfl", "feddbe", "gpfl", "ifca")


def tiny():
    """Client 0 has one sample in each view, client 1 two, client 2 nine."""
    rng = np.random.default_rng(0)
    sizes = {"train": (1, 2, 9), "support": (1, 1, 5), "query": (1, 1, 4), "test_support": (1, 1, 3)}
    pools = [(rng.normal(size=(12, 5)), rng.integers(0, 3, 12)) for _ in range(3)]
    return fm.from_clients(pools, num_classes=3, views={name: (np.zeros(3, int), np.array(n)) for name, n in sizes.items()})


def finite(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves)


@pytest.mark.parametrize("name", WITH_BUFFERS + WITHOUT)
def test_a_client_of_one_sample_trains_and_tests(name):
    """Models with batch norms where the method takes them: their statistics move, by one sample too."""
    task = problems.task() if name in WITHOUT else problems.normed_task()
    method = fm.METHODS[name](task, **({"clusters": 2} if name in ("cfl", "ifca") else {}))
    algorithm, data = fm.federate(method, fm.Federation(cohort_size=3, devices=1, lanes=1)), tiny()
    step, state = jax.jit(algorithm.round), algorithm.init(KEY, data)
    for _ in range(2):
        state, info = step(jax.random.fold_in(KEY, state.round), state, data)
        assert finite(state) and bool(jnp.all(info.returned))
    for client in (0, None):
        variables = algorithm.personalize(KEY, state, data.client(0)["test_support"], client)
        assert finite(algorithm.predict(variables, jnp.ones((2, 5))))
    if name in WITH_BUFFERS:
        fixed = jax.tree.map(lambda moves: not moves, task.trainable(fm.masks.variables_shape(task)))
        before = fm.masks.split(task.init(KEY), fixed)[0]
        tested = variables[0] if name == "fedproto" else variables
        after = fm.masks.split(tested.params if hasattr(tested, "params") else tested, fixed)[0]
        assert jax.tree.leaves(after) and problems.forms(before) == problems.forms(after)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_method_for_models_without_buffers_says_so(name):
    with pytest.raises(ValueError, match=f"{name} is for models without buffers"):
        fm.METHODS[name](problems.normed_task())
