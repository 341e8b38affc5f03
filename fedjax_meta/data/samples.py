"""Checks of samples: trees of arrays with one row a sample, their labels, their numbers, their scaling.

Axis letters: M samples of the data set, N clients, S samples that clients hold, K classes.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.task import Weighted
from fedjax_meta.types import PyTree

STORED = "stored"
"""As `scale`: a batch holds the numbers as they are stored."""


def is_tree(values: Any) -> bool:
    """Whether inputs or targets are a pytree of several arrays: a dict, a `NamedTuple`, a registered class, a tuple of arrays.

    A list is taken for the rows of one array, as NumPy does.
    """
    if isinstance(values, Mapping) or (isinstance(values, tuple) and hasattr(values, "_fields")):
        return True
    if isinstance(values, tuple):
        return bool(values) and all(is_tree(part) or getattr(part, "ndim", 0) >= 1 for part in values)
    return values is not None and not isinstance(values, list) and not jax.tree_util.all_leaves([values])


def to_arrays(name: str, values: Any) -> PyTree:
    """Inputs or targets as a tree of NumPy arrays.

    Raises:
      ValueError: a leaf that is not one array, a tree without leaves.
    """
    if not is_tree(values):
        return as_array(name, values)
    paths, structure = jax.tree_util.tree_flatten_with_path(values, is_leaf=lambda node: not is_tree(node))
    if not paths:
        raise ValueError(f"{name} holds no arrays")
    return jax.tree.unflatten(structure, [as_array(f"{name}{jax.tree_util.keystr(path)}", leaf) for path, leaf in paths])


def named(what: str, tree: PyTree) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their names, e.g. `inputs['tokens']`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield what + jax.tree_util.keystr(path), leaf


def length(tree: PyTree) -> int:
    """Number of samples."""
    return len(jax.tree.leaves(tree)[0])


def as_array(name: str, values: ArrayLike) -> np.ndarray:
    """One array in the byte order of this machine.

    Raises:
      ValueError: a mask that hides something, or values that are no array.
    """
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(f"{name} is a masked array, whose masked numbers would count: fill them, or leave these samples out")
    try:
        array = np.asarray(values)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not one array [M, ...]; bring all samples to one shape first") from None


def one_array(what: str, values: Any) -> None:
    """Raises `ValueError` unless inputs or targets are one array; `what` says who asks, e.g. "rotate turns inputs"."""
    if is_tree(values):
        raise ValueError(f"{what} that are one array, but these are a tree: {jax.tree.structure(values)}")


def has_labels(y: PyTree, num_classes: int | None) -> bool:
    """Whether the targets are class labels: one array, perhaps with weights, and `num_classes` is not 0."""
    return num_classes != 0 and not is_tree(y.value if isinstance(y, Weighted) else y)


def check_form(x: PyTree, y: PyTree, num_classes: int | None, *, who: str = "") -> None:
    """Dtypes and shapes; `who` begins the message.

    Raises:
      ValueError: what is not numeric, arrays of different lengths, arrays without samples or with an axis of length 0, targets
        with weights that do not fit.
    """
    for name, leaf in named("inputs", x):
        if not (checks.is_real(leaf.dtype) or leaf.dtype == bool):
            raise ValueError(
                f"{who}{name} must be one numeric array [M, ...], not dtype {leaf.dtype} (images of mixed shape?)"
            )
    values = y.value if isinstance(y, Weighted) else y
    labels = has_labels(y, num_classes)
    for name, leaf in named("labels" if labels else "targets", values):
        if labels and not np.issubdtype(leaf.dtype, np.integer):
            real = "; give num_classes=0 if they are real targets" if np.issubdtype(leaf.dtype, np.floating) else ""
            raise ValueError(f"{who}{name} must be integers, not dtype {leaf.dtype}{real}")
        if not (checks.is_real(leaf.dtype) or leaf.dtype == bool):
            raise ValueError(f"{who}{name} must be numbers, not dtype {leaf.dtype}")
    if is_tree(values) and num_classes:
        raise ValueError(f"{who}num_classes={num_classes} is for one array of labels, but the targets are a tree of arrays")
    if not is_tree(x) and not is_tree(y) and (y.ndim < 1 or x.ndim < 2 or len(x) != len(y) or len(y) == 0):
        raise ValueError(f"{who}inputs must be [M, ...] and labels [M] with M >= 1, not {x.shape} and {y.shape}")
    leaves = [*named("inputs", x), *named("targets", y)]
    for name, leaf in leaves:
        if leaf.ndim < 1 or len(leaf) != len(leaves[0][1]) or len(leaf) == 0:
            first = f"{leaves[0][0]} {leaves[0][1].shape}"
            raise ValueError(f"{who}every array needs M >= 1 rows, one a sample, but {first} and {name} {leaf.shape} differ")
        if 0 in leaf.shape:
            raise ValueError(f"{who}{name} are empty: shape {leaf.shape}")
    if isinstance(y, Weighted):
        _check_weights(y, who)


def _check_weights(y: Weighted, who: str) -> None:
    weight, value = y.weight, jax.tree.leaves(y.value)[0]
    if weight.shape != value.shape[: weight.ndim]:
        raise ValueError(f"{who}targets {value.shape} have weights {weight.shape}: the leading axes must be the same")
    if not (weight.dtype == bool or (np.isfinite(weight).all() and (weight >= 0).all())):
        raise ValueError(f"{who}weights of targets must be finite and not negative")
    none = ~(weight.reshape(len(weight), -1) > 0).any(1)
    if none.any():
        raise ValueError(f"{who}sample {int(np.argmax(none))} has no target with a weight above 0: leave such samples out")


def check_labels(y: np.ndarray, num_classes: int | None, order: np.ndarray, sizes: np.ndarray) -> int:
    """K, which is the largest label plus 1 unless it is given."""
    most = checks.MOST_CLASSES if num_classes is None else num_classes
    outside = ((y < 0) | (y >= most)).reshape(len(y), -1)
    if outside.any():
        sample = int(np.argmax(outside.any(1)))
        label = y.reshape(len(y), -1)[sample, np.argmax(outside[sample])]
        few = num_classes is None or len(np.unique(y)) <= num_classes
        hint = "; np.unique(labels, return_inverse=True)[1] makes them 0, 1, 2, ..." if few else ""
        raise ValueError(
            f"labels run from {y.min()} to {y.max()}, but must lie in [0, num_classes={most}): label {label} in "
            f"{of_client(sample, order, sizes)}{hint}"
        )
    return class_count(y) if num_classes is None else num_classes


def class_count(*labels: np.ndarray) -> int:
    """The largest label plus 1. Warns where class 0, or most of these classes, have no sample: a model has an output for each."""
    counts = np.bincount(np.concatenate([y.reshape(-1).astype(np.int64) for y in labels]))
    empty = int(np.count_nonzero(counts == 0))
    if empty > len(counts) / 2:
        warnings.warn(
            f"labels run up to {len(counts) - 1}, so that a model has {len(counts)} classes, {empty} of them without a sample; "
            "np.unique(labels, return_inverse=True)[1] makes them 0, 1, 2, ...",
            stacklevel=2,
        )
    elif counts.size and not counts[0] and all(y.ndim == 1 for y in labels):  # of tokens, 0 may stand for padding
        warnings.warn(
            f"labels run from {np.flatnonzero(counts)[0]} to {len(counts) - 1}, so that a model has {len(counts)} classes, class "
            "0 among them, which has no sample; subtract 1 if they count from 1",
            stacklevel=2,
        )
    return len(counts)


def check_ids(x: PyTree, num_ids: Any, order: np.ndarray, sizes: np.ndarray) -> None:
    """Integer inputs that name one of `num_ids` things, e.g. tokens of a vocabulary.

    Raises:
      ValueError: an id out of range, inputs that are no integers, `num_ids` that does not fit the inputs.
    """
    for (name, leaf), most in zip(named("inputs", x), like_tree("num_ids", num_ids, x), strict=True):
        if most is None:
            continue
        checks.count("num_ids", most)
        if not np.issubdtype(leaf.dtype, np.integer):
            raise ValueError(f"num_ids={most} is for integer ids, but {name} are {leaf.dtype}")
        outside = ((leaf < 0) | (leaf >= most)).reshape(len(leaf), -1)
        if outside.any():
            sample = int(np.argmax(outside.any(1)))
            found = leaf.reshape(len(leaf), -1)[sample, np.argmax(outside[sample])]
            raise ValueError(
                f"{name} must lie in [0, num_ids={most}), but one is {found}, first in {of_client(sample, order, sizes)}"
            )


def check_finite(what: str, tree: PyTree, order: np.ndarray, sizes: np.ndarray) -> None:
    """Raises `ValueError` for a number that is not finite, or not in the type that JAX will give it."""
    for name, values in named(what, tree):
        bad, kind = lost(values)
        if bad is not None:
            sample = int(np.argmax(bad.reshape(len(values), -1).any(1)))
            raise ValueError(f"{name} hold {kind}, first in {of_client(sample, order, sizes)}")


def lost(values: np.ndarray) -> tuple[np.ndarray | None, str]:
    """Which numbers are not finite, or are not in the type that JAX will give them; and what they are, in words.

    Returns:
      Booleans in the shape of `values` and the words; `None` and no words where all numbers are good.
    """
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(values.dtype))
    if checks.is_real(dtype) and not np.issubdtype(dtype, np.integer):
        with np.errstate(over="ignore", invalid="ignore"):
            bad = ~np.isfinite(values.astype(dtype, copy=False))
        kind = "NaN or infinite values" + (f" as {dtype}" if bad.any() and np.isfinite(values).all() else "")
    elif dtype != values.dtype:
        limits = np.iinfo(dtype)
        bad, kind = (values < limits.min) | (values > limits.max), f"integers that {dtype} cannot hold"
    else:
        return None, ""
    return (bad, kind) if bad.any() else (None, "")


def of_client(sample: int, order: np.ndarray, sizes: np.ndarray) -> str:
    """Which sample of which client it is, in words."""
    where = np.flatnonzero(order == sample)
    if not where.size:
        return f"sample {sample}, of no client"
    ends = np.cumsum(sizes)
    client = int(np.searchsorted(ends, where[0], side="right"))
    return f"sample {where[0] - ends[client] + sizes[client]} of client {client} (number {sample} of all)"


# -------------------------------------------------------------------------------------------------------------------- scaling


def like_tree(what: str, option: Any, x: PyTree) -> list[Any]:
    """One value of an option for each leaf of the inputs, `None` where it names none.

    Args:
      what: name of the option.
      option: for inputs that are one array, its value; for a tree, `None` or a dict (or tuple) with a value for some leaves.
      x: the inputs.

    Raises:
      ValueError: a value that stands for no leaf.
    """
    if not is_tree(x):
        return [option]
    leaves: Sequence[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(x)
    found, used = [], 0
    for path, _ in leaves:
        value = option
        for entry in path:
            value = _part(value, entry)
        found.append(value)
        used += value is not None
    given = len(jax.tree.leaves(option, is_leaf=lambda node: not isinstance(node, Mapping)))
    fits = used == given if isinstance(option, Mapping) else isinstance(option, tuple) and len(option) <= len(leaves)
    if option is not None and not fits:
        names = ", ".join(jax.tree_util.keystr(path) for path, _ in leaves)
        raise ValueError(f"{what}={checks.shown(option)} must name leaves of the inputs, which are {names}")
    return found


def _part(value: Any, entry: Any) -> Any:
    """What an option holds at one step of a leaf's path; `None` where it holds nothing."""
    name = getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", None)))
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, tuple) and isinstance(name, int):
        return value[name] if name < len(value) else None
    return getattr(value, name, None) if isinstance(value, tuple) and isinstance(name, str) else None


def scaling(x: PyTree, offset: Any, scale: Any) -> tuple[PyTree, PyTree]:
    """`offset` and `scale` as trees like the inputs of float32 arrays, `None` where a leaf is as stored.

    Raises:
      ValueError: numbers that do not fit; uint8 inputs of which nobody said whether they are pixels or tokens.
    """
    everywhere = isinstance(scale, str) and scale == STORED
    offsets = like_tree("offset", offset, x)
    scales = [STORED] * len(offsets) if everywhere else like_tree("scale", scale, x)
    pairs = [
        _scaling(name, leaf, one, other) for (name, leaf), one, other in zip(named("inputs", x), offsets, scales, strict=True)
    ]
    if all(one is None for one, _ in pairs):
        return None, None
    structure = jax.tree.structure(x)
    return tuple(jax.tree.unflatten(structure, values) for values in zip(*pairs, strict=True))


def _scaling(
    who: str, x: np.ndarray, offset: ArrayLike | None, scale: ArrayLike | str | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if isinstance(scale, str) and scale == STORED:
        if offset is not None:
            raise ValueError(f"scale={STORED!r} says that {who} are taken as stored: leave offset out")
        return None, None
    if offset is None and scale is None:
        if x.dtype != np.uint8:
            return None, None
        if x.ndim != 4:
            raise ValueError(
                f"{who} are uint8 of shape {x.shape}: give scale=1/255 if they are pixels, scale={STORED!r} if they are tokens "
                "or other integers (only images [M, height, width, channels] are taken for pixels), or give another type, "
                "as the .npz of a study must: x / 255, or x.astype(int)"
            )
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
