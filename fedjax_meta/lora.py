"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685) around any task: frozen base weights, small trained matrices.

An adapted matrix is W + (alpha / rank) * B A. W is frozen. A reads the inputs of the layer and starts random, B writes its
outputs and starts at 0, so that an adapter starts as the base model.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks, masks
from fedjax_meta.masks import MaskSpec
from fedjax_meta.task import Batch, LogitsLoss, Task, require_task
from fedjax_meta.types import Key, Mask, PyTree, Variables

A = "path:(^|/)lora_A$"
"""The mask of the matrices that read inputs."""

B = "path:(^|/)lora_B$"
"""The mask of the matrices that write outputs."""

INPUTS = ("first", "last")
"""Which axis of a matrix its inputs are on."""


def lora(
    task: Task,
    base: Variables,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: MaskSpec | None = None,
    train: MaskSpec = "none",
    frozen_a: int | None = None,
    inputs: str = "last",
) -> Task:
    """A task whose variables are low-rank adapters of a base model.

    The base is a constant of the task. It is no part of the variables: no state, client row, checkpoint or message holds it, and
    its bytes are there once, whatever the number of clients. While a client computes, the adapted matrices of its lane exist.

    The variables are `{"adapters": {path: {"lora_A": [rank, inputs], "lora_B": [outputs, rank]}}, "trained": leaves}`, with the
    names of the base in every path, so that masks such as `"head"`, `"last:2"` and `"path:..."` work as for `task`. The masks
    `lora.A` and `lora.B` select one half of all adapters: `fm.fedavg(adapted, personal=lora.A)` keeps A with its client and
    shares B.

    Args:
      task: any task.
      base: its variables, e.g. those of a trained state. Its buffers stay buffers, and are among the trained leaves.
      rank: r, the inner size of each adapter.
      alpha: scale of the adapters, which are multiplied by alpha / rank; the rank when not given.
      targets: mask of the matrices `[., .]` that get adapters; by default, all trainable matrices outside `train` whose smaller
        side is above `rank`.
      train: mask of leaves of the base that are trained whole (a head, biases, norms).
      frozen_a: FFA-LoRA (Sun et al. 2024, arXiv 2403.12313): a seed from which all A are drawn once. They are then constants
        like the base, and clients train and send B alone. `None`: A is trained.
      inputs: which axis of a matrix reads inputs: `"last"` (`[outputs, inputs]`, as in this package's layers, Equinox and
        PyTorch) or `"first"` (Flax's `Dense`). Tables of embeddings, `[tokens, outputs]`, have their inputs first in all of
        them: with `"last"`, their B belongs to the tokens and their A to the outputs.

    Raises:
      ValueError: a target that is no matrix or is among the leaves that are trained whole, no target at all, a base of another
        form than the task's variables, options out of range.

    Example:
      >>> from fedjax_meta import models
      >>> task = models.mlp(20, (16,), 3)
      >>> base = task.init(jax.random.key(0))
      >>> adapted = lora(task, base, rank=2, targets="path:fc1/kernel")
      >>> jax.tree.map(jnp.shape, adapted.init(jax.random.key(1)))["adapters"]
      {'params': {'fc1': {'kernel': {'lora_A': (2, 20), 'lora_B': (16, 2)}}}}
    """
    require_task("lora", task)
    checks.count("rank", rank)
    if alpha is not None:
        checks.positive("alpha", alpha)
    if frozen_a is not None:
        checks.seed("frozen_a", frozen_a, bits=32)
    checks.one_of("inputs", inputs, INPUTS)
    shapes = masks.variables_shape(task)
    checks.arrays("base", base)
    odd = checks.mismatch(jax.eval_shape(lambda: base), shapes)
    if odd is not None:
        raise ValueError(f"base must have the form of the task's variables, but {odd}")
    trainable = task.trainable(shapes)
    whole = masks.union(masks.resolve(train, task, name="train"), masks.complement(trainable))
    chosen = _default_targets(shapes, whole, rank) if targets is None else masks.resolve(targets, task, name="targets")
    _check_targets(shapes, chosen, whole, rank)
    adapters = _Adapters(base, chosen, whole, rank, (rank if alpha is None else alpha) / rank, frozen_a, inputs == "first")

    def moves(variables: Variables) -> Mask:
        return {
            "adapters": jax.tree.map(lambda _: True, variables["adapters"]),
            "trained": masks.split(trainable, whole)[0],
        }

    return task._replace(
        init=adapters.init,
        loss=adapters.loss(task.loss),
        predict=adapters.of(task.predict),
        features=None if task.features is None else adapters.of(task.features),
        head=None if task.head is None else adapters.of(task.head),
        trainable=moves,
    )


def merged(task: Task, variables: Variables) -> Variables:
    """The base task's variables in which adapters are added to their matrices, e.g. to export a client's model.

    Args:
      task: as `lora` returned it.
      variables: of this task, e.g. the `model` of a state, or what `personalize` returns. May be traced.

    Raises:
      ValueError: another task, variables of another form.
    """
    adapters = getattr(task.init, "__self__", None)
    if not isinstance(adapters, _Adapters):
        raise ValueError("task must be one that lora.lora returned")
    odd = checks.mismatch(jax.eval_shape(lambda: variables), masks.variables_shape(task))
    if odd is not None:
        raise ValueError(f"variables must have the form of the task's, but {odd}")
    return adapters.merged(variables)


class _Adapters:
    """The adapters of one base model; `whole` and `chosen` are masks over its leaves."""

    def __init__(
        self, base: Variables, chosen: Mask, whole: Mask, rank: int, scale: float, frozen_a: int | None, inputs_first: bool
    ) -> None:
        self._base, self._chosen, self._whole, self._rank, self._scale = base, chosen, whole, rank, scale
        self._inputs_first, self._frozen = inputs_first, None
        self._kind = jnp.result_type(*(leaf for _, leaf in self._targets()))
        if frozen_a is not None:
            self._frozen = self._drawn(jax.random.key(frozen_a))

    def init(self, key: Key) -> Variables:
        adapters = {path: {} if self._frozen is not None else {"lora_A": a} for path, a in self._drawn(key).items()}
        for path, leaf in self._targets():
            outputs = leaf.shape[1 if self._inputs_first else 0]
            adapters[path]["lora_B"] = jnp.zeros((outputs, self._rank), leaf.dtype)
        return {"adapters": _nested(adapters), "trained": masks.split(self._base, self._whole)[0]}

    def merged(self, variables: Variables) -> Variables:
        """The variables of the base task."""
        adapters = variables["adapters"]
        kind = jnp.result_type(*jax.tree.leaves(adapters))

        def adapted(path: Any, leaf: jax.Array, chosen: bool) -> jax.Array:
            # `mixed_precision` casts variables, of which the base is none.
            leaf = leaf.astype(kind) if leaf.dtype == self._kind else leaf
            if not chosen:
                return leaf
            names = masks.path_names(path)
            own = adapters
            for name in names:
                own = own[name]
            a = own["lora_A"] if self._frozen is None else self._frozen[names].astype(own["lora_B"].dtype)
            product = own["lora_B"] @ a
            return leaf + self._scale * (product.T if self._inputs_first else product)

        base = jax.tree_util.tree_map_with_path(adapted, self._base, self._chosen)
        return masks.merge(masks.split(base, self._whole)[1], variables["trained"])

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the base's variables as one of the adapters."""
        return lambda variables, *arguments: function(self.merged(variables), *arguments)

    def loss(self, loss: Any) -> Any:
        def updated(variables: Variables, base: Variables) -> Variables:
            # Buffers are the only leaves that a loss changes, and they are among those kept whole.
            return {**variables, "trained": masks.split(base, self._whole)[0]}

        if not isinstance(loss, LogitsLoss):

            def opaque(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
                value, base = loss(self.merged(variables), batch, key)
                return value, updated(variables, base)

            return opaque

        def logits(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
            outputs, base = loss.logits(self.merged(variables), batch, key)
            return outputs, updated(variables, base)

        return dataclasses.replace(loss, logits=logits)

    def _targets(self) -> list[tuple[tuple[str, ...], Any]]:
        leaves = jax.tree_util.tree_leaves_with_path(self._base)
        chosen = jax.tree.leaves(self._chosen)
        return [(masks.path_names(path), leaf) for (path, leaf), mine in zip(leaves, chosen, strict=True) if mine]

    def _drawn(self, key: Key) -> dict[tuple[str, ...], jax.Array]:
        """A new A for each target: uniform within ±1/sqrt(inputs)."""
        drawn = {}
        for number, (path, leaf) in enumerate(self._targets()):
            fan_in = leaf.shape[0 if self._inputs_first else 1]
            bound = 1 / math.sqrt(fan_in)
            shape = (self._rank, fan_in)
            drawn[path] = jax.random.uniform(jax.random.fold_in(key, number), shape, leaf.dtype, -bound, bound)
        return drawn


def _nested(flat: dict[tuple[str, ...], PyTree]) -> PyTree:
    if () in flat:  # the whole model is one matrix
        return flat[()]
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def _default_targets(shapes: PyTree, whole: Mask, rank: int) -> Mask:
    return jax.tree.map(lambda leaf, kept: not kept and len(leaf.shape) == 2 and min(leaf.shape) > rank, shapes, whole)


def _check_targets(shapes: PyTree, chosen: Mask, whole: Mask, rank: int) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), mine, kept in zip(leaves, jax.tree.leaves(chosen), jax.tree.leaves(whole), strict=True):
        name = "/".join(masks.path_names(path))
        if mine and len(leaf.shape) != 2:
            raise ValueError(
                f"targets selects {name}, which is no matrix but {leaf.dtype}{list(leaf.shape)}: low-rank adapters are for "
                "matrices; train such leaves whole with train=..."
            )
        if mine and kept:
            raise ValueError(f"targets selects {name}, which is trained whole or a buffer already")
        if mine and rank >= min(leaf.shape):
            raise ValueError(f"rank={rank} is not below the smaller side of {name}, {list(leaf.shape)}: train it whole")
    if not any(jax.tree.leaves(chosen)):
        raise ValueError(f"there is no matrix to adapt whose smaller side is above rank={rank}")
