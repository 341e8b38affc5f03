"""LG-FedAvg: FedAvg of the head alone; each client keeps its own representation.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think locally, act globally: federated learning with local
and global representations", arXiv 2001.01523, Algorithm 1.

| paper | here | shape |
|---|---|---|
| local, global parameters | leaves inside and outside `personal` | |
| n_i / n | `weighting="samples"` | `[C]` |
| ensemble of a new device | `Ensemble` | leaves `[N, ...]` |

Differs from the authors' code: the first layers are personal, as in the paper (there, on CIFAR-10, the last ones are); clients
count by their samples, as in the paper (there, equally: `weighting="uniform"`); training starts from scratch and no model is
chosen by its test accuracy.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Population, Reduction
from fedjax_meta.data import ClientView
from fedjax_meta.methods.fedavg import fedavg
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


class Ensemble(NamedTuple):
    """What a new client predicts with.

    Attributes:
      personal: all clients' personal leaves, `[N, ...]`.
      shared: the shared leaves.
      seen: bool `[N]`, whose personal leaves are trained.
    """

    personal: PyTree
    shared: PyTree
    seen: jax.Array


def _vote(task: Task, vote: str, ensemble: Ensemble, x: Any) -> jax.Array:
    """The logarithm of the members' joint vote, `[B, K]`."""

    def member(total: jax.Array, entry: tuple[PyTree, jax.Array]) -> tuple[jax.Array, None]:
        part, counts = entry
        logits = task.predict(masks.merge(part, ensemble.shared), x)
        majority = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
        share = jax.nn.softmax(logits) if vote == "mean" else majority
        return total + jnp.where(counts, share, 0), None

    # Before any client has taken part all members are the same untrained model, and all count.
    counts = ensemble.seen | ~jnp.any(ensemble.seen)
    members = (ensemble.personal, counts)
    shape = jax.eval_shape(lambda: member(jnp.zeros(()), jax.tree.map(lambda leaf: leaf[0], members)))[0]
    total, _ = jax.lax.scan(member, jnp.zeros(shape.shape, shape.dtype), members)
    return jnp.log(total / jnp.sum(counts) + jnp.finfo(total.dtype).tiny)


@described("shared head, own body", "Liang et al. 2001.01523")
@method_builder
def lg_fedavg(
    task: Task,
    *,
    personal: masks.MaskSpec = "body",
    vote: str = "mean",
    lr: Rate = 0.01,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    epochs: int = 1,
    batch_size: int = 32,
    finetune_epochs: int = 0,
    finetune: masks.MaskSpec = "all",
    weighting: str = "samples",
) -> Method:
    """LG-FedAvg.

    A client that is none of the N sends its inputs through the representation of every client that has taken part, and the shared
    head. One of the N that no round has asked yet has the initial representation.

    Args:
      task: a classifier.
      personal: mask of the leaves that stay with their client.
      vote: how the members' predictions are joined: "mean" of their probabilities, or "majority" of their classes.
      lr, optimizer, epochs, batch_size: as in `fedavg`.
      finetune_epochs, finetune: as in `fedavg`, for known clients.
      weighting: "samples" (the paper), "uniform" (the authors' code) or "query".

    Raises:
      ValueError: an option out of range.
    """
    checks.one_of("vote", vote, ("mean", "majority"))
    own = masks.resolve(personal, task, name="personal")
    base = fedavg(
        task,
        personal=own,
        lr=lr,
        optimizer=optimizer,
        epochs=epochs,
        batch_size=batch_size,
        finetune_epochs=finetune_epochs,
        finetune=finetune,
        weighting=weighting,
    )
    joint = partial(_vote, task, vote)

    def new_client(key: Key, population: Population, support: ClientView) -> Ensemble:
        del key, support
        return Ensemble(population.personal, masks.split(population.model, own)[1], population.seen)

    def predict(variables: Ensemble | Variables, x: Any) -> jax.Array:
        return joint(variables, x) if isinstance(variables, Ensemble) else task.predict(variables, x)

    return dataclasses.replace(base, predict=predict, new_client=new_client, new_client_reads="personal", needs_classes=True)


REDUCES_TO = (
    Reduction("LG-FedAvg trains as FedAvg with a personal body", "lg_fedavg", {}, "fedavg", {"personal": "body"}),
    Reduction("LG-FedAvg with nothing personal is FedAvg", "lg_fedavg", {"personal": "none"}, "fedavg", {}),
)
