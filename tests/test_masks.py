"""Masks: split and merge are exact inverses, every word selects what it says, and a wrong one is refused by name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_meta import masks, models
from fedjax_meta.task import Task, classification

TREES = st.recursive(
    st.integers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    ),
    max_leaves=10,
)


@st.composite
def trees_with_masks(draw, masks_each=1):
    tree = draw(TREES)
    return tree, *(jax.tree.map(lambda _: draw(st.booleans()), tree) for _ in range(masks_each))


@given(trees_with_masks())
def test_split_and_merge_are_exact_inverses(case):
    tree, mask = case
    selected, rest = masks.split(tree, mask)
    assert masks.merge(selected, rest) == tree
    assert masks.merge(rest, selected) == tree
    assert masks.split(masks.merge(selected, rest), mask) == (selected, rest)
    flags = jax.tree.leaves(mask)
    leaves = jax.tree.leaves(tree)
    assert jax.tree.leaves(selected) == [leaf for leaf, keep in zip(leaves, flags, strict=True) if keep]
    assert jax.tree.leaves(rest) == [leaf for leaf, keep in zip(leaves, flags, strict=True) if not keep]


@given(trees_with_masks(masks_each=2))
def test_masks_form_a_boolean_algebra(case):
    _, a, b = case
    assert masks.complement(masks.complement(a)) == a
    assert masks.complement(masks.union(a, b)) == masks.intersection(masks.complement(a), masks.complement(b))
    assert jax.tree.leaves(masks.union(a, b)) == [x or y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    assert masks.intersection(a, b) == masks.intersection(b, a)


def test_split_costs_nothing_in_a_compiled_function():
    mask = {"a": True, "b": False}
    jaxpr = jax.make_jaxpr(lambda tree: masks.merge(*masks.split(tree, mask)))({"a": jnp.ones(2), "b": jnp.ones(3)})
    assert not jaxpr.jaxpr.eqns


def test_halves_can_be_differentiated_and_mapped():
    tree = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    personal, shared = masks.split(tree, {"a": True, "b": False})

    def loss(half):
        both = masks.merge(half, shared)
        return jnp.sum(both["a"] ** 2) * jnp.sum(both["b"])

    gradient = jax.grad(loss)(personal)
    np.testing.assert_array_equal(gradient["a"], 4 * tree["a"])
    assert gradient["b"] is None


NAMES = {
    "conv1": {"params/conv1/kernel", "params/conv1/bias"},
    "bn1": {"params/bn1/scale", "params/bn1/bias"},
    "bn1 stats": {"batch_stats/bn1/mean", "batch_stats/bn1/var"},
    "conv2": {"params/conv2/kernel", "params/conv2/bias"},
    "bn2": {"params/bn2/scale", "params/bn2/bias"},
    "bn2 stats": {"batch_stats/bn2/mean", "batch_stats/bn2/var"},
    "fc1": {"params/fc1/kernel", "params/fc1/bias"},
    "head": {"params/head/kernel", "params/head/bias"},
}


@pytest.fixture(scope="module")
def network():
    return models.mtfl_cnn((10, 10, 1))


def selected(mask):
    return {"/".join(masks.path_names(path)) for path, keep in jax.tree_util.tree_leaves_with_path(mask) if keep}


@pytest.mark.parametrize(
    ("word", "groups"),
    [
        ("all", list(NAMES)),
        ("none", []),
        ("head", ["head"]),
        ("body", [name for name in NAMES if name != "head"]),
        ("last:1", ["head"]),
        ("last:2", ["fc1", "head"]),
        ("last:4", ["conv1", "conv2", "fc1", "head"]),
        ("first:1", ["conv1"]),
        ("first:3", ["conv1", "conv2", "fc1"]),
        ("bn", ["bn1", "bn2", "bn1 stats", "bn2 stats"]),
        ("bn_affine", ["bn1", "bn2"]),
        ("bn_stats", ["bn1 stats", "bn2 stats"]),
        ("path:conv", ["conv1", "conv2"]),
        ("path:^params/.n1/", ["bn1"]),
        (r"path:v\d+/|h+ead", ["conv1", "conv2", "head"]),
        ("head+bn_stats", ["head", "bn1 stats", "bn2 stats"]),
        (" head + first:1 + none ", ["head", "conv1"]),
        (r"head + path:/c[on]+v1", ["head", "conv1"]),
    ],
)
def test_every_word_selects_what_it_says(network, word, groups):
    mask = masks.resolve(word, network)
    assert jax.tree.structure(mask) == jax.tree.structure(masks.variables_shape(network))
    assert selected(mask) == set().union(*(NAMES[group] for group in groups))


def test_a_function_or_a_ready_tree_is_taken_as_it_is(network):
    tree = masks.by_path(lambda names: names[-1] == "bias")(network)
    assert selected(tree) == {name for group in NAMES.values() for name in group if name.endswith("/bias")}
    assert masks.resolve(tree, network) == tree
    assert masks.resolve(masks.by_path(lambda names: names[-1] == "bias"), network) == tree
    assert masks.resolve(masks.last(2), network) == masks.resolve("last:2", network)


@jax.tree_util.register_pytree_node_class
class Model:
    """A model that is a pytree and a function at once, as in Equinox."""

    def __init__(self, w, b):
        self.w, self.b = w, b

    def __call__(self, x):
        return x @ self.w + self.b

    def tree_flatten(self):
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_the_mask_of_a_callable_model_is_a_tree_and_is_not_called():
    task = classification(lambda key: Model(jnp.ones((2, 3)), jnp.ones(3)), lambda model, x: model(x))
    mask = masks.resolve(Model(True, False), task)
    assert jax.tree.leaves(mask) == [True, False]


def test_variables_may_be_a_single_array():
    task = classification(lambda key: jnp.ones((2, 3)), lambda w, x: x @ w)
    assert masks.resolve("all", task) is True
    assert masks.resolve("none", task) is False
    assert masks.resolve(lambda task: True, task) is True
    with pytest.raises(ValueError, match="selects no leaf"):
        masks.resolve("bn", task)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tail", "personal='tail' is unknown; allowed are all, none, head"),
        ("", "personal='' is unknown"),
        ("head+", "personal='' is unknown"),
        ("last:", "personal='last:' is unknown"),
        ("last:-1", "personal='last:-1' is unknown"),
        ("last:0", "personal='last:0': .* names 4 .conv1, conv2, fc1, head."),
        ("last:5", "personal='last:5': .* names 4"),
        ("first:5", "personal='first:5': .* names 4"),
        ("path:[", "personal='path:.' is not a regular expression"),
        ("path:", "personal='path:' is unknown"),
        ("path:gru", "personal='path:gru' selects no leaf of this model"),
        (
            {"params": True},
            r"personal must have a Python bool at every leaf .* one value at \['params'\], where there are 12 leaves",
        ),
        ({"params": {}}, r"personal must have a Python bool at every leaf .* it has none at \['batch_stats'\]"),
        (
            lambda task: jax.tree.map(lambda leaf: 1, masks.variables_shape(task)),
            "must hold Python bools, not 1: a mask is read",
        ),
        (
            lambda task: jax.tree.map(lambda leaf: jnp.ones((), bool), masks.variables_shape(task)),
            "bools, not an array: a mask",
        ),
    ],
)
def test_a_wrong_mask_is_refused_by_name(network, spec, message):
    with pytest.raises(ValueError, match=message):
        masks.resolve(spec, network, name="personal")


def test_bools_of_numpy_become_those_of_python(network):
    head = masks.resolve("head", network)
    assert set(map(type, jax.tree.leaves(masks.resolve(jax.tree.map(np.bool_, head), network)))) == {bool}
    assert masks.resolve(jax.tree.map(np.bool_, head), network) == head


@pytest.mark.parametrize("word", ["bn", "bn_affine", "bn_stats"])
def test_batch_norm_words_need_a_model_with_batch_norm(word):
    with pytest.raises(ValueError, match=f"private='{word}' selects no leaf"):
        masks.resolve(word, models.logistic(), name="private")


def test_a_leaf_belongs_to_the_outermost_layer_of_its_path():
    """A block's own "head" is a part of the block."""
    shapes = {"encoder": {"head": {"w": (2, 2)}, "query": {"w": (2, 2)}}, "head": {"w": (2, 3)}}

    def init(key):
        return {"params": jax.tree.map(jnp.ones, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))}

    def predict(variables, x):
        p = variables["params"]
        return x @ p["encoder"]["query"]["w"] @ p["encoder"]["head"]["w"] @ p["head"]["w"]

    task = classification(init, predict, layers=("encoder", "head"))
    for word, of_head in (("head", True), ("last:1", True), ("body", False), ("first:1", False)):
        mask = masks.resolve(word, task)["params"]
        assert jax.tree.leaves(mask["head"]) == [of_head]
        assert jax.tree.leaves(mask["encoder"]) == [not of_head] * 2
    with pytest.raises(ValueError, match=r"names 'query', all of whose variables belong to encoder"):
        classification(init, predict, layers=("encoder", "query", "head"))
    with pytest.raises(ValueError, match=r"names 'tail', but the variables are called encoder, head, params, query, w"):
        classification(init, predict, layers=("encoder", "tail"))


def test_a_task_without_layer_names_says_how_to_give_them():
    task: Task = classification(lambda key: {"w": jnp.ones((2, 3))}, lambda p, x: x @ p["w"])
    for word in ("head", "body"):
        with pytest.raises(ValueError, match=r"give it layers=\(...\)"):
            masks.resolve(word, task)
    assert partial(masks.resolve, "path:w")(task) == {"w": True}


def test_every_leaf_has_one_of_four_roles():
    own, moves, still = ({"a": a, "b": b, "c": c, "d": d} for a, b, c, d in ((0, 1, 1, 0), (1, 1, 0, 0), (0, 0, 0, 0)))
    own, moves, still = (jax.tree.map(bool, tree) for tree in (own, moves, still))
    roles = masks.roles(own, moves, {**still, "a": True})
    assert roles == {"a": "frozen", "b": "personal", "c": "personal", "d": "buffer"}
    assert masks.having(roles, masks.Role.PERSONAL, masks.Role.FROZEN) == {"a": True, "b": True, "c": True, "d": False}
    with pytest.raises(ValueError, match="a leaf cannot be personal and frozen"):
        masks.roles(own, moves, {**still, "b": True})
