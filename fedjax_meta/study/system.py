"""A system: a method and how it is run, with parts that are given by name so that a file can hold them."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fedjax_meta import checks, masks
from fedjax_meta import federation as federations
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.contract import Method
from fedjax_meta.features import with_projection
from fedjax_meta.federation import Federation
from fedjax_meta.rounds import federate
from fedjax_meta.study import lookup, presets, rates
from fedjax_meta.study.parts import (
    PARTS,
    UPLOADS,
    at_point,
    filled,
    made,
    over_rounds,
    part,
    placed,
    told,
    with_clients,
    written_as,
)
from fedjax_meta.study.scenario import Clients
from fedjax_meta.task import Task

OF_A_STUDY = ("rounds", "seeds", "eval_every", "metrics", "tuning", "data_seeds", "store", "stop_at")
"""Fields of a study that one may look for in a system."""

AMONG_CLIENTS = ("participation", "uploads", "aggregator", "attack")
"""Options of a federation that central training does not have. Of the schedule it has the number of passes alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A method in a federation, ready to be compared.

    A part is written as its name (`outer_optimizer: adam`), or as a name with options (`estimator: {name: implicit,
    prox_weight: 2.0}`); aggregators and attacks also as on a command line (`aggregator: nearest_neighbours:f=2+median`). What a
    scenario says of attackers, and epsilons, are filled in by `Study.system`, see `parts.told`.

    Attributes:
      method: name in `METHODS`, or "module:name" of a builder of your own.
      options: of the method.
      federation: of `Federation`; `uploads` is a list of parts.
      rates: how rates change over the rounds, by the name of an option of the method, or "server_lr" of the federation, which
        counts the server's steps: a part whose factor multiplies the value of that option, be it given or of the grid, see
        `study.rates`. Clients that adapt in tests have the rate after the last round, unless `tested_with` says it.
      grid: values to try, by the name of an option of the method or the federation, or of an option of a part:
        "attack.scale", "uploads.clip.norm".
      title: for tables; the method's name when not given.
      preset: name of tuned values, see `presets`; they fill in options that are not given, and how these change over the rounds
        (`rates: {lr: null}` keeps one constant).
      scenarios: names of the scenarios that it is run on; all when not given.
      projection: numbers between two more layers before the head, which MOON's contrast needs (`features.with_projection`);
        none when not given.
      tested_with: options of the method in tests, where they differ from those in rounds: `{finetune_epochs: 1}` tests MTFL's
        clients after local training. User accuracy is measured without them.
      pooled: central training: one client holds the samples of all that train, and makes as many passes over them as a client
        makes on average in the study's rounds. Only for methods without personal leaves and memory, such as FedAvg. It has no
        options that are about many clients (`AMONG_CLIENTS`); those of its study are left out.

    Raises:
      ValueError: an unknown method, option, part or preset, a preset of another method, a grid without values, an option that is
        also in the grid.
    """

    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    federation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rates: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grid: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    title: str | None = None
    preset: str | None = None
    scenarios: Sequence[str] | None = None
    projection: int | None = None
    pooled: bool = False
    tested_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.title is not None:
            checks.word("title", self.title)
        for name in ("options", "federation", "rates", "grid", "tested_with"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name}={checks.shown(getattr(self, name))} must be a mapping of names and values")
        if not isinstance(self.federation.get("uploads") or [], (list, tuple)):
            chain = checks.shown(self.federation["uploads"])
            raise ValueError(f"uploads={chain} must be a list of parts, e.g. [{{name: clip, norm: 1.0}}]")
        builder = lookup.method(self.method)
        if self.preset is not None:
            self._fill_in(presets.find(self.preset))
        self._check_options(keywords(builder))
        self._check_rates(builder)
        self._check_grid()
        if self.scenarios is not None and (not isinstance(self.scenarios, (list, tuple)) or not self.scenarios):
            raise ValueError(f"scenarios={self.scenarios!r} must be a list of names; leave it out for all")
        if self.projection is not None:
            checks.count("projection", self.projection)
        self._check_pooled()
        self._check_parts()

    def _check_options(self, taken: Sequence[str]) -> None:
        for name in self.grid:
            checks.word("option in the grid", name)
        given = dict.fromkeys([*self.options, *(name for name in self.grid if "." not in name)])
        own = [name for name in given if name not in federations.OPTIONS or name in self.options]
        for name in own:
            if name not in taken and (written := written_as(name, [*taken, *federations.OPTIONS])):
                raise ValueError(f"{self.method} takes no {name!r}: it is a part, which is written as {written}")
        elsewhere = {**dict.fromkeys(OF_A_STUDY, "the study"), **dict.fromkeys(federations.OPTIONS, "federation")}
        checks.options(self.method, own, taken, elsewhere, error=ValueError)
        checks.options(self.method, self.tested_with, taken, {}, error=ValueError)
        checks.options("federation", self.federation, federations.OPTIONS, dict.fromkeys(taken, "options"), error=ValueError)

    def _check_grid(self) -> None:
        for name, values in self.grid.items():
            if name in self.options or name in self.federation:
                raise ValueError(f"{name} has a value and a grid: leave one of them out")
            numbers = isinstance(values, (list, tuple)) and values and all(_is_number(value) for value in values)
            if not numbers or len(set(values)) < len(values):
                hint = "; `each` tries other values" if isinstance(values, (list, tuple)) and values and not numbers else ""
                raise ValueError(f"grid of {name} must be a list of different numbers, not {values!r}{hint}")

    def _check_pooled(self) -> None:
        checks.flag("pooled", self.pooled)
        if self.pooled and self.changing:
            raise ValueError("pooled and rates, which change over the rounds of a federation: leave one of them out")
        if self.pooled and self.tested_with:
            raise ValueError("pooled and tested_with: leave one of them out")
        if self.pooled and "cohort_size" in self.grid:
            raise ValueError(
                "pooled: central training has one client, so that a grid of cohort_size changes nothing: leave it out"
            )
        odd = [name for name in AMONG_CLIENTS if self.pooled and name in self.federation]
        if odd:
            raise ValueError(f"pooled: central training knows no {odd[0]}: leave it out")

    def _check_parts(self) -> None:
        # Words for numbers that a scenario will give have a value here, so that the rest can be checked.
        # The study or a scenario may have the part that a grid is about.
        of_parts = {
            name: values[0] for name, values in self.grid.items() if "." in name and name.split(".")[0] in self.federation
        }
        shared = told(placed(self.federation, of_parts), attackers=0.1)
        for name, value in {**self.options, **shared}.items():
            if name in PARTS:
                part(name, value)
        for one in shared.get("uploads") or ():
            made("uploads", UPLOADS, one)

    def _check_rates(self, builder: Callable[..., Method]) -> None:
        own = rates.of(builder)
        checks.options(f"rates of {self.method}", self.rates, [*own, rates.SERVER], {}, error=ValueError)
        if rates.SERVER in self.rates and rates.SERVER in own:
            raise ValueError(
                f"rates: {self.method} has {rates.SERVER} of its own, for an optimiser that counts rounds itself: take a method "
                f"without it, such as fedavg with federation: {{server_optimizer: adam, {rates.SERVER}: 0.01}}"
            )
        for name, value in self.options.items():
            word = value.get("name") if isinstance(value, Mapping) else str(value).partition("(")[0]
            if isinstance(word, str) and word in rates.RATES and name in own:
                raise ValueError(
                    f"{name}={checks.shown(value)}: give {name} a number, and beside it rates: {{{name}: {word}}}"
                )
        for name, value in over_rounds(self.changing, rounds=checks.LARGEST_COUNT).items():
            made(f"rates: {name}", rates.RATES, value)

    def _fill_in(self, preset: presets.Preset) -> None:
        if preset.method != self.method:
            raise ValueError(f"preset {preset.name} is of method {preset.method}, not {self.method}")
        given = {*self.options, *self.federation}
        takes, free = keywords(lookup.method(self.method)), {**preset.options, **preset.chosen}
        for kind, mine in (("options", [name for name in free if name in takes]), ("federation", set(free) - set(takes))):
            tuned = {name: free[name] for name in mine if name not in self.grid and "." not in name}
            object.__setattr__(self, kind, {**tuned, **getattr(self, kind)})
        # How a value changes belongs to the value: one that the preset fills in, or the default of its method.
        filled_in = {*takes, *free} - {*given, *self.grid}
        theirs = {name: value for name, value in preset.rates.items() if name in filled_in and not self.pooled}
        object.__setattr__(self, "rates", {**theirs, **self.rates})
        # Options of parts, where the system has the part and does not say them itself.
        of_parts = {name: value for name, value in free.items() if "." in name and name not in self.grid}
        object.__setattr__(self, "federation", filled(self.federation, of_parts))

    @property
    def changing(self) -> dict[str, Any]:
        """`rates` without the nulls, which say what does not change although a preset says so."""
        return {name: part for name, part in self.rates.items() if part is not None}

    def build(self, clients_or_task: Clients | Task, **numbers: Any) -> Algorithm:
        """The algorithm, see `parts`."""
        return federate(*self.parts(clients_or_task, **numbers))

    def tested(self) -> "System":
        """The system as clients are tested, with the options of `tested_with`, which do not change over the rounds."""
        left, changing = (
            {name: part for name, part in some.items() if name not in self.tested_with} for some in (self.grid, self.rates)
        )
        # What a preset says is filled in already; rates that were left out would be filled in again.
        options = {**self.options, **self.tested_with}
        return dataclasses.replace(self, options=options, rates=changing, grid=left, tested_with={}, preset=None)

    def tested_parts(self, clients_or_task: Clients | Task, **numbers: Any) -> tuple[Method, Federation]:
        """`parts` of `tested`: an option of `tested_with` has its value there, also where the grid has numbers of it."""
        left = {name: value for name, value in numbers.items() if name not in self.tested_with}
        return self.tested().parts(clients_or_task, **left)

    def parts(self, clients_or_task: Clients | Task, **numbers: Any) -> tuple[Method, Federation]:
        """The method and its federation.

        Args:
          clients_or_task: the clients of a scenario; their task alone will do where no part needs more.
          **numbers: of the grid; they may be traced.

        Raises:
          ValueError: what the method or the federation refuses.
        """
        task, clients = (
            (clients_or_task, None) if isinstance(clients_or_task, Task) else (clients_or_task.task, clients_or_task)
        )
        builder = lookup.method(self.method)
        takes = keywords(builder)
        options = {name: part(name, value) if name in PARTS else value for name, value in self.options.items()}
        options |= {name: value for name, value in numbers.items() if name in takes}
        federation = at_point(self.federation, {name: value for name, value in numbers.items() if name not in takes})
        if self.pooled:
            federation = {name: value for name, value in federation.items() if name != "schedule"}
        try:
            shared = with_clients(federation, clients)
            if self.projection is not None:
                task = with_projection(task, *_size_of_head(task), projection=self.projection)
            factors = {name: made(f"rates: {name}", rates.RATES, value) for name, value in self.changing.items()}
            of_server = factors.pop(rates.SERVER, None)
            method = rates.method(builder, task, factors, options)
            return method, rates.federation(Federation(**shared), of_server, method)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _size_of_head(task: Task) -> tuple[int, int]:
    """(d, K) of a task whose head is one dense layer."""
    leaves = jax.tree.leaves(masks.split(masks.variables_shape(task), masks.resolve("head", task))[0])
    shapes = sorted((leaf.shape for leaf in leaves), key=len)
    if [len(shape) for shape in shapes] != [1, 2]:
        raise ValueError("projection needs a model whose head is one dense layer with a bias")
    return math.prod(shapes[1]) // shapes[0][0], shapes[0][0]


def keywords(function: Callable[..., Any]) -> list[str]:
    """The options of a method, a partition or the like: its keyword-only arguments."""
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
