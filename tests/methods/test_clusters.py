"""Clients that choose one of several models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.clusters import losses
from tests import problems


@pytest.mark.parametrize("name", ["ifca", "cfl"])
def test_a_model_whose_loss_is_no_number_is_not_chosen(name):
    data, task = problems.data(), problems.task()
    run = problems.build(name, clusters=2, cohort_size=7, devices=1)
    state = run.init(jax.random.key(0), data)
    # Finite weights, whose products overflow to infinity minus infinity.
    model = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.where(leaf[0] > 0, 1.7e308, -1.7e308)), state.model)
    each = losses(task, jax.random.key(1), model, data.client(0)["train"])
    assert each[0] == np.inf and np.isfinite(each[1])
    if name == "cfl":
        state = state._replace(extra=jnp.ones(2, bool))  # both were trained
    after, info = run.round(jax.random.key(2), state._replace(model=model), data)
    assert not np.any(info.metrics["cluster_0"]) and np.all(info.metrics["cluster_1"] == 1) and np.all(info.returned)
    chosen = run.personalize(jax.random.key(3), after, data.client(0)["support"], None)
    assert problems.finite(chosen) and max(np.abs(leaf).max() for leaf in jax.tree.leaves(chosen)) < 1e100
