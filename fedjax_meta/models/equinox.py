"""`from_equinox`: any Equinox module as a `Task`. It needs the package equinox."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fedjax_meta import checks
from fedjax_meta.masks import path_names
from fedjax_meta.models import functional
from fedjax_meta.task import Task, check_layers, cross_entropy
from fedjax_meta.types import Key, PyTree, Variables

AXIS = "batch"
"""The name of the batch axis, for layers such as `equinox.nn.BatchNorm(size, axis_name="batch")`."""


def from_equinox(
    make: Callable[[Key], Any],
    sample_shape: Any,
    *,
    layers: tuple[str, ...] = (),
    features: str | None = None,
    head: str | None = None,
    loss: str | functional.Criterion = cross_entropy,
    metrics: tuple[Any, ...] | None = None,
    sample_dtype: DTypeLike | None = None,
) -> Task:
    """A task from any Equinox module.

    As is usual in Equinox, the module's `__call__(x, ...)` takes ONE sample; the task maps it over the batch, an axis of the
    name `"batch"`. It may also take `key`, which is `None` in evaluation mode, and `state` (`equinox.nn.State`) as its second
    argument, with which it returns `(outputs, state)`. Evaluation mode is that of `equinox.nn.inference_mode`. Rows of padding
    enter no statistics of `equinox.nn.BatchNorm`.

    The variables are a dict: `"params"`, the module with its floating-point arrays alone (`equinox.combine(params, module)` puts
    them back), and where there are any, `"buffers"`, its other arrays, and `"batch_stats"` and `"state"`, the states of its batch
    norms and of other layers, as dicts by the fields of the module.

    Args:
      make: `key -> module`, or `key -> (module, state)` as `equinox.nn.make_with_state` gives it.
      sample_shape, layers, loss, metrics, sample_dtype: as for `from_linen`; layers are named by the fields of the module.
      features: name of the method that stops before the head, with the same arguments as `__call__`.
      head: name of the field or method `features [d] -> [K]` that continues from there, without state.

    Raises:
      ValueError: `make` is no such function, the module lacks a given layer or method, or it is made without the state that it
        needs.

    Example:
      >>> make = lambda key: eqx.nn.MLP(4, 3, width_size=8, depth=1, key=key)
      >>> task = from_equinox(make, (4,))
      >>> task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4))).shape
      (2, 3)
    """
    if isinstance(make, eqx.Module) and not isinstance(make, type):
        raise ValueError(
            f"make must be a function of a key that builds the module, e.g. lambda key: {type(make).__name__}(..., key=key), "
            "not a module: every seed has its own initial values"
        )
    checks.function("make", make, ("key",), "lambda key: eqx.nn.MLP(4, 3, 8, 1, key=key)")
    check_layers(layers)
    functional.check_criterion(loss)
    made = eqx.filter_eval_shape(make, jax.random.key(0))
    module, state = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, eqx.Module):
        raise ValueError(f"make must return an equinox.Module, or it and its state, not {checks.shown(module)}")
    name = type(module).__name__
    if state is None and _named(module, eqx.nn.StateIndex):
        raise ValueError(f"module {name} has a state (batch norm?): give make=eqx.nn.make_with_state({name})")
    functional.check_split(name, lambda part: callable(getattr(module, part, None)), features, head)
    static = eqx.filter(module, _is_form, inverse=True)
    state_structure = jax.tree.structure(state)
    places = [] if state is None else _places(module, state)

    def init(key: Key) -> Variables:
        made = make(key)
        module, state = made if places else (made, None)
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        variables = {"params": params}
        if jax.tree.leaves(eqx.filter(rest, eqx.is_array)):
            variables["buffers"] = eqx.filter(rest, eqx.is_array)
        return _with_state(variables, places, [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)])

    def run(method: str, variables: Variables, x: PyTree, train: bool, key: Key | None, weight: Any) -> tuple[Any, Variables]:
        module = eqx.combine(*(variables[name] for name in ("params", "buffers") if name in variables), static)
        module = eqx.nn.inference_mode(module, value=not train)
        rows = jax.tree.leaves(x)[0].shape[0]
        keys = None if key is None else jax.random.split(key, rows)
        weight = jnp.ones(rows) if weight is None else weight
        stateful = bool(places) and "state" in inspect.signature(getattr(module, method)).parameters

        def of_one(x: PyTree, key: Key | None, weight: jax.Array) -> tuple[Any, tuple[Any, ...]]:
            part = getattr(_with_weight(module, weight), method)
            given: dict[str, Any] = {"key": key} if "key" in inspect.signature(part).parameters else {}
            if not stateful:
                return part(x, **given), ()
            state = jax.tree.unflatten(state_structure, [_at(variables, place) for place in places])
            outputs, updated = part(x, state, **given)
            return outputs, tuple(jax.tree.leaves(updated))

        in_axes = (0, None if keys is None else 0, 0)
        outputs, updated = jax.vmap(of_one, in_axes=in_axes, out_axes=(0, None), axis_name=AXIS)(x, keys, weight)
        return outputs, _with_state(variables, places, updated) if stateful else variables

    one = functional.samples(sample_shape, 1, sample_dtype)
    try:
        jax.eval_shape(lambda: run("__call__", init(jax.random.key(0)), functional.zeros(one), False, None, None)[0])
    # The module is code of the user's own.
    except Exception as error:
        raise ValueError(
            f"{name} must take one sample, without the axis of a batch, here {checks.shown(sample_shape)}: "
            f"{checks.first_line(error)}"
        ) from error
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


def _is_form(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def _named(module: Any, kind: type) -> dict[tuple[str, ...], Any]:
    """The nodes of a kind by their path, e.g. `("layers", "0")`."""
    nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=lambda node: isinstance(node, kind))
    return {path_names(path): node for path, node in nodes if isinstance(node, kind)}


def _places(module: Any, state: Any) -> list[tuple[str, ...]]:
    """Where each leaf of the state stands in the variables, e.g. `("batch_stats", "norm", "batch_state_index.0")`."""
    norms = _named(module, eqx.nn.BatchNorm)
    owned = {node.marker: names for names, node in _named(module, eqx.nn.StateIndex).items()}
    places = []
    values, markers = state.tree_flatten()
    for marker, value in zip(markers, values, strict=True):
        *owner, field = owned[marker]
        collection = "batch_stats" if tuple(owner) in norms else "state"
        places += [(collection, *owner, f"{field}.{i}") for i in range(len(jax.tree.leaves(value)))]
    return places


def _at(tree: Any, place: tuple[str, ...]) -> Any:
    for name in place:
        tree = tree[name]
    return tree


def _with_state(variables: Variables, places: list[tuple[str, ...]], leaves: Sequence[Any]) -> Variables:
    """The variables with the leaves of the state at their places, in new dicts."""
    changed = {name: tree for name, tree in variables.items() if name not in ("batch_stats", "state")}
    for (*owner, last), leaf in zip(places, leaves, strict=True):
        node = changed
        for name in owner:
            node = node.setdefault(name, {})
        node[last] = leaf
    return changed


# ------------------------------------------------------------------------------------ batch norm that leaves out padding


def _with_weight(module: Any, weight: jax.Array) -> Any:
    """The module with its batch norms told how much the sample at hand counts."""

    def told(node: Any) -> Any:
        return _WeightedNorm(node, weight) if isinstance(node, eqx.nn.BatchNorm) else node

    return jax.tree.map(told, module, is_leaf=lambda node: isinstance(node, eqx.nn.BatchNorm))


class _WeightedNorm(eqx.Module):
    """`equinox.nn.BatchNorm` of a batch in which rows of weight 0 do not count; one of padding alone changes no statistics.

    Attributes:
      norm: the layer.
      weight: of the sample at hand, a scalar.
    """

    norm: eqx.nn.BatchNorm
    weight: jax.Array

    def __call__(self, x: jax.Array, state: Any, *, key: Key | None = None, inference: bool | None = None) -> tuple[Any, Any]:
        """As `equinox.nn.BatchNorm.__call__`: `x [channels, ...]`."""
        norm = self.norm
        if norm.inference if inference is None else inference:
            return norm(x, state, key=key, inference=True)
        axes = tuple(range(1, x.ndim))
        total = lax.psum(self.weight, norm.axis_name)
        some = total > 0
        total = jnp.maximum(total, 1)
        mean = lax.psum(self.weight * jnp.mean(x, axes), norm.axis_name) / total
        centred = x - jnp.expand_dims(mean, axes)
        var = lax.psum(self.weight * jnp.mean(centred**2, axes), norm.axis_name) / total
        if norm.mode == "ema":
            first = state.get(norm.ema_first_time_index)
            old_mean, old_var = state.get(norm.ema_state_index)
            mean = jnp.where(first, mean, (1 - norm.momentum) * mean + norm.momentum * old_mean)
            var = jnp.where(first, var, (1 - norm.momentum) * var + norm.momentum * old_var)
            state = state.set(norm.ema_first_time_index, first & ~some)
            state = state.set(norm.ema_state_index, (jnp.where(some, mean, old_mean), jnp.where(some, var, old_var)))
        else:
            old_mean, old_var = state.get(norm.batch_state_index)
            rate = jnp.where(some, 1 - norm.momentum, 0)
            state = state.set(norm.batch_counter, state.get(norm.batch_counter) + some)
            new = (old_mean + rate * (mean - old_mean), old_var + rate * (var - old_var))
            state = state.set(norm.batch_state_index, new)
        out = (x - jnp.expand_dims(mean, axes)) / jnp.expand_dims(jnp.sqrt(var + norm.eps), axes)
        if norm.weight is not None and norm.bias is not None:
            out = out * jnp.expand_dims(norm.weight, axes) + jnp.expand_dims(norm.bias, axes)
        return out, state
