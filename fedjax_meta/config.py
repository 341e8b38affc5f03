"""Hyper-parameters as JSON values, for the record of a run."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_meta.keys import is_key


def plain(value: Any) -> Any:
    """A value as JSON can hold it.

    Functions become their qualified name, with their arguments where they were fixed by `functools.partial`; arrays become
    numbers or lists. A traced value has no number: it becomes "traced", and the caller records what it stands for.

    Example:
      >>> plain({"lr": np.float32(0.5), "optimizer": functools.partial(sorted, reverse=True)})
      {'lr': 0.5, 'optimizer': 'builtins.sorted(reverse=True)'}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, jax.core.Tracer):
        return "traced"
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(jax.random.key_data(value) if isinstance(value, jax.Array) and is_key(value) else value)
        # A float32 as the shortest number that reads as it: 0.1, not 0.10000000149011612.
        return float(str(array)) if array.ndim == 0 and np.issubdtype(array.dtype, np.floating) else array.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    if isinstance(value, functools.partial):
        given = [*map(str, map(plain, value.args)), *(f"{key}={plain(part)}" for key, part in value.keywords.items())]
        return f"{plain(value.func)}({', '.join(given)})"
    if hasattr(value, "name") and hasattr(value, "config"):
        return {"name": value.name, **plain(value.config)}
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
