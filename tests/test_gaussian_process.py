"""The Gaussian process of two classes: its kernel, its posterior given omega, and Polya-Gamma variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from fedjax_meta.gaussian_process import chance, draw_omega, gibbs, kernel, mean_field, mean_omega, posterior
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


def test_the_mean_field_is_a_fixed_point_near_the_draws():
    covariance, signs = jnp.asarray(gram(X, X) + JITTER * np.eye(12)), jnp.asarray(SIGNS)
    omega = mean_field(covariance, signs, 200)
    near(mean_field(covariance, signs, 201), omega, 1e-8)
    near(omega, np.asarray(gibbs(jax.random.key(3), covariance, signs, 20, 400)).mean(0)[None], 0.05)
