"""Puts arrays on the devices that share a cohort: copies on each of them, or the rows of clients in equal parts."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from fedjax_meta import hardware, runtime
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.hardware import Devices, free_bytes
from fedjax_meta.keys import is_key
from fedjax_meta.types import PyTree

CLIENTS = "clients"
"""Name of the mesh axis over which a cohort is spread."""

WHOLE, SLICE = P(), P(CLIENTS)
"""A copy on each device, and the rows of clients in equal parts."""

_log = logging.getLogger("fedjax_meta")


def client_mesh(devices: Devices = None) -> Mesh:
    """A mesh of the given devices, or JAX's first ones (all when `None`), with the one axis `clients`.

    Raises:
      ValueError: see `hardware.chosen`.
    """
    return Mesh(np.array(hardware.chosen(devices)), (CLIENTS,))


def replicate(tree: PyTree, devices: Devices = None) -> Any:
    """The tree with a copy on each device that shares a cohort."""
    mesh = client_mesh(devices)
    return jax.device_put(tree, NamedSharding(mesh, WHOLE)) if _placed(mesh, devices) else tree


def _placed(mesh: Mesh, devices: Devices) -> bool:
    """Whether arrays must be put on the mesh; the only device that nobody named is where they are anyway."""
    return mesh.size > 1 or hardware.given(devices)


def place_shared(tree: PyTree, placed: Sharding) -> Any:
    """A read-only tree on the devices of `placed`, as `laid_out` for them; the devices of a host share one copy of it.

    Do not donate the result: on a CPU all of its buffers are the same memory.
    """

    def once(leaf: Any) -> jax.Array:
        if getattr(leaf, "sharding", None) == placed:
            return leaf
        if is_key(leaf):
            return jax.random.wrap_key_data(once(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if len(placed.device_set) > 1 and _platform(placed) == "cpu" and placed.is_fully_addressable:
            # All devices of the host read an array in place if it is aligned as XLA wants it, which a JAX buffer is.
            there = isinstance(leaf, np.ndarray) and runtime.is_aligned(leaf)
            return jax.device_put(leaf if there else np.asarray(jnp.asarray(leaf)), placed, may_alias=True)
        # With several processes, only host arrays that are equal in all of them can be put on all devices.
        return jax.device_put(leaf if placed.is_fully_addressable else np.asarray(leaf), placed)

    return jax.tree.map(once, laid_out(tree, _platform(placed)))


def on_devices(tree: PyTree, devices: Devices = None) -> Any:
    """Copies leaves that live on other devices, or in another device order, to `devices`; `jax.jit` would refuse them.

    Under a transformation of JAX it stays as it is: the devices are those of the whole program.
    """
    mesh = client_mesh(devices)
    wanted = tuple(mesh.devices.flat)

    def elsewhere(leaf: Any) -> bool:
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            return False
        held = leaf.sharding
        ordered = tuple(held.mesh.devices.flat) if isinstance(held, NamedSharding) else wanted
        return held.device_set != {*wanted} or ordered != wanted

    if runtime.tracing() or not any(map(elsewhere, jax.tree.leaves(tree))):
        return tree  # as it is: mapping it would sort the names of its dicts
    everywhere = NamedSharding(mesh, WHOLE)
    return jax.tree.map(lambda leaf: place_shared(leaf, everywhere) if elsewhere(leaf) else leaf, tree)


def laid_out(tree: PyTree, platform: str) -> Any:
    """A tree whose `FederatedData` are stored as a platform likes it: on a TPU, a sample is a row of numbers."""
    if platform != "tpu":
        return tree

    def is_data(part: Any) -> bool:
        return isinstance(part, FederatedData)

    return jax.tree.map(lambda part: part.flat() if is_data(part) else part, tree, is_leaf=is_data)


def _platform(placed: Any) -> str:
    return next(iter(placed.device_set)).platform


def place_state(state: PyTree, places: PyTree) -> Any:
    """A copy of a state, each leaf where `places` says; it may be donated."""

    def copy(leaf: Any, place: Sharding) -> jax.Array:
        if not place.is_fully_addressable and getattr(leaf, "sharding", None) != place:
            # With several processes, only host arrays that are equal in all of them can be put on all devices.
            leaf = np.asarray(leaf)
        elif isinstance(leaf, jax.Array) and leaf.sharding != place:
            leaf = jnp.copy(leaf)  # JAX would use the buffer of a device that has the leaf already, in spite of `may_alias`
        return jax.device_put(leaf, place, may_alias=False)

    return jax.tree.map(copy, state, places)


def populate(begin: Callable[[jax.Array], Any], ids: jax.Array, devices: Devices = None) -> Any:
    """Leaves `[N, ...]` of `begin(client id)` for clients `ids` `[N]`, partitioned over the devices if their number divides N.

    What is only traced allocates nothing here: who runs it calls `check_room` first.

    Raises:
      ValueError: see `check_room`.
    """
    mesh = client_mesh(devices)
    rows = jax.eval_shape(jax.vmap(begin), ids)
    if not runtime.tracing():
        check_room(rows, devices)
    if not runtime.size_in_bytes(rows):
        return jax.vmap(begin)(ids)
    placed = NamedSharding(mesh, SLICE if ids.shape[0] % mesh.size == 0 else WHOLE)
    return jax.jit(jax.vmap(begin), out_shardings=placed if _placed(mesh, devices) else None)(ids)


def check_room(rows: PyTree, devices: Devices = None, *, runs: int = 1) -> None:
    """Logs the bytes of what clients keep before it is allocated (see `announce`), and checks them.

    Args:
      rows: shapes, leaves `[N, ...]` of the clients of one run.
      devices: that share the rows of a run.
      runs: how many runs these devices hold side by side.

    Raises:
      ValueError: more bytes than are free.
    """
    mesh, whole = client_mesh(devices), runtime.size_in_bytes(rows)
    if not whole:
        return
    num_clients = jax.tree.leaves(rows)[0].shape[0]
    parts = mesh.size if num_clients % mesh.size == 0 else 1
    # All devices of a CPU host share its memory.
    first = mesh.local_devices[0]
    host = first.platform == "cpu"
    need = runs * whole * (len(mesh.local_devices) if host else 1) // parts
    free, where = free_bytes(first), "this host" if host else "each device"
    sizes = (
        f"{amount(need)} on {where} ({f'{runs} runs, ' if runs > 1 else ''}N={num_clients} clients, "
        f"{amount(whole / num_clients)} each, {parts} parts on {mesh.size} devices)"
    )
    announce(sizes, need, free)
    if free is not None and need > free:
        raise ValueError(
            f"what clients keep takes {sizes}, but only {amount(free)} are free; keep fewer leaves or clients, or use a store on "
            "the host (`store` of `simulate`)"
        )


def announce(sizes: str, need: int, free: int | None) -> None:
    """Logs the memory that clients' rows take (logger `fedjax_meta`); as a warning when it is over a tenth of what is free."""
    level = logging.INFO if free is None or need <= free / 10 else logging.WARNING
    _log.log(level, "what clients keep takes %s; %s are free", sizes, "unknown" if free is None else amount(free))


def amount(count: float) -> str:
    """A number of bytes with a unit.

    Example:
      >>> amount(0), amount(318_040), amount(44_700_000), amount(2.5e12)
      ('0 bytes', '318 kB', '44.7 MB', '2500 GB')
    """
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
