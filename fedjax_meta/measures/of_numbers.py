"""Metrics of real targets."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta.measures.metric import Metric, mean, or_one
from fedjax_meta.task import Batch, check_alike, entry_weights, targets


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
        mine = jnp.sum(y * weight) / or_one(here)
        total = or_one(count + here)
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
