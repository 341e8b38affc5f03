"""The code of the README runs as it stands, and its layout names the modules."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

import fedjax_meta as fm
from tests import problems

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def _run(number) -> dict:
    names: dict = {}
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


def test_a_method_runs_on_ones_own_model_and_arrays_in_a_federation():
    names = _run(1)
    assert 0 <= names["scores"]["accuracy"] <= 1
    assert names["records"][-1].round == 4
    assert 3 <= int(jnp.sum(names["state"].seen)) <= 6


def test_a_new_method_moves_by_no_more_than_its_clipped_steps():
    method = _run(2)["clipped_fedavg"](problems.task())
    algorithm = fm.federate(method)
    state = algorithm.init(jax.random.key(0), problems.data())
    after, _ = jax.jit(algorithm.round)(jax.random.key(1), state, problems.data())
    assert 0 < problems.distance(after.model, state.model) <= 0.1 * 1.0 * 4  # at most 4 clipped steps of rate 0.1


def test_there_are_three_examples_and_as_many_methods_as_it_says():
    assert len(BLOCKS) == 3
    ((methods, variants),) = re.findall(r"\*\*(\d+) methods and (\d+) variants", TEXT)
    assert f"| {methods}, and {variants} variants | 7 |" in TEXT
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "fedjax_meta" / "methods").glob("*.py")]
    assert sum(source.count("\n@variant(") for source in sources) == int(variants)
    assert int(methods) + int(variants) == len(fm.METHODS)


def test_the_layout_names_modules_that_exist_and_nearly_all_of_them():
    named = set(re.findall(r"`([\w]+)(?:\.py|/)`", TEXT.partition("## Package layout")[2]))
    package = ROOT / "fedjax_meta"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} | {"studies"}
    assert named <= there and len(named) > 0.9 * len(there)
