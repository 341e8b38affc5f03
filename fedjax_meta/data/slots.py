"""Partitions with a fixed list of classes per client, as in FedMeta-Per (Nguyen and Cao).

A client has J slots, and each slot holds samples of one class. Axis letters: M samples of the data set, N clients, K classes.
"""

import random

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.data import runs
from fedjax_meta.data.partition import Partition, check_labels


def class_slots(num_clients: int, num_classes: int, *, per_client: int = 2, stride: int = 2) -> np.ndarray:
    """Int `[N, per_client]`: the classes of each client, `(stride * u + j) mod K` for slot j of client u.

    With ten classes and two per client, stride 2 gives the five pairs 01, 23, 45, 67, 89 (FedMeta-Per on MNIST), and stride 1
    the ten pairs of neighbours (FedMeta-Per on CIFAR-10).

    Raises:
      ValueError: more classes per client than there are.

    Example:
      >>> class_slots(3, 10).tolist()
      [[0, 1], [2, 3], [4, 5]]
    """
    checks.count("num_clients", num_clients)
    checks.count("stride", stride)
    checks.count("per_client", per_client)
    checks.count("num_classes", num_classes)
    if per_client > num_classes:
        raise ValueError(f"per_client={per_client} must not exceed the number of classes, {num_classes}")
    return (stride * np.arange(num_clients)[:, None] + np.arange(per_client)) % num_classes


NEWCOMERS = ("as published", "unlike")
"""How the pairs of new clients relate to those of training clients, see `new_client_slots`."""


def new_client_slots(
    slots: np.ndarray,
    num_classes: int,
    rng: np.random.Generator,
    *,
    newcomers: str = "unlike",
    num_new: int | None = None,
) -> np.ndarray:
    """Int `[num_new, 2]`: class pairs for new clients.

    The classes are put in random order, and client u gets two neighbours in that order.

    Args:
      slots: int `[N, 2]`, the pairs of the training clients.
      num_classes: K.
      rng: source of the random orders.
      newcomers: "as published" takes the first order, as the authors of FedMeta-Per do, so that new clients may have a pair of
        training clients. "unlike" draws orders until no pair is in `slots`, which is harder.
      num_new: how many there are; N if not given.

    Raises:
      ValueError: no such order among 10,000 draws, because there are too few classes.
    """
    slots = checks.numeric("slots", slots, integers=True)
    if slots.ndim != 2 or slots.shape[1] != 2 or not slots.size:
        raise ValueError(f"slots must be pairs of classes [N, 2], not of shape {list(slots.shape)}")
    checks.instance("rng", rng, np.random.Generator, "np.random.default_rng(1)")
    checks.one_of("newcomers", newcomers, NEWCOMERS)
    place = class_slots(len(slots) if num_new is None else num_new, num_classes, stride=1)
    for _ in range(10_000):
        new = rng.permutation(num_classes)[place]
        if newcomers == "as published" or not shared_pairs(slots, new):
            return new
    raise ValueError(f"with {num_classes} classes no pairs are left for new clients that no training client has")


def shared_pairs(slots: np.ndarray, others: np.ndarray) -> int:
    """How many different pairs of classes both have.

    Example:
      >>> shared_pairs(np.array([[0, 1], [2, 3]]), np.array([[1, 0], [3, 4], [1, 0]]))
      1
    """
    one, other = ({frozenset(pair) for pair in pairs.tolist()} for pairs in (slots, others))
    return len(one & other)


def stick_breaking(
    labels: ArrayLike,
    slots: ArrayLike,
    *,
    seed: int,
    min_samples: int = 0,
    divisor: int | None = None,
    in_turn: bool = False,
    at_random: int | None = None,
) -> Partition:
    """Splits each class into unequal parts, one per client that holds the class (FedMeta-Per's generator for MNIST).

    For a class with h holders, h - 1 parts are drawn one after the other from [rest // divisor, rest // 2), where `rest` is
    what remains at that point; the last holder gets the remainder. Every sample of a class with holders is
    assigned once. The draws come from NumPy's legacy generator, so that seed 1 gives the sizes that the authors of FedMeta-Per
    drew.

    With `in_turn`, parts have the same sizes but go to other slots: the first part of each class, then the second of each, and so
    on, go to slot after slot, whatever class the slot holds, as in pFedMe's generator; and every slot takes the first samples of
    its class, so that clients share samples, some for training and others for tests. FedMeta-Per's published MNIST runs used such
    clients, according to their logs (docs/papers_errors.md). The logs do not say which samples of its class a slot took.

    Args:
      labels: int `[M]`.
      slots: int `[N, J]`, the classes of each client, all different within a row; from `class_slots`.
      seed: an integer.
      min_samples: samples of each of its classes that every client gets before the draws; small data sets need it.
      divisor: at least 2; h + 1 if not given. The authors' code has 11, whatever h is.
      in_turn: whether parts go to the slots in turn, and clients share samples.
      at_random: with `in_turn`, a seed by which a slot takes samples of its class at random, none twice, in place of the first
        ones.

    Raises:
      ValueError: a client without samples, a class that is too small for `min_samples`, `at_random` without `in_turn`; with
        `in_turn`, classes that are not held by the same number of clients each, or a part that is larger than the class of its
        slot.
    """
    labels = check_labels(labels)
    slots = _check_slots(slots, labels)
    checks.count("min_samples", min_samples, least=0)
    checks.seed("seed", seed, bits=32)
    if divisor is not None:
        checks.count("divisor", divisor, least=2)
    if at_random is not None:
        checks.seed("at_random", at_random)
        if not in_turn:
            raise ValueError("at_random needs in_turn=True: otherwise no two clients have a sample")
    generator = np.random.RandomState(seed)
    counts = np.bincount(labels, minlength=slots.max() + 1)
    parts = np.zeros(slots.shape, np.int64)
    turns = []
    for c in range(len(counts)):
        holds = slots == c
        holders = int(holds.sum())
        if holders == 0:
            continue
        rest = int(counts[c]) - min_samples * holders
        if rest < 0:
            raise ValueError(f"class {c} has {counts[c]} samples, too few for min_samples={min_samples} of {holders} clients")
        drawn = []
        for _ in range(holders - 1):
            low = rest // (holders + 1 if divisor is None else divisor)
            drawn.append(int(generator.randint(low, max(rest // 2, low + 1))))
            rest -= drawn[-1]
        parts[holds] = min_samples + np.array([*drawn, rest])
        turns.append(parts[holds])
    if in_turn:
        if len({len(part) for part in turns}) > 1:
            raise ValueError("parts go in turn only to slots that hold every class equally often")
        parts = np.stack(turns, axis=1).reshape(slots.shape)
        if (parts > counts[slots]).any():
            raise ValueError("a part in turn is larger than the class of its slot: classes differ too much in size")
    if at_random is not None:
        rng, classes = np.random.default_rng([at_random, 0]), [np.flatnonzero(labels == c) for c in range(len(counts))]
        held = [rng.choice(classes[c], n, replace=False) for c, n in zip(slots.ravel(), parts.ravel(), strict=True)]
        return Partition(np.concatenate(held), _sizes(parts))
    return _assign(labels, slots, parts, shared=in_turn)


def lognormal_classes(labels: ArrayLike, slots: ArrayLike, *, seed: int) -> Partition:
    """Client sizes from a lognormal distribution within each class (FedMeta-Per's generator for CIFAR-10, after pFedMe's).

    Every slot gets 10 samples, then `share + uniform{300..600}` more if the class still has more than that. The shares of a
    class are lognormal(0, 2) draws, scaled so that their sum is the size of the class less 50. Slot j of the first N / 10
    clients uses one draw, slot j of the next N / 10 another, and so on. Some samples stay unused. For classes of another size
    than CIFAR-10's 6,000, these constants scale with the size. The draws come from the legacy generators of Python and NumPy,
    so that seed 1 gives Table 2 of FedMeta-Per exactly.

    Args:
      labels: int `[M]`.
      slots: int `[N, J]` as for `stick_breaking`; N must be a multiple of 10.
      seed: an integer.

    Raises:
      ValueError: N is not a multiple of 10, or classes are too small.
    """
    labels = check_labels(labels)
    slots = _check_slots(slots, labels)
    checks.seed("seed", seed, bits=32)
    num_clients, per_client = slots.shape
    if num_clients % 10:
        raise ValueError(
            f"num_clients={num_clients} must be a multiple of 10, because a tenth of the clients shares its draws"
        )
    counts = np.bincount(labels, minlength=slots.max() + 1)
    uniform, generator = random.Random(seed), np.random.RandomState(seed)
    shares = generator.lognormal(0, 2.0, (len(counts), 50, per_client))
    unit = counts / 6000
    shares *= ((counts - 50 * unit) / shares.sum((1, 2)))[:, None, None]
    first = np.maximum(np.rint(10 * unit), 1).astype(np.int64)
    taken = np.bincount(slots.ravel(), minlength=len(counts)) * first
    if (taken > counts).any():
        c = int(np.argmax(taken > counts))
        raise ValueError(f"class {c} has {counts[c]} samples, too few for its {taken[c] // first[c]} clients")
    parts = first[slots]
    for u in range(num_clients):
        for j in range(per_client):
            c = slots[u, j]
            more = int(shares[c, u // (num_clients // 10), j]) + round(uniform.randint(300, 600) * unit[c])
            if taken[c] + more < counts[c]:
                parts[u, j] += more
                taken[c] += more
    return _assign(labels, slots, parts)


def _check_slots(slots: ArrayLike, labels: np.ndarray) -> np.ndarray:
    slots = checks.numeric("slots", slots)
    if slots.ndim != 2 or slots.size == 0 or not np.issubdtype(slots.dtype, np.integer) or slots.min() < 0:
        raise ValueError(f"slots must be classes [N, J], not {slots.dtype} {list(slots.shape)}")
    if (np.diff(np.sort(slots, axis=1), axis=1) == 0).any():
        raise ValueError("slots must name different classes for each client, but one client has a class twice")
    missing = np.setdiff1d(slots, labels)
    if missing.size:
        raise ValueError(f"slots name class {missing[0]}, which has no samples")
    return slots


def _assign(labels: np.ndarray, slots: np.ndarray, parts: np.ndarray, *, shared: bool = False) -> Partition:
    """Gives each client u `parts[u, j]` samples of class `slots[u, j]`, both `[N, J]`; clients and samples go in order.

    With `shared`, every slot begins at the first sample of its class.
    """
    sizes = _sizes(parts)
    counts = np.bincount(labels, minlength=slots.max() + 1)
    begin = np.cumsum(counts) - counts
    flat, length = slots.ravel(), parts.ravel()
    queue = np.argsort(flat, kind="stable")
    ahead = np.cumsum(length[queue]) - length[queue]
    held = np.bincount(flat, weights=length, minlength=len(counts)).astype(np.int64)
    offset = np.zeros_like(length)
    if not shared:
        offset[queue] = ahead - (np.cumsum(held) - held)[flat[queue]]
    return Partition(np.argsort(labels, kind="stable")[runs.positions(begin[flat] + offset, length)], sizes)


def _sizes(parts: np.ndarray) -> np.ndarray:
    """Samples of each client `[N]`, of its parts `[N, J]`; raises `ValueError` where one has none."""
    sizes = parts.sum(1)
    if sizes.min() < 1:
        raise ValueError(f"client {int(np.argmin(sizes))} would be empty: too few samples of its classes for so many clients")
    return sizes
