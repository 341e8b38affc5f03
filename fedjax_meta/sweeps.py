"""Many runs of one method as one program: a grid of hyper-parameters times seeds.

Members of a sweep share everything that shapes a program (model, batch sizes, epochs, clients) and differ in numbers: rates,
weights, seeds. The program is compiled once. On a CPU the members are dealt to the cores, and each core trains its members one
after the other: no core waits for another within a round. On an accelerator they are lanes of one program.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_meta import checks, engine, runtime
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.federation import Federation
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import federate
from fedjax_meta.simulation import Compiled, Log, Record, all_there, faults_in, run_keys, run_rounds, schedule
from fedjax_meta.types import Key

MEMBERS = "members"
"""Name of the mesh axis over which the members of a sweep are spread."""

Build = Callable[..., Method | tuple[Method, Federation]]
"""`(**numbers) -> method`, e.g. `lambda lr: fm.fedavg(task, lr=lr)`, or a method and its federation; the numbers are traced."""


class Member(NamedTuple):
    """One run of a sweep.

    Attributes:
      numbers: its hyper-parameters by name.
      seed: of its key, `jax.random.key(seed)`.
    """

    numbers: Mapping[str, float]
    seed: int

    def __str__(self) -> str:
        return ", ".join([*(f"{name}={value:g}" for name, value in self.numbers.items()), f"seed {self.seed}"])


class MemberEvaluator(NamedTuple):
    """What to measure, and on which data.

    Attributes:
      measure: `(algorithm, key, state, data) -> pytree of arrays`, traceable; usually `evaluate`.
      data: the last argument of `measure`.
    """

    measure: Callable[[Algorithm, Key, State, Any], Any]
    data: Any


def grid(**values: Sequence[float]) -> list[dict[str, float]]:
    """Every combination of the values, the last name varying fastest.

    Example:
      >>> grid(lr=[0.1, 0.2], prox_weight=[1.0])
      [{'lr': 0.1, 'prox_weight': 1.0}, {'lr': 0.2, 'prox_weight': 1.0}]
    """
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def sweep(  # over 80 lines: half of them explain the arguments
    build: Build,
    members: Sequence[Member],
    data: FederatedData,
    *,
    rounds: int,
    federation: Federation | None = None,
    eval_every: int = 20,
    evaluators: Mapping[str, MemberEvaluator] | None = None,
    state: State | None = None,
    devices: int | None = None,
    at_once: int | None = None,
    on_record: Callable[[State, int, list[Record]], None] | None = None,
    on_progress: Callable[[int, dict[str, np.ndarray]], None] | None = None,
) -> tuple[State, list[list[Record]]]:
    """Trains a method at each point of a grid with each seed, and evaluates as `simulate` does.

    A member gets the keys that `simulate` gives the run of its seed, so that both find the same numbers up to rounding.

    Args:
      build: the method as a function of its numbers.
      members: what to train, e.g. `members(grid(lr=[0.1, 0.3]), seeds=[1, 2, 3])`; all name the same numbers.
      data: the clients that train.
      rounds, eval_every: as in `simulate`.
      federation: how rounds are run where `build` does not say it; its `devices` is ignored, because a member has one device.
      evaluators: by name, what to measure.
      state: where to resume: a state of this sweep, leaves `[M, ...]`.
      devices: how many devices share the members; all by default.
      at_once: members that a device trains side by side; one on a CPU and all on an accelerator by default.
      on_record: called after each evaluation with (state of all members, finished rounds, each member's record). The next block
        reuses the memory of the state: copy what you keep.
      on_progress: as in `simulate`, with metrics `[M, rounds]`.

    Returns:
      (state, leaves `[M, ...]`; the records of each member).

    Raises:
      ValueError: no members, members of different names, a value that the method refuses, a state of another sweep, and what
        `simulate` raises.
    """
    _check_members(members)
    checks.count("rounds", rounds)
    checks.count("eval_every", eval_every)
    # At the door, each point is tried with plain numbers: traced ones pass every check.
    for point in {tuple(member.numbers.items()) for member in members}:
        _algorithm(build, dict(point), federation)
    run = _Sweep(build, members, federation, data, evaluators or {}, devices, at_once, state, most=eval_every)
    done = int(np.asarray(run.state.round)[0])
    if done > rounds:
        raise ValueError(f"rounds={rounds}, but the state has finished {done} rounds already")
    records: list[list[Record]] = [[] for _ in members]
    stretch = eval_every if on_progress is None else 1
    for stop in [stop for stop in schedule(rounds, eval_every) if stop > done]:
        started, compiled, first = time.perf_counter(), run.compile_seconds, done
        logs: list[Log] = []
        while done < stop:
            count, clock = min(stretch, stop - done), time.perf_counter() - run.compile_seconds
            with all_there(done):
                logs.append(run.train(count))
            done += count
            if on_progress is not None:
                took = time.perf_counter() - run.compile_seconds - clock
                stretch = int(np.clip(count / max(took, 1e-3), 1, eval_every))
                on_progress(done, logs[-1].metrics)
        with all_there(done):
            results = run.measure()
        log = jax.tree.map(lambda *parts: np.concatenate(parts, 1), *logs)
        compiled = run.compile_seconds - compiled
        seconds = (time.perf_counter() - started - compiled) / len(members)
        for m, history in enumerate(records):
            mine, result = jax.tree.map(lambda leaf, m=m: leaf[m], (log, results))
            faults = tuple(faults_in(mine, first, run.algorithm, data, run=str(members[m])))
            history.append(Record(done, mine.metrics, result, seconds, compiled / len(members), faults))
        if on_record is not None:
            on_record(run.state, done, [history[-1] for history in records])
    return run.state, records


def members(points: Sequence[Mapping[str, float]], seeds: Sequence[int]) -> list[Member]:
    """Every point with every seed, seeds varying fastest.

    Raises:
      ValueError: no points or seeds, a seed twice, points of different names.
    """
    made = [Member(dict(point), int(seed)) for point in points for seed in seeds]
    _check_members(made)
    return made


def _check_members(members: Sequence[Member]) -> None:
    if not members:
        raise ValueError("a sweep needs at least one point and one seed")
    names = list(members[0].numbers)
    for member in members:
        if list(member.numbers) != names:
            raise ValueError(f"all members must name the same numbers in the same order: {names}, but one has {member}")
    labels = [str(member) for member in members]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"a sweep has the member {label} twice")


def _algorithm(build: Build, numbers: Mapping[str, Any], federation: Federation | None) -> Algorithm:
    """A member's algorithm on a device of its own."""
    made = build(**numbers)
    method, own = made if isinstance(made, tuple) else (made, federation or Federation())
    return federate(method, dataclasses.replace(own, devices=1))


def member_algorithm(build: Build, member: Member, federation: Federation | None = None) -> Algorithm:
    """The algorithm of one member, e.g. to evaluate its state."""
    return _algorithm(build, member.numbers, federation)


def state_shapes(build: Build, members: Sequence[Member], data: FederatedData, federation: Federation | None = None) -> State:
    """The shapes of a sweep's state, leaves `[M, ...]`; nothing is computed."""
    algorithm = _algorithm(build, members[0].numbers, federation)
    one = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(members), *leaf.shape), leaf.dtype), one)


class _Sweep:
    """The members' states on the devices, and the two programs of a sweep."""

    def __init__(
        self,
        build: Build,
        members: Sequence[Member],
        federation: Federation | None,
        data: FederatedData,
        evaluators: Mapping[str, MemberEvaluator],
        devices: int | None,
        at_once: int | None,
        state: State | None,
        *,
        most: int,
    ) -> None:
        count = len(members)
        available = engine.client_mesh(devices).devices
        mesh = Mesh(available[: min(count, available.size)], (MEMBERS,))
        share = -(-count // mesh.size)
        lanes = at_once or (1 if runtime.on_cpu() else share)
        checks.count("at_once", lanes)
        self.algorithm = _algorithm(build, members[0].numbers, federation)
        # Members that fill up the last share repeat the last one and are dropped from every result.
        rows = np.minimum(np.arange(mesh.size * share), count - 1)
        split, whole = NamedSharding(mesh, P(MEMBERS)), NamedSharding(mesh, P())
        listed = {name: np.array([m.numbers[name] for m in members])[rows] for name in members[0].numbers}
        numbers = {name: jnp.asarray(values, jnp.result_type(float)) for name, values in listed.items()}
        keys = jax.vmap(jax.random.key)(np.array([m.seed for m in members])[rows])
        self._who = jax.device_put((numbers, keys), split)
        self._data = engine.place_shared(data, whole)
        self._test_data = engine.place_shared({name: test.data for name, test in evaluators.items()}, whole)
        self._count, self._rows = count, rows

        def each(function: Callable[..., Any]) -> Callable[..., Any]:
            """`function(algorithm, key, state, shared)` for all members, on all devices."""

            def member(shared: Any, one: Any) -> Any:
                (numbers, key), state = one
                return function(_algorithm(build, numbers, federation), key, state, shared)

            def on_device(who: Any, state: Any, shared: Any) -> Any:
                return engine.map_clients(partial(member, shared), (who, state), lanes=lanes)

            specs = (P(MEMBERS), P(MEMBERS), P())
            return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(MEMBERS), check_vma=False)

        def begin(algorithm: Algorithm, key: Key, state: None, data: FederatedData) -> State:
            return algorithm.init(run_keys(key)[0], data)

        def block(algorithm: Algorithm, key: Key, state: State, shared: Any) -> Any:
            data, number = shared
            return run_rounds(algorithm, run_keys(key)[1], state, data, number, most=most)

        def measure(algorithm: Algorithm, key: Key, state: State, data: Any) -> Any:
            key = run_keys(key)[2]
            return {
                name: test.measure(algorithm, tagged(key, name, state.round), state, data[name])
                for name, test in evaluators.items()
            }

        self._block = Compiled(jax.jit(each(block), donate_argnums=(1,)))
        self._measure = Compiled(jax.jit(each(measure)))
        if state is None:
            self._state = Compiled(jax.jit(each(begin)))(self._who, None, self._data)
        else:
            odd = checks.mismatch(state, state_shapes(build, members, data, federation))
            if odd is not None:
                raise ValueError(f"state does not fit: {odd}; is it of another sweep?")
            self._state = jax.device_put(jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], state), split)

    @property
    def state(self) -> State:
        """Of the M members."""
        return jax.tree.map(lambda leaf: leaf[: self._count], self._state)

    @property
    def compile_seconds(self) -> float:
        """Of the programs so far."""
        return self._block.seconds + self._measure.seconds

    def train(self, number: int) -> Log:
        """`number` rounds of each member; leaves `[M, number, ...]`."""
        self._state, log = jax.block_until_ready(self._block(self._who, self._state, (self._data, number)))
        return jax.tree.map(lambda line: np.asarray(line)[: self._count, :number], log)

    def measure(self) -> dict[str, Any]:
        """What each test finds, leaves `[M, ...]`."""
        found = self._measure(self._who, self._state, self._test_data)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: self._count], found)
