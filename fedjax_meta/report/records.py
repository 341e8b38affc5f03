"""Compact records of every client at every evaluation, as JSON values; and the score that a report shows of them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import metrics
from fedjax_meta.evaluation import Evaluation
from fedjax_meta.measures import Score
from fedjax_meta.simulation import Record


def compact(record: Record) -> dict[str, Any]:
    """A record as JSON values: the scores of every client, and the confusion matrices that they are computed from.

    Returns:
      `round`, `seconds`, `compile_seconds`, `train` (each training metric by round), and `tests`: for each evaluator
      `accuracy`, `f1` (as FedMeta-Per takes it, see `metrics.within_own_classes`) and `loss` of each client `[N]`, `scores` as
      in `metrics.summary`, and `confusion [N, K, K]`. Without a confusion matrix, and for metrics beside it, `metrics` holds for
      each its `values [N]`, `higher_is_better` and `share`. `faults` lists what was not finite since the record before, see
      `simulation.Fault`. Scores are NaN where the loss is not finite.
    """
    return {
        "round": record.round,
        "seconds": round(record.seconds, 4),
        "compile_seconds": round(record.compile_seconds, 4),
        "train": {name: _numbers(values) for name, values in record.metrics.items()},
        "tests": {name: _test(evaluation) for name, evaluation in record.evaluations.items()},
        "faults": [fault._asdict() for fault in record.faults],
    }


def joined(first: Mapping[str, Any] | None, then: dict[str, Any]) -> dict[str, Any]:
    """A row of `compact`, preceded by that of a record which ended between evaluations (`should_stop` of `simulate`)."""
    if first is None:
        return then
    sums = {name: round(first[name] + then[name], 4) for name in ("seconds", "compile_seconds")}
    train = {name: [*first["train"][name], *values] for name, values in then["train"].items()}
    return {**then, **sums, "train": train, "faults": [*first["faults"], *then["faults"]]}


def without_confusion(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `compact` without its confusion matrices, for all evaluations of a run but the last."""
    tests = {name: {key: value for key, value in test.items() if key != "confusion"} for name, test in row["tests"].items()}
    return {**row, "tests": tests}


def _test(evaluation: Evaluation) -> dict[str, Any]:
    loss: Any = None if evaluation.loss is None else np.asarray(evaluation.loss)
    found: dict[str, Any] = {}
    if evaluation.confusion is not None:
        confusion = np.asarray(evaluation.confusion)
        found["accuracy"] = _numbers(metrics.where_finite(metrics.accuracy(confusion), loss))
        found["f1"] = _numbers(metrics.where_finite(metrics.macro_f1(metrics.within_own_classes(confusion)), loss))
    if loss is not None:
        found["loss"] = _numbers(loss)
    found["scores"] = evaluation.summary()
    if evaluation.confusion is not None:
        found["confusion"] = confusion.tolist()
    if evaluation.metrics:
        found["metrics"] = {name: _score(score, loss) for name, score in evaluation.metrics.items()}
    return found


def _score(score: Score, loss: np.ndarray | None) -> dict[str, Any]:
    values = np.asarray(score.values)
    shown = values if loss is None else metrics.where_finite(values, loss)
    return {"values": _numbers(shown), "higher_is_better": score.higher_is_better, "share": score.share}


class MainScore(NamedTuple):
    """The score of a test that tables, figures and comparisons show: accuracy where there is a confusion matrix, else the first
    metric, else the loss.

    Attributes:
      name: of the metric.
      values: `[N]`, of each client; in percent if it is a share.
      overall: in percent if it is a share: over the samples of all clients for accuracy from a confusion matrix, else the mean
        over clients.
      mean: over clients, in percent if it is a share.
      higher_is_better, share: as in `measures.Metric`.
    """

    name: str
    values: np.ndarray
    overall: float
    mean: float
    higher_is_better: bool
    share: bool

    @property
    def label(self) -> str:
        """With its unit, for an axis."""
        return f"{self.name.replace('_', ' ')}{', %' if self.share else ''}"


def main_score(test: Mapping[str, Any]) -> MainScore:
    """The main score of a test in a row of `compact`.

    Raises:
      ValueError: nothing was measured.
    """
    scores = test["scores"]
    if "accuracy" in test:
        values = 100 * np.array(test["accuracy"], float)
        return MainScore("accuracy", values, 100 * scores["accuracy"], 100 * scores["accuracy_mean"], True, True)
    for name, one in test.get("metrics", {}).items():
        unit = 100 if one["share"] else 1
        mean = unit * scores[f"{name}_mean"]
        return MainScore(name, unit * np.array(one["values"], float), mean, mean, one["higher_is_better"], one["share"])
    if "loss" not in test:
        raise ValueError("a test without metrics and without a loss has no score to report")
    return MainScore("loss", np.array(test["loss"], float), scores["loss"], scores["loss"], False, False)


def _numbers(values: ArrayLike) -> list[float]:
    """float32 values `[n]` as the shortest decimals that round to the same float32."""
    # A loss of float64 that float32 cannot hold is infinite there.
    with np.errstate(over="ignore"):
        return [float(str(value)) for value in np.asarray(values, np.float32)]


def diverged(rows: Sequence[Mapping[str, Any]], test: str) -> int | None:
    """The round from which on a run has diverged, `None` if it has not.

    A run has diverged when its last evaluation is not finite, or when a round since the evaluation before counts as diverged (see
    `algorithm.Faults`). It has diverged since the first of the evaluations, up to the last, of which that is true. A run that
    recovers has not diverged.

    Args:
      rows: one for each evaluation, in order (see `compact`).
      test: name of the evaluator.
    """
    since = None
    for row in rows:
        rounds = [fault["round"] for fault in row.get("faults", ()) if fault["diverged"]]
        if rounds or not all(math.isfinite(value) for value in row["tests"][test]["scores"].values()):
            since = min([*rounds, row["round"]]) if since is None else since
        else:
            since = None
    return since


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def strict(value: Any) -> Any:
    """A JSON value without numbers that are not finite, which JSON does not know: they become strings, as `load` reads them.

    Example:
      >>> strict({"loss": [0.5, float("nan"), float("-inf")]})
      {'loss': [0.5, 'NaN', '-Infinity']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return next(text for text, number in _NOT_FINITE.items() if str(number) == str(value))
    if isinstance(value, Mapping):
        return {name: strict(part) for name, part in value.items()}
    return [strict(part) for part in value] if isinstance(value, list | tuple) else value


def load(path: str | Path) -> list[dict[str, Any]]:
    """The parts of a `metrics.json`: for each its `name`, `config` and `result`, the rows of `compact` for a training run.

    The file is strict JSON. Its strings "NaN", "Infinity" and "-Infinity" are numbers, and become numbers here.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no such file.
    """
    try:
        return numbers_again(json.loads(Path(path).read_text(encoding="utf-8"))["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no metrics file: {error}") from error


def numbers_again(value: Any) -> Any:
    """The inverse of `strict`."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: numbers_again(part) for name, part in value.items()}
    return [numbers_again(part) for part in value] if isinstance(value, list) else value
