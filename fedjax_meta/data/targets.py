"""Targets that are no class of each sample, from an `.npz` file: real numbers, or several labels a sample."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import npz
from fedjax_meta.data.cache import ARRAYS
from fedjax_meta.data.samples import lost

REAL, LABELS = "real targets", "several labels"

FREE_OF_CLASSES = ("iid", "quantity_skew", "natural")
"""The partitions that need no class of each sample."""


class Targets(NamedTuple):
    """A data set without classes, as a file holds it.

    Attributes:
      x: inputs `[M, ...]`; uint8 images have a channel axis.
      y: float32 targets `[M, d]`, or 0 and 1 `[M, L]`.
      name: of the file, without its ending.
      num_classes: 0.
      note: what the targets are.
      kind: `REAL` or `LABELS`, by their type in the file.
    """

    x: np.ndarray
    y: np.ndarray
    name: str
    num_classes: int = 0
    note: str = ""
    kind: str = ""

    def pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of all samples, those of the training split first."""
        return self.x, self.y


def read(path: str | os.PathLike, arrays: Mapping[str, np.ndarray] | None = None) -> Targets | None:
    """Reads `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`, whose targets are no classes.

    Targets of a floating-point type, `[M]` or `[M, d]`, are real numbers; integers or booleans `[M, L]`, all 0 or 1, are several
    labels.

    Args:
      path: of the file.
      arrays: what `npz.read` gave of it; read when not given.

    Returns:
      The data set; `None` where each sample has one whole number, its class, and where the file has other arrays, which
      `sources.read_npz` reads or refuses.

    Raises:
      ValueError: what `npz.read` refuses; targets of another form; inputs that are no numbers, do not match or are not finite.
    """
    arrays = npz.read(path) if arrays is None else arrays
    if {"x", "y"} <= arrays.keys():
        x, y = arrays["x"], arrays["y"]
    elif set(ARRAYS) <= arrays.keys():
        pairs = [("x_train", "x_test"), ("y_train", "y_test")]
        for first, second in pairs:
            if arrays[first].shape[1:] != arrays[second].shape[1:] or arrays[first].dtype != arrays[second].dtype:
                return None  # refused by `sources`, with both forms
        x, y = (np.concatenate([arrays[first], arrays[second]]) for first, second in pairs)
    else:
        return None
    real = np.issubdtype(y.dtype, np.floating)
    if not real and y.ndim < 2:
        return None
    shown = repr(os.fspath(path))
    if y.ndim not in (1, 2) or len(x) != len(y) or x.ndim < 2 or not x.size or not y.size:
        raise ValueError(f"{shown} must have x [M, ...] and y [M] or [M, d], not {list(x.shape)} and {list(y.shape)}")
    if not real and not (checks.is_real(y.dtype) or y.dtype == bool):
        raise ValueError(f"{shown} has y of type {y.dtype}: give numbers")
    if not real and not np.isin(y, (0, 1)).all():
        raise ValueError(
            f"{shown} has whole numbers y {list(y.shape)} beyond 0 and 1: real targets are floats, classes are [M], "
            "sequences of tokens are for fm.from_clients"
        )
    if not checks.is_real(x.dtype) and x.dtype != bool:
        raise ValueError(f"{shown} has x of type {x.dtype}: give numbers")
    for name, values in (("x", x), ("y", y)):
        bad, words = lost(values)
        if bad is not None:
            sample = int(np.argmax(bad.reshape(len(values), -1).any(1)))
            raise ValueError(f"{shown} holds {words} in {name}, first in sample {sample}")
    x = x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
    y = y.reshape(len(y), -1).astype(np.float32)
    kind = REAL if real else LABELS
    return Targets(x, y, Path(path).stem, note=f"{kind}, {y.shape[1]} a sample", kind=kind)


def kind(y: Any) -> str:
    """What targets `[S, d]` of data without classes are: `LABELS` if all of them are 0 or 1, else `REAL`."""
    return LABELS if np.isin(np.asarray(y), (0, 1)).all() else REAL


MOST_WHOLE = 100
"""Real targets that are all whole numbers below this look like classes that were stored as floats."""


def in_words(y: Any, num_classes: int, kind_: str = "") -> str:
    """Describes the targets, e.g. "4 classes, 2 of them empty", and notes floats that look like class labels.

    Args:
      y: targets, as `FederatedData` holds them.
      num_classes: K; 0 for targets that are no classes.
      kind_: `REAL` or `LABELS` where a file says it; what `kind` finds when not given.

    Example:
      >>> in_words(np.array([0, 3, 3]), 4), in_words(np.array([[0.5]]), 0), in_words(np.array([[1.0], [2.0]]), 0)
      ('4 classes, 2 of them empty', '1 real target', '1 real target (all whole numbers: classes must be stored as integers)')
    """
    y = np.asarray(y)
    if num_classes:
        empty = num_classes - len(np.unique(y))
        return f"{num_classes} classes{f', {empty} of them empty' if empty else ''}"
    columns = y.shape[1] if y.ndim == 2 else 1
    labels = (kind_ or kind(y)) == LABELS
    said = f"several labels, {columns} a sample" if labels else f"{columns} real target{'s' * (columns > 1)}"
    if columns > 1 and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        return f"{said} (each row has a single 1: classes must be stored as their numbers, y.argmax(1))"
    if not labels and ((y >= 0) & (y < MOST_WHOLE) & (y == np.round(y))).all():
        return f"{said} (all whole numbers: classes must be stored as integers)"
    return said
