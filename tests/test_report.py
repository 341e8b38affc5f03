"""Reports: compact records against scores computed from labels, tables and figures."""

import json

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from sklearn.metrics import accuracy_score, f1_score

from fedjax_meta import report
from fedjax_meta.evaluation import Evaluation
from fedjax_meta.simulation import Record

CLIENTS, CLASSES = 6, 5


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


def a_series(title, clients, seed=1, accuracy=(10.0, 60.0, 90.0), by_client=(80.0, 90.0, 100.0)):
    scores = {"accuracy": accuracy[-1], "accuracy_mean": float(np.mean(by_client)), "loss": 0.3}
    rounds = np.array([1, 20, 40])[: len(accuracy)]
    return report.Series(title, clients, seed, rounds, np.array(accuracy), np.array(by_client), scores)


def test_series_are_in_percent(predictions):
    rows = [report.compact(record(predictions, done)) for done in (1, 20)]
    one = report.series("A", "local", 3, rows, "a/local")
    assert one.rounds.tolist() == [1, 20]
    np.testing.assert_allclose(one.by_client, 100 * np.array(rows[-1]["tests"]["a/local"]["accuracy"]))
    assert one.scores["accuracy"] == one.accuracy[-1] == 100 * rows[-1]["tests"]["a/local"]["scores"]["accuracy"]
    assert one.scores["loss"] == rows[-1]["tests"]["a/local"]["scores"]["loss"]


def test_a_series_needs_rows_and_a_known_test(predictions):
    with pytest.raises(ValueError, match="no evaluation"):
        report.series("A", "local", 1, [], "a/local")
    with pytest.raises(ValueError, match=r"test='b/local' is not a test of this run; it has a/local"):
        report.series("A", "local", 1, [report.compact(record(predictions))], "b/local")


def test_over_seeds():
    runs = [a_series("A", "local", seed, accuracy=(value,)) for seed, value in ((1, 90.0), (2, 92.0), (3, 97.0))]
    mean, std = report.over_seeds(runs)["accuracy"]
    assert mean == pytest.approx(93)
    assert std == pytest.approx(np.sqrt((9 + 1 + 16) / 3))


def test_markdown_has_one_line_a_row():
    text = report.markdown_table(["a\nb", "c"], [["x", "1"], ["y", "2"]])
    assert text.splitlines() == ["| a b | c |", "|:---|---:|", "| x | 1 |", "| y | 2 |"]


@pytest.mark.parametrize("clients", [("local",), ("local", "new")])
@pytest.mark.parametrize("seeds", [1, 3])
def test_figure_shows_every_method(clients, seeds, tmp_path):
    titles = ["FedAvg", "FedPer", "FedMeta"]
    drawn = [
        a_series(title, group, seed, accuracy=(10.0, 60.0 + 10 * number + seed, 80.0 + 5 * number))
        for number, title in enumerate(titles)
        for group in clients
        for seed in range(seeds)
        if not (title == "FedPer" and group == "new")
    ]
    path = tmp_path / "made" / "figure.png"
    report.save_figure(path, drawn, title="A title", published={("FedAvg", "local"): 70.0})
    image = matplotlib.image.imread(path)[..., :3]
    assert image.shape[1] > image.shape[0] / 2 > 200
    for number in range(len(titles)):
        distance = np.abs(image - np.array(to_rgb(report.COLORS[number]))).max(-1)
        assert (distance < 0.02).sum() > 100


def test_figure_of_a_single_evaluation(tmp_path):
    report.save_figure(tmp_path / "figure.svg", [a_series("A", "local", accuracy=(50.0,))], title="One point")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
