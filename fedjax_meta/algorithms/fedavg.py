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
    finetune_full_batch: bool = False,
    new_client_epochs: int | None = None,
    personal: masks.MaskSpec = "none",
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Federated averaging; `personal` leaves stay with their client and are never averaged.

    A client that never took part begins with the server's model, whose personal leaves are as they were initialised (or an
    average, with `average_personal`), and fine-tunes it for `new_client_epochs`.

    Args:
      task: what is learned.
      lr: learning rate of local training and of fine-tuning; may be traced.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      epochs: passes over a client's train view in a round.
      batch_size: samples a step; the last batch of a pass may be smaller.
      finetune_epochs: passes over the support view before a client predicts; 0 tests the model as it is.
      finetune: mask of the leaves that fine-tuning moves.
      finetune_full_batch: take that many steps on the whole support view instead (S3's "one update").
      new_client_epochs: passes of a client that never took part; `finetune_epochs` when not given.
      personal: mask of the leaves that stay with their client; "all" is local-only training.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a rate, size or count out of range, an unknown mask or weighting.
    """
    checks.positive("lr", lr)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    for name, value in (("finetune_epochs", finetune_epochs), ("new_client_epochs", new_client_epochs or 0)):
        checks.count(name, value, least=0)
    checks.one_of("weighting", weighting, WEIGHTINGS)
    trainable = task.trainable(masks.variables_shape(task))
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        passes = {"epochs": epochs, "batch_size": batch_size}
        trained, loss = local.train_epochs(key, task.loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        return Trained(trained, client_weight(weighting, data), {"loss": loss})

    def adapted(key: Key, model: Any, support: ClientView, count: int, needed: Any = True) -> Variables:
        if finetune_full_batch:
            batches = support.full(count).only_if(needed)
            return local.train(key, task.loss, model, batches, optimizer(lr), moves_at_test)[0]
        passes = {"epochs": count, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, model, support, optimizer(lr), moves_at_test, **passes)[0]

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        if new_client_epochs is None:
            return adapted(key, received.model, support, finetune_epochs)
        model = adapted(key, received.model, support, finetune_epochs, received.seen)
        return adapted(key, model, support, new_client_epochs, ~received.seen)

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
    """FedPer: FedAvg whose last layers stay with their client (arXiv 1912.00818). `options` are those of `fedavg`.

    The paper has no rule for new clients: one that never took part has the server's head, which nobody has trained, and should
    be given `new_client_epochs` to fit it (with `finetune="head"`, on the shared body).
    """
    return fedavg(task, personal=personal, **options)


def local_only(task: Task, **options: Any) -> Algorithm:
    """Every client trains by itself and nothing is averaged. `options` are those of `fedavg`.

    A client that never took part has nothing but the initial model, and `new_client_epochs` on its support set.
    """
    return fedavg(task, personal="all", **options)
