"""What one client does on its own data: gradients over batches, and training by them.

Nothing here knows that there are other clients. Loops have a traced number of steps, so a client's work follows its samples.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import masks
from fedjax_meta.data.federated import Batches, ClientView
from fedjax_meta.task import Batch, Key, Task, Variables

Loss = Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]


def train(
    key: Key,
    loss: Loss,
    variables: Variables,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    trainable: masks.Mask,
) -> tuple[Variables, jax.Array]:
    """Minimises a loss by `batches.steps` steps of an optimiser that starts fresh.

    Args:
      key: consumed; every batch gets its own.
      loss: `(variables, batch, key) -> (loss, variables)` as in `Task.loss`.
      variables: where to start.
      batches: the steps.
      optimizer: any optax transformation.
      trainable: mask of the leaves that the optimiser moves. Buffers among the others follow the loss; what is neither
        trained nor a buffer stays as it is.

    Returns:
      (variables, mean loss over the steps, each taken before its update).
    """
    slots = optimizer.init(masks.split(variables, trainable)[0])
    variables, _, result = train_on(key, loss, variables, slots, batches, optimizer, trainable)
    return variables, result


def train_epochs(
    key: Key,
    loss: Loss,
    variables: Variables,
    view: ClientView,
    optimizer: optax.GradientTransformation,
    trainable: masks.Mask,
    *,
    epochs: int,
    batch_size: int,
    needed: Any = True,
) -> tuple[Variables, jax.Array]:
    """`train` on shuffled passes over a view.

    Args:
      key, loss, variables, optimizer, trainable: as in `train`.
      view: the samples.
      epochs: passes; with 0 nothing moves.
      batch_size: samples a step.
      needed: whether to do anything, a bool that may be traced.
    """
    if epochs == 0:
        return variables, jnp.zeros(())
    order_key, key = jax.random.split(key)
    batches = view.epochs(order_key, batch_size, epochs)
    return train(key, loss, variables, batches if needed is True else batches.only_if(needed), optimizer, trainable)


def train_on(
    key: Key,
    loss: Loss,
    variables: Variables,
    slots: Any,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    trainable: masks.Mask,
) -> tuple[Variables, Any, jax.Array]:
    """`train` with an optimiser that goes on from `slots`; returns (variables, slots, mean loss)."""
    batches = batches.keyed(key)

    def step(t: Any, carry: Any) -> Any:
        variables, slots, total = carry
        moving, fixed = masks.split(variables, trainable)

        def value(moving: Any, batch: Batch, key: Key) -> Any:
            result, moved_on = loss(masks.merge(moving, fixed), batch, key)
            return result, masks.split(moved_on, trainable)[1]

        gradient_of = jax.value_and_grad(value, has_aux=True)
        (result, fixed), gradient = batches.mean(lambda pair: gradient_of(moving, *pair), t)
        updates, slots = optimizer.update(gradient, slots, moving)
        moving = optax.apply_updates(moving, updates)
        return masks.merge(moving, fixed), slots, total + result

    variables, slots, total = jax.lax.fori_loop(0, batches.steps, step, (variables, slots, jnp.zeros(())))
    return variables, slots, total / jnp.maximum(batches.steps, 1)


def proximal(loss: Loss, anchor: Variables, weight: Any) -> Loss:
    """The loss plus `weight / 2 * ||v - anchor||^2` over all leaves (FedProx; also Ditto, pFedMe, FedAMP).

    Leaves that are not trained, buffers among them, add to its value but not to its gradient.
    """

    def regularised(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        value, moved_on = loss(variables, batch, key)
        distance = optax.tree.norm(optax.tree.sub(variables, anchor), squared=True)
        return value + weight / 2 * distance, moved_on

    return regularised


def parameter_loss(task: Task, buffers: Variables) -> Callable[[Any, tuple[Batch, Key]], jax.Array]:
    """The task's loss as a function of its trainable leaves alone, with the buffers held: what a meta-gradient works on."""

    def loss(parameters: Any, sample: tuple[Batch, Key]) -> jax.Array:
        batch, key = sample
        return task.loss(masks.merge(parameters, buffers), batch, key)[0]

    return loss
