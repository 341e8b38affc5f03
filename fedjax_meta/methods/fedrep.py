"""FedRep and FedBABU: head and body are trained one after the other, or the body alone, where FedAvg trains both at once.

FedRep keeps the heads with their clients and trains head, then body. FedBABU leaves the head as it was initialised, trains and
averages the body, and fine-tunes at test time.

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
from typing import Any, Unpack

import jax
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Key, Task, Variables


def fedrep(
    task: Task,
    *,
    lr: Any = 0.01,
    head_lr: Any = None,
    head_epochs: int = 10,
    body_epochs: int = 1,
    batch_size: int = 10,
    head: masks.MaskSpec = "head",
    share_head: bool = False,
    finetune: masks.MaskSpec = "head",
    finetune_epochs: int = 0,
    new_client_epochs: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = lambda lr: optax.sgd(lr, momentum=0.5),
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """FedRep. A client that never took part fine-tunes from the server's model, whose head is as it was initialised.

    Args:
      task: what is learned.
      lr: learning rate of the body; may be traced.
      head_lr: of the head and of fine-tuning; `lr` when not given.
      head_epochs: passes over the train view for the head, first.
      body_epochs: passes for the body, then.
      batch_size: samples a step.
      head: mask of the leaves that the head consists of.
      share_head: whether the head belongs to the server's model; otherwise it stays with its client.
      finetune: mask of the leaves that move before a client predicts.
      finetune_epochs: passes over the support view of a client that took part.
      new_client_epochs: passes over the support view of one that did not.
      optimizer: `lr -> optax transformation`, started fresh in each phase.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a rate or count out of range, an unknown mask.
    """
    head_lr = lr if head_lr is None else head_lr
    checks.positive("lr", lr)
    checks.positive("head_lr", head_lr)
    checks.count("batch_size", batch_size)
    counts = {"head_epochs": head_epochs, "body_epochs": body_epochs}
    for name, value in {**counts, "finetune_epochs": finetune_epochs, "new_client_epochs": new_client_epochs}.items():
        checks.count(name, value, least=0)
    trainable = task.trainable(masks.variables_shape(task))
    own = masks.resolve(head, task, name="head")
    head_leaves, body_leaves = (masks.intersection(mask, trainable) for mask in (own, masks.complement(own)))
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def phase(key: Key, start: Any, view: ClientView, epochs: int, rate: Any, moving: Any, needed: Any = True) -> Any:
        passes = {"epochs": epochs, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, start, view, optimizer(rate), moving, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        head_key, body_key = jax.random.split(key)
        model, head_loss = phase(head_key, received.model, data["train"], head_epochs, head_lr, head_leaves)
        model, loss = phase(body_key, model, data["train"], body_epochs, lr, body_leaves)
        return Trained(model, client_weight(weighting, data), {"loss": loss, "head_loss": head_loss})

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen_key, new_key = jax.random.split(key)
        model, _ = phase(seen_key, received.model, support, finetune_epochs, head_lr, moves_at_test, received.seen)
        return phase(new_key, model, support, new_client_epochs, head_lr, moves_at_test, ~received.seen)[0]

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.nothing(task) if share_head else own,
        trainable=trainable,
        **options,
    )


def fedbabu(
    task: Task, *, lr: Any = 0.1, epochs: int = 1, finetune_lr: Any = None, finetune_epochs: int = 5, **options: Any
) -> Algorithm:
    """FedBABU: the head is never trained, only the body; every client fine-tunes all of it before it predicts.

    Other options are those of `fedrep`; `finetune="head"` or `"body"` gives the paper's ablations.
    """
    defaults = {"batch_size": 50, "weighting": "uniform", "finetune": "all"}
    defaults["optimizer"] = lambda lr: optax.sgd(lr, momentum=0.9)
    return fedrep(
        task,
        lr=lr,
        head_lr=lr if finetune_lr is None else finetune_lr,
        head_epochs=0,
        body_epochs=epochs,
        share_head=True,
        finetune_epochs=finetune_epochs,
        new_client_epochs=finetune_epochs,
        **{**defaults, **options},
    )
