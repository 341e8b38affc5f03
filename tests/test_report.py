"""Reports: compact records against scores computed from labels, tables and figures."""

import io
import json
import math
import re

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from sklearn.metrics import accuracy_score, f1_score

from fedjax_meta import report
from fedjax_meta.evaluation import Evaluation
from fedjax_meta.faults import Fault
from fedjax_meta.report import curves
from fedjax_meta.simulation import Record

CLIENTS, CLASSES = 6, 5
ACCURACY, RMSE = report.Kind("accuracy", True, True), report.Kind("rmse", False, False)


@pytest.fixture(scope="module")
def predictions():
    """(true, predicted) labels of clients of unequal size that hold two classes each, with some predictions of other classes."""
    rng = np.random.default_rng(0)
    clients = []
    for client in range(CLIENTS):
        own = rng.permutation(CLASSES)[:2]
        true = np.concatenate([own, rng.choice(own, 7 + 5 * client)])
        guess = np.where(rng.random(true.size) < 0.6, true, rng.integers(0, CLASSES, true.size))
        clients.append((true, guess))
    return clients


def record(predictions, done=1, seconds=1.5):
    confusion = np.zeros((CLIENTS, CLASSES, CLASSES), np.int32)
    for client, (true, guess) in enumerate(predictions):
        np.add.at(confusion[client], (true, guess), 1)
    losses = np.linspace(0.1, 1.7, CLIENTS, dtype=np.float32)
    metrics = {"loss": np.array([1 / 3, 0.1], np.float32)}
    return Record(done, metrics, {"a/local": Evaluation(confusion, losses)}, seconds, 0.25)


def test_compact_keeps_every_client(predictions):
    """Accuracy and F1 of each client agree with scikit-learn on the labels, post-processed as in FedMeta-Per."""
    row = json.loads(json.dumps(report.compact(record(predictions))))
    test = row["tests"]["a/local"]
    np.testing.assert_allclose(test["accuracy"], [accuracy_score(*pair) for pair in predictions], rtol=1e-6)
    scores = []
    for true, guess in predictions:
        own = set(true.tolist())
        other = [g if g in own else (own - {t}).pop() for t, g in zip(true.tolist(), guess.tolist(), strict=True)]
        scores.append(f1_score(true, other, average="macro"))
    np.testing.assert_allclose(test["f1"], scores, rtol=1e-6)
    np.testing.assert_allclose(test["scores"]["f1_std"], np.std(scores), rtol=1e-6)
    pooled = [np.concatenate(labels) for labels in zip(*predictions, strict=True)]
    assert test["scores"]["accuracy"] == pytest.approx(accuracy_score(*pooled), rel=1e-6)
    np.testing.assert_array_equal(test["confusion"], record(predictions).evaluations["a/local"].confusion)


def test_compact_keeps_every_float32_exactly(predictions):
    row = json.loads(json.dumps(report.compact(record(predictions))))
    np.testing.assert_array_equal(np.float32(row["train"]["loss"]), record(predictions).metrics["loss"])
    np.testing.assert_array_equal(np.float32(row["tests"]["a/local"]["loss"]), record(predictions).evaluations["a/local"].loss)


def test_without_confusion_drops_only_the_matrices(predictions):
    row = report.compact(record(predictions))
    light = report.without_confusion(row)
    assert "confusion" in row["tests"]["a/local"]
    assert set(row["tests"]["a/local"]) - set(light["tests"]["a/local"]) == {"confusion"}
    assert {**light, "tests": None} == {**row, "tests": None}


def a_series(title, clients, seed=1, means=(10.0, 60.0, 90.0), by_client=(80.0, 90.0, 100.0)):
    rounds = np.array([1, 20, 40])[: len(means)]
    return report.Series(title, clients, seed, ACCURACY, rounds, np.array(means), np.array(by_client))


def test_series_are_means_over_clients_in_percent(predictions):
    """The clients are of unequal sizes, so that a mean over samples is another number."""
    rows = [report.compact(record(predictions, done)) for done in (1, 20)]
    one = report.series("A", "local", 3, rows, "a/local")
    assert one.rounds.tolist() == [1, 20]
    accuracy = [100 * accuracy_score(*pair) for pair in predictions]
    np.testing.assert_allclose(one.by_client, accuracy, rtol=1e-6)
    np.testing.assert_allclose(one.means, np.mean(accuracy), rtol=1e-6)
    assert abs(100 * rows[-1]["tests"]["a/local"]["scores"]["accuracy"] - one.means[-1]) > 0.1


def test_a_run_that_diverged_has_no_line_in_any_group(predictions):
    """New clients may have finite losses when the known ones have none any more."""
    known, new = rows_of(predictions, [1, math.nan, math.nan]), rows_of(predictions, [1, 1, 1])
    rows = [
        {**a, "tests": {"known": a["tests"]["a/local"], "new": b["tests"]["a/local"]}} for a, b in zip(known, new, strict=True)
    ]
    for one in (report.series("A", "new", 1, rows, "new"), report.series("A", "new", 1, rows, "new", run="known")):
        assert np.isfinite(one.means).tolist() == [True, False, False] and one.diverged == 20
        assert np.isnan(one.by_client).all()
    alone = report.series("A", "new", 1, rows, "new", run="new")
    assert np.isfinite(alone.means).all() and alone.diverged is None


def test_a_series_takes_the_records_of_simulate(predictions):
    records = [record(predictions), record(predictions, 20)]
    one, same = (report.series("A", "new", 3, rows, "a/local") for rows in (records, [report.compact(r) for r in records]))
    assert one.rounds.tolist() == [1, 20] and one.means.tolist() == same.means.tolist()
    np.testing.assert_array_equal(one.by_client, same.by_client)


def test_a_series_leaves_out_rounds_that_no_evaluation_ended(predictions):
    """`should_stop` ended the run there: the record holds training metrics alone."""
    first, last = record(predictions, 1), record(predictions, 20)
    stopped = first._replace(round=7, evaluations={})
    whole = report.series("A", "new", 3, [first, last], "a/local")
    for rows in ([first, stopped], [first, stopped, last], [stopped, last]):
        one = report.series("A", "new", 3, rows, "a/local")
        assert one.rounds.tolist() == [row.round for row in rows if row.evaluations]
        np.testing.assert_array_equal(one.by_client, whole.by_client)
    with pytest.raises(ValueError, match="rows hold no evaluation of A: the run was stopped before"):
        report.series("A", "new", 3, [stopped], "a/local")
    with pytest.raises(ValueError, match="a figure needs a series at least"):
        report.save_figure("figure.png", [], title="none")


def test_a_series_needs_rows_and_a_known_test(predictions):
    with pytest.raises(ValueError, match="no evaluation"):
        report.series("A", "local", 1, [], "a/local")
    with pytest.raises(ValueError, match=r"test='b/local' is not a test of this run; it has a/local"):
        report.series("A", "local", 1, [report.compact(record(predictions))], "b/local")


def test_over_seeds():
    mean, std = report.over_seeds([90.0, 92.0, 97.0])
    assert mean == pytest.approx(93)
    assert std == pytest.approx(np.sqrt((9 + 1 + 16) / 2))
    assert np.isnan([*report.over_seeds([1.0, math.nan]), *report.over_seeds([1.0, math.inf])]).all()


def test_markdown_has_one_line_a_row():
    text = report.markdown_table(["a\nb", "c"], [["x", "1"], ["y", "2"]])
    assert text.splitlines() == ["| a b | c |", "|:---|---:|", "| x | 1 |", "| y | 2 |"]


@pytest.mark.parametrize("clients", [("local",), ("local", "new")])
@pytest.mark.parametrize("seeds", [1, 3])
def test_figure_shows_every_method(clients, seeds, tmp_path):
    titles = ["FedAvg", "FedPer", "FedMeta"]
    drawn = [
        a_series(title, group, seed, means=(10.0, 60.0 + 10 * number + seed, 80.0 + 5 * number))
        for number, title in enumerate(titles)
        for group in clients
        for seed in range(seeds)
        if not (title == "FedPer" and group == "new")
    ]
    path = tmp_path / "made" / "figure.png"
    report.save_figure(path, drawn, title="A title")
    image = matplotlib.image.imread(path)[..., :3]
    assert image.shape[1] > image.shape[0] / 2 > 200
    for number in range(len(titles)):
        distance = np.abs(image - np.array(to_rgb(report.COLORS[number]))).max(-1)
        assert (distance < 0.02).sum() > 100


@pytest.mark.parametrize("means", [(50.0,), (math.nan, 50.0), (50.0, math.nan, 60.0), (math.nan, 50.0, math.nan)])
def test_points_without_neighbours_are_dots(means, tmp_path):
    nothing = a_series("A", "local", means=[math.nan] * len(means), by_client=[math.nan])
    shown = [inked(one, tmp_path) for one in (nothing, a_series("A", "local", means=means, by_client=[math.nan]))]
    # Ticks are grey, too.
    assert shown[1] - shown[0] > 20 * np.isfinite(means).sum()


def inked(one, folder):
    """How many pixels of the upper half of a figure have the colour of its system."""
    report.save_figure(folder / "figure.png", [one], title="T")
    image = matplotlib.image.imread(folder / "figure.png")[..., :3]
    return (np.abs(image[: image.shape[0] // 2] - np.array(to_rgb(report.COLORS[0]))).max(-1) < 0.1).sum()


def axis_of_curves(monkeypatch, tmp_path, drawn, title="T"):
    """The axes that a figure of one group of clients has (curves, clients), and its title."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    report.save_figure(tmp_path / "figure.png", drawn, title=title)
    return (*kept[0].axes, kept[0])


@pytest.mark.parametrize(
    ("means", "inside"), [((10.0, 60.0), True), ((10.0, 60.0, 90.0), True), ((10.0, 60.0, 80.0, 90.0), False)]
)
def test_few_evaluations_are_all_in_the_frame(means, inside, monkeypatch, tmp_path):
    one = a_series("A", "local")._replace(means=np.array(means), rounds=np.arange(1, len(means) + 1))
    axis = axis_of_curves(monkeypatch, tmp_path, [one])[0]
    assert (axis.get_ylim()[0] < 10) == inside and axis.get_ylim()[0] < 60


def test_a_long_title_stays_within_the_figure(monkeypatch, tmp_path):
    title = ", ".join(f"FEDAVG(lr=0.{number}, epochs=10)" for number in range(11))
    figure = axis_of_curves(monkeypatch, tmp_path, [a_series("A", "local")], title)[2]
    figure.canvas.draw()
    box = figure._suptitle.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert figure._suptitle.get_text().startswith("FEDAVG(lr=0.0, epochs=10)")


def rmse_series(title, means, by_client):
    return a_series(title, "local", means=means, by_client=by_client)._replace(kind=RMSE)


def test_one_blown_up_system_leaves_the_others_readable(monkeypatch, tmp_path):
    """The two good systems lie between 0.5 and 3: they must fill the axes, and the other's number must be there."""
    drawn = [
        rmse_series("A", (3.0, 2.0, 1.0), (0.5, 1.0, 1.5)),
        rmse_series("B", (3.0, 2.5, 2.0), (1.5, 2.0, 3e13)),
        rmse_series("C", (3.0, 1e7, 3e15), (1e15, 3e15, 5e15)),
    ]
    by_round, by_client, _ = axis_of_curves(monkeypatch, tmp_path, drawn)
    for (low, high), (least, most), words in (
        (by_round.get_ylim(), (1.0, 3.0), ["3e+15"]),
        (by_client.get_xlim(), (0.5, 2.0), ["3e+13", "3 up to 5e+15"]),
    ):
        assert low < least and most < high and (most - least) / (high - low) > 0.8
        axis = by_round if words == ["3e+15"] else by_client
        texts = [text.get_text() for text in axis.texts]
        assert all(word in texts for word in words)
    # Without it, nothing is left out, and shares never are.
    whole = axis_of_curves(monkeypatch, tmp_path, [drawn[0]])[0]
    assert whole.get_ylim()[1] > 3 and not whole.texts


def test_higher_scores_end_at_the_bottom():
    r2 = report.Kind("r2", True, False)
    low, high = curves.limits([np.array([0.1, 0.5]), np.array([0.0, 0.9]), np.array([0.0, -1e9])], r2)
    assert -0.1 < low < 0 and 0.9 < high < 1
    assert curves.limits([np.array([0.1, 0.5]), np.array([0.0, -5.0])], r2) is None
    assert curves.limits([np.array([math.nan])], r2) is None
    assert curves.limits([np.array([50.0]), np.array([0.0])], ACCURACY) is None


def test_crosses_do_not_hide_each_other():
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    axis.set(xlim=(0, 40), ylim=(0, 100))
    ended = [
        curves.Drawn(np.array([1, 20, 40]), np.array(means), "red")
        for means in ([10.0, 50.0, np.nan], [90.0, 50.0, np.nan], [10.0, 90.0, np.nan], [np.nan] * 3, [500.0, np.nan, np.nan])
    ]
    curves.crosses(axis, ended)
    places = [tuple(line.get_transform().transform(np.transpose(line.get_data()))[0]) for line in axis.lines]
    apart = [np.hypot(a[0] - b[0], a[1] - b[1]) for i, a in enumerate(places) for b in places[:i]]
    assert len(places) == 5 and min(apart) > 8
    # At their last finite point; without one at the bottom, and never out of the frame.
    ends = [tuple(map(float, np.ravel(line.get_data()))) for line in axis.lines]
    assert ends == [(20, 50), (20, 50), (20, 90), (1, 0), (1, 100)]


def test_a_figure_names_means_over_clients_and_whole_rounds(tmp_path):
    few = a_series("A", "local", means=(50.0, 60.0))._replace(rounds=np.array([1, 2]))
    report.save_figure(tmp_path / "figure.svg", [few], title="T")
    text = (tmp_path / "figure.svg").read_text()
    words = re.findall(r"<!-- (.*?) -->", text)
    assert "accuracy, %, mean over clients" in words and "over samples" not in text
    ticks = words[: words.index("round")]
    assert ticks and all(tick.isdecimal() for tick in ticks)


def test_a_seed_that_ended_early_counts_at_the_later_rounds_of_the_others():
    assert report.common_rounds([[1, 10, 15], [1, 10, 20, 30]]).tolist() == [1, 10, 20, 30]
    assert report.places([1, 10, 15], np.array([1, 10, 20, 30])).tolist() == [0, 1, 2, 2]


# What is not finite.


def test_a_client_without_a_finite_loss_counts_as_nan_in_every_score(predictions):
    """Its predictions are the argmax of NaN, class 0: they must enter neither its own accuracy nor a mean."""
    one = record(predictions)
    losses = np.array(one.evaluations["a/local"].loss)
    for bad in (np.nan, np.inf):
        losses[2] = bad
        broken = one._replace(evaluations={"a/local": one.evaluations["a/local"]._replace(loss=losses)})
        test = report.compact(broken)["tests"]["a/local"]
        for score in ("accuracy", "f1"):
            assert np.flatnonzero(np.isnan(test[score])).tolist() == [2]
        assert all(math.isnan(value) for name, value in test["scores"].items() if name != "loss")
        assert not math.isfinite(test["scores"]["loss"])


def test_metrics_are_strict_json_and_become_numbers_again():
    values = {"a": [0.1, math.nan, (math.inf, -math.inf)], "b": None, "c": True, "d": "text", "e": 3}
    text = json.dumps(report.strict({"name": "x", "result": values}), allow_nan=False)
    part = report.numbers_again(json.loads(text, parse_constant=pytest.fail))
    a = part["result"].pop("a")
    assert part == {"name": "x", "result": {"b": None, "c": True, "d": "text", "e": 3}}
    np.testing.assert_array_equal([*a[:2], *a[2]], [0.1, np.nan, np.inf, -np.inf])


def rows_of(predictions, losses, faults=()):
    """Rows of `compact` at rounds 10, 20, ... with these losses of the first client, and faults by round."""
    rows = []
    for number, loss in enumerate(losses, 1):
        one = record(predictions, 10 * number)
        evaluation = one.evaluations["a/local"]
        mine = tuple(fault for fault in faults if 10 * (number - 1) < fault.round <= 10 * number)
        evaluation = evaluation._replace(loss=np.array([loss, *evaluation.loss[1:]], np.float32))
        rows.append(report.compact(one._replace(evaluations={"a/local": evaluation}, faults=mine)))
    return json.loads(json.dumps(rows))


@pytest.mark.parametrize(
    ("losses", "faults", "expected"),
    [
        ([1, 1, 1], [], None),
        ([1, math.nan, math.inf], [], 20),
        ([math.nan, 1, math.nan], [], 30),
        ([math.nan, math.nan, 1], [], None),  # recovered
        ([1, 1, 1], [Fault(7, "clients left out", (1,), "w", False)], None),  # a client left out is no divergence
        ([1, 1, 1], [Fault(7, "server not finite", (), "w", True)], None),  # recovered
        ([1, 1, 1], [Fault(25, "clients left out", (0, 1), "w", True)], 25),
        ([1, math.nan, math.nan], [Fault(14, "server not finite", (), "w", True), Fault(15, "x", (), "w", True)], 14),
    ],
)
def test_the_round_of_divergence(predictions, losses, faults, expected):
    rows = rows_of(predictions, losses, faults)
    assert report.diverged(rows, "a/local") == expected
    assert report.series("A", "local", 1, rows, "a/local").diverged == expected


def test_a_metric_that_has_no_value_for_a_client_is_no_divergence():
    """The recall of a class that a client lacks; without a loss, nothing else says whether a run diverged."""
    scores = {"loss": 0.5, "accuracy_mean": 0.8, "recall_mean": math.nan}
    row = {"round": 3, "faults": [], "tests": {"known": {"scores": scores}}}
    assert report.diverged([row], "known") is None
    assert report.diverged([row | {"tests": {"known": {"scores": scores | {"loss": math.nan}}}}], "known") == 3
    del scores["loss"]
    assert report.diverged([row], "known") == 3


def test_rows_of_a_broken_off_block_precede_the_next_one(predictions):
    """Metrics and faults are joined in order, times added, and tests are those of the second row."""
    faults = [Fault(number, "clients left out", (number,), "w", False) for number in (1, 2)]
    first = report.compact(record(predictions, 1, seconds=1.0)._replace(evaluations={}, faults=(faults[0],)))
    then = report.compact(record(predictions, 2, seconds=2.0)._replace(faults=(faults[1],)))
    whole = report.joined(first, then)
    assert (whole["round"], whole["seconds"], whole["compile_seconds"], whole["tests"]) == (2, 3.0, 0.5, then["tests"])
    assert whole["train"]["loss"] == first["train"]["loss"] + then["train"]["loss"]
    assert [fault["round"] for fault in whole["faults"]] == [1, 2]
    assert report.joined(None, then) is then


def test_a_metric_that_rounds_before_did_not_have_is_unknown_there():
    first = {
        "round": 2,
        "seconds": 1.0,
        "compile_seconds": 0.0,
        "train": {"loss": [3.0, 2.0], "cluster": [0.5, 0.5]},
        "faults": [],
    }
    then = {**first, "round": 3, "train": {"loss": [1.0], "cluster_0": [0.25]}}
    assert report.joined(first, then)["train"] == {"loss": [3.0, 2.0, 1.0], "cluster_0": [None, None, 0.25]}


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_figure_marks_what_diverged(seeds, all_of_them, tmp_path):
    """NaN scores, runs of unequal length, and a system of which nothing is finite."""
    nan = math.nan
    drawn = [a_series("A", "local", seed) for seed in range(seeds) if not all_of_them]
    drawn += [
        a_series("B", "local", 0, (nan, nan), (nan, nan, nan))._replace(diverged=1),
        a_series("C", "local", 0, (20.0, 30.0, nan), (40.0, nan, 60.0))._replace(diverged=35),
    ]
    drawn += [a_series("C", "local", 1)] * (seeds - 1)
    report.save_figure(tmp_path / "figure.svg", drawn, title="T")
    text = (tmp_path / "figure.svg").read_text()
    assert "diverged at round 1" in text
    assert ("diverged at round 35 in 1 of 2 seeds" if seeds == 2 else "diverged at round 35") in text


def test_equal_titles_are_refused(tmp_path):
    """They would be merged into one row of a table and one line of a figure."""
    twice = [a_series("A", "local", 1), a_series("A", "new", 1), a_series("A", "local", 2), a_series("A", "local", 1)]
    report.save_figure(tmp_path / "figure.svg", twice[:3], title="T")
    with pytest.raises(ValueError, match=r"two systems have the title 'A' \(local, seed 1\)"):
        report.save_figure(tmp_path / "other.svg", twice, title="T")
    assert not (tmp_path / "other.svg").exists()


def test_dollars_in_a_title_are_no_formula(tmp_path):
    title = r"cost $\foo$ x"
    report.save_figure(tmp_path / "figure.svg", [a_series(title, r"new $\foo$", 1)], title=title)
    assert (tmp_path / "figure.svg").exists()


def test_a_mean_and_its_deviation_have_the_same_decimals():
    kind = report.Kind("rmse", False, False)
    for mean, deviation, words in [
        (12.34567, 0.0123, "12.346 ±0.012"),
        (8123.4, 251.0, "8123 ±251"),
        (0.5, 0.0, "0.5000 ±0.0000"),
        (1e-9, 2e-10, "1e-09 ±2e-10"),
        (3.14159, float("nan"), "3.142"),
        (float("nan"), 1.0, ""),
    ]:
        assert kind.spread(mean, deviation) == words
    assert report.Kind("accuracy", True, True).spread(81.234, 0.5) == "81.23 ±0.50"


def test_nothing_in_a_table_is_taken_for_markup():
    from rich.console import Console

    cells = ["[bold]a[/bold]", "x|y\nz", "[/]"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.rich_table("[red]t[/red]", cells, [cells]))
    shown = console.export_text()
    assert shown.count("[bold]a[/bold]") == shown.count("[/]\n") == 2
    assert "[red]t[/red]" in shown
    lines = report.markdown_table(cells, [cells]).splitlines()
    assert len(lines) == 3
    assert lines[2] == r"| \[bold\]a\[/bold\] | x\|y z | \[/\] |"


def test_every_judgement_follows_the_direction_of_the_score():
    mine, base = np.array([1.0, 5.0, 3.0]), np.array([2.0, 4.0, 3.0])
    assert ACCURACY.gain(mine, base).tolist() == [-1, 1, 0] and RMSE.gain(mine, base).tolist() == [1, -1, 0]
    values = [2.0, np.nan, 9.0, 1.0, 9.0, 1.0]
    assert ACCURACY.best(values) == 2 and RMSE.best(values) == 3 and RMSE.best([np.nan, np.inf]) == 0
    many = np.arange(20.0)
    assert np.isnan([kind.worst_tenth(np.append(many, bad)) for kind in (ACCURACY, RMSE) for bad in (np.nan, np.inf)]).all()
    assert ACCURACY.worst_tenth(many) == 0.5 and RMSE.worst_tenth(many) == 18.5 and RMSE.worst_tenth(mine) == 5
    scores = np.array([0.5, 0.9, np.nan, 1.1])
    assert ACCURACY.reaches(scores, 0.9).tolist() == [False, True, False, True]
    assert RMSE.reaches(scores, 0.9).tolist() == [True, True, False, False]
    assert ACCURACY.direction == "" and "lower is better" in RMSE.direction


def test_shares_are_in_percent_and_other_scores_are_as_they_are():
    assert (ACCURACY.label, ACCURACY.points, RMSE.label, RMSE.points) == (
        "accuracy, %", "points of accuracy", "rmse", "rmse",
    )  # fmt: skip
    assert ACCURACY.spread(81.234, 1.5) == "81.23 ±1.50" and RMSE.spread(0.012345, 0.00123) == "0.0123 ±0.0012"
    assert ACCURACY.spread(float("nan"), 0.0) == "" and RMSE.spread(1.0, float("nan")) == "1"


def test_a_score_by_its_name():
    score = {"values": [2.0, 4.0], "higher_is_better": False, "share": False}
    test = {
        "accuracy": [0.5, 1.0], "f1": [0.2, 0.4], "loss": [1.0, 3.0], "metrics": {"perplexity": score},
        "scores": {"accuracy": 0.9, "accuracy_mean": 0.75, "f1_mean": 0.3, "loss": 2.0, "perplexity_mean": 3.0},
    }  # fmt: skip
    assert report.score_names(test) == ["accuracy", "perplexity", "f1", "loss"]
    assert (report.main_score(test).overall, report.main_score(test).mean) == (90, 75)
    f1, perplexity, loss = (report.main_score(test, name) for name in ("f1", "perplexity", "loss"))
    assert f1.values.tolist() == [20, 40] and f1.mean == f1.overall == pytest.approx(30)
    assert perplexity.values.tolist() == [2, 4] and perplexity.mean == 3 and not perplexity.kind.higher_is_better
    assert loss.values.tolist() == [1, 3] and loss.mean == 2 and not loss.kind.higher_is_better
    with pytest.raises(ValueError, match="score='rmse' is unknown"):
        report.main_score(test, "rmse")


def test_a_tenth_of_17_clients_is_two_of_them():
    assert report.Kind("accuracy", True, True).worst_tenth(np.arange(17.0)) == 0.5


def test_the_band_of_a_share_ends_at_100():
    axis, values = Figure().subplots(), np.array([[99.0, 99.0], [80.0, 80.0], [100.0, 100.0]])
    curves.draw(axis, np.arange(2), values, report.Kind("accuracy", True, True), color="C0")
    assert axis.collections[0].get_paths()[0].vertices[:, 1].max() == 100
