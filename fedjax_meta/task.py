"""The `Task`: a learning problem as pure functions of one pytree of variables.

A `Task` holds how to initialise a model, its loss on a batch and its predictions. The rest of the library uses a model only
through these functions, so Flax, Equinox, NNX and hand-written models all work the same way.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, runtime
from fedjax_meta.numerics.axes import leading
from fedjax_meta.types import Key, Mask, PyTree, Variables


class Batch(NamedTuple):
    """Samples of ONE client. A padded row has weight 0 and must not affect any result.

    Attributes:
      x: inputs, an array or a pytree of arrays, each `[B, ...]`.
      y: targets, an array `[B, ...]`, a `Weighted`, or another pytree of arrays; class labels are int32 `[B]`, or `[B, T]` for
        the tokens of a sequence.
      weight: `[B]`, 1 for a real sample and 0 for padding.
    """

    x: PyTree
    y: Any
    weight: jax.Array


class Weighted(NamedTuple):
    """Targets with weights of their own: padded tokens and missing values have weight 0, and no result depends on them.

    Attributes:
      value: `[B, ...]`, e.g. tokens `[B, T]`.
      weight: bool or real, not negative; its shape is that of `value` or of its leading axes, e.g. `[B, T]`.
    """

    value: Any
    weight: Any


def targets(batch: Batch) -> Any:
    """The targets of a batch without their weights."""
    return batch.y.value if isinstance(batch.y, Weighted) else batch.y


def entry_weights(batch: Batch, values: jax.Array) -> jax.Array:
    """The weight of each entry of `values [B, ...]`: that of its sample, times that of its target if it has one.

    Args:
      batch: the samples.
      values: one number for each entry, e.g. the losses of tokens `[B, T]`.

    Raises:
      ValueError: targets with weights finer than `values`, or of another shape.
    """
    weight = leading(batch.weight, values)
    if isinstance(batch.y, Weighted):
        own = jnp.asarray(batch.y.weight)
        if own.shape != values.shape[: own.ndim]:
            raise ValueError(f"targets have weights {list(own.shape)}, but there are losses or scores {list(values.shape)}")
        weight = weight * leading(own, values)
    return jnp.broadcast_to(weight, values.shape)


class Task(NamedTuple):
    """A learning problem as pure functions of its variables (parameters and, if the model has any, buffers).

    Attributes:
      init: `key -> variables`.
      loss: `(variables, batch, key) -> (loss, variables)`. The loss is a scalar, the mean over the real samples of the batch.
        The returned variables have updated buffers (batch-norm running statistics); a model without buffers returns its
        variables unchanged. The key is for dropout and other randomness. Methods that look inside the model need a
        `LogitsLoss`, which shows what the loss is made of.
      predict: `(variables, x [B, ...]) -> outputs [B, ...]` in evaluation mode: logits `[B, K]` of a classifier, `[B, T, K]` of
        a model of sequences, predictions `[B]` or `[B, d]` of a regression.
      features: `(variables, x [B, ...]) -> [B, ..., d]`, the input of the head; `None` if the model has no such split.
      head: `(variables, features [B, ..., d]) -> outputs`, with `predict(v, x) == head(v, features(v, x))`.
      layers: layer names from input to output, as they appear in the paths of the variables, see `layer_of`; `masks.last` needs
        them.
      trainable: `variables -> mask` of the leaves that gradients update; the other leaves are buffers.
      private: how its gradients are made private, see `privacy.private_task`; `None` if they are not.
      metrics: what `evaluate` measures by default, see `measures`; what the data ask for when `None`.
    """

    init: Callable[[Key], Variables]
    loss: Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]
    predict: Callable[[Variables, PyTree], jax.Array]
    features: Callable[[Variables, PyTree], jax.Array] | None = None
    head: Callable[[Variables, jax.Array], jax.Array] | None = None
    layers: tuple[str, ...] = ()
    trainable: Callable[[Variables], Mask] = lambda variables: jax.tree.map(lambda _: True, variables)
    private: Any = None
    metrics: tuple[Any, ...] | None = None


FIRST_ORDER_ONLY = (
    "a private task has first derivatives only: exact, hessian_free and implicit meta-gradients need more; use first_order or "
    "reptile"
)
"""The message of `exact`, `hessian_free` and `implicit` for a task with private gradients."""


def unchanged(batch: Batch, key: Key) -> tuple[Batch, Key]:
    """The `LogitsLoss.prepare` of a loss that takes samples as they are."""
    return batch, key


@dataclasses.dataclass(frozen=True, eq=False)
class LogitsLoss:
    """A `Task.loss` that is a criterion of the model's logits.

    Methods that need the logits themselves (mixtures of models) or share a forward pass with features put a loss of their own
    together from these parts, so that it sees what `Task.loss` sees. `dataclasses.replace(task.loss, criterion=...)` changes a
    part; a plain function in its place is opaque, and these methods refuse it.

    Attributes:
      logits: `(variables, batch, key) -> (outputs, variables)`, in training mode, with updated buffers; outputs as those of
        `Task.predict`.
      criterion: `(outputs, batch) -> scalar`, a mean over the real samples, e.g. a `MeanLoss`.
      prepare: `(batch, key) -> (batch, key)`, the batch as the loss sees it (augmented), and the key for what follows.
      as_predicted: whether `logits` are those of `Task.predict`, without dropout and batch statistics.
    """

    logits: Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]
    criterion: Callable[[jax.Array, Batch], jax.Array]
    prepare: Callable[[Batch, Key], tuple[Batch, Key]] = unchanged
    as_predicted: bool = False

    def __call__(self, variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        """`Task.loss`."""
        return self.prepared(variables, *self.prepare(batch, key))

    def prepared(self, variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        """The loss of a batch that was prepared before."""
        logits, variables = self.logits(variables, batch, key)
        return self.criterion(logits, batch), variables

    def of_samples(self, logits: jax.Array, batch: Batch) -> jax.Array:
        """The criterion of each sample by itself, `[B]`, from outputs `[B, ...]`; 0 for padding."""

        def of_one(row: jax.Array, y: Any, weight: jax.Array) -> jax.Array:
            return self.criterion(row[None], Batch(None, jax.tree.map(lambda leaf: leaf[None], y), weight[None]))

        return jax.vmap(of_one)(logits, batch.y, batch.weight)


def require_parts(task: Task, method: str, *, as_predicted: bool = False) -> LogitsLoss:
    """The loss of a task, for the method of that name, which needs to know what it is made of.

    Args:
      task: a classifier.
      method: the name of the method, for the error message.
      as_predicted: whether the method computes logits by itself, as `Task.predict` does.

    Raises:
      ValueError: the loss is an opaque function, or has dropout or batch statistics where `as_predicted` is true.
    """
    loss = task.loss
    if task.private is not None:
        raise ValueError(f"{method} takes gradients of the model's logits, which those of private_task do not cover")
    if not isinstance(loss, LogitsLoss):
        raise ValueError(
            f"{method} needs to know what the task's loss is made of, but it is an opaque function: "
            "give fm.task.LogitsLoss(logits, criterion, ...)"
        )
    if as_predicted and not loss.as_predicted:
        raise ValueError(
            f"{method} computes logits as task.predict does, but this task's loss does not (dropout, batch statistics)"
        )
    return loss


def require_task(name: str, value: object) -> None:
    """Checks the first argument of a method builder, and the task of any other function.

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
    example = "fm.models.from_linen(module, sample_shape)" if is_module else "fm.classification(init, predict)"
    if isinstance(value, type):
        given = f"the class {value.__name__}"
    elif callable(value) and not is_module:
        given = "a function"
    else:
        given = f"an object of type {type(value).__name__}"
    raise ValueError(f"{name}'s first argument must be a Task, e.g. {example}, not {given}")


def weighted_mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean of `values`, weighted by `weight` of their shape; 0 if all weights are 0, so an empty batch has gradient 0."""
    # A padded row may hold NaN (e.g. from an invalid label), and 0 * NaN is NaN: mask the rows instead.
    total = jnp.sum(weight)
    return jnp.sum(jnp.where(weight > 0, values * weight, 0)) / jnp.where(total > 0, total, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class MeanLoss:
    """A criterion that is a mean over entries: samples, or tokens or outputs of samples, each with its weight.

    Attributes:
      name: for messages.
      entries: `(outputs, targets) -> losses [B, ...]`, one for each entry.
      within: the least and the largest value of a target, where there are such.
    """

    name: str
    entries: Callable[[jax.Array, Any], jax.Array]
    within: tuple[float, float] | None = None

    def __call__(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """The mean over the real entries of a batch, a scalar."""
        return weighted_mean(*self.weighted(outputs, batch))

    def weighted(self, outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(losses, weights) of the entries, of one shape."""
        # NaN in a target without weight, which stands for a missing value, would be NaN in gradients.
        known = jax.tree.map(
            lambda y: jnp.where(entry_weights(batch, y) > 0, y, 0) if checks.is_real(y.dtype) else y, targets(batch)
        )
        losses = self.entries(outputs, known)
        return losses, entry_weights(batch, losses)


def check_entries(what: str, entries: Callable[[Any, Any], Any], outputs: jax.Array, values: Any) -> None:
    """Raises `ValueError` unless `entries(outputs, values)` is `[B, ...]` of B samples: shapes `[B, 1]` and `[B]` make `[B, B]`.

    Args:
      what: for the message.
      entries: numbers of samples, or of their tokens or outputs.
      outputs, values: `[B, ...]`, or their shapes; values may be a tree.
    """

    def shape(count: int) -> tuple[int, ...]:
        of_count = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), (outputs, values))
        return jax.eval_shape(lambda *given: jnp.asarray(entries(*given)), *of_count).shape

    two, three = shape(2), shape(3)
    if (two[:1], three[:1]) != ((2,), (3,)) or two[1:] != three[1:]:
        raise ValueError(
            f"{what} must give [B, ...] of B samples, but gives {list(two)} of 2 and {list(three)} of 3, with "
            f"{_forms(outputs, values)}"
        )


def check_labels(what: str, outputs: jax.Array, labels: Any, *, else_: str = "") -> None:
    """Raises `ValueError` unless `labels` are integers `[B, ...]` for `outputs [B, ..., K]`; `else_` is for other targets."""
    integers = hasattr(labels, "dtype") and jnp.issubdtype(labels.dtype, jnp.integer)
    if not integers or not hasattr(outputs, "shape") or outputs.shape[:-1] != labels.shape:
        given = f"not {_forms(outputs, labels)}{'' if integers else else_}"
        raise ValueError(f"{what} takes integer labels [B, ...] and outputs [B, ..., K], {given}")


def check_alike(what: str, outputs: jax.Array, values: Any) -> None:
    """Raises `ValueError` unless targets have the shape of the outputs."""
    if not hasattr(values, "shape") or values.shape != getattr(outputs, "shape", None):
        raise ValueError(f"{what} takes outputs and targets of one shape, not {_forms(outputs, values)}")


def _forms(outputs: jax.Array, values: Any) -> str:
    def form(tree: Any) -> str:
        return f"{tree.dtype}{list(tree.shape)}" if hasattr(tree, "dtype") else str(jax.tree.structure(tree))

    return f"targets {form(values)} and outputs {form(outputs)}"


def _cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    real = "; for real targets: fm.regression, or loss='squared' of fm.from_linen"
    check_labels("cross-entropy", logits, labels, else_=real)
    if runtime.on_cpu():
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    # Picking one logit is a gather, and its gradient a scatter: kernels of their own on an accelerator.
    chosen = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    return jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(chosen, logits, 0), -1)


cross_entropy = MeanLoss("cross-entropy", _cross_entropies)
"""Mean softmax cross-entropy over the real samples of a batch, or over their tokens: `(logits [B, ..., K], batch) -> scalar`."""


def check_layers(layers: Any) -> None:
    """Raises `ValueError` unless `layers` is a tuple of different names; a bare word would count as one layer a letter."""
    names = isinstance(layers, (tuple, list)) and all(isinstance(name, str) and name for name in layers)
    if not names or len(set(layers)) < len(layers):
        raise ValueError(f"layers={checks.shown(layers)} must be a tuple of different names, e.g. layers=('body', 'head')")


def layer_of(names: tuple[str, ...], layers: tuple[str, ...]) -> str | None:
    """The layer that a leaf belongs to: the first name in its path that is one; `None` if none is.

    Example:
      >>> layer_of(("params", "encoder", "head", "kernel"), ("encoder", "head"))
      'encoder'
    """
    return next((name for name in names if name in layers), None)


def check_layer_names(layers: tuple[str, ...], variables: Variables) -> None:
    """Raises `ValueError` for a layer to which no leaf of the variables belongs, see `layer_of`."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(variables)]
    names = [tuple(jax.tree_util.keystr((part,), simple=True) for part in path) for path in paths]
    for layer in layers:
        around = sorted({str(layer_of(one, layers)) for one in names if layer in one})
        if not around:
            called = ", ".join(sorted({name for one in names for name in one}))
            raise ValueError(f"layers={layers} names {layer!r}, but the variables are called {called}")
        if layer not in around:
            raise ValueError(f"layers={layers} names {layer!r}, all of whose variables belong to {', '.join(around)}")


def classification(
    init: Callable[[Key], Variables],
    predict: Callable[[Variables, PyTree], jax.Array],
    *,
    layers: tuple[str, ...] = (),
    loss: Callable[[jax.Array, Batch], jax.Array] = cross_entropy,
    features: Callable[[Variables, PyTree], jax.Array] | None = None,
    head: Callable[[Variables, jax.Array], jax.Array] | None = None,
) -> Task:
    """A classification task from your own model: softmax cross-entropy on its logits, or another criterion.

    Args:
      init: `key -> parameters`, any pytree of floating-point arrays.
      predict: `(parameters, x [B, ...]) -> logits [B, K]`.
      layers: layer names from input to output, as they appear in the paths of the parameters; needed only for masks such as
        `"head"` and `"last:2"`. A leaf whose path has none of them is in no layer.
      loss: `(logits, batch) -> scalar`, over rows with weight only; softmax cross-entropy by default.
      features, head: the model in two parts, see `Task`; both or none. Methods that look at features need them.

    Raises:
      ValueError: arguments that are no such functions, no tuple of names, or a name that is in no path.

    Returns:
      a `Task` without buffers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> init = lambda key: {"head": {"w": 0.1 * jax.random.normal(key, (4, 3)), "b": jnp.zeros((1, 3))}}
      >>> predict = lambda p, x: x @ p["head"]["w"] + p["head"]["b"]
      >>> task = classification(init, predict, layers=("head",))
      >>> task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4))).shape
      (2, 3)
    """

    return of_outputs(init, predict, loss, layers=layers, features=features, head=head)


def of_outputs(
    init: Callable[[Key], Variables],
    predict: Callable[[Variables, PyTree], jax.Array],
    criterion: Callable[[jax.Array, Batch], jax.Array],
    *,
    layers: tuple[str, ...],
    features: Callable[[Variables, PyTree], jax.Array] | None,
    head: Callable[[Variables, jax.Array], jax.Array] | None,
    metrics: tuple[Any, ...] | None = None,
) -> Task:
    """A task whose loss is a criterion of what the model predicts: what `classification` and its like make.

    Args:
      init, predict, layers, features, head: as in `classification`.
      criterion: `(outputs, batch) -> scalar`.
      metrics: see `Task`.

    Raises:
      ValueError: arguments that are no such functions, or no tuple of names; features without a head.
    """
    checks.function("init", init, ("key",), "lambda key: parameters")
    checks.function("predict", predict, ("parameters", "x"), "lambda parameters, x: logits")
    checks.function("loss", criterion, ("logits", "batch"), "fm.task.cross_entropy")
    check_layers(layers)
    if layers:
        check_layer_names(tuple(layers), jax.eval_shape(lambda: init(jax.random.key(0))))
    if (features is None) != (head is None):
        raise ValueError("features and head are the model in two parts: give both or none")
    if features is not None:
        checks.function("features", features, ("parameters", "x"), "lambda parameters, x: features")
        checks.function("head", head, ("parameters", "features"), "lambda parameters, features: logits")

    def logits(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        del key
        return predict(variables, batch.x), variables

    loss = LogitsLoss(logits, criterion, as_predicted=True)
    return Task(init=init, loss=loss, predict=predict, features=features, head=head, layers=layers, metrics=metrics)
