"""Compact records of every client at every evaluation, as JSON values; and the score that a report shows of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks, metrics
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
      `faults.Fault`. Scores are NaN where the loss is not finite.
    """
    return {
        "round": record.round,
        "seconds": round(record.seconds, 4),
        "compile_seconds": round(record.compile_seconds, 4),
        "train": {name: _numbers(values) for name, values in record.metrics.items()},
        "tests": {name: _test(found) for name, found in record.evaluations.items() if isinstance(found, Evaluation)},
        "faults": [fault._asdict() for fault in record.faults],
    }


def joined(first: Mapping[str, Any] | None, then: dict[str, Any]) -> dict[str, Any]:
    """A row of `compact`, preceded by that of a record which ended between evaluations (`should_stop` of `simulate`)."""
    if first is None:
        return then
    sums = {name: round(first[name] + then[name], 4) for name in ("seconds", "compile_seconds")}
    # Rounds before may be of a version of the method that measured something else.
    lost = [None] * len(next(iter(first["train"].values()), ()))
    train = {name: [*first["train"].get(name, lost), *values] for name, values in then["train"].items()}
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
        found["accuracy"] = _shown(metrics.accuracy(confusion), loss)
        found["f1"] = _shown(metrics.macro_f1(metrics.within_own_classes(confusion)), loss)
    if loss is not None:
        found["loss"] = _numbers(loss)
    found["scores"] = evaluation.summary()
    if evaluation.confusion is not None:
        found["confusion"] = confusion.tolist()
    if evaluation.metrics:
        found["metrics"] = {name: _score(score, loss) for name, score in evaluation.metrics.items()}
    return found


def _score(score: Score, loss: np.ndarray | None) -> dict[str, Any]:
    return {"values": _shown(score.values, loss), "higher_is_better": score.higher_is_better, "share": score.share}


def _shown(values: Any, loss: np.ndarray | None) -> Any:
    """Scores of clients `[N]` as numbers, NaN where the loss is known and not finite."""
    return _numbers(np.asarray(values) if loss is None else metrics.where_finite(np.asarray(values), loss))


ROUNDING = 1e-6
"""Scores are computed in single precision: two that differ by less than this part of them are the same."""


def difference(mine: Any, reference: Any) -> Any:
    """`mine - reference`, exactly 0 where only rounding tells them apart: nobody wins by the last bit.

    Infinite scores, such as the perplexity of a large loss, are as far as can be from finite ones, and 0 from each other.

    Example:
      >>> difference([3.0, 3.0000001, np.inf, np.inf], [1.0, 3.0, 3.0, np.inf])
      array([ 2.,  0., inf,  0.])
    """
    with np.errstate(invalid="ignore"):
        change = np.subtract(mine, reference)
    return np.where(np.equal(mine, reference) | (np.abs(change) <= rounding_of(mine, reference)), 0, change)


def rounding_of(mine: Any, reference: Any) -> Any:
    """By how much two scores may differ by rounding alone; 0 where one of them is not finite."""
    size = np.maximum(np.abs(mine), np.abs(reference))
    return np.where(np.isfinite(size), ROUNDING * size, 0)


class Kind(NamedTuple):
    """What a score is, so that reports can show and compare it.

    Attributes:
      name: of the metric.
      higher_is_better, share: as in `measures.Metric`; a share is shown in percent.
    """

    name: str
    higher_is_better: bool
    share: bool

    @property
    def words(self) -> str:
        """The name, for a sentence."""
        return self.name.replace("_", " ")

    @property
    def label(self) -> str:
        """With its unit, for an axis."""
        return f"{self.words}{', %' if self.share else ''}"

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return f"points of {self.words}" if self.share else self.words

    @property
    def direction(self) -> str:
        """ " (lower is better)", or nothing."""
        return "" if self.higher_is_better else " (lower is better)"

    def gain(self, mine: Any, reference: Any) -> Any:
        """By how much `mine` is better than `reference`, numbers or arrays, see `difference`; negative where it is worse."""
        return difference(mine, reference) if self.higher_is_better else difference(reference, mine)

    def reaches(self, scores: Any, target: float) -> Any:
        """Whether scores are at least as good as a target; NaN never is."""
        return self.gain(scores, target) >= 0

    def best(self, values: Sequence[float]) -> int:
        """The place of the best of the values, the first of equal ones; what is not finite is worse than anything."""
        sign = 1 if self.higher_is_better else -1
        return max(range(len(values)), key=lambda i: sign * values[i] if math.isfinite(values[i]) else -math.inf)

    def worst_tenth(self, values: np.ndarray) -> float:
        """The mean over the N / 10 clients `[N]` with the worst scores; NaN if a score is not finite.

        N / 10 is rounded, halves to the even number, and at least 1.
        """
        if not np.isfinite(values).all():
            return math.nan
        count = max(1, round(len(values) / 10))
        ordered = np.sort(values)
        return float(np.mean(ordered[:count] if self.higher_is_better else ordered[::-1][:count]))

    def text(self, value: float, *, sign: bool = False) -> str:
        """A score, or with `sign` a difference: shares with two decimals, other scores with four digits.

        Example:
          >>> Kind("accuracy", True, True).text(81.234), Kind("rmse", False, False).text(0.912345, sign=True)
          ('81.23', '+0.9123')
        """
        return format(value, f"{'+' if sign else ''}{'.2f' if self.share else '.4g'}")

    def spread(self, mean: float, deviation: float) -> str:
        """A mean with its standard deviation, see `over_seeds`, where that is known; empty where the mean is not.

        Both have the same decimals: two for shares, else as many as the first two digits of the deviation need.

        Example:
          >>> Kind("rmse", False, False).spread(12.34567, 0.0123), Kind("rmse", False, False).spread(8123.4, 251.0)
          ('12.346 ±0.012', '8123 ±251')
        """
        if not math.isfinite(mean):
            return ""
        if not math.isfinite(deviation):
            return self.text(mean)
        if self.share:
            return f"{mean:.2f} ±{deviation:.2f}"
        decimals = max(0, 1 - math.floor(math.log10(deviation))) if deviation else 4
        return f"{mean:.{decimals}f} ±{deviation:.{decimals}f}" if decimals <= 6 else f"{mean:.4g} ±{deviation:.2g}"


Spread = tuple[float, float]
"""A mean over seeds and its sample standard deviation."""


def over_seeds(values: Sequence[float] | np.ndarray) -> Spread:
    """The mean of a number of each seed and its sample standard deviation, NaN for one seed; both NaN where one is not finite.

    Example:
      >>> over_seeds([90.0, 92.0, 97.0])[0], over_seeds([90.0]), over_seeds([])
      (93.0, (90.0, nan), (nan, nan))
      >>> over_seeds([0.1, 0.1, 0.1])[1]
      0.0
    """
    if not len(values) or not np.isfinite(values).all():
        return math.nan, math.nan
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, math.nan
    # Equal numbers have no spread; the mean may differ from them by rounding.
    return mean, 0.0 if np.ptp(values) == 0 else float(np.std(values, ddof=1))


class MainScore(NamedTuple):
    """A score of a test that tables, figures and comparisons show; in percent if it is a share.

    Attributes:
      kind: what it is.
      values: `[N]`, of each client.
      mean: over clients.
      overall: over the samples of all clients for accuracy from a confusion matrix, else the mean over clients.
    """

    kind: Kind
    values: np.ndarray
    mean: float
    overall: float


def score_names(test: Mapping[str, Any]) -> list[str]:
    """The names of a test's scores, that of the main score first: accuracy where there is a confusion matrix, else the first
    metric, else the loss.
    """
    own = [name for name in ("accuracy", "f1", "loss") if name in test]
    metrics_ = list(test.get("metrics", {}))
    return list(dict.fromkeys([*own[:1], *metrics_, *own] if "accuracy" in test else [*metrics_, *own]))


def main_score(test: Mapping[str, Any], name: str | None = None) -> MainScore:
    """A score of a test in a row of `compact`.

    Args:
      test: of one group of clients.
      name: of the score, see `score_names`; the first of them when not given.

    Raises:
      ValueError: nothing was measured, or no score of that name.
    """
    known = score_names(test)
    if not known:
        raise ValueError("a test without metrics and without a loss has no score to report")
    name = known[0] if name is None else name
    checks.one_of("score", name, known)
    scores = test["scores"]
    if name in test.get("metrics", {}):
        one = test["metrics"][name]
        unit, share, higher, values = 100 if one["share"] else 1, one["share"], one["higher_is_better"], one["values"]
    else:
        unit, share, higher, values = (1, False, False, test[name]) if name == "loss" else (100, True, True, test[name])
    mean = unit * scores["loss" if name == "loss" else f"{name}_mean"]
    # Over all samples where the sum of the confusion matrices says it.
    overall = unit * scores.get("accuracy", np.nan) if name == "accuracy" and "accuracy" in test else mean
    return MainScore(Kind(name, higher, share), unit * np.array(values, float), mean, overall)


def _numbers(values: ArrayLike) -> list[float]:
    """float32 values `[n]` as the shortest decimals that round to the same float32."""
    # A loss of float64 that float32 cannot hold is infinite there.
    with np.errstate(over="ignore"):
        return [float(str(value)) for value in np.asarray(values, np.float32)]


def diverged(rows: Sequence[Mapping[str, Any]], test: str) -> int | None:
    """The round from which on a run has diverged, `None` if it has not.

    A run has diverged when the loss of its last evaluation is not finite, or when a round since the evaluation before counts as
    diverged (see `algorithm.Faults`). It has diverged since the first of the evaluations, up to the last, of which that is true.
    A run that recovers has not diverged. Where no loss is measured, all scores must be finite. Beside a loss they need not be: a
    metric may have no value for a client, e.g. the recall of a class that it lacks.

    Args:
      rows: one for each evaluation, in order (see `compact`).
      test: name of the evaluator.
    """
    since = None
    for row in rows:
        rounds = [fault["round"] for fault in row.get("faults", ()) if fault["diverged"]]
        scores = row["tests"][test]["scores"]
        if rounds or not all(map(math.isfinite, [scores["loss"]] if "loss" in scores else scores.values())):
            since = min([*rounds, row["round"]]) if since is None else since
        else:
            since = None
    return since


def diverged_words(rounds: Sequence[int | None]) -> str:
    """Where the runs of some seeds diverged, in words; empty where none did.

    Args:
      rounds: of each seed the one from which on it has diverged, `None` where it has not.

    Example:
      >>> diverged_words([None, 4]), diverged_words([5, 4]), diverged_words([4]), diverged_words([None])
      ('diverged at round 4 in 1 of 2 seeds', 'diverged at round 4 to 5', 'diverged at round 4', '')
    """
    found = sorted(number for number in rounds if number is not None)
    if not found:
        return ""
    when = f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
    return f"diverged at round {when}" + (f" in {len(found)} of {len(rounds)} seeds" if len(found) < len(rounds) else "")


def without_loss(row: Mapping[str, Any], test: str) -> tuple[int, int] | None:
    """How many clients have no finite loss in an evaluation (see `compact`) of a diverged run, and of how many.

    `None` where that is none or all of them, or where a round since the evaluation before counts as diverged.
    """
    finite = np.isfinite(np.asarray(row["tests"][test].get("loss", ()), float))
    if not finite.any() or finite.all() or any(fault["diverged"] for fault in row.get("faults", ())):
        return None
    return int((~finite).sum()), finite.size


def without_loss_words(found: Sequence[tuple[int, int] | None], clients: str) -> str:
    """What `without_loss` found in runs of some seeds, in words; empty where it is `None` in one of them.

    Example:
      >>> without_loss_words([(1, 80)], "known"), without_loss_words([(1, 80), (3, 80)], "known")
      ('1 of 80 known clients had no finite loss', '1 to 3 of 80 known clients had no finite loss')
    """
    lost = [one for one in found if one is not None]
    if not lost or len(lost) < len(found):
        return ""
    (least, clients_in_all), (most, _) = min(lost), max(lost)
    return f"{least if least == most else f'{least} to {most}'} of {clients_in_all} {clients} clients had no finite loss"


def no_number(diverged: bool) -> str:
    """What a table says in place of a score that is no number, of runs of which some `diverged` or none did.

    Without divergence, it is infinite (a perplexity of a large loss) or has no value for some client.
    """
    return "diverged" if diverged else "not finite"


def negative_curvature(rows: Iterable[Mapping[str, Any]]) -> float:
    """In what share of a run's implicit gradients the operator was not positive, in percent, mean over rounds; NaN without any.

    Such a linear system may have no solution, see `implicit.implicit_gradient`.

    Args:
      rows: see `compact`.
    """
    told = [share for row in rows for share in row["train"].get("negative_curvature", ())]
    known = [share for share in told if not math.isnan(share)]  # a round from which nobody returned has no number
    return 100 * float(np.mean(known)) if known else math.nan


def mean_score(row: Mapping[str, Any], group: str, name: str | None, *, test: str, overall: bool = False) -> float:
    """A score of an evaluation, mean over clients, in percent if it is a share; NaN where the run counts as diverged there.

    A round in which nobody's update was finite leaves a model that may score well, see `diverged`.

    Args:
      row: of the evaluation, see `compact`.
      group: of the clients.
      name: of the score, see `main_score`.
      test: by which the run counts as diverged.
      overall: whether to take `MainScore.overall` instead of the mean.
    """
    one = main_score(row["tests"][group], name)
    return math.nan if diverged([row], test) is not None else one.overall if overall else one.mean


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def strict(value: Any) -> Any:
    """A JSON value without numbers that are not finite, which JSON does not know: they become strings, see `numbers_again`.

    Example:
      >>> strict({"loss": [0.5, float("nan"), float("-inf")]})
      {'loss': [0.5, 'NaN', '-Infinity']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return next(text for text, number in _NOT_FINITE.items() if str(number) == str(value))
    if isinstance(value, Mapping):
        return {name: strict(part) for name, part in value.items()}
    return [strict(part) for part in value] if isinstance(value, list | tuple) else value


def numbers_again(value: Any) -> Any:
    """The inverse of `strict`."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: numbers_again(part) for name, part in value.items()}
    return [numbers_again(part) for part in value] if isinstance(value, list) else value
