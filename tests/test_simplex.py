"""Tests of `simplex.mixtures` against a closed form, fine grids and an independent solver."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from fedjax_meta.simplex import mixtures


def problem(count, width=6, seed=0):
    """(v `[C]`, h `[C, width]`) of clients in two groups, with unequal variances."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(2, width))
    return rng.uniform(0.05, 1.5, count), centres[np.arange(count) % 2] + 0.4 * rng.normal(size=(count, width))


def objective(weights, i, v, h):
    """The bound of FedPAC as in the paper: Σ α_j² v_j + |h_i - Σ α_j h_j|²."""
    weights = np.asarray(weights)
    return (weights**2) @ v + np.sum((h[i] - weights @ h) ** 2, -1)


def solve(v, h, **options):
    h = jnp.asarray(h)
    return np.asarray(mixtures(h @ h.T, jnp.asarray(v), **options))


def test_two_clients_match_the_closed_form():
    # a² v_0 + (1 - a)² (v_1 + |h_0 - h_1|²) is minimal at a = (v_1 + D) / (v_0 + v_1 + D).
    v, h = problem(2)
    apart = np.sum((h[0] - h[1]) ** 2)
    own = np.array([v[1] + apart, v[0] + apart]) / (v.sum() + apart)
    np.testing.assert_allclose(solve(v, h), [[own[0], 1 - own[0]], [1 - own[1], own[1]]], atol=1e-9)


@pytest.mark.parametrize(("count", "parts"), [(3, 300), (4, 60)])
def test_no_grid_point_is_better(count, parts):
    cuts = np.array([c for c in itertools.product(range(parts + 1), repeat=count - 1) if sum(c) <= parts])
    grid = np.column_stack([cuts, parts - cuts.sum(1)]) / parts
    for seed in range(3):
        v, h = problem(count, seed=seed)
        weights = solve(v, h)
        for i in range(count):
            least = min(np.sum(grid**2 * v, 1) + np.sum((h[i] - grid @ h) ** 2, 1))
            assert objective(weights[i], i, v, h) <= least + 1e-9


@pytest.mark.parametrize("count", [5, 12])
def test_objective_equals_that_of_an_independent_solver(count):
    v, h = problem(count, seed=count)
    weights = solve(v, h)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
    assert weights.min() >= 0
    for i in range(count):
        other = minimize(
            objective,
            np.full(count, 1 / count),
            args=(i, v, h),
            method="SLSQP",
            bounds=[(0, 1)] * count,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            options={"ftol": 1e-12, "maxiter": 500},
        )
        assert abs(objective(weights[i], i, v, h) - other.fun) < 1e-6


def test_single_precision_solves_a_badly_conditioned_problem():
    v, h = problem(40, width=60, seed=3)
    h = 30 * h
    exact, single = solve(v, h), np.asarray(mixtures(jnp.float32(h @ h.T), jnp.float32(v)))
    scale = np.mean(v + np.sum((h - h.mean(0)) ** 2, 1))
    for i in range(40):
        assert objective(single[i], i, v, h) - objective(exact[i], i, v, h) < 1e-6 * scale


def test_identical_clients_get_equal_weights():
    np.testing.assert_allclose(solve(np.full(6, 0.3), np.ones((6, 4))), np.full((6, 6), 1 / 6), atol=1e-9)


def test_a_client_of_large_variance_gets_no_weight_from_others():
    v, h = problem(4)
    v[2] = 1e9
    weights = solve(v, h)
    assert weights[:, 2].max() < 1e-8
    v = np.array([0.3, 1e9, 1e9, 1e9])
    assert solve(v, h)[0, 0] > 1 - 1e-8


def test_invalid_clients_and_clients_with_nan_statistics_keep_their_own_head():
    v, h = problem(5)
    h[3], v[4] = np.nan, np.inf
    weights = solve(v, h, valid=jnp.array([True, False, True, True, True]))
    np.testing.assert_array_equal(weights[[1, 3, 4]], np.eye(5)[[1, 3, 4]])
    assert not weights[[0, 2]][:, [1, 3, 4]].any()
    sub = solve(v[[0, 2]], h[[0, 2]])
    np.testing.assert_allclose(weights[np.ix_([0, 2], [0, 2])], sub, atol=1e-9)


def test_result_does_not_depend_on_client_order_under_vmap():
    v, h = problem(7)
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    both = jax.vmap(mixtures)(jnp.stack([h @ h.T, h[order] @ h[order].T]), jnp.stack([v, v[order]]))
    np.testing.assert_allclose(both[1], np.asarray(both[0])[np.ix_(order, order)], atol=1e-6)


def test_shapes_and_tolerance_are_checked():
    with pytest.raises(ValueError, match=r"gram must be \[C, C\]"):
        mixtures(jnp.zeros((3, 2)), jnp.zeros(3))
    with pytest.raises(ValueError, match="tolerance=0"):
        mixtures(jnp.eye(2), jnp.ones(2), tolerance=0)
