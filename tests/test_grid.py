"""A sweep: many runs as one program, which finds what the runs find one by one."""

import threading
from functools import partial

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.sweeps import Member, MemberEvaluator, Programs, grid, members, sweep
from tests import problems

FEDERATION = fm.Federation(cohort_size=3)


def measured(algorithm, key, state, data):
    return fm.evaluate(algorithm, key, state, data)


def ditto(lr, prox_weight):
    return fm.ditto(problems.task(), lr=lr, prox_weight=prox_weight, epochs=1, batch_size=16)


def run(points=None, seeds=None, **options):
    points = grid(lr=[0.05, 0.2], prox_weight=[0.1]) if points is None else points
    given = {"rounds": 5, "eval_every": 2, "federation": FEDERATION}
    chosen = members(points, seeds=[1, 5] if seeds is None else seeds)
    evaluators = {"local": MemberEvaluator(measured, problems.data())}
    return chosen, *sweep(ditto, chosen, problems.data(), evaluators=evaluators, **(given | options))


def alone(member: Member, rounds=5):
    """The same run by `simulate`."""
    algorithm = fm.federate(ditto(**member.numbers), fm.Federation(cohort_size=3, devices=1))
    measure = lambda key, state, data: measured(algorithm, key, state, data)  # noqa: E731
    tests = {"local": fm.Evaluator(measure, problems.data())}
    key = jax.random.key(member.seed)
    return fm.simulate(algorithm, problems.data(), key=key, rounds=rounds, eval_every=2, evaluators=tests)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("layout", [{"devices": 1}, {"devices": 2}, {"devices": 2, "at_once": 2}], ids=str)
def test_every_member_of_a_sweep_is_the_run_of_its_numbers_and_seed(layout):
    who, state, records = run(**layout)
    assert [str(member) for member in who] == [
        "lr=0.05, prox_weight=0.1, seed 1",
        "lr=0.05, prox_weight=0.1, seed 5",
        "lr=0.2, prox_weight=0.1, seed 1",
        "lr=0.2, prox_weight=0.1, seed 5",
    ]
    for m in (0, 3):
        expected, history = alone(who[m])
        assert problems.distance(jax.tree.map(lambda leaf, m=m: np.asarray(leaf)[m], state), on_host(expected)) < 1e-12
        assert [record.round for record in records[m]] == [record.round for record in history] == [1, 2, 4, 5]
        for mine, its in zip(records[m], history, strict=True):
            assert problems.distance(mine.evaluations, its.evaluations) < 1e-12
            assert problems.distance(mine.metrics, its.metrics) < 1e-12


def test_members_that_do_not_divide_the_devices_are_complete():
    points = grid(lr=[0.05, 0.1, 0.2], prox_weight=[0.1])
    who, state, records = run(points, seeds=[1], rounds=1, devices=2)
    assert len(who) == len(records) == state.round.shape[0] == 3
    assert problems.distance(jax.tree.map(lambda leaf: np.asarray(leaf)[2], state), on_host(alone(who[2], 1)[0])) < 1e-12


def test_a_sweep_resumes_bit_for_bit():
    _, whole, history = run(devices=2)
    saved = []

    def stop(state, done, records):
        if done == 2:
            saved.append(jax.tree.map(np.array, state))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(devices=2, on_record=stop)
    _, again, rest = run(devices=2, state=saved[0])
    assert problems.leaves_equal(again, whole)
    assert [record.round for record in rest[0]] == [4, 5]
    assert problems.leaves_equal(rest[1][-1].evaluations, history[1][-1].evaluations)


def test_progress_is_told_for_all_members():
    seen = []
    run(rounds=3, on_progress=lambda done, metrics: seen.append((done, metrics["loss"].shape[0])))
    assert seen[-1] == (3, 4) and seen[0][0] == 1


@pytest.mark.long
def test_pruned_members_keep_their_state_and_the_others_are_not_changed():
    """Rounds 1, 2, 4, 5: the first two members of four end after round 2; what is left moves to other devices."""
    for layout in ({"devices": 2}, {"devices": 1}, {"devices": 1, "at_once": 2}):
        _, whole, history = run(**layout)
        who, state, records = run(**layout, prune=lambda done, records: [done < 2, done < 2, True, True])
        assert [[record.round for record in mine] for mine in records] == [[1, 2], [1, 2], [1, 2, 4, 5], [1, 2, 4, 5]]
        assert list(np.asarray(state.round)) == [2, 2, 5, 5]
        kept = [jax.tree.map(lambda leaf: np.asarray(leaf)[2:], tree) for tree in (state, whole)]
        assert problems.distance(*kept) < 1e-12
        assert problems.distance(records[3][-1].evaluations, history[3][-1].evaluations) < 1e-12
        expected, _ = alone(who[0], rounds=2)
        assert problems.distance(jax.tree.map(lambda leaf: np.asarray(leaf)[0], state), on_host(expected)) < 1e-12


@pytest.mark.parametrize("at_once", [1, 2])
def test_members_that_are_not_active_rest(at_once):
    _, half, _ = run(rounds=2)
    _, state, records = run(devices=1, at_once=at_once, rounds=4, state=half, active=[True, False, True, False])
    assert np.asarray(state.round).tolist() == [4, 2, 4, 2] and [len(row) for row in records] == [1, 0, 1, 0]
    resting = jax.tree.map(lambda leaf: np.asarray(leaf)[1::2], (state, half))
    assert problems.distance(*resting) == 0


def test_a_pruned_sweep_resumes_bit_for_bit():
    def prune(done, records):
        return [record is not None and (done < 2 or m > 1) for m, record in enumerate(records)]

    saved = []
    _, whole, history = run(devices=2, prune=prune, on_record=lambda state, *_: saved.append(jax.tree.map(np.array, state)))
    _, again, rest = run(devices=2, prune=prune, state=saved[1], active=[False, False, True, True])
    assert problems.leaves_equal(again, whole)
    assert [len(mine) for mine in rest] == [0, 0, 2, 2]
    assert problems.leaves_equal(rest[2][-1].evaluations, history[2][-1].evaluations)


def test_members_that_rest_must_be_named_when_a_sweep_goes_on():
    _, half, _ = run(rounds=2)
    _, pruned, _ = run(rounds=4, state=half, active=[True, False, True, False])
    with pytest.raises(ValueError, match=r"have finished \[4, 2, 4, 2\] rounds: say with active"):
        run(rounds=6, state=pruned)


def test_a_sweep_that_is_stopped_between_evaluations_goes_on_bit_for_bit():
    _, whole, history = run(eval_every=[3])
    asked = []

    def should_stop():
        asked.append(0)
        return len(asked) == 2  # after the second piece of rounds

    _, state, records = run(eval_every=[3], should_stop=should_stop)
    assert 0 < int(state.round[0]) < 5 and [len(mine) for mine in records] == [len(records[0])] * 4
    _, again, rest = run(eval_every=[3], state=jax.tree.map(np.array, state))
    assert problems.leaves_equal(again, whole)
    first, second = (np.concatenate([r.metrics["loss"] for r in mine]) for mine in (records[1] + rest[1], history[1]))
    np.testing.assert_array_equal(first, second)


def test_programs_compiled_on_another_thread_are_those_of_the_sweep():
    chosen = members(grid(lr=[0.05, 0.2], prox_weight=[0.1]), seeds=[1, 5])
    evaluators = {"local": MemberEvaluator(measured, problems.data())}
    programs = Programs(ditto, chosen, problems.data(), federation=FEDERATION, evaluators=evaluators)
    thread = threading.Thread(target=programs.compile)
    thread.start()
    thread.join()
    _, state, _ = run(programs=programs)
    assert programs.waited < 0.05  # nothing was compiled again
    assert problems.leaves_equal(state, run()[1])
    others = fm.from_clients([(np.ones((9, 5)), np.arange(9) % 3)] * 4, num_classes=3)
    for options, words in (
        ({"seeds": [1]}, "programs are of a sweep of other members"),
        ({"federation": fm.Federation(cohort_size=4)}, "programs are of a sweep in another federation"),
        ({"prune": lambda round, records: [True] * 4}, "programs were made without prunes=True"),
        ({"devices": 1}, "programs were made with devices=None, not 1"),
    ):
        with pytest.raises(ValueError, match=words):
            run(programs=programs, **options)
    given = {"rounds": 1, "federation": FEDERATION, "programs": programs}
    with pytest.raises(ValueError, match="programs are of a sweep of other clients"):
        sweep(ditto, chosen, others, evaluators=evaluators, **given)
    for tests in ({}, {"local": MemberEvaluator(measured, others)}):
        with pytest.raises(ValueError, match="programs are of a sweep with other evaluators"):
            sweep(ditto, chosen, problems.data(), evaluators=tests, **given)


BAD = {
    "no points": ({"points": []}, "at least one point and one seed"),
    "no seeds": ({"seeds": []}, "at least one point and one seed"),
    "points that are told apart by a seventh digit": (
        {"points": grid(lr=[0.1, 0.1000001], prox_weight=[0.1])},
        "members must differ in the first six digits of a number",
    ),
    "a seed twice": ({"seeds": [1, 1]}, "a sweep has the member lr=0.05, prox_weight=0.1, seed 1 twice"),
    "points of other names": (
        {"points": [{"lr": 0.1, "prox_weight": 1.0}, {"lr": 0.1}]},
        "all members must name the same numbers",
    ),
    "a rate that is refused": ({"points": grid(lr=[0.1, -1.0], prox_weight=[0.1])}, "lr=-1.0 must be finite and above 0"),
    "no interval": ({"eval_every": np.int64(0)}, "eval_every=0 must be an integer of at least 1"),
    "a round that is none": ({"eval_every": [0, 2]}, "eval_every=0 must be an integer of at least 1"),
    "nobody goes on": ({"prune": lambda done, records: [False] * 4}, "and keep one"),
    "no rounds": ({"rounds": 0}, "rounds=0 must be an integer of at least 1"),
}


KINDS = {
    "a method": ({"build": fm.fedavg(problems.task())}, "must be a function of a member's numbers"),
    "a pair": ({"members": [({"lr": 0.1}, 0)]}, r"members must be what sweeps.members\(points, seeds\) gives"),
    "a list of tests": ({"evaluators": [1]}, r"evaluators=\[1\] must be a mapping of names to sweeps.MemberEvaluator"),
    "a test of one run": (
        {"evaluators": {"a": fm.Evaluator(measured, None)}},
        r"evaluators\['a'\] must be a sweeps.MemberEval",
    ),
    "a record too few": ({"on_record": lambda state, record: None}, r"on_record must be a function \(state, round, records\)"),
    "a round too few": ({"prune": lambda records: [True]}, r"prune must be a function \(round, records\)"),
}


@pytest.mark.parametrize(("options", "words"), KINDS.values(), ids=KINDS)
def test_arguments_of_another_kind_are_refused_before_anything_is_trained(options, words):
    given = {"build": partial(fm.fedavg, problems.task()), "members": members([{"lr": 0.1}], [0])} | options
    with pytest.raises(ValueError, match=words):
        sweep(data=problems.data(), rounds=1, federation=FEDERATION, **given)


def test_members_may_come_one_by_one():
    who = members([{"lr": 0.1}, {"lr": 0.2}], [0])
    state, records = sweep(partial(fm.fedavg, problems.task()), iter(who), problems.data(), rounds=1, federation=FEDERATION)
    assert state.round.shape == (2,) and len(records) == 2


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(options, words):
    with pytest.raises(ValueError, match=words):
        run(**options)


def test_a_number_that_decides_the_program_is_refused_in_one_line():
    def build(noise):
        return fm.fedpac(problems.task(), noise=noise, epochs=1, batch_size=16)

    with pytest.raises(ValueError, match="a number of this sweep decides what its program is") as error:
        sweep(build, members(grid(noise=[0.1, 0.2]), [1]), problems.data(), rounds=1, federation=FEDERATION)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda v: {"attack": fm.attacks.sign_flip(v)}, "a number of this sweep decides what its program is"),
        (lambda v: {"attack": fm.attacks.sign_flip(0.5, seed=v)}, "seed decides what a program is"),
        (lambda v: {"uploads": (fm.uploads.quantize(v),)}, "bits decides what a program is"),
        (lambda v: {"aggregator": fm.aggregate.krum(v)}, "f decides what a program is"),
        (lambda v: {"cohort_size": v}, "cohort_size decides what a program is"),
    ],
    ids=["attackers", "seed", "bits", "f", "cohort_size"],
)
def test_an_option_that_decides_the_program_is_named(options, words):
    def build(v):
        federation = fm.Federation(**{"cohort_size": 3, **options(v)})
        return fm.fedavg(problems.task(), lr=0.1, batch_size=16), federation

    with pytest.raises(ValueError, match=words) as error:
        sweep(build, members(grid(v=[0.3, 0.6] if "sweep" in words else [1, 2]), [1]), problems.data(), rounds=1)
    assert "\n" not in str(error.value)


def test_a_state_of_another_sweep_is_refused():
    _, state, _ = run(rounds=1, seeds=[1], points=grid(lr=[0.1], prox_weight=[0.1]))
    with pytest.raises(ValueError, match="state does not fit"):
        run(state=state)
