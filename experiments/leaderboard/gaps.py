"""Paired differences over seeds, and their intervals in words."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.leaderboard.board import Line
from fedjax_meta import metrics, report

BETTER, OPEN, WORSE = "better", "undecided", "worse"
END = "‡"
"""Marks a system whose best value stands at an end of its grid, and a comparison with a system that is not sound, see `Gap`."""


class Gap(NamedTuple):
    """A paired difference over seeds, above 0 where the first system is better.

    Attributes:
      words: its mean and 95 % interval.
      verdict: `BETTER` or `WORSE` where the interval lies on one side of 0, else `OPEN`.
      sound: whether a statement may rest on it: neither of the two is an unsound system.
    """

    words: str
    verdict: str
    sound: bool = True


def between(first: Mapping[int, float], second: Mapping[int, float], kind: report.Kind) -> Gap | None:
    """The difference of scores by seed, on the seeds that both have; `None` where one of them has no number."""
    gaps = np.array([first[seed] - second[seed] for seed in first if seed in second])
    if not gaps.size or not np.isfinite(gaps).all():
        return None
    gaps = gaps if kind.higher_is_better else -gaps
    mean, margin = float(gaps.mean()) or 0.0, metrics.confidence_margin(gaps)  # -0.0 would be printed as below 0
    interval = f" [{kind.text(mean - margin, sign=True)}, {kind.text(mean + margin, sign=True)}]" if gaps.size > 1 else ""
    words = kind.text(mean, sign=True) + interval
    return Gap(words, BETTER if mean - margin > 0 else WORSE if mean + margin < 0 else OPEN)


def of_lines(first: Sequence[Line], second: Sequence[Line], name: str, unsound: Collection[str] = ()) -> Gap | None:
    """The difference of two systems in "known" or "new"; pairs with one of the unsound systems are not sound."""
    one, other = ({line.seed: getattr(line, name) for line in some} for some in (first, second))
    found = between(one, other, first[0].kind)
    return None if found is None else found._replace(sound=not {first[0].system, second[0].system} & {*unsound})


def sound(gaps: Iterable[Gap | None]) -> list[Gap]:
    """Those that are sound."""
    return [one for one in gaps if one is not None and one.sound]


def counts(gaps: Iterable[Gap | None]) -> list[int]:
    """How many say better, how many nothing, and how many worse."""
    verdicts = [one.verdict for one in gaps if one is not None]
    return [verdicts.count(verdict) for verdict in (BETTER, OPEN, WORSE)]
