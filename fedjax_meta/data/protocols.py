"""The data protocol of each paper as one call: training clients, their local tests, new clients and views.

Papers: S0 FedMeta-Per (Nguyen, Cao), S2 FedPAC (ICLR 2023), S3 Per-FedAvg-Reptile (Xia, Cui), S4 MTFL (arXiv 2007.09236).
Axis letters: M samples of the data set, N clients, S samples that clients hold, K classes.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import partition
from fedjax_meta.data.federated import FederatedData, federate, train_test_views
from fedjax_meta.data.partition import Partition
from fedjax_meta.data.sources import Source

SCALINGS = ("pixel", "half", "unit")
PAIRINGS = {"2u+j": 2, "u+j": 1}


class Protocol(NamedTuple):
    """What a paper trains and tests on.

    Attributes:
      train: the training clients, with views "train", "support", "query", "test", "test_support" and "test_query".
      new: clients that never train, with views "support" and "query"; `None` where the paper has none.
      name: of the protocol and the data set, for tables.
      note: what a reader of results should know, one line; may be empty.
    """

    train: FederatedData
    new: FederatedData | None
    name: str
    note: str = ""


def fedmeta_per(
    source: Source,
    *,
    seed: int = 1,
    num_clients: int = 50,
    pairing: str | None = None,
    sizes: str | None = None,
    scaling: str | None = None,
    least: int | None = None,
) -> Protocol:
    """Protocol of S0: 50 clients with two classes each and unequal sizes, and 50 new clients with other pairs of classes.

    Both official splits are pooled, cut by class, and 75 % of each client's samples (shuffled; stratified by class for
    `sizes="lognormal"`) train. Each part is shuffled and cut into 20 % support and 80 % query. The new clients share the pooled
    test parts: the labels are permuted until no new client has the pair of a training client, and each class is cut anew by
    stick-breaking.

    Args:
      source: the data set.
      seed: fixes sizes, pairs and shuffles; 1 gives the sizes of S0's Table 2.
      num_clients: N.
      pairing: which classes client u has in slot j: `"2u+j"` (five pairs) or `"u+j"` (ten), modulo K. Without it, `"u+j"` for
        lognormal sizes and `"2u+j"` otherwise.
      sizes: `"stick"` or `"lognormal"` (see `partition.stick_breaking`, `partition.lognormal_classes`). Without it, lognormal
        for CIFAR-10 and stick-breaking otherwise.
      scaling: see `pixel_scaling`; without it, `"half"` for CIFAR-10 and `"pixel"` otherwise.
      least: samples of each of its classes that every client holds at least (stick-breaking). Without it 0, as published, for
        classes of 1,000 samples and more; a third of an equal share in smaller sets, whose smallest clients would be empty.

    Returns:
      A `Protocol`; arrays are on the default device, images as uint8.

    Raises:
      ValueError: an unknown option, or a data set too small for the clients and their views.
    """
    cifar = source.name == "cifar10"
    sizes = ("lognormal" if cifar else "stick") if sizes is None else sizes
    checks.one_of("sizes", sizes, ("stick", "lognormal"))
    pairing = ("u+j" if sizes == "lognormal" else "2u+j") if pairing is None else pairing
    checks.one_of("pairing", pairing, PAIRINGS)
    x, y = source.pooled()
    slots = partition.class_slots(num_clients, source.num_classes, stride=PAIRINGS[pairing])
    if sizes == "lognormal":
        held = partition.lognormal_classes(y, slots, seed=seed)
    else:
        held = partition.stick_breaking(y, slots, seed=seed, least=_least(y, slots, least))
    shuffle, deal = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    held = held.shuffled(shuffle)
    if sizes == "lognormal":
        held = _stratified(held, y, 0.75, shuffle)
    scale = pixel_scaling(x, ("half" if cifar else "pixel") if scaling is None else scaling)
    views = train_test_views(held.sizes)
    train = federate(x, y, *held, num_classes=source.num_classes, views=views, **scale)

    pool = deal.permutation(held.order[_inside(held.sizes, *views["test"])])
    new_slots = unlike_slots(slots, source.num_classes, deal)
    recut = partition.stick_breaking(y[pool], new_slots, seed=seed, least=_least(y[pool], new_slots, least)).shuffled(deal)
    cut = np.maximum(recut.sizes // 5, 1)
    new_views = {"support": (np.zeros_like(cut), cut), "query": (cut, recut.sizes)}
    new = federate(x, y, pool[recut.order], recut.sizes, num_classes=source.num_classes, views=new_views, **scale)
    return Protocol(on_device(train), on_device(new), f"FedMeta-Per on {source.name}", source.note)


def fedmeta_per_iid(
    source: Source, *, seed: int = 1, num_clients: int = 50, train: float = 0.75, scaling: str | None = None
) -> FederatedData:
    """The IID control of S0: all samples of both splits to clients of equal size, with the views of `fedmeta_per`.

    `num_clients=1, train=0.8` is the authors' centralised split.

    Returns:
      Clients with views "train", "support", "query", "test", "test_support" and "test_query".
    """
    x, y = source.pooled()
    held = partition.iid(y, num_clients, seed=np.random.default_rng([seed, 2]))
    scale = pixel_scaling(x, ("half" if source.name == "cifar10" else "pixel") if scaling is None else scaling)
    views = train_test_views(held.sizes, train=train)
    return on_device(federate(x, y, *held, num_classes=source.num_classes, views=views, **scale))


def pooled(data: FederatedData) -> FederatedData:
    """All clients' samples as those of one client, view by view: what a centralised system trains and is tested on.

    Args:
      data: clients with the views of `train_test_views`.

    Returns:
      One client with the same views, each the union of the clients' views.

    Example:
      >>> from fedjax_meta.data.federated import from_clients
      >>> one = pooled(from_clients([(np.zeros((20, 3)), np.arange(20) % 2), (np.ones((40, 3)), np.arange(40) % 2)]))
      >>> one.num_clients, one.sizes("train").tolist(), one.sizes("test_query").tolist()
      (1, [45], [12])
    """
    parts = ("support", "query", "test_support", "test_query")
    base = np.zeros(1, np.int64)
    begin, size = {}, {}
    pieces = []
    for name in parts:
        start, length = np.asarray(data.start[name], np.int64), np.asarray(data.sizes(name), np.int64)
        pieces.append(_inside_runs(start, length))
        begin[name], size[name] = base, base + length.sum()
        base = size[name]
    views = {name: (begin[name], size[name]) for name in parts}
    views = {"train": (begin["support"], size["query"]), "test": (begin["test_support"], size["test_query"]), **views}
    order = np.concatenate(pieces)
    return on_device(
        federate(
            np.asarray(data.x),
            np.asarray(data.y),
            order,
            base,
            num_classes=data.num_classes,
            views={name: views[name] for name in data.views},
            offset=data.offset,
            scale=data.scale,
        )
    )


def pixel_scaling(x: np.ndarray, scaling: str) -> dict[str, Any]:
    """The `offset` and `scale` of `federate` that turn stored pixels into the numbers a model reads; the images stay uint8.

    Args:
      x: uint8 images `[M, height, width, channels]`.
      scaling: `"pixel"`: each pixel less its mean over all images, by its standard deviation + 0.001 in grey levels (pFedMe's
        standardisation; S0's published MNIST numbers need it); `"half"`: mean 0.5 and standard deviation 0.5 for every channel;
        `"unit"`: to [0, 1].

    Raises:
      ValueError: an unknown scaling, inputs that are not uint8.

    Example:
      >>> pixel_scaling(np.zeros((4, 2, 2, 1), np.uint8), "half")
      {'offset': 127.5, 'scale': 0.00784313725490196}
    """
    checks.one_of("scaling", scaling, SCALINGS)
    if x.dtype != np.uint8:
        raise ValueError(f"scaling={scaling!r} is for uint8 images, not {x.dtype}; scale other inputs before")
    if scaling == "unit":
        return {"offset": 0.0, "scale": 1 / 255}
    if scaling == "half":
        return {"offset": 127.5, "scale": 1 / 127.5}
    # Sums of integers: exact, so the result does not depend on the order of the samples.
    total, square = np.zeros(x.shape[1:], np.int64), np.zeros(x.shape[1:], np.int64)
    for begin in range(0, len(x), 2048):
        chunk = x[begin : begin + 2048].astype(np.uint32)
        total += chunk.sum(0, dtype=np.uint32)
        square += np.square(chunk, out=chunk).sum(0, dtype=np.uint32)
    mean = total / len(x)
    deviation = np.sqrt(np.maximum(square / len(x) - mean**2, 0))
    return {"offset": mean.astype(np.float32), "scale": (1 / (deviation + 1e-3)).astype(np.float32)}


def unlike_slots(slots: np.ndarray, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Classes of new clients `[N, 2]`: neighbours in a random order of the classes, no pair equal to one of `slots [N, 2]`.

    Raises:
      ValueError: no such order was found among 10,000 draws; there are too few classes.
    """
    old = {frozenset(pair) for pair in slots.tolist()}
    place = partition.class_slots(len(slots), num_classes, stride=1)
    for _ in range(10_000):
        new = rng.permutation(num_classes)[place]
        if old.isdisjoint(map(frozenset, np.unique(new, axis=0).tolist())):
            return new
    raise ValueError(f"with {num_classes} classes no pairs are left for new clients that no training client has")


def on_device(data: FederatedData) -> FederatedData:
    """The same data with its arrays on the default device."""
    return jax.tree.map(jax.numpy.asarray, data)


def _least(y: np.ndarray, slots: np.ndarray, least: int | None) -> int:
    if least is not None:
        return least
    counts = np.bincount(y, minlength=int(slots.max()) + 1)
    holders = np.bincount(slots.ravel(), minlength=len(counts))
    smallest = counts[holders > 0].min()
    return 0 if smallest >= 1000 else int((counts // np.maximum(3 * holders, 1))[holders > 0].min())


def _inside(sizes: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Positions in a partition's order of a view that runs from `begin` to `end [N]` inside each client."""
    return _inside_runs(np.cumsum(sizes) - sizes + begin, end - begin)


def _inside_runs(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    return np.repeat(start - (np.cumsum(length) - length), length) + np.arange(length.sum())


def _stratified(held: Partition, y: np.ndarray, train: float, rng: np.random.Generator) -> Partition:
    """Reorders each client's samples so that the first int(train * size) hold every class in the client's proportion.

    A class gets the rounded-down part of its share; the places that are left go to the largest remainders.
    """
    owner, labels = held.owner(), y[held.order]
    order = []
    for u in range(len(held.sizes)):
        mine, classes = held.order[owner == u], labels[owner == u]
        present, counts = np.unique(classes, return_counts=True)
        share = counts * (int(train * len(mine)) / len(mine))
        quota = share.astype(np.int64)
        quota[np.argsort(quota - share, kind="stable")[: int(train * len(mine)) - quota.sum()]] += 1
        first = np.zeros(len(mine), bool)
        for c, q in zip(present, quota, strict=True):
            first[np.flatnonzero(classes == c)[:q]] = True
        order += [rng.permutation(mine[first]), rng.permutation(mine[~first])]
    return Partition(np.concatenate(order), held.sizes)
