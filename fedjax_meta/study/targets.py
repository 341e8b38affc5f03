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

    Args:
      rows: its evaluations, see `report.compact`.
      score: its name; the first one that was measured when not given.

    Raises:
      ValueError: the score was not measured.
    """
    if score == USER_ACCURACY:
        values = [value for row in rows for value in row["train"].get(score, ())]
        if not values:
            raise ValueError(f"no {score} was recorded: name it in the study, see user_accuracy")
        return np.arange(1, len(values) + 1), 100 * np.array(values, float), report.Kind(score, True, True)
    found = [report.main_score(row["tests"][_KNOWN], score) for row in rows]
    return np.array([row["round"] for row in rows]), np.array([one.mean for one in found]), found[0].kind


def is_reached(rows: Sequence[Mapping[str, Any]], goal: Target) -> bool:
    """Whether a run was at least as good as a target at one of its evaluations, or, for user accuracy, rounds."""
    _, scores, kind = curve(rows, goal.name)
    return bool(np.any(kind.reaches(scores, goal.value)))
