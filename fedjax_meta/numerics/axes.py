"""Shapes that broadcast."""

from typing import Any, TypeVar

Numbers = TypeVar("Numbers", bound=Any)


def leading(numbers: Numbers, values: Any) -> Numbers:
    """`numbers [A]`, of JAX or NumPy, as `[A, 1, ...]`, so that they broadcast against `values [A, ...]`; A may be several axes.

    Example: one weight for each client, against a leaf that has the clients first.
      >>> import jax.numpy as jnp
      >>> leading(jnp.ones(3), jnp.ones((3, 28, 28))).shape
      (3, 1, 1)
    """
    return numbers.reshape(numbers.shape + (1,) * (values.ndim - numbers.ndim))
