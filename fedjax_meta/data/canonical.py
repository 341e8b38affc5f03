"""A canonical order of samples, and a test split for data sets without an official one. Axis letters: M samples."""

import hashlib

import numpy as np

from fedjax_meta.data import runs


def canonical_order(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The order `[M]` that sorts samples by a 64-bit BLAKE2b hash of their bytes and label.

    Equal samples become neighbours, so the sorted arrays do not depend on the original order.

    Example:
      >>> x, y = np.arange(12, dtype=np.uint8).reshape(6, 2), np.arange(6)
      >>> first, other = canonical_order(x, y), canonical_order(x[::-1], y[::-1])
      >>> bool((x[first] == x[::-1][other]).all())
      True
    """
    rows = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
    width = len(rows) // len(x)
    labels = np.ascontiguousarray(y, "<i8").tobytes()
    blake = hashlib.blake2b
    digests = b"".join(
        blake(rows[i * width : (i + 1) * width], digest_size=8, key=labels[8 * i : 8 * i + 8]).digest() for i in range(len(x))
    )
    return np.argsort(np.frombuffer(digests, "<u8"), kind="stable")


def in_canonical_order(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and int32 labels in canonical order."""
    order = canonical_order(x, y)
    return x[order], y[order].astype(np.int32)


def last_fifth(y: np.ndarray) -> np.ndarray:
    """Boolean `[M]`: whether a sample is in the last fifth (rounded down) of the samples of its class."""
    order = np.argsort(y, kind="stable")
    counts = np.bincount(y)
    test = np.empty(len(y), bool)
    test[order] = runs.rank(counts) >= np.repeat(counts - counts // 5, counts)
    return test


def split(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`x_train`, `y_train`, `x_test`, `y_test` in canonical order; the last fifth of each class is the test split."""
    x, y = in_canonical_order(x, y)
    test = last_fifth(y)
    return x[~test], y[~test], x[test], y[test]
