"""Roles: every leaf has exactly one, and the parts that they cut put the model together again."""

import jax
from hypothesis import given
from hypothesis import strategies as st

from fedjax_meta import masks
from fedjax_meta.masks import Role

MODEL = {"body": {"a": 1, "b": 2}, "head": {"c": 3, "d": 4}}
MASKS = st.lists(st.booleans(), min_size=4, max_size=4).map(lambda flags: jax.tree.unflatten(jax.tree.structure(MODEL), flags))


def _flags(mask):
    return jax.tree.leaves(mask)


@given(personal=MASKS, trainable=MASKS, frozen=MASKS)
def test_roles_partition_the_leaves(personal, trainable, frozen):
    frozen = masks.intersection(frozen, masks.complement(personal))
    roles = masks.roles(personal, trainable, frozen)
    parts = {role: masks.having(roles, role) for role in Role}
    assert [sum(flags) for flags in zip(*map(_flags, parts.values()), strict=True)] == [1] * 4
    assert _flags(parts[Role.PERSONAL]) == _flags(personal) and _flags(parts[Role.FROZEN]) == _flags(frozen)
    rest = masks.complement(masks.union(personal, frozen))
    assert _flags(parts[Role.SHARED]) == _flags(masks.intersection(rest, trainable))
    assert _flags(parts[Role.BUFFER]) == _flags(masks.intersection(rest, masks.complement(trainable)))
    whole = jax.tree.map(lambda _: None, MODEL)
    for part in parts.values():
        whole = masks.merge(masks.split(MODEL, part)[0], whole)
    assert whole == MODEL


@given(a=MASKS, b=MASKS)
def test_a_union_selects_what_either_selects_and_splits_like_two_cuts(a, b):
    both = masks.union(a, b)
    selected, rest = masks.split(MODEL, both)
    first, left = masks.split(MODEL, a)
    second = masks.split(MODEL, masks.intersection(b, masks.complement(a)))[0]
    assert masks.merge(first, second) == selected
    assert masks.merge(selected, rest) == MODEL and masks.merge(first, left) == MODEL
    assert _flags(masks.intersection(both, masks.complement(both))) == [False] * 4
    assert _flags(masks.union(both, masks.complement(both))) == _flags(masks.everything_like(a))
