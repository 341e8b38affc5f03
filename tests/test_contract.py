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
import optax
import pytest

import fedjax_meta as fm
from tests import problems

KEY = jax.random.key(3)


# What is about batch norms, and where the paper's rate is too small for a few rounds, another.
NEEDS_BATCH_NORM = {"mtfl": {}, "mtfl_fedavg_adam": {}, "fedbn": {"lr": 0.1}}


def make(name: str, **options) -> fm.Algorithm:
    task = problems.normed_task() if name in NEEDS_BATCH_NORM else problems.task()
    return fm.ALGORITHMS[name](task, **(NEEDS_BATCH_NORM.get(name, {}) | {"cohort_size": 5} | options))


@cache
def build(name: str) -> tuple[fm.Algorithm, Callable, fm.State]:
    """An algorithm, its compiled round and its first state, shared by all tests of it: compilation is most of what they cost."""
    algorithm = make(name, devices=1, lanes=1)
    return algorithm, jax.jit(algorithm.round), jax.jit(algorithm.init)(KEY, problems.data())


@cache
def adaptation(name: str, known: bool) -> Callable:
    """`(state, data, client) -> (variables that the client tests with, logits, loss on its train view)`, compiled."""
    algorithm = build(name)[0]

    def adapt(state, data, client):
        mine = data.client(client)
        variables = algorithm.personalize(KEY, state, mine["test_support"], client if known else None)
        own = mine["train"].in_order(128).get(0, 0)
        loss = optax.softmax_cross_entropy_with_integer_labels(algorithm.predict(variables, own.x), own.y)
        logits = algorithm.predict(variables, mine["test_query"].in_order(8).get(0, 0).x)
        return variables, logits, jnp.average(loss, weights=own.weight)

    return jax.jit(adapt)


def run(step: Callable, state: fm.State, count: int, data=None) -> fm.State:
    for _ in range(count):
        state, _ = step(jax.random.fold_in(KEY, state.round), state, problems.data() if data is None else data)
    return state


def rounds(algorithm: fm.Algorithm, count: int, state=None) -> fm.State:
    """`count` rounds of an algorithm that is not in the registry's cache."""
    return run(jax.jit(algorithm.round), algorithm.init(KEY, problems.data()) if state is None else state, count)


# All tests of an algorithm run in one process and compile its programs once.
@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in fm.ALGORITHMS])
def name(request) -> str:
    return request.param


def test_a_round_is_pure_and_its_state_never_changes_form(name):
    (_, step, before), data = build(name), problems.data()
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


def test_a_compiled_run_on_another_layout_equals_a_python_loop_and_a_resumed_run_equals_it_bit_for_bit(name):
    # Two lanes on two devices do not divide a cohort of five: some lanes are padding.
    _, step, start = build(name)
    spread, begin = make(name, devices=2, lanes=2), fm.engine.replicate(start, 2)
    places, data = jax.tree.map(lambda leaf: leaf.sharding, begin), problems.data()
    block = jax.jit(
        lambda state, count: fm.simulate.run_rounds(spread, KEY, state, data, count, most=4)[0], out_shardings=places
    )
    whole = block(begin, 4)
    assert problems.leaves_equal(whole, block(block(begin, 1), 3))
    assert block._cache_size() == 1
    assert problems.distance(whole, run(step, start, 4)) < 1e-10


def test_a_round_among_its_cohort_alone_is_the_round_among_all(name):
    """What `fedjax_meta.store` rests on: the rows of the others are needed nowhere, and a client stays who it is."""
    (algorithm, step, start), data = build(name), problems.data()
    before = run(step, start, 3)
    key = jax.random.fold_in(KEY, before.round)
    ids = algorithm.cohort(key, data.num_clients)
    rows = lambda state: {field: jax.tree.map(lambda leaf: leaf[ids], getattr(state, field)) for field in fm.store.ROWS}  # noqa: E731
    whole, info = step(key, before, data)
    part, alone = jax.jit(algorithm.round)(key, before._replace(**rows(before)), data.select(ids))
    assert problems.distance(part, whole._replace(**rows(whole))) < 1e-12
    assert problems.distance(alone.metrics, info.metrics) < 1e-12
    np.testing.assert_array_equal(info.ids, ids)


def test_state_of_clients_that_were_not_sampled_is_untouched(name):
    (_, step, start), data = build(name), problems.data()
    before = run(step, start, 1)
    after, info = step(jax.random.key(8), before, data)
    absent = np.setdiff1d(np.arange(len(problems.SIZES)), np.asarray(info.ids))
    assert absent.size == 2
    for old, new in ((before.personal, after.personal), (before.memory, after.memory), (before.seen, after.seen)):
        assert problems.leaves_equal(
            jax.tree.map(lambda leaf: leaf[absent], old), jax.tree.map(lambda leaf: leaf[absent], new)
        )


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_personalize_is_pure_sees_no_test_label_and_predicts_logits_of_every_class(name, known):
    (_, step, start), data, adapt = build(name), problems.data(), adaptation(name, known)
    # What lies beyond a support view is test data: its labels must change neither training nor adaptation.
    y = np.array(data.y)
    for begin, size in zip(data.start["test_query"], data.size["test_query"], strict=True):
        y[begin : begin + size] = (y[begin : begin + size] + 1) % 3
    relabelled = dataclasses.replace(data, y=y)
    state = run(step, start, 2)
    assert problems.leaves_equal(state, run(step, start, 2, relabelled))
    variables, logits, _ = adapt(state, data, 2)
    assert problems.leaves_equal(variables, adapt(state, relabelled, 2)[0])
    assert logits.shape == (8, 3)
    assert bool(jnp.all(jnp.isfinite(logits)))


def test_training_lowers_the_loss_of_those_who_train(name):
    (_, step, start), data, adapt = build(name), problems.data(), adaptation(name, True)
    before, after = (
        np.mean([adapt(state, data, client)[2] for client in range(data.num_clients)])
        for state in (start, run(step, start, 20))
    )
    assert after < before


def test_a_cohort_larger_than_the_population_is_refused(name):
    algorithm, data = make(name, cohort_size=8), problems.data()
    state = jax.eval_shape(algorithm.init, KEY, data)
    with pytest.raises(ValueError, match="cohort_size=8 is more than the N=7"):
        jax.eval_shape(algorithm.round, KEY, state, data)


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
