"""Reference implementations by plain XLA and automatic differentiation, for the tests of layers and networks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def xla_convolution(x, kernel, padding):
    return lax.conv_general_dilated(
        x, kernel.transpose(1, 2, 3, 0), (1, 1), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def xla_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@partial(jax.jit, static_argnums=0)
def gradient_and_curvature(function, argument, direction):
    """Gradient and Hessian-vector product, forward over reverse; compiled, because eager execution takes seconds."""
    return jax.jvp(jax.grad(function), (argument,), (direction,))
