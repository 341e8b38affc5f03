"""The `Task`: a learning problem as pure functions of one pytree of variables.

A `Task` holds how to initialise a model, its loss on a batch and its predictions. The rest of the library uses a model only
through these functions, so Flax, Equinox, NNX and hand-written models all work the same way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta.types import Key, Mask, PyTree, Variables


class Batch(NamedTuple):
    """Samples of ONE client. A padded row has weight 0 and must not affect any result.

    Attributes:
      x: inputs, an array or a pytree of arrays, each `[B, ...]`.
      y: targets `[B, ...]`; class labels are int32 `[B]`.
      weight: `[B]`, 1 for a real sample and 0 for padding.
    """

    x: PyTree
    y: jax.Array
    weight: jax.Array


class Task(NamedTuple):
    """A learning problem as pure functions of its variables (parameters and, if the model has any, buffers).

    Attributes:
      init: `key -> variables`.
      loss: `(variables, batch, key) -> (loss, variables)`. The loss is a scalar, the mean over the real samples of the batch.
        The returned variables have updated buffers (batch-norm running statistics); a model without buffers returns its
        variables unchanged. The key is for dropout and other randomness.
      predict: `(variables, x [B, ...]) -> logits [B, K]` in evaluation mode.
      features: `(variables, x [B, ...]) -> [B, d]`, the input of the head; `None` if the model has no such split.
      head: `(variables, features [B, d]) -> logits [B, K]`, with `predict(v, x) == head(v, features(v, x))`.
      layers: layer names from input to output, as they appear in the paths of the variables; `masks.last` needs them.
      trainable: `variables -> mask` of the leaves that gradients update; the other leaves are buffers.
      private: how its gradients are made private, see `privacy.private_task`; `None` if they are not.
    """

    init: Callable[[Key], Variables]
    loss: Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]
    predict: Callable[[Variables, PyTree], jax.Array]
    features: Callable[[Variables, PyTree], jax.Array] | None = None
    head: Callable[[Variables, jax.Array], jax.Array] | None = None
    layers: tuple[str, ...] = ()
    trainable: Callable[[Variables], Mask] = lambda variables: jax.tree.map(lambda _: True, variables)
    private: Any = None


FIRST_ORDER_ONLY = (
    "a private task has first derivatives only: exact, hessian_free and implicit meta-gradients need more; use first_order or "
    "reptile"
)
"""What the estimators that it names say of a task with private gradients."""


def require_task(name: str, value: object) -> None:
    """Checks the first argument of a method builder.

    Args:
      name: the builder's name, for the error message.
      value: the argument.

    Raises:
      ValueError: `value` is not a `Task`.

    Example:
      >>> require_task("fedavg", lambda variables, x: x)
      Traceback (most recent call last):
      ...
      ValueError: fedavg's first argument must be a Task, e.g. fm.classification(init, predict), not a function
    """
    if isinstance(value, Task):
        return
    # Flax modules are callable too, and have an `apply`.
    is_module = hasattr(value, "apply")
    example = "fm.models.flax_task(module, sample_shape)" if is_module else "fm.classification(init, predict)"
    if isinstance(value, type):
        given = f"the class {value.__name__}"
    elif callable(value) and not is_module:
        given = "a function"
    else:
        given = f"an object of type {type(value).__name__}"
    raise ValueError(f"{name}'s first argument must be a Task, e.g. {example}, not {given}")


def weighted_mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean of `values [B]`, weighted by `weight [B]`; 0 if all weights are 0, so an empty batch has gradient 0."""
    # A padded row may hold NaN (e.g. from an invalid label), and 0 * NaN is NaN: mask the rows instead.
    total = jnp.sum(weight)
    return jnp.sum(jnp.where(weight > 0, values * weight, 0)) / jnp.where(total > 0, total, 1)


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """Mean softmax cross-entropy over the real samples of a batch, a scalar; `logits` are `[B, K]`."""
    return weighted_mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch.y), batch.weight)


def classification(
    init: Callable[[Key], Variables],
    predict: Callable[[Variables, PyTree], jax.Array],
    *,
    layers: tuple[str, ...] = (),
) -> Task:
    """A classification task from your own model: softmax cross-entropy on its logits.

    Args:
      init: `key -> parameters`, any pytree of floating-point arrays.
      predict: `(parameters, x [B, ...]) -> logits [B, K]`.
      layers: layer names from input to output, needed only for masks such as `"head"` and `"last:2"`.

    Returns:
      a `Task` without buffers and without `features` and `head`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> init = lambda key: {"head": {"w": 0.1 * jax.random.normal(key, (4, 3)), "b": jnp.zeros((1, 3))}}
      >>> predict = lambda p, x: x @ p["head"]["w"] + p["head"]["b"]
      >>> task = classification(init, predict, layers=("head",))
      >>> task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4))).shape
      (2, 3)
    """

    def loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        del key
        return cross_entropy(predict(variables, batch.x), batch), variables

    return Task(init=init, loss=loss, predict=predict, layers=layers)
