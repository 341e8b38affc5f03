"""A whole run: when it evaluates, that it resumes after a stop, and what its records hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.blocks import run_rounds, schedule
from fedjax_meta.keys import tagged
from fedjax_meta.simulation import Evaluator, simulate
from tests import problems

KEY = jax.random.key(4)


def _client(key, received, data):
    """Half a step, with noise, towards the client's first sample: cheap to compile, and wrong if a key or a leaf is lost."""
    sample = data["train"].in_order(1).get(0, 0).x[0]
    target = sample + jax.random.normal(key, sample.shape)
    model = jax.tree.map(lambda leaf: (leaf + target) / 2, received.model)
    return fm.Trained(model, {"loss": jnp.sum((received.model["own"] - target) ** 2)})


def _build(**personal):
    method = fm.Method(
        init=lambda key: {"shared": jax.random.normal(key, (5,)), "own": jnp.zeros(5)},
        client=_client,
        personalize=lambda key, received, support: received.model,
        predict=lambda model, x: x,
        roles=fm.masks.roles({"shared": False, "own": True} | personal, {"shared": True, "own": True}),
        weighting="uniform",
    )
    return fm.federate(method, fm.Federation(cohort_size=3, devices=1))


# With a personal leaf, so that resuming has more than the server's model to bring back.
ALGORITHM = _build()


def _measure(key, state, scale):
    return {"norm": scale * jnp.sum(state.model["shared"] ** 2), "round": state.round, "draw": jax.random.uniform(key)}


EVALUATORS = {"one": Evaluator(_measure, jnp.array(1.0)), "two": Evaluator(_measure, jnp.array(2.0))}


def _simulate(rounds=7, eval_every=3, **options):
    options = {"evaluators": EVALUATORS} | options
    options = {"key": KEY} | options
    return simulate(ALGORITHM, problems.data(), rounds=rounds, eval_every=eval_every, **options)


def _same(a, b):
    """Whether two lists of records hold the same, but for the clock."""
    return len(a) == len(b) and all(
        problems.leaves_equal((x.round, x.metrics, x.evaluations), (y.round, y.metrics, y.evaluations))
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def whole():
    return _simulate()


@pytest.mark.parametrize(
    ("rounds", "every", "expected"),
    [
        (1, 20, [1]),
        (20, 20, [1, 20]),
        (21, 20, [1, 20, 21]),
        (5, 1, [1, 2, 3, 4, 5]),
        (300, 100, [1, 100, 200, 300]),
        (2, 50, [1, 2]),
    ],
)
def test_the_schedule_is_the_first_every_so_many_and_the_last(rounds, every, expected):
    assert schedule(rounds, every) == expected


def test_records_hold_each_round_once(whole):
    state, records = whole
    assert [record.round for record in records] == [1, 3, 6, 7]
    assert [record.metrics["loss"].size for record in records] == [1, 2, 3, 1]
    for record in records:
        assert record.evaluations["one"]["round"] == record.round
        assert record.evaluations["two"]["norm"] == 2 * record.evaluations["one"]["norm"]
    assert int(state.round) == 7


def test_the_metrics_are_the_cohorts_means_of_a_plain_loop(whole):
    init_key, round_key = tagged(KEY, "init"), tagged(KEY, "rounds")
    state, step, losses = ALGORITHM.init(init_key, problems.data()), jax.jit(ALGORITHM.round), []
    for r in range(7):
        state, info = step(jax.random.fold_in(round_key, r), state, problems.data())
        losses.append(np.mean(info.metrics["loss"]))
    np.testing.assert_allclose(np.concatenate([record.metrics["loss"] for record in whole[1]]), losses, rtol=1e-12)
    assert problems.distance(whole[0], state) < 1e-12


def test_every_evaluator_and_evaluation_has_its_own_key_which_other_evaluators_do_not_change(whole):
    draws = [float(record.evaluations[name]["draw"]) for record in whole[1] for name in EVALUATORS]
    assert len(set(draws)) == len(draws)
    alone = _simulate(rounds=1, evaluators={"two": EVALUATORS["two"]})[1]
    assert alone[0].evaluations["two"]["draw"] == whole[1][0].evaluations["two"]["draw"]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_stopped_run_resumes_as_if_it_had_not_been_stopped(whole, stop):
    saved = []

    class StopError(Exception):
        pass

    def on_record(state, record):
        saved.append((jax.tree.map(np.array, state), record))
        if record.round == stop:
            raise StopError

    with pytest.raises(StopError):
        _simulate(on_record=on_record)
    state, before = saved[-1][0], [record for _, record in saved]
    again, after = _simulate(state=state)
    assert problems.leaves_equal(again, whole[0])
    assert _same(before + after, whole[1])
    # The caller's state was copied, not donated, and can be resumed from again.
    assert problems.leaves_equal(_simulate(state=jax.tree.map(jnp.asarray, state))[0], whole[0])


def test_the_state_at_a_stop_is_intact():
    """The state that a raising callback has seen is not among the buffers that the next block reuses."""
    kept = []

    def on_record(state, record):
        kept.append(state)
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _simulate(on_record=on_record)
    assert int(kept[-1].round) == 3
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(kept[-1].model))


def test_a_run_that_is_stopped_between_evaluations_says_what_it_knows_and_goes_on(whole, monkeypatch):
    monkeypatch.setattr(fm.simulation, "_MOST_AT_ONCE", 2)
    seen, asked = [], []

    def should_stop():
        asked.append(0)
        return len(asked) == 3  # after the first round, after its evaluation, and after at most two more rounds

    on_record = lambda state, record: seen.append(record.round)  # noqa: E731
    state, (first, last) = _simulate(eval_every=7, should_stop=should_stop, on_record=on_record)
    assert seen == [1] and 1 < last.round == int(state.round) <= 3 and not last.evaluations
    again, (rest,) = _simulate(eval_every=7, state=state)
    assert problems.leaves_equal(again, whole[0])
    losses = [np.concatenate([record.metrics["loss"] for record in records]) for records in ((first, last, rest), whole[1])]
    np.testing.assert_array_equal(*losses)


def test_rounds_without_evaluations_take_no_memory_for_each_of_them():
    """A log of 10^9 rounds would not fit anywhere."""
    _, records = _simulate(rounds=2, eval_every=10**9)
    assert [record.round for record in records] == [1, 2]


def test_a_finished_run_has_nothing_to_add(whole):
    state, records = _simulate(state=whole[0])
    assert problems.leaves_equal(state, whole[0]) and records == []


def test_progress_is_reported_without_changing_a_number(whole):
    heard = []
    state, records = _simulate(on_progress=lambda done, metrics: heard.append((done, metrics["loss"])))
    assert problems.leaves_equal(state, whole[0]) and _same(records, whole[1])
    assert heard[-1][0] == 7 and sum(line.size for _, line in heard) == 7
    np.testing.assert_array_equal(
        np.concatenate([line for _, line in heard]), np.concatenate([record.metrics["loss"] for record in records])
    )


def test_compilation_is_counted_once_and_apart():
    def slow(key, state, data):
        # Hundreds of operations: what it takes to compile is far more than what it takes to run.
        del key
        value = data
        for i in range(400):
            value = jnp.sin(value + i)
        return {"value": value + state.round}

    _, records = _simulate(rounds=3, eval_every=1, evaluators={"slow": Evaluator(slow, jnp.array(1.0))})
    assert records[0].compile_seconds > 0
    assert [record.compile_seconds for record in records[1:]] == [0, 0]
    assert records[0].seconds < records[0].compile_seconds
    assert all(record.seconds > 0 for record in records)


def test_an_evaluator_that_fails_does_so_before_anything_is_trained():
    def fails(key, state, data):
        raise ZeroDivisionError("of the evaluator")

    done = []
    with pytest.raises(ZeroDivisionError, match="of the evaluator"):
        _simulate(evaluators={"it": Evaluator(fails, jnp.array(1.0))}, on_progress=lambda number, _: done.append(number))
    assert not done


def test_an_evaluator_is_compiled_beside_the_rounds_with_the_settings_of_the_caller():
    with jax.enable_x64(False):
        data = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), jnp.ones(3, jnp.float32))
        _, records = _simulate(rounds=1, evaluators={"it": Evaluator(lambda key, state, x: state.model["own"][:3] + x, data)})
    (record,) = records
    assert record.evaluations["it"].dtype == np.float32


def test_the_number_of_rounds_may_be_traced_and_the_rest_of_the_log_is_zero():
    start = ALGORITHM.init(KEY, problems.data())
    block = jax.jit(lambda count: run_rounds(ALGORITHM, KEY, start, problems.data(), count, most=4))
    state, log = block(2)
    assert int(state.round) == 2
    assert np.all(np.asarray(log.metrics["loss"])[:2] > 0) and np.all(np.asarray(log.metrics["loss"])[2:] == 0)
    assert int(block(0)[0].round) == 0


BAD = {
    "no rounds": ({"rounds": 0}, "rounds=0 must be an integer of at least 1"),
    "half a round": ({"rounds": 2.5}, "rounds=2.5 must be an integer of at least 1"),
    "a seed for a key": ({"key": 0}, r"key=0 must be a JAX PRNG key: jax.random.key\(0\)"),
    "never": ({"eval_every": 0}, "eval_every=0 must be an integer of at least 1"),
    "another algorithm's state": (
        {"state": _build(shared=True).init(KEY, problems.data())},
        r"state does not fit: .personal\['shared'\] does not belong there",
    ),
    "a state beyond the end": (
        {"state": ALGORITHM.init(KEY, problems.data())._replace(round=jnp.array(8, jnp.int32))},
        "rounds=7, but the state has finished 8 rounds already",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_refused(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        _simulate(**options)


def test_a_method_runs_in_the_default_federation_or_in_a_given_one():
    data = problems.data()
    method = fm.fedavg(problems.task())
    (one, _), (two, _) = (simulate(run, data, key=KEY, rounds=2) for run in (method, fm.federate(method)))
    assert problems.leaves_equal(one, two)
    small, _ = simulate(method, data, key=KEY, rounds=1, federation=fm.Federation(cohort_size=2))
    assert int(jnp.sum(small.seen)) == 2
    for wrong, what in (({"test": fm.evaluate}, "evaluate"), ({"test": 3}, "3")):
        with pytest.raises(TypeError, match=rf"evaluators\['test'\] must be an Evaluator, e.g. fm.Evaluator\(lambda.*{what}"):
            simulate(method, data, key=KEY, rounds=1, evaluators=wrong)
    with pytest.raises(ValueError, match=r"data must be a FederatedData, e.g. fm.from_clients\(...\), not \[1, 2\]"):
        simulate(method, [1, 2], key=KEY, rounds=1)
    with pytest.raises(TypeError, match="this is an algorithm, which has its federation already"):
        simulate(fm.federate(method), data, key=KEY, rounds=1, federation=fm.Federation())
    with pytest.raises(TypeError, match=r"federate takes a method such as fm.fedavg\(task\), not fedavg"):
        simulate(fm.fedavg, data, key=KEY, rounds=1)


def test_evaluation_and_logging_change_no_draw_of_the_training(whole):
    """Keys are folded from tags: a run without evaluators is the same run."""
    assert problems.leaves_equal(_simulate(evaluators={})[0], whole[0])
    assert problems.leaves_equal(_simulate(evaluators={}, eval_every=7)[0], whole[0])


@pytest.mark.parametrize("store", [None, "memory"])
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fednova"])
def test_a_training_on_selected_clients_is_one_on_data_of_these_alone(name, store):
    """Also for methods whose server divides by the number of clients."""
    sizes = [12, 9, 15, 10, 11, 13, 9]
    method = fm.METHODS[name](problems.task(), lr=0.3, batch_size=8)
    trained = [
        simulate(method, data, key=KEY, rounds=3, federation=fm.Federation(cohort_size=2), store=store)[0]
        for data in (problems.clients_of(sizes).select(np.arange(4)), problems.clients_of(sizes[:4]))
    ]
    assert problems.distance(trained[0].model, trained[1].model) < 1e-12
    assert problems.distance(trained[0].extra, trained[1].extra) < 1e-12
