"""LG-FedAvg: FedAvg of the head alone; each client keeps its own representation.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think locally, act globally: federated learning with local
and global representations", arXiv 2001.01523, Algorithm 1.

| paper | here | shape |
|---|---|---|
| local, global parameters | leaves inside and outside `personal` | |
| ensemble of a new device | `Ensemble` | leaves `[N, ...]` |

Differs from the authors' code: the first layers are personal, as in the paper (there, on CIFAR-10, the last ones are);
training starts from scratch and no model is chosen by its test accuracy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks, masks
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.algorithms.fedavg import fedavg
from fedjax_meta.data.federated import ClientView
from fedjax_meta.task import Key, Task, Variables


class Ensemble(NamedTuple):
    """What a new client predicts with: everybody's personal leaves, the shared ones, and whose personal leaves are trained."""

    personal: Any
    shared: Any
    seen: jax.Array


def lg_fedavg(
    task: Task, *, personal: masks.MaskSpec = "body", vote: str = "mean", weighting: str = "uniform", **options: Any
) -> Algorithm:
    """LG-FedAvg. A new client sends its inputs through every client's representation and the shared head.

    Args:
      task: a classifier.
      personal: mask of the leaves that stay with their client.
      vote: how the members' predictions are joined: "mean" of their probabilities, or "majority" of their classes.
      weighting: "uniform", "samples" or "query".
      **options: those of `fedavg`. Fine-tuning is for known clients.

    Raises:
      ValueError: as `fedavg`; an unknown vote.
    """
    checks.one_of("vote", vote, ("mean", "majority"))
    own = masks.resolve(personal, task, name="personal")
    base = fedavg(task, personal=own, weighting=weighting, **options)

    def predict(variables: Any, x: Any) -> jax.Array:
        if not isinstance(variables, Ensemble):
            return task.predict(variables, x)

        def member(carry: Any, entry: Any) -> tuple[Any, None]:
            part, trained = entry
            logits = task.predict(masks.merge(part, variables.shared), x)
            majority = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
            share = jax.nn.softmax(logits) if vote == "mean" else majority
            return carry + jnp.where(trained, share, 0), None

        # Before anybody has taken part all members are the same untrained model; they then count all.
        trained = variables.seen | ~jnp.any(variables.seen)
        shape = jax.eval_shape(
            lambda: member(jnp.zeros(()), jax.tree.map(lambda leaf: leaf[0], (variables.personal, trained)))
        )[0]
        total, _ = jax.lax.scan(member, jnp.zeros(shape.shape, shape.dtype), (variables.personal, trained))
        return jnp.log(total / jnp.sum(trained) + jnp.finfo(total.dtype).tiny)

    def personalize(key: Key, state: State, support: ClientView, client: Any) -> Variables:
        if client is None:
            return Ensemble(state.personal, masks.split(state.model, own)[1], state.seen)
        return base.personalize(key, state, support, client)

    return base._replace(personalize=personalize, predict=predict)
