"""Loops whose carry takes the type of what the body returns, so that they run inside a user's `jax.shard_map` and explicit mesh.

JAX asks that a carry begins with the type that it keeps. Inside `jax.shard_map` a type says along which axes of the mesh a value
varies, and on an explicit mesh how it is sharded; a loop that begins with zeros, or with parameters from outside, would be
refused. Elsewhere the functions below are those of JAX.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from fedjax_meta.types import PyTree, Scalar

Carry = TypeVar("Carry")


def fori_loop(count: Scalar, body: Callable[[Scalar, Carry], Carry], carry: Carry) -> Carry:
    """`jax.lax.fori_loop(0, count, body, carry)`; without a loop if there is exactly one step."""
    if isinstance(count, int) and count == 1:
        return body(0, carry)
    carry = typed(lambda carry: body(jnp.zeros((), jnp.int32), carry), carry)
    return jax.lax.fori_loop(0, count, body, carry)


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
