"""A study: which systems are compared on which scenarios, and how they are tuned. It reads from and writes to YAML."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_meta import checks, measures
from fedjax_meta.federation import OPTIONS
from fedjax_meta.methods import METHODS
from fedjax_meta.report.frames import USER_ACCURACY
from fedjax_meta.study import files, flags, lookup, parts, targets
from fedjax_meta.study.files import DRAW
from fedjax_meta.study.scenario import Scenario
from fedjax_meta.study.system import AMONG_CLIENTS, System, keywords

STORES = ("device", "host", "disk")
ON_DIVERGENCE = ("continue", "stop")

LONGEST_NAME = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a point of a system's grid is chosen, the same for all systems.

    Attributes:
      rounds, eval_every: of each trial; those of the study when not given. Only the last evaluation counts: where tests cost more
        than training, a large `eval_every` saves most of them.
      seeds: of the trials.
      metric: the score by which points are compared after the last round of a trial: the study's main one when not given, or
        another that is measured. "accuracy" is over all samples, for which confusion matrices must be measured, as they are by
        default; "accuracy_mean" and all others are means over clients, with or without "_mean" in their names.
      validation: what it is measured on: "samples" of the train view that were held back from training, "clients" that were
        held out, or "both", the mean of the two.
      clients: share of the known clients that is held out in the trials, for "clients" and "both".
      halving: after a part of the rounds only the best 1 / `halving` of a grid's points go on (successive halving, Jamieson and
        Talwalkar 2016); all of them when not given.
      extend: how often a grid is continued, by its own ratio, where the best value is at its end.
    """

    rounds: int | None = None
    eval_every: int | None = None
    seeds: Sequence[int] = (0,)
    metric: str | None = None
    validation: str = "samples"
    clients: float = 0.2
    halving: int | None = None
    extend: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "eval_every"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name))
        _check_seeds("tuning.seeds", self.seeds)
        if self.metric is not None:
            checks.word("metric", self.metric)
        checks.one_of("validation", self.validation, ("samples", "clients", "both"))
        checks.fraction("clients", self.clients)
        if self.halving is not None:
            checks.count("halving", self.halving, least=2)
        checks.count("extend", self.extend, least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A number that a paper prints.

    Attributes:
      system, scenario: names in the study.
      clients: "known" or "new".
      score: name in `metrics.summary`, or of another metric, as in `Tuning`.
      value: in percent if the score is a share.
      note: where it is printed, and what is unclear about it.
    """

    system: str
    scenario: str
    value: float
    clients: str = "known"
    score: str = "accuracy"
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("system", "scenario", "score"):
            checks.word(name, getattr(self, name))
        checks.finite("value", self.value)
        if not isinstance(self.note, str):
            raise ValueError(f"note={checks.shown(self.note)} must be text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Systems times scenarios times seeds.

    Attributes:
      title: of the report.
      scenarios, systems: by name.
      rounds, eval_every, seeds: of every run.
      data_seeds: seeds of several draws of every scenario's clients, which become scenarios "name@seed"; each is tuned and
        trained on its own, and tables have the mean and the spread over draws and seeds together. The scenario's own seed alone
        when empty.
      federation: options of every system that does not say otherwise.
      metrics: what is measured: names in `measures.METRICS`, `top_` and a number, or "module:name" of a metric of your own. What
        the task says when not given: for class labels the confusion matrix (accuracy, F1), for tokens accuracy and perplexity,
        for real targets MAE, RMSE and R².
      main: the score that tables, figures and comparisons show, and by which hyper-parameters are chosen; when not given the
        first of `metrics`, or of what the task says.
      tuning: how grids are searched.
      user_accuracy: records MTFL's user accuracy of each round in the final runs: the accuracy of the round's clients before they
        train, on their own view "test". It names the view on which methods that adapt do so first ("support", "train"); or it
        names that view for each system, and is recorded of these alone. Clients that the scenario says are noisy do not count.
      delta: of the epsilon that tables print of systems with noise; N^-1.1 for N clients when not given.
      devices: how many devices share the members of a sweep, or with a store the cohort; all when not given. A member is
        trained by one device, so that its numbers do not depend on how many there are.
      store: where what clients keep is while others train: "device"; "host", its memory; or "disk", files below the run's folder.
        With a store the members of a sweep train one after the other, and a device holds the rows of one cohort.
      on_divergence: "continue" trains a run that has diverged to its end, since it may recover; "stop" ends it at the evaluation
        after which it has.
      stop_at: a target, e.g. "user_accuracy=95" or "80" (of the main score): a final run ends at the evaluation after which it
        was reached. Scores are then those of that round.
      published: numbers to print beside the measured ones.
      notes: lines for the report.

    Raises:
      ValueError: nothing to compare, counts out of range, a published number of an unknown system or scenario.
    """

    title: str
    scenarios: Mapping[str, Scenario]
    systems: Mapping[str, System]
    rounds: int = 100
    eval_every: int = 20
    seeds: Sequence[int] = (1,)
    data_seeds: Sequence[int] = ()
    federation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Sequence[str] = ()
    main: str | None = None
    tuning: Tuning = dataclasses.field(default_factory=Tuning)
    user_accuracy: str | Mapping[str, str] | None = None
    delta: float | None = None
    devices: int | None = None
    store: str = "device"
    on_divergence: str = "continue"
    stop_at: str | float | None = None
    published: Sequence[Published] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        checks.count("rounds", self.rounds)
        checks.count("eval_every", self.eval_every)
        _check_seeds("seeds", self.seeds)
        if self.data_seeds is None:  # an empty field of a file
            object.__setattr__(self, "data_seeds", ())
        if self.data_seeds:
            _check_seeds("data_seeds", self.data_seeds)
            object.__setattr__(self, "scenarios", _drawn(self.scenarios, self.data_seeds))
        for kind in ("scenarios", "systems"):
            if not getattr(self, kind):
                raise ValueError(f"a study needs {kind}")
            for name in getattr(self, kind):
                if not isinstance(name, str) or not name.replace("-", "_").replace(DRAW, "_", 1).isidentifier():
                    quoted = "" if isinstance(name, str) else f", in quotes where YAML reads a {type(name).__name__}"
                    raise ValueError(f"{kind}: {name!r} must be made of letters, digits, _ and -{quoted}")
                if len(name) > LONGEST_NAME:  # files are called so
                    raise ValueError(f"{kind}: {checks.shown(name)} must have {LONGEST_NAME} letters at most")
        checks.word("title", self.title)
        titles = [self.title_of(name) for name in self.systems]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(f"two systems have the title {title!r}: give each its own")
        bases = [name.partition(DRAW)[0] for name in self.scenarios]
        for name, system in self.systems.items():
            for scenario in system.scenarios or ():
                checks.one_of(f"systems.{name}.scenarios", scenario, bases)
        self._check_scenarios()
        checks.options("federation", self.federation, OPTIONS, {}, error=ValueError)
        self._check_goal()
        self._check_metrics()
        if self.delta is not None:
            checks.fraction("delta", self.delta)
        if self.devices is not None:
            checks.count("devices", self.devices)
        checks.one_of("store", self.store, STORES)
        checks.one_of("on_divergence", self.on_divergence, ON_DIVERGENCE)
        if self.store != "device" and self.tuning.halving is not None:
            raise ValueError(
                f"store={self.store!r} trains one member after the other, so that halving compares none: leave it out"
            )
        if self.store != "device" and self.user_accuracy is not None:
            raise ValueError(f"user_accuracy needs all rows on the device: leave store={self.store!r} out")
        views = self.user_accuracy if isinstance(self.user_accuracy, Mapping) else {}
        for name in views:
            checks.one_of("system in user_accuracy", name, self.systems)
        for view in views.values() if views else [self.user_accuracy]:
            if view is not None and not isinstance(view, str):
                raise ValueError(f"user_accuracy={self.user_accuracy!r} must name a view, or a view for each system")
        for row in self.published:
            checks.one_of("published.system", row.system, self.systems)
            checks.one_of("published.scenario", row.scenario, bases)
            checks.one_of("published.clients", row.clients, ("known", "new"))

    def _check_scenarios(self) -> None:
        for name, scenario in self.scenarios.items():
            if not self.systems_on(name):
                raise ValueError(f"scenarios.{name}: no system is run on it")
            for system in self.systems_on(name):
                of_parts = {path: values[0] for path, values in self.systems[system].grid.items() if "." in path}
                if not (scenario.federation or scenario.attackers or of_parts):
                    continue
                try:
                    parts.placed(self.system(system, name).federation, of_parts)
                except ValueError as error:
                    raise ValueError(f"scenarios.{name}, systems.{system}: {error}") from None

    def _check_goal(self) -> None:
        if isinstance(self.stop_at, bool) or not isinstance(self.stop_at, (str, int, float, type(None))):
            raise ValueError(f"stop_at={self.stop_at!r} must be a number, or SCORE=NUMBER, e.g. 80 or rmse=0.9")
        if self.goal is not None and self.goal.name == USER_ACCURACY:
            for name in self.systems:
                if self.user_accuracy_of(name) is None:
                    raise ValueError(f"stop_at={self.stop_at!r} needs user_accuracy, which is not recorded of {name}")

    def _check_metrics(self) -> None:
        if not isinstance(self.metrics, (list, tuple)) or not all(isinstance(name, str) for name in self.metrics):
            raise ValueError(f"metrics={self.metrics!r} must be a list of names, e.g. [rmse, mae]")
        if self.main is not None:
            checks.word("main", self.main)
        # The number of classes is that of the data; any does to see what the names are.
        names = [metric.name for metric in measures.resolve(self.metrics, classes=2)]
        # Where the study names none, the task does, from these.
        known = {*(names or measures.METRICS), "loss", *(("accuracy", "f1") if measures.CONFUSION in names else ())}
        goal, tuned = "" if self.goal is None else self.goal.name, (self.tuning.metric or "").removesuffix("_mean")
        for field, name in (("main", self.main), ("tuning.metric", tuned), ("stop_at", goal)):
            if name and name != USER_ACCURACY:
                checks.one_of(f"{field}: score", name, sorted(known - {measures.CONFUSION}))

    @property
    def score(self) -> str | None:
        """The name of the main score; `None` where the task says it, see `report.score_names`."""
        if self.main is not None or not self.metrics:
            return self.main
        first = measures.resolve(self.metrics[:1], classes=2)[0].name
        return "accuracy" if first == measures.CONFUSION else first

    @property
    def goal(self) -> targets.Target | None:
        """What `stop_at` says, with the main score where it names none."""
        if self.stop_at is None:
            return None
        goal = targets.target(str(self.stop_at), name="stop_at")
        return goal if goal.name is not None else goal._replace(name=self.score)

    @property
    def tuned_by(self) -> Tuning:
        """The tuning, with the main score where it names none."""
        metric = self.tuning.metric or (f"{self.score}_mean" if self.score is not None else None)
        return dataclasses.replace(self.tuning, metric=metric)

    def title_of(self, system: str) -> str:
        """A system's title in tables."""
        return self.systems[system].title or system

    def systems_on(self, scenario: str) -> list[str]:
        """The systems that are run on a scenario, or on a draw of it, in order."""
        base = scenario.partition(DRAW)[0]
        return [name for name, system in self.systems.items() if system.scenarios is None or base in system.scenarios]

    def scenario(self, name: str) -> Scenario:
        """A scenario by its name, or the first draw of it."""
        return next(one for key, one in self.scenarios.items() if name in (key, key.partition(DRAW)[0]))

    def user_accuracy_of(self, system: str) -> str | None:
        """The view that clients adapt on before a system's user accuracy is measured; `None` if it is not recorded."""
        return self.user_accuracy.get(system) if isinstance(self.user_accuracy, Mapping) else self.user_accuracy

    def system(self, name: str, scenario: str | None = None) -> System:
        """A system with the federation's options and the rounds of the study filled in, and with what a scenario says.

        Raises:
          ValueError: options of the scenario that no federation takes, and what `parts.told` and `parts.to_spend` refuse.
        """
        own, shared = self.systems[name], dict(self.federation)
        on_scenario = None if scenario is None else self.scenario(scenario)
        if on_scenario is not None:
            shared |= on_scenario.federation
        if own.pooled:
            shared = {key: value for key, value in shared.items() if key not in AMONG_CLIENTS}
        merged = {**{key: value for key, value in shared.items() if key not in own.grid}, **own.federation}
        merged = parts.to_spend(merged, rounds=self.rounds, delta=self.delta)
        if on_scenario is not None:
            # A grid may be extended, beyond every size that is known here.
            sizes = [*own.grid["cohort_size"], 10**6] if "cohort_size" in own.grid else ()
            merged = parts.told(merged, attackers=on_scenario.attackers, cohort_sizes=sizes)
        return dataclasses.replace(own, federation=merged, rates={**own.rates, **parts.over_rounds(own.changing, self.rounds)})


def load(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    variants: Sequence[str] = (),
    systems: str | Sequence[str] | None = None,
    scenarios: str | Sequence[str] | None = None,
    scenario_fields: Mapping[str, Any] | None = None,
) -> Study:
    """Reads a study from a YAML file, or a study of the package by its name. Without a title it is called as the file.

    Args:
      path: of the file, or the name; `None` for a study of `systems` that are written as calls, see `flags.study`.
      overrides: `"systems.fedavg.options.epochs=5"`; a value is read as YAML.
      variants: names of changes that the file holds under "variants", in order; overrides come after them.
      systems: those to keep, with the scenarios, published numbers and notes that concern them; all when not given. Names, or a
        text of names between commas.
      scenarios: those to keep, with the systems that are run on them, likewise.
      scenario_fields: of all scenarios, see `flags.scenario`.

    Raises:
      OSError: the file cannot be read.
      ValueError: no YAML, a field that does not exist, and what `Study` refuses; the message names the field.
    """
    if isinstance(systems, str) and path is not None:
        systems = flags.words(systems)
    if isinstance(scenarios, str):
        scenarios = flags.words(scenarios)
    tree = flags.study(str(systems or "")) if path is None else files.read(path)
    tree = files.variants(tree, variants)
    flags.everywhere(tree, scenario_fields or {})
    for text in overrides:
        files.override(tree, text)
    if path is not None and tree.get("title") is None:
        tree["title"] = Path(path).stem
    named = None if path is None or systems is None else [*systems]
    return from_tree(tree if named is None and scenarios is None else files.only(tree, named, scenarios))


def from_tree(tree: Mapping[str, Any]) -> Study:
    """A study from nested mappings, as YAML holds it.

    Raises:
      ValueError: see `load`.
    """
    tree = files.variants(dict(tree))
    if not isinstance(tree.get("federation") or {}, Mapping):
        raise ValueError(f"federation must be a mapping of options, not {checks.shown(tree['federation'])}")
    for name in ("published", "notes"):
        if not isinstance(tree.get(name) or [], (list, tuple)):
            raise ValueError(f"{name} must be a list, not {checks.shown(tree[name])}")
    for kind, of in (("scenarios", Scenario), ("systems", System)):
        named = tree.get(kind)
        if not isinstance(named, Mapping) or not named:
            raise ValueError(f"{kind} must be a mapping of names")
        if of is System:
            named = {name: _with_method(name, entry) for name, entry in named.items()}
        tree[kind] = {name: _object(f"{kind}.{name}", of, value) for name, value in files.expanded(kind, named).items()}
    if "tuning" in tree:
        tree["tuning"] = _object("tuning", Tuning, tree["tuning"])
    if "published" in tree:
        rows = files.published(tree["published"] or ())
        tree["published"] = [_object(f"published[{i}]", Published, row) for i, row in enumerate(rows)]
    if "notes" in tree:
        tree["notes"] = files.notes(tree["notes"] or (), tree["systems"])
    return _object("study", Study, tree)


def to_tree(study: Study) -> dict[str, Any]:
    """Nested mappings of plain values, from which `from_tree` makes the same study."""
    return _plain(dataclasses.asdict(study))


def to_yaml(study: Study) -> str:
    """The study as YAML, with all its fields; options that are not given stay so."""
    return files.text_of(to_tree(study))


def _with_method(name: Any, entry: Any) -> Any:
    """A system that names no method is that of its own name, if there is one."""
    if not (entry is None or (isinstance(entry, Mapping) and "method" not in entry)):
        return entry
    if name not in METHODS:
        raise ValueError(f"systems.{name} needs method, because its name is that of none{checks.nearest(name, METHODS)}")
    return {"method": name, **(entry or {})}


def _object(where: str, of: type, given: Any) -> Any:
    """A dataclass from a mapping; its errors begin with where they are in the file."""
    if dataclasses.is_dataclass(given):
        return given
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a mapping, not {given!r}")
    fields = {field.name: field for field in dataclasses.fields(of)}
    # A field of mappings that stands there without any, as `options:`, is an empty one.
    blank = [f.name for f in fields.values() if f.default_factory is dict and f.name in given and given[f.name] is None]
    given = {name: value for name, value in given.items() if name not in blank}
    for name in given:
        if name not in fields:
            owner = _owner(of, given, name)
            hint = checks.nearest(name, fields) if owner is None else f", which belongs to {owner}"
            raise ValueError(f"{where} has no field {name!r}{hint}; allowed are {', '.join(fields)}")
    needed = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    for name in needed:
        if name not in given:
            raise ValueError(f"{where} needs {name}")
    try:
        return of(**given)
    except ValueError as error:
        raise ValueError(str(error) if where == "study" else f"{where}: {error}") from None


def _owner(of: type, given: Mapping[str, Any], name: Any) -> str | None:
    """Which other field has what stands one level too high; `None` if it is not known."""
    if of in (Study, Scenario, System) and name in OPTIONS:
        return "federation"
    if of is Study:
        kinds = (("scenarios", Scenario), ("systems", System))
        return next((kind for kind, one in kinds if name in [field.name for field in dataclasses.fields(one)]), None)
    method = given.get("method") if of is System else None
    return "options" if isinstance(method, str) and name in keywords(lookup.method(method)) else None


def _drawn(scenarios: Mapping[str, Scenario], seeds: Sequence[int]) -> dict[str, Scenario]:
    """Every scenario once for each seed. Draws of these seeds that are there already stay, and those of others are left out."""
    drawn: dict[str, Scenario] = {}
    for name, scenario in scenarios.items():
        base = name.partition(DRAW)[0]
        for label, seed in ((f"{base}{DRAW}{seed}", seed) for seed in seeds):
            if label not in drawn:
                drawn[label] = scenarios.get(label) or dataclasses.replace(scenario, seed=seed)
    return drawn


def _check_seeds(name: str, seeds: Any) -> None:
    if not isinstance(seeds, (list, tuple)) or not seeds:
        raise ValueError(f"{name}={seeds!r} must be a list of at least one seed")
    for seed in seeds:
        checks.seed(name, seed, bits=32)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{name}={list(seeds)} names a seed twice")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
