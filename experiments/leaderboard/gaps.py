"""Paired differences over seeds, and their intervals in words."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.leaderboard.board import Line
from fedjax_meta import metrics, report

BETTER, OPEN, WORSE = "better", "undecided", "worse"
END = "‡"
"""Marks a system whose best value stands at an end of its grid, and a comparison with one."""


class Gap(NamedTuple):
    """A paired difference over seeds, above 0 where the first system is better.

    Attributes:
      words: its mean and 95 % interval.
      verdict: `BETTER` or `WORSE` where the interval lies on one side of 0, else `OPEN`.
      at_end: whether one of the two chose a value at the end of its grid.
    """

    words: str
    verdict: str
    at_end: bool = False


def between(first: Mapping[int, float], second: Mapping[int, float], kind: report.Kind) -> Gap | None:
    """The difference of scores by seed, on the seeds that both have; `None` where one of them has no number."""
    gaps = np.array([first[seed] - second[seed] for seed in first if seed in second])
    if not gaps.size or not np.isfinite(gaps).all():
        return None
    gaps = gaps if kind.higher_is_better else -gaps
    mean, margin = float(gaps.mean()), metrics.confidence_margin(gaps)
    interval = f" [{kind.text(mean - margin, sign=True)}, {kind.text(mean + margin, sign=True)}]" if gaps.size > 1 else ""
    words = kind.text(mean, sign=True) + interval
    return Gap(words, BETTER if mean - margin > 0 else WORSE if mean + margin < 0 else OPEN)


def of_lines(first: Sequence[Line], second: Sequence[Line], name: str) -> Gap | None:
    """The difference of two systems in "known" or "new"."""
    one, other = ({line.seed: getattr(line, name) for line in some} for some in (first, second))
    found = between(one, other, first[0].kind)
    return None if found is None else found._replace(at_end=bool(first[0].edge or second[0].edge))


def inside(gaps: Iterable[Gap | None]) -> list[Gap]:
    """Those of two systems neither of which chose a value at the end of its grid."""
    return [one for one in gaps if one is not None and not one.at_end]


def counts(gaps: Iterable[Gap | None]) -> list[int]:
    """How many say better, how many nothing, and how many worse."""
    verdicts = [one.verdict for one in gaps if one is not None]
    return [verdicts.count(verdict) for verdict in (BETTER, OPEN, WORSE)]
