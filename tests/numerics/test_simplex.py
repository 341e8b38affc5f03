"""Tests of `simplex.mixtures` against a closed form, fine grids, all supports and two independent solvers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize, nnls

from fedjax_meta.numerics.simplex import bounds, mixtures
from tests import problems


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
    options = {"tolerance": 1e-12, **options}
    return np.asarray(solved(jnp.asarray(h), jnp.asarray(v), **options).weights)


solved = jax.jit(mixtures, static_argnames=("tolerance", "pair_steps", "max_steps"))


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


KINDS = {
    # name: (dimensions of h, decades of v, common offset, whether clients are repeated)
    "wide": (40, 1, 0, False),
    "narrow": (1, 1, 0, False),
    "two dimensions": (2, 4, 0, False),
    "twelve decades": (6, 12, 0, False),
    "narrow, twelve decades": (1, 12, 0, False),
    "offset": (6, 1, 1e4, False),
    "duplicates": (4, 2, 0, True),
}
COUNTS = (1, 2, 5, 8, 50)


def hard(kind, count, seed):
    width, decades, offset, repeated = KINDS[kind]
    rng = np.random.default_rng([seed, count, list(KINDS).index(kind)])
    h, v = rng.normal(size=(count, width)) + offset, 10 ** rng.uniform(-decades / 2, decades / 2, count)
    if repeated:
        which = rng.integers(0, max(count // 2, 1), count)
        h, v = h[which], np.where(rng.random(count) < 0.7, v[which], v)
    return v, h


def points(i, v, h):
    """Columns of which the mixture is wanted that lies nearest to 0: |points a|^2 is the objective."""
    return np.concatenate([(h - h[i]).T, np.diag(np.sqrt(v))])


def least_by_nnls(i, v, h):
    """The minimum by Lawson and Hanson: for u >= 0, |A u|^2 + (1 - sum u)^2 is least along the direction of the minimiser."""
    a = points(i, v, h) / np.sqrt(v[i])
    u, _ = nnls(np.vstack([a, np.ones(len(v))]), np.append(np.zeros(len(a)), 1), maxiter=100 * len(v))
    return objective_at(u / u.sum(), i, v, h)


def least_of_all_supports(i, v, h):
    """The minimum over all supports on which the affine minimiser, by its triangular factor, is a mixture."""
    best = v[i]
    for size in range(1, len(v) + 1):
        for support in itertools.combinations(range(len(v)), size):
            factor = np.linalg.qr(points(i, v, h)[:, support], mode="r")
            if np.min(np.abs(np.diag(factor))) == 0:
                continue
            y = np.linalg.solve(factor, np.linalg.solve(factor.T, np.ones(size)))
            if np.all(np.isfinite(y)) and np.all(y > 0):
                weights = np.zeros(len(v))
                weights[list(support)] = y / y.sum()
                best = min(best, objective_at(weights, i, v, h))
    return best


def objective_at(weights, i, v, h):
    return np.sum((points(i, v, h) @ weights) ** 2)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    problems.chosen(
        itertools.product(KINDS, [np.float64, np.float32]),
        lambda kind, dtype: kind in ("narrow, twelve decades", "duplicates") or (kind, dtype) == ("offset", np.float32),
    ),
)
def test_every_programme_is_solved_and_no_client_is_worse_off(kind, dtype):
    """With those of both precisions, 70 problems and 924 programmes; the inputs are the same in both solvers."""
    for count in COUNTS:
        v, h = (part.astype(dtype) for part in hard(kind, count, 0))
        result = solved(jnp.asarray(h), jnp.asarray(v))
        v, h, weights = v.astype(float), h.astype(float), np.asarray(result.weights, float)
        assert result.weights.dtype == dtype
        assert weights.min() >= 0 and np.max(np.abs(weights.sum(1) - 1)) < 4e-7
        assert float(jnp.max(result.gap)) <= (2e-8 if dtype == np.float64 else 1.3e-6)
        for i in range(count):
            value = objective_at(weights[i], i, v, h)
            assert value <= least_by_nnls(i, v, h) * (1 + 3e-6) + 1e-300
            # Up to rounding: of this sum, and of the weights to float32.
            assert value <= v[i] * (1 + (1e-14 if dtype == np.float64 else 1e-6))


@pytest.mark.parametrize("kind", KINDS)
def test_many_small_programmes_against_all_supports(kind):
    """40 problems of 5 clients of each kind, 280 in all, at a tight tolerance."""
    for seed in range(40):
        v, h = hard(kind, 5, 1 + seed)
        result = solved(jnp.asarray(h), jnp.asarray(v), tolerance=1e-11)
        i = seed % 5
        least = least_of_all_supports(i, v, h)
        # With an offset of 1e4 the differences of the h_j themselves are known to 1e-12 only.
        assert objective_at(np.asarray(result.weights[i]), i, v, h) == pytest.approx(least, rel=1e-7)
        assert float(result.gap[i]) < 1e-9


@pytest.mark.parametrize("apart", [1e2, 1e5])
def test_groups_far_apart_are_solved_as_exactly_as_each_alone(apart):
    """A Gram matrix of all would lose the groups' own differences, 1e-10 of the whole in squares, and with them the minimum."""
    rng = np.random.default_rng(4)
    h, v = rng.normal(size=(12, 5)), rng.uniform(0.01, 0.1, 12)
    h[6:, 0] += apart
    weights = solve(v, h)
    assert weights[:6, 6:].max() < 0.01 and weights[6:, :6].max() < 0.01
    for i in range(12):
        assert objective_at(weights[i], i, v, h) <= least_by_nnls(i, v, h) * (1 + 1e-7)


def test_an_objective_that_is_zero_up_to_rounding_counts_as_solved():
    """A client whose h is a mean of others, which have no variance, takes their mixture, at the cost of rounding alone."""
    for seed in range(5):
        h, v = np.random.default_rng(seed).normal(size=(8, 3)), np.zeros(8)
        h[0], v[0] = h[1:].mean(0), 0.5
        result = solved(jnp.asarray(h), jnp.asarray(v))
        assert objective_at(np.asarray(result.weights[0]), 0, v, h) < 1e-16 and float(result.gap[0]) < 1e-6


def test_a_client_keeps_its_own_head_where_rounding_leaves_a_worse_mixture():
    """Variances and distances over many decades: without the comparison at the end a mixture is up to 1,000 times worse."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        h, v = rng.normal(size=(12, 2)) * 10 ** rng.uniform(-4, 4, (12, 1)), 10 ** rng.uniform(-20, 1, 12)
        weights = solve(v, h)
        for i in range(12):
            assert objective_at(weights[i], i, v, h) <= v[i] * (1 + 1e-14)


def test_too_few_steps_are_reported_and_do_not_harm():
    v, h = hard("narrow", 8, 0)
    few = solved(jnp.asarray(h), jnp.asarray(v), pair_steps=1, max_steps=1)
    assert float(jnp.max(few.gap)) > 1e-3
    for i in range(8):
        value, least = objective_at(np.asarray(few.weights[i]), i, v, h), least_by_nnls(i, v, h)
        assert value <= v[i]
        # A gap g says that the minimum is at least (1 - g) of the objective.
        assert least >= (1 - float(few.gap[i])) * value - 1e-12


def test_steps_between_pairs_alone_come_near_the_minimum():
    v, h = hard("wide", 8, 0)
    found = solved(jnp.asarray(h), jnp.asarray(v), pair_steps=10_000, max_steps=1)
    assert float(jnp.max(found.gap)) < 1e-3


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_gap_does_not_depend_on_the_unit_of_h(scale):
    v, h = hard("narrow", 8, 0)
    options = {"pair_steps": 1, "max_steps": 1}
    few, other = (solved(jnp.asarray(s * h), jnp.asarray(s**2 * v), **options) for s in (1.0, scale))
    assert float(jnp.max(few.gap)) > 1e-3
    np.testing.assert_allclose(other.gap, few.gap, rtol=1e-6, atol=1e-12)


def test_bounds_are_those_of_the_paper():
    v, h = problem(5)
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5), 5)
    expected = [objective(weights[i], i, v, h) for i in range(5)]
    np.testing.assert_allclose(bounds(jnp.asarray(weights), jnp.asarray(h), jnp.asarray(v)), expected, rtol=1e-12)


def test_single_precision_solves_a_badly_conditioned_problem():
    v, h = problem(40, width=60, seed=3)
    h = (30 * h).astype(np.float32).astype(float)
    exact, single = solve(v, h), np.asarray(solved(jnp.float32(h), jnp.float32(v)).weights)
    for i in range(40):
        assert objective(single[i], i, v, h) < (1 + 3e-6) * objective(exact[i], i, v, h)


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
    both = jax.vmap(mixtures)(jnp.stack([h, h[order]]), jnp.stack([v, v[order]])).weights
    np.testing.assert_allclose(both[1], np.asarray(both[0])[np.ix_(order, order)], atol=1e-4)


def test_shapes_and_tolerance_are_checked():
    with pytest.raises(ValueError, match=r"profile must be \[C, d\]"):
        mixtures(jnp.zeros((2, 2)), jnp.zeros(3))
    with pytest.raises(ValueError, match="tolerance=0"):
        mixtures(jnp.eye(2), jnp.ones(2), tolerance=0)


def test_the_programs_of_several_runs_are_solved_side_by_side_in_a_float32_program():
    """As in a sweep on an accelerator: `vmap` around the loop of rounds, which JAX traces again outside of `mixtures`."""
    problems_of_runs = [problem(5, seed=seed) for seed in range(6)]
    v, h = (np.stack(parts).reshape(2, 3, *parts[0].shape) for parts in zip(*problems_of_runs, strict=True))

    def rounds(h, v):
        def body(_, found):
            weights, gap = mixtures(h, v)
            return weights, gap, bounds(weights, h, v)

        return jax.lax.fori_loop(0, 1, body, (jnp.zeros((5, 5)), jnp.zeros(5), jnp.zeros(5)))

    expected = [solve(*one) for one in problems_of_runs]
    with jax.enable_x64(False):
        weights, gap, least = jax.jit(jax.vmap(jax.vmap(rounds)))(jnp.float32(h), jnp.float32(v))
    assert weights.dtype == jnp.float32
    for run, (one_v, one_h) in enumerate(problems_of_runs):
        at = np.unravel_index(run, (2, 3))
        np.testing.assert_allclose(weights[at], expected[run], atol=1e-5)
        assert np.max(gap[at]) < 1e-5
        of_each = [objective(expected[run][i], i, one_v, one_h) for i in range(5)]
        np.testing.assert_allclose(least[at], of_each, rtol=1e-5)


def test_a_negative_variance_counts_as_none():
    h = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)))
    one, other = (mixtures(h, jnp.array([v, 0.5, 1.0, 0.3])).weights for v in (-2.0, 0.0))
    np.testing.assert_allclose(one, other, atol=1e-10)
