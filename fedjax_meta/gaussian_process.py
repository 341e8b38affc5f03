"""A Gaussian process for two classes: Polya-Gamma variables omega make its posterior that of a regression.

Polson, Scott, Windle: "Bayesian inference for logistic models using Polya-Gamma latent variables", JASA 2013, arXiv 1205.0310.
Given omega, the function f at the samples is Gaussian; given f, omega is PG(1, f). M is the number of samples, B that of other
inputs, D that of draws, d that of features.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import linalg
from fedjax_meta.keys import tagged
from fedjax_meta.types import Key, Scalar

_POINTS, _WEIGHTS = (part for part in np.polynomial.hermite.hermgauss(20))
_TERMS = 100


def kernel(a: jax.Array, b: jax.Array, output_scale: Scalar, length_scale: Scalar) -> jax.Array:
    """The squared-exponential kernel of features on the unit sphere, `[A, B]` from `[A, d]` and `[B, d]`."""
    a, b = (z / jnp.sqrt(jnp.maximum(jnp.sum(z**2, -1, keepdims=True), 1e-24)) for z in (a, b))
    square = jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1)[None, :] - 2 * a @ b.T
    return output_scale * jnp.exp(-jnp.maximum(square, 0) / (2 * length_scale**2))


def mean_omega(c: jax.Array) -> jax.Array:
    """E of a Polya-Gamma variable PG(1, c): tanh(c / 2) / (2 c)."""
    c = jnp.maximum(jnp.abs(c), 1e-4)
    return jnp.tanh(c / 2) / (2 * c)


def draw_omega(key: Key, c: jax.Array) -> jax.Array:
    """PG(1, c) for each entry: sum_k e_k / ((k - 1/2)^2 + c^2 / (4 pi^2)) / (2 pi^2), e_k exponential; key consumed."""
    scale = 1 / (2 * jnp.pi**2) / ((jnp.arange(_TERMS) + 0.5) ** 2 + (c[..., None] / (2 * jnp.pi)) ** 2)
    rest = jnp.maximum(mean_omega(c) - jnp.sum(scale, -1), 0)
    return jnp.sum(jax.random.exponential(key, scale.shape, scale.dtype) * scale, -1) + rest


def _factor(gram: jax.Array, omega: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(s, Cholesky factor of I + s K s), s the root of omega; an omega of 0 leaves a sample out."""
    s = jnp.sqrt(omega)
    return s, linalg.cholesky(jnp.eye(len(s)) + s[:, None] * gram * s[None, :])


def posterior(
    gram: jax.Array, signs: jax.Array, omega: jax.Array, cross: jax.Array, variance: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of f at other inputs, given omega: the regression on signs / omega with noise 1 / omega.

    Args:
      gram: `[M, M]`, the kernel of the samples with jitter.
      signs: `[M]`, 1/2 or -1/2, 0 for a sample that does not take part.
      omega: `[M]`, 0 for these.
      cross: `[M, B]`, the kernel between samples and inputs.
      variance: `[B]`, prior variance there.

    Returns:
      two arrays `[B]`.
    """
    s, lower = _factor(gram, omega)
    # One solve for both, whose gradient needs one more: solves dominate the time.
    sides = jnp.concatenate([cross, (gram @ signs)[:, None]], 1)
    sides = linalg.solve_triangular(lower, s[:, None] * sides)
    seen, target = sides[:, :-1], sides[:, -1]
    return cross.T @ signs - seen.T @ target, jnp.maximum(variance - jnp.sum(seen**2, 0), 1e-10)


def chance(mean: jax.Array, variance: jax.Array) -> jax.Array:
    """E sigma(f) for Gaussian f, by Gauss-Hermite quadrature; like `mean`."""
    f = mean[..., None] + jnp.sqrt(2 * variance)[..., None] * jnp.asarray(_POINTS, mean.dtype)
    return jnp.sum(jax.nn.sigmoid(f) * jnp.asarray(_WEIGHTS / np.sqrt(np.pi), mean.dtype), -1)


def gibbs(key: Key, gram: jax.Array, signs: jax.Array, steps: int, draws: int) -> jax.Array:
    """omega after `steps` sweeps of f | omega and omega | f, from f drawn from the prior: `[D, M]`; key consumed."""
    takes_part, root = jnp.abs(signs) > 0, linalg.cholesky(gram)

    def omega_of(key: Key, f: jax.Array) -> jax.Array:
        return jnp.where(takes_part, draw_omega(key, f), 0)

    def sweep(t: Any, carry: tuple[jax.Array, Key]) -> tuple[jax.Array, Key]:
        omega, key = carry
        # A draw of the prior, corrected by the regression of signs / omega on it.
        mine = jax.random.fold_in(key, t)
        prior = root @ jax.random.normal(tagged(mine, "prior"), signs.shape, signs.dtype)
        s, lower = _factor(gram, omega)
        noise = jax.random.normal(tagged(mine, "noise"), signs.shape, signs.dtype)
        gap = jnp.where(takes_part, signs / jnp.where(takes_part, s, 1) - s * prior - noise, 0)
        solved = linalg.solve_factored(lower, gap[:, None])[:, 0]
        return omega_of(tagged(mine, "omega"), prior + gram @ (s * solved)), key

    def chain(key: Key) -> jax.Array:
        f = root @ jax.random.normal(tagged(key, "start"), signs.shape, signs.dtype)
        return jax.lax.fori_loop(0, steps, sweep, (omega_of(tagged(key, "first"), f), tagged(key, "sweeps")))[0]

    return jax.vmap(chain)(jax.random.split(key, draws))


def mean_field(gram: jax.Array, signs: jax.Array, steps: int) -> jax.Array:
    """omega <- E PG(1, c), c^2 = E f^2 under the posterior that omega gives, `steps` times from c = 0: `[1, M]`."""

    def step(_: Any, omega: jax.Array) -> jax.Array:
        mean, variance = posterior(gram, signs, omega, gram, jnp.diagonal(gram))
        return jnp.where(jnp.abs(signs) > 0, mean_omega(jnp.sqrt(mean**2 + variance)), 0)

    start = jnp.where(jnp.abs(signs) > 0, 0.25, 0).astype(gram.dtype)
    return jax.lax.fori_loop(0, steps, step, start)[None]
