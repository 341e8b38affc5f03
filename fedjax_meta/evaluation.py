"""Evaluation: each client personalises on its support view and predicts its query view.

The result keeps every client apart: confusion matrices `[N, K, K]` (rows true, columns predicted), from which all scores of
`metrics` follow afterwards, on a device or in NumPy; or the scores `[N]` of any other `measures`.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, hardware, host_store, loops, measures, metrics
from fedjax_meta.algorithm import Algorithm, RoundInfo, State, check_known, check_one_run, rows_with_ids, with_metrics
from fedjax_meta.contract import Method
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.data.batches import real_samples
from fedjax_meta.engine import ClientUpdate, run_cohort
from fedjax_meta.federation import Federation
from fedjax_meta.hardware import Devices
from fedjax_meta.keys import tagged
from fedjax_meta.measures import CONFUSION, Metric, Score, resolve
from fedjax_meta.placement import on_devices
from fedjax_meta.rounds import as_algorithm
from fedjax_meta.task import Batch, LogitsLoss, MeanLoss, Weighted, cross_entropy
from fedjax_meta.types import Key, Variables

FEW_CLASSES = 128
"""Up to this number of classes a client's scores come from its confusion matrix by default."""


class Evaluation(NamedTuple):
    """The results of N clients.

    Attributes:
      confusion: int32 `[N, K, K]`, true classes in rows, predicted ones in columns, or float32 where targets have real weights;
        `None` if it was not measured.
      loss: `[N]`, the mean loss: of class labels the cross-entropy, else the task's loss (an opaque one as in training, e.g. with
        dropout). Where it is not finite, the model has diverged and the scores mean nothing: take them through
        `metrics.where_finite`, as `summary` does. `None` where the task's loss is an opaque function and the method predicts by
        more than the task's variables.
      metrics: the `measures.Score` of each other metric, by name.
    """

    confusion: Any
    loss: Any
    metrics: Mapping[str, Score] = {}

    def summary(self) -> dict[str, float]:
        """The numbers that papers print, see `metrics.summary`; mean and standard deviation over clients of other metrics.

        The metric "f1", over all classes, takes the place of the F1 of `metrics.summary`, where both were asked for.
        """
        found = {} if self.confusion is None else metrics.summary(self.confusion, self.loss)
        return found | metrics.summary_of_scores(
            {name: score.values for name, score in self.metrics.items()}, self.loss, with_loss=self.confusion is None
        )


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
    metrics: Sequence[Metric | str] | None = None,
    batch_size: int | None = None,
    lanes: int | None = None,
    devices: Devices = None,
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
        otherwise none of the clients took part ("new" clients). Known clients are all of the training, or some of the population
        that `data.select` or `ids` choose. Those of which the state has no row, because the training was of others, are tested
        like clients that have not taken part yet: with the server's leaves and a fresh memory.
      ids: int32 `[N']`, which clients; all when not given.
      metrics: what to measure beside the loss: names such as "accuracy", "top_5", "mae", or a `measures.Metric` of your own. By
        default what the task says, or for one class label a sample the confusion matrix, and for more than 128 classes
        `("accuracy", "top_5")`.
      batch_size: the largest number of samples to predict at a time; what suits the platform when not given.
      lanes, devices: as in `engine.run_cohort`; those of the federation when not given.
      federation: in which the method was trained, if its `own_at_test` or `new_client` was not the default.

    Raises:
      ValueError: a state of another method or model; a view that the data do not have; known clients that are not as many as
        those of the training and were not selected; ids out of range; logits of another number of classes than the data have;
        metrics that do not fit the task, or that give no scalar.
    """
    algorithm = as_algorithm(method, federation)
    devices = algorithm.devices if devices is None else devices
    lanes = algorithm.lanes if lanes is None else lanes
    checks.prng_key("key", key)
    checks.instance("state", state, State, "algorithm.init(key, data)")
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.flag("known", known)
    data.sizes(support)
    check_one_run(state)
    population = state.seen.shape[0]
    if known:
        check_known(data, state.ids)
    if batch_size is not None:
        checks.count("batch_size", batch_size)
    measured = _chosen(algorithm, data, metrics)
    if ids is not None:
        checks.indices("ids", ids, data.num_clients)
        if np.ndim(ids) != 1 or not np.size(ids):
            raise ValueError(f"ids={checks.shown(ids)} must name at least one client, [N']")
    if lanes is not None:
        checks.count("lanes", lanes)
    devices = hardware.check(devices)
    ids = jnp.arange(data.num_clients, dtype=jnp.int32) if ids is None else jnp.asarray(ids, jnp.int32)
    rows: Any = ids
    if known and data.drawn is None:  # a host store picks rows and clients in one order
        rows = rows_with_ids(state, data.ids_of(ids), max(population, data.total_clients))
    if known and isinstance(state.seen, np.ndarray):
        # The rows are on the host: only those of the asked clients go to the device.
        where = np.asarray(rows)
        state, data, ids = host_store.subset(state, data, where, np.asarray(ids))
        rows = jnp.where(where < 0, -1, ids)
    key, state, data, ids, rows = on_devices((key, jax.tree.map(jnp.asarray, state), data, ids, rows), devices)
    own: Any = ()
    if known:
        state, own = host_store.split_rows(state)
    test = _Test(algorithm, support, query, batch_size, max(population, data.total_clients) if known else None, measured)
    sizes = jnp.asarray(data.sizes(query))[ids]
    _, _, evaluation = run_cohort(
        test.of_client, key, data.ids_of(ids), sizes, (ids, rows >= 0), own, rows, (state, data), lanes=lanes, devices=devices
    )
    return evaluation


def _chosen(algorithm: Algorithm, data: FederatedData, given: Sequence[Metric | str] | None) -> tuple[Metric, ...]:
    """What is measured: the metrics that were given, or those of the task, or those of class labels."""
    task = algorithm.task
    y = data.y.value if isinstance(data.y, Weighted) else data.y
    if given is None:
        if task is not None and task.metrics is not None:
            given = task.metrics
        elif data.num_classes and getattr(y, "ndim", 0) == 1:
            given = (CONFUSION,) if data.num_classes <= FEW_CLASSES else ("accuracy", "top_5")
        elif task is not None and not isinstance(task.loss, LogitsLoss):
            given = ()
        else:
            what = "other targets than one class label a sample" if data.num_classes else "real targets (num_classes is 0)"
            example = "token_accuracy" if data.num_classes else "mae"
            raise ValueError(f"the data have {what}: there are no classes to score; give metrics, e.g. metrics=({example!r},)")
    several = data.num_classes == 0 and getattr(y, "ndim", 0) == 2
    return resolve(given, y.shape[1] if several else data.num_classes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Test:
    """The test of one client; `population` is N of the training for known clients, `None` for new ones."""

    algorithm: Algorithm
    support: str
    query: str
    batch_size: int | None
    population: int | None
    measured: tuple[Metric, ...]

    def of_client(self, key: Key, id_: jax.Array, given: Any, row: Any, context: Any) -> ClientUpdate:
        (place, has_row), (state, data) = given, context
        views = data.client(jnp.where(id_ < 0, -1, place))
        client = None
        if self.population is not None:
            row = row | {"seen": row["seen"] & has_row}
            state, client = state._replace(**jax.tree.map(lambda leaf: leaf[None], row)), 0
        variables = self.algorithm.personalize(key, state, views[self.support], client, self.population)
        return ClientUpdate((), (), self.score(variables, views[self.query], data))

    def score(self, variables: Variables, view: ClientView, data: FederatedData) -> Evaluation:
        batches = view.in_chunks(self.batch_size)

        def outputs_and_loss(batch: Batch) -> tuple[jax.Array, Any]:
            outputs = self.algorithm.predict(variables, batch.x)
            return outputs, _loss(self.algorithm, data, variables, outputs, batch)

        def step(t: Any, carry: Any) -> Any:
            found, sums = carry
            batch = batches.get(t, 0)
            outputs, loss = outputs_and_loss(batch)
            found = [
                measures.update(metric, statistics, outputs, batch)
                for metric, statistics in zip(self.measured, found, strict=True)
            ]
            return found, jax.tree.map(jnp.add, sums, loss)

        batch = jax.eval_shape(lambda: batches.get(0, 0))
        outputs, loss = jax.eval_shape(outputs_and_loss, batch)
        start = [measures.begin(metric, outputs, batch) for metric in self.measured]
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), loss)
        found, sums = loops.fori_loop(batches.steps, step, (start, zero))
        results = {metric.name: metric.result(of) for metric, of in zip(self.measured, found, strict=True)}
        # In the order in which they were asked for: JAX sorts the names of a plain dict.
        scores = OrderedDict(
            (metric.name, Score(results[metric.name], metric.higher_is_better, metric.share))
            for metric in self.measured
            if metric.name != CONFUSION
        )
        mean = None if sums is None else sums[0] / jnp.where(sums[1] > 0, sums[1], 1)
        return Evaluation(results.get(CONFUSION), mean, scores)


def _loss(
    algorithm: Algorithm, data: FederatedData, variables: Variables, outputs: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array] | None:
    """(sum, weight) of the losses of a batch; `None` where they are not known. See `Evaluation.loss`."""
    task, count = algorithm.task, real_samples(batch)
    criterion = getattr(getattr(task, "loss", None), "criterion", None)
    if data.labelled and outputs.shape == (len(batch.weight), data.num_classes):
        criterion = cross_entropy
    if isinstance(criterion, MeanLoss):
        losses, weight = criterion.weighted(outputs, batch)
        return jnp.sum(jnp.where(weight > 0, losses * weight, 0)), jnp.sum(weight)
    if criterion is not None:
        return criterion(outputs, batch) * count, count
    if task is None or algorithm.predict is not task.predict:
        return None
    return task.loss(variables, batch, jax.random.key(0))[0] * count, count


def with_user_accuracy(
    algorithm: Method | Algorithm,
    *,
    support: str = "train",
    query: str = "test",
    excluded: Any = (),
    lanes: int | None = None,
    devices: Devices = None,
) -> Algorithm:
    """The same algorithm with the user accuracy of MTFL (arXiv 2007.09236) as a metric of each round.

    User accuracy is the mean over the cohort, without the excluded clients, of the accuracy on the client's own test of the model
    with which the client starts the round: the server's with the client's personal leaves, personalised on `support` by methods
    that do so, before any local training. It becomes the metric "user_accuracy", a scalar, beside "user_accuracy_std", its
    population standard deviation over these clients; both are NaN where all clients of a cohort are excluded. The paper averages
    batches of 128 test samples, which is the same for up to 128 samples a client.

    Args:
      algorithm: what to run.
      support, query: names of the views, which must share no sample: "test_support" is a part of "test".
      excluded: ids of clients that do not count (the paper's noisy ones).
      lanes, devices: as in `engine.run_cohort`.

    Raises:
      ValueError: `own_at_test=False`, with which tests leave out what clients start from; on `round`, an asynchronous schedule,
        whose clients start from past models, all clients excluded, an id out of range, a view that the data do not have.
    """
    excluded = checks.numeric("excluded", excluded, integers=True).astype(np.int64).reshape(-1)
    algorithm = as_algorithm(algorithm)
    if not algorithm.config.get("federation", {}).get("own_at_test", True):
        raise ValueError("user accuracy is of the models that clients start from: Federation(own_at_test=False) tests others")
    for option, name in (("support", support), ("query", query)):
        checks.word(option, name)
    if lanes is not None:
        checks.count("lanes", lanes)
    devices = hardware.check(devices)
    if excluded.size and excluded.min() < 0:
        raise ValueError(f"excluded={checks.shown(excluded)} must hold ids of clients, from 0 on")

    def one_round(key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        clients = data.total_clients
        if excluded.size and excluded.max() >= clients:
            raise ValueError(f"excluded={excluded} must hold ids of the N={clients} clients, from 0 on")
        counts = np.ones(clients, bool)
        counts[excluded] = False
        if not counts.any():
            raise ValueError(f"excluded leaves out all N={clients} clients: there is no user accuracy")
        if jax.tree.leaves(state.aggregation.past):  # where nothing is shared, clients start from models of their own
            raise ValueError(
                "user accuracy is of the models that clients start from, which are past ones in asynchronous rounds"
            )
        after, info = algorithm.round(key, state, data)
        key = tagged(key, "user accuracy")
        if not data.labelled:
            raise ValueError("user accuracy is of class labels, one a sample, which the data do not have")
        options: dict[str, Any] = {"support": support, "query": query, "lanes": lanes, "devices": devices}
        positions = jnp.maximum(jnp.asarray(info.positions), 0)  # those of empty places do not count
        scores = evaluate(algorithm, key, state, data, ids=positions, metrics=(CONFUSION,), **options)
        counted = jnp.asarray(counts)[info.ids] & (info.ids >= 0)
        accuracy = metrics.where_finite(metrics.accuracy(scores.confusion), scores.loss)
        measured = {"user_accuracy": jnp.mean(accuracy, where=counted), "user_accuracy_std": jnp.std(accuracy, where=counted)}
        return after, info._replace(metrics=with_metrics("a round with user accuracy", info.metrics, measured))

    return dataclasses.replace(algorithm, round=one_round)
