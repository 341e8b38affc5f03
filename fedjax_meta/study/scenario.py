"""A scenario: a data set cut into clients, and the model that they train."""

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, imports, models, tasks
from fedjax_meta.data import (
    ClientData,
    FederatedData,
    from_partition,
    holdout,
    npz,
    sources,
    targets,
    train_test_views,
    transforms,
)
from fedjax_meta.data.builders import Bounds, nested_views
from fedjax_meta.data.natural import LEAST
from fedjax_meta.data.natural_sets import NATURAL, check_options, load_natural
from fedjax_meta.data.partition import Partition
from fedjax_meta.data.protocols import Protocol
from fedjax_meta.data.registry import GENERATED, PAPERS, PARTITIONS, natural
from fedjax_meta.study import lookup
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
      orders: how many draws of the new clients `new` holds one after the other; their results are also compared draw by draw.
      noisy: int, the clients whose training inputs are noisy by the paper's protocol, which leaves them out of its averages.
      server: the server's own samples; `None` without any.
      targets: what the targets are, in words.
      names: of the clients that train and of the new ones, where the data set has them; else empty.
    """

    task: Task
    train: FederatedData
    tuning: FederatedData
    new: FederatedData | None
    title: str
    note: str
    fingerprint: str
    orders: int = 1
    noisy: np.ndarray = np.zeros(0, np.int64)
    server: ClientData | None = None
    targets: str = ""
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def _noise(data: FederatedData, *, share: float = 0.2, std: float = 0.5, seed: int) -> FederatedData:
    """Gaussian noise on the training inputs of a share of the clients; inputs in [0, 1], such as images, stay there.

    Args:
      share: of the clients.
      std: standard deviation of the noise; pixels count as numbers in [0, 1].
    """
    checks.share("share", share)
    # A stream of its own: those that validation holds out, and attackers, are drawn from the same seed.
    rng = np.random.default_rng([seed, 3])
    noisy = rng.permutation(data.num_clients)[: round(share * data.num_clients)]
    amount = np.zeros(data.num_clients, np.float32)
    amount[noisy] = std
    transforms.one_array("the shift noise changes inputs", data.x)
    return transforms.add_noise(data, amount, seed=seed)


def _concept(data: FederatedData, *, num_groups: int = 2, seed: int) -> FederatedData:
    """Labels permuted alike within groups of clients.

    Args:
      num_groups: groups, each with a permutation of its own; the first keeps its labels.
    """
    return transforms.concept_shift(data, num_groups=num_groups, seed=seed)


def _rotation(data: FederatedData, *, seed: int) -> FederatedData:
    """Images turned by 0, 90, 180 or 270 degrees, one angle a client."""
    return transforms.rotate(data, np.random.default_rng(seed).integers(0, 4, data.num_clients))


SHIFTS: dict[str, Callable[..., FederatedData]] = {"noise": _noise, "concept": _concept, "rotation": _rotation}
"""What else makes clients differ, by name: `(data, *, seed, ...) -> data`."""


def _crop_and_flip(task: Task, data: FederatedData, *, pad: int = 4) -> Task:
    """Random crops and flips of the images that a client trains on."""
    transforms.one_array("the augmentation crop_and_flip changes inputs", data.x)
    if len(data.sample_shapes[0]) != 3:
        raise ValueError(
            f"crop_and_flip is for images [height, width, channels], not for inputs {list(data.sample_shapes[0])}"
        )
    black = 0.0 if data.offset is None else -jnp.asarray(data.offset) * jnp.asarray(data.scale)
    return transforms.augmented(task, partial(transforms.crop_and_flip, pad=pad, fill=black))


AUGMENTS: dict[str, Callable[..., Task]] = {"crop_and_flip": _crop_and_flip}
"""What changes the samples of training batches, by name: `(task, data, ...) -> task`."""

TESTED_ON = {"train": "test", "test_support": "test_query"}
"""The view that known clients are tested on, by the view that they adapt on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A data set, its clients and their model.

    Attributes:
      dataset: name for `data.sources.load`, the path of an .npz file (with real targets or several labels too, see
        `data.targets.read`), or a name in `natural_sets.NATURAL`, whose clients are given, or in `GENERATED`, whose clients are
        generated.
      partition: name in `PARTITIONS`, "natural" (the clients of `NATURAL`, or those that an .npz names), a paper's protocol in
        `PAPERS`, or "module:name" of a function of your own, see `lookup.partition`; not for generated clients.
      options: of the partition, of the natural clients, or of the generator.
      clients: N, new ones included; the paper's number when not given for a paper's protocol, all for natural clients.
      model: name in `models.MODELS`, or "module:name" of a function of your own, see `lookup.model`; by default the LeNet for
        colour images, else the perceptron.
      model_options: of the model.
      augment: name in `AUGMENTS`, how training batches are changed; not at all when not given.
      shift: name in `SHIFTS`, with `shift_options`; none when not given. It changes the clients that train: new clients keep
        their samples as they are.
      test: share of a client's samples for its test; papers, generators and natural clients with a test split have their own.
      support: share of each part for adaptation. Papers and generators cut their own clients; there it is for the new clients
        that `new` holds out.
      adapt_on: what a known client adapts on before its test: "train", and it is tested on all of its test samples; or
        "test_support", a share of them, and it is tested on the rest (FedMeta-Per).
      new: share of the clients that never train; a fifth when not given, and none where a paper or a generator draws them.
      validation: share of the train samples that is held back while hyper-parameters are chosen.
      seed: of the partition.
      federation: options of `Federation` of every system that does not say otherwise, such as an attack; they replace those
        of the study.
      attackers: the share of the clients that attack, for an `attack` that does not say it, and that aggregators are told of
        where they say "attackers", also if nobody attacks.
      server: samples that the server keeps for itself, for FLTrust.

    Raises:
      ValueError: an unknown name, or an option that a partition, model or shift does not take.
    """

    dataset: str = "mnist_small"
    partition: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clients: int | None = None
    model: str | None = None
    model_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    augment: str | None = None
    shift: str | None = None
    shift_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    test: float = 0.25
    support: float = 0.2
    adapt_on: str = "train"
    new: float | None = None
    validation: float = 0.2
    seed: int = 1
    federation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attackers: float | None = None
    server: int = 0

    def __post_init__(self) -> None:
        checks.word("dataset", self.dataset)
        for name in ("options", "model_options", "shift_options", "federation"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name}={checks.shown(getattr(self, name))} must be a mapping of names and values")
        if self.dataset in GENERATED:
            if self.partition is not None:
                raise ValueError(f"dataset {self.dataset} generates its clients: leave partition={self.partition!r} out")
            _check_options(f"dataset {self.dataset}", GENERATED[self.dataset], self.options)
        elif self.dataset in NATURAL:
            if self.partition not in (None, "natural"):
                raise ValueError(f"the clients of {self.dataset} are given: partition={self.partition!r} must be 'natural'")
            check_options(self.dataset, self.options)
        else:
            _check_options(f"partition {self.rule}", lookup.partition(self.rule), self.options)
        if self.model is not None:
            _check_options(f"model {self.model}", lookup.model(self.model), self.model_options)
        elif self.model_options:
            raise ValueError("model_options need a model")
        if self.augment is not None:
            checks.one_of("augment", self.augment, AUGMENTS)
        if self.shift is not None:
            checks.one_of("shift", self.shift, SHIFTS)
            _check_options(f"shift {self.shift}", SHIFTS[self.shift], self.shift_options)
        elif self.shift_options:
            raise ValueError("shift_options need a shift")
        for name in ("test", "support", "validation"):
            checks.fraction(name, getattr(self, name))
        checks.one_of("adapt_on", self.adapt_on, TESTED_ON)
        if self.new is not None:
            checks.share("new", self.new)
        checks.count("seed", self.seed, least=0)
        checks.count("server", self.server, least=0)
        if self.server == 1:
            raise ValueError("server=1 must be 0 or at least 2: a method may adapt on some samples and train on others")
        given = self.dataset in GENERATED or self.dataset in NATURAL
        if self.server and (given or not (self.rule in PARTITIONS or lookup.is_own(self.rule))):
            raise ValueError(f"server={self.server} needs one of the partitions {', '.join(PARTITIONS)}")
        if self.dataset in GENERATED or (self.dataset not in NATURAL and self.rule in PAPERS):
            cut = self.dataset if self.dataset in GENERATED else self.rule
            for name in ("test",) if self.new else ("test", "support"):
                if getattr(self, name) != getattr(Scenario, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)}, but {cut} cuts the {name} samples of its clients itself: leave {name} out"
                    )
        if self.attackers is not None:
            checks.fraction("attackers", self.attackers)
        if self.clients is not None:
            checks.count("clients", self.clients)

    @property
    def rule(self) -> str:
        """Name of the partition, "classes" when not given."""
        return "classes" if self.partition is None else self.partition

    def build(self, data_dir: str | None = None) -> Clients:
        """Loads the data set and cuts it; the same scenario always gives the same clients.

        Raises:
          ValueError: a data set that is not there or has one class, too few samples for so many clients.
        """
        own = None
        if self.dataset in GENERATED:
            made = self._drawn(GENERATED[self.dataset])
        elif self.dataset in NATURAL:
            made = self._of_natural(data_dir)
        elif self.rule in PAPERS:
            made = self._drawn(partial(PAPERS[self.rule], sources.load(self.dataset, data_dir=data_dir)))
        else:
            made, own = self._of_partition(data_dir)
        train, title = made.train, made.name
        if self.dataset.endswith(".npz") and self.rule != "natural" and "split" in npz.names(self.dataset):
            cut = f"the array split of the file is not used: {self.rule} cuts tests anew"
            made = made._replace(note="; ".join(filter(None, [made.note, cut])))
        if train.num_classes == 1:
            raise ValueError(
                f"dataset {self.dataset}: all samples have the label 0, but a classifier needs at least 2 classes"
            )
        if self.shift is not None:
            train = SHIFTS[self.shift](train, **{"seed": self.seed, **self.shift_options})
            title += f", {self.shift}"
        if self.federation.get("attack") is not None:
            attack = self.federation["attack"]
            title += f", attack {attack['name'] if isinstance(attack, Mapping) else attack}"
        tuning = holdout.validation_samples(train, self.validation, support=made.support, scored=TESTED_ON[self.adapt_on])
        task = model_for(self.model, train, self.model_options, made.targets)
        if self.augment is not None:
            task = AUGMENTS[self.augment](task, train)
        digest = fingerprint(train, made.new)
        if self.federation.get("attack") is not None:
            # Other clients attack, and others are scored.
            digest = hashlib.blake2b(
                f"{digest} {self.federation['attack']} {self.attackers}".encode(), digest_size=8
            ).hexdigest()
        said = targets.in_words(train.y, train.num_classes, made.targets)
        return Clients(task, train, tuning, made.new, title, made.note, digest, made.orders, made.noisy, own, said, made.names)

    def _of_natural(self, data_dir: str | None) -> Protocol:
        source = load_natural(self.dataset, data_dir=data_dir, **self.options).at_least(LEAST, most_clients=self.clients)
        if self.model is None and source.vocabulary and not isinstance(source.x, dict):
            raise ValueError(
                f"{self.dataset} holds tokens, for which there is no default model: take one, e.g. model char_lstm"
            )
        if source.train_sizes is not None:
            self._check_own_split()
        data = source.federated(test=self.test, support=self.support, seed=self.seed)
        train, new = holdout.new_clients(data, 0.2 if self.new is None else self.new, support=self.support, seed=self.seed)
        title = f"{source.name}, {len(source.sizes)} natural clients"
        note = f"{source}. {source.note}".rstrip(". ")
        return Protocol(train, new, title, note, names=self._names(source.clients), support=self.support)

    def _names(self, clients: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(the names of the clients that train, those of the new ones)."""
        held, rest = holdout.held_out(len(clients), 0.2 if self.new is None else self.new, self.seed)
        return tuple(clients[i] for i in rest), tuple(clients[i] for i in held)

    def _drawn(self, draw: Callable[..., Protocol]) -> Protocol:
        """Clients of a paper's protocol or of a generator."""
        given = {} if self.clients is None else {"num_clients": self.clients}
        made = draw(**{"seed": self.seed, **given, **self.options})
        train = jax.tree.map(np.asarray, made.train)
        new = None if made.new is None else jax.tree.map(np.asarray, made.new)
        if self.new:
            if new is not None:
                raise ValueError(f"new={self.new}, but the protocol {made.name} draws new clients of its own: leave new out")
            if len(made.noisy):
                raise ValueError(
                    f"new={self.new}, but the protocol {made.name} has noisy clients, whose noisy training samples would test "
                    "new ones: leave one of the two out"
                )
            train, new = holdout.new_clients(train, self.new, support=self.support, seed=self.seed)
        return made._replace(train=train, new=new)

    def _of_partition(self, data_dir: str | None) -> tuple[Protocol, ClientData | None]:
        """The clients, and the samples of the server."""
        tests = None
        if self.rule == "natural":
            source: sources.Source | targets.Targets
            names: tuple[str, ...]
            source, held, names, out, tests = natural(self.dataset, **self.options)
            x, y = source.pooled()
            own, notes = np.zeros(0, int), [source.note, out]
            if self.clients is not None:
                raise ValueError(f"clients={self.clients}, but the partition 'natural' takes the clients of {self.dataset}")
        else:
            source, names = self._source(data_dir), ()
            if self.partition is None and self.dataset.endswith(".npz") and "client" in npz.names(self.dataset):
                raise ValueError(
                    f"{self.dataset} names the client of each sample: set partition to natural to keep these clients, or to "
                    "another one, e.g. classes, to form new ones"
                )
            x, y = source.pooled()
            notes = [source.note]
            count = 20 if self.clients is None else self.clients
            own, rest = self._server_first(len(y))
            held = self._divided(y[rest], count)
            if lookup.is_own(self.rule):
                notes.append(_uses(held.order, len(rest)))
            held = held._replace(order=rest[held.order])
        order, sizes = held.shuffled(self.seed)
        if tests is None:
            views = train_test_views(sizes, train=1 - self.test, support=self.support)
        else:
            self._check_own_split()
            order = order[np.lexsort((tests[order], held.owner()))]  # each client's tests last
            of_tests = np.add.reduceat(tests[order].astype(np.int64), np.cumsum(sizes) - sizes)
            views = nested_views(sizes - of_tests, of_tests, support=self.support)
        self._check_sizes(sizes, views, names)
        data = from_partition(x, y, order, sizes, num_classes=source.num_classes, views=views)
        share = 0.2 if self.new is None else self.new
        train, new = holdout.new_clients(data, share, support=self.support, seed=self.seed)
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        title = f"{self.rule}{f' ({options})' if options else ''} on {source.name}, {len(sizes)} clients"
        server = self._of_server(x, y, own, source.num_classes) if self.server else None
        kind = source.kind if isinstance(source, targets.Targets) else ""
        note, called = "; ".join(filter(None, notes)), self._names(names)
        return Protocol(train, new, title, note, targets=kind, names=called, support=self.support), server

    def _divided(self, y: np.ndarray, count: int) -> Partition:
        """The samples of `count` clients, by a rule of the package or of a user's own."""
        rule = lookup.partition(self.rule)
        if not lookup.is_own(self.rule):
            return rule(y if y.ndim == 1 else np.zeros(len(y), int), count, **{"seed": self.seed, **self.options})
        what = f"partition {self.rule}"
        try:
            found = rule(y, count, **{"seed": self.seed, **self.options})
        except Exception as error:
            if imports.place_of(error) is None:
                raise
            raise ValueError(f"{what}: {imports.said(error)}") from error
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"{what} must return (order, sizes), e.g. a Partition, not {checks.shown(found)}")
        order, sizes = (
            checks.numeric(f"{name} of {what}", found[i], integers=True) for i, name in enumerate(Partition._fields)
        )
        checks.indices(f"order of {what}", order, len(y))
        if order.ndim != 1 or sizes.shape != (count,) or (sizes < 0).any() or sizes.sum() != len(order):
            raise ValueError(
                f"{what} must return order [S], and sizes [{count}] with the sum S, not {list(order.shape)} and "
                f"{list(sizes.shape)} with the sum {sizes.sum()}"
            )
        held = Partition(order.astype(np.int64), sizes.astype(np.int64))
        pairs = np.stack([held.owner(), held.order])
        once, counts = np.unique(pairs, axis=1, return_counts=True)
        if len(counts) and counts.max() > 1:
            client, sample = once[:, np.argmax(counts)].tolist()
            raise ValueError(
                f"{what} gives client {client} sample {sample} {counts.max()} times: it would train on samples of its own test"
            )
        return held

    def _of_server(self, x: np.ndarray, y: np.ndarray, order: np.ndarray, classes: int) -> ClientData:
        """The server's samples, with the views that a client trains on. The server is not tested."""
        sizes = np.array([self.server])
        views = nested_views(sizes, np.zeros_like(sizes), support=self.support)
        views = {name: views[name] for name in ("train", "support", "query")}
        return from_partition(x, y, order, sizes, num_classes=classes, views=views).client(0)

    def _check_own_split(self) -> None:
        """Refuses a share of tests where the data set says itself which samples are tests."""
        if self.test != Scenario.test:
            raise ValueError(f"test={self.test}, but {self.dataset} has test samples of its own: leave test out")

    def _check_sizes(self, sizes: np.ndarray, views: Mapping[str, Bounds], names: tuple[str, ...]) -> None:
        """Refuses a client of whom a view would be empty, by its name where it has one."""
        short = (sizes < 4) | np.any([stop <= first for first, stop in views.values()], axis=0)
        if short.any():
            client = int(np.argmax(short))
            name = repr(names[client]) if names else client
            raise ValueError(
                f"client {name} has {sizes[client]} samples of {self.dataset}, too few for the views of training, validation and "
                f"test (test={self.test:g}, support={self.support:g}): take fewer clients, or a larger min_samples where the "
                "partition has it"
            )

    def _source(self, data_dir: str | None) -> sources.Source | targets.Targets:
        """The samples that a partition divides."""
        other = targets.read(self.dataset) if self.dataset.endswith(".npz") else None
        if other is None:
            return sources.load(self.dataset, data_dir=data_dir)
        if self.rule not in targets.FREE_OF_CLASSES and not lookup.is_own(self.rule):
            raise ValueError(
                f"partition {self.rule} divides samples by their class, but {self.dataset} has {other.note}: take one of "
                f"{', '.join(targets.FREE_OF_CLASSES)}"
            )
        return other

    def _server_first(self, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """(the samples of the server, those of the clients)."""
        if self.server >= samples:
            raise ValueError(f"server={self.server} leaves no sample of {self.dataset} for clients: it has {samples}")
        order = np.random.default_rng(self.seed).permutation(samples) if self.server else np.arange(samples)
        return order[: self.server], np.sort(order[self.server :])


def _uses(order: np.ndarray, samples: int) -> str:
    """How many samples a partition of one's own gives to clients, and how many of them to several."""
    once, counts = np.unique(order, return_counts=True)
    several = int(np.count_nonzero(counts > 1))
    shared = f", {several:,} of them to several clients, of which one may test on what another trains on" if several else ""
    return f"gives clients {len(once):,} of {samples:,} samples{shared}"


LEAST_OF_LENET = 16
"""Height and width of the smallest images that its two convolutions of 5 x 5, each with a pooling, leave a pixel of."""


def model_name(name: str | None, data: FederatedData) -> str:
    """The name of a model; where none is given, the LeNet for colour images that are large enough, else the perceptron."""
    shape = data.x.shape[1:]
    return name or ("lenet" if len(shape) == 3 and shape[-1] == 3 and min(shape[:2]) >= LEAST_OF_LENET else "mlp")


def model_for(name: str | None, data: FederatedData, options: Mapping[str, Any], kind: str = "") -> Task:
    """A model, see `lookup.model`, for the shape of the data; see `model_name`.

    Targets that are no classes are what `kind` says, see `Protocol.targets`, else what `targets.kind` finds in their values.
    """
    if name == "matrix_factorisation":
        return models.matrix_factorisation(**{"items": int(np.max(data.x["item"])) + 1, **options})
    if isinstance(data.x, dict):
        known = "; take model matrix_factorisation" if name is None and "item" in data.x else ""
        raise ValueError(
            f"{'the default model' if name is None else f'model={name!r}'} takes one array of inputs, but the data have "
            f"{', '.join(data.x)}{known}"
        )
    shape, name = data.x.shape[1:], model_name(name, data)
    build = lookup.model(name)
    takes = inspect.signature(build).parameters
    if "vocabulary" in takes:
        if data.x.ndim != 2 or not np.issubdtype(data.x.dtype, np.integer):
            given = f"{data.x.dtype}[S{''.join(f', {side}' for side in shape)}]"
            raise ValueError(f"model={name!r} reads tokens, integers [S, T], but the inputs are {given}")
        if not data.num_classes:
            raise ValueError(f"model={name!r} predicts tokens or classes, but the targets are none")
        each = data.y.ndim == 2  # a label for each token, or one for the whole text
        form: dict[str, Any] = {"vocabulary": max(_tokens(name, data), data.num_classes), "length": shape[0]}
        form |= {"every": each} if "every" in takes else {}
        form |= {"classes": data.num_classes} if "classes" in takes and not each else {}
        return _made(name, {**form, **options})
    if not data.num_classes:
        return _of_targets(name, data, options, kind)
    return _made(name, {**_form(takes, shape), "classes": data.num_classes, **options})


def _tokens(name: str, data: FederatedData) -> int:
    """The least vocabulary that has all tokens of some samples; raises `ValueError` for integers that are no tokens."""
    least, most = int(np.min(data.x)), int(np.max(data.x))
    if least < 0 or most >= checks.MOST_CLASSES:
        raise ValueError(
            f"model={name!r} reads tokens, integers from 0 to {checks.MOST_CLASSES - 1}, but the inputs hold "
            f"{least if least < 0 else most}"
        )
    return most + 1


def _form(takes: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The shape of one sample, in the words of a builder."""
    if "window" in takes:
        return {"window": shape}
    if "inputs" in takes:
        return {"inputs": math.prod(shape)}
    return {"image": shape if len(shape) == 3 else (*shape, 1)}


def _of_targets(name: str, data: FederatedData, options: Mapping[str, Any], kind: str) -> Task:
    """A model with an output for each target `[S, d]`, the loss that they ask for, and what is measured of it."""
    y = data.y
    if getattr(y, "ndim", 0) != 2:
        raise ValueError(f"model={name!r} takes targets [S, d] where there are no classes, not {checks.shown(y)}")
    several = (kind or targets.kind(y)) == targets.LABELS
    loss = tasks.sigmoid_cross_entropy if several else tasks.squared_error()
    metrics = ("label_accuracy", "f1") if several else ("mae", "rmse", "r2")
    form = _form(inspect.signature(lookup.model(name)).parameters, data.x.shape[1:])
    return _made(name, {**form, "classes": y.shape[1], "loss": loss, **options})._replace(metrics=metrics)


def _made(name: str, given: Mapping[str, Any]) -> Task:
    """The model of a name with its arguments; a function of a user's own may not take them, or return something else."""
    build = lookup.model(name)
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        raise ValueError(f"model {name}: {error}") from None
    try:
        task = build(**given)
    except Exception as error:
        if not (isinstance(error, ValueError) or imports.place_of(error) is not None):
            raise
        raise ValueError(f"model {name}: {imports.said(error)}") from error
    if not isinstance(task, Task):
        raise ValueError(f"model {name} must return a Task, e.g. fm.classification(...), not {checks.shown(task)}")
    return task


def fingerprint(*populations: FederatedData | None) -> str:
    """A digest of all samples, labels and views of some clients."""
    digest = hashlib.blake2b(digest_size=8)
    for data in populations:
        for leaf in jax.tree.leaves(data):
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _check_options(where: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuses options that a function does not take, and a partition, generator or shift without one that it needs."""
    kind, _, called = where.partition(" ")
    parameters = inspect.signature(function).parameters
    if kind == "model":  # what it needs may follow from the data, see `model_for`
        checks.options(where, given, [name for name in parameters if name not in lookup.FROM_DATA], {}, error=ValueError)
        return
    taken = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name != "num_clients"]
    checks.options(where, given, taken, {}, error=ValueError)
    for name in taken:
        if parameters[name].default is inspect.Parameter.empty and name not in given and name != "seed":
            explained = f"; `fedjax-meta list {kind}s {called}` explains it" if kind in ("partition", "shift") else ""
            raise ValueError(f"{where} needs {name}{explained}")
