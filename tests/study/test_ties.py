"""Scores are computed in single precision: nobody wins, loses or misses a target by the last bit."""

import itertools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_meta import metrics, report
from fedjax_meta.study import compare
from tests.study.test_compare import system


def shares(*counts):
    """Accuracies as evaluation gives them: numbers right of 7, in single precision."""
    return [float(jnp.float32(count) / 7) for count in counts]


def test_an_exact_tie_is_a_tie():
    """Two seeds of 12 clients: 2/7 and 2/7 against 3/7 and 1/7."""
    a, b = (system(name, [shares(*[one] * 12) for one in counts]) for name, counts in (("a", (2, 2)), ("b", (3, 1))))
    found = compare.difference(a, b, "known")
    assert (found.mean, found.better, found.worse, found.p_clients) == (0, 0, 0, 1)


def test_clients_that_gain_are_counted_as_fractions_would():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 8, (2, 3, 40))
    a, b = (system(name, [shares(*row) for row in part]) for name, part in zip("ab", counts, strict=True))
    exact = [sum(Fraction(int(x) - int(y), 7) for x, y in zip(*column, strict=True)) for column in counts.transpose(2, 0, 1)]
    found = compare.difference(a, b, "known")
    assert found.better == pytest.approx(100 * np.mean([one > 0 for one in exact]))
    assert found.worse == pytest.approx(100 * np.mean([one < 0 for one in exact]))
    assert 0 in exact


def test_a_target_that_is_hit_exactly_is_reached():
    assert metrics.rounds_to_target(np.array(jnp.array([0.5, 0.7])), 0.7).rounds == (2,)
    kind = report.Kind("accuracy", True, True)
    assert kind.reaches(100 * 0.57, 57.0) and not kind.reaches(56.99, 57.0) and not kind.reaches(np.nan, 0.0)
    assert report.Kind("rmse", False, False).reaches(float(jnp.float32(0.1)), 0.1)


@pytest.mark.parametrize("clients", [12, 80], ids=["exact", "approximate"])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_of_clients_are_those_of_their_counts(seed, clients):
    """Differences of thirds are ±1/3, ±2/3 or ±1, whatever their last bits are."""
    counts = np.random.default_rng(seed).integers(0, 4, (2, clients))
    scores = [[float(jnp.float32(count) / 3) for count in row] for row in counts]
    found = compare.difference(*(system(name, [row]) for name, row in zip("ab", scores, strict=True)), "known")
    moved = (counts[0] - counts[1])[counts[0] != counts[1]]
    # SciPy's exact distribution is that of ranks without ties: every choice of signs is looked at instead.
    if clients == 12:
        ranks = scipy.stats.rankdata(np.abs(moved))
        signs = np.array(list(itertools.product([0, 1], repeat=len(moved))))
        sums = signs @ ranks
        smaller = min(ranks[moved > 0].sum(), ranks[moved < 0].sum())
        expected = min(1.0, 2 * np.mean(sums <= smaller + 1e-9))
    else:
        expected = scipy.stats.wilcoxon(moved, method="asymptotic").pvalue
    assert found.p_clients == pytest.approx(expected)


def test_magnitudes_that_differ_are_not_tied():
    differences = np.array([1.0, -2.0, 3.0, 4.0, -5.0, 6.0])
    assert compare.signed_rank(differences, 1e-6) == pytest.approx(scipy.stats.wilcoxon(differences, method="exact").pvalue)


def test_one_large_score_does_not_make_the_differences_of_others_equal():
    """A perplexity of 10 million, whose rounding is larger than what tells other clients apart."""
    rng = np.random.default_rng(0)
    one = rng.uniform(2, 3, 20)
    other = one + rng.normal(0.1, 0.15, 20)
    one[0], other[0] = 1e7, 2e7
    found = compare.signed_rank(one - other, report.records.rounding_of(one, other))
    assert found == pytest.approx(scipy.stats.wilcoxon(one - other, method="exact").pvalue)


def test_an_infinite_score_is_worse_than_any_other_and_like_another():
    """The perplexity of a large loss, which is finite itself."""
    kind, inf = report.Kind("perplexity", False, False), np.inf
    np.testing.assert_array_equal(kind.reaches(np.array([inf, 3.0, 9.0]), 5.0), [False, True, False])
    np.testing.assert_array_equal(kind.gain([inf, 3.0, inf], [3.0, inf, inf]), [-inf, inf, 0])
    assert report.Kind("score", True, False).reaches(inf, 5.0)
    # The ranks of infinite differences are the highest, and equal.
    ranks = np.array([-1.0, 2.0, -3.0, 4.5, 4.5])
    signs = np.array(list(itertools.product([0, 1], repeat=5))) @ np.abs(ranks)
    expected = 2 * np.mean(signs <= 4 + 1e-9)
    assert compare.signed_rank(np.array([-1.0, 2.0, -3.0, inf, inf])) == pytest.approx(expected)


def test_clients_with_infinite_scores_are_compared():
    finite, infinite = system("a", [[0.3, 0.4, 0.5, 0.6]]), system("b", [[np.inf, 0.5, np.inf, 0.6]])
    found = compare.difference(finite, infinite, "known")
    assert (found.better, found.worse, found.mean) == (0, 75, -np.inf)
    assert found.p_clients == pytest.approx(0.25) and np.isnan(found.p_seeds)
