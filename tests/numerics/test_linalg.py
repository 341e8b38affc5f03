"""Factors and solves against NumPy, and their gradients against finite differences, alone and in nested batches."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fedjax_meta import runtime
from fedjax_meta.numerics import linalg

ROOTS = np.random.default_rng(0).normal(size=(2, 3, 5, 5))
MATRICES = ROOTS @ ROOTS.swapaxes(-1, -2) + np.eye(5)
SIDES = np.random.default_rng(1).normal(size=(2, 3, 5, 4))


def test_factors_and_solves_of_nested_batches_are_those_of_numpy():
    lower = jax.vmap(jax.vmap(linalg.cholesky))(MATRICES)
    np.testing.assert_allclose(lower, np.linalg.cholesky(MATRICES), atol=1e-12)
    for transpose in (False, True):
        found = jax.vmap(jax.vmap(lambda a, b, t=transpose: linalg.solve_triangular(a, b, transpose=t)))(lower, SIDES)
        of = np.swapaxes(lower, -1, -2) if transpose else np.asarray(lower)
        np.testing.assert_allclose(found, np.linalg.solve(of, SIDES), atol=1e-12)
    found = jax.vmap(jax.vmap(linalg.solve_factored))(lower, SIDES)
    np.testing.assert_allclose(found, np.linalg.solve(MATRICES, SIDES), atol=1e-12)


@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_are_those_of_finite_differences(transpose):
    def of_one(root, sides):
        lower = linalg.cholesky(root @ root.T + jnp.eye(5))
        return jnp.sum(jnp.sin(linalg.solve_triangular(lower, sides, transpose=transpose))) + jnp.sum(jnp.cos(lower))

    check_grads(of_one, (ROOTS[0, 0], SIDES[0, 0]), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
    batched = jax.grad(lambda roots, sides: jnp.sum(jax.vmap(of_one)(roots, sides)), (0, 1))(ROOTS[0], SIDES[0])
    alone = [jax.grad(of_one, (0, 1))(root, sides) for root, sides in zip(ROOTS[0], SIDES[0], strict=True)]
    for number, found in enumerate(batched):
        np.testing.assert_allclose(found, np.stack([one[number] for one in alone]), atol=1e-12)


def test_what_is_above_the_diagonal_is_not_read():
    lower = np.tril(ROOTS[0, 0]) + 3 * np.eye(5)
    full = lower + np.triu(np.full((5, 5), np.nan), 1)
    np.testing.assert_allclose(linalg.solve_triangular(full, SIDES[0, 0]), np.linalg.solve(lower, SIDES[0, 0]), atol=1e-12)


@pytest.mark.long
def test_the_gradient_of_a_large_batch_ends():
    """JAX's own functions, batched, never end here on two cores."""
    code = """if True:
        import jax, jax.numpy as jnp
        from fedjax_meta.numerics import linalg
        matrices = 9 * jnp.eye(256) + 0.01 * jax.random.normal(jax.random.key(0), (20, 256, 256))
        of_one = lambda a: linalg.solve_triangular(linalg.cholesky(a @ a.T), a)
        print(jnp.sum(jax.jit(jax.grad(lambda a: jnp.sum(jax.vmap(of_one)(a) ** 2)))(matrices)))
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=240)
    assert np.isfinite(float(done.stdout)), done.stderr


@pytest.mark.parametrize(("before", "given", "threads"), [("jax", "", 1), ("scipy.linalg", "", 1), ("jax", "2", 2)])
def test_a_call_of_lapack_takes_one_thread_unless_somebody_says_otherwise(before, given, threads):
    pytest.importorskip("threadpoolctl")
    if runtime.cores() < 2:
        pytest.skip("one core: there is one thread anyway")
    code = f"""
import os, {before}, jax.numpy as jnp, threadpoolctl
from fedjax_meta import runtime
from fedjax_meta.numerics import linalg
linalg.cholesky(2 * jnp.eye(3))
for one in threadpoolctl.threadpool_info():
    if "scipy.libs" in one["filepath"]:
        print(one["num_threads"], os.environ.get("OPENBLAS_NUM_THREADS"))
"""
    rest = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**rest, "JAX_PLATFORMS": "cpu", **({"OPENBLAS_NUM_THREADS": given} if given else {})},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if not found:
        pytest.skip("SciPy has no OpenBLAS of its own here")
    assert found.split() == [str(threads), str(given or None)]


def test_gradients_have_the_form_of_their_matrices():
    """Symmetric for a matrix that is factored, and 0 where a triangle has no entries."""
    root, weights = np.random.default_rng(0).normal(size=(2, 4, 4))
    spd = jnp.asarray(root @ root.T + np.eye(4))
    gradient = jax.grad(lambda m: jnp.sum(weights * linalg.cholesky(m)))(spd)
    np.testing.assert_allclose(gradient, gradient.T, atol=1e-12)
    lower = jnp.asarray(np.tril(root) + 3 * np.eye(4))
    gradient = jax.grad(lambda m: jnp.sum(jnp.sin(linalg.solve_triangular(m, jnp.ones((4, 2))))))(lower)
    assert not np.any(np.triu(gradient, 1))
