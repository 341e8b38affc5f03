"""MTFL's user accuracy in extracts of runs: after the last round, its deviation over the cohort, and rounds to targets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import metrics

LAST, DEVIATION, ROUNDS = "user_accuracy", "user_accuracy_std", "rounds to "
"""Names of scores in extracts; the last one is followed by the target in percent."""


class Claimed(NamedTuple):
    """A score that a claim speaks of.

    Attributes:
      values: by seed, the higher the better: rounds count negative; -infinity if a seed diverged or never reached its target.
      words: mean and sample deviation over seeds.
    """

    values: list[float]
    words: str


def extract(trials: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> dict[str, list[float | None]]:
    """The scores of each seed: shares in percent, rounds from 1 on, `None` for a target that was not reached; {} without any.

    From the round on in which a run diverged it has no score, and reaches nothing.
    """
    curves = [np.array([v for row in t["rows"] for v in row["train"].get(LAST, ())], float) for t in trials]
    if not all(curve.size for curve in curves):
        return {}
    ends = [trial["diverged"] for trial in trials]
    curves = [curve if end is None else curve[: end - 1] for curve, end in zip(curves, ends, strict=True)]
    found: dict[str, list[float | None]] = {
        name: [_percent(t["rows"][-1]["train"][name][-1]) if t["diverged"] is None else None for t in trials]
        for name in (LAST, DEVIATION)
    }
    for target in targets:
        # A run that diverged in its first round has an empty curve, and NaN reaches nothing.
        hits = [metrics.rounds_to_target(np.append(curve, np.nan), target / 100) for curve in curves]
        found[f"{ROUNDS}{target:g}"] = [hit.rounds[0] for hit in hits]
    return found


def _percent(value: float) -> float | None:
    return round(100 * value, 3) if math.isfinite(value) else None


def claimed(scores: Mapping[str, Sequence[float | None]], name: str) -> Claimed:
    """A score of an extract, as claims compare it.

    Raises:
      KeyError: the extract has no such score.
    """
    values = scores[name]
    missing, fine = sum(value is None for value in values), not name.startswith(ROUNDS)
    ranks = [-math.inf if value is None else value if fine else -value for value in values]
    if missing:
        many = "" if missing == len(values) else f" in {missing} of {len(values)} seeds"
        return Claimed(ranks, "diverged" if fine else f"never{many}")
    known, digits = np.array(values, float), 2 if fine else 1
    spread = f" ±{known.std(ddof=1):.{digits}f}" if known.size > 1 else ""
    return Claimed(ranks, f"{known.mean():.{digits}f}{spread}")


def table(rows: Sequence[tuple[str, Mapping[str, Sequence[float | None]]]]) -> tuple[list[str], list[list[str]]]:
    """(headings, a line for each system) of pairs of a title and the scores of an extract."""
    names = list(dict.fromkeys(name for _, scores in rows for name in scores))
    words = {LAST: "user accuracy, last round", DEVIATION: "deviation over the cohort"}
    headings = ["system", *(words.get(name, f"{name} %") for name in names)]
    return headings, [[title, *(claimed(scores, name).words for name in names)] for title, scores in rows]
