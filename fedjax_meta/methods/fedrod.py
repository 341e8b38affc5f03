"""Fed-RoD: FedAvg with a class-balanced loss, and on its features a personal head that learns what is left to learn locally.

Chen, Chao: "On bridging generic and personalized federated learning for image classification", ICLR 2022, arXiv 2107.00778.

| paper | here | shape |
|---|---|---|
| theta, G | `Model.generic` | |
| P_m | `Model.personal`, or what `Model.hyper` makes of the class shares | like the head |
| balanced softmax, gamma | `balanced_loss`, `balance` | |

Differs from the paper: personal heads begin at 0, so that a client without one predicts as the generic model does. The
hypernetwork is a network of one hidden layer, whose output begins at 0 too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Batch, Key, Task, Variables, cross_entropy


class Model(NamedTuple):
    """Generic model, personal head (like the head's leaves), and with `classes` the hypernetwork that makes such heads."""

    generic: Any
    personal: Any
    hyper: Any


def balanced_loss(logits: jax.Array, batch: Batch, counts: jax.Array, exponent: Any) -> jax.Array:
    """Cross-entropy of softmax(logits + exponent * log counts); a class that the client lacks gets probability 0."""
    offset = jnp.where(counts > 0, exponent * jnp.log(jnp.where(counts > 0, counts, 1)), -jnp.inf)
    return cross_entropy(logits + offset[None], batch)


def fedrod(
    task: Task,
    *,
    lr: Any = 0.01,
    balance: Any = 1.0,
    classes: int | None = None,
    hyper_width: int = 32,
    epochs: int = 5,
    batch_size: int = 40,
    optimizer: Callable[[Any], optax.GradientTransformation] = lambda lr: optax.sgd(lr, momentum=0.9),
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Fed-RoD. A client that never took part predicts with the generic model, or, with a hypernetwork, with the personal head
    that this makes of the class shares of its support set. A client of one class teaches the generic model nothing: its
    balanced loss is 0.

    Args:
      task: a classifier with features, without buffers.
      lr: learning rate; may be traced, as `balance`.
      balance: gamma, how strongly the generic loss is balanced; 0 is FedAvg's loss.
      classes: K, asks for the hypernetwork; without it every client keeps a head of its own.
      hyper_width: hidden units of the hypernetwork.
      epochs: passes over the train view.
      batch_size: samples a step.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a task without features or with buffers, a negative exponent, a rate or count out of range.
    """
    extract, apply_head = features.require(task, "fedrod", buffers=False)
    checks.positive("lr", lr)
    checks.not_negative("balance", balance)
    for name, value in (("hyper_width", hyper_width), ("epochs", epochs), ("batch_size", batch_size)):
        checks.count(name, value)
    if classes is not None:
        checks.count("classes", classes, least=2)
    in_head = masks.resolve("head", task)
    head_shape = masks.split(masks.variables_shape(task), in_head)[0]
    no_head = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), head_shape)
    flat, unravel = ravel_pytree(no_head)

    def init(key: Key) -> Model:
        hyper: Any = ()
        if classes is not None:
            hidden = jax.random.normal(jax.random.fold_in(key, 1), (hyper_width, classes)) * (2 / classes) ** 0.5
            hyper = {"hidden": hidden, "bias": jnp.zeros(hyper_width), "out": jnp.zeros((flat.size, hyper_width))}
        return Model(task.init(key), () if hyper else no_head, hyper)

    def personal_head(model: Model, counts: jax.Array) -> Any:
        if classes is None:
            return model.personal
        share = counts / jnp.maximum(jnp.sum(counts), 1)
        return unravel(model.hyper["out"] @ jax.nn.relu(model.hyper["hidden"] @ share + model.hyper["bias"]))

    def logits(generic: Any, head: Any, z: jax.Array) -> jax.Array:
        body = masks.split(generic, in_head)[1]
        return apply_head(generic, z) + apply_head(masks.merge(head, body), z)

    def counts_of(model: Model, view: ClientView) -> jax.Array:
        return features.class_counts(view, features.feature_shape(task, model.generic, view)[0])

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        counts = counts_of(received.model, data["train"])

        def loss(model: Model, batch: Batch, key: Key) -> tuple[jax.Array, Model]:
            z = extract(model.generic, batch.x)
            generic = balanced_loss(apply_head(model.generic, z), batch, counts, balance)
            frozen, z = jax.lax.stop_gradient((model.generic, z))
            return generic + cross_entropy(logits(frozen, personal_head(model, counts), z), batch), model

        everything = jax.tree.map(lambda _: True, received.model)
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, total = local.train_epochs(key, loss, received.model, data["train"], optimizer(lr), everything, **passes)
        return Trained(model, client_weight(weighting, data), {"loss": total})

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        del key
        model = received.model
        return Model(model.generic, personal_head(model, counts_of(model, support)), ())

    def predict(variables: Model, x: Any) -> jax.Array:
        return logits(variables.generic, variables.personal, extract(variables.generic, x))

    shape = jax.eval_shape(init, jax.random.key(0))
    nothing, everything = (jax.tree.map(lambda _, value=value: value, shape) for value in (False, True))
    return federated(
        init=init,
        client=client,
        personalize=personalize,
        predict=predict,
        personal=nothing._replace(personal=everything.personal),
        trainable=everything,
        **options,
    )
