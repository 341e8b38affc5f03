"""The data protocol of each paper as one call: training clients, their local tests, new clients and views.

Papers: S0 FedMeta-Per (Nguyen, Cao), S2 FedPAC (ICLR 2023), S3 Per-FedAvg-Reptile (Xia, Cui), S4 MTFL (arXiv 2007.09236).
Axis letters: M samples of the data set, N clients, S samples that clients hold, K classes.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import partition, synthetic, transforms
from fedjax_meta.data.federated import FederatedData, federate, train_test_views
from fedjax_meta.data.partition import Partition
from fedjax_meta.data.sources import Source

SCALINGS = ("pixel", "half", "unit", "cifar")
PAIRINGS = {"2u+j": 2, "u+j": 1}
FEDPAC_GROUPS = {
    10: ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0)),
    62: (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62))),
}
"""Dominant classes by the number of classes: ten, and EMNIST's digits, capitals and small letters."""


class Protocol(NamedTuple):
    """What a paper trains and tests on.

    Attributes:
      train: the training clients, with views "train", "support", "query", "test", "test_support" and "test_query".
      new: clients that never train, with views "support" and "query"; `None` where the paper has none.
      name: of the protocol and the data set, for tables.
      note: what a reader of results should know, one line; may be empty.
      noisy: int64, the clients whose training inputs are noisy and whose accuracy is left out of S4's averages.
    """

    train: FederatedData
    new: FederatedData | None
    name: str
    note: str = ""
    noisy: np.ndarray = np.zeros(0, np.int64)


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
    `sizes="lognormal"`) train. Each part is shuffled and cut into 20 % support and 80 % query. The new clients share the
    pooled test parts: the labels are permuted until no new client has the pair of a training client, and each class is cut
    anew by stick-breaking.

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


def fedpac(
    source: Source,
    *,
    seed: int = 2022,
    num_clients: int = 20,
    size: int | None = None,
    test_size: int | None = None,
    uniform: float = 0.2,
    groups: Any = None,
    share: bool = False,
    concept_groups: int = 1,
    scaling: str | None = None,
    support: float = 0.2,
) -> Protocol:
    """Protocol of S2: clients of one size, a share uniform over all classes and the rest from a group of dominant classes.

    Training clients are cut from the official training split, their tests by the same rule from the official test split. Both
    splits are shuffled by the seed first; as in the authors' code, counting begins at sample 2,000 of each class of CIFAR-10's
    training split and 500 of its test split.

    Args:
      source: the data set.
      seed: fixes the samples; 2022 is the authors'.
      num_clients: N; client i has group i mod len(groups).
      size: training samples of a client; 600, and 1,000 for EMNIST, when not given.
      test_size: test samples of a client; when not given 300 for CIFAR-10 and CINIC-10, 600 for EMNIST, else `size`.
      uniform: the paper's s.
      groups: dominant classes of each group; the paper's for 10 and 62 classes when not given.
      share: whether clients may share samples where a class runs out, as in the authors' code; an error otherwise.
      concept_groups: with 2 or more, clients i mod `concept_groups` read the labels by a permutation of their own (concept
        shift; the authors' construction is not public).
      scaling: see `pixel_scaling`; `"cifar"` for three channels and `"unit"` otherwise when not given. The random crops and
        flips of training batches are `transforms.crop_and_flip`.
      support: share of each part that goes to the support view, for systems that need one.
    """
    emnist = source.name.startswith("emnist")
    size = (1000 if emnist else 600) if size is None else size
    if test_size is None:
        test_size = 300 if source.name in ("cifar10", "cinic10") else 600 if emnist else size
    if groups is None:
        if source.num_classes not in FEDPAC_GROUPS:
            raise ValueError(f"groups must be given for {source.num_classes} classes; the paper has them for 10 and 62")
        groups = FEDPAC_GROUPS[source.num_classes]
    rng = np.random.default_rng(seed)
    parts = []
    for y, amount, first in ((source.y_train, size, 2000), (source.y_test, test_size, 500)):
        mixed = rng.permutation(len(y))
        part = partition.dominant_groups(
            y[mixed],
            num_clients,
            groups=groups,
            size=amount,
            uniform=uniform,
            first=first if source.name == "cifar10" else 0,
            share=share,
            num_classes=source.num_classes,
        )
        parts.append(Partition(mixed[part.order], part.sizes).shuffled(rng))
    color = source.x_train.shape[-1] == 3
    scale = pixel_scaling(source.x_train, ("cifar" if color else "unit") if scaling is None else scaling)
    data = _with_local_tests(source, *parts, support=support, **scale)
    if concept_groups > 1:
        data = transforms.concept_shift(data, num_groups=concept_groups, seed=rng)
    return Protocol(on_device(data), None, f"FedPAC on {source.name}", source.note)


def reptile(
    source: Source,
    *,
    seed: int = 1,
    num_clients: int = 50,
    concentration: float = 0.5,
    least: int = 10,
    scaling: str = "unit",
) -> Protocol:
    """Protocol of S3 on images: Dirichlet shares; 70 % of a client's samples train, of the rest 30 % adapt and 70 % test.

    Both official splits are pooled. "test_support" is the part for the one adaptation step, "test_query" the one that is
    scored; the training part is cut alike for systems that need support and query.

    Args:
      source: the data set.
      seed: fixes shares and shuffles.
      num_clients: N.
      concentration: of the Dirichlet shares of each class.
      least: samples that every client has at least, 5 or more.
      scaling: see `pixel_scaling`.
    """
    checks.count("least", least, least=5)
    x, y = source.pooled()
    rng = np.random.default_rng(seed)
    held = partition.dirichlet_classes(y, num_clients, concentration=concentration, seed=rng, least=least).shuffled(rng)
    views = train_test_views(held.sizes, train=0.7, support=0.3)
    data = federate(x, y, *held, num_classes=source.num_classes, views=views, **pixel_scaling(x, scaling))
    return Protocol(on_device(data), None, f"Per-FedAvg-Reptile on {source.name}", source.note)


def reptile_synthetic(model_spread: float, data_spread: float, *, seed: int = 1, spread: str = "variance") -> Protocol:
    """Protocol of S3 on synthetic(δ, θ): 30 clients of 100 to 1,000 samples, with the views of `reptile`.

    Which four pairs (δ, θ) the paper took is unknown. `spread` is as in `synthetic.synthetic`.
    """
    data = synthetic.synthetic(model_spread, data_spread, seed=seed, spread=spread)
    return Protocol(on_device(data), None, f"Per-FedAvg-Reptile on synthetic({model_spread:g}, {data_spread:g})")


def mtfl(
    source: Source,
    *,
    seed: int = 1,
    num_clients: int = 200,
    noisy: float = 0.0,
    noise: float | None = None,
    support: float = 0.2,
) -> Protocol:
    """Protocol of S4: two shards a client, the test split cut and dealt alike, pixels in [0, 1], some clients noisy.

    Where shards do not divide a split, the longer ones come first, as in the authors' code. With 400 clients the test shards
    so drift against the classes: about 7 % of the local test samples are of classes that the client has not trained on.

    Args:
      source: the data set.
      seed: fixes deal, noisy clients and noise.
      num_clients: W, 200 or 400 in the paper.
      noisy: share of clients whose training images (never the tests) get Gaussian noise; 0.2 in the paper's noise experiment.
      noise: its standard deviation in units of the [0, 1] images; when not given 0.2 for three channels (CIFAR-10), else 3.0.
      support: share of each part that goes to the support view, for systems that need one.

    Returns:
      A `Protocol` whose `noisy` names the noisy clients. `local_steps` gives the paper's steps of an epoch.
    """
    if not 0 <= noisy <= 1:
        raise ValueError(f"noisy={noisy} must lie between 0 and 1")
    rng = np.random.default_rng(seed)
    dealt = partition.shard_assignment(num_clients, seed=rng)
    parts = [partition.shards(y, dealt, uneven=True).shuffled(rng) for y in (source.y_train, source.y_test)]
    data = _with_local_tests(source, *parts, support=support, **pixel_scaling(source.x_train, "unit"))
    chosen = np.sort(rng.permutation(num_clients)[: round(noisy * num_clients)])
    if chosen.size:
        std = np.zeros(num_clients)
        std[chosen] = (0.2 if source.x_train.shape[-1] == 3 else 3.0) if noise is None else noise
        data = transforms.add_noise(data, std, seed=rng)
    return Protocol(on_device(data), None, f"MTFL on {source.name}", source.note, chosen)


def local_steps(samples: int, num_clients: int, batch_size: int = 20) -> int:
    """Steps of one local epoch in S4: samples / (W B), rounded half to even; the same for all clients.

    Example:
      >>> [local_steps(60_000, 200), local_steps(60_000, 400), local_steps(50_000, 200), local_steps(50_000, 400)]
      [15, 8, 12, 6]
    """
    for name, value in (("samples", samples), ("num_clients", num_clients), ("batch_size", batch_size)):
        checks.count(name, value)
    return max(round(samples / (num_clients * batch_size)), 1)


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
        standardisation; S0's published MNIST numbers need it); `"half"`: mean and standard deviation 0.5 for all channels;
        `"unit"`: to [0, 1]; `"cifar"`: the usual means and standard deviations of CIFAR's three channels.

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
    if scaling == "cifar":
        if x.shape[-1] != 3:
            raise ValueError(f"scaling='cifar' is for images of 3 channels, not {x.shape[-1]}")
        mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
        return {"offset": (255 * mean).astype(np.float32), "scale": (1 / (255 * deviation)).astype(np.float32)}
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


def _with_local_tests(source: Source, train: Partition, test: Partition, *, support: float, **scale: Any) -> FederatedData:
    """Training clients from the training split with local tests from the test split, and the views of `train_test_views`."""
    checks.fraction("support", support)
    x, y = source.pooled()
    owner = np.concatenate([train.owner(), test.owner()])
    order = np.concatenate([train.order, len(source.y_train) + test.order])[np.argsort(owner, kind="stable")]
    sizes, cut = train.sizes + test.sizes, train.sizes
    inner = np.maximum((cut * support + 1e-9).astype(np.int64), 1)
    outer = cut + np.maximum((test.sizes * support + 1e-9).astype(np.int64), 1)
    zero = np.zeros_like(cut)
    views = {
        "train": (zero, cut),
        "support": (zero, inner),
        "query": (inner, cut),
        "test": (cut, sizes),
        "test_support": (cut, outer),
        "test_query": (outer, sizes),
    }
    return federate(x, y, order, sizes, num_classes=source.num_classes, views=views, **scale)


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
