"""Metrics of `evaluate`, each against its definition in NumPy, over batches with padding; own metrics and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

import fedjax_meta as fm
from fedjax_meta import measures, metrics, report
from fedjax_meta import task as T
from fedjax_meta.simulation import Record
from tests import problems

KEY = jax.random.key(0)
CLASSES = 4


def measured(metric, outputs, y, weight=None, *, batch_size=7):
    """The result over batches, the last one padded by rows that would spoil it."""

    def filled(values, spoils=True):
        spoiled = jnp.nan if spoils and jnp.issubdtype(values.dtype, jnp.floating) else 3
        return jnp.concatenate([values, jnp.full((batch_size - len(values), *values.shape[1:]), spoiled, values.dtype)])

    start = None
    for first in range(0, len(outputs), batch_size):
        rows = slice(first, first + batch_size)
        targets = filled(y[rows])
        if weight is not None:
            targets = T.Weighted(targets, filled(weight[rows], spoils=False))
        batch = T.Batch(None, targets, (jnp.arange(batch_size) < len(outputs[rows])).astype(float))
        out = filled(outputs[rows])
        start = measures.begin(metric, out, batch) if start is None else start
        start = jax.jit(lambda s, o, b: measures.update(metric, s, o, b))(start, out, batch)
    return float(metric.result(start))


def sample(*shape, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, shape)
    return 2 * rng.normal(size=(*shape, CLASSES)) + 1.5 * np.eye(CLASSES)[y], y, rng.random(shape) < 0.7


def _softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _area(scores, own):
    """The share of pairs in the right order (Mann and Whitney)."""
    gaps = scores[own][:, None] - scores[~own][None]
    return np.mean((gaps > 0) + (gaps == 0) / 2)


def test_scores_of_classes_equal_numpy_with_and_without_weights_of_tokens():
    for shape in ((31,), (23, 5)):
        z, y, counted = sample(*shape)
        weight = None if len(shape) == 1 else counted
        kept = np.ones(shape, bool) if weight is None else counted
        flat, labels = z[kept], y[kept]
        right = flat.argmax(-1) == labels
        assert measured(measures.accuracy(), z, y, weight) == pytest.approx(right.mean(), rel=1e-12)
        above = (flat > np.take_along_axis(flat, labels[:, None], -1)).sum(-1)
        assert measured(measures.top_k(2), z, y, weight) == pytest.approx(np.mean(above < 2), rel=1e-12)
        chance = np.take_along_axis(_softmax(flat), labels[:, None], -1)
        assert measured(measures.perplexity(), z, y, weight) == pytest.approx(np.exp(-np.log(chance).mean()), rel=1e-12)
        table = np.zeros((CLASSES, CLASSES), int)
        np.add.at(table, (labels, flat.argmax(-1)), 1)
        assert measured(measures.f1(CLASSES), z, y, weight) == pytest.approx(metrics.macro_f1(table), rel=1e-12)
        confidence = _softmax(flat).max(-1)
        place = np.ceil(confidence * 10).astype(int)
        gaps = [abs((confidence - right)[place == one].sum()) for one in range(1, 11)]
        wanted = sum(gaps) / len(flat)
        assert measured(measures.calibration_error(bins=10), z, y, weight) == pytest.approx(wanted, rel=1e-12)
        areas = [_area(np.log(p / (1 - p)), labels == one) for one, p in enumerate(_softmax(flat).T)]
        assert measured(measures.auroc(CLASSES, bins=2**15), z, y, weight) == pytest.approx(np.mean(areas), abs=2e-3)


def test_scores_of_several_labels_equal_numpy():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, (40, 3))
    z = rng.normal(size=y.shape) + 0.5 * y
    held, predicted = y > 0, z > 0
    assert measured(measures.label_accuracy(), z, y) == pytest.approx(np.mean(held == predicted), rel=1e-12)
    f1 = 2 * (held & predicted).sum(0) / (held.sum(0) + predicted.sum(0))
    assert measured(measures.f1(3), z, y) == pytest.approx(f1.mean(), rel=1e-12)
    areas = [_area(z[:, one], held[:, one]) for one in range(3)]
    assert measured(measures.auroc(3, bins=2**15), z, y) == pytest.approx(np.mean(areas), abs=2e-3)


def test_scores_of_real_targets_equal_numpy_far_from_zero_too():
    rng = np.random.default_rng(2)
    for shift in (0.0, 1e6):
        y = rng.normal(size=(40, 2)) + shift
        out = y + rng.normal(size=y.shape) / 2
        assert measured(measures.mae(), out, y) == pytest.approx(np.abs(out - y).mean(), rel=1e-12)
        assert measured(measures.rmse(), out, y) == pytest.approx(np.sqrt(((out - y) ** 2).mean()), rel=1e-12)
        y[:, 1] -= 50
        out[:, 1] -= 50
        expected = sklearn.metrics.r2_score(y, out, multioutput="variance_weighted")
        pooled = 1 - ((out - y) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
        assert measured(measures.r2(), out, y) == pytest.approx(pooled, rel=1e-9) == pytest.approx(expected, rel=1e-9)
        assert measured(measures.r2(), out[:, 0], y[:, 0]) == pytest.approx(
            sklearn.metrics.r2_score(y[:, 0], out[:, 0]), rel=1e-9
        )
        constant = np.broadcast_to(y.mean(0), y.shape)
        assert measured(measures.r2(), constant, y) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("value", [0.1, 0.3, 1.7, 123.456])
def test_r2_of_targets_that_are_all_alike_is_0(value):
    """Their rounded mean may differ from them."""
    for count in (3, 7, 11):
        assert measured(measures.r2(), np.full(count, value + 0.5), np.full(count, value)) == 0


# --------------------------------------------------------------------------------------------------------------------- evaluate


def test_fractions_of_samples_count_in_the_confusion_matrix():
    rng = np.random.default_rng(2)
    labels, logits, weight = rng.integers(0, 3, 30), rng.normal(size=(30, 3)), rng.random(30).astype(np.float32)
    metric = measures.METRICS["confusion"](3)
    batch = fm.Batch(jnp.zeros((30, 1)), fm.Weighted(jnp.asarray(labels), jnp.asarray(weight)), jnp.ones(30))
    start = measures.begin(metric, jnp.asarray(logits), batch)
    found = metric.result(measures.update(metric, start, jnp.asarray(logits), batch))
    expected = sklearn.metrics.confusion_matrix(labels, logits.argmax(1), labels=np.arange(3), sample_weight=weight)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    counted = batch._replace(y=fm.Weighted(jnp.asarray(labels), jnp.asarray(weight > 0.5)))
    assert measures.begin(metric, jnp.asarray(logits), counted).dtype == jnp.int32


def test_evaluate_gives_what_was_asked_for_beside_the_same_confusion_and_loss():
    data = problems.data()
    algorithm = problems.build("fedavg")
    state = algorithm.init(KEY, data)
    usual = fm.evaluate(algorithm, KEY, state, data)
    asked = fm.evaluate(algorithm, KEY, state, data, metrics=("confusion", "accuracy", "f1", measures.top_k(2)), batch_size=5)
    assert usual.metrics == {} and np.array_equal(usual.confusion, asked.confusion)
    assert np.allclose(usual.loss, asked.loss, rtol=1e-12)
    assert np.allclose(asked.metrics["accuracy"].values, metrics.accuracy(usual.confusion), rtol=1e-12)
    assert np.allclose(asked.metrics["f1"].values, metrics.macro_f1(usual.confusion), rtol=1e-12)
    only = fm.evaluate(algorithm, KEY, state, data, metrics=())
    assert only.confusion is None and np.allclose(only.loss, usual.loss, rtol=1e-12) and set(only.summary()) == {"loss"}


def test_labels_with_weights_are_scored_as_those_without_by_default():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 5)), rng.integers(0, 3, 20)) for _ in range(3)]
    algorithm = problems.build("fedavg", fm.classification(lambda key: jax.random.normal(key, (5, 3)), lambda p, x: x @ p))
    weighted = [(x, fm.Weighted(y, np.ones(20))) for x, y in clients]
    one, other = (fm.from_clients(each, num_classes=3) for each in (clients, weighted))
    state = algorithm.init(KEY, one)
    found = [fm.evaluate(algorithm, KEY, state, data) for data in (one, other)]
    np.testing.assert_array_equal(found[0].confusion, found[1].confusion)


def test_many_classes_have_no_confusion_matrix_by_default():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 5)), rng.integers(0, 300, 20)) for _ in range(3)]
    data = fm.from_clients(clients, num_classes=300)
    task = fm.classification(lambda key: jax.random.normal(key, (5, 300)), lambda p, x: x @ p)
    algorithm = fm.federate(fm.fedavg(task), fm.Federation(cohort_size=2))
    scores = jax.eval_shape(lambda s, d: fm.evaluate(algorithm, KEY, s, d), algorithm.init(KEY, data), data)
    assert scores.confusion is None and set(scores.metrics) == {"accuracy", "top_5"}


def test_an_own_metric_takes_five_lines_and_its_statistics_may_start_as_integers():
    data, algorithm = problems.data(), problems.build("fedavg")
    state = algorithm.init(KEY, data)
    largest = fm.Metric(
        name="largest logit",
        init=lambda: 0,
        update=lambda most, outputs, batch: jnp.maximum(
            most, jnp.max(jnp.where(batch.weight[:, None] > 0, outputs, -jnp.inf))
        ),
        result=lambda most: most,
    )
    found = fm.evaluate(algorithm, KEY, state, data, metrics=(largest,)).metrics["largest logit"]
    start, size = int(data.start["test_query"][3]), int(data.size["test_query"][3])
    logits = algorithm.predict(state.model, jnp.asarray(data.x[start : start + size]))
    assert float(found.values[3]) == pytest.approx(max(0, float(jnp.max(logits))), rel=1e-12)


def metric(name="odd", **changes):
    parts = {"init": lambda: 0.0, "update": lambda s, outputs, batch: s + 1, "result": lambda s: s}
    return fm.Metric(name=name, **{**parts, **changes})


BAD = {
    "no scalar": (
        metric(result=lambda s: jnp.ones(3) * s),
        r"metric 'odd': result must give one number, .*, not an array \[3\]",
    ),
    "a pair": (metric(result=lambda s: (s, s)), "metric 'odd': result must give one number, .*, not a tuple"),
    "growing statistics": (metric(update=lambda s, o, b: (s, s)), "metric 'odd': init gives statistics of shapes"),
    "scores of pairs": (
        measures.mean("gap", lambda outputs, y: outputs[:, :1] - y),
        r"gap must give \[B, ...\] of B samples, but gives \[2, 2\] of 2",
    ),
    "an unknown name": ("accuracies", "did you mean 'accuracy'"),
    "real targets": ("mae", "mae takes outputs and targets of one shape"),
    "too many": ("top_9", "top_9 of K=3 outputs"),
    "another number of classes": (measures.f1(5), "f1 of K=5 classes does not fit outputs"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_metric_that_does_not_fit_is_refused(case):
    given, message = BAD[case]
    data, algorithm = problems.data(), problems.build("fedavg")
    state = jax.eval_shape(algorithm.init, KEY, data)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda s: fm.evaluate(algorithm, KEY, s, data, metrics=(given,)), state)


@pytest.mark.parametrize("name", ["ids", "loss", "name", "samples", "x_samples"])
def test_a_metric_may_not_have_the_name_of_a_column_beside_the_scores(name):
    with pytest.raises(ValueError, match=f"name='{name}' is that of a column beside the scores"):
        metric(name)


def test_two_metrics_of_one_name_and_one_that_is_no_tuple_are_refused():
    with pytest.raises(ValueError, match="two metrics have the name 'accuracy'"):
        measures.resolve(("accuracy", "accuracy"), 3)
    with pytest.raises(ValueError, match="must be a tuple of metrics or their names"):
        measures.resolve("accuracy", 3)
    with pytest.raises(ValueError, match="'confusion' needs classes"):
        measures.resolve(("confusion",), 0)


# ---------------------------------------------------------------------------------------------------------------------- reports


def test_reports_show_the_main_score_whatever_it_is(tmp_path):
    def rows(name, values, **options):
        score = measures.Score(np.array(values), *options.values())
        evaluation = fm.Evaluation(None, np.array([0.5, 0.7]), {name: score})
        records = [Record(r, {}, {"all": evaluation}, 0.1, 0.0) for r in (1, 2)]
        return [report.numbers_again(report.strict(report.compact(record))) for record in records]

    mae = report.series("FedAvg", "known", 1, rows("mae", [2.0, 4.0], higher_is_better=False, share=False), "all")
    assert mae.kind == report.Kind("mae", False, False)
    assert mae.means.tolist() == [3, 3] and mae.by_client.tolist() == [2, 4]
    top = report.series("FedAvg", "known", 1, rows("top_5", [0.5, 1.0], higher_is_better=True, share=True), "all")
    assert top.means.tolist() == [75, 75]
    report.save_figure(tmp_path / "mae.png", [mae, mae._replace(seed=2)], title="errors")
    assert (tmp_path / "mae.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="one figure shows one score, not mae and top_5"):
        report.save_figure(tmp_path / "both.png", [mae, top._replace(seed=2)], title="both")


def test_a_score_of_a_client_that_diverged_is_not_a_number():
    evaluation = fm.Evaluation(None, np.array([0.5, np.nan]), {"mae": measures.Score(np.array([1.0, 2.0]), False, False)})
    test = report.compact(Record(1, {}, {"all": evaluation}, 0.1, 0.0))["tests"]["all"]
    assert np.isnan(test["metrics"]["mae"]["values"][1]) and np.isnan(test["scores"]["mae_mean"])


def test_a_confusion_matrix_without_a_loss_has_its_scores():
    confusion = np.array([[[3, 1], [1, 3]], [[4, 0], [4, 0]]])
    evaluation = fm.Evaluation(confusion, None, {"mae": measures.Score(np.array([1.0, 2.0]), False, False)})
    assert evaluation.summary()["accuracy_mean"] == 0.625 and "loss" not in evaluation.summary()
    test = report.compact(Record(1, {}, {"all": evaluation}, 0.1, 0.0))["tests"]["all"]
    assert test["accuracy"] == [0.75, 0.5] and test["metrics"]["mae"]["values"] == [1, 2] and "loss" not in test


def test_what_another_evaluator_found_is_no_score_of_clients():
    evaluation = fm.Evaluation(np.array([[[3, 1], [1, 3]]]), np.array([0.5]))
    record = Record(1, {}, {"mine": {"norm": np.ones(3)}, "all": evaluation}, 0.1, 0.0)
    assert report.series("FedAvg", "known", 1, [record], "all").means.tolist() == [75]
    with pytest.raises(ValueError, match="test='mine' is not a test of this run; it has all"):
        report.series("FedAvg", "known", 1, [record], "mine")


def test_rounds_to_a_target_know_that_an_error_must_fall():
    found = metrics.rounds_to_target([3.0, 2.0, 1.0], 2.0, higher_is_better=False)
    assert found.rounds == (2,) and metrics.rounds_to_target([3.0, 2.0, 1.0], 2.0).rounds == (1,)


def test_a_metric_that_counts_rows_that_fill_a_batch_up_is_refused():
    def wrong(statistics, outputs, batch):
        return statistics[0] + jnp.sum(jnp.argmax(outputs, -1) != batch.y), statistics[1] + len(batch.y)

    def right(statistics, outputs, batch):
        return statistics[0] + jnp.sum(batch.weight * (jnp.argmax(outputs, -1) != batch.y)), statistics[1] + jnp.sum(
            batch.weight
        )

    def result(statistics):
        return statistics[0] / statistics[1]

    state = fm.federate(fm.fedavg(problems.task()), fm.Federation(cohort_size=2)).init(jax.random.key(0), problems.data())
    for update, words in ((wrong, "'error' does not read batch.weight"), (right, None)):
        metric = fm.Metric(
            name="error", init=lambda: (0.0, 0.0), update=update, result=result, higher_is_better=False, share=True
        )
        given = fm.fedavg(problems.task()), jax.random.key(1), state, problems.data()
        if words is not None:
            with pytest.raises(ValueError, match=words):
                fm.evaluate(*given, metrics=(metric,))
            continue
        found = fm.evaluate(*given, metrics=(metric, "accuracy")).metrics
        np.testing.assert_allclose(found["error"].values, 1 - found["accuracy"].values, rtol=1e-6)


def test_of_two_equal_scores_either_may_be_first():
    assert measured(measures.auroc(1), np.zeros((6, 1)), np.array([[1], [0]] * 3)) == 0.5


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    """Of two bins, the lower one has two that are right at 0.5, the upper one has one that is wrong at 0.9."""
    sure = np.log([[1.0, 1.0], [1.0, 1.0], [9.0, 1.0]])
    found = measured(measures.calibration_error(bins=2), sure, np.array([0, 0, 1]))
    assert found == pytest.approx((2 * 0.5 + 0.9) / 3, rel=1e-5)


def test_the_resolution_of_the_area_under_the_curve():
    """Eight bins of s / (4 + |s|), each 1/4 wide: 1/4 is the score 4/3, so that 0.1 and 0.9 share a bin and 1.5 does not."""
    found = [measured(measures.auroc(1, bins=8), np.array([[0.1], [s]]), np.array([[0], [1]])) for s in (0.9, 1.5)]
    assert found == [0.5, 1.0]
