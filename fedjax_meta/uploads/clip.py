"""Clipping: a client's whole upload is scaled down to a bounded Euclidean norm.

It bounds the influence of one client, and is the first half of differential privacy at the level of clients (McMahan, Ramage,
Talwar, Zhang: "Learning differentially private recurrent language models", ICLR 2018, arXiv 1710.06963, flat clipping). The
norm may follow a quantile of the uploads' norms: `adaptive_clip`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.types import Key, PyTree, Scalar
from fedjax_meta.uploads.secret import init_secret, with_secret
from fedjax_meta.uploads.transform import ServerContext, UploadTransform


def clip(norm: Scalar) -> UploadTransform:
    """Clips uploads to `norm`.

    With it, clients send by how much the model moved, buffers included, instead of its values. The norm is that of all that a
    client sends: where a method sends statistics (features of each class, control variates), these take a part of it. In single
    precision it holds for norms from about 1e-18 on: squares of smaller numbers are 0.

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


def adaptive_clip(
    norm: Scalar, *, quantile: Scalar = 0.5, rate: Scalar = 0.2, bit_noise: Scalar = 0.0, reproducible: bool = False
) -> UploadTransform:
    """Clips uploads to a norm S that follows a quantile of their norms.

    Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS 2021, arXiv
    1905.03871, algorithm 1. Each client sends a bit b_i, whether its norm was at most S. The server takes the noisy share of them
    over its divisor m and moves the norm:

        S <- S exp(-rate ((sum_i (b_i - 1/2) + N(0, bit_noise^2)) / m + 1/2 - quantile)).

    With `noise(z)` after it, the noise on the uploads has the multiplier `(z^-2 - (2 bit_noise)^-2)^(-1/2)`, so that uploads and
    bits together are as private as z says (the paper's splitting of z). The paper takes `bit_noise = m / 20`.

    Args:
      norm: the first S, above 0.
      quantile: gamma, in [0, 1].
      rate: eta, at least 0.
      bit_noise: sigma_b, the deviation of the noise on the sum of bits; above z / 2 where there is `noise(z)`.
      reproducible: whether the bits' noise follows from the run's seed, as in `noise`.

    Raises:
      ValueError: a value out of range.
    """
    checks.positive("norm", norm)
    checks.between("quantile", quantile, 0, 1)
    checks.not_negative("rate", rate)
    checks.not_negative("bit_noise", bit_noise)
    checks.flag("reproducible", reproducible)

    def init_server(key: Key, upload: PyTree) -> PyTree:
        secret = () if reproducible else init_secret(key, upload)
        return {"norm": jnp.asarray(norm, jnp.result_type(float)), "secret": secret}

    def client(key: Key, upload: PyTree, memory: PyTree, kept: PyTree) -> tuple[PyTree, PyTree]:
        del key
        return clipped(upload, kept["norm"]), memory

    def measure(upload: PyTree, kept: PyTree) -> PyTree:
        # Around 0, one client counts for 1/2 at most, and one that does not return for nothing.
        return jnp.where(_norm(upload)[0] <= kept["norm"], 0.5, -0.5)

    def server(key: Key, average: PyTree, context: ServerContext, kept: PyTree, measured: PyTree) -> tuple[PyTree, PyTree]:
        key = key if reproducible else with_secret(key, kept["secret"])
        deviation = bit_noise / context.divisor
        share = measured + 0.5 + deviation * jax.random.normal(key, (), measured.dtype)
        moved = kept["norm"] * jnp.exp(-rate * (share - quantile))
        return average, kept | {"norm": moved.astype(kept["norm"].dtype)}

    config = {"norm": norm, "quantile": quantile, "rate": rate, "bit_noise": bit_noise, "reproducible": reproducible}
    return UploadTransform(
        name="adaptive_clip",
        client=client,
        measure=measure,
        server=server,
        init_server=init_server,
        clip_norm=lambda kept: kept["norm"],
        # The bit moves its sum by 1/2.
        spends=math.inf if not isinstance(bit_noise, jax.Array) and bit_noise == 0 else (2 * bit_noise) ** -2,
        sends_differences=True,
        config=config,
    )


def clipped(tree: PyTree, norm: Any) -> PyTree:
    """The tree scaled down to a Euclidean norm of at most `norm`, in exact arithmetic on the returned numbers; zeros where its
    norm is not finite.

    Example:
      >>> clipped({"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}, 1.0)["a"].round(3).tolist()
      [0.6, 0.0]
    """
    length, wide = _norm(tree)
    form = length.dtype
    # A sum of squares errs by some units in the last place; this margin keeps the bound.
    most = norm * (1 - 1024 * jnp.finfo(form).eps)
    factor = jnp.minimum(1, most / jnp.maximum(length, jnp.finfo(form).tiny)).astype(form)

    def scaled(leaf: jax.Array, exact: jax.Array) -> jax.Array:
        shrunk = jnp.where(factor < 1, _toward_zero(exact * factor, leaf.dtype), leaf)
        return jnp.where(jnp.isfinite(length), shrunk, 0)

    return jax.tree.map(scaled, tree, wide)


def _norm(tree: PyTree) -> tuple[jax.Array, PyTree]:
    """(norm, the tree in the type in which it was computed: at least 32 bits)."""
    form = jnp.result_type(jnp.float32, *jax.tree.leaves(tree))
    wide = jax.tree.map(lambda leaf: leaf.astype(form), tree)
    return optax.tree.norm(wide), wide


def _toward_zero(exact: jax.Array, form: Any) -> jax.Array:
    """The number of a narrower type that is nearest among those of no larger magnitude."""
    near = exact.astype(form)
    if near.dtype == exact.dtype:
        return near
    # Of a positive or negative number in binary, the next one towards zero is one bit pattern below.
    pattern = jnp.uint16 if near.dtype.itemsize == 2 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(near, pattern)
    below = jax.lax.bitcast_convert_type(bits - jnp.asarray(1, pattern), near.dtype)
    return jnp.where(jnp.abs(near.astype(exact.dtype)) > jnp.abs(exact), below, near)
