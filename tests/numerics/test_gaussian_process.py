"""The Gaussian process of two classes: its kernel, its posterior given omega, and Polya-Gamma variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from fedjax_meta.numerics.gaussian_process import (
    _TERMS,
    _omega_of,
    chance,
    gibbs,
    kernel,
    mean_field,
    mean_omega,
    posterior,
    posterior_of_parts,
)
from tests.whole_rounds.world import near

JITTER = 1e-3
X, QUERIES = np.random.default_rng(1).normal(size=(12, 4)), np.random.default_rng(2).normal(size=(5, 4))
SIGNS = np.where(X[:, 0] + 0.3 * np.random.default_rng(3).normal(size=12) > 0, 0.5, -0.5)


def normal(z):
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def gram(a, b, scale=8.0, length=1.0):
    square = ((normal(a)[:, None] - normal(b)[None]) ** 2).sum(-1)
    return scale * np.exp(-square / (2 * length**2))


def test_the_kernel():
    near(kernel(jnp.asarray(X), jnp.asarray(QUERIES), 8.0, 0.7), gram(X, QUERIES, 8.0, 0.7), 1e-9)


def test_the_posterior_given_omega_is_a_regression(rng):
    """On kappa / omega with noise 1 / omega: scikit-learn's, with that kernel. Samples of omega 0 are left out."""
    omega = rng.uniform(0.05, 0.25, 12)
    used = np.arange(12) != 7
    regression = GaussianProcessRegressor(ConstantKernel(8.0) * RBF(1.0), alpha=1 / omega[used] + JITTER, optimizer=None)
    regression.fit(normal(X)[used], (SIGNS / omega)[used])
    mean, deviation = regression.predict(normal(QUERIES), return_std=True)
    signs, omega = jnp.asarray(np.where(used, SIGNS, 0)), jnp.asarray(np.where(used, omega, 0))
    got = posterior(
        jnp.asarray(gram(X, X) + JITTER * np.eye(12)), signs, omega, jnp.asarray(gram(X, QUERIES)), jnp.full(5, 8.0)
    )
    near(got[0], mean, 1e-8)
    near(got[1], deviation**2, 1e-8)


def test_slopes_of_the_posterior_are_those_of_finite_differences(rng):
    """With respect to the three covariances, one of them through a symmetric change; omega and signs are held."""
    omega, signs = jnp.asarray(rng.uniform(0.05, 0.25, 12)).at[7].set(0), jnp.asarray(SIGNS).at[7].set(0)
    mean, variance = rng.normal(size=(2, 5))

    def value(root, cross, prior):
        found = posterior(root @ root.T / 4 + jnp.eye(12), signs, omega, cross, prior)
        return jnp.sum(mean * jnp.sin(found[0])) + jnp.sum(variance * found[1] ** 2)

    at = jnp.asarray(rng.normal(size=(12, 4))), jnp.asarray(rng.normal(size=(12, 5))), jnp.full(5, 8.0)
    check_grads(value, at, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
    assert not np.any(jax.grad(lambda o: jnp.sum(posterior(jnp.eye(12), signs, o, at[1], at[2])[0]))(omega))


def test_a_variance_that_rounding_makes_negative_is_tiny_and_has_no_slope():
    found, pull = jax.vjp(
        lambda v: posterior(jnp.eye(1), jnp.ones(1) / 2, jnp.ones(1), jnp.full((1, 1), 9.0), v)[1], jnp.ones(1)
    )
    assert float(found[0]) == 1e-10 and float(pull(jnp.ones(1))[0][0]) == 0


def test_processes_that_share_no_sample_are_computed_together(rng):
    """Two of them, interleaved, and a sample of neither: as if each had its samples alone."""
    part = np.array([[1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1]])
    omega = rng.uniform(0.05, 0.25, 12) * part.sum(0)
    whole, cross = gram(X, X) + JITTER * np.eye(12), gram(X, QUERIES)
    apart = jnp.asarray(np.where(part.T @ part > 0, whole, 0))
    signs = jnp.asarray(np.where(part.sum(0), SIGNS, 0))
    got = posterior_of_parts(apart, signs, jnp.asarray(omega), jnp.asarray(cross), jnp.full(5, 8.0), jnp.asarray(part * 1.0))
    for number, mask in enumerate(part > 0):
        expected = posterior(
            jnp.asarray(whole[np.ix_(mask, mask)]),
            signs[mask],
            jnp.asarray(omega[mask]),
            jnp.asarray(cross[mask]),
            jnp.full(5, 8.0),
        )
        near(got[0][number], expected[0], 1e-10)
        near(got[1][number], expected[1], 1e-10)


def draw_omega(key, c):
    """PG(1, c) for each entry."""
    return _omega_of(jax.random.exponential(key, (*c.shape, _TERMS), c.dtype), c)


@pytest.mark.parametrize("c", [0.0, 2.0, 8.0])
def test_polya_gamma_variables_have_their_laplace_transform(c):
    """E exp(-t omega) = cosh(c / 2) / cosh(sqrt((c^2 / 2 + t) / 2)) (Polson, Scott and Windle 2013)."""
    drawn = np.asarray(draw_omega(jax.random.key(4), jnp.full(100_000, c)))
    for t in (1.0, 8.0, 40.0):
        exact = np.cosh(c / 2) / np.cosh(np.sqrt((c**2 / 2 + t) / 2))
        found = np.exp(-t * drawn)
        assert np.mean(found) == pytest.approx(exact, abs=4 * np.std(found) / np.sqrt(len(found)))


@pytest.mark.parametrize("c", [0.0, 0.8, 3.0, 12.0])
def test_polya_gamma_variables_have_their_moments(c):
    drawn = np.asarray(draw_omega(jax.random.key(1), jnp.full(40_000, c)))
    safe = max(c, 1e-3)
    variance = (np.sinh(safe) - safe) / (4 * safe**3 * np.cosh(safe / 2) ** 2)
    assert np.mean(drawn) == pytest.approx(float(mean_omega(jnp.asarray(c))), rel=0.02)
    assert np.var(drawn) == pytest.approx(variance, rel=0.06)


def test_one_sample_against_quadrature():
    """p(y* = left) after one sample of the left branch: a two-dimensional integral."""
    a, b = np.array([[1.0, 0.2, 0, 0]]), np.array([[0.4, 1.0, 0, 0]])
    k, cross = gram(a, a)[0, 0] + JITTER, gram(a, b)[0, 0]
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    f = np.sqrt(k) * points
    rest = np.sqrt(k - cross**2 / k)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    inner = (weights[None] * sigmoid(cross / k * f[:, None] + rest * points[None])).sum(1) / weights.sum()
    expected = (weights * sigmoid(f) * inner).sum() / (weights * sigmoid(f)).sum()
    signs, covariance = jnp.asarray([0.5]), jnp.asarray([[k]])
    omega = gibbs(jax.random.key(2), covariance, signs, 20, 3000)
    at = lambda drawn: posterior(covariance, signs, drawn, jnp.asarray([[cross]]), jnp.asarray([k]))  # noqa: E731
    assert float(jnp.mean(chance(*jax.vmap(at)(omega)))) == pytest.approx(expected, abs=0.01)


def test_chains_may_share_a_root_of_the_whole_gram_matrix():
    """A matrix of two processes, and the root of the one without zeros between them: each has its own distribution of omega."""
    part = np.arange(12) < 6
    whole = gram(X, X) + JITTER * np.eye(12)
    apart = jnp.asarray(np.where(part[:, None] == part[None], whole, 0))
    shared = gibbs(jax.random.key(5), apart, jnp.asarray(SIGNS), 6, 10_000, jnp.asarray(np.linalg.cholesky(whole)))
    alone = gibbs(jax.random.key(6), jnp.asarray(whole[:6, :6]), jnp.asarray(SIGNS[:6]), 6, 10_000)
    near(np.mean(shared[:, :6], 0), np.mean(alone, 0), 0.007)
    near(np.std(shared[:, :6], 0), np.std(alone, 0), 0.009)


def test_the_mean_field_is_a_fixed_point_near_the_draws():
    covariance, signs = jnp.asarray(gram(X, X) + JITTER * np.eye(12)), jnp.asarray(SIGNS)
    omega = mean_field(covariance, signs, 200)
    near(mean_field(covariance, signs, 201), omega, 1e-8)
    near(omega, np.asarray(gibbs(jax.random.key(3), covariance, signs, 20, 400)).mean(0)[None], 0.05)


def test_sweeps_of_gibbs_sampling_draw_from_the_posterior_of_one_sample():
    """Mean and variance of omega: moments of Polya-Gamma given f, and quadrature over p(f | y = 1)."""
    variance, draws = 8.0, 20_000
    f, weight = np.polynomial.hermite_e.hermegauss(80)
    f = f * np.sqrt(variance)
    weight = weight / (1 + np.exp(-f))
    weight /= weight.sum()
    of_f = np.tanh(f / 2) / (2 * f)
    spread = (np.sinh(f) - f) / (4 * f**3 * np.cosh(f / 2) ** 2)
    mean = weight @ of_f
    expected = weight @ (spread + of_f**2) - mean**2
    found = np.asarray(gibbs(jax.random.key(1), jnp.array([[variance]]), jnp.array([0.5]), 8, draws))[:, 0]
    assert found.mean() == pytest.approx(mean, abs=5 * np.sqrt(expected / draws))
    assert found.var() == pytest.approx(expected, rel=0.05)
