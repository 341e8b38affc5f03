"""Splits an upload into parts with their own weights, for aggregators other than the mean.

A method may divide one mean by another, so that a client counts as much as its amount. Another aggregator could pick different
clients for the numerator and the denominator. It gets each client's own quotients instead, with the client's amounts as weights.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import masks
from fedjax_meta.aggregate import Ratio, of_units, units
from fedjax_meta.rounds.setting import Setting
from fedjax_meta.types import PyTree

Three = tuple[PyTree, PyTree, PyTree]
"""Of an upload or its weights: the model's part, the statistics, what upload transformations measured."""


def split(setting: Setting, upload: Three, weights: Three) -> tuple[Three, Three]:
    """The parts of ONE client's upload, and their weights: a quotient for each amount where a mean is divided by another."""
    (model, statistics, measured), (weight, statistics_weight, measured_weight) = upload, weights
    if setting.method.divides_by_statistics:
        moving, held = masks.split(model, setting.shared)
        ratio = Ratio(moving, statistics)
        return ((units(ratio), held), (), measured), ((_amounts(ratio, weight), weight), (), measured_weight)
    if isinstance(statistics, Ratio):
        return (model, units(statistics), measured), (weight, _amounts(statistics, statistics_weight), measured_weight)
    return upload, weights


def joined(setting: Setting, combined: Three, uploads: Three, weights: Three) -> Three:
    """The combined parts in the form of an upload.

    Args:
      setting: of the round.
      combined: what became of the parts.
      uploads, weights: of the clients, leaves `[C, ...]`; their mean amounts are those of the result.
    """
    model, statistics, measured = combined
    if setting.method.divides_by_statistics:
        quotients, held = model
        moving, amount = of_units(quotients, _mean(uploads[1], weights[0]))
        return masks.merge(moving, held), amount, measured
    if isinstance(uploads[1], Ratio):
        return model, of_units(statistics, _mean(uploads[1].amount, weights[1])), measured
    return combined


def _amounts(ratio: Ratio, weight: Any) -> tuple[jax.Array, ...]:
    """The weights of `units`."""
    return tuple(weight * amount for amount in jnp.atleast_1d(ratio.amount))


def _mean(amount: jax.Array, weight: Any) -> jax.Array:
    """The weighted mean of amounts `[C, ...]`."""
    some = jnp.where(weight > 0, weight, 0)
    return jnp.tensordot(some, amount, 1) / jnp.maximum(jnp.sum(some), jnp.finfo(some.dtype).tiny)
