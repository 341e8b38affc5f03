"""Copies of a few clients' samples, for data that stay on the host while cohorts go to the device.

Axis letters: N' chosen clients, S samples.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import runs
from fedjax_meta.data.federated import FederatedData

Array = jax.Array | np.ndarray
"""Of the device or of the host."""


def pack(data: FederatedData, clients: np.ndarray, capacity: int) -> FederatedData:
    """Like `data.select(clients)`, but by NumPy and with a copy of these clients' samples only.

    Args:
      data: clients whose arrays are on the host.
      clients: int `[N']`, distinct positions; -1 for an empty place, which gets no samples.
      capacity: number of samples that the copy has space for. With `capacity(data, N')`, the shapes are the same for any
        N' clients.

    Returns:
      The clients with arrays `[capacity, ...]` in `x` and `y`; unused rows are 0.

    Raises:
      ValueError: clients with more than `capacity` samples.
    """
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    clients = np.asarray(clients)
    checks.indices("clients", clients[clients >= 0], data.num_clients)
    start = {name: np.where(clients < 0, 0, np.asarray(values)[clients]) for name, values in data.start.items()}
    size = {name: np.where(clients < 0, 0, np.asarray(values)[clients]) for name, values in data.size.items()}
    begin, length = _extents(start, size)
    first = np.cumsum(length) - length
    checks.count("capacity", capacity)
    if length.sum() > capacity:
        raise ValueError(f"capacity={capacity} must be at least {length.sum()}, the number of samples of these clients")
    where = runs.positions(begin, length)

    def packed(values: Array) -> np.ndarray:
        # The unused rows must hold numbers: samples of weight 0 are read too.
        array = np.zeros((capacity, *values.shape[1:]), values.dtype)
        np.take(values, where, 0, out=array[: len(where)], mode="clip")  # the default mode would buffer `out`
        return array

    return dataclasses.replace(
        data,
        x=jax.tree.map(packed, data.x),
        y=jax.tree.map(packed, data.y),
        start={name: (values - begin + first).astype(np.int32) for name, values in start.items()},
        size=size,
        ids=data.ids_of(clients),
        population=data.total_clients,
    )


def capacity(data: FederatedData, count: int) -> int:
    """Maximum number of samples that any `count` clients hold together."""
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.count("count", count)
    _, length = _extents(data.start, data.size)
    return int(np.sort(length)[-count:].sum())


def _extents(start: Mapping[str, Array], size: Mapping[str, Array]) -> tuple[np.ndarray, np.ndarray]:
    """(first sample, number of samples) of each client, `[N]` each, over all views; they cover one contiguous run."""
    begin = np.min([np.asarray(values) for values in start.values()], 0)
    end = np.max([np.asarray(start[name]) + np.asarray(size[name]) for name in size], 0)
    return begin, end - begin
