"""What is measured: every client's confusion matrix after personalisation, and the scores that follow from it.

The whole distribution over clients is kept: all scores are functions of confusion matrices `[N, K, K]` (rows true, columns
predicted) and can be taken afterwards, on device or in NumPy.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, store
from fedjax_meta.algorithm import Algorithm, RoundInfo, State, rows_of
from fedjax_meta.data.federated import CHUNK, FederatedData
from fedjax_meta.engine import ClientUpdate, client_mesh, run_cohort
from fedjax_meta.task import Key

MANY_BYTES = 2**26
"""From this many bytes on, to be moved between devices, clients are evaluated where what they keep lies."""


class Evaluation(NamedTuple):
    """What N clients scored.

    Attributes:
      confusion: int32 `[N, K, K]`, true classes in rows, predicted ones in columns.
      loss: `[N]`, mean cross-entropy.
    """

    confusion: Any
    loss: Any


def evaluate(
    algorithm: Algorithm,
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
) -> Evaluation:
    """Lets every client personalise on its support view and predict its query view.

    Args:
      algorithm, state: what was trained.
      key: client i of the population gets `fold_in(key, i)`; consumed.
      data: the clients to test.
      support, query: names of the views; a client never sees labels of its query view.
      known: client i of the population of `data` is client i of the training (S0's "local" clients); else nobody here took part
        ("new" clients).
      ids: int32 `[N']`, which clients; all when not given.
      batch_size: samples predicted at a time, at most.
      lanes, devices: as in `engine.run_cohort`.

    Raises:
      ValueError: a view that the data do not have; known clients that outnumber those of the training; ids out of range;
        targets that are no classes, or logits of another number of classes than the data have.
    """
    population = state.seen.shape[0]
    if known and data.num_clients > population:
        raise ValueError(f"known=True, but the data have {data.num_clients} clients and the training had {population}")
    checks.count("batch_size", batch_size)
    classes = data.num_classes
    if classes == 0:
        raise ValueError("the data have real targets (num_classes is 0): there are no classes to score")
    if ids is not None:
        checks.indices("ids", ids, data.num_clients)
    in_order = ids is None and population == data.num_clients and (data.ids is None or population < data.total_clients)
    ids = jnp.arange(data.num_clients, dtype=jnp.int32) if ids is None else jnp.asarray(ids, jnp.int32)
    rows = rows_of(state, data, ids) if known else ids
    if known and isinstance(state.seen, np.ndarray):
        # They wait on the host: only the rows that are asked for leave it.
        state, data, ids = store.part(state, data, np.asarray(rows), np.asarray(ids))
        rows, in_order = ids, True
    state = jax.tree.map(jnp.asarray, state)
    # Many rows stay on the devices that have them; few go with their clients to the device with the least work, which may have
    # to take all of them.
    move = not in_order or client_mesh(devices).size * len(ids) * store.row_bytes(state) < MANY_BYTES
    own: Any = ()
    if known:
        state, own = store.parted(state)
        own = own if in_order else jax.tree.map(lambda leaf: leaf[rows], own)

    def rule(key: Key, id_: jax.Array, kept: Any, context: Any) -> ClientUpdate:
        state, data = context
        place, row = kept
        views = data.client(jnp.where(id_ < 0, -1, place))
        if known:
            state = state._replace(**jax.tree.map(lambda leaf: leaf[None], row))
        variables = algorithm.personalize(key, state, views[support], 0 if known else None)
        batches = views[query].in_chunks(batch_size)

        def step(t: Any, carry: Any) -> Any:
            confusion, total = carry
            batch = batches.get(t, 0)
            logits = algorithm.predict(variables, batch.x)
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
        loss = total / jnp.maximum(views[query].size, 1)
        return ClientUpdate((), (), kept, Evaluation(confusion.reshape(classes, classes), loss))

    sizes = jnp.asarray(data.sizes(query))[ids]
    _, _, evaluation = run_cohort(
        rule, key, data.who(ids), sizes, (ids, own), (state, data), lanes=lanes, devices=devices, move=move or not known
    )
    return evaluation


def with_user_accuracy(
    algorithm: Algorithm,
    *,
    support: str = "test_support",
    query: str = "test",
    excluded: Any = (),
    lanes: int | None = None,
    devices: int | None = None,
) -> Algorithm:
    """The same algorithm, each of whose rounds also measures the user accuracy of MTFL (arXiv 2007.09236).

    That is the mean over the clients of the round's cohort, without the excluded ones, of the accuracy on their own tests of
    the model with which they begin the round: the server's with their own leaves, personalised on `support` by algorithms that
    do so, before any local training. It becomes the metric "user_accuracy", a scalar; NaN where all of a cohort are excluded.
    The paper averages batches of 128 test samples, which is the same for up to 128 samples a client.

    Args:
      algorithm: what to run.
      support, query: names of the views.
      excluded: ids of clients that do not count (the paper's noisy ones).
      lanes, devices: as in `engine.run_cohort`.

    Raises:
      ValueError: on `round`, all clients excluded, an id out of range, a view that the data do not have.
    """
    excluded = np.asarray(excluded, np.int64).reshape(-1)

    def one_round(key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        clients = data.total_clients
        if excluded.size and not (excluded.min() >= 0 and excluded.max() < clients):
            raise ValueError(f"excluded={excluded} must hold ids of the N={clients} clients, from 0 on")
        counts = np.ones(clients, bool)
        counts[excluded] = False
        if not counts.any():
            raise ValueError(f"excluded leaves out all N={clients} clients: there is no user accuracy")
        after, info = algorithm.round(key, state, data)
        # Fold in what no client id can be, so that these keys are not those of the clients' training.
        key = jax.random.fold_in(key, np.uint32(2**32 - 1))
        scores = evaluate(
            algorithm, key, state, data, support=support, query=query, ids=info.places, lanes=lanes, devices=devices
        )
        mean = jnp.mean(accuracy(scores.confusion), where=jnp.asarray(counts)[info.ids])
        return after, info._replace(metrics={**info.metrics, "user_accuracy": mean})

    return algorithm._replace(round=one_round)


class ToTarget(NamedTuple):
    """When runs that differ in their seed reached a target.

    Attributes:
      target: the score to reach.
      rounds: for each run the first round at which it did, `None` where it never did.
      budget: rounds that each run had.
      mean: mean over the runs; infinity when a run never reached the target, because the mean is then not known.
      margin: half the width of the 95 % confidence interval of the mean (Student's t over runs); NaN when that is not known.
    """

    target: float
    rounds: tuple[int | None, ...]
    budget: int
    mean: float
    margin: float

    def __str__(self) -> str:
        missed = sum(first is None for first in self.rounds)
        if missed:
            return f"never in {self.budget} rounds ({missed} of {len(self.rounds)} runs)"
        return f"{self.mean:.1f}" if math.isnan(self.margin) else f"{self.mean:.1f} ± {self.margin:.1f}"


# Two-sided 95 % quantiles of Student's t by degrees of freedom; from 30 on the normal one is within 4 %.
_STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120]
_STUDENT += [2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045]


def rounds_to_target(scores: Any, target: float, *, rounds: Sequence[int] | None = None) -> ToTarget:
    """First round at which a score is at least `target`, over runs of several seeds.

    Args:
      scores: `[R]` or `[runs, R]`, one number a round (or an evaluation); NaN is not reached.
      target: what to reach.
      rounds: `[R]`, the rounds at which the scores were taken; 1, 2, ... when not given.

    Raises:
      ValueError: no scores, a target that is not finite, rounds of another length.

    Example:
      >>> print(rounds_to_target([[0.1, 0.5, 0.4, 0.6], [0.1, 0.2, 0.5, 0.6]], 0.5))
      2.5 ± 6.4
      >>> print(rounds_to_target([[0.1, 0.5, 0.4, 0.6], [0.1, 0.2, 0.5, 0.6]], 0.6), rounds_to_target([0.1, 0.2], 0.5))
      4.0 ± 0.0 never in 2 rounds (1 of 1 runs)
    """
    scores = np.atleast_2d(np.asarray(scores, float))
    if scores.ndim != 2 or scores.size == 0:
        raise ValueError(f"scores must be [R] or [runs, R] with at least one score, not of shape {scores.shape}")
    if not math.isfinite(target):
        raise ValueError(f"target={target} must be finite")
    at = np.arange(1, scores.shape[1] + 1) if rounds is None else np.asarray(rounds)
    if at.shape != scores.shape[1:]:
        raise ValueError(f"rounds has shape {at.shape}, but there are R={scores.shape[1]} scores a run")
    hit = scores >= target
    first = tuple(int(at[np.argmax(line)]) if line.any() else None for line in hit)
    reached = np.array([number for number in first if number is not None], float)
    mean, margin, runs = math.inf, math.nan, len(first)
    if reached.size == runs:
        mean = float(reached.mean())
        if runs > 1:
            quantile = _STUDENT[runs - 2] if runs - 2 < len(_STUDENT) else 1.96
            margin = quantile * float(reached.std(ddof=1)) / math.sqrt(runs)
    return ToTarget(target, first, int(at[-1]), mean, margin)


def accuracy(confusion: Any) -> Any:
    """Share of correct predictions of each client, `[N]`; its mean and population std are the "macro" accuracy."""
    xp = _numpy_of(confusion)
    return xp.trace(confusion, axis1=-2, axis2=-1) / xp.maximum(xp.sum(confusion, (-2, -1)), 1)


def micro_accuracy(confusion: Any) -> Any:
    """Share of correct predictions over the samples of all clients, a scalar."""
    return accuracy(_numpy_of(confusion).sum(confusion, -3))


def macro_f1(confusion: Any) -> Any:
    """F1 averaged over the classes that a client holds or predicts, `[N]` (scikit-learn's macro average)."""
    xp = _numpy_of(confusion)
    correct = xp.diagonal(confusion, axis1=-2, axis2=-1)
    held, predicted = xp.sum(confusion, -1), xp.sum(confusion, -2)
    present = (held + predicted) > 0
    f1 = 2 * correct / xp.maximum(held + predicted, 1)
    return xp.sum(xp.where(present, f1, 0), -1) / xp.maximum(xp.sum(present, -1), 1)


def within_own_classes(confusion: Any) -> Any:
    """Confusion matrices `[N, K, K]` after S0's post-processing of predictions, which its F1 scores rest on.

    A prediction of a class that the client does not hold becomes the next class that it does hold, other than the true one; it
    stays wrong. So accuracy is unchanged, and classes that a client has nothing of do not enter its F1. S0's clients hold two
    classes, where "the other one" is unique; a client of one class keeps its predictions.
    """
    xp = _numpy_of(confusion)
    classes = confusion.shape[-1]
    own = xp.sum(confusion, -1) > 0  # [N, K]
    outside = xp.sum(xp.where(own[..., None, :], 0, confusion), -1)  # [N, K] by true class
    # distance[c, d]: how many classes after c (cyclically) class d comes; the nearest own one other than c takes the strays.
    distance = (xp.arange(classes)[None, :] - xp.arange(classes)[:, None]) % classes
    distance = distance.reshape((1,) * (own.ndim - 1) + distance.shape)
    distance = xp.where(own[..., None, :] & (distance > 0), distance, classes)
    target = xp.argmin(distance, -1)
    alone = xp.min(distance, -1) == classes
    moved = (target[..., None] == xp.arange(classes)) * xp.where(alone, 0, outside)[..., None]
    kept = xp.where(own[..., None, :] | alone[..., None], confusion, 0)
    return kept + moved


def _numpy_of(values: Any) -> Any:
    """The NumPy that values belong to. Scores of what has left the device are taken on the host, where nothing is compiled."""
    return np if isinstance(values, np.ndarray) else jnp


def summary(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that papers print: accuracy over samples; over clients, and F1 as S0 takes it, with population std."""
    confusion, loss = np.asarray(evaluation.confusion), np.asarray(evaluation.loss)
    by_client, f1, raw_f1 = accuracy(confusion), macro_f1(within_own_classes(confusion)), macro_f1(confusion)
    numbers = {
        "accuracy": micro_accuracy(confusion),
        "accuracy_mean": np.mean(by_client),
        "accuracy_std": np.std(by_client),
        "f1_mean": np.mean(f1),
        "f1_std": np.std(f1),
        "raw_f1_mean": np.mean(raw_f1),
        "raw_f1_std": np.std(raw_f1),
        "loss": np.mean(loss),
    }
    return {name: float(value) for name, value in numbers.items()}
