"""Shapes that broadcast."""

from __future__ import annotations

from typing import Any, TypeVar

Numbers = TypeVar("Numbers", bound=Any)


def leading(numbers: Numbers, values: Any) -> Numbers:
    """`numbers`, of JAX or NumPy, in a shape that broadcasts against `values`, whose first axes are all of theirs.

    Example: one weight a client, against a leaf that has the clients first.
      >>> import jax.numpy as jnp
      >>> leading(jnp.ones(3), jnp.ones((3, 28, 28))).shape
      (3, 1, 1)
    """
    return numbers.reshape(numbers.shape + (1,) * (values.ndim - numbers.ndim))
