"""How a point of a grid is chosen: held-out clients, halving, grids that move on."""

import itertools
from functools import partial

import numpy as np
import pytest

from fedjax_meta import report
from fedjax_meta.data import holdout
from fedjax_meta.study import System, phase, results, run, tuning
from tests.study.common import TREE, Silent, study


def tuned(tmp_path, grid, **changes):
    fedavg = TREE["systems"]["fedavg"]
    options = {name: value for name, value in fedavg["options"].items() if name not in grid}
    systems = {"fedavg": {**fedavg, "options": options, "grid": grid}}
    chosen = study(systems=systems, rounds=2, seeds=[1], tuning={"rounds": 8, **changes})
    return chosen, run.run(chosen, tmp_path, watcher=Silent())[0]


def samples(data, views=None):
    return {
        position
        for view in views or data.views
        for start, size in zip(np.asarray(data.start[view]), np.asarray(data.size[view]), strict=True)
        for position in range(int(start), int(start + size))
    }


def test_clients_that_are_held_out_never_train_and_nobody_sees_a_test_sample():
    chosen = study(tuning={"validation": "both", "clients": 0.25})
    clients = chosen.scenarios["pairs"].build()
    rest, held = tuning.data_for(chosen.tuning, chosen.scenarios["pairs"], clients)
    assert (rest.num_clients, held.num_clients, set(held.views)) == (6, 2, {"support", "query"})
    assert not samples(rest) & samples(held)
    assert samples(rest) | samples(held) == samples(clients.train, ["train"])
    same, nobody = tuning.data_for(study().tuning, chosen.scenarios["pairs"], clients)
    assert same is clients.tuning and nobody is None
    few = study(tuning={"validation": "clients", "clients": 0.01}).tuning
    with pytest.raises(ValueError, match="clients=0.01 of 8 known clients holds out nobody"):
        tuning.data_for(few, chosen.scenarios["pairs"], clients)


def test_clients_that_are_held_out_are_those_of_the_scenario_s_seed_and_adapt_on_its_share():
    """Noisy clients are the same ones, wherever they end up."""
    place = {**TREE["scenarios"]["pairs"], "seed": 5, "support": 0.5}
    chosen = study(scenarios={"pairs": place}, tuning={"validation": "clients", "clients": 0.5})
    clients = chosen.scenarios["pairs"].build()._replace(noisy=np.array([0, 2, 3, 7]))
    given = chosen.tuning, chosen.scenarios["pairs"], clients
    (rest, held), (trains, waits) = tuning.data_for(*given), tuning.noisy_in(*given)
    assert len(trains) and len(waits) and np.ptp([held.sizes(view) for view in ("support", "query")], 0).max() <= 1
    parts = (rest, trains), (held, waits), (clients.tuning, clients.noisy)
    of_rest, of_held, noisy = (samples(holdout.as_population(*part)) for part in parts)
    assert of_rest | of_held == noisy
    found = holdout.held_out(clients.tuning.num_clients, 0.5, 5)[0]
    assert samples(held) == samples(holdout.as_population(clients.tuning, found))


@pytest.mark.parametrize("where", ["samples", "clients", "both"])
def test_the_choice_is_by_the_score_that_the_study_names(where):
    def trial(lr, seed, samples, clients):
        tests = {"validation": samples, "validation clients": clients}
        return tuning.Trial(
            {"lr": lr},
            seed,
            [{"round": 5, "tests": {k: {"accuracy": [v], "scores": {"accuracy_mean": v}} for k, v in tests.items()}}],
            None,
        )

    trials = [
        trial(0.1, 0, 0.9, 0.1), trial(0.1, 1, 0.7, 0.1), trial(0.2, 0, 0.1, 0.8), trial(0.2, 1, 0.1, 0.8),
        trial(0.3, 0, 0.6, 0.6), trial(0.3, 1, 0.6, 0.6), trial(0.4, 0, 1.0, 1.0), trial(0.4, 1, float("nan"), float("nan")),
    ]  # fmt: skip
    chosen = study(tuning={"validation": where}).tuning
    assert tuning.best(trials, chosen).point == {"lr": {"samples": 0.1, "clients": 0.2, "both": 0.3}[where]}


def test_halving_stops_the_worse_half_and_every_grid_of_a_size_gets_the_same_rounds(tmp_path):
    assert tuning.rungs(16, 40, 2) == {5: 8, 10: 4, 20: 2} and tuning.rungs(9, 30, 3) == {10: 3}
    assert tuning.rungs(2, 40, 2) == tuning.rungs(4, 40, None) == {} and tuning.rungs(4, 1, 2) == {}
    grid = {"lr": [1e-5, 0.003, 0.03, 0.1]}
    _, whole = tuned(tmp_path / "whole", grid, eval_every=100)
    _, halved = tuned(tmp_path / "halved", grid, halving=2)
    last = {trial.numbers["lr"]: trial.rows[-1]["round"] for trial in halved.tuning}
    score = {t.numbers["lr"]: next(r for r in t.rows if r["round"] == 4) for t in halved.tuning}
    by_score = sorted(score, key=lambda lr: -tuning.score(score[lr], study().tuning)[0])
    assert last == {lr: 8 if lr in by_score[:2] else 4 for lr in grid["lr"]}
    # Those that go on are the runs that they would have been, however often these are evaluated; an early end wins nothing.
    assert [row["round"] for row in whole.tuning[0].rows] == [1, 8]
    assert [row["round"] for row in whole.final[0].rows] == [1, 2]
    ends = {t.numbers["lr"]: t.rows[-1]["tests"]["validation"]["accuracy"] for t in whole.tuning}
    for trial in halved.tuning:
        if trial.rows[-1]["round"] == 8:
            assert trial.rows[-1]["tests"]["validation"]["accuracy"] == ends[trial.numbers["lr"]]
    assert halved.chosen == whole.chosen


def test_the_rounds_of_trials_are_those_of_all_points_and_seeds_up_to_where_halving_ended_them():
    whole, halved = (study(tuning={"rounds": 8, "seeds": [0, 1], "halving": halving}) for halving in (None, 2))
    assert tuning.rounds_of_trials(5, whole) == 5 * 8 * 2 and tuning.rounds_of_trials(1, whole) == 0
    # Three go on after 2 rounds, and two after 4.
    assert tuning.rounds_of_trials(5, halved) == (5 * 2 + 3 * 2 + 2 * 4) * 2


def test_the_table_says_where_no_point_of_a_grid_beat_a_constant_prediction(tmp_path):
    """A model that does not move, whose trials score what each client's most frequent label scores, or a bit more."""
    chosen, outcome = tuned(tmp_path, {"lr": [1e-9, 1e-8]}, validation="both", clients=0.25)
    place = chosen.scenarios["pairs"]
    clients = place.build()
    rest, held = tuning.data_for(chosen.tuning, place, clients)

    def most_frequent(data, seen, asked):
        labels, shares = np.asarray(data.y), []
        for i in range(data.num_clients):
            own, other = (
                labels[int(data.start[view][i]) : int(data.start[view][i]) + int(data.size[view][i])] for view in (seen, asked)
            )
            shares.append(np.mean(other == np.bincount(own).argmax()))
        return float(np.mean(shares))

    floors = {
        "validation": most_frequent(rest, "train", "test"),
        "validation clients": most_frequent(held, "support", "query"),
    }
    for step, told in ((0.0, True), (-0.02, True), (0.02, False)):
        for trial in outcome.tuning:
            for group, floor in floors.items():
                trial.rows[-1]["tests"][group]["scores"]["accuracy_mean"] = floor + step
        (line, *_) = results.lines(chosen, "pairs", clients, [outcome])
        assert "no better than the majority class" in line.remark
        assert (", nor was any point of its grid when it was tuned: begin the grid elsewhere" in line.remark) == told


def ends(outcome):
    """Of each trial: numbers, seed, rounds, and all validation scores."""
    rows = [(t.numbers, t.seed, [(r["round"], r["tests"]["validation"]["accuracy"]) for r in t.rows]) for t in outcome.tuning]
    return rows, outcome.chosen


@pytest.mark.long
def test_halving_compares_all_points_however_they_are_grouped(tmp_path, monkeypatch):
    """Memory for all members, for three and for one, of a grid whose points one program holds."""
    grid, changes = {"lr": [1e-5, 0.1, 1e-4, 0.05, 0.003, 0.03]}, {"halving": 2, "seeds": [0, 1]}
    whole = ends(tuned(tmp_path / "whole", grid, **changes)[1])
    assert {rounds[-1][0] for _, _, rounds in whole[0]} == {2, 4, 8}
    for together in (3, 1):
        monkeypatch.setattr(phase, "_in_memory", lambda _, some, n=together: [some[i : i + n] for i in range(0, len(some), n)])
        assert ends(tuned(tmp_path / str(together), grid, **changes)[1]) == whole


def test_halving_compares_points_of_different_programs(tmp_path):
    """Numbers of passes shape a program: four points in two programs, of which the two worst end, wherever they are."""
    grid = {"lr": [1e-6, 0.1], "epochs": [1, 2]}
    _, halved = tuned(tmp_path, grid, halving=2)
    last = {tuple(trial.numbers.values()): trial.rows[-1]["round"] for trial in halved.tuning}
    assert last == {(1e-6, 1): 4, (1e-6, 2): 4, (0.1, 1): 8, (0.1, 2): 8}


def test_halving_over_programs_goes_on_where_it_was_stopped(tmp_path):
    """Stopped again and again, so also between two groups and before a rung."""
    grid = {"lr": [1e-6, 0.1, 0.03], "epochs": [1, 2]}
    chosen, whole = tuned(tmp_path / "whole", grid, halving=2)
    stops = 0
    while True:
        answers = itertools.chain([False] * (2 + 3 * stops), itertools.repeat(True))
        try:
            (found,) = run.run(chosen, tmp_path / "stopped", watcher=Silent(), should_stop=partial(next, answers))
            break
        except run.Stopped:
            stops += 1
    assert stops > 1 and ends(found) == ends(whole)


def test_the_rounds_of_trials_grow_unless_halving_has_cut_points_after_parts_of_them(tmp_path):
    grid = {"lr": [1e-5, 0.003, 0.1]}
    tuned(tmp_path / "halved", grid, rounds=2, halving=2)
    words = r"holds another study: tuning.rounds \(halving ends trials after parts of them\) was 2 and is 4 now"
    with pytest.raises(ValueError, match=words):
        tuned(tmp_path / "halved", grid, rounds=4, halving=2)
    # Two points are never cut.
    for name, values, halving in (("whole", grid["lr"], None), ("two", grid["lr"][1:], 2)):
        tuned(tmp_path / name, {"lr": values}, rounds=2, halving=halving)
        _, more = tuned(tmp_path / name, {"lr": values}, rounds=4, halving=halving)
        assert {trial.rows[-1]["round"] for trial in more.tuning} == {4}


def test_points_that_halving_compared_are_not_compared_with_others_later(tmp_path):
    """A point goes on with all of its seeds or none, and every point is judged after the same rounds."""
    grid = {"lr": [1e-5, 1e-4, 0.003, 0.1]}
    tuned(tmp_path, grid, rounds=4, halving=2)
    for values, seeds in ((grid["lr"], [0, 1]), (grid["lr"][:3], [0]), ([*grid["lr"], 0.2], [0])):
        with pytest.raises(ValueError, match=r"cannot resume: compared by halving.*was .* and is .* now"):
            tuned(tmp_path, {"lr": values}, rounds=4, halving=2, seeds=seeds)
    for values, seeds in ((grid["lr"][2:], [0]), (grid["lr"], [0, 1])):  # nothing is cut, or was
        tuned(tmp_path / "whole", {"lr": values}, rounds=2, seeds=seeds)


def test_ties_go_to_the_earlier_point_and_seeds_stay_together():
    points = [{"lr": 0.1}, {"lr": 0.1}, None, None, {"lr": 0.3}, {"lr": 0.3}, {"lr": 0.4}, {"lr": 0.4}]
    accuracy, values = report.Kind("accuracy", True, True), [0.5, 0.5, 9, 9, 0.1, 0.9, 0.9, 0.0]
    assert tuning.goes_on(points, values, 1, accuracy) == [True, True, *[False] * 6]
    # Of errors the least goes on, and what diverged does not.
    rmse = report.Kind("rmse", False, False)
    assert tuning.goes_on(points, [0.5, 0.5, 9, 9, 0.1, 0.7, 0.9, 0.0], 1, rmse) == [*[False] * 4, True, True, False, False]
    assert tuning.goes_on(points[::4], [np.nan, 7.0], 1, rmse) == [False, True]


def test_a_grid_moves_on_by_its_own_ratio_until_the_best_is_inside(tmp_path):
    grid = {"lr": [0.01, 0.02]}
    _, fixed = tuned(tmp_path / "fixed", grid)
    assert fixed.at_edge == ["lr"] and len(fixed.tuning) == 2
    _, moved = tuned(tmp_path / "moved", grid, extend=2)
    assert [trial.numbers["lr"] for trial in moved.tuning] == [0.01, 0.02, 0.04, 0.08]
    assert moved.chosen == {"lr": 0.08} and moved.at_edge == ["lr"]  # the stated limit
    # The same folder goes further, and what is finished is not trained again.
    watcher = Silent()
    chosen = study(
        systems={"fedavg": {**TREE["systems"]["fedavg"], "grid": grid}},
        rounds=2,
        seeds=[1],
        tuning={"rounds": 8, "extend": 20},
    )
    (inside,) = run.run(chosen, tmp_path / "moved", watcher=watcher)
    assert inside.at_edge == [] and len(inside.tuning) > 4


def test_a_grid_is_searched_by_the_main_score_of_the_study(tmp_path):
    """Of steps that are too long the loss is the worst and the accuracy the best."""

    def trials(name, lrs, **options):
        systems = {"fedavg": {**TREE["systems"]["fedavg"], "grid": {"lr": lrs}}}
        options = {"rounds": 2, "seeds": [0], **options}
        chosen = study(systems=systems, rounds=1, seeds=[1], main="loss", tuning=options)
        (outcome,) = run.run(chosen, tmp_path / name, watcher=Silent())
        last = {trial.numbers["lr"]: trial.rows[-1] for trial in outcome.tuning}
        return outcome.chosen["lr"], last

    best, moved = trials("moved", [0.05, 10.0], extend=1)
    means = {lr: row["tests"]["validation"]["scores"]["accuracy_mean"] for lr, row in moved.items()}
    assert list(moved) == [0.05, 10.0, 0.00025] and max(means, key=means.get) == 10 and best == 0.05
    best, halved = trials("halved", [0.005, 0.05, 10.0], halving=2)
    assert {lr: row["round"] for lr, row in halved.items()} == {0.005: 2, 0.05: 2, 10.0: 1} and best == 0.05


def test_what_a_grid_cannot_move_on_to():
    clients = study().scenarios["pairs"].build()
    ditto = System(method="ditto", grid={"prox_weight": [0.0, 1.0, 3.0], "lr": [0.1, 0.2]}, federation={"cohort_size": 4})
    points = tuning.points_of(ditto)
    assert tuning.next_points(points, {"prox_weight": 0.0, "lr": 0.1}, ditto, clients) == [
        {"prox_weight": weight, "lr": 0.05} for weight in (0.0, 1.0, 3.0)
    ]  # not below 0
    both = tuning.next_points(points, {"prox_weight": 3.0, "lr": 0.2}, ditto, clients)
    assert [list(point.values()) for point in both] == [
        [9.0, 0.1], [9.0, 0.2], [0.0, 0.4], [1.0, 0.4], [3.0, 0.4], [9.0, 0.4],
    ]  # fmt: skip
    assert tuning.next_points(points, {"prox_weight": 1.0, "lr": 0.1}, ditto, clients)[0]["lr"] == 0.05
    apfl = System(method="apfl", grid={"share": [0.3, 0.9]}, federation={"cohort_size": 4})
    assert tuning.next_points(tuning.points_of(apfl), {"share": 0.9}, apfl, clients) == []  # 2.7 is refused


def test_the_text_says_how_it_was_tuned_and_that_grids_differ():
    systems = {**TREE["systems"], "ditto": {"method": "ditto", "grid": {"lr": [0.1, 0.2, 0.3]}}}
    text = tuning.words(
        study(systems=systems, tuning={"validation": "both", "halving": 2, "extend": 3, "rounds": 7}), ["accuracy"]
    )
    for words in (
        "searched by accuracy (mean over clients) on",
        "held out (0.2 of them)",
        "after 7 rounds",
        "best 1/2 went on",
        "up to 3 times",
        "fedavg: 2 points; ditto: 3 points",
    ):
        assert words in text
    assert tuning.words(study(systems={"local": TREE["systems"]["local"]}), ["accuracy"]) == ""
    by_metric = study(systems=systems, tuning={"metric": "accuracy"})
    assert "by accuracy (over all samples) on" in tuning.words(by_metric, ["f1"])
    several = tuning.words(study(systems=systems), ["token_accuracy", "rmse", "rmse"])
    assert "by token accuracy and rmse (mean over clients) on" in several


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"validation": "client"}, "tuning: validation='client' is unknown .did you mean 'clients'"),
        ({"clients": 1.0}, "tuning: clients=1.0"),
        ({"halving": 1}, "tuning: halving=1 must be an integer of at least 2"),
        ({"extend": -1}, "tuning: extend=-1 must be an integer of at least 0"),
    ],
)
def test_bad_input_gets_one_line(given, words):
    with pytest.raises(ValueError, match=words):
        study(tuning=given)


def test_the_table_says_where_a_grid_cannot_move_on(tmp_path):
    """The pull of Ditto is best at 0, below which there is nothing."""
    systems = {"ditto": {"method": "ditto", "grid": {"prox_weight": [0.0, 50.0]}, "options": {"lr": 0.1, "batch_size": 20}}}
    chosen = study(systems=systems, rounds=2, seeds=[1], tuning={"rounds": 3, "extend": 2})
    built = run.build(chosen)
    (found,) = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    remarks = results.lines(chosen, "pairs", built["pairs"], [found])[0].remark
    assert len(found.tuning) == 2 and found.chosen == {"prox_weight": 0.0}, found.chosen
    assert "best prox_weight at the end of its grid, from which it cannot move on" in remarks
