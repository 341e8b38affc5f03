"""The leaderboard: runs in order of priority, their raw results, and the page docs/leaderboard.md made from them.

`experiments/leaderboard/runs.yaml` is the list of runs, and `experiments/leaderboard.yaml` is the study.

- `--list` shows what is done.
- `--hours` runs what is missing until the time is over. With `--missing`, rows that the docs have are not run again where the
  folder of a run is gone.
- `--write-docs` makes docs/leaderboard/ and the page.
- `--new-clients` and `--count-flops` add measurements that rows lack.
- `--beside` shows where a run of one's own stands.
- `--changed` names rows that later code may have changed. `--same-programs` finds those whose programs have stayed the same,
  `--same-start` those whose first rounds have, and `--confirm` trains them again.
"""

from pathlib import Path
from typing import Annotated

import typer

from experiments.leaderboard import again, beside, board, changed, flops, missing, newcomers, page, same_programs
from experiments.reproduce import run_list, running
from fedjax_meta import report
from fedjax_meta.process import console, one_line_errors

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def main(
    runs: running.Runs = Path("runs/leaderboard"),
    list_: running.List = False,
    only: running.Only = None,
    hours: running.Hours = None,
    data_dir: running.DataDir = None,
    missing_: Annotated[
        bool,
        typer.Option(
            "--missing",
            help="Only systems without a current row in docs/, and those whose best value is at an end of a grid that may move "
            "further now.",
        ),
    ] = False,
    count_flops: Annotated[bool, typer.Option(help="Count the FLOPs of rows that lack them, and stop.")] = False,
    new_clients: Annotated[
        bool,
        typer.Option(
            help="Test new clients of finished rows with fewer samples and other numbers of steps, and stop. Rows without a run "
            "folder are trained again."
        ),
    ] = False,
    write_docs: Annotated[
        bool, typer.Option(help="Write the results of finished runs, if any, and the pages into docs/, and stop.")
    ] = False,
    changed_: Annotated[
        bool, typer.Option("--changed", help="Name the rows of the page that later code may have changed, and stop.")
    ] = False,
    confirm: Annotated[
        bool,
        typer.Option(
            help="Check the rows of the page that later code may have changed: train their first seed again, say whether they "
            "still hold, and stop."
        ),
    ] = False,
    same: Annotated[
        bool,
        typer.Option(
            "--same-programs",
            help="Compare the programs of rows that later code may have changed with those of before. Where they are the same, "
            "the row holds. Nothing is trained; a row takes some seconds.",
        ),
    ] = False,
    same_start: Annotated[
        bool,
        typer.Option(
            "--same-start",
            help="Train the first two rounds of rows that later code may have changed, by this code and by that of before, in "
            "float64. Where every client has the same scores up to rounding, the row holds. A row takes minutes.",
        ),
    ] = False,
    beside_: Annotated[
        Path | None,
        typer.Option(
            "--beside",
            help="Folder of a run whose study extends experiments/leaderboard.yaml: show its systems among the committed rows, "
            "and stop.",
        ),
    ] = None,
    debug: running.Debug = False,
) -> None:
    """Runs the list, one run after the other. The same command continues where it was stopped.

    `python -m experiments.leaderboard --list`

    `python -m experiments.leaderboard --data-dir DIR --hours 3 --only mnist_small,uci_har`

    `python -m experiments.leaderboard --data-dir DIR --hours 3 --missing`

    `python -m experiments.leaderboard --data-dir DIR --count-flops`

    `python -m experiments.leaderboard --data-dir DIR --same-programs`

    `python -m experiments.leaderboard --data-dir DIR --same-start`

    `python -m experiments.leaderboard --data-dir DIR --confirm`

    `python -m experiments.leaderboard --data-dir DIR --write-docs`

    `python -m experiments.leaderboard --beside runs/mine`
    """
    with one_line_errors(debug):
        others = list_, write_docs, count_flops, new_clients, confirm, same, same_start, changed_, beside_ is not None
        if missing_ and any(others):
            raise ValueError("--missing says what is trained: give it alone, or with --only and --hours")
        listed = run_list.read_list(board.LIST)
        chosen = running.pick(listed, only)
        if list_:
            lines = board.read_lines()
            table = [
                [run.name, f"{run.hours:g}", running.state(run, runs), missing.rows_there(run, lines), run.title]
                for run in chosen
            ]
            headings = ["name", "hours", "state", "rows in docs", "title"]
            console.print(report.rich_table("Runs", headings, table, text_columns=1))
            unlisted = board.unlisted(listed)
            if unlisted:
                console.print(f"in no run: {', '.join(unlisted)}", soft_wrap=True, markup=False)
        elif beside_ is not None:
            found, path = beside.write(beside_, listed)
            for one in found:
                console.print(report.rich_table(one.title, one.headings, one.rows))
            console.print(beside.explanation(), markup=False)
            console.print(f"saved: {path}", soft_wrap=True, markup=False)
        elif changed_:
            for line in changed.in_words(listed, board.read_lines()):
                console.print(line, soft_wrap=True, markup=False)
        elif count_flops or new_clients or confirm or same or same_start:
            for run in chosen:
                if same:
                    same_programs.clear(run, data_dir)
                if same_start:
                    same_programs.clear(run, data_dir, start=True)
                if confirm:
                    again.confirm(run, data_dir)
                if count_flops:
                    flops.count(run, data_dir)
                if new_clients:
                    newcomers.measure(run, runs / run.name, data_dir)
                    there = {one.system for one in newcomers.read(runs / run.name)}
                    newcomers.measure_rows(run, there, data_dir)
            page.write([], listed, runs, data_dir)
        elif write_docs:
            for line in page.write(chosen, listed, runs, data_dir):
                console.print(line, soft_wrap=True, markup=False)
        else:
            chosen = missing.lacking(chosen, board.read_lines()) if missing_ else chosen
            if not chosen:
                console.print(f"{board.RAW} has all of it", soft_wrap=True, markup=False)
            raise typer.Exit(running.run_all(chosen, runs, data_dir, hours))


if __name__ == "__main__":
    app()
