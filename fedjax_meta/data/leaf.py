"""LEAF's JSON files (Caldas et al. 2018, arXiv 1812.01097): FEMNIST, Shakespeare, Sent140 and Synthetic.

A file has `users`, `num_samples` and `user_data`, which holds `x` and `y` of each user. LEAF's scripts write folders `train` and
`test` of such files.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import text
from fedjax_meta.data.natural import Natural, of_clients

KINDS = ("femnist", "shakespeare", "sent140", "synthetic")
"""Data sets of LEAF that are read."""

PUBLISHED = {
    "femnist": "LEAF says 3,500 users",
    "shakespeare": "LEAF says 2,288 speaking roles, of which papers use 1,129 with enough text; TensorFlow Federated has 715",
    "sent140": "LEAF says 660,120 users",
    "synthetic": "as many as were generated",
}
"""Client counts of LEAF's README, of its users and of TensorFlow Federated's documentation."""

SENTENCE = 25
"""Words of a Sent140 sample, as in LEAF's model."""


def read_leaf(folder: str | os.PathLike, kind: str, *, vocabulary: int = 10_000) -> Natural:
    """Reads what LEAF's scripts wrote.

    Inputs are `float32 [S, 28, 28, 1]` (FEMNIST), `int32 [S, 80]` characters of `text.LEAF_CHARACTERS` with the next one as label
    (Shakespeare), `int32 [S, 25]` words (Sent140; the last token stands for other words and for nothing), `float32 [S, d]`
    (Synthetic).

    Args:
      folder: with folders `train` and `test` of .json files, or with .json files alone.
      kind: one of `KINDS`.
      vocabulary: words of Sent140, the most frequent ones of the folder `train`, or of all samples where there is none.

    Raises:
      ValueError: no such folder or files, a file that is cut off or is no LEAF file, a user without data or samples, counts that
        do not fit; the message names the file and the user.
    """
    checks.one_of("kind", kind, KINDS)
    checks.count("vocabulary", vocabulary)
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {str(folder)!r}: clone https://github.com/TalwalkarLab/leaf, run data/{kind}/preprocess.sh "
            f"there (e.g. with -s niid --sf 1.0 -k 0 -t sample) and give the folder data/{kind}/data"
        )
    split = (folder / "train").is_dir() and (folder / "test").is_dir()
    train = _read(folder / "train" if split else folder)
    test = _read(folder / "test") if split else {}
    for user in test:
        if user not in train:
            raise ValueError(f"user {user!r} is in {folder / 'test'}, but not in {folder / 'train'}")
    known = text.most_frequent((row[4] for x, _ in train.values() for row in x if _is_tweet(row)), vocabulary)
    clients = []
    for user, (x, y) in train.items():
        x_test, y_test = test.get(user, ([], []))
        where = f"user {user!r} of {folder}"
        clients.append((user, _inputs(where, kind, x + x_test, known), _targets(where, kind, y + y_test)))
    sizes = np.array([len(y) for _, y in train.values()], np.int64)
    labels = max(int(y.max()) for _, _, y in clients) + 1
    return of_clients(
        clients,
        where=f"{str(folder)!r}",
        num_classes={"femnist": 62, "shakespeare": len(text.LEAF_CHARACTERS), "sent140": 2}.get(kind, labels),
        name=f"leaf_{kind}",
        train_sizes=sizes if split else None,
        note="" if split else "no train and test folders: each user's samples are cut by this library",
        published=PUBLISHED[kind],
        ordered=kind == "shakespeare",
        vocabulary=tuple(text.LEAF_CHARACTERS) if kind == "shakespeare" else tuple(known),
    )


def _read(folder: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """`x` and `y` of all users of the files of a folder."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"there is no .json file in {str(folder)!r}")
    users: dict[str, tuple[list[Any], list[Any]]] = {}
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} is no JSON, or it was cut off: {checks.first_line(error)}") from None
        missing = [key for key in ("users", "num_samples", "user_data") if not isinstance(content, dict) or key not in content]
        if missing:
            raise ValueError(f"{str(path)!r} is no LEAF file: it has no {' and no '.join(missing)}")
        wanted = {"users": list, "num_samples": list, "user_data": dict}
        odd = [name for name, kind in wanted.items() if not isinstance(content[name], kind)]
        if odd:
            shown = f"{odd[0]} is {checks.shown(content[odd[0]])}"
            raise ValueError(f"{str(path)!r} is no LEAF file: {shown}, no {'object' if odd[0] == 'user_data' else 'list'}")
        if len(content["users"]) != len(content["num_samples"]):
            raise ValueError(f"{str(path)!r} has {len(content['users'])} users and {len(content['num_samples'])} num_samples")
        for user, count in zip(content["users"], content["num_samples"], strict=True):
            if not isinstance(user, str):
                raise ValueError(f"{str(path)!r} has the user {checks.shown(user)}, whose name is no text")
            samples = content["user_data"].get(user)
            if not isinstance(samples, dict) or not {"x", "y"} <= samples.keys():
                raise ValueError(f"user {user!r} of {str(path)!r} has no x and y in user_data")
            x, y = samples["x"], samples["y"]
            if not isinstance(x, list) or not isinstance(y, list):
                raise ValueError(f"user {user!r} of {str(path)!r} has x and y that are no lists")
            if not isinstance(count, int) or isinstance(count, bool):
                raise ValueError(
                    f"user {user!r} of {str(path)!r} has num_samples {checks.shown(count)}, which is no whole number"
                )
            if not len(x) == len(y) == count:
                raise ValueError(
                    f"user {user!r} of {str(path)!r} has {len(x)} inputs and {len(y)} targets, but num_samples says {count}"
                )
            if not count:
                raise ValueError(f"user {user!r} of {str(path)!r} has no samples")
            if user in users:
                raise ValueError(f"user {user!r} is in two files of {str(folder)!r}")
            users[user] = x, y
    if not users:
        raise ValueError(f"the files of {str(folder)!r} have no users")
    return users


def _is_tweet(row: Any) -> bool:
    # Number, date, query, user, text; LEAF's own tools add which part of Sentiment140 it is from.
    return isinstance(row, list) and len(row) >= 5 and isinstance(row[4], str)


def _inputs(where: str, kind: str, x: list[Any], known: dict[str, int]) -> np.ndarray:
    if kind == "shakespeare":
        vocabulary = tuple(text.LEAF_CHARACTERS)
        if not all(isinstance(row, str) for row in x) or len({len(row) for row in x}) != 1:
            raise ValueError(f"{where} has inputs that are no texts of one length")
        return np.stack([text.encode(row, vocabulary, unknown=vocabulary.index(" ")) for row in x])
    if kind == "sent140":
        if not all(_is_tweet(row) for row in x):
            raise ValueError(f"{where} has inputs that are no tweets, whose text is the fifth field")
        return text.encode_words([row[4] for row in x], known, SENTENCE)
    try:
        rows = np.array(x, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where} has inputs that are not numbers, as many in each sample") from None
    if not np.isfinite(rows).all():
        sample = int(np.argmin(np.isfinite(rows).reshape(len(rows), -1).all(1)))
        raise ValueError(f"{where} has inputs that are not finite (NaN, null or too large), first in sample {sample}")
    if kind == "femnist":
        if rows.ndim != 2 or rows.shape[1] != 784:
            raise ValueError(f"{where} has inputs {list(rows.shape[1:])}, but images of FEMNIST have 784 pixels")
        return rows.reshape(-1, 28, 28, 1)
    return rows


def _targets(where: str, kind: str, y: list[Any]) -> np.ndarray:
    most = {"femnist": 62, "sent140": 2}.get(kind, checks.MOST_CLASSES)
    if kind == "shakespeare":
        vocabulary = tuple(text.LEAF_CHARACTERS)
        odd = next((letter for letter in y if not isinstance(letter, str) or len(letter) != 1), None)
        if odd is not None:
            raise ValueError(f"{where} has a target that is not one character: {odd!r}")
        return np.array([text.encode(letter, vocabulary, unknown=vocabulary.index(" "))[0] for letter in y], np.int32)
    try:
        labels = np.array(y, float)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where} has targets that are no class labels") from None
    if labels.ndim != 1 or (labels != np.round(labels)).any() or labels.min() < 0:
        raise ValueError(f"{where} has targets that are no class labels")
    if labels.max() >= most:
        raise ValueError(f"{where} has the label {labels.max():g}, but labels are below {most}")
    return labels.astype(np.int32)
