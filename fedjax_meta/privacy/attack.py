"""Membership inference: how well an attacker tells samples (or clients) that were trained on from others, against what epsilon
allows.

Yeom, Giacomelli, Fredrikson, Jha, "Privacy risk in machine learning", CSF 2018, arXiv 1709.01604 (a threshold on the loss);
Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership inference attacks from first principles", S&P 2022, arXiv 2112.03570
(likelihood ratios from models that were trained with and without a sample). An attack that fails proves nothing; one that beats
the bound proves an accountant or an implementation wrong.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks


class Attack(NamedTuple):
    """What an attack achieves; intervals are Clopper-Pearson intervals.

    Attributes:
      true_positives, false_positives: shares of members, and of others, that it calls members.
      true_positives_range, false_positives_range: (low, high).
      advantage: their difference, 0 for a guess and 1 for certainty.
      advantage_range: (low, high), at least as sure as asked.
    """

    true_positives: float
    false_positives: float
    true_positives_range: tuple[float, float]
    false_positives_range: tuple[float, float]
    advantage: float
    advantage_range: tuple[float, float]


def membership_attack(
    members: ArrayLike, others: ArrayLike, *, false_positives: float | None = None, confidence: float = 0.95
) -> Attack:
    """An attack that calls those members whose score is above a threshold.

    The threshold is chosen on every other score and judged on the rest, so that its result is not what was fitted.

    Args:
      members: `[n]`, scores of what was trained on, in random order, e.g. the negative loss or `likelihood_ratio`.
      others: `[m]`, scores of what was not.
      false_positives: the share of others that may be called members; the threshold of the largest advantage when not given.
      confidence: of the intervals, in (0, 1).

    Raises:
      ValueError: fewer than 4 scores of a kind, NaN, a share or confidence out of range.

    Example:
      >>> round(membership_attack(np.arange(100) + 50.0, np.arange(100.0)).advantage, 2)
      0.5
    """
    checks.fraction("confidence", confidence)
    if false_positives is not None:
        checks.fraction("false_positives", false_positives)
    found = []
    for name, scores in (("members", members), ("others", others)):
        array = np.asarray(scores, float)
        if array.ndim != 1 or array.size < 4 or np.isnan(array).any():
            raise ValueError(f"{name} must be at least 4 scores [n] without NaN, not {list(array.shape)}")
        found.append(array)
    threshold = _threshold(found[0][::2], found[1][::2], false_positives)
    hits = [(int(np.sum(scores[1::2] > threshold)), scores[1::2].size) for scores in found]
    # Two intervals at once: the chance that either misses is shared between them.
    ranges = [_interval(*hit, 1 - (1 - confidence) / 2) for hit in hits]
    shares = [count / size for count, size in hits]
    return Attack(
        true_positives=shares[0],
        false_positives=shares[1],
        true_positives_range=ranges[0],
        false_positives_range=ranges[1],
        advantage=shares[0] - shares[1],
        advantage_range=(ranges[0][0] - ranges[1][1], ranges[0][1] - ranges[1][0]),
    )


def _threshold(members: Any, others: Any, false_positives: float | None) -> float:
    if false_positives is not None:
        return float(np.quantile(others, 1 - false_positives, method="higher"))
    candidates = np.concatenate([[-math.inf], np.unique(np.concatenate([members, others]))])
    above = [1 - np.searchsorted(np.sort(scores), candidates, "right") / scores.size for scores in (members, others)]
    return float(candidates[np.argmax(above[0] - above[1])])


def _interval(count: int, size: int, confidence: float) -> tuple[float, float]:
    from scipy import stats

    found = stats.binomtest(count, size).proportion_ci(confidence, "exact")
    return float(found.low), float(found.high)


def likelihood_ratio(score: ArrayLike, trained_with: ArrayLike, trained_without: ArrayLike) -> np.ndarray[Any, Any]:
    """LiRA's score: the log of how much likelier a score is under models that were trained with the sample than without it.

    Both are taken as normal distributions, of each sample by itself.

    Args:
      score: `[n]`, of the attacked model, roughly normal, e.g. `logit_of_loss`.
      trained_with, trained_without: `[k, n]`, of shadow models, at least 2 of each kind.

    Raises:
      ValueError: other shapes.
    """
    from scipy import stats

    given, with_, without = (np.asarray(part, float) for part in (score, trained_with, trained_without))
    for name, part in (("trained_with", with_), ("trained_without", without)):
        if part.ndim != 2 or part.shape[0] < 2 or part.shape[1:] != given.shape:
            raise ValueError(f"{name} must be scores [k, {given.size}] of at least 2 shadow models, not {list(part.shape)}")

    def log_density(models: Any) -> Any:
        deviation = np.maximum(models.std(0, ddof=1), 1e-6)
        return stats.norm.logpdf(given, models.mean(0), deviation)

    return log_density(with_) - log_density(without)


def logit_of_loss(loss: ArrayLike) -> np.ndarray[Any, Any]:
    """`log(p / (1 - p))` of the probability `p = exp(-loss)` that a classifier gives to the true label."""
    values = np.maximum(np.asarray(loss, float), 1e-12)
    return -values - np.log(-np.expm1(-values))


def largest_advantage(epsilon: float, delta: float) -> float:
    """The largest advantage of any attack on an (epsilon, delta)-private run: `(exp(e) - 1 + 2 delta) / (exp(e) + 1)`.

    Kairouz, Oh, Viswanath, "The composition theorem for differential privacy", ICML 2015, arXiv 1311.0776.

    Example:
      >>> largest_advantage(0.0, 0.0), largest_advantage(math.inf, 0.0)
      (0.0, 1.0)
    """
    checks.share("delta", delta)
    if math.isnan(epsilon) or epsilon < 0:
        raise ValueError(f"epsilon={epsilon} must be at least 0")
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700)) + 1))


def largest_true_positives(false_positives: float, epsilon: float, delta: float) -> float:
    """The largest share of members that any attack finds at a share of false positives: the smaller of `exp(e) f + delta` and
    `1 - exp(-e) (1 - delta - f)` (the same paper)."""
    checks.share("false_positives", false_positives)
    checks.share("delta", delta)
    if math.isnan(epsilon) or epsilon < 0:
        raise ValueError(f"epsilon={epsilon} must be at least 0")
    grown = math.exp(min(epsilon, 700)) * false_positives + delta
    return float(np.clip(min(grown, 1 - math.exp(-epsilon) * (1 - delta - false_positives)), 0, 1))
