"""The scores of methods by round, over seeds, for tables and figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta.report.records import compact, diverged, main_score
from fedjax_meta.simulation import Record


class Series(NamedTuple):
    """The scores of one method on one group of clients, in one training run.

    Attributes:
      title: name of the method.
      clients: which clients, e.g. "local" or "new".
      seed: of the run.
      rounds: int `[E]`.
      accuracy: the main score `[E]`, in percent if it is a share; accuracy over all samples where there are confusion matrices.
      by_client: each client's main score at the last evaluation `[N]`, in percent if it is a share.
      scores: `Evaluation.summary` of the last evaluation, shares in percent.
      diverged: the round from which on the run has diverged, `None` if it has not; see `diverged`.
      score: name of the main score, see `MainScore`.
      share: whether it is one.
      higher_is_better: whether a larger one is better.
      over_samples: whether `accuracy` is over the samples of all clients; else it is a mean over clients.
    """

    title: str
    clients: str
    seed: int
    rounds: np.ndarray
    accuracy: np.ndarray
    by_client: np.ndarray
    scores: dict[str, float]
    diverged: int | None = None
    score: str = "accuracy"
    share: bool = True
    higher_is_better: bool = True
    over_samples: bool = True


def series(
    title: str,
    clients: str,
    seed: int,
    rows: Sequence[Mapping[str, Any] | Record],
    test: str,
    score: str | None = None,
) -> Series:
    """The series of one evaluator in a run.

    Args:
      title: name of the method.
      clients: which clients the evaluator tested, e.g. "local" or "new".
      seed: of the run.
      rows: one for each evaluation, in order: the records of `simulate`, or what `compact` makes of them.
      test: name of the evaluator.
      score: name of the main score; that of `score_names` when not given.

    Raises:
      ValueError: `rows` is empty or has no such test, or the test no such score.
    """
    if not rows:
        raise ValueError(f"rows is empty: there is no evaluation of {title} to report")
    found = [compact(row) if isinstance(row, Record) else row for row in rows]
    if test not in found[-1]["tests"]:
        raise ValueError(f"test={test!r} is not a test of this run; it has {', '.join(found[-1]['tests'])}")
    tests = [row["tests"][test] for row in found]
    last, main = tests[-1]["scores"], main_score(tests[-1], score)
    whole = {
        f"{name}_{what}" for name, one in tests[-1].get("metrics", {}).items() if not one["share"] for what in ("mean", "std")
    }
    whole.add("loss")
    return Series(
        title,
        clients,
        seed,
        np.array([row["round"] for row in found]),
        np.array([main_score(one, score).overall for one in tests]),
        main.values,
        {name: value if name in whole else 100 * value for name, value in last.items()},
        diverged(found, test),
        main.name,
        main.share,
        main.higher_is_better,
        main.name == "accuracy" and "accuracy" in tests[-1],
    )


def marked(runs: Sequence[Series]) -> str:
    """The title of a method's runs, with a mark if some of them diverged.

    Example:
      >>> one = Series("FedAvg", "local", 1, [1, 20], [9.0, math.nan], [math.nan], {})
      >>> marked([one]), marked([one._replace(diverged=20)]), marked([one._replace(diverged=20), one._replace(seed=2)])
      ('FedAvg', 'FedAvg (diverged at round 20)', 'FedAvg (1 of 2 seeds diverged at round 20)')
    """
    rounds = sorted(run.diverged for run in runs if run.diverged is not None)
    if not rounds:
        return runs[0].title
    who = f"{len(rounds)} of {len(runs)} seeds " if len(runs) > 1 else ""
    when = f"{rounds[0]}" if rounds[0] == rounds[-1] else f"{rounds[0]} to {rounds[-1]}"
    return f"{runs[0].title} ({who}diverged at round {when})"


def check_titles(titles: Sequence[tuple[Any, ...]]) -> None:
    """Refuses two runs that a table or a figure could not tell apart.

    Args:
      titles: of each run its title, its clients and its seed.

    Raises:
      ValueError: two of them are equal.
    """
    for number, one in enumerate(titles):
        if one in titles[:number]:
            raise ValueError(
                f"two systems have the title {one[0]!r} ({', '.join(map(str, one[1:]))}): a table could not tell them apart; "
                "leave one out, or give them titles of their own"
            )


def over_seeds(runs: Sequence[Series]) -> dict[str, tuple[float, float]]:
    """Mean and sample standard deviation (NaN for one seed) of every score over the seeds of a method on a group of clients."""
    return {
        name: (float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan)
        for name in runs[0].scores
        for values in [[run.scores[name] for run in runs]]
    }


def with_spread(value: tuple[float, float], runs: int) -> str:
    """A mean as text, with its sample standard deviation if there are several runs.

    Example:
      >>> with_spread((97.456, 0.21), 3), with_spread((97.456, 0.0), 1)
      ('97.46 ±0.21', '97.46')
    """
    return f"{value[0]:.2f} ±{value[1]:.2f}" if runs > 1 else f"{value[0]:.2f}"
