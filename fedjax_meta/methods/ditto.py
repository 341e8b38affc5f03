"""Ditto: FedAvg for the global model, and beside it a personal model that is drawn to the global one.

Li, Hu, Beirami, Smith: "Ditto: fair and robust federated learning through personalization", ICML 2021, arXiv 2012.04221,
Algorithm 1.

| paper | here | shape |
|---|---|---|
| w^t | server's model | |
| v_k | a client's memory | like the model |
| lambda | `prox_weight` | scalar |
| eta, s | `personal_lr`, `personal_epochs` | |

Differs from the authors' code: clients are sampled uniformly and weighted as `weighting` says (there they are sampled by their
number of samples and weighted equally); the steps of v and w do not alternate, which changes nothing, because both look at
w^t.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Key, Task, Variables


def ditto(
    task: Task,
    *,
    lr: Any = 0.05,
    personal_lr: Any = None,
    prox_weight: Any = 1.0,
    epochs: int = 1,
    personal_epochs: int | None = None,
    batch_size: int = 16,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Ditto. A known client tests with its v. One that never took part trains a v from the global model on its support set.

    Args:
      task: what is learned.
      lr: learning rate of the global model; may be traced, as the next two.
      personal_lr: of the personal models; `lr` when not given.
      prox_weight: lambda, how strongly v is drawn to the global model; 0 is local-only training of v.
      epochs: passes over the train view for the global model.
      personal_epochs: passes for the personal model; `epochs` when not given.
      batch_size: samples a step.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a negative weight, a rate or count out of range.
    """
    personal_lr = lr if personal_lr is None else personal_lr
    personal_epochs = epochs if personal_epochs is None else personal_epochs
    checks.positive("lr", lr)
    checks.positive("personal_lr", personal_lr)
    checks.not_negative("prox_weight", prox_weight)
    for name, value in (("epochs", epochs), ("personal_epochs", personal_epochs), ("batch_size", batch_size)):
        checks.count(name, value)
    trainable = task.trainable(masks.variables_shape(task))

    def train_personal(key: Key, start: Any, anchor: Any, view: ClientView, needed: Any = True) -> tuple[Variables, jax.Array]:
        # v ← v - η (∇f(v) + λ (v - w^t)); the anchor is what the server sent, not what w has become since.
        loss = local.proximal(task.loss, anchor, prox_weight)
        passes = {"epochs": personal_epochs, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, loss, start, view, optimizer(personal_lr), trainable, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        # The same key, and so the same batches, as the authors have it.
        own, own_loss = train_personal(key, received.memory, received.model, data["train"])
        return Trained(model, client_weight(weighting, data), {"loss": loss, "personal_loss": own_loss}, memory=own)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen = received.seen
        start = jax.tree.map(lambda own, shared: jnp.where(seen, own, shared), received.memory, received.model)
        return train_personal(key, start, received.model, support, ~seen)[0]

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.nothing(task),
        trainable=trainable,
        init_memory=lambda key, model, num_clients: model,
        **options,
    )
