"""FedAvg and what only differs from it by who keeps which leaves: FedPer, local-only, and each with fine-tuning at test time.

Clients start from the server's model, train on all their samples, and the server takes the mean of what comes back.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017, arXiv 1602.05629, Algorithm 1. FedPer: Arivazhagan et al., arXiv 1912.00818. Epochs and batch size are
those of Nguyen and Cao, "Meta-learning and personalization layer in federated learning" (S0), whose FedAvgMeta and FedPerMeta
are FedAvg and FedPer with one epoch of fine-tuning on a test client's support set.

| paper | here | shape |
|---|---|---|
| w_B, w_P | leaves outside and inside `personal` | |
| E, B, eta | `epochs`, `batch_size`, `lr` | |
| n_i / sum n | `weighting="samples"` | `[C]` |

Differs from S0's code: a client shuffles its samples as one set rather than support before query.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import WEIGHTINGS, client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Key, Task, Variables


def fedavg(
    task: Task,
    *,
    lr: Any = 0.01,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    epochs: int = 1,
    batch_size: int = 32,
    finetune_epochs: int = 0,
    finetune: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Federated averaging; `personal` leaves stay with their client and are never averaged.

    Args:
      task: what is learned.
      lr: learning rate of local training and of fine-tuning; may be traced.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      epochs: passes over a client's train view in a round.
      batch_size: samples a step; the last batch of a pass may be smaller.
      finetune_epochs: passes over the support view before a client predicts; 0 tests the model as it is.
      finetune: mask of the leaves that fine-tuning moves.
      personal: mask of the leaves that stay with their client; "all" is local-only training.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a rate, size or count out of range, an unknown mask or weighting.
    """
    checks.positive("lr", lr)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.count("finetune_epochs", finetune_epochs, least=0)
    checks.one_of("weighting", weighting, WEIGHTINGS)
    trainable = task.trainable(masks.variables_shape(task))
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order_key, key = jax.random.split(key)
        batches = data["train"].epochs(order_key, batch_size, epochs)
        trained, loss = local.train(key, task.loss, received.model, batches, optimizer(lr), trainable)
        return Trained(trained, client_weight(weighting, data), {"loss": loss})

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        if finetune_epochs == 0:
            return received.model
        order_key, key = jax.random.split(key)
        batches = support.epochs(order_key, batch_size, finetune_epochs)
        return local.train(key, task.loss, received.model, batches, optimizer(lr), moves_at_test)[0]

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.resolve(personal, task, name="personal"),
        trainable=trainable,
        **options,
    )


def fedper(task: Task, *, personal: masks.MaskSpec = "head", **options: Any) -> Algorithm:
    """FedPer: FedAvg whose last layers stay with their client (arXiv 1912.00818). `options` are those of `fedavg`."""
    return fedavg(task, personal=personal, **options)


def local_only(task: Task, **options: Any) -> Algorithm:
    """Every client trains by itself and nothing is averaged. `options` are those of `fedavg`."""
    return fedavg(task, personal="all", **options)
