"""Whether anything became slower: ratios of new rows against those of the last committed ones.

Ratios between cases of one run carry over from machine to machine where seconds do not: this library against the fastest other
simulator, a large population against a small one, clients who wait on the host against clients on the device, uneven clients
against equal ones, many devices against one, second order against first, every system against FedAvg.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PLACES = {
    "peers": ("case", "peer"),
    "scaling": ("axis", "case"),
    "second_order": ("model", "support", "query", "k", "estimator"),
    "systems": ("model", "clients", "samples", "batch_size", "epochs", "case"),
}
"""Under which keys a benchmark's rows say what was timed; those that differ in the last alone were timed side by side."""

Place = tuple[Any, ...]
"""(benchmark, what stands under its keys)."""


def rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All JSON lines of some files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def times(rows: Iterable[Mapping[str, Any]]) -> dict[Place, float]:
    """Seconds by what was timed; of repeated rows the last counts."""
    return {
        (row["benchmark"], *(row[key] for key in PLACES[row["benchmark"]])): row["seconds"]
        for row in rows
        if "seconds" in row and row.get("benchmark") in PLACES
    }


def base(place: Place) -> str | None:
    """The last part of the place with which this one is compared, if any, simulators apart."""
    benchmark, *group, name = place
    if benchmark == "systems":
        return "fedavg"
    if benchmark == "second_order":
        return "first order" if name == "exact" else None
    bases = {"population": "1000", "devices": "1", "skew": name.replace("skewed", "equal")}
    return {**bases, "store": f"device,{name.partition(',')[2]}"}.get(group[0])


def ratios(seconds: Mapping[Place, float]) -> dict[str, float]:
    """By name, what should not grow."""
    found = {}
    for place, value in seconds.items():
        *group, name = place
        label = f"{' '.join(map(str, group[1:]))}: {name}"
        if group[0] == "peers":
            others = [s for (*g, n), s in seconds.items() if g == group and n != name]
            if name == "fedjax_meta" and others:
                found[f"{label} / fastest other"] = value / min(others)
        elif (against := base(place)) != name and (*group, against) in seconds:
            found[f"{label} / {against}"] = value / seconds[*group, against]
    return found


def compare(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """(old, new) ratio by name, of what both have timed: a simulator that one of them lacks counts in neither."""
    before, now = times(old), times(new)
    was, is_ = (ratios({place: rows[place] for place in now if place in before}) for rows in (before, now))
    return {name: (was[name], value) for name, value in is_.items()}


def main(
    new: Annotated[Path, typer.Argument(help="File with the new rows.", exists=True)],
    committed: Annotated[Path, typer.Option(help="Folder with the rows to compare with.")] = RESULTS,
    platform: Annotated[str, typer.Option(help="Compare with rows of this platform only (cpu, gpu).")] = "cpu",
    allowance: Annotated[
        float, typer.Option(help="How much a ratio may grow; two runs on one machine differ by up to 1.3.")
    ] = 1.3,
) -> None:
    """Compares ratios with those of the last committed rows; exits with 1 when one grew beyond the allowance."""
    files = (sorted(committed.glob("*.json*")), [new])
    both = compare(*([row for row in rows(some) if row.get("platform") == platform] for some in files))
    if not both:
        raise typer.BadParameter(f"{new} and {committed} have no ratio of platform {platform!r} in common")
    table = Table("ratio", "committed", "new", "grew by")
    worse = []
    for name, (old, now) in both.items():
        growth = now / old
        worse += [name] if growth > allowance else []
        mark = "red" if growth > allowance else "default"
        table.add_row(name, f"{old:.3f}", f"{now:.3f}", f"[{mark}]{growth:.2f}[/]")
    Console().print(table)
    if worse:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
