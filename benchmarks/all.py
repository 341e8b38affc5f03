"""All benchmarks one after the other, each in a process of its own; rows and figure go into one folder."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent


def main(
    folder: Annotated[Path, typer.Option(help="Where rows and figure go.")] = Path("runs/benchmarks"),
    quick: Annotated[bool, typer.Option(help="Fewer rounds and no million clients: about ten minutes on two cores.")] = False,
) -> None:
    """Runs all benchmarks, draws the roofline, and compares with the committed rows where there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.unlink(missing_ok=True)
    patience = ["--rounds", "5", "--patience", "10"] if quick else []
    few = ["--repeats", "3", "--most", "100000", "--cohort", "1024"] if quick else []
    turns = ["--repeats", "3"] if quick else []
    starts = ["--repeats", "1"] if quick else []
    for command in (
        ["peers.py", *patience, "--output", rows],
        ["scaling.py", *few, "--output", rows],
        ["second_order.py", "--output", rows],
        ["systems.py", *turns, "--output", rows],
        ["start.py", *starts, "--output", rows],
        ["roofline.py", rows, "--figure", folder / "roofline.png"],
    ):
        subprocess.run([sys.executable, str(HERE / command[0]), *map(str, command[1:])], check=True)
    if any((HERE / "results").glob("*.json*")):
        raise typer.Exit(subprocess.run([sys.executable, str(HERE / "check.py"), str(rows)], check=False).returncode)


if __name__ == "__main__":
    typer.run(main)
