"""The cache of decoded images: one `.npz` file per data set.

The checksums of the zip format reveal a damaged file, and a key inside reveals a file of another data set.
"""

import hashlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_meta import disk, runtime
from fedjax_meta.data import npz

FORMAT = 1
"""Written into every cached file. Raise it when the meaning of the contents changes."""

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
"""Names of the arrays that every cached file has."""


def fingerprint(files: list[Path]) -> str:
    """Identifies files by their paths, sizes and modification times, without reading them."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read(folder: Path, name: str, fingerprint: str) -> dict[str, np.ndarray] | None:
    """The cached arrays, or `None` if there are none, the file is damaged, or it belongs to other data."""
    try:
        arrays = npz.read(_path(folder, name, fingerprint))
    except (OSError, ValueError):
        return None
    if str(arrays.pop("key", "")) != _key(name, fingerprint):
        return None
    names = str(arrays.pop("names", ""))
    return arrays if names == " ".join(sorted(arrays)) and set(ARRAYS) <= arrays.keys() and _valid(arrays) else None


def write(folder: Path, name: str, fingerprint: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays; a folder that cannot be written gives a warning."""
    named: dict[str, Any] = {"key": np.array(_key(name, fingerprint)), "names": np.array(" ".join(sorted(arrays))), **arrays}
    file = io.BytesIO()
    np.savez(file, **named)
    try:
        disk.replace(_path(folder, name, fingerprint), [file.getbuffer()])
    except OSError as error:
        warnings.warn(
            f"decoded {name!r} is not cached and will be decoded again next time: cannot write {folder} ({error.strerror}); "
            f"set {runtime.CACHE_VARIABLE} to another folder",
            stacklevel=2,
        )


def _path(folder: Path, name: str, fingerprint: str) -> Path:
    return folder / f"{name.replace('/', '-')}-{fingerprint[:16]}.npz"


def _key(name: str, fingerprint: str) -> str:
    return f"fedjax_meta {FORMAT} {name} {fingerprint}"


def _valid(arrays: Mapping[str, np.ndarray]) -> bool:
    return all(
        arrays[f"x_{split}"].dtype == np.uint8
        and arrays[f"y_{split}"].dtype == np.int32
        and arrays[f"x_{split}"].ndim == 4
        and arrays[f"y_{split}"].shape == arrays[f"x_{split}"].shape[:1]
        for split in ("train", "test")
    )
