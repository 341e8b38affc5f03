"""Aggregation of the clients' uploads: weighted means, robust aggregators and mixtures.

Means are running sums, so that uploads are never stacked. Robust aggregators and mixtures need the trees of all clients at
once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.data import ClientData
from fedjax_meta.types import Key, PyTree

WEIGHTINGS = {"samples": "train", "query": "query", "uniform": None}
"""Names of weightings, each with the view whose number of samples is a client's weight."""


def client_weight(weighting: str, data: ClientData) -> jax.Array:
    """A client's weight in a mean: its number of train samples ("samples"), of query samples ("query"), or 1 ("uniform")."""
    checks.one_of("weighting", weighting, WEIGHTINGS)
    view = WEIGHTINGS[weighting]
    return jnp.ones(()) if view is None else jnp.asarray(data[view].size, jnp.result_type(float))


@partial(jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=["dtypes"])
@dataclass(frozen=True)
class WeightedSum:
    """A running sum of `weight * upload`, and of the weights.

    Attributes:
      total: like one upload; 16-bit numbers are summed in 32 bits.
      weight: a scalar, or a tree prefix of the upload when its parts have different weights.
      dtypes: of the leaves of an upload, and of their mean.
    """

    total: PyTree
    weight: PyTree
    dtypes: tuple[jnp.dtype, ...]


def weigh(upload: PyTree, weight: PyTree) -> WeightedSum:
    """The weighted sum of a single client's upload.

    An upload whose weight is not above 0 has no effect, even where it is not finite.

    Args:
      upload: a pytree of floating-point arrays.
      weight: a scalar, or a tree prefix of `upload` with a scalar at each leaf.

    Raises:
      ValueError: an upload that is not floating-point; its mean would be truncated to integers.
    """
    weight = jax.tree.map(lambda w: jnp.where(jnp.asarray(w) > 0, w, 0), weight)

    def scale(w: jax.Array, part: PyTree) -> PyTree:
        def scaled(leaf: jax.Array) -> jax.Array:
            wide = _wide(leaf)
            return jnp.where(w > 0, w.astype(wide.dtype) * wide, 0)

        return jax.tree.map(scaled, part)

    dtypes = tuple(jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(upload))
    return WeightedSum(jax.tree.map(scale, weight, upload), weight, dtypes)


def mean(summed: WeightedSum) -> PyTree:
    """The weighted mean; exactly 0 where the weights sum to 0, so that a round from which no client returns changes nothing."""

    def divide(w: jax.Array, part: PyTree) -> PyTree:
        some = w > 0
        return jax.tree.map(lambda leaf: jnp.where(some, leaf / jnp.where(some, w, 1).astype(leaf.dtype), 0), part)

    leaves, structure = jax.tree.flatten(jax.tree.map(divide, summed.weight, summed.total))
    return jax.tree.unflatten(structure, [leaf.astype(dtype) for leaf, dtype in zip(leaves, summed.dtypes, strict=True)])


def _wide(leaf: ArrayLike) -> jax.Array:
    """A leaf in at least 32 bits, for summing: with a mantissa of 8 bits, a large sum absorbs small terms."""
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise ValueError(f"an upload of {array.dtype}{list(array.shape)} cannot be averaged: it must be floating-point")
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


Aggregator = Callable[[PyTree, jax.Array], PyTree]
"""`(stacked uploads, leaves [C, ...], weights [C]) -> one tree`. A client whose weight is not above 0 must have no effect."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """An aggregator that needs more than the uploads of this round.

    It is applied to each part of an upload that has a weight of its own: the model's part, and each such part of the statistics.
    The rows of clients that did not return are 0.

    Attributes:
      combine: `(key, stacked [C, ...], weights [C], memory, reference) -> (tree, memory)`.
      init: `upload -> memory`, from the shapes of a part of an upload.
      root: samples of the server, on which it runs the method's client rule; the resulting upload is the `reference`, which is
        `None` without root samples.
      config: the name and hyper-parameters, for the record of a run.
    """

    combine: Callable[[Key, PyTree, jax.Array, PyTree, PyTree], tuple[PyTree, PyTree]]
    init: Callable[[PyTree], PyTree] = lambda upload: ()
    root: ClientData | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def plain(cls, function: Aggregator) -> "Rule":
        """A rule that needs no key, memory or reference."""
        return cls(combine=lambda key, stacked, weight, memory, reference: (function(stacked, weight), memory))


def median(stacked: PyTree, weight: jax.Array) -> PyTree:
    """The median of each number over the clients that returned.

    These clients count equally, because a client could lie about its number of samples. The median tolerates arbitrary uploads,
    NaN included, from fewer than half of the clients (Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed
    learning", ICML 2018, definition 1). It is exactly 0 when no client returned.

    Args:
      stacked: leaves `[C, ...]`.
      weight: `[C]`; clients whose weight is not above 0 did not return.

    Example:
      >>> median(jnp.array([1.0, 2.0, 4.0, jnp.nan, 9.0]), jnp.array([1, 1, 1, 1, 0])).tolist()
      3.0
    """

    def middle(ordered: jax.Array, count: jax.Array) -> jax.Array:
        return (ordered[jnp.maximum(count - 1, 0) // 2] + ordered[count // 2]) / 2

    return _by_rank(middle, stacked, weight)


def trimmed_mean(share: float) -> Aggregator:
    """The mean of each number without the `share` of clients with the largest values and the `share` with the smallest.

    The clients that returned count equally, and NaN counts as one of the largest values. The trimmed mean tolerates arbitrary
    uploads from a `share` of the clients (Yin et al., ICML 2018, definition 2). It is exactly 0 when no client returned.

    Args:
      share: beta, at least 0 and below 1/2; of n clients, floor(share * n) are left out at each end.

    Raises:
      ValueError: `share` out of range.

    Example:
      >>> trimmed_mean(0.25)(jnp.array([1.0, 2.0, 4.0, jnp.nan]), jnp.ones(4)).tolist()
      3.0
    """
    checks.between("share", share, 0, 0.5)
    if share == 0.5:
        raise ValueError("share=0.5 would leave out every client: it must be below 1/2; or use `median`")

    return partial(_by_rank, partial(_inner_mean, share))


def _inner_mean(share: float, ordered: jax.Array, count: jax.Array) -> jax.Array:
    # Tolerance: floor(0.29 * 100) must be 29, but the product is 28.999... in floating point.
    cut = jnp.floor(share * count + 1e-3).astype(count.dtype)
    rank = jnp.arange(ordered.shape[0]).reshape(-1, *[1] * (ordered.ndim - 1))
    inside = (rank >= cut) & (rank < count - cut)
    return jnp.sum(ordered, 0, where=inside) / jnp.maximum(count - 2 * cut, 1).astype(ordered.dtype)


def _by_rank(choose: Callable[[jax.Array, jax.Array], jax.Array], stacked: PyTree, weight: jax.Array) -> PyTree:
    """`choose(sorted values, number of clients that returned)` of each leaf; values of other clients, and NaN, come last."""
    returned = weight > 0
    count = jnp.sum(returned)

    def one(leaf: jax.Array) -> jax.Array:
        wide = jnp.where(returned.reshape(-1, *[1] * (leaf.ndim - 1)), _wide(leaf), jnp.nan)
        return jnp.where(count > 0, choose(jnp.sort(wide, 0), count), 0).astype(leaf.dtype)

    return jax.tree.map(one, stacked)


def combine(matrix: jax.Array, stacked: PyTree) -> PyTree:
    """Each client's own mixture of all clients' trees.

    This is the general aggregator (FedPAC, FedFomo, FedAMP, L2GD); it needs every client's tree at once. Plain means use the
    running sum instead and never build a matrix. A leaf that is not finite has no effect on rows that give it weight 0, and
    makes the leaf NaN in the other rows.

    Args:
      matrix: `[C, C]`; row i has the weights of client i's mixture and sums to 1.
      stacked: leaves `[C, ...]`.

    Returns:
      Leaves `[C, ...]`: the mixture of each client.
    """

    def mixed(leaf: jax.Array) -> jax.Array:
        wide, rows = _wide(leaf), (-1, *[1] * (leaf.ndim - 1))
        finite = jnp.all(jnp.isfinite(leaf), tuple(range(1, leaf.ndim)))
        usable = jnp.where(finite.reshape(rows), wide, 0)
        # At an accelerator's default precision, even the identity matrix would round every parameter.
        mixture = jnp.einsum("ij,j...->i...", matrix.astype(wide.dtype), usable, precision=jax.lax.Precision.HIGHEST)
        diverged = jnp.any((matrix != 0) & ~finite, 1)
        return jnp.where(diverged.reshape(rows), jnp.nan, mixture).astype(leaf.dtype)

    return jax.tree.map(mixed, stacked)
