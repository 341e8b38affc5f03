"""Whether anything became slower: ratios of new rows against those of the last committed ones.

Ratios between cases of one run carry over from machine to machine where seconds do not: this library against the fastest other
simulator, a large population against a small one, uneven clients against equal ones, second order against first.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PLACES = {"peers": ("case", "peer"), "scaling": ("axis", "case"), "systems": ("model", "case")}
"""Under which keys rows have what is compared, and what it is compared with."""


def rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All JSON lines of some files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By name, what should not grow; of repeated rows the last counts."""
    seconds: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if "seconds" in row and row.get("benchmark") in PLACES:
            group, name = (row[key] for key in PLACES[row["benchmark"]])
            seconds[row["benchmark"], group, name] = row["seconds"]
    found = {}
    for (benchmark, group, name), value in seconds.items():
        others = {n: s for (b, g, n), s in seconds.items() if (b, g) == (benchmark, group) and n != name}
        if benchmark == "systems" and name != "fedavg" and "fedavg" in others:
            found[f"{group}: {name} / FedAvg"] = value / others["fedavg"]
        if benchmark == "peers" and name == "fedjax_meta" and others:
            found[f"{group}: this library / fastest other"] = value / min(others.values())
        if benchmark == "scaling" and group == "population" and "1000" in others:
            found[f"{name} clients / 1000 clients"] = value / others["1000"]
        if benchmark == "scaling" and group == "skew" and name == "skewed" and "equal" in others:
            found["skewed clients / equal clients"] = value / others["equal"]
    return found


def main(
    new: Annotated[Path, typer.Argument(help="File with the new rows.", exists=True)],
    committed: Annotated[Path, typer.Option(help="Folder with the rows to compare with.")] = RESULTS,
    platform: Annotated[str, typer.Option(help="Compare with rows of this platform only (cpu, gpu).")] = "cpu",
    allowance: Annotated[
        float, typer.Option(help="How much a ratio may grow; two runs on one machine differ by up to 1.3.")
    ] = 1.3,
) -> None:
    """Compares ratios with those of the last committed rows; exits with 1 when one grew beyond the allowance."""
    old = ratios([row for row in rows(sorted(committed.glob("*.json*"))) if row.get("platform") == platform])
    now = ratios([row for row in rows([new]) if row.get("platform") == platform])
    both = [name for name in now if name in old]
    if not both:
        raise typer.BadParameter(f"{new} and {committed} have no ratio of platform {platform!r} in common")
    table = Table("ratio", "committed", "new", "grew by")
    worse = []
    for name in both:
        growth = now[name] / old[name]
        worse += [name] if growth > allowance else []
        mark = "red" if growth > allowance else "default"
        table.add_row(name, f"{old[name]:.3f}", f"{now[name]:.3f}", f"[{mark}]{growth:.2f}[/]")
    Console().print(table)
    if worse:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
