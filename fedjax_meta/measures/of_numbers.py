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
    """R²: 1 minus the squared error over the squared distance of the targets from their means, both over all entries of a client.

    Each of several targets `[B, d]` has a mean of its own, so that a constant prediction is never better than 0. It is 0 for a
    client whose targets are all alike.
    """

    def update(sums: Any, outputs: jax.Array, batch: Batch) -> Any:
        y = targets(batch)
        error = _errors("r2", outputs, y)
        weight = entry_weights(batch, error)
        counts = weight > 0  # what does not count may hold anything
        error, y = jnp.where(counts, error, 0), jnp.where(counts, y, 0).astype(weight.dtype)
        samples = tuple(range(max(y.ndim - 1, 1)))  # all axes but that of the targets
        # Batches are joined by their means: a difference of sums of squares would lose its digits.
        count, centre, spread, squares, low, high = sums
        here = jnp.sum(weight, samples)
        mine = jnp.sum(y * weight, samples) / or_one(here)
        total = or_one(count + here)
        gap = mine - centre
        return (
            count + here,
            centre + gap * here / total,
            spread + jnp.sum(weight * (y - mine) ** 2, samples) + gap**2 * count * here / total,
            squares + jnp.sum(weight * error**2),
            jnp.minimum(low, jnp.min(y, samples, where=counts, initial=jnp.inf)),
            jnp.maximum(high, jnp.max(y, samples, where=counts, initial=-jnp.inf)),
        )

    def result(sums: Any) -> Any:
        _, _, spread, squares, low, high = sums
        # The rounded mean of equal numbers may differ from them.
        apart = jnp.sum(jnp.where(high > low, spread, 0))
        return jnp.where(apart > 0, 1 - squares / jnp.where(apart > 0, apart, 1), 0.0)

    return Metric(name="r2", init=lambda: (0.0, 0.0, 0.0, 0.0, jnp.inf, -jnp.inf), update=update, result=result)
