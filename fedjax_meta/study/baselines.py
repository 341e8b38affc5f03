"""What takes no training, for a row beside every comparison: a client's most frequent class or mean, and the untrained model."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import loops, report, sweeps
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.blocks import run_keys
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.evaluation import Evaluation, evaluate
from fedjax_meta.federation import Federation
from fedjax_meta.methods import METHODS
from fedjax_meta.simulation import Record
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import KNOWN, NEW
from fedjax_meta.task import Batch, Task, Weighted, entry_weights, targets
from fedjax_meta.tasks import sigmoid_cross_entropy
from fedjax_meta.types import PyTree, Variables

Json = Any

UNTRAINED = "untrained model"


LOCAL = "local_only"
"""The method that the others are compared with, where a study has it."""


def alone(study: Study, system: str) -> tuple[str, ...]:
    """The groups whose clients train by themselves with a system; new clients only if they are given epochs."""
    one = study.systems[system]
    if one.method != LOCAL:
        return ()
    options = {**one.options, **{name: max(values) for name, values in one.grid.items()}, **one.tested_with}
    epochs = options.get("new_client_epochs")
    return (KNOWN, NEW) if (options.get("finetune_epochs") if epochs is None else epochs) else (KNOWN,)


def trained(group: str, *alone: tuple[str, ...]) -> bool:
    """True unless a system tests this group with local models that were never trained; `alone` of each system."""
    return all(not groups or group in groups for groups in alone)


def measured(
    clients: Clients, seeds: Sequence[int], metrics: Sequence[str] = (), asked: str = "test", ids: np.ndarray | None = None
) -> dict[str, dict[str, list[dict[str, Json]]]]:
    """Every score of known and new clients, without any training.

    Args:
      clients: of a scenario.
      seeds: of the untrained model.
      metrics: what is measured, see `Study.metrics`.
      asked: the view that known clients are tested on, see `Scenario.adapt_on`.
      ids: of the known clients that are scored, see `job.scored_clients`; all of them if not given.

    Returns:
      By name and by group of clients tests as in a row of `report.compact`. "untrained model" is the model as each of the seeds
      initialises it. The other is one test, of the best constant prediction from the samples on which a client trains or adapts:
      "majority class", "most frequent token", "majority of each label" or "mean of own targets"; it is not there for targets of
      another form. Its logits are the logarithms of the client's counts of each class, plus one.
    """
    plain = untrained(clients)
    states = [plain.init(run_keys(jax.random.key(seed))[0], clients.train) for seed in seeds]
    rows = {UNTRAINED: (plain, states)}
    constant = _constant(clients.task, clients.train)
    if constant is not None:
        rows = {constant.title: (_always(plain, clients.task, constant), states[:1]), **rows}
    groups: dict[str, tuple[Any, ...]] = {KNOWN: (clients.train, "train", asked, ids)}
    if clients.new is not None:
        groups[NEW] = (clients.new, "support", "query", None)
    return {
        title: {
            group: [_test(algorithm, state, *where, metrics=metrics) for state in states] for group, where in groups.items()
        }
        for title, (algorithm, states) in rows.items()
    }


def constant_in(clients: Clients, data: FederatedData, tests: Mapping[str, sweeps.MemberEvaluator]) -> dict[str, Json] | None:
    """The best constant prediction in other tests, such as those of trials: a row of `report.compact`.

    Args:
      clients: of a scenario.
      data: the clients that train before these tests.
      tests: by group of clients.

    Returns:
      `None` where `measured` has no such prediction.
    """
    constant = _constant(clients.task, clients.train)
    if constant is None:
        return None
    plain = untrained(clients)
    algorithm, init_key = _always(plain, clients.task, constant), run_keys(jax.random.key(0))[0]
    state, key = plain.init(init_key, data), jax.random.key(0)
    found = {name: jax.tree.map(np.asarray, test.measure(algorithm, key, state, test.data)) for name, test in tests.items()}
    return report.compact(Record(0, {}, found, 0.0, 0.0, ()))


def untrained(clients: Clients) -> Algorithm:
    """The model of a scenario, as FedAvg would begin with it."""
    return sweeps.alone(METHODS["fedavg"](clients.task), Federation(cohort_size=1))


def scored(clients: Clients, metrics: Sequence[str], algorithm: Algorithm) -> dict[str, Json]:
    """A test in a row of `report.compact`, which says what is measured but has no values; nothing is computed.

    Raises:
      ValueError: metrics that do not fit the task.
    """

    def scores(state: State) -> Evaluation:
        return _evaluated(algorithm, state, clients.train, "train", "test", None, metrics=metrics)

    found = jax.eval_shape(scores, jax.eval_shape(algorithm.init, jax.random.key(0), clients.train))
    test: dict[str, Json] = {} if found.confusion is None else {"accuracy": [], "f1": []}
    return {**test, **({} if found.loss is None else {"loss": []}), "metrics": {name: {} for name in found.metrics}}


def _evaluated(
    algorithm: Algorithm,
    state: State,
    data: FederatedData,
    seen: str,
    asked: str,
    ids: np.ndarray | None,
    *,
    metrics: Sequence[str],
) -> Evaluation:
    options: dict[str, Any] = {"support": seen, "query": asked, "known": False, "devices": 1, "metrics": metrics or None}
    scored = None if ids is None else jnp.asarray(ids)
    return evaluate(algorithm, jax.random.key(0), state, data, ids=scored, **options)


def _test(algorithm: Algorithm, state: State, *where: Any, metrics: Sequence[str]) -> Json:
    found = jax.tree.map(np.asarray, _evaluated(algorithm, state, *where, metrics=metrics))
    return report.compact(Record(0, {}, {"it": found}, 0.0, 0.0, ()))["tests"]["it"]


class _Constant(NamedTuple):
    """A prediction that is the same for all samples of a client.

    Attributes:
      title: for tables.
      sums: of a batch, what is added over batches.
      outputs: of the sums of a client, the outputs for one sample.
    """

    title: str
    sums: Callable[[Batch], PyTree]
    outputs: Callable[[PyTree], jax.Array]


def _constant(task: Task, data: FederatedData) -> _Constant | None:
    y = data.y.value if isinstance(data.y, Weighted) else data.y
    if not hasattr(y, "ndim"):
        return None
    if data.num_classes > 0:

        def counts(batch: Batch) -> jax.Array:
            labels = targets(batch)
            return jnp.zeros(data.num_classes).at[labels].add(entry_weights(batch, labels))

        title = "majority class" if data.labelled else "most frequent token"
        return _Constant(title, counts, lambda found: jnp.log(found + 1))

    def sums(batch: Batch) -> tuple[jax.Array, jax.Array]:
        values = targets(batch)
        weight = entry_weights(batch, values)
        return jnp.sum(jnp.where(weight > 0, values * weight, 0), 0), jnp.sum(weight, 0)

    if getattr(task.loss, "criterion", None) is sigmoid_cross_entropy:
        # Log-odds of each label's share, with one sample more of either kind.
        return _Constant("majority of each label", sums, lambda found: jnp.log((found[0] + 1) / (found[1] - found[0] + 1)))
    return _Constant("mean of own targets", sums, lambda found: found[0] / jnp.maximum(found[1], 1e-9))


def _always(algorithm: Algorithm, task: Task, constant: _Constant) -> Algorithm:
    """An algorithm that predicts a client's constant, whatever the inputs."""

    def personalize(key: Any, state: State, support: ClientView, *rest: Any) -> Variables:
        del key, state, rest
        batches = support.in_chunks()
        first = constant.sums(batches.get(0, 0))
        zero = jax.tree.map(jnp.zeros_like, first)

        def step(t: Any, total: PyTree) -> PyTree:
            return jax.tree.map(jnp.add, total, constant.sums(batches.get(t, 0)))

        return loops.fori_loop(batches.steps, step, zero)

    def predict(found: Variables, x: PyTree) -> jax.Array:
        shape = jax.eval_shape(task.predict, jax.eval_shape(task.init, jax.random.key(0)), x).shape
        outputs = constant.outputs(found)
        if outputs.ndim and outputs.shape[-1] < shape[-1]:
            # A model may have more outputs than there are classes.
            outputs = jnp.pad(outputs, (0, shape[-1] - outputs.shape[-1]))
        return jnp.broadcast_to(outputs, shape)

    return dataclasses.replace(algorithm, personalize=personalize, predict=predict)
