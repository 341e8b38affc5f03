"""What holds for every registered algorithm, whatever it does."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from tests import problems

KEY = jax.random.key(3)


# What is about batch norms, and where the paper's rate is too small for a few rounds, another.
NEEDS_BATCH_NORM = {"mtfl": {}, "mtfl_fedavg_adam": {}, "fedbn": {"lr": 0.1}}


@cache
def build(name: str, **options) -> tuple[fm.Algorithm, Callable]:
    """An algorithm and its compiled round, shared by all tests of it: compilation is most of what they cost."""
    task = problems.normed_task() if name in NEEDS_BATCH_NORM else problems.task()
    algorithm = fm.ALGORITHMS[name](
        task, **(NEEDS_BATCH_NORM.get(name, {}) | {"cohort_size": 5, "devices": 1, "lanes": 1} | options)
    )
    return algorithm, jax.jit(algorithm.round)


def run(step: Callable, state: fm.State, count: int, data=None) -> fm.State:
    for _ in range(count):
        state, _ = step(jax.random.fold_in(KEY, state.round), state, problems.data() if data is None else data)
    return state


def rounds(algorithm: fm.Algorithm, count: int, state=None) -> fm.State:
    """`count` rounds of an algorithm that is not in the registry's cache."""
    return run(jax.jit(algorithm.round), algorithm.init(KEY, problems.data()) if state is None else state, count)


@pytest.fixture(params=list(fm.ALGORITHMS))
def name(request) -> str:
    return request.param


def test_a_round_is_pure_and_its_state_never_changes_form(name):
    (algorithm, step), data = build(name), problems.data()
    before = algorithm.init(KEY, data)
    after, info = step(KEY, before, data)
    assert problems.leaves_equal((after, info), step(KEY, before, data))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert problems.forms(before) == problems.forms(after)
    traces = step._cache_size()
    step(KEY, after, data)
    assert step._cache_size() == traces
    assert len(set(np.asarray(info.ids).tolist())) == info.ids.size
    assert all(values.shape == info.ids.shape for values in info.metrics.values())
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(after) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def test_a_compiled_run_equals_a_python_loop_and_a_resumed_run_equals_both(name):
    (algorithm, step), data = build(name), problems.data()
    start = algorithm.init(KEY, data)
    block = jax.jit(lambda state, count: fm.simulate.run_rounds(algorithm, KEY, state, data, count, most=4)[0])
    whole = block(start, 4)
    assert problems.leaves_equal(whole, block(block(start, 1), 3))
    assert problems.distance(whole, run(step, start, 4)) < 1e-12


@pytest.mark.parametrize("layout", [{"lanes": 2, "devices": 2}], ids=str)
def test_results_do_not_depend_on_the_layout_of_the_work(name, layout):
    # Two lanes on two devices do not divide a cohort of five: some lanes are padding.
    (algorithm, step), (other, other_step) = build(name), build(name, **layout)
    reference = run(step, algorithm.init(KEY, problems.data()), 2)
    assert problems.distance(run(other_step, other.init(KEY, problems.data()), 2), reference) < 1e-10


def test_state_of_clients_that_were_not_sampled_is_untouched(name):
    (algorithm, step), data = build(name), problems.data()
    before = run(step, algorithm.init(KEY, data), 1)
    after, info = step(jax.random.key(8), before, data)
    absent = np.setdiff1d(np.arange(len(problems.SIZES)), np.asarray(info.ids))
    assert absent.size == 2
    for old, new in ((before.personal, after.personal), (before.memory, after.memory), (before.seen, after.seen)):
        assert problems.leaves_equal(
            jax.tree.map(lambda leaf: leaf[absent], old), jax.tree.map(lambda leaf: leaf[absent], new)
        )


@pytest.mark.parametrize("client", [2, None])
def test_personalize_is_pure_sees_no_test_label_and_predicts_logits_of_every_class(name, client):
    (algorithm, step), data = build(name), problems.data()
    # What lies beyond a support view is test data: its labels must change neither training nor adaptation.
    y = np.array(data.y)
    for start, size in zip(data.start["test_query"], data.size["test_query"], strict=True):
        y[start : start + size] = (y[start : start + size] + 1) % 3
    relabelled = dataclasses.replace(data, y=y)
    state = run(step, algorithm.init(KEY, data), 2)
    assert problems.leaves_equal(state, run(step, algorithm.init(KEY, relabelled), 2, relabelled))
    personalize = jax.jit(lambda state, data: algorithm.personalize(KEY, state, data.client(2)["test_support"], client))
    variables = personalize(state, data)
    assert problems.leaves_equal(variables, personalize(state, relabelled))
    logits = algorithm.predict(variables, data.client(2)["test_query"].in_order(8).get(0, 0).x)
    assert logits.shape == (8, 3)
    assert bool(jnp.all(jnp.isfinite(logits)))


def test_training_lowers_the_loss_of_those_who_train(name):
    (algorithm, step), data = build(name), problems.data()
    evaluate = jax.jit(lambda state: fm.evaluate.evaluate(algorithm, KEY, state, data, support="support", query="train").loss)
    start = algorithm.init(KEY, data)
    assert float(jnp.mean(evaluate(run(step, start, 20)))) < float(jnp.mean(evaluate(start)))


def test_a_cohort_larger_than_the_population_is_refused(name):
    algorithm, _ = build(name, cohort_size=8)
    with pytest.raises(ValueError, match="cohort_size=8 is more than the N=7"):
        algorithm.round(KEY, algorithm.init(KEY, problems.data()), problems.data())


def test_builders_take_the_task_first_and_the_rest_by_name(name):
    parameters = list(inspect.signature(fm.ALGORITHMS[name]).parameters.values())
    assert parameters[0].name == "task"
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[1:])


def test_every_file_of_the_package_is_registered():
    used = {getattr(builder, "func", builder).__module__ for builder in fm.ALGORITHMS.values()}
    files = {f"fedjax_meta.algorithms.{module.name}" for module in pkgutil.iter_modules(fm.algorithms.__path__)}
    assert files == used


def test_nothing_below_imports_an_algorithm():
    below = [module.name for module in pkgutil.iter_modules(fm.__path__) if module.name != "algorithms"]
    for module in below:
        source = inspect.getsource(importlib.import_module(f"fedjax_meta.{module}"))
        assert "fedjax_meta.algorithms" not in source, module
