"""Runs all benchmarks, each in its own process, writes their rows to one folder, and compares them with the committed rows."""

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from _measure import as_program, check_outputs

HERE = Path(__file__).parent


def main(
    folder: Annotated[Path, typer.Option(help="Folder for the rows.")] = Path("runs/benchmarks"),
    quick: Annotated[
        bool, typer.Option(help="Fewer rounds and at most 100,000 clients; about ten minutes on two cores.")
    ] = False,
) -> None:
    """Runs all benchmarks, and compares their rows with the committed ones.

    \b
    Examples:
      python benchmarks/all.py --quick
      python benchmarks/all.py --folder runs/benchmarks
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    check_outputs(rows)
    if rows.exists():
        kept = rows.with_name(f"rows-{datetime.fromtimestamp(rows.stat().st_mtime):%Y%m%d-%H%M%S}.jsonl")
        rows.rename(kept)
        print(f"rows of the last call: {kept}")
    peers = ["--rounds", "5", "--max-seconds", "10"] if quick else []
    scaling = ["--repeats", "3", "--max-clients", "100000", "--max-cohort", "1024"] if quick else []
    systems = ["--repeats", "3"] if quick else []
    start = ["--repeats", "1"] if quick else []
    sweeps = ["--rates", "4", "--seeds", "2", "--rounds", "20"] if quick else []
    published = ["--rounds", "2"] if quick else []
    for command in (
        ["peers.py", *peers, "--output", rows],
        ["scaling.py", *scaling, "--output", rows],
        ["second_order.py", "--output", rows],
        ["systems.py", *systems, "--output", rows],
        ["start.py", *start, "--output", rows],
        ["sweeps.py", *sweeps, "--output", rows],
        ["published.py", "--peers", *published, "--output", rows],
    ):
        subprocess.run([sys.executable, str(HERE / command[0]), *map(str, command[1:])], check=True)
    raise typer.Exit(subprocess.run([sys.executable, str(HERE / "check.py"), str(rows)], check=False).returncode)


if __name__ == "__main__":
    as_program(main)()
