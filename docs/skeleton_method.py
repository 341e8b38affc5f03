"""NAME: FedAvg whose clients are pulled towards the mean of the models that they received so far.

Authors: "Title", venue year, arXiv number, Algorithm number.

| paper | here | shape |
|---|---|---|
| w^t | `received.model` | like the model |
| mu | `prox_weight` | scalar |
| m_i | a client's memory | like the model |

Differs from the paper: say it, or "nothing".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


class Memory(NamedTuple):
    """What a client keeps.

    Attributes:
      mean: mean of the models that it received, like the model.
      rounds: how many these were, a float.
    """

    mean: PyTree
    rounds: jax.Array


def running_mean(memory: Memory, model: PyTree) -> Memory:
    """m ← m + (w - m) / t."""
    rounds = memory.rounds + 1
    mean = jax.tree.map(lambda m, w: m + (w - m) / rounds.astype(m.dtype), memory.mean, model)
    return Memory(mean, rounds)


@described("what it does, in few words", "Author et al. 1234.56789")
@method_builder
def skeleton(
    task: Task,
    *,
    lr: Rate = 0.1,
    prox_weight: Rate = 0.1,
    epochs: int = 1,
    batch_size: int = 32,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
) -> Method:
    """NAME. Every client, known or new, tests with the server's model.

    Args:
      task: what is learned.
      lr: learning rate; may be traced, as `prox_weight`.
      prox_weight: mu >= 0; 0 is FedAvg.
      epochs: passes over the train view in a round.
      batch_size: samples a step.
      optimizer: factory `rate -> optax.GradientTransformation`, started afresh in each round.
      weighting: "samples", "query" or "uniform".

    Raises:
      ValueError: a rate, weight or count out of range.
    """
    # Options of a usual name (`builders.USUAL`) have been checked by now. Check your own: checks.share("mixing", mixing).
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        memory = running_mean(received.memory, received.model)
        loss = local.proximal(task.loss, memory.mean, prox_weight)
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, value = local.train_epochs(key, loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        return Trained(model, {"loss": value}, memory=memory)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        del key, support
        return received.model

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: Memory(jax.tree.map(jnp.zeros_like, model), jnp.zeros(())),
    )


REDUCES_TO = (Reduction("NAME with mu = 0 is FedAvg", "skeleton", {"prox_weight": 0.0}, "fedavg", {}),)
