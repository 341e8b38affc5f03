"""Powers of 2 as units: numbers in them are of the size of 1, so that their squares have a place, and no digit is lost."""

import jax
import jax.numpy as jnp


def power_of_two(magnitude: jax.Array) -> jax.Array:
    """A power of 2 near each magnitude >= 0, in its type; 0 and what is not finite get that of 1.

    It is an eighth of the largest power at most, because XLA divides by a number by multiplying with its inverse, and the inverse
    of a larger one is too small for a normal number, i.e. 0.

    Example:
      >>> power_of_two(jnp.array([0.0, 0.3, 3.0, 4.0])).tolist()
      [2.0, 0.5, 4.0, 8.0]
    """
    usable = jnp.where(jnp.isfinite(magnitude) & (magnitude > 0), magnitude, 1)
    return jnp.minimum(usable / jnp.frexp(usable)[0], 2.0 ** (jnp.finfo(usable.dtype).maxexp - 3))
