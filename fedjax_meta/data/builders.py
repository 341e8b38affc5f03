"""Builders of `FederatedData` from arrays, and their input checks.

Axis letters: M samples of the data set, N clients, S samples that clients hold, K classes.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
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
      ValueError: shapes that do not match, inputs that are not numeric, or not finite in the type that JAX gives them, labels out
        of range, a client without samples, a view that is empty or outside the client's samples. The message names the client.
    """
    mapped = isinstance(x, np.memmap)
    x, y = _array("x", x), _array("y", y)
    order, sizes = checks.numeric("order", order, integers=True), checks.numeric("sizes", sizes, integers=True)
    if num_classes is not None:
        checks.count("num_classes", num_classes, least=0)
    regression = num_classes == 0
    _check_form(x, y, regression=regression)
    _check_partition(order, sizes, len(y))
    order, sizes = order.astype(np.int64), sizes.astype(np.int64)
    if not regression:
        num_classes = _check_labels(y, num_classes, order, sizes)
    _check_finite("inputs", x, order, sizes)
    if regression:
        _check_finite("targets", y, order, sizes)
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
        num_classes=num_classes or 0,
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
    allowed = [p.name for p in inspect.signature(from_partition).parameters.values() if p.kind is p.KEYWORD_ONLY]
    checks.options("from_clients", options, allowed, {})
    if not isinstance(clients, (list, tuple)):
        raise ValueError(f"clients must be a list of one (x, y) pair per client, not {checks.shown(clients)}")
    if not clients:
        raise ValueError("clients is empty; give one (x, y) pair per client")
    pairs = []
    for i, pair in enumerate(clients):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"clients must be a list of (x, y) pairs, but client {i} is {checks.shown(pair)}")
        pairs.append((_array(f"x of client {i}", pair[0]), _array(f"y of client {i}", pair[1])))
    shapes = {x.shape[1:] for x, _ in pairs}
    if len(shapes) > 1:
        raise ValueError(f"clients' inputs differ in shape: {', '.join(map(str, sorted(shapes)))}")
    if len({x.dtype == np.uint8 for x, _ in pairs}) > 1:
        raise ValueError(
            "some clients' inputs are uint8, which is scaled to [0, 1], and others are not; convert all to one type"
        )
    for i, (x, y) in enumerate(pairs):
        if x.ndim and y.ndim and len(x) != len(y):
            raise ValueError(f"client {i} has {len(x)} inputs and {len(y)} labels")
        if y.ndim and not len(y):
            raise ValueError(f"every client needs at least 1 sample, but client {i} has none")
        _check_form(x, y, regression=options.get("num_classes") == 0, who=f"client {i}: ")
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
    sizes = checks.numeric("sizes", sizes, integers=True).astype(np.int64)
    if sizes.ndim != 1 or not sizes.size or sizes.min() < 0:
        raise ValueError(f"sizes must be counts [N] of N >= 1 clients, not {checks.shown(sizes)}")
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
    if not isinstance(views, Mapping) or not all(isinstance(name, str) for name in views):
        raise ValueError(f"views must be a dict of name and (begin, end), not {checks.shown(views)}")
    if not views:
        raise ValueError("views is empty; name at least one")
    if sizes.sum() > checks.LARGEST_COUNT:
        raise ValueError(f"the clients hold S={sizes.sum()} samples, more than the {checks.LARGEST_COUNT} of 32-bit positions")
    base = np.cumsum(sizes) - sizes
    start, size = {}, {}
    for name, bounds in views.items():
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise ValueError(f"view {name!r} must be a pair (begin, end), int [N] each, not {checks.shown(bounds)}")
        first, stop = (
            checks.numeric(f"{what} of view {name!r}", values, integers=True).astype(np.int64)
            for what, values in zip(("begin", "end"), bounds, strict=True)
        )
        if not first.shape == stop.shape == sizes.shape:
            raise ValueError(
                f"view {name!r} has begin {first.shape} and end {stop.shape}, but there are N={sizes.size} clients"
            )
        outside = (first < 0) | (stop > sizes)
        if outside.any():
            bad = int(np.argmax(outside))
            raise ValueError(
                f"view {name!r} of client {bad} reaches from {first[bad]} to {stop[bad]}, beyond its {sizes[bad]} samples"
            )
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
    with np.errstate(over="ignore"):  # what overflows is refused below
        offset = checks.numeric("offset", 0 if offset is None else offset).astype(np.float32)
        scale = checks.numeric("scale", 1 if scale is None else scale).astype(np.float32)
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
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not one array [M, ...]; bring all samples to one shape first") from None


def _check_partition(order: np.ndarray, sizes: np.ndarray, num_samples: int) -> None:
    if sizes.ndim != 1 or sizes.size == 0:
        raise ValueError(f"sizes must be counts [N] of N >= 1 clients, not of shape {sizes.shape}")
    if sizes.min() < 1:
        raise ValueError(f"every client needs at least 1 sample, but client {int(np.argmin(sizes))} has none")
    if order.shape != (sizes.sum(),):
        raise ValueError(f"order has shape {order.shape}, but the sizes sum to S={sizes.sum()}")
    if order.min() < 0 or order.max() >= num_samples:
        raise ValueError(f"order names samples {order.min()} to {order.max()}, but there are M={num_samples}")


def _check_form(x: np.ndarray, y: np.ndarray, *, regression: bool, who: str = "") -> None:
    """Dtypes and shapes; `who` begins the message."""
    if not (checks.is_real(x.dtype) or x.dtype == bool):
        raise ValueError(f"{who}inputs must be one numeric array [M, ...], not dtype {x.dtype} (images of mixed shape?)")
    if not (checks.is_real(y.dtype) if regression else np.issubdtype(y.dtype, np.integer)):
        wanted = "targets must be numbers" if regression else "labels must be integers"
        raise ValueError(f"{who}{wanted}, not dtype {y.dtype}")
    if y.ndim < 1 or (y.ndim > 1 and not regression) or x.ndim < 2 or len(x) != len(y) or len(y) == 0:
        raise ValueError(f"{who}inputs must be [M, ...] and labels [M] with M >= 1, not {x.shape} and {y.shape}")


def _check_labels(y: np.ndarray, num_classes: int | None, order: np.ndarray, sizes: np.ndarray) -> int:
    """K, which is the largest label plus 1 unless it is given."""
    most = checks.MOST_CLASSES if num_classes is None else num_classes
    outside = (y < 0) | (y >= most)
    if outside.any():
        sample = int(np.argmax(outside))
        hint = "" if num_classes is not None else "; np.unique(labels, return_inverse=True)[1] makes them 0, 1, 2, ..."
        raise ValueError(
            f"labels run from {y.min()} to {y.max()}, but must lie in [0, num_classes={most}): label {y[sample]} "
            f"{_of_client(sample, order, sizes)}{hint}"
        )
    return int(y.max()) + 1 if num_classes is None else num_classes


def _check_finite(what: str, values: np.ndarray, order: np.ndarray, sizes: np.ndarray) -> None:
    """Raises `ValueError` for a number that is not finite, or not in the type that JAX will give it."""
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(values.dtype))
    if checks.is_real(dtype) and not np.issubdtype(dtype, np.integer):
        with np.errstate(over="ignore", invalid="ignore"):
            bad = ~np.isfinite(values.astype(dtype, copy=False))
        kind = "NaN or infinite values"
    elif dtype != values.dtype:
        limits = np.iinfo(dtype)
        bad, kind = (values < limits.min) | (values > limits.max), f"integers that {dtype} cannot hold"
    else:
        return
    if bad.any():
        sample = int(np.argmax(bad.reshape(len(values), -1).any(1)))
        cast = "" if kind[0] == "i" or not np.isfinite(values).all() else f" as {dtype}"
        raise ValueError(f"{what} hold {kind}{cast}, first in sample {sample} {_of_client(sample, order, sizes)}")


def _of_client(sample: int, order: np.ndarray, sizes: np.ndarray) -> str:
    where = np.flatnonzero(order == sample)
    return f"of client {int(np.searchsorted(np.cumsum(sizes), where[0], side='right'))}" if where.size else "of no client"
