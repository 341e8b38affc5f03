"""Tasks ready to use, beside `classification`: regression, several labels a sample, the next token, and any other loss.

Each takes a model as pure functions, `init` and `predict`, and where the model has them its two parts `features` and `head`, with
which methods that look at features work. Letters: B batch, T tokens, V words of a vocabulary, L labels.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from fedjax_meta import checks, masks
from fedjax_meta.task import (
    Batch,
    MeanLoss,
    Task,
    check_alike,
    check_layer_names,
    check_layers,
    cross_entropy,
    of_outputs,
    require_parts,
    require_task,
)
from fedjax_meta.types import Key, Mask, PyTree, Scalar, Variables

Init = Callable[[Key], Variables]
"""`key -> variables`."""

Predict = Callable[[Variables, PyTree], jax.Array]
"""`(variables, x [B, ...]) -> outputs [B, ...]`."""

LOSSES = ("squared", "huber")
"""Losses of real targets by name."""

METRICS = ("mae", "rmse", "r2")
"""What `evaluate` measures of real targets by default."""


def squared_error() -> MeanLoss:
    """The mean of (output - target)² over all entries."""

    def entries(outputs: jax.Array, y: Any) -> jax.Array:
        check_alike("the squared error", outputs, y)
        return (outputs - y) ** 2

    return MeanLoss("squared error", entries)


def huber(delta: float = 1.0) -> MeanLoss:
    """Huber's loss: half the squared error up to `delta`, linear beyond, so that single wrong targets pull less (Huber 1964)."""
    checks.positive("delta", delta)

    def entries(outputs: jax.Array, y: Any) -> jax.Array:
        check_alike("the Huber loss", outputs, y)
        return optax.losses.huber_loss(outputs, y, delta=delta)

    return MeanLoss("Huber loss", entries)


def criterion(loss: Any, *, delta: float = 1.0) -> Any:
    """A loss of `LOSSES` by its name; anything else as it is. `delta` is that of the Huber loss."""
    if not isinstance(loss, str):
        return loss
    checks.one_of("loss", loss, LOSSES)
    return squared_error() if loss == "squared" else huber(delta)


def _label_entropies(outputs: jax.Array, y: Any) -> jax.Array:
    check_alike("the loss of several labels", outputs, y)
    # Beyond [0, 1], as with labels -1 and 1, it has no lower bound. The factor makes gradients NaN, too.
    known = jnp.where((y < 0) | (y > 1), jnp.asarray(jnp.nan, outputs.dtype), 1)
    return known * optax.losses.sigmoid_binary_cross_entropy(outputs, y.astype(outputs.dtype))


sigmoid_cross_entropy = MeanLoss("sigmoid cross-entropy", _label_entropies, within=(0, 1))
"""The mean over labels of the cross-entropy of a sigmoid of each output: `(logits [B, L], batch of 0 and 1 [B, L]) -> scalar`.

Shares between 0 and 1 are labels, too. The loss of others is NaN.
"""


def regression(
    init: Init,
    predict: Predict,
    *,
    loss: str | Callable[[jax.Array, Batch], Scalar] = "squared",
    delta: float = 1.0,
    layers: tuple[str, ...] = (),
    features: Predict | None = None,
    head: Callable[[Variables, jax.Array], jax.Array] | None = None,
) -> Task:
    """Real targets: `y [B]` or `[B, ...]`, and predictions of the same shape. Data: `num_classes=0`.

    Args:
      init, predict, layers, features, head: as in `classification`.
      loss: "squared", "huber", or a function `(outputs, batch) -> scalar`.
      delta: of the Huber loss.

    Raises:
      ValueError: an unknown loss, arguments that are no such functions.

    Returns:
      a task that `evaluate` scores by MAE, RMSE and R².

    Example:
      >>> task = regression(lambda key: {"w": jnp.zeros(3)}, lambda p, x: x @ p["w"], loss="huber")
      >>> batch = Batch(jnp.ones((2, 3)), jnp.array([0.5, 3.0]), jnp.ones(2))
      >>> float(task.loss(task.init(jax.random.key(0)), batch, jax.random.key(1))[0])
      1.3125
    """
    checks.positive("delta", delta)
    of_batch = criterion(loss, delta=delta)
    return of_outputs(init, predict, of_batch, layers=layers, features=features, head=head, metrics=METRICS)


def multi_label(
    init: Init,
    predict: Predict,
    *,
    loss: Callable[[jax.Array, Batch], Scalar] = sigmoid_cross_entropy,
    layers: tuple[str, ...] = (),
    features: Predict | None = None,
    head: Callable[[Variables, jax.Array], jax.Array] | None = None,
) -> Task:
    """Several labels a sample: `y [B, L]` of 0 and 1, and logits `[B, L]`. Data: `num_classes=0`.

    Args:
      init, predict, layers, features, head: as in `classification`.
      loss: `(logits, batch) -> scalar`; the mean sigmoid cross-entropy over labels by default.

    Raises:
      ValueError: arguments that are no such functions.

    Returns:
      a task that `evaluate` scores by the share of right labels and F1 over labels.
    """
    return of_outputs(init, predict, loss, layers=layers, features=features, head=head, metrics=("label_accuracy", "f1"))


def next_token(
    init: Init,
    predict: Predict,
    *,
    loss: Callable[[jax.Array, Batch], Scalar] = cross_entropy,
    layers: tuple[str, ...] = (),
    features: Predict | None = None,
    head: Callable[[Variables, jax.Array], jax.Array] | None = None,
) -> Task:
    """The next token at each place of a sequence: `y [B, T]` in [0, V), and logits `[B, T, V]`. Data: `num_classes=V`.

    The targets are the inputs shifted by one place. Those of padding have weight 0, see `Weighted` and `data.pad`.

    Args:
      init, predict, layers, features, head: as in `classification`; features are `[B, T, d]`.
      loss: `(logits, batch) -> scalar`; the mean cross-entropy over real tokens by default.

    Raises:
      ValueError: arguments that are no such functions.

    Returns:
      a task that `evaluate` scores by the accuracy and the perplexity over tokens.
    """
    metrics = ("token_accuracy", "perplexity")
    return of_outputs(init, predict, loss, layers=layers, features=features, head=head, metrics=metrics)


def starting_from(task: Task, variables: Variables, *, part: Mask | str = "all") -> Task:
    """The same task, with given (pretrained) values in place of its initial ones.

    Args:
      task: what is learned.
      variables: values like those of `task.init`, in structure, and where they are taken in shape and type.
      part: which leaves start from them, a mask or its name (`masks.resolve`), e.g. "body" of a model whose head is new; the
        others are initialised by `task.init`.

    Raises:
      ValueError: values that do not fit the task, or that are not finite.
    """
    require_task("starting_from", task)
    mask = masks.resolve(part, task, name="part")
    checks.arrays("variables", variables)
    missing = checks.misplaced_leaf(variables, masks.variables_shape(task))
    if missing is not None:
        raise ValueError(f"variables must have a value at every leaf of the task, but {missing}")
    odd = checks.mismatch(masks.split(variables, mask)[0], masks.split(masks.variables_shape(task), mask)[0])
    if odd is not None:
        raise ValueError(f"variables do not fit the task: {odd}")
    given = masks.split(variables, mask)[0]

    def init(key: Key) -> Variables:
        return masks.merge(jax.tree.map(jnp.asarray, given), masks.split(task.init(key), mask)[1])

    return task._replace(init=init)


def mixed_precision(task: Task, dtype: DTypeLike = jnp.bfloat16) -> Task:
    """The same task computed in another type, while variables, gradients, losses and outputs keep theirs.

    Trainable parameters and real inputs are rounded to `dtype` before each pass. Accelerators have faster products of bfloat16;
    most CPUs do not. The criterion is computed in the type of the variables. Buffers stay as they are: running statistics that
    were rounded would stop moving, and counters would stop counting.

    Args:
      task: what is learned, with a `LogitsLoss`.
      dtype: a floating-point type, e.g. `jnp.bfloat16`. float16 has no room for small gradients, which this does not scale.

    Raises:
      ValueError: a type that is not floating-point, an opaque loss.
    """
    require_task("mixed_precision", task)
    checks.float_type("dtype", dtype)
    parts = require_parts(task, "mixed_precision")

    def narrow(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)

    def narrowed(variables: Variables) -> Variables:
        parameters, buffers = masks.split(variables, task.trainable(variables))
        return masks.merge(narrow(parameters), buffers)

    def like(tree: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda new, old: new.astype(old.dtype), tree, old)

    def wide(outputs: jax.Array, variables: Variables) -> jax.Array:
        return outputs.astype(jnp.result_type(*(leaf.dtype for leaf in jax.tree.leaves(variables))))

    def logits(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        outputs, updated = parts.logits(narrowed(variables), batch._replace(x=narrow(batch.x)), key)
        trainable = task.trainable(variables)
        buffers = like(masks.split(updated, trainable)[1], masks.split(variables, trainable)[1])
        return wide(outputs, variables), masks.merge(masks.split(variables, trainable)[0], buffers)

    def of_two(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda variables, x: wide(function(narrowed(variables), narrow(x)), variables)

    return task._replace(
        loss=dataclasses.replace(parts, logits=logits),
        predict=of_two(task.predict),
        features=None if task.features is None else of_two(task.features),
        head=None if task.head is None else of_two(task.head),
    )


def from_loss(
    init: Init,
    loss: Callable[[Variables, Batch, Key], Scalar],
    *,
    predict: Predict | None = None,
    layers: tuple[str, ...] = (),
    features: Predict | None = None,
    head: Callable[[Variables, jax.Array], jax.Array] | None = None,
    metrics: Sequence[Any] = (),
) -> Task:
    """Any loss of the variables and a batch, e.g. one that is no criterion of predictions.

    Methods that put a loss of their own together from the task's logits refuse it, because it is opaque. A criterion of outputs
    goes better into `loss` of `classification` or `regression`, which every method can look into.

    Args:
      init: `key -> variables`.
      loss: `(variables, batch, key) -> scalar`, a mean over samples of weight 1: those of weight 0 must not count.
      predict: `(variables, x [B, ...]) -> outputs`, for metrics; without it an evaluation has the loss alone.
      layers, features, head: as in `classification`.
      metrics: what `evaluate` measures by default, names or `measures.Metric`.

    Raises:
      ValueError: arguments that are no such functions, a layer name that is in no path; metrics without `predict`.

    Example:
      >>> distance = lambda p, batch, key: jnp.sum(batch.weight * jnp.sum((batch.x - p) ** 2, -1)) / jnp.sum(batch.weight)
      >>> task = from_loss(lambda key: jnp.zeros(2), distance)
      >>> float(task.loss(jnp.ones(2), Batch(jnp.eye(2), jnp.zeros(2), jnp.ones(2)), jax.random.key(0))[0])
      1.0
    """
    checks.function("init", init, ("key",), "lambda key: parameters")
    checks.function("loss", loss, ("variables", "batch", "key"), "lambda variables, batch, key: scalar")
    if predict is not None:
        checks.function("predict", predict, ("parameters", "x"), "lambda parameters, x: outputs")
    check_layers(layers)
    if layers:
        check_layer_names(tuple(layers), jax.eval_shape(lambda: init(jax.random.key(0))))
    if (features is None) != (head is None):
        raise ValueError("features and head are the model in two parts: give both or none")
    if metrics and predict is None:
        raise ValueError("metrics score what predict gives: give predict too")

    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ValueError(f"metrics={checks.shown(metrics)} must be a tuple of metrics or their names, e.g. ('mae', 'rmse')")

    def of_batch(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        value = loss(variables, batch, key)
        if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
            raise ValueError(f"loss must return one number, not an object of {type(value).__name__}")
        return jnp.asarray(value), variables

    def nothing(variables: Variables, x: PyTree) -> jax.Array:
        """Outputs of a model that predicts nothing, `[B, 0]`."""
        del variables
        return jnp.zeros((jax.tree.leaves(x)[0].shape[0], 0))

    return Task(
        init=init,
        loss=of_batch,
        predict=nothing if predict is None else predict,
        features=features,
        head=head,
        layers=layers,
        metrics=tuple(metrics),
    )
