"""Functions for methods that use a classifier's features and head: losses with a penalty on features, and class statistics.

K is the number of classes, d the number of features.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks, loops, masks
from fedjax_meta.data import CHUNK, Batches, ClientView, FederatedData
from fedjax_meta.task import Batch, Task, classification, cross_entropy, require_parts, unchanged
from fedjax_meta.types import Key, Params, PyTree, Scalar, Variables

Extractor = Callable[[Variables, PyTree], jax.Array]
"""`(variables, x [B, ...]) -> features [B, d]`."""

Head = Callable[[Variables, jax.Array], jax.Array]
"""`(variables, features [B, d]) -> logits [B, K]`."""


def require_features(task: Task, method: str, *, buffers: bool = True) -> tuple[Extractor, Head]:
    """The task's `features` and `head`, for the method of that name.

    Args:
      task: a classifier.
      method: the name of the method that needs them, for the error message.
      buffers: whether the method accepts a task with buffers.

    Raises:
      ValueError: the task has no features and head, or has buffers where `buffers` is false.
    """
    if task.features is None or task.head is None:
        raise ValueError(f"{method} looks at features, but the task has no features and head; give it both")
    if not buffers:
        require_no_buffers(task, method)
    return task.features, task.head


def require_no_buffers(task: Task, method: str) -> None:
    """Raises `ValueError` if the task has buffers (batch-norm statistics)."""
    if _has_buffers(task):
        raise ValueError(f"{method} is for models without buffers, but this one has some (batch-norm statistics)")


def require_own_loss(task: Task, method: str, minimised: str) -> None:
    """Raises `ValueError` if a method that minimises a loss of its own would ignore what the task's loss says.

    Args:
      task: a classifier.
      method: the name of the method.
      minimised: what it minimises, for the error message.
    """
    parts = require_parts(task, method, as_predicted=True)
    if parts.criterion is not cross_entropy or parts.prepare is not unchanged:
        raise ValueError(
            f"{method} minimises {minimised} of its own on the samples as they are, but this task's loss augments them or has "
            "another criterion"
        )


def _has_buffers(task: Task) -> bool:
    return not all(jax.tree.leaves(task.trainable(masks.variables_shape(task))))


def penalised(
    task: Task, penalty: Callable[[jax.Array, Batch], jax.Array], method: str
) -> Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]:
    """The loss of a classifier plus a penalty on its features, both of the batch as `task.loss` sees it (augmented).

    The features are those of evaluation mode. If the loss has neither dropout nor batch statistics, it shares its forward pass
    with the penalty.

    Args:
      task: a classifier with features and head.
      penalty: `(features [B, d], batch) -> scalar`.
      method: the name of the method that asks, for error messages.

    Returns:
      a loss `(variables, batch, key) -> (loss, variables)` as in `Task.loss`.

    Raises:
      ValueError: the task has no features and head, or an opaque loss.
    """
    extract, head = require_features(task, method)
    parts = require_parts(task, method)

    def loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        batch, key = parts.prepare(batch, key)
        features = extract(variables, batch.x)
        if parts.as_predicted:
            value, updated = parts.criterion(head(variables, features), batch), variables
        else:
            value, updated = parts.prepared(variables, batch, key)
        return value + penalty(features, batch), updated

    return loss


def dense_layer(key: Key, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Initial kernel `[outputs, inputs]` and bias `[outputs]` of a dense layer, uniform within ±1/sqrt(inputs).

    The key is consumed.
    """
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5
    return {
        "kernel": jax.random.uniform(kernel_key, (outputs, inputs), minval=-bound, maxval=bound),
        "bias": jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound),
    }


def with_projection(task: Task, width: int, classes: int, *, projection: int = 256) -> Task:
    """The task with two dense layers between its features and a new head: d - d - ReLU - `projection` - classes (MOON).

    Args:
      task: a classifier with features; its own head is dropped.
      width: d, the number of features of `task`.
      classes: K.
      projection: number of features of the returned task, the inputs of its head.

    Returns:
      a task with the criterion of `task`, on batches that are prepared (augmented) in the same way.

    Raises:
      ValueError: the task has no features, or has buffers, dropout or an opaque loss, or a size is below 1.
    """
    extract, _ = require_features(task, "with_projection", buffers=False)
    parts = require_parts(task, "with_projection", as_predicted=True)
    for name, value in (("width", width), ("classes", classes), ("projection", projection)):
        checks.count(name, value)
    own_head = masks.resolve("head", task)
    sizes = {"project1": (width, width), "project2": (width, projection), "head": (projection, classes)}

    def init(key: Key) -> Variables:
        key, *keys = jax.random.split(key, 1 + len(sizes))
        layers = {name: dense_layer(key, *size) for key, (name, size) in zip(keys, sizes.items(), strict=True)}
        return {"base": masks.split(task.init(key), own_head)[1], **layers}

    def dense(layer: Params, x: jax.Array) -> jax.Array:
        return x @ layer["kernel"].T + layer["bias"][None]

    def project(variables: Variables, x: PyTree) -> jax.Array:
        unused = masks.split(masks.variables_shape(task), own_head)[0]
        unused = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), unused)
        z = extract(masks.merge(unused, variables["base"]), x)
        return dense(variables["project2"], jax.nn.relu(dense(variables["project1"], z)))

    def top(variables: Variables, z: jax.Array) -> jax.Array:
        return dense(variables["head"], z)

    layers = (*task.layers[:-1], *sizes)
    base = classification(
        init, lambda variables, x: top(variables, project(variables, x)), layers=layers, loss=parts.criterion
    )
    loss = dataclasses.replace(require_parts(base, "with_projection"), prepare=parts.prepare)
    return base._replace(loss=loss, features=project, head=top)


def feature_shape(task: Task, variables: Variables, view: ClientView) -> tuple[int, int]:
    """(K, d) of a task on the inputs of a view, from shapes alone: no model is run."""
    extract, head = require_features(task, "the shape of features")

    def both(variables: Variables) -> tuple[jax.Array, jax.Array]:
        features = extract(variables, view.take(jnp.zeros(1, jnp.int32), jnp.ones(1)).x)
        return features, head(variables, features)

    features, logits = jax.eval_shape(both, variables)
    return logits.shape[-1], features.shape[-1]


def head_shape(task: Task, method: str) -> tuple[int, int]:
    """(K, d) of the task's head, found without data: d is the size of a leaf of the head that it takes for features.

    Raises:
      ValueError: no size of a leaf of the head fits.
    """
    from flax.errors import FlaxError  # Flax takes long to import

    _, head = require_features(task, method)
    variables = masks.variables_shape(task)
    leaves = jax.tree.leaves(masks.split(variables, masks.resolve("head", task))[0])
    for width in sorted({size for leaf in leaves for size in leaf.shape}, reverse=True):
        try:
            return jax.eval_shape(head, variables, jax.ShapeDtypeStruct((1, width), jnp.result_type(float))).shape[-1], width
        except (TypeError, ValueError, FlaxError):
            continue
    raise ValueError(f"{method} finds no number of features that the task's head accepts")


def shape_in(task: Task, variables: Variables, data: FederatedData) -> tuple[int, int]:
    """`feature_shape` on the inputs of a federated data set."""
    return feature_shape(task, variables, data.client(0)[data.views[0]])


class ClassSums(NamedTuple):
    """Sums over a client's samples, one entry per class.

    Attributes:
      number: `[K]`, number of samples.
      total: `[K, d]`, sum of the features.
      square: `[K]`, sum of the squared norms of the features.
    """

    number: jax.Array
    total: jax.Array
    square: jax.Array

    def mean(self) -> jax.Array:
        """Mean feature of each class, `[K, d]`; 0 for a class without samples."""
        return self.total / jnp.maximum(self.number, 1)[:, None]


def class_sums(task: Task, variables: Variables, view: ClientView, *, batch_size: int = CHUNK) -> ClassSums:
    """The `ClassSums` of a view, by one pass in evaluation mode.

    Args:
      task: a classifier with features.
      variables: where to evaluate it.
      view: the samples.
      batch_size: samples per batch of the pass; it changes memory and rounding only.
    """
    classes, width = feature_shape(task, variables, view)
    extract, _ = require_features(task, "a pass over features")
    batches = view.in_chunks(batch_size)

    def step(t: Scalar, sums: ClassSums) -> ClassSums:
        batch = batches.get(t, 0)
        features = extract(variables, batch.x)
        member = jax.nn.one_hot(batch.y, classes, dtype=features.dtype) * batch.weight[:, None]
        here = ClassSums(jnp.sum(member, 0), member.T @ features, member.T @ jnp.sum(features**2, -1))
        return jax.tree.map(jnp.add, sums, here)

    dtype = jnp.result_type(float)
    start = ClassSums(jnp.zeros(classes, dtype), jnp.zeros((classes, width), dtype), jnp.zeros(classes, dtype))
    return loops.fori_loop(batches.steps, step, start)


class Centroids(NamedTuple):
    """A server's mean feature of each class.

    Attributes:
      mean: over all clients, `[K, d]`.
      known: whether a class has a centroid yet, bool `[K]`.
    """

    mean: jax.Array
    known: jax.Array


def no_centroids(task: Task, variables: Variables, data: FederatedData) -> Centroids:
    """Centroids of no class yet, for `Method.init_extra`."""
    classes, width = shape_in(task, variables, data)
    return Centroids(jnp.zeros((classes, width)), jnp.zeros(classes, bool))


def renewed_centroids(state: Any, mean: PyTree, weight: PyTree, num_clients: int) -> Centroids:
    """A `Method.update_extra` of centroids from the mean `aggregate.Ratio` of sums of features `[K, d]` and their numbers `[K]`.

    A class that no client of the cohort holds keeps its last centroid.
    """
    del weight, num_clients
    total, count = mean
    held = count > 0
    fresh = total / jnp.where(held, count, 1)[:, None]
    return Centroids(jnp.where(held[:, None], fresh, state.extra.mean), state.extra.known | held)


def class_counts(view: ClientView, classes: int, *, batch_size: int = 1024) -> jax.Array:
    """Number of samples of each class in a view, `[K]`."""
    # XLA removes the unused inputs, so only labels are read.
    batches: Batches = view.in_chunks(batch_size)

    def step(t: Scalar, counts: jax.Array) -> jax.Array:
        batch = batches.get(t, 0)
        return counts.at[batch.y].add(batch.weight.astype(counts.dtype))

    return loops.fori_loop(batches.steps, step, jnp.zeros(classes))
