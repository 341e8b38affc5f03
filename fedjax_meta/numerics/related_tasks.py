"""Linear models of related tasks, which maximise the dual of their hinge losses one sample at a time.

Smith, Chiang, Sanjabi, Talwalkar: "Federated multi-task learning", NeurIPS 2017, arXiv 1705.10467. With the relations Sigma of N
tasks, the problem is sum_t mean_i hinge(y_i w_t x_i) + lambda / 2 tr(W Sigma^-1 W'). A task's dual variables alpha_t have the map
X_t' alpha_t / n_t, and W = map Sigma / lambda. The K classes are told apart one against the rest; M is the number of samples, d
that of inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta.numerics import linalg
from fedjax_meta.types import Scalar


def relations(weights: jax.Array, smoothing: Scalar) -> jax.Array:
    """Sigma = (W'W)^(1/2) / tr (W'W)^(1/2), mixed with the identity over N; that identity while W is 0.

    Args:
      weights: `[N, ...]`, the model of each client.
      smoothing: share of the identity.

    Returns:
      `[N, N]`, symmetric, positive, of trace 1.
    """
    linalg.one_thread()
    flat = weights.reshape(len(weights), -1)
    values, vectors = jnp.linalg.eigh(flat @ flat.T)
    root = (vectors * jnp.sqrt(jnp.maximum(values, 0))[None]) @ vectors.T
    trace, even = jnp.trace(root), jnp.eye(len(flat)) / len(flat)
    return jnp.where(trace > 0, (1 - smoothing) * root / jnp.where(trace > 0, trace, 1) + smoothing * even, even)


def safety(relation: jax.Array) -> jax.Array:
    """sigma' = max_t sum_t' |Sigma_tt'| / Sigma_tt, over rows that are not 0: no client's step overshoots that of all."""
    own = jnp.diagonal(relation)
    return jnp.max(jnp.where(own > 0, jnp.sum(jnp.abs(relation), 1) / jnp.where(own > 0, own, 1), 0), initial=0)


def ascend(
    dual: jax.Array,
    weights: jax.Array,
    x: jax.Array,
    y: jax.Array,
    size: Scalar,
    order: jax.Array,
    steps: Scalar,
    scale: Scalar,
) -> tuple[jax.Array, jax.Array]:
    """Coordinate ascent on the hinge loss's local dual: each step maximises it over one sample's variables.

    Args:
      dual: `[M, K]`.
      weights: `[K, d]`, the model from before.
      x, y: `[M, d]`, `[M]`.
      size: number of samples n.
      order: int `[n or more]`, samples in the order of the steps, again and again.
      steps: number of steps, may be traced.
      scale: sigma' Sigma_tt / lambda.

    Returns:
      (the dual variables `[M, K]`, their map `[K, d]`).
    """
    count = jnp.maximum(size, 1)

    def step(t: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dual, moved = carry
        i = order[t % count]
        sign = jnp.where(y[i] == jnp.arange(dual.shape[1]), 1, -1).astype(dual.dtype)
        length = jnp.maximum(scale * jnp.sum(x[i] ** 2), jnp.finfo(dual.dtype).tiny)
        best = sign * jnp.clip(count * (1 - sign * (moved @ x[i])) / length + dual[i] * sign, 0, 1)
        return dual.at[i].set(best), moved + scale * (best - dual[i])[:, None] * x[i][None] / count

    dual = jax.lax.fori_loop(0, steps, step, (dual, weights))[0]
    return dual, dual.T @ x / count


def primal(relation: jax.Array, maps: jax.Array, regularisation: Scalar) -> jax.Array:
    """W = Sigma map / lambda, `[N, K, d]`."""
    return jnp.tensordot(relation, maps, 1) / regularisation


def hinge(weights: jax.Array, x: jax.Array, y: jax.Array, size: Scalar) -> jax.Array:
    """The mean over the first `size` samples of the hinge losses of all classes; shapes as in `ascend`."""
    sign = jnp.where(y[:, None] == jnp.arange(len(weights))[None], 1, -1)
    losses = jnp.sum(jnp.maximum(1 - sign * (x @ weights.T), 0), 1)
    return jnp.sum(jnp.where(jnp.arange(len(x)) < size, losses, 0)) / jnp.maximum(size, 1)
