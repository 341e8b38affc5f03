"""Verdicts on published numbers and orders, from scores over seeds and over orders of the labels."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import metrics

WITHIN, ORDER, NOT, ONE, UNRUN = "within the spread", "in order", "not reproduced", "one run, no spread", "not run"
VERDICTS = (WITHIN, ORDER, NOT, ONE, UNRUN)
"""On numbers; on orders, `ORDER`, `NOT`, `OPEN`, `ONE` and `UNRUN`."""

OPEN = "undecided"


class Measured(NamedTuple):
    """A score over seeds, in percent.

    Attributes:
      mean: over seeds, and over orders of the labels for new clients.
      seeds: sample deviation over seeds; NaN for one.
      orders: sample deviation over orders of the means over seeds; NaN for one.
    """

    mean: float
    seeds: float
    orders: float

    @property
    def spread(self) -> float:
        """Deviation of one run with one order; NaN for one seed, whose orders say nothing of what another seed would give."""
        return math.hypot(self.seeds, _or_0(self.orders))

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "diverged"
        parts = [f"{self.mean:.2f}", *(f"±{value:.2f}" for value in (self.seeds, self.orders) if not math.isnan(value))]
        return " ".join(parts)


def measured(row: Mapping[str, Any], clients: str, score: str) -> Measured:
    """A score of an extract's row."""
    over = [row[clients][score], row.get("orders", {}).get(score, [None]) if clients == "new" else [None]]
    seeds, orders = (np.array([math.nan if value is None else value for value in values], float) for values in over)
    return Measured(float(seeds.mean()), _deviation(seeds), _deviation(orders))


def _deviation(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if values.size > 1 else math.nan


def verdicts(published: Mapping[str, float], found: Mapping[str, Measured]) -> dict[str, str]:
    """What stands of each published number of one table.

    Args:
      published: by system.
      found: by system, of those that were run.

    Returns:
      By system: `WITHIN` if the published number is within two deviations of one run; else `ORDER` if each other system that
      was run and has a number stands on the published side of this one; else `NOT`. Published numbers that are closer to each
      other than two deviations have no order. `ONE` for one seed, so that no distance can be judged; `UNRUN` if it was not run.
    """
    told = {}
    for system, value in published.items():
        if system not in found:
            told[system] = UNRUN
            continue
        mine = found[system]
        if math.isnan(mine.spread) and not math.isnan(mine.mean):
            told[system] = ONE
            continue
        if abs(mine.mean - value) <= 2 * mine.spread:
            told[system] = WITHIN
            continue
        others = [name for name in published if name in found and name != system and not math.isnan(found[name].mean)]
        kept = all(
            abs(value - published[other]) <= 2 * math.hypot(_or_0(mine.spread), _or_0(found[other].spread))
            or (value - published[other]) * (mine.mean - found[other].mean) > 0
            for other in others
        )
        told[system] = ORDER if kept and others and not math.isnan(mine.mean) else NOT
    return told


def _or_0(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def order(systems: Sequence[Sequence[float]]) -> str:
    """What stands of an order.

    Args:
      systems: of each, that which is said to be best first, the values by seed, higher ones being better and the seeds the same;
        -infinity for a seed without a value.

    Returns:
      `ORDER` if each system is above the next: the 95 % interval of the mean paired difference lies above 0. `NOT` if one of them
      lies below 0, else `OPEN`; `ONE` for one seed. Where a seed has no value, all seeds must say the same.
    """
    words = {_pair(np.array(first), np.array(second)) for first, second in itertools.pairwise(systems)}
    return next(word for word in (NOT, OPEN, ONE, ORDER) if word in words)


def _pair(first: np.ndarray, second: np.ndarray) -> str:
    if first.size == 1:
        return ONE
    if np.isfinite([first, second]).all():
        gaps = first - second
        mean, margin = gaps.mean(), metrics.confidence_margin(gaps)
        return ORDER if mean - margin > 0 else NOT if mean + margin < 0 else OPEN
    return ORDER if (first > second).all() else NOT if (first < second).all() else OPEN
