"""Clients that wait on the host: what they keep lies in its memory or in files, and only a cohort is on the device.

A round among the clients of its cohort alone is the round among all (`Algorithm.cohort`), so rounds need the others nowhere.
While the device runs one round, the host writes what the clients of the round before keep, and reads what those of the next one
keep and hold. What a round costs does not depend on how many clients wait. Axis letters: N clients, C cohort.
"""

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import engine, runtime
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.task import Key

MEMORY = "memory"
"""Names the host's own memory where a folder could be given."""

ROWS = ("personal", "memory", "seen")
"""Fields of a `State` whose leaves are `[N, ...]`."""

_PART_BYTES = 2**26


def begin(algorithm: Algorithm, key: Key, data: FederatedData, where: str | Path) -> State:
    """What `algorithm.init` returns, made part by part, with its rows `[N, ...]` as NumPy arrays on the host.

    Args:
      algorithm: whose state.
      key: consumed.
      data: the N clients.
      where: "memory", or a folder (`Path("memory")` is one) for files that are mapped into memory. The files are the run's
        scratch: they change with every round, and are gone when the state is. Checkpoints hold their own copies.

    Raises:
      OSError: the folder cannot be made or written.
      ValueError: more bytes than are free there, an algorithm without `cohort`, several processes, clients that keep a
        PRNG key.
    """
    check(algorithm)
    part_of = jax.jit(lambda key, data, ids: algorithm.init(key, data.select(ids)))
    like = shapes(algorithm, key, data)
    rows = _allocate(like, where)
    for ids in parts(data.num_clients, row_bytes(like)):
        state = part_of(key, data, ids)
        put(rows, ids, _rows(state))
    return state._replace(**rows)


def adopt(state: State, where: str | Path) -> State:
    """A state with its rows copied to the host; `where` and errors as in `begin`."""
    rows = _allocate(state, where)
    for ids in parts(state.seen.shape[0], row_bytes(state)):
        put(rows, ids, jax.tree.map(lambda leaf, ids=ids: leaf[ids[0] : ids[-1] + 1], _rows(state)))
    return state._replace(**rows)


def shapes(algorithm: Algorithm, key: Key, data: FederatedData) -> State:
    """The shapes of `algorithm.init(key, data)`, without a look at whether a device has room for them."""
    one = jax.eval_shape(lambda key, data: algorithm.init(key, data.select(np.zeros(1, np.int32))), key, data)

    def of_all(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((data.num_clients, *leaf.shape[1:]), leaf.dtype)

    return one._replace(**jax.tree.map(of_all, _rows(one)))


def check(algorithm: Algorithm) -> None:
    """Whether its clients can wait on the host.

    Raises:
      ValueError: they cannot.
    """
    if algorithm.cohort is None:
        raise ValueError("store: this algorithm has no `cohort`, so that nobody knows which rows a round needs")
    if jax.process_count() > 1:
        raise ValueError(f"store: a store belongs to one process, and this run has {jax.process_count()}")


def cohort(algorithm: Algorithm, key: Key, num_clients: int) -> jax.Array:
    """Whom the round of this key asks, `[C]`."""
    assert algorithm.cohort is not None  # see `check`
    return algorithm.cohort(key, num_clients)


def parted(state: State) -> tuple[State, dict[str, Any]]:
    """(what the server has, the rows of the clients by field)."""
    nothing: dict[str, Any] = dict.fromkeys(ROWS)
    return state._replace(**nothing), _rows(state)


def take(state: State, ids: np.ndarray) -> dict[str, Any]:
    """A copy of the rows of some clients, int `[n]`, by field."""
    return jax.tree.map(lambda leaf: leaf[ids], _rows(state))


def put(rows: dict[str, Any], ids: np.ndarray, new: dict[str, Any]) -> None:
    """Writes rows in place; waits for them where a device still computes them."""

    def write(leaf: np.ndarray, values: Any) -> None:
        leaf[ids] = np.asarray(values)[: len(ids)]

    jax.tree.map(write, rows, new)


def part(state: State, data: FederatedData, rows: np.ndarray, places: np.ndarray) -> tuple[State, FederatedData, jax.Array]:
    """(state, data, places) of some clients alone."""
    return state._replace(**take(state, rows)), data.select(places), jnp.arange(len(places), dtype=jnp.int32)


def parts(count: int, each: float, *, most: int = 2**16) -> Iterator[np.ndarray]:
    """Ids 0 to `count` in runs of equal length but for the last, each of at most 64 MB at `each` bytes a client."""
    step = int(np.clip(_PART_BYTES // max(each, 1), 1, most))
    for first in range(0, count, step):
        yield np.arange(first, min(first + step, count), dtype=np.int32)


def row_bytes(state: State) -> int:
    """Of what one client keeps."""
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(_rows(state)))


def settled(data: FederatedData, place: Callable[[Any], Any]) -> FederatedData:
    """The data with their samples where they will stay: NumPy arrays on the host, others where `place` puts them, once."""
    start, size = jax.tree.map(np.asarray, (data.start, data.size))
    if not _on_host(data):
        data = place(data)
    return dataclasses.replace(data, start=start, size=size, ids=None if data.ids is None else np.asarray(data.ids))


def run_rounds(
    step: Callable[..., Any],
    state: State,
    cohorts: np.ndarray,
    fetch: Callable[[np.ndarray], Any],
    place: Callable[[Any], Any],
) -> tuple[State, list[dict[str, Any]]]:
    """Rounds one after the other, with the reading and writing of rows and samples beside them.

    Args:
      step: `(shared, rows, before, again, data) -> (shared, rows, metrics)`, a round of a cohort; see `joined`.
      state: its rows are written in place.
      cohorts: int `[rounds, C]`.
      fetch: `ids -> (rows, data)` of a cohort where `step` wants them, without waiting.
      place: puts what else is needed there.

    Returns:
      (state, metrics by round).
    """
    shared, rows = parted(state)
    log: list[dict[str, Any]] = []
    before: Any = None
    came, data = fetch(cohorts[0])
    for number, ids in enumerate(cohorts):
        again = _places(ids, cohorts[number - 1]) if number else np.full(len(ids), -1, np.int32)
        shared, after, metrics = step(shared, came, came if before is None else before, place(again), data)
        log.append(metrics)
        # The device is at work on this round: time for the rows of its neighbours.
        if before is not None:
            put(rows, cohorts[number - 1], before)
        if number + 1 < len(cohorts):
            came, data = fetch(cohorts[number + 1])
        before = after
    put(rows, cohorts[-1], before)
    return shared._replace(**rows), log


def of_clients(data: FederatedData, ids: np.ndarray, room: int) -> FederatedData:
    """The data of some clients, with a copy of their samples where these are NumPy arrays, which stay on the host."""
    return data.extract(ids, room) if _on_host(data) else data.select(ids)


def _on_host(data: FederatedData) -> bool:
    return isinstance(data.x, np.ndarray) and isinstance(data.y, np.ndarray)


def joined(came: Any, before: Any, again: jax.Array) -> Any:
    """Rows `[C, ...]` as the host has them, with those of clients that were in the round before taken from its result.

    Args:
      came: read while that round ran.
      before: its result.
      again: int `[C]`, which of its clients each one was; -1 for none.
    """

    def newest(old: jax.Array, result: jax.Array) -> jax.Array:
        fresh = (again >= 0).reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(fresh, result[jnp.maximum(again, 0)], old)

    return jax.tree.map(newest, came, before)


def _places(ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    """For each id where it stands in `among`, -1 where it does not."""
    order = np.argsort(among)
    found = order[np.minimum(np.searchsorted(among, ids, sorter=order), len(among) - 1)]
    return np.where(among[found] == ids, found, -1).astype(np.int32)


def _rows(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ROWS}


def _allocate(like: State, where: str | Path) -> dict[str, Any]:
    """Arrays for rows like those of a state, after a look at whether there is room."""
    leaves: Sequence[Any] = jax.tree.leaves(_rows(like))
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
        raise ValueError("store: these clients keep a PRNG key, which no NumPy array holds; keep `jax.random.key_data` of it")
    count, each = like.seen.shape[0], row_bytes(like)
    need = count * each
    if where == MEMORY:
        free, place = runtime.free_host_bytes(), "this host's memory"
    else:
        Path(where).mkdir(parents=True, exist_ok=True)
        free, place = shutil.disk_usage(where).free, str(where)
    sizes = f"{engine.amount(need)} in {place} (N={count} clients, {engine.amount(each)} each)"
    engine.announce(sizes, need, free)
    if need > free:
        raise ValueError(f"store: what clients keep takes {sizes}, but only {engine.amount(free)} are free")

    def array(leaf: Any) -> np.ndarray:
        if where == MEMORY or 0 in leaf.shape:
            return np.empty(leaf.shape, leaf.dtype)
        # A file without a name: no other run can mistake it for its own, and it is gone with the array.
        with tempfile.TemporaryFile(dir=where) as file:
            if hasattr(os, "posix_fallocate"):
                # A disk that fills up later would end the process without a word.
                os.posix_fallocate(file.fileno(), 0, math.prod(leaf.shape) * leaf.dtype.itemsize)
            return np.memmap(file, leaf.dtype, "w+", shape=leaf.shape)

    try:
        return jax.tree.map(array, _rows(like))
    except OSError as error:
        raise OSError(f"store: could not take {sizes}: {error.strerror or error}") from error
