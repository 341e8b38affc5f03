"""A phase of a study: the trials of a grid, or the final runs of a system; trained in waves, saved as they come."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_meta import checkpoint, costs, report, runtime, sweeps
from fedjax_meta import host_store as stores
from fedjax_meta.algorithm import State
from fedjax_meta.rounds import federate
from fedjax_meta.simulation import Evaluator, Record, schedule, simulate
from fedjax_meta.study import made
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.folder import Metrics, read_trials, save_clients
from fedjax_meta.study.study import Tuning
from fedjax_meta.study.targets import Target, is_reached
from fedjax_meta.study.tuning import Trial
from fedjax_meta.sweeps import Member, MemberEvaluator

Json = Any


class Stopped(Exception):  # noqa: N818 - it is no error
    """`should_stop` ended a study; all that was trained is saved. The message says where."""


class Watcher(Protocol):
    """Shows how far a study is; every method may do nothing."""

    def begin(self, scenario: str, system: str, phase: str, members: int, rounds: int, done: int) -> None:
        """A sweep begins, or goes on after `done` rounds."""

    def progress(self, done: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Rounds are finished."""

    def record(self, done: int, records: Sequence[Record]) -> None:
        """All members were evaluated that were not stopped by halving."""

    def end(self, outcome: Any) -> None:
        """A system is finished, see `step.Outcome`."""

    def wait(self, others: Sequence[tuple[str, str]]) -> None:
        """Other processes train what is left of a shared run: scenario and system of each."""


class Phase(NamedTuple):
    """A sweep of a study.

    Attributes:
      scenario, system, name: where it belongs; `name` is "tuning" or "final".
      build: the algorithm as a function of the grid's numbers.
      rounds, eval_every, data, tests: what is trained, and measured.
      config: what else the results depend on.
      tuning: how trials are compared, in the phase "tuning".
      samples: of each test, the number of samples that each client is tested on; in the phase "final".
      shaping: names of the grid's numbers that decide what a program is, see `tuning.shaping`.
      scored: of a test of some clients alone, their ids.
      pooled: whether one client trains with the samples of all, so that those that are tested are strangers.
      devices, store, on_divergence: as in `Study`.
      goal: a final run ends at the evaluation after which it was reached.
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
    tuning: Tuning | None = None
    samples: Mapping[str, np.ndarray] = {}
    scored: Mapping[str, np.ndarray] = {}
    shaping: tuple[str, ...] = ()
    pooled: bool = False
    devices: int | None = None
    store: str = "device"
    on_divergence: str = "continue"
    goal: Target | None = None

    @property
    def prunes(self) -> bool:
        """Whether members may be stopped early."""
        return self.ends or (self.tuning is not None and self.tuning.halving is not None)

    @property
    def stops(self) -> bool:
        """Whether members are stopped that have diverged."""
        return self.on_divergence == "stop"

    @property
    def ends(self) -> bool:
        """Whether a member may end early by what it has reached itself."""
        return self.stops or self.goal is not None

    def shape(self, member: Member) -> dict[str, float]:
        """The numbers of a member that decide what its program is."""
        return {name: value for name, value in member.numbers.items() if name in self.shaping}

    def traced(self, members: Sequence[Member]) -> tuple[Callable[..., Any], list[Member]]:
        """(the algorithm as a function of the numbers that are traced, the members with these numbers alone).

        Args:
          members: all of one shape.
        """
        rest = [{name: value for name, value in one.numbers.items() if name not in self.shaping} for one in members]
        bare = [Member(numbers, one.seed) for numbers, one in zip(rest, members, strict=True)]
        return (partial(self.build, **self.shape(members[0])) if self.shaping else self.build), bare


class Desk(NamedTuple):
    """Where phases leave what they find.

    Attributes:
      folder: of the run.
      metrics: its `metrics.jsonl`, or that of the system where processes share the run.
      watcher: is told of every step.
      should_stop: asked about once a second.
      ahead: programs that are compiled beforehand.
    """

    folder: Path
    metrics: Metrics
    watcher: Watcher
    should_stop: Callable[[], bool]
    ahead: "Ahead"


class _Saved(NamedTuple):
    """What a checkpoint of a sweep holds."""

    members: State
    round: Any


def trials(phase: Phase, members: Sequence[Member], desk: Desk) -> list[Trial]:
    """The trials of a phase: those that are finished as they were saved, the others trained in waves that fit the memory.

    Raises:
      Stopped: `should_stop` said so.
      ValueError: the folder holds results of other options, or of more rounds.
    """
    path = results_path(phase, desk.folder)
    finished = _finished(path, phase)
    if phase.name == "final":  # where a grid has moved on, another point may have been trained before
        finished = {label: trial for label, trial in finished.items() if trial.numbers == members[0].numbers}
    left = [member for member in members if str(member) not in finished]
    known = [finished[str(member)] for member in members if str(member) in finished]
    makers = _makers(path, phase) if left else []
    if phase.name == "final":
        desk.metrics.keep_numbers(_where(phase), members[0].numbers)
    desk.metrics.align(_where(phase), known)
    if left and any(phase.shape(member) != phase.shape(left[0]) for member in left):
        # Programs of other shapes are compiled while the first one trains.
        desk.ahead.start(phase, left)
    for some in waves(phase, left):
        trained = _train(phase, some, desk)
        finished |= {str(member): trial for member, trial in zip(some, trained, strict=True)}
        lines = {label: trial._asdict() for label, trial in finished.items()}
        content = {"config": phase.config, "rounds": phase.rounds, "made": makers, "trials": lines}
        if phase.name == "final" and not phase.pooled:
            content["traffic"] = sum(costs.traffic(sweeps.member_algorithm(phase.build, members[0]), phase.data))
        checkpoint.write_text(path, json.dumps(report.strict(content), allow_nan=False) + "\n")
    found = [finished[str(member)] for member in members]
    if phase.name == "final":
        save_clients(path.with_name(f"{phase.system}.clients"), found, phase.samples)
    return found


def results_path(phase: Phase, folder: Path) -> Path:
    """Where the finished trials of a phase are."""
    return folder / "results" / phase.scenario / f"{phase.system}.{phase.name}.json"


def waves(phase: Phase, members: Sequence[Member]) -> list[list[Member]]:
    """The members in groups of one program whose states fit into a quarter of the free memory.

    A point's seeds stay together where they fit; with a store, each member is by itself.
    """
    if phase.store != "device":
        return [[member] for member in members]
    shapes = list({tuple(phase.shape(member).items()): None for member in members})
    return [
        wave
        for shape in shapes
        for wave in _in_memory(phase, [member for member in members if tuple(phase.shape(member).items()) == shape])
    ]


def _in_memory(phase: Phase, members: Sequence[Member]) -> list[list[Member]]:
    build, bare = phase.traced(members[:1])
    one = costs.size_in_bytes(sweeps.state_shapes(build, bare, phase.data))
    most = runtime.free_host_bytes() // 4 // max(one, 1) if runtime.on_cpu() else len(members)
    seeds = sum(member.numbers == members[0].numbers for member in members)
    most = max(1, min(len(members), most // seeds * seeds if most >= seeds else most))
    return [list(members[first : first + most]) for first in range(0, len(members), most)]


def programs(phase: Phase, members: Sequence[Member]) -> sweeps.Programs:
    """The programs of a wave, not compiled yet."""
    build, bare = phase.traced(members)
    tests, devices = phase.tests, phase.devices
    return sweeps.Programs(build, bare, phase.data, evaluators=tests, devices=devices, prunes=phase.prunes)


_SETTINGS = ("enable_x64", "numpy_rank_promotion", "numpy_dtype_promotion", "default_matmul_precision", "default_prng_impl")
"""Settings of JAX that a thread may have of its own, and that a program depends on."""


def saved_shapes(phase: Phase, members: Sequence[Member]) -> _Saved:
    """The shapes of a checkpoint of a sweep."""
    build, bare = phase.traced(members)
    return _Saved(sweeps.state_shapes(build, bare, phase.data), jax.ShapeDtypeStruct((), np.int32))


class Ahead:
    """Compiles the programs of phases that come next while one trains.

    Attributes:
      depth: how many phases ahead.
    """

    def __init__(self) -> None:
        self.depth = max(1, min(4, runtime.cores()))
        self._pool = concurrent.futures.ThreadPoolExecutor(self.depth, "compile")
        self._found: dict[tuple[Any, ...], concurrent.futures.Future[sweeps.Programs]] = {}

    def start(self, phase: Phase, members: Sequence[Member]) -> None:
        """Begins to compile what the first wave of each shape of a phase needs; a second call for it does nothing."""
        if phase.store != "device":
            return
        first = {_key(phase, wave): wave for wave in reversed(waves(phase, members))}
        for key, wave in reversed(first.items()):
            if key not in self._found:
                self._begin(key, phase, wave)

    def _begin(self, key: tuple[Any, ...], phase: Phase, members: Sequence[Member]) -> None:
        settings = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}

        def compile_it() -> sweeps.Programs:
            with contextlib.ExitStack() as stack:
                for name, value in settings.items():
                    stack.enter_context(getattr(jax, name)(value))
                made = programs(phase, members)
                made.compile()
            return made

        self._found[key] = self._pool.submit(compile_it)

    def take(self, phase: Phase, members: Sequence[Member]) -> sweeps.Programs:
        """The programs of a wave; those begun beforehand are waited for, and forgotten here."""
        begun = self._found.pop(_key(phase, members), None)
        return programs(phase, members) if begun is None else begun.result().of(phase.traced(members)[1])

    def close(self) -> None:
        """Drops what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _key(phase: Phase, members: Sequence[Member]) -> tuple[Any, ...]:
    return phase.scenario, phase.system, phase.name, len(members), *phase.shape(members[0]).items()


def _train(phase: Phase, members: Sequence[Member], desk: Desk) -> list[Trial]:
    """Trains some members together, from their newest checkpoint on."""
    if desk.should_stop():
        raise Stopped(f"{phase.scenario}, {phase.system}, {phase.name}: not begun")
    wave = _Wave(phase, members, desk)
    done = wave.restore()
    desk.watcher.begin(phase.scenario, phase.system, phase.name, len(members), phase.rounds, done)
    if done == phase.rounds or wave.over:
        return wave.trials
    state, records = (_with_store if phase.store != "device" else _swept)(wave, phase, members, desk)
    reached = int(np.asarray(state.round).max())
    if reached < phase.rounds and not wave.over:
        wave.save_part(state, reached, records)
        raise Stopped(f"{phase.scenario}, {phase.system}, {phase.name}: round {reached} of {phase.rounds}")
    return wave.trials


def _swept(wave: "_Wave", phase: Phase, members: Sequence[Member], desk: Desk) -> tuple[State, list[list[Record]]]:
    """Trains the members as one program."""
    build, bare = phase.traced(members)
    return sweeps.sweep(
        build,
        bare,
        phase.data,
        rounds=phase.rounds,
        eval_every=wave.evaluated,
        evaluators=phase.tests,
        state=wave.state,
        active=wave.active,
        on_record=wave.record,
        on_progress=desk.watcher.progress,
        should_stop=lambda: wave.over or desk.should_stop(),
        prune=wave.prune if phase.prunes else None,
        programs=desk.ahead.take(phase, members),
    )


def _with_store(wave: "_Wave", phase: Phase, members: Sequence[Member], desk: Desk) -> tuple[State, list[list[Record]]]:
    """Trains one member, with what its clients keep on the host; states are `[1, ...]`, as those of a sweep of one."""
    (member,) = members
    method, federation = phase.build(**member.numbers)
    algorithm = federate(method, dataclasses.replace(federation, devices=phase.devices))
    place = stores.MEMORY if phase.store == "host" else desk.folder / "store"

    def lifted(state: State) -> State:
        return jax.tree.map(lambda leaf: leaf[None], state)

    def on_record(state: State, record: Record) -> None:
        if phase.ends:
            wave.prune(record.round, [record])
        wave.record(lifted(state), record.round, [record])

    known = () if phase.pooled else (choice.KNOWN, choice.VALIDATION)
    tests = {
        name: Evaluator(partial(test.measure, algorithm), test.data, known=name in known) for name, test in phase.tests.items()
    }
    state, records = simulate(
        algorithm,
        phase.data,
        key=jax.random.key(member.seed),
        rounds=phase.rounds,
        eval_every=phase.eval_every,
        evaluators=tests,
        state=None if wave.state is None else jax.tree.map(lambda leaf: leaf[0], wave.state),
        store=place,
        on_record=on_record,
        on_progress=lambda done, metrics: desk.watcher.progress(
            done, {name: values[None] for name, values in metrics.items()}
        ),
        should_stop=lambda: wave.over or desk.should_stop(),
    )
    return lifted(state), [records]


class _Wave:
    """What is known of some members that train together, and its checkpoints.

    Attributes:
      trials: of each member.
      parts: for each member what is known of the rounds since its last evaluation, see `report.joined`.
      active: which members were not stopped by halving.
      evaluated: the rounds after which to evaluate.
      state: where to go on.
      over: whether all members have ended, because they diverged or reached their goal.
    """

    def __init__(self, phase: Phase, members: Sequence[Member], desk: Desk) -> None:
        self._phase, self._members, self._desk = phase, members, desk
        self._config = {**phase.config, "members": [str(member) for member in members]}
        # Other members, e.g. those of more seeds, have a folder of their own.
        who = hashlib.blake2b(repr(self._config["members"]).encode(), digest_size=4).hexdigest()
        self._folder = desk.folder / "state" / phase.scenario / f"{phase.system}.{phase.name}.{who}"
        points = {tuple(member.numbers.items()) for member in members}
        self._rungs = choice.rungs(len(points), phase.rounds, phase.tuning.halving if phase.tuning else None)
        self.evaluated = [*schedule(phase.rounds, phase.eval_every), *self._rungs]
        self.trials = [Trial(dict(member.numbers), member.seed, [], None) for member in members]
        self.parts: list[dict[str, Json] | None] = [None] * len(members)
        self.active = [True] * len(members)
        self.state: State | None = None
        self.over = False

    def restore(self) -> int:
        """Reads the newest checkpoint; the rounds that are finished."""
        shapes = saved_shapes(self._phase, self._members)
        saved = checkpoint.restore(self._folder, shapes, self._config)
        if saved is not None:
            known = report.numbers_again(saved.records)
            self.trials = [Trial(**one) for one in known["trials"]]
            self.parts, self.active, self.state = known["parts"], known["active"], saved.state.members
            self.over = self._phase.ends and self._all_ended()
        done = 0 if saved is None else saved.round
        if done > self._phase.rounds or (done == self._phase.rounds and any(self.parts)):
            raise ValueError(
                f"{self._phase.system} has trained {done} rounds in {self._desk.folder}, and rounds={self._phase.rounds} is no "
                "more: give another folder"
            )
        self._desk.metrics.align(_where(self._phase), self.trials)
        return done

    def prune(self, done: int, records: Sequence[Record | None]) -> list[bool]:
        """Which members go on after round `done`; the last ones that end are left to end the wave, see `over`."""
        if self._phase.ends:
            rows = [None if one is None else self._row(i, one) for i, one in enumerate(records)]
            left = [row is not None and not self._ended(i, row) for i, row in enumerate(rows)]
            self.over = not any(here and on for here, on in zip(self.active, left, strict=True))
            if self.over:
                return self.active
            self.active = [here and on for here, on in zip(self.active, left, strict=True)]
        if done in self._rungs and self._phase.tuning is not None and self._phase.tuning.halving is not None:
            rows = [{} if record is None else report.compact(record) for record in records]
            found = [choice.score(row, self._phase.tuning) if row else None for row in rows]
            kind = next(one[1] for one in found if one is not None)
            # A point goes on with all of its seeds or none. A seed that has ended counts as the worst.
            alive = {tuple(m.numbers.items()) for m, here in zip(self._members, self.active, strict=True) if here}
            points = [dict(m.numbers) if tuple(m.numbers.items()) in alive else None for m in self._members]
            values = [one[0] if one is not None and here else math.nan for one, here in zip(found, self.active, strict=True)]
            chosen = choice.goes_on(points, values, self._rungs[done], kind)
            self.active = [here and on for here, on in zip(self.active, chosen, strict=True)]
        return self.active

    def record(self, state: State, done: int, records: Sequence[Record | None]) -> None:
        """Saves what all members have reached."""
        lines = []
        for i, record in enumerate(records):
            if record is None:
                continue
            row = self._row(i, record)
            rows = [*map(report.without_confusion, self.trials[i].rows), row]
            self.trials[i] = self.trials[i]._replace(rows=rows, diverged=self._diverged(i, row))
            self.parts[i] = None
            lines.append((self.trials[i], row))
        self._save(state, done)
        self._desk.metrics.append(_where(self._phase), lines)
        self._desk.watcher.record(done, [record for record in records if record is not None])

    def _row(self, i: int, record: Record) -> dict[str, Json]:
        row = report.compact(record)
        for test, ids in self._phase.scored.items():
            row["tests"][test]["ids"] = ids.tolist()
        return report.joined(self.parts[i], row)

    def _diverged(self, i: int, row: dict[str, Json]) -> int | None:
        return report.diverged([*self.trials[i].rows, row], next(iter(self._phase.tests)))

    def _ended(self, i: int, row: dict[str, Json]) -> bool:
        goal = self._phase.goal
        if self._phase.stops and self._diverged(i, row) is not None:
            return True
        return goal is not None and is_reached([*self.trials[i].rows, row], goal)

    def _all_ended(self) -> bool:
        def ended(trial: Trial) -> bool:
            goal = self._phase.goal
            gone = self._phase.stops and trial.diverged is not None
            return gone or (goal is not None and bool(trial.rows) and is_reached(trial.rows, goal))

        return all(ended(trial) for trial, here in zip(self.trials, self.active, strict=True) if here)

    def save_part(self, state: State, done: int, records: Sequence[Sequence[Record]]) -> None:
        """Saves what the members have reached between two evaluations."""
        for i, mine in enumerate(records):
            last = self.trials[i].rows[-1]["round"] if self.trials[i].rows else 0
            if mine and mine[-1].round > last:
                self.parts[i] = report.joined(self.parts[i], report.compact(mine[-1]))
        self._save(state, done)

    def _save(self, state: State, done: int) -> None:
        known = {"trials": [trial._asdict() for trial in self.trials], "parts": self.parts, "active": self.active}
        checkpoint.save(self._folder, _Saved(state, np.int32(done)), report.strict(known), self._config, keep=1)


def _where(phase: Phase) -> tuple[str, str, str]:
    return phase.scenario, phase.system, phase.name


def _makers(path: Path, phase: Phase) -> list[Json]:
    """By which code the trials of a file are made, see `made`: a list, since others may have been trained before."""
    before = json.loads(path.read_text(encoding="utf-8")).get("made", []) if path.is_file() else []
    now = made.made(phase.config["system"]["method"])
    return [*(one for one in before if one != now), now]


def _finished(path: Path, phase: Phase) -> dict[str, Trial]:
    """The trials that an earlier run saved.

    Raises:
      ValueError: they were found with other options, or the file is damaged.
    """
    if not path.is_file():
        return {}
    trials, content = read_trials(path)
    odd = checkpoint.first_difference(content["config"], json.loads(json.dumps(phase.config)))
    if odd is not None:
        raise ValueError(
            f"cannot resume: {odd[0]} was {odd[1]!r} when {path} was written and is {odd[2]!r} now; give another folder"
        )
    # A run of other rounds is continued from its last state.
    return trials if content["rounds"] == phase.rounds else {}
