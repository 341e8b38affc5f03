"""Scores of an evaluation, from every client's confusion matrix.

All scores are functions of confusion matrices `[N, K, K]` (rows true, columns predicted) and losses `[N]`, so that they can be
computed after a run, on the device or in NumPy.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.types import Scalar

Array: TypeAlias = jax.Array | np.ndarray
"""An array on the device or on the host; a score of it is an array of the same kind."""


def accuracy(confusion: Array) -> Array:
    """The share of correct predictions of each client, `[N]`; 0 for a client without samples.

    Its mean and population standard deviation over clients are the "macro" accuracy.
    """
    xp = _numpy_of(confusion)
    total = xp.sum(confusion, (-2, -1))
    return xp.trace(confusion, axis1=-2, axis2=-1) / xp.where(total > 0, total, 1)


def where_finite(score: Array, loss: Array) -> Array:
    """A score of each client, NaN where its loss is not finite: such a model predicts nothing, whatever the argmax of NaN is.

    Args:
      score: `[N]`.
      loss: `[N]`.
    """
    xp = _numpy_of(score)
    return xp.where(xp.isfinite(loss), score, xp.nan)


def micro_accuracy(confusion: Array) -> Scalar:
    """The share of correct predictions over the samples of all clients."""
    return accuracy(_numpy_of(confusion).sum(confusion, -3))


def macro_f1(confusion: Array) -> Array:
    """F1 averaged over the classes that a client holds or predicts, `[N]` (scikit-learn's macro average)."""
    xp = _numpy_of(confusion)
    correct = xp.diagonal(confusion, axis1=-2, axis2=-1)
    held, predicted = xp.sum(confusion, -1), xp.sum(confusion, -2)
    present = (held + predicted) > 0
    # Counts of 8 bits: twice as many may have no place in their type, but sums are of more bits.
    f1 = correct / xp.where(present, (held + predicted) / 2, 1)
    return xp.sum(xp.where(present, f1, 0), -1) / xp.maximum(xp.sum(present, -1), 1)


def within_own_classes(confusion: Array) -> Array:
    """Confusion matrices `[N, K, K]` with each prediction moved to a class that the client holds.

    This is the post-processing behind the F1 scores of FedMeta-Per (Nguyen and Cao). A prediction of a class that the client
    does not hold becomes the next class (cyclically, from the true one) that it does hold, other than the true class. It stays
    wrong, so accuracy is unchanged, and classes of which the client has no samples do not enter its F1. The paper's clients
    hold two classes, where that next class is simply the other one. A client of one class keeps its predictions.
    """
    xp = _numpy_of(confusion)
    classes = confusion.shape[-1]
    own = xp.sum(confusion, -1) > 0  # [N, K]
    outside = xp.sum(xp.where(own[..., None, :], 0, confusion), -1)  # [N, K] by true class
    # distance[c, d]: how many classes after c (cyclically) class d comes; predictions move to the nearest own class but c.
    distance = (xp.arange(classes)[None, :] - xp.arange(classes)[:, None]) % classes
    distance = distance.reshape((1,) * (own.ndim - 1) + distance.shape)
    distance = xp.where(own[..., None, :] & (distance > 0), distance, classes)
    target = xp.argmin(distance, -1)
    single_class = xp.min(distance, -1) == classes
    moved = (target[..., None] == xp.arange(classes)) * xp.where(single_class, 0, outside)[..., None]
    kept = xp.where(own[..., None, :] | single_class[..., None], confusion, 0)
    return kept + moved


def summary(confusion: ArrayLike, loss: ArrayLike | None) -> dict[str, float]:
    """The numbers that papers report of one evaluation.

    Args:
      confusion: `[N, K, K]`.
      loss: `[N]`, each client's mean loss; `None` if it is not known.

    Returns:
      `accuracy` over the samples of all clients; mean and population standard deviation over clients of accuracy, of F1 as
      FedMeta-Per takes it (`within_own_classes`) and of F1 without that (`raw_f1`); and the mean `loss` over clients. All are NaN
      if the loss of a client is not finite.
    """
    matrices = checks.numeric("confusion", confusion)
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or not matrices.size:
        raise ValueError(f"confusion must be matrices [N, K, K] of N >= 1 clients, not of shape {list(matrices.shape)}")
    losses = np.zeros(len(matrices)) if loss is None else np.asarray(loss)
    if losses.shape != matrices.shape[:1]:
        raise ValueError(f"loss must be [N={len(matrices)}], not of shape {list(losses.shape)}")
    scores = accuracy(matrices), macro_f1(within_own_classes(matrices)), macro_f1(matrices)
    by_client, f1, raw_f1 = (where_finite(score, losses) for score in scores)
    numbers = {
        "accuracy": micro_accuracy(matrices) if np.all(np.isfinite(losses)) else np.nan,
        "accuracy_mean": np.mean(by_client),
        "accuracy_std": np.std(by_client),
        "f1_mean": np.mean(f1),
        "f1_std": np.std(f1),
        "raw_f1_mean": np.mean(raw_f1),
        "raw_f1_std": np.std(raw_f1),
        **({} if loss is None else {"loss": np.mean(losses)}),
    }
    return {name: float(value) for name, value in numbers.items()}


def summary_of_scores(scores: Mapping[str, ArrayLike], loss: ArrayLike | None, *, with_loss: bool = True) -> dict[str, float]:
    """Mean and population standard deviation over clients of some scores, `NAME_mean` and `NAME_std`, and of the loss its mean.

    Args:
      scores: `[N]` each.
      loss: `[N]`; where it is not finite, the scores are NaN. `None` if it is not known.
      with_loss: whether the mean loss is part of the result.
    """
    losses = None if loss is None else np.asarray(loss)
    numbers: dict[str, Any] = {}
    for name, values in scores.items():
        of_client = np.asarray(values, float) if losses is None else where_finite(np.asarray(values, float), losses)
        numbers |= {f"{name}_mean": np.mean(of_client), f"{name}_std": np.std(of_client)}
    if with_loss and losses is not None:
        numbers["loss"] = np.mean(losses)
    return {name: float(value) for name, value in numbers.items()}


class ToTarget(NamedTuple):
    """When runs that differ in their seed first reached a target score.

    Attributes:
      target: the score to reach.
      rounds: for each run the first round at which it reached the target, `None` if it never did.
      budget: rounds that each run had.
      mean: mean of `rounds` over the runs; infinity when a run never reached the target, because the mean is then unknown.
      margin: half the width of the 95 % confidence interval of the mean (Student's t over runs); NaN when it is unknown.
    """

    target: float
    rounds: tuple[int | None, ...]
    budget: int
    mean: float
    margin: float

    def __str__(self) -> str:
        missed = sum(first is None for first in self.rounds)
        if missed:
            return f"never in {self.budget} rounds ({missed} of {len(self.rounds)} runs)"
        return f"{self.mean:.1f}" if math.isnan(self.margin) else f"{self.mean:.1f} ± {self.margin:.1f}"


def confidence_margin(values: ArrayLike) -> float:
    """Half the 95 % confidence interval of the mean of independent values `[n]` (Student's t); NaN for fewer than two.

    Example:
      >>> round(confidence_margin([1.0, 2.0, 3.0]), 3)
      2.484
    """
    numbers = np.asarray(values, float)
    count = numbers.size
    if count < 2:
        return math.nan
    from scipy import special  # here, because it takes a while to import

    return float(special.stdtrit(count - 1, 0.975)) * float(numbers.std(ddof=1)) / math.sqrt(count)


def rounds_to_target(
    scores: ArrayLike, target: float, *, rounds: Sequence[int] | None = None, higher_is_better: bool = True
) -> ToTarget:
    """The first round at which a score is at least `target`, over runs of several seeds.

    Args:
      scores: `[R]` or `[runs, R]`, one number for each round (or evaluation); NaN never reaches the target.
      target: the score to reach.
      rounds: `[R]`, the rounds at which the scores were taken; 1, 2, ... when not given.
      higher_is_better: otherwise the score must be at most `target` (an error, a perplexity).

    Raises:
      ValueError: no scores, a target that is not finite, or `rounds` of another length.

    Example:
      >>> print(rounds_to_target([[0.1, 0.5, 0.4, 0.6], [0.1, 0.2, 0.5, 0.6]], 0.5))
      2.5 ± 6.4
      >>> print(rounds_to_target([[0.1, 0.5, 0.4, 0.6], [0.1, 0.2, 0.5, 0.6]], 0.6), rounds_to_target([0.1, 0.2], 0.5))
      4.0 ± 0.0 never in 2 rounds (1 of 1 runs)
    """
    table = np.atleast_2d(checks.numeric("scores", scores).astype(float))
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"scores must be [R] or [runs, R] with at least one score, not of shape {table.shape}")
    checks.finite("target", target)
    at = np.arange(1, table.shape[1] + 1) if rounds is None else checks.numeric("rounds", rounds, integers=True)
    if at.shape != table.shape[1:]:
        raise ValueError(f"rounds has shape {at.shape}, but there are R={table.shape[1]} scores in each run")
    # A score of single precision that is the target but for rounding has reached it.
    least = 1e-6 * abs(target)
    hit = table >= target - least if higher_is_better else table <= target + least
    first = tuple(int(at[np.argmax(line)]) if line.any() else None for line in hit)
    reached = np.array([number for number in first if number is not None], float)
    mean, margin, runs = math.inf, math.nan, len(first)
    if reached.size == runs:
        mean, margin = float(reached.mean()), confidence_margin(reached)
    return ToTarget(target, first, int(at[-1]), mean, margin)


def _numpy_of(values: Array) -> Any:
    """NumPy for arrays on the host, where nothing then needs to be compiled; else `jax.numpy`."""
    return np if isinstance(values, np.ndarray) else jnp
