"""Secure aggregation, simulated: the server sees sums of uploads and no upload.

Every pair of clients of a cohort agrees on a random mask, which one adds and the other subtracts, so that masks cancel in the
sum. Uploads are fixed-point integers modulo 2^32. If a client drops out after the masks were agreed on, the others reveal the
masks that they shared with it, and the server removes these.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: "Practical secure aggregation for privacy-preserving
machine learning", CCS 2017, without key exchange and secret sharing: what a server computes, not a protocol that is secure.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.aggregate import WeightedSum
from fedjax_meta.keys import tagged
from fedjax_meta.types import Key, PyTree
from fedjax_meta.uploads.transform import Message, UploadTransform, per_leaf


def mask(fraction_bits: int = 16) -> UploadTransform:
    """Masks uploads; it comes last in a chain.

    A cohort costs each client C masks and the server up to C^2 / 4 for those that dropped out.

    Args:
      fraction_bits: binary digits after the point, from 1 to 30. Each number is multiplied by weight / largest weight (that a
        client can have; 1 for what counts equally) and rounded to a multiple of `2^-fraction_bits`. With `noise` it is rounded
        towards zero, so that the clip norm still holds. Values out of range are cut. So a mean is exact to about
        `2^-fraction_bits` times the largest weight over the cohort's mean weight: where one client has 1,000 times the samples of
        the others, take more bits, or `weighting="uniform"`.
        The sum over the cohort must stay below `2^(31 - fraction_bits)` in magnitude, else it wraps around: C numbers of
        magnitude up to `2^(31 - fraction_bits) / C` are safe.

    Raises:
      ValueError: bits out of range.
    """
    checks.count("fraction_bits", fraction_bits)
    checks.between("fraction_bits", fraction_bits, 1, 30)
    scale = 2.0**fraction_bits

    def message(message: Message, leaf: Any) -> Message:
        del leaf
        return message._replace(bits=32, extra_bits=0)

    return UploadTransform(
        name="mask",
        message=message,
        encode=partial(_encode, scale),
        decode=partial(_decode, scale),
        config={"fraction_bits": fraction_bits},
    )


@partial(jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=["dtypes", "bounds"])
@dataclass(frozen=True)
class Masked(WeightedSum):
    """A `WeightedSum` in fixed-point integers, uint32.

    Attributes:
      bounds: the largest value of each leaf of `weight`.
    """

    bounds: tuple[float, ...]

    def scales(self, scale: float, cohort_size: int) -> "Masked":
        """What the parts are multiplied by before they are rounded: a number by `scale`, and a weight as finely as the sum of C
        weights allows; both in units of the largest weight."""
        of_weights = 2.0 ** (30 - math.ceil(math.log2(max(cohort_size, 2))))
        bounds = jax.tree.unflatten(jax.tree.structure(self.weight), self.bounds)
        total = jax.tree.map(lambda bound, part: jax.tree.map(lambda _: scale / bound, part), bounds, self.total)
        return Masked(total, jax.tree.map(lambda bound: of_weights / bound, bounds), self.dtypes, self.bounds)


def _encode(
    scale: float, key: Key, sums: WeightedSum, bounds: PyTree, id_: jax.Array, ids: jax.Array, shrinks: bool = False
) -> Masked:
    """What client `id_` of the cohort `ids` sends: fixed-point integers plus its masks."""
    each = jax.tree.map(lambda bound, part: jax.tree.map(lambda _: bound, part), bounds, sums.weight)
    unmasked = Masked(sums.total, sums.weight, sums.dtypes, tuple(jax.tree.leaves(each)))

    def integers(leaf: jax.Array, factor: float) -> jax.Array:
        most = 2.0**31 - 2**8  # the largest float32 below 2^31 leaves room for rounding
        exact = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) * factor
        fixed = jnp.clip(jnp.trunc(exact) if shrinks else jnp.round(exact), -most, most)
        return jax.lax.bitcast_convert_type(jnp.nan_to_num(fixed).astype(jnp.int32), jnp.uint32)

    def add(place: Any, total: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, _pair_mask(key, id_, ids[place], total))

    start = jax.tree.map(integers, unmasked, unmasked.scales(scale, ids.shape[0]))
    return jax.lax.fori_loop(0, ids.shape[0], add, start)


def _decode(scale: float, key: Key, total: Masked, ids: jax.Array, returned: jax.Array) -> WeightedSum:
    """The sum of the uploads that returned, without the masks that they share with clients that did not."""
    count = ids.shape[0]

    def remove(pair: Any, total: PyTree) -> PyTree:
        there, gone = pair // count, pair % count
        left = returned[there] & ~returned[gone]

        def unmask(total: PyTree) -> PyTree:
            return jax.tree.map(jnp.subtract, total, _pair_mask(key, ids[there], ids[gone], total))

        return jax.lax.cond(left, unmask, lambda total: total, total)

    total = jax.lax.fori_loop(0, count * count, remove, total)

    def number(leaf: jax.Array, factor: float, form: Any) -> jax.Array:
        return (jax.lax.bitcast_convert_type(leaf, jnp.int32) / factor).astype(form)

    scales, real = total.scales(scale, count), jnp.result_type(float)
    forms = [jnp.promote_types(form, jnp.float32) for form in total.dtypes]
    numbers = jax.tree.map(number, total.total, scales.total, jax.tree.unflatten(jax.tree.structure(total.total), forms))
    weight = jax.tree.map(lambda leaf, factor: number(leaf, factor, real), total.weight, scales.weight)
    return WeightedSum(numbers, weight, total.dtypes)


def _pair_mask(key: Key, one: jax.Array, other: jax.Array, like: PyTree) -> PyTree:
    """What client `one` adds for its pair with `other`, uint32; `other` adds the negative, and a client with itself 0."""
    pair_key = tagged(key, "pair", jnp.minimum(one, other), jnp.maximum(one, other))
    bits = per_leaf(lambda key, leaf: jax.random.bits(key, leaf.shape, jnp.uint32), pair_key, like)
    sign = jnp.sign(other - one)
    return jax.tree.map(lambda leaf: jnp.where(sign == 0, 0, jnp.where(sign > 0, leaf, -leaf)), bits)
