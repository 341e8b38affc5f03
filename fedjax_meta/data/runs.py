"""Index arithmetic for arrays that hold one run of consecutive entries per group."""

import numpy as np


def positions(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Int64 `[sum(length)]`: the numbers `start[i], ..., start[i] + length[i] - 1` of every run i, run after run.

    Example:
      >>> positions(np.array([10, 0]), np.array([2, 3])).tolist()
      [10, 11, 0, 1, 2]
    """
    return np.repeat(start, length) + rank(length)


def rank(length: np.ndarray) -> np.ndarray:
    """Int64 `[sum(length)]`: the position of each entry inside its run.

    Example:
      >>> rank(np.array([2, 3])).tolist()
      [0, 1, 0, 1, 2]
    """
    return np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
