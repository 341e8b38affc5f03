"""The scores of methods by round, over seeds, for figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta.report.records import Kind, compact, diverged, joined, main_score, mean_score
from fedjax_meta.simulation import Record


class Series(NamedTuple):
    """The scores of one method on one group of clients, in one training run; shares in percent.

    Attributes:
      title: name of the method.
      clients: which clients, e.g. "local" or "new".
      seed: of the run.
      kind: what the score is.
      rounds: int `[E]`.
      means: the mean over clients `[E]`; NaN where the run had diverged.
      by_client: the score of each client at the last evaluation `[N]`; NaN if the run has diverged.
      diverged: the round from which on the run has diverged, `None` if it has not; see `diverged`.
    """

    title: str
    clients: str
    seed: int
    kind: Kind
    rounds: np.ndarray
    means: np.ndarray
    by_client: np.ndarray
    diverged: int | None = None


def series(
    title: str,
    clients: str,
    seed: int,
    rows: Sequence[Mapping[str, Any] | Record],
    test: str,
    score: str | None = None,
    *,
    run: str | None = None,
) -> Series:
    """The series of one evaluator in a run.

    Args:
      title: name of the method.
      clients: which clients the evaluator tested, e.g. "local" or "new".
      seed: of the run.
      rows: one for each evaluation, in order: the records of `simulate`, or what `compact` makes of them.
      test: name of the evaluator.
      score: name of the score; the first of `score_names` when not given.
      run: name of the evaluator by which the run counts as diverged, for all groups of clients; the first of the rows when not
        given.

    Raises:
      ValueError: `rows` is empty or has no such test, or the test no such score.
    """
    if not rows:
        raise ValueError(f"rows is empty: there is no evaluation of {title} to report")
    found: list[dict[str, Any]] = []
    part = None  # rounds up to where a run was stopped, which no evaluation ended
    for row in rows:
        one = joined(part, dict(compact(row) if isinstance(row, Record) else row))
        part = None if one["tests"] else one
        found += [one] if one["tests"] else []
    if not found:
        raise ValueError(f"rows hold no evaluation of {title}: the run was stopped before")
    if test not in found[-1]["tests"]:
        raise ValueError(f"test={test!r} is not a test of this run; it has {', '.join(found[-1]['tests'])}")
    run = next(iter(found[-1]["tests"])) if run is None else run
    last, since = main_score(found[-1]["tests"][test], score), diverged(found, run)
    return Series(
        title,
        clients,
        seed,
        last.kind,
        np.array([row["round"] for row in found]),
        np.array([mean_score(row, test, score, test=run) for row in found]),
        last.values if since is None else np.full_like(last.values, math.nan),
        since,
    )


def common_rounds(rounds: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """The rounds after which every run was tested; one that ended early counts at all later ones.

    Example:
      >>> common_rounds([[1, 10, 15], [1, 10, 20, 30]]).tolist()
      [1, 10, 20, 30]
    """
    tested = [set(map(int, mine)) for mine in rounds]
    return np.array([r for r in sorted(set().union(*tested)) if all(r in mine or r > max(mine) for mine in tested)])


def places(tested: Sequence[int] | np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Which of a run's evaluations hold after some rounds: the last one of those up to there.

    Example:
      >>> places([1, 10, 15], np.array([1, 10, 20])).tolist()
      [0, 1, 2]
    """
    return np.searchsorted(tested, rounds, side="right") - 1
