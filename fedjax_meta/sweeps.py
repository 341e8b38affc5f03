"""Many runs of one method as one program: a grid of hyper-parameters times seeds.

Members of a sweep share everything that shapes a program (model, batch sizes, epochs, clients) and differ in numbers: rates,
weights, seeds. The program is compiled once. On a CPU the members are dealt to the cores, and each core trains its members one
after the other: no core waits for another within a round. On an accelerator they are lanes of one program.
"""

import contextlib
import copy
import dataclasses
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_meta import checks, engine, placement, runtime
from fedjax_meta.algorithm import Algorithm, State, check_clients, check_distinct
from fedjax_meta.blocks import Compiled, Log, run_keys, run_rounds, schedule, stretches
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.faults import faults_in, leaf_names
from fedjax_meta.federation import Federation, check_values
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import federate
from fedjax_meta.simulation import Record, check_schedule
from fedjax_meta.types import Key

MEMBERS = "members"
"""Name of the mesh axis over which the members of a sweep are spread."""

Build = Callable[..., Method | tuple[Method, Federation] | Algorithm]
"""`(**numbers) -> method`, e.g. `lambda lr: fm.fedavg(task, lr=lr)`, or a method and its federation, or an algorithm on one
device, see `alone`; the numbers are traced."""


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
    for name, given in values.items():
        if isinstance(given, str) or not hasattr(given, "__iter__"):
            raise ValueError(f"{name}={checks.shown(given)} must be a list of numbers, e.g. {name}=[0.1, 0.3]")
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def sweep(  # over 80 lines: half of them explain the arguments
    build: Build,
    members: Sequence[Member],
    data: FederatedData,
    *,
    rounds: int,
    federation: Federation | None = None,
    eval_every: int | Sequence[int] = 20,
    evaluators: Mapping[str, MemberEvaluator] | None = None,
    state: State | None = None,
    active: Sequence[bool] | None = None,
    devices: int | None = None,
    at_once: int | None = None,
    on_record: Callable[[State, int, list[Record | None]], None] | None = None,
    on_progress: Callable[[int, dict[str, np.ndarray]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    prune: Callable[[int, list[Record | None]], Sequence[bool]] | None = None,
    programs: "Programs | None" = None,
) -> tuple[State, list[list[Record]]]:
    """Trains a method at each point of a grid with each seed, and evaluates as `simulate` does.

    A member gets the keys that `simulate` gives the run of its seed, so that both find the same numbers up to rounding. (Not
    where a traced number decides which samples a rule takes, `validation_share` of `knn_per` and `held_out` of `fedgp`, nor with
    a private task, whose noise follows from the bits of the parameters: there they are draws of the same distribution.)

    Args:
      build: the method as a function of its numbers.
      members: what to train, e.g. `members(grid(lr=[0.1, 0.3]), seeds=[1, 2, 3])`; all name the same numbers.
      data: the clients that train.
      rounds: as in `simulate`.
      federation: how rounds are run where `build` does not say it; its `devices` is ignored, because a member has one device.
      eval_every: as in `simulate`, or the rounds after which to evaluate; the last round is always one of them.
      evaluators: by name, what to measure.
      state: where to resume: a state of this sweep, leaves `[M, ...]`.
      active: which members go on, where some were pruned before; these must have finished equally many rounds.
      devices: how many devices share the members; all by default.
      at_once: members that a device trains side by side; one on a CPU and all on an accelerator by default.
      on_record: called after each evaluation with (state of all members, finished rounds, each member's record, `None` for those
        that were pruned). The next block reuses the memory of the state: copy what you keep.
      on_progress: as in `simulate`, with metrics `[A, rounds]` of the A members that go on.
      should_stop: as in `simulate`.
      prune: called after each evaluation but the last, before `on_record`, with (finished rounds, each member's record); says for
        each member whether it goes on. The others keep their state, with the number of rounds that they have finished, and get no
        more records. What is left is dealt to the devices anew, which saves time where a device trains one member at a time.
      programs: of this sweep, compiled beforehand; made here when not given. Their `build` and `measure` are used, not those of
        this call.

    Returns:
      (state, leaves `[M, ...]`; the records of each member, which share the wall-clock of the sweep equally). Records are those
      of this call: a state that has finished all `rounds` gets none.

    Raises:
      ValueError: no members, members of different names, a value that the method refuses, a state of another sweep or of members
        that have not finished equally many rounds, programs of another sweep, and what `simulate` raises.
    """
    checks.count("rounds", rounds)
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    check_distinct(data)
    stops = _stops(rounds, eval_every)
    members = _checked(build, members, evaluators)
    for name, told, takes in (
        ("on_record", on_record, ("state", "round", "records")),
        ("on_progress", on_progress, ("round", "metrics")),
        ("should_stop", should_stop, ()),
        ("prune", prune, ("round", "records")),
    ):
        if told is not None:
            checks.function(name, told, takes, f"lambda {', '.join(takes)}: ...")
    if active is not None and not np.iterable(active):
        raise ValueError(f"active={checks.shown(active)} must say for each member whether it goes on")
    some_rest = active is not None and not all(active)
    if programs is None:
        programs = Programs(
            build,
            members,
            data,
            federation=federation,
            evaluators=evaluators,
            devices=devices,
            at_once=at_once,
            prunes=prune is not None or some_rest,
        )
    else:
        checks.instance("programs", programs, Programs, "sweeps.Programs(build, members, data)")
        programs.check_of(members, data, federation, evaluators, devices, at_once, prunes=prune is not None or some_rest)
    check_values(programs.algorithm.task, data)
    for seed in dict.fromkeys(member.seed for member in members):
        check_schedule(programs.algorithm, run_keys(jax.random.key(seed))[1], data, rounds)
    run = _Sweep(programs, state, active)
    if run.done > rounds:
        raise ValueError(f"rounds={rounds}, but the state has finished {run.done} rounds already")
    records: list[list[Record]] = [[] for _ in members]
    leaves = leaf_names(programs.algorithm, data)

    def on_log(first: int, log: Log) -> None:
        if on_progress is not None:
            on_progress(first + log.some.shape[1], {name: values[run.active] for name, values in log.metrics.items()})

    in_pieces = on_progress is not None or should_stop is not None
    for found in stretches(run, stops, most=programs.most, in_pieces=in_pieces, on_log=on_log, should_stop=should_stop):
        log = jax.tree.map(lambda *parts: np.concatenate(parts, 1), *found.logs)
        count = int(run.active.sum())
        seconds = found.seconds / count, found.compile_seconds / count
        last: list[Record | None] = [None] * len(members)
        for m in np.flatnonzero(run.active).tolist():
            mine, evaluations = jax.tree.map(lambda leaf, m=m: leaf[m], (log, found.evaluations or {}))
            faults = tuple(faults_in(mine, found.first, leaves, run=str(members[m])))
            records[m].append(Record(found.done, mine.metrics, evaluations, *seconds, faults))
            last[m] = records[m][-1]
        if found.evaluations is not None:
            if prune is not None and found.done < rounds:
                run.go_on(np.asarray(prune(found.done, last), bool))
            if on_record is not None:
                on_record(run.state, found.done, last)
    return run.state, records


def _checked(build: Any, members: Any, evaluators: Any) -> list[Member]:
    """The members as a list. Raises `ValueError` for arguments of another kind."""
    if not callable(build):
        raise ValueError(
            f"build={checks.shown(build)} must be a function of a member's numbers, e.g. lambda lr: fm.fedavg(task, lr=lr)"
        )
    made = list(members) if np.iterable(members) else [members]
    for one in made:
        if not isinstance(one, Member):
            raise ValueError(f"members must be what sweeps.members(points, seeds) gives, not {checks.shown(one)}")
        if not isinstance(one.numbers, Mapping):
            raise ValueError(f"a member has numbers by name, e.g. Member({{'lr': 0.1}}, 1), not {checks.shown(one.numbers)}")
        for name, value in one.numbers.items():
            checks.finite(name, value)
        checks.seed("seed", one.seed, bits=32)
    if not isinstance(evaluators or {}, Mapping):
        raise ValueError(f"evaluators={checks.shown(evaluators)} must be a mapping of names to sweeps.MemberEvaluator")
    for name, test in (evaluators or {}).items():
        checks.word("the name of an evaluator", name)
        if not isinstance(test, MemberEvaluator):
            raise ValueError(f"evaluators[{name!r}] must be a sweeps.MemberEvaluator, not {checks.shown(test)}")
    return made


def _stops(rounds: int, eval_every: int | Sequence[int]) -> list[int]:
    """The rounds after which to evaluate."""
    if isinstance(eval_every, (int, np.integer)):
        checks.count("eval_every", eval_every)
        return schedule(rounds, int(eval_every))
    if not np.iterable(eval_every):
        raise ValueError(f"eval_every={checks.shown(eval_every)} must be an integer, or the rounds after which to evaluate")
    for number in eval_every:
        checks.count("eval_every", number)
    return sorted({*(number for number in eval_every if number < rounds), rounds})


def members(points: Sequence[Mapping[str, float]], seeds: Sequence[int]) -> list[Member]:
    """Every point with every seed, seeds varying fastest.

    Raises:
      ValueError: no points or seeds, a seed twice, points of different names, a value that is no number, a seed out of range.
    """
    for name, given in (("points", points), ("seeds", seeds)):
        if not np.iterable(given):
            raise ValueError(
                f"{name}={checks.shown(given)} must be a list, e.g. members(sweeps.grid(lr=[0.1, 0.3]), seeds=[1, 2])"
            )
    points, seeds = list(points), list(seeds)
    for seed in seeds:
        checks.seed("seed", seed, bits=32)
    for point in points:
        if not isinstance(point, Mapping):
            raise ValueError(f"points must be numbers by name, e.g. sweeps.grid(lr=[0.1, 0.3]), not {checks.shown(point)}")
        for name, value in point.items():
            checks.finite(name, value)
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
            raise ValueError(f"a sweep has the member {label} twice; members must differ in the first six digits of a number")


def _check_points(build: Build, members: Sequence[Member], federation: Federation | None) -> None:
    """Tries each point with plain numbers: traced ones pass every check."""
    _check_members(members)
    try:
        inspect.signature(build).bind(**members[0].numbers)
    except TypeError as error:
        raise ValueError(f"build must take the numbers of the members, {', '.join(members[0].numbers)}: {error}") from None
    for point in {tuple(member.numbers.items()) for member in members}:
        _algorithm(build, dict(point), federation)


def _algorithm(build: Build, numbers: Mapping[str, Any], federation: Federation | None) -> Algorithm:
    """A member's algorithm on a device of its own."""
    made = build(**numbers)
    if isinstance(made, Algorithm):
        return made
    return alone(*made) if isinstance(made, tuple) else alone(made, federation or Federation())


def alone(method: Method, federation: Federation) -> Algorithm:
    """A method in a federation as a member of a sweep runs it: on one device."""
    checks.instance("federation", federation, Federation, "fm.Federation(cohort_size=5)")
    return federate(method, dataclasses.replace(federation, devices=1))


def member_algorithm(build: Build, member: Member, federation: Federation | None = None) -> Algorithm:
    """The algorithm of one member, e.g. to evaluate its state."""
    return _algorithm(build, member.numbers, federation)


def state_shapes(build: Build, members: Sequence[Member], data: FederatedData, federation: Federation | None = None) -> State:
    """The shapes of a sweep's state, leaves `[M, ...]`; nothing is computed."""
    algorithm = _algorithm(build, members[0].numbers, federation)
    one = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(members), *leaf.shape), leaf.dtype), one)


class Programs:
    """The programs of a sweep: its first state, a block of rounds, and the tests.

    They hold no numbers: members of other values and seeds, but of the same count, are run by the same programs. `compile` may be
    called on another thread, e.g. while another sweep trains.

    Args:
      build, members, data, federation, evaluators, devices, at_once: as in `sweep`.
      prunes: whether members may be pruned.

    Attributes:
      members: whose programs these are.
      algorithm: of the first member.
      waited: seconds that a sweep waited for compilation.

    Raises:
      ValueError: see `sweep`.
    """

    most = 64
    """Rounds of a block, at most: the interval of evaluation is no part of a program."""

    def __init__(
        self,
        build: Build,
        members: Sequence[Member],
        data: FederatedData,
        *,
        federation: Federation | None = None,
        evaluators: Mapping[str, MemberEvaluator] | None = None,
        devices: int | None = None,
        at_once: int | None = None,
        prunes: bool = False,
    ) -> None:
        if jax.process_count() > 1:
            raise ValueError(
                f"a sweep is run by one process, but this run has {jax.process_count()}: share the members among processes that "
                "do not know of each other"
            )
        _check_points(build, members, federation)
        self._build, self._federation, self._asked = build, federation, (devices, at_once)
        tests = dict(evaluators or {})
        self._given = data, tests
        available = placement.client_mesh(devices).devices
        mesh = Mesh(available[: min(len(members), available.size)], (MEMBERS,))
        share = -(-len(members) // mesh.size)
        if at_once is not None:
            checks.count("at_once", at_once)
        lanes = at_once or (1 if runtime.on_cpu() else share)
        self.members, self.waited = list(members), 0.0
        self.algorithm = _algorithm(build, members[0].numbers, federation)
        self.devices, self.places, self.prunes = mesh.size, mesh.size * share, prunes
        self.split, self._whole = NamedSharding(mesh, P(MEMBERS)), NamedSharding(mesh, P())
        self.shapes = state_shapes(build, members, data, federation)
        given = data, {name: test.data for name, test in tests.items()}
        self._data, self._test_data = placement.laid_out(given, available.flat[0].platform)

        def each(function: Callable[..., Any]) -> Callable[..., Any]:
            """`function(algorithm, key, active, state, shared)` for all members, on all devices."""

            def member(shared: Any, one: Any) -> Any:
                (numbers, key, active), state = one
                with engine.sharing_memory(lanes):
                    return function(_algorithm(build, numbers, federation), key, active, state, shared)

            def on_device(who: Any, state: Any, shared: Any) -> Any:
                return engine.map_clients(partial(member, shared), (who, state), lanes=lanes)

            specs = (P(MEMBERS), P(MEMBERS), P())
            return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(MEMBERS), check_vma=False)

        def begin(algorithm: Algorithm, key: Key, active: Any, state: None, data: FederatedData) -> State:
            return algorithm.init(run_keys(key)[0], data)

        def block(algorithm: Algorithm, key: Key, active: Any, state: State, shared: Any) -> Any:
            data, number = shared
            # Lanes of different lengths would take longer than lanes of one.
            number = number * active if prunes or lanes == 1 else number
            return run_rounds(algorithm, run_keys(key)[1], state, data, number, most=self.most)

        def measure(algorithm: Algorithm, key: Key, active: Any, state: State, data: Any) -> Any:
            def found() -> dict[str, Any]:
                own = run_keys(key)[2]
                return {
                    name: test.measure(algorithm, tagged(own, name, state.round), state, data[name])
                    for name, test in tests.items()
                }

            if not prunes:
                return found()
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(found))
            return jax.lax.cond(active > 0, found, lambda: nothing)

        self.begin = Compiled(jax.jit(each(begin)))
        self.block = Compiled(jax.jit(each(block), donate_argnums=(1,)))
        self.measure = Compiled(jax.jit(each(measure)))

    def compile(self) -> None:
        """Compiles what is not compiled yet."""
        who = jax.tree.map(lambda leaf: _shape(leaf, self.split), self.who(np.zeros(self.places, int), np.zeros(self.places)))
        state = jax.tree.map(lambda leaf: _shape(leaf, self.split, (self.places, *leaf.shape[1:])), self.shapes)
        data, tests = (jax.tree.map(lambda leaf: _shape(leaf, self._whole), tree) for tree in (self._data, self._test_data))
        with _numbers_that_shape_nothing():
            self.begin.compile(who, None, data)
            self.block.compile(who, state, (data, np.int32(1)))
            self.measure.compile(who, state, tests)

    def check_of(
        self,
        members: Sequence[Member],
        data: FederatedData,
        federation: Federation | None,
        evaluators: Mapping[str, MemberEvaluator] | None,
        devices: int | None,
        at_once: int | None,
        *,
        prunes: bool,
    ) -> None:
        """Raises `ValueError` unless these are the programs of such a sweep; functions (`build`, `measure`) are not compared."""
        if self.members != list(members):
            raise ValueError("these programs are of a sweep of other members")
        clients, tests = self._given
        if not _same_arrays(clients, data):
            raise ValueError("these programs are of a sweep of other clients")
        given = dict(evaluators or {})
        if given.keys() != tests.keys() or not all(_same_arrays(tests[name].data, given[name].data) for name in tests):
            raise ValueError("these programs are of a sweep with other evaluators")
        if federation is not None and federation != self._federation:
            raise ValueError("these programs are of a sweep in another federation")
        for name, asked, had in zip(("devices", "at_once"), (devices, at_once), self._asked, strict=True):
            if asked is not None and asked != had:
                raise ValueError(f"these programs were made with {name}={had}, not {asked}")
        if prunes and not self.prunes:
            raise ValueError("these programs were made without prunes=True")

    def of(self, members: Sequence[Member]) -> "Programs":
        """The same programs for other members.

        Raises:
          ValueError: another count or other names, and what `sweep` raises.
        """
        if len(members) != len(self.members) or list(members[0].numbers) != list(self.members[0].numbers):
            raise ValueError("these programs are of a sweep of other members")
        _check_points(self._build, members, self._federation)
        other = copy.copy(self)
        other.members, other.waited = list(members), 0.0
        return other

    def place_data(self) -> tuple[FederatedData, dict[str, Any]]:
        """The clients that train, and what is tested, on the devices."""
        return placement.place_shared(self._data, self._whole), placement.place_shared(self._test_data, self._whole)

    def who(self, rows: np.ndarray, active: np.ndarray) -> Any:
        """Numbers, keys and activity of the members `rows`, one for each place; not on the devices yet."""
        some = [self.members[row] for row in rows]
        numbers = {name: np.array([member.numbers[name] for member in some]) for name in some[0].numbers}
        kind = jnp.result_type(float)
        keys = jax.vmap(jax.random.key)(np.array([member.seed for member in some]))
        return {name: values.astype(kind) for name, values in numbers.items()}, keys, active.astype(np.int32)

    def call(self, program: Compiled, *arguments: Any) -> Any:
        """The result of a program, when it is there."""
        before = time.perf_counter()
        with _numbers_that_shape_nothing():
            program.compile(*arguments)
        self.waited += time.perf_counter() - before
        return program(*arguments)


def _same_arrays(one: Any, other: Any) -> bool:
    """Whether two trees hold the same arrays, which are compared only where they are not the very same objects."""

    def same(a: Any, b: Any) -> bool:
        alike = np.shape(a) == np.shape(b) and jnp.result_type(a) == jnp.result_type(b)
        return a is b or (alike and np.asarray(a).tobytes() == np.asarray(b).tobytes())

    mine, others = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (one, other))
    return mine.keys() == others.keys() and all(same(leaf, others[path]) for path, leaf in mine.items())


SHAPING = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of a traced number where Python needs its value."""


@contextlib.contextmanager
def _numbers_that_shape_nothing() -> Iterator[None]:
    """Explains the error of a program that would need a number of a member when it is compiled."""
    try:
        yield
    except SHAPING as error:
        raise ValueError(
            f"a number of this sweep decides what its program is ({checks.first_line(error)}): give each of its values a sweep, "
            "or in a study a system, of its own"
        ) from error


def _shape(leaf: Any, placed: NamedSharding, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    leaf = jax.eval_shape(lambda: leaf) if isinstance(leaf, np.ndarray) else leaf
    return jax.ShapeDtypeStruct(leaf.shape if shape is None else shape, leaf.dtype, sharding=placed)


class _Sweep:
    """The members' states on the devices.

    Attributes:
      active: bool `[M]`, which members go on.
      done: rounds that these have finished.
    """

    def __init__(self, programs: Programs, state: State | None, active: Sequence[bool] | None) -> None:
        self._programs, self._count = programs, len(programs.members)
        self._data, self._test_data = programs.place_data()
        self.active = np.ones(self._count, bool) if active is None else np.array(active, bool)
        if self.active.shape != (self._count,) or not self.active.any():
            raise ValueError(f"active must say for each of the {self._count} members whether it goes on, and keep one")
        if state is None:
            self._deal()
            # The devices of a CPU share its memory.
            runs = programs.places if runtime.on_cpu() else programs.places // programs.devices
            blank = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), programs.shapes)
            placement.check_room((blank.personal, blank.memory, blank.residual), 1, runs=runs)
            self._state = programs.call(programs.begin, self._who, None, self._data)
        else:
            odd = checks.mismatch(state, programs.shapes)
            if odd is not None:
                raise ValueError(f"state does not fit: {odd}; is it of another sweep?")
            check_clients(state, self._data)
            self._deal()
            self._put(state)
        reached = np.asarray(self.state.round)[self.active]
        self.done = int(reached.max())
        if (reached != self.done).any():
            raise ValueError(
                f"the members have finished {reached.tolist()} rounds: say with active=[...] which of one round go on"
            )

    @property
    def compile_seconds(self) -> float:
        """Seconds that it has waited for compilation so far."""
        return self._programs.waited

    def _deal(self) -> None:
        """Gives each place a member, so that the devices share the active ones evenly."""
        devices, places = self._programs.devices, self._programs.places
        # Places that are left over repeat the last member; they are not trained, and dropped from every result.
        dealt = np.full(places, -1)
        dealt[: self._count] = np.arange(self._count)
        if not self.active.all():
            on, off = np.flatnonzero(self.active), [*np.flatnonzero(~self.active), *[-1] * (places - self._count)]
            share = places // devices
            for device in range(devices):
                mine = on[device::devices]
                dealt[device * share :][:share] = [*mine, *(off.pop(0) for _ in range(share - len(mine)))]
        self._rows = np.where(dealt < 0, self._count - 1, dealt)
        self._at = np.array([np.flatnonzero(dealt == member)[0] for member in range(self._count)])
        trained = (dealt >= 0) & self.active[self._rows]
        self._who = jax.device_put(self._programs.who(self._rows, trained), self._programs.split)

    def _put(self, state: State) -> None:
        """Places the states of the M members."""
        self._state = jax.device_put(jax.tree.map(lambda leaf: jnp.asarray(leaf)[self._rows], state), self._programs.split)

    def go_on(self, which: np.ndarray) -> None:
        """Only these members go on, bool `[M]`, of those that are active."""
        if which.shape != (self._count,) or not (which & self.active).any():
            raise ValueError(f"prune must say for each of the {self._count} members whether it goes on, and keep one")
        if np.array_equal(which & self.active, self.active):
            return
        if not self._programs.prunes:
            raise ValueError("these programs were made without prunes=True")
        state, self.active = self.state, self.active & which
        self._deal()
        self._put(state)

    @property
    def state(self) -> State:
        """Of the M members."""
        if np.array_equal(self._at, np.arange(self._count)):
            return jax.tree.map(lambda leaf: leaf[: self._count], self._state)
        return jax.tree.map(lambda leaf: leaf[self._at], self._state)

    def train(self, number: int) -> Log:
        """`number` rounds of each active member; leaves `[M, number, ...]`."""
        call = self._programs.call
        self._state, log = jax.block_until_ready(
            call(self._programs.block, self._who, self._state, (self._data, np.int32(number)))
        )
        self.done += number
        return jax.tree.map(lambda line: np.asarray(line)[self._at, :number], log)

    def measure(self) -> dict[str, Any]:
        """What each test finds, leaves `[M, ...]`."""
        found = self._programs.call(self._programs.measure, self._who, self._state, self._test_data)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[self._at], found)
