"""FedRep and FedBABU: clients train head and body one after the other, or the body alone, where FedAvg trains both at once.

FedRep keeps the heads with their clients and trains the head first, then the body. FedBABU leaves the head as it was
initialised, trains and averages the body, and fine-tunes at test time.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting shared representations for personalized federated learning", ICML 2021,
arXiv 2102.07078, Algorithm 1. Oh, Kim, Yun: "FedBABU: toward enhanced representation for federated image classification", ICLR
2022, arXiv 2106.06042, Algorithm 1.

| paper | here | shape |
|---|---|---|
| h_i, phi | leaves inside and outside `head` | |
| tau, epochs of the body | `head_epochs`, `body_epochs` | |
| alpha | `lr` (body), `head_lr` | |

Differs from the papers: the learning rate does not decay over the rounds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Mask, Rate, Variables

FEDREP_SGD = partial(optax.sgd, momentum=0.5)
"""The local optimiser of FedRep."""
FEDBABU_SGD = partial(optax.sgd, momentum=0.9)
"""The local optimiser of FedBABU."""


@described("own head, trained first", "Collins et al. 2102.07078")
@method_builder
def fedrep(
    task: Task,
    *,
    lr: Rate = 0.01,
    head_lr: Rate | None = None,
    head_epochs: int = 10,
    body_epochs: int = 1,
    batch_size: int = 10,
    head: masks.MaskSpec = "head",
    share_head: bool = False,
    finetune: masks.MaskSpec = "head",
    finetune_epochs: int = 0,
    new_client_epochs: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = FEDREP_SGD,
    weighting: str = "samples",
) -> Method:
    """FedRep. A client that never took part fine-tunes the server's model, whose head is as it was initialised.

    A round takes `head_epochs + body_epochs` passes; for as many gradients as `fedavg(epochs=E)`, let them sum to E.

    Args:
      task, batch_size, finetune, weighting: as in `fedavg`.
      lr: learning rate of the body.
      head_lr: of the head and of fine-tuning; `lr` when not given.
      head_epochs: passes over the train view for the head, first.
      body_epochs: passes for the body, second.
      head: mask of the leaves that the head consists of.
      share_head: whether the head belongs to the server's model; otherwise it stays with its client. A shared head with
        `head_epochs=0` is frozen.
      finetune_epochs, new_client_epochs: passes over the support view of a client that took part, and of one that did not.
      optimizer: as in `fedavg`, started afresh in each phase.

    Raises:
      ValueError: an option out of range.
    """
    head_lr = lr if head_lr is None else head_lr
    checks.count("head_epochs", head_epochs, least=0)
    checks.count("body_epochs", body_epochs, least=0)
    trainable = task.trainable(masks.variables_shape(task))
    in_head = masks.resolve(head, task, name="head")
    head_leaves, body_leaves = (masks.intersection(mask, trainable) for mask in (in_head, masks.complement(in_head)))
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def phase(
        key: Key, start: Variables, view: ClientView, epochs: int, rate: Rate, moving: Mask, needed: Any = True
    ) -> tuple[Variables, jax.Array]:
        passes = {"epochs": epochs, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, start, view, optimizer(rate), moving, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, head_loss = phase(tagged(key, "head"), received.model, data["train"], head_epochs, head_lr, head_leaves)
        # The round's own key, so that without a head phase the batches are those of FedAvg.
        model, loss = phase(key, model, data["train"], body_epochs, lr, body_leaves)
        return Trained(model, {"loss": loss, "head_loss": head_loss})

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen, model = received.seen, received.model
        model, _ = phase(tagged(key, "known"), model, support, finetune_epochs, head_lr, moves_at_test, seen)
        return phase(tagged(key, "new"), model, support, new_client_epochs, head_lr, moves_at_test, ~seen)[0]

    personal = masks.nothing(task) if share_head else in_head
    frozen = head_leaves if share_head and head_epochs == 0 else None
    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(personal, trainable, frozen),
        weighting=weighting,
    )


@described("body alone, then fine-tuning", "Oh et al. 2106.06042")
@method_builder
def fedbabu(
    task: Task,
    *,
    lr: Rate = 0.1,
    epochs: int = 1,
    batch_size: int = 50,
    finetune_lr: Rate | None = None,
    finetune_epochs: int = 5,
    finetune: masks.MaskSpec = "all",
    head: masks.MaskSpec = "head",
    optimizer: Callable[[Any], optax.GradientTransformation] = FEDBABU_SGD,
    weighting: str = "uniform",
) -> Method:
    """FedBABU: the head is frozen, clients train the body alone, and every client fine-tunes before it predicts.

    Args:
      task, lr, epochs, batch_size, finetune_epochs, optimizer, weighting: as in `fedavg`.
      finetune_lr: learning rate of fine-tuning; `lr` when not given.
      finetune: mask of the leaves that fine-tuning moves, e.g. "head" or "body" alone.
      head: mask of the leaves that are frozen.

    Raises:
      ValueError: an option out of range.
    """
    if finetune_lr is not None:
        checks.positive("finetune_lr", finetune_lr)
    return fedrep(
        task,
        lr=lr,
        head_lr=finetune_lr,
        head_epochs=0,
        body_epochs=epochs,
        batch_size=batch_size,
        head=head,
        share_head=True,
        finetune=finetune,
        finetune_epochs=finetune_epochs,
        new_client_epochs=finetune_epochs,
        optimizer=optimizer,
        weighting=weighting,
    )


REDUCES_TO = (
    Reduction(
        "FedRep without a head is FedAvg",
        "fedrep",
        {"head": "none", "head_epochs": 0, "body_epochs": 2, "optimizer": optax.sgd},
        "fedavg",
        {"epochs": 2},
    ),
    Reduction(
        "FedBABU without a head is FedAvg with equal weights",
        "fedbabu",
        {"head": "none", "optimizer": optax.sgd},
        "fedavg",
        {"weighting": "uniform"},
        tests_alike=False,
    ),
)
