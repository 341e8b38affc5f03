"""Rounds in blocks: a block is one compiled loop, and the blocks up to an evaluation are a stretch of the run.

A round's key is folded from the run's key and the number of the round, so that neither the length of a block nor a stop changes a
number.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import runtime
from fedjax_meta.algorithm import Algorithm, RoundInfo, State
from fedjax_meta.data import FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.types import Key


def run_keys(key: Key) -> tuple[Key, Key, Key]:
    """The keys of a run's initial state, rounds and evaluations."""
    return tagged(key, "init"), tagged(key, "rounds"), tagged(key, "evaluations")


def schedule(rounds: int, eval_every: int) -> list[int]:
    """Rounds after which to evaluate: the first, every `eval_every`-th, and the last, as the FedMeta-Per paper does."""
    return sorted({1, *range(eval_every, rounds, eval_every), rounds})


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
    step = jax.jit(partial(one_round, algorithm))

    def body(i: Any, carry: Any) -> Any:
        state, log = carry
        state, line = step(key, state, data)
        return state, jax.tree.map(lambda lines, value: lines.at[i].set(value), log, line)

    shapes = jax.eval_shape(step, key, state, data)[1]
    log = jax.tree.map(lambda shape: jnp.zeros((most, *shape.shape), shape.dtype), shapes)
    return jax.lax.fori_loop(0, rounds, body, (state, log))


def one_round(algorithm: Algorithm, key: Key, state: State, data: FederatedData) -> tuple[State, Log]:
    """The next round of a state with its part of the run's key, and its line of the log, without the axis R."""
    state, info = algorithm.round(jax.random.fold_in(key, state.round), state, data)
    # The server does not know the metrics of clients that did not return; the mean is NaN when none returned.
    metrics = {name: jnp.mean(values, where=_counted(values, info)) for name, values in info.metrics.items()}
    returned = info.ids >= 0 if info.returned is None else info.returned
    return state, Log(metrics, jnp.any(returned), info.ids, info.faults)


def _counted(values: jax.Array, info: RoundInfo) -> Any:
    return True if info.returned is None or values.ndim == 0 else info.returned


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
    # Processes do the same, also where only one of them shows its progress, or can be asked to stop.
    with _explaining_lost_processes(run.done):
        in_pieces = runtime.least_of_processes(not in_pieces) == 0
        may_stop = runtime.least_of_processes(should_stop is None) == 0

    def asked_to_stop() -> bool:
        """All processes of a run stop where one of them is asked to."""
        with _explaining_lost_processes(run.done):
            return may_stop and runtime.least_of_processes(should_stop is None or not should_stop()) == 0

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
      seconds: that its compilation took of those who called.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted, self._lock = jitted, threading.Lock()
        self._begun: Any = None
        self._executable: Any = None
        self.seconds = 0.0

    def begin(self, *arguments: Any) -> None:
        """Lowers it for such arguments, and begins to compile it on another thread.

        Several processes compile their programs in one order.
        """
        if jax.process_count() > 1:
            return
        with self._lock:
            started = time.perf_counter()
            self._begun = runtime.compiling(self._jitted.lower(*arguments))
            self.seconds += time.perf_counter() - started

    def compile(self, *arguments: Any) -> None:
        """Compiles it for arguments of these shapes and places, if it is not compiled yet."""
        with self._lock:
            if self._executable is None:
                started = time.perf_counter()
                begun = self._begun
                self._executable = runtime.compiled(self._jitted.lower(*arguments)) if begun is None else begun.result()
                self.seconds += time.perf_counter() - started

    def __call__(self, *arguments: Any) -> Any:
        """The result for these arguments, whose shapes must be those of the first call."""
        self.compile(*arguments)
        return self._executable(*arguments)
