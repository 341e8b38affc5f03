"""Ranks of numbers: the median and the trimmed mean of each coordinate over clients, and the k-th largest of many."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.aggregate.means import sum_clients, weights_of, wide
from fedjax_meta.aggregate.rule import Aggregator
from fedjax_meta.types import PyTree


def median(stacked: PyTree, weight: jax.Array) -> PyTree:
    """The median of each number over the clients that returned.

    These clients count equally, because a client could lie about its number of samples. The median tolerates arbitrary uploads,
    NaN included, from fewer than half of the clients (Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed
    learning", ICML 2018, definition 1). It is exactly 0 when no client returned.

    Args:
      stacked: leaves `[C, ...]`.
      weight: `[C]`; clients whose weight is not above 0 did not return.

    Raises:
      ValueError: weights or uploads of other shapes.

    Example:
      >>> median(jnp.array([1.0, 2.0, 4.0, jnp.nan, 9.0]), jnp.array([1, 1, 1, 1, 0])).tolist()
      3.0
    """

    def middle(ordered: jax.Array, count: jax.Array) -> jax.Array:
        return ordered[jnp.maximum(count - 1, 0) // 2] / 2 + ordered[count // 2] / 2

    return _by_rank(middle, stacked, weight)


def trimmed_mean(share: float) -> Aggregator:
    """The mean of each number without the `share` of clients with the largest values and the `share` with the smallest.

    The clients that returned count equally, and NaN counts as one of the largest values. The trimmed mean tolerates arbitrary
    uploads from a `share` of the clients (Yin et al., ICML 2018, definition 2). It is exactly 0 when no client returned.

    Args:
      share: beta, at least 0 and below 1/2; of n clients, floor(share * n) are left out at each end.

    Raises:
      ValueError: `share` out of range; on use, as `median`.

    Example:
      >>> trimmed_mean(0.25)(jnp.array([1.0, 2.0, 4.0, jnp.nan]), jnp.ones(4)).tolist()
      3.0
    """
    checks.between("share", share, 0, 0.5)
    if not isinstance(share, jax.core.Tracer) and share == 0.5:
        raise ValueError("share=0.5 would leave out every client: it must be below 1/2; or use `median`")

    return partial(_by_rank, partial(_inner_mean, share))


def kth_largest(values: jax.Array, number: int) -> jax.Array:
    """The `number`-th largest of values >= 0, `[n]`, bit by bit: bits are in the order of values, and a sort takes far longer.

    Example:
      >>> kth_largest(jnp.array([0.5, 3.0, 2.0, 2.0]), 3).tolist()
      2.0
    """
    width = 8 * values.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(jnp.abs(values), jnp.dtype(f"uint{width}"))  # a 0 may have a sign

    def step(i: Any, low: jax.Array) -> jax.Array:
        trial = low | jnp.left_shift(jnp.ones((), bits.dtype), (width - 1 - i).astype(bits.dtype))
        return jnp.where(jnp.sum(bits >= trial) >= number, trial, low)

    # The first bit is the sign.
    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(1, width, step, jnp.zeros((), bits.dtype)), values.dtype)


def _inner_mean(share: float, ordered: jax.Array, count: jax.Array) -> jax.Array:
    # Tolerance: floor(0.29 * 100) must be 29, but the product is 28.999... in floating point.
    cut = jnp.minimum(jnp.floor(share * count * (1 + 1e-6)).astype(count.dtype), (count - 1) // 2)
    rank = jnp.arange(ordered.shape[0]).reshape(-1, *[1] * (ordered.ndim - 1))
    inside = (rank >= cut) & (rank < count - cut)
    return sum_clients(jnp.where(inside, ordered, 0)) / jnp.maximum(count - 2 * cut, 1).astype(ordered.dtype)


def _by_rank(choose: Callable[[jax.Array, jax.Array], jax.Array], stacked: PyTree, weight: jax.Array) -> PyTree:
    """`choose(sorted values, number of clients that returned)` of each leaf; values of other clients, and NaN, are infinity."""
    returned = weights_of(stacked, weight) > 0
    count = jnp.sum(returned)

    def one(leaf: jax.Array) -> jax.Array:
        values = jnp.where(returned.reshape(-1, *[1] * (leaf.ndim - 1)), wide(leaf), jnp.inf)
        return jnp.where(count > 0, choose(sort_clients(values), count), 0).astype(leaf.dtype)

    return jax.tree.map(one, stacked)


MOST_UNROLLED = 64
"""Up to this many clients, values are sorted by a network of comparisons."""


def sort_clients(values: jax.Array) -> jax.Array:
    """Sorts `[C, ...]` along its first axis; NaN becomes infinity.

    For few clients this is Batcher's merge exchange (Knuth, The Art of Computer Programming 3, algorithm 5.2.2M) on whole rows.
    On a CPU it takes a hundredth of the time of XLA's sort, which compares numbers one by one.
    """
    values = jnp.where(jnp.isnan(values), jnp.inf, values)
    if len(values) > MOST_UNROLLED:
        return jnp.sort(values, 0)
    rows = list(values)
    for low, high in _comparisons(len(rows)):
        rows[low], rows[high] = jnp.minimum(rows[low], rows[high]), jnp.maximum(rows[low], rows[high])
    return jnp.stack(rows)


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """The pairs (low, high) that a sorting network of `count` rows compares, in order."""
    top = p = 1 << max((count - 1).bit_length() - 1, 0)
    while p > 0:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(count - d) if i & p == r)
            if q == p:
                break
            q, r, d = q // 2, p, q - p
        p //= 2
