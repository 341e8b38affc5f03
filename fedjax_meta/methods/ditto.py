"""Ditto: FedAvg for the global model, and beside it a personal model that a proximal term pulls towards the global one.

Li, Hu, Beirami, Smith: "Ditto: fair and robust federated learning through personalization", ICML 2021, arXiv 2012.04221,
Algorithm 1.

| paper | here | shape |
|---|---|---|
| w^t | server's model | |
| v_k | a client's memory | like the model |
| lambda | `prox_weight` | scalar |
| eta, s | `personal_lr`, `personal_epochs` | |

Differs from the paper: v_k starts from the server's model at the time when client k first takes part, which is w^0 in the
first round only. Differs from the authors' code: clients are sampled uniformly and weighted as `weighting` says (there they
are sampled by their number of samples and weighted equally). The steps of v and w do not alternate, which changes nothing,
because both start from w^t.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Rate, Variables


@described("own model near the shared one", "Li et al. 2012.04221")
@method_builder
def ditto(
    task: Task,
    *,
    lr: Rate = 0.05,
    personal_lr: Rate | None = None,
    prox_weight: Rate = 1.0,
    epochs: int = 1,
    personal_epochs: int | None = None,
    batch_size: int = 16,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
) -> Method:
    """Ditto. A known client tests with its v. One that never took part trains a v from the global model on its support set.

    Args:
      task, lr, epochs, batch_size, optimizer, weighting: as in `fedavg`.
      personal_lr: learning rate of the personal models; `lr` when not given.
      prox_weight: lambda >= 0, how strongly v is pulled towards the global model; 0 trains v on local data alone.
      personal_epochs: passes over the train view for the personal model; `epochs` when not given.

    Raises:
      ValueError: an option out of range.
    """
    personal_lr = lr if personal_lr is None else personal_lr
    personal_epochs = epochs if personal_epochs is None else personal_epochs
    checks.count("personal_epochs", personal_epochs)
    trainable = task.trainable(masks.variables_shape(task))

    def train_personal(
        key: Key, start: Variables, anchor: Variables, view: ClientView, needed: Any = True
    ) -> tuple[Variables, jax.Array]:
        # v ← v - η (∇f(v) + λ (v - w^t)); the anchor is the model that the server sent, not w after local training.
        loss = local.proximal(task.loss, anchor, prox_weight)
        passes = {"epochs": personal_epochs, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, loss, start, view, optimizer(personal_lr), trainable, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        # The same key and therefore the same batches, as in the authors' code.
        own, own_loss = train_personal(key, received.memory, received.model, data["train"])
        return Trained(model, {"loss": loss, "personal_loss": own_loss}, memory=own)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        return train_personal(key, received.memory, received.model, support, ~received.seen)[0]

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: model,
    )


REDUCES_TO = (
    Reduction(
        "the global model of Ditto is that of FedAvg, whatever lambda is",
        "ditto",
        {"prox_weight": 3.0},
        "fedavg",
        {},
        tests_alike=False,
    ),
)
