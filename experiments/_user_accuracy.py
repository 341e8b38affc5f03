"""MTFL's user accuracy in extracts of runs: after the last round, its deviation over the cohort, and rounds to targets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LAST, DEVIATION, ROUNDS = "user_accuracy", "user_accuracy_std", "rounds to "
"""Names of scores in extracts; the last one is followed by the target in percent."""


class Claimed(NamedTuple):
    """A score that a claim speaks of.

    Attributes:
      rank: mean over seeds, the higher the better: rounds count negative, and a target that a seed never reached is -infinity.
      words: mean and sample deviation over seeds.
    """

    rank: float
    words: str


def extract(trials: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> dict[str, list[float | None]]:
    """The scores of each seed: shares in percent, rounds from 1 on, `None` for a target that was not reached; {} without any."""
    curves = [np.array([v for row in t["rows"] for v in row["train"].get(LAST, ())], float) for t in trials]
    if not all(curve.size for curve in curves):
        return {}
    last = [trial["rows"][-1]["train"] for trial in trials]
    found: dict[str, list[float | None]] = {name: [_percent(train[name][-1]) for train in last] for name in (LAST, DEVIATION)}
    for target in targets:
        hits = [np.flatnonzero(100 * curve >= target) for curve in curves]
        found[f"{ROUNDS}{target:g}"] = [int(hit[0]) + 1 if hit.size else None for hit in hits]
    return found


def _percent(value: float) -> float | None:
    return round(100 * value, 3) if math.isfinite(value) else None


def claimed(scores: Mapping[str, Sequence[float | None]], name: str) -> Claimed:
    """A score of an extract, as claims compare it.

    Raises:
      KeyError: the extract has no such score.
    """
    values = scores[name]
    missing = sum(value is None for value in values)
    if missing:
        many = "" if missing == len(values) else f" in {missing} of {len(values)} seeds"
        return Claimed(-math.inf, f"never{many}" if name.startswith(ROUNDS) else "diverged")
    known = np.array(values, float)
    mean, fine = float(known.mean()), not name.startswith(ROUNDS)
    spread = f" ±{known.std(ddof=1):.{2 if fine else 1}f}" if known.size > 1 else ""
    return Claimed(mean, f"{mean:.2f}{spread}") if fine else Claimed(-mean, f"{mean:.1f}{spread}")


def table(rows: Sequence[tuple[str, Mapping[str, Sequence[float | None]]]]) -> tuple[list[str], list[list[str]]]:
    """(headings, a line for each system) of pairs of a title and the scores of an extract."""
    names = list(dict.fromkeys(name for _, scores in rows for name in scores))
    words = {LAST: "user accuracy, last round", DEVIATION: "deviation over the cohort"}
    headings = ["system", *(words.get(name, f"{name} %") for name in names)]
    return headings, [[title, *(claimed(scores, name).words for name in names)] for title, scores in rows]
