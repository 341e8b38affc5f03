"""Differential privacy at the level of clients: what a client adds to the model is clipped, and the server adds noise.

DP-FedAvg: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018, arXiv
1710.06963, with cohorts of fixed size, clients that count alike, and all of an upload clipped at once ("flat clipping").
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.task import Key


class Privacy(NamedTuple):
    """How uploads are made private; an option of every algorithm whose clients send nothing but what is averaged.

    An upload is everything that is averaged: by how much the model moved (buffers too), or the gradient, and statistics. Its norm
    is cut to `clip_norm`, every client counts alike, and the sum is divided by C, whoever returned, so that one client moves the
    mean by no more than `clip_norm / C`. To that the server adds Gaussian noise of deviation `noise_multiplier * clip_norm / C`.

    For a guarantee (epsilon, delta), give the noise multiplier, the rate C / N and the number of rounds to an accountant. It
    speaks of the server's state, which all clients see; not of personal leaves and memories, which stay where they are, nor of
    metrics, which a deployment would not send. Buffers and averaged slots that must be positive (a variance) may not be after
    the noise: let clients keep these.

    Attributes:
      clip_norm: S, above 0; may be traced, as the other.
      noise_multiplier: z, at least 0.
    """

    clip_norm: Any
    noise_multiplier: Any

    def check(self) -> None:
        """Raises `ValueError` for a norm or a multiplier out of range."""
        checks.positive("clip_norm", self.clip_norm)
        checks.not_negative("noise_multiplier", self.noise_multiplier)


def clipped(tree: Any, norm: Any) -> Any:
    """The tree scaled down to a Euclidean norm of at most `norm`; zeros where it is not finite.

    Example:
      >>> clipped({"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}, 1.0)["a"].round(3).tolist()
      [0.6, 0.0]
    """
    length = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree))
    factor = jnp.minimum(1, norm / jnp.maximum(length, jnp.finfo(length.dtype).tiny))
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(length), leaf * factor.astype(leaf.dtype), 0), tree)


def noised(key: Key, tree: Any, deviation: Any) -> Any:
    """The tree plus independent Gaussian noise on every number; the key is consumed."""
    leaves, structure = jax.tree.flatten(tree)

    def one(key: Key, leaf: jax.Array) -> jax.Array:
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        return (leaf.astype(wide) + deviation * jax.random.normal(key, leaf.shape, wide)).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [one(jax.random.fold_in(key, i), leaf) for i, leaf in enumerate(leaves)])
