"""Attacks on the data of attackers: wrong labels, and a pattern that means a class."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.aggregate.distances import along
from fedjax_meta.attacks.attack import Attack, scaled
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.data.samples import one_array
from fedjax_meta.task import Batch
from fedjax_meta.types import Rate


def label_flip(attackers: float | Sequence[int], *, mapping: Sequence[int] | None = None, seed: int = 0) -> Attack:
    """Attackers train on wrong labels: y becomes K - 1 - y, or `mapping[y]`.

    Fang, Cao, Jia, Gong: "Local model poisoning attacks to Byzantine-robust federated learning", USENIX Security 2020, section 4.

    Args:
      attackers, seed: as in `Attack`.
      mapping: the new class of each of the K classes.

    Raises:
      ValueError: on use, a mapping that has not K classes, or targets that are no classes.
    """
    given = None if mapping is None else np.asarray(mapping)

    def poison(batch: Batch, chance: jax.Array, view: ClientView, num_classes: int) -> Batch:
        del chance, view
        _needs_classes("label_flip", num_classes)
        new = np.arange(num_classes)[::-1] if given is None else given
        if (
            new.shape != (num_classes,)
            or not np.issubdtype(new.dtype, np.integer)
            or new.min() < 0
            or new.max() >= num_classes
        ):
            raise ValueError(f"mapping={mapping} must give a class for each of the K={num_classes} classes")
        one_array("label_flip changes labels", batch.y)
        return batch._replace(y=jnp.asarray(new, batch.y.dtype)[batch.y])

    return Attack(name="label_flip", attackers=attackers, seed=seed, poison=poison, config={"mapping": mapping})


def backdoor(
    attackers: float | Sequence[int],
    *,
    target: int = 0,
    size: int = 3,
    value: float | None = None,
    share: float = 0.5,
    boost: Rate = 1.0,
    seed: int = 0,
) -> Attack:
    """Attackers put a pattern on a share of their samples and label these as the target class.

    Pattern: Gu, Dolan-Gavitt, Garg, "BadNets", arXiv 1708.06733. In federated learning: Bagdasaryan, Veit, Hua, Estrin,
    Shmatikov, "How to backdoor federated learning", AISTATS 2020, whose model replacement is a `boost` of C over the number of
    attackers; Sun et al., arXiv 1911.07963. `stamped` and `backdoor_success` measure it.

    Args:
      attackers, seed: as in `Attack`.
      target: the class.
      size: the pattern is a square of so many pixels in the last rows and columns; of a sample that is a vector the last
        `size * size` numbers.
      value: of the pattern, in the numbers that are stored (before scaling); 255 for integers and 1 for other inputs when not
        given.
      share: of an attacker's samples, in [0, 1].
      boost: what attackers multiply their changes by.

    Raises:
      ValueError: an option out of range; on use, a target that is not one of the K classes, a pattern larger than the image.
    """
    checks.count("target", target, least=0)
    checks.count("size", size)
    checks.share("share", share)
    checks.positive("boost", boost)

    def poison(batch: Batch, chance: jax.Array, view: ClientView, num_classes: int) -> Batch:
        _needs_classes("backdoor", num_classes)
        if target >= num_classes:
            raise ValueError(f"target={target} must be one of the K={num_classes} classes")
        one_array("backdoor marks inputs", batch.x)
        if getattr(batch.y, "ndim", 0) != 1:
            raise ValueError("backdoor needs one class label a sample")
        stored = jnp.asarray(_value(view.x.dtype, value), batch.x.dtype)
        if view.offset is not None and view.scale is not None:
            stored = (stored - view.offset) * view.scale
        stored = jnp.broadcast_to(stored, batch.x.shape[1:]).astype(batch.x.dtype)
        chosen = chance < share
        here = along(chosen, batch.x) & _pattern(batch.x.shape[1:], size)
        return batch._replace(x=jnp.where(here, stored, batch.x), y=jnp.where(chosen, target, batch.y))

    options = {"target": target, "size": size, "value": value, "share": share, "boost": boost}
    boosted = None if isinstance(boost, (int, float)) and boost == 1 else scaled(boost)
    return Attack(name="backdoor", attackers=attackers, seed=seed, poison=poison, lie=boosted, config=options)


def stamped(data: FederatedData, view: str = "test_query", *, size: int = 3, value: float | None = None) -> FederatedData:
    """The data with the pattern of `backdoor` on all samples of one view, for `evaluate`; labels stay true.

    Raises:
      ValueError: a view that the data do not have.
    """
    one_array("stamped marks inputs", data.x)
    start, count, x = np.asarray(data.start.get(view, ())), np.asarray(data.sizes(view)), np.array(data.x)
    rows = np.concatenate([np.arange(s, s + n) for s, n in zip(start, count, strict=True)])
    x[rows] = np.where(_pattern(x.shape[1:], size), np.asarray(_value(x.dtype, value), x.dtype), x[rows])
    return dataclasses.replace(data, x=x if isinstance(data.x, np.ndarray) else jnp.asarray(x))


def backdoor_success(confusion: ArrayLike, target: int) -> float:
    """The share of samples of other classes that are predicted as the target.

    Args:
      confusion: `[N, K, K]` of an evaluation on `stamped` data, rows true, columns predicted.
      target: the class.

    Raises:
      ValueError: matrices of another form, a target that is not one of the K classes.

    Example:
      >>> backdoor_success([[[5, 0], [3, 1]]], target=0)
      0.75
    """
    counts = checks.numeric("confusion", confusion)
    if counts.ndim != 3 or counts.shape[1] != counts.shape[2]:
        raise ValueError(f"confusion must be matrices [N, K, K], not of shape {list(counts.shape)}")
    checks.indices("target", target, counts.shape[1])
    others = np.delete(counts.sum(0), target, 0)
    return float(others[:, target].sum() / (others.sum() or 1))


def _needs_classes(name: str, num_classes: int) -> None:
    if num_classes == 0:
        raise ValueError(f"{name} needs class labels, but the data have real numbers or several labels (num_classes is 0)")


def _pattern(shape: tuple[int, ...], size: int) -> np.ndarray:
    """Bool, like one sample: where the pattern of a backdoor is."""
    here = np.zeros(shape, bool)
    if len(shape) > 1:
        if size > min(shape[:2]):
            raise ValueError(f"size={size} of the pattern is more than an image of shape {shape} has rows or columns")
        here[-size:, -size:] = True
    else:
        here[-size * size :] = True
    return here


def _value(dtype: Any, value: float | None) -> float:
    return value if value is not None else 255.0 if jnp.issubdtype(dtype, jnp.integer) else 1.0
