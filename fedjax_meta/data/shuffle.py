"""A random permutation of `range(size)` that is never stored.

Shuffling ragged clients with a sort needs an array padded to the largest client and a sort per client and epoch. The
swap-or-not shuffle (Hoang, Morris, Rogaway: "An enciphering scheme based on a card shuffle", CRYPTO 2012) computes the image
of one index by itself, for any size, even a traced one: a batch costs its own length, and nothing is padded.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import runtime

ROUNDS = 24
"""Rounds of the shuffle. Each leaves an element in place with probability 1/2, so 2^-24 of all elements never move."""


def round_keys(key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    """Random words `[*shape, ROUNDS, 2]` that fix one permutation each; the key is consumed."""
    return jax.random.bits(key, (*shape, ROUNDS, 2), jnp.uint32)


def permuted(keys: jax.Array, index: jax.Array, size: jax.Array | int) -> jax.Array:
    """The images of `index` under the permutation of `range(size)` that `keys` fix.

    Args:
      keys: round keys `[ROUNDS, 2]` from `round_keys`, or `[B, ROUNDS, 2]` for one permutation an element.
      index: int32 `[B]` with entries in `[0, size)`; an entry outside gives an arbitrary value in the range.
      size: number of elements, may be traced; at least 1.

    Returns:
      int32 `[B]`; distinct entries have distinct images, in `[0, size)`.
    """
    size = jnp.maximum(jnp.asarray(size, jnp.int32), 1)
    index = jnp.clip(index, 0, size - 1)

    pivots = (keys[..., 0] % size.astype(jnp.uint32)).astype(jnp.int32)

    def one_round(r: Any, index: jax.Array) -> jax.Array:
        pivot, salt = (jax.lax.dynamic_index_in_dim(of, r, -1, keepdims=False) for of in (pivots, keys[..., 1]))
        partner = pivot - index
        partner = jnp.where(partner < 0, partner + size, partner)
        # Both members of a pair must see the same coin, so it hangs on the larger of the two.
        coin = _hash(jnp.maximum(index, partner).astype(jnp.uint32), salt)
        return jnp.where(coin, partner, index)

    # A loop is what XLA does not fuse: it would compute an index anew for every number of its image. On a CPU its steps cost
    # nothing and one round compiles sooner than many; elsewhere each is a launch.
    return jax.lax.fori_loop(0, ROUNDS, one_round, index, unroll=1 if runtime.on_cpu() else ROUNDS // 2)


def _hash(x: jax.Array, salt: jax.Array) -> jax.Array:
    """One random-looking bit of x: the finaliser of MurmurHash3 over a salted multiply."""
    x = x * jnp.uint32(0x9E3779B1) ^ salt
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)) >> 31 == 1
