"""Studies of regression, tokens and several labels: chosen, ranked and reported by their own scores, whichever way is better."""

import copy
import csv
import dataclasses
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fedjax_meta as fm
from fedjax_meta import report
from fedjax_meta.cli import app
from fedjax_meta.data import holdout, pooled
from fedjax_meta.study import compare, comparison, from_tree, index, page, results, run
from fedjax_meta.study.scenario import Clients
from tests.study.common import TREE, Silent, study, tree

OPTIONS = {"epochs": 2, "batch_size": 8}
SYSTEMS = {
    "fedavg": {"method": "fedavg", "options": OPTIONS, "grid": {"lr": [0.1, 1e-6]}},
    "local": {"method": "local_only", "options": {**OPTIONS, "lr": 0.1}, "title": "Local only"},
}
close = fm.measures.mean("close", lambda outputs, y: jnp.abs(outputs - y) < 0.5, share=True)


def clients_of(task, samples, **options):
    data = fm.from_clients(samples, **options)
    train, new = holdout.new_clients(data, 0.25, seed=1)
    return Clients(task, train, holdout.validation_samples(train, 0.25), new, "clients of a test", "", "abc")


def regression():
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(8):
        x = rng.normal(size=(24, 3))
        samples.append((x, x @ np.array([1.0, -2.0, 0.5]) + 3 + 0.3 * rng.normal() + 0.1 * rng.normal(size=24)))
    task = fm.regression(
        lambda key: {"w": 0.1 * jax.random.normal(key, (3,)), "b": jnp.zeros(())}, lambda p, x: x @ p["w"] + p["b"]
    )
    return clients_of(task, samples, num_classes=0)


def several_labels():
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(8):
        x = rng.normal(size=(24, 4))
        samples.append((x, (x @ np.eye(4, 3) + rng.normal(0, 0.1, 3) > 0.8).astype(np.float32)))
    # It begins with all labels, which is worse than none.
    init = {"w": jnp.zeros((4, 3)), "b": jnp.ones(3)}
    task = fm.multi_label(lambda key: init, lambda p, x: x @ p["w"] + p["b"])
    return clients_of(task, samples, num_classes=0)


def tokens():
    rng = np.random.default_rng(0)
    samples = [
        fm.data.next_tokens([rng.choice(5, 9, p=[0.1, 0.5, 0.2, 0.1, 0.1]) for _ in range(16)], length=8) for _ in range(8)
    ]
    task = fm.next_token(lambda key: jnp.zeros((5, 5)), lambda p, x: p[x])
    return clients_of(task, samples, num_classes=5)


CASES = {
    "regression": (regression, ["rmse", "mae", "tests.study.test_tasks:close"], "rmse", False, "mean of own targets"),
    "perplexity": (tokens, ["perplexity", "token_accuracy"], "perplexity", False, "most frequent token"),
    "tokens": (tokens, [], "token_accuracy", True, "most frequent token"),
    "several labels": (several_labels, [], "label_accuracy", True, "majority of each label"),
}


@pytest.fixture(
    scope="module", params=[name if name == "perplexity" else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def made(request, tmp_path_factory):
    make, metrics, score, higher, constant = CASES[request.param]
    chosen = from_tree(tree(systems=SYSTEMS, metrics=metrics, rounds=3, seeds=[1, 2]))
    place = tmp_path_factory.mktemp("runs") / "one"
    built = {"pairs": make()}
    outcomes = run.run(chosen, place, watcher=Silent(), clients=built)
    page.write_all(place, chosen, built, outcomes, "x")
    return chosen, built, outcomes, place, score, higher, constant


def by_hand(outcome, group, score):
    """The score of each client `[seeds, N]` as the rows have it."""
    return np.array([trial.rows[-1]["tests"][group]["metrics"][score]["values"] for trial in outcome.final])


def test_the_better_point_is_chosen_on_held_back_samples(made):
    _, _, (fedavg, _), _, score, higher, _ = made
    means = {
        trial.numbers["lr"]: np.mean(trial.rows[-1]["tests"]["validation"]["metrics"][score]["values"])
        for trial in fedavg.tuning
    }
    assert fedavg.chosen["lr"] == (max if higher else min)(means, key=means.get) == 0.1


def test_the_table_shows_the_worst_tenth_and_who_stays_behind_by_the_score(made):
    chosen, built, outcomes, _, score, higher, constant = made
    lines = results.lines(chosen, "pairs", built["pairs"], outcomes)
    assert [line.title for line in lines] == ["fedavg", "Local only", constant, "untrained model"]
    assert {line.kind.name for line in lines} == {score} and {line.kind.higher_is_better for line in lines} == {higher}
    mine, base = (by_hand(one, "known", score) for one in outcomes)
    unit = 100 if lines[0].kind.share else 1
    assert lines[0].known == pytest.approx((unit * mine.mean(), unit * mine.mean(1).std(ddof=1)))
    worst = mine.min(1) if higher else mine.max(1)
    assert lines[0].worst[0] == pytest.approx(unit * worst.mean())
    loses = mine.mean(0) < base.mean(0) if higher else mine.mean(0) > base.mean(0)
    assert lines[0].behind == pytest.approx(100 * loses.mean())
    untrained = lines[-1].known[0]
    assert (lines[0].known[0] > untrained) == higher
    others = results.other_scores(lines)
    assert others.rows[0][0] == "fedavg" and all(others.rows[0]) and len(others.headings) >= 3


def test_the_table_says_what_ends_worse_than_the_untrained_model(made):
    """Scores that are the untrained model's, a bit worse or better, by the direction of the score."""
    chosen, built, outcomes, _, score, higher, _ = made
    lines = results.lines(chosen, "pairs", built["pairs"], outcomes)
    unit, untrained = 100 if lines[-1].kind.share else 1, lines[-1].known[0]
    for step, told in ((-0.01, higher), (0.01, not higher), (0.0, False)):
        trials = copy.deepcopy(outcomes[0].final)
        for trial in trials:
            test = trial.rows[-1]["tests"]["known"]["metrics"][score]
            test["values"] = [untrained / unit + step] * len(test["values"])
        (line, *_) = results.lines(chosen, "pairs", built["pairs"], [outcomes[0]._replace(final=trials)])
        assert ("worse than the untrained model" in line.remark) == told


def test_the_table_says_what_is_no_better_than_a_constant_prediction(made):
    chosen, built, outcomes, _, score, higher, _ = made
    lines = results.lines(chosen, "pairs", built["pairs"], outcomes)
    constants = [line for line in lines if line.remark == "no training" and line.title != "untrained model"]
    assert constants
    for constant in constants:
        unit = 100 if constant.kind.share else 1
        for step, told in ((-0.01, higher), (0.01, not higher), (0.0, True)):
            trials = copy.deepcopy(outcomes[0].final)
            for trial in trials:
                test = trial.rows[-1]["tests"]["known"]["metrics"][score]
                test["values"] = [constant.known[0] / unit + step] * len(test["values"])
            (line, *_) = results.lines(chosen, "pairs", built["pairs"], [outcomes[0]._replace(final=trials)])
            assert (f"no better than the {constant.title}" in line.remark) == told


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([1.0, math.nan, 0.5], "negative curvature in 75 % of its linear systems"),
        ([0.0, 0.004], ""),
        ([math.nan], ""),
        ([], ""),
    ],
)
def test_the_table_says_how_often_implicit_gradients_met_negative_curvature(made, shares, words):
    chosen, built, outcomes, *_ = made
    trials = copy.deepcopy(outcomes[0].final)
    for trial in trials:
        trial.rows[-1]["train"]["negative_curvature"] = shares
    (line, *_) = results.lines(chosen, "pairs", built["pairs"], [outcomes[0]._replace(final=trials)])
    assert words in line.remark and ("negative curvature" in line.remark) == bool(words)


def test_the_untrained_model_is_that_of_each_seed(made):
    chosen, built, _, _, score, *_ = made
    row = lambda seeds: results.lines(dataclasses.replace(chosen, seeds=seeds), "pairs", built["pairs"], [])[-1].known  # noqa: E731
    means = [row([seed])[0] for seed in chosen.seeds]
    first, second = (jax.tree.leaves(built["pairs"].task.init(jax.random.key(seed))) for seed in (1, 2))
    drawn = any((a != b).any() for a, b in zip(first, second, strict=True))
    assert drawn == (score == "rmse") and (len(set(means)) == len(chosen.seeds) > 1) == drawn
    assert row(chosen.seeds) == pytest.approx((np.mean(means), np.std(means, ddof=1)))


def test_who_gains_and_who_loses(made):
    chosen, _, outcomes, _, score, higher, _ = made
    mine, base = (by_hand(one, "known", score).mean(0) for one in outcomes)
    kind = results.by_client(outcomes[0].final, "known", chosen.score).kind
    gain = (100 if kind.share else 1) * (mine - base if higher else base - mine)
    row = next(row for row in results.gains(chosen, outcomes) if row[:3] == ["fedavg", "Local only", "known"])
    assert row[3] == f"{100 * np.mean(gain < 0):.0f} %"
    digits = "+.1f" if kind.share else "+.3g"
    assert row[5] == f"{gain.min():{digits}} (client {gain.argmin()})"
    assert row[6] == f"{gain.max():{digits}} (client {gain.argmax()})"


def test_reports_name_the_score_and_its_direction(made):
    _, _, _, place, score, higher, constant = made
    texts = [(place / name).read_text(encoding="utf-8") for name in ("report.html", "report.md", "report.tex")]
    for text in texts:
        assert (
            score.replace("_", " ").capitalize() in text
            and constant in text
            and "ccuracy, %" not in text.replace("token accuracy, %", "").replace("label accuracy, %", "")
        )
        assert ("(lower is better), mean over clients" in text) == (not higher)
    assert "<svg" in texts[0] and "Confusion by class" not in texts[0]
    assert f"{score.replace('_', ' ').capitalize()} by round" in texts[0]


def test_comparisons_differences_targets_and_the_index(made, tmp_path):
    _, _, outcomes, place, score, higher, _ = made
    systems = compare.finished([place])
    unit = 100 if systems[0].kind.share else 1
    mine, base = (unit * by_hand(one, "known", score) for one in outcomes)
    rows = compare.compared(systems, reference="Local only", target=None)
    found = rows[0].against
    assert found.mean == pytest.approx((mine - base).mean())
    change = (mine - base).mean(0)
    assert found.better == pytest.approx(100 * np.mean(change > 0 if higher else change < 0))
    assert rows[0].worst == pytest.approx(mine.min(1) if higher else mine.max(1))
    # Between the first evaluation and the last one.
    curve = np.array([[row["tests"]["known"]["scores"][f"{score}_mean"] for row in t.rows] for t in outcomes[0].final])
    goal = compare.Target(unit * float(curve[:, -1].mean() + curve[:, 0].mean()) / 2)
    hits = unit * curve >= goal.value if higher else unit * curve <= goal.value
    rounds = [row["round"] for row in outcomes[0].final[0].rows]
    expected = [rounds[np.flatnonzero(line)[0]] if line.any() else np.inf for line in hits]
    assert compare.reached(systems[0], goal).rounds.tolist() == expected
    assert score != "rmse" or min(expected) > 1
    text = comparison.comma_separated([compare.compared(systems, target=goal)])
    assert next(csv.DictReader(io.StringIO(text)))["score"] == score
    means = {one.title: one.by_client("known") for one in systems}
    best = (max if higher else min)(means, key=lambda name: np.mean(list(means[name].values())))
    (one,) = index.runs_in(place.parent)
    assert one.best[0][1] == best and one.best[0][2].startswith(score.replace("_", " "))
    result = CliRunner().invoke(app, ["compare", str(place), "--target", f"{goal.value}", "--metric", score])
    assert result.exit_code == 0 and ("is a gain" in " ".join(result.output.split())) == (not higher), result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    result = CliRunner().invoke(app, ["compare", str(place), "--metric", "auroc"])
    assert result.exit_code == 1 and f"was not measured by 'auroc' in scenario pairs, but by {score}" in " ".join(
        result.stderr.split()
    )


def test_clients_and_evaluations_are_data_frames(made, tmp_path):
    chosen, built, outcomes, place, score, *_ = made
    table = report.load_clients(place)
    known = table[(table.system == "fedavg") & (table.clients == "known") & (table.seed == 2)]
    np.testing.assert_allclose(known[score], by_hand(outcomes[0], "known", score)[1], rtol=1e-5)
    np.testing.assert_array_equal(known["samples"], built["pairs"].train.size["test"])
    assert f"{score}_mean" in report.load(place)
    # An evaluation that was made twice took another time.
    lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({**json.loads(lines[-1]), "seconds": 7.0})]) + "\n")
    assert len(report.load(tmp_path)) == len(report.load(place)) and (report.load(tmp_path)["seconds"] == 7).any()
    assert chosen.score in (None, score)


def test_constant_predictions_are_those_of_each_client_s_own_samples(made):
    chosen, built, outcomes, _, score, _, constant = made
    data = built["pairs"].train
    line = next(line for line in results.lines(chosen, "pairs", built["pairs"], outcomes) if line.title == constant)
    y = np.asarray(data.y.value if isinstance(data.y, fm.Weighted) else data.y)
    weight = np.asarray(data.y.weight) if isinstance(data.y, fm.Weighted) else np.ones(y.shape)
    values = []
    for i in range(data.num_clients):
        parts = []
        for view in ("train", "test"):
            first, size = int(data.start[view][i]), int(data.size[view][i])
            parts.append((y[first : first + size], weight[first : first + size] > 0))
        (seen, real), (asked, counted) = parts
        if score == "rmse":
            values.append(np.sqrt(np.mean((asked - seen.mean()) ** 2)))
        elif score == "label_accuracy":
            values.append(100 * np.mean(asked == (seen.mean(0) > 0.5)))
        else:
            counts = np.bincount(seen[real], minlength=5)
            share = (counts + 1) / (counts + 1).sum()
            asked = asked[counted]
            values.append(
                np.exp(-np.log(share[asked]).mean()) if score == "perplexity" else 100 * np.mean(asked == counts.argmax())
            )
    assert line.known[0] == pytest.approx(np.mean(values), rel=1e-4)


def test_a_score_that_is_not_measured_is_refused_before_anything_is_written(tmp_path):
    for field in ({"main": "accuracy"}, {"tuning": {"metric": "accuracy_mean"}}):
        chosen = from_tree(tree(systems=SYSTEMS, **field))
        with pytest.raises(
            ValueError, match="scenario pairs: the score 'accuracy' is not measured; there are mae, rmse, r2, loss"
        ):
            run.run(chosen, tmp_path / "run", watcher=Silent(), clients={"pairs": regression()})
    with pytest.raises(ValueError, match="metric 'f1' needs classes"):
        run.run(from_tree(tree(metrics=["f1"])), tmp_path / "run", watcher=Silent(), clients={"pairs": regression()})
    assert not (tmp_path / "run").exists()


def test_other_metrics_than_those_of_the_results_are_refused(made):
    chosen, built, _, place, *_ = made
    other = from_tree(tree(systems=SYSTEMS, metrics=[*chosen.metrics, "calibration_error"], rounds=3, seeds=[1, 2]))
    if built["pairs"].train.num_classes:
        with pytest.raises(ValueError, match="cannot resume: metrics was .* and is .*calibration_error"):
            run.run(other, place, watcher=Silent(), clients=built)


def test_central_training_learns_from_all_clients_together(tmp_path):
    central = {"method": "fedavg", "pooled": True, "options": {"epochs": 2, "batch_size": 8, "lr": 0.1}}
    chosen = from_tree(tree(systems={"central": central}, metrics=["rmse"], rounds=6, eval_every=3, seeds=[1]))
    built = {"pairs": regression()}
    (one,) = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    # Cohorts of 4 of 6 clients: 6 rounds are 4 passes of two epochs each.
    assert [row["round"] for row in one.final[0].rows] == [1, 2, 4]
    data = pooled(built["pairs"].train)
    alone = fm.federate(
        fm.fedavg(built["pairs"].task, epochs=2, batch_size=8, lr=0.1), fm.Federation(cohort_size=1, devices=1)
    )
    state, _ = fm.simulate(alone, data, key=jax.random.key(1), rounds=4)
    options = {"known": False, "support": "train", "query": "test", "metrics": ("rmse",)}
    found = fm.evaluate(alone, jax.random.key(0), state, built["pairs"].train, **options)
    np.testing.assert_allclose(by_hand(one, "known", "rmse")[0], found.metrics["rmse"].values, rtol=1e-5)
    (line, *_) = results.lines(chosen, "pairs", built["pairs"], [one])
    assert np.isnan(line.up) and "central training" in line.remark
    assert page.systems(chosen, [one])[0].traffic != page.systems(chosen, [one])[0].traffic
    keeps = {**central, "method": "fedper"}
    with pytest.raises(ValueError, match="pooled needs a method whose clients keep nothing"):
        run.run(study(systems={"central": keeps}), tmp_path / "no", watcher=Silent())
    assert not (tmp_path / "no").exists()


def test_labels_by_accuracy_and_f1(tmp_path):
    chosen = from_tree(
        tree(metrics=["f1", "accuracy", "confusion"], rounds=1, seeds=[1], systems={"a": TREE["systems"]["local"]})
    )
    built = run.build(chosen)
    (one,) = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    test = one.final[0].rows[-1]["tests"]["known"]
    expected = fm.metrics.macro_f1(np.array(test["confusion"]))
    kind, values = results.by_client(one.final, "known", chosen.score)
    assert kind == report.Kind("f1", True, True)
    np.testing.assert_allclose(values[0], 100 * np.asarray(expected), rtol=1e-5)
    accuracy = next(line for line in results.lines(chosen, "pairs", built["pairs"], [one])).others["accuracy"][1][0]
    assert accuracy == pytest.approx(100 * np.mean(test["accuracy"]))
