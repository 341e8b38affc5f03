"""The code of the README runs as it stands."""

import re
from pathlib import Path

import jax
import pytest

from tests import problems

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture(params=range(len(BLOCKS)))
def names(request) -> dict:
    names: dict = {}
    exec(BLOCKS[request.param], names)
    return names


def test_every_block_runs_and_shows_what_it_says(names):
    if "gradient" in names:
        # The reference differentiates through the unrolled inner loop.
        def unrolled(params):
            adapted = params
            for _ in range(5):
                step = jax.grad(names["loss"])(adapted, names["batch"])
                adapted = jax.tree.map(lambda p, g: p - 0.1 * g, adapted, step)
            return names["loss"](adapted, names["batch"])

        assert problems.distance(names["gradient"], jax.grad(unrolled)(names["params"])) < 1e-6
    elif "scores" in names:
        assert 0 <= names["scores"]["accuracy"] <= 1
        assert names["records"][-1].round == 4
    else:
        algorithm = names["clipped_fedavg"](problems.task(), cohort_size=5)
        state = algorithm.init(jax.random.key(0), problems.data())
        after, _ = jax.jit(algorithm.round)(jax.random.key(1), state, problems.data())
        assert 0 < problems.distance(after.model, state.model) <= 0.1 * 1.0 * 4  # at most 4 clipped steps of rate 0.1


def test_there_are_three_examples():
    assert len(BLOCKS) == 3
