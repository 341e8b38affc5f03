"""The tree of classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.numerics.class_tree import at_most, build_tree


def test_the_tree_halves_the_classes_by_their_means():
    means = jnp.asarray([[0.0, 0], [9.0, 0], [0.5, 0], [9.5, 1], [4.0, 4]])
    tree = build_tree(means, jnp.asarray([True, True, True, True, False]))
    assert tree.node.shape == tree.left.shape == (4, 5) and int(tree.depth) == 2
    none = at_most(5)
    one, other = frozenset({0, 2}), frozenset({1, 3})
    assert branches(tree, 0) == {frozenset([one, other])}
    assert branches(tree, 1) == {frozenset([frozenset({0}), frozenset({2})]), frozenset([frozenset({1}), frozenset({3})])}
    assert np.all(np.asarray(tree.node)[:, 4] == none) and np.all(np.asarray(tree.node)[2:] == none)


def branches(tree, level):
    """The two sets of classes of each node of a level."""
    node, left = np.asarray(tree.node[level]), np.asarray(tree.left[level])
    numbers = sorted(set(node[node < at_most(len(node))].tolist()))
    assert numbers == list(range(len(numbers)))
    sides = [(frozenset(np.flatnonzero((node == n) & left)), frozenset(np.flatnonzero((node == n) & ~left))) for n in numbers]
    return {frozenset(pair) for pair in sides}


@pytest.mark.parametrize("present", [[], [2], [0, 3], list(range(7))])
def test_every_class_ends_alone(present):
    """Leaves are single classes: K - 1 nodes, each of two branches with classes, whose classes are one branch of a node above."""
    means = jnp.asarray(np.random.default_rng(len(present)).normal(size=(7, 3)))
    tree = build_tree(means, jnp.asarray(np.isin(np.arange(7), present)))
    above, splits = {frozenset(present)}, 0
    for level in range(int(tree.depth)):
        nodes = branches(tree, level)
        assert nodes and all(all(pair) and frozenset().union(*pair) in above for pair in nodes)
        above, splits = {side for pair in nodes for side in pair}, splits + len(nodes)
    assert splits == max(len(present) - 1, 0)


def test_distant_outliers_make_a_chain():
    """Means 1, 10, 100, ...: each level splits off the farthest, so that there are as many levels as nodes."""
    tree = build_tree(10.0 ** jnp.arange(5)[:, None], jnp.ones(5, bool))
    assert int(tree.depth) == 4
    assert branches(tree, 0) == {frozenset([frozenset({4}), frozenset({0, 1, 2, 3})])}


def test_of_the_two_classes_that_are_farthest_apart_the_first_is_left():
    """Whichever of the two equal distances, from either side, rounding makes the larger one."""
    means = np.random.default_rng(0).normal(size=(7, 20)).astype(np.float32)
    tree = jax.jit(build_tree)(means, np.ones(7, bool))
    apart = np.sum((means[:, None].astype(float) - means[None]) ** 2, -1)
    nodes = 0
    for level in range(int(tree.depth)):
        node, left = np.asarray(tree.node[level]), np.asarray(tree.left[level])
        for number in set(node[node < at_most(7)].tolist()):
            members = np.flatnonzero(node == number)
            pairs = [(apart[a, b], a, b) for a in members for b in members if a < b]
            _, one, other = max(pairs)
            assert left[one] and not left[other]
            nodes += 1
    assert nodes == 6


def test_halves_are_those_of_ten_steps_of_lloyd_with_the_two_farthest_classes_apart():
    """Also where three more classes, far away, have no samples."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x, absent = rng.normal(size=(9, 2)), 5 + 5 * rng.normal(size=(3, 2))
        apart = ((x[:, None] - x[None]) ** 2).sum(-1)
        i, j = np.unravel_index(np.argmax(np.triu(apart, 1)), apart.shape)
        left = apart[i] <= apart[j]
        for _ in range(10):
            left[[i, j]] = True, False
            one, other = x[left].mean(0), x[~left].mean(0)
            left = ((x - one) ** 2).sum(1) <= ((x - other) ** 2).sum(1)
        left[[i, j]] = True, False
        assert np.array_equal(jax.jit(build_tree)(jnp.asarray(x), jnp.ones(9, bool)).left[0], left)
        more = jax.jit(build_tree)(jnp.asarray(np.r_[x, absent]), jnp.arange(12) < 9)
        assert np.array_equal(more.left[0], np.r_[left, [False] * 3])
