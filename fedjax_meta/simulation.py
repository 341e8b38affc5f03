"""A whole run: blocks of rounds, each one compiled loop, with an evaluation after each block.

The host does nothing between evaluations, unless it holds a store. A round's key is folded from the run's key and the number of
the round, so that a run that resumes from a saved state equals the run that was never stopped.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, placement, runtime
from fedjax_meta import host_store as stores
from fedjax_meta.algorithm import Algorithm, RoundInfo, State, check_clients, check_state
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.data.packing import capacity
from fedjax_meta.federation import Federation
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import as_algorithm
from fedjax_meta.types import Key

_log = logging.getLogger("fedjax_meta")

_DRAWN_AHEAD = 64
"""Rounds whose cohorts are drawn in advance with a host store."""

_MOST_AT_ONCE = 512
"""Rounds of one block at most, whose metrics are kept until it ends."""

_MOST_WARNINGS = 3
"""Faults that are logged one by one for each stretch of rounds."""


class Evaluator(NamedTuple):
    """What to measure, and on which data.

    Attributes:
      measure: `(key, state, data) -> pytree of arrays`, traceable; usually `evaluate` with its algorithm filled in.
      data: the third argument of `measure`. Do not let `measure` close over data: they would be compiled into the program as
        constants, which takes longer than the run.
      known: whether client i of the data is client i of the training. A run with a host store needs it: known clients are
        measured in parts, so that every leaf of the result must be `[N, ...]`; for new clients all rows are at hand.
    """

    measure: Callable[[Key, State, Any], Any]
    data: Any
    known: bool | None = None


class Fault(NamedTuple):
    """Something that was not finite in a round.

    Attributes:
      round: its number, the first round is 1.
      what: "clients left out", "server not finite" or "loss not finite".
      clients: ids of the clients that it concerns.
      leaf: where: the path of the first leaf that was not finite, or the name of the metric.
      diverged: whether the round counts as diverged, see `algorithm.Faults`.
    """

    round: int
    what: str
    clients: tuple[int, ...]
    leaf: str
    diverged: bool

    def __str__(self) -> str:
        who = f" ({', '.join(map(str, self.clients[:5]))}{', ...' if len(self.clients) > 5 else ''})" if self.clients else ""
        return f"round {self.round}: {self.what}{who}: {self.leaf}{', diverged' if self.diverged else ''}"


class Record(NamedTuple):
    """The results of one evaluation.

    Attributes:
      round: number of finished rounds.
      metrics: training metrics since the last record, each the cohort's mean by round, `[rounds]`.
      evaluations: what each evaluator returned, as NumPy arrays.
      seconds: wall-clock of training and evaluation since the last record, without compilation.
      compile_seconds: wall-clock of compilation since the last record.
      faults: what was not finite since the last record, in order.
    """

    round: int
    metrics: dict[str, np.ndarray]
    evaluations: dict[str, Any]
    seconds: float
    compile_seconds: float
    faults: tuple[Fault, ...] = ()


class Log(NamedTuple):
    """What is known of each round of a run; leaves `[R, ...]`.

    Attributes:
      metrics: each metric's mean over the clients that returned, `[R]`.
      some: bool `[R]`, whether any client returned.
      ids: int32 `[R, C]`, the cohorts.
      faults: `algorithm.Faults` of each round, or `None`.
    """

    metrics: dict[str, Any]
    some: Any
    ids: Any
    faults: Any


def run_rounds(
    algorithm: Algorithm, key: Key, state: State, data: FederatedData, rounds: Any, *, most: int
) -> tuple[State, Log]:
    """`rounds` rounds as one loop: a pure function, to be jitted, or vmapped over keys and rates.

    Args:
      key: the run's key; round r uses `fold_in(key, r)`.
      rounds: how many, may be traced, at most `most`.
      most: static bound, the length of the metrics returned.

    Returns:
      (state, the log of the rounds, zero beyond `rounds`).
    """

    # Jitted by itself, a round is traced once for both its shapes and the loop.
    step = jax.jit(partial(_one_round, algorithm))

    def body(i: Any, carry: Any) -> Any:
        state, log = carry
        state, line = step(key, state, data)
        return state, jax.tree.map(lambda lines, value: lines.at[i].set(value), log, line)

    shapes = jax.eval_shape(step, key, state, data)[1]
    log = jax.tree.map(lambda shape: jnp.zeros((most, *shape.shape), shape.dtype), shapes)
    return jax.lax.fori_loop(0, rounds, body, (state, log))


def _one_round(algorithm: Algorithm, key: Key, state: State, data: FederatedData) -> tuple[State, Log]:
    state, info = algorithm.round(jax.random.fold_in(key, state.round), state, data)
    # The server does not know the metrics of clients that did not return; the mean is NaN when none returned.
    metrics = {name: jnp.mean(values, where=_counted(values, info)) for name, values in info.metrics.items()}
    returned = info.ids >= 0 if info.returned is None else info.returned
    return state, Log(metrics, jnp.any(returned), info.ids, info.faults)


def _counted(values: jax.Array, info: RoundInfo) -> Any:
    return True if info.returned is None or values.ndim == 0 else info.returned


def schedule(rounds: int, eval_every: int) -> list[int]:
    """Rounds after which to evaluate: the first, every `eval_every`-th, and the last, as the FedMeta-Per paper does."""
    return sorted({1, *range(eval_every, rounds, eval_every), rounds})


def simulate(  # over 80 lines: half of them explain the arguments
    method: Method | Algorithm,
    data: FederatedData,
    *,
    key: Key,
    rounds: int,
    federation: Federation | None = None,
    eval_every: int = 20,
    evaluators: Mapping[str, Evaluator] | None = None,
    state: State | None = None,
    store: str | Path | None = None,
    on_record: Callable[[State, Record], None] | None = None,
    on_progress: Callable[[int, dict[str, np.ndarray]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[State, list[Record]]:
    """Trains, and evaluates after round 1, every `eval_every` rounds and at the end.

    Each configuration is compiled once. Rates are part of it unless they are traced: `jax.jit(lambda rate: run_rounds(
    federate(fedavg(task, lr=rate)), key, ...))` is one program for all rates, and trains with all of them at once under vmap.

    Args:
      method: what to run, e.g. `fedavg(task)`, or an algorithm, which is a method in a federation.
      data: the clients that train.
      key: a JAX key; it decides everything: initialisation, cohorts, batches.
      rounds: R, counted from the first round of the run.
      federation: how the rounds of the method are run; `Federation()` when not given.
      eval_every: rounds between evaluations.
      evaluators: by name, what to measure.
      state: where to resume, e.g. a checkpoint; a fresh state when not given. The same key gives the same run.
      on_record: called after each evaluation, to show, save or stop (by raising). The next block reuses the memory of the state
        that it gets: copy what you keep.
      on_progress: called with (finished rounds, training metrics of the rounds since the last call) about once a second. Blocks
        are then split into pieces of about a second, which changes no number.
      should_stop: asked about once a second, between rounds (in pieces as with `on_progress`), and after each evaluation. The run
        ends where it returns true. If that is between two evaluations, a last record, which `on_record` does not get, holds what
        is known of the rounds since the last evaluation; it has no `evaluations`. Of several processes, all end where it returns
        true in one of them.
      store: where the rows of all clients are if not on the device: "memory" of the host, or a folder for files that are mapped
        into memory. A device then holds only the rows of a cohort and, where `data` are NumPy arrays, its samples. The leaves
        `[N, ...]` of a state are NumPy arrays, and every round changes these same objects. See `host_store`.

    Returns:
      (final state, records).

    Raises:
      OSError: a store's folder cannot be written.
      RuntimeError: a run over several processes lost one of them.
      TypeError: no method or algorithm, a federation beside an algorithm, or an evaluator that is no `Evaluator`.
      ValueError: no JAX key, counts below 1, a state of another algorithm or one that is already beyond `rounds`; rows that do
        not fit into the device or the store (see `host_store.initial_state`); with a store, an evaluator that does not say
        whether its clients are known, or that does not return a row for each of them.
    """
    algorithm = as_algorithm(method, federation)
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.prng_key("key", key)
    checks.count("rounds", rounds)
    checks.count("eval_every", eval_every)
    if not isinstance(evaluators or {}, Mapping):
        raise ValueError(
            f"evaluators={checks.shown(evaluators)} must be a mapping of names to functions, e.g. simulation.Evaluator"
        )
    for name, told, takes in (
        ("on_record", on_record, ("state", "record")),
        ("on_progress", on_progress, ("round", "metrics")),
        ("should_stop", should_stop, ()),
    ):
        if told is not None:
            checks.function(name, told, takes, f"lambda {', '.join(takes)}: ...")
    runtime.log_idle_cores()
    tests = dict(evaluators or {})
    for name, test in tests.items():
        if not isinstance(test, Evaluator):
            example = "fm.Evaluator(lambda key, state, data: fm.evaluate(method, key, state, data), data)"
            raise TypeError(f"evaluators[{name!r}] must be an Evaluator, e.g. {example}, not {checks.shown(test)}")
    most = min(eval_every, _MOST_AT_ONCE)
    if store is None:
        run: _OnDevice | _OnHost = _OnDevice(algorithm, key, data, tests, state, most=most)
    else:
        run = _OnHost(algorithm, key, data, tests, state, store)
    if run.done > rounds:
        raise ValueError(f"rounds={rounds}, but the state has finished {run.done} rounds already")
    records: list[Record] = []
    faults: list[Fault] = []
    leaves = leaf_names(algorithm, data)

    def on_log(first: int, log: Log) -> None:
        faults.extend(faults_in(log, first, leaves))
        if on_progress is not None:
            on_progress(first + len(log.some), log.metrics)

    stops = schedule(rounds, eval_every)
    in_pieces = on_progress is not None or should_stop is not None
    for found in stretches(run, stops, most=most, in_pieces=in_pieces, on_log=on_log, should_stop=should_stop):
        names = found.logs[0].metrics
        metrics = {name: np.concatenate([log.metrics[name] for log in found.logs]) for name in names}
        seconds = found.seconds, found.compile_seconds
        records.append(Record(found.done, metrics, found.evaluations or {}, *seconds, tuple(faults)))
        faults.clear()
        if on_record is not None and found.evaluations is not None:
            on_record(run.state, records[-1])
    return run.state, records


class Trains(Protocol):
    """A run of `done` finished rounds."""

    done: int

    @property
    def compile_seconds(self) -> float:
        """Seconds that it has waited for compilation."""

    def train(self, count: int) -> Log:
        """`count` rounds, to their end."""

    def measure(self) -> dict[str, Any]:
        """What each evaluator finds."""


class Stretch(NamedTuple):
    """The rounds up to an evaluation, or to where the run was asked to stop.

    Attributes:
      first, done: finished rounds before and after it.
      logs: of its pieces.
      evaluations: what each evaluator found; `None` where the run stopped before.
      seconds, compile_seconds: as in `Record`.
    """

    first: int
    done: int
    logs: list[Log]
    evaluations: dict[str, Any] | None
    seconds: float
    compile_seconds: float


def stretches(
    run: Trains,
    stops: Sequence[int],
    *,
    most: int,
    in_pieces: bool,
    on_log: Callable[[int, Log], None],
    should_stop: Callable[[], bool] | None,
) -> Iterator[Stretch]:
    """Runs the rounds up to each of `stops` that is ahead, evaluates there, and yields what came of it.

    Args:
      run: what is trained.
      stops: the rounds after which to evaluate, in order.
      most: rounds that one call of `run.train` may have.
      in_pieces: whether a call takes about a second, or `most` rounds.
      on_log: called after each piece, with the rounds that were finished before it.
      should_stop: as in `simulate`.
    """

    def asked_to_stop() -> bool:
        """All processes of a run stop where one of them is asked to."""
        with _explaining_lost_processes(run.done):
            return should_stop is not None and runtime.least_of_processes(not should_stop()) == 0

    piece = 1 if in_pieces else most
    for stop in [stop for stop in stops if stop > run.done]:
        started, compiled, first = time.perf_counter(), run.compile_seconds, run.done
        logs: list[Log] = []
        stopped = False
        while run.done < stop and not stopped:
            before, count = run.done, min(piece, stop - run.done)
            clock = time.perf_counter() - run.compile_seconds
            with _explaining_lost_processes(before):
                logs.append(run.train(count))
            if in_pieces:
                took = time.perf_counter() - run.compile_seconds - clock
                with _explaining_lost_processes(run.done):
                    piece = int(runtime.least_of_processes(np.clip(count / max(took, 1e-3), 1, most)))
            on_log(before, logs[-1])
            stopped = asked_to_stop()
        with _explaining_lost_processes(run.done):
            evaluations = run.measure() if run.done == stop else None
        compiled = run.compile_seconds - compiled
        yield Stretch(first, run.done, logs, evaluations, time.perf_counter() - started - compiled, compiled)
        if stopped or asked_to_stop():
            return


class _OnDevice:
    """A run with the rows of all clients on the devices: a block of rounds is one program."""

    def __init__(
        self,
        algorithm: Algorithm,
        key: Key,
        data: FederatedData,
        tests: dict[str, Evaluator],
        state: State | None,
        *,
        most: int,
    ) -> None:
        # Each program derives its key from that of the run, which saves programs that would do nothing else.
        initial = jax.jit(lambda key, data: algorithm.init(run_keys(key)[0], data)).lower(key, data)
        # `algorithm.init` decides where a state is placed; a given state and all that is read go to the same devices.
        begin = runtime.compiled(initial, once=True)
        places = begin.output_shardings
        if state is None:
            blank = initial.out_info
            placement.check_room((blank.personal, blank.memory, blank.residual), algorithm.devices)
            self.state = begin(key, data)
        else:
            check_state(state, initial.out_info)
            check_clients(state, data)
            self.state = placement.place_state(state, places)
        whole = places.round
        test_data = {name: test.data for name, test in tests.items()}
        self._data, self._test_data, self._key = placement.place_shared((data, test_data, key), whole)

        def block(state: State, data: FederatedData, key: Key, count: Any) -> Any:
            return run_rounds(algorithm, run_keys(key)[1], state, data, count, most=most)

        def measure(state: State, data: Any, key: Key) -> Any:
            own = run_keys(key)[2]
            return {name: _measured(name, test, own, state, data[name]) for name, test in tests.items()}

        self._block = Compiled(jax.jit(block, donate_argnums=(0,), out_shardings=(places, whole)))
        self._measure = Compiled(jax.jit(measure, out_shardings=whole))
        self.done = int(self.state.round)

    def train(self, count: int) -> Log:
        """`count` rounds, to their end."""
        # Without waiting, the clock would be wrong where there is nothing to log.
        self.state, log = jax.block_until_ready(self._block(self.state, self._data, self._key, count))
        self.done += count
        return jax.tree.map(lambda line: np.asarray(line)[:count], log)

    def measure(self) -> dict[str, Any]:
        """What each evaluator finds."""
        return jax.tree.map(np.asarray, self._measure(self.state, self._test_data, self._key))

    @property
    def compile_seconds(self) -> float:
        """Of all programs so far."""
        return self._block.seconds + self._measure.seconds


class _OnHost:
    """A run with a host store: a round is a program, and tests of known clients run in parts."""

    def __init__(
        self,
        algorithm: Algorithm,
        key: Key,
        data: FederatedData,
        tests: dict[str, Evaluator],
        state: State | None,
        where: str | Path,
    ) -> None:
        init_key, round_key, measure_key = run_keys(key)
        stores.check_algorithm(algorithm)
        if data.ids is not None and data.num_clients == data.total_clients:
            raise ValueError("with a store, all clients must be in their order; data.select(...) may leave some out")
        for name, test in tests.items():
            _check_evaluator(name, test, data.num_clients)
        if state is not None:
            check_state(state, stores.state_shapes(algorithm, init_key, data))
            check_clients(state, data)
        # The state of one client shows on which devices the algorithm places it.
        whole = jax.jit(algorithm.init)(init_key, data.select(np.zeros(1, np.int32))).round.sharding
        self._place = partial(placement.place_shared, placed=whole)
        begun = stores.initial_state(algorithm, init_key, data, where) if state is None else stores.move_to_host(state, where)
        shared, rows = stores.split_rows(begun)
        self.state = placement.place_state(shared, jax.tree.map(lambda _: whole, shared))._replace(**rows)
        self._tests, self._population = tests, data.total_clients
        self._data = stores.place_samples(data, self._place)
        self._test_data = {
            name: stores.place_samples(test.data, self._place) if test.known else self._place(test.data)
            for name, test in tests.items()
        }
        self._round_key, self._measure_key = self._place((round_key, measure_key))

        def cohorts(first: Any, key: Key) -> Any:
            def of_round(number: Any) -> jax.Array:
                return algorithm.cohort(jax.random.fold_in(key, number), number, data.num_clients)

            return jax.vmap(of_round)(first + jnp.arange(_DRAWN_AHEAD, dtype=jnp.int32))

        def step(shared: State, rows: Any, before: Any, again: Any, cohort: FederatedData, key: Key) -> Any:
            state = shared._replace(**stores.newest_rows(rows, before, again))
            state, line = _one_round(algorithm, key, state, cohort)
            shared, rows = stores.split_rows(state)
            return shared, rows, line

        asked = jax.eval_shape(cohorts, 0, round_key)
        self._room = capacity(self._data, asked.shape[1])
        self._cohorts = Compiled(jax.jit(cohorts))
        self._step = Compiled(jax.jit(step, donate_argnums=(0,), out_shardings=whole))
        self._measures = {name: Compiled(jax.jit(partial(_measured, name, test))) for name, test in tests.items()}
        self.done = int(self.state.round)

    def train(self, count: int) -> Log:
        """`count` rounds, to their end."""
        log: list[Log] = []
        fetch = partial(self._fetch, self._data, room=self._room)
        while len(log) < count:
            asked = np.asarray(self._cohorts(self.state.round, self._round_key))[: count - len(log)]

            def step(*arguments: Any) -> Any:
                return self._step(*arguments, self._round_key)

            self.state, lines = stores.run_pipelined(step, self.state, asked, fetch, self._place)
            log += lines
        self.done += count
        return jax.tree.map(lambda *lines: np.stack([np.asarray(line) for line in lines]), *log)

    def _fetch(self, data: FederatedData, ids: np.ndarray, *, room: int) -> Any:
        return self._place((stores.read_rows(self.state, ids), stores.cohort_data(data, ids, room)))

    def measure(self) -> dict[str, Any]:
        """What each evaluator finds."""
        return {name: self._measure(name, test) for name, test in self._tests.items()}

    def _measure(self, name: str, test: Evaluator) -> Any:
        data, run = self._test_data[name], self._measures[name]
        if not test.known:
            return jax.tree.map(np.asarray, run(self._measure_key, self.state, data))
        clients = data.num_clients
        each = stores.row_bytes(self.state) + sum(leaf.nbytes for leaf in jax.tree.leaves((data.x, data.y))) / clients
        runs = list(stores.client_ranges(clients, each, most=1024))
        room = capacity(data, len(runs[0]))
        found: list[Any] = []
        for ids in runs:
            # The last part overlaps the one before, so that all parts have one shape and share one program.
            first = max(ids[-1] + 1 - len(runs[0]), 0)
            rows, part = self._fetch(data, np.arange(first, ids[-1] + 1, dtype=np.int32), room=room)
            part = dataclasses.replace(part, population=self._population)
            result = run(self._measure_key, self.state._replace(**rows), part)
            odd = [leaf.shape for leaf in jax.tree.leaves(result) if leaf.shape[:1] != (len(runs[0]),)]
            if odd:
                raise ValueError(
                    f"with a store, evaluator {name!r} must return leaves [N, ...], a row for each client that it is given, not "
                    f"{list(odd[0])} for {len(runs[0])} clients"
                )
            # Waiting here keeps the host from sending part after part to the device.
            found.append(jax.tree.map(lambda leaf, skip=ids[0] - first: np.asarray(leaf)[skip:], result))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)

    @property
    def compile_seconds(self) -> float:
        """Of all programs so far."""
        return sum(program.seconds for program in (self._cohorts, self._step, *self._measures.values()))


def _check_evaluator(name: str, test: Evaluator, clients: int) -> None:
    if test.known is None:
        raise ValueError(f"with a store, evaluator {name!r} must say whether its clients are known: Evaluator(..., known=...)")
    if test.known and not isinstance(test.data, FederatedData):
        raise ValueError(f"with a store, evaluator {name!r} of known clients must have FederatedData, not {type(test.data)}")
    if test.known and test.data.ids is not None:
        raise ValueError(
            f"with a store, evaluator {name!r} of known clients must have the data of all of them, in their order, not of some "
            "that were selected"
        )
    if test.known and test.data.total_clients != clients:
        raise ValueError(
            f"evaluator {name!r} has known=True, but its data have {test.data.num_clients} clients and the training {clients}: "
            "give known=False for clients that did not train"
        )


def _measured(name: str, test: Evaluator, key: Key, state: State, data: Any) -> Any:
    """Each evaluator has a key of its own, folded from its name: it does not depend on what else is measured."""
    return test.measure(tagged(key, name, state.round), state, data)


def run_keys(key: Key) -> tuple[Key, Key, Key]:
    """The keys of a run's initial state, rounds and evaluations."""
    return tagged(key, "init"), tagged(key, "rounds"), tagged(key, "evaluations")


LeafNames = Callable[[], tuple[Sequence[str], Sequence[str]]]
"""`() -> (names of a client's leaves, names of the server's leaves)`."""


def leaf_names(algorithm: Algorithm, data: FederatedData) -> LeafNames:
    """What `faults_in` calls the leaves; found out when it is first asked, because training is traced for it."""
    return functools.cache(lambda: ([], []) if algorithm.checked is None else algorithm.checked(data))


def faults_in(log: Log, done: int, leaves: LeafNames, *, run: str = "") -> list[Fault]:
    """The faults of a few rounds, the first of which is round `done + 1`; they are also logged, with the name of the run.

    Args:
      log, done: the rounds.
      leaves: see `leaf_names`.
      run: its name.
    """
    prefix = f"{run}: " if run else ""
    found: list[Fault] = []
    empty = np.zeros(len(log.some), bool)
    clients, server, diverged = (None, None, empty) if log.faults is None else log.faults
    if clients is not None and server is not None and ((clients >= 0).any() or (server >= 0).any()):
        names = leaves()
        for r in np.flatnonzero((clients >= 0).any(1) | (server >= 0)):
            for leaf in np.unique(clients[r][clients[r] >= 0]):
                who = tuple(sorted(log.ids[r][clients[r] == leaf].tolist()))
                found.append(Fault(done + int(r) + 1, "clients left out", who, names[0][int(leaf)], bool(diverged[r])))
            if server[r] >= 0:
                found.append(Fault(done + int(r) + 1, "server not finite", (), names[1][server[r]], True))
    for name, values in log.metrics.items():
        if "loss" in name:
            odd = np.flatnonzero(log.some & ~np.isfinite(values))
            found += [Fault(done + int(r) + 1, "loss not finite", (), name, bool(diverged[r])) for r in odd]
    found.sort(key=lambda fault: fault.round)
    for fault in found[:_MOST_WARNINGS]:
        _log.warning("%s%s", prefix, fault)
    if len(found) > _MOST_WARNINGS:
        _log.warning("%sand %d more until round %d", prefix, len(found) - _MOST_WARNINGS, done + len(log.some))
    return found


@contextlib.contextmanager
def _explaining_lost_processes(done: int) -> Iterator[None]:
    """Explains the error that JAX raises when other processes of the run no longer answer."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise RuntimeError(
            f"another process of this run was lost after round {done}; start the run again from its last saved state, "
            "on as many processes and devices as there are"
        ) from error


class Compiled:
    """A jitted function that is compiled once, on the thread that asks first; others wait for it.

    Attributes:
      seconds: that its compilation took.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted, self._lock = jitted, threading.Lock()
        self._executable: Any = None
        self.seconds = 0.0

    def compile(self, *arguments: Any) -> None:
        """Compiles it for arguments of these shapes and places, if it is not compiled yet."""
        with self._lock:
            if self._executable is None:
                started = time.perf_counter()
                self._executable = runtime.compiled(self._jitted.lower(*arguments))
                self.seconds = time.perf_counter() - started

    def __call__(self, *arguments: Any) -> Any:
        """The result for these arguments, whose shapes must be those of the first call."""
        self.compile(*arguments)
        return self._executable(*arguments)
