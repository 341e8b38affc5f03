"""Units of a power of 2, in which numbers have a size near 1: squares neither overflow nor vanish, and no digit changes."""

import jax
import jax.numpy as jnp


def power_of_two(magnitude: jax.Array) -> jax.Array:
    """The power of 2 above each magnitude >= 0, in its type; 1 for 0 and for what is not finite.

    It stays where it and its reciprocal, by which XLA multiplies, are normal numbers, so that the largest magnitudes are up to 4
    of it.

    Example:
      >>> power_of_two(jnp.array([0.0, 0.3, 3.0, 4.0])).tolist()
      [1.0, 0.5, 4.0, 8.0]
    """
    limits = jnp.finfo(magnitude.dtype)
    exponent = jnp.clip(jnp.frexp(magnitude)[1], limits.minexp, limits.maxexp - 2)
    return jnp.ldexp(jnp.ones_like(magnitude), exponent)
