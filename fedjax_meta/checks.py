"""Checks of arguments. Each raises with one line that names the argument, its value and what is allowed.

Rates may be traced, because a sweep over rates is one vmapped program. A traced value is not known yet, so it passes.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta.types import PyTree


def _concrete(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def _finite(value: Any) -> bool:
    array = np.asarray(value)
    return bool(np.issubdtype(array.dtype, np.number) and np.all(np.isfinite(array)))


def positive(name: str, value: Any) -> None:
    """Raises `ValueError` unless every entry of a concrete `value` is finite and above 0."""
    if _concrete(value) and not (_finite(value) and np.all(np.asarray(value) > 0)):
        raise ValueError(f"{name}={value} must be finite and above 0")


def not_negative(name: str, value: Any) -> None:
    """Raises `ValueError` unless every entry of a concrete `value` is finite and at least 0."""
    if _concrete(value) and not (_finite(value) and np.all(np.asarray(value) >= 0)):
        raise ValueError(f"{name}={value} must be finite and at least 0")


def count(name: str, value: Any, *, least: int = 1) -> None:
    """Raises `ValueError` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")


def fraction(name: str, value: Any) -> None:
    """Raises `ValueError` unless a concrete `value` lies strictly between 0 and 1."""
    if _concrete(value) and not (_finite(value) and 0 < value < 1):
        raise ValueError(f"{name}={value} must lie strictly between 0 and 1")


def indices(name: str, values: Any, count: int) -> None:
    """Raises `ValueError` unless concrete `values` are integers in `[0, count)`."""
    if not _concrete(values):
        return
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer) or (array.size and not 0 <= array.min() <= array.max() < count):
        raise ValueError(f"{name}={values} must be integers in [0, {count})")


def share(name: str, value: Any) -> None:
    """Raises `ValueError` unless a concrete `value` lies in [0, 1]."""
    if _concrete(value) and not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie between 0 and 1")


def between(name: str, value: Any, least: float, most: float) -> None:
    """Raises `ValueError` unless every entry of a concrete `value` lies in [least, most]."""
    if _concrete(value) and not (np.all(np.asarray(value) >= least) and np.all(np.asarray(value) <= most)):
        raise ValueError(f"{name}={value} must lie in [{least}, {most}]")


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises `ValueError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed are {', '.join(map(str, allowed))}")


def optimizer_factory(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a function that makes an optimiser from its rate, e.g. `optax.sgd`."""
    wanted = f"{name} must be a factory `rate -> optax.GradientTransformation` such as optax.sgd"
    if isinstance(value, optax.GradientTransformation):
        raise ValueError(f"{wanted}; its rate is an argument of its own, not {name}=optax.sgd(0.1)")
    if not callable(value):
        raise ValueError(f"{wanted}, not {value!r}")


def prng_key(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a typed JAX PRNG key (`jax.random.key`), which may be traced."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return
    if dtype == np.uint32 and value.shape == (2,):
        raise ValueError(f"{name} is a legacy uint32[2] key: use jax.random.key(0) instead of jax.random.PRNGKey(0)")
    shown = repr(value) if dtype is None else _shown(value)
    raise ValueError(f"{name}={shown} must be a JAX PRNG key: jax.random.key(0)")


def options(function_name: str, given: Iterable[str], allowed: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Raises `TypeError` for a keyword argument that a function does not take.

    Args:
      function_name: the function that the user called.
      given: names of the keyword arguments that the user gave.
      allowed: names of the arguments that the function takes.
      elsewhere: for names of arguments that something else takes, what that is.

    Example:
      >>> options("fedavg", {"cohort_size": 10}, ["lr", "epochs"], {"cohort_size": "Federation"})
      Traceback (most recent call last):
      TypeError: fedavg() takes no 'cohort_size', which belongs to Federation; allowed are lr, epochs
    """
    for name in given:
        if name in allowed:
            continue
        hint = ""
        if name in elsewhere:
            hint = f", which belongs to {elsewhere[name]}"
        elif near := difflib.get_close_matches(name, [*allowed, *elsewhere], 1):
            owner = f", which belongs to {elsewhere[near[0]]}" if near[0] in elsewhere else ""
            hint = f" (did you mean {near[0]!r}{owner}?)"
        raise TypeError(f"{function_name}() takes no {name!r}{hint}; allowed are {', '.join(allowed) or 'none'}")


def mismatch(given: PyTree, wanted: PyTree) -> str | None:
    """Describes the first leaf of `given` that differs from `wanted`; `None` when structure, shapes and types agree.

    A Python number, or a weakly typed array, agrees with any type that can hold it.

    Args:
      given: a pytree of arrays, shapes or Python numbers.
      wanted: likewise. For a mask this is a tree of bools, e.g. `masks.everything_like(shapes)`.

    Example:
      >>> mismatch({"w": np.zeros(3, np.float32)}, {"w": np.zeros((3, 2), np.float32)})
      "['w'] is float32[3], not float32[3, 2]"
      >>> mismatch({}, {"w": np.zeros(3, np.float32)})
      "['w'] is missing"
      >>> mismatch({"head": True}, {"head": {"w": True}})
      "['head']['w'] is missing"
    """

    def by_path(tree: PyTree) -> dict[str, Any]:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    found, expected = by_path(given), by_path(wanted)
    for path, like in expected.items():
        if path not in found:
            return f"{path or 'the only leaf'} is missing"
        leaf, form, like_form = found[path], _form(found[path]), _form(like)
        fits = getattr(form, "weak_type", False) and jnp.result_type(leaf, like_form.dtype) == like_form.dtype
        if form.shape != like_form.shape or not (fits or form.dtype == like_form.dtype):
            return f"{path or 'the only leaf'} is {_shown(form)}, not {_shown(like_form)}"
    for path in found:
        if path not in expected:
            return f"{path or 'the only leaf'} does not belong there"
    structure: Any = jax.tree.structure(given)
    wanted_structure: Any = jax.tree.structure(wanted)
    return None if structure == wanted_structure else f"it has the structure {structure}, not {wanted_structure}"


def misplaced_leaf(given: PyTree, wanted: PyTree) -> str | None:
    """Describes the first leaf of either tree that the other does not have; `None` when the leaves of both are at the same paths.

    Example:
      >>> misplaced_leaf({"head": True}, {"head": {"w": 1, "b": 2}})
      "it has one value at ['head'], where there are 2 leaves (['head']['b'], ...)"
    """

    def paths(tree: PyTree) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    found, asked = paths(given), paths(wanted)
    for path in found:
        below = [other for other in asked if other.startswith(path) and other != path]
        if path not in asked and below:
            return f"it has one value at {path or 'the root'}, where there are {len(below)} leaves ({below[0]}, ...)"
        if path not in asked:
            return f"it has a value at {path}, where there is no leaf"
    missing = [path for path in asked if path not in found]
    return f"it has none at {missing[0]}" if missing else None


def _form(leaf: Any) -> Any:
    """A leaf's dtype and shape. Computes nothing, so that a check does not start JAX's backend."""
    return leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)


def _shown(form: Any) -> str:
    return f"{form.dtype}{list(form.shape)}"
