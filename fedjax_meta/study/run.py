"""Runs a study: tunes every system alike, trains it with every seed, and saves what it finds as it comes.

A run's folder holds `study.yaml` (every field filled in), `run.json` (versions, devices, clients, fingerprints), `metrics.jsonl`
(one line for each evaluation of each member), `results/` (one file for each finished system), `state/` (checkpoints) and the
report.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import sweeps
from fedjax_meta.algorithm import State
from fedjax_meta.attacks import stamped
from fedjax_meta.data import FederatedData
from fedjax_meta.evaluation import FEW_CLASSES, Evaluation, evaluate
from fedjax_meta.federation import Federation
from fedjax_meta.methods import METHODS
from fedjax_meta.metrics import accuracy
from fedjax_meta.rounds import federate
from fedjax_meta.simulation import run_keys
from fedjax_meta.study import folder as folders
from fedjax_meta.study import presets
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.phase import Ahead, Desk, Phase, Stopped, Watcher, results_path, trials
from fedjax_meta.study.scenario import TESTED_ON, Clients, Scenario
from fedjax_meta.study.study import Study
from fedjax_meta.study.system import part
from fedjax_meta.study.tuning import KNOWN, NEW, VALIDATION, VALIDATION_CLIENTS, Trial, points_of
from fedjax_meta.sweeps import MemberEvaluator

BACKDOOR = "backdoor"
"""The group of tests of known clients whose samples carry the pattern of the attack of this name."""

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
    "baselines",
    "build",
    "points_of",
    "run",
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
      ValueError: a scenario that cannot be built, a system that a scenario refuses, a folder that holds another study (the
        message names each field that differs).
      OSError: the folder cannot be written, or another process has it.
    """
    built = build(study) if clients is None else clients
    for scenario, of_scenario in built.items():
        for name in study.systems_on(scenario):
            _check(study, scenario, name, of_scenario)
    folders.open_run(study, folder, built, command)
    ahead = Ahead()
    desk = Desk(folder, folders.Metrics(folder), watcher, should_stop or (lambda: False), ahead)
    outcomes = []
    try:
        steps = [
            _Step(study, scenario, name, built[scenario], desk) for scenario in built for name in study.systems_on(scenario)
        ]
        for number, step in enumerate(steps):
            outcomes.append(step.run(steps[number + 1 :]))
            watcher.end(outcomes[-1])
    finally:
        ahead.close()
    _save_presets(study, folder, outcomes)
    folders.close_run(folder)
    return outcomes


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
            score = max(value for _, value in choice.scores(one.tuning, study.tuning))
            systems[one.system] = {
                "method": system.method,
                "options": dict(system.options),
                "chosen": one.chosen,
                "score": round(100 * score, 2),
                "trials": len(one.tuning),
                "at the end of its grid": one.at_edge,
                "federation": dict(system.federation),
            }
        facts = {"study": study.title, "command": content["command"], "versions": content["versions"], "git": content["git"]}
        tuning = {**dataclasses.asdict(study.tuning), "rounds": study.tuning.rounds or study.rounds}
        tree = {"scenario": dataclasses.asdict(place), **facts, "tuning": tuning, "systems": systems}
        presets.write(folder / "presets" / f"{scenario}.yaml", tree)


def baselines(clients: Clients, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Accuracy of each client `[N]`, for known and new ones, without any training.

    Returns:
      By name: "majority class" predicts the class that a client's own samples for training or adaptation have most of, and
      "untrained model" is the model as the seed initialises it; by group of clients.
    """
    groups = {KNOWN: (clients.train, "train", "test")}
    if clients.new is not None:
        groups[NEW] = (clients.new, "support", "query")
    scores, untrained = {}, {}
    algorithm = federate(METHODS["fedavg"](clients.task), Federation(cohort_size=1, devices=1))
    state = algorithm.init(run_keys(jax.random.key(seed))[0], clients.train)
    for group, (data, seen, asked) in groups.items():
        found = evaluate(algorithm, jax.random.key(0), state, data, support=seen, query=asked, known=False, devices=1)
        untrained[group] = np.asarray(accuracy(np.asarray(found.confusion)))
        y, values = np.asarray(data.y), []
        for i in range(data.num_clients):
            mine, theirs = (y[int(data.start[v][i]) : int(data.start[v][i]) + int(data.size[v][i])] for v in (seen, asked))
            values.append(np.mean(theirs == np.bincount(mine).argmax()))
        scores[group] = np.array(values)
    return {"majority class": scores, "untrained model": untrained}


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
        system = study.system(name, scenario)
        attack = part("attack", system.federation.get("attack"))
        if attack is not None:
            out |= attack.members(data.num_clients)
    if data.num_clients == clients.train.num_clients:
        out[clients.noisy] = True
    if out.all():
        raise ValueError(f"scenario {scenario}: all {data.num_clients} clients attack or are noisy: none is left to score")
    return np.flatnonzero(~out).astype(np.int32) if out.any() else None


def _check(study: Study, scenario: str, name: str, clients: Clients) -> None:
    """Raises before anything is trained or written."""
    system = study.system(name, scenario)
    if not clients.train.labelled or clients.train.num_classes > FEW_CLASSES:
        raise ValueError(
            f"scenario {scenario}: a study compares accuracies, which need one class label a sample, of at most {FEW_CLASSES} "
            "classes; for other tasks use fedjax_meta.simulate and evaluate"
        )
    points = points_of(system)
    training = [clients.train]
    if len(points) > 1:
        training.append(choice.data_for(study.tuning, study.scenarios[scenario], clients)[0])
    try:
        for data in training:
            counted(study, scenario, clients, data)
        for point in points:
            algorithm = system.build(clients, **point)
            for data in training:
                algorithm.cohort(jax.random.key(0), 0, data.num_clients)
            state = jax.eval_shape(algorithm.init, jax.random.key(0), clients.train)
        if system.federation.get("aggregator") is not None:
            # A rule says only in a round how many attackers are too many.
            jax.eval_shape(algorithm.round, jax.random.key(0), state, clients.train)
    except ValueError as error:
        many = len(study.systems) > 1 or len(study.scenarios) > 1
        said = str(error).partition("\n")[0]
        raise ValueError(f"{scenario}, {name}: {said}" if many else said) from None


class _Step:
    """A system on a scenario: its trials and its final runs."""

    def __init__(self, study: Study, scenario: str, name: str, clients: Clients, desk: Desk) -> None:
        self._study, self._scenario, self._name, self._clients, self._desk = study, scenario, name, clients, desk
        self._system, self._place = study.system(name, scenario), study.scenarios[scenario]
        self._points = points_of(self._system)
        self._chosen = self._points[0]

    def run(self, later: "list[_Step]") -> Outcome:
        """Tunes and trains, or reads what was found before; what comes later is compiled meanwhile."""
        found: list[Trial] = []
        points, moved = list(self._points), 0
        if len(points) > 1:
            tuning, coming = self.tuning(), [self.sweeps()[-1], *(pair for step in later for pair in step.sweeps())]
            self._prepare(coming)
            found = trials(tuning, sweeps.members(points, self._study.tuning.seeds), self._desk)
            self._chosen = choice.best(found, self._study.tuning)
            while moved < self._study.tuning.extend:
                more = choice.next_points(points, self._chosen, self._system, self._clients)
                if not more:
                    break
                points, moved = [*points, *more], moved + 1
                found += trials(tuning, sweeps.members(more, self._study.tuning.seeds), self._desk)
                self._chosen = choice.best(found, self._study.tuning)
        self._prepare([pair for step in later for pair in step.sweeps()])
        final = trials(self.final(), sweeps.members([self._chosen], self._study.seeds), self._desk)
        edges = choice.at_edge(points, self._chosen)
        return Outcome(self._scenario, self._name, found, self._chosen, edges, final)

    def _prepare(self, coming: list[tuple[Phase, list[sweeps.Member]]]) -> None:
        missing = [pair for pair in coming if not results_path(pair[0], self._desk.folder).is_file()]
        for phase, members in missing[: self._desk.ahead.depth]:
            self._desk.ahead.start(phase, members)

    def sweeps(self) -> list[tuple[Phase, list[sweeps.Member]]]:
        """The phases with their members; before the tuning, the final members have the first point's numbers."""
        final = (self.final(), sweeps.members([self._chosen], self._study.seeds))
        if len(self._points) == 1:
            return [final]
        return [(self.tuning(), sweeps.members(self._points, self._study.tuning.seeds)), final]

    def _config(self) -> dict[str, Any]:
        model = [self._place.model, dict(self._place.model_options)]
        return {"system": folders.options_of(self._system), "data": self._clients.fingerprint, "model": model}

    def tuning(self) -> Phase:
        """The trials of the grid."""
        tuning = self._study.tuning
        data, held = choice.data_for(tuning, self._place, self._clients)
        tests = {VALIDATION: _test(self._place, data, self._counted(data))}
        config = self._config()
        if held is not None:
            tests[VALIDATION_CLIENTS] = _test_of_new(held)
            config["held out"] = tuning.clients
        if tuning.halving is not None:
            config["halving"] = tuning.halving
        rounds = tuning.rounds or self._study.rounds
        return self._phase("tuning", rounds, data, tests, config)._replace(tuning=tuning)

    def final(self) -> Phase:
        """The runs with every seed of the study."""
        scored = self._counted(self._clients.train)
        tests = {KNOWN: _test(self._place, self._clients.train, scored)}
        if self._clients.new is not None:
            tests[NEW] = _test_of_new(self._clients.new)
        attack = part("attack", self._system.federation.get("attack"))
        if attack is not None and attack.name == BACKDOOR:
            options = {name: attack.config[name] for name in ("size", "value")}
            marked = stamped(self._clients.train, TESTED_ON[self._place.adapt_on], **options)
            tests[BACKDOOR] = _test(self._place, marked, scored)
        return self._phase("final", self._study.rounds, self._clients.train, tests, self._config())

    def _counted(self, data: FederatedData) -> np.ndarray | None:
        return counted(self._study, self._scenario, self._clients, data)

    def _phase(
        self, name: str, rounds: int, data: Any, tests: Mapping[str, MemberEvaluator], config: Mapping[str, Any]
    ) -> Phase:
        return Phase(
            scenario=self._scenario,
            system=self._name,
            name=name,
            build=partial(self._system.parts, self._clients),
            rounds=rounds,
            eval_every=self._study.eval_every,
            data=data,
            tests=tests,
            config=config,
        )


def _test(scenario: Scenario, data: Any, ids: np.ndarray | None) -> MemberEvaluator:
    support, query = scenario.adapt_on, TESTED_ON[scenario.adapt_on]
    return MemberEvaluator(partial(_evaluate, support=support, query=query, known=True, ids=ids), data)


def _test_of_new(data: Any) -> MemberEvaluator:
    return MemberEvaluator(partial(_evaluate, support="support", query="query", known=False), data)


def _evaluate(algorithm: Any, key: Any, state: State, data: Any, **options: Any) -> Evaluation:
    return evaluate(algorithm, key, state, data, devices=1, **options)
