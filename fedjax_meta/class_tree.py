"""A binary tree of classes, which makes a classifier of K classes out of K - 1 classifiers of two."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Tree(NamedTuple):
    """K - 1 nodes in no particular order; a node of no classes is not used.

    Attributes:
      member: bool `[K - 1, K]`, the classes of a node.
      left: bool `[K - 1, K]`, those of its left branch.
    """

    member: jax.Array
    left: jax.Array


def build_tree(means: jax.Array, present: jax.Array) -> Tree:
    """Splits the classes that are present, again and again, by two-means of their mean features.

    Args:
      means: `[K, d]`.
      present: bool `[K]`.
    """
    count = len(present)
    apart = jnp.sum((means[:, None] - means[None]) ** 2, -1)

    def halves(member: jax.Array) -> jax.Array:
        """The left half of a set of at least two classes; the two that are farthest apart are never together."""
        pairs = jnp.where(member[:, None] & member[None] & ~jnp.eye(count, dtype=bool), apart, -1.0)
        one, other = jnp.unravel_index(jnp.argmax(pairs), pairs.shape)
        places = jnp.arange(count)

        def lloyd(_: Any, left: jax.Array) -> jax.Array:
            centres = [jnp.sum(means * side[:, None], 0) / jnp.maximum(jnp.sum(side), 1) for side in (left, member & ~left)]
            near, far = (jnp.sum((means - centre[None]) ** 2, -1) for centre in centres)
            return member & ((near <= far) | (places == one)) & (places != other)

        return jax.lax.fori_loop(0, 10, lloyd, member & (apart[one] <= apart[other]) & (places != other))

    def split(group: jax.Array, number: jax.Array) -> tuple[jax.Array, Tree]:
        sizes = jnp.sum((group[None] == jnp.arange(count)[:, None]) & present[None], 1)
        member = present & (group == jnp.argmax(sizes)) & (jnp.max(sizes) > 1)
        left = halves(member) & member
        return jnp.where(member & ~left, number, group), Tree(member, left)

    return jax.lax.scan(split, jnp.zeros(count, jnp.int32), jnp.arange(1, count, dtype=jnp.int32))[1]
