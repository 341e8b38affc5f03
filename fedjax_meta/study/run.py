"""Runs a study: tunes every system alike, trains it with every seed, and saves what it finds as it comes.

A run's folder holds `study.yaml` (every field filled in), `run.json` (versions, devices, clients, fingerprints), `metrics.jsonl`
(one line for each evaluation of each member), `results/` (one file for each finished system), `state/` (checkpoints) and the
report; where processes share it also `parts/`, with the metrics of each system as they come.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import disk, sweeps
from fedjax_meta import host_store as stores
from fedjax_meta.aggregate import as_rule
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.attacks import stamped
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData, pooled
from fedjax_meta.data.views import check_view
from fedjax_meta.engine import client_mesh
from fedjax_meta.evaluation import Evaluation, evaluate, with_user_accuracy
from fedjax_meta.federation import Federation
from fedjax_meta.study import baselines, presets, promise
from fedjax_meta.study import folder as folders
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.phase import Ahead, Desk, Phase, Stopped, Watcher, results_path, trials
from fedjax_meta.study.scenario import TESTED_ON, Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.system import System, part
from fedjax_meta.study.tuning import KNOWN, NEW, VALIDATION, VALIDATION_CLIENTS, Trial, points_of
from fedjax_meta.sweeps import MemberEvaluator

BACKDOOR = "backdoor"
"""The group of tests of known clients whose samples carry the pattern of the attack of this name."""

_PAUSE = 1.0
"""Seconds between two looks at what other processes have finished."""

__all__ = [
    "BACKDOOR",
    "KNOWN",
    "NEW",
    "VALIDATION",
    "VALIDATION_CLIENTS",
    "Outcome",
    "Stopped",
    "Trial",
    "Watcher",
    "build",
    "passes",
    "points_of",
    "run",
    "shared",
]


class Outcome(NamedTuple):
    """A system's results on a scenario.

    Attributes:
      scenario, system: names in the study.
      tuning: the trials of the grid; empty without a grid of several points.
      chosen: the point that the final runs had.
      at_edge: names of the numbers that were chosen at the end of their grid.
      final: a trial for each seed.
    """

    scenario: str
    system: str
    tuning: list[Trial]
    chosen: dict[str, float]
    at_edge: list[str]
    final: list[Trial]

    @property
    def seconds(self) -> tuple[float, float]:
        """Wall-clock of training and testing, and of compilation, of all trials."""
        rows = [row for trial in (*self.tuning, *self.final) for row in trial.rows]
        return sum(row["seconds"] for row in rows), sum(row["compile_seconds"] for row in rows)


def build(study: Study, data_dir: str | None = None) -> dict[str, Clients]:
    """The clients of every scenario."""
    return {name: scenario.build(data_dir) for name, scenario in study.scenarios.items()}


def run(
    study: Study,
    folder: Path,
    *,
    watcher: Watcher,
    clients: Mapping[str, Clients] | None = None,
    command: str = "",
    should_stop: Callable[[], bool] | None = None,
) -> list[Outcome]:
    """Runs what is not finished of a study.

    Args:
      study: what to run.
      folder: of the run; made if it is not there. A run that was stopped goes on where it was.
      watcher: is told of every step.
      clients: of every scenario, as `build` gives them; built here when not given.
      command: how the run was started, for the record.
      should_stop: asked about once a second, between rounds; the run saves what it has reached where it returns true.

    Returns:
      The outcomes, scenario by scenario.

    Raises:
      Stopped: `should_stop` ended the run; the same call goes on.
      ValueError: several processes, a scenario that cannot be built, a system that a scenario refuses, a folder that holds
        another study (the message names each field that differs).
      OSError: the folder cannot be written, or another process has it.
    """
    built = build(study) if clients is None else clients
    _check_start(study, built)
    disk.lock(folder)
    folders.open_run(study, folder, built, command)
    steps, outcomes = _steps(study, built), []
    with _desk(folder, watcher, should_stop) as desk:
        for number, step in enumerate(steps):
            outcomes.append(step.run(steps[number + 1 :], desk))
            watcher.end(outcomes[-1])
    _save_presets(study, folder, outcomes)
    folders.close_run(folder)
    return outcomes


@contextlib.contextmanager
def shared(
    study: Study,
    folder: Path,
    *,
    watcher: Watcher,
    clients: Mapping[str, Clients] | None = None,
    command: str = "",
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[list[Outcome] | None]:
    """Takes part in a run that other processes may share: each calls this with the same study and folder.

    A process trains systems that no other one has; what a process had that died is taken by another. When all systems are
    finished, the block begins: with the outcomes in the process that is to report them, with `None` in the others as soon as that
    one's block has ended; where it fails, another one is to report. Numbers are those of `run`, and so are arguments and errors.

    Example:
      ```
      with shared(study, folder, watcher=watcher) as outcomes:
          if outcomes is not None:
              page.write_all(folder, study, build(study), outcomes)
      ```
    """
    earlier = folders.ending(folder)
    built = build(study) if clients is None else clients
    _check_start(study, built)
    steps = _steps(study, built)
    common = folder / folders.PARTS  # who has it writes what belongs to all
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(_desk(folder, watcher, should_stop))
        with _turn(common, desk.should_stop):
            at_work = disk.locked(folder, patience=_PAUSE / 5)
            if not stack.enter_context(disk.held(folder, shared=True)):
                raise disk.in_use(folder)
            # Short runs may begin and end while this process prepares itself: it took part in them all the same.
            if at_work or folders.ending(folder) not in (None, earlier):
                folders.join_run(study, folder, built)
            else:
                folders.open_run(study, folder, built, command)
        _train_free(steps, desk)
        with _turn(common, desk.should_stop):
            if folders.ending(folder) is not None:
                yield None
                return
            whole = desk._replace(metrics=folders.Metrics(folder))
            outcomes = [step.run([], whole) for step in steps]
            _save_presets(study, folder, outcomes)
            yield outcomes
            folders.close_run(folder)


def _check_start(study: Study, built: Mapping[str, Clients]) -> None:
    if jax.process_count() > 1:
        raise ValueError(
            f"a study runs in one process, and JAX sees {jax.process_count()}: start processes that do not know of each other, "
            "which can share a run, or train one method over all of them with simulate"
        )
    check(study, built)


def _steps(study: Study, built: Mapping[str, Clients]) -> list["_Step"]:
    return [_Step(study, scenario, name, built[scenario]) for scenario in built for name in study.systems_on(scenario)]


@contextlib.contextmanager
def _desk(folder: Path, watcher: Watcher, should_stop: Callable[[], bool] | None) -> Iterator[Desk]:
    """Where steps leave what they find."""
    ahead = Ahead()
    try:
        yield Desk(folder, folders.Metrics(folder), watcher, should_stop or (lambda: False), ahead)
    finally:
        ahead.close()


@contextlib.contextmanager
def _turn(place: Path, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Gives a folder to this process for the length of a block, as soon as no other one has it."""
    with contextlib.ExitStack() as stack:
        while not stack.enter_context(disk.held(place)):
            if should_stop():
                raise Stopped("waiting for another process, which opens the run or reports it")
            time.sleep(_PAUSE)
        yield


def _train_free(steps: Sequence["_Step"], desk: Desk) -> None:
    """Runs the steps that no other process has, until all are finished."""
    left, waits = list(steps), False
    while left:
        for step in list(left):
            place = folders.part(desk.folder, *step.where)
            with disk.held(place) as mine:
                if mine:
                    desk.watcher.end(step.run([], desk._replace(metrics=folders.Metrics(place))))
                    left.remove(step)
        if left:
            if desk.should_stop():
                raise Stopped(f"waiting for {len(left)} of {len(steps)} systems, which other processes train")
            if not waits:
                desk.watcher.wait([step.where for step in left])
            waits = True
            time.sleep(_PAUSE)


def check(study: Study, built: Mapping[str, Clients]) -> None:
    """Raises `ValueError` where a scenario refuses a score, a system or a point of its grid; trains and writes nothing."""
    for scenario, clients in built.items():
        _check_metrics(study, scenario, clients)
        for name in study.systems_on(scenario):
            with named(study, scenario, name):
                _check_system(study, scenario, name, clients)


def _save_presets(study: Study, folder: Path, outcomes: Sequence[Outcome]) -> None:
    """What the grids found, as presets: `presets/SCENARIO.yaml`."""
    content = folders.read_run(folder)
    for scenario, place in study.scenarios.items():
        tuned = [one for one in outcomes if one.scenario == scenario and one.tuning]
        if not tuned:
            continue
        systems = {}
        for one in tuned:
            system = study.system(one.system, scenario)
            best = choice.best(one.tuning, study.tuned_by)
            systems[one.system] = {
                "method": system.method,
                "options": dict(system.options),
                "chosen": one.chosen,
                "score": float(best.kind.text(best.score)),
                "metric": best.kind.label,
                "trials": len(one.tuning),
                "at the end of its grid": one.at_edge,
                "federation": dict(system.federation),
            }
        facts = {"study": study.title, "command": content["command"], "versions": content["versions"], "git": content["git"]}
        tuning = {**dataclasses.asdict(study.tuning), "rounds": study.tuning.rounds or study.rounds}
        tree = {"scenario": dataclasses.asdict(place), **facts, "tuning": tuning, "systems": systems}
        presets.write(folder / "presets" / f"{scenario}.yaml", tree)


def _check_metrics(study: Study, scenario: str, clients: Clients) -> None:
    """Raises where a scenario's task has no such scores."""
    found = baselines.scored(clients, study.metrics, baselines.untrained(clients))
    said = [row.score.removeprefix("raw_").removesuffix("_std") for row in study.published if row.scenario == scenario]
    for name in (study.score, study.tuned_by.metric, *said):
        base = None if name is None else name.removesuffix("_mean")
        if base is not None and base not in found:
            raise ValueError(f"scenario {scenario}: the score {base!r} is not measured; there are {', '.join(found)}")


def counted(study: Study, scenario: str, clients: Clients, data: FederatedData) -> np.ndarray | None:
    """The clients that are scored: those that attack in no system of the scenario, and whose inputs are not noisy.

    Args:
      study, scenario, clients: what is run.
      data: the clients that train: `clients.train`, or those of them that were not held out for trials.

    Returns:
      Ids; `None` for all clients.

    Raises:
      ValueError: nobody is left.
    """
    out = np.zeros(data.num_clients, bool)
    for name in study.systems_on(scenario):
        attack = part("attack", study.system(name, scenario).federation.get("attack"))
        if attack is not None:
            out |= attack.members(data.num_clients)
    if data.num_clients == clients.train.num_clients:
        out[clients.noisy] = True
    if out.all():
        raise ValueError(f"scenario {scenario}: all {data.num_clients} clients attack or are noisy: none is left to score")
    return np.flatnonzero(~out).astype(np.int32) if out.any() else None


@contextlib.contextmanager
def named(study: Study, scenario: str, name: str) -> Iterator[None]:
    """Errors begin with the scenario and the system, where a study has several."""
    try:
        yield
    except ValueError as error:
        said, many = str(error).partition("\n")[0], len(study.systems) > 1 or len(study.scenarios) > 1
        raise ValueError(f"{scenario}, {name}: {said}" if many else said) from None


def _check_system(study: Study, scenario: str, name: str, clients: Clients) -> None:
    system, view = study.system(name, scenario), study.user_accuracy_of(name)
    client_mesh(study.devices)
    points = points_of(system)
    training = [clients.train]
    if len(points) > 1:
        training.append(choice.data_for(study.tuning, study.scenarios[scenario], clients)[0])
    for data in training:
        counted(study, scenario, clients, data)
    traced: set[tuple[Any, ...]] = set()
    for point in points:
        algorithm = system.build(clients, **point)
        if study.store != "device":
            stores.check_algorithm(algorithm)
        promise.words(study, algorithm, clients.train.num_clients)
        shape = tuple(point[name] for name in choice.shaping(system))
        if shape in traced:
            continue
        # Points of one shape are one program. Cohorts are traced, since each that is drawn would be compiled.
        traced.add(shape)
        for data in training:
            jax.eval_shape(lambda key, a=algorithm, n=data.num_clients: a.cohort(key, 0, n), jax.random.key(0))
        state = jax.eval_shape(algorithm.init, jax.random.key(0), clients.train)
    _check_defence(system.parts(clients, **points[0])[1], state.model, clients.train)
    if system.pooled and (jax.tree.leaves((state.personal, state.memory)) or view is not None):
        raise ValueError("pooled needs a method whose clients keep nothing, and no user accuracy, e.g. fedavg")
    if view is not None:
        check_view(view, clients.train.views)
        if len(clients.noisy) == clients.train.num_clients:
            raise ValueError(f"scenario {scenario}: all clients are noisy, so that there is no user accuracy")


def _check_defence(federation: Federation, model: Any, data: FederatedData) -> None:
    """Raises what a rule says only in a round, of too many attackers, and an attack, of samples that it cannot change."""
    if federation.aggregator is not None:
        rule, cohort = as_rule(federation.aggregator), federation.cohort_size
        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((cohort, *leaf.shape), leaf.dtype), model)
        given = (jax.random.key(0), stacked, jax.ShapeDtypeStruct((cohort,), np.float32), jax.eval_shape(rule.init, model))
        jax.eval_shape(rule.combine, *given, None if rule.root is None else model)
    attack = federation.attack
    if attack is not None and attack.poison is not None:
        poisoned = attack.poisoned(data.client(0), jnp.zeros((), jnp.int32), jnp.array(True), data.num_classes)
        jax.eval_shape(next(iter(poisoned.views.values())).take, jnp.zeros(1, jnp.int32), jnp.ones(1))


def final_phase(study: Study, scenario: str, name: str, clients: Clients) -> Phase:
    """The final runs of a system, as `run` trains them."""
    return _Step(study, scenario, name, clients).final()


class _Step:
    """A system on a scenario: its trials and its final runs.

    Attributes:
      where: names of the scenario and the system.
    """

    def __init__(self, study: Study, scenario: str, name: str, clients: Clients) -> None:
        self.where = scenario, name
        self._study, self._scenario, self._name, self._clients = study, scenario, name, clients
        self._system, self._place = study.system(name, scenario), study.scenarios[scenario]
        self._points = points_of(self._system)
        self._chosen = self._points[0]

    def run(self, later: Sequence["_Step"], desk: Desk) -> Outcome:
        """Tunes and trains, or reads what was found before; what comes later is compiled meanwhile."""
        found: list[Trial] = []
        points, moved = list(self._points), 0
        if len(points) > 1:
            tuning, coming = self.tuning(), [self.sweeps()[-1], *(pair for step in later for pair in step.sweeps())]
            self._prepare(coming, desk)
            found = trials(tuning, sweeps.members(points, self._study.tuning.seeds), desk)
            self._chosen = choice.best(found, self._study.tuned_by).point
            while moved < self._study.tuning.extend:
                more = choice.next_points(points, self._chosen, self._system, self._clients)
                if not more:
                    break
                points, moved = [*points, *more], moved + 1
                found += trials(tuning, sweeps.members(more, self._study.tuning.seeds), desk)
                self._chosen = choice.best(found, self._study.tuned_by).point
        self._prepare([pair for step in later for pair in step.sweeps()], desk)
        final = trials(self.final(), sweeps.members([self._chosen], self._study.seeds), desk)
        edges = choice.at_edge(points, self._chosen)
        return Outcome(self._scenario, self._name, found, self._chosen, edges, final)

    @staticmethod
    def _prepare(coming: list[tuple[Phase, list[sweeps.Member]]], desk: Desk) -> None:
        missing = [pair for pair in coming if not results_path(pair[0], desk.folder).is_file()]
        for phase, members in missing[: desk.ahead.depth]:
            desk.ahead.start(phase, members)

    def sweeps(self) -> list[tuple[Phase, list[sweeps.Member]]]:
        """The phases with their members; before the tuning, the final members have the first point's numbers."""
        final = (self.final(), sweeps.members([self._chosen], self._study.seeds))
        if len(self._points) == 1:
            return [final]
        return [(self.tuning(), sweeps.members(self._points, self._study.tuning.seeds)), final]

    def _config(self) -> dict[str, Any]:
        model = [self._place.model, dict(self._place.model_options)]
        config = {"system": folders.options_of(self._system), "data": self._clients.fingerprint, "model": model}
        # What is not said is what older runs had.
        if self._study.metrics:
            config["metrics"] = list(self._study.metrics)
        if self._study.store != "device":
            # Cohorts that devices share are summed in another order.
            config["store"] = "host or disk"
        if self._study.on_divergence != "continue":
            config["on_divergence"] = self._study.on_divergence
        return config

    def tuning(self) -> Phase:
        """The trials of the grid."""
        tuning = self._study.tuning
        data, held = choice.data_for(tuning, self._place, self._clients)
        tests = {VALIDATION: self._test(data)}
        config = self._config()
        if held is not None:
            tests[VALIDATION_CLIENTS] = _test_of_new(held, self._study.metrics)
            config["held out"] = tuning.clients
        if tuning.halving is not None:
            config["halving"] = tuning.halving
            # The score decides which points end early; runs of older versions had this one.
            if self._study.tuned_by.metric not in (None, "accuracy_mean"):
                config["halved by"] = self._study.tuned_by.metric
        rounds = tuning.rounds or self._study.rounds
        return self._phase("tuning", rounds, data, tests, config)._replace(tuning=self._study.tuned_by)

    def final(self) -> Phase:
        """The runs with every seed of the study."""
        clients, metrics = self._clients, self._study.metrics
        view = TESTED_ON[self._place.adapt_on]
        scored = counted(self._study, self._scenario, clients, clients.train)
        sizes = np.asarray(clients.train.sizes(view))
        tests, samples = {KNOWN: self._test(clients.train)}, {KNOWN: sizes if scored is None else sizes[scored]}
        if clients.new is not None:
            tests[NEW] = _test_of_new(clients.new, metrics)
            samples[NEW] = np.asarray(clients.new.sizes("query"))
        only = {} if scored is None else {KNOWN: scored}
        attack = part("attack", self._system.federation.get("attack"))
        if attack is not None and attack.name == BACKDOOR:
            only |= {BACKDOOR: only[KNOWN]} if only else {}
            marked = stamped(clients.train, view, size=attack.config["size"], value=attack.config["value"])
            tests[BACKDOOR], samples[BACKDOOR] = self._test(marked), samples[KNOWN]
        watched, config = self._study.user_accuracy_of(self._name), self._config()
        if watched is not None:
            # Its numbers are in the rows of the final runs, which therefore depend on it.
            config["user_accuracy"] = watched
        if self._study.goal is not None:
            config["stop_at"] = str(self._study.stop_at)
        phase = self._phase("final", self._study.rounds, clients.train, tests, config)
        return phase._replace(samples=samples, scored=only, goal=self._study.goal)

    def _test(self, data: Any) -> MemberEvaluator:
        """Of the clients that train; those whose samples were pooled are strangers to the model."""
        support, query = self._place.adapt_on, TESTED_ON[self._place.adapt_on]
        known, metrics = not self._system.pooled, self._study.metrics or None
        ids = counted(self._study, self._scenario, self._clients, data)
        measure = partial(_evaluate, support=support, query=query, known=known, ids=ids, metrics=metrics)
        return MemberEvaluator(measure, data)

    def _phase(
        self, name: str, rounds: int, data: Any, tests: Mapping[str, MemberEvaluator], config: Mapping[str, Any]
    ) -> Phase:
        build: sweeps.Build = partial(self._system.parts, self._clients)
        every = (self._study.tuning.eval_every if name == "tuning" else None) or self._study.eval_every
        if self._system.pooled:
            share = passes(self._system, self._clients, data)
            rounds, every = max(round(rounds * share), 1), max(round(every * share), 1)
            build, data = partial(_central, partial(self._system.parts, self._clients)), pooled(data)
        view = self._study.user_accuracy_of(self._name) if name == "final" else None
        if view is not None or self._system.tested_with:
            build = _Built(self._system, self._clients, view)
        return Phase(
            scenario=self._scenario,
            system=self._name,
            name=name,
            build=build,
            rounds=rounds,
            eval_every=every,
            data=data,
            tests=tests,
            config=config,
            shaping=choice.shaping(self._system),
            pooled=self._system.pooled,
            devices=self._study.devices,
            store=self._study.store,
            on_divergence=self._study.on_divergence,
        )


@dataclasses.dataclass(frozen=True)
class _Built:
    """Builds the algorithm of a system whose rounds are watched, or whose tests have options of their own.

    Attributes:
      system, clients: what is built.
      view: that clients adapt on before user accuracy is measured; `None` to measure none.
    """

    system: System
    clients: Clients
    view: str | None

    def __call__(self, **numbers: Any) -> Algorithm:
        algorithm = sweeps.alone(*self.system.parts(self.clients, **numbers))
        if self.view is not None:
            noisy = tuple(self.clients.noisy.tolist())
            algorithm = with_user_accuracy(algorithm, support=self.view, excluded=noisy, devices=1)
        if self.system.tested_with:
            tests = sweeps.alone(*self.system.tested().parts(self.clients, **numbers))
            algorithm = dataclasses.replace(algorithm, personalize=tests.personalize)
        return algorithm


def passes(system: System, clients: Clients, data: FederatedData) -> float:
    """The share of the clients that a round asks: how many rounds of central training stand for one."""
    _, federation = system.parts(clients, **points_of(system)[0])
    return min(federation.cohort_size / data.num_clients, 1.0)


def _central(parts: Callable[..., tuple[Method, Federation]], **numbers: Any) -> tuple[Method, Federation]:
    """The method with the one client that holds all samples."""
    method, federation = parts(**numbers)
    return method, dataclasses.replace(federation, cohort_size=1)


def _test_of_new(data: Any, metrics: Sequence[str]) -> MemberEvaluator:
    return MemberEvaluator(partial(_evaluate, support="support", query="query", known=False, metrics=metrics or None), data)


def _evaluate(algorithm: Any, key: Any, state: State, data: Any, **options: Any) -> Evaluation:
    return evaluate(algorithm, key, state, data, devices=1, **options)
