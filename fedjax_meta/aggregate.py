"""From the client axis to the server: weighted means of uploads, as running sums that never stack what they average."""

from typing import Any, NamedTuple

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


class WeightedSum(NamedTuple):
    """A running sum of `weight * upload`, and of the weights.

    Attributes:
      total: like one upload.
      weight: a scalar, or a tree that is a prefix of the upload when its parts count differently.
    """

    total: Any
    weight: Any


def weigh(upload: Any, weight: Any) -> WeightedSum:
    """The sum that holds one client's upload. `weight` is a scalar or a prefix tree of scalars.

    An upload whose weight is not above 0 leaves no trace, even where it is not finite.

    Raises:
      ValueError: an upload that is not floating-point: a mean of integers would be cut to an integer.
    """
    weight = jax.tree.map(lambda w: jnp.where(jnp.asarray(w) > 0, w, 0), weight)

    def scale(w: jax.Array, part: Any) -> Any:
        def scaled(leaf: Any) -> jax.Array:
            leaf = jnp.asarray(leaf)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ValueError(f"an upload of {leaf.dtype}{list(leaf.shape)} cannot be averaged: it must be floating-point")
            return jnp.where(w > 0, w.astype(leaf.dtype) * leaf, 0)

        return jax.tree.map(scaled, part)

    return WeightedSum(jax.tree.map(scale, weight, upload), weight)


def mean(summed: WeightedSum) -> Any:
    """The weighted mean; exactly 0 where no weight came in, so that a round in which nobody returns moves nothing."""

    def divide(w: jax.Array, part: Any) -> Any:
        some = w > 0
        return jax.tree.map(lambda leaf: jnp.where(some, leaf / jnp.where(some, w, 1).astype(leaf.dtype), 0), part)

    return jax.tree.map(divide, summed.weight, summed.total)


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
    through the running sum instead and never build a matrix. A tree that is not finite spoils every row, whatever its weight.

    Args:
      matrix: `[C, C]`, rows sum to 1.
      stacked: leaves `[C, ...]`.
    """

    def mixed(leaf: jax.Array) -> jax.Array:
        # At an accelerator's default precision even the identity would round every parameter of every client.
        return jnp.einsum("ij,j...->i...", matrix.astype(leaf.dtype), leaf, precision=jax.lax.Precision.HIGHEST)

    return jax.tree.map(mixed, stacked)
