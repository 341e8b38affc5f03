"""FedProto: no model is averaged; clients share the mean features of their classes, and are pulled towards their global means.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: federated prototype learning across heterogeneous clients", AAAI 2022, arXiv
2105.00243; the steps are those of the authors' code, yuetan031/FedProto, lib/update.py 137-205 and lib/utils.py 205-240.

| paper | here | shape |
|---|---|---|
| omega_i | personal leaves (all) | like the model |
| C_i^j | class means of a client's features | `[K, d]` |
| bar C^j | `Centroids.mean` | `[K, d]` |
| lambda | `prototype_weight` | scalar |

A client minimises its loss plus lambda times the mean squared distance between features and the prototype of their class. Differs
from the paper: prototypes are taken by one pass of the trained model. Differs from the code: there from the batches of the last
epoch as the model moves (line 177), with equal weights of clients (`by_samples=False`), and only classes of the client are
considered in its test (line 502). Without prototypes of its class a sample is not pulled, and a class that no client of a cohort
holds keeps its last one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import Ratio
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.features import Centroids
from fedjax_meta.task import Batch, Task, require_parts, weighted_mean
from fedjax_meta.types import Key, Rate, Variables


class Predictor(NamedTuple):
    """What a client tests with: its model, and the global prototypes."""

    model: Variables
    prototypes: Centroids


def half_momentum(rate: Rate) -> optax.GradientTransformation:
    """SGD with momentum 0.5, as in the authors' code."""
    return optax.sgd(rate, momentum=0.5)


def nearness(z: jax.Array, centroids: Centroids) -> jax.Array:
    """Minus the squared distance of features `[B, d]` to each centroid, `[B, K]`; a class without one is furthest away."""
    near = -jnp.sum((z[:, None] - centroids.mean) ** 2, -1)
    return jnp.where(centroids.known, near, jnp.min(jnp.where(centroids.known, near, jnp.inf), 1, keepdims=True) - 1)


def to_centroids(z: jax.Array, batch: Batch, centroids: Centroids) -> jax.Array:
    """The mean over a batch of the mean squared distance, over d, of features to the centroid of their class, if it has one."""
    away = jnp.where(centroids.known[batch.y], jnp.mean((z - centroids.mean[batch.y]) ** 2, -1), 0)
    return weighted_mean(away, batch.weight)


@described("shares class means alone", "Tan et al. 2105.00243")
@method_builder
def fedproto(
    task: Task,
    *,
    lr: Rate = 0.01,
    prototype_weight: Rate = 1.0,
    by_samples: bool = True,
    predicts_with: str = "prototypes",
    epochs: int = 1,
    batch_size: int = 4,
    new_client_epochs: int = 1,
    optimizer: Callable[[Any], optax.GradientTransformation] = half_momentum,
) -> Method:
    """FedProto. A client that never took part trains the initial model on its support set, pulled to the global prototypes.

    Args:
      task: a classifier with features, head and a transparent loss.
      prototype_weight: lambda >= 0; 0 is local training. May be traced.
      by_samples: whether clients count by their samples of a class (the paper) or equally (the code) in its prototype.
      predicts_with: "prototypes", the class of the nearest one that there is (the head until there are any), or "head".
      lr, epochs, batch_size, new_client_epochs, optimizer: as in `fedavg`.

    Raises:
      ValueError: a task without features or with an opaque loss, an option out of range.
    """
    extract, head = features.require_features(task, "fedproto")
    require_parts(task, "fedproto")
    checks.not_negative("prototype_weight", prototype_weight)
    checks.one_of("predicts_with", predicts_with, ("prototypes", "head"))
    trainable = task.trainable(masks.variables_shape(task))

    def train(
        key: Key, start: Variables, prototypes: Centroids, view: ClientView, count: int, needed: Any = True
    ) -> tuple[Variables, jax.Array]:
        def penalty(z: jax.Array, batch: Batch) -> jax.Array:
            return prototype_weight * to_centroids(z, batch, prototypes)

        loss = features.penalised(task, penalty, "fedproto")
        passes = {"epochs": count, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, loss, start, view, optimizer(lr), trainable, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, loss = train(key, received.model, received.extra, data["train"], epochs)
        sums = features.class_sums(task, model, data["train"])
        held = (sums.number > 0).astype(sums.total.dtype)
        sent = Ratio(sums.total, sums.number) if by_samples else Ratio(sums.mean(), held)
        counts = jnp.where(data["train"].size > 0, 1.0, 0.0)
        return Trained(model, {"loss": loss}, statistics=sent, statistics_weight=counts)

    def personalize(key: Key, received: Received, support: ClientView) -> Predictor:
        model, _ = train(key, received.model, received.extra, support, new_client_epochs, ~received.seen)
        return Predictor(model, received.extra)

    def predict(variables: Predictor, x: Any) -> jax.Array:
        z = extract(variables.model, x)
        logits = head(variables.model, z)
        if predicts_with == "head":
            return logits
        return jnp.where(jnp.any(variables.prototypes.known), nearness(z, variables.prototypes), logits)

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=predict,
        roles=masks.roles(masks.everything(task), trainable),
        weighting="uniform",
        init_extra=partial(features.no_centroids, task),
        update_extra=features.renewed_centroids,
        needs_classes=True,
    )


REDUCES_TO = (
    Reduction(
        "FedProto with lambda = 0 and its heads is local training",
        "fedproto",
        {"prototype_weight": 0.0, "predicts_with": "head", "optimizer": optax.sgd},
        "local_only",
        {},
    ),
)
