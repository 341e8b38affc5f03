"""Builders of `FederatedData` from arrays, and their input checks.

Axis letters: M samples of the data set, N clients, S samples that clients hold, K classes.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks, runtime
from fedjax_meta.data import samples
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.task import Weighted
from fedjax_meta.types import PyTree

Bounds = tuple[np.ndarray, np.ndarray]
"""(begin, end) of a view inside each client's samples, int64 `[N]` each."""


def from_partition(
    x: Any,
    y: Any,
    order: ArrayLike,
    sizes: ArrayLike,
    *,
    num_classes: int | None = None,
    views: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    offset: Any = None,
    scale: Any = None,
    num_ids: Any = None,
) -> FederatedData:
    """Sorts the samples of a data set by client. `from_partition(x, y, *partition)` takes a `Partition`.

    Args:
      x: inputs `[M, ...]`, numeric, or a tree of such arrays: a dict, a `NamedTuple`, a tuple of arrays. Images may stay uint8. A
        memory-mapped file (`np.memmap`) is not copied if `order` is 0, 1, 2, ..., M - 1.
      y: integer labels `[M]`, or `[M, T]` for the tokens of a sequence, in `[0, num_classes)`; real targets `[M, ...]` if
        `num_classes` is 0; a `Weighted` of one of these, where some entries do not count (`data.pad`); or another tree of arrays.
      order: int `[S]`, the samples of client 0, then those of client 1, and so on.
      sizes: int `[N]`, the number of samples of each client, at least 1 each, with sum S.
      num_classes: K; `max(y) + 1` if not given, 0 for regression and several labels a sample.
      views: for each name the (begin, end), int `[N]` each, of the view inside each client's samples, e.g. from
        `train_test_views`; a single view "train" of all samples if not given. No view of any client may be empty.
      offset, scale: a batch holds `(x - offset) * scale`. If neither is given, uint8 images `[M, height, width, channels]` are
        scaled by 1/255 and everything else is as stored; uint8 inputs of another form need `scale`: 1/255 for pixels, or
        `"stored"`. For a tree, dicts with a value for some of its leaves.
      num_ids: how many ids integer inputs are drawn from, e.g. the size of a vocabulary; for a tree as `scale`. Other ids are
        then refused: a table of embeddings would give NaN for them, or another id's row.

    Raises:
      ValueError: shapes that do not match, inputs that are not numeric, or not finite in the type that JAX gives them, labels or
        ids out of range, sequences of length 0, a client without samples, a view that is empty or outside the client's samples.
        The message names the client.
    """
    mapped = [isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(x, is_leaf=lambda node: not samples.is_tree(node))]
    x, y = samples.to_arrays("x", x), samples.to_arrays("y", y)
    order, sizes = checks.numeric("order", order, integers=True), checks.numeric("sizes", sizes, integers=True)
    if num_classes is not None:
        checks.count("num_classes", num_classes, least=0)
    samples.check_form(x, y, num_classes)
    count = samples.length(y)
    _check_partition(order, sizes, count)
    order, sizes = order.astype(np.int64), sizes.astype(np.int64)
    labels = samples.has_labels(y, num_classes)
    if labels:
        num_classes = samples.check_labels(y.value if isinstance(y, Weighted) else y, num_classes, order, sizes)
    samples.check_finite("inputs", x, order, sizes)
    if not labels:
        samples.check_finite("targets", y, order, sizes)
    if num_ids is not None:
        samples.check_ids(x, num_ids, order, sizes)
    offset, scale = samples.scaling(x, offset, scale)
    start, size = _view_runs({"train": (np.zeros_like(sizes), sizes)} if views is None else views, sizes)
    # Samples that are in order already are not copied, so that those of a memory-mapped file stay in the file.
    in_order = any(mapped) and len(order) == count and bool((np.diff(order) == 1).all())
    rows = [
        leaf if in_order and kept else _gathered(leaf, order) for leaf, kept in zip(jax.tree.leaves(x), mapped, strict=True)
    ]
    return FederatedData(
        x=jax.tree.unflatten(jax.tree.structure(x), rows),
        y=_stored_targets(jax.tree.map(lambda leaf: leaf[order], y), labels, real=num_classes == 0),
        offset=offset,
        scale=scale,
        start=start,
        size=size,
        num_classes=num_classes or 0,
        **bounds(size),
    )


def _gathered(leaf: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`leaf[order]`, in memory that the devices of a CPU host read in place."""
    rows = runtime.aligned_empty((len(order), *leaf.shape[1:]), leaf.dtype)
    return np.take(leaf, order, 0, out=rows, mode="clip")  # the default mode would buffer `out`


def bounds(sizes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """`max_size` and `same_size` of `FederatedData`, of the sizes of each view, `[N]`."""
    return {
        "max_size": tuple((name, int(size.max())) for name, size in sizes.items()),
        "same_size": tuple(name for name, size in sizes.items() if (size == size.max()).all()),
    }


def _stored_targets(y: PyTree, labels: bool, real: bool) -> PyTree:
    """Targets in the types that they are stored in: int32 labels; real targets where `real`; other trees by their leaves."""

    def weight(leaf: np.ndarray) -> np.ndarray:
        return leaf if leaf.dtype == bool else leaf.astype(np.float32)

    def value(leaf: np.ndarray) -> np.ndarray:
        if labels:
            return leaf.astype(np.int32)
        return leaf.astype(np.result_type(leaf, np.float32)) if real or np.issubdtype(leaf.dtype, np.floating) else leaf

    if isinstance(y, Weighted):
        return Weighted(jax.tree.map(value, y.value), weight(y.weight))
    return jax.tree.map(value, y)


def from_clients(clients: Sequence[tuple[Any, Any]], **options: Any) -> FederatedData:
    """Builds the data from one pair `(x [n, ...], y [n, ...])` per client, arrays or trees of arrays.

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
    options = {name: value for name, value in options.items() if value is not None}
    if not isinstance(clients, (list, tuple)):
        hint = ": list(clients.values()) makes one" if isinstance(clients, Mapping) else ""
        raise ValueError(f"clients must be a list of one (x, y) pair per client, not {_kind(clients)}{hint}")
    if not clients:
        raise ValueError("clients is empty; give one (x, y) pair per client")
    pairs = []
    for i, pair in enumerate(clients):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"clients must be a list of (x, y) pairs, but client {i} is {_kind(pair)}")
        pairs.append((samples.to_arrays(f"x of client {i}", pair[0]), samples.to_arrays(f"y of client {i}", pair[1])))
    _check_alike(pairs)
    for i, (x, y) in enumerate(pairs):
        leaves = jax.tree.leaves((x, y))
        if all(leaf.ndim and not len(leaf) for leaf in leaves):
            raise ValueError(f"every client needs at least 1 sample, but client {i} has none")
        if len(leaves) == 2 and all(leaf.ndim for leaf in leaves) and len(leaves[0]) != len(leaves[1]):
            raise ValueError(f"client {i} has {len(leaves[0])} inputs and {len(leaves[1])} labels")
        samples.check_form(x, y, options.get("num_classes"), who=f"client {i}: ")
    sizes = np.array([samples.length(y) for _, y in pairs])
    options.setdefault("views", train_test_views(sizes))
    x, y = (jax.tree.map(lambda *leaves: _joined(leaves), *parts) for parts in zip(*pairs, strict=True))
    return from_partition(x, y, np.arange(sizes.sum()), sizes, **options)


def _joined(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """One array of those of all clients; integers stay integers, of which NumPy makes floats where some are uint64."""
    whole = all(np.issubdtype(leaf.dtype, np.integer) for leaf in leaves)
    if whole and not np.issubdtype(np.result_type(*leaves), np.integer) and max(leaf.max() for leaf in leaves) < 2**63:
        leaves = [leaf.astype(np.int64) for leaf in leaves]
    return np.concatenate(leaves)


def _kind(value: Any) -> str:
    """What a value is, for a message; the numbers of arrays would fill it."""
    if hasattr(value, "shape"):
        return f"an array {list(value.shape)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple, Mapping)) else checks.shown(value)


def _check_alike(pairs: Sequence[tuple[PyTree, PyTree]]) -> None:
    """Raises `ValueError` unless the samples of all clients have one structure, and one shape and scaling for each leaf."""
    for what, trees in zip(("inputs", "targets"), zip(*pairs, strict=True), strict=True):
        first: Any = jax.tree.structure(trees[0])
        odd = next((i for i, tree in enumerate(trees) if jax.tree.structure(tree) != first), None)
        if odd is not None:
            given = jax.tree.structure(trees[odd])
            raise ValueError(f"clients' {what} differ in structure: {first} for client 0 and {given} for client {odd}")
        for number, (name, _) in enumerate(samples.named(what, trees[0])):
            leaves = [jax.tree.leaves(tree)[number] for tree in trees]
            shapes = {leaf.shape[1:] for leaf in leaves if leaf.ndim}
            if len(shapes) > 1:
                raise ValueError(f"clients' {name} differ in shape: {', '.join(map(str, sorted(shapes)))}")
            if what == "inputs" and len({leaf.dtype == np.uint8 for leaf in leaves}) > 1:
                raise ValueError(
                    f"some clients' {name} are uint8, which images are stored as, and others are not; convert all"
                )


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


def nested_views(train_sizes: ArrayLike, test_sizes: ArrayLike, *, support: float = 0.2) -> dict[str, Bounds]:
    """The views of `train_test_views` for clients whose training samples come first and test samples second.

    Args:
      train_sizes, test_sizes: int `[N]`.
      support: share of each part for adaptation.
    """
    checks.fraction("support", support)
    train_sizes, test_sizes = (np.asarray(sizes, np.int64) for sizes in (train_sizes, test_sizes))
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
            has = "1 sample" if sizes[bad] == 1 else f"{sizes[bad]} samples"
            raise ValueError(
                f"view {name!r} of client {bad} is empty: it begins at {first[bad]} and ends at {stop[bad]} of {has}. "
                "Each view needs a sample of every client, and those of `train_test_views` need 5 samples of a client"
            )
        start[name], size[name] = (base + first).astype(np.int32), (stop - first).astype(np.int32)
    return start, size


def _check_partition(order: np.ndarray, sizes: np.ndarray, num_samples: int) -> None:
    if sizes.ndim != 1 or sizes.size == 0:
        raise ValueError(f"sizes must be counts [N] of N >= 1 clients, not of shape {sizes.shape}")
    if sizes.min() < 1:
        raise ValueError(f"every client needs at least 1 sample, but client {int(np.argmin(sizes))} has none")
    if order.shape != (sizes.sum(),):
        raise ValueError(f"order has shape {order.shape}, but the sizes sum to S={sizes.sum()}")
    if order.min() < 0 or order.max() >= num_samples:
        raise ValueError(f"order names samples {order.min()} to {order.max()}, but there are M={num_samples}")
