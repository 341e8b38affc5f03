"""Contract tests: what holds for every registered method, in every federation."""

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
from fedjax_meta import placement
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import ROWS
from fedjax_meta.masks import Role
from tests import problems

KEY = jax.random.key(3)


FEDERATION = {"cohort_size": 5}


def method_of(name: str, **options) -> fm.Method:
    return fm.METHODS[name](problems.task_of(name), **(problems.TRIED_WITH.get(name, {}) | options))


def make(name: str, **federation) -> fm.Algorithm:
    return fm.federate(method_of(name), fm.Federation(**(FEDERATION | federation)))


@cache
def build(name: str) -> tuple[fm.Algorithm, Callable, fm.State]:
    """An algorithm, its compiled round and its first state, shared by its tests because compilation dominates their time."""
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


# All tests of a method run in one process and compile its programs once.
@pytest.fixture(params=problems.sampled(problems.VARIED, grouped=True))
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
    assert problems.finite(after)


def test_weakly_typed_parameters_are_traced_once():
    init = lambda key: {"w": jax.random.normal(key, (5, 3)), "scale": jnp.array(1.0)}  # noqa: E731
    task = fm.classification(init, lambda p, x: x @ p["w"] * p["scale"], layers=("w", "scale"))
    data = fm.from_clients([(np.ones((8, 5)), np.arange(8) % 3)] * 2, num_classes=3)
    algorithm = fm.federate(fm.fedavg(task), fm.Federation(cohort_size=2))
    step = jax.jit(algorithm.round)
    run(step, algorithm.init(KEY, data), 3, data)
    assert step._cache_size() == 1


def test_a_compiled_run_on_another_layout_equals_a_python_loop_and_a_resumed_run_equals_it_bit_for_bit(name):
    """The other layout has two devices and lanes, which do not divide a cohort of five, and the cohort in reverse."""
    _, step, start = build(name)
    spread = make(name, devices=2, lanes=2, schedule=lambda *given: fm.schedules.uniform(*given)[::-1])
    begin = placement.replicate(start, 2)
    places, data = jax.tree.map(lambda leaf: leaf.sharding, begin), problems.data()
    block = jax.jit(
        lambda state, count: fm.blocks.run_rounds(spread, KEY, state, data, count, most=4)[0], out_shardings=places
    )
    whole = block(begin, 4)
    assert problems.leaves_equal(whole, block(block(begin, 1), 3))
    assert block._cache_size() == 1
    assert problems.distance(whole, run(step, start, 4)) < 1e-10


def test_a_round_needs_only_the_rows_and_data_of_its_cohort(name):
    """A host store rests on this: the rows of other clients are not needed, and a client keeps its id."""
    (algorithm, step, start), data = build(name), problems.data()
    if algorithm.needs_all_rows:
        with pytest.raises(ValueError, match="must be on the device"):
            fm.host_store.check_algorithm(algorithm)
        return
    before = run(step, start, 3)
    key = jax.random.fold_in(KEY, before.round)
    ids = algorithm.cohort(key, before.round, data.num_clients)
    rows = lambda state: {field: problems.at(getattr(state, field), ids) for field in ROWS}  # noqa: E731
    whole, info = step(key, before, data)
    cohort = dataclasses.replace(data.select(ids), drawn=data.num_clients)
    part, alone = jax.jit(algorithm.round)(key, before._replace(**rows(before)), cohort)
    assert problems.distance(part, whole._replace(**rows(whole))) < 1e-12
    assert problems.distance(alone.metrics, info.metrics) < 1e-12
    np.testing.assert_array_equal(info.ids, ids)


def test_state_of_clients_that_were_not_sampled_is_untouched(name):
    (_, step, start), data = build(name), problems.data()
    before = run(step, start, 1)
    after, info = step(jax.random.key(8), before, data)
    absent = np.setdiff1d(np.arange(len(problems.SIZES)), np.asarray(info.ids))
    assert absent.size == 2
    for field in ROWS:
        assert problems.leaves_equal(*(problems.at(getattr(state, field), absent) for state in (before, after)))


def test_a_late_joiner_starts_from_the_servers_model_and_a_fresh_memory(name):
    """What a client that has not taken part would keep is never read, in a round or in a test."""
    (_, step, start), data = build(name), problems.data()
    before = run(step, start, 1)
    late = np.flatnonzero(~np.asarray(before.seen))
    assert late.size == 2

    def spoilt(leaf):
        return (
            leaf.at[late].set(jnp.ones((), leaf.dtype))
            if leaf.dtype == bool
            else leaf.at[late].add(jnp.asarray(7, leaf.dtype))
        )

    other = before._replace(**{field: jax.tree.map(spoilt, getattr(before, field)) for field in ("personal", "memory")})
    adapt = adaptation(name, True)
    assert problems.leaves_equal(adapt(before, data, int(late[0]))[0], adapt(other, data, int(late[0]))[0])
    for number in range(20):
        key = jax.random.key(number)
        (one, info), (two, _) = step(key, before, data), step(key, other, data)
        if set(late.tolist()) <= set(np.asarray(info.ids).tolist()):
            break
    assert problems.leaves_equal(one, two)


def test_frozen_leaves_never_move_and_only_personal_leaves_are_kept(name):
    (_, step, start), method = build(name), method_of(name)
    after = run(step, start, 2)
    frozen = fm.masks.having(method.roles, Role.FROZEN)
    assert problems.leaves_equal(fm.masks.split(after.model, frozen)[0], fm.masks.split(start.model, frozen)[0])
    personal = fm.masks.having(method.roles, Role.PERSONAL)
    assert jax.tree.structure(fm.masks.split(start.model, personal)[0]) == jax.tree.structure(after.personal)
    assert problems.leaves_equal(fm.masks.split(after.model, personal)[0], fm.masks.split(start.model, personal)[0])


PERSONAL = {
    "head": {"fedper", "fedper_meta", "fedmeta_per", "fedmeta_per_metasgd", "fedpac", "fedrep", "pfedhn_pc", "fedas", "gpfl"},
    "body": {"lg_fedavg"},
    "all": {"local_only", "fedfomo", "fedamp", "heur_fedamp", "l2gd", "fedproto", "fedcac"},
    "bn": {"mtfl", "mtfl_fedavg_adam", "fedbn"},
}
"""The personal leaves that each paper has; in the papers of the other methods every leaf of the model is shared."""


BESIDE = {"fedrod": "personal", "pfedhn_pc": "own", "mocha": "weights"}
"""Methods whose model has personal leaves beside those of the task, and how the paths of these begin."""


@pytest.mark.parametrize("name", fm.METHODS)
def test_personal_leaves_are_those_of_the_paper(name):
    method, task = method_of(name), problems.task_of(name)
    found = jax.tree.leaves_with_path(fm.masks.having(method.roles, Role.PERSONAL))
    names = {"/".join(fm.masks.path_names(path)) for path, own in found if own}
    word = next((word for word, methods in PERSONAL.items() if name in methods), "none")
    expected = jax.tree.leaves_with_path(fm.masks.resolve(word, task))
    wanted = {"/".join(fm.masks.path_names(path)) for path, own in expected if own}
    if name in BESIDE:
        assert names and all(path.startswith(BESIDE[name]) for path in names)
        return
    # Rates and slots of personal leaves are personal too.
    said = f"PERSONAL, above, says that the personal leaves of {name} are {sorted(wanted)}, but they are {sorted(names)}"
    assert {path for path in names if any(path.endswith(end) for end in wanted)} == names, said
    assert all(any(path.endswith(end) for path in names) for end in wanted), said


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_personalize_is_pure_sees_no_test_label_and_predicts_logits_of_every_class(name, known):
    (_, step, start), data, adapt = build(name), problems.data(), adaptation(name, known)
    # Labels outside the support view are test data: they must change neither training nor adaptation.
    y = np.array(data.y)
    for begin, size in zip(data.start["test_query"], data.size["test_query"], strict=True):
        y[begin : begin + size] = (y[begin : begin + size] + 1) % 3
    relabelled = dataclasses.replace(data, y=y)
    state = run(step, start, 2)
    assert problems.leaves_equal(state, run(step, start, 2, relabelled))
    variables, logits, _ = adapt(state, data, 2)
    assert problems.leaves_equal(variables, adapt(state, relabelled, 2)[0])
    assert logits.shape == (8, 3)
    assert problems.finite(logits)


def test_training_lowers_the_loss_of_those_who_train(name):
    (_, step, start), data, adapt = build(name), problems.data(), adaptation(name, True)
    before, after = (
        np.mean([adapt(state, data, client)[2] for client in range(data.num_clients)])
        for state in (start, run(step, start, 20))
    )
    assert after < before


ALONE, NARROW = 0, 1


@cache
def odd_clients() -> fm.FederatedData:
    """The data when client ALONE has one sample in each view and client NARROW one class; compiled programs take them too."""
    data = problems.data()
    size = {view: jnp.asarray(sizes).at[ALONE].set(1) for view, sizes in data.size.items()}
    first = int(sum(problems.SIZES[:NARROW]))
    y = jnp.asarray(data.y).at[first : first + int(problems.SIZES[NARROW])].set(1)
    return dataclasses.replace(data, size=size, y=y)


def round_of_both(algorithm: fm.Algorithm, state: fm.State) -> jax.Array:
    """A key with which both odd clients are in the next cohort."""
    drawn = ((key, algorithm.cohort(key, state.round, 7)) for key in map(jax.random.key, range(50)))
    return next(key for key, ids in drawn if {ALONE, NARROW} <= set(np.asarray(ids).tolist()))


def kept_by(state: fm.State, ids) -> list:
    """The personal leaves and the memories of some clients."""
    return problems.at([state.personal, state.memory], ids)


KEEPS_NOTHING_NEW = {"cfl": "its cluster, until that is split", "ifca": "its cluster, where the nearest is the same"}
"""Methods in which a round may leave a client with what it had, and what that is."""


def test_clients_of_one_sample_or_of_one_class_train_and_change_nothing_for_others(name):
    (algorithm, step, start), data, odd = build(name), problems.data(), odd_clients()
    before = run(step, start, 1)
    key = round_of_both(algorithm, before)
    (usual, _), (after, info) = step(key, before, data), step(key, before, odd)
    assert problems.finite(after) and np.all(info.returned) and np.all(np.asarray(info.faults.clients) < 0)
    if jax.tree.leaves(kept_by(before, [ALONE])) and name not in KEEPS_NOTHING_NEW:
        for client in (ALONE, NARROW):
            assert problems.distance(kept_by(after, [client]), kept_by(before, [client])) > 1e-9
    if method_of(name).collaborate is None:  # else clients get something of each other on purpose
        others = np.setdiff1d(np.arange(7), [ALONE, NARROW])
        assert problems.leaves_equal(kept_by(after, others), kept_by(usual, others))
    for known in (True, False):
        for client in (ALONE, NARROW):
            variables, logits, loss = adaptation(name, known)(after, odd, client)
            assert problems.finite((variables, logits, loss))


@pytest.mark.long
def test_a_round_does_not_depend_on_how_many_samples_absent_clients_have(name):
    """Batches are padded to the largest client's: a loss that counts rows of padding as samples shows here.

    The client that trains is the largest at first, and smaller than any usual batch, so that its batches get padding later.
    """
    build_it = lambda: make(name, cohort_size=1, schedule=fm.schedules.given(np.array([[0]])), devices=1, lanes=1)  # noqa: E731
    found = []
    # The random draws of Gibbs sampling have the shape of the padded batch.
    for size in (70, 400) if name == "fedgp" else (9, 400):
        data, algorithm = problems.clients_of([12, 9, 9, 9, 9, 9, size]), build_it()
        state = jax.jit(algorithm.init)(KEY, data)
        state, info = jax.jit(algorithm.round)(KEY, state, data)
        found.append((state.model, state.extra, kept_by(state, [0]), info.metrics))
    assert problems.distance(*found) < 1e-10


AS_IT_IS = {"fedavg", "fedavg_adam", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedprox", "fednova", "feddyn", "scaffold"}
AS_IT_IS |= {"moon", "qfedavg", "afl", "fedper", "fedbn", "mtfl", "mtfl_fedavg_adam", "lg_fedavg", "local_only"}
AS_IT_IS |= {"fedala", "feddbe", "fedcac", "fedrod", "pfedsim", "cfl"}
"""Methods in which a new client does by default nothing with its support set; CFL as long as there is one cluster."""


def test_a_new_client_adapts_to_its_support_set_or_gets_what_the_server_has(name):
    (_, step, start), data, adapt = build(name), problems.data(), adaptation(name, False)
    state, x = run(step, start, 2), np.array(data.x)
    for first, size in zip(data.start["test_support"], data.size["test_support"], strict=True):
        x[first : first + size] *= -1
    mirrored, same = dataclasses.replace(data, x=jnp.asarray(x)), []
    for client in (2, 3):
        variables, logits, _ = adapt(state, data, client)
        same.append(problems.leaves_equal(logits, adapt(state, mirrored, client)[1]))
    assert all(same) == (name in AS_IT_IS), "AS_IT_IS names the methods in which a new client does nothing with its samples"
    model = {"afl": lambda: state.extra.model, "fedcac": lambda: state.extra}.get(name, lambda: state.model)()
    if name in AS_IT_IS - {"cfl"} and jax.tree.structure(variables) == jax.tree.structure(model):
        assert problems.leaves_equal(variables, model)


def test_clients_count_as_the_method_says(name):
    """An aggregator sees the weights of the cohort: they are those of the declared weighting, and of nothing else."""
    method, data = method_of(name), problems.data()
    seen = []

    def aggregator(stacked, weight):
        jax.debug.callback(lambda w: seen.append(np.asarray(w)), weight)
        return jax.tree.map(lambda leaf: leaf[0], stacked)

    algorithm = fm.federate(method, fm.Federation(cohort_size=7, devices=1, lanes=1, aggregator=aggregator))
    # This aggregator keeps nothing, so that the state has the leaves of any federation's.
    start = build(name)[2]._replace(aggregation=jax.eval_shape(algorithm.init, KEY, data).aggregation)
    jax.jit(lambda *given: (algorithm.round(*given), None)[1])(KEY, start, data)  # without the new state, less is compiled
    jax.effects_barrier()
    if not jax.tree.leaves(algorithm.exchange(data).averaged):
        return  # local training, FedFomo: nothing is averaged
    if method.divides_by_statistics or name == "fedproto":
        return  # a client's weights are its amounts, which tests/methods/test_ratios.py compares with the plain mean's
    expected = [float(client_weight(method.weighting, data.client(i))) for i in range(7)]
    assert any(np.allclose(weights, expected) for weights in seen), seen


def test_no_key_is_used_twice(name):
    algorithm, data = build(name)[0], problems.data()
    with jax.debug_key_reuse(True):
        state = jax.eval_shape(algorithm.init, KEY, data)
        jax.jit(algorithm.round).trace(KEY, state, data)
        support = data.client(1)["test_support"]
        for client in (1, None):
            test = lambda key, state, client=client: algorithm.personalize(key, state, support, client)  # noqa: E731
            jax.jit(test).trace(KEY, state)


def test_a_cohort_larger_than_the_population_is_refused(name):
    algorithm, data = make(name, cohort_size=8), problems.data()
    state = jax.eval_shape(algorithm.init, KEY, data)
    with pytest.raises(ValueError, match="cohort_size=8 is more than the N=7"):
        jax.eval_shape(algorithm.round, KEY, state, data)


@pytest.mark.parametrize("name", fm.METHODS)
def test_a_builder_names_itself_and_records_every_option(name):
    builder, algorithm = fm.METHODS[name], make(name)
    assert getattr(fm, name) is builder and builder.__name__ == name and builder.__doc__.strip()
    parameters = list(inspect.signature(builder).parameters.values())
    assert parameters[0].name == "task"
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[1:])
    assert set(algorithm.config) == {"method", "federation", *(p.name for p in parameters[1:])}
    assert algorithm.config["method"] == name and algorithm.config["federation"]["cohort_size"] == 5


def test_a_wrong_option_is_refused_under_the_name_that_was_called(name):
    builder, task = fm.METHODS[name], problems.task()
    option = list(inspect.signature(builder).parameters)[1]
    with pytest.raises(TypeError, match=rf"^{name}\(\) .*{option}x.*did you mean '{option}'"):
        builder(task, **{option + "x": 1})
    with pytest.raises(TypeError, match=rf"^{name}\(\) .*cohort_size.*Federation"):
        builder(task, cohort_size=3)
    with pytest.raises(ValueError, match=f"^{name}'s first argument must be a Task"):
        builder(task.predict)


def test_every_file_of_the_package_is_registered():
    used = {builder.__module__ for builder in fm.METHODS.values()}
    files = {f"fedjax_meta.methods.{module.name}" for module in pkgutil.iter_modules(fm.methods.__path__)}
    assert files == used


def test_nothing_below_imports_a_method():
    above = {"methods", "study", "cli", "__main__"}
    below = [module.name for module in pkgutil.iter_modules(fm.__path__) if module.name not in above]
    for module in below:
        source = inspect.getsource(importlib.import_module(f"fedjax_meta.{module}"))
        assert "fedjax_meta.methods" not in source, module
