"""Runs that diverged have no score, and clients that are not the same are not compared."""

import itertools

import numpy as np
import pytest

from fedjax_meta.study import (
    compare,
    comparison,
    draws,
    figures,
    from_tree,
    phase,
    results,
    run,
    summary,
    targets,
    train,
    tuning,
)
from fedjax_meta.study.study import Tuning
from fedjax_meta.study.tuning import Trial
from tests.study.common import study, tree
from tests.study.test_compare import system, trial


def ended(accuracy, *, seed=0, numbers=None, diverged=None, new=None):
    """A trial whose clients have these accuracies after its last round."""
    return trial(seed, accuracy, new=new)._replace(numbers=numbers or {}, diverged=diverged)


def outcome(name, trials):
    return run.Outcome("pairs", name, [], {}, [], trials)


def validated(accuracy):
    """A row with this accuracy on validation samples."""
    return {"round": 5, "tests": {"validation": ended([accuracy]).rows[-1]["tests"]["known"]}}


def test_a_diverged_trial_never_wins_a_grid_whatever_its_model_scores():
    bad, good = Trial({"lr": 1.0}, 0, [validated(0.9)], 3), Trial({"lr": 0.1}, 0, [validated(0.5)], None)
    for order in itertools.permutations([bad, good]):
        found = tuning.best(order, Tuning())
        assert found.point == {"lr": 0.1} and found.score == pytest.approx(50)
    assert tuning.best([bad], Tuning()).point == {"lr": 1.0}  # there is no other


def test_a_grid_whose_score_is_no_number_anywhere_says_so():
    trials = [Trial({"lr": lr}, 0, [validated(np.nan)], None) for lr in (0.1, 1.0)]
    with pytest.warns(UserWarning, match="accuracy is no number for some client at every point.*the first is taken"):
        assert tuning.best(trials, Tuning()).point == {"lr": 0.1}


def test_halving_keeps_no_point_with_a_seed_that_has_diverged():
    """Two seeds of three points; the best one has a seed that ended."""
    halved = Tuning(rounds=8, seeds=[0, 1], halving=2)
    one = phase.Phase("pairs", "fedavg", "tuning", None, 8, 2, None, {}, {}, tuning=halved)
    numbers = [{"lr": lr} for lr in (0.1, 0.2, 0.3) for _ in range(2)]
    rows = [None, *map(validated, (0.9, 0.5, 0.5, 0.4, 0.4))]
    alive = [False, True, True, True, True, True]
    assert train._cut(one, numbers, rows, alive, 2) == [False, False, True, True, True, True]


def lost(row, at):
    """A row whose model scores well, though in a round before it nobody's update was finite."""
    return {**row, "faults": [{"round": at, "diverged": True}]}


def test_halving_counts_a_point_as_the_worst_that_diverged_and_scores_well():
    halved = Tuning(rounds=8, seeds=[0], halving=2)
    one = phase.Phase("pairs", "fedavg", "tuning", None, 8, 2, None, {"validation": None}, {}, tuning=halved)
    numbers = [{"lr": lr} for lr in (0.1, 0.2, 0.3)]
    rows = [lost(validated(0.9), 4), validated(0.5), validated(0.4)]
    assert train._cut(one, numbers, rows, [True] * 3, 2) == [False, True, True]
    trials = [Trial(point, 0, [row], None) for point, row in zip(numbers, rows, strict=True)]
    assert train._going_on(one, trials, [True] * 3, 5, 2) == [False, True, True]


def test_a_run_that_diverged_reaches_nothing_from_then_on():
    run_ = trial(0, [0.9], [0.3, 0.9, 0.5, 0.9])
    broken = run_._replace(rows=[run_.rows[0], lost(run_.rows[1], 7), *run_.rows[2:]])
    one = compare.Finished("a", "pairs", "abc", [broken])
    assert compare.reached(one, targets.target("80")).rounds.tolist() == [20]
    assert compare.reached(one, targets.target("30")).rounds.tolist() == [5]
    assert not targets.is_reached(broken.rows[:2], targets.target("80"))
    shown = figures._scores(figures.Shown("a", 0, [broken]), "known")
    np.testing.assert_allclose(shown, [[30, np.nan, 50, 90]])


def test_points_are_told_apart_where_halving_ended_some():
    def some(lr, *accuracies, diverged=None):
        rows = [{**validated(accuracy), "round": 5 * number} for number, accuracy in enumerate(accuracies, 1)]
        return Trial({"lr": lr}, 0, rows, diverged)

    same = [some(0.1, 0.4, 0.5), some(0.2, 0.4, 0.5)]
    assert not tuning.told_apart(same, Tuning())
    assert not tuning.told_apart([*same, some(0.3, 0.4)], Tuning())
    assert tuning.told_apart([*same, some(0.3, 0.2)], Tuning())
    assert tuning.told_apart([*same, some(0.3, np.nan, diverged=5)], Tuning())
    gone = [some(lr, 0.3 + lr, np.nan, diverged=10) for lr in (0.1, 0.2)]
    assert not tuning.told_apart(gone, Tuning())
    # Both had another score before they diverged, which is not what they are chosen by.
    assert tuning.told_apart([*gone, some(0.3, 0.4, 0.5)], Tuning())


def test_user_accuracy_ends_at_the_round_in_which_a_run_diverged():
    rows = [{**row, "train": {"user_accuracy": [0.1 * row["round"] / 5] * 5}} for row in trial(0, [0.9], [0.3] * 3).rows]
    rows[1] = lost(rows[1], 7)
    rounds, scores, _ = targets.curve(rows, "user_accuracy")
    np.testing.assert_allclose(scores, [10] * 5 + [20] + [np.nan] * 4 + [30] * 5)
    assert rounds.tolist() == list(range(1, 16))


def test_nobody_is_held_against_a_run_that_diverged():
    fine, gone = system("a", [[0.4, 0.6]]), system("b", [[0.5, 0.5]])
    gone = gone._replace(trials=[one._replace(diverged=2) for one in gone.trials])
    for pair in ((fine, gone), (gone, fine)):
        found = compare.difference(*pair, "known")
        assert np.isnan([found.mean, found.better, found.worse]).all()
    (table,) = [one for one in comparison.tables(compare.compared([gone, fine])) if one.title.startswith("Minus")]
    assert "nan" not in " ".join(itertools.chain(*table.rows)) and "better" not in table.headings


def test_a_loss_that_exploded_is_told_though_its_point_wins_by_accuracy():
    def some(lr, *losses):
        tests = [{"accuracy": [lr], "scores": {"accuracy_mean": lr, "loss": loss}} for loss in losses]
        return Trial({"lr": lr}, 0, [{"round": 5 * i, "tests": {"validation": t}} for i, t in enumerate(tests, 1)], None)

    trials = [some(0.1, 2.0, 0.5), some(1.0, 90.0, 7.7e9), some(0.2, 1.9, 4.0)]
    assert tuning.exploded(trials, {"lr": 1.0}, Tuning()) == 7.7e9
    assert tuning.exploded(trials, {"lr": 0.2}, Tuning()) is None
    assert tuning.exploded([], {}, Tuning()) is None
    # A loss that another point brought down a hundred times is no measure of the beginning.
    assert tuning.exploded([*trials, some(0.3, 2.0, 0.02)], {"lr": 0.2}, Tuning()) is None
    clients = type("Clients", (), {"orders": 1, "new": None})()
    for lr, told in ((1.0, True), (0.2, False)):
        one = outcome("fedavg", [ended([0.9])])._replace(tuning=trials, chosen={"lr": lr})
        assert ("validation loss of 7.7e+09 at the chosen point" in results._remarks(study(), one, clients)) == told
    # A trial of one draw of the clients is none of another draw, which chose the same number.
    apart = outcome("fedavg", [ended([0.9])])._replace(
        tuning=[*trials, *trials], chosen={"lr": 0.2}, draws=({"lr": 0.2}, {"lr": 1.0}), draw_tunings=(trials, trials[:1])
    )
    assert not any("validation loss" in remark for remark in results._remarks(study(), apart, clients))
    without = Trial({"lr": 0.1}, 0, [validated(0.5)], None)
    assert tuning.exploded([without], {"lr": 0.1}, Tuning()) is None


def test_a_remark_says_how_few_clients_had_no_finite_loss():
    """Training went on: only their models are to blame. With all of them, or after a lost round, it says nothing."""
    nan, clients = float("nan"), type("Clients", (), {"orders": 1, "new": None})()

    def first(*of_seeds, faults=()):
        trials = []
        for seed, loss in enumerate(of_seeds):
            one = ended([0.5] * len(loss), seed=seed, diverged=None if np.isfinite(loss).all() else 60)
            one.rows[-1]["tests"]["known"]["loss"], one.rows[-1]["faults"] = loss, faults
            trials.append(one)
        return results._remarks(study(), outcome("fedavg", trials), clients)[0]

    assert first([1.0, nan, 2.0], [1.0, 1.0, 1.0]) == (
        "diverged at round 60 in 1 of 2 seeds: 1 of 3 known clients had no finite loss"
    )
    assert first([1.0, np.inf, 2.0], [nan, nan, 1.0]) == "diverged at round 60: 1 to 2 of 3 known clients had no finite loss"
    assert first([nan, nan]) == "diverged at round 60"
    assert first([1.0, nan], faults=[{"round": 59, "diverged": True}]) == "diverged at round 60"


def test_a_gap_that_is_not_known_is_empty():
    def some(title, **more):
        return compare.Finished(title, "pairs", "abc", [ended([0.9], new=[0.8], **more), ended([0.7], seed=1, new=[0.6])])

    rows = comparison.tables(compare.compared([some("a"), some("b", diverged=3)]))[0].rows
    assert [row[-1] for row in rows] == ["+10.00", ""]


def test_no_table_has_the_score_of_a_diverged_run():
    one = outcome("fedavg", [ended([0.9, 0.7], diverged=1, new=[0.8]), ended([0.5, 0.3], seed=1, new=[0.6])])
    assert np.isnan(summary.values(study(), one, "known")[0]) and summary.values(study(), one, "known")[1] == pytest.approx(40)
    clients = type("Clients", (), {"orders": 1})()
    assert np.isnan(draws.over_orders(one, clients)[0]).all() and draws.over_orders(one, clients)[1, 0] == pytest.approx(60)


def test_clients_of_different_draws_are_different_clients():
    """Each of FedAvg's clients gains in one draw what it loses in the other."""
    drawn = from_tree(tree(data_seeds=[1, 2], seeds=[7]))
    local = outcome("local", [ended([0.5, 0.5]), ended([0.5, 0.5])])
    other = outcome("fedavg", [ended([0.4, 0.7]), ended([0.7, 0.4])])
    assert draws.mean_over_seeds(np.array([[40.0, 70], [70, 40]]), len(drawn.data_seeds)).tolist() == [40, 70, 70, 40]
    assert draws.mean_over_seeds(np.array([[40.0, 70], [60, 50]])).tolist() == [50, 60]
    (row,) = [row for row in results.gains(drawn, [local, other]) if row[2] == "known"][:1]
    assert row[3] == "50 %" and "(client 0, draw 1)" in row[5] and "(client 1, draw 1)" in row[6]


def test_clients_are_compared_by_their_ids():
    def some(title, ids, accuracy):
        found = system(title, [accuracy])
        found.trials[0].rows[-1]["tests"]["known"]["ids"] = ids
        return found

    a, b = some("a", [0, 2, 3], [0.1, 0.2, 0.3]), some("b", [2, 3, 5, 7], [0.5, 0.5, 0.9, 0.9])
    assert compare.difference(b, a, "known").mean == pytest.approx(25)
    assert compare.difference(a, system("all", [[0.1] * 4]), "known").mean == pytest.approx(10)
    assert compare.difference(a, some("c", [1], [0.9]), "known") is None


def test_only_what_has_diverged_has_a_cross_in_figures():
    """A score may be missing in the middle of a run that recovers."""
    from matplotlib.figure import Figure

    def marks(curve, diverged):
        axis = Figure().subplots()
        one = trial(0, [curve[-1]], curve)._replace(diverged=diverged)
        figures.by_round([figures.Shown("a", 0, [one])]).panels[0].draw(axis)
        return [
            (line.get_marker(), *map(float, np.ravel(line.get_data()))) for line in axis.lines if line.get_marker() != "None"
        ]

    nan = float("nan")
    assert marks([0.5, nan, 0.7, 0.8], None) == [("o", 5, 50)]
    assert marks([0.5, 0.6, nan, nan], 13) == [("x", 10, 60)]
    assert marks([0.5, 0.6, 0.7], None) == []
    assert marks([0.5], None) == [("o", 5, 50)]
