"""FedProx: FedAvg whose clients are pulled back to the model that they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated optimization in heterogeneous networks", MLSys 2020, arXiv 1812.06127,
Algorithm 2. The local objective is f_i(w) + mu/2 ||w - w^t||^2.

| paper | here | shape |
|---|---|---|
| mu | `prox_weight` | scalar |
| w^t | `received.model` | like the model |

Differs from the paper: a client always finishes its epochs unless the federation says otherwise. Clients are sampled uniformly
and count by their samples, as in the authors' code.
"""

from typing import Any, Unpack

import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData
from fedjax_meta.task import Key, Task


def fedprox(
    task: Task,
    *,
    prox_weight: Any = 1.0,
    lr: Any = 0.01,
    epochs: int = 20,
    batch_size: int = 10,
    personal: masks.MaskSpec = "none",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Federated averaging with a proximal term; arguments as in `fedavg`, `prox_weight` is mu >= 0.

    Every client, known or new, tests with the server's model; a new one begins with the server's personal leaves, if any.
    """
    checks.not_negative("prox_weight", prox_weight)
    checks.positive("lr", lr)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        loss = local.proximal(task.loss, received.model, prox_weight)
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, value = local.train_epochs(key, loss, received.model, data["train"], optax.sgd(lr), trainable, **passes)
        return Trained(model, client_weight("samples", data), {"loss": value})

    return federated(
        init=task.init,
        client=client,
        personalize=lambda key, received, support: received.model,
        predict=task.predict,
        personal=masks.resolve(personal, task, name="personal"),
        trainable=trainable,
        **options,
    )
