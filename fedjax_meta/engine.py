"""Runs clients: with `rows`, the only module that knows about client axes, lanes and devices.

A client rule is written for one client. `run_cohort` runs it for C clients: a group of `lanes` clients at a time under `vmap`,
group after group in a loop that carries the sum of uploads along, so that what is only averaged is never stacked. Several devices
share the work of a cohort, and one all-reduce adds up their sums. What clients keep is not stacked either: see `rows`.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from fedjax_meta import checks, fitting, hardware, loops, runtime
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.hardware import Devices, free_bytes
from fedjax_meta.keys import is_key
from fedjax_meta.rows import Held, Layout, put
from fedjax_meta.types import Key, PyTree

CLIENTS = "clients"
"""Name of the mesh axis over which a cohort is spread."""

_WHOLE, _SLICE = P(), P(CLIENTS)

PRECISIONS = {"float32": "float32", "tf32": "TF32_TF32_F32", "bfloat16": "BF16_BF16_F32"}
"""Precision of matrix products where the hardware has a choice; sums and parameters keep their own type."""

_log = logging.getLogger("fedjax_meta")


class ClientUpdate(NamedTuple):
    """What one client returns after a round.

    Attributes:
      sums: a pytree that is added up over the cohort, e.g. an `aggregate.WeightedSum`; zeros for a client of negative id.
      kept: what the client keeps for its next round, in the structure in which it came; `()` where nothing was changed.
      outputs: what is wanted of each client separately, any pytree; it comes back stacked.
    """

    sums: PyTree
    kept: PyTree
    outputs: PyTree


ClientRule = Callable[[Key, jax.Array, Any, Any, Any], ClientUpdate]
"""`(key, client id, given, kept, context) -> ClientUpdate`; the context (model, data) is the same for every client."""


def client_mesh(devices: Devices = None) -> Mesh:
    """A mesh of the given devices, or JAX's first ones (all when `None`), with the one axis `clients`.

    Raises:
      ValueError: see `hardware.chosen`.
    """
    return Mesh(np.array(hardware.chosen(devices)), (CLIENTS,))


def replicate(tree: PyTree, devices: Devices = None) -> Any:
    """The tree with a copy on each device that shares a cohort."""
    mesh = client_mesh(devices)
    return jax.device_put(tree, NamedSharding(mesh, _WHOLE)) if _placed(mesh, devices) else tree


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


def within_reach(tree: PyTree, devices: Devices = None) -> Any:
    """The tree with a copy on the devices of those leaves that others hold, or in another order; `jax.jit` would refuse them.

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
    everywhere = NamedSharding(mesh, _WHOLE)
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


def populate(begin: Callable[[jax.Array], Any], ids: jax.Array, devices: Devices = None, *, look_first: bool = True) -> Any:
    """Leaves `[N, ...]` of `begin(client id)` for clients `ids` `[N]`, partitioned over the devices if their number divides N.

    With `look_first`, the bytes needed are logged and checked before they are allocated, see `announce`.

    Raises:
      ValueError: more bytes than are free, with `look_first`.
    """
    mesh, num_clients = client_mesh(devices), ids.shape[0]
    each = jax.eval_shape(begin, ids[0])
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(each))
    if one == 0:
        return jax.vmap(begin)(ids)
    parts = mesh.size if num_clients % mesh.size == 0 else 1
    # All devices of a CPU host share its memory.
    first = mesh.local_devices[0]
    host = first.platform == "cpu"
    need = num_clients * one * (len(mesh.local_devices) if host else 1) // parts
    free, where = free_bytes(first), "this host" if host else "each device"
    sizes = f"{amount(need)} on {where} (N={num_clients} clients, {amount(one)} each, {parts} parts on {mesh.size} devices)"
    if look_first:
        announce(sizes, need, free)
    if look_first and free is not None and need > free:
        raise ValueError(
            f"what clients keep takes {sizes}, but only {amount(free)} are free; keep fewer leaves or clients, or use a store on "
            "the host (`store` of `simulate`)"
        )
    placed = NamedSharding(mesh, _SLICE if parts > 1 else _WHOLE)
    return jax.jit(jax.vmap(begin), out_shardings=placed if _placed(mesh, devices) else None)(ids)


def announce(sizes: str, need: int, free: int | None) -> None:
    """Logs the memory that clients' rows take (logger `fedjax_meta`); as a warning when it is over a tenth of what is free."""
    level = logging.INFO if free is None or need <= free / 10 else logging.WARNING
    _log.log(level, "what clients keep takes %s; %s are free", sizes, "unknown" if free is None else amount(free))


def amount(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def run_cohort(
    rule: ClientRule,
    key: Key,
    ids: jax.Array,
    sizes: jax.Array | None,
    given: PyTree,
    kept: PyTree,
    rows: jax.Array,
    context: PyTree,
    *,
    lanes: int | None = None,
    devices: Devices = None,
    precision: str = "float32",
) -> tuple[Any, Any, Any]:
    """Runs a client rule for every client of a cohort.

    `lanes`, `devices` and the order of the cohort change a result by no more than the rounding of the sum.

    Rows stay where they are: a client reads its own when its turn comes, and writes it in place. Where the devices have parts of
    the population, a client of one that has more work than its share runs on another, and its row travels there and back.

    Args:
      rule: what one client does. A client of negative id is padding: it has no samples, its `sums` must be 0, and what it keeps
        and returns is dropped.
      key: client i gets `fold_in(key, i)`, by its id and never by its position.
      ids: int32 `[C]`, distinct.
      sizes: int32 `[C]`, the work of each client: clients of similar size share a lane group, and devices get equal shares.
        `None` where all have the same.
      given: what each client gets beside that, leaves `[C, ...]`.
      kept: what the clients of a population kept from their last rounds, leaves `[N, ...]`.
      rows: int32 `[C]`, distinct: where `kept` has the clients; a client of a row below 0 keeps nothing.
      context: what every client reads, passed to the rule.
      lanes: clients that run side by side on a device. By default one on a CPU, where the matrix products of one client fill a
        core and lanes only enlarge the working set, and on an accelerator as many as fit its memory. Give a number where this
        function is itself vmapped: the default does not see what else runs.
      devices: how many devices share the cohort, or which (a list; devices that are only described serve to lower and compile);
        all of JAX's by default. The program is made for their platform.
      precision: of matrix products where the hardware has a choice, "float32", "tf32" or "bfloat16".

    Returns:
      (sum of the clients' sums, `kept` with the cohort's rows renewed, outputs `[C, ...]` in the order of `ids`).

    Raises:
      ValueError: lanes below 1 or more than a device's memory holds; devices as in `hardware.chosen`; an unknown precision, or
        one that the platform does not have.
    """
    checks.one_of("precision", precision, PRECISIONS)
    if lanes is not None:
        checks.count("lanes", lanes)
    mesh = client_mesh(devices)
    with hardware.computing_on(devices), exactness(precision):
        # Jitted by itself, a group is traced once for its memory, its shapes and the loop over groups.
        group_of = functools.cache(lambda lanes: jax.jit(partial(_group, rule, lanes)))
        lanes = _lanes(group_of, lanes, mesh, key, ids, given, kept, context)
        layout = Layout.of(kept, ids.shape[0], mesh.size, CLIENTS)
        run = partial(_on_device, group_of(lanes), lanes, layout)
        if mesh.size > 1:
            held = _SLICE if layout.divided else _WHOLE
            given_to_each = (_WHOLE, _WHOLE, _WHOLE, _WHOLE, held, _WHOLE, _WHOLE)
            given_back = (_WHOLE, held, _WHOLE)
            run = jax.shard_map(run, mesh=mesh, in_specs=given_to_each, out_specs=given_back, check_vma=False)
        # Outside of a program, e.g. under `evaluate`, each operation would otherwise be compiled by itself.
        options = {} if runtime.tracing() else runtime.compiler_options()
        program = jax.jit(run, compiler_options=options or None)
        return program(key, ids, sizes, given, kept, rows.astype(jnp.int32), context)


def _on_device(
    group: Any,
    lanes: int,
    layout: Layout,
    key: Key,
    ids: jax.Array,
    sizes: jax.Array | None,
    given: PyTree,
    kept: PyTree,
    rows: jax.Array,
    context: PyTree,
) -> Any:
    """Runs one device's groups one after the other and carries the sum along; (sum over devices, kept, outputs of all)."""
    # Every device computes the whole assignment. XLA would otherwise spread it over the devices, with collectives in its loop.
    homes = layout.homes(rows)
    if sizes is None and homes is None:
        slots, groups = map(jnp.asarray, _deal_equal(ids.shape[0], lanes, layout.devices))
    else:
        work = jnp.ones_like(ids) if sizes is None else sizes
        slots, groups = _deal(work, lanes, layout.devices, homes, layout.room)
    where, away = layout.routes(rows, slots)
    share = slots.shape[0] // layout.devices
    mine = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, layout.here() * share, share), (slots, where))
    members, where = jax.tree.map(lambda leaf: leaf.reshape(-1, lanes), mine)
    held = layout.begin(kept, away)

    def clients(g: Any, held: Held) -> ClientUpdate:
        who = ids.at[members[g]].get(mode="fill", fill_value=-1)
        theirs = jax.tree.map(lambda leaf: leaf.at[members[g]].get(mode="clip"), given)
        return group(key, context, who, theirs, layout.read(held, jax.tree.map(lambda leaf: leaf[g], where), kept))

    shapes = jax.eval_shape(clients, 0, held)
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.sums)
    outputs = jax.tree.map(lambda leaf: jnp.zeros((ids.shape[0], *leaf.shape[1:]), leaf.dtype), shapes.outputs)
    changes = bool(jax.tree.leaves(shapes.kept))

    def step(g: Any, carry: Any) -> Any:
        total, outputs, after = carry
        update = clients(g, after if changes else held)
        if changes:
            after = layout.write(after, jax.tree.map(lambda leaf: leaf[g], where), update.kept)
        place = jnp.where(members[g] < ids.shape[0], members[g], -1)
        return jax.tree.map(jnp.add, total, update.sums), put(outputs, place, update.outputs), after

    # Rows that are only read stay out of what the loop carries, which would be copied.
    start = (total, outputs, held if changes else ())
    total, outputs, after = jax.lax.fori_loop(0, groups[layout.here()], step, start)
    total, outputs, sent = layout.exchanged(total, outputs, after.sent if changes else ())
    return total, layout.end(after._replace(sent=sent), away, kept) if changes else kept, outputs


def _deal(
    sizes: jax.Array, lanes: int, devices: int, homes: jax.Array | None = None, room: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Assigns the members of a cohort to devices and lanes.

    Members are sorted by size and cut into groups of `lanes`, because a group takes as long as its largest member. Groups go,
    largest first, to the device with the least work so far (Graham 1969: at most 4/3 of the best makespan), so that a device may
    get anything from none to all of them. With `homes`, the device of each member, int32 `[C]`, a group has members of one home
    and stays there while that has less than its share of the work; at most `room` members go elsewhere.

    Returns:
      (the member that each slot runs, int32 `[devices * G * lanes]`, ordered by device, group and lane, C (out of range) for an
      empty slot; the number of groups of each device, int32 `[devices]`).
    """
    cohort_size = sizes.shape[0]
    order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
    if homes is None:
        groups = -(-cohort_size // lanes)
        order = jnp.pad(order, (0, groups * lanes - cohort_size), constant_values=cohort_size)
    else:
        # The members of each home begin a group of their own.
        groups = -(-cohort_size // lanes) + devices - 1
        order = order[jnp.argsort(homes[order], stable=True)]
        inhabitants = jnp.bincount(homes, length=devices)
        filled = -(-inhabitants // lanes) * lanes
        moved = (jnp.cumsum(filled) - filled) - (jnp.cumsum(inhabitants) - inhabitants)
        place = jnp.arange(cohort_size) + moved[homes[order]]
        order = jnp.full(groups * lanes, cohort_size, jnp.int32).at[place].set(order)
    order = order.reshape(groups, lanes)
    if devices == 1:
        return order.reshape(-1), jnp.full(1, groups, jnp.int32)
    work = jnp.maximum(sizes.at[order[:, 0]].get(mode="fill", fill_value=0), 1)
    home = None
    if homes is not None:
        home = homes.at[order[:, 0]].get(mode="fill", fill_value=devices)
        largest = jnp.argsort(jnp.where(home < devices, -work, 0), stable=True)
        order, work, home = order[largest], work[largest], home[largest]
    share = jnp.sum(work) / devices

    def give(shares: Any, group: Any) -> Any:
        load, count, away = shares
        work, home, members = group
        device = jnp.argmin(load)
        if home is not None:
            stays = (load[home] + work <= share) | (away + members > room)
            # A group without members goes nowhere.
            device = jnp.where(stays | (home == devices), home, device)
            away += jnp.where(device != home, members, 0)
        return (load.at[device].add(work, mode="drop"), count.at[device].add(1, mode="drop"), away), (device, count[device])

    none = jnp.zeros(devices, jnp.int32)
    start = (none.astype(work.dtype), none, jnp.zeros((), jnp.int32))
    members = jnp.sum(order < cohort_size, 1, dtype=jnp.int32)
    (_, count, _), (device, place) = jax.lax.scan(give, start, (work, home, members))
    slots = jnp.full((devices, groups, lanes), cohort_size, jnp.int32).at[device, place].set(order, mode="drop")
    return slots.reshape(-1), count


def _deal_equal(cohort_size: int, lanes: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """`_deal` for members of equal size, in NumPy."""
    groups = -(-cohort_size // lanes)
    members = np.arange(groups * lanes, dtype=np.int32).reshape(groups, lanes)
    slots = np.full((devices, groups, lanes), cohort_size, np.int32)
    for group, row in enumerate(np.minimum(members, cohort_size)):
        slots[group % devices, group // devices] = row
    return slots.reshape(-1), np.bincount(np.arange(groups) % devices, minlength=devices).astype(np.int32)


def _group(
    rule: ClientRule, lanes: int, key: Key, context: PyTree, ids: jax.Array, given: PyTree, kept: PyTree
) -> ClientUpdate:
    """Runs `lanes` clients side by side; `sums` are added up."""

    def one(client: jax.Array, given: PyTree, kept: PyTree) -> ClientUpdate:
        return rule(jax.random.fold_in(key, client), client, given, kept, context)

    if lanes == 1:
        update = one(ids[0], *jax.tree.map(lambda leaf: leaf[0], (given, kept)))
        kept, outputs = jax.tree.map(lambda leaf: leaf[None], (update.kept, update.outputs))
        return update._replace(kept=kept, outputs=outputs)
    update = jax.vmap(one, axis_name=loops.LANES)(ids, given, kept)
    # With its type: JAX would sum uint32 in 64 bits where these are on, and lose the arithmetic modulo 2^32.
    return update._replace(sums=jax.tree.map(lambda leaf: jnp.sum(leaf, 0, dtype=leaf.dtype), update.sums))


def exactness(precision: str) -> contextlib.AbstractContextManager[Any]:
    """The precision of the matrix products that are traced inside."""
    hardware.check_precision(precision)
    # A CPU has one precision; setting it would only make two programs of one.
    return contextlib.nullcontext() if runtime.on_cpu() else jax.default_matmul_precision(PRECISIONS[precision])


def _lanes(
    group_of: Callable[[int], Any],
    asked: int | None,
    mesh: Mesh,
    key: Key,
    ids: jax.Array,
    given: PyTree,
    kept: PyTree,
    context: PyTree,
) -> int:
    """The lanes of a cohort: what was given, or one on a CPU, and on an accelerator as many as fit."""
    share = -(-ids.shape[0] // mesh.size)
    if runtime.on_cpu():
        return min(asked or 1, share)

    def program(lanes: int) -> Any:
        members = jax.tree.map(lambda leaf: leaf[:lanes], (ids, given, kept))
        # The rule may close over traced values (the rates of a sweep), which become arguments of the program.
        return jax.make_jaxpr(group_of(lanes))(key, context, *members)

    device = mesh.local_devices[0]
    free = free_bytes(device)
    if free is None:
        if asked is None:
            raise ValueError(f"{device.device_kind} does not say how much memory it has: give lanes, e.g. lanes={share}")
        return min(asked, share)
    # A tenth stays free for what a round holds besides its lanes.
    return fitting.lanes(program, share, asked, device, runtime.least_of_processes(0.9 * free))


def map_clients(function: Callable[[Any], Any], inputs: Any, *, lanes: int | None = None) -> Any:
    """Maps `function` over the leading axis of `inputs`; `lanes` as in `run_cohort`, but by default all on an accelerator.

    Raises:
      ValueError: lanes below 1.
    """
    count = jax.tree.leaves(inputs)[0].shape[0]
    if lanes is None:
        lanes = 1 if runtime.on_cpu() else count
    checks.count("lanes", lanes)
    lanes = min(count, lanes)
    return jax.lax.map(function, inputs, batch_size=None if lanes == 1 else lanes)
