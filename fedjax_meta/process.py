"""What a command-line program needs around its work: signals, errors in one line, and its own command."""

import contextlib
import errno
import io
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import typer
from rich.console import Console
from rich.text import Text

from fedjax_meta import imports


class _Terminal(Console):
    """rich's without emoji: `module:fire:name` stays as it is. Where the terminal is gone, nothing more is shown."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(emoji=False, stderr=stderr)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.to_nowhere()

    def to_nowhere(self) -> None:
        """What is printed from now on is dropped, also by Python when the program ends."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if self.stderr else sys.stdout).fileno())


class _Output(_Terminal):
    """Where nobody reads on (`| head`), it asks the program to stop, as SIGTERM does, so that a run is saved.

    Attributes:
      closed: whether that has happened.
    """

    closed = False

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's, but no line is cut at the edge of the terminal: what is left of a number would be another number."""
        super().print(*objects, **{"crop": False, **options})

    def on_broken_pipe(self) -> None:
        """Called by rich."""
        self.closed = True
        self.to_nowhere()
        signal.raise_signal(signal.SIGTERM)


console = _Output()
errors = _Terminal(stderr=True)


_OF_USERS = (ValueError, OSError, ImportError, OverflowError, jax.errors.JaxRuntimeError)
"""Errors that a user can correct."""
_NO_BACKEND = "Unable to initialize backend"
"""How JAX says that a platform is missing."""
_MEMORY = "RESOURCE_EXHAUSTED"
"""What JAX says when the memory of a device is full."""
_FULL = (
    "train fewer clients side by side (--set federation.lanes=8); programs that share a GPU each need a part of its memory "
    "(XLA_PYTHON_CLIENT_MEM_FRACTION=0.2 in the environment)"
)
"""What helps then."""


class Stopped(Exception):  # noqa: N818 - it is no error
    """The user stopped the program; the message says what is saved.

    Attributes:
      number: of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end.

    Attributes:
      number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns errors that a user can correct, and all of a user's own code, into one line on stderr and exit code 1.

    Ctrl-C (SIGINT), SIGTERM and SIGHUP end with one line and exit code 130, 143 or 129. Letters that a terminal cannot show are
    shown as question marks: a table must not be lost to a sign in it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with signals(_interrupt), _nothing_swallows_interrupts(), _one_line_warnings():
            yield
    except (Stopped, KeyboardInterrupt) as stop:
        if console.closed and not isinstance(stop, Stopped):
            raise typer.Exit(128 + signal.SIGTERM) from None  # whoever closed the output knows
        # Lines of their own would break a path that is longer than the terminal is wide.
        text = str(stop) if isinstance(stop, Stopped) else "stopped; everything that was saved is still there"
        errors.print(Text(text, style="yellow"), soft_wrap=True)
        raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None
    except Exception as error:
        place = imports.place_of(error)
        # What JAX raises for JAX_PLATFORMS is a RuntimeError or an AssertionError; every other one, like all that is not listed,
        # is a fault of the program, unless it came from a user's own code.
        if isinstance(error, AssertionError) and not _has_devices():
            error = RuntimeError(f"{_NO_BACKEND}: JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} is not at hand here")
        platform = isinstance(error, RuntimeError) and str(error).startswith(_NO_BACKEND)
        if debug or not (place or platform or isinstance(error, _OF_USERS)):
            raise
        where = f" ({place}; --debug shows the traceback)" if place else ""
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        said = f"{said.rstrip()}; {_FULL}" if isinstance(error, jax.errors.JaxRuntimeError) and _MEMORY in said else said
        errors.print(Text(f"error: {imports.said(error) if place else said}{where}"), soft_wrap=True)
        raise typer.Exit(1) from None


def _has_devices() -> bool:
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False


@contextlib.contextmanager
def signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles SIGINT, SIGTERM and SIGHUP (the terminal was closed).

    Not what the parent process told this one to ignore (`nohup`, background jobs).
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python allows no other to do so
        known = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
        before = {number: signal.getsignal(number) for number in known if number is not None}
    handled = [number for number, old in before.items() if old is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Shows warnings as one line without the place in the source that they came from."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        errors.print(Text(f"note: {message}", style="yellow"), soft_wrap=True)

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before


@contextlib.contextmanager
def _nothing_swallows_interrupts() -> Iterator[None]:
    """Sends a signal again if its exception was raised where Python drops exceptions.

    That is in a callback of the garbage collector, of which JAX has one, or in a destructor.
    """
    before, sent = sys.unraisablehook, list[threading.Timer]()

    def again(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Interrupted):
            return before(dropped)
        # Raised here, it would be dropped again.
        sent.append(threading.Timer(0.1, os.kill, (os.getpid(), dropped.exc_value.number)))
        sent[-1].start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in sent:
            timer.cancel()  # what is left of the program handles signals in its own way


def command_line(folder: Path) -> str:
    """The command that runs this program in `folder`, or goes on there, for a shell."""
    spec, script = getattr(sys.modules["__main__"], "__spec__", None), Path(sys.argv[0])
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else ["python", sys.argv[0]]
    if not spec and script.suffix != ".py":
        program = [script.name]  # an installed command
    given = sys.argv[1:]
    if not any(word == "--out" or word.startswith("--out=") for word in given):
        given = [*given, "--out", str(folder)]
    return shlex.join([*program, *given])
