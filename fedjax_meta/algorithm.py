"""What runs: an `Algorithm`, a method and a federation put together, as pure functions of (key, state, data)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.hardware import Devices
from fedjax_meta.rows import positions_among
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Variables
from fedjax_meta.uploads import Message


class Aggregation(NamedTuple):
    """What the server keeps for the aggregation of uploads.

    Attributes:
      uploads: for each upload transformation what it keeps at the server, `()` if nothing.
      rule: what an `aggregate.Rule` keeps, for each part of an upload that has a weight of its own.
      past: under an asynchronous schedule, the last values of the leaves that the server changes, `[most_stale + 1, ...]`.
    """

    uploads: PyTree
    rule: PyTree
    past: PyTree = ()


class State(NamedTuple):
    """What the next round reads.

    Attributes:
      model: the server's model, whole. Personal leaves keep their initial values here, unless they are averaged too.
      optimizer: slots of the server optimiser.
      extra: what else the server keeps (control variates, centroids, averaged moments).
      aggregation: what the federation's upload transformations and aggregator keep at the server.
      personal: personal leaves of all clients, each `[N, ...]`; `None` where a leaf is not personal.
      memory: what else each client keeps from round to round (a second model, its control variate), leaves `[N, ...]`; zeros
        until the client first takes part.
      residual: what upload transformations keep of each client, leaves `[N, ...]`.
      seen: bool `[N]`, whether a client has taken part yet. A client that has not starts from the server's leaves and a fresh
        memory.
      ids: int32 `[N]`, whose rows these are: `arange(N)` where all of a population train.
      round: int32 scalar, the number of finished rounds.

    On several CPU devices of one process, JAX takes a state apart (as it does when a state is handed to a jitted function) only
    after the round that makes it has finished. XLA's CPU client has a thread for each device; a Python loop that is many rounds
    ahead of them can leave one waiting for another until XLA aborts the process.
    """

    model: PyTree
    optimizer: PyTree
    extra: PyTree
    aggregation: Aggregation
    personal: PyTree
    memory: PyTree
    residual: PyTree
    seen: jax.Array
    ids: jax.Array
    round: jax.Array


def _children(state: State) -> tuple[Any, ...]:
    """The fields of a state, whose round has finished if it runs on several CPU devices, see `State`."""
    made = state.round
    if isinstance(made, jax.Array) and not isinstance(made, jax.core.Tracer):
        devices = made.devices()
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            made.block_until_ready()
    return tuple(state)


jax.tree_util.register_pytree_with_keys(
    State,
    lambda state: (tuple(zip(map(jax.tree_util.GetAttrKey, State._fields), _children(state), strict=True)), None),
    lambda _, children: State(*children),
    lambda state: (_children(state), None),
)


ROWS = ("personal", "memory", "residual", "seen", "ids")
"""Fields of a `State` whose leaves are `[N, ...]`."""


class Faults(NamedTuple):
    """What was not finite in a round. Leaves are counted as `Algorithm.checked` lists them; -1 means none.

    Attributes:
      clients: int32 `[C]`, for each client the first leaf of its result that holds NaN or infinity. Such a client was left out of
        the round: nothing of it was used, and it keeps what it had.
      server: int32 scalar, the first such leaf of what the server keeps after the round.
      diverged: bool scalar, whether the server's leaves are not finite, or more clients were left out than
        `Federation.max_dropped` allows.
    """

    clients: jax.Array
    server: jax.Array
    diverged: jax.Array


class RoundInfo(NamedTuple):
    """Diagnostics of one round; no later round reads them.

    Attributes:
      ids: int32 `[C]`, the clients of the cohort; -1 for an empty place.
      metrics: what the clients measured, each `[C]`, or a scalar for the cohort as a whole.
      returned: bool `[C]`, whose results reached the server and count; all when `None`.
      positions: int32 `[C]`, theirs in the data; differs from `ids` when the data are a subset, the same when `None`.
      faults: what was not finite; not known when `None`.
    """

    ids: jax.Array
    metrics: dict[str, jax.Array]
    returned: jax.Array | None = None
    positions: jax.Array | None = None
    faults: Faults | None = None


def with_metrics(what: str, metrics: dict[str, jax.Array], more: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The metrics of a round's clients, and more that `what` measures.

    Raises:
      ValueError: a name that both have.
    """
    twice = sorted(set(metrics) & set(more))
    if twice:
        raise ValueError(f"{what} measures {twice[0]!r}, which is a metric of its clients, too: give theirs another name")
    return metrics | more


class Exchange(NamedTuple):
    """What travels between the server and ONE client in a round: trees of `jax.ShapeDtypeStruct`.

    Attributes:
      down: what the client downloads.
      averaged: what it uploads to be averaged, or aggregated in another way.
      separate: what it uploads that the server sees by itself.
      message: the size of an averaged leaf on the wire, after the upload transformations.
    """

    down: PyTree
    averaged: PyTree
    separate: PyTree
    message: Callable[[Any], Message]


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm:
    """A method in a federation, ready to run.

    Attributes:
      init: `(key, data) -> State`.
      round: `(key, state, data) -> (State, RoundInfo)`; the state keeps its structure, shapes and dtypes.
      personalize: `(key, state, support, client, num_clients=None) -> variables`: the model that one client tests with, after
        whatever the method does with its support view. `client` is the row of a client in the state, or `None` for a new
        client, which is none of the N. `num_clients` is N where the state holds the rows of some clients only.
      predict: `(variables, x [B, ...]) -> outputs [B, ...]`, as `Task.predict`.
      exchange: `data -> Exchange`; nothing is computed. See `costs.traffic`.
      cohort: `(key of the round, round, N) -> ids [C]`. A round needs the rows and data of these clients only, so that the
        others need not be on a device. See `host_store`.
      config: the method's and the federation's name and hyper-parameters, as JSON values.
      checked: `data -> (names of a client's leaves, names of the server's leaves)`, to which `Faults` refers.
      devices, lanes: of the federation; `evaluate` uses the same by default.
      needs_all_rows: whether a round reads the rows of clients outside its cohort, so that a host store is refused.
      task: what is learned; `None` for a method that was put together by hand.
    """

    init: Callable[[Key, FederatedData], State]
    round: Callable[[Key, State, FederatedData], tuple[State, RoundInfo]]
    personalize: Callable[..., Variables]
    predict: Callable[[Variables, Any], jax.Array]
    exchange: Callable[[FederatedData], Exchange]
    cohort: Callable[[Key, Any, int], jax.Array]
    config: Mapping[str, Any]
    checked: Callable[[FederatedData], tuple[Sequence[str], Sequence[str]]] | None = None
    devices: Devices = None
    lanes: int | None = None
    needs_all_rows: bool = False
    task: Task | None = None


def check_state(state: State, wanted: State) -> None:
    """Raises `ValueError` unless a state has the structure, shapes and types of another."""
    odd = checks.mismatch(state, wanted)
    if odd is not None:
        raise ValueError(f"state does not fit: {odd}; is it of another algorithm, model or number of clients?")


def check_clients(state: State, data: FederatedData) -> None:
    """Raises `ValueError` unless the rows of a state are those of the clients of data; `[M, N]` ids are of M states."""
    found, wanted = np.asarray(state.ids), np.asarray(row_ids(data))
    odd = np.argwhere(found != wanted)
    if len(odd):
        at = tuple(odd[0])
        raise ValueError(
            f"row {at[-1]} of the state is of client {found[at]}, but there the data have client {wanted[at[-1]]}: give the data "
            "of the clients that trained, in their order"
        )


def row_ids(data: FederatedData) -> jax.Array | np.ndarray:
    """The ids of the clients whose rows `Algorithm.init` makes for these data, int32 `[N]`."""
    if data.num_clients == data.total_clients:
        return np.arange(data.num_clients, dtype=np.int32)
    return data.ids_of(np.arange(data.num_clients))


def check_distinct(data: FederatedData) -> None:
    """Raises `ValueError` where a client is there twice: it has one row, which two places would write."""
    if data.ids is None:
        return
    found, counts = np.unique(np.asarray(data.ids), return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"client {found[counts > 1][0]} was selected {counts[counts > 1][0]} times: select each client once")


def check_one_run(state: State) -> None:
    """Raises `ValueError` for the state of a sweep."""
    if state.seen.ndim != 1:
        raise ValueError(
            f"the state holds the {state.seen.shape[0]} members of a sweep: give that of one, "
            "jax.tree.map(lambda leaf: leaf[0], state)"
        )


def check_known(data: FederatedData, trained: Any) -> None:
    """Raises `ValueError` unless data can be of clients of a training: of all, or of some that say so (`ids`, `population`).

    Args:
      data: clients that are said to be those of the training.
      trained: ids of the clients of the training, int32 `[N]`; where they are traced, only their number is looked at.
    """
    population = trained.shape[0]
    if data.total_clients < population or (data.ids is None and data.total_clients != population):
        among = "" if data.ids is None else f" of a population of {data.total_clients}"
        raise ValueError(
            f"known=True, but the data have {data.num_clients} clients{among} and the training had {population}: "
            "give known=False for clients that did not train, or the data of all that did, of which data.select(...) or ids=... "
            "may choose some"
        )
    most = -1 if isinstance(trained, jax.core.Tracer) else int(np.max(np.asarray(trained), initial=-1))
    if most >= data.total_clients:
        raise ValueError(
            f"known=True, but client {most} trained, and the data number their clients from 0 to {data.total_clients - 1}: "
            "select them, by data.select(...) or ids=..., from the data from which those of the training were selected"
        )


def state_rows(state: State, data: FederatedData, positions: jax.Array) -> jax.Array:
    """The rows that a round reads and writes for the clients at `positions` of the data, int32 like `positions`.

    Where the data are a subset of the population, a state may hold the rows of all clients or those of this subset,
    in its order; with data that a host store has picked (`FederatedData.drawn`), it holds the rows of these.

    Raises:
      ValueError: it holds neither.
    """
    rows = state.seen.shape[0]
    if data.ids is None or data.drawn is not None or rows == data.num_clients < data.total_clients:
        return positions
    if rows != data.total_clients:
        raise ValueError(
            f"the state has rows of {rows} clients, but the data are {data.num_clients} of {data.total_clients} clients: the "
            "state must have the rows of these or of all"
        )
    return jnp.asarray(data.ids_of(positions))


def training_size(state: State, data: FederatedData) -> int:
    """N of a training: the clients that have rows, on the device or in a host store; a round's data may be of some of them."""
    return state.seen.shape[0] if data.drawn is None else data.drawn


def rows_with_ids(state: State, ids: jax.Array | np.ndarray, population: int) -> jax.Array | np.ndarray:
    """The rows of a state that belong to clients, int32 like `ids`; -1 for a client that has none.

    Args:
      ids: int32 `[N']`.
      population: number of clients of which the ids are.
    """
    if not isinstance(state.ids, jax.core.Tracer) and not isinstance(ids, jax.core.Tracer):
        # On the host, because the state and the data may be on different devices.
        return positions_among(np.asarray(ids), np.asarray(state.ids))
    places = jnp.arange(state.ids.shape[0], dtype=jnp.int32)
    return jnp.full(population, -1, jnp.int32).at[state.ids].set(places, mode="drop")[ids]


def check_support(support: Any) -> None:
    """Raises `ValueError` unless `support` is a view of one client."""
    if not isinstance(support, ClientView):
        raise ValueError(
            f"support must be a view of one client, e.g. data.client(0)['test_support'], not {type(support).__name__}"
        )
