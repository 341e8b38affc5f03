"""The code of the README runs as it stands."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fedjax_meta as fm
from tests import problems

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), flags=re.DOTALL)


def _run(*numbers) -> dict:
    names: dict = {}
    for number in numbers:
        exec(BLOCKS[number], names)
    return names


def test_the_meta_gradient_is_that_of_the_unrolled_inner_loop():
    names = _run(0)

    def unrolled(params):
        adapted = params
        for _ in range(5):
            step = jax.grad(names["loss"])(adapted, names["batch"])
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, adapted, step)
        return names["loss"](adapted, names["batch"])

    assert problems.distance(names["gradient"], jax.grad(unrolled)(names["params"])) < 1e-6


@pytest.mark.parametrize(("numbers", "cohort"), [((1,), 5), ((1, 2), 3)], ids=["own model", "federation"])
def test_a_method_runs_on_ones_own_model_and_arrays_and_in_a_federation(numbers, cohort):
    names = _run(*numbers)
    assert 0 <= names["scores"]["accuracy"] <= 1
    assert names["records"][-1].round == 4
    assert cohort <= int(jnp.sum(names["state"].seen)) <= 6


def test_a_new_method_moves_by_no_more_than_its_clipped_steps():
    method = _run(3)["clipped_fedavg"](problems.task())
    algorithm = fm.federate(method)
    state = algorithm.init(jax.random.key(0), problems.data())
    after, _ = jax.jit(algorithm.round)(jax.random.key(1), state, problems.data())
    assert 0 < problems.distance(after.model, state.model) <= 0.1 * 1.0 * 4  # at most 4 clipped steps of rate 0.1


def test_there_are_four_examples():
    assert len(BLOCKS) == 4
