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

from collections.abc import Callable
from typing import Any

import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Rate, Variables


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
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    personal: masks.MaskSpec = "none",
) -> Method:
    """Federated averaging with a proximal term; arguments as in `fedavg`, `prox_weight` is mu >= 0.

    All clients, known or new, test with the server's model and their own personal leaves, if there are any, after fine-tuning if
    there is any: `optimizer` on the support view, without the proximal term, as in `fedavg`.
    """
    if finetune_lr is not None:
        checks.positive("finetune_lr", finetune_lr)
    trainable = task.trainable(masks.variables_shape(task))
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        loss = local.proximal(task.loss, received.model, prox_weight)
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, value = local.train_epochs(key, loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        return Trained(model, {"loss": value})

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        passes = {"epochs": finetune_epochs, "batch_size": batch_size}
        finetuner = optimizer(lr if finetune_lr is None else finetune_lr)
        return local.train_epochs(key, task.loss, received.model, support, finetuner, moves_at_test, **passes)[0]

    roles = masks.roles(masks.resolve(personal, task, name="personal"), trainable)
    return Method(init=task.init, client=client, personalize=personalize, predict=task.predict, roles=roles)


REDUCES_TO = (
    Reduction("FedProx with mu = 0 is FedAvg", "fedprox", {"prox_weight": 0.0}, "fedavg", {}),
    Reduction(
        "FedProx with mu = 0 that fine-tunes is FedAvg that fine-tunes",
        "fedprox",
        {"prox_weight": 0.0, "finetune_epochs": 2, "finetune": "head"},
        "fedavg",
        {"finetune_epochs": 2, "finetune": "head"},
    ),
)
