"""Checks at the door: one clear line that names the argument, its value and what is allowed.

Rates may be traced (a sweep is one vmapped program), and a traced value has no number to look at yet: it passes.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
    """Raises `ValueError` unless `value` lies strictly between 0 and 1."""
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


def mismatch(given: Any, wanted: Any) -> str | None:
    """The first leaf of `given` that is not as in `wanted`, in words; `None` where structure, shapes and types agree.

    A Python number, or what JAX made of one alone, agrees with any type that takes it.

    Example:
      >>> mismatch({"w": np.zeros(3, np.float32)}, {"w": np.zeros((3, 2), np.float32)})
      "['w'] is float32[3], not float32[3, 2]"
      >>> mismatch({}, {"w": np.zeros(3, np.float32)})
      "['w'] is missing"
    """

    def by_path(tree: Any) -> dict[str, Any]:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    found, asked = by_path(given), by_path(wanted)
    for path, like in asked.items():
        if path not in found:
            return f"{path or 'the only leaf'} is missing"
        leaf = found[path]
        form = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        fits = getattr(form, "weak_type", False) and jnp.result_type(leaf, like.dtype) == like.dtype
        if form.shape != like.shape or not (fits or form.dtype == like.dtype):
            return f"{path or 'the only leaf'} is {form.dtype}{list(form.shape)}, not {like.dtype}{list(like.shape)}"
    for path in found:
        if path not in asked:
            return f"{path or 'the only leaf'} does not belong there"
    structure: Any = jax.tree.structure(given)
    expected: Any = jax.tree.structure(wanted)
    return None if structure == expected else f"it has the structure {structure}, not {expected}"
