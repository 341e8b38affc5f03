"""FedCAC: FedAvg, except that a client averages its most important parameters only with clients for which the same ones matter.

Wu, Liu, Niu, Zhu, Tang: "Bold but cautious: unlocking the potential of personalized federated learning through cautiously
aggressive collaboration", ICCV 2023, arXiv 2309.11103; the steps are those of TsingZ0/PFLlib, system/flcore/clients/clientcac.py
59-121 and servers/servercac.py 72-118.

| paper | here | shape |
|---|---|---|
| M_i, critical parameters | a client's memory, from `critical` | bools like the model |
| O_ij, overlap | `overlaps` | `[C, C]` |
| customised model of client i | personal leaves (all) | like the model |
| global model | the server's extra state | like the model |
| tau, beta | `share`, `patience` | |

Critical are, in each leaf, the entries with the `share` largest |change * value| of a round. Differs from that code: customised
models come with the first round (there, lines 31 and 121, critical parameters fall back to their initial values once).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.aggregate.ranks import kth_largest
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Trained, keep_mean
from fedjax_meta.data import ClientData, FederatedData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


def critical(before: jax.Array, after: jax.Array, share: float) -> jax.Array:
    """The entries of a leaf whose |change * value| is among the `share` of the largest, but not 0; bools like the leaf."""
    score = jnp.abs((after - before) * after).reshape(-1)
    number = int(share * score.size)
    if number == 0:
        return jnp.zeros(after.shape, bool)
    least = kth_largest(score, number)
    # Where fewer than that many matter, all that matter are critical.
    smallest = jnp.min(jnp.where(score > 1e-20, score, jnp.inf))
    return (score >= jnp.where(least <= 1e-10, smallest, least)).reshape(after.shape)


def overlaps(marks: jax.Array) -> jax.Array:
    """O_ij = 1 - |m_i - m_j|_1 / (2 |m_i|_1), `[C, C]`, of bools `[C, p]`; 0 for a client without any mark (FedCAC)."""
    m = marks.astype(jnp.result_type(float))
    size = jnp.sum(m, 1)
    apart = size[:, None] + size[None, :] - 2 * jnp.dot(m, m.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(size[:, None] > 0, 1 - apart / (2 * jnp.maximum(size, 1)[:, None]), 0)


def partners(overlap: jax.Array, valid: jax.Array, progress: jax.Array) -> jax.Array:
    """Whose models client i averages: itself, and those with O_ij >= mean + progress (max - mean); rows `[C, C]` sum to 1."""
    pairs = valid[:, None] & valid[None, :] & ~jnp.eye(len(valid), dtype=bool)
    mean = jnp.sum(jnp.where(pairs, overlap, 0)) / jnp.maximum(jnp.sum(pairs), 1)
    largest = jnp.max(jnp.where(pairs, overlap, -jnp.inf))
    chosen = pairs & (overlap >= mean + progress * (largest - mean)) | jnp.eye(len(valid), dtype=bool)
    return chosen / jnp.sum(chosen, 1, keepdims=True)


@described("own critical parameters", "Wu et al. 2309.11103")
@method_builder
def fedcac(
    task: Task,
    *,
    lr: Rate = 0.005,
    share: float = 0.5,
    patience: Rate = 100,
    epochs: int = 1,
    batch_size: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
) -> Method:
    """FedCAC. A known client tests with the model that it would start from; one that never took part with the global one.

    Args:
      task: what is learned.
      share: tau in [0, 1], of each leaf's entries that are critical; a Python number. With 0 it is FedAvg.
      patience: beta >= 1, rounds until only the nearest clients are partners; later nobody has any, unless all are equally near.
      lr, epochs, batch_size, optimizer, weighting: as in `fedavg`.

    Raises:
      ValueError: an option out of range.
    """
    checks.share("share", share)
    checks.between("patience", patience, 1, float("inf"))
    trainable = task.trainable(masks.variables_shape(task))

    def begin(received: Received) -> Variables:
        return jax.tree.map(jnp.where, received.memory, received.model, received.extra)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        start, passes = begin(received), {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, start, data["train"], optimizer(lr), trainable, **passes)
        marks = jax.tree.map(
            lambda moves, a, b: critical(a, b, share) if moves else jnp.zeros(b.shape, bool), trainable, start, model
        )
        return Trained(model, {"loss": loss}, memory=marks, statistics=model)

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        del key, data
        marks = jax.vmap(lambda memory: ravel_pytree(masks.split(memory, trainable)[0])[0])(cohort.memory)
        matrix = partners(overlaps(marks), cohort.returned, (state.round + 1.0) / patience)
        return combine(matrix, cohort.personal), cohort.memory, {"partners": jnp.sum(matrix > 0, 1)}

    return Method(
        init=task.init,
        client=client,
        personalize=lambda key, received, support: begin(received),
        predict=task.predict,
        roles=masks.roles(masks.everything(task), trainable),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, bool), model),
        init_extra=lambda model, data: model,
        update_extra=keep_mean,
        statistics_renew_extra=True,
        # The server computes the mean from the models that it reads anyway.
        sends_statistics=False,
        collaborate=Collaboration(mix, reads="personal+memory", gives="personal"),
    )
