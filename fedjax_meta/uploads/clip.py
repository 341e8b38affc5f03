"""Clipping: a client's whole upload is scaled down to a bounded Euclidean norm.

It bounds the influence of one client, and is the first half of differential privacy at the level of clients (McMahan, Ramage,
Talwar, Zhang: "Learning differentially private recurrent language models", ICLR 2018, arXiv 1710.06963, flat clipping).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.types import Key, PyTree, Scalar
from fedjax_meta.uploads.transform import UploadTransform


def clip(norm: Scalar) -> UploadTransform:
    """Clips uploads to `norm`.

    With it, clients send by how much the model moved, buffers included, instead of its values.

    Args:
      norm: S, above 0; may be traced.

    Raises:
      ValueError: a norm that is not positive.
    """
    checks.positive("norm", norm)

    def client(key: Key, upload: PyTree, memory: PyTree, kept: PyTree) -> tuple[PyTree, PyTree]:
        del key, kept
        return clipped(upload, norm), memory

    return UploadTransform(name="clip", client=client, clip_norm=norm, sends_differences=True, config={"norm": norm})


def clipped(tree: PyTree, norm: Any) -> PyTree:
    """The tree scaled down to a Euclidean norm of at most `norm`; zeros where it is not finite.

    Example:
      >>> clipped({"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}, 1.0)["a"].round(3).tolist()
      [0.6, 0.0]
    """
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)
    length = optax.tree.norm(wide)
    factor = jnp.minimum(1, norm / jnp.maximum(length, jnp.finfo(length.dtype).tiny))

    def scaled(leaf: jax.Array, exact: jax.Array) -> jax.Array:
        # Rounding to 16 bits may go up by half a unit in the last place: a whole one less keeps the bound.
        narrow = 1 - jnp.finfo(leaf.dtype).eps if leaf.dtype.itemsize < 4 else 1
        shrunk = jnp.where(factor < 1, factor * narrow, 1).astype(exact.dtype)
        return jnp.where(jnp.isfinite(length), (exact * shrunk).astype(leaf.dtype), 0)

    return jax.tree.map(scaled, tree, wide)
