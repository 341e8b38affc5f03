"""The code of the guide to new methods runs as it stands."""

import importlib.util
import re
from pathlib import Path

import jax

import fedjax_meta as fm
from tests import problems

DOCS = Path(__file__).parents[1] / "docs"
FEDERATION = fm.Federation(cohort_size=5, devices=1)


def skeleton():
    spec = importlib.util.spec_from_file_location("skeleton_method", DOCS / "skeleton_method.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounds(method, count):
    algorithm, data = fm.federate(method, FEDERATION), problems.data()
    state, step = algorithm.init(jax.random.key(3), data), jax.jit(algorithm.round)
    for number in range(count):
        state, _ = step(jax.random.key(number), state, data)
    return state


def test_the_skeleton_is_a_method_that_reduces_as_it_says():
    module = skeleton()
    for says, _, options, other, other_options, _ in module.REDUCES_TO:
        one = rounds(module.skeleton(problems.task(), **options), 3)
        assert (
            problems.distance(one.model, rounds(fm.METHODS[other](problems.task(), **{"lr": 0.1} | other_options), 3).model)
            < 1e-12
        ), says
    assert problems.distance(one.model, rounds(module.skeleton(problems.task()), 3).model) > 1e-6


def test_the_round_by_hand_holds():
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "new_method.md").read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(block, names)
    names["test_one_round_written_out"]()
