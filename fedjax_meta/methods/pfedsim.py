"""pFedSim: FedAvg at first; then each client keeps its head and mixes the bodies of clients whose heads are like its own.

Tan, Zhou, Liu, Wang, Yu: "pFedSim: similarity-aware model aggregation towards personalized federated learning", 2023, arXiv
2305.15706; the steps are those of its first author's code, KarhouTam/FL-bench, src/server/pfedsim.py 38-148.

| paper | here | shape |
|---|---|---|
| omega_i, phi_i | leaves outside and inside `head` | |
| the model of client i | `Own.model` | like the model |
| its mixture | `Own.start` | like the model |
| S_ij | `similar_clients`, -log(1 - cosine), normalised | `[C, C]` |

Differs from the code: a mixture is over the bodies of the last cohort of a client (there over all clients, with similarities of
the last cohort in which two of them met), and cosines are those of whole heads (there the mean over classes of those of rows:
`cosines="rows"`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, FederatedData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


class Own(NamedTuple):
    """A client's memory: its trained model, where it starts next, whether it took part after the warm-up."""

    model: Variables
    start: Variables
    personal: jax.Array


def cosines_of(vectors: jax.Array) -> jax.Array:
    """Of each pair, the cosine, or the mean of the cosines of rows: `[C, C]` from vectors `[C, p]`, or rows `[C, K, d]`."""
    vectors = vectors.astype(jnp.promote_types(vectors.dtype, jnp.float32))  # in 16 bits, cosines near 1 are 1
    norm = jnp.sqrt(jnp.sum(vectors**2, -1))
    unit = vectors / jnp.where(norm > 0, norm, 1)[..., None]
    if vectors.ndim == 2:
        return jnp.dot(unit, unit.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.einsum("ikd,jkd->ij", unit, unit, precision=jax.lax.Precision.HIGHEST) / vectors.shape[1]


def similar_clients(cosine: jax.Array, valid: jax.Array) -> jax.Array:
    """pFedSim's S_ij = -log(1 - min(max(0, cosine), 0.9999)) over the valid clients, S_ii = -log(1 - 0.9999), rows normalised.

    Args:
      cosine: `[C, C]`.
      valid: bool `[C]`, whose models came; the others keep their own.
    """
    most, cosine = 0.9999, cosine.astype(jnp.promote_types(cosine.dtype, jnp.float32))
    weight = jnp.where(valid[:, None] & valid[None, :], -jnp.log1p(-jnp.clip(cosine, 0, most)), 0)
    weight = jnp.where(jnp.eye(len(valid), dtype=bool), -jnp.log1p(-jnp.full((), most, weight.dtype)), weight)
    return weight / jnp.sum(weight, 1, keepdims=True)


def class_rows(task: Task, variables: Variables) -> jax.Array:
    """The weights of each class's logit in a linear head, whatever the layout of its leaves: `[K, d]`, its slopes at 0."""
    _, head = features.require_features(task, "the rows of a head")
    width = features.head_shape(task, "the rows of a head")[1]
    return jax.jacrev(lambda z: head(variables, z[None])[0])(jnp.zeros(width))


@described("bodies mixed by like heads", "Tan et al. 2305.15706")
@method_builder
def pfedsim(
    task: Task,
    *,
    lr: Rate = 0.01,
    warmup: int = 50,
    head: masks.MaskSpec = "head",
    cosines: str = "heads",
    epochs: int = 5,
    batch_size: int = 32,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
) -> Method:
    """pFedSim. After the warm-up a known client tests with its trained model; before it, and a new client, with the server's.

    Args:
      task: a model with named layers.
      warmup: rounds of FedAvg; in the authors' code half of all rounds.
      head: mask of the leaves that stay with their client, and whose cosines are taken.
      cosines: of whole "heads", or the mean of those of their "rows" (the authors' code), the weights of the logit of one class
        each; they need a task with features and a linear head.
      lr, epochs, batch_size, optimizer, weighting: as in `fedavg`.

    Raises:
      ValueError: an option out of range; "rows" of a task without features.
    """
    checks.count("warmup", warmup, least=0)
    checks.one_of("cosines", cosines, ("heads", "rows"))
    by_rows = cosines == "rows"
    if by_rows:
        features.require_features(task, "pfedsim")
    own, trainable = masks.resolve(head, task, name="head"), task.trainable(masks.variables_shape(task))
    trainable_head = masks.intersection(own, trainable)

    def compared(model: Variables) -> jax.Array:
        if by_rows:
            return class_rows(task, model)
        return ravel_pytree(masks.split(model, trainable_head)[0])[0]

    def choose(condition: jax.Array, one: PyTree, other: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        late, memory = received.round >= warmup, received.memory
        start = choose(late & memory.personal, memory.start, received.model)
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, start, data["train"], optimizer(lr), trainable, **passes)
        # The server's model stays as the warm-up left it.
        sent = choose(late, received.model, model)
        return Trained(sent, {"loss": loss}, memory=Own(model, model, late), stacked=model)

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        del key, state, data
        heads, bodies = masks.split(cohort.stacked, own)
        matrix = similar_clients(cosines_of(jax.vmap(compared)(cohort.stacked)), cohort.returned)
        memory = cohort.memory._replace(start=masks.merge(heads, combine(matrix, bodies)))
        return cohort.personal, memory, {"own_share": jnp.diagonal(matrix)}

    return Method(
        init=task.init,
        client=client,
        personalize=lambda key, received, support: choose(received.memory.personal, received.memory.model, received.model),
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: Own(model, model, jnp.zeros((), bool)),
        # One model travels each way: the server's in the warm-up, the mixture after it. The server averages what it sees.
        travels=lambda model: (model, ()),
        collaborate=Collaboration(mix, reads="", gives=""),
        refuses={
            "server_optimizer": "after the warm-up the server's model stays, which one with momentum would go on to move",
            "an aggregator with a memory": "its memory would go on to move the server's model, which stays after the warm-up",
        },
    )


REDUCES_TO = (Reduction("pFedSim in its warm-up is FedAvg", "pfedsim", {"warmup": 100}, "fedavg", {}),)
