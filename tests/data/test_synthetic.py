"""Generated clients: moments of their distributions, and closed forms against finite differences and gradient descent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import Weighted
from fedjax_meta.data import synthetic as syn


def _client(data, view, u):
    start, size = int(data.start[view][u]), int(data.sizes(view)[u])
    return np.asarray(data.x)[start : start + size], np.asarray(data.y)[start : start + size]


def test_synthetic_has_the_sizes_of_perfedavg_reptile():
    data = syn.synthetic(0.5, 0.5, seed=0)
    sizes = np.asarray(data.sizes("train")) + np.asarray(data.sizes("test"))
    assert len(sizes) == 30 and sizes.min() >= 100 and sizes.max() <= 1000
    assert data.x.shape == (sizes.sum(), 60) and data.x.dtype == np.float32 and data.num_classes == 10
    again = syn.synthetic(0.5, 0.5, seed=0)
    assert np.array_equal(data.x, again.x) and np.array_equal(data.y, again.y)
    assert not np.array_equal(data.x[:100], syn.synthetic(0.5, 0.5, seed=1).x[:100])


def test_synthetic_inputs_have_the_covariance_of_the_benchmark():
    data = syn.synthetic(0, 0, seed=0, num_clients=1, sizes=[40_000])
    covariance = np.cov(data.x.T.astype(np.float64))
    assert np.diag(covariance) == pytest.approx(np.arange(1, 61) ** -1.2, rel=0.06)
    correlation = covariance / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    assert np.abs(correlation - np.eye(60)).max() < 0.03


def test_the_spread_of_models_changes_no_label():
    """u adds the same number to the logit of each class."""
    one, other = (syn.synthetic(delta, 0.5, seed=1, num_clients=5) for delta in (0, 100))
    assert np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)


@pytest.mark.parametrize(("spread", "variance"), [("variance", 4.0), ("deviation", 16.0)])
def test_synthetic_spread_is_a_variance_or_a_deviation(spread, variance):
    # The mean of x over samples and dimensions is B ~ N(0, θ) plus an error of variance (1 + mean(j^-1.2) / 20) / 60.
    clients = 2000
    data = syn.synthetic(0, 4.0, seed=0, num_clients=clients, sizes=[20] * clients, spread=spread)
    centres = data.x.astype(np.float64).reshape(clients, 20, 60).mean((1, 2))
    assert centres.mean() == pytest.approx(0, abs=4 * np.sqrt(variance / clients))
    assert centres.var() == pytest.approx(variance, rel=0.15)


def test_synthetic_spreads_agree_at_zero_and_one():
    for value in (0.0, 1.0):
        one, other = (syn.synthetic(value, value, seed=3, num_clients=3, spread=s) for s in ("variance", "deviation"))
        assert np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)


def test_synthetic_labels_are_linear_in_the_inputs():
    # The labels of a client have no noise, so a linear classifier separates its samples (nearly) perfectly.
    data = syn.synthetic(0, 0, seed=0, num_clients=1, sizes=[600], dim=5, num_classes=3)
    x = np.concatenate([data.x, np.ones((600, 1))], 1).astype(np.float64)
    w = np.zeros((6, 3))
    target = np.eye(3)[data.y]
    for _ in range(4000):
        p = np.exp(x @ w - (x @ w).max(1, keepdims=True))
        w -= 2.0 * x.T @ (p / p.sum(1, keepdims=True) - target) / 600
    assert ((x @ w).argmax(1) == data.y).mean() > 0.98


def test_fedprox_sizes_are_lognormal_above_fifty():
    data = syn.synthetic(0, 0, seed=0, num_clients=3000, sizes="lognormal", dim=1, num_classes=2)
    sizes = np.asarray(data.sizes("train")) + np.asarray(data.sizes("test"))
    assert sizes.min() >= 50
    # The median of int(lognormal(4, 2)) + 50 is e^4 + 50, about 104.
    assert np.median(sizes) == pytest.approx(np.exp(4) + 50, abs=8)


# The regression problems.


@pytest.fixture(scope="module")
def linear():
    data = syn.linear_regression(4, seed=0, dim=3, size=30)
    return data, syn.quadratics(data, "support"), syn.quadratics(data, "query")


def _loss(x, y, w):
    return 0.5 * np.mean((x @ w - y) ** 2)


def test_quadratics_are_the_mean_squared_error(linear):
    data, support, _ = linear
    w = np.random.default_rng(1).normal(size=3)
    for u in range(4):
        x, y = _client(data, "support", u)
        assert support.loss(w)[u] == pytest.approx(_loss(x, y, w), rel=1e-12)
        difference = [(_loss(x, y, w + h) - _loss(x, y, w - h)) / 2e-5 for h in 1e-5 * np.eye(3)]
        assert support.gradient(w)[u] == pytest.approx(difference, rel=1e-7)


def test_quadratics_are_of_inputs_as_a_batch_has_them():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)), rng.normal(size=20)
    plain = fm.from_clients([(x, y)], num_classes=0)
    stored = fm.from_clients([(10 * x + 3, y)], num_classes=0, offset=3.0, scale=0.1)
    for one, other in zip(*(syn.quadratics(data, "train") for data in (plain, stored)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    weighted = dataclasses.replace(plain, y=Weighted(plain.y, np.ones_like(plain.y)))
    with pytest.raises(ValueError, match="linear regression needs targets that are one array"):
        syn.quadratics(weighted, "train")


@pytest.mark.parametrize("weight", [None, [1.0, 1.0, 1.0, 1.0]])
def test_optimum_minimises_the_weighted_loss(linear, weight):
    data, _, query = linear
    best = syn.optimum(query, weight=weight)
    rows = [_client(data, "query", u) for u in range(4)]
    # Independent reference: least squares on all rows, each scaled by the square root of its weight.
    share = [1.0 if weight is None else 1 / len(y) for _, y in rows]
    a = np.concatenate([np.sqrt(s) * x for s, (x, _) in zip(share, rows, strict=True)])
    b = np.concatenate([np.sqrt(s) * y for s, (_, y) in zip(share, rows, strict=True)])
    assert best == pytest.approx(np.linalg.lstsq(a, b, rcond=None)[0], rel=1e-10)


def test_weighting_by_samples_differs_from_equal_weights(linear):
    _, _, query = linear
    assert np.abs(syn.optimum(query) - syn.optimum(query, weight=np.ones(4))).max() > 1e-3


def _adapted_loss(data, u, w, inner_lr, steps):
    x, y = _client(data, "support", u)
    for _ in range(steps):
        w = w - inner_lr * x.T @ (x @ w - y) / len(y)
    return _loss(*_client(data, "query", u), w)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_meta_gradient_against_finite_differences(linear, steps):
    data, support, query = linear
    w = np.random.default_rng(2).normal(size=3)
    exact = syn.meta_gradient(w, support, query, inner_lr=0.1, steps=steps)
    for u in range(4):
        difference = [
            (_adapted_loss(data, u, w + h, 0.1, steps) - _adapted_loss(data, u, w - h, 0.1, steps)) / 2e-5
            for h in 1e-5 * np.eye(3)
        ]
        assert exact[u] == pytest.approx(difference, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("steps", [1, 3])
def test_meta_gradient_against_automatic_differentiation(linear, steps):
    data, support, query = linear
    w = np.random.default_rng(3).normal(size=3)
    exact = syn.meta_gradient(w, support, query, inner_lr=0.2, steps=steps)
    with jax.enable_x64(True):
        for u in range(2):
            (xs, ys), (xq, yq) = _client(data, "support", u), _client(data, "query", u)

            def loss(v, x, y):
                return 0.5 * jnp.mean((x @ v - y) ** 2)

            def after(v, xs=xs, ys=ys, xq=xq, yq=yq):
                for _ in range(steps):
                    v = v - 0.2 * jax.grad(loss)(v, xs, ys)
                return loss(v, xq, yq)

            assert exact[u] == pytest.approx(np.asarray(jax.grad(after)(jnp.asarray(w))), rel=1e-10)


@pytest.mark.parametrize("steps", [1, 2])
def test_meta_optimum_is_the_limit_of_descent_on_the_meta_gradient(linear, steps):
    _, support, query = linear
    weight = query.size / query.size.sum()
    w = np.zeros(3)
    for _ in range(5000):
        w = w - 0.3 * weight @ syn.meta_gradient(w, support, query, inner_lr=0.1, steps=steps)
    assert syn.meta_optimum(support, query, inner_lr=0.1, steps=steps) == pytest.approx(w, rel=1e-8)
    assert np.abs(w - syn.optimum(query)).max() > 1e-3


def test_without_inner_steps_the_meta_optimum_is_the_optimum(linear):
    _, support, query = linear
    assert syn.meta_optimum(support, query, inner_lr=0.1, steps=0) == pytest.approx(syn.optimum(query), rel=1e-12)


def test_sinusoids_are_linear_in_sine_and_cosine():
    data, amplitude, phase = syn.sinusoids(5, seed=0)
    assert ((amplitude >= 0.1) & (amplitude <= 5)).all() and ((phase >= 0) & (phase <= np.pi)).all()
    exact = syn.quadratics(data, "train", features=syn.sinusoid_features)
    for u in range(5):
        x, y = _client(data, "train", u)
        assert np.abs(x).max() <= 5 and y == pytest.approx(amplitude[u] * np.sin(x[:, 0] - phase[u]), abs=1e-12)
        own = np.linalg.solve(exact.hessian[u], exact.linear[u])
        assert own == pytest.approx([amplitude[u] * np.cos(phase[u]), -amplitude[u] * np.sin(phase[u])], rel=1e-9)
        assert exact.loss(own)[u] == pytest.approx(0, abs=1e-12)


def test_best_single_function_for_sinusoids_is_the_expectation():
    data, _, _ = syn.sinusoids(4000, seed=0)
    best = syn.optimum(syn.quadratics(data, "train", features=syn.sinusoid_features))
    x = np.linspace(-5, 5, 50)[:, None]
    assert (syn.sinusoid_features(x) @ best)[:, None] == pytest.approx(syn.sinusoid_mean(x), abs=0.12)


BAD = {
    "negative spread": (lambda: syn.synthetic(-1, 0, seed=0), "model_spread=-1 must be finite and at least 0"),
    "NaN spread": (lambda: syn.synthetic(0, np.nan, seed=0), "data_spread=nan must be"),
    "unknown spread": (
        lambda: syn.synthetic(0, 0, seed=0, spread="std"),
        "spread='std' is unknown; allowed are variance, deviation",
    ),
    "unknown sizes": (lambda: syn.synthetic(0, 0, seed=0, sizes="equal"), "sizes='equal' is unknown"),
    "wrong sizes": (lambda: syn.synthetic(0, 0, seed=0, sizes=[5, 5]), r"counts \[N=30\], not of shape \(2,\)"),
    "empty client": (lambda: syn.synthetic(0, 0, seed=0, num_clients=2, sizes=[50, 0]), "client 1 has none"),
    "no clients": (lambda: syn.synthetic(0, 0, seed=0, num_clients=0), "num_clients=0 must be"),
    "one class": (lambda: syn.synthetic(0, 0, seed=0, num_classes=1), "num_classes=1 must be an integer of at least 2"),
    "too few samples": (lambda: syn.linear_regression(2, seed=0, size=3), "size=3 must be an integer of at least 8"),
    "noise": (lambda: syn.sinusoids(2, seed=0, noise=-1), "noise=-1 must be"),
    "inner rate": (
        lambda: syn.meta_optimum(*[syn.quadratics(syn.linear_regression(2, seed=0), "train")] * 2, inner_lr=-1),
        "inner_lr=-1 must be",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_names_the_argument(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
