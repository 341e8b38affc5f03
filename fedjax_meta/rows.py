"""What clients keep, on the devices: rows stay on the device that has them, and are read and written in place.

Of N clients, device d of D has the rows from d N/D on where D divides N, and all rows otherwise. A cohort's client runs where its
row is, unless that device has more work than its share. Then its row travels to the device that runs it, and back: a sum over
devices, to which all but one add zeros.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import runtime
from fedjax_meta.keys import is_key
from fedjax_meta.types import PyTree

REMOTE_BYTES, REMOTE_LEAST = 2**23, 8
"""Rows that may be remote in a round, i.e. travel to another device: as many as have so many bytes, and at least so many."""


class Where(NamedTuple):
    """Where the row of the client in a slot is, int32 `[slots]` each.

    Attributes:
      at: its place among the rows of the device that runs it; -1 if it is not there.
      via: its place among the travelling rows; -1 if it does not travel.
    """

    at: jax.Array
    via: jax.Array


class Remote(NamedTuple):
    """The rows that travel to a device that does not own them.

    Attributes:
      rows: int32 `[room]`, of the population; -1 for an empty place.
      number: int32 scalar, how many there are, in front.
    """

    rows: jax.Array
    number: jax.Array


class Held(NamedTuple):
    """What a device has in a round.

    Attributes:
      mine: its rows, leaves `[n, ...]`.
      received: the rows that travel, as they were, leaves `[room, ...]`.
      renewed: what became of those that travelled to this device, and zeros.
    """

    mine: PyTree
    received: PyTree
    renewed: PyTree


class Layout(NamedTuple):
    """How the rows of a population lie on devices.

    Attributes:
      devices: their number D.
      each: how many rows a device has.
      divided: whether devices have different rows.
      room: how many rows can travel.
      axis: name of the mesh axis.
    """

    devices: int
    each: int
    divided: bool
    room: int
    axis: str

    @classmethod
    def of(cls, kept: PyTree, cohort_size: int, devices: int, axis: str) -> "Layout":
        """The layout of leaves `[N, ...]` for cohorts of C clients."""
        leaves = jax.tree.leaves(kept)
        if not leaves:
            return cls(devices, 0, False, 0, axis)
        count = leaves[0].shape[0]
        divided = devices > 1 and count % devices == 0
        room = 0 if devices == 1 else cohort_size
        if divided:
            one = runtime.size_in_bytes(leaves) // count
            room = min(cohort_size, max(REMOTE_LEAST, REMOTE_BYTES // max(one, 1)))
        return cls(devices, count // devices if divided else count, divided, room, axis)

    def here(self) -> Any:
        """The number of the device that asks."""
        return jax.lax.axis_index(self.axis) if self.devices > 1 else 0

    def owners(self, rows: jax.Array) -> jax.Array | None:
        """The device that has each row, int32 `[C]`; `None` where it makes no difference which device runs a client."""
        return jnp.maximum(rows, 0) // self.each if self.divided and self.room < rows.shape[0] else None

    def routes(self, rows: jax.Array, slots: jax.Array) -> tuple[Where, Remote]:
        """For the rows of a cohort, int32 `[C]`, and the member that each slot runs (see `engine._assign`)."""
        runner = jnp.repeat(jnp.arange(self.devices, dtype=jnp.int32), slots.shape[0] // self.devices)
        row = rows.at[slots].get(mode="fill", fill_value=-1)
        at = self._local(row, runner)
        if not self.room:
            return Where(at, jnp.full_like(at, -1)), Remote(jnp.zeros(0, jnp.int32), jnp.zeros((), jnp.int32))
        travels = (at < 0) & (row >= 0) if self.divided else row >= 0
        place = jnp.cumsum(travels, dtype=jnp.int32) - 1
        remote = jnp.full(self.room, -1, jnp.int32).at[jnp.where(travels, place, self.room)].set(row, mode="drop")
        return Where(at, jnp.where(travels, place, -1)), Remote(remote, jnp.sum(travels, dtype=jnp.int32))

    def begin(self, kept: PyTree, remote: Remote) -> Held:
        """What this device has before its first client; the first exchange."""
        mine = jax.tree.map(_raw, kept)
        empty = jax.tree.map(lambda leaf: jnp.zeros((self.room, *leaf.shape[1:]), leaf.dtype), mine)
        if not (self.divided and self.room):
            return Held(mine, (), empty if self.room else ())

        def pack(k: Any, received: PyTree) -> PyTree:
            at = self._local(remote.rows[k], self.here())
            return put(received, jnp.where(at < 0, -1, k)[None], _take(mine, at[None]))

        return Held(mine, self._summed(jax.lax.fori_loop(0, remote.number, pack, empty)), empty)

    def read(self, held: Held, where: Where, like: PyTree) -> PyTree:
        """The rows of the clients of a group, leaves `[lanes, ...]` of the types of `like`."""
        rows = _take(held.mine, where.at)
        if self.divided and self.room:

            def either() -> PyTree:
                received = _take(held.received, where.via)
                return jax.tree.map(lambda here, there: _choose(where.at >= 0, here, there), rows, received)

            # A branch makes a copy of the rows. Otherwise XLA reads them again where others are written, and copies all for that.
            rows = jax.lax.cond(jnp.any(where.at >= 0), either, lambda: _take(held.received, where.via))
        return jax.tree.map(_typed, rows, like)

    def write(self, held: Held, where: Where, new: PyTree) -> Held:
        """With the rows of a group renewed."""
        new = jax.tree.map(_raw, new)
        # Where all devices have all rows, each learns what became of a row in the last exchange.
        mine = put(held.mine, where.at, new) if self.divided or self.devices == 1 else held.mine
        return held._replace(mine=mine, renewed=put(held.renewed, where.via, new) if self.room else ())

    def end(self, held: Held, remote: Remote, like: PyTree) -> PyTree:
        """The rows of this device after its last client, with those that came back; `held.renewed` is what was exchanged."""
        mine = held.mine
        if self.room:

            def unpack(k: Any, mine: PyTree) -> PyTree:
                at = self._local(remote.rows[k], self.here())
                return put(mine, at[None], _take(held.renewed, k[None]))

            mine = jax.lax.fori_loop(0, remote.number, unpack, mine)
        return jax.tree.map(_typed, mine, like)

    def _local(self, rows: jax.Array, device: Any) -> jax.Array:
        """The places of rows on a device, -1 where it does not have them."""
        at = rows - device * self.each if self.divided else rows
        return jnp.where((rows >= 0) & (at >= 0) & (at < self.each), at, -1)

    def _summed(self, tree: PyTree) -> PyTree:
        """The sum over devices of trees of which all but one are zeros at any place, bit for bit."""
        return self.exchanged((), tree, ())[1]

    def exchanged(self, total: PyTree, outputs: PyTree, renewed: PyTree) -> tuple[Any, Any, Any]:
        """Sums `total`, `outputs` and `renewed` over devices, with one collective per dtype; the last two as in `_summed`."""
        if self.devices == 1:
            return total, outputs, renewed
        total, words = jax.lax.psum((total, jax.tree.map(_words, (outputs, renewed))), self.axis)
        return total, *jax.tree.map(_numbers, words, (outputs, renewed))


def _take(tree: PyTree, at: jax.Array) -> PyTree:
    """Rows `[lanes, ...]`; any row where `at` is -1."""
    if at.shape[0] > 1:
        return jax.tree.map(lambda leaf: leaf.at[at].get(mode="clip"), tree)
    # A slice is copied faster than a row is gathered.
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, jnp.maximum(at[0], 0), 1), tree)


def put(tree: PyTree, at: jax.Array, new: PyTree) -> PyTree:
    """A tree with new rows at `at`, int32 `[lanes]`, distinct but for -1, where nothing changes."""
    if at.shape[0] > 1:
        # A GPU sorts all numbers that it scatters to places which may be the same.
        nowhere = jnp.arange(at.shape[0], dtype=at.dtype)

        def written(leaf: jax.Array, rows: jax.Array) -> jax.Array:
            distinct = jnp.where(at < 0, len(leaf) + nowhere, at)
            return leaf.at[distinct].set(rows, mode="drop", unique_indices=True)

        return jax.tree.map(written, tree, new)
    new = jax.tree.map(lambda rows, old: _choose(at >= 0, rows, old), new, _take(tree, at))
    put = jax.lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda leaf, rows: put(leaf, rows, jnp.maximum(at[0], 0), 0), tree, new)


def _choose(condition: jax.Array, rows: jax.Array, others: jax.Array) -> jax.Array:
    return jnp.where(condition.reshape(-1, *[1] * (rows.ndim - 1)), rows, others)


def _raw(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _typed(raw: jax.Array, like: jax.Array) -> jax.Array:
    if not is_key(like):
        return raw
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(like))


def _words(leaf: jax.Array) -> jax.Array:
    """Its bits as uint32, so that rows of all types travel in one exchange and zeros change nothing, not even the sign of 0."""
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return _words(jnp.stack([leaf.real, leaf.imag], -1))
    width = 8 * min(leaf.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32)


def _numbers(words: jax.Array, like: jax.Array) -> jax.Array:
    """The leaf that has these words and the type of `like`."""
    if like.dtype == bool:
        return words.astype(bool)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = _numbers(words, jnp.stack([like.real, like.imag], -1))
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    width = 8 * min(like.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(words.astype(jnp.dtype(f"uint{width}")), like.dtype)


def positions_among(ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    """The position of each id in `among`, int32 like `ids`; -1 where it is not there."""
    order = np.argsort(among)
    found = order[np.minimum(np.searchsorted(among, ids, sorter=order), len(among) - 1)]
    return np.where(among[found] == ids, found, -1).astype(np.int32)
