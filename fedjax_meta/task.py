"""What is learned: pure functions of one pytree of variables.

A `Task` says how a model is initialised, what it loses on a batch and what it predicts. Everything else in the library
sees a model only through these functions, so Flax, Equinox, NNX and hand-written models are all the same to it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Key = jax.Array
Variables = Any


class Batch(NamedTuple):
    """Samples of ONE client. A padded row has weight 0 and must not influence anything.

    Attributes:
      x: inputs, an array or a pytree of arrays, each `[B, ...]`.
      y: targets `[B, ...]`; class labels are int32 `[B]`.
      weight: `[B]`, 1 for a real sample and 0 for padding.
    """

    x: Any
    y: jax.Array
    weight: jax.Array


class Task(NamedTuple):
    """A learning problem as pure functions of its variables (parameters and, where there are any, buffers).

    Attributes:
      init: `key -> variables`.
      loss: `(variables, batch, key) -> (loss, variables)`: the mean loss over the real samples of the batch, a scalar, and
        the variables with their buffers (batch-norm running statistics) moved on; a model without buffers returns its
        variables as they came. The key is for dropout and the like.
      predict: `(variables, x [B, ...]) -> logits [B, K]` in evaluation mode.
      features: `(variables, x [B, ...]) -> [B, d]`, the input of the head; `None` where the model has no such split.
      head: `(variables, features [B, d]) -> logits [B, K]`, with `predict(v, x) == head(v, features(v, x))`.
      layers: names of the layers from input to output, as they stand in the variables' paths; `masks.last` needs them.
      trainable: `variables -> mask` of the leaves that gradients move; the others are buffers.
    """

    init: Callable[[Key], Variables]
    loss: Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]
    predict: Callable[[Variables, Any], jax.Array]
    features: Callable[[Variables, Any], jax.Array] | None = None
    head: Callable[[Variables, jax.Array], jax.Array] | None = None
    layers: tuple[str, ...] = ()
    trainable: Callable[[Variables], Any] = lambda variables: jax.tree.map(lambda _: True, variables)


def weighted_mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean of `values [B]` over the rows with weight; 0 when there are none, so that an empty batch moves nothing."""
    # What stands in a padded row may not even be a number (a label that is no class), and 0 times that is not 0.
    total = jnp.sum(weight)
    return jnp.sum(jnp.where(weight > 0, values * weight, 0)) / jnp.where(total > 0, total, 1)


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """Mean softmax cross-entropy over the real samples of a batch; `logits` are `[B, K]`, the result is a scalar."""
    return weighted_mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch.y), batch.weight)


def classification(
    init: Callable[[Key], Variables],
    predict: Callable[[Variables, Any], jax.Array],
    *,
    layers: tuple[str, ...] = (),
) -> Task:
    """A classification task of a user's own model: softmax cross-entropy on its logits.

    Args:
      init: `key -> parameters`, any pytree of floating-point arrays.
      predict: `(parameters, x [B, ...]) -> logits [B, K]`.
      layers: names of the layers from input to output, needed only for masks such as `"head"` and `"last:2"`.

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
