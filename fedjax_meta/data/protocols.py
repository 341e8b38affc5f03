"""The data protocol of each paper as one function: training clients, their local tests, new clients and views.

Papers: FedMeta-Per (Nguyen and Cao), FL with MAML and iMAML (Nguyen et al.), FedPAC (Xu, Tong and Huang, ICLR 2023),
Per-FedAvg-Reptile (Xia and Cui), MTFL (Mills, Hu and Min, arXiv 2007.09236). Axis letters: M samples of the data set, N clients,
S samples that clients hold, K classes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import partition, runs, slots, synthetic, transforms
from fedjax_meta.data.builders import from_partition, nested_views, train_test_views
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.data.holdout import with_views
from fedjax_meta.data.partition import Partition
from fedjax_meta.data.scaling import Scaling, pixel_scaling
from fedjax_meta.data.sources import Source
from fedjax_meta.data.views import check_view

PAIRINGS = {"2u+j": 2, "u+j": 1}
"""The pairings of FedMeta-Per, as strides of `slots.class_slots`."""

SUPPORT = 0.2
"""Share of a client's samples for adaptation in FedMeta-Per and in FL with MAML and iMAML."""

REPTILE_SUPPORT = 0.3
"""The same in Per-FedAvg-Reptile."""

FEDPAC_GROUPS = {
    10: ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0)),
    62: (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62))),
}
"""FedPAC's groups of dominant classes for 10 classes, and for the 62 of EMNIST: digits, capitals and small letters."""


class Protocol(NamedTuple):
    """The data that a paper trains and tests on.

    Attributes:
      train: the training clients, with views "train", "support", "query", "test", "test_support" and "test_query".
      new: clients that never train, with views "support" and "query"; `None` if the paper has none.
      name: of the protocol and the data set, for tables.
      note: one line that belongs next to results on these data; may be empty.
      noisy: int64, the clients whose training inputs are noisy. MTFL leaves them out of its average accuracies.
      orders: how many draws of the new clients `new` holds one after the other, each of the same number of clients.
      names: of the training clients and of the new ones, where the data set has them; else empty.
      targets: what targets that are no classes are, `targets.REAL` or `targets.LABELS`, where a file says it by their type.
      support: share of the training and of the test part that is for adaptation.
    """

    train: FederatedData
    new: FederatedData | None
    name: str
    note: str = ""
    noisy: np.ndarray = np.zeros(0, np.int64)
    orders: int = 1
    targets: str = ""
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    support: float = SUPPORT


def fedmeta_per_clients(
    source: Source,
    *,
    seed: int = 1,
    num_clients: int = 50,
    pairing: str | None = None,
    sizes: str | None = None,
    sizes_seed: int | None = None,
    samples: str = "first",
    scaling: str | None = None,
    min_samples: int | None = None,
    newcomers: str = "as published",
    new_sizes: str | None = None,
    orders: int | Sequence[Sequence[int]] = 1,
) -> Protocol:
    """FedMeta-Per: 50 clients with two classes each and unequal sizes, and 50 new clients with pairs of their own.

    Both official splits are pooled and cut by class. Each client's samples are shuffled, and 75 % of them train (stratified by
    class for `sizes="lognormal"`). The training and the test part are each cut into 20 % support and 80 % query. The new
    clients share the pooled test parts: the labels are put in random order, a new client gets two neighbours in it, and each
    class is cut again, as for the clients that train. The results of new clients depend on the order, so that a report needs
    several.

    Args:
      source: the data set.
      seed: determines sizes, pairs and shuffles; 1 gives the sizes of the paper's Table 2.
      num_clients: N.
      pairing: the class of slot j of client u: `"2u+j"` (five pairs) or `"u+j"` (ten pairs), modulo K. If not given, `"u+j"`
        for lognormal sizes and `"2u+j"` otherwise.
      sizes: `"stick"`, `"stick in turn"` or `"lognormal"` (see `slots.stick_breaking`, `slots.lognormal_classes`). If not given,
        lognormal for CIFAR-10 and stick-breaking otherwise. The published runs on MNIST had `"stick in turn"` and `"u+j"`, where
        clients share samples. The test parts that new clients share then hold samples several times, and the note says how many
        of their queries are also in their own support.
      sizes_seed: determines the sizes in place of `seed`, so that other draws of the samples keep them.
      samples: with `"stick in turn"`, which samples of its class a slot takes: the `"first"` ones, or others at `"random"`.
      scaling: see `pixel_scaling`; if not given, `"half"` for CIFAR-10 and `"pixel"` otherwise.
      min_samples: minimum number of samples of each of its classes that a client holds (stick-breaking). If not given, 0 as
        published if all classes have 1,000 samples or more; otherwise a third of an equal share, because the smallest clients
        would be empty.
      newcomers: see `slots.new_client_slots`.
      new_sizes: of new clients, `"stick"` or `"lognormal"`. If not given, lognormal where `sizes` is. The authors' code makes new
        clients for MNIST alone, by stick-breaking. The published scores of CIFAR-10's new clients are nearly the same over
        samples and over clients, which sizes from stick-breaking do not give (docs/papers_errors.md).
      orders: how many orders of the labels are drawn for new clients, or the orders themselves `[orders, K]`. The N new clients
        of an order share the test parts.

    Returns:
      A `Protocol`; arrays are on the default device, images are uint8. Its new clients stand order by order.

    Raises:
      ValueError: an unknown option, or a data set too small for the clients and their views.
    """
    _check(source, seed)
    cifar = source.name == "cifar10"
    sizes = ("lognormal" if cifar else "stick") if sizes is None else sizes
    checks.one_of("sizes", sizes, ("stick", "stick in turn", "lognormal"))
    sizes_seed = seed if sizes_seed is None else sizes_seed
    checks.seed("sizes_seed", sizes_seed, bits=32)
    checks.one_of("samples", samples, ("first", "random"))
    if samples == "random" and sizes != "stick in turn":
        raise ValueError(f'samples="random" needs sizes="stick in turn", where clients share samples; sizes is {sizes!r}')
    pairing = ("u+j" if sizes == "lognormal" else "2u+j") if pairing is None else pairing
    checks.one_of("pairing", pairing, PAIRINGS)
    new_sizes = ("lognormal" if sizes == "lognormal" else "stick") if new_sizes is None else new_sizes
    checks.one_of("new_sizes", new_sizes, ("stick", "lognormal"))
    x, y = source.pooled()
    scale = pixel_scaling(x, _fedmeta_per_scaling(source, scaling))
    pairs = slots.class_slots(num_clients, source.num_classes, stride=PAIRINGS[pairing])
    if sizes == "lognormal":
        held = slots.lognormal_classes(y, pairs, seed=sizes_seed)
    else:
        least = _min_samples(y, pairs, min_samples)
        drawn = seed if samples == "random" else None
        held = slots.stick_breaking(
            y, pairs, seed=sizes_seed, min_samples=least, in_turn=sizes == "stick in turn", at_random=drawn
        )
    shuffle_rng, new_rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    held = held.shuffled(shuffle_rng)
    if sizes == "lognormal":
        held = _stratified(held, y, 0.75, shuffle_rng)
    pool = new_rng.permutation(_tests(held))
    found = _new_pairs(pairs, source.num_classes, new_rng, newcomers, orders, num_clients)
    parts = []
    for new_pairs in found:
        if new_sizes == "lognormal":
            part = slots.lognormal_classes(y[pool], new_pairs, seed=sizes_seed)
        else:
            part = _stick_of_new(y[pool], new_pairs, sizes_seed, min_samples, pairs.size // source.num_classes)
        part = part.shuffled(new_rng)
        parts.append(Partition(pool[part.order], part.sizes))
    return _with_newcomers(source, x, y, held, parts, [pairs, *found], scale, f"FedMeta-Per on {source.name}")


def fl_imaml_clients(
    source: Source,
    *,
    seed: int = 1,
    num_clients: int = 50,
    num_new: int = 30,
    orders: int | Sequence[Sequence[int]] = 1,
    scaling: str = "unit",
    misread: bool = False,
    min_samples: int | None = None,
) -> Protocol:
    """FL with MAML and iMAML (Nguyen et al.): two classes a client, neighbours in a random order of the labels, and new clients.

    As `fedmeta_per_clients` with sizes from stick-breaking, but also the clients that train have neighbours in a random order of
    the labels, and a new client's support is a fifth of each of its classes. The authors' clients train on 75 % of all samples
    and have no tests; the other 25 % are the new clients'. Here these are also the local tests, which new clients share.

    Args:
      source: the data set.
      seed: determines sizes, pairs and shuffles.
      num_clients: N.
      num_new: new clients of each order.
      orders: how many orders of the labels are drawn for new clients, or the orders themselves `[orders, K]`.
      scaling: see `pixel_scaling`.
      misread: whether images, which are stored as [height, width, channels], are read as [channels, height, width]. The authors'
        CIFAR-10 is (`cifar_loader.py:19` of commit 858f10a), which scrambles it; grey images stay as they are.
      min_samples: as in `fedmeta_per_clients`.

    Returns:
      A `Protocol`; arrays are on the default device. Its new clients stand order by order.

    Raises:
      ValueError: an unknown option, or a data set too small for the clients and their views.
    """
    _check(source, seed)
    checks.count("num_new", num_new)
    checks.flag("misread", misread)
    x, y = source.pooled()
    if misread:
        if x.ndim != 4:
            raise ValueError(f"misread=True is for images [M, height, width, channels], not for inputs {list(x.shape)}")
        count, height, width, channels = x.shape
        x = np.moveaxis(x.reshape(count, channels, height, width), 1, -1)
        misread_note = "Images are scrambled: stored as [height, width, channels], they are read as [channels, height, width]"
        source = source._replace(note="; ".join(filter(None, [source.note, misread_note])))
    scale = pixel_scaling(x, scaling)
    rng, new_rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    neighbours = slots.class_slots(num_clients, source.num_classes, stride=1)
    pairs = rng.permutation(source.num_classes)[neighbours]
    held = slots.stick_breaking(y, pairs, seed=seed, min_samples=_min_samples(y, pairs, min_samples)).shuffled(rng)
    pool = new_rng.permutation(_tests(held))
    found = _new_pairs(pairs, source.num_classes, new_rng, "as published", orders, num_new)
    parts = []
    for new_pairs in found:
        part = _stick_of_new(y[pool], new_pairs, seed, min_samples, pairs.size // source.num_classes).shuffled(new_rng)
        part = _stratified(part, y[pool], SUPPORT, new_rng)
        parts.append(Partition(pool[part.order], part.sizes))
    return _with_newcomers(source, x, y, held, parts, [pairs, *found], scale, f"FL with MAML and iMAML on {source.name}")


def _stick_of_new(y: np.ndarray, new_pairs: np.ndarray, seed: int, min_samples: int | None, holders: int) -> Partition:
    """New clients by stick-breaking, with the divisor of the clients that train, of whom `holders` hold a class."""
    least = _min_samples(y, new_pairs, min_samples)
    return slots.stick_breaking(y, new_pairs, seed=seed, min_samples=least, divisor=holders + 1)


def _tests(held: Partition) -> np.ndarray:
    """The samples that clients hold in the "test" part of `train_test_views`."""
    begin, end = train_test_views(held.sizes)["test"]
    return held.order[runs.positions(np.cumsum(held.sizes) - held.sizes + begin, end - begin)]


def _with_newcomers(
    source: Source,
    x: np.ndarray,
    y: np.ndarray,
    held: Partition,
    parts: Sequence[Partition],
    pairs: Sequence[np.ndarray],
    scale: Scaling,
    name: str,
) -> Protocol:
    """Clients that hold `held`, and for each order of the labels new ones that hold one of `parts`.

    `pairs` are the classes `[N, 2]` of the clients that train, and then those of the new clients of each order.
    """
    views = train_test_views(held.sizes)
    train = from_partition(x, y, *held, num_classes=source.num_classes, views=views, **scale)
    size = np.concatenate([part.sizes for part in parts])
    support = np.maximum((size * SUPPORT).astype(np.int64), 1)
    views = {"support": (np.zeros_like(support), support), "query": (support, size)}
    order = np.concatenate([part.order for part in parts])
    new = from_partition(x, y, order, size, num_classes=source.num_classes, views=views, **scale)
    shared = [slots.shared_pairs(pairs[0], new_pairs) for new_pairs in pairs[1:]]
    if any(shared):
        orders = f"{len(parts)} order{'' if len(parts) == 1 else 's'} of the labels"
        note = f"New clients: {orders}; of their pairs of classes, training clients have {', '.join(map(str, shared))}, too."
    else:
        note = "New clients hold pairs of classes that no training client has."
    owner = np.repeat(np.arange(len(size)), size)
    adapted = np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size) < support[owner]
    held_by = owner * len(y) + order
    twice = np.isin(held_by[~adapted], held_by[adapted])
    if twice.any():
        note += (
            f" Clients share samples: {twice.sum()} of {twice.size} queries of new clients are samples that the same client "
            "adapts on."
        )
    return Protocol(on_device(train), on_device(new), name, ". ".join(filter(None, [source.note, note])), orders=len(parts))


def _new_pairs(
    pairs: np.ndarray, classes: int, rng: np.random.Generator, newcomers: str, orders: int | Sequence[Sequence[int]], many: int
) -> list[np.ndarray]:
    """The class pairs `[many, 2]` of new clients for each order of the labels, drawn or given."""
    checks.one_of("newcomers", newcomers, slots.NEWCOMERS)
    if isinstance(orders, int):
        checks.count("orders", orders)
        return [slots.new_client_slots(pairs, classes, rng, newcomers=newcomers, num_new=many) for _ in range(orders)]
    given = checks.numeric("orders", orders, integers=True)
    if given.ndim != 2 or given.shape[1] != classes or not given.size or (np.sort(given, 1) != np.arange(classes)).any():
        raise ValueError(
            f"orders={checks.shown(orders)} must be a number, or lists that name each of the {classes} classes once"
        )
    return [order[slots.class_slots(many, classes, stride=1)] for order in given]


def fedmeta_per_iid_clients(
    source: Source, *, seed: int = 1, num_clients: int = 50, train: float = 0.75, scaling: str | None = None
) -> FederatedData:
    """FedMeta-Per's IID control: the samples of both splits on clients of equal size, with the views of `fedmeta_per_clients`.

    `num_clients=1, train=0.8` is the authors' centralised split.

    Returns:
      Clients with views "train", "support", "query", "test", "test_support" and "test_query".
    """
    _check(source, seed)
    x, y = source.pooled()
    held = partition.iid(y, num_clients, seed=np.random.default_rng([seed, 2]))
    scale = pixel_scaling(x, _fedmeta_per_scaling(source, scaling))
    views = train_test_views(held.sizes, train=train)
    return on_device(from_partition(x, y, *held, num_classes=source.num_classes, views=views, **scale))


def fedpac_clients(
    source: Source,
    *,
    seed: int = 2022,
    num_clients: int = 20,
    size: int | None = None,
    test_size: int | None = None,
    uniform: float = 0.2,
    groups: Sequence[Sequence[int]] | None = None,
    share: bool = False,
    concept_groups: int = 1,
    scaling: str | None = None,
    support: float = 0.2,
) -> Protocol:
    """FedPAC: clients of equal size with a share uniform over all classes and the rest from a group of dominant classes.

    Training samples come from the official training split, and local tests by the same rule from the official test split. Both
    splits are shuffled with the seed first. As in the authors' code, CIFAR-10's samples are taken from position 2,000 of each
    class in the training split, and from position 500 in the test split. As there, clients share test samples of a class that is
    too small (the 600 tests of each of 20 clients of Fashion-MNIST are 12,000 of 10,000); the note says so.

    Args:
      source: the data set.
      seed: determines the samples; 2022 is the authors' seed.
      num_clients: N; client i has group i mod len(groups).
      size: training samples per client; if not given, 1,000 for EMNIST and 600 otherwise.
      test_size: test samples per client; if not given, 300 for CIFAR-10 and CINIC-10, 600 for EMNIST, `size` otherwise.
      uniform: share that is spread over all classes, the paper's s.
      groups: dominant classes of each group; if not given, those of the paper for 10 and 62 classes.
      share: whether clients may share training samples of a class that is too small, as in the authors' code. Otherwise such a
        class is an error.
      concept_groups: if 2 or more, the clients with the same i mod `concept_groups` use the same permutation of the labels
        (concept shift; the authors' construction is not public).
      scaling: see `pixel_scaling`; if not given, `"cifar"` for three channels and `"unit"` otherwise. The random crops and
        flips of training batches are in `transforms.crop_and_flip`.
      support: share of each part that goes to the support view, for systems that need one.
    """
    _check(source, seed)
    checks.count("concept_groups", concept_groups)
    for name, value in (("size", size), ("test_size", test_size)):
        if value is not None:
            checks.count(name, value)
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
    for y, amount, first, shared in ((source.y_train, size, 2000, share), (source.y_test, test_size, 500, True)):
        mixed = rng.permutation(len(y))
        part = partition.dominant_groups(
            y[mixed],
            num_clients,
            groups=groups,
            size=amount,
            uniform=uniform,
            first=first if source.name == "cifar10" else 0,
            share=shared,
            num_classes=source.num_classes,
        )
        parts.append(Partition(mixed[part.order], part.sizes).shuffled(rng))
    color = source.x_train.shape[-1] == 3
    scale = pixel_scaling(source.x_train, ("cifar" if color else "unit") if scaling is None else scaling)
    data = _with_local_tests(source, *parts, support=support, scale=scale)
    if concept_groups > 1:
        data = transforms.concept_shift(data, num_groups=concept_groups, seed=rng)
    note = "; ".join(filter(None, (source.notes, _shared_tests(parts[1]))))
    return Protocol(on_device(data), None, f"FedPAC on {source.name}", note, support=support)


def _shared_tests(tests: Partition) -> str:
    """Says how often a test sample is used, where clients share some."""
    own = len(np.unique(tests.order))
    if own == len(tests.order):
        return ""
    return f"the test split is too small for {len(tests.order):,} tests: clients share its samples, {own:,} different ones"


def perfedavg_reptile_clients(
    source: Source,
    *,
    seed: int = 1,
    num_clients: int = 50,
    concentration: float = 0.5,
    min_samples: int = 10,
    scaling: str = "unit",
) -> Protocol:
    """Per-FedAvg-Reptile on images: Dirichlet shares of each class; 70 % of a client's samples train, 30 % are its test.

    Both official splits are pooled. Of the test part, 30 % ("test_support") are for the one adaptation step, and the other 70
    % ("test_query") are scored. The training part is cut in the same way, for systems that need support and query.

    Args:
      source: the data set.
      seed: determines shares and shuffles.
      num_clients: N.
      concentration: of the Dirichlet shares of each class.
      min_samples: minimum number of samples per client, 5 or more.
      scaling: see `pixel_scaling`.
    """
    _check(source, seed)
    checks.count("min_samples", min_samples, least=5)
    x, y = source.pooled()
    rng = np.random.default_rng(seed)
    held = partition.dirichlet_classes(y, num_clients, concentration=concentration, seed=rng, min_samples=min_samples)
    held = held.shuffled(rng)
    views = train_test_views(held.sizes, train=0.7, support=REPTILE_SUPPORT)
    data = from_partition(x, y, *held, num_classes=source.num_classes, views=views, **pixel_scaling(x, scaling))
    return Protocol(on_device(data), None, f"Per-FedAvg-Reptile on {source.name}", source.note, support=REPTILE_SUPPORT)


def perfedavg_reptile_synthetic_clients(
    model_spread: float, data_spread: float, *, seed: int = 1, spread: str = "variance"
) -> Protocol:
    """Per-FedAvg-Reptile on synthetic(δ, θ): 30 clients of 100 to 1,000 samples, views as in `perfedavg_reptile_clients`.

    The paper does not say which four pairs (δ, θ) it used. `spread` is as in `synthetic.synthetic`.
    """
    data = synthetic.synthetic(model_spread, data_spread, seed=seed, spread=spread, support=REPTILE_SUPPORT)
    name = f"Per-FedAvg-Reptile on synthetic({model_spread:g}, {data_spread:g})"
    return Protocol(on_device(data), None, name, support=REPTILE_SUPPORT)


def mtfl_clients(
    source: Source,
    *,
    seed: int = 1,
    num_clients: int = 200,
    noisy: float = 0.0,
    noise: float | None = None,
    support: float = 0.2,
) -> Protocol:
    """MTFL: two shards per client, the test split cut and assigned in the same way, pixels in [0, 1], some clients noisy.

    If the number of shards does not divide a split, the longer shards come first, as in the authors' code. With 400 clients
    the test shards are therefore not aligned with the classes: about 7 % of the local test samples are of classes that the
    client has not trained on.

    Args:
      source: the data set.
      seed: determines the assignment of shards, the noisy clients and the noise.
      num_clients: the paper's W, 200 or 400.
      noisy: share of clients whose training images (never the tests) get Gaussian noise; 0.2 in the paper's noise experiment.
      noise: standard deviation of the noise for images in [0, 1]; if not given, 0.2 for three channels (CIFAR-10), else 3.0.
      support: share of each part that goes to the support view, for systems that need one.

    Returns:
      A `Protocol` whose `noisy` names the noisy clients. `local_steps` gives the paper's number of steps per epoch.
    """
    _check(source, seed)
    checks.share("noisy", noisy)
    if noise is not None:
        checks.not_negative("noise", noise)
    rng = np.random.default_rng(seed)
    assignment = partition.shard_assignment(num_clients, seed=rng)
    parts = [partition.shards(y, assignment, uneven=True).shuffled(rng) for y in (source.y_train, source.y_test)]
    data = _with_local_tests(source, *parts, support=support, scale=pixel_scaling(source.x_train, "unit"))
    chosen = np.sort(rng.permutation(num_clients)[: round(noisy * num_clients)])
    if chosen.size:
        std = np.zeros(num_clients)
        std[chosen] = (0.2 if source.x_train.shape[-1] == 3 else 3.0) if noise is None else noise
        data = transforms.add_noise(data, std, seed=rng)
    return Protocol(on_device(data), None, f"MTFL on {source.name}", source.notes, chosen, support=support)


def dealt_tests_clients(
    source: Source, *, seed: int = 1, num_clients: int = 1000, concentration: float = 1.0, support: float = 0.2
) -> Protocol:
    """Many small clients who train on all that they hold, the whole training split; the test split is dealt out evenly.

    Where it divides evenly, the mean over clients of a model that all share is its accuracy on the test split.

    Args:
      source: the data set.
      seed: determines who holds which samples.
      num_clients: N, at most the samples of either split.
      concentration: of the Dirichlet distribution of class mixes, see `partition.dirichlet_clients`.
      support: share of each part that goes to the support view, for systems that need one; clients of a single sample in a part
        have only the views "train" and "test".
    """
    _check(source, seed)
    rng = np.random.default_rng(seed)
    train = partition.dirichlet_clients(source.y_train, num_clients, concentration=concentration, seed=rng)
    # Views and held-back samples are cut in storage order, and this partition goes class by class.
    train = train.shuffled(rng)
    test = partition.iid(source.y_test, num_clients, seed=seed)
    scale = pixel_scaling(source.x_train, "unit") if source.x_train.dtype == np.uint8 else None
    data = _with_local_tests(source, train, test, support=support, scale=scale, tiny=True)
    name = f"Dirichlet({concentration:g}) on {source.name}, {num_clients} clients"
    return Protocol(on_device(data), None, name, source.notes, support=support)


def local_steps(samples: int, num_clients: int, batch_size: int = 20) -> int:
    """Steps of one local epoch in MTFL: samples / (W B), rounded half to even; the same for all clients.

    Example:
      >>> [local_steps(60_000, 200), local_steps(60_000, 400), local_steps(50_000, 200), local_steps(50_000, 400)]
      [15, 8, 12, 6]
    """
    for name, value in (("samples", samples), ("num_clients", num_clients), ("batch_size", batch_size)):
        checks.count(name, value)
    return max(round(samples / (num_clients * batch_size)), 1)


def pooled(data: FederatedData) -> FederatedData:
    """All clients' samples as those of one client, view by view, for training and testing a centralised system.

    Args:
      data: clients with the view "train", and perhaps "test".

    Returns:
      One client with the views "train" and "test" that are the unions of those of the clients, and, where the clients have them
      as the two parts of these, in this order, "support" and "query", "test_support" and "test_query".

    Raises:
      ValueError: there is no view "train".

    Example:
      >>> from fedjax_meta.data import from_clients
      >>> one = pooled(from_clients([(np.zeros((20, 3)), np.arange(20) % 2), (np.ones((40, 3)), np.arange(40) % 2)]))
      >>> one.num_clients, one.sizes("train").tolist(), one.sizes("test_query").tolist()
      (1, [45], [12])
    """
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    check_view("train", data.views)
    pieces: list[np.ndarray] = []
    found: dict[str, tuple[int, int]] = {}
    end = 0
    for whole, parts in (("train", ("support", "query")), ("test", ("test_support", "test_query"))):
        if whole not in data.views:
            continue
        size = {name: np.asarray(data.sizes(name), np.int64) for name in (whole, *parts) if name in data.views}
        start = {name: np.asarray(data.start[name], np.int64) for name in size}
        nested = len(size) == 3 and all(
            np.array_equal(*ends)
            for ends in (
                (size[whole], size[parts[0]] + size[parts[1]]),
                (start[whole], start[parts[0]]),
                (start[parts[1]], start[parts[0]] + size[parts[0]]),
            )
        )
        begin = end
        for name in parts if nested else (whole,):
            pieces.append(runs.positions(start[name], size[name]))
            found[name] = (end, end := end + len(pieces[-1]))
        found[whole] = (begin, end)
    rows = np.concatenate(pieces)
    # The samples stay as they are stored: their types, shapes and scale, and weights of targets.
    x, y = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], (data.x, data.y))
    views = {name: (np.array([found[name][0]]), np.array([np.diff(found[name])[0]])) for name in data.views if name in found}
    return on_device(dataclasses.replace(with_views(data, views), x=x, y=y, ids=None, population=None))


def on_device(data: FederatedData) -> FederatedData:
    """The same data with its arrays on the default device."""
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    return jax.tree.map(jnp.asarray, data)


def _check(source: Source, seed: int) -> None:
    checks.instance("source", source, Source, "sources.load('mnist_small')")
    checks.seed("seed", seed, bits=32)


def _fedmeta_per_scaling(source: Source, scaling: str | None) -> str:
    return ("half" if source.name == "cifar10" else "pixel") if scaling is None else scaling


def _with_local_tests(
    source: Source, train: Partition, test: Partition, *, support: float, scale: Scaling | None, tiny: bool = False
) -> FederatedData:
    """Clients with `train` of the training split and `test` of the test split, and the views of `train_test_views`.

    `tiny` allows parts of a single sample, where all clients have the views "train" and "test" alone.
    """
    x, y = source.pooled()
    owner = np.concatenate([train.owner(), test.owner()])
    order = np.concatenate([train.order, len(source.y_train) + test.order])[np.argsort(owner, kind="stable")]
    if not tiny or min(train.sizes.min(), test.sizes.min()) > 1:
        views = nested_views(train.sizes, test.sizes, support=support)
    else:
        views = {"train": (np.zeros_like(train.sizes), train.sizes), "test": (train.sizes, train.sizes + test.sizes)}
    given: dict[str, Any] = {} if scale is None else {**scale}
    return from_partition(x, y, order, train.sizes + test.sizes, num_classes=source.num_classes, views=views, **given)


def _min_samples(labels: np.ndarray, pairs: np.ndarray, given: int | None) -> int:
    """The default of `fedmeta_per_clients` for `min_samples`, unless it is given."""
    if given is not None:
        checks.count("min_samples", given, least=0)
        return given
    counts = np.bincount(labels, minlength=int(pairs.max()) + 1)
    holders = np.bincount(pairs.ravel(), minlength=len(counts))
    smallest = counts[holders > 0].min()
    return 0 if smallest >= 1000 else int((counts // np.maximum(3 * holders, 1))[holders > 0].min())


def _stratified(held: Partition, y: np.ndarray, train: float, rng: np.random.Generator) -> Partition:
    """Reorders each client's samples so that the first int(train * size) have the class proportions of the client.

    Each class gets its share rounded down, and the remaining places go to the classes with the largest remainders.
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
