"""Runs clients. Only this module, `rows` and `placement` know about client axes, lanes and devices.

A client rule is written for one client. `run_cohort` runs it for C clients: a group of `lanes` clients at a time under `vmap`,
group after group in a loop that carries the sum of uploads along, so that what is only averaged is never stacked. Several devices
share the work of a cohort, and one all-reduce adds up their sums. What clients keep is not stacked either: see `rows`.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_meta import checks, fitting, hardware, loops, runtime
from fedjax_meta.hardware import Devices, memory
from fedjax_meta.placement import CLIENTS, SLICE, WHOLE, client_mesh
from fedjax_meta.rows import Held, Layout, put
from fedjax_meta.types import Key, PyTree

PRECISIONS = {"float32": "float32", "tf32": "TF32_TF32_F32", "bfloat16": "BF16_BF16_F32"}
"""Precision of matrix products where the hardware has a choice; sums and parameters keep their own type."""


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
        core and lanes only enlarge the working set, and on an accelerator as many as fit half of its memory. Give a number where
        this function is itself vmapped: the default does not see what else runs.
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
    with hardware.computing_on(devices), matmul_precision(precision):
        # Jitted by itself, a group is traced once for its memory, its shapes and the loop over groups.
        group_of = functools.cache(lambda lanes: jax.jit(partial(_group, rule, lanes)))
        lanes = _lanes(group_of, lanes, mesh, key, ids, given, kept, context)
        layout = Layout.of(kept, ids.shape[0], mesh.size, CLIENTS)
        run = partial(_on_device, group_of(lanes), lanes, layout)
        if mesh.size > 1:
            held = SLICE if layout.divided else WHOLE
            given_to_each = (WHOLE, WHOLE, WHOLE, WHOLE, held, WHOLE, WHOLE)
            given_back = (WHOLE, held, WHOLE)
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
    owners = layout.owners(rows)
    if sizes is None and owners is None:
        slots, groups = map(jnp.asarray, _assign_equal(ids.shape[0], lanes, layout.devices))
    else:
        work = jnp.ones_like(ids) if sizes is None else sizes
        slots, groups = _assign(work, lanes, layout.devices, owners, layout.room)
    where, remote = layout.routes(rows, slots)
    share = slots.shape[0] // layout.devices
    mine = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, layout.here() * share, share), (slots, where))
    members, where = jax.tree.map(lambda leaf: leaf.reshape(-1, lanes), mine)
    held = layout.begin(kept, remote)

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
    total, outputs, renewed = layout.exchanged(total, outputs, after.renewed if changes else ())
    return total, layout.end(after._replace(renewed=renewed), remote, kept) if changes else kept, outputs


def _assign(
    sizes: jax.Array, lanes: int, devices: int, owners: jax.Array | None = None, room: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Assigns the members of a cohort to devices and lanes.

    Members are sorted by size and cut into groups of `lanes`, because a group takes as long as its largest member. Groups go,
    largest first, to the device with the least work so far (Graham 1969: at most 4/3 of the best makespan), so that a device may
    get anything from none to all of them. With `owners`, the device of each member, int32 `[C]`, a group has members of one owner
    and stays there while that has less than its share of the work; at most `room` members go elsewhere.

    Returns:
      (the member that each slot runs, int32 `[devices * G * lanes]`, ordered by device, group and lane, C (out of range) for an
      empty slot; the number of groups of each device, int32 `[devices]`).
    """
    cohort_size = sizes.shape[0]
    order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
    if owners is None:
        groups = -(-cohort_size // lanes)
        order = jnp.pad(order, (0, groups * lanes - cohort_size), constant_values=cohort_size)
    else:
        # The members of each owner begin a group of their own.
        groups = -(-cohort_size // lanes) + devices - 1
        order = order[jnp.argsort(owners[order], stable=True)]
        owned = jnp.bincount(owners, length=devices)
        filled = -(-owned // lanes) * lanes
        moved = (jnp.cumsum(filled) - filled) - (jnp.cumsum(owned) - owned)
        place = jnp.arange(cohort_size) + moved[owners[order]]
        order = jnp.full(groups * lanes, cohort_size, jnp.int32).at[place].set(order)
    order = order.reshape(groups, lanes)
    if devices == 1:
        return order.reshape(-1), jnp.full(1, groups, jnp.int32)
    work = jnp.maximum(sizes.at[order[:, 0]].get(mode="fill", fill_value=0), 1)
    owner = None
    if owners is not None:
        owner = owners.at[order[:, 0]].get(mode="fill", fill_value=devices)
        largest = jnp.argsort(jnp.where(owner < devices, -work, 0), stable=True)
        order, work, owner = order[largest], work[largest], owner[largest]
    share = jnp.sum(work) / devices

    def give(shares: Any, group: Any) -> Any:
        load, count, remote = shares
        work, owner, members = group
        device = jnp.argmin(load)
        if owner is not None:
            stays = (load[owner] + work <= share) | (remote + members > room)
            # A group without members goes nowhere.
            device = jnp.where(stays | (owner == devices), owner, device)
            remote += jnp.where(device != owner, members, 0)
        return (load.at[device].add(work, mode="drop"), count.at[device].add(1, mode="drop"), remote), (device, count[device])

    none = jnp.zeros(devices, jnp.int32)
    start = (none.astype(work.dtype), none, jnp.zeros((), jnp.int32))
    members = jnp.sum(order < cohort_size, 1, dtype=jnp.int32)
    (_, count, _), (device, place) = jax.lax.scan(give, start, (work, owner, members))
    slots = jnp.full((devices, groups, lanes), cohort_size, jnp.int32).at[device, place].set(order, mode="drop")
    return slots.reshape(-1), count


def _assign_equal(cohort_size: int, lanes: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """`_assign` for members of equal size, in NumPy."""
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


def matmul_precision(precision: str) -> contextlib.AbstractContextManager[Any]:
    """The precision of the matrix products that are traced inside."""
    hardware.check_precision(precision)
    # A CPU has one precision; setting it would only make two programs of one.
    return contextlib.nullcontext() if runtime.on_cpu() else jax.default_matmul_precision(PRECISIONS[precision])


def in_precision(precision: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its matrix products in this precision, however it is traced."""

    def precise(*arguments: Any) -> Any:
        with matmul_precision(precision):
            return function(*arguments)

    return precise


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
    """The lanes of a cohort: what was given, or one on a CPU, and on an accelerator as many as fit half of its memory."""
    share = -(-ids.shape[0] // mesh.size)
    if runtime.on_cpu():
        return min(asked or 1, share)

    def program(lanes: int) -> Any:
        members = jax.tree.map(lambda leaf: leaf[:lanes], (ids, given, kept))
        # The rule may close over traced values (the rates of a sweep), which become arguments of the program.
        return jax.make_jaxpr(group_of(lanes))(key, context, *members)

    device = mesh.local_devices[0]
    known = memory(device)
    if known is None:
        if asked is None:
            raise ValueError(f"{device.device_kind} does not say how much memory it has: give lanes, e.g. lanes={share}")
        return min(asked, share)
    # A tenth stays free for what a round holds besides its lanes. Lanes in half of the memory already keep a device busy. With
    # more, their number, and with it the rounding of sums, would follow from what else is in the memory, and there might be no
    # gap in it that is large enough for all of them.
    room = 0.9 * (known.limit - known.used)
    room = room if asked else min(room, known.limit / 2)
    return fitting.lanes(program, share, asked, device, runtime.least_of_processes(room / _copies.get()))


_copies: contextvars.ContextVar[int] = contextvars.ContextVar("copies", default=1)


@contextlib.contextmanager
def sharing_memory(count: int) -> Iterator[None]:
    """What is traced inside will be mapped: so many copies of it share the memory of a device."""
    token = _copies.set(count)
    try:
        yield
    finally:
        _copies.reset(token)


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
