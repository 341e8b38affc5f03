"""Who holds which samples: partitions of a data set among clients, from labels alone.

Every partitioner is a pure function of its arguments and seed and returns a `Partition`; none makes a client empty, none gives
a sample to two clients unless it is told to. Axis letters: M samples of the data set, N clients, S samples that clients hold,
K classes.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import checks

Seed = int | np.random.Generator


class Partition(NamedTuple):
    """Which samples each client holds, as `federate` takes it.

    Attributes:
      order: int64 `[S]`, the samples of client 0, then those of client 1, and so on.
      sizes: int64 `[N]`, how many each client holds.
    """

    order: np.ndarray
    sizes: np.ndarray

    def owner(self) -> np.ndarray:
        """int64 `[S]`: the client that holds each entry of `order`."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def class_counts(self, labels: Any, num_classes: int) -> np.ndarray:
        """int64 `[N, K]`: how many samples of each class each client holds."""
        cell = self.owner() * num_classes + np.asarray(labels)[self.order]
        return np.bincount(cell, minlength=len(self.sizes) * num_classes).reshape(-1, num_classes)

    def shuffled(self, seed: Seed) -> "Partition":
        """The same clients with the samples of each in random order."""
        return Partition(self.order[_grouped(self.owner(), np.random.default_rng(seed))], self.sizes)


def iid(labels: Any, num_clients: int, *, seed: Seed) -> Partition:
    """Every sample once, at random, to clients whose sizes differ by at most 1 (McMahan et al., AISTATS 2017).

    Args:
      labels: int `[M]`; only their number matters.
      num_clients: N, at most M.
      seed: an integer or a numpy generator.

    Example:
      >>> iid(np.zeros(10, int), 3, seed=0).sizes.tolist()
      [4, 3, 3]
    """
    labels = _labels(labels)
    _clients(num_clients, len(labels))
    return Partition(np.random.default_rng(seed).permutation(len(labels)), _even(len(labels), num_clients))


def quantity_skew(labels: Any, num_clients: int, *, concentration: float, seed: Seed, least: int = 1) -> Partition:
    """Every sample once, at random, to clients whose sizes are shares drawn from Dir_N(concentration) (Li et al., ICDE 2022).

    Args:
      labels: int `[M]`; only their number matters.
      num_clients: N.
      concentration: above 0; the smaller, the more unequal.
      seed: an integer or a numpy generator.
      least: samples that every client holds, set aside before the shares are drawn.
    """
    labels = _labels(labels)
    checks.positive("concentration", concentration)
    checks.count("least", least)
    _clients(num_clients, len(labels), least)
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(num_clients, concentration))
    sizes = least + _cut(shares[None], np.array([len(labels) - least * num_clients]))[0]
    return Partition(rng.permutation(len(labels)), sizes)


def class_slots(num_clients: int, num_classes: int, *, per_client: int = 2, stride: int = 2) -> np.ndarray:
    """int `[N, per_client]`: the classes of each client, `(stride * u + j) mod K` for slot j of client u.

    With ten classes and two a client, stride 2 gives the five pairs 01, 23, 45, 67, 89 (S0 on MNIST), stride 1 the ten pairs
    of neighbours (S0 on CIFAR-10).

    Raises:
      ValueError: more classes a client than there are.

    Example:
      >>> class_slots(3, 10).tolist()
      [[0, 1], [2, 3], [4, 5]]
    """
    checks.count("num_clients", num_clients)
    checks.count("stride", stride)
    checks.count("per_client", per_client)
    if per_client > num_classes:
        raise ValueError(f"per_client={per_client} must not exceed the number of classes, {num_classes}")
    return (stride * np.arange(num_clients)[:, None] + np.arange(per_client)) % num_classes


def stick_breaking(labels: Any, slots: Any, *, seed: int, least: int = 0) -> Partition:
    """Cuts each class into unequal parts, one for every client that holds the class (generator of S0 for MNIST).

    With h holders left of a class, h - 1 parts are drawn one after the other from [rest // (h + 1), rest // 2), where h + 1
    keeps its first value; the last holder takes what remains. Every sample of a class that anybody holds is assigned once. The
    draws are those of numpy's legacy generator, so that seed 1 gives the sizes that S0's authors drew.

    Args:
      labels: int `[M]`.
      slots: int `[N, J]`, the classes of each client, all different in a row; from `class_slots`.
      seed: an integer.
      least: samples of each of its classes that every client gets beforehand; small data sets need it.

    Raises:
      ValueError: a client that gets no samples, a class that is too small for `least`.
    """
    labels, slots = _labels(labels), _slots(slots, labels)
    checks.count("least", least, least=0)
    generator = np.random.RandomState(seed)
    counts = np.bincount(labels, minlength=slots.max() + 1)
    parts = np.zeros(slots.shape, np.int64)
    for c in range(len(counts)):
        holds = slots == c
        holders = int(holds.sum())
        if holders == 0:
            continue
        rest = int(counts[c]) - least * holders
        if rest < 0:
            raise ValueError(f"class {c} has {counts[c]} samples, too few to give {least} to each of {holders} clients")
        drawn = []
        for _ in range(holders - 1):
            low = rest // (holders + 1)
            drawn.append(int(generator.randint(low, max(rest // 2, low + 1))))
            rest -= drawn[-1]
        parts[holds] = least + np.array([*drawn, rest])
    return _deal(labels, slots, parts)


def lognormal_classes(labels: Any, slots: Any, *, seed: int) -> Partition:
    """Client sizes by a lognormal law within each class (generator of S0 for CIFAR-10, after pFedMe's).

    Every slot gets 10 samples, then `share + uniform{300..600}` more if the class still has that many to spare, where the
    shares of a class are lognormal(0, 2) draws scaled to a sum of its size less 50 and shared by the clients of one tenth of
    the population; some samples stay unused. For classes of another size than CIFAR-10's 6,000 all these constants scale with
    it. The draws are those of Python's and numpy's legacy generators, so that seed 1 gives Table 2 of S0 to the digit.

    Args:
      labels: int `[M]`.
      slots: int `[N, J]` as for `stick_breaking`; N must be a multiple of 10.
      seed: an integer.

    Raises:
      ValueError: N that is no multiple of 10, classes too small.
    """
    labels, slots = _labels(labels), _slots(slots, labels)
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
    return _deal(labels, slots, parts)


def shard_assignment(num_clients: int, *, per_client: int = 2, seed: Seed) -> np.ndarray:
    """int `[N, per_client]`: a random deal of `N * per_client` shards; training and test data are cut by the same one (S4)."""
    checks.count("num_clients", num_clients)
    checks.count("per_client", per_client)
    return np.random.default_rng(seed).permutation(num_clients * per_client).reshape(num_clients, per_client)


def shards(labels: Any, assignment: Any, *, uneven: bool = False) -> Partition:
    """Sorts by label, cuts into equal shards and gives each client its own (McMahan et al., AISTATS 2017; S4).

    Every sample is assigned once.

    Args:
      labels: int `[M]`.
      assignment: int `[N, s]`, a permutation of the shards, from `shard_assignment`.
      uneven: whether shards may differ by one sample where they do not divide M.

    Raises:
      ValueError: shards that do not divide M (unless `uneven`), more shards than samples, an assignment that is no
        permutation.

    Example:
      >>> part = shards(np.array([1, 0, 1, 0]), np.array([[0], [1]]))
      >>> part.order.tolist(), part.sizes.tolist()
      ([1, 3, 0, 2], [2, 2])
    """
    labels, assignment = _labels(labels), np.asarray(assignment)
    total = assignment.size
    if assignment.ndim != 2 or not np.array_equal(np.sort(assignment, axis=None), np.arange(total)):
        raise ValueError(f"assignment must be a permutation of the shards as [N, s], not {assignment.shape}")
    if total > len(labels):
        raise ValueError(f"{total} shards are more than the M={len(labels)} samples")
    if len(labels) % total and not uneven:
        raise ValueError(
            f"M={len(labels)} samples do not divide into {total} equal shards; uneven=True lets them differ by one"
        )
    by_class = np.argsort(labels, kind="stable")
    length = _even(len(labels), total)
    begin = np.cumsum(length) - length
    dealt = assignment.ravel()
    return Partition(by_class[_runs(begin[dealt], length[dealt])], length[assignment].sum(1))


def dirichlet_classes(labels: Any, num_clients: int, *, concentration: float, seed: Seed, least: int = 1) -> Partition:
    """Each class is shared out by a draw from Dir_N(concentration) (Yurochkin et al., ICML 2019; S3 with 0.5).

    Sizes and class mixes are both unequal; every sample is assigned once. Clients that end below `least` are filled up with
    random samples of those above it, so that a draw is never thrown away.

    Args:
      labels: int `[M]`.
      num_clients: N.
      concentration: above 0; the smaller, the more unequal.
      seed: an integer or a numpy generator.
      least: samples that every client ends with at least.
    """
    labels = _labels(labels)
    checks.positive("concentration", concentration)
    checks.count("least", least)
    _clients(num_clients, len(labels), least)
    rng = np.random.default_rng(seed)
    counts = np.bincount(labels)
    shares = rng.dirichlet(np.full(num_clients, concentration), len(counts))
    parts = _cut(shares, counts)
    owner = np.repeat(np.tile(np.arange(num_clients), len(counts)), parts.ravel())
    samples = _grouped(labels, rng)
    owner = _filled_up(owner, num_clients, least, rng)
    return _collect(samples, owner, num_clients)


def dirichlet_clients(labels: Any, num_clients: int, *, concentration: float, seed: Seed, sizes: Any = None) -> Partition:
    """Each client draws its class mix from Dir_K(concentration * prior) (Hsu, Qi, Brown, arXiv 1909.06335).

    The prior is the data set's class mix. Sizes are given, no sample is assigned twice, and with equal sizes (the default) all
    are assigned. A wish for a class that has run out is met from the classes that are left, at random.

    Args:
      labels: int `[M]`.
      num_clients: N.
      concentration: above 0; the smaller, the fewer classes a client sees.
      seed: an integer or a numpy generator.
      sizes: int `[N]`, at least 1 each, with a sum of at most M; equal shares of everything when not given.
    """
    labels = _labels(labels)
    checks.positive("concentration", concentration)
    _clients(num_clients, len(labels))
    sizes = _even(len(labels), num_clients) if sizes is None else np.asarray(sizes, np.int64)
    if sizes.shape != (num_clients,) or sizes.min() < 1 or sizes.sum() > len(labels):
        raise ValueError(
            f"sizes must be N={num_clients} counts of at least 1 with a sum of at most M={len(labels)}, "
            f"not {sizes.shape} with sum {sizes.sum()}"
        )
    rng = np.random.default_rng(seed)
    counts = np.bincount(labels)
    present = np.flatnonzero(counts)
    mix = rng.dirichlet(concentration * counts[present] / len(labels) * len(present), num_clients)
    wishes = rng.multinomial(sizes, mix)
    owner = np.repeat(np.arange(num_clients), sizes)
    wanted = np.repeat(np.tile(present, num_clients), wishes.ravel())
    # Wishes in random order inside each class meet the samples of the class in random order.
    queue = _grouped(wanted, rng)
    rank = _rank_in_runs(np.bincount(wanted, minlength=len(counts)))
    met = rank < counts[wanted[queue]]
    begin = np.cumsum(counts) - counts
    samples = _grouped(labels, rng)
    place = begin[wanted[queue]][met] + rank[met]
    left = np.ones(len(samples), bool)
    left[place] = False
    given = np.empty(len(wanted), np.int64)
    given[queue[met]] = samples[place]
    given[queue[~met]] = rng.permutation(samples[left])[: int((~met).sum())]
    return _collect(given, owner, num_clients)


def dominant_groups(
    labels: Any,
    num_clients: int,
    *,
    groups: Sequence[Sequence[int]],
    size: int,
    uniform: float = 0.2,
    first: int = 0,
    share: bool = False,
    num_classes: int | None = None,
) -> Partition:
    """Clients of one size: a share uniform over all classes, the rest from a group of dominant classes (FedPAC, ICLR 2023).

    Client i has group i mod len(groups). Of its `size` samples int(uniform * size) are spread evenly over all K classes, the
    others evenly over the group; what does not divide goes to the last class. Samples are taken one after the other from each
    class, so the result is a function of the labels' order; shuffle the data set beforehand for another draw.

    Args:
      labels: int `[M]`.
      num_clients: N.
      groups: classes of each group.
      size: samples of each client.
      uniform: share that is spread over all classes, between 0 and 1.
      first: sample of each class to begin with; counting goes on from the first one after the last.
      share: whether a class that is asked for more samples than it has may give some to several clients. The authors' code
        does so silently.
      num_classes: K; `max(labels) + 1` when not given.

    Raises:
      ValueError: a class that is too small (unless `share`), groups that name unknown classes.
    """
    labels = _labels(labels)
    checks.count("num_clients", num_clients)
    checks.count("size", size)
    checks.count("first", first, least=0)
    if not 0 <= uniform <= 1:
        raise ValueError(f"uniform={uniform} must lie between 0 and 1")
    num_classes = int(labels.max()) + 1 if num_classes is None else num_classes
    if not groups or any(len(group) == 0 or min(group) < 0 or max(group) >= num_classes for group in groups):
        raise ValueError(f"groups must be lists of classes in [0, {num_classes}), not {groups}")
    counts = np.bincount(labels, minlength=num_classes)
    common = int(uniform * size)
    wishes = np.zeros((len(groups), num_classes), np.int64)
    for wish, group in zip(wishes, groups, strict=True):
        for amount, among in ((common, list(range(num_classes))), (size - common, list(group))):
            wish[among] += amount // len(among)
            wish[among[-1]] += amount % len(among)
    parts = wishes[np.arange(num_clients) % len(groups)]
    asked = parts.sum(0)
    short = int(np.argmax(asked - counts))
    if asked[short] > counts[short] and (not share or counts[short] == 0):
        raise ValueError(
            f"class {short} has {counts[short]} samples, but the clients ask for {asked[short]}; "
            "take fewer or smaller clients, or allow them to share samples with share=True (--share)"
        )
    begin = np.cumsum(counts) - counts
    offset = first + np.cumsum(parts, 0) - parts
    within = _runs(offset.ravel(), parts.ravel())
    cell = np.repeat(np.tile(np.arange(num_classes), num_clients), parts.ravel())
    return Partition(np.argsort(labels, kind="stable")[begin[cell] + within % counts[cell]], parts.sum(1))


def natural(features: Any, *, least: int = 1) -> Partition:
    """One client for each value of a feature of the data set (writer, user, site), in the sorted order of the values.

    Every sample of a client that has at least `least` samples is assigned once; smaller clients are left out, as LEAF does
    (Caldas et al., arXiv 1812.01097).

    Args:
      features: `[M]`, integers or strings.
      least: samples that a client must have.

    Example:
      >>> part = natural(np.array(["b", "a", "b"]))
      >>> part.order.tolist(), part.sizes.tolist()
      ([1, 0, 2], [1, 2])
    """
    features = np.asarray(features)
    checks.count("least", least)
    if features.ndim != 1 or features.size == 0 or features.dtype == object:
        raise ValueError(f"features must be integers or strings [M], not {features.dtype} {features.shape}")
    _, client, sizes = np.unique(features, return_inverse=True, return_counts=True)
    order = np.argsort(client, kind="stable")
    keep = sizes >= least
    if not keep.any():
        raise ValueError(f"no client has least={least} samples; the largest has {sizes.max()}")
    return Partition(order[np.repeat(keep, sizes)], sizes[keep])


def _labels(labels: Any) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels must be integers [M] with M >= 1, not {labels.dtype} {labels.shape}; "
            "np.unique(labels, return_inverse=True)[1] numbers any labels"
        )
    if labels.min() < 0:
        raise ValueError(f"labels must not be negative, but one is {labels.min()}")
    return labels


def _clients(num_clients: int, samples: int, least: int = 1) -> None:
    checks.count("num_clients", num_clients)
    if num_clients * least > samples:
        raise ValueError(
            f"num_clients={num_clients} with at least {least} samples each need more than the M={samples} there are"
        )


def _slots(slots: Any, labels: np.ndarray) -> np.ndarray:
    slots = np.asarray(slots)
    if slots.ndim != 2 or slots.size == 0 or not np.issubdtype(slots.dtype, np.integer) or slots.min() < 0:
        raise ValueError(f"slots must be classes [N, J], not {slots.dtype} {slots.shape}")
    if (np.diff(np.sort(slots, axis=1), axis=1) == 0).any():
        raise ValueError("slots name a class twice for one client")
    missing = np.setdiff1d(slots, labels)
    if missing.size:
        raise ValueError(f"slots name class {missing[0]}, of which there are no samples")
    return slots


def _even(total: int, parts: int) -> np.ndarray:
    """int64 `[parts]`: sizes that differ by at most 1, the larger ones first."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _cut(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Whole parts `[K, N]` of `totals [K]` by rounded cumulative `shares [K, N]`; each row sums to its total."""
    ends = np.rint(np.cumsum(shares, 1) * totals[:, None]).astype(np.int64)
    ends[:, -1] = totals
    return np.diff(np.minimum(ends, totals[:, None]), axis=1, prepend=0)


def _runs(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The numbers `begin[i] .. begin[i] + length[i] - 1` of every run, one run after the other."""
    return np.repeat(begin, length) + _rank_in_runs(length)


def _rank_in_runs(length: np.ndarray) -> np.ndarray:
    return np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)


def _grouped(group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions sorted by group and in random order inside each."""
    random_order = rng.permutation(len(group))
    if group.max() < 2**16:
        # numpy sorts words of 16 bits by radix, in linear time.
        return random_order[np.argsort(group[random_order].astype(np.uint16), kind="stable")]
    # A random rank and its group in one word: one sort instead of one a group.
    return np.argsort(group.astype(np.int64) * len(group) + random_order)


def _collect(samples: np.ndarray, owner: np.ndarray, num_clients: int) -> Partition:
    return Partition(samples[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=num_clients))


def _deal(labels: np.ndarray, slots: np.ndarray, parts: np.ndarray) -> Partition:
    """Deals each class out in its order: `parts [N, J]` samples of class `slots [N, J]`, clients in order."""
    sizes = parts.sum(1)
    if sizes.min() < 1:
        raise ValueError(f"client {int(np.argmin(sizes))} would be empty: too few samples of its classes for so many clients")
    counts = np.bincount(labels, minlength=slots.max() + 1)
    begin = np.cumsum(counts) - counts
    flat, length = slots.ravel(), parts.ravel()
    queue = np.argsort(flat, kind="stable")
    ahead = np.cumsum(length[queue]) - length[queue]
    held = np.bincount(flat, weights=length, minlength=len(counts)).astype(np.int64)
    offset = np.empty_like(length)
    offset[queue] = ahead - (np.cumsum(held) - held)[flat[queue]]
    return Partition(np.argsort(labels, kind="stable")[_runs(begin[flat] + offset, length)], sizes)


def _filled_up(owner: np.ndarray, num_clients: int, least: int, rng: np.random.Generator) -> np.ndarray:
    """`owner [S]` after clients with fewer than `least` samples got random ones of clients that have more."""
    sizes = np.bincount(owner, minlength=num_clients)
    lack = np.maximum(least - sizes, 0)
    if not lack.any():
        return owner
    queue = _grouped(owner, rng)
    spare = queue[_rank_in_runs(sizes) >= least]
    owner = owner.copy()
    owner[rng.permutation(spare)[: lack.sum()]] = np.repeat(np.arange(num_clients), lack)
    return owner
