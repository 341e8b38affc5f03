"""What systems need that look inside a classifier: its features, its head, and what a client's classes look like there.

K classes, d features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks, masks
from fedjax_meta.data.federated import CHUNK, Batches, ClientView, FederatedData
from fedjax_meta.task import Batch, Key, Task, Variables, classification, cross_entropy

Extractor = Callable[[Variables, Any], jax.Array]
Head = Callable[[Variables, jax.Array], jax.Array]


def require(task: Task, system: str, *, buffers: bool = True) -> tuple[Extractor, Head]:
    """The task's `features` and `head`.

    Raises:
      ValueError: when it has none, or has buffers where `buffers` is false.
    """
    if task.features is None or task.head is None:
        raise ValueError(f"{system} looks at features, but the task has no features and head; give it both")
    if not buffers:
        require_plain(task, system)
    return task.features, task.head


def require_plain(task: Task, system: str) -> None:
    """Raises `ValueError` when the task has buffers (batch-norm statistics)."""
    if not all(jax.tree.leaves(task.trainable(masks.variables_shape(task)))):
        raise ValueError(f"{system} is for models without buffers, but this one has some (batch-norm statistics)")


def penalised(
    task: Task, penalty: Callable[[jax.Array, Batch], jax.Array]
) -> Callable[[Variables, Batch, Key], tuple[jax.Array, Variables]]:
    """The loss of a classifier plus `penalty(features [B, d], batch)`.

    Without buffers it is the cross-entropy of the head on the very features that the penalty sees, so that the network runs
    once. With buffers it is the task's own loss, and the features are those of evaluation mode.
    """
    buffers = not all(jax.tree.leaves(task.trainable(masks.variables_shape(task))))
    extract, head = require(task, "this loss")

    def loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        features = extract(variables, batch.x)
        if buffers:
            value, moved_on = task.loss(variables, batch, key)
        else:
            value, moved_on = cross_entropy(head(variables, features), batch), variables
        return value + penalty(features, batch), moved_on

    return loss


def dense_layer(key: Key, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Kernel `[outputs, inputs]` and bias `[outputs]` of a dense layer, uniform within 1/sqrt(inputs); the key is consumed."""
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5
    return {
        "kernel": jax.random.uniform(kernel_key, (outputs, inputs), minval=-bound, maxval=bound),
        "bias": jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound),
    }


def with_projection(task: Task, width: int, classes: int, *, projection: int = 256) -> Task:
    """The task with two dense layers between its features and a new head: d - d - ReLU - `projection` - classes (MOON).

    Args:
      task: a classifier with features; its own head is left out.
      width: d, its number of features.
      classes: K.
      projection: number of features of the result, its head's inputs.

    Raises:
      ValueError: a task without features, or with buffers; a size below 1.
    """
    extract, _ = require(task, "with_projection", buffers=False)
    for name, value in (("width", width), ("classes", classes), ("projection", projection)):
        checks.count(name, value)
    own_head = masks.resolve("head", task)
    sizes = {"project1": (width, width), "project2": (width, projection), "head": (projection, classes)}

    def init(key: Key) -> Variables:
        key, *keys = jax.random.split(key, 1 + len(sizes))
        layers = {name: dense_layer(key, *size) for key, (name, size) in zip(keys, sizes.items(), strict=True)}
        return {"base": masks.split(task.init(key), own_head)[1], **layers}

    def dense(layer: Any, x: jax.Array) -> jax.Array:
        return x @ layer["kernel"].T + layer["bias"][None]

    def project(variables: Variables, x: Any) -> jax.Array:
        unused = masks.split(masks.variables_shape(task), own_head)[0]
        unused = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), unused)
        z = extract(masks.merge(unused, variables["base"]), x)
        return dense(variables["project2"], jax.nn.relu(dense(variables["project1"], z)))

    def top(variables: Variables, z: jax.Array) -> jax.Array:
        return dense(variables["head"], z)

    layers = (*task.layers[:-1], *sizes)
    base = classification(init, lambda variables, x: top(variables, project(variables, x)), layers=layers)
    return base._replace(features=project, head=top)


def feature_shape(task: Task, variables: Variables, view: ClientView) -> tuple[int, int]:
    """(K, d) of a task on these inputs; nothing is computed."""

    extract, head = require(task, "the shape of features")

    def both(variables: Variables) -> tuple[jax.Array, jax.Array]:
        features = extract(variables, view.take(jnp.zeros(1, jnp.int32), jnp.ones(1)).x)
        return features, head(variables, features)

    features, logits = jax.eval_shape(both, variables)
    return logits.shape[-1], features.shape[-1]


def shape_in(task: Task, variables: Variables, data: FederatedData) -> tuple[int, int]:
    """`feature_shape` on the inputs of a federation."""
    return feature_shape(task, variables, data.client(0)[data.views[0]])


class ClassSums(NamedTuple):
    """Sums over a client's samples, class by class.

    Attributes:
      number: `[K]`, samples.
      total: `[K, d]`, sum of their features.
      square: `[K]`, sum of the squared norms of their features.
    """

    number: jax.Array
    total: jax.Array
    square: jax.Array

    def mean(self) -> jax.Array:
        """Mean feature of each class, `[K, d]`; 0 for a class without samples."""
        return self.total / jnp.maximum(self.number, 1)[:, None]


def class_sums(task: Task, variables: Variables, view: ClientView, *, batch_size: int = CHUNK) -> ClassSums:
    """One pass over a view, in evaluation mode."""
    classes, width = feature_shape(task, variables, view)
    extract, _ = require(task, "a pass over features")
    batches = view.in_chunks(batch_size)

    def step(t: Any, sums: ClassSums) -> ClassSums:
        batch = batches.get(t, 0)
        features = extract(variables, batch.x)
        member = jax.nn.one_hot(batch.y, classes, dtype=features.dtype) * batch.weight[:, None]
        here = ClassSums(jnp.sum(member, 0), member.T @ features, member.T @ jnp.sum(features**2, -1))
        return jax.tree.map(jnp.add, sums, here)

    dtype = jnp.result_type(float)
    start = ClassSums(jnp.zeros(classes, dtype), jnp.zeros((classes, width), dtype), jnp.zeros(classes, dtype))
    return jax.lax.fori_loop(0, batches.steps, step, start)


def class_counts(view: ClientView, classes: int, *, batch_size: int = 1024) -> jax.Array:
    """How many samples of each class a view holds, `[K]`."""
    # Only labels are read: XLA drops the inputs, which nothing uses.
    batches: Batches = view.in_chunks(batch_size)

    def step(t: Any, counts: jax.Array) -> jax.Array:
        batch = batches.get(t, 0)
        return counts.at[batch.y].add(batch.weight.astype(counts.dtype))

    return jax.lax.fori_loop(0, batches.steps, step, jnp.zeros(classes))
