"""GPFL: FedPer whose features are modulated in two ways: for the client's head, and for class embeddings that all clients share.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan: "GPFL: simultaneously learning global and personalized feature information for
personalized federated learning", ICCV 2023, arXiv 2308.10279; the steps are those of the authors' code, TsingZ0/GPFL,
system/flcore/clients/clientgp.py 68-126 and servers/servergp.py 240-284.

| paper | here | shape |
|---|---|---|
| GCE, class embeddings | `Parts.embedding` | `[K, d]` |
| CoV, gamma and beta | `Parts.gamma`, `Parts.beta`, `modulated` | |
| g, p_i | mean of the received embeddings, over classes or over the client's samples | `[d]` |
| lambda, mu | `embedding_weight`, `decay` | scalars |

Loss: that of the head on CoV(z, p), the cross-entropy of the cosines of CoV(z, g) and the embeddings, and lambda times the
Euclidean norm over the batch of CoV(z, g) minus the received embedding of its class. Differs from the paper, as the code does: p
is not divided by the number of classes (equation 7). Differs from the code: g and p come from the received embeddings (there,
line 114, from the client's old ones, and are 0 in the first round).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.task import Batch, Task, cross_entropy, require_parts
from fedjax_meta.types import Key, Params, PyTree, Rate, Variables


class Parts(NamedTuple):
    """The model of the task, the class embeddings, and the two conditional layers."""

    model: Variables
    embedding: jax.Array
    gamma: PyTree
    beta: PyTree


class Predictor(NamedTuple):
    """What a client tests with: the parts, and its condition p, `[d]`."""

    parts: Parts
    condition: jax.Array


def modulated(parts: Parts, z: jax.Array, condition: jax.Array) -> jax.Array:
    """CoV: ReLU of z (1 + gamma) + beta, `[B, d]`."""
    return jax.nn.relu(z * (conditional(parts.gamma, condition) + 1) + conditional(parts.beta, condition))


def class_shares(view: ClientView, classes: int) -> jax.Array:
    """The share of each class in a view, `[K]`; 0 where the view is empty."""
    return features.class_counts(view, classes) / jnp.maximum(view.size, 1)


def unit_rows(z: jax.Array) -> jax.Array:
    """The rows of `[B, d]` scaled to length 1; a row of zeros stays, without a gradient."""
    square = jnp.sum(z**2, -1, keepdims=True)
    return jnp.where(square > 0, z * jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


def norm(z: jax.Array) -> jax.Array:
    """The Euclidean norm of all numbers; its gradient at 0 is 0."""
    square = jnp.sum(z**2)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def conditional_layer(key: Key, width: int) -> dict[str, jax.Array]:
    """Initial parameters of `conditional`; the key is consumed."""
    return features.dense_layer(key, width, width) | {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def conditional(layer: Params, condition: jax.Array) -> jax.Array:
    """A dense layer, ReLU and layer normalisation of a condition `[d]`."""
    a = jax.nn.relu(layer["kernel"] @ condition + layer["bias"])
    return (a - jnp.mean(a)) * jax.lax.rsqrt(jnp.var(a) + 1e-5) * layer["scale"] + layer["shift"]


@described("features for head and classes", "Zhang et al. 2308.10279")
@method_builder
def gpfl(  # over 80 lines: the loss has three terms that share two conditions
    task: Task,
    *,
    lr: Rate = 0.005,
    embedding_weight: Rate = 0.01,
    decay: Rate = 0.1,
    head: masks.MaskSpec = "head",
    epochs: int = 1,
    batch_size: int = 10,
    new_client_epochs: int = 1,
    weighting: str = "samples",
) -> Method:
    """GPFL. A client that never took part fits its head to its support set, whose classes give its condition p.

    Args:
      task: a classifier with features and named layers, without buffers and dropout.
      embedding_weight: lambda >= 0; may be traced, as `decay`.
      decay: mu >= 0, weight decay of embeddings and conditional layers.
      head: mask of the leaves that stay with their client.
      new_client_epochs: passes over the support set by which a new client fits its head.
      lr, epochs, batch_size, weighting: as in `fedavg`; the optimiser is plain SGD.

    Raises:
      ValueError: a task without features, with buffers, dropout or an opaque loss, an option out of range.
    """
    extract, top = features.require_features(task, "gpfl", buffers=False)
    criterion = require_parts(task, "gpfl", as_predicted=True)
    checks.not_negative("embedding_weight", embedding_weight)
    checks.not_negative("decay", decay)
    (classes, width), own = features.head_shape(task, "gpfl"), masks.resolve(head, task, name="head")

    def init(key: Key) -> Parts:
        of_model, of_embedding, *of_layers = jax.random.split(key, 4)
        gamma, beta = (conditional_layer(key, width) for key in of_layers)
        return Parts(task.init(of_model), jax.random.normal(of_embedding, (classes, width)), gamma, beta)

    shapes = jax.eval_shape(init, jax.random.key(0))
    nothing, everything = (jax.tree.map(lambda _, flag=flag: flag, shapes) for flag in (False, True))
    personal = nothing._replace(model=own)
    step = optax.chain(optax.add_decayed_weights(decay, mask=everything._replace(model=False)), optax.sgd(lr))

    def train(
        key: Key, start: Parts, share: jax.Array, view: ClientView, moves: PyTree, count: int, needed: Any = True
    ) -> tuple[Parts, jax.Array]:
        received = start.embedding
        generic, own_condition = jnp.mean(received, 0), share @ received

        def loss(parts: Parts, batch: Batch, key: Key) -> tuple[jax.Array, Parts]:
            batch, key = criterion.prepare(batch, key)
            z = extract(parts.model, batch.x)
            value = criterion.criterion(top(parts.model, modulated(parts, z, own_condition)), batch)
            shared = modulated(parts, z, generic)
            value += cross_entropy(unit_rows(shared) @ unit_rows(parts.embedding).T, batch)
            away = jnp.where(batch.weight[:, None] > 0, shared - received[batch.y], 0)
            return value + embedding_weight * norm(away), parts

        passes = {"epochs": count, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, loss, start, view, step, moves, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        share = class_shares(data["train"], classes)
        parts, loss = train(key, received.model, share, data["train"], everything, epochs)
        return Trained(parts, {"loss": loss}, memory=share)

    def personalize(key: Key, received: Received, support: ClientView) -> Predictor:
        share = jnp.where(received.seen, received.memory, class_shares(support, classes))
        parts, _ = train(key, received.model, share, support, personal, new_client_epochs, ~received.seen)
        return Predictor(parts, share @ received.model.embedding)

    def predict(variables: Predictor, x: Any) -> jax.Array:
        parts, condition = variables
        return top(parts.model, modulated(parts, extract(parts.model, x), condition))

    return Method(
        init=init,
        client=client,
        personalize=personalize,
        predict=predict,
        roles=masks.roles(personal, everything),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: jnp.zeros(classes),
        needs_classes=True,
    )
