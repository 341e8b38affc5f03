"""The papers' tables at full size: runs in order of priority, and docs/results.md from their results.

`experiments/reproduce/runs.yaml` is the list of runs.

- `--list` shows what is done.
- `--hours` runs what is missing until the time is over.
- `--write-docs FOLDER` turns the run folders in FOLDER into docs/results/NAME.json, and writes the page from those files.
- With `--missing`, a run of many hours goes on where its folder is gone: scenarios and systems whose rows the docs have are not
  run again, and `--write-docs` adds the others to them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.reproduce import extracts, page, run_list, running
from experiments.reproduce.run_list import Run
from fedjax_meta import report
from fedjax_meta.process import console, one_line_errors

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def main(
    runs: running.Runs = Path("runs/reproduce"),
    list_: running.List = False,
    only: running.Only = None,
    hours: running.Hours = None,
    data_dir: running.DataDir = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only scenarios and systems whose results docs/ does not have.")
    ] = False,
    write_docs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the results in FOLDER into docs/, and stop.")
    ] = None,
    debug: running.Debug = False,
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
        chosen = running.pick(run_list.read_list(), only)
        if write_docs is not None:
            for said in write(chosen, write_docs):
                console.print(said, soft_wrap=True, markup=False)
        elif list_:
            table = [line(run, runs, extracts.read_extracts().get(run.name)) for run in chosen]
            headings = ["name", "hours", "", "state", "in docs", "title"]
            console.print(report.rich_table("Runs", headings, table, text_columns=1))
        else:
            chosen = lacking(chosen) if missing else chosen
            if not chosen:
                console.print(f"{extracts.EXTRACTS} has all of it", soft_wrap=True, markup=False)
            raise typer.Exit(running.run_all(chosen, runs, data_dir, hours))


def lacking(chosen: list[Run]) -> list[Run]:
    """The runs of which docs/results lacks rows, with their scenarios and systems alone, and with their share of the hours."""
    found, runs = extracts.read_extracts(), []
    for run in chosen:
        if places := extracts.missing(run, found.get(run.name)):
            every = extracts.places_of(run.load())
            scenarios, systems = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
            rows = sum(len({*systems} & {*every[name]}) for name in scenarios)
            hours = round(run.hours * rows / sum(map(len, every.values())), 2)
            some = scenarios if len(scenarios) < len(every) else run.scenarios
            runs.append(dataclasses.replace(run, systems=systems, scenarios=some, hours=hours))
    return runs


def line(run: Run, root: Path, found: Mapping[str, Any] | None) -> list[str]:
    """A run in the list; its hours are measured where docs/results has them."""
    hours, how = (run.hours, "estimated") if found is None else (round(extracts.hours_of(found), 2), "measured")
    return [run.name, f"{hours:g}", how, running.state(run, root), page.in_docs(run, found), run.title]


def write(chosen: list[Run], root: Path) -> list[str]:
    """Extracts the runs of the list that `root` holds and writes the page; says what became of each.

    Raises:
      ValueError: a folder that holds another study than the list, or none of the list.
    """
    said = []
    for run in chosen:
        folder = root / run.name
        if not (folder / "run.json").is_file():
            continue
        found = extracts.extract(run, folder)
        if not found["rows"]:
            continue
        found = extracts.joined(run, found, extracts.read_extracts().get(run.name))
        extracts.write_extract(found, extracts.EXTRACTS / f"{run.name}.json")
        said.append(f"{run.name}: {len(found['rows'])} rows")
    if not said:
        raise ValueError(f"{root} holds no results of {', '.join(run.name for run in chosen)}")
    text = page.PAGE.read_text(encoding="utf-8")
    generated = page.page(run_list.read_list(), extracts.read_extracts())
    page.PAGE.write_text(page.with_generated(text, generated), encoding="utf-8")
    return [*said, f"written: {page.PAGE}"]


if __name__ == "__main__":
    app()
