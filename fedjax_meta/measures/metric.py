"""A metric: what an evaluation keeps of a client's batches, and the number that it makes of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.dependence import marks_of
from fedjax_meta.task import Batch, check_entries, entry_weights, targets
from fedjax_meta.types import PyTree, Scalar


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Metric:
    """A score of one client.

    Attributes:
      name: for reports; not "loss", nor one of the columns "ids", "name" and "samples" of the file of all clients, nor one that
        ends with "_samples".
      init: `() -> statistics` of no sample, a pytree of numbers or arrays. A number may stand for an array of that number, of the
        shape that `update` makes of it, e.g. one for each output.
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
        if self.name in ("ids", "loss", "name", "samples") or self.name.endswith("_samples"):
            raise ValueError(f"name={self.name!r} is that of a column beside the scores: take another")
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
        check_entries(name, values, outputs, targets(batch))
        found = jnp.asarray(values(outputs, targets(batch)))
        weight = entry_weights(batch, found)
        return statistics[0] + jnp.sum(jnp.where(weight > 0, found * weight, 0)), statistics[1] + jnp.sum(weight)

    def result(statistics: Any) -> Any:
        return of_mean(statistics[0] / or_one(statistics[1]))

    return Metric(
        name=name, init=lambda: (0.0, 0.0), update=update, result=result, higher_is_better=higher_is_better, share=share
    )


def or_one(count: Any) -> Any:
    """A count to divide by: 1 where there is nothing."""
    return jnp.where(count > 0, count, 1)


def begin(metric: Metric, outputs: Any, batch: Batch) -> PyTree:
    """The statistics of no sample, in the types that updates give them.

    Args:
      metric: what to measure.
      outputs, batch: shapes.

    Raises:
      ValueError: a task without predictions, statistics that change their structure or shape, that count rows which fill a batch
        up, a result that is no scalar.
    """
    start = jax.tree.map(jnp.array, metric.init())
    if getattr(outputs, "shape", ())[-1:] == (0,):
        raise ValueError(f"metric {metric.name!r} scores predictions, which the task has none of: give fm.from_loss a predict")
    after = jax.eval_shape(metric.update, start, outputs, batch)
    before: Any = jax.tree.structure(start)
    if before == jax.tree.structure(after):
        start = jax.tree.map(lambda old, new: old if old.shape else jnp.full(new.shape, old), start, after)
        after = jax.eval_shape(metric.update, start, outputs, batch)
    if before != jax.tree.structure(after) or any(
        old.shape != new.shape for old, new in zip(jax.tree.leaves(start), jax.tree.leaves(after), strict=True)
    ):
        shapes = [jax.tree.map(lambda leaf: list(leaf.shape), tree) for tree in (start, after)]
        raise ValueError(f"metric {metric.name!r}: init gives statistics of shapes {shapes[0]}, but update gives {shapes[1]}")
    _check_weighted(metric, start, outputs, batch)
    start = jax.tree.map(lambda old, new: old.astype(jnp.promote_types(old.dtype, new.dtype)), start, after)
    if metric.name != CONFUSION:
        result = jax.eval_shape(metric.result, start)
        if not hasattr(result, "shape") or result.shape != ():
            form = f"an array {list(result.shape)}" if hasattr(result, "shape") else f"a {type(result).__name__}"
            raise ValueError(f"metric {metric.name!r}: result must give one number, a scalar, for each client, not {form}")
    return start


def _check_weighted(metric: Metric, start: PyTree, outputs: Any, batch: Batch) -> None:
    """Raises `ValueError` if a statistic depends on samples, but not on their weights."""

    def marks(of_samples: bool) -> list[bool]:
        def all_like(tree: PyTree, mark: bool) -> PyTree:
            return jax.tree.map(lambda _: mark, tree)

        rows = Batch(
            *(all_like(leaf, mark) for leaf, mark in zip(batch, (of_samples, of_samples, not of_samples), strict=True))
        )
        marked = all_like(start, False), all_like(outputs, of_samples), rows
        return jax.tree.leaves(marks_of(metric.update, marked, start, outputs, batch))

    by_samples, by_weight = marks(True), marks(False)
    if any(one and not other for one, other in zip(by_samples, by_weight, strict=True)):
        raise ValueError(
            f"metric {metric.name!r} does not read batch.weight, which is 0 for rows that fill a batch up: they would count as "
            "samples; multiply what update adds up by it"
        )


def update(metric: Metric, statistics: PyTree, outputs: jax.Array, batch: Batch) -> PyTree:
    """`metric.update` in the types of the statistics."""
    after = metric.update(statistics, outputs, batch)
    return jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), after, statistics)
