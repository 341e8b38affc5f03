"""A random permutation of `range(size)` that needs no memory.

Shuffling clients of different sizes with a sort needs an array padded to the largest client, and a sort per client and epoch.
The swap-or-not shuffle (Hoang, Morris, Rogaway: "An enciphering scheme based on a card shuffle", CRYPTO 2012) computes the
image of each index independently, for any size, which may be traced. The cost of a batch depends only on its own length, and
nothing is padded.
"""

import jax
import jax.numpy as jnp

from fedjax_meta import runtime
from fedjax_meta.types import Key, Scalar

ROUNDS = 24
"""Rounds of the shuffle. Each round leaves an element in place with probability 1/2, so a share of 2^-24 never moves."""


def permutation_keys(key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
    """Random uint32 words `[*shape, ROUNDS, 2]` that determine one permutation each.

    Args:
      key: consumed.
      shape: shape of the array of permutations.
    """
    return jax.random.bits(key, (*shape, ROUNDS, 2), jnp.uint32)


def permute(keys: jax.Array, index: jax.Array, size: Scalar) -> jax.Array:
    """The images of `index` under the permutation of `range(size)` that `keys` determine.

    Args:
      keys: uint32 `[ROUNDS, 2]` from `permutation_keys`, or `[B, ROUNDS, 2]` for a separate permutation per element.
      index: int32 `[B]` with entries in `[0, size)`; an entry outside gives an arbitrary value in that range.
      size: number of elements, at least 1; may be traced.

    Returns:
      int32 `[B]` in `[0, size)`; distinct entries have distinct images.
    """
    size = jnp.maximum(jnp.asarray(size, jnp.int32), 1)
    index = jnp.clip(index, 0, size - 1)

    pivots = (keys[..., 0] % size.astype(jnp.uint32)).astype(jnp.int32)

    def one_round(r: Scalar, index: jax.Array) -> jax.Array:
        pivot, salt = (jax.lax.dynamic_index_in_dim(of, r, -1, keepdims=False) for of in (pivots, keys[..., 1]))
        partner = pivot - index
        partner = jnp.where(partner < 0, partner + size, partner)
        # Both members of a pair need the same coin, so it depends on the larger of the two.
        coin = _hash(jnp.maximum(index, partner).astype(jnp.uint32), salt)
        return jnp.where(coin, partner, index)

    # XLA does not fuse a loop into its consumers; fused, an index would be recomputed for every number of its image. On a CPU
    # loop steps cost nothing and one round compiles faster than many. On other devices every step is a kernel launch.
    return jax.lax.fori_loop(0, ROUNDS, one_round, index, unroll=1 if runtime.on_cpu() else ROUNDS // 2)


def _hash(x: jax.Array, salt: jax.Array) -> jax.Array:
    """One pseudo-random bit of x: the finaliser of MurmurHash3 after a salted multiplication."""
    x = x * jnp.uint32(0x9E3779B1) ^ salt
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)) >> 31 == 1
