"""Tests of the implicit meta-gradient: closed forms on ridge regression, finite differences of a solved logistic problem."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_meta import meta
from fedjax_meta.data import Batches
from fedjax_meta.implicit import conjugate_gradient, implicit_gradient


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def least_squares(w: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ w - y) ** 2) / 2


def logistic(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    return jnp.mean(jax.nn.softplus(-y * (jnp.tanh(x @ params["body"]) @ params["head"] + params["bias"])))


def signs(seed: int, size: int) -> tuple[jax.Array, jax.Array]:
    return normal(seed, size, 3), jnp.sign(normal(seed + 1, size))


def run(estimate: meta.Estimator, loss: Any, theta: Any, support: Any, query: Any) -> meta.MetaGradient:
    return jax.jit(lambda theta: estimate(loss, theta, support, query))(theta)


def ridge() -> tuple[Any, Any, jax.Array]:
    """Support [7, 4], query [5, 4] and theta: unequal sizes, no symmetry."""
    return (normal(0, 7, 4), normal(1, 7)), (normal(2, 5, 4), normal(3, 5)), normal(4, 4)


def hessian_and_solution(support: Any, theta: jax.Array, prox_weight: float) -> tuple[jax.Array, jax.Array]:
    x, y = support
    hessian = x.T @ x / len(y)
    return hessian, jnp.linalg.solve(hessian + prox_weight * jnp.eye(4), x.T @ y / len(y) + prox_weight * theta)


@pytest.mark.parametrize("warm_start", ["zero", "gradient"])
@pytest.mark.parametrize("inner", [meta.sgd(0.2), meta.optimizer(partial(optax.sgd, momentum=0.8), 0.1)])
def test_ridge_regression_matches_its_closed_form(warm_start: str, inner: meta.InnerOptimizer) -> None:
    """phi = (H + lambda)^-1 (X'y/n + lambda theta), so dphi/dtheta = lambda (H + lambda)^-1. CG needs at most as
    many steps as dimensions."""
    support, query, theta = ridge()
    prox_weight = 0.7
    hessian, phi = hessian_and_solution(support, theta, prox_weight)
    outer = jax.grad(least_squares)(phi, query)
    expected = prox_weight * jnp.linalg.solve(hessian + prox_weight * jnp.eye(4), outer)
    estimate = implicit_gradient(
        inner, prox_weight=prox_weight, steps=400, cg_steps=20, tolerance=1e-12, warm_start=warm_start
    )
    result = run(estimate, least_squares, theta, support, query)
    np.testing.assert_allclose(result.adapted, phi, rtol=1e-10)
    np.testing.assert_allclose(result.gradient, expected, rtol=1e-9)
    assert result.info.cg_steps <= 4 + 1 and result.info.residual < 1e-11 and not result.info.negative_curvature


def solved(theta: Any, support: Any, prox_weight: float, moving: tuple[str, ...]) -> Any:
    """The minimiser of the proximal problem over the `moving` leaves, by Newton's method to machine precision."""
    fixed = {name: leaf for name, leaf in theta.items() if name not in moving}
    start, unravel = ravel_pytree({name: theta[name] for name in moving})

    def objective(flat: jax.Array) -> jax.Array:
        return logistic({**unravel(flat), **fixed}, support) + prox_weight / 2 * jnp.sum((flat - start) ** 2)

    gradient, hessian = jax.grad(objective), jax.hessian(objective)
    flat = jax.lax.fori_loop(0, 30, lambda _, flat: flat - jnp.linalg.solve(hessian(flat), gradient(flat)), start)
    return {**unravel(flat), **fixed}


@pytest.mark.parametrize("moving", [("body", "head", "bias"), ("head", "bias")])
def test_logistic_model_against_finite_differences(moving: tuple[str, ...]) -> None:
    """Central differences in each entry of theta, with the proximal problem solved again each time. If only the head adapts,
    the gradient of the body contains the mixed derivative."""
    theta = {"body": normal(0, 3, 2), "head": normal(1, 2), "bias": jnp.array(0.3)}
    support, query, prox_weight = signs(10, 9), signs(20, 12), 0.8
    flat, unravel = ravel_pytree(theta)

    @jax.jit
    def target(flat: jax.Array) -> jax.Array:
        return logistic(solved(unravel(flat), support, prox_weight, moving), query)

    step = 1e-4
    expected = [(target(flat + step * e) - target(flat - step * e)) / (2 * step) for e in jnp.eye(len(flat))]
    mask = {name: name in moving for name in theta}
    rule = meta.sgd(0.5, mask=None if all(mask.values()) else mask)
    estimate = implicit_gradient(rule, prox_weight=prox_weight, steps=600, cg_steps=30, tolerance=1e-12)
    result = run(estimate, logistic, theta, support, query)
    np.testing.assert_allclose(ravel_pytree(result.gradient)[0], jnp.array(expected), rtol=1e-6, atol=1e-7)
    assert not result.info.negative_curvature


def test_large_weight_gives_the_plain_query_gradient_at_theta() -> None:
    support, query, theta = ridge()
    result = run(implicit_gradient(meta.sgd(1e-9), prox_weight=1e9, steps=50), least_squares, theta, support, query)
    np.testing.assert_allclose(result.gradient, jax.grad(least_squares)(theta, query), rtol=1e-7)


def test_operators_of_published_code() -> None:
    """Compares each operator with a dense system at the adapted parameters, which do not depend on the operator. The query has
    two chunks of unequal weight."""
    support, _, theta = ridge()
    chunks = [(normal(20, 3, 4), normal(21, 3)), (normal(22, 3, 4), normal(23, 3))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    query = Batches(
        lambda step, chunk: jax.tree.map(lambda leaf: leaf[chunk], stacked),
        1,
        1,
        chunks=2,
        samples=lambda b: 1.0 + 2.0 * b[1][0],
    )
    weights = jnp.array([1.0 + 2.0 * y[0] for _, y in chunks])
    prox_weight, damping = 0.7, 0.3
    phi = theta
    for _ in range(3):
        phi = phi - 0.2 * (jax.grad(least_squares)(phi, support) + prox_weight * (phi - theta))
    hessian = support[0].T @ support[0] / 7
    of_chunks = [x.T @ x / 3 for x, _ in chunks]
    gradients = [jax.grad(least_squares)(phi, chunk) for chunk in chunks]
    outer = sum(w * g for w, g in zip(weights, gradients, strict=True)) / weights.sum()
    eye = jnp.eye(4)
    systems = {
        "implicit": (1 + damping) * eye + hessian / prox_weight,
        "imaml_dev": (1 + damping) * eye + hessian / (prox_weight + 10),
        "fl_imaml": (1 + 2 + damping) * eye + sum(of_chunks) / prox_weight,
    }
    build = partial(
        implicit_gradient, meta.sgd(0.2), prox_weight=prox_weight, steps=3, cg_steps=8, tolerance=1e-12, damping=damping
    )
    for operator, system in systems.items():
        result = run(build(operator=operator), least_squares, theta, support, query)
        np.testing.assert_allclose(result.adapted, phi, rtol=1e-12)
        np.testing.assert_allclose(result.gradient, jnp.linalg.solve(system, outer), rtol=1e-8)
    result = run(build(outer="regularised"), least_squares, theta, support, query)
    regularised = outer + prox_weight * (phi - theta)
    np.testing.assert_allclose(result.gradient, jnp.linalg.solve(systems["implicit"], regularised), rtol=1e-8)
    # The code behind the logs takes the two chunks as the support's.
    both = meta.WithHessian(support, query)
    result = run(build(operator="fl_imaml_march"), least_squares, theta, both, query)
    np.testing.assert_allclose(result.gradient, jnp.linalg.solve(systems["fl_imaml"], outer), rtol=1e-8)
    result = run(build(outer="last_chunk"), least_squares, theta, support, query)
    last = gradients[1] + prox_weight * (phi - theta)
    np.testing.assert_allclose(result.gradient, jnp.linalg.solve(systems["implicit"], last), rtol=1e-8)


def test_proximal_last_takes_one_proximal_step_at_the_end() -> None:
    """The inner loop of iMAML's code: plain descent, then one step on the proximal term alone."""
    support, query, theta = ridge()
    phi = theta
    for _ in range(3):
        phi = phi - 0.2 * jax.grad(least_squares)(phi, support)
    phi = phi - 0.2 * 0.7 * (phi - theta)
    result = run(
        implicit_gradient(meta.sgd(0.2), prox_weight=0.7, steps=3, proximal="last"), least_squares, theta, support, query
    )
    np.testing.assert_allclose(result.adapted, phi, rtol=1e-12)


def test_the_proximal_step_starts_an_optimiser_at_the_adapted_parameters() -> None:
    """One that is drawn to where it started takes the first step of plain descent."""
    support, query, theta = ridge()

    def drawn_back(rate: Any) -> optax.GradientTransformation:
        def update(gradient: Any, start: Any, parameters: Any) -> Any:
            return jax.tree.map(lambda g, s, p: -rate * (g + 5 * (p - s)), gradient, start, parameters), start

        return optax.GradientTransformation(lambda parameters: parameters, update)

    found = [
        run(implicit_gradient(inner, prox_weight=0.7, steps=1, proximal="last"), least_squares, theta, support, query)
        for inner in (meta.optimizer(drawn_back, 0.2), meta.sgd(0.2))
    ]
    np.testing.assert_allclose(found[0].adapted, found[1].adapted, rtol=1e-12)


def test_the_hessian_is_that_of_the_whole_support() -> None:
    """Three steps of two chunks use the Hessian of all six batches; `WithHessian` replaces it. One CG step suffices to check,
    because it is g times g'g / g'(I + H/lambda)g."""
    _, query, theta = ridge()
    parts = [(normal(30 + i, 4, 4), normal(40 + i, 4)) for i in range(6)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    def get(step: Any, chunk: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[2 * step + chunk], stacked)

    support = Batches(get, 3, 3, chunks=2, samples=lambda batch: jnp.asarray(float(len(batch[1]))))
    everything = (stacked[0].reshape(-1, 4), stacked[1].reshape(-1))
    other = (normal(50, 6, 4), normal(51, 6))
    estimate = implicit_gradient(meta.sgd(0.1), prox_weight=0.5, cg_steps=1, tolerance=0.0)
    for given, samples in ((support, everything), (meta.WithHessian(support, other), other)):
        result = run(estimate, least_squares, theta, given, query)
        g = jax.grad(least_squares)(result.adapted, query)
        hessian = samples[0].T @ samples[0] / len(samples[1])
        np.testing.assert_allclose(result.gradient, g * (g @ g) / (g @ (g + hessian @ g / 0.5)), rtol=1e-10)


def quadratic(w: jax.Array, matrix: jax.Array) -> jax.Array:
    return w @ matrix @ w / 2 + jnp.sum(w)


def test_singular_hessian_is_solved_in_two_steps() -> None:
    """H has rank 1, so I + H/lambda is positive with two distinct eigenvalues, and CG ends in two steps."""
    u = normal(0, 6)
    estimate = implicit_gradient(meta.sgd(0.0), prox_weight=2.0, cg_steps=10, tolerance=1e-12)
    result = run(estimate, quadratic, normal(1, 6), jnp.outer(u, u), jnp.diag(jnp.arange(6.0)))
    outer = jax.grad(quadratic)(normal(1, 6), jnp.diag(jnp.arange(6.0)))
    np.testing.assert_allclose(result.gradient, jnp.linalg.solve(jnp.eye(6) + jnp.outer(u, u) / 2, outer), rtol=1e-10)
    assert result.info.cg_steps == 2 and not result.info.negative_curvature


@pytest.mark.parametrize("warm_start", ["zero", "gradient"])
@pytest.mark.parametrize("eigenvalue", [-2.0, -5.0])
def test_curvature_that_is_not_positive_is_reported(warm_start: str, eigenvalue: float) -> None:
    """With lambda = 2 an eigenvalue -2 of H makes the operator singular and -5 indefinite. Along that eigenvector the solver
    stops at once and returns the query gradient; enough damping makes the system positive again."""
    theta = jnp.zeros(3)
    matrix = jnp.diag(jnp.array([1.0, eigenvalue, 3.0]))
    outer = jnp.array([0.0, 1.0, 0.0])
    build = partial(implicit_gradient, meta.sgd(0.0), prox_weight=2.0, cg_steps=10, warm_start=warm_start, tolerance=1e-12)

    def loss(w: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return w @ batch[0] @ w / 2 + batch[1] @ w

    support, query = (matrix, jnp.zeros(3)), (jnp.zeros((3, 3)), outer)
    result = run(build(), loss, theta, support, query)
    np.testing.assert_allclose(result.gradient, outer, rtol=1e-12)
    assert result.info.negative_curvature and result.info.cg_steps == 0
    np.testing.assert_allclose(result.info.residual, abs(eigenvalue / 2), rtol=1e-12)
    damped = run(build(damping=2.0), loss, theta, support, query)
    np.testing.assert_allclose(damped.gradient, outer / (3 + eigenvalue / 2), rtol=1e-12)
    assert not damped.info.negative_curvature and damped.info.residual < 1e-12


def test_solver_stops_at_negative_curvature_with_its_current_iterate() -> None:
    """Positive along the right side, negative in the second direction: returns the result of one steepest-descent step."""
    values, right = jnp.array([3.0, -2.0]), jnp.array([1.0, 0.5])
    solution = conjugate_gradient(lambda v: values * v, right, steps=10)
    length = (right @ right) / (right @ (values * right))
    np.testing.assert_allclose(solution.x, length * right, rtol=1e-12)
    assert solution.negative_curvature and solution.steps == 1
    residual = jnp.linalg.norm(right - values * solution.x) / jnp.linalg.norm(right)
    np.testing.assert_allclose(solution.residual, residual, rtol=1e-12)


@pytest.mark.parametrize("from_right_side", [False, True])
def test_a_solver_that_continues_solves_an_indefinite_system(from_right_side: bool) -> None:
    """Conjugate gradients find the solution of any regular symmetric system in as many steps as it has eigenvalues, as long as no
    direction has curvature 0; before that, they are where the recursion of a textbook is."""
    eigenvalues, right = np.array([1.0, -2.0, 3.0, -0.4]), np.array([1.0, 2.0, -1.0, 0.5])
    x = right.copy() if from_right_side else np.zeros(4)
    residual = right - eigenvalues * x
    direction = residual.copy()
    for taken in range(1, 5):
        image = eigenvalues * direction
        length = residual @ residual / (direction @ image)
        x, after = x + length * direction, residual - length * image
        direction, residual = after + after @ after / (residual @ residual) * direction, after
        solution = conjugate_gradient(
            lambda v: eigenvalues * v,
            jnp.asarray(right),
            steps=taken,
            from_right_side=from_right_side,
            stop_at_negative=False,
        )
        np.testing.assert_allclose(solution.x, x, rtol=1e-9)
        assert solution.steps == taken
    np.testing.assert_allclose(x, right / eigenvalues, rtol=1e-9)
    assert solution.negative_curvature and solution.residual < 1e-9


def test_an_estimate_that_continues_differs_where_the_operator_is_not_positive() -> None:
    """Of a support loss -2 |w|^2 with lambda = 1, I + H is -3: the solver stops at the plain gradient, or divides it by -3."""
    loss = lambda w, batch: -2.0 * jnp.sum(w**2) * batch + jnp.sum(w)  # noqa: E731
    results = [
        implicit_gradient(meta.sgd(1e-9), prox_weight=1.0, negative_curvature=word)(
            loss, jnp.array([1.0, 2.0]), jnp.array(1.0), jnp.array(0.0)
        )
        for word in ("stop", "continue")
    ]
    np.testing.assert_allclose([result.gradient for result in results], [[1, 1], [-1 / 3, -1 / 3]], rtol=1e-7)
    assert all(result.info.negative_curvature for result in results)


def test_conjugate_gradient_equals_that_of_jax() -> None:
    """For a positive operator on a tree every iterate equals that of `jax.scipy.sparse.linalg.cg`."""
    root = normal(0, 8, 8)
    matrix = root @ root.T / 8 + jnp.eye(8)
    right = {"a": normal(1, 5), "b": normal(2, 3)}
    _, unravel = ravel_pytree(right)

    def operator(tree: Any) -> Any:
        return unravel(matrix @ ravel_pytree(tree)[0])

    for steps in (1, 3, 6):
        expected, _ = jax.scipy.sparse.linalg.cg(operator, right, tol=0.0, maxiter=steps)
        solution = conjugate_gradient(operator, right, steps=steps)
        np.testing.assert_allclose(ravel_pytree(solution.x)[0], ravel_pytree(expected)[0], rtol=1e-10)
        assert solution.steps == steps
    assert conjugate_gradient(operator, right, steps=50, tolerance=1e-6).steps < 9
    zero = conjugate_gradient(operator, jax.tree.map(jnp.zeros_like, right), steps=5)
    assert zero.steps == 0 and zero.residual == 0 and not zero.negative_curvature


def test_each_client_under_vmap_stops_at_its_own_step() -> None:
    """Three clients: positive, indefinite, query gradient 0. The rate and lambda are traced too."""
    matrices = jnp.stack([jnp.diag(jnp.array([1.0, 2.0])), jnp.diag(jnp.array([-9.0, -9.0])), jnp.eye(2)])
    outers = jnp.array([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]])

    def loss(w: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return w @ batch[0] @ w / 2 + batch[1] @ w

    def client(matrix: jax.Array, outer: jax.Array, prox_weight: jax.Array) -> meta.MetaGradient:
        estimate = implicit_gradient(meta.sgd(prox_weight * 0), prox_weight=prox_weight, cg_steps=5, tolerance=1e-10)
        return estimate(loss, jnp.zeros(2), (matrix, jnp.zeros(2)), (jnp.zeros((2, 2)), outer))

    result = jax.jit(jax.vmap(client, in_axes=(0, 0, None)))(matrices, outers, jnp.array(2.0))
    np.testing.assert_allclose(result.gradient, [[1 / 1.5, 2 / 2.0], [1.0, 2.0], [0.0, 0.0]], rtol=1e-10)
    np.testing.assert_array_equal(result.info.cg_steps, [2, 0, 0])
    np.testing.assert_array_equal(result.info.negative_curvature, [False, True, False])


def test_memory_does_not_grow_with_inner_steps() -> None:
    """Temporary memory by XLA's analysis changes by at most 5 % from 4 to 64 inner steps."""
    theta, batch = normal(0, 400), (normal(1, 32, 400), normal(2, 32))

    def temporary(steps: int) -> int:
        estimate = partial(implicit_gradient(meta.sgd(0.01), prox_weight=1.0, steps=steps), least_squares)
        return jax.jit(estimate).lower(theta, batch, batch).compile().memory_analysis().temp_size_in_bytes

    assert abs(temporary(64) / temporary(4) - 1) <= 0.05


def test_invalid_arguments_raise() -> None:
    rule = meta.sgd(0.1)
    for options, name in (
        ({"prox_weight": 0.0}, "prox_weight"),
        ({"prox_weight": -1.0}, "prox_weight"),
        ({"prox_weight": float("nan")}, "prox_weight"),
        ({"cg_steps": 0}, "cg_steps"),
        ({"steps": 0}, "steps"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"damping": -1.0}, "damping"),
        ({"warm_start": "one"}, "warm_start"),
        ({"operator": "hessian"}, "operator"),
        ({"proximal": "first"}, "proximal"),
        ({"outer": "first_chunk"}, "outer"),
        ({"inner": meta.learned_sgd()}, "implicit_gradient has no gradient for learned rates"),
    ):
        with pytest.raises(ValueError, match=name):
            implicit_gradient(**{"inner": rule, "prox_weight": 1.0, **options})
    estimate, (support, query, theta) = implicit_gradient(rule, prox_weight=1.0), ridge()
    with pytest.raises(ValueError, match="query is None"):
        estimate(least_squares, theta, support, None)
    with pytest.raises(ValueError, match="one real scalar"):
        estimate(lambda w, b: b[0] @ w, theta, support, query)
    with pytest.raises(ValueError, match="the same structure"):
        estimate(least_squares, theta, support, list(query))
    with pytest.raises(ValueError, match="support and hessian must have the same structure"):
        estimate(least_squares, theta, meta.WithHessian(support, list(support)), query)
    with pytest.raises(ValueError, match="floating-point"):
        estimate(least_squares, jnp.arange(4), support, query)


@pytest.mark.parametrize("from_right_side", [False, True])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_gives_a_solution_that_is_not_a_number(bad: float, from_right_side: bool) -> None:
    """A right side, or a product, that is not finite: never 0 and never the right side."""
    matrix = jnp.diag(jnp.array([1.0, 2.0, 3.0]))
    options: dict[str, Any] = {"steps": 3, "tolerance": 1e-6, "from_right_side": from_right_side}
    right = conjugate_gradient(lambda v: matrix @ v, jnp.array([1.0, bad, 2.0]), **options)
    product = conjugate_gradient(lambda v: bad * (matrix @ v), jnp.ones(3), **options)
    for solution in (right, product):
        assert bool(jnp.all(jnp.isnan(solution.x)))
        assert jnp.isnan(solution.residual)
        assert not solution.negative_curvature


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_system_in_half_precision_is_solved_to_that_precision(dtype: Any) -> None:
    """The squared norm of this right side, 4e5, is beyond float16."""
    diagonal = jnp.linspace(1, 4, 40)
    right = 100 * normal(5, 40)
    solution = conjugate_gradient(lambda v: (diagonal * v).astype(dtype), right.astype(dtype), steps=30, tolerance=1e-3)
    assert solution.x.dtype == dtype
    error = jnp.abs(solution.x.astype(float) - right / diagonal)
    assert float(jnp.max(error)) < 20 * float(jnp.finfo(dtype).eps) * 100


@pytest.mark.parametrize("operator", ["implicit", "fl_imaml_march"])
def test_where_nothing_adapts_the_gradient_is_that_of_the_query(operator):
    inner = meta.sgd(0.1, mask={"a": False})
    estimate = implicit_gradient(inner, prox_weight=1.0, operator=operator)
    result = estimate(lambda w, batch: jnp.sum((w["a"] - batch) ** 2), {"a": jnp.ones(2)}, 3.0, 0.5)
    assert np.allclose(result.gradient["a"], 2 * (1 - 0.5)) and int(result.info.cg_steps) == 0


@pytest.mark.parametrize("size", [1e-25, 1e-3, 1e25, 9e37, 1.5e38])
def test_systems_are_solved_whatever_the_size_of_their_right_side(size: float) -> None:
    """The squares of these numbers have no place in float32."""
    matrix = np.diag([1.0, 3.0, 9.0]).astype(np.float32) + 0.1
    right = (np.array([1.0, -2.0, 0.5]) * size).astype(np.float32)
    found = conjugate_gradient(lambda v: jnp.asarray(matrix) @ v, jnp.asarray(right), steps=5, tolerance=1e-6)
    np.testing.assert_allclose(found.x, np.linalg.solve(matrix.astype(float), right), rtol=1e-5)
    assert 0 < found.steps <= 4 and found.residual < 1e-5
    with pytest.raises(ValueError, match="floating-point numbers, not int"):
        conjugate_gradient(lambda v: v, jnp.arange(3), steps=2)


def test_leaves_may_have_different_precision() -> None:
    right = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.full(2, 2.0, jnp.float32), "c": jnp.full(1, 3.0, jnp.float64)}
    found = conjugate_gradient(lambda tree: jax.tree.map(lambda v: 2 * v, tree), right, steps=3)
    assert jax.tree.map(lambda leaf: leaf.dtype, found.x) == jax.tree.map(lambda leaf: leaf.dtype, right)
    assert [float(leaf[0]) for leaf in jax.tree.leaves(found.x)] == [0.5, 1.0, 1.5]


def test_a_curvature_that_is_rounding_alone_is_none() -> None:
    tiny = 5 * float(jnp.finfo(jnp.zeros(()).dtype).eps)
    assert conjugate_gradient(lambda v: tiny * v, jnp.ones(3), steps=3).negative_curvature


def test_leaves_that_do_not_adapt_get_their_part_by_lambda_whatever_the_operator() -> None:
    """g_b = (I + H_bb / (lambda + 10))^-1 r_b, and g_a = r_a - H_ab g_b / lambda: b alone is solved for."""
    root, prox = np.asarray(normal(1, 5, 5)), 0.7
    curvature = root @ root.T

    def quadratic(p: dict[str, jax.Array], linear: jax.Array) -> jax.Array:
        w = jnp.concatenate([p["a"], p["b"]])
        return 0.5 * w @ curvature @ w + linear @ w

    theta, (support, query) = {"a": normal(2, 2), "b": normal(3, 3)}, normal(4, 2, 5)
    rule = meta.sgd(0.01, mask={"a": False, "b": True})
    estimate = implicit_gradient(rule, prox_weight=prox, steps=3, cg_steps=9, tolerance=1e-13, operator="imaml_dev")
    found = run(estimate, quadratic, theta, support, query)
    right = curvature @ np.concatenate([found.adapted["a"], found.adapted["b"]]) + query
    of_b = np.linalg.solve(np.eye(3) + curvature[2:, 2:] / (prox + 10), right[2:])
    np.testing.assert_allclose(found.gradient["b"], of_b, rtol=1e-8)
    np.testing.assert_allclose(found.gradient["a"], right[:2] - curvature[:2, 2:] @ of_b / prox, rtol=1e-8)
