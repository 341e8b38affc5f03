"""Sequences of unequal length as arrays: padding with weight 0, and pairs of tokens and the tokens that come next.

Axis letters: M sequences or samples, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_meta import checks
from fedjax_meta.task import Weighted


def pad(sequences: Sequence[Any], length: int | None = None) -> Weighted:
    """Sequences of unequal length as one array, filled up at the end by zeros of weight 0.

    Args:
      sequences: M arrays `[t, ...]` with t >= 1, alike but for t.
      length: T, at least that of the longest; that of the longest when not given.

    Returns:
      `Weighted(value [M, T, ...], weight bool [M, T])`: targets as they are; of inputs a model reads `value`, and `weight` where
      it must know what is padding.

    Raises:
      ValueError: no sequences, an empty one, one that is longer than `length`, arrays that differ otherwise.

    Example:
      >>> padded = pad([[5, 6, 7], [8]])
      >>> padded.value.tolist(), padded.weight.astype(int).tolist()
      ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    """
    if not isinstance(sequences, (list, tuple, np.ndarray, jax.Array)) or not len(sequences):
        raise ValueError(f"sequences={checks.shown(sequences)} must be a list of at least one array [t, ...]")
    arrays = [_sequence(f"sequence {number}", one) for number, one in enumerate(sequences)]
    rests = {one.shape[1:] for one in arrays}
    if len(rests) > 1:
        raise ValueError(f"sequences differ in more than their length: {', '.join(map(str, sorted(rests)))}")
    lengths = np.array([len(one) for one in arrays])
    if length is None:
        length = int(lengths.max())
    checks.count("length", length)
    if lengths.max() > length:
        raise ValueError(
            f"sequence {int(lengths.argmax())} has length {lengths.max()}, more than length={length}: cut it before"
        )
    value = np.zeros((len(arrays), length, *arrays[0].shape[1:]), np.result_type(*arrays))
    weight = np.arange(length) < lengths[:, None]
    value[weight] = np.concatenate(arrays)
    return Weighted(value, weight)


def next_tokens(tokens: Any, length: int) -> tuple[np.ndarray, Weighted]:
    """Samples for the prediction of the next token: pieces of `length` tokens, and the tokens that follow each of them.

    Args:
      tokens: ids `[n]` of one text with n >= 2, or a list of such texts. Pieces do not overlap; the last one of a text is padded.
      length: T.

    Returns:
      `(x int [M, T], Weighted(y int [M, T], weight bool [M, T]))`.

    Raises:
      ValueError: ids that are no integers, a text of fewer than 2 tokens.

    Example:
      >>> x, y = next_tokens([1, 2, 3, 4, 5, 6], 3)
      >>> x.tolist(), y.value.tolist(), y.weight.astype(int).tolist()
      ([[1, 2, 3], [4, 5, 0]], [[2, 3, 4], [5, 6, 0]], [[1, 1, 1], [1, 1, 0]])
    """
    checks.count("length", length)
    texts = tokens if isinstance(tokens, (list, tuple)) and len(tokens) and np.ndim(tokens[0]) else [tokens]
    inputs, following = [], []
    for number, text in enumerate(texts):
        ids = checks.numeric(f"text {number}", text, integers=True)
        if ids.ndim != 1 or len(ids) < 2:
            raise ValueError(
                f"text {number} must be ids [n] with n >= 2, so that a token has a next one, not {list(ids.shape)}"
            )
        for first in range(0, len(ids) - 1, length):
            piece = ids[first : first + length + 1]
            inputs.append(piece[:-1])
            following.append(piece[1:])
    return pad(inputs, length).value, pad(following, length)


def _sequence(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not one array [t, ...]") from None
    if array.ndim < 1 or not (checks.is_real(array.dtype) or array.dtype == bool):
        raise ValueError(f"{name} must be an array [t, ...] of numbers, not {array.dtype}{list(array.shape)}")
    if not len(array):
        raise ValueError(f"{name} is empty: leave it out")
    return array
