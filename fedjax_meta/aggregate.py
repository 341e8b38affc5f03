"""From the client axis to the server: weighted means of uploads, as running sums that never stack what they average.

Robust aggregators and mixtures need the trees of all clients at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.data.federated import ClientData

WEIGHTINGS = {"samples": "train", "query": "query", "uniform": None}
"""By what a client counts in a mean, and the view whose samples say so."""


def client_weight(weighting: str, data: ClientData) -> jax.Array:
    """A client's weight: its train samples ("samples"), its query samples ("query") or 1 ("uniform")."""
    checks.one_of("weighting", weighting, WEIGHTINGS)
    view = WEIGHTINGS[weighting]
    return jnp.ones(()) if view is None else jnp.asarray(data[view].size, jnp.result_type(float))


@partial(jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=["dtypes"])
@dataclass(frozen=True)
class WeightedSum:
    """A running sum of `weight * upload`, and of the weights.

    Attributes:
      total: like one upload; 16-bit numbers are summed in 32 bits.
      weight: a scalar, or a tree that is a prefix of the upload when its parts count differently.
      dtypes: what the leaves of an upload were, and their mean will be.
    """

    total: Any
    weight: Any
    dtypes: tuple[Any, ...]


def weigh(upload: Any, weight: Any) -> WeightedSum:
    """The sum that holds one client's upload. `weight` is a scalar or a prefix tree of scalars.

    An upload whose weight is not above 0 leaves no trace, even where it is not finite.

    Raises:
      ValueError: an upload that is not floating-point: a mean of integers would be cut to an integer.
    """
    weight = jax.tree.map(lambda w: jnp.where(jnp.asarray(w) > 0, w, 0), weight)

    def scale(w: jax.Array, part: Any) -> Any:
        def scaled(leaf: Any) -> jax.Array:
            wide = _wide(leaf)
            return jnp.where(w > 0, w.astype(wide.dtype) * wide, 0)

        return jax.tree.map(scaled, part)

    dtypes = tuple(jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(upload))
    return WeightedSum(jax.tree.map(scale, weight, upload), weight, dtypes)


def mean(summed: WeightedSum) -> Any:
    """The weighted mean; exactly 0 where no weight came in, so that a round in which nobody returns moves nothing."""

    def divide(w: jax.Array, part: Any) -> Any:
        some = w > 0
        return jax.tree.map(lambda leaf: jnp.where(some, leaf / jnp.where(some, w, 1).astype(leaf.dtype), 0), part)

    leaves, structure = jax.tree.flatten(jax.tree.map(divide, summed.weight, summed.total))
    return jax.tree.unflatten(structure, [leaf.astype(dtype) for leaf, dtype in zip(leaves, summed.dtypes, strict=True)])


def _wide(leaf: Any) -> jax.Array:
    """A leaf in at least 32 bits, to be summed: 8 bits of mantissa lose what is small beside a sum of many."""
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(f"an upload of {leaf.dtype}{list(leaf.shape)} cannot be averaged: it must be floating-point")
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


Aggregator = Callable[[Any, jax.Array], Any]
"""`(stacked uploads, leaves [C, ...], weights [C]) -> one tree`; a client whose weight is not above 0 must leave no trace."""


def median(stacked: Any, weight: jax.Array) -> Any:
    """The median of each number over the clients that returned, who count alike: a client could lie about its samples.

    It stands up to all but half of the clients sending anything at all, NaN included (Yin, Chen, Ramchandran, Bartlett,
    "Byzantine-robust distributed learning", ICML 2018, definition 1). Exactly 0 where nobody returned.

    Example:
      >>> median(jnp.array([1.0, 2.0, 4.0, jnp.nan, 9.0]), jnp.array([1, 1, 1, 1, 0])).tolist()
      3.0
    """

    def middle(ordered: jax.Array, count: jax.Array) -> jax.Array:
        return (ordered[jnp.maximum(count - 1, 0) // 2] + ordered[count // 2]) / 2

    return _by_rank(middle, stacked, weight)


def trimmed_mean(share: float) -> Aggregator:
    """The mean of each number without the `share` of the clients with the largest values and the `share` with the smallest.

    Whoever returned counts alike, and a value that is not a number is among the largest. It stands up to a `share` of clients
    sending anything at all (Yin et al., ICML 2018, definition 2). Exactly 0 where nobody returned.

    Args:
      share: beta, at least 0 and below 1/2; of n clients the whole part of `share * n` is left out at either end.

    Raises:
      ValueError: a share out of range.

    Example:
      >>> trimmed_mean(0.25)(jnp.array([1.0, 2.0, 4.0, jnp.nan]), jnp.ones(4)).tolist()
      3.0
    """
    checks.between("share", share, 0, 0.5)
    if share == 0.5:
        raise ValueError("share=0.5 would leave nobody: it must be below 1/2; see `median`")

    def inner_mean(ordered: jax.Array, count: jax.Array) -> jax.Array:
        # 0.29 * 100 is 28.999... in floating point.
        cut = jnp.floor(share * count + 1e-3).astype(count.dtype)
        rank = jnp.arange(ordered.shape[0]).reshape(-1, *[1] * (ordered.ndim - 1))
        inside = (rank >= cut) & (rank < count - cut)
        return jnp.sum(ordered, 0, where=inside) / jnp.maximum(count - 2 * cut, 1).astype(ordered.dtype)

    return partial(_by_rank, inner_mean)


def _by_rank(choose: Callable[[jax.Array, jax.Array], jax.Array], stacked: Any, weight: jax.Array) -> Any:
    """`choose(values in order, how many of them count)` of each leaf; those that do not count, and NaN, stand last."""
    returned = weight > 0
    count = jnp.sum(returned)

    def one(leaf: jax.Array) -> jax.Array:
        wide = jnp.where(returned.reshape(-1, *[1] * (leaf.ndim - 1)), _wide(leaf), jnp.nan)
        return jnp.where(count > 0, choose(jnp.sort(wide, 0), count), 0).astype(leaf.dtype)

    return jax.tree.map(one, stacked)


def quantized(key: Any, tree: Any, bits: int) -> Any:
    """What arrives of an upload whose numbers are sent with `bits` bits each, and each leaf's smallest and largest in full.

    A number is rounded at random to one of the two nearest of 2^bits evenly spaced levels between its leaf's smallest and
    largest, so that its expectation is the number itself (Alistarh et al., "QSGD", NeurIPS 2017, with a leaf as a bucket).
    Nothing leaves the range of its leaf: variances stay positive. Leaves of integers are sent as they are.

    Args:
      key: consumed.
      tree: any pytree of arrays.
      bits: at least 1.
    """
    leaves, structure = jax.tree.flatten(tree)
    steps = 2**bits - 1

    def one(key: Any, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        low, high = jnp.min(leaf), jnp.max(leaf)
        width = jnp.where(high > low, (high - low) / steps, 1)
        level = jnp.floor((leaf - low) / width + jax.random.uniform(key, leaf.shape, leaf.dtype))
        return jnp.clip(low + level * width, low, high)

    return jax.tree.unflatten(structure, [one(jax.random.fold_in(key, i), leaf) for i, leaf in enumerate(leaves)])


def combine(matrix: jax.Array, stacked: Any) -> Any:
    """Each client's own mixture of all clients' trees: row i of `matrix` `[C, C]` weighs what client i receives.

    This is the general aggregator (FedPAC, FedFomo, FedAMP, L2GD); it needs every client's tree at once. Plain means go
    through the running sum instead and never build a matrix. A leaf that is not finite leaves no trace in rows that do not
    weigh it, and the others get NaN there.

    Args:
      matrix: `[C, C]`, rows sum to 1.
      stacked: leaves `[C, ...]`.
    """

    def mixed(leaf: jax.Array) -> jax.Array:
        wide, rows = _wide(leaf), (-1, *[1] * (leaf.ndim - 1))
        finite = jnp.all(jnp.isfinite(leaf), tuple(range(1, leaf.ndim)))
        sound = jnp.where(finite.reshape(rows), wide, 0)
        # At an accelerator's default precision even the identity would round every parameter of every client.
        mixture = jnp.einsum("ij,j...->i...", matrix.astype(wide.dtype), sound, precision=jax.lax.Precision.HIGHEST)
        spoilt = jnp.any((matrix != 0) & ~finite, 1)
        return jnp.where(spoilt.reshape(rows), jnp.nan, mixture).astype(leaf.dtype)

    return jax.tree.map(mixed, stacked)
