"""A scenario: a data set cut into clients, and the model that they train."""

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import checks, models
from fedjax_meta.data import (
    FederatedData,
    from_partition,
    holdout,
    partition,
    protocols,
    sources,
    train_test_views,
    transforms,
)
from fedjax_meta.data.natural_sets import NATURAL, check_options, load_natural
from fedjax_meta.data.sources import Source
from fedjax_meta.task import Task


class Clients(NamedTuple):
    """What a scenario yields.

    Attributes:
      task: the model.
      train: the clients that train, with their own tests.
      tuning: the same clients, tested on train samples that are held back; hyper-parameters are chosen on it.
      new: clients that never train, with the views "support" and "query"; `None` if there are none.
      title: for tables.
      note: one line that belongs next to the results.
      fingerprint: a digest of all samples, labels and views.
    """

    task: Task
    train: FederatedData
    tuning: FederatedData
    new: FederatedData | None
    title: str
    note: str
    fingerprint: str


def _shards(labels: np.ndarray, num_clients: int, *, per_client: int = 2, seed: int) -> partition.Partition:
    """Shards of samples sorted by class, some for each client (McMahan et al. 2017)."""
    assignment = partition.shard_assignment(num_clients, per_client=per_client, seed=seed)
    return partition.shards(labels, assignment, uneven=True)


def _classes(labels: np.ndarray, num_clients: int, *, per_client: int = 2, seed: int) -> partition.Partition:
    """A few classes for each client, each class cut evenly among its clients."""
    count = int(labels.max()) + 1
    checks.count("per_client", per_client)
    if per_client > count:
        raise ValueError(f"per_client={per_client} is more than the K={count} classes")
    rng = np.random.default_rng(seed)
    # Every class is dealt out before one comes again, so that all classes have clients.
    deck = np.concatenate([rng.permutation(count) for _ in range(-(-num_clients * per_client // count) + per_client)])
    held: list[list[int]] = []
    for _ in range(num_clients):
        mine: list[int] = []
        for card in range(len(deck)):
            if deck[card] >= 0 and deck[card] not in mine:
                mine.append(int(deck[card]))
                deck[card] = -1
                if len(mine) == per_client:
                    break
        held.append(mine)
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label in range(count):
        owners = [i for i, mine in enumerate(held) if label in mine]
        if owners:
            samples = rng.permutation(np.flatnonzero(labels == label))
            for owner, piece in zip(owners, np.array_split(samples, len(owners)), strict=True):
                parts[owner].append(piece)
    order = [np.concatenate(pieces) for pieces in parts]
    return partition.Partition(np.concatenate(order), np.array([len(piece) for piece in order]))


PARTITIONS: dict[str, Callable[..., partition.Partition]] = {
    "iid": partition.iid,
    "shards": _shards,
    "classes": _classes,
    "dirichlet_classes": partition.dirichlet_classes,
    "dirichlet_clients": partition.dirichlet_clients,
    "quantity_skew": partition.quantity_skew,
}
"""Partition rules by name: `(labels, num_clients, *, seed, ...) -> Partition`."""

PAPERS: dict[str, Callable[..., protocols.Protocol]] = {
    "fedmeta_per": protocols.fedmeta_per_clients,
    "fedpac": protocols.fedpac_clients,
    "perfedavg_reptile": protocols.perfedavg_reptile_clients,
    "mtfl": protocols.mtfl_clients,
}
"""Clients as a paper draws them; they bring their own tests and new clients."""


def _noise(data: FederatedData, *, share: float = 0.2, std: float = 0.5, seed: int) -> FederatedData:
    """Gaussian noise on the training inputs of a share of the clients."""
    noisy = np.random.default_rng(seed).permutation(data.num_clients)[: round(share * data.num_clients)]
    amount = np.zeros(data.num_clients, np.float32)
    amount[noisy] = std
    return transforms.add_noise(data, amount, seed=seed)


def _concept(data: FederatedData, *, num_groups: int = 2, seed: int) -> FederatedData:
    """Labels permuted alike within groups of clients."""
    return transforms.concept_shift(data, num_groups=num_groups, seed=seed)


def _rotation(data: FederatedData, *, seed: int) -> FederatedData:
    """Images turned by 0, 90, 180 or 270 degrees, one angle a client."""
    return transforms.rotate(data, np.random.default_rng(seed).integers(0, 4, data.num_clients))


SHIFTS: dict[str, Callable[..., FederatedData]] = {"noise": _noise, "concept": _concept, "rotation": _rotation}
"""What else makes clients differ, by name: `(data, *, seed, ...) -> data`."""


TESTED_ON = {"train": "test", "test_support": "test_query"}
"""The view that known clients are tested on, by the view that they adapt on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A data set, its clients and their model.

    Attributes:
      dataset: name for `data.sources.load`, or the path of an .npz file; or a name in `natural_sets.NATURAL`.
      partition: name in `PARTITIONS` or `PAPERS`; "natural" for a data set of `NATURAL`, whose clients are given.
      options: of the partition.
      clients: N, new ones included; the paper's number when not given for a paper's partition, all for natural clients.
      model: name in `models.MODELS`; by default the LeNet for colour images, else the perceptron.
      model_options: of the model.
      shift: name in `SHIFTS`, with `shift_options`; none when not given.
      test: share of a client's samples for its test.
      support: share of each part for adaptation.
      adapt_on: what a known client adapts on before its test: "train", and it is tested on all of its test samples; or
        "test_support", a share of them, and it is tested on the rest (FedMeta-Per).
      new: share of the clients that never train.
      validation: share of the train samples that is held back while hyper-parameters are chosen.
      seed: of the partition.

    Raises:
      ValueError: an unknown name, or an option that a partition, model or shift does not take.
    """

    dataset: str = "mnist_small"
    partition: str = "classes"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clients: int | None = None
    model: str | None = None
    model_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shift: str | None = None
    shift_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    test: float = 0.25
    support: float = 0.2
    adapt_on: str = "train"
    new: float = 0.2
    validation: float = 0.2
    seed: int = 1

    def __post_init__(self) -> None:
        if self.dataset in NATURAL:
            if self.partition != "natural":
                raise ValueError(f"the clients of {self.dataset} are given: partition={self.partition!r} must be 'natural'")
            check_options(self.dataset, self.options)
        else:
            checks.one_of("partition", self.partition, [*PARTITIONS, *PAPERS])
            _check_options(f"partition {self.partition}", {**PARTITIONS, **PAPERS}[self.partition], self.options)
        if self.model is not None:
            checks.one_of("model", self.model, models.MODELS)
            _check_options(f"model {self.model}", models.MODELS[self.model], self.model_options)
        elif self.model_options:
            raise ValueError("model_options need a model")
        if self.shift is not None:
            checks.one_of("shift", self.shift, SHIFTS)
            _check_options(f"shift {self.shift}", SHIFTS[self.shift], self.shift_options)
        elif self.shift_options:
            raise ValueError("shift_options need a shift")
        for name in ("test", "support", "validation"):
            checks.fraction(name, getattr(self, name))
        checks.one_of("adapt_on", self.adapt_on, TESTED_ON)
        checks.share("new", self.new)
        checks.count("seed", self.seed, least=0)
        if self.clients is not None:
            checks.count("clients", self.clients)

    def build(self, data_dir: str | None = None) -> Clients:
        """Loads the data set and cuts it; the same scenario always gives the same clients.

        Raises:
          ValueError: a data set that is not there, too few samples for so many clients.
        """
        if self.dataset in NATURAL:
            train, new, title, note = self._of_natural(data_dir)
        elif self.partition in PAPERS:
            train, new, title, note = self._of_paper(sources.load(self.dataset, data_dir=data_dir))
        else:
            train, new, title, note = self._of_partition(sources.load(self.dataset, data_dir=data_dir))
        if self.shift is not None:
            train = SHIFTS[self.shift](train, **{"seed": self.seed, **self.shift_options})
            title += f", {self.shift}"
        tuning = holdout.validation_samples(train, self.validation, support=self.support)
        task = model_for(self.model, train, self.model_options)
        return Clients(task, train, tuning, new, title, note, fingerprint(train, new))

    def _of_natural(self, data_dir: str | None) -> tuple[FederatedData, FederatedData | None, str, str]:
        source = load_natural(self.dataset, data_dir=data_dir, **self.options).at_least(8, most_clients=self.clients)
        data = source.federated(test=self.test, support=self.support, seed=self.seed)
        train, new = holdout.new_clients(data, self.new, support=self.support, seed=self.seed)
        return train, new, f"{source.name}, {len(source.sizes)} natural clients", f"{source}. {source.note}".rstrip(". ")

    def _of_paper(self, source: Source) -> tuple[FederatedData, FederatedData | None, str, str]:
        given = {} if self.clients is None else {"num_clients": self.clients}
        made = PAPERS[self.partition](source, **{"seed": self.seed, **given, **self.options})
        train, new = (None if data is None else jax.tree.map(np.asarray, data) for data in (made.train, made.new))
        assert train is not None
        return train, new, made.name, made.note

    def _of_partition(self, source: Source) -> tuple[FederatedData, FederatedData | None, str, str]:
        x, y = source.pooled()
        count = 20 if self.clients is None else self.clients
        rule = PARTITIONS[self.partition]
        order, sizes = rule(y, count, **{"seed": self.seed, **self.options}).shuffled(self.seed)
        if sizes.min() < 4:
            raise ValueError(
                f"client {int(sizes.argmin())} has {sizes.min()} samples of {self.dataset}; train, validation and test need at "
                "least 4: take fewer clients, or min_samples where the partition has it"
            )
        views = train_test_views(sizes, train=1 - self.test, support=self.support)
        data = from_partition(x, y, order, sizes, num_classes=source.num_classes, views=views)
        train, new = holdout.new_clients(data, self.new, support=self.support, seed=self.seed)
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        title = f"{self.partition}{f' ({options})' if options else ''} on {source.name}, {count} clients"
        return train, new, title, source.note


def model_for(name: str | None, data: FederatedData, options: Mapping[str, Any]) -> Task:
    """A model of `models.MODELS` for the shape of the data; by default the LeNet for colour images, else the perceptron."""
    if name == "matrix_factorisation":
        return models.matrix_factorisation(**{"items": int(np.max(data.x["item"])) + 1, **options})
    if isinstance(data.x, dict):
        raise ValueError(f"model={name!r} takes one array of inputs, but the data have {', '.join(data.x)}")
    shape = data.x.shape[1:]
    if name is None:
        name = "lenet" if len(shape) == 3 and shape[-1] == 3 else "mlp"
    checks.one_of("model", name, models.MODELS)
    build = models.MODELS[name]
    takes = inspect.signature(build).parameters
    if "vocabulary" in takes:
        return build(vocabulary=data.num_classes, length=shape[0], **options)
    if "window" in takes:
        return build(window=shape, classes=data.num_classes, **options)
    if "inputs" in takes:
        return build(inputs=math.prod(shape), classes=data.num_classes, **options)
    return build(image=shape if len(shape) == 3 else (*shape, 1), classes=data.num_classes, **options)


def fingerprint(*populations: FederatedData | None) -> str:
    """A digest of all samples, labels and views of some clients."""
    digest = hashlib.blake2b(digest_size=8)
    for data in populations:
        for leaf in jax.tree.leaves(data):
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _check_options(where: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    taken = [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    if where.startswith("model"):
        given_by_data = ("inputs", "classes", "image", "window", "vocabulary", "length", "loss")
        taken = [name for name in inspect.signature(function).parameters if name not in given_by_data]
    try:
        checks.options(where, given, [name for name in taken if name != "num_clients"], {})
    except TypeError as error:
        raise ValueError(str(error).replace("() takes", " takes")) from None
