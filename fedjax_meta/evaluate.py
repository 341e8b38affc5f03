"""What is measured: every client's confusion matrix after personalisation, and the scores that follow from it.

The whole distribution over clients is kept: all scores are functions of confusion matrices `[N, K, K]` (rows true, columns
predicted) and can be taken afterwards, on device or in NumPy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.engine import ClientUpdate, run_cohort
from fedjax_meta.task import Key


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
    batch_size: int = 256,
    lanes: int | None = None,
    devices: int | None = None,
) -> Evaluation:
    """Lets every client personalise on its support view and predict its query view.

    Args:
      algorithm, state: what was trained.
      key: client i gets `fold_in(key, i)`; consumed.
      data: the clients to test.
      support, query: names of the views; a client never sees labels of its query view.
      known: client i of `data` is client i of the training (S0's "local" clients); else nobody here took part ("new" clients).
      ids: int32 `[N']`, which clients; all when not given.
      batch_size: samples predicted at a time.
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
    ids = jnp.arange(data.num_clients, dtype=jnp.int32) if ids is None else jnp.asarray(ids, jnp.int32)

    def rule(key: Key, id_: jax.Array, _: Any, context: Any) -> ClientUpdate:
        state, data = context
        views = data.client(id_)
        variables = algorithm.personalize(key, state, views[support], jnp.maximum(id_, 0) if known else None)
        batches = views[query].in_order(batch_size)

        def step(t: Any, carry: Any) -> Any:
            confusion, total = carry
            batch = batches.get(t, 0)
            logits = algorithm.predict(variables, batch.x)
            if logits.shape != (batch_size, classes):
                raise ValueError(
                    f"predict gives {logits.shape} for B={batch_size} samples, but the data have K={classes} classes "
                    "(num_classes is the largest label plus 1 where the data were built without it)"
                )
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch.y)
            cell = batch.y * classes + jnp.argmax(logits, -1)
            confusion = confusion.at[cell].add(batch.weight.astype(jnp.int32))
            return confusion, total + jnp.sum(jnp.where(batch.weight > 0, losses * batch.weight, 0))

        start = (jnp.zeros(classes * classes, jnp.int32), jnp.zeros(()))
        confusion, total = jax.lax.fori_loop(0, batches.steps, step, start)
        loss = total / jnp.maximum(views[query].size, 1)
        return ClientUpdate((), (), (), Evaluation(confusion.reshape(classes, classes), loss))

    sizes = jnp.asarray(data.sizes(query))[ids]
    _, _, evaluation = run_cohort(rule, key, ids, sizes, (), (state, data), lanes=lanes, devices=devices)
    return evaluation


def accuracy(confusion: Any) -> Any:
    """Share of correct predictions of each client, `[N]`; its mean and population std are the "macro" accuracy."""
    return jnp.trace(confusion, axis1=-2, axis2=-1) / jnp.maximum(jnp.sum(confusion, (-2, -1)), 1)


def micro_accuracy(confusion: Any) -> Any:
    """Share of correct predictions over the samples of all clients, a scalar."""
    return accuracy(jnp.sum(confusion, -3))


def macro_f1(confusion: Any) -> Any:
    """F1 averaged over the classes that a client holds or predicts, `[N]` (scikit-learn's macro average)."""
    correct = jnp.diagonal(confusion, axis1=-2, axis2=-1)
    held, predicted = jnp.sum(confusion, -1), jnp.sum(confusion, -2)
    present = (held + predicted) > 0
    f1 = 2 * correct / jnp.maximum(held + predicted, 1)
    return jnp.sum(jnp.where(present, f1, 0), -1) / jnp.maximum(jnp.sum(present, -1), 1)


def within_own_classes(confusion: Any) -> Any:
    """Confusion matrices `[N, K, K]` after S0's post-processing of predictions, which its F1 scores rest on.

    A prediction of a class that the client does not hold becomes the next class that it does hold, other than the true one; it
    stays wrong. So accuracy is unchanged, and classes that a client has nothing of do not enter its F1. S0's clients hold two
    classes, where "the other one" is unique; a client of one class keeps its predictions.
    """
    classes = confusion.shape[-1]
    own = jnp.sum(confusion, -1) > 0  # [N, K]
    outside = jnp.sum(jnp.where(own[..., None, :], 0, confusion), -1)  # [N, K] by true class
    # distance[c, d]: how many classes after c (cyclically) class d comes; the nearest own one other than c takes the strays.
    distance = (jnp.arange(classes)[None, :] - jnp.arange(classes)[:, None]) % classes
    distance = jnp.where(own[..., None, :] & (distance > 0), distance, classes)
    target = jnp.argmin(distance, -1)
    alone = jnp.min(distance, -1) == classes
    moved = jax.nn.one_hot(target, classes, dtype=confusion.dtype) * jnp.where(alone, 0, outside)[..., None]
    kept = jnp.where(own[..., None, :] | alone[..., None], confusion, 0)
    return kept + moved


def summary(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that papers print: accuracy over samples; over clients, and F1 as S0 takes it, with population std."""
    confusion = jnp.asarray(evaluation.confusion)
    by_client, f1, raw_f1 = accuracy(confusion), macro_f1(within_own_classes(confusion)), macro_f1(confusion)
    numbers = {
        "accuracy": micro_accuracy(confusion),
        "accuracy_mean": jnp.mean(by_client),
        "accuracy_std": jnp.std(by_client),
        "f1_mean": jnp.mean(f1),
        "f1_std": jnp.std(f1),
        "raw_f1_mean": jnp.mean(raw_f1),
        "raw_f1_std": jnp.std(raw_f1),
        "loss": jnp.mean(jnp.asarray(evaluation.loss)),
    }
    return {name: float(value) for name, value in numbers.items()}
