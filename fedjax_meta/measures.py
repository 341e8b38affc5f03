"""What `evaluate` measures of each client: pure functions over its batches, from which one number a client follows.

A `Metric` starts from statistics of no sample, takes in batch after batch on the device, and ends with a score. Padding has
weight 0 and never counts. Letters: B batch, K classes or outputs; targets and outputs as in `task.Batch` and `Task.predict`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.task import Batch, check_alike, check_labels, cross_entropy, entry_weights, targets
from fedjax_meta.types import PyTree, Scalar


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Metric:
    """A score of one client.

    Attributes:
      name: for reports.
      init: `() -> statistics` of no sample, a pytree of numbers or arrays.
      update: `(statistics, outputs [B, ...], batch) -> statistics`; rows of weight 0 must not count.
      result: `statistics -> scalar`.
      higher_is_better: whether a larger score is a better one.
      share: whether the score is a share in [0, 1], which reports show in percent.
    """

    name: str
    init: Callable[[], PyTree]
    update: Callable[[PyTree, jax.Array, Batch], PyTree]
    result: Callable[[PyTree], Scalar]
    higher_is_better: bool = True
    share: bool = False

    def __post_init__(self) -> None:
        checks.word("name", self.name)
        checks.function("init", self.init, (), "lambda: 0.0")
        checks.function("update", self.update, ("statistics", "outputs", "batch"), "see fm.measures")
        checks.function("result", self.result, ("statistics",), "lambda statistics: statistics")
        checks.flag("higher_is_better", self.higher_is_better)
        checks.flag("share", self.share)


CONFUSION = "confusion"
"""Name of the metric whose result is a matrix."""


@dataclasses.dataclass(frozen=True)
class Score:
    """One metric's result.

    Attributes:
      values: `[N]`, one number a client.
      higher_is_better, share: as in `Metric`.
    """

    values: Any
    higher_is_better: bool
    share: bool


jax.tree_util.register_dataclass(Score, ["values"], ["higher_is_better", "share"])


def mean(
    name: str,
    values: Callable[[jax.Array, Any], jax.Array],
    *,
    higher_is_better: bool = True,
    share: bool = False,
    of_mean: Callable[[jax.Array], jax.Array] = lambda value: value,
) -> Metric:
    """A metric that is a mean over samples, or over their tokens or outputs; 0 without any.

    Args:
      name: for reports.
      values: `(outputs [B, ...], targets [B, ...]) -> [B]` or one for each entry `[B, ...]`, numbers or bools.
      higher_is_better, share: as in `Metric`.
      of_mean: what becomes of the mean, e.g. `jnp.sqrt`.

    Example:
      >>> close = mean("within 0.5", lambda outputs, y: jnp.abs(outputs - y) < 0.5, share=True)
      >>> batch = Batch(None, jnp.array([1.0, 2.0, 9.0]), jnp.array([1.0, 1.0, 0.0]))
      >>> float(close.result(close.update(close.init(), jnp.array([1.2, 3.0, 9.0]), batch)))
      0.5
    """
    checks.function("values", values, ("outputs", "targets"), "lambda outputs, y: jnp.abs(outputs - y)")
    checks.function("of_mean", of_mean, ("mean",), "jnp.sqrt")

    def update(statistics: Any, outputs: jax.Array, batch: Batch) -> Any:
        found = jnp.asarray(values(outputs, targets(batch)))
        weight = entry_weights(batch, found)
        return statistics[0] + jnp.sum(jnp.where(weight > 0, found * weight, 0)), statistics[1] + jnp.sum(weight)

    def result(statistics: Any) -> Any:
        return of_mean(statistics[0] / _or_one(statistics[1]))

    return Metric(
        name=name, init=lambda: (0.0, 0.0), update=update, result=result, higher_is_better=higher_is_better, share=share
    )


def _or_one(count: Any) -> Any:
    return jnp.where(count > 0, count, 1)


# ----------------------------------------------------------------------------------------------------------------- of classes


def accuracy(name: str = "accuracy") -> Metric:
    """The share of samples, or of tokens, whose largest logit is that of their label."""
    return mean(name, partial(_among_first, 1), share=True)


def token_accuracy() -> Metric:
    """`accuracy` over tokens: labels `[B, T]`, logits `[B, T, K]`."""
    return accuracy("token_accuracy")


def top_k(k: int) -> Metric:
    """The share of samples or tokens whose label is among the k largest logits; of equal logits the first count as larger."""
    checks.count("k", k)
    return mean(f"top_{k}", partial(_among_first, k), share=True)


def _among_first(k: int, logits: jax.Array, labels: jax.Array) -> jax.Array:
    check_labels("this metric", logits, labels)
    if k == 1:
        return jnp.argmax(logits, -1) == labels
    if k > logits.shape[-1]:
        raise ValueError(f"top_{k} of K={logits.shape[-1]} outputs counts every sample as right")
    return jnp.any(jax.lax.top_k(logits, k)[1] == labels[..., None], -1)


def confusion(classes: int) -> Metric:
    """The confusion matrix `[K, K]` of true classes in rows and predicted ones in columns; `Evaluation.confusion` holds it."""
    checks.count("classes", classes)

    def update(counts: jax.Array, logits: jax.Array, batch: Batch) -> jax.Array:
        labels = targets(batch)
        if logits.shape != (*labels.shape, classes):
            raise ValueError(
                f"predict gives {logits.shape} for B={len(batch.weight)} samples, but the data have K={classes} classes "
                "(num_classes is the largest label plus 1 where the data were built without it)"
            )
        cell = labels * classes + jnp.argmax(logits, -1)
        return counts.at[cell].add(entry_weights(batch, cell).astype(jnp.int32))

    return Metric(
        name=CONFUSION,
        init=lambda: jnp.zeros(classes * classes, jnp.int32),
        update=update,
        result=lambda counts: counts.reshape(classes, classes),
    )


def f1(classes: int) -> Metric:
    """F1 averaged over the classes that a client holds or predicts, as `metrics.macro_f1`, from 3 K counts a client.

    For several labels a sample (`multi_label`), targets `[B, K]` of 0 and 1, an output above 0 predicts its label.

    Args:
      classes: K.
    """
    checks.count("classes", classes)

    def update(counts: Any, outputs: jax.Array, batch: Batch) -> Any:
        y = targets(batch)
        if getattr(y, "shape", None) == outputs.shape:
            held, predicted = y > 0.5, outputs > 0
        else:
            check_labels("f1", outputs, y)
            held, predicted = (jax.nn.one_hot(of, classes, dtype=bool) for of in (y, jnp.argmax(outputs, -1)))
        if held.shape[-1] != classes or outputs.shape[-1] != classes:
            raise ValueError(f"f1 of K={classes} classes does not fit outputs {list(outputs.shape)}")
        weight = entry_weights(batch, held) if held.shape == y.shape else entry_weights(batch, y)[..., None]
        return tuple(
            before + jnp.sum((here * weight).reshape(-1, classes), 0)
            for before, here in zip(counts, (held & predicted, held, predicted), strict=True)
        )

    def result(counts: Any) -> Any:
        correct, held, predicted = counts
        present = held + predicted > 0
        return jnp.sum(jnp.where(present, 2 * correct / _or_one(held + predicted), 0)) / jnp.maximum(jnp.sum(present), 1)

    return Metric(name="f1", init=lambda: (jnp.zeros(classes),) * 3, update=update, result=result, share=True)


def perplexity() -> Metric:
    """The exponential of the mean cross-entropy over samples or tokens."""
    return mean("perplexity", cross_entropy.entries, higher_is_better=False, of_mean=jnp.exp)


def label_accuracy() -> Metric:
    """The share of right labels where a sample has several: targets `[B, L]` of 0 and 1, an output above 0 predicts its label."""

    def right(outputs: jax.Array, y: jax.Array) -> jax.Array:
        check_alike("label_accuracy", outputs, y)
        return (outputs > 0) == (y > 0.5)

    return mean("label_accuracy", right, share=True)


def auroc(classes: int, *, bins: int = 1024) -> Metric:
    """The area under the ROC curve: how often a sample of a class gets a higher score for it than one of another class.

    Each class against the others, averaged over the classes that some but not all samples of a client have; 0.5 without such a
    class. Scores s are log-odds of softmax outputs (labels `[B]`) or the outputs themselves (targets `[B, K]` of 0 and 1). They
    are counted in equal bins of s / (4 + |s|). Scores in one bin count as equal, which is half right: near 0 those closer than
    8/`bins`.

    Args:
      classes: K; of two classes both have the same area.
      bins: of the histogram; a client takes 2 K `bins` numbers.
    """
    checks.count("classes", classes)
    checks.count("bins", bins, least=2)

    def update(counts: jax.Array, outputs: jax.Array, batch: Batch) -> jax.Array:
        y = targets(batch)
        if getattr(y, "shape", None) == outputs.shape:
            scores, own, weight = outputs, y > 0.5, entry_weights(batch, y)
        else:
            check_labels("auroc", outputs, y)
            share = jax.nn.log_softmax(outputs)
            # log(p / (1 - p)), without a difference that could be 0.
            others = jax.nn.logsumexp(jnp.where(jnp.eye(outputs.shape[-1], dtype=bool), -jnp.inf, share[..., None, :]), -1)
            scores, own = share - others, jax.nn.one_hot(y, outputs.shape[-1], dtype=bool)
            weight = jnp.broadcast_to(entry_weights(batch, y)[..., None], own.shape)
        if outputs.shape[-1] != classes:
            raise ValueError(f"auroc of K={classes} classes does not fit outputs {list(outputs.shape)}")
        # Finite for any score, and fine where scores of a calibrated model are.
        squashed = jnp.where(jnp.isinf(scores), jnp.sign(scores), scores / (4 + jnp.abs(scores)))
        place = jnp.clip(jnp.floor((squashed + 1) * (bins / 2)), 0, bins - 1).astype(jnp.int32)
        column = jnp.broadcast_to(jnp.arange(classes), place.shape)
        return counts.at[own.astype(jnp.int32), column, place].add(weight)

    def result(counts: jax.Array) -> jax.Array:
        others, own = counts
        below = jnp.cumsum(others, -1) - others
        right = jnp.sum(own * (below + others / 2), -1)
        pairs = jnp.sum(own, -1) * jnp.sum(others, -1)
        known = pairs > 0
        area = jnp.sum(jnp.where(known, right / _or_one(pairs), 0)) / jnp.maximum(jnp.sum(known), 1)
        return jnp.where(jnp.any(known), area, 0.5)

    return Metric(name="auroc", init=lambda: jnp.zeros((2, classes, bins)), update=update, result=result, share=True)


def calibration_error(*, bins: int = 15) -> Metric:
    """The expected calibration error (Guo et al. 2017): the mean distance of confidence and accuracy, over bins of confidence.

    Args:
      bins: of equal width, of the largest softmax output.
    """
    checks.count("bins", bins)

    def update(sums: Any, logits: jax.Array, batch: Batch) -> Any:
        right = _among_first(1, logits, targets(batch))
        confidence = jnp.max(jax.nn.softmax(logits), -1)
        weight = entry_weights(batch, confidence)
        # A confidence on an edge belongs to the bin below, as in the paper.
        place = jnp.clip(jnp.ceil(confidence * bins) - 1, 0, bins - 1).astype(jnp.int32)
        gaps, total = sums
        return gaps.at[place].add((confidence - right) * weight), total + jnp.sum(weight)

    def result(sums: Any) -> Any:
        return jnp.sum(jnp.abs(sums[0])) / _or_one(sums[1])

    return Metric(
        name="calibration_error",
        init=lambda: (jnp.zeros(bins), 0.0),
        update=update,
        result=result,
        higher_is_better=False,
        share=True,
    )


# ------------------------------------------------------------------------------------------------------------ of real targets


def mae() -> Metric:
    """Mean absolute error over all entries."""
    return mean("mae", lambda outputs, y: jnp.abs(_errors("mae", outputs, y)), higher_is_better=False)


def rmse() -> Metric:
    """Root of the mean squared error over all entries."""
    return mean("rmse", lambda outputs, y: _errors("rmse", outputs, y) ** 2, higher_is_better=False, of_mean=jnp.sqrt)


def _errors(name: str, outputs: jax.Array, y: Any) -> jax.Array:
    check_alike(name, outputs, y)
    return outputs - y


def r2() -> Metric:
    """R²: 1 minus the squared error over the squared distance of the targets from their mean, over all entries of a client.

    It is 0 for a client whose targets are all alike.
    """

    def update(sums: Any, outputs: jax.Array, batch: Batch) -> Any:
        y = targets(batch)
        error = _errors("r2", outputs, y)
        weight = entry_weights(batch, error)
        # Batches are joined by their means: a difference of sums of squares would lose its digits.
        count, centre, spread, squares = sums
        here = jnp.sum(weight)
        mine = jnp.sum(y * weight) / _or_one(here)
        total = _or_one(count + here)
        gap = mine - centre
        return (
            count + here,
            centre + gap * here / total,
            spread + jnp.sum(weight * (y - mine) ** 2) + gap**2 * count * here / total,
            squares + jnp.sum(weight * error**2),
        )

    def result(sums: Any) -> Any:
        _, _, spread, squares = sums
        return jnp.where(spread > 0, 1 - squares / jnp.where(spread > 0, spread, 1), 0.0)

    return Metric(name="r2", init=lambda: (0.0, 0.0, 0.0, 0.0), update=update, result=result)


# -------------------------------------------------------------------------------------------------------------- names of them

METRICS: Mapping[str, Callable[[int], Metric]] = {
    "accuracy": lambda classes: accuracy(),
    "token_accuracy": lambda classes: token_accuracy(),
    "label_accuracy": lambda classes: label_accuracy(),
    "perplexity": lambda classes: perplexity(),
    "f1": f1,
    "auroc": auroc,
    "calibration_error": lambda classes: calibration_error(),
    CONFUSION: confusion,
    "mae": lambda classes: mae(),
    "rmse": lambda classes: rmse(),
    "r2": lambda classes: r2(),
}
"""Metrics by name, made from the number of classes, or of labels a sample, of the data; beside these `top_5` and the like."""

_PER_CLASS = ("f1", "auroc", CONFUSION)


def resolve(given: Sequence[Metric | str], classes: int) -> tuple[Metric, ...]:
    """Metrics by their names or as they are.

    Args:
      given: names of `METRICS`, `top_` and a number, or metrics.
      classes: K, or the number of labels a sample; 0 where there is neither.

    Raises:
      ValueError: an unknown name, two metrics of one name, a metric of classes where there are none.
    """
    if isinstance(given, (str, Metric)) or not isinstance(given, Sequence):
        raise ValueError(
            f"metrics={checks.shown(given)} must be a tuple of metrics or their names, e.g. ('accuracy', 'top_5')"
        )
    found = []
    for one in given:
        if isinstance(one, Metric):
            found.append(one)
            continue
        top = re.fullmatch(r"top_(\d{1,9})", one) if isinstance(one, str) else None
        if top is not None:
            found.append(top_k(int(top[1])))
            continue
        checks.one_of("metric", one, [*METRICS, "top_5"])
        if one in _PER_CLASS and classes == 0:
            raise ValueError(f"metric {one!r} needs classes, but the data have none (num_classes is 0): leave it out")
        found.append(METRICS[one](classes))
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two metrics have the name {max(names, key=names.count)!r}: give one of them another name")
    return tuple(found)


def begin(metric: Metric, outputs: Any, batch: Batch) -> PyTree:
    """The statistics of no sample, in the types that updates give them.

    Args:
      metric: what to measure.
      outputs, batch: shapes.

    Raises:
      ValueError: statistics that change their structure or shape, a result that is no scalar.
    """
    start = jax.tree.map(jnp.array, metric.init())
    after = jax.eval_shape(metric.update, start, outputs, batch)
    before: Any = jax.tree.structure(start)
    if before != jax.tree.structure(after) or any(
        old.shape != new.shape for old, new in zip(jax.tree.leaves(start), jax.tree.leaves(after), strict=True)
    ):
        shapes = [jax.tree.map(lambda leaf: list(leaf.shape), tree) for tree in (start, after)]
        raise ValueError(f"metric {metric.name!r}: init gives statistics of shapes {shapes[0]}, but update gives {shapes[1]}")
    start = jax.tree.map(lambda old, new: old.astype(jnp.promote_types(old.dtype, new.dtype)), start, after)
    if metric.name != CONFUSION:
        result = jax.eval_shape(metric.result, start)
        if not hasattr(result, "shape") or result.shape != ():
            form = f"an array {list(result.shape)}" if hasattr(result, "shape") else f"a {type(result).__name__}"
            raise ValueError(f"metric {metric.name!r}: result must give one number, a scalar, for each client, not {form}")
    return start


def update(metric: Metric, statistics: PyTree, outputs: jax.Array, batch: Batch) -> PyTree:
    """`metric.update` in the types of the statistics."""
    after = metric.update(statistics, outputs, batch)
    return jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), after, statistics)
