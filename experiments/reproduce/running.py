"""Runs of a list, one after the other: which ones, what is done of them, and for how long."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from experiments.reproduce import extracts
from experiments.reproduce.run_list import Run
from fedjax_meta import checks
from fedjax_meta.process import console
from fedjax_meta.study import folder as folders
from fedjax_meta.study import load

GRACE = 900.0
"""Seconds that a run gets to save itself after it was told to stop."""
BY_ITSELF = 10.0
"""Seconds after which a run is taken not to have heard of a SIGTERM."""

Runs = Annotated[Path, typer.Option(help="Folder that contains the run folders.")]
List = Annotated[bool, typer.Option("--list", help="Show what is done and what each run costs, and stop.")]
Only = Annotated[str | None, typer.Option(help="Only these runs of the list, separated by commas.")]
Hours = Annotated[float | None, typer.Option(min=0.0, help="Stop after this many hours; the progress is saved.")]
DataDir = Annotated[str | None, typer.Option(help="Folder of the data sets.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


def pick(listed: list[Run], only: str | None) -> list[Run]:
    """The runs of the list that are named, in the order of the list.

    Raises:
      ValueError: a name that the list does not have.
    """
    if only is None:
        return listed
    names = [name.strip() for name in only.split(",")]
    known = {run.name for run in listed}
    unknown = [name for name in names if name not in known]
    if unknown:
        checks.one_of("run", unknown[0], [run.name for run in listed])
    return [run for run in listed if run.name in names]


def state(run: Run, root: Path) -> str:
    """ "done", "partly (finished systems of all)", "done, but grids may move on" or "not run"."""
    folder = root / run.name
    if not (folder / "run.json").is_file():
        return "not run"
    study = run.load()
    wanted = [(scenario, system) for scenario in study.scenarios for system in study.systems_on(scenario)]
    paths = {(scenario, system): folder / "results" / scenario / f"{system}.final.json" for scenario, system in wanted}
    done = sum(extracts.is_finished(path, study, system) for (_, system), path in paths.items())
    finished = folders.read_run(folder).get("finished") is not None
    if not finished or done < len(wanted):
        return f"partly ({done} of {len(wanted)})"
    return "done" if load(folder / "study.yaml").tuning.extend >= study.tuning.extend else "done, but grids may move on"


def run_all(chosen: list[Run], root: Path, data_dir: str | None, hours: float | None) -> int:
    """Runs what is not done; the exit code of the first run that failed, or 0."""
    until = None if hours is None else time.monotonic() + 3600 * hours
    for run in chosen:
        if state(run, root) == "done":
            continue
        if until is not None and time.monotonic() >= until:
            break
        command = [sys.executable, "-m", "fedjax_meta", "run", *run.arguments(), "--out", str(root / run.name)]
        command += ["--data-dir", data_dir] if data_dir else []
        console.print(f"{run.name}: about {run.hours:g} h", markup=False)
        code = _call(command, until)
        if code in (128 + signal.SIGTERM, -signal.SIGTERM):  # saved, or ended before it could begin
            console.print("the time is over; the same command goes on", markup=False)
            return 0
        if code:
            return code
    return 0


def _call(command: list[str], until: float | None) -> int:
    """Runs a command, which is told to stop when the time is over; its exit code."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait(None if until is None else max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.wait(GRACE)
        except BaseException as error:
            # Ctrl-C reaches the run too, which saves itself; so may SIGTERM, and a second one would not let it.
            if getattr(error, "number", None) == signal.SIGTERM:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(BY_ITSELF)
                process.terminate()
            process.wait(GRACE)
            raise
