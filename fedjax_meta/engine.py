"""Runs clients: the only module that knows about client axes, lanes and devices.

A client rule is written for one client. `run_cohort` runs it for C clients: a group of `lanes` clients at a time under `vmap`,
group after group in a loop that carries the sum of uploads along, so that what is only averaged is never stacked. Several devices
share the work of a cohort, and one all-reduce adds up their sums.
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
      kept: what the client keeps for its next round, in the structure in which it came.
      outputs: what is wanted of each client separately, any pytree; it comes back stacked.
    """

    sums: PyTree
    kept: PyTree
    outputs: PyTree


ClientRule = Callable[[Key, jax.Array, Any, Any], ClientUpdate]
"""`(key, client id, kept, context) -> ClientUpdate`; the context (model, data) is the same for every client."""


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
        if jnp.issubdtype(jax.dtypes.result_type(leaf), jax.dtypes.prng_key):
            return jax.random.wrap_key_data(once(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if len(placed.device_set) > 1 and _platform(placed) == "cpu" and placed.is_fully_addressable:
            # A JAX buffer is aligned as XLA wants it, so that other devices of the host can read it in place.
            return jax.device_put(np.asarray(jnp.asarray(leaf)), placed, may_alias=True)
        # With several processes, only host arrays that are equal in all of them can be put on all devices.
        return jax.device_put(leaf if placed.is_fully_addressable else np.asarray(leaf), placed)

    return jax.tree.map(once, laid_out(tree, _platform(placed)))


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
    sizes: jax.Array,
    kept: PyTree,
    context: PyTree,
    *,
    lanes: int | None = None,
    devices: Devices = None,
    precision: str = "float32",
    move: bool = True,
) -> tuple[Any, Any, Any]:
    """Runs a client rule for every client of a cohort.

    `lanes`, `devices` and the order of the cohort change a result by no more than the rounding of the sum.

    Args:
      rule: what one client does. A client of negative id is padding: it has no samples, its `sums` must be 0, and what it keeps
        and returns is dropped.
      key: client i gets `fold_in(key, i)`, by its id and never by its position.
      ids: int32 `[C]`, distinct.
      sizes: int32 `[C]`, the work of each client: clients of similar size share a lane group, and devices get equal shares.
      kept: what each client kept from its last round, leaves `[C, ...]`.
      context: what every client reads, passed to the rule.
      lanes: clients that run side by side on a device. By default one on a CPU, where the matrix products of one client fill a
        core and lanes only enlarge the working set, and on an accelerator as many as fit its memory. Give a number where this
        function is itself vmapped: the default does not see what else runs.
      devices: how many devices share the cohort, or which (a list; devices that are only described serve to lower and compile);
        all of JAX's by default. The program is made for their platform.
      precision: of matrix products where the hardware has a choice, "float32", "tf32" or "bfloat16".
      move: whether clients, with what they kept, go to the device with the least work. If not, device d of D runs the d-th of D
        equal slices of the cohort and only reads what its clients kept: rows that are partitioned over the devices stay in place
        and are not copied, but work is not balanced.

    Returns:
      (sum of the clients' sums, kept, outputs), the last two with leaves `[C, ...]` in the order of `ids`.

    Raises:
      ValueError: lanes below 1 or more than a device's memory holds; devices as in `hardware.chosen`; an unknown precision, or
        one that the platform does not have.
    """
    checks.one_of("precision", precision, PRECISIONS)
    if lanes is not None:
        checks.count("lanes", lanes)
    mesh = client_mesh(devices)
    with hardware.computing_on(devices), _exactness(precision):
        # Jitted by itself, a group is traced once for its memory, its shapes and the loop over groups.
        group_of = functools.cache(lambda lanes: jax.jit(partial(_group, rule, lanes)))
        lanes = _lanes(group_of, lanes, mesh, key, ids, kept, context)
        if not move:
            return _run_slices(rule, lanes, mesh, key, ids, sizes, kept, context)
        slots, groups = _deal(sizes, lanes, mesh.size)
        if mesh.size > 1:
            # Every device computes the whole assignment. XLA would otherwise partition the loop of `_deal` over the devices, with
            # a collective in every step, which can deadlock on CPU devices that run other collectives in another order.
            slots, groups = jax.lax.with_sharding_constraint((slots, groups), NamedSharding(mesh, _WHOLE))
        here = ids.at[slots].get(mode="fill", fill_value=-1)
        kept = jax.tree.map(lambda leaf: leaf.at[slots].get(mode="clip"), kept)
        run = _on_each_device(partial(_stream, group_of(lanes), lanes), mesh, (_WHOLE, _SLICE, _SLICE, _SLICE, _WHOLE))
        total, dealt = run(key, groups, here, kept, context)
    place = _places(slots, ids.shape[0])
    return total, *jax.tree.map(lambda leaf: leaf[place], dealt)


def _run_slices(
    rule: ClientRule, lanes: int, mesh: Mesh, key: Key, ids: jax.Array, sizes: jax.Array, kept: PyTree, context: PyTree
) -> tuple[Any, Any, Any]:
    """`run_cohort` with `move=False`."""
    cohort_size = ids.shape[0]
    share = -(-cohort_size // mesh.size)
    slots = jnp.arange(mesh.size * share, dtype=jnp.int32)
    # If the devices do not divide the cohort, each has all rows (`populate`).
    partitioned = cohort_size == len(slots)
    rows = slots % share if partitioned else jnp.minimum(slots, cohort_size - 1)

    def reading(key: Key, id_: jax.Array, row: Any, context: PyTree) -> ClientUpdate:
        kept, context = context
        return rule(key, id_, jax.tree.map(lambda leaf: leaf[row], kept), context)._replace(kept=row)

    def run(key: Key, ids: jax.Array, sizes: jax.Array, rows: jax.Array, kept: PyTree, context: PyTree) -> Any:
        order, groups = _deal(sizes, lanes, 1)
        here, rows = ids.at[order].get(mode="fill", fill_value=-1), rows.at[order].get(mode="clip")
        total, (_, outputs) = _stream(
            jax.jit(partial(_group, reading, lanes)), lanes, key, groups, here, rows, (kept, context)
        )
        place = _places(order, share)
        return total, jax.tree.map(lambda leaf: leaf[place], outputs)

    ids = ids.at[slots].get(mode="fill", fill_value=-1)
    sizes = sizes.at[slots].get(mode="fill", fill_value=0)
    layout = (_WHOLE, _SLICE, _SLICE, _SLICE, _SLICE if partitioned else _WHOLE, _WHOLE)
    total, outputs = _on_each_device(run, mesh, layout)(key, ids, sizes, rows, kept, context)
    return total, kept, jax.tree.map(lambda leaf: leaf[:cohort_size], outputs)


def _places(slots: jax.Array, count: int) -> jax.Array:
    """The position of each of `count` members in `slots`, int32 `[count]`; slots out of range are padding."""
    return jnp.zeros(count, jnp.int32).at[slots].set(jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop")


def _on_each_device(run: Callable[..., Any], mesh: Mesh, layout: tuple[P, ...]) -> Callable[..., Any]:
    """Runs `run`, which returns (sum, rest), on every device and adds up the sums.

    `layout` says of each argument whether a device gets all of it or its slice.
    """
    if mesh.size == 1:
        return run

    def on_device(*arguments: Any) -> Any:
        total, rest = run(*arguments)
        return jax.lax.psum(total, CLIENTS), rest

    return jax.shard_map(on_device, mesh=mesh, in_specs=layout, out_specs=(_WHOLE, _SLICE), check_vma=False)


def _deal(sizes: jax.Array, lanes: int, devices: int) -> tuple[jax.Array, jax.Array]:
    """Assigns the members of a cohort to devices and lanes.

    Members are sorted by size and cut into G groups of `lanes`, because a group takes as long as its largest member. Groups go,
    largest first, to the device with the least work so far (Graham 1969: at most 4/3 of the best makespan), so that a device may
    get anything from none to all of them.

    Returns:
      (the member that each slot runs, int32 `[devices * G * lanes]`, ordered by device, group and lane, C (out of range) for an
      empty slot; the number of groups of each device, int32 `[devices]`).
    """
    cohort_size = sizes.shape[0]
    groups = -(-cohort_size // lanes)
    order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, groups * lanes - cohort_size), constant_values=cohort_size)
    order = order.reshape(groups, lanes)
    if devices == 1:
        return order.reshape(-1), jnp.full(1, groups, jnp.int32)
    work = jnp.maximum(sizes[order[:, 0]], 1)

    def give(shares: Any, work: jax.Array) -> Any:
        load, count = shares
        least = jnp.argmin(load)
        return (load.at[least].add(work), count.at[least].add(1)), (least, count[least])

    none = jnp.zeros(devices, jnp.int32)
    (_, count), (device, place) = jax.lax.scan(give, (none.astype(work.dtype), none), work)
    slots = jnp.full((devices, groups, lanes), cohort_size, jnp.int32).at[device, place].set(order)
    return slots.reshape(-1), count


def _group(rule: ClientRule, lanes: int, key: Key, context: PyTree, ids: jax.Array, kept: PyTree) -> ClientUpdate:
    """Runs `lanes` clients side by side; `sums` are added up."""

    def one(client: jax.Array, kept: PyTree) -> ClientUpdate:
        return rule(jax.random.fold_in(key, client), client, kept, context)

    if lanes == 1:
        update = one(ids[0], jax.tree.map(lambda leaf: leaf[0], kept))
        kept, outputs = jax.tree.map(lambda leaf: leaf[None], (update.kept, update.outputs))
        return update._replace(kept=kept, outputs=outputs)
    update = jax.vmap(one, axis_name=loops.LANES)(ids, kept)
    # With its type: JAX would sum uint32 in 64 bits where these are on, and lose the arithmetic modulo 2^32.
    return update._replace(sums=jax.tree.map(lambda leaf: jnp.sum(leaf, 0, dtype=leaf.dtype), update.sums))


def _stream(group: Any, lanes: int, key: Key, groups: jax.Array, ids: jax.Array, kept: PyTree, context: PyTree) -> Any:
    """Runs one device's groups one after the other and carries the sum along; (sum, (kept, outputs))."""
    ids, kept = jax.tree.map(lambda leaf: leaf.reshape(-1, lanes, *leaf.shape[1:]), (ids, kept))
    shapes = jax.eval_shape(group, key, context, *jax.tree.map(lambda leaf: leaf[0], (ids, kept)))
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.sums)
    outputs = jax.tree.map(lambda leaf: jnp.zeros((ids.shape[0], *leaf.shape), leaf.dtype), shapes.outputs)

    def step(g: Any, carry: Any) -> Any:
        total, kept, outputs = carry
        update = group(key, context, ids[g], jax.tree.map(lambda leaf: leaf[g], kept))
        put = lambda leaf, new: leaf.at[g].set(new)  # noqa: E731
        total = jax.tree.map(jnp.add, total, update.sums)
        return total, jax.tree.map(put, kept, update.kept), jax.tree.map(put, outputs, update.outputs)

    total, *dealt = jax.lax.fori_loop(0, groups[0], step, (total, kept, outputs))
    return total, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tuple(dealt))


def _exactness(precision: str) -> contextlib.AbstractContextManager[Any]:
    """The precision of the matrix products that are traced inside."""
    hardware.check_precision(precision)
    # A CPU has one precision; setting it would only make two programs of one.
    return contextlib.nullcontext() if runtime.on_cpu() else jax.default_matmul_precision(PRECISIONS[precision])


def _lanes(
    group_of: Callable[[int], Any], given: int | None, mesh: Mesh, key: Key, ids: jax.Array, kept: PyTree, context: PyTree
) -> int:
    """The lanes of a cohort: what was given, or one on a CPU, and on an accelerator as many as fit."""
    share = -(-ids.shape[0] // mesh.size)
    if runtime.on_cpu():
        return min(given or 1, share)

    def program(lanes: int) -> Any:
        members = jax.tree.map(lambda leaf: leaf[:lanes], (ids, kept))
        # The rule may close over traced values (the rates of a sweep), which become arguments of the program.
        return jax.make_jaxpr(group_of(lanes))(key, context, *members)

    device = mesh.local_devices[0]
    free = free_bytes(device)
    if free is None:
        if given is None:
            raise ValueError(f"{device.device_kind} does not say how much memory it has: give lanes, e.g. lanes={share}")
        return min(given, share)
    # A tenth stays free for what a round holds besides its lanes.
    return fitting.lanes(program, share, given, device, runtime.least_of_processes(0.9 * free))


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
