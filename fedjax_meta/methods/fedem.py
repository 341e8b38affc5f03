"""FedEM: FedAvg of several models at once; each client predicts with its own mixture of them.

Marfoq, Neglia, Bellet, Kameni, Vidal: "Federated multi-task learning under a mixture of distributions", NeurIPS 2021, arXiv
2108.10252, Algorithm 1.

| paper | here | shape |
|---|---|---|
| theta_m | `components`, a stacked model | leaves `[M, ...]` |
| pi_t | a client's memory | `[M]` |
| q_t(s, m) | `responsibilities` | `[B, M]` |

Differs from the paper: responsibilities are computed anew for each batch from the models that the client received, instead of
being stored for all samples; they are the same numbers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import WEIGHTINGS
from fedjax_meta.builders import method_builder
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.method import Method, Received, Trained
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, PyTree, Rate


class Mixture(NamedTuple):
    """What a client predicts with.

    Attributes:
      components: M models, leaves `[M, ...]`.
      share: the weight of each, `[M]`.
    """

    components: PyTree
    share: jax.Array


def responsibilities(losses: jax.Array, share: jax.Array) -> jax.Array:
    """q ∝ π_m exp(-ℓ_m) of each sample: `[B, M]` from losses `[B, M]` and shares `[M]`."""
    return jax.nn.softmax(jnp.log(jnp.maximum(share, jnp.finfo(share.dtype).tiny))[None] - losses, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class _FedEM:
    """The rules of one FedEM; fields are arguments of `fedem`."""

    task: Task
    components: int
    optimizer: optax.GradientTransformation
    epochs: int
    batch_size: int
    test_steps: int

    def init(self, key: Key) -> PyTree:
        return jax.vmap(self.task.init)(jax.random.split(key, self.components))

    def losses(self, models: PyTree, batch: Batch) -> jax.Array:
        """Cross-entropy of each sample under each component, `[B, M]`."""
        logits = jax.vmap(self.task.predict, (0, None), 1)(models, batch.x)
        labels = jnp.broadcast_to(batch.y[:, None], logits.shape[:2])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)

    def renewed_share(self, models: PyTree, share: jax.Array, view: ClientView) -> jax.Array:
        """One step of expectation and maximisation: π_m ← mean of q(s, m) over the client's samples."""
        batches = view.in_chunks()

        def step(t: Any, total: jax.Array) -> jax.Array:
            batch = batches.get(t, 0)
            return total + batch.weight @ responsibilities(self.losses(models, batch), share)

        total = jax.lax.fori_loop(0, batches.steps, step, jnp.zeros_like(share))
        return jnp.where(view.size > 0, total / jnp.maximum(view.size, 1), share)

    def client(self, key: Key, received: Received, data: ClientData) -> Trained:
        start, share = received.model, received.memory

        def loss(models: PyTree, batch: Batch, key: Key) -> tuple[jax.Array, PyTree]:
            del key
            q = responsibilities(self.losses(start, batch), share)
            value = jnp.sum(jnp.where(batch.weight > 0, jnp.sum(q * self.losses(models, batch), -1), 0))
            return value / jnp.maximum(jnp.sum(batch.weight), 1), models

        passes = {"epochs": self.epochs, "batch_size": self.batch_size}
        everything = masks.everything_like(start)
        models, value = local.train_epochs(key, loss, start, data["train"], self.optimizer, everything, **passes)
        return Trained(models, {"loss": value}, memory=self.renewed_share(start, share, data["train"]))

    def personalize(self, key: Key, received: Received, support: ClientView) -> Mixture:
        """Finds the shares of a client that never took part; the others keep theirs."""
        del key
        steps = jnp.where(received.seen, 0, self.test_steps)

        def step(_: Any, share: jax.Array) -> jax.Array:
            return self.renewed_share(received.model, share, support)

        return Mixture(received.model, jax.lax.fori_loop(0, steps, step, received.memory))

    def predict(self, variables: Mixture, x: Any) -> jax.Array:
        """The logarithm of the mixed probabilities, `[B, K]`."""
        probability = jax.nn.softmax(jax.vmap(self.task.predict, (0, None))(variables.components, x))
        mixed = jnp.tensordot(variables.share, probability, 1)
        return jnp.log(jnp.maximum(mixed, jnp.finfo(mixed.dtype).tiny))

    def init_memory(self, key: Key, model: PyTree, num_clients: int) -> jax.Array:
        del key, model, num_clients
        return jnp.full(self.components, 1 / self.components)


@method_builder
def fedem(
    task: Task,
    *,
    components: int = 3,
    lr: Rate = 0.03,
    epochs: int = 1,
    batch_size: int = 128,
    test_steps: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
) -> Method:
    """FedEM.

    A client that never took part finds its shares on its support set; the models do not move.

    Args:
      task: a classifier without buffers.
      components: M.
      lr: learning rate; may be traced.
      epochs: passes over the train view, after one step of expectation and maximisation.
      batch_size: samples a step.
      test_steps: steps of expectation and maximisation by which a client that never took part finds its shares.
      optimizer: factory `rate -> optax.GradientTransformation`, started afresh in each round.
      weighting: "samples", "query" or "uniform".

    Raises:
      ValueError: a task with buffers, a rate or count out of range, an unknown weighting.
    """
    features.require_no_buffers(task, "fedem")
    checks.positive("lr", lr)
    counts = {"components": components, "epochs": epochs, "batch_size": batch_size, "test_steps": test_steps}
    for name, value in counts.items():
        checks.count(name, value)
    checks.optimizer_factory("optimizer", optimizer)
    checks.one_of("weighting", weighting, WEIGHTINGS)
    rules = _FedEM(task, optimizer=optimizer(lr), **counts)
    return Method(
        init=rules.init,
        client=rules.client,
        personalize=rules.personalize,
        predict=rules.predict,
        roles=masks.roles(masks.nothing(task), masks.everything(task)),
        weighting=weighting,
        init_memory=rules.init_memory,
        needs_classes=True,
    )
