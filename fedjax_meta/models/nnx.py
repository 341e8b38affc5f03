"""`from_nnx`: any Flax NNX module as a `Task`."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fedjax_meta import checks
from fedjax_meta.keys import is_key
from fedjax_meta.models import functional
from fedjax_meta.task import Task, check_layers, cross_entropy
from fedjax_meta.types import Key, PyTree, Variables

_COLLECTIONS: dict[str, Any] = {"params": nnx.Param, "batch_stats": nnx.BatchStat, "buffers": ...}
"""Which variables of a module go into which collection; the first that fits. Random state and sown values are left out."""


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    sample_shape: Any,
    *,
    layers: tuple[str, ...] = (),
    features: str | None = None,
    head: str | None = None,
    loss: str | functional.Criterion = cross_entropy,
    metrics: tuple[Any, ...] | None = None,
    sample_dtype: DTypeLike | None = None,
) -> Task:
    """A task from any Flax NNX module.

    The variables are plain dicts: `"params"` (`nnx.Param`), `"batch_stats"` (`nnx.BatchStat`) and `"buffers"` (all others). The
    last two are buffers: training updates them, and no gradient reaches them. `nnx.update(module, variables["params"])` puts
    trained parameters back into a module. Training and evaluation mode are set by `module.train()` and `module.eval()`; random
    streams of the module (dropout) start from the key of the loss. If `__call__` takes `weight`, it gets `[B]`, 1 for real rows
    and 0 for padding.

    Args:
      make: `rngs -> module`, e.g. the class of a module that takes `rngs` alone.
      sample_shape, layers, loss, metrics, sample_dtype: as for `from_linen`.
      features: name of the method `(x, ...) -> [B, d]` that stops before the head; it gets `weight` if it takes it.
      head: name of the submodule or method `[B, d] -> [B, K]` that continues from there.

    Raises:
      ValueError: `make` is no such function, the module lacks a given layer or method, or has batch statistics but no argument
        `weight` (for `nnx.BatchNorm`, as its `mask`), because rows of padding would enter its statistics.

    Example:
      >>> class Small(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.fc1, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
      ...         self.head = nnx.Linear(8, 3, rngs=rngs)
      ...     def __call__(self, x, weight=None):
      ...         mask = None if weight is None else weight[:, None] > 0
      ...         return self.head(nnx.relu(self.norm(self.fc1(x), mask=mask)))
      >>> task = from_nnx(Small, (4,), layers=("fc1", "head"), sample_dtype=jnp.float32)
      >>> task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4))).shape
      (2, 3)
    """
    if isinstance(make, nnx.Module):
        raise ValueError(
            f"make must be a function of rngs that builds the module, e.g. lambda rngs: {type(make).__name__}(..., rngs=rngs), "
            "not a module: every seed has its own initial values"
        )
    checks.function("make", make, ("rngs",), "lambda rngs: nnx.Linear(4, 3, rngs=rngs)")
    check_layers(layers)
    functional.check_criterion(loss)
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    if not isinstance(module, nnx.Module):
        raise ValueError(f"make must return an nnx.Module, not {checks.shown(module)}")
    name = type(module).__name__
    functional.check_split(name, lambda part: callable(getattr(module, part, None)), features, head)
    graph, random, states = _split(module)
    flags = functional.flags(type(module).__call__)
    if jax.tree.leaves(states[1]) and "weight" not in flags(True, jnp.ones(1)):
        raise ValueError(
            f"module {name} has batch statistics, so its __call__ must take weight [B] and give it to nnx.BatchNorm as mask: "
            "rows of padding would enter them otherwise"
        )

    def init(key: Key) -> Variables:
        return _collected(_split(make(nnx.Rngs(key)))[2])

    def run(
        method: str, variables: Variables, x: PyTree, train: bool, key: Key | None, weight: jax.Array | None
    ) -> tuple[Any, Variables]:
        bound = nnx.merge(graph, _streams(random, key), *_states(states, variables))
        bound.train() if train else bound.eval()
        part = getattr(bound, method)
        outputs = part(x, weight=weight) if "weight" in functional.flags(part)(True, weight) else part(x)
        return outputs, _collected(_split(bound)[2])

    return functional.from_methods(
        init,
        run,
        sample_shape,
        features=features,
        head=head,
        layers=layers,
        loss=loss,
        metrics=metrics,
        sample_dtype=sample_dtype,
    )


def _split(module: nnx.Module) -> tuple[Any, Any, list[Any]]:
    """(structure, random state, the state of each collection)."""
    parts: Any = nnx.split(module, nnx.RngState, nnx.Intermediate, *_COLLECTIONS.values())
    return parts[0], parts[1], list(parts[3:])


def _collected(states: Any) -> Variables:
    """The collections that have any leaves, as plain dicts of arrays."""
    named = zip(_COLLECTIONS, states, strict=True)
    return {name: nnx.to_pure_dict(state) for name, state in named if jax.tree.leaves(state)}


def _states(states: Any, variables: Variables) -> list[Any]:
    filled = []
    for name, state in zip(_COLLECTIONS, states, strict=True):
        # A copy: the states belong to the module, and are filled anew in each trace.
        copy = jax.tree.map(lambda leaf: leaf, state)
        if name in variables:
            nnx.replace_by_pure_dict(copy, variables[name])
        filled.append(copy)
    return filled


def _streams(random: Any, key: Key | None) -> Any:
    """The random state of a module, each stream begun anew from the key."""
    number = itertools.count()
    key = jax.random.key(0) if key is None else key

    def begun(leaf: Any) -> jax.Array:
        if not is_key(leaf):
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = jax.random.fold_in(key, next(number))
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    return jax.tree.map(begun, random)
