"""`from_linen`: any Flax Linen module as a `Task`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_meta import checks, masks
from fedjax_meta.models import functional
from fedjax_meta.task import Task, check_layers, cross_entropy
from fedjax_meta.types import Key, Params, PyTree, Variables

_Flags = Callable[[bool, jax.Array | None], dict[str, Any]]


def from_linen(
    module: nn.Module,
    sample_shape: Any,
    *,
    layers: tuple[str, ...] = (),
    features: str | None = None,
    head: str | None = None,
    loss: str | functional.Criterion = cross_entropy,
    metrics: tuple[Any, ...] | None = None,
    sample_dtype: DTypeLike | None = None,
) -> Task:
    """A task from any Flax Linen module.

    The module's `__call__(x, ...)` returns outputs `[B, ...]`, logits `[B, K]` for a classifier. Its other arguments are
    recognised by name: a flag `train` or `training` (or `deterministic`, which gets the opposite value), and `weight [B]`, 1 for
    real rows and 0 for padding. A module with none of them is called with `x` alone. Every variable collection except `params`
    is a buffer: training updates it, and no gradient reaches it. Dropout gets its key under the name `dropout`.

    Args:
      module: the module, unbound.
      sample_shape: shape of one input, or one input as a pytree of arrays or `jax.ShapeDtypeStruct`.
      layers: layer names from input to output, as they appear in the paths of the variables, for masks such as `"last:2"`.
      features: name of the method `(x, ...) -> [B, d]` that stops before the head; it takes the same flags as `__call__`.
      head: name of the submodule or method `[B, d] -> [B, K]` that continues from there.
      loss: `(outputs, batch) -> scalar`, over rows with weight only, or for real targets "squared" or "huber"; softmax
        cross-entropy by default.
      metrics: what `evaluate` measures by default, see `Task`.
      sample_dtype: dtype of the inputs where `sample_shape` is a shape; JAX's default float type if `None`.

    Raises:
      ValueError: the module lacks a given layer, method or flag. A module with batch statistics must take `train` and `weight`
        (for `flax.linen.BatchNorm`, as its `mask`), because rows of padding would enter its statistics otherwise.

    Example:
      >>> import flax.linen as nn
      >>> class Small(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(3, name="head")(nn.relu(nn.Dense(8, name="fc1")(x)))
      >>> task = from_linen(Small(), (4,), layers=("fc1", "head"))
      >>> task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4))).shape
      (2, 3)
    """
    checks.instance("module", module, nn.Module, "models.Network((784,), 10)")
    one = functional.samples(sample_shape, 1, sample_dtype)
    check_layers(layers)
    functional.check_criterion(loss)
    # A head may be a submodule, which exists only while the module runs.
    functional.check_split(
        type(module).__name__, lambda name: name == head or callable(getattr(type(module), name, None)), features, head
    )
    flags = functional.flags(type(module).__call__)
    init = partial(_init, module, flags, one)
    shapes = jax.eval_shape(init, jax.random.key(0))
    _check_module(module, layers, flags, shapes)
    if head is not None and not callable(getattr(module.bind(shapes), head, None)):
        raise ValueError(f"head={head!r} is not a method or submodule of {type(module).__name__}")

    def apply(
        variables: Variables, x: PyTree, *, train: bool, key: Key | None, weight: jax.Array | None
    ) -> tuple[jax.Array, Variables]:
        if not train:
            return _evaluate(module, type(module).__call__, flags, variables, x), variables
        buffers = [name for name in variables if name != "params"]
        rngs: Any = {} if key is None else {"dropout": key}  # a loss without dropout may be asked for without a key
        outputs, updated = module.apply(variables, x, rngs=rngs, mutable=buffers, **flags(True, weight))
        return outputs, {**variables, **flax.core.unfreeze(updated)}

    extract = None
    if features is not None:
        method = getattr(type(module), features)
        extract = partial(_evaluate, module, method, functional.flags(method))
    return functional.from_functions(
        init,
        apply,
        sample_shape,
        trainable=functional.params_trainable,
        features=extract,
        head=None if head is None else partial(_evaluate, module, lambda bound, z: getattr(bound, head)(z), _no_flags),
        layers=layers,
        loss=loss,
        metrics=metrics,
        sample_dtype=sample_dtype,
    )


def _no_flags(train: bool, weight: jax.Array | None) -> dict[str, Any]:
    del train, weight
    return {}


def _init(module: nn.Module, flags: _Flags, one: PyTree, key: Key) -> Variables:
    rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
    variables = flax.core.unfreeze(module.init(rngs, functional.zeros(one), **flags(False, jnp.ones(1))))
    # How a model is spread over devices is of no use here: clients are.
    return jax.tree.map(_without_box, variables, is_leaf=_is_box)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def _without_box(leaf: Any) -> Any:
    if isinstance(leaf, nn.Partitioned):
        return leaf.unbox(apply_constraint=False)
    return leaf.unbox() if _is_box(leaf) else leaf


def _evaluate(module: nn.Module, method: Callable[..., Any], flags: _Flags, variables: Variables, x: PyTree) -> jax.Array:
    return jnp.asarray(module.apply(variables, x, method=method, **flags(False, None)))


def _check_module(module: nn.Module, layers: tuple[str, ...], flags: _Flags, shapes: Variables) -> None:
    """Raises `ValueError` for a layer name without parameters, and for batch statistics without `train` and `weight`."""
    params: Params = shapes.get("params", {})
    named = {name for path, _ in jax.tree_util.tree_leaves_with_path(params) for name in masks.path_names(path)}
    for layer in layers:
        if layer not in named:
            raise ValueError(f"layers={layers} names {layer!r}, but the parameters are called {', '.join(sorted(named))}")
    taken = flags(True, jnp.ones(1))
    if "batch_stats" in shapes and not ("weight" in taken and len(taken) >= 2):
        raise ValueError(
            f"module {type(module).__name__} has batch statistics, so its __call__ must take train (or deterministic) and "
            f"weight [B]: rows of padding would enter them otherwise; it takes {', '.join(taken) or 'neither'}"
        )
