"""A phase of a study: the trials of a grid, or the final runs of a system; which members one program trains."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import costs, report, runtime, sweeps
from fedjax_meta.algorithm import State
from fedjax_meta.simulation import Record
from fedjax_meta.study.result_files import Metrics
from fedjax_meta.study.scenario import Scenario
from fedjax_meta.study.study import Tuning
from fedjax_meta.study.targets import Target, is_reached
from fedjax_meta.sweeps import Member, MemberEvaluator

Json = Any


class Stopped(Exception):  # noqa: N818 - it is no error
    """`should_stop` ended a study; all that was trained is saved. The message says where."""


class Watcher:
    """Is told how far a study is. This one shows nothing; others show what they want to in methods of the same names."""

    def begin(
        self, scenario: str, system: str, phase: str, members: int, rounds: int, done: int, tested: Sequence[int]
    ) -> None:
        """A sweep begins, or goes on after `done` rounds. After the rounds `tested` its members are tested."""

    def progress(self, done: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Rounds are finished. If `done` is one after which members are tested, the test begins now, and ends with `record`."""

    def record(self, done: int, records: Sequence[Record]) -> None:
        """All members were evaluated that were not stopped by halving."""

    def end(self, outcome: Any) -> None:
        """A system is finished, see `job.Outcome`."""

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
      names: of each test, the names of the clients that are scored, where they have some; in the phase "final".
      shaping: names of the grid's numbers that decide what a program is, see `tuning.shaping`.
      scored: of a test of some clients alone, their ids.
      pooled: whether one client trains with the samples of all, so that those that are tested are strangers.
      devices, store, on_divergence: as in `Study`.
      goal: a final run ends at the evaluation after which it was reached.
      place: the scenario itself.
      traffic: of a final run, gives the bytes of a client in a round; `None` where one client has the samples of all.
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
    names: Mapping[str, Sequence[str]] = {}
    goal: Target | None = None
    place: Scenario | None = None
    traffic: Callable[[], costs.Traffic] | None = None

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

    def diverged(self, rows: Sequence[Mapping[str, Json]]) -> int | None:
        """The round by which the evaluations of a member say that it has diverged; `None` if they do not."""
        return report.diverged(rows, next(iter(self.tests)))

    def has_ended(self, rows: Sequence[Mapping[str, Json]]) -> bool:
        """Whether a member ended early after these evaluations, because it diverged or reached its goal."""
        if self.stops and self.diverged(rows) is not None:
            return True
        return self.goal is not None and bool(rows) and is_reached(rows, self.goal)

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


class RunContext(NamedTuple):
    """Where phases save what they find, and whom they tell.

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


class Saved(NamedTuple):
    """What a checkpoint of a sweep holds."""

    members: State
    round: Any


def results_path(phase: Phase, folder: Path) -> Path:
    """Where the finished trials of a phase are."""
    return folder / "results" / phase.scenario / f"{phase.system}.{phase.name}.json"


def waves(phase: Phase, members: Sequence[Member]) -> list[list[Member]]:
    """The members in groups of one program whose states fit into a quarter of the host's memory.

    It is all of the memory, and not what is free now, so that a run that goes on finds the groups that it saved. A point's seeds
    stay together where they fit; with a store, each member is by itself.
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
    one = runtime.size_in_bytes(sweeps.state_shapes(build, bare, phase.data))
    most = runtime.host_bytes() // 4 // max(one, 1) if runtime.on_cpu() else len(members)
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


def saved_shapes(phase: Phase, members: Sequence[Member]) -> Saved:
    """The shapes of a checkpoint of a sweep."""
    build, bare = phase.traced(members)
    return Saved(sweeps.state_shapes(build, bare, phase.data), jax.ShapeDtypeStruct((), np.int32))


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
