"""Image classification sets prepared by tensorflow-datasets, read without TensorFlow.

Only preparing (downloading) a set needs TensorFlow. Decoded images are cached on disk.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import cache, canonical

BUNDLED = ("mnist_small", "digits")
"""Sets that are part of a Python package; `sources.load` reads them without tensorflow-datasets."""

PREPARED = ("mnist", "fashion_mnist", "cifar10", "cifar100", "emnist/byclass", "emnist/letters")
"""The papers' sets that tensorflow-datasets provides. Its other image classification sets work by their names, too."""


def load_prepared(name: str, data_dir: Path, cache_dir: Path, *, download: bool) -> dict[str, np.ndarray]:
    """Reads a set from the cache, or from the files that tensorflow-datasets wrote.

    Args:
      name: of the set.
      data_dir: folder of the prepared sets.
      cache_dir: folder of the decoded arrays.
      download: whether a set that is not prepared may be downloaded, which needs TensorFlow.

    Returns:
      The arrays `cache.ARRAYS`, each split in canonical order, and the scalars "num_classes" and "note".

    Raises:
      ValueError: a set that is unknown, not prepared, damaged, or not one of images with labels.
    """
    # The fingerprint needs no tensorflow-datasets, whose import alone would take most of the time of a cached load.
    files = _files(data_dir / name)
    known = cache.read(cache_dir, name, cache.fingerprint(files)) if files else None
    if known is not None:
        return known
    builder = _builder(name, data_dir, download)
    arrays = _read_splits(name, builder)
    num_classes = int(builder.info.features[_feature_keys(name, builder)[1]].num_classes)
    known = {**arrays, "num_classes": np.array(num_classes), "note": np.array(_note(name, builder))}
    files = _files(data_dir / name)
    if files:
        cache.write(cache_dir, name, cache.fingerprint(files), known)
    return known


def load_text(name: str, data_dir: Path, *, download: bool) -> str:
    """The text of a prepared set with a feature "text": its splits "train", "validation" and "test", one after the other.

    Raises:
      ValueError: a set that is unknown, not prepared, damaged, or without text.
    """
    builder = _builder(name, data_dir, download, needs=_check_text)
    parts = []
    for split in [split for split in ("train", "validation", "test") if split in builder.info.splits]:
        try:
            with _quiet():
                records = builder.as_data_source(split=split)
                parts += [record["text"].decode() for record in records]
        except NotImplementedError:
            raise _not_array_record(name, builder) from None
        except Exception as error:  # the readers of records and protocol buffers raise exceptions of many types
            raise _damaged(name, builder, error) from error
    return "".join(parts)


def _check_text(name: str, builder: Any) -> None:
    if "text" not in (builder.info.features or {}):
        raise ValueError(f"data set {name!r} has no feature 'text'; it has {', '.join(builder.info.features or {})}")


def _not_array_record(name: str, builder: Any) -> ValueError:
    return ValueError(
        f"data set {name!r} in {builder.data_path} is not stored as array_record, so reading it would need TensorFlow; "
        "prepare it again with file_format='array_record'"
    )


def _damaged(name: str, builder: Any, error: Exception) -> ValueError:
    return ValueError(
        f"data set {name!r} in {builder.data_path} cannot be read ({checks.first_line(error)}); "
        "delete that folder and prepare it again"
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _builder(name: str, data_dir: Path, download: bool, needs: Callable[[str, Any], Any] | None = None) -> Any:
    """The tensorflow-datasets builder of a set, which is prepared first if `download` allows it.

    `needs(name, builder)` refuses a set of the wrong kind, before it is downloaded; one of labelled images by default.
    """
    try:
        with _quiet():
            import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(f"data set {name!r} needs tensorflow-datasets: pip install 'fedjax-meta[data]' ({error})") from None
    unknown = (
        f"data set {name!r} is unknown{checks.nearest(name, BUNDLED + PREPARED)}; there are {', '.join(BUNDLED + PREPARED)}, "
        "any image classification set of tensorflow-datasets, and the path of an .npz; `fedjax-meta list datasets` also shows "
        "those whose clients are given or generated"
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
                f"tensorflow-datasets has no 'cinic10': write it to {data_dir} with a builder of your own, "
                "or give the path of an .npz with x_train, y_train, x_test and y_test"
            ) from None
        raise ValueError(unknown) from None
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"data set {name!r} cannot be read from {data_dir}: {checks.first_line(error)}") from None
    (needs or _feature_keys)(name, builder)
    if prepared:
        return builder
    if not download:
        raise ValueError(
            f"data set {name!r} is not prepared in {data_dir}: give another data_dir (--data-dir), or download it once in "
            f"Python, fedjax_meta.data.load({name!r}, download=True), which needs TensorFlow (pip install tensorflow); reading "
            "it does not"
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise ValueError(f"downloading {name!r} needs TensorFlow: pip install tensorflow; reading it later does not")
    # MNIST and Fashion-MNIST have the same file names. In one extraction folder, one would be made of the other's images.
    config = tfds.download.DownloadConfig(extract_dir=str(data_dir / "downloads" / "extracted" / name))
    builder.download_and_prepare(download_config=config, file_format="array_record")
    return tfds.builder(name, data_dir=str(data_dir), try_gcs=False)


def _feature_keys(name: str, builder: Any) -> tuple[str, str]:
    """The names of the image feature and of the label feature."""
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
        return f"{version}; it has no test split, its validation split is used instead"
    return f"{version}; it has no test split, a fifth of each class is used instead"


def _read_splits(name: str, builder: Any) -> dict[str, np.ndarray]:
    splits = builder.info.splits
    if "train" not in splits:
        raise ValueError(f"data set {name!r} has no split 'train'; it has {', '.join(splits)}")
    x, y = _read_split(name, builder, "train")
    held_out = next((split for split in ("test", "validation") if split in splits), None)
    if held_out is None:
        arrays = canonical.split(x, y)
    else:
        test = _read_split(name, builder, held_out)
        arrays = (*canonical.in_canonical_order(x, y), *canonical.in_canonical_order(*test))
    return dict(zip(cache.ARRAYS, arrays, strict=True))


def _read_split(name: str, builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    import tensorflow_datasets as tfds

    image_key, label_key = _feature_keys(name, builder)
    channels = builder.info.features[image_key].shape[-1]
    try:
        with _quiet():
            records = builder.as_data_source(split=split, decoders={image_key: tfds.decode.SkipDecoding()})
    except NotImplementedError:
        raise _not_array_record(name, builder) from None
    x, y = None, np.empty(len(records), np.int32)
    for begin in range(0, len(records), 4096):
        try:
            chunk = records.__getitems__(range(begin, min(begin + 4096, len(records))))
            images = [_decode(record[image_key], channels) for record in chunk]
        except Exception as error:  # the readers of records, protocol buffers and images raise exceptions of many types
            raise _damaged(name, builder, error) from error
        for i, (image, record) in enumerate(zip(images, chunk, strict=True), begin):
            if x is None:
                x = np.empty((len(records), *image.shape), np.uint8)
            if image.shape != x.shape[1:] or image.dtype != np.uint8:
                raise ValueError(
                    f"data set {name!r} has images of mixed shape, {list(x.shape[1:])} and {list(image.shape)} {image.dtype}; "
                    "resize them to one shape and give them as an .npz"
                )
            x[i] = image
            y[i] = record[label_key]
    if x is None:
        raise ValueError(f"split {split!r} of data set {name!r} is empty")
    if y.min() < 0:
        raise ValueError(f"split {split!r} of data set {name!r} has samples without a label")
    return x, y


def _decode(encoded: bytes, channels: int | None) -> np.ndarray:
    """One image `[height, width, channels]`.

    Only PNG, which is lossless, is decoded by OpenCV. JPEG decoders differ in the last bit or two.
    """
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


@functools.cache
def _opencv() -> Any:
    """The module of OpenCV, which is twice as fast as Pillow, or `None` if it is not installed."""
    return importlib.import_module("cv2") if importlib.util.find_spec("cv2") else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides absl's warnings about missing folders; the errors of this module say what is wrong."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
