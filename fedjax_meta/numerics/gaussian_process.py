"""A Gaussian process for two classes: Polya-Gamma variables omega make its posterior that of a regression.

Polson, Scott, Windle: "Bayesian inference for logistic models using Polya-Gamma latent variables", JASA 2013, arXiv 1205.0310.
Given omega, the function f at the samples is Gaussian; given f, omega is PG(1, f). M is the number of samples, B that of other
inputs, D that of draws, d that of features.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta.keys import tagged
from fedjax_meta.numerics import linalg
from fedjax_meta.types import Key, Scalar

_LEAST = 1e-10
"""A variance is at least this, whatever rounding makes of it."""
_POINTS, _WEIGHTS = (part for part in np.polynomial.hermite.hermgauss(20))
_TERMS = 8
"""Beyond them a Polya-Gamma variable is its mean: at c = 0 they have all but 4e-5 of its variance, at c = 12 all but 6e-3."""


def kernel(a: jax.Array, b: jax.Array, output_scale: Scalar, length_scale: Scalar) -> jax.Array:
    """The squared-exponential kernel of features on the unit sphere, `[A, B]` from `[A, d]` and `[B, d]`.

    It is of single precision at least, in which Cholesky factors are.
    """
    a, b = (z.astype(jnp.promote_types(z.dtype, jnp.float32)) for z in (a, b))
    a, b = (z / jnp.sqrt(jnp.maximum(jnp.sum(z**2, -1, keepdims=True), 1e-24)) for z in (a, b))
    square = jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1)[None, :] - 2 * a @ b.T
    return output_scale * jnp.exp(-jnp.maximum(square, 0) / (2 * length_scale**2))


def mean_omega(c: jax.Array) -> jax.Array:
    """E of a Polya-Gamma variable PG(1, c): tanh(c / 2) / (2 c)."""
    c = jnp.maximum(jnp.abs(c), 1e-4)
    return jnp.tanh(c / 2) / (2 * c)


def _omega_of(exponential: jax.Array, c: jax.Array) -> jax.Array:
    """PG(1, c): sum_k e_k / ((k - 1/2)^2 + c^2 / (4 pi^2)) / (2 pi^2) and the mean of the rest; e is `[..., _TERMS]`."""
    scale = 1 / (2 * jnp.pi**2) / ((jnp.arange(_TERMS, dtype=c.dtype) + 0.5) ** 2 + (c[..., None] / (2 * jnp.pi)) ** 2)
    rest = jnp.maximum(mean_omega(c) - jnp.sum(scale, -1), 0)
    return jnp.sum(exponential * scale, -1) + rest


def _factor(gram: jax.Array, omega: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(s, Cholesky factor of I + s K s), s the root of omega; an omega of 0 leaves a sample out."""
    s = jnp.sqrt(omega)
    return s, linalg.cholesky(jnp.eye(len(s), dtype=s.dtype) + s[:, None] * gram * s[None, :])


def _solved(
    gram: jax.Array, signs: jax.Array, omega: jax.Array, cross: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(s, L, L^-1 s cross, L^-1 s K signs): the parts of means and variances, of one solve, since solves dominate the time."""
    s, lower = _factor(gram, omega)
    sides = linalg.solve_triangular(lower, s[:, None] * jnp.concatenate([cross, (gram @ signs)[:, None]], 1))
    return s, lower, sides[:, :-1], sides[:, -1]


def posterior(
    gram: jax.Array, signs: jax.Array, omega: jax.Array, cross: jax.Array, variance: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of f at other inputs, given omega: the regression on signs / omega with noise 1 / omega.

    It has gradients in reverse mode with respect to the three covariances; signs and omega are held.

    Args:
      gram: `[M, M]`, the kernel of the samples with jitter.
      signs: `[M]`, 1/2 or -1/2, 0 for a sample that does not take part.
      omega: `[M]`, 0 for these.
      cross: `[M, B]`, the kernel between samples and inputs.
      variance: `[B]`, prior variance there.

    Returns:
      two arrays `[B]`.
    """
    signs, omega = jax.lax.stop_gradient((signs, omega))
    return _posterior(gram, signs, omega, cross, variance)


@jax.custom_vjp
def _posterior(
    gram: jax.Array, signs: jax.Array, omega: jax.Array, cross: jax.Array, variance: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _posterior_forward(gram, signs, omega, cross, variance)[0]


def _posterior_forward(gram: jax.Array, signs: jax.Array, omega: jax.Array, cross: jax.Array, variance: jax.Array) -> Any:
    s, lower, seen, target = _solved(gram, signs, omega, cross)
    left = variance - jnp.sum(seen**2, 0)
    found = cross.T @ signs - seen.T @ target, jnp.maximum(left, _LEAST)
    return found, (s, lower, seen, target, signs, left > _LEAST)


def _posterior_backward(kept: tuple[Any, ...], given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
    # With C = cross, R = (K + 1 / omega)^-1 C and w = (K + 1 / omega)^-1 signs / omega:
    # d mean = dC' w - R' dK w, d variance = dv - diag(2 R' dC - R' dK R).
    s, lower, seen, target, signs, free = kept
    to_mean, to_variance = given[0], jnp.where(free, given[1], 0)
    sides = jnp.concatenate([seen, target[:, None]], 1)
    sides = s[:, None] * linalg.solve_triangular(lower, sides, transpose=True)
    solved, weights = sides[:, :-1], signs - sides[:, -1]
    to_gram = solved @ (to_variance[:, None] * solved.T - to_mean[:, None] * weights[None])
    to_cross = weights[:, None] * to_mean[None] - 2 * solved * to_variance[None]
    return to_gram, None, None, to_cross, to_variance


_posterior.defvjp(_posterior_forward, _posterior_backward)


def posterior_of_parts(
    gram: jax.Array, signs: jax.Array, omega: jax.Array, cross: jax.Array, variance: jax.Array, part: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`posterior` of several processes that share no sample, all at the same inputs.

    Args:
      gram: `[M, M]`, 0 between samples of different processes.
      signs, omega, cross, variance: as in `posterior`.
      part: `[P, M]`, 1 where a sample is of a process, else 0.

    Returns:
      two arrays `[P, B]`.
    """
    _, _, seen, target = _solved(gram, signs, omega, cross)
    # Rows of a triangular factor without entries between processes stay apart.
    mean = part @ (signs[:, None] * cross - seen * target[:, None])
    return mean, jnp.maximum(variance[None] - part @ seen**2, _LEAST)


def chance(mean: jax.Array, variance: jax.Array) -> jax.Array:
    """E sigma(f) for Gaussian f, by Gauss-Hermite quadrature; like `mean`."""
    f = mean[..., None] + jnp.sqrt(2 * variance)[..., None] * jnp.asarray(_POINTS, mean.dtype)
    return jnp.sum(jax.nn.sigmoid(f) * jnp.asarray(_WEIGHTS / np.sqrt(np.pi), mean.dtype), -1)


def gibbs(key: Key, gram: jax.Array, signs: jax.Array, steps: int, draws: int, root: jax.Array | None = None) -> jax.Array:
    """omega after `steps` sweeps of f | omega and omega | f, from f drawn from the prior: `[D, M]`; key consumed.

    Args:
      gram, signs: as in `posterior`; or a Gram matrix of several processes, 0 between them.
      steps, draws: number of sweeps, and of chains D.
      root: a matrix whose product with its own transpose is a Gram matrix with that of each process in its place; by default
        the Cholesky factor of `gram`. Processes that share one have draws that are right one by one, though not independent.
    """
    takes_part, count = jnp.abs(signs) > 0, len(signs)
    root = linalg.cholesky(gram) if root is None else root
    # All random numbers at once: on a CPU each call costs more than a sweep of a small process.
    normal = jax.random.normal(tagged(key, "normal"), (draws, 2 * steps + 1, count), signs.dtype)
    exponential = jax.random.exponential(tagged(key, "exponential"), (draws, steps + 1, count, _TERMS), signs.dtype)
    prior = normal[:, : steps + 1] @ root.T

    def chain(prior: jax.Array, noise: jax.Array, exponential: jax.Array) -> jax.Array:
        def omega_of(number: Any, f: jax.Array) -> jax.Array:
            return jnp.where(takes_part, _omega_of(exponential[number], f), 0)

        def sweep(t: Any, omega: jax.Array) -> jax.Array:
            # A draw of the prior, corrected by the regression of signs / omega on it.
            s, lower = _factor(gram, omega)
            gap = jnp.where(takes_part, signs / jnp.where(takes_part, s, 1) - s * prior[t] - noise[t], 0)
            return omega_of(t + 1, prior[t] + gram @ (s * linalg.solve_factored(lower, gap[:, None])[:, 0]))

        return jax.lax.fori_loop(0, steps, sweep, omega_of(0, prior[steps]))

    return jax.vmap(chain)(prior, normal[:, steps + 1 :], exponential)


def mean_field(gram: jax.Array, signs: jax.Array, steps: int) -> jax.Array:
    """omega <- E PG(1, c), c^2 = E f^2 under the posterior that omega gives, `steps` times from c = 0: `[1, M]`."""

    def step(_: Any, omega: jax.Array) -> jax.Array:
        mean, variance = posterior(gram, signs, omega, gram, jnp.diagonal(gram))
        return jnp.where(jnp.abs(signs) > 0, mean_omega(jnp.sqrt(mean**2 + variance)), 0)

    start = jnp.where(jnp.abs(signs) > 0, 0.25, 0).astype(gram.dtype)
    return jax.lax.fori_loop(0, steps, step, start)[None]
