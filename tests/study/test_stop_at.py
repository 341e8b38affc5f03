"""Runs that end at a target: each is a run without one up to the evaluation after which the target was reached."""

import numpy as np
import pytest

from fedjax_meta.study import from_tree, results, run, targets
from fedjax_meta.study.check import check
from tests.study.common import Silent, study, tree
from tests.study.test_study import without_clocks

SYSTEM = {"fedavg": {"method": "fedavg", "options": {"epochs": 1, "batch_size": 20, "lr": 0.05}}}


def made(**changes):
    return study(systems=SYSTEM, rounds=6, user_accuracy="train", **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(the study's clients, its outcome without a target)."""
    built = run.build(made())
    return built, run.run(made(), tmp_path_factory.mktemp("whole"), watcher=Silent(), clients=built)[0]


def between(whole):
    """(a user accuracy that one seed has reached in the first round and the other has not, which of them)."""
    best = [trial.rows[0]["train"]["user_accuracy"][0] for trial in whole.final]
    assert abs(best[0] - best[1]) > 1e-3
    return 50 * sum(best), int(np.argmax(best))


def wanted_end(trial, value):
    """The first evaluation, after rounds 1, 2, 4 and 6, at which the target has been reached."""
    curve = [share for row in trial.rows for share in row["train"]["user_accuracy"]]
    hit = next((number for number, share in enumerate(curve, 1) if 100 * share >= value), 6)
    return next(at for at in (1, 2, 4, 6) if at >= hit)


def test_each_seed_ends_after_its_target_and_is_unchanged_until_then(whole, tmp_path):
    built, free = whole
    value, first = between(free)
    chosen = made(stop_at=f"user_accuracy={value}")
    (found,) = run.run(chosen, tmp_path / "run", watcher=Silent(), clients=built)
    ends = [trial.rows[-1]["round"] for trial in found.final]
    assert ends == [wanted_end(trial, value) for trial in free.final]
    assert ends[first] == 1 < max(ends)
    for one, other in zip(found.final, free.final, strict=True):
        kept = [row["train"] for row in one.rows]
        assert kept == [row["train"] for row in other.rows][: len(kept)]
        last = other.rows[len(kept) - 1]["tests"]["known"]["loss"]
        assert one.rows[-1]["tests"]["known"]["loss"] == last
    # Interrupted after the first evaluation, and by a finished run: the same.
    with pytest.raises(KeyboardInterrupt):
        run.run(chosen, tmp_path / "again", watcher=Silent(stop_at=1), clients=built)
    for _ in range(2):
        (again,) = run.run(chosen, tmp_path / "again", watcher=Silent(), clients=built)
        assert without_clocks([again]) == without_clocks([found])
    (line,) = [row for row in results.lines(chosen, "pairs", built["pairs"], [found]) if row.title == "fedavg"]
    some = "" if all(targets.is_reached(trial.rows, chosen.goal) for trial in found.final) else " in 1 of 2 seeds"
    assert f"reached user_accuracy={value}{some}, ended at round 1" in line.remark
    with pytest.raises(ValueError, match="cannot resume: stop_at was"):
        run.run(made(), tmp_path / "run", watcher=Silent(), clients=built)


def test_a_target_of_the_main_score_with_a_store(whole, tmp_path):
    built, free = whole
    rows = free.final[0].rows
    scores = [100 * row["tests"]["known"]["scores"]["accuracy_mean"] for row in rows]
    value = (scores[0] + max(scores)) / 2
    chosen = study(systems=SYSTEM, rounds=6, store="host", devices=1, seeds=[1], stop_at=value)
    (found,) = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    end = next(row["round"] for row, score in zip(rows, scores, strict=True) if score >= value)
    assert found.final[0].rows[-1]["round"] == end > 1


def test_a_target_that_nobody_reaches_changes_nothing(whole, tmp_path):
    built, free = whole
    chosen = made(stop_at="user_accuracy=100")
    (found,) = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    assert without_clocks([found]) == without_clocks([free])
    assert "never reached user_accuracy=100" in results.lines(chosen, "pairs", built["pairs"], [found])[0].remark


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_at": "high"}, "stop_at='high' must be a number, or SCORE=NUMBER"),
        ({"stop_at": True}, "stop_at=True must be a number"),
        ({"stop_at": [80]}, "must be a number, or SCORE=NUMBER"),
        ({"stop_at": "nan"}, "stop_at=nan"),
        ({"stop_at": "=80"}, "stop_at='=80' must be a number, or SCORE=NUMBER"),
        ({"stop_at": "user_accuracy=95"}, "needs user_accuracy, which is not recorded of fedavg"),
        ({"stop_at": "user_accuracy=95", "user_accuracy": {"fedavg": "train"}}, "is not recorded of local"),
    ],
)
def test_bad_targets_get_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        from_tree(tree(**fields))
    assert "\n" not in str(error.value)


def test_a_goal_that_is_not_measured_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="stop_at: score='acuracy' is unknown"):
        study(stop_at="acuracy=90")
    chosen = study(stop_at="rmse=0.9", rounds=2)
    with pytest.raises(ValueError, match="the score 'rmse' is not measured; there are accuracy"):
        run.run(chosen, tmp_path / "run", watcher=Silent())
    assert not (tmp_path / "run" / "results").exists()


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        (0.95, "is below 1 %: shares are in percent, so write 95"),
        ("accuracy=0.95", "is below 1 %: shares are in percent, so write 95"),
        ("f1=0.95", "is below 1 %: shares are in percent, so write 95"),
        ("user_accuracy=0.95", "is below 1 %: shares are in percent, so write 95"),
        (101, "is never reached: shares are in percent"),
        ("f1=100.5", "is never reached: shares are in percent"),
        ("user_accuracy=900", "is never reached: shares are in percent"),
    ],
)
def test_a_share_that_is_not_in_percent_is_refused_before_anything_is_trained(goal, words, tmp_path):
    """Nearly every run would end at its first evaluation, or none."""
    with pytest.raises(ValueError, match=f"stop_at=.* {words}"):
        run.run(study(stop_at=goal, user_accuracy="train"), tmp_path / "run", watcher=Silent())
    assert not (tmp_path / "run" / "results").exists()


@pytest.mark.parametrize("goal", ["loss=0.95", "calibration_error=0.95"])
def test_a_small_target_of_another_score_is_taken(goal):
    chosen = study(stop_at=goal, metrics=["accuracy", "calibration_error"])
    check(chosen, run.build(chosen))
