"""What a command-line program needs around its work: its folder, signals, and errors in one line."""

import contextlib
import itertools
import json
import platform
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import typer
from rich.console import Console
from rich.text import Text

from fedjax_meta import checkpoint, report, runtime

console = Console()
errors = Console(stderr=True)

Json = Any
"""A value that JSON can hold."""


class Stopped(Exception):  # noqa: N818 - it is no error
    """The user stopped the experiment; the message says what is saved.

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


started: list[Path] = []
"""What `open_folder` made for a run that has no result yet: its folder and those above it that are new."""


@contextlib.contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns errors that a user can correct into one line on stderr and exit code 1.

    Ctrl-C (SIGINT) and SIGTERM save what a training run has reached, and end with one line and exit code 130 or 143. After an
    error the folder of a run that had nothing to save is removed.
    """
    try:
        with signals(_interrupt):
            yield
    except (Stopped, KeyboardInterrupt) as stop:
        # Lines of their own would break a path that is longer than the terminal is wide.
        text = str(stop) if isinstance(stop, Stopped) else "stopped; everything that was saved is still there"
        errors.print(Text(text, style="yellow"), soft_wrap=True)
        raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None
    except (ValueError, OSError, ImportError, OverflowError, jax.errors.JaxRuntimeError) as error:
        _remove_started()
        if debug:
            raise
        errors.print(Text(f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}"), soft_wrap=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles SIGINT and SIGTERM, but not what the parent process told this one to ignore (`nohup`, background jobs)."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python allows no other to do so
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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


def _remove_started() -> None:
    if not started:
        return
    (folder, *made), ours = started, ("config.json", checkpoint.LOCK)
    started.clear()
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= set(ours):
        for name in ours:
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others may have put something there
            for path in made:
                path.rmdir()


def open_folder(
    out: Path | None, default: str, *, resume: bool, options: Mapping[str, Json], algorithms: Mapping[str, Json]
) -> Path:
    """The folder of the experiment, with `config.json` in it.

    Args:
      out: as the user gave it; a new folder under runs/ when not given.
      default: how the name of a new folder begins.
      resume: whether the folder must have a run already.
      options: of the experiment.
      algorithms: the config of every algorithm by the name of its results, see `Algorithm.config`.

    Raises:
      ValueError: `--resume` without a folder that holds a run, or without `--resume` a folder that holds one.
      OSError: the folder cannot be written, or another process has it.
    """
    if resume and out is None:
        raise ValueError("--resume needs --out DIR, the folder of the run to continue")
    started.clear()
    folder = out if out is not None else Path("runs") / f"{default}-{datetime.now():%Y%m%d-%H%M%S}"
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    if out is None:
        folder = _unused(folder)
        made = [folder, *(path for path in made if path in folder.parents)]
    if (folder / checkpoint.LOCK).exists():
        checkpoint.lock(folder)
    if resume and not (folder / "config.json").is_file():
        raise ValueError(f"there is no run to resume in {folder} (no config.json)")
    if not resume and (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a run already: add --resume to continue it, or give another --out")
    if resume:
        checkpoint.lock(folder)
        return folder  # its config.json says how the run began
    started[:] = [folder, *made]
    checkpoint.lock(folder)
    versions = {"python": platform.python_version(), "jax": jax.__version__, "fedjax_meta": version("fedjax_meta")}
    config: dict[str, Json] = {"options": dict(options), "algorithms": dict(algorithms)}
    config |= {"versions": versions, "device": runtime.device_kinds(), "command": command_line(folder)}
    checkpoint.write_text(
        folder / "config.json", json.dumps(report.strict(config), indent=2, default=str, allow_nan=False) + "\n"
    )
    return folder


def _unused(folder: Path) -> Path:
    """The folder, or one with a number after its name, made now: two runs that start in the same second get different ones."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def command_line(folder: Path, *, resume: bool = False) -> str:
    """The command that runs this experiment in `folder`, for a shell."""
    spec, script = getattr(sys.modules["__main__"], "__spec__", None), Path(sys.argv[0])
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else ["python", sys.argv[0]]
    if not spec and script.suffix != ".py":
        program = [script.name]  # an installed command
    given = [word for word in sys.argv[1:] if word != "--resume"]
    if not any(word == "--out" or word.startswith("--out=") for word in given):
        given += ["--out", str(folder)]
    return shlex.join([*program, *given, *(["--resume"] if resume else [])])
