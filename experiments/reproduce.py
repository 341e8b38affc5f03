"""The papers' tables at full size: runs in order of priority, and docs/results.md from their results.

`experiments/reproduce.yaml` is the list of runs. `--list` shows what is done. `--hours` runs what is missing until the time is
over. `--write-docs FOLDER` turns the run folders in FOLDER into docs/results/NAME.json, and writes the page from those files.
With `--missing`, a run of many hours goes on where its folder is gone: scenarios and systems whose rows the docs have are not run
again, and `--write-docs` adds the others to them.
"""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import _results_page as results
from experiments import _standing as standing
from fedjax_meta import checks, report
from fedjax_meta.process import console, one_line_errors
from fedjax_meta.study import folder as folders
from fedjax_meta.study import load

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
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


@app.command()
def main(
    runs: Runs = Path("runs/reproduce"),
    list_: List = False,
    only: Only = None,
    hours: Hours = None,
    data_dir: DataDir = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only scenarios and systems whose results docs/ does not have.")
    ] = False,
    write_docs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the results in FOLDER into docs/, and stop.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Runs the list, one run after the other. The same command continues where it was stopped.

    `python -m experiments.reproduce --list`

    `python -m experiments.reproduce --data-dir DIR --hours 3 --only fedmeta_per,imaml_logged`

    `python -m experiments.reproduce --data-dir DIR --hours 3 --missing`

    `python -m experiments.reproduce --write-docs runs/reproduce`
    """
    with one_line_errors(debug):
        if missing and (list_ or write_docs is not None):
            raise ValueError("--missing says what is run: leave out --list or --write-docs")
        chosen = pick(standing.read_list(), only)
        if write_docs is not None:
            for said in write(chosen, write_docs):
                console.print(said, soft_wrap=True, markup=False)
        elif list_:
            table = [line(run, runs, standing.read_extracts().get(run.name)) for run in chosen]
            headings = ["name", "hours", "", "state", "in docs", "title"]
            console.print(report.rich_table("Runs", headings, table, text_columns=1))
        else:
            chosen = lacking(chosen) if missing else chosen
            if not chosen:
                console.print(f"{standing.EXTRACTS} has all of it", soft_wrap=True, markup=False)
            raise typer.Exit(run_all(chosen, runs, data_dir, hours))


def pick(listed: list[standing.Run], only: str | None) -> list[standing.Run]:
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


def lacking(chosen: list[standing.Run]) -> list[standing.Run]:
    """The runs of which docs/results lacks rows, with their scenarios and systems alone, and with their share of the hours."""
    extracts, runs = standing.read_extracts(), []
    for run in chosen:
        if places := standing.missing(run, extracts.get(run.name)):
            every = standing.places_of(run.load())
            scenarios, systems = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
            rows = sum(len({*systems} & {*every[name]}) for name in scenarios)
            hours = round(run.hours * rows / sum(map(len, every.values())), 2)
            some = scenarios if len(scenarios) < len(every) else []
            runs.append(dataclasses.replace(run, systems=systems, scenarios=some, hours=hours))
    return runs


def line(run: standing.Run, root: Path, found: Mapping[str, Any] | None) -> list[str]:
    """A run in the list; its hours are measured where docs/results has them."""
    hours, how = (run.hours, "estimated") if found is None else (round(standing.hours_of(found), 2), "measured")
    return [run.name, f"{hours:g}", how, state(run, root), results.in_docs(run, found), run.title]


def state(run: standing.Run, root: Path) -> str:
    """ "done", "partly (finished systems of all)", "done, but grids may move on" or "not run"."""
    folder = root / run.name
    if not (folder / "run.json").is_file():
        return "not run"
    study = run.load()
    wanted = [(scenario, system) for scenario in study.scenarios for system in study.systems_on(scenario)]
    paths = {(scenario, system): folder / "results" / scenario / f"{system}.final.json" for scenario, system in wanted}
    done = sum(standing.is_finished(path, study, system) for (_, system), path in paths.items())
    finished = folders.read_run(folder).get("finished") is not None
    if not finished or done < len(wanted):
        return f"partly ({done} of {len(wanted)})"
    return "done" if load(folder / "study.yaml").tuning.extend >= study.tuning.extend else "done, but grids may move on"


def run_all(chosen: list[standing.Run], root: Path, data_dir: str | None, hours: float | None) -> int:
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


def write(chosen: list[standing.Run], root: Path) -> list[str]:
    """Extracts the runs of the list that `root` holds and writes the page; says what became of each.

    Raises:
      ValueError: a folder that holds another study than the list, or none of the list.
    """
    said = []
    for run in chosen:
        folder = root / run.name
        if not (folder / "run.json").is_file():
            continue
        found = standing.extract(run, folder)
        if not found["rows"]:
            continue
        found = standing.joined(run, found, standing.read_extracts().get(run.name))
        standing.write_extract(found, standing.EXTRACTS / f"{run.name}.json")
        said.append(f"{run.name}: {len(found['rows'])} rows")
    if not said:
        raise ValueError(f"{root} holds no results of {', '.join(run.name for run in chosen)}")
    text = results.PAGE.read_text(encoding="utf-8")
    generated = results.page(standing.read_list(), standing.read_extracts())
    results.PAGE.write_text(results.with_generated(text, generated), encoding="utf-8")
    return [*said, f"written: {results.PAGE}"]


if __name__ == "__main__":
    app()
