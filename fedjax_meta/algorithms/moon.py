"""MOON: FedAvg whose clients keep their features near the global model's and away from those of their own last model.

Li, He, Song: "Model-contrastive federated learning", CVPR 2021, arXiv 2103.16257, Algorithm 1.

| paper | here | shape |
|---|---|---|
| z, z_glob, z_prev | `task.features` of the local, received and last local model | `[B, d]` |
| mu, tau | `contrast_weight`, `temperature` | scalars |
| projection head | `with_projection` | |

Differs from the paper: nothing. The features that are contrasted are those of the task; the paper's are the output of a
projection head of two layers, which `with_projection` gives to any task.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Batch, Key, Task, Variables, cross_entropy, weighted_mean


def with_projection(task: Task, width: int, classes: int, *, projection: int = 256) -> Task:
    """The task with two dense layers between its features and a new head: d - d - ReLU - `projection` - classes.

    Args:
      task: a classifier with features; its own head is left out.
      width: d, its number of features.
      classes: K.
      projection: number of features of the result, its head's inputs.

    Raises:
      ValueError: a task without features, or with buffers; a size below 1.
    """
    extract, _ = features.require(task, "with_projection", buffers=False)
    for name, value in (("width", width), ("classes", classes), ("projection", projection)):
        checks.count(name, value)
    own_head = masks.resolve("head", task)
    sizes = {"project1": (width, width), "project2": (width, projection), "head": (projection, classes)}

    def init(key: Key) -> Variables:
        key, *keys = jax.random.split(key, 1 + len(sizes))
        layers = {}
        for layer_key, (name, (inputs, outputs)) in zip(keys, sizes.items(), strict=True):
            kernel_key, bias_key = jax.random.split(layer_key)
            bound = inputs**-0.5
            layers[name] = {
                "kernel": jax.random.uniform(kernel_key, (outputs, inputs), minval=-bound, maxval=bound),
                "bias": jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound),
            }
        return {"base": masks.split(task.init(key), own_head)[1], **layers}

    def dense(layer: Any, x: jax.Array) -> jax.Array:
        return x @ layer["kernel"].T + layer["bias"][None]

    def project(variables: Variables, x: Any) -> jax.Array:
        unused = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), masks.split(masks.variables_shape(task), own_head)[0]
        )
        z = extract(masks.merge(unused, variables["base"]), x)
        return dense(variables["project2"], jax.nn.relu(dense(variables["project1"], z)))

    def predict(variables: Variables, x: Any) -> jax.Array:
        return dense(variables["head"], project(variables, x))

    def loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        del key
        return cross_entropy(predict(variables, batch.x), batch), variables

    return Task(
        init=init,
        loss=loss,
        predict=predict,
        features=project,
        head=lambda variables, z: dense(variables["head"], z),
        layers=(*task.layers[:-1], *sizes),
    )


def contrast(z: jax.Array, towards: jax.Array, away: jax.Array, temperature: Any) -> jax.Array:
    """-log(e^(s+/tau) / (e^(s+/tau) + e^(s-/tau))) of each row, s+ and s- the cosines with `towards` and `away`; `[B]`."""

    def cosine(other: jax.Array) -> jax.Array:
        square = jnp.sum(z**2, -1) * jnp.sum(other**2, -1)
        # A row of zeros (dead units) has no direction: cosine 0, and no gradient rather than 0/0.
        safe = jnp.where(square > 0, square, 1)
        return jnp.where(square > 0, jnp.sum(z * other, -1) * jax.lax.rsqrt(safe), 0)

    return jax.nn.softplus((cosine(away) - cosine(towards)) / temperature)


def moon(
    task: Task,
    *,
    lr: Any = 0.01,
    contrast_weight: Any = 5.0,
    temperature: Any = 0.5,
    epochs: int = 10,
    batch_size: int = 64,
    optimizer: Callable[[Any], optax.GradientTransformation] = lambda lr: optax.chain(
        optax.add_decayed_weights(1e-5), optax.sgd(lr, momentum=0.9)
    ),
    finetune_epochs: int = 0,
    finetune: masks.MaskSpec = "all",
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """MOON. All clients, new ones too, test with the server's model, after fine-tuning if there is any.

    Args:
      task: a classifier with features; for the paper's model, `with_projection(task, ...)`.
      lr: learning rate; may be traced, as the next two.
      contrast_weight: mu; 0 is FedAvg.
      temperature: tau.
      epochs: passes over the train view.
      batch_size: samples a step.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      finetune_epochs: passes over the support view before a client predicts.
      finetune: mask of the leaves that fine-tuning moves.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a task without features, a negative weight, a rate, temperature or count out of range.
    """
    extract, _ = features.require(task, "moon")
    checks.positive("lr", lr)
    checks.not_negative("contrast_weight", contrast_weight)
    checks.positive("temperature", temperature)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.count("finetune_epochs", finetune_epochs, least=0)
    trainable = task.trainable(masks.variables_shape(task))
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order_key, key = jax.random.split(key)

        def penalty(z: jax.Array, batch: Batch) -> jax.Array:
            towards, away = (extract(frozen, batch.x) for frozen in (received.model, received.memory))
            return contrast_weight * weighted_mean(contrast(z, towards, away, temperature), batch.weight)

        batches = data["train"].epochs(order_key, batch_size, epochs)
        model, loss = local.train(key, features.penalised(task, penalty), received.model, batches, optimizer(lr), trainable)
        return Trained(model, client_weight(weighting, data), {"loss": loss}, memory=model)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        if finetune_epochs == 0:
            return received.model
        order_key, key = jax.random.split(key)
        batches = support.epochs(order_key, batch_size, finetune_epochs)
        return local.train(key, task.loss, received.model, batches, optimizer(lr), moves_at_test)[0]

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.nothing(task),
        trainable=trainable,
        init_memory=lambda key, model, num_clients: model,
        **options,
    )
