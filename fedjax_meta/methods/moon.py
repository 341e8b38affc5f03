"""MOON: FedAvg whose clients keep their features near the global model's and away from those of their own last model.

Li, He, Song: "Model-contrastive federated learning", CVPR 2021, arXiv 2103.16257, Algorithm 1.

| paper | here | shape |
|---|---|---|
| z, z_glob, z_prev | `task.features` of the local, received and last local model | `[B, d]` |
| mu, tau | `contrast_weight`, `temperature` | scalars |
| projection head | `features.with_projection` | |

Differs from the paper: the last local model of a client that has none is the model that it receives, where the contrast has no
gradient at first. The features that are contrasted are those of the task. The paper's are the output of a projection head of
two layers, which `features.with_projection` adds to any task.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData
from fedjax_meta.methods.fedavg import fedavg
from fedjax_meta.task import Batch, Task, require_parts, weighted_mean
from fedjax_meta.types import Key, Rate


def contrast(z: jax.Array, towards: jax.Array, away: jax.Array, temperature: Rate) -> jax.Array:
    """-log(e^(s+/tau) / (e^(s+/tau) + e^(s-/tau))) of each row, s+ and s- the cosines with `towards` and `away`; `[B]`."""

    def cosine(other: jax.Array) -> jax.Array:
        square = jnp.sum(z**2, -1) * jnp.sum(other**2, -1)
        # A row of zeros (dead units) has no direction: cosine 0, and no gradient rather than 0/0.
        safe = jnp.where(square > 0, square, 1)
        return jnp.where(square > 0, jnp.sum(z * other, -1) * jax.lax.rsqrt(safe), 0)

    return jax.nn.softplus((cosine(away) - cosine(towards)) / temperature)


def momentum_with_decay(rate: Rate) -> optax.GradientTransformation:
    """The paper's local optimiser: SGD with momentum 0.9 and weight decay 1e-5."""
    return optax.chain(optax.add_decayed_weights(1e-5), optax.sgd(rate, momentum=0.9))


@described("FedAvg, contrasted features", "Li et al. 2103.16257")
@method_builder
def moon(
    task: Task,
    *,
    lr: Rate = 0.01,
    contrast_weight: Rate = 5.0,
    temperature: Rate = 0.5,
    epochs: int = 10,
    batch_size: int = 64,
    optimizer: Callable[[Any], optax.GradientTransformation] = momentum_with_decay,
    finetune_epochs: int = 0,
    finetune_lr: Rate | None = None,
    finetune: masks.MaskSpec = "all",
    weighting: str = "samples",
) -> Method:
    """MOON. All clients, known or new, test with the server's model, after fine-tuning if there is any.

    Args:
      task: a classifier with features; for the paper's model, `features.with_projection(task, ...)`.
      contrast_weight: mu >= 0; 0 is FedAvg.
      temperature: tau > 0.
      lr, epochs, batch_size, optimizer, finetune_epochs, finetune_lr, finetune, weighting: as in `fedavg`.

    Raises:
      ValueError: a task without features or with an opaque loss, an option out of range.
    """
    extract, _ = features.require_features(task, "moon")
    require_parts(task, "moon")
    checks.not_negative("contrast_weight", contrast_weight)
    checks.positive("temperature", temperature)
    trainable = task.trainable(masks.variables_shape(task))
    base = fedavg(
        task,
        lr=lr,
        batch_size=batch_size,
        optimizer=optimizer,
        finetune_epochs=finetune_epochs,
        finetune_lr=finetune_lr,
        finetune=finetune,
        weighting=weighting,
    )

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        def penalty(z: jax.Array, batch: Batch) -> jax.Array:
            towards, away = (extract(fixed, batch.x) for fixed in (received.model, received.memory))
            return contrast_weight * weighted_mean(contrast(z, towards, away, temperature), batch.weight)

        loss = features.penalised(task, penalty, "moon")
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, value = local.train_epochs(key, loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        return Trained(model, {"loss": value}, memory=model)

    return dataclasses.replace(base, client=client, init_memory=lambda key, model, num_clients: model, needs_classes=True)


REDUCES_TO = (Reduction("MOON with mu = 0 is FedAvg", "moon", {"contrast_weight": 0.0, "optimizer": optax.sgd}, "fedavg", {}),)
