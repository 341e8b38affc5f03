"""Runs a study: tunes every system alike, trains it with every seed, and saves what it finds as it comes.

A run's folder holds `study.yaml` (every field filled in), `run.json` (versions, devices, clients, fingerprints), `metrics.jsonl`
(one line for each evaluation of each member), `results/` (one file for each finished system), `state/` (checkpoints) and the
report.
"""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_meta import checkpoint, costs, report, runtime, sweeps
from fedjax_meta.algorithm import State
from fedjax_meta.evaluation import Evaluation, evaluate
from fedjax_meta.federation import Federation
from fedjax_meta.methods import METHODS
from fedjax_meta.metrics import accuracy
from fedjax_meta.rounds import federate
from fedjax_meta.simulation import Record, run_keys
from fedjax_meta.study.scenario import TESTED_ON, Clients, Scenario
from fedjax_meta.study.study import Study, to_yaml
from fedjax_meta.study.system import System
from fedjax_meta.sweeps import Member, MemberEvaluator

Json = Any

KNOWN, NEW, VALIDATION = "known", "new", "validation"


class Trial(NamedTuple):
    """One member of a finished sweep.

    Attributes:
      numbers: its hyper-parameters.
      seed: of the run.
      rows: its evaluations, see `report.compact`.
      diverged: the round from which on it counts as diverged, see `report.diverged`; `None` if it does not.
    """

    numbers: dict[str, float]
    seed: int
    rows: list[dict[str, Json]]
    diverged: int | None


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


class Watcher(Protocol):
    """Shows how far a study is; every method may do nothing."""

    def begin(self, scenario: str, system: str, phase: str, members: int, rounds: int, done: int) -> None:
        """A sweep begins, or goes on after `done` rounds."""

    def progress(self, done: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Rounds are finished."""

    def record(self, done: int, records: Sequence[Record]) -> None:
        """All members were evaluated."""

    def end(self, outcome: Outcome) -> None:
        """A system is finished."""


class _Saved(NamedTuple):
    """What a checkpoint of a sweep holds."""

    members: State
    round: Any


def build(study: Study, data_dir: str | None = None) -> dict[str, Clients]:
    """The clients of every scenario, or of each draw of it, see `Study.draws`."""
    return {name: scenario.build(data_dir) for name, scenario in study.draws().items()}


def run(
    study: Study, folder: Path, *, watcher: Watcher, clients: Mapping[str, Clients] | None = None, command: str = ""
) -> list[Outcome]:
    """Runs what is not finished of a study.

    Args:
      study: what to run.
      folder: of the run; made if it is not there. A run that was stopped goes on where it was.
      watcher: is told of every step.
      clients: of every scenario, as `build` gives them; built here when not given.
      command: how the run was started, for the record.

    Returns:
      The outcomes, scenario by scenario.

    Raises:
      ValueError: a scenario that cannot be built, a system that a scenario refuses, a folder that holds another study (the
        message names the first field that differs).
      OSError: the folder cannot be written.
    """
    built = build(study) if clients is None else clients
    for scenario, of_scenario in built.items():
        for name in study.systems_on(scenario):
            _check(study.system(name), of_scenario)
    checkpoint.lock(folder)
    _open(study, folder, built, command)
    outcomes = []
    for scenario, of_scenario in built.items():
        for name in study.systems_on(scenario):
            outcomes.append(_system(study, scenario, name, of_scenario, folder, watcher))
            watcher.end(outcomes[-1])
    return outcomes


def points_of(system: System) -> list[dict[str, float]]:
    """Every point of a system's grid; one without numbers if it has none."""
    return sweeps.grid(**{name: [float(value) for value in values] for name, values in system.grid.items()})


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


def _check(system: System, clients: Clients) -> None:
    """Raises before anything is trained or written."""
    for point in points_of(system):
        algorithm = system.build(clients.task, **point)
        algorithm.cohort(jax.random.key(0), 0, clients.train.num_clients)
        jax.eval_shape(algorithm.init, jax.random.key(0), clients.train)


def _open(study: Study, folder: Path, built: Mapping[str, Clients], command: str) -> None:
    """Writes what the run is, or compares it with what the folder says."""
    path = folder / "run.json"
    facts = {
        name: {
            "title": clients.title,
            "clients": clients.train.num_clients,
            "new clients": 0 if clients.new is None else clients.new.num_clients,
            "fingerprint": clients.fingerprint,
        }
        for name, clients in built.items()
    }
    fixed = {
        "scenarios": {name: dataclasses.asdict(scenario) for name, scenario in study.draws().items()},
        "systems": {name: _options(study.system(name)) for name in study.systems},
        "clients": {name: one["fingerprint"] for name, one in facts.items()},
    }
    fixed = json.loads(json.dumps(fixed))
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))["fixed"]
        for kind, given in fixed.items():
            both = [name for name in given if name in before[kind]]
            odd = checkpoint.first_difference({n: before[kind][n] for n in both}, {n: given[n] for n in both})
            if odd is not None:
                raise ValueError(
                    f"{folder} holds another study: {kind}.{odd[0]} was {odd[1]!r} and is {odd[2]!r} now; give another folder"
                )
        fixed = {kind: {**before[kind], **given} for kind, given in fixed.items()}
    versions = {"python": platform.python_version(), "jax": jax.__version__, "fedjax_meta": version("fedjax_meta")}
    device = f"{jax.devices()[0].device_kind} x {jax.device_count()}"
    content = {"command": command, "versions": versions, "device": device, "clients": facts, "fixed": fixed}
    checkpoint.write_text(folder / "study.yaml", to_yaml(study))
    checkpoint.write_text(path, json.dumps(content, indent=2) + "\n")


def _options(system: System) -> dict[str, Json]:
    """What the results of a system depend on, apart from the numbers of its grid."""
    return {key: value for key, value in dataclasses.asdict(system).items() if key not in ("grid", "title", "scenarios")}


def _system(study: Study, scenario: str, name: str, clients: Clients, folder: Path, watcher: Watcher) -> Outcome:
    """Tunes and trains one system, or reads what was found before."""
    system, place = study.system(name), study.draws()[scenario]
    points = points_of(system)
    config = {"system": _options(system), "data": clients.fingerprint, "model": [place.model, dict(place.model_options)]}
    phase = _Phase(
        scenario=scenario,
        system=name,
        name="tuning",
        build=partial(system.parts, clients.task),
        rounds=study.tuning.rounds or study.rounds,
        eval_every=study.eval_every,
        data=clients.tuning,
        tests={VALIDATION: _test(place, clients.tuning)},
        config=config,
    )
    trials: list[Trial] = []
    chosen = points[0]
    if len(points) > 1:
        trials = _trials(phase, sweeps.members(points, study.tuning.seeds), folder, watcher)
        chosen = best(trials, study.tuning.metric)
    tests = {KNOWN: _test(place, clients.train)}
    if clients.new is not None:
        tests[NEW] = MemberEvaluator(partial(_evaluate, support="support", query="query", known=False), clients.new)
    phase = phase._replace(name="final", rounds=study.rounds, data=clients.train, tests=tests)
    final = _trials(phase, sweeps.members([chosen], study.seeds), folder, watcher)
    edges = {key: {min(values), max(values)} for key, values in system.grid.items() if len(values) > 1}
    at_edge = [key for key, ends in edges.items() if chosen[key] in ends]
    return Outcome(scenario, name, trials, chosen, at_edge, final)


def best(trials: Sequence[Trial], metric: str) -> dict[str, float]:
    """The point with the highest mean score over the seeds, after the last round; a diverged trial counts as the worst."""
    scores: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for trial in trials:
        score = trial.rows[-1]["tests"][VALIDATION]["scores"][metric]
        point: tuple[tuple[str, float], ...] = tuple(trial.numbers.items())
        scores.setdefault(point, []).append(-1.0 if np.isnan(score) else score)
    return dict(max(scores.items(), key=lambda item: float(np.mean(item[1])))[0])


def _test(scenario: Scenario, data: Any) -> MemberEvaluator:
    support, query = scenario.adapt_on, TESTED_ON[scenario.adapt_on]
    return MemberEvaluator(partial(_evaluate, support=support, query=query, known=True), data)


def _evaluate(algorithm: Any, key: Any, state: State, data: Any, **options: Any) -> Evaluation:
    return evaluate(algorithm, key, state, data, devices=1, **options)


class _Phase(NamedTuple):
    """A sweep of a study: the trials of a grid, or the final runs.

    Attributes:
      scenario, system, name: where it belongs; `name` is "tuning" or "final".
      build: the algorithm as a function of the grid's numbers.
      rounds, eval_every, data, tests: what is trained, and measured.
      config: what else the results depend on.
    """

    scenario: str
    system: str
    name: str
    build: Callable[..., Any]
    rounds: int
    eval_every: int
    data: Any
    tests: Mapping[str, MemberEvaluator]
    config: Mapping[str, Json]


def _trials(phase: _Phase, members: Sequence[Member], folder: Path, watcher: Watcher) -> list[Trial]:
    """The trials of a phase, those that are finished as they were saved; the others in waves that fit the memory."""
    path = folder / "results" / phase.scenario / f"{phase.system}.{phase.name}.json"
    finished = _finished(path, phase)
    left = [member for member in members if str(member) not in finished]
    wave = _at_once(phase, left) if left else 1
    for first in range(0, len(left), wave):
        some = left[first : first + wave]
        trained = _train(phase, some, folder, watcher)
        finished |= {str(member): trial for member, trial in zip(some, trained, strict=True)}
        lines = {label: trial._asdict() for label, trial in finished.items()}
        content = report.strict({"config": phase.config, "rounds": phase.rounds, "trials": lines})
        checkpoint.write_text(path, json.dumps(content, allow_nan=False) + "\n")
    return [finished[str(member)] for member in members]


def _train(phase: _Phase, members: Sequence[Member], folder: Path, watcher: Watcher) -> list[Trial]:
    """Trains some members together, from their newest checkpoint on."""
    config = {**phase.config, "members": [str(member) for member in members]}
    # Other members, e.g. those of more seeds, have a folder of their own.
    who = hashlib.blake2b(repr(config["members"]).encode(), digest_size=4).hexdigest()
    state_folder = folder / "state" / phase.scenario / f"{phase.system}.{phase.name}.{who}"
    shapes = _Saved(sweeps.state_shapes(phase.build, members, phase.data), jax.ShapeDtypeStruct((), np.int32))
    saved = checkpoint.restore(state_folder, shapes, config)
    trials = [Trial(dict(member.numbers), member.seed, [], None) for member in members]
    if saved is not None:
        trials = [Trial(**one) for one in report.numbers_again(saved.records)]
    watcher.begin(phase.scenario, phase.system, phase.name, len(members), phase.rounds, 0 if saved is None else saved.round)

    def on_record(state: State, done: int, records: list[Record]) -> None:
        for i, (member, record) in enumerate(zip(members, records, strict=True)):
            row = report.compact(record)
            rows = [*map(report.without_confusion, trials[i].rows), row]
            trials[i] = trials[i]._replace(rows=rows, diverged=report.diverged(rows, next(iter(phase.tests))))
            where = {"scenario": phase.scenario, "system": phase.system, "phase": phase.name}
            _append(folder / "metrics.jsonl", {**where, **member._asdict(), **report.without_confusion(row)})
        records_ = report.strict([trial._asdict() for trial in trials])
        checkpoint.save(state_folder, _Saved(state, np.int32(done)), records_, config, keep=1)
        watcher.record(done, records)

    if saved is None or saved.round < phase.rounds:
        sweeps.sweep(
            phase.build,
            members,
            phase.data,
            rounds=phase.rounds,
            eval_every=phase.eval_every,
            evaluators=phase.tests,
            state=None if saved is None else saved.state.members,
            on_record=on_record,
            on_progress=watcher.progress,
        )
    return trials


def _finished(path: Path, phase: _Phase) -> dict[str, Trial]:
    """The trials that an earlier run saved.

    Raises:
      ValueError: they were found with other options.
    """
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    odd = checkpoint.first_difference(content["config"], json.loads(json.dumps(phase.config)))
    if odd is not None:
        raise ValueError(f"cannot resume: {odd[0]} was {odd[1]!r} when {path} was written and is {odd[2]!r} now")
    # A run of other rounds is continued from its last state.
    same = content["rounds"] == phase.rounds
    return {label: Trial(**trial) for label, trial in report.numbers_again(content["trials"]).items()} if same else {}


def _at_once(phase: _Phase, members: Sequence[Member]) -> int:
    """How many members' states fit into a quarter of the free memory; at least one."""
    one = costs.size_in_bytes(sweeps.state_shapes(phase.build, members[:1], phase.data))
    fitting = runtime.free_host_bytes() // 4 // max(one, 1) if runtime.on_cpu() else len(members)
    return max(1, min(len(members), fitting))


def _append(path: Path, line: Mapping[str, Json]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(report.strict(line), allow_nan=False) + "\n")
