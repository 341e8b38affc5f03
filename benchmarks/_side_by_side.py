"""Measurements in processes of their own, which get ready side by side and are timed one after the other, up to a time limit."""

import contextlib
import itertools
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

Row = dict[str, Any]
Ready = Callable[[], Row]
"""A measurement that has started and compiled; a call makes it."""


class Measurement(NamedTuple):
    """What is measured, and how to get ready for it."""

    about: Row
    prepare: Callable[[], Ready]


class Clock:
    """The time that is left."""

    def __init__(self, limit: float) -> None:
        self._end = time.monotonic() + limit

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def in_process(clock: Clock, prepare: Callable[..., Ready], *arguments: Any) -> Ready:
    """`prepare(*arguments)` in a process of its own, which ends at the time limit. A call has it make the measurement.

    Raises (here and in the call):
      TimeoutError: the limit came first.
      RuntimeError: the measurement failed; the message has its error.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, prepare, arguments), daemon=True)
    process.start()
    theirs.close()  # the process has its own, so that its end is seen here

    def answer() -> Row | None:
        error: str | None = None
        try:
            if not ours.poll(max(clock.left, 0)):
                raise TimeoutError(f"{prepare.__name__} ran into the time limit")
            found, error = ours.recv()
        except EOFError:
            process.join()
            error = f"ended with exit status {process.exitcode}"
        except TimeoutError:
            end()
            raise
        if error is not None:
            end()
            raise RuntimeError(error)
        return found

    def end() -> None:
        process.kill()
        process.join()

    def measure() -> Row:
        ours.send(None)
        found = answer()
        end()
        assert found is not None
        return found

    answer()
    return measure


def _serve(pipe: Any, prepare: Callable[..., Ready], arguments: tuple[Any, ...]) -> None:
    """Sends (`None`, `None`) when it is ready and (row, `None`) when it was asked to measure, or (`None`, its error)."""
    logging.getLogger("fedjax_meta").setLevel(logging.ERROR)  # here a CPU beside the accelerator is one device, on purpose
    try:
        measure = prepare(*arguments)
        pipe.send((None, None))
        try:
            pipe.recv()
        except EOFError:
            return  # the time limit came: nobody asks any more
        pipe.send((measure(), None))
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send((None, f"{type(error).__name__}: {error}"))


def at_once(measure: Callable[..., Row], *arguments: Any) -> Ready:
    """A measurement that is no time, so that others may run beside it: it is made here."""
    found = measure(*arguments)
    return lambda: found


def measured(planned: Iterable[Measurement], at_a_time: int, clock: Clock) -> Iterator[tuple[Row, Row | None]]:
    """(what was measured, what was found) of each measurement; `None` of the one that the time limit stopped, the last.

    So many get ready side by side; then they are timed one after the other.
    """
    planned = iter(planned)
    while batch := list(itertools.islice(planned, at_a_time)):
        if clock.left <= 0:
            yield batch[0].about, None
            return
        with ThreadPoolExecutor(len(batch)) as pool:
            waiting = [pool.submit(one.prepare) for one in batch]
        for one, ready in zip(batch, waiting, strict=True):
            try:
                found = ready.result()()
            except TimeoutError:
                yield one.about, None
                return
            # One network or simulator that fails says something too, and does not keep the others from being measured.
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            yield one.about, found
