"""FedEM: FedAvg of several models at once, and each client predicts with its own mixture of them.

Marfoq, Neglia, Bellet, Kameni, Vidal: "Federated multi-task learning under a mixture of distributions", NeurIPS 2021, arXiv
2108.10252, Algorithm 1.

| paper | here | shape |
|---|---|---|
| theta_m | `components`, a stacked model | leaves `[M, ...]` |
| pi_t | a client's memory | `[M]` |
| q_t(s, m) | `responsibilities` | `[B, M]` |

Differs from the paper: responsibilities are found anew for each batch from the models that the client received, instead of
being stored for all samples; they are the same numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Batch, Key, Task, Variables


class Mixture(NamedTuple):
    """What a client predicts with: M models and its share of each, `[M]`."""

    components: Any
    share: jax.Array


def responsibilities(losses: jax.Array, share: jax.Array) -> jax.Array:
    """q ∝ π_m exp(-ℓ_m) of each sample: `[B, M]` from losses `[B, M]` and shares `[M]`."""
    return jax.nn.softmax(jnp.log(jnp.maximum(share, jnp.finfo(share.dtype).tiny))[None] - losses, -1)


def fedem(
    task: Task,
    *,
    components: int = 3,
    lr: Any = 0.03,
    epochs: int = 1,
    batch_size: int = 128,
    test_steps: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """FedEM. A client that never took part finds its shares on its support set, with the models held as they are.

    Args:
      task: a classifier without buffers.
      components: M.
      lr: learning rate; may be traced.
      epochs: passes over the train view, after one step of expectation and maximisation.
      batch_size: samples a step.
      test_steps: steps of expectation and maximisation by which a client that never took part finds its shares.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a task with buffers, a rate or count out of range.
    """
    features.require_plain(task, "fedem")
    checks.positive("lr", lr)
    for name, value in (
        ("components", components),
        ("epochs", epochs),
        ("batch_size", batch_size),
        ("test_steps", test_steps),
    ):
        checks.count(name, value)

    def losses(models: Any, batch: Batch) -> jax.Array:
        """Cross-entropy of each sample under each component, `[B, M]`."""
        logits = jax.vmap(task.predict, (0, None), 1)(models, batch.x)
        labels = jnp.broadcast_to(batch.y[:, None], logits.shape[:2])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)

    def maximise(models: Any, share: jax.Array, view: ClientView) -> jax.Array:
        """π_m ← mean of q(s, m) over the client's samples."""
        batches = view.in_chunks()

        def step(t: Any, total: jax.Array) -> jax.Array:
            batch = batches.get(t, 0)
            return total + batch.weight @ responsibilities(losses(models, batch), share)

        total = jax.lax.fori_loop(0, batches.steps, step, jnp.zeros_like(share))
        return jnp.where(view.size > 0, total / jnp.maximum(view.size, 1), share)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        frozen, share = received.model, received.memory

        def loss(models: Any, batch: Batch, key: Key) -> tuple[jax.Array, Any]:
            q = responsibilities(losses(frozen, batch), share)
            value = jnp.sum(jnp.where(batch.weight > 0, jnp.sum(q * losses(models, batch), -1), 0))
            return value / jnp.maximum(jnp.sum(batch.weight), 1), models

        passes = {"epochs": epochs, "batch_size": batch_size}
        models, value = local.train_epochs(key, loss, frozen, data["train"], optimizer(lr), everything, **passes)
        renewed = maximise(frozen, share, data["train"])
        return Trained(models, client_weight(weighting, data), {"loss": value}, memory=renewed)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        del key
        steps = jnp.where(received.seen, 0, test_steps)
        find = lambda _, share: maximise(received.model, share, support)  # noqa: E731
        return Mixture(received.model, jax.lax.fori_loop(0, steps, find, received.memory))

    def predict(variables: Mixture, x: Any) -> jax.Array:
        probability = jax.nn.softmax(jax.vmap(task.predict, (0, None))(variables.components, x))
        mixed = jnp.tensordot(variables.share, probability, 1)
        return jnp.log(jnp.maximum(mixed, jnp.finfo(mixed.dtype).tiny))

    def init(key: Key) -> Any:
        return jax.vmap(task.init)(jax.random.split(key, components))

    shape = masks.variables_shape(task)
    everything = jax.tree.map(lambda _: True, shape)
    return federated(
        init=init,
        client=client,
        personalize=personalize,
        predict=predict,
        personal=masks.nothing(task),
        trainable=everything,
        init_memory=lambda key, model, num_clients: jnp.full(components, 1 / components),
        **options,
    )
