"""Text as tokens: vocabularies, next-character samples, and the speakers of a play."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedjax_meta import checks

LEAF_CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's Shakespeare, in its order; 80 of them."""


def characters(texts: Iterable[str]) -> tuple[str, ...]:
    """All characters that occur, sorted.

    Example:
      >>> characters(["ab", "ba!"])
      ('!', 'a', 'b')
    """
    return tuple(sorted(set().union(*texts)))


def encode(text: str, vocabulary: tuple[str, ...], *, unknown: int | None = None) -> np.ndarray:
    """Characters as int32 positions in a vocabulary, `[T]`.

    Args:
      text: the characters.
      vocabulary: one character each.
      unknown: the token of characters that are not in it; `None` refuses them.

    Raises:
      ValueError: a character that is not in the vocabulary.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    table = np.array([ord(character) for character in vocabulary], np.uint32)
    order = np.argsort(table)
    place = np.minimum(np.searchsorted(table[order], codes), len(table) - 1)
    tokens = order[place].astype(np.int32)
    missing = table[order][place] != codes
    if missing.any():
        if unknown is None:
            raise ValueError(f"the character {chr(codes[np.argmax(missing)])!r} is not in the vocabulary of {len(vocabulary)}")
        tokens[missing] = unknown
    return tokens


def shifted_by_one(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Consecutive sequences and the same shifted by one: inputs and targets, int32 `[S, T]` each.

    The last tokens, fewer than T + 1 of them, are left out.

    Args:
      tokens: `[M]`.
      length: T.

    Example:
      >>> x, y = shifted_by_one(np.arange(8), 3)
      >>> x.tolist(), y.tolist()
      ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    checks.count("length", length)
    count = max(len(tokens) - 1, 0) // length
    x, y = tokens[: count * length], tokens[1 : count * length + 1]
    return x.reshape(count, length).astype(np.int32), y.reshape(count, length).astype(np.int32)


def speakers(play: str) -> dict[str, str]:
    """What each speaker of a play says, speeches joined by a line break, in the order of their first speech.

    A speech is a paragraph whose first line is a name and a colon. Two of the same speaker may follow each other.

    Example:
      >>> speakers("First:\\nYes.\\n\\nSecond:\\nNo.\\n\\nFirst:\\nWell.\\n")
      {'First': 'Yes.\\nWell.', 'Second': 'No.'}
    """
    spoken: dict[str, list[str]] = {}
    for paragraph in re.split(r"\n\s*\n", play.replace("\r\n", "\n")):
        name, colon, words = paragraph.strip().partition(":\n")
        if colon and words.strip() and "\n" not in name:
            spoken.setdefault(name.strip(), []).append(words.strip())
    return {name: "\n".join(speeches) for name, speeches in spoken.items()}


def words(line: str) -> list[str]:
    """A line as lower-case words and marks of punctuation.

    Example:
      >>> words("It's late, go!")
      ["it's", 'late', ',', 'go', '!']
    """
    return re.findall(r"[\w']+|[.,!?;]", line.lower())


def encode_words(lines: list[str], vocabulary: dict[str, int], length: int) -> np.ndarray:
    """The first words of each line as int32 `[S, T]`; unknown words and the places after the end have token `len(vocabulary)`."""
    tokens: Any = np.full((len(lines), length), len(vocabulary), np.int32)
    for i, line in enumerate(lines):
        for t, word in enumerate(words(line)[:length]):
            tokens[i, t] = vocabulary.get(word, len(vocabulary))
    return tokens


def most_frequent(lines: Iterable[str], count: int) -> dict[str, int]:
    """The most frequent words and their tokens 0, 1, ...; equally frequent ones in the order of the alphabet."""
    counts: dict[str, int] = {}
    for line in lines:
        for word in words(line):
            counts[word] = counts.get(word, 0) + 1
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate(ranked[:count])}
