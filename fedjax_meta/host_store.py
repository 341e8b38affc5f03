"""A store on the host for what clients keep: in memory or in files, while only a cohort is on the device.

A round needs the rows and the data of its cohort only (`Algorithm.cohort`). While the device runs a round, the host writes the
rows of the round before and reads rows and samples of the next one, so that the cost of a round does not depend on the number of
clients. Axis letters: N clients, C cohort.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import disk, placement, runtime
from fedjax_meta.algorithm import ROWS, Algorithm, State
from fedjax_meta.data import FederatedData
from fedjax_meta.data.packing import pack
from fedjax_meta.keys import is_key
from fedjax_meta.numerics.axes import leading
from fedjax_meta.rows import positions_among
from fedjax_meta.types import Key

MEMORY = "memory"
"""Pass this instead of a folder to use host memory."""

_PART_BYTES = 2**26


def initial_state(algorithm: Algorithm, key: Key, data: FederatedData, where: str | Path) -> State:
    """The state that `algorithm.init` returns, computed part by part, with its rows `[N, ...]` as NumPy arrays on the host.

    Args:
      algorithm: what will run.
      key: as for `algorithm.init`.
      data: the N clients.
      where: "memory", or a folder (`Path("memory")` is one) for files that are mapped into memory. The files are scratch space of
        the run: they change with every round and disappear with the state. Checkpoints hold copies of their own.

    Raises:
      OSError: the folder cannot be made or written.
      ValueError: more bytes than are free there, a method that reads the rows of all clients, several processes, clients that
        keep a PRNG key.
    """
    check_algorithm(algorithm)
    part_of = jax.jit(lambda key, data, ids: algorithm.init(key, data.select(ids)))
    like = state_shapes(algorithm, key, data)
    rows = _allocate(like, where)
    for ids in client_ranges(data.num_clients, row_bytes(like)):
        state = part_of(key, data, ids)
        write_rows(rows, ids, _rows(state))
    return state._replace(**rows)


def move_to_host(state: State, where: str | Path) -> State:
    """A state with its rows copied to the host; `where` and errors as in `initial_state`."""
    rows = _allocate(state, where)
    for ids in client_ranges(state.seen.shape[0], row_bytes(state)):
        write_rows(rows, ids, jax.tree.map(lambda leaf, ids=ids: leaf[ids[0] : ids[-1] + 1], _rows(state)))
    return state._replace(**rows)


def state_shapes(algorithm: Algorithm, key: Key, data: FederatedData) -> State:
    """The shapes of `algorithm.init(key, data)`; does not check whether a device has room for them."""
    one = jax.eval_shape(lambda key, data: algorithm.init(key, data.select(np.zeros(1, np.int32))), key, data)

    def of_all(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((data.num_clients, *leaf.shape[1:]), leaf.dtype)

    return one._replace(**jax.tree.map(of_all, _rows(one)))


def check_algorithm(algorithm: Algorithm) -> None:
    """Raises `ValueError` unless what the clients of an algorithm keep can be in a host store."""
    if algorithm.needs_all_rows:
        name = algorithm.config.get("method", "this method")
        raise ValueError(
            f"store: {name} reads what all clients keep in each round, so that their rows must be on the device; run it "
            "without a store"
        )
    if jax.process_count() > 1:
        raise ValueError(f"store: a host store belongs to one process, but this run has {jax.process_count()}")


def split_rows(state: State) -> tuple[State, dict[str, Any]]:
    """(the state without its rows, the rows of the clients by field)."""
    nothing: dict[str, Any] = dict.fromkeys(ROWS)
    return state._replace(**nothing), _rows(state)


def read_rows(state: State, ids: np.ndarray) -> dict[str, Any]:
    """A copy of the rows of some clients, int `[n]`, by field."""
    return jax.tree.map(lambda leaf: leaf[ids], _rows(state))


def write_rows(rows: dict[str, Any], ids: np.ndarray, new: dict[str, Any]) -> None:
    """Writes rows in place, none for a negative id; waits for a device that is still computing them."""
    real = np.flatnonzero(ids >= 0)
    everyone = len(real) == len(ids)

    def write(leaf: np.ndarray, values: Any) -> None:
        leaf[ids[real]] = np.asarray(values)[: len(ids)] if everyone else np.asarray(values)[real]

    jax.tree.map(write, rows, new)


def subset(state: State, data: FederatedData, rows: np.ndarray, places: np.ndarray) -> tuple[State, FederatedData, jax.Array]:
    """(state, data, places) of some clients only."""
    return state._replace(**read_rows(state, rows)), data.select(places), jnp.arange(len(places), dtype=jnp.int32)


def client_ranges(count: int, each: float, *, most: int = 2**16) -> Iterator[np.ndarray]:
    """Ids 0 to `count` in ranges of equal length, the last may be shorter; each takes at most 64 MB at `each` bytes a client."""
    step = int(np.clip(_PART_BYTES // max(each, 1), 1, most))
    for first in range(0, count, step):
        yield np.arange(first, min(first + step, count), dtype=np.int32)


def row_bytes(state: State) -> int:
    """Bytes that one client keeps."""
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(_rows(state)))


def place_samples(data: FederatedData, place: Callable[[Any], Any]) -> FederatedData:
    """The data with their samples where they will stay: NumPy arrays on the host, others where `place` puts them."""
    start, size = jax.tree.map(np.asarray, (data.start, data.size))
    if not _on_host(data):
        data = place(data)
    return dataclasses.replace(data, start=start, size=size, ids=None if data.ids is None else np.asarray(data.ids))


def run_pipelined(
    step: Callable[..., Any],
    state: State,
    cohorts: np.ndarray,
    fetch: Callable[[np.ndarray], Any],
    place: Callable[[Any], Any],
) -> tuple[State, list[Any]]:
    """Rounds one after the other, while the host reads and writes rows and samples.

    Args:
      step: `(shared, rows, before, again, data) -> (shared, rows, line)`, a round of a cohort and its line of the log; see
        `newest_rows`.
      state: its rows are written in place.
      cohorts: int `[rounds, C]`.
      fetch: `ids -> (rows, data)` of a cohort on the device; does not wait for the transfer.
      place: puts other arrays on the device.

    Returns:
      (state, the lines of the log).
    """
    shared, rows = split_rows(state)
    log: list[Any] = []
    before: Any = None
    came, data = fetch(cohorts[0])
    for number, ids in enumerate(cohorts):
        again = positions_among(ids, cohorts[number - 1]) if number else np.full(len(ids), -1, np.int32)
        again = np.where(ids < 0, -1, again)  # an empty place is nobody
        shared, after, line = step(shared, came, came if before is None else before, place(again), data)
        log.append(line)
        # The device is busy with this round: the host moves rows meanwhile.
        if before is not None:
            write_rows(rows, cohorts[number - 1], before)
        if number + 1 < len(cohorts):
            came, data = fetch(cohorts[number + 1])
        before = after
    write_rows(rows, cohorts[-1], before)
    return shared._replace(**rows), log


def cohort_data(data: FederatedData, ids: np.ndarray, room: int) -> FederatedData:
    """The data of some clients; samples in NumPy arrays, which stay on the host, are copied. An id of -1 is an empty place."""
    if _on_host(data):
        some = pack(data, ids, room)
    else:
        some = data.select(np.maximum(ids, 0))
        size = {name: np.where(ids < 0, 0, values) for name, values in some.size.items()}
        some = dataclasses.replace(some, size=size, ids=data.ids_of(ids))
    return dataclasses.replace(some, drawn=data.num_clients)


def _on_host(data: FederatedData) -> bool:
    return all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((data.x, data.y)))


def newest_rows(came: Any, before: Any, again: jax.Array) -> Any:
    """Rows `[C, ...]` as the host has them, but those of clients that were in the round before taken from its result.

    Args:
      came: rows that were read while the round before ran.
      before: the result of that round.
      again: int `[C]`, the position of each client in that round's cohort; -1 where it was not in it.
    """

    def newest(old: jax.Array, result: jax.Array) -> jax.Array:
        return jnp.where(leading(again >= 0, old), result[jnp.maximum(again, 0)], old)

    return jax.tree.map(newest, came, before)


def _rows(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ROWS}


def _allocate(like: State, where: str | Path) -> dict[str, Any]:
    """Arrays for rows like those of a state, if there is room for them."""
    leaves: Sequence[Any] = jax.tree.leaves(_rows(like))
    if any(map(is_key, leaves)):
        raise ValueError(
            "store: clients of this method keep a PRNG key, which NumPy cannot store; keep its `jax.random.key_data`"
        )
    count, each = like.seen.shape[0], row_bytes(like)
    need = count * each
    if where == MEMORY:
        free, place = runtime.free_host_bytes(), "this host's memory"
    else:
        Path(where).mkdir(parents=True, exist_ok=True)
        free, place = shutil.disk_usage(where).free, str(where)
    sizes = f"{placement.amount(need)} in {place} (N={count} clients, {placement.amount(each)} each)"
    placement.announce(sizes, need, free)
    if need > free:
        raise ValueError(f"store: what clients keep takes {sizes}, but only {placement.amount(free)} are free")

    def array(leaf: Any) -> np.ndarray:
        if where == MEMORY or 0 in leaf.shape:
            return np.empty(leaf.shape, leaf.dtype)
        return disk.unnamed_map(where, leaf.dtype, leaf.shape)

    try:
        return jax.tree.map(array, _rows(like))
    except OSError as error:
        raise OSError(f"store: could not take {sizes}: {error.strerror or error}") from error
