"""FedAvg, and methods that differ from it only in which leaves are personal and in fine-tuning: FedPer, local-only, FedAvg-FT.

Clients start from the server's model, train on all their samples, and the server takes the weighted mean of their models.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-efficient learning of deep networks from decentralized data",
AISTATS 2017, arXiv 1602.05629, Algorithm 1. FedPer: Arivazhagan et al., arXiv 1912.00818. The defaults of epochs and batch size
are those of Nguyen and Cao, "Meta-learning and personalization layer in federated learning" (the FedMeta-Per paper), whose
FedAvgMeta and FedPerMeta are FedAvg and FedPer with one epoch of fine-tuning on a test client's support set.

| paper | here | shape |
|---|---|---|
| w_B, w_P | leaves outside and inside `personal` | |
| E, B, eta | `epochs`, `batch_size`, `lr` | |
| n_i / sum n | `weighting="samples"` | `[C]` |

Differs from the FedMeta-Per code: a client shuffles its samples as one set, not support before query.
"""

from collections.abc import Callable
from typing import Any

import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Params, Rate, Variables


@described("the mean of all models", "McMahan et al. 1602.05629")
@method_builder
def fedavg(
    task: Task,
    *,
    lr: Rate = 0.01,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    epochs: int = 1,
    batch_size: int = 32,
    finetune_epochs: int = 0,
    finetune_lr: Rate | None = None,
    finetune: masks.MaskSpec = "all",
    finetune_full_batch: bool = False,
    new_client_epochs: int | None = None,
    personal: masks.MaskSpec = "none",
    weighting: str = "samples",
) -> Method:
    """Federated averaging; `personal` leaves stay with their client and are never averaged.

    A client that never took part starts from the server's model, whose personal leaves are as they were initialised, and
    fine-tunes it for `new_client_epochs`.

    Args:
      task: what is learned.
      lr: learning rate of local training; may be traced, like every `Rate`.
      optimizer: factory `rate -> optax.GradientTransformation`, started afresh in each round.
      epochs: passes over a client's train view in a round.
      batch_size: samples per step; the last batch of a pass may be smaller.
      finetune_epochs: passes over the support view before a client predicts; 0 tests the model as it is.
      finetune_lr: learning rate of fine-tuning; `lr` when not given.
      finetune: mask of the leaves that fine-tuning moves.
      finetune_full_batch: take `finetune_epochs` steps on the whole support view instead (the "one update" of Xia and Cui).
      new_client_epochs: passes over the support view of a client that never took part; `finetune_epochs` when not given.
      personal: mask of the leaves that stay with their client; "all" is local-only training.
      weighting: "samples", "query" or "uniform".

    Raises:
      ValueError: an option out of range.
    """
    if finetune_lr is not None:
        checks.positive("finetune_lr", finetune_lr)
    trainable = task.trainable(masks.variables_shape(task))
    finetuner = optimizer(lr if finetune_lr is None else finetune_lr)
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        return Trained(model, {"loss": loss})

    def adapted(key: Key, model: Params, support: ClientView, count: int, needed: Any = True) -> Variables:
        if finetune_full_batch:
            batches = support.full(count).only_if(needed)
            return local.train(key, task.loss, model, batches, finetuner, moves_at_test)[0]
        passes = {"epochs": count, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, model, support, finetuner, moves_at_test, **passes)[0]

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        if new_client_epochs is None:
            return adapted(key, received.model, support, finetune_epochs)
        model = adapted(tagged(key, "known"), received.model, support, finetune_epochs, received.seen)
        return adapted(tagged(key, "new"), model, support, new_client_epochs, ~received.seen)

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.resolve(personal, task, name="personal"), trainable),
        weighting=weighting,
    )


@described("FedAvg, then one epoch", "Nguyen, Cao (FedMeta-Per)")
@variant(fedavg, finetune_epochs=1)
def fedavg_meta(task: Task) -> Method:
    """FedAvgMeta of the FedMeta-Per paper: FedAvg whose clients fine-tune for one epoch before they predict."""


@described("FedAvg, then one step")
@variant(fedavg, finetune_epochs=1, finetune_full_batch=True)
def fedavg_one_step(task: Task) -> Method:
    """FedAvg with one full-batch update before a client predicts, as Xia and Cui test it beside Per-FedAvg-Reptile.

    Batch norm has the statistics of each chunk of the support view, see `ClientView.full`.
    """


@described("FedAvg, then fine-tuning")
@variant(fedavg, finetune="head", finetune_epochs=5)
def fedavg_ft(task: Task) -> Method:
    """FedAvg-FT: FedAvg whose clients fine-tune the head before they predict, as the FedPAC paper tests it."""


@described("FedAvg with own head", "Arivazhagan et al. 1912.00818")
@variant(fedavg, personal="head")
def fedper(task: Task) -> Method:
    """FedPer: FedAvg whose last layers stay with their client (arXiv 1912.00818).

    The paper has no rule for new clients: a client that never took part gets the initial, untrained head. Set
    `new_client_epochs` so that it fits the head first (with `finetune="head"`, on the shared body).
    """


@described("FedPer, then one epoch", "Nguyen, Cao (FedMeta-Per)")
@variant(fedper, finetune_epochs=1)
def fedper_meta(task: Task) -> Method:
    """FedPerMeta of the FedMeta-Per paper: FedPer whose clients fine-tune for one epoch before they predict."""


@described("every client trains by itself", "")
@variant(fedavg, personal="all")
def local_only(task: Task) -> Method:
    """Every client trains by itself and nothing is averaged.

    A client that never took part trains the initial model for `new_client_epochs` on its support set.
    """


REDUCES_TO = (
    Reduction("FedPer with nothing personal is FedAvg", "fedper", {"personal": "none"}, "fedavg", {}),
    Reduction("local-only training is FedAvg with everything personal", "local_only", {}, "fedavg", {"personal": "all"}),
)
