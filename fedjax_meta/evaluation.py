"""Evaluation: each client personalises on its support view and predicts its query view.

The result keeps every client apart: confusion matrices `[N, K, K]` (rows true, columns predicted), from which all scores of
`metrics` follow afterwards, on a device or in NumPy.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, host_store, metrics
from fedjax_meta.algorithm import Algorithm, RoundInfo, State, state_rows
from fedjax_meta.contract import Method
from fedjax_meta.data import CHUNK, ClientView, FederatedData
from fedjax_meta.engine import ClientUpdate, client_mesh, run_cohort
from fedjax_meta.federation import Federation
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import as_algorithm
from fedjax_meta.types import Key, Variables

MANY_BYTES = 2**26
"""From this many bytes of rows on, clients are evaluated on the device that holds their rows instead of moving."""


class Evaluation(NamedTuple):
    """The results of N clients.

    Attributes:
      confusion: int32 `[N, K, K]`, true classes in rows, predicted ones in columns.
      loss: `[N]`, mean cross-entropy. Where it is not finite, the model has diverged and the confusion means nothing: take scores
        through `metrics.where_finite`, as `summary` does.
    """

    confusion: Any
    loss: Any

    def summary(self) -> dict[str, float]:
        """The numbers that papers print, see `metrics.summary`."""
        return metrics.summary(self.confusion, self.loss)


def evaluate(
    method: Method | Algorithm,
    key: Key,
    state: State,
    data: FederatedData,
    *,
    support: str = "test_support",
    query: str = "test_query",
    known: bool = True,
    ids: jax.Array | None = None,
    batch_size: int = CHUNK,
    lanes: int | None = None,
    devices: int | None = None,
    federation: Federation | None = None,
) -> Evaluation:
    """Lets every client personalise on its support view and predict its query view.

    Args:
      method: what was trained, or the algorithm that holds it.
      state: its state.
      key: a JAX key; client i of the population gets `fold_in(key, i)`.
      data: the clients to test.
      support, query: names of the views; a client never sees labels of its query view.
      known: whether client i of the population of `data` is client i of the training ("local" clients in the FedMeta-Per paper);
        otherwise none of the clients took part ("new" clients).
      ids: int32 `[N']`, which clients; all when not given.
      batch_size: the largest number of samples to predict at a time.
      lanes, devices: as in `engine.run_cohort`; those of the federation when not given.
      federation: in which the method was trained, if its `own_at_test` or `new_client` was not the default.

    Raises:
      ValueError: a view that the data do not have; known clients that outnumber those of the training; ids out of range; targets
        that are no classes, or logits of another number of classes than the data have.
    """
    algorithm = as_algorithm(method, federation)
    devices = algorithm.devices if devices is None else devices
    lanes = algorithm.lanes if lanes is None else lanes
    checks.prng_key("key", key)
    checks.instance("state", state, State, "algorithm.init(key, data)")
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.flag("known", known)
    data.sizes(support)
    population = state.seen.shape[0]
    if known and data.num_clients > population:
        raise ValueError(f"known=True, but the data have {data.num_clients} clients and the training had {population}")
    checks.count("batch_size", batch_size)
    if data.num_classes == 0:
        raise ValueError("the data have real targets (num_classes is 0): there are no classes to score")
    if ids is not None:
        checks.indices("ids", ids, data.num_clients)
        if np.ndim(ids) != 1 or not np.size(ids):
            raise ValueError(f"ids={checks.shown(ids)} must name at least one client, [N']")
    for option, value in (("lanes", lanes), ("devices", devices)):
        if value is not None:
            checks.count(option, value)
    in_order = ids is None and population == data.num_clients and (data.ids is None or population < data.total_clients)
    ids = jnp.arange(data.num_clients, dtype=jnp.int32) if ids is None else jnp.asarray(ids, jnp.int32)
    rows = state_rows(state, data, ids) if known else ids
    if known and isinstance(state.seen, np.ndarray):
        # The rows are on the host: only those of the asked clients go to the device.
        state, data, ids = host_store.subset(state, data, np.asarray(rows), np.asarray(ids))
        rows, in_order = ids, True
    state = jax.tree.map(jnp.asarray, state)
    # Few rows move with their clients to the device with the least work; many stay on the device that holds them.
    move = not in_order or client_mesh(devices).size * len(ids) * host_store.row_bytes(state) < MANY_BYTES
    own: Any = ()
    if known:
        state, own = host_store.split_rows(state)
        own = own if in_order else jax.tree.map(lambda leaf: leaf[rows], own)
    test = _Test(algorithm, support, query, batch_size, max(population, data.total_clients) if known else None)
    sizes = jnp.asarray(data.sizes(query))[ids]
    _, _, evaluation = run_cohort(
        test.of_client,
        key,
        data.ids_of(ids),
        sizes,
        (ids, own),
        (state, data),
        lanes=lanes,
        devices=devices,
        move=move or not known,
    )
    return evaluation


@dataclasses.dataclass(frozen=True, eq=False)
class _Test:
    """The test of one client; `population` is N of the training for known clients, `None` for new ones."""

    algorithm: Algorithm
    support: str
    query: str
    batch_size: int
    population: int | None

    def of_client(self, key: Key, id_: jax.Array, kept: Any, context: Any) -> ClientUpdate:
        state, data = context
        place, row = kept
        views = data.client(jnp.where(id_ < 0, -1, place))
        client = None
        if self.population is not None:
            state, client = state._replace(**jax.tree.map(lambda leaf: leaf[None], row)), 0
        variables = self.algorithm.personalize(key, state, views[self.support], client, self.population)
        return ClientUpdate((), kept, self.score(variables, views[self.query], data.num_classes))

    def score(self, variables: Variables, view: ClientView, classes: int) -> Evaluation:
        batches = view.in_chunks(self.batch_size)

        def step(t: Any, carry: Any) -> Any:
            confusion, total = carry
            batch = batches.get(t, 0)
            logits = self.algorithm.predict(variables, batch.x)
            size = len(batch.weight)
            if logits.shape != (size, classes):
                raise ValueError(
                    f"predict gives {logits.shape} for B={size} samples, but the data have K={classes} classes "
                    "(num_classes is the largest label plus 1 where the data were built without it)"
                )
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch.y)
            cell = batch.y * classes + jnp.argmax(logits, -1)
            confusion = confusion.at[cell].add(batch.weight.astype(jnp.int32))
            return confusion, total + jnp.sum(jnp.where(batch.weight > 0, losses * batch.weight, 0))

        start = (jnp.zeros(classes * classes, jnp.int32), jnp.zeros(()))
        confusion, total = jax.lax.fori_loop(0, batches.steps, step, start)
        return Evaluation(confusion.reshape(classes, classes), total / jnp.maximum(view.size, 1))


def with_user_accuracy(
    algorithm: Method | Algorithm,
    *,
    support: str = "test_support",
    query: str = "test",
    excluded: Any = (),
    lanes: int | None = None,
    devices: int | None = None,
) -> Algorithm:
    """The same algorithm with the user accuracy of MTFL (arXiv 2007.09236) as a metric of each round.

    User accuracy is the mean over the cohort, without the excluded clients, of the accuracy on the client's own test of the model
    with which the client starts the round: the server's with the client's personal leaves, personalised on `support` by methods
    that do so, before any local training. It becomes the metric "user_accuracy", a scalar, beside "user_accuracy_std", its
    population standard deviation over these clients; both are NaN where all clients of a cohort are excluded. The paper averages
    batches of 128 test samples, which is the same for up to 128 samples a client.

    Args:
      algorithm: what to run.
      support, query: names of the views.
      excluded: ids of clients that do not count (the paper's noisy ones).
      lanes, devices: as in `engine.run_cohort`.

    Raises:
      ValueError: on `round`, all clients excluded, an id out of range, a view that the data do not have.
    """
    excluded = checks.numeric("excluded", excluded, integers=True).astype(np.int64).reshape(-1)
    algorithm = as_algorithm(algorithm)
    for option, name in (("support", support), ("query", query)):
        checks.word(option, name)
    for option, value in (("lanes", lanes), ("devices", devices)):
        if value is not None:
            checks.count(option, value)
    if excluded.size and excluded.min() < 0:
        raise ValueError(f"excluded={checks.shown(excluded)} must hold ids of clients, from 0 on")

    def one_round(key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        clients = data.total_clients
        if excluded.size and not (excluded.min() >= 0 and excluded.max() < clients):
            raise ValueError(f"excluded={excluded} must hold ids of the N={clients} clients, from 0 on")
        counts = np.ones(clients, bool)
        counts[excluded] = False
        if not counts.any():
            raise ValueError(f"excluded leaves out all N={clients} clients: there is no user accuracy")
        after, info = algorithm.round(key, state, data)
        key = tagged(key, "user accuracy")
        scores = evaluate(
            algorithm, key, state, data, support=support, query=query, ids=info.places, lanes=lanes, devices=devices
        )
        counted = jnp.asarray(counts)[info.ids] & (info.ids >= 0)
        accuracy = metrics.where_finite(metrics.accuracy(scores.confusion), scores.loss)
        measured = {"user_accuracy": jnp.mean(accuracy, where=counted), "user_accuracy_std": jnp.std(accuracy, where=counted)}
        return after, info._replace(metrics={**info.metrics, **measured})

    return dataclasses.replace(algorithm, round=one_round)
