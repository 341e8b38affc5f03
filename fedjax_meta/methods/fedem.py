"""FedEM: FedAvg of several models at once; each client predicts with its own mixture of them.

Marfoq, Neglia, Bellet, Kameni, Vidal: "Federated multi-task learning under a mixture of distributions", NeurIPS 2021, arXiv
2108.10252, Algorithm 1.

| paper | here | shape |
|---|---|---|
| theta_m | `components`, a stacked model | leaves `[M, ...]` |
| pi_t | `Own.share`, a client's memory | `[M]` |
| q_t(s, m) | `responsibilities` | `[B, M]` |

Responsibilities and shares follow the samples as they are, also where the loss augments them. In the authors' code,
omarfoq/FedEM, a client's optimisers live as long as the client, so that momentum goes on from round to round
(learners/learner.py 173-194): `keep_optimizer=True`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, loops, masks, runtime
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task, require_parts, weighted_mean
from fedjax_meta.types import Key, PyTree, Rate


class Mixture(NamedTuple):
    """What a client predicts with.

    Attributes:
      components: M models, leaves `[M, ...]`.
      share: the weight of each, `[M]`.
    """

    components: PyTree
    share: jax.Array


class Own(NamedTuple):
    """A client's memory: the weight of each component, `[M]`, and with `keep_optimizer` the slots of its optimiser."""

    share: jax.Array
    slots: PyTree


def responsibilities(losses: jax.Array, share: jax.Array) -> jax.Array:
    """q ∝ π_m exp(-ℓ_m) of each sample: `[B, M]` from losses `[B, M]` and shares `[M]`."""
    return jax.nn.softmax(jnp.log(jnp.maximum(share, jnp.finfo(share.dtype).tiny))[None] - losses, -1)


@described("own mixture of shared models", "Marfoq et al. 2108.10252")
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
    keep_optimizer: bool = False,
    weighting: str = "samples",
) -> Method:
    """FedEM. A client that never took part finds its shares on its support set; the models do not move.

    Args:
      task: a classifier without buffers.
      components: M; on a CPU, time to compile grows with it.
      lr, epochs, batch_size, weighting: as in `fedavg`. A round also takes one step of expectation and maximisation.
      optimizer: as in `fedavg`, for each component.
      keep_optimizer: whether a client's optimiser goes on where its last round ended (the authors' code) or starts afresh.
      test_steps: steps of expectation and maximisation by which a client that never took part finds its shares.

    Raises:
      ValueError: a task with buffers or an opaque loss, an option out of range.
    """
    features.require_no_buffers(task, "fedem")
    parts = require_parts(task, "fedem")
    checks.count("components", components)

    def each(of_samples: Callable[[PyTree], jax.Array], models: PyTree) -> jax.Array:
        """`[B, M]`. A CPU takes one component after the other: side by side they leave its cache, and take twice the time."""
        if not runtime.on_cpu():
            return jax.vmap(of_samples, out_axes=1)(models)
        return jnp.stack([of_samples(jax.tree.map(lambda leaf, m=m: leaf[m], models)) for m in range(components)], 1)

    def losses(models: PyTree, batch: Batch) -> jax.Array:
        """The loss of each sample under each component, in evaluation mode, `[B, M]`."""
        return each(lambda model: parts.of_samples(task.predict(model, batch.x), batch), models)

    def training_losses(models: PyTree, batch: Batch, key: Key) -> jax.Array:
        """The same in training mode."""
        return each(lambda model: parts.of_samples(parts.logits(model, batch, key)[0], batch), models)

    def expected(models: PyTree, share: jax.Array, view: ClientView) -> tuple[jax.Array, jax.Array]:
        """One step of expectation and maximisation: (q of the view's samples, `[max_size, M]`; π_m, its mean over them)."""
        batches = view.in_chunks()
        length = jax.eval_shape(lambda: batches.get(0, 0).weight).shape[0]

        def step(t: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            (q, total), batch = carry, batches.get(t, 0)
            found = responsibilities(losses(models, batch), share)
            return jax.lax.dynamic_update_slice_in_dim(q, found, t * length, 0), total + batch.weight @ found

        nothing = jnp.zeros((batches.max_steps * length, components), share.dtype), jnp.zeros_like(share)
        q, total = loops.fori_loop(batches.steps, step, nothing)
        return q[: view.max_size], jnp.where(view.size > 0, total / jnp.maximum(view.size, 1), share)

    # Each component has an optimiser of its own.
    one = optimizer(lr)
    step = optax.GradientTransformation(jax.vmap(one.init), jax.vmap(one.update))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        start, (share, slots), everything = received.model, received.memory, masks.everything_like(received.model)
        q, share = expected(start, share, data["train"])

        def loss(models: PyTree, batch: Batch, key: Key) -> tuple[jax.Array, PyTree]:
            y, q = batch.y
            batch, key = parts.prepare(batch._replace(y=y), key)
            return weighted_mean(jnp.sum(q * training_losses(models, batch, key), -1), batch.weight), models

        view = dataclasses.replace(data["train"], beside=q)
        batches = view.epochs(tagged(key, "order"), batch_size, epochs)
        slots = slots if keep_optimizer else step.init(start)
        models, slots, value = local.train_on(tagged(key, "loss"), loss, start, slots, batches, step, everything)
        return Trained(models, {"loss": value}, memory=Own(share, slots if keep_optimizer else ()))

    def personalize(key: Key, received: Received, support: ClientView) -> Mixture:
        del key
        models, share, steps = received.model, received.memory.share, jnp.where(received.seen, 0, test_steps)
        return Mixture(models, loops.fori_loop(steps, lambda _, share: expected(models, share, support)[1], share))

    def predict(variables: Mixture, x: Any) -> jax.Array:
        """The logarithm of the mixed probabilities, `[B, K]`."""
        probability = jax.nn.softmax(jax.vmap(task.predict, (0, None))(variables.components, x))
        mixed = jnp.tensordot(variables.share, probability, 1)
        return jnp.log(jnp.maximum(mixed, jnp.finfo(mixed.dtype).tiny))

    def init_memory(key: Key, model: PyTree, num_clients: int) -> Own:
        return Own(jnp.full(components, 1 / components), step.init(model) if keep_optimizer else ())

    return Method(
        init=lambda key: jax.vmap(task.init)(jax.random.split(key, components)),
        client=client,
        personalize=personalize,
        predict=predict,
        roles=masks.roles(masks.nothing(task), masks.everything(task)),
        weighting=weighting,
        init_memory=init_memory,
        needs_classes=True,
    )
