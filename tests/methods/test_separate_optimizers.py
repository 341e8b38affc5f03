"""Models that a client trains at once have an optimiser each, also one that looks at all leaves."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

from tests import problems
from tests.methods.common import FULL, build, run, start


def clipped(norm, lr):
    return optax.chain(optax.clip_by_global_norm(norm), optax.sgd(lr))


OPTIONS = {"lr": 0.5, "epochs": 1, "batch_size": 32, "optimizer": partial(clipped, 0.05), "weighting": "uniform"}


@pytest.mark.parametrize(
    ("name", "options", "model"),
    [("apfl", {"share": 0.7}, lambda model: model), ("fedrod", {"balance": 0.0}, lambda model: model.generic)],
)
def test_the_global_model_is_that_of_fedavg(name, options, model):
    ours, plain = (build(name, **OPTIONS, **more, cohort_size=5) for name, more in ((name, options), ("fedavg", {})))
    assert problems.distance(model(run(ours, 2).model), run(plain, 2).model) < 1e-12


def test_each_component_of_fedem_is_clipped_by_itself():
    algorithm = build("fedem", components=3, lr=1.0, epochs=1, optimizer=partial(clipped, 0.01), **FULL | {"cohort_size": 1})
    before = start(algorithm)
    moved = jax.tree.map(jnp.subtract, run(algorithm, 1, before).model, before.model)
    for m in range(3):
        norm = float(optax.tree.norm(jax.tree.map(lambda leaf, m=m: leaf[m], moved)))
        assert norm == pytest.approx(0.01, rel=1e-6)
