"""Loops whose carry takes the type of what the body returns, so that they run inside a user's `jax.shard_map` and explicit mesh.

JAX asks that a carry begins with the type that it keeps. Inside `jax.shard_map` a type says along which axes of the mesh a value
varies, and on an explicit mesh how it is sharded; a loop that begins with zeros, or with parameters from outside, would be
refused.

Clients that run side by side (lanes of a `vmap`) may have loops of different lengths. JAX then gives every lane its own counter,
so that what a step reads and writes at the counter becomes a gather and a scatter, and it selects between the old and the new
value of everything that the loop carries, in every step. Here lanes share the counter of the longest loop, and a lane that has
finished keeps its carry; what `recorded_loop` records is written at the common counter and never selected.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from fedjax_meta.types import PyTree, Scalar

Carry = TypeVar("Carry")

LANES = "fedjax_meta lanes"
"""Name of the axis of the clients that run side by side."""


def fori_loop(count: Scalar, body: Callable[[Scalar, Carry], Carry], carry: Carry) -> Carry:
    """`jax.lax.fori_loop(0, count, body, carry)`; without a loop if there is exactly one step."""
    if isinstance(count, int) and count == 1:
        return body(0, carry)
    longest = _longest(count)

    def step(i: Scalar, carry: Carry) -> Carry:
        return _unless_finished(i, count, longest, body(i, carry), carry)

    carry = typed(lambda carry: step(jnp.zeros((), jnp.int32), carry), carry)
    return jax.lax.fori_loop(0, longest, step, carry)


def recorded_loop(
    count: Scalar, body: Callable[[Scalar, Carry], tuple[Carry, PyTree]], carry: Carry, record: PyTree
) -> tuple[Carry, PyTree]:
    """`fori_loop` whose body also returns what is written at position i of `record` [M, ...], M >= count: (carry, record).

    Positions from `count` on hold any values.
    """
    longest = _longest(count)

    def step(i: Scalar, both: tuple[Carry, PyTree]) -> tuple[Carry, PyTree]:
        carry, record = both
        moved, entry = body(i, carry)
        record = jax.tree.map(lambda slots, leaf: jax.lax.dynamic_update_index_in_dim(slots, leaf, i, 0), record, entry)
        return _unless_finished(i, count, longest, moved, carry), record

    if isinstance(count, int) and count == 1:
        return step(0, (carry, record))
    start = typed(lambda both: step(jnp.zeros((), jnp.int32), both), (carry, record))
    return jax.lax.fori_loop(0, longest, step, start)


def backward_loop(count: Scalar, body: Callable[[Scalar, Carry], Carry], carry: Carry) -> Carry:
    """`fori_loop` from `count - 1` down to 0."""
    longest = _longest(count)

    def step(i: Scalar, carry: Carry) -> Carry:
        t = longest - 1 - i
        return _unless_finished(t, count, longest, body(t, carry), carry)

    if isinstance(count, int) and count == 1:
        return step(0, carry)
    carry = typed(lambda carry: step(jnp.zeros((), jnp.int32), carry), carry)
    return jax.lax.fori_loop(0, longest, step, carry)


def _longest(count: Scalar) -> Scalar:
    """The largest number of steps of all lanes; `count` itself where it is the same in all."""
    if isinstance(count, int):
        return count
    try:
        jax.lax.axis_size(LANES)
    except NameError:  # not in lanes
        return count
    return jax.lax.pmax(count, LANES)


def _unless_finished(i: Scalar, count: Scalar, longest: Scalar, new: Carry, old: Carry) -> Carry:
    return new if longest is count else jax.tree.map(lambda a, b: jnp.where(i < count, a, b), new, old)


def while_loop(unfinished: Callable[[Carry], Any], body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`jax.lax.while_loop`."""
    return jax.lax.while_loop(unfinished, body, typed(body, carry))


def storage(count: int, shapes: PyTree) -> PyTree:
    """Uninitialised arrays `[count, ...]` for trees of these shapes."""
    whole = PartitionSpec() if _explicit_mesh() else None
    return jax.tree.map(lambda leaf: jax.lax.empty((count, *leaf.shape), leaf.dtype, out_sharding=whole), shapes)


def typed(body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """The carry with the type that `body` returns: varying along the same axes, and sharded on the same explicit mesh."""
    if _explicit_mesh():
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


def own(tree: Carry, result: Callable[[Carry], Any]) -> Carry:
    """`tree` as a value that each device of a `jax.shard_map` has for itself, if `result(tree)` differs between the devices.

    `jax.grad` with respect to a value that all devices share sums the gradients of the devices. That is not meant where
    every client adapts its own copy of the value. On an explicit mesh, leaves that were made elsewhere are put on all of it.
    """
    if _explicit_mesh():
        tree = jax.tree.map(_on_mesh, tree)
    if not _checks_varying():
        return tree
    axes = frozenset().union(*map(_axes, jax.tree.leaves(jax.eval_shape(result, tree))))
    return jax.tree.map(lambda leaf: _vary(leaf, axes - _axes(jax.typeof(leaf))), tree)


def _explicit_mesh() -> bool:
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
