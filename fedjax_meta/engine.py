"""The only place that knows about client axes, lanes and devices.

A client rule is written for one client. `run_cohort` runs it for C clients: a group of `lanes` clients at a time under `vmap`,
group after group in a loop that carries the weighted sum along, so that what will only be averaged is never stacked; on
several devices each takes its share of the cohort, and one all-reduce adds the sums up.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_meta import checks
from fedjax_meta.aggregate import WeightedSum, weigh
from fedjax_meta.data.shuffle import permuted, round_keys
from fedjax_meta.task import Key

CLIENTS = "clients"
"""Name of the mesh axis over which a cohort is spread."""


class ClientUpdate(NamedTuple):
    """What one client hands back after a round.

    Attributes:
      upload: a pytree that the server averages and nobody else sees.
      weight: how much it counts: a scalar, or a prefix tree of `upload` when its parts count differently.
      kept: what the client keeps for its next round, in the structure in which it came.
      outputs: what is wanted of every client by itself, any pytree; it comes back stacked.
    """

    upload: Any
    weight: Any
    kept: Any
    outputs: Any


ClientRule = Callable[[Key, jax.Array, Any, Any], ClientUpdate]
"""`(key, client id, kept, context) -> ClientUpdate`; the context (model, data) is the same for every client."""


def sample_cohort(key: Key, num_clients: int, cohort_size: int) -> jax.Array:
    """C distinct client ids, int32 `[C]`, uniformly at random; the cost does not depend on N. The key is consumed.

    Raises:
      ValueError: a cohort larger than the population.
    """
    checks.count("cohort_size", cohort_size)
    if cohort_size > num_clients:
        raise ValueError(f"cohort_size={cohort_size} is more than the N={num_clients} clients there are")
    if cohort_size == num_clients:
        return jnp.arange(num_clients, dtype=jnp.int32)
    return permuted(round_keys(key), jnp.arange(cohort_size, dtype=jnp.int32), num_clients)


def client_mesh(devices: int | None = None) -> Mesh:
    """A mesh of the first `devices` devices (all when not given) with the one axis `clients`.

    Raises:
      ValueError: more devices than there are.
    """
    available = jax.devices()
    devices = len(available) if devices is None else devices
    if not 1 <= devices <= len(available):
        raise ValueError(f"devices={devices}, but JAX sees {len(available)} ({available[0].platform})")
    return Mesh(np.array(available[:devices]), (CLIENTS,))


def replicate(tree: Any, devices: int | None = None) -> Any:
    """The tree with a copy on each of the devices that will share a cohort."""
    mesh = client_mesh(devices)
    return tree if mesh.size == 1 else jax.device_put(tree, NamedSharding(mesh, P()))


def run_cohort(
    rule: ClientRule,
    key: Key,
    ids: jax.Array,
    sizes: jax.Array,
    kept: Any,
    context: Any,
    *,
    lanes: int | None = None,
    devices: int | None = None,
) -> tuple[WeightedSum, Any, Any]:
    """Runs a client rule for every client of a cohort.

    Neither `lanes`, nor `devices`, nor the order of the cohort changes a result by more than the rounding of the sum.

    Args:
      rule: what one client does; a client of negative id is padding, has no samples, and nothing of it is counted or kept.
      key: client i gets `fold_in(key, i)`, by its id and never by its place.
      ids: int32 `[C]`, distinct.
      sizes: int32 `[C]`, how much work each client is: clients of like size share a lane group.
      kept: what each client kept from its last round, leaves `[C, ...]`.
      context: what every client reads, handed to the rule.
      lanes: clients that run side by side on a device: by default one on a CPU, where one client's matrix products fill a
        core and lanes only enlarge the working set, and a device's whole share on an accelerator.
      devices: how many devices share the cohort; all by default.

    Returns:
      (weighted sum of the uploads, kept, outputs), the last two with leaves `[C, ...]` in the order of `ids`.

    Raises:
      ValueError: lanes below 1, more devices than there are.
    """
    mesh = client_mesh(devices)
    count = mesh.size
    share = -(-ids.shape[0] // count)
    lanes = min(share, lanes or (1 if jax.default_backend() == "cpu" else share))
    checks.count("lanes", lanes)
    slots = _deal(sizes, lanes, count)
    here = ids.at[slots].get(mode="fill", fill_value=-1)
    share_of = partial(_stream, rule, lanes)
    if count > 1:

        def on_device(*arguments: Any) -> Any:
            total, *rest = share_of(*arguments)
            return jax.lax.psum(total, CLIENTS), *rest

        spread, whole = P(CLIENTS), P()
        run = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(whole, spread, spread, whole),
            out_specs=(whole, spread, spread),
            check_vma=False,
        )
    else:
        run = share_of
    total, *dealt = run(key, here, jax.tree.map(lambda leaf: leaf.at[slots].get(mode="clip"), kept), context)
    place = jnp.zeros(ids.shape, jnp.int32).at[slots].set(jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop")
    return total, *jax.tree.map(lambda leaf: leaf[place], dealt)


def _deal(sizes: jax.Array, lanes: int, devices: int) -> jax.Array:
    """Which member of the cohort each slot runs, int32 `[devices * groups * lanes]`; C (out of range) where none.

    Slots are ordered by device, then group, then lane. Members are dealt largest first, so that lanes of one group are of like
    size, and back and forth over the devices, so that their shares are alike.
    """
    cohort_size = sizes.shape[0]
    groups = -(-cohort_size // (lanes * devices))
    order = jnp.argsort(-sizes, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, groups * lanes * devices - cohort_size), constant_values=cohort_size)
    dealt = order.reshape(groups, devices, lanes)
    dealt = jnp.where((jnp.arange(groups) % 2 == 0)[:, None, None], dealt, dealt[:, ::-1])
    return dealt.swapaxes(0, 1).reshape(-1)


def _stream(rule: ClientRule, lanes: int, key: Key, ids: jax.Array, kept: Any, context: Any) -> Any:
    """One device's share: groups of lanes one after the other, the weighted sum carried along."""

    def one(client: jax.Array, kept: Any) -> ClientUpdate:
        update = rule(jax.random.fold_in(key, client), client, kept, context)
        weight = jax.tree.map(lambda w: jnp.where(client >= 0, w, 0), update.weight)
        return update._replace(upload=weigh(update.upload, weight), weight=())

    def group(ids: jax.Array, kept: Any) -> ClientUpdate:
        if lanes == 1:
            update = one(ids[0], jax.tree.map(lambda leaf: leaf[0], kept))
            kept, outputs = jax.tree.map(lambda leaf: leaf[None], (update.kept, update.outputs))
            return update._replace(kept=kept, outputs=outputs)
        update = jax.vmap(one)(ids, kept)
        return update._replace(upload=jax.tree.map(lambda leaf: jnp.sum(leaf, 0), update.upload))

    def step(total: WeightedSum, inputs: Any) -> tuple[WeightedSum, Any]:
        update = group(*inputs)
        return jax.tree.map(jnp.add, total, update.upload), (update.kept, update.outputs)

    inputs = jax.tree.map(lambda leaf: leaf.reshape(-1, lanes, *leaf.shape[1:]), (ids, kept))
    shapes = jax.eval_shape(group, *jax.tree.map(lambda leaf: leaf[0], inputs))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.upload)
    total, outputs = jax.lax.scan(step, zero, inputs)
    return total, *jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)


def map_lanes(function: Callable[[Any], Any], inputs: Any, *, lanes: int | None = None) -> Any:
    """`function` over the leading axis of `inputs`, results stacked; `lanes` as in `run_cohort`."""
    count = jax.tree.leaves(inputs)[0].shape[0]
    lanes = min(count, lanes or (1 if jax.default_backend() == "cpu" else count))
    return jax.lax.map(function, inputs, batch_size=None if lanes == 1 else lanes)
