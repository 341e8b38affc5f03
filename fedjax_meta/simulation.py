"""A whole run: rounds in blocks, with an evaluation after each stretch of them.

The host does nothing between evaluations, unless it holds a store. A run that resumes from a saved state equals the run that was
never stopped.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, placement, runtime
from fedjax_meta import host_store as stores
from fedjax_meta.algorithm import Algorithm, State, check_clients, check_distinct, check_known, check_state, row_ids
from fedjax_meta.blocks import Compiled, Log, one_round, run_keys, run_rounds, schedule, stretches
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.data.packing import capacity
from fedjax_meta.faults import Fault, faults_in, leaf_names
from fedjax_meta.federation import Federation, check_values
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import as_algorithm
from fedjax_meta.types import Key

_DRAWN_AHEAD = 64
"""Rounds whose cohorts are drawn in advance with a host store."""

_LOOKED_AT = 8
"""Rounds whose cohorts are looked at before a run with a schedule of the user's own."""

_MOST_AT_ONCE = 512
"""Rounds of one block at most, whose metrics are kept until it ends."""


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

    Each configuration is compiled once. Rates are part of it unless they are traced: `jax.jit(lambda rate: blocks.run_rounds(
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
      (final state, records of this call). A state that has finished all `rounds` gets none.

    Raises:
      OSError: a store's folder cannot be written.
      RuntimeError: a run over several processes lost one of them.
      TypeError: no method or algorithm, a federation beside an algorithm, or an evaluator that is no `Evaluator`.
      ValueError: no JAX key, counts below 1, a schedule of one's own that draws clients that do not exist, a state of another
        algorithm or one that is already beyond `rounds`; rows that do not fit into the device or the store (see
        `host_store.initial_state`); with a store, an evaluator that does not say whether its clients are known, or that does not
        return a row for each of them.
    """
    algorithm = as_algorithm(method, federation)
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    check_distinct(data)
    check_values(algorithm.task, data)
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
        checks.word("the name of an evaluator", name)
        if not isinstance(test, Evaluator):
            example = "fm.Evaluator(lambda key, state, data: fm.evaluate(method, key, state, data), data)"
            raise TypeError(f"evaluators[{name!r}] must be an Evaluator, e.g. {example}, not {checks.shown(test)}")
        if test.known and isinstance(test.data, FederatedData):
            check_known(test.data, row_ids(data))
    check_schedule(algorithm, run_keys(key)[1], data, rounds)
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


def check_schedule(algorithm: Algorithm, key: Key, data: FederatedData, rounds: int) -> None:
    """Raises `ValueError` if a schedule of one's own draws a client twice or one that is none of the N, in the first rounds."""
    told = algorithm.config.get("federation", {}).get("schedule")
    if not isinstance(told, str) or told.startswith("fedjax_meta."):
        return
    for number in range(min(rounds, _LOOKED_AT)):
        ids = np.asarray(algorithm.cohort(jax.random.fold_in(key, number), number, data.num_clients))
        there = ids[ids != -1]  # the others are empty places
        checks.indices(f"the cohort that schedule draws for round {number + 1}", there, data.num_clients)
        if np.unique(there).size < there.size:
            raise ValueError(f"schedule draws a client twice in round {number + 1}: {checks.shown(ids)}")


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
        if tests:
            self._measure.begin(self.state, self._test_data, self._key)  # while the first block is traced
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
            _check_evaluator(name, test, data)
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
            state, line = one_round(algorithm, key, state, cohort)
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


def _check_evaluator(name: str, test: Evaluator, data: FederatedData) -> None:
    if test.known is None:
        raise ValueError(f"with a store, evaluator {name!r} must say whether its clients are known: Evaluator(..., known=...)")
    if not test.known:
        return
    if not isinstance(test.data, FederatedData):
        raise ValueError(f"with a store, evaluator {name!r} of known clients must have FederatedData, not {type(test.data)}")
    clients = [None if one.ids is None else np.asarray(one.ids).tolist() for one in (test.data, data)]
    if clients[0] != clients[1] or test.data.total_clients != data.total_clients:
        raise ValueError(
            f"with a store, evaluator {name!r} of known clients must have the data of all clients that train, in their order; "
            "give known=False for others"
        )


def _measured(name: str, test: Evaluator, key: Key, state: State, data: Any) -> Any:
    """Each evaluator has a key of its own, folded from its name: it does not depend on what else is measured."""
    return test.measure(tagged(key, name, state.round), state, data)
