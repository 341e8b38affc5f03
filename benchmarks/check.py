"""Checks for regressions: compares ratios of times in new rows with those in the committed rows.

Seconds differ between machines, but ratios between cases of one run carry over. These ratios are compared:

- this library to the fastest other simulator;
- a large population to a small one;
- a host store to the device;
- clients of different sizes to clients of equal size;
- several devices to one;
- second order to first order;
- every system to FedAvg.

Numbers of `static.py` (kernels, loops that wait for the host, bytes, temporary memory) are compared directly. They may grow only
a little, because they depend on the compiler and not on the machine. Rows of other benchmarks are ignored.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from _measure import as_program, needed, read_rows
from rich.console import Console
from rich.table import Table

from fedjax_meta import checks, escape

RESULTS = Path(__file__).parent / "results"
KEYS = {
    "peers": ("case", "peer"),
    "scaling": ("axis", "case"),
    "second_order": ("model", "support", "query", "k", "estimator"),
    "systems": ("model", "clients", "samples", "batch_size", "epochs", "case"),
}
"""By benchmark, the keys of a row that say what was timed. Rows that differ only in the last key were timed side by side."""

STATIC = ("kernels", "waits", "step_bytes", "temp_bytes")
"""Numbers of a row of `static.py` that should not grow."""
STATIC_ALLOWANCE = 1.05
"""By how much they may: another version of XLA fuses otherwise. Where there were no waits, there must be none."""

Case = tuple[Any, ...]
"""(benchmark, the values of its keys)."""


def times(rows: Iterable[Mapping[str, Any]]) -> dict[Case, float]:
    """Seconds by case; the last of repeated rows counts."""
    timed = [row for row in rows if "seconds" in row and row.get("benchmark") in KEYS]
    for row in timed:
        needed(row, KEYS[row["benchmark"]])
    return {(row["benchmark"], *(row[key] for key in KEYS[row["benchmark"]])): row["seconds"] for row in timed}


def base(case: Case) -> str | None:
    """The last value of the case that this one is compared with, if any. Simulators are compared in `ratios`."""
    benchmark, *group, name = case
    if benchmark == "systems":
        return "fedavg"
    if benchmark == "second_order":
        return "first order" if name == "exact" else None
    bases = {"population": "1000", "devices": "1", "skew": name.replace("skewed", "equal")}
    return {**bases, "store": f"device,{name.partition(',')[2]}"}.get(group[0])


def ratios(seconds: Mapping[Case, float]) -> dict[str, float]:
    """The ratios that should not grow, by name."""
    found = {}
    for case, value in seconds.items():
        *group, name = case
        label = f"{' '.join(map(str, group[1:]))}: {name}"
        if group[0] == "peers":
            others = [s for (*g, n), s in seconds.items() if g == group and n != name]
            if name == "fedjax_meta" and others:
                found[f"{label} / fastest other"] = value / min(others)
        elif (against := base(case)) != name and (*group, against) in seconds:
            found[f"{label} / {against}"] = value / seconds[*group, against]
    return found


def static(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of compiled programs by name; the last of repeated rows counts."""
    found = {}
    for row in rows:
        if row.get("benchmark") == "static":
            needed(row, ("target", "case", "cohort", "waits"), numbers=[name for name in STATIC if name != "waits"])
            found |= {f"{row['target']} {row['case']}-{row['cohort']}: {name}": float(row[name]) for name in STATIC}
    return found


def compare(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """(old, new) ratio by name, from the cases that both have: a simulator that is missing in one counts in neither."""
    old, new = list(old), list(new)
    before, now = static(old), static(new)
    return _ratios_of_times(old, new) | {name: (before[name], value) for name, value in now.items() if name in before}


def _ratios_of_times(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    old_times, new_times = times(old), times(new)
    both = [case for case in new_times if case in old_times]
    old_ratios, new_ratios = (ratios({case: seconds[case] for case in both}) for seconds in (old_times, new_times))
    return {name: (old_ratios[name], value) for name, value in new_ratios.items()}


def main(
    new: Annotated[Path, typer.Argument(help="File with the new rows.", exists=True)],
    committed: Annotated[Path, typer.Option(help="Folder with the rows to compare with.")] = RESULTS,
    platform: Annotated[str, typer.Option(help="Compare times of this platform only (cpu, gpu).")] = "cpu",
    allowance: Annotated[
        float, typer.Option(help="Factor by which a ratio of times may grow; two runs on one machine differ by up to 1.3.")
    ] = 1.3,
) -> None:
    """Compares ratios with those of the committed rows; exits with 1 if one grew by more than the allowance.

    \b
    Examples:
      python benchmarks/check.py runs/benchmarks/rows.jsonl
      python benchmarks/check.py rows.jsonl --allowance 1.3
    """
    checks.positive("--allowance", allowance)
    files = (sorted(committed.glob("*.json*")), [new])

    def counts(row: Mapping[str, Any]) -> bool:
        return row.get("platform") == platform or row.get("benchmark") == "static"

    both = compare(*(filter(counts, read_rows(some)) for some in files))
    if not both:
        raise typer.BadParameter(f"{new} and {committed} have no ratio of platform={platform!r} in common")
    table = Table("ratio", "committed", "new", "grew by")
    worse, fixed = [], static(filter(counts, read_rows([new])))
    for name, (old, now) in both.items():
        growth = now / old if old else 1.0 if now == old else math.inf
        too_much = growth > (STATIC_ALLOWANCE if name in fixed else allowance)
        worse += [name] if too_much else []
        mark = "red" if too_much else "default"
        table.add_row(escape.console(name), f"{old:.4g}", f"{now:.4g}", f"[{mark}]{growth:.2f}[/]")
    Console().print(table)
    if worse:
        raise typer.Exit(1)


if __name__ == "__main__":
    as_program(main)()
