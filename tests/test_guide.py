"""The code of the guide to new methods runs as it stands."""

import importlib
import importlib.util
import re
from pathlib import Path

import jax
import pytest

import fedjax_meta as fm
from fedjax_meta import masks
from tests import problems
from tests.methods.common import FULL, gradient, of, step

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


def blocks():
    """The guide's code: a method with personal leaves, and a test."""
    return re.findall(r"```python\n(.*?)```", (DOCS / "new_method.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_functions_that_the_page_names_exist():
    page = re.sub(r"```.*?```", "", (DOCS / "new_method.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    modules = {"aggregate", "builders", "checks", "features", "keys", "local", "masks", "meta"}
    named = set(re.findall(r"(?<![\w./])(\w+)\.([A-Za-z_]+)\b", " ".join(re.findall(r"`([^`]+)`", page))))
    named = {(module, name) for module, name in named if module in modules and name != "py"}
    assert len(named) > 15
    for module, name in named:
        assert hasattr(importlib.import_module(f"fedjax_meta.{module}"), name), f"{module}.{name}"


def test_the_round_by_hand_holds():
    names: dict = {}
    exec(blocks()[1], names)
    names["test_one_round_written_out"]()


@pytest.fixture(scope="module")
def fading():
    names: dict = {}
    exec(blocks()[0], names)
    return names["fading"]


def test_the_method_with_an_own_head_is_written_out(fading):
    """Step s of a client: w <- w - lr (grad f + mu gamma^s (w - w^t)), the second term on the shared leaves alone."""
    method = fading(problems.task(), lr=0.1, prox_weight=0.7, decay=0.4, epochs=3, batch_size=FULL["batch_size"])
    algorithm, data = fm.federate(method, fm.Federation(cohort_size=7, devices=1)), problems.data()
    state = algorithm.init(jax.random.key(3), data)
    own, sizes = masks.resolve("head", problems.task()), data.size["train"]
    trained = []
    for i in range(7):
        w = state.model
        for s in range(3):
            pull = jax.tree.map(lambda mine, a, b, s=s: (not mine) * 0.7 * 0.4**s * (a - b), own, w, state.model)
            w = step(w, 0.1, jax.tree.map(lambda g, p: g + p, gradient(w, i), pull))
        trained.append(w)
    after, _ = jax.jit(algorithm.round)(jax.random.key(0), state, data)
    mean = jax.tree.map(lambda *leaves: sum(n * w for n, w in zip(sizes, leaves, strict=True)) / sum(sizes), *trained)
    assert problems.distance(masks.split(after.model, own)[1], masks.split(mean, own)[1]) < 1e-12
    assert problems.distance(of(after.personal, 4), masks.split(trained[4], own)[0]) < 1e-12


@pytest.mark.parametrize(
    ("options", "other", "of_other"),
    [
        ({"prox_weight": 0.0}, "fedper", {}),
        ({"decay": 1.0, "personal": "none"}, "fedprox", {"prox_weight": 0.1, "epochs": 1, "batch_size": 32}),
    ],
)
def test_the_method_with_an_own_head_reduces_as_the_page_says(fading, options, other, of_other):
    one = rounds(fading(problems.task(), **options), 2)
    two = rounds(fm.METHODS[other](problems.task(), lr=0.1, **of_other), 2)
    assert problems.distance((one.model, one.personal), (two.model, two.personal)) < 1e-12
