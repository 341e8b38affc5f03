"""Cholesky factors and triangular solves whose batches and gradients also end on a CPU.

With JAX 0.10 the gradient of a batch of 20 triangular solves of 256 x 256 never ended on two cores. On a CPU the matrices of a
batch are therefore taken one after the other, whatever `vmap` they come from; on other platforms these are JAX's own functions.
They have first derivatives in reverse mode.

JAX calls SciPy's LAPACK there, which is OpenBLAS in the packages of PyPI. Its threads wait in loops for each other and for the
threads of JAX's devices: `one_thread` turns them off.
"""

import functools
import importlib.util
import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from fedjax_meta import runtime


def one_thread() -> None:
    """Lets SciPy's LAPACK take one thread for a call: the devices of a CPU, which make the calls, are its cores.

    It changes nothing where `OPENBLAS_NUM_THREADS` is set, or where SciPy's linear algebra has been imported before and
    threadpoolctl is not installed.
    """
    if runtime.on_cpu():
        _load_for_one_thread()


@functools.cache  # once a process
def _load_for_one_thread() -> None:
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        return
    if "scipy.linalg" not in sys.modules:
        os.environ[name] = "1"  # OpenBLAS reads it when it is loaded
        try:
            importlib.import_module("scipy.linalg.cython_lapack")
        finally:
            del os.environ[name]
    elif importlib.util.find_spec("threadpoolctl") is not None:
        for library in importlib.import_module("threadpoolctl").ThreadpoolController().lib_controllers:
            if library.internal_api == "openblas" and "scipy" in os.path.basename(os.path.dirname(library.filepath)):
                library.set_num_threads(1)


def cholesky(matrix: jax.Array) -> jax.Array:
    """The lower triangular L with L L^T = matrix.

    Args:
      matrix: `[M, M]`, symmetric and positive definite; both halves are read by the gradient.
    """
    one_thread()
    return _cholesky(matrix) if runtime.on_cpu() else jnp.linalg.cholesky(matrix)


def solve_triangular(lower: jax.Array, sides: jax.Array, *, transpose: bool = False) -> jax.Array:
    """X with L X = B, or with L^T X = B.

    Args:
      lower: L, `[M, M]`; what is above its diagonal is not read.
      sides: B, `[M, K]`.
      transpose: whether L is transposed.
    """
    one_thread()
    if runtime.on_cpu():
        return _solve(lower, sides, transpose)
    return jax.scipy.linalg.solve_triangular(lower, sides, trans=int(transpose), lower=True)


def solve_factored(lower: jax.Array, sides: jax.Array) -> jax.Array:
    """X with L L^T X = B; arguments as in `solve_triangular`."""
    return solve_triangular(lower, solve_triangular(lower, sides), transpose=True)


_factor_one = sequential_vmap(jnp.linalg.cholesky)
_solve_one = sequential_vmap(partial(jax.scipy.linalg.solve_triangular, lower=True))
_solve_transposed_one = sequential_vmap(partial(jax.scipy.linalg.solve_triangular, trans=1, lower=True))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _solve(lower: jax.Array, sides: jax.Array, transpose: bool) -> jax.Array:
    return (_solve_transposed_one if transpose else _solve_one)(lower, sides)


def _solve_forward(lower: jax.Array, sides: jax.Array, transpose: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    found = _solve(lower, sides, transpose)
    return found, (lower, found)


def _solve_backward(transpose: bool, kept: tuple[jax.Array, jax.Array], given: jax.Array) -> tuple[jax.Array, jax.Array]:
    lower, found = kept
    to_sides = _solve(lower, given, not transpose)
    outer = found @ to_sides.T if transpose else to_sides @ found.T
    return -jnp.tril(outer), to_sides


_solve.defvjp(_solve_forward, _solve_backward)


@jax.custom_vjp
def _cholesky(matrix: jax.Array) -> jax.Array:
    return _factor_one(matrix)


def _cholesky_forward(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    lower = _factor_one(matrix)
    return lower, lower


def _cholesky_backward(lower: jax.Array, given: jax.Array) -> tuple[jax.Array]:
    # Murray 2016, arXiv 1602.07527, equation 10: L^-T Phi(L^T G) L^-1, symmetrised; Phi halves the diagonal of a lower triangle.
    inner = jnp.tril(lower.T @ given)
    inner = inner - jnp.diag(jnp.diagonal(inner)) / 2
    half = _solve(lower, _solve(lower, inner, True).T, True)
    return ((half + half.T) / 2,)


_cholesky.defvjp(_cholesky_forward, _cholesky_backward)
