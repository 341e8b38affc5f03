"""Checks at the door: one clear line that names the argument, its value and what is allowed.

Rates may be traced (a sweep is one vmapped program), and a traced value has no number to look at yet: it passes.
"""

from collections.abc import Collection
from typing import Any

import jax
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


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises `ValueError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed are {', '.join(map(str, allowed))}")
