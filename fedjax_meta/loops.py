"""Loops whose carry takes the type of what the body returns, so that they run inside a user's `jax.shard_map` and explicit mesh.

JAX asks that a carry begins with the type that it keeps. Inside `jax.shard_map` a type says along which axes of the mesh a value
varies, and on an explicit mesh how it is sharded; a loop that begins with zeros, or with parameters from outside, would be
refused.

Clients that run side by side (lanes of a `vmap`) may have loops of different lengths. JAX then gives every lane its own counter,
so that what a step reads and writes at the counter becomes a gather and a scatter, and it selects between the old and the new
value of everything that the loop carries, in every step. Here lanes share the counter of the longest loop, and a lane that has
finished keeps its carry; what `recorded_loop` records is written at the common counter and never selected. On an accelerator
small leaves travel as one vector, because selecting and writing each of them is a kernel.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from fedjax_meta import runtime
from fedjax_meta.types import PyTree, Scalar

Carry = TypeVar("Carry")

LANES = "fedjax_meta lanes"
"""Name of the axis of the clients that run side by side."""

_SMALL = 2**14
"""Numbers of a leaf up to which it is packed with others: more cost more to move than a kernel costs to launch."""


def lanes() -> int | None:
    """How many clients run side by side in what is being traced, as far as `engine` knows; `None` outside of lanes."""
    try:
        return jax.lax.axis_size(LANES)
    except NameError:
        return None


def fori_loop(count: Scalar, body: Callable[[Scalar, Carry], Carry], carry: Carry) -> Carry:
    """`jax.lax.fori_loop(0, count, body, carry)`; without a loop if there is exactly one step."""
    return _run(count, body, carry)


def until_steady(
    step: Callable[[jax.Array, Carry], tuple[Carry, jax.Array]],
    carry: Carry,
    *,
    most: Scalar,
    least: int,
    window: int,
    tolerance: Scalar,
) -> tuple[Carry, jax.Array]:
    """Steps until the values of the last `window` of them have a standard deviation below `tolerance`.

    Args:
      step: `(i, carry) -> (carry, value)`.
      carry: what the first step gets.
      most: no more steps than this, may be traced.
      least: no fewer, unless `most` says so.
      window, tolerance: when values are steady.

    Returns:
      (carry, number of steps).
    """

    def goes_on(state: tuple[Carry, jax.Array, jax.Array]) -> jax.Array:
        _, recent, i = state
        return (i < most) & ((i < least) | (jnp.std(recent) >= tolerance))

    def one(state: tuple[Carry, jax.Array, jax.Array]) -> tuple[Carry, jax.Array, jax.Array]:
        carry, recent, i = state
        carry, value = step(i, carry)
        return carry, recent.at[i % window].set(value), i + 1

    carry, _, count = jax.lax.while_loop(goes_on, one, (carry, jnp.zeros(window), jnp.zeros((), jnp.int32)))
    return carry, count


def recorded_loop(
    count: Scalar, body: Callable[[Scalar, Carry], tuple[Carry, PyTree]], carry: Carry, entry: PyTree, most: int
) -> tuple[Carry, Callable[[Scalar], PyTree]]:
    """`fori_loop` whose body also returns an entry for each step, which is kept.

    Args:
      count, carry: as in `fori_loop`.
      body: `(i, carry) -> (carry, entry)`.
      entry: shapes of an entry.
      most: static upper bound of `count`.

    Returns:
      (carry, `i -> entry` of step i; of a step from `count` on it holds any values).
    """
    packing = _packing(entry, worth_it=True)
    record = storage(most, jax.eval_shape(packing.pack, entry))

    def step(i: Scalar, carry: Carry, record: PyTree) -> tuple[Carry, PyTree]:
        carry, entry = body(i, carry)
        put = lambda slots, leaf: jax.lax.dynamic_update_index_in_dim(slots, leaf, i, 0)  # noqa: E731
        return carry, jax.tree.map(put, record, packing.pack(entry))

    carry, record = _run(count, step, carry, record)
    return carry, lambda i: packing.unpack(jax.tree.map(lambda slots: slots[i], record))


def backward_loop(count: Scalar, body: Callable[[Scalar, Carry], Carry], carry: Carry) -> Carry:
    """`fori_loop` from `count - 1` down to 0."""
    return _run(count, body, carry, backward=True)


def _run(count: Scalar, body: Callable[..., Any], carry: Any, *beside: PyTree, backward: bool = False) -> Any:
    """The loop. A lane that has finished keeps its carry; trees `beside` it, which the body also takes and returns, change on."""
    longest = _longest(count)
    ragged = longest is not count
    packing = _packing(carry, worth_it=ragged)

    def step(i: Scalar, before: Any) -> Any:
        t = longest - 1 - i if backward else i
        after = body(t, packing.unpack(before[0]), *before[1:])
        after = after if beside else (after,)
        packed = packing.pack(after[0])
        if ragged:
            packed = jax.tree.map(lambda new, old: jnp.where(t < count, new, old), packed, before[0])
        return (packed, *after[1:])

    start = (packing.pack(carry), *beside)
    # What is recorded must come of a traced step, as its shapes do.
    if isinstance(count, int) and count == 1 and not beside:
        found = step(0, start)
    else:
        start = typed(lambda carry: step(jnp.zeros((), jnp.int32), carry), start)
        found = jax.lax.fori_loop(0, longest, step, start)
    found = (packing.unpack(found[0]), *found[1:])
    return found if beside else found[0]


class _Packing(NamedTuple):
    """A tree as another with fewer leaves, and back."""

    pack: Callable[[PyTree], PyTree]
    unpack: Callable[[PyTree], PyTree]


def _packing(tree: PyTree, *, worth_it: bool) -> _Packing:
    """Small leaves of one type as one vector where that is worth it: on an accelerator, if each would cost a kernel."""
    if not worth_it or runtime.on_cpu():
        return _Packing(lambda tree: tree, lambda packed: packed)
    leaves, structure = jax.tree.flatten(tree if _are_shapes(tree) else jax.eval_shape(lambda: tree))
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size <= _SMALL and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            groups.setdefault(leaf.dtype, []).append(i)
    members = {i for group in groups.values() for i in group}
    alone = [i for i in range(len(leaves)) if i not in members]

    def pack(tree: PyTree) -> PyTree:
        given = jax.tree.leaves(tree)
        vectors = [jnp.concatenate([jnp.ravel(given[i]) for i in group]) for group in groups.values()]
        return [given[i] for i in alone], vectors

    def unpack(packed: PyTree) -> PyTree:
        found: dict[int, Any] = dict(zip(alone, packed[0], strict=True))
        for group, vector in zip(groups.values(), packed[1], strict=True):
            ends = itertools.accumulate(leaves[i].size for i in group)
            for i, end in zip(group, ends, strict=True):
                found[i] = vector[end - leaves[i].size : end].reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])

    return _Packing(pack, unpack)


def _are_shapes(tree: PyTree) -> bool:
    return all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _longest(count: Scalar) -> Scalar:
    """The largest number of steps of all lanes; `count` itself where it is the same in all."""
    return count if isinstance(count, int) or lanes() is None else jax.lax.pmax(count, LANES)


def while_loop(unfinished: Callable[[Carry], Any], body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`jax.lax.while_loop`."""
    return jax.lax.while_loop(unfinished, body, typed(body, carry))


def storage(count: int, shapes: PyTree) -> PyTree:
    """Uninitialised arrays `[count, ...]` for trees of these shapes."""
    whole = PartitionSpec() if explicit_mesh() else None
    return jax.tree.map(lambda leaf: jax.lax.empty((count, *leaf.shape), leaf.dtype, out_sharding=whole), shapes)


def strongly_typed(tree: PyTree) -> PyTree:
    """The tree with arrays of their own type for numbers and weakly typed arrays, such as `jnp.array(1.0)`.

    A weak type lasts until the first sum with another array, so that what is traced with it is traced again.
    """

    def strong(leaf: Any) -> Any:
        weak = isinstance(leaf, (bool, int, float, complex)) or getattr(leaf, "weak_type", False)
        return jax.lax.convert_element_type(leaf, jnp.result_type(leaf)) if weak else leaf

    return jax.tree.map(strong, tree)


def like(new: Carry, old: Any) -> Carry:
    """`new` with its leaves in the types of those of `old`: a rate that is traced, in float32, widens slots of 16 bits."""

    def cast(leaf: Any, before: Any) -> Any:
        return leaf if jnp.result_type(leaf) == before.dtype else jnp.asarray(leaf, before.dtype)

    return jax.tree.map(cast, new, old)


def typed(body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """The carry with the type that `body` returns: varying along the same axes, and sharded on the same explicit mesh."""
    if explicit_mesh():
        carry = jax.tree.map(_on_mesh, carry)
    if not _checks_varying():
        return carry
    while True:
        missing = jax.tree.map(
            lambda before, after: _axes(after) - _axes(jax.typeof(before)), carry, jax.eval_shape(body, carry)
        )
        if not any(jax.tree.leaves(missing)):
            return carry
        carry = jax.tree.map(_vary, carry, missing)


def device_local(tree: Carry, result: Callable[[Carry], Any]) -> Carry:
    """Makes `tree` device-local if `result(tree)` differs between devices. Otherwise `jax.grad` would sum their gradients.

    That is inside a `jax.shard_map`, where every client adapts its own copy. On an explicit mesh, leaves that were made elsewhere
    are put on all of it.
    """
    if explicit_mesh():
        tree = jax.tree.map(_on_mesh, tree)
    if not _checks_varying():
        return tree
    axes = frozenset().union(*map(_axes, jax.tree.leaves(jax.eval_shape(result, tree))))
    return jax.tree.map(lambda leaf: _vary(leaf, axes - _axes(jax.typeof(leaf))), tree)


def explicit_mesh() -> bool:
    """Whether this is traced on a mesh whose axes are part of the types of arrays (`jax.set_mesh` with explicit axes)."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _on_mesh(leaf: Any) -> Any:
    leaf = jnp.asarray(leaf)
    return jax.sharding.reshard(leaf, PartitionSpec()) if jax.typeof(leaf).sharding.mesh.empty else leaf


def _checks_varying() -> bool:
    """Whether this is traced inside a `jax.shard_map` with `check_vma=True`, its default."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes) and bool(_axes(jax.typeof(_vary(jnp.zeros(()), axes))))


def _axes(type_: Any) -> frozenset[str]:
    """The axes of the mesh along which values of this type differ between devices."""
    return type_.vma if hasattr(type_, "vma") else type_.manual_axis_type.varying  # JAX 0.10 renames it


def _vary(leaf: Any, axes: Any) -> Any:
    return jax.lax.pcast(leaf, tuple(axes), to="varying") if axes else leaf
