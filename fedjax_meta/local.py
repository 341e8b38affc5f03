"""Local training: what one client does on its own data.

Nothing here knows of other clients. Loops have a traced number of steps, so that the work of a client follows its samples.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, loops, masks
from fedjax_meta.data import Batches, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, Mask, Params, Rate, Variables

Loss = Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]
"""`(variables, batch, key) -> (loss, variables with new buffers)`."""


def train(
    key: Key,
    loss: Loss,
    variables: Variables,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    trainable: Mask,
) -> tuple[Variables, jax.Array]:
    """Minimises a loss by `batches.steps` steps of an optimiser that starts fresh.

    Args:
      key: each batch gets its own, folded from it.
      loss: `(variables, batch, key) -> (loss, variables)` as in `Task.loss`.
      variables: where to start.
      batches: the steps.
      optimizer: an optax transformation, built with its rate.
      trainable: mask of the leaves that the optimiser moves. Of the others, buffers follow the loss and the rest stays as it is.

    Returns:
      (variables, mean loss over the steps, each taken before its update).

    Raises:
      ValueError: an optimiser that is none or needs more than gradients, a loss that does not return a pair, trainable leaves
        that are not floating-point.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"optimizer must be one of optax, built with its rate, e.g. optax.sgd(0.1), not {checks.shown(optimizer)}"
        )
    checks.gradients_suffice("optimizer", "it", optimizer)
    checks.floats(masks.split(variables, trainable)[0])
    slots = optimizer.init(masks.split(variables, trainable)[0])
    variables, _, result = train_on(key, loss, variables, slots, batches, optimizer, trainable)
    return variables, result


def train_epochs(
    key: Key,
    loss: Loss,
    variables: Variables,
    view: ClientView,
    optimizer: optax.GradientTransformation,
    trainable: Mask,
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
    batches = view.epochs(tagged(key, "order"), batch_size, epochs)
    return train(
        tagged(key, "loss"), loss, variables, batches if needed is True else batches.only_if(needed), optimizer, trainable
    )


def train_on(
    key: Key,
    loss: Loss,
    variables: Variables,
    slots: Any,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    trainable: Mask,
) -> tuple[Variables, Any, jax.Array]:
    """`train` with an optimiser that goes on from `slots`; returns (variables, slots, mean loss)."""
    batches = batches.keyed(key)
    variables = loops.device_local(variables, lambda variables: loss(variables, *batches.get(0, 0)))

    def step(t: Any, carry: Any) -> Any:
        variables, slots, total = carry
        moving, fixed = masks.split(variables, trainable)

        def value(moving: Any, batch: Batch, key: Key) -> Any:
            result, moved_on = _pair(loss(masks.merge(moving, fixed), batch, key))
            # Batch statistics may be computed in a wider type than that of the model.
            return result, jax.tree.map(lambda new, old: new.astype(old.dtype), masks.split(moved_on, trainable)[1], fixed)

        gradient_of = jax.value_and_grad(value, has_aux=True)
        (result, fixed), gradient = batches.mean(lambda pair: gradient_of(moving, *pair), t)
        updates, after = optimizer.update(gradient, slots, moving)
        moving = optax.apply_updates(moving, updates)
        return masks.merge(moving, fixed), loops.like(after, slots), total + result

    variables, slots, total = loops.fori_loop(batches.steps, step, (variables, slots, jnp.zeros(())))
    return variables, slots, total / jnp.maximum(batches.steps, 1)


def _pair(returned: Any) -> tuple[jax.Array, Variables]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(f"loss(variables, batch, key) must return (loss, variables), not {checks.shown(returned)}")
    return returned


def separately(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimiser for a tuple of trees, each of which has one of its own: clipping, say, is by the norm of each tree."""

    def init(parts: Any) -> Any:
        return tuple(optimizer.init(part) for part in parts)

    def update(updates: Any, slots: Any, parts: Any = None) -> tuple[Any, Any]:
        given = parts if parts is not None else (None,) * len(updates)
        moved = [optimizer.update(*one) for one in zip(updates, slots, given, strict=True)]
        found = [one[0] for one in moved]
        named = hasattr(updates, "_fields")
        return type(updates)(*found) if named else type(updates)(found), tuple(one[1] for one in moved)

    return optax.GradientTransformation(init, update)


def proximal_term(variables: Params, anchor: Params, weight: Rate, mask: Mask | None = None) -> jax.Array:
    """`weight / 2 * ||variables - anchor||^2`, over all leaves or those of a mask; a scalar."""
    moved = jax.tree.map(jnp.subtract, variables, anchor)
    if mask is not None:
        moved = masks.split(moved, mask)[0]
    return weight / 2 * optax.tree.norm(moved, squared=True)


def proximal(loss: Loss, anchor: Variables, weight: Rate) -> Loss:
    """The loss plus `proximal_term` over all leaves (FedProx, Ditto, pFedMe, FedAMP).

    Leaves that are not trained, buffers among them, add to its value but not to its gradient.
    """

    def regularised(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        value, moved_on = loss(variables, batch, key)
        return value + proximal_term(variables, anchor, weight), moved_on

    return regularised


def parameter_loss(task: Task, buffers: Variables) -> Callable[[Params, tuple[Batch, Key]], jax.Array]:
    """The task's loss as a function of its trainable leaves alone, with the buffers held: what a meta-gradient works on."""

    def loss(parameters: Params, sample: tuple[Batch, Key]) -> jax.Array:
        batch, key = sample
        return task.loss(masks.merge(parameters, buffers), batch, key)[0]

    loss.private = task.private is not None  # type: ignore[attr-defined]
    return loss
