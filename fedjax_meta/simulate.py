"""A whole run: blocks of rounds, each one compiled loop, with an evaluation after each block.

The host does nothing between evaluations. A round's key is folded from the run's key and the round's number, so a run that
goes on from a saved state is the run that was never stopped.
"""

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, engine
from fedjax_meta.algorithm import Algorithm, RoundInfo, State
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.task import Key


class Evaluator(NamedTuple):
    """What to measure, and on which data.

    Attributes:
      measure: `(key, state, data) -> pytree of arrays`, traceable; usually `evaluate.evaluate` with its algorithm filled in.
      data: given to `measure`. Data that a function closes over would be compiled into the program as constants, which takes
        longer than the run.
    """

    measure: Callable[[Key, State, Any], Any]
    data: Any


class Record(NamedTuple):
    """What is known at one evaluation.

    Attributes:
      round: rounds done.
      metrics: training metrics since the last record, each the cohort's mean by round, `[rounds]`.
      evaluations: what each evaluator returned, as NumPy arrays.
      seconds: wall-clock of training and evaluation since the last record, compilation left out.
      compile_seconds: wall-clock of compilation since the last record.
    """

    round: int
    metrics: dict[str, np.ndarray]
    evaluations: dict[str, Any]
    seconds: float
    compile_seconds: float


def run_rounds(
    algorithm: Algorithm, key: Key, state: State, data: FederatedData, rounds: Any, *, most: int
) -> tuple[State, dict[str, jax.Array]]:
    """`rounds` rounds as one loop: a pure function, to be jitted, or vmapped over keys and rates.

    Args:
      key: the run's key; round r uses `fold_in(key, r)`.
      rounds: how many, may be traced, at most `most`.
      most: static bound, the length of the metrics returned.

    Returns:
      (state, for each metric the mean over who returned by round `[most]`, zero beyond `rounds`).
    """

    def step(state: State) -> tuple[State, dict[str, jax.Array]]:
        state, info = algorithm.round(jax.random.fold_in(key, state.round), state, data)
        # What a client that never returned has measured, the server does not know; where nobody did, the mean is no number.
        return state, {name: jnp.mean(values, where=_counted(values, info)) for name, values in info.metrics.items()}

    def body(i: Any, carry: Any) -> Any:
        state, log = carry
        state, metrics = step(state)
        return state, jax.tree.map(lambda line, value: line.at[i].set(value), log, metrics)

    shapes = jax.eval_shape(step, state)[1]
    log = {name: jnp.zeros(most, shape.dtype) for name, shape in shapes.items()}
    return jax.lax.fori_loop(0, rounds, body, (state, log))


def _counted(values: jax.Array, info: RoundInfo) -> Any:
    return True if info.returned is None or values.ndim == 0 else info.returned


def schedule(rounds: int, eval_every: int) -> list[int]:
    """Rounds after which to evaluate: the first, every `eval_every`-th, and the last (S0's schedule)."""
    return sorted({1, *range(eval_every, rounds, eval_every), rounds})


def simulate(
    algorithm: Algorithm,
    data: FederatedData,
    *,
    key: Key,
    rounds: int,
    eval_every: int = 20,
    evaluators: Mapping[str, Evaluator] | None = None,
    state: State | None = None,
    on_record: Callable[[State, Record], None] | None = None,
    on_progress: Callable[[int, dict[str, np.ndarray]], None] | None = None,
) -> tuple[State, list[Record]]:
    """Trains, and evaluates after round 1, every `eval_every` rounds and at the end.

    Args:
      algorithm: what to run.
      data: the clients that train.
      key: decides everything: initialisation, cohorts, batches.
      rounds: R, counted from the very first round of the run.
      eval_every: rounds between evaluations.
      evaluators: by name, what to measure.
      state: where to go on from, e.g. a checkpoint; a fresh one when not given. Same key, same run.
      on_record: called after each evaluation, to show, save or stop (by raising). The state it gets is reused by the next
        block: copy what you keep.
      on_progress: called with (rounds done, training metrics of the rounds since the last call) about once a second. Blocks
        are then cut into stretches of about a second, which changes no number.

    Returns:
      (final state, records).

    Raises:
      RuntimeError: a run over several processes lost one of them.
      ValueError: counts below 1, a state of another algorithm or one that is already beyond `rounds`.
    """
    checks.count("rounds", rounds)
    checks.count("eval_every", eval_every)
    init_key, round_key, measure_key = jax.random.split(key, 3)
    initial = jax.jit(algorithm.init).lower(init_key, data)
    # An algorithm places its state, and a given one goes to the same places; what is only read goes to the same devices.
    begin = initial.compile()
    places = begin.output_shardings
    state = begin(init_key, data) if state is None else _copy_like(state, initial.out_info, places)
    whole = places.round
    tests = {name: evaluator.measure for name, evaluator in (evaluators or {}).items()}
    test_data = {name: evaluator.data for name, evaluator in (evaluators or {}).items()}
    data, test_data, round_key, measure_key = engine.share((data, test_data, round_key, measure_key), whole)
    done = int(state.round)
    if done > rounds:
        raise ValueError(f"rounds={rounds}, but the state has {done} rounds behind it")

    def block(state: State, data: FederatedData, key: Key, count: Any) -> Any:
        return run_rounds(algorithm, key, state, data, count, most=eval_every)

    def measure(state: State, data: Any, key: Key) -> Any:
        key = jax.random.fold_in(key, state.round)
        # Each evaluator has a key of its own, which hangs on its name and not on what else is measured.
        keys = {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in tests}
        return {name: test(keys[name], state, data[name]) for name, test in tests.items()}

    run_block = _Compiled(jax.jit(block, donate_argnums=(0,), out_shardings=(places, whole)))
    run_measure = _Compiled(jax.jit(measure))
    records = []
    stretch = eval_every if on_progress is None else 1
    for stop in [stop for stop in schedule(rounds, eval_every) if stop > done]:
        started = time.perf_counter()
        compiled = run_block.seconds + run_measure.seconds
        lines: list[dict[str, np.ndarray]] = []
        while done < stop:
            count, clock = min(stretch, stop - done), time.perf_counter() - run_block.seconds
            with _all_there(done):
                # Waited for, so that the clock is right even where there is nothing to log.
                state, log = jax.block_until_ready(run_block(state, data, round_key, count))
                lines.append({name: np.asarray(line)[:count] for name, line in log.items()})
            done += count
            if on_progress is not None:
                took = time.perf_counter() - run_block.seconds - clock
                stretch = int(np.clip(count / max(took, 1e-3), 1, eval_every))
                on_progress(done, lines[-1])
        with _all_there(done):
            results = jax.tree.map(np.asarray, run_measure(state, test_data, measure_key))
        metrics = {name: np.concatenate([line[name] for line in lines]) for name in lines[0]}
        compiled = run_block.seconds + run_measure.seconds - compiled
        records.append(Record(done, metrics, results, time.perf_counter() - started - compiled, compiled))
        if on_record is not None:
            on_record(state, records[-1])
    return state, records


@contextlib.contextmanager
def _all_there(done: int) -> Iterator[None]:
    """Says what has happened when other processes of the run no longer answer."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise RuntimeError(
            f"another process of this run was lost after round {done}; start the run again from its last saved state, "
            "on as many processes and devices as there are"
        ) from error


def _copy_like(state: State, wanted: Any, places: Any) -> State:
    """A copy of a state that a caller gave, where it belongs; it must have the structure, shapes and types that are wanted."""
    odd = checks.mismatch(state, wanted)
    if odd is not None:
        raise ValueError(f"state does not fit: {odd}; is it of another algorithm, model or number of clients?")
    return jax.device_put(state, places, may_alias=False)


class _Compiled:
    """A jitted function that knows how long its one compilation took."""

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._executable: Any = None
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        if self._executable is None:
            started = time.perf_counter()
            self._executable = self._jitted.lower(*arguments).compile()
            self.seconds = time.perf_counter() - started
        return self._executable(*arguments)
