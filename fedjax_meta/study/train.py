"""Trains the members of a phase in waves, which are saved as they come, and compares them where halving does."""

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_meta import checkpoint, disk, report, sweeps
from fedjax_meta import host_store as stores
from fedjax_meta.algorithm import State
from fedjax_meta.blocks import schedule
from fedjax_meta.rounds import federate
from fedjax_meta.simulation import Evaluator, Record, simulate
from fedjax_meta.study import made, parts
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.phase import Phase, RunContext, Saved, Stopped, results_path, saved_shapes, waves
from fedjax_meta.study.result_files import read_json, read_trials, save_clients
from fedjax_meta.study.tuning import Trial
from fedjax_meta.sweeps import Member

Json = Any

SAVE_EVERY = 600.0
"""Seconds after which a sweep is saved although no evaluation is due, so that a kill loses no more than these."""


def trials(phase: Phase, members: Sequence[Member], context: RunContext) -> list[Trial]:
    """The trials of a phase: those that are finished as they were saved, the others trained in waves that fit the memory.

    Raises:
      Stopped: `should_stop` said so.
      ValueError: the folder holds results of other options, or of more rounds.
    """
    path = results_path(phase, context.folder)
    finished = _finished(path, phase)
    if phase.name == "final":  # where a grid has moved on, another point may have been trained before
        finished = {label: trial for label, trial in finished.items() if trial.numbers == members[0].numbers}
    left = [member for member in members if str(member) not in finished]
    known = [finished[str(member)] for member in members if str(member) in finished]
    makers = _makers(path, phase) if left else []
    if phase.name == "final":
        context.metrics.keep_numbers(_where(phase), members[0].numbers)
    context.metrics.align(_where(phase), known)
    if left and any(phase.shape(member) != phase.shape(left[0]) for member in left):
        # Programs of other shapes are compiled while the first one trains.
        context.ahead.start(phase, left)
    for trained in _trained(phase, left, context):
        finished |= trained
        lines = {label: trial._asdict() for label, trial in finished.items()}
        content = {"config": phase.config, "rounds": phase.rounds, "made": makers, "trials": lines}
        if phase.traffic is not None:
            content["traffic"] = sum(phase.traffic())
        disk.write_text(path, json.dumps(report.strict(content), allow_nan=False) + "\n")
    found = [finished[str(member)] for member in members]
    if phase.name == "final":
        save_clients(path.with_name(f"{phase.system}.clients"), found, phase.samples, phase.names)
    return found


def _trained(phase: Phase, members: Sequence[Member], context: RunContext) -> Iterator[dict[str, Trial]]:
    """The trials of all members by name, as they are finished."""
    if not members:
        return
    points = len({tuple(member.numbers.items()) for member in members})
    rungs = choice.rungs(points, phase.rounds, phase.tuning.halving if phase.tuning else None)
    groups = waves(phase, members) if rungs else _as_saved(phase, members, context.folder)
    if rungs and len(groups) > 1:
        yield _in_turns(phase, groups, rungs, context)
        return
    for group in groups:
        wave = _Wave(phase, group, context, rungs)
        _train(wave, phase, group, context)
        yield wave.named()


def _as_saved(phase: Phase, members: Sequence[Member], folder: Path) -> list[list[Member]]:
    """The members in groups that train together: as an earlier run saved them, and the others in waves.

    More seeds or values of a grid thus lose nothing of what others have trained.
    """
    left, groups = {str(member): member for member in members}, []
    for _, names in sorted(_saved_groups(phase, folder), reverse=True):
        group = [left[name] for name in names if name in left]
        if len(group) == len(names) and len(waves(phase, group)) == 1:
            groups.append(group)
            left = {name: member for name, member in left.items() if name not in names}
    return [*groups, *waves(phase, list(left.values()))]


def _saved_groups(phase: Phase, folder: Path) -> Iterator[tuple[int, list[str]]]:
    """(rounds, members) of every checkpoint of a phase."""
    for state in (folder / "state" / phase.scenario).glob(f"{phase.system}.{phase.name}.*"):
        config = checkpoint.saved_config(state)
        if config is not None:
            yield checkpoint.saved_rounds(state)[-1], config["members"]


def _in_turns(
    phase: Phase, groups: Sequence[Sequence[Member]], rungs: Mapping[int, int], context: RunContext
) -> dict[str, Trial]:
    """Trains waves whose points halving compares with each other: every wave up to a rung, then what goes on to the next one."""
    everybody = [member for group in groups for member in group]
    on = [True] * len(everybody)
    found: dict[str, Trial] = {}
    programs: dict[int, sweeps.Programs] = {}
    for until in [*rungs, phase.rounds]:
        flags = iter(on)
        for i, group in enumerate(groups):
            mine = list(itertools.islice(flags, len(group)))
            if not any(mine):
                continue
            wave = _Wave(phase, group, context, rungs, until)
            _train(wave, phase, group, context, mine, programs.get(i))
            found |= wave.named()
            if wave.programs is not None:
                programs[i] = wave.programs
        if until in rungs:
            on = _going_on(phase, [found[str(member)] for member in everybody], on, until, rungs[until])
    return found


def _going_on(phase: Phase, trials: Sequence[Trial], on: Sequence[bool], done: int, most: int) -> list[bool]:
    """Which of all members go on after a rung; they may have been trained further already, before a process was stopped."""
    then = [trial._replace(rows=[row for row in trial.rows if row["round"] <= done]) for trial in trials]
    rows = [trial.rows[-1] if here and trial.rows[-1]["round"] == done else None for trial, here in zip(then, on, strict=True)]
    alive = [row is not None and not phase.has_ended(trial.rows) for row, trial in zip(rows, then, strict=True)]
    return _cut(phase, [trial.numbers for trial in trials], rows, alive, most)


def _cut(
    phase: Phase, numbers: Sequence[Mapping[str, float]], rows: Sequence[Json | None], alive: Sequence[bool], most: int
) -> list[bool]:
    """Which members go on: those of the `most` best points. A point goes on with all of its seeds or none.

    Args:
      phase: of the members.
      numbers: of each member.
      rows: the evaluation of each; `None` if it was not evaluated.
      alive: which members have not ended. One that has counts as the worst.
      most: how many points go on.
    """
    if phase.tuning is None or not any(alive):
        return list(alive)
    found = [None if row is None else choice.score(row, phase.tuning) for row in rows]
    kind = next(one[1] for one in found if one is not None)
    names = {tuple(point.items()) for point, here in zip(numbers, alive, strict=True) if here}
    points = [dict(point) if tuple(point.items()) in names else None for point in numbers]
    values = [one[0] if one is not None and here else math.nan for one, here in zip(found, alive, strict=True)]
    chosen = choice.goes_on(points, values, most, kind)
    return [here and on for here, on in zip(alive, chosen, strict=True)]


def _train(
    wave: "_Wave",
    phase: Phase,
    members: Sequence[Member],
    context: RunContext,
    on: Sequence[bool] | None = None,
    programs: sweeps.Programs | None = None,
) -> None:
    """Trains some members together, from their newest checkpoint to the end of the wave.

    Args:
      wave, phase, members, context: what is trained, and where it is saved.
      on: which of the members go on, where others were compared with them.
      programs: of these members, where they were trained before.

    Raises:
      Stopped: `should_stop` said so.
    """
    where = f"{phase.scenario}, {phase.system}, {phase.name}"
    if context.should_stop():
        raise Stopped(f"{where}: before the next round")
    done = wave.restore(on)
    context.watcher.begin(*_where(phase), len(members), phase.rounds, done, wave.evaluated)
    wave.programs = programs
    while done < wave.until and not wave.over:
        state, records = (_with_store if phase.store != "device" else _swept)(wave, phase, members, context)
        reached = int(np.asarray(state.round).max())
        if reached >= wave.until or wave.over:
            return
        wave.save_part(state, reached, records)
        if context.should_stop():
            raise Stopped(f"{where}: round {reached} of {phase.rounds}")
        # Training goes on from the file, as it does after a stop. The states of large populations are not in memory twice.
        del state, records
        done = wave.restore()


def _swept(wave: "_Wave", phase: Phase, members: Sequence[Member], context: RunContext) -> tuple[State, list[list[Record]]]:
    """Trains the members as one program."""
    build, bare = phase.traced(members)
    wave.programs = wave.programs or context.ahead.take(phase, members)
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
        on_progress=context.watcher.progress,
        should_stop=lambda: wave.ends_here or wave.unsaved_for > SAVE_EVERY or context.should_stop(),
        prune=wave.prune if phase.prunes else None,
        programs=wave.programs,
    )


def _with_store(
    wave: "_Wave", phase: Phase, members: Sequence[Member], context: RunContext
) -> tuple[State, list[list[Record]]]:
    """Trains one member, with what its clients keep on the host; states are `[1, ...]`, as those of a sweep of one."""
    (member,) = members
    method, federation = phase.build(**member.numbers)
    algorithm = federate(method, dataclasses.replace(federation, devices=phase.devices))
    store = stores.MEMORY if phase.store == "host" else context.folder / "store"

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
        store=store,
        on_record=on_record,
        on_progress=lambda done, metrics: context.watcher.progress(
            done, {name: values[None] for name, values in metrics.items()}
        ),
        should_stop=lambda: wave.ends_here or wave.unsaved_for > SAVE_EVERY or context.should_stop(),
    )
    return lifted(state), [records]


class _Wave:
    """What is known of some members that train together, and its checkpoints.

    Attributes:
      trials: of each member.
      parts: for each member what is known of the rounds since its last evaluation, see `report.joined`.
      active: which members go on: those that halving did not stop, and that neither diverged nor reached their goal, where that
        ends a run.
      evaluated: the rounds after which to evaluate.
      state: where to go on.
      until: the round after which the wave ends: the last one, or a rung at which it waits for other waves.
      over: whether all members have ended, because they diverged or reached their goal.
      programs: that trained them, to train them on.
    """

    def __init__(
        self, phase: Phase, members: Sequence[Member], context: RunContext, rungs: Mapping[int, int], until: int | None = None
    ) -> None:
        self._phase, self._members, self._context, self._rungs = phase, members, context, rungs
        self._config = {**phase.config, "members": [str(member) for member in members]}
        # Other members, e.g. those of more seeds, have a folder of their own.
        who = hashlib.blake2b(repr(self._config["members"]).encode(), digest_size=4).hexdigest()
        self._folder = context.folder / "state" / phase.scenario / f"{phase.system}.{phase.name}.{who}"
        self._compares, self.until = until is None, until or phase.rounds
        self.evaluated = sorted({*schedule(phase.rounds, phase.eval_every), *rungs})
        self.trials = [Trial(dict(member.numbers), member.seed, [], None) for member in members]
        self.parts: list[dict[str, Json] | None] = [None] * len(members)
        self.active = [True] * len(members)
        self.state: State | None = None
        self.over = False
        self.programs: sweeps.Programs | None = None
        self._done, self._saved = 0, time.monotonic()

    @property
    def ends_here(self) -> bool:
        """Whether there is nothing left to train, or it waits for other waves."""
        return self.over or self._done >= self.until

    @property
    def unsaved_for(self) -> float:
        """Seconds since it was saved, or read."""
        return time.monotonic() - self._saved

    def named(self) -> dict[str, Trial]:
        """The trials by their members."""
        return {str(member): trial for member, trial in zip(self._members, self.trials, strict=True)}

    def restore(self, on: Sequence[bool] | None = None) -> int:
        """Reads the newest checkpoint; the rounds that are finished.

        Args:
          on: which members go on; all that did when it was saved by default.
        """
        saved = checkpoint.restore(self._folder, partial(saved_shapes, self._phase, self._members), self._config)
        if saved is not None:
            known = report.numbers_again(saved.records)
            self.trials = [Trial(**one) for one in known["trials"]]
            self.parts, self.active, self.state = known["parts"], known["active"], saved.state.members
            self.over = self._phase.ends and self._all_ended()
        if on is not None and not self.over:
            self.active = [here and goes for here, goes in zip(self.active, on, strict=True)]
        done = self._done = 0 if saved is None else saved.round
        if done > self._phase.rounds or (done == self._phase.rounds and any(self.parts)):
            raise ValueError(
                f"{self._phase.system} has trained {done} rounds in {self._context.folder}, and rounds={self._phase.rounds} is "
                "no more: give another folder"
            )
        self._context.metrics.align(_where(self._phase), self.trials)
        self._saved = time.monotonic()
        return done

    def prune(self, done: int, records: Sequence[Record | None]) -> list[bool]:
        """Which members go on after round `done`; the last ones that end are left to end the wave, see `over`."""
        at_rung = self._compares and done in self._rungs
        if not (self._phase.ends or at_rung):
            return self.active
        rows = [None if one is None else self._row(i, one) for i, one in enumerate(records)]
        if self._phase.ends:
            lines = [[*trial.rows, row] if row is not None else None for trial, row in zip(self.trials, rows, strict=True)]
            left = [line is not None and not self._phase.has_ended(line) for line in lines]
            self.over = not any(here and on for here, on in zip(self.active, left, strict=True))
            if self.over:
                return self.active
            self.active = [here and on for here, on in zip(self.active, left, strict=True)]
        if at_rung:
            numbers = [member.numbers for member in self._members]
            self.active = _cut(self._phase, numbers, rows, self.active, self._rungs[done])
        return self.active

    def record(self, state: State, done: int, records: Sequence[Record | None]) -> None:
        """Saves what all members have reached."""
        lines, self._done = [], done
        for i, record in enumerate(records):
            if record is None:
                continue
            row = self._row(i, record)
            rows = [*map(report.without_confusion, self.trials[i].rows), row]
            self.trials[i] = self.trials[i]._replace(rows=rows, diverged=self._phase.diverged(rows))
            self.parts[i] = None
            lines.append((self.trials[i], row))
        self._save(state, done)
        self._context.metrics.append(_where(self._phase), lines)
        self._context.watcher.record(done, [record for record in records if record is not None])

    def _row(self, i: int, record: Record) -> dict[str, Json]:
        row = report.compact(record)
        for test, ids in self._phase.scored.items():
            row["tests"][test]["ids"] = ids.tolist()
        return report.joined(self.parts[i], row)

    def _all_ended(self) -> bool:
        return all(self._phase.has_ended(trial.rows) for trial, here in zip(self.trials, self.active, strict=True) if here)

    def save_part(self, state: State, done: int, records: Sequence[Sequence[Record]]) -> None:
        """Saves what the members have reached between two evaluations."""
        for i, mine in enumerate(records):
            last = self.trials[i].rows[-1]["round"] if self.trials[i].rows else 0
            if mine and mine[-1].round > last:
                self.parts[i] = report.joined(self.parts[i], report.compact(mine[-1]))
        self._save(state, done)

    def _save(self, state: State, done: int) -> None:
        known = {"trials": [trial._asdict() for trial in self.trials], "parts": self.parts, "active": self.active}
        checkpoint.save(self._folder, Saved(state, np.int32(done)), report.strict(known), self._config, keep=1)
        self._saved = time.monotonic()


def _where(phase: Phase) -> tuple[str, str, str]:
    return phase.scenario, phase.system, phase.name


def _makers(path: Path, phase: Phase) -> list[Json]:
    """By which code the trials of a file are made, see `made`: a list, since others may have been trained before."""
    before = json.loads(path.read_text(encoding="utf-8")).get("made", []) if path.is_file() else []
    system = phase.config["system"]
    now = made.made(system["method"], phase.place, parts.own_names(system["federation"]))
    return [*(one for one in before if one != now), now]


def check_phase(phase: Phase, folder: Path) -> None:
    """Raises `ValueError` if a folder holds results or checkpoints of a phase that were made with other options."""
    path = results_path(phase, folder)
    if path.is_file():
        _check_config(read_json(path, ("trials", "config"))["config"], phase, path)
    for state in sorted((folder / "state" / phase.scenario).glob(f"{phase.system}.{phase.name}.*")):
        config = checkpoint.saved_config(state)
        if config is not None:
            _check_config({name: value for name, value in config.items() if name != "members"}, phase, state)


def _check_config(before: Json, phase: Phase, path: Path) -> None:
    odd = checkpoint.first_difference(before, json.loads(json.dumps(phase.config)))
    if odd is None:
        return
    name, old, new = odd
    change = f"{name} was {old!r} when {path} was written and is {new!r} now"
    if name == "scored":
        change = (
            f"other systems of scenario {phase.scenario} attack than when {path} was written, so that other clients are scored"
        )
    raise ValueError(f"cannot resume: {change}; give another folder")


def _finished(path: Path, phase: Phase) -> dict[str, Trial]:
    """The trials that an earlier run saved.

    Raises:
      ValueError: they were found with other options, or the file is damaged.
    """
    if not path.is_file():
        return {}
    trials, content = read_trials(path)
    _check_config(content["config"], phase, path)
    # A run of other rounds is continued from its last state.
    return trials if content["rounds"] == phase.rounds else {}
