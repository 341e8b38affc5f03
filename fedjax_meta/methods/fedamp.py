"""FedAMP: no global model; the server keeps for each client a mixture of all models, and the client is drawn to it.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized cross-silo federated learning on non-IID data", AAAI 2021, arXiv
2007.03797, Algorithm 1; HeurFedAMP from its section on deep networks.

| paper | here | shape |
|---|---|---|
| w_i | personal leaves (all) | |
| u_i | a client's memory | like the model |
| alpha_k, lambda, sigma | `step`, `prox_weight`, `width` | scalars |
| xi | `attention`, `cosine_attention` | `[C, C]` |

Differs from the paper: the kernel's squared distances can be taken relative to their mean (`relative`), because those of
networks underflow it otherwise; a row whose weights exceed 1 is normalised, with nothing left for the client itself.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.algorithm import Algorithm, Cohort, FederationOptions, Received, State, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView, FederatedData
from fedjax_meta.task import Key, Task, Variables


def attention(gram: jax.Array, valid: jax.Array, *, step: Any, width: Any, relative: bool) -> jax.Array:
    """ξ_ij = step * exp(-|w_i - w_j|² / width) / width for j ≠ i and the rest for i itself; `[C, C]`, from a Gram matrix."""
    square = jnp.diagonal(gram)
    pairs = valid[:, None] & valid[None, :] & ~jnp.eye(len(square), dtype=bool)
    distance = jnp.where(pairs, jnp.maximum(square[:, None] + square[None, :] - 2 * gram, 0), 0)
    if relative:
        mean = jnp.sum(distance) / jnp.maximum(jnp.sum(pairs), 1)
        distance = distance / jnp.where(mean > 0, mean, 1)
    weights = jnp.where(pairs, step * jnp.exp(-distance / width) / width, 0)
    weights = weights / jnp.maximum(jnp.sum(weights, 1, keepdims=True), 1)
    return weights + jnp.diag(1 - jnp.sum(weights, 1))


def cosine_attention(gram: jax.Array, valid: jax.Array, *, width: Any, own_share: Any) -> jax.Array:
    """HeurFedAMP: a fixed share for oneself, the rest by softmax(width * cosine) over the others; `[C, C]`."""
    norm = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), jnp.finfo(gram.dtype).tiny))
    pairs = valid[:, None] & valid[None, :] & ~jnp.eye(len(norm), dtype=bool)
    score = jnp.where(pairs, width * gram / (norm[:, None] * norm[None, :]), -jnp.inf)
    any_other = jnp.any(pairs, 1, keepdims=True)
    others = jnp.where(any_other, jax.nn.softmax(jnp.where(any_other, score, 0), -1), 0)
    return (1 - own_share) * others + jnp.diag(jnp.where(any_other[:, 0], own_share, 1))


def fedamp(
    task: Task,
    *,
    lr: Any = 0.01,
    step: Any = 1.0,
    prox_weight: Any = 1.0,
    width: Any = 1.0,
    relative: bool = True,
    kernel: str = "exponential",
    own_share: Any = 0.1,
    epochs: int = 10,
    batch_size: int = 32,
    new_client_epochs: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """FedAMP. The paper has no rule for new clients: a client that never took part trains on its support set from the mean of
    all clients' models (from the initial model before there are any), drawn to it like the others to theirs.

    Args:
      task: what is learned.
      lr: learning rate; may be traced, as the next three and `own_share`.
      step: alpha_k.
      prox_weight: lambda; the proximal term has weight lambda / alpha_k.
      width: sigma, of the kernel; for "cosine" the factor of the cosines.
      relative: whether the kernel's distances are taken relative to their mean.
      kernel: "exponential" (FedAMP) or "cosine" (HeurFedAMP).
      own_share: weight of a client's own model with "cosine".
      epochs: passes over the train view.
      batch_size: samples a step.
      new_client_epochs: passes over the support view of a client that never took part.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      **options: those of `federated`.

    Raises:
      ValueError: a negative weight, a rate, width or count out of range, an unknown kernel.
    """
    checks.positive("lr", lr)
    checks.positive("step", step)
    checks.positive("width", width)
    checks.not_negative("prox_weight", prox_weight)
    checks.one_of("kernel", kernel, ("exponential", "cosine"))
    checks.between("own_share", own_share, 0, 1)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.count("new_client_epochs", new_client_epochs, least=0)
    trainable = task.trainable(masks.variables_shape(task))

    def train(
        key: Key, start: Any, cloud: Any, view: ClientView, count: int, needed: Any = True
    ) -> tuple[Variables, jax.Array]:
        loss = local.proximal(task.loss, cloud, prox_weight / step)
        passes = {"epochs": count, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, loss, start, view, optimizer(lr), trainable, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, loss = train(key, received.model, received.memory, data["train"], epochs)
        size = jnp.asarray(data["train"].size, jnp.result_type(float))
        return Trained(model, size, {"loss": loss}, memory=received.memory, statistics=model, statistics_weight=size)

    def exchange(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[Any, Any]:
        del key, state, data
        parameters = masks.split(cohort.personal, trainable)[0]
        flat = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(parameters)], 1)
        valid = cohort.returned
        if kernel == "cosine":
            matrix = cosine_attention(flat @ flat.T, valid, width=width, own_share=own_share)
        else:
            # Distances do not see a common shift, and rounding does.
            flat = flat - jnp.mean(flat, 0, keepdims=True)
            matrix = attention(flat @ flat.T, valid, step=step, width=width, relative=relative)
        mixed = combine(matrix, cohort.personal)

        def where_returned(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(valid.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return cohort.personal, jax.tree.map(where_returned, mixed, cohort.memory)

    def update_mean(state: State, mean: Any, weight: jax.Array, _: int) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), mean, state.extra)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen = received.seen
        start = jax.tree.map(lambda own, mean: jnp.where(seen, own, mean), received.model, received.extra)
        return train(key, start, received.extra, support, new_client_epochs, ~seen)[0]

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.everything(task),
        trainable=trainable,
        init_memory=lambda key, model, num_clients: model,
        init_extra=lambda model, data: model,
        update_extra=update_mean,
        collaborate=exchange,
        **options,
    )
