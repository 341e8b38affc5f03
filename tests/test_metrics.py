"""Scores against scikit-learn and plain loops, and rounds to a target over seeds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from fedjax_meta import metrics

K = 5


def _draw(seed, own, size=60, classes=K):
    """Labels of the client's own classes, all present, and predictions of any class, about half of them random."""
    own, rng = np.asarray(own), np.random.default_rng(seed)
    true = np.concatenate([own, rng.choice(own, size - own.size)])
    return true, np.where(rng.random(size) < 0.5, true, rng.integers(0, classes, size))


def _matrix(true, predicted, classes=K):
    return sklearn.metrics.confusion_matrix(true, predicted, labels=np.arange(classes))


CLIENTS = [_draw(seed, own) for seed, own in enumerate(([0, 1], [1, 4], [0, 2, 3], [3], range(K)))]
CONFUSION = jnp.asarray(np.stack([_matrix(*client) for client in CLIENTS]), jnp.int32)


def _postprocessed(true, predicted, classes=K):
    """FedMeta-Per's rule in a plain loop: a prediction outside the client's classes becomes its next class after the true."""
    own = sorted(set(true.tolist()))
    out = []
    for t, p in zip(true.tolist(), predicted.tolist(), strict=True):
        others = [c % classes for c in range(t + 1, t + classes) if c % classes in own]
        out.append(p if p in own or not others else others[0])
    return np.array(out)


def test_accuracy_over_clients_and_over_samples():
    each = [sklearn.metrics.accuracy_score(*client) for client in CLIENTS]
    np.testing.assert_allclose(metrics.accuracy(CONFUSION), each, rtol=1e-12)
    # Clients of unequal size: the two means differ.
    uneven = CONFUSION.at[0].multiply(7)
    right = np.trace(np.asarray(uneven), axis1=1, axis2=2)
    assert float(metrics.micro_accuracy(uneven)) == pytest.approx(right.sum() / np.asarray(uneven).sum(), rel=1e-12)
    assert float(metrics.micro_accuracy(uneven)) != pytest.approx(np.mean(each), rel=1e-3)


def test_macro_f1_is_scikit_learns():
    expected = [sklearn.metrics.f1_score(true, predicted, average="macro") for true, predicted in CLIENTS]
    np.testing.assert_allclose(metrics.macro_f1(CONFUSION), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16"])
def test_scores_of_small_counts_do_not_overflow(dtype):
    counts = np.full((1, 2, 2), 120, dtype)
    assert metrics.macro_f1(counts) == metrics.accuracy(counts) == 0.5


@pytest.mark.parametrize("score", [metrics.accuracy, metrics.macro_f1])
def test_scores_of_weights_that_sum_to_less_than_one(score, rng):
    """Confusion matrices of weighted samples, and of whole ones in the same proportions."""
    counts = rng.integers(0, 9, (4, 3, 3)).astype(float)
    np.testing.assert_allclose(score(0.004 * counts), score(counts), rtol=1e-12)


def test_scores_of_a_client_without_samples_are_zero_and_not_nan():
    nothing = jnp.zeros((1, K, K), jnp.int32)
    assert metrics.accuracy(nothing) == metrics.macro_f1(nothing) == metrics.micro_accuracy(nothing) == 0
    assert not np.any(metrics.within_own_classes(nothing))


@pytest.mark.parametrize("score", [metrics.accuracy, metrics.micro_accuracy, metrics.macro_f1, metrics.within_own_classes])
def test_scores_stay_where_the_matrices_are(score):
    on_host, on_device = score(np.asarray(CONFUSION)), score(CONFUSION)
    assert isinstance(on_host, (np.ndarray, np.generic)) and isinstance(on_device, jax.Array)
    np.testing.assert_allclose(on_host, on_device, rtol=1e-12)


def test_predictions_outside_move_to_another_own_class_and_accuracy_stays():
    after = metrics.within_own_classes(CONFUSION)
    expected = [_matrix(true, _postprocessed(true, predicted)) for true, predicted in CLIENTS]
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(metrics.accuracy(after), metrics.accuracy(CONFUSION))
    assert np.any(np.asarray(after) != np.asarray(CONFUSION))


def test_two_classes_as_fedmeta_per_scores_them():
    """Every wrong prediction of a two-class client, whatever it was, counts as one of the other class."""
    true, predicted = CLIENTS[1]
    assert set(predicted.tolist()) - {1, 4}
    other = np.where(predicted == true, true, np.where(true == 1, 4, 1))
    f1 = sklearn.metrics.f1_score(true, other, average="macro")
    after = metrics.within_own_classes(CONFUSION)
    assert float(metrics.macro_f1(after)[1]) == pytest.approx(f1, rel=1e-12)
    assert f1 > float(metrics.macro_f1(CONFUSION)[1])


def test_a_client_of_one_class_keeps_its_predictions():
    np.testing.assert_array_equal(metrics.within_own_classes(CONFUSION)[3], CONFUSION[3])


def test_the_summary_has_population_deviations(rng):
    loss = rng.random(len(CLIENTS))
    numbers = metrics.summary(CONFUSION, loss)
    each = np.asarray(metrics.accuracy(CONFUSION))
    f1 = [sklearn.metrics.f1_score(t, _postprocessed(t, p), average="macro") for t, p in CLIENTS]
    assert numbers["accuracy_std"] == pytest.approx(np.std(each), rel=1e-12)
    assert numbers["accuracy_mean"] == pytest.approx(np.mean(each), rel=1e-12)
    assert (numbers["f1_mean"], numbers["f1_std"]) == pytest.approx((np.mean(f1), np.std(f1)), rel=1e-12)
    assert numbers["loss"] == pytest.approx(np.mean(loss), rel=1e-12)


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (5, 2.776), (31, 2.042), (41, 2.021), (121, 1.980)])
def test_a_confidence_margin_is_that_of_students_t(count, quantile):
    """Quantiles of a printed table, for 1, 4, 30, 40 and 120 degrees of freedom."""
    values = np.random.default_rng(count).normal(size=count)
    assert metrics.confidence_margin(values) == pytest.approx(quantile * np.std(values, ddof=1) / np.sqrt(count), rel=3e-4)


def test_rounds_to_target():
    runs = [[0.2, 0.6, 0.4, 0.9], [0.1, 0.2, 0.3, 0.7], [0.7, 0.0, 0.0, 0.0]]
    found = metrics.rounds_to_target(runs, 0.6)
    assert found.rounds == (2, 4, 1) and found.mean == pytest.approx(7 / 3)
    # Student's t with 2 degrees of freedom, by hand: 4.303 * s / sqrt(3), s^2 = 7/3.
    assert found.margin == pytest.approx(4.303 * math.sqrt(7 / 3 / 3), rel=1e-4)
    assert metrics.rounds_to_target(runs, 0.7, rounds=[1, 20, 40, 60]).rounds == (60, 60, 1)


def test_a_run_that_never_reaches_the_target_makes_the_mean_infinite():
    found = metrics.rounds_to_target([[0.2, 0.6], [0.2, 0.4]], 0.6)
    assert found.rounds == (2, None) and found.mean == math.inf and math.isnan(found.margin)
    assert str(found) == "never in 2 rounds (1 of 2 runs)"
    assert metrics.rounds_to_target([np.nan, np.nan], 0.0).rounds == (None,)


def test_bad_targets_are_refused():
    with pytest.raises(ValueError, match="at least one score"):
        metrics.rounds_to_target([], 0.5)
    with pytest.raises(ValueError, match="target=nan"):
        metrics.rounds_to_target([0.1], math.nan)
    with pytest.raises(ValueError, match="R=2 scores"):
        metrics.rounds_to_target([0.1, 0.2], 0.1, rounds=[1])


def test_one_loss_that_is_not_finite_leaves_no_mean():
    found = metrics.summary(np.array([[[3, 1], [0, 2]], [[1, 0], [0, 1]]]), [0.5, np.nan])
    assert math.isnan(found["accuracy"]) and math.isnan(found["accuracy_mean"])
    found = metrics.summary_of_scores({"mae": [1.0, 2.0]}, [0.1, np.inf])
    assert math.isnan(found["mae_mean"]) and math.isnan(found["mae_std"])


def test_a_score_of_single_precision_reaches_the_target_that_it_is():
    assert float(np.float32(0.7)) < 0.7
    assert metrics.rounds_to_target(np.float32([0.1, 0.7]), 0.7).rounds == (2,)
    assert metrics.rounds_to_target([0.1, 0.6999], 0.7).rounds == (None,)
