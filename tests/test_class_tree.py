"""The tree of classes."""

import jax.numpy as jnp
import numpy as np

from fedjax_meta.class_tree import build_tree


def test_the_tree_halves_the_classes_by_their_means():
    means = jnp.asarray([[0.0, 0], [9.0, 0], [0.5, 0], [9.5, 1], [4.0, 4]])
    tree = build_tree(means, jnp.asarray([True, True, True, True, False]))
    member, left = np.asarray(tree.member), np.asarray(tree.left)
    assert not member[:, 4].any() and member.sum(1).tolist().count(0) == 1
    pairs = {
        frozenset([frozenset(np.flatnonzero(a)), frozenset(np.flatnonzero(m & ~a))]) for m, a in zip(member, left, strict=True)
    }
    one, other = frozenset({0, 2}), frozenset({1, 3})
    singles = {frozenset([frozenset({0}), frozenset({2})]), frozenset([frozenset({1}), frozenset({3})])}
    assert pairs - {frozenset([frozenset()])} == {frozenset([one, other])} | singles
