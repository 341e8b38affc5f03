"""A sweep: many runs as one program, which finds what the runs find one by one."""

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.sweeps import Member, MemberEvaluator, grid, members, sweep
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


BAD = {
    "no points": ({"points": []}, "at least one point and one seed"),
    "no seeds": ({"seeds": []}, "at least one point and one seed"),
    "a seed twice": ({"seeds": [1, 1]}, "a sweep has the member lr=0.05, prox_weight=0.1, seed 1 twice"),
    "points of other names": (
        {"points": [{"lr": 0.1, "prox_weight": 1.0}, {"lr": 0.1}]},
        "all members must name the same numbers",
    ),
    "a rate that is refused": ({"points": grid(lr=[0.1, -1.0], prox_weight=[0.1])}, "lr=-1.0 must be finite and above 0"),
    "no rounds": ({"rounds": 0}, "rounds=0 must be an integer of at least 1"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(options, words):
    with pytest.raises(ValueError, match=words):
        run(**options)


def test_a_state_of_another_sweep_is_refused():
    _, state, _ = run(rounds=1, seeds=[1], points=grid(lr=[0.1], prox_weight=[0.1]))
    with pytest.raises(ValueError, match="state does not fit"):
        run(state=state)
