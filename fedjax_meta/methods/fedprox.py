"""FedProx: FedAvg whose clients are pulled back to the model that they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated optimization in heterogeneous networks", MLSys 2020, arXiv 1812.06127,
Algorithm 2. The local objective is f_i(w) + mu/2 ||w - w^t||^2.

| paper | here | shape |
|---|---|---|
| mu | `prox_weight` | scalar |
| w^t | `received.model` | like the model |

Differs from the paper: a client finishes its epochs unless the federation's `participation` says otherwise. Clients are sampled
uniformly and count by their samples, as in the authors' code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from fedjax_meta import local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData
from fedjax_meta.methods.fedavg import fedavg
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Rate


@described("FedAvg with a proximal term", "Li et al. 1812.06127")
@method_builder
def fedprox(
    task: Task,
    *,
    prox_weight: Rate = 1.0,
    lr: Rate = 0.01,
    epochs: int = 20,
    batch_size: int = 10,
    finetune_epochs: int = 0,
    finetune_lr: Rate | None = None,
    finetune: masks.MaskSpec = "all",
    finetune_full_batch: bool = False,
    new_client_epochs: int | None = None,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    personal: masks.MaskSpec = "none",
    weighting: str = "samples",
) -> Method:
    """FedProx. All clients, known or new, test as in `fedavg`: with the server's model and their own personal leaves, if there
    are any, after fine-tuning if there is any.

    Args:
      task, lr, epochs, batch_size, optimizer, personal, weighting: as in `fedavg`.
      prox_weight: mu >= 0; may be traced.
      finetune_epochs, finetune_lr, finetune, finetune_full_batch, new_client_epochs: as in `fedavg`, without the proximal term.

    Raises:
      ValueError: an option out of range.
    """
    base = fedavg(
        task,
        finetune_epochs=finetune_epochs,
        finetune_lr=finetune_lr,
        finetune=finetune,
        finetune_full_batch=finetune_full_batch,
        new_client_epochs=new_client_epochs,
        lr=lr,
        batch_size=batch_size,
        optimizer=optimizer,
        personal=personal,
        weighting=weighting,
    )
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        loss = local.proximal(task.loss, received.model, prox_weight)
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, value = local.train_epochs(key, loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        return Trained(model, {"loss": value})

    return dataclasses.replace(base, client=client)


_OWN = {"personal": "head", "new_client_epochs": 2, "weighting": "uniform"}

REDUCES_TO = (
    Reduction("FedProx with mu = 0 is FedAvg", "fedprox", {"prox_weight": 0.0}, "fedavg", {}),
    Reduction(
        "FedProx with mu = 0 that fine-tunes is FedAvg that fine-tunes",
        "fedprox",
        {"prox_weight": 0.0, "finetune_epochs": 2, "finetune": "head"},
        "fedavg",
        {"finetune_epochs": 2, "finetune": "head"},
    ),
    Reduction(
        "FedProx with mu = 0 and heads of its clients' own is FedAvg with such heads",
        "fedprox",
        {"prox_weight": 0.0, **_OWN},
        "fedavg",
        _OWN,
    ),
)
