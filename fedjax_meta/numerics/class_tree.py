"""A binary tree of classes, which makes a classifier of K classes out of K - 1 classifiers of two."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Tree(NamedTuple):
    """Levels of nodes, from the root on: the nodes of a level have no class in common, so that one pass does them all.

    Attributes:
      node: int `[K - 1, K]`, the node of each class at a level, from 0 on; `at_most(K)` where it is at none.
      left: bool `[K - 1, K]`, whether a class is in the left branch of its node.
      depth: number of levels with nodes, the first ones; K - 1 at most, about log2(K) where branches are alike in size.
    """

    node: jax.Array
    left: jax.Array
    depth: jax.Array


class Level(NamedTuple):
    """One level of a tree: the node and the branch of each class, `[K]`, and the number of the level."""

    node: jax.Array
    left: jax.Array
    number: jax.Array


def level_of(tree: Tree, number: Any) -> Level:
    """A level; beyond the last one it has no nodes."""
    return Level(tree.node[number], tree.left[number], jnp.asarray(number))


def at_most(classes: int) -> int:
    """The largest number of nodes in a level: each has two classes or more."""
    return max(1, classes // 2)


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
        # Each pair once: rounding could make either order the larger one, and exchange left and right from program to program.
        pairs = jnp.where(member[:, None] & member[None] & jnp.triu(jnp.ones((count, count), bool), 1), apart, -1.0)
        one, other = jnp.unravel_index(jnp.argmax(pairs), pairs.shape)
        places = jnp.arange(count)

        def lloyd(_: Any, left: jax.Array) -> jax.Array:
            centres = [jnp.sum(means * side[:, None], 0) / jnp.maximum(jnp.sum(side), 1) for side in (left, member & ~left)]
            near, far = (jnp.sum((means - centre[None]) ** 2, -1) for centre in centres)
            return member & ((near <= far) | (places == one)) & (places != other)

        return jax.lax.fori_loop(0, 10, lloyd, member & (apart[one] <= apart[other]) & (places != other))

    def split(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[Any, Any]:
        group, depth = carry
        sizes = jnp.sum((group[None] == jnp.arange(count)[:, None]) & present[None], 1)
        member = present & (group == jnp.argmax(sizes)) & (jnp.max(sizes) > 1)
        left = halves(member) & member
        level = jnp.where(jnp.any(member), jnp.max(jnp.where(member, depth, 0)), count)
        return (jnp.where(member & ~left, number, group), depth + member), (member, left, level)

    start = jnp.zeros(count, jnp.int32)
    (_, depth), (member, left, level) = jax.lax.scan(split, (start, start), jnp.arange(1, count, dtype=jnp.int32))
    here = level[None] == jnp.arange(count - 1)[:, None]  # [levels, nodes]
    rank = jnp.cumsum(here, 1) - 1
    of_class = here[:, :, None] & member[None]
    node = jnp.where(jnp.any(of_class, 1), jnp.sum(jnp.where(of_class, rank[:, :, None], 0), 1), at_most(count))
    return Tree(node, jnp.any(here[:, :, None] & left[None], 1), jnp.max(depth))


def tree_of(z: jax.Array, label: jax.Array, real: jax.Array, classes: int) -> tuple[Tree, jax.Array]:
    """(the tree of the classes' mean features, the number of samples of each class `[K]`).

    Args:
      z, label: features and labels, `[M, d]` and `[M]`.
      real: bool `[M]`, false for padding; the features of padding are 0.
      classes: K.
    """
    member = jax.nn.one_hot(label, classes) * real[:, None]
    number = jnp.sum(member, 0)
    return build_tree(member.T @ z / jnp.maximum(number, 1)[:, None], number > 0), number
