"""Mixtures: each client gets its own combination of all clients' trees."""

import jax
import jax.numpy as jnp

from fedjax_meta.aggregate.means import wide
from fedjax_meta.types import PyTree


def combine(matrix: jax.Array, stacked: PyTree) -> PyTree:
    """Each client's own mixture of all clients' trees.

    FedPAC, FedFomo, FedAMP, FedCAC and pFedSim use it. It needs every client's tree at once; plain means use a running sum and
    never build a matrix. A leaf that is not finite has no effect on rows that give it weight 0, and makes the leaf NaN in the
    other rows.

    Args:
      matrix: `[C, C]`; row i has the weights of client i's mixture and sums to 1.
      stacked: leaves `[C, ...]`.

    Returns:
      Leaves `[C, ...]`: the mixture of each client.
    """

    def mixed(leaf: jax.Array) -> jax.Array:
        exact, rows = wide(leaf), (-1, *[1] * (leaf.ndim - 1))
        finite = jnp.all(jnp.isfinite(leaf), tuple(range(1, leaf.ndim)))
        usable = jnp.where(finite.reshape(rows), exact, 0)
        # At an accelerator's default precision, even the identity matrix would round every parameter.
        mixture = jnp.einsum("ij,j...->i...", matrix.astype(exact.dtype), usable, precision=jax.lax.Precision.HIGHEST)
        diverged = jnp.any((matrix != 0) & ~finite, 1)
        return jnp.where(diverged.reshape(rows), jnp.nan, mixture).astype(leaf.dtype)

    return jax.tree.map(mixed, stacked)
