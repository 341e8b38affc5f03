"""Builders of `FederatedData` from arrays, and their input checks.

Axis letters: M samples of the data set, N clients, S samples that clients hold, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.data.federated import FederatedData

Bounds = tuple[np.ndarray, np.ndarray]
"""(begin, end) of a view inside each client's samples, int64 `[N]` each."""


def from_partition(
    x: ArrayLike,
    y: ArrayLike,
    order: ArrayLike,
    sizes: ArrayLike,
    *,
    num_classes: int | None = None,
    views: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    offset: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> FederatedData:
    """Sorts the samples of a data set by client. `from_partition(x, y, *partition)` takes a `Partition`.

    Args:
      x: inputs `[M, ...]`, numeric. Images may stay uint8. A memory-mapped file (`np.memmap`) is not copied if `order` is
        0, 1, 2, ..., M - 1.
      y: integer labels `[M]` in `[0, num_classes)`, or real targets `[M, ...]` if `num_classes` is 0.
      order: int `[S]`, the samples of client 0, then those of client 1, and so on.
      sizes: int `[N]`, the number of samples of each client, at least 1 each, with sum S.
      num_classes: K; `max(y) + 1` if not given, 0 for regression.
      views: for each name the (begin, end), int `[N]` each, of the view inside each client's samples, e.g. from
        `train_test_views`; a single view "train" of all samples if not given. No view of any client may be empty.
      offset, scale: a batch holds `(x - offset) * scale`; uint8 inputs are scaled by 1/255 if neither is given.

    Raises:
      ValueError: shapes that do not match, inputs that are not numeric or not finite, labels out of range, a client without
        samples, a view that is empty or outside the client's samples.
    """
    mapped = isinstance(x, np.memmap)
    x, y = _array("x", x), _array("y", y)
    order, sizes = _integers("order", order), _integers("sizes", sizes)
    regression = num_classes == 0
    _check_samples(x, y, regression=regression)
    _check_partition(order, sizes, len(y))
    if num_classes is not None:
        checks.count("num_classes", num_classes, least=0)
    num_classes = int(y.max()) + 1 if num_classes is None else num_classes
    if not regression and (y.min() < 0 or y.max() >= num_classes):
        raise ValueError(f"labels run from {y.min()} to {y.max()}, but must lie in [0, num_classes={num_classes})")
    offset, scale = _scaling(x, offset, scale)
    start, size = _view_runs({"train": (np.zeros_like(sizes), sizes)} if views is None else views, sizes)
    # Samples that are in order already are not copied, so that those of a memory-mapped file stay in the file.
    in_order = mapped and len(order) == len(x) and bool((np.diff(order) == 1).all())
    return FederatedData(
        x=x if in_order else x[order],
        y=y[order].astype(np.result_type(y, np.float32) if regression else np.int32),
        offset=offset,
        scale=scale,
        start=start,
        size=size,
        max_size=tuple((name, int(size[name].max())) for name in size),
        num_classes=num_classes,
    )


def from_clients(clients: Sequence[tuple[ArrayLike, ArrayLike]], **options: Any) -> FederatedData:
    """Builds the data from one pair of arrays `(x [n, ...], y [n])` per client.

    Args:
      clients: the pairs.
      **options: keyword arguments of `from_partition`. Without `views`, the views are those of `train_test_views`: 75 % train
        (20 % of it support) and 25 % test.

    Raises:
      ValueError: as in `from_partition`, and clients whose inputs differ in shape.

    Example:
      >>> import numpy as np
      >>> data = from_clients([(np.zeros((20, 3)), np.arange(20) % 2), (np.ones((40, 3)), np.arange(40) % 2)])
      >>> data.num_clients, data.sizes("support").tolist(), data.sizes("test").tolist()
      (2, [3, 6], [5, 10])
    """
    if not clients:
        raise ValueError("clients is empty; give one (x, y) pair per client")
    pairs = [(_array("x", x), _array("y", y)) for x, y in clients]
    shapes = {x.shape[1:] for x, _ in pairs}
    if len(shapes) > 1:
        raise ValueError(f"clients' inputs differ in shape: {', '.join(map(str, sorted(shapes)))}")
    if len({x.dtype == np.uint8 for x, _ in pairs}) > 1:
        raise ValueError(
            "some clients' inputs are uint8, which is scaled to [0, 1], and others are not; convert all to one type"
        )
    for i, (x, y) in enumerate(pairs):
        if len(x) != len(y):
            raise ValueError(f"client {i} has {len(x)} inputs and {len(y)} labels")
    sizes = np.array([len(y) for _, y in pairs])
    options.setdefault("views", train_test_views(sizes))
    x, y = np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])
    return from_partition(x, y, np.arange(len(y)), sizes, **options)


def train_test_views(sizes: ArrayLike, *, train: float = 0.75, support: float = 0.2) -> dict[str, Bounds]:
    """Splits each client's samples into train and test, and both of them into support and query.

    The defaults, 75/25 and 20/80, are those of FedMeta-Per. Counts are rounded down, but a support view has at least 1 sample.
    The samples are split in storage order: shuffle them before.

    Args:
      sizes: int `[N]`.
      train: share of a client's samples for training.
      support: share of each part for adaptation.

    Returns:
      (begin, end) `[N]` for "train", "support", "query", "test", "test_support", "test_query".
    """
    checks.fraction("train", train)
    sizes = np.asarray(sizes, np.int64)
    train_sizes = _share(sizes, train)
    return nested_views(train_sizes, sizes - train_sizes, support=support)


def nested_views(train_sizes: np.ndarray, test_sizes: np.ndarray, *, support: float = 0.2) -> dict[str, Bounds]:
    """The views of `train_test_views` for clients whose training samples come first and test samples second.

    Args:
      train_sizes, test_sizes: int64 `[N]`.
      support: share of each part for adaptation.
    """
    checks.fraction("support", support)
    zero, sizes = np.zeros_like(train_sizes), train_sizes + test_sizes
    train_support = np.maximum(_share(train_sizes, support), 1)
    test_support = train_sizes + np.maximum(_share(test_sizes, support), 1)
    return {
        "train": (zero, train_sizes),
        "support": (zero, train_support),
        "query": (train_support, train_sizes),
        "test": (train_sizes, sizes),
        "test_support": (train_sizes, test_support),
        "test_query": (test_support, sizes),
    }


def _share(sizes: np.ndarray, share: float) -> np.ndarray:
    # Tolerance: 29 % of 100 is 28.999999999999996 in binary, but must be 29.
    return np.floor(sizes * share + 1e-9).astype(np.int64)


def _view_runs(
    views: Mapping[str, tuple[ArrayLike, ArrayLike]], sizes: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(start, size) of each view in the flat arrays, int32 `[N]` each."""
    if not views:
        raise ValueError("views is empty; name at least one")
    base = np.cumsum(sizes) - sizes
    start, size = {}, {}
    for name, (begin, end) in views.items():
        first, stop = _integers(f"begin of view {name!r}", begin), _integers(f"end of view {name!r}", end)
        if not first.shape == stop.shape == sizes.shape:
            raise ValueError(
                f"view {name!r} has begin {first.shape} and end {stop.shape}, but there are N={sizes.size} clients"
            )
        if first.min() < 0 or (stop > sizes).any():
            raise ValueError(f"view {name!r} reaches beyond its client's samples")
        if (stop <= first).any():
            bad = int(np.argmax(stop <= first))
            raise ValueError(f"view {name!r} of client {bad} is empty: its {sizes[bad]} samples are too few for the views")
        start[name], size[name] = (base + first).astype(np.int32), (stop - first).astype(np.int32)
    return start, size


def _scaling(x: np.ndarray, offset: ArrayLike | None, scale: ArrayLike | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`offset` and `scale` as float32 arrays with their defaults filled in."""
    if offset is None and scale is None:
        if x.dtype != np.uint8:
            return None, None
        scale = 1 / 255
    offset = np.array(0 if offset is None else offset, np.float32)
    scale = np.array(1 if scale is None else scale, np.float32)
    sample = x.shape[1:]
    for name, value in (("offset", offset), ("scale", scale)):
        if not np.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinite values")
        # Broadcasting the other way would add a channel axis to samples without one.
        fits = value.ndim <= len(sample) and all(n in (1, m) for n, m in zip(value.shape[::-1], sample[::-1], strict=False))
        if not fits:
            raise ValueError(f"{name} has shape {value.shape}, which does not broadcast against one sample {sample}")
    return offset, scale


def _array(name: str, values: ArrayLike) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} is not one array [M, ...]; bring all samples to one shape first") from None


def _integers(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, not dtype {array.dtype}")
    return array.astype(np.int64)


def _check_partition(order: np.ndarray, sizes: np.ndarray, num_samples: int) -> None:
    if sizes.ndim != 1 or sizes.size == 0:
        raise ValueError(f"sizes must be counts [N] of N >= 1 clients, not of shape {sizes.shape}")
    if sizes.min() < 1:
        raise ValueError(f"every client needs at least 1 sample, but client {int(np.argmin(sizes))} has none")
    if order.shape != (sizes.sum(),):
        raise ValueError(f"order has shape {order.shape}, but the sizes sum to S={sizes.sum()}")
    if order.min() < 0 or order.max() >= num_samples:
        raise ValueError(f"order names samples {order.min()} to {order.max()}, but there are M={num_samples}")


def _check_samples(x: np.ndarray, y: np.ndarray, *, regression: bool) -> None:
    if x.dtype == object or not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise ValueError(f"inputs must be one numeric array [M, ...], not dtype {x.dtype} (images of mixed shape?)")
    if not np.issubdtype(y.dtype, np.number if regression else np.integer):
        raise ValueError(f"{'targets must be numbers' if regression else 'labels must be integers'}, not dtype {y.dtype}")
    if y.ndim < 1 or (y.ndim > 1 and not regression) or x.ndim < 2 or len(x) != len(y) or len(y) == 0:
        raise ValueError(f"inputs must be [M, ...] and labels [M] with M >= 1, not {x.shape} and {y.shape}")
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
        raise ValueError("inputs hold NaN or infinite values")
    if regression and not np.isfinite(y).all():
        raise ValueError("targets hold NaN or infinite values")
