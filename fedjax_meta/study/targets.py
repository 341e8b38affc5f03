"""Targets: a score that runs are compared by, or end at, and its course over the rounds of a run."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import checks, report
from fedjax_meta.report.frames import USER_ACCURACY

_KNOWN = "known"


class Target(NamedTuple):
    """A score to reach.

    Attributes:
      value: in percent if the score is a share.
      name: of the score, or "user_accuracy"; the one that is compared when not given.
    """

    value: float
    name: str | None = None


def target(text: str, *, name: str = "target") -> Target:
    """A target from words: a number, or `SCORE=NUMBER`.

    Args:
      text: the words.
      name: of the field or flag, for errors.

    Raises:
      ValueError: no number, or one that is not finite.

    Example:
      >>> target("80"), target("rmse=0.9")
      (Target(value=80.0, name=None), Target(value=0.9, name='rmse'))
    """
    score, equals, number = text.rpartition("=")
    try:
        if equals and not score.strip():
            raise ValueError
        value = float(number)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number, or SCORE=NUMBER, e.g. 80 or rmse=0.9") from None
    checks.finite(name, value)
    return Target(value, score.strip() or None)


def curve(rows: Sequence[Mapping[str, Any]], score: str | None) -> tuple[np.ndarray, np.ndarray, report.Kind]:
    """(rounds `[E]`, mean scores of known clients `[E]`, what they are) of a run; user accuracy is known of every round.

    Scores are NaN from the round on in which the run diverged.

    Args:
      rows: its evaluations, see `report.compact`.
      score: its name; the first one that was measured when not given.

    Raises:
      ValueError: the score was not measured.
    """
    if score == USER_ACCURACY:
        values = _of_every_round(rows, score)
        if not values.size:
            raise ValueError(f"no {score} was recorded: name it in the study, see user_accuracy")
        return np.arange(1, len(values) + 1), 100 * values, report.Kind(score, True, True)
    means = [report.mean_score(row, _KNOWN, score, test=_KNOWN) for row in rows]
    kind = report.main_score(rows[0]["tests"][_KNOWN], score).kind
    return np.array([row["round"] for row in rows]), np.array(means), kind


def _of_every_round(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """What was recorded of every round `[R]`; NaN from the round on in which the run diverged, up to where it recovered."""
    values: list[float] = []
    since = None
    for row in rows:
        before = len(values)
        values += row["train"].get(name, ())
        first = report.diverged([row], _KNOWN)
        since = first if since is None or first is None else since
        if since is not None:
            lost = max(since - 1, before)
            values[lost:] = [np.nan] * (len(values) - lost)
    return np.array(values, float)


def is_reached(rows: Sequence[Mapping[str, Any]], goal: Target) -> bool:
    """Whether a run was at least as good as a target at one of its evaluations, or, for user accuracy, rounds."""
    _, scores, kind = curve(rows, goal.name)
    return bool(np.any(kind.reaches(scores, goal.value)))
