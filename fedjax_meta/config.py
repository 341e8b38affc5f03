"""Hyper-parameters as JSON values, for the record of a run."""

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_meta.keys import is_key


def plain(value: Any) -> Any:
    """A value as JSON can hold it.

    Functions become their qualified name, with their arguments where they were fixed by `functools.partial`, and with the
    numbers, texts and functions that a function inside another one holds. The code of a function is not recorded, but a digest of
    that of a lambda, whose name says nothing. Arrays become numbers or lists. A traced value has no number: it becomes "traced",
    and the caller records what it stands for.

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
        return _function(value)
    return repr(value)


MOST = 16
"""Entries of an array or a collection that a function holds, beyond which only its type is recorded."""


def _function(value: Any, inside: tuple[Any, ...] = ()) -> str:
    """The name of a function, with what it holds.

    Example:
      >>> def decayed(start):
      ...     return lambda round: start / (1 + round)
      >>> _function(decayed(0.1)).partition("<lambda>")[2].endswith("(start=0.1)"), _function(len)
      (True, 'builtins.len')
    """
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    value = value if hasattr(value, "__code__") else getattr(value, "__wrapped__", value)  # e.g. of jax.jit
    code = getattr(value, "__code__", None)
    if code is None or any(value is one for one in inside):
        return name
    held = dict(zip(code.co_freevars, map(_content, value.__closure__ or ()), strict=True))
    if "<" in name:  # a lambda, or a function inside another one
        defaults = value.__defaults__ or ()
        held |= dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
        held |= value.__kwdefaults__ or {}
    if name.endswith("<lambda>"):
        name += f"#{hashlib.sha256(repr(list(_parts(code))).encode()).hexdigest()[:8]}"
    told = [f"{key}={_held(part, (*inside, value))}" for key, part in held.items()]
    return f"{name}({', '.join(told)})" if told else name


def _content(cell: Any) -> Any:
    """What a cell of a closure holds; `None` where nothing was put into it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _parts(code: types.CodeType) -> Iterator[Any]:
    """What a function does, as far as it is in its code: instructions, names and constants, with those of functions inside."""
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
        else:
            yield sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _held(value: Any, inside: tuple[Any, ...]) -> str:
    """A value that a function holds; of other objects than numbers, texts, functions and a few of them, only the type."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not isinstance(value, jax.core.Tracer):
        return str(plain(value)) if value.size <= MOST else f"{value.dtype}{list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str, jax.core.Tracer)):
        return str(plain(value))
    if isinstance(value, (tuple, list)) and len(value) <= MOST:
        return f"[{', '.join(_held(part, inside) for part in value)}]"
    if isinstance(value, Mapping) and len(value) <= MOST:
        return f"{{{', '.join(f'{key}: {_held(part, inside)}' for key, part in value.items())}}}"
    if callable(value) and not isinstance(value, type):
        return _function(value, inside)
    return type(value).__name__
