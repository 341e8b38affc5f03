"""Clients whose results hold NaN or infinity: the server leaves them out, they keep what they had, and nobody else notices."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.algorithm import ROWS
from fedjax_meta.rounds.trees import first_broken
from tests import problems
from tests.test_contract import KEY, build, make, run

N = len(problems.SIZES)
TRAINS_BY_COIN = {"l2gd"}
"""Methods in whose round a client may not train at all, so that it cannot break."""


@pytest.fixture(params=problems.sampled(problems.VARIED, grouped=True))
def name(request) -> str:
    return request.param


def broken(ids, value=np.nan) -> fm.FederatedData:
    """The data with inputs of some clients that are not finite."""
    data = problems.data()
    x = np.array(data.x)
    for i in ids:
        first = min(int(start[i]) for start in data.start.values())
        x[first : first + problems.SIZES[i]] = value
    return dataclasses.replace(data, x=jnp.asarray(x))


def without(ids) -> fm.FederatedData:
    """The data with no samples of some clients, who then cannot take part."""
    data = problems.data()
    size = {view: jnp.asarray(sizes).at[np.asarray(ids)].set(0) for view, sizes in data.size.items()}
    return dataclasses.replace(data, size=size)


def rows_of(state: fm.State, ids) -> list:
    return problems.at([getattr(state, field) for field in ROWS], ids)


def test_one_broken_client_changes_for_the_others_no_more_than_its_absence(name):
    _, step, start = build(name)
    before = run(step, start, 1)
    _, info = step(jax.random.fold_in(KEY, before.round), before, problems.data())
    sick = [int(info.ids[0])]
    after, absent = (run(step, before, 3, data) for data in (broken(sick), without(sick)))
    others = np.setdiff1d(np.arange(N), sick)
    assert problems.distance(rows_of(after, others), rows_of(absent, others)) < 1e-9
    shared = lambda state: (state.model, state.extra, state.optimizer)  # noqa: E731
    assert problems.distance(shared(after), shared(absent)) < 1e-9
    assert problems.finite(after)


def test_a_broken_client_is_named_and_keeps_what_it_had(name):
    algorithm, step, start = build(name)
    before = run(step, start, 2)
    cohort = np.asarray(algorithm.cohort(jax.random.fold_in(KEY, before.round), before.round, N))
    sick = cohort[1:3]
    after, info = step(jax.random.fold_in(KEY, before.round), before, broken(sick, np.inf))
    assert problems.leaves_equal(rows_of(after, sick), rows_of(before, sick))
    assert not info.faults.diverged and int(info.faults.server) == -1
    if name in TRAINS_BY_COIN:
        return
    assert set(cohort[np.asarray(info.faults.clients) >= 0]) == set(sick)
    assert not np.any(np.asarray(info.returned)[np.isin(cohort, sick)])
    names, _ = algorithm.checked(problems.data())
    assert all(0 <= leaf < len(names) for leaf in np.asarray(info.faults.clients)[np.isin(cohort, sick)])


def test_many_broken_clients_leave_everybody_finite_and_the_run_counts_as_diverged(name):
    _, step, start = build(name)
    state, info = step(KEY, start, broken(range(4)))
    assert problems.finite(state)
    count = int(np.sum(np.asarray(info.ids) < 4))
    whole, everyone = step(KEY, start, broken(range(N)))
    assert problems.finite(whole)
    if name in TRAINS_BY_COIN:
        return
    assert bool(info.faults.diverged) == (count > 2)
    assert bool(everyone.faults.diverged) and not np.any(np.asarray(everyone.returned))
    assert problems.leaves_equal(whole._replace(round=start.round), start)


@cache
def hundred() -> fm.FederatedData:
    rng = np.random.default_rng(0)
    return fm.from_clients([(rng.normal(size=(8, 5)), rng.integers(0, 3, 8)) for _ in range(100)], num_classes=3)


@pytest.mark.parametrize("name", problems.sampled({"ditto"}))
def test_of_a_hundred_clients_any_share_may_break(name):
    """1, 10 or 50 of 100 clients are broken: everybody stays finite, and the others get what they get without these."""
    data = hundred()
    algorithm = make(name, cohort_size=100, devices=1)
    step, start = jax.jit(algorithm.round), jax.jit(algorithm.init)(KEY, data)
    for share in (0.01, 0.1, 0.5):
        sick = np.random.default_rng(1).permutation(100)[: round(100 * share)]
        x = np.array(data.x)
        x.reshape(100, 8, 5)[sick] = np.nan
        size = {view: jnp.asarray(sizes).at[sick].set(0) for view, sizes in data.size.items()}
        after, info = step(KEY, start, dataclasses.replace(data, x=jnp.asarray(x)))
        absent, _ = step(KEY, start, dataclasses.replace(data, size=size))
        others = np.setdiff1d(np.arange(100), sick)
        assert problems.finite(after)
        assert problems.distance(rows_of(after, others), rows_of(absent, others)) < 1e-9
        assert (
            problems.distance((after.model, after.extra, after.optimizer), (absent.model, absent.extra, absent.optimizer))
            < 1e-9
        )
        assert bool(info.faults.diverged) is False
        if name not in TRAINS_BY_COIN:
            assert sorted(np.asarray(info.ids)[np.asarray(info.faults.clients) >= 0]) == sorted(sick)


def test_a_run_reports_who_broke_when_and_where(caplog):
    algorithm = fm.federate(fm.fedavg(problems.task()), fm.Federation(cohort_size=N, devices=1))
    test = fm.simulation.Evaluator(lambda key, state, data: fm.evaluate(algorithm, key, state, data), broken([2]), known=True)
    _, records = fm.simulate(algorithm, broken([2]), key=KEY, rounds=3, eval_every=2, evaluators={"test": test})
    faults = [fault for record in records for fault in record.faults]
    assert [(fault.round, fault.what, fault.clients, fault.diverged) for fault in faults] == [
        (done, "clients left out", (2,), False) for done in (1, 2, 3)
    ]
    assert faults[0].leaf == "['upload'][0]['body']['b']"
    assert "round 1: clients left out (2): ['upload'][0]['body']['b'] is not finite" in caplog.text
    losses = records[-1].evaluations["test"].loss
    assert np.flatnonzero(np.isnan(losses)).tolist() == [2]
    assert np.isnan(records[-1].evaluations["test"].summary()["accuracy_mean"])
    assert np.all(np.isfinite(records[-1].metrics["loss"]))


def test_a_server_that_diverges_is_reported(caplog):
    broken_step = {"server_optimizer": lambda rate: optax.scale(jnp.nan * rate), "server_lr": 1.0}
    federation = fm.Federation(cohort_size=N, devices=1, **broken_step)
    _, records = fm.simulate(
        fm.fedavg(problems.task()), problems.data(), key=KEY, rounds=4, eval_every=4, federation=federation
    )
    first, second, *_ = (fault for record in records for fault in record.faults)
    assert (first.what, first.leaf, first.diverged) == ("server not finite", "['model']['body']['b']", True)
    assert (second.what, second.clients, second.diverged) == ("clients left out", tuple(range(N)), True)
    assert "round 1: server not finite" in caplog.text


def test_broken_clients_may_be_let_in():
    algorithm = fm.federate(fm.fedavg(problems.task()), fm.Federation(cohort_size=N, devices=1, drop_nonfinite=False))
    state, info = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), broken([2]))
    assert not problems.finite(state.model) and int(info.faults.server) >= 0 and bool(info.faults.diverged)
    assert np.all(np.asarray(info.faults.clients) == -1)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_a_weight_that_is_none_is_reported(weight):
    """Of a method of one's own; a client without samples has no say, whatever its method makes of it."""
    method, sizes = fm.fedavg(problems.task()), np.asarray(problems.data().sizes("train"))

    def client(key, received, data):
        trained = method.client(key, received, data)
        odd = (data["train"].size == sizes[2]) | (data["train"].size == 0)
        return trained._replace(weight=jnp.where(odd, weight, data["train"].size))

    algorithm = fm.federate(dataclasses.replace(method, client=client), fm.Federation(cohort_size=N, devices=1))
    sick = [i for i, size in enumerate(sizes) if size == sizes[2]]
    state, info = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), without([0]))
    assert sorted(np.asarray(info.ids)[np.asarray(info.faults.clients) >= 0]) == sick and 0 not in sick
    assert problems.finite(state.model)


@pytest.mark.parametrize("store", [None, "memory"])
def test_an_empty_place_of_a_cohort_is_as_if_it_were_not_there(store):
    """A schedule may draw fewer clients than the cohort has places, as Poisson sampling does."""
    table = jnp.array([[3, -1, 6, -1], [-1, 6, -1, 0], [-1, -1, -1, -1]], jnp.int32)

    def draw(key, round_, num_clients, cohort_size):
        return table[round_]

    def full(key, round_, num_clients, cohort_size):
        return jnp.array([[3, 6], [6, 0]], jnp.int32)[round_]

    method, data = fm.ditto(problems.task()), jax.tree.map(np.asarray, problems.data())
    options = {"key": KEY, "store": store}
    padded = fm.Federation(cohort_size=4, schedule=draw, devices=1)
    exact = fm.Federation(cohort_size=2, schedule=full, devices=1)
    three, records = fm.simulate(method, data, rounds=3, federation=padded, **options)
    two, _ = fm.simulate(method, data, rounds=2, federation=exact, **options)
    assert problems.distance(three._replace(round=two.round), two) < 1e-12
    _, info = fm.federate(method, padded).round(KEY, fm.federate(method, padded).init(KEY, data), data)
    np.testing.assert_array_equal(info.ids, table[0])
    np.testing.assert_array_equal(info.positions, table[0])
    assert np.isnan(records[-1].metrics["loss"][-1]) and not any(record.faults for record in records)


@pytest.mark.parametrize(("late", "diverged"), [((2, 3, 4, 5), True), ((2, 3, 4), False)])
def test_the_share_that_was_left_out_is_one_of_the_results_that_came(late, diverged):
    """Clients 0 and 1 of 7 break: 2 of 3 results that came are more than half, 2 of 4 are not. Late clients sent none."""
    rule = lambda key, id_: fm.Participation(returned=~jnp.isin(id_, jnp.array(late)))  # noqa: E731
    algorithm = fm.federate(fm.fedavg(problems.task()), fm.Federation(cohort_size=N, devices=1, participation=rule))
    _, info = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), broken([0, 1]))
    assert int(np.sum(info.returned)) == N - 2 - len(late)
    assert bool(info.faults.diverged) is diverged


def test_clients_that_took_no_part_are_not_left_out():
    """Client 0 crashes and client 1 does no work; what they would have sent is not finite, and no fault."""
    rule = lambda key, id_: fm.Participation(crashed=id_ == 0, work=jnp.where(id_ == 1, 0.0, 1.0))  # noqa: E731
    federation = fm.Federation(cohort_size=N, devices=1, participation=rule, max_dropped=0.0)
    algorithm = fm.federate(fm.fedavg(problems.task()), federation)
    _, info = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), broken([0, 1]))
    assert int(np.sum(info.returned)) == N - 2
    assert np.all(np.asarray(info.faults.clients) == -1) and not bool(info.faults.diverged)


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_the_share_that_may_be_left_out_is_checked(value):
    with pytest.raises(ValueError, match="max_dropped=.* must lie between 0 and 1"):
        fm.Federation(max_dropped=value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_leaf_that_is_not_finite_is_found_by_one_number_for_all(value):
    """Also where squares overflow, in 16 bits, at the last entry, and for several clients at once."""
    rng = np.random.default_rng(0)
    tree = {
        "a": rng.normal(size=(40, 50)).astype(np.float32),
        "b": np.full(3, 3e4, np.float16),
        "c": np.full(5000, 1e30, np.float32),  # finite, but its squares are not
        "d": np.arange(3),
        "e": rng.normal(size=2000).astype(jnp.bfloat16),
        "f": rng.normal(size=()),
    }
    names = ["a", "b", "c", "e", "f"]  # "d" holds integers
    assert int(jax.jit(first_broken)(tree)) == -1
    assert int(jax.jit(first_broken)({**tree, "c": tree["a"]})) == -1
    for place, name in enumerate(names):
        hurt = {**tree, name: np.array(tree[name])}
        hurt[name].reshape(-1)[-1] = value
        hurt["f"] = np.float64(value)  # a later one too
        assert int(jax.jit(first_broken)(hurt)) == place
        both = jax.tree.map(lambda one, other: np.stack([one, other]), tree, hurt)
        assert jax.jit(jax.vmap(first_broken))(both).tolist() == [-1, place]
