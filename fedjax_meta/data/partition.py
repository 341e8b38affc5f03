"""Partitions of a data set among clients, computed from the labels.

Every partitioner is a pure function of its arguments and seed and returns a `Partition`. No client is empty, and no sample
belongs to two clients unless the caller allows it. `slots` has the partitions with a fixed list of classes per client. Axis
letters: M samples of the data set, N clients, S samples that clients hold, K classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.data import runs
from fedjax_meta.data.samples import as_array

Seed = int | np.random.Generator
"""What a partition draws from."""

IDS = "iubSU"
"""Kinds of the types that can name a client: integers, bools and strings."""


class Partition(NamedTuple):
    """The samples that each client holds, in the form that `from_partition` takes.

    Attributes:
      order: int64 `[S]`, the samples of client 0, then those of client 1, and so on.
      sizes: int64 `[N]`, the number of samples of each client.
    """

    order: np.ndarray
    sizes: np.ndarray

    def owner(self) -> np.ndarray:
        """Int64 `[S]`: the client that holds each entry of `order`."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def class_counts(self, labels: ArrayLike, num_classes: int) -> np.ndarray:
        """Int64 `[N, K]`: the number of samples of each class that each client holds, for the `labels [M]`."""
        labels = np.asarray(labels)
        checks.indices("labels", labels, num_classes)
        cell = self.owner() * num_classes + labels[self.order].astype(np.int64)
        return np.bincount(cell, minlength=len(self.sizes) * num_classes).reshape(-1, num_classes)

    def shuffled(self, seed: Seed) -> "Partition":
        """The same clients, with each client's samples in random order."""
        checks.seed("seed", seed)
        return Partition(self.order[_random_within_groups(self.owner(), np.random.default_rng(seed))], self.sizes)


def iid(labels: ArrayLike, num_clients: int, *, seed: Seed) -> Partition:
    """Assigns every sample once, at random; the clients' sizes differ by at most 1 (McMahan et al., AISTATS 2017).

    Args:
      labels: int `[M]`; only M matters.
      num_clients: N, at most M.
      seed: an integer or a NumPy generator.

    Example:
      >>> iid(np.zeros(10, int), 3, seed=0).sizes.tolist()
      [4, 3, 3]
    """
    labels = check_labels(labels)
    _check_clients(num_clients, len(labels))
    checks.seed("seed", seed)
    return Partition(np.random.default_rng(seed).permutation(len(labels)), _even(len(labels), num_clients))


def quantity_skew(labels: ArrayLike, num_clients: int, *, concentration: float, seed: Seed, min_samples: int = 1) -> Partition:
    """Assigns every sample once, at random, with client sizes drawn from Dir_N(concentration) (Li et al., ICDE 2022).

    Args:
      labels: int `[M]`; only M matters.
      num_clients: N.
      concentration: above 0; smaller values give more unequal clients.
      seed: an integer or a NumPy generator.
      min_samples: minimum number of samples per client, set aside before the shares are drawn.
    """
    labels = check_labels(labels)
    _check_concentration(concentration)
    checks.count("min_samples", min_samples)
    _check_clients(num_clients, len(labels), min_samples)
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(num_clients, concentration))
    sizes = min_samples + _split(shares[None], np.array([len(labels) - min_samples * num_clients]))[0]
    return Partition(rng.permutation(len(labels)), sizes)


def shard_assignment(num_clients: int, *, per_client: int = 2, seed: Seed) -> np.ndarray:
    """Int `[N, per_client]`: a random assignment of `N * per_client` shards to clients, for `shards`.

    MTFL uses the same assignment for the training and for the test split.
    """
    checks.count("num_clients", num_clients)
    checks.count("per_client", per_client)
    checks.seed("seed", seed)
    return np.random.default_rng(seed).permutation(num_clients * per_client).reshape(num_clients, per_client)


def shards(labels: ArrayLike, assignment: ArrayLike, *, uneven: bool = False) -> Partition:
    """Sorts the samples by label, cuts them into equal shards and gives each client some shards.

    Source: McMahan et al., AISTATS 2017; also used by MTFL (Mills, Hu and Min). Every sample is assigned once.

    Args:
      labels: int `[M]`.
      assignment: int `[N, s]`, a permutation of the shards, from `shard_assignment`.
      uneven: whether shards may differ by one sample if M is not a multiple of their number; the longer ones come first.

    Raises:
      ValueError: M is not a multiple of the number of shards (unless `uneven`), more shards than samples, an `assignment`
        that is not a permutation.

    Example:
      >>> part = shards(np.array([1, 0, 1, 0]), np.array([[0], [1]]))
      >>> part.order.tolist(), part.sizes.tolist()
      ([1, 3, 0, 2], [2, 2])
    """
    checks.flag("uneven", uneven)
    labels, assignment = check_labels(labels), checks.numeric("assignment", assignment, integers=True)
    total = assignment.size
    if assignment.ndim != 2 or not np.array_equal(np.sort(assignment, axis=None), np.arange(total)):
        raise ValueError(
            f"assignment must be a permutation of the shards [N, s], not {list(assignment.shape)}; see shard_assignment"
        )
    if total > len(labels):
        raise ValueError(f"{total} shards are more than the M={len(labels)} samples; take fewer clients or shards")
    if len(labels) % total and not uneven:
        raise ValueError(
            f"M={len(labels)} samples do not divide into {total} equal shards; uneven=True lets shards differ by one sample"
        )
    by_class = np.argsort(labels, kind="stable")
    length = _even(len(labels), total)
    begin = np.cumsum(length) - length
    shard = assignment.ravel()
    return Partition(by_class[runs.positions(begin[shard], length[shard])], length[assignment].sum(1))


def dirichlet_classes(
    labels: ArrayLike, num_clients: int, *, concentration: float, seed: Seed, min_samples: int = 1
) -> Partition:
    """Splits each class among the clients in shares drawn from Dir_N(concentration) (Yurochkin et al., ICML 2019).

    Per-FedAvg-Reptile uses it with 0.5. Sizes and class mixes are both unequal; every sample is assigned once. Clients with
    fewer than `min_samples` samples get random samples of clients with more, so that no draw is rejected.

    Args:
      labels: int `[M]`.
      num_clients: N.
      concentration: above 0; smaller values give more unequal clients.
      seed: an integer or a NumPy generator.
      min_samples: minimum number of samples per client.
    """
    labels = check_labels(labels)
    _check_concentration(concentration)
    checks.count("min_samples", min_samples)
    _check_clients(num_clients, len(labels), min_samples)
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    labels = np.unique(labels, return_inverse=True)[1]
    counts = np.bincount(labels)
    shares = rng.dirichlet(np.full(num_clients, concentration), len(counts))
    # A class of few samples a client would give its samples to the same clients as every other such class.
    small, offset = counts < 10 * num_clients, np.full(len(counts), 0.5)
    offset[small] = rng.random(small.sum())
    parts = _split(shares, counts, offset)
    owner = np.repeat(np.tile(np.arange(num_clients), len(counts)), parts.ravel())
    samples = _random_within_groups(labels, rng)
    owner = _filled_up(owner, num_clients, min_samples, rng)
    return _collect(samples, owner, num_clients)


def dirichlet_clients(
    labels: ArrayLike, num_clients: int, *, concentration: float, seed: Seed, sizes: ArrayLike | None = None
) -> Partition:
    """Draws each client's class mix from Dir_K(concentration * K * prior) (Hsu, Qi, Brown, arXiv 1909.06335).

    The prior is the class mix of the data set; where it is uniform, the parameter of each class is `concentration`. For an alpha
    that stands for Dir_K(alpha * prior), give alpha / K. Client sizes are given, no sample is assigned twice, and with equal
    sizes (the default) every sample is assigned. When a class has run out, random samples of the other classes replace it.

    Args:
      labels: int `[M]`.
      num_clients: N.
      concentration: above 0; smaller values give fewer classes per client.
      seed: an integer or a NumPy generator.
      sizes: int `[N]`, at least 1 each, with a sum of at most M; if not given, all samples in equal parts.
    """
    labels = check_labels(labels)
    _check_concentration(concentration)
    _check_clients(num_clients, len(labels))
    checks.seed("seed", seed)
    sizes = _even(len(labels), num_clients) if sizes is None else checks.numeric("sizes", sizes, integers=True)
    if sizes.shape != (num_clients,) or sizes.min() < 1 or sizes.sum() > len(labels):
        raise ValueError(
            f"sizes must be N={num_clients} counts of at least 1 with a sum of at most M={len(labels)}, "
            f"not {sizes.shape} with sum {sizes.sum()}"
        )
    rng = np.random.default_rng(seed)
    counts = np.bincount(labels)
    present = np.flatnonzero(counts)
    mix = rng.dirichlet(concentration * counts[present] / len(labels) * len(present), num_clients)
    requests = rng.multinomial(sizes, mix)
    owner = np.repeat(np.arange(num_clients), sizes)
    requested = np.repeat(np.tile(present, num_clients), requests.ravel())
    # Within each class, requests in random order are matched with samples in random order.
    queue = _random_within_groups(requested, rng)
    rank = runs.rank(np.bincount(requested, minlength=len(counts)))
    met = rank < counts[requested[queue]]
    begin = np.cumsum(counts) - counts
    samples = _random_within_groups(labels, rng)
    place = begin[requested[queue]][met] + rank[met]
    left = np.ones(len(samples), bool)
    left[place] = False
    given = np.empty(len(requested), np.int64)
    given[queue[met]] = samples[place]
    given[queue[~met]] = rng.permutation(samples[left])[: int((~met).sum())]
    return _collect(given, owner, num_clients)


def dominant_groups(
    labels: ArrayLike,
    num_clients: int,
    *,
    groups: Sequence[Sequence[int]],
    size: int,
    uniform: float = 0.2,
    first: int = 0,
    share: bool = False,
    num_classes: int | None = None,
) -> Partition:
    """Clients of equal size: a share uniform over all classes, the rest from a group of dominant classes (FedPAC, ICLR 2023).

    Client i has group i mod len(groups). Of its `size` samples, int(uniform * size) are spread evenly over all K classes and
    the others evenly over the group; the remainder of each division goes to the last class. The samples of each class are
    taken in storage order, so the result depends on the order of the labels; shuffle the data set first for another draw.

    Args:
      labels: int `[M]`.
      num_clients: N.
      groups: the classes of each group.
      size: number of samples of each client.
      uniform: share that is spread over all classes, between 0 and 1.
      first: position of the first sample taken from each class; after the last sample of a class comes its first.
      share: whether several clients may get the same samples of a class that is too small, and a client that asks for more
        than all of them the same ones several times. The authors' code does this without notice.
      num_classes: K; `max(labels) + 1` if not given.

    Raises:
      ValueError: a class that is too small (unless `share`), groups with unknown classes or with a class twice.
    """
    labels = check_labels(labels)
    checks.count("num_clients", num_clients)
    checks.count("size", size)
    checks.count("first", first, least=0)
    checks.share("uniform", uniform)
    checks.flag("share", share)
    if num_classes is not None:
        checks.count("num_classes", num_classes, least=int(labels.max()) + 1)
    num_classes = int(labels.max()) + 1 if num_classes is None else num_classes
    lists = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple, np.ndarray)) for group in groups)
    if lists:
        for group in groups:
            checks.indices("groups", group, num_classes)
            if len({*map(int, group)}) < len(group):
                raise ValueError(f"groups={checks.shown(groups)}: the group {checks.shown(group)} names a class twice")
    if not lists or not groups or any(len(group) == 0 for group in groups):
        raise ValueError(f"groups={checks.shown(groups)} must be non-empty lists of classes in [0, {num_classes})")
    counts = np.bincount(labels, minlength=num_classes)
    common = int(uniform * size)
    requests = np.zeros((len(groups), num_classes), np.int64)
    for request, group in zip(requests, groups, strict=True):
        for amount, among in ((common, list(range(num_classes))), (size - common, list(group))):
            request[among] += amount // len(among)
            request[among[-1]] += amount % len(among)
    parts = requests[np.arange(num_clients) % len(groups)]
    asked = parts.sum(0)
    missing = np.where(share & (counts > 0), 0, asked - counts)
    short = int(np.argmax(missing))
    if missing[short] > 0:
        remedy = "take fewer or smaller clients, or let them share samples with share=True (--share)"
        if counts[short] == 0:
            remedy = "leave it out of groups, with uniform=0"
        raise ValueError(f"class {short} has {counts[short]} samples, but the clients ask for {asked[short]}; {remedy}")
    begin = np.cumsum(counts) - counts
    offset = first + np.cumsum(parts, 0) - parts
    within = runs.positions(offset.ravel(), parts.ravel())
    cell = np.repeat(np.tile(np.arange(num_classes), num_clients), parts.ravel())
    return Partition(np.argsort(labels, kind="stable")[begin[cell] + within % counts[cell]], parts.sum(1))


def natural(features: ArrayLike, *, min_samples: int = 1) -> Partition:
    """One client for each value of a feature of the data set (writer, user, site), sorted by value.

    Clients with fewer than `min_samples` samples are left out, as in LEAF (Caldas et al., arXiv 1812.01097). Every sample of
    the other clients is assigned once.

    Args:
      features: `[M]`, integers or strings.
      min_samples: minimum number of samples of a client.

    Example:
      >>> part = natural(np.array(["b", "a", "b"]))
      >>> part.order.tolist(), part.sizes.tolist()
      ([1, 0, 2], [1, 2])
    """
    try:
        features = np.asarray(features)
    except (TypeError, ValueError):
        raise ValueError(f"features must be integers or strings [M], not {checks.shown(features)}") from None
    checks.count("min_samples", min_samples)
    if features.ndim != 1 or features.size == 0 or features.dtype.kind not in IDS:
        raise ValueError(f"features must be integers or strings [M], not {features.dtype} {list(features.shape)}")
    _, client, sizes = np.unique(features, return_inverse=True, return_counts=True)
    order = np.argsort(client, kind="stable")
    keep = sizes >= min_samples
    if not keep.any():
        raise ValueError(
            f"min_samples={min_samples} must be at most {sizes.max()}, the number of samples of the largest client"
        )
    return Partition(order[np.repeat(keep, sizes)], sizes[keep])


def _check_concentration(value: Any) -> None:
    checks.positive("concentration", value)
    # The sum of N of them must be a number.
    checks.between("concentration", value, 0, 1e100)


def check_labels(labels: ArrayLike) -> np.ndarray:
    """`labels` as an array `[M]`.

    Raises:
      ValueError: labels that are not integers, are negative, or do not have the shape `[M]` with M >= 1.
    """
    labels = as_array("labels", labels)
    if labels.ndim != 1 or labels.size == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels must be integers [M] with M >= 1, not {labels.dtype} {list(labels.shape)}; "
            "np.unique(labels, return_inverse=True)[1] converts any"
        )
    if labels.min() < 0:
        raise ValueError(f"labels must not be negative, but one is {labels.min()}")
    if labels.max() >= checks.MOST_CLASSES:
        raise ValueError(
            f"labels must be below {checks.MOST_CLASSES}, but one is {labels.max()}; "
            "np.unique(labels, return_inverse=True)[1] makes them 0, 1, 2, ..."
        )
    return labels


def _check_clients(num_clients: int, num_samples: int, min_samples: int = 1) -> None:
    checks.count("num_clients", num_clients)
    if num_clients * min_samples > num_samples:
        raise ValueError(
            f"num_clients={num_clients} with at least {min_samples} samples each need more than the M={num_samples} samples"
        )


def _even(total: int, parts: int) -> np.ndarray:
    """Int64 `[parts]`: sizes with sum `total` that differ by at most 1, the larger ones first."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _split(shares: np.ndarray, totals: np.ndarray, offset: ArrayLike = 0.5) -> np.ndarray:
    """Int64 `[K, N]`: `totals [K]` split in the `shares [K, N]`, rounded so that each row sums to its total.

    With a random `offset [K]` in [0, 1), each part is its share on average.
    """
    ends = np.floor(np.cumsum(shares, 1) * totals[:, None] + np.reshape(offset, (-1, 1))).astype(np.int64)
    ends[:, -1] = totals
    return np.diff(np.minimum(ends, totals[:, None]), axis=1, prepend=0)


def _random_within_groups(group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions sorted by `group`, in random order within each group."""
    random_order = rng.permutation(len(group))
    if group.max() < 2**16:
        # NumPy sorts 16-bit integers by radix sort, in linear time.
        return random_order[np.argsort(group[random_order].astype(np.uint16), kind="stable")]
    # Group and random rank in one integer: one sort instead of one per group.
    return np.argsort(group.astype(np.int64) * len(group) + random_order)


def _collect(samples: np.ndarray, owner: np.ndarray, num_clients: int) -> Partition:
    return Partition(samples[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=num_clients))


def _filled_up(owner: np.ndarray, num_clients: int, min_samples: int, rng: np.random.Generator) -> np.ndarray:
    """`owner [S]` after clients with fewer than `min_samples` samples got random samples of clients with more."""
    sizes = np.bincount(owner, minlength=num_clients)
    lack = np.maximum(min_samples - sizes, 0)
    if not lack.any():
        return owner
    queue = _random_within_groups(owner, rng)
    spare = queue[runs.rank(sizes) >= min_samples]
    owner = owner.copy()
    owner[rng.permutation(spare)[: lack.sum()]] = np.repeat(np.arange(num_clients), lack)
    return owner
