"""Checks for regressions: compares new rows with the committed ones (cpu.jsonl, accelerator.jsonl, static.jsonl).

Seconds differ between machines, but ratios between cases of one run carry over. Compared are, on the same platform only:

- peers: a round of this library, and its first round, relative to the fastest other simulator; how far the parameters of others
  are from this library's (at most ten times as far, and always up to 1e-4);
- scaling: cohorts relative to one client, populations to 100 clients, host stores to the device, clients of different sizes to
  clients of equal size, several devices to one;
- second_order: every estimator relative to first order;
- systems: every system relative to FedAvg;
- accelerator: a round relative to the fastest PyTorch of the same run, or to W2-50 of the run if there is none;
- static: kernels, loops that wait for the host, bytes and temporary memory of a compiled program. These depend on the compiler
  and not on the machine, so they may grow by 5 % only.

Only what both have is compared: the fastest other is one of the simulators that both timed. Committed numbers that the new rows
lack are counted. A row of this library that is an error fails. Times of other benchmarks are ignored.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from _measure import as_program, needed, read_rows
from rich.console import Console
from rich.table import Table
from second_order import ESTIMATORS

from fedjax_meta import checks, escape

RESULTS = Path(__file__).parent / "results"
FILES = ("cpu.jsonl", "accelerator.jsonl", "static.jsonl")
"""The committed rows to compare with. Of the other files, hourly.jsonl repeats cases in slower hours; the rest is not checked."""
OURS = "fedjax_meta"

Row = Mapping[str, Any]
Case = tuple[Any, ...]
"""(platform, the values of a check's keys)."""


class Check(NamedTuple):
    """A number of the rows of a benchmark that should not grow.

    Attributes:
      benchmark: with the part of accelerator.py.
      keys: of a row, that say what was timed. Rows that differ only in the last one were timed side by side.
      number: the key of what is compared.
      relative: whether to divide it by that of the case that `divisor` names.
      factor: by which it may grow; `None` for --allowance.
      always: what is allowed however small the committed number is.
    """

    benchmark: str
    keys: tuple[str, ...]
    number: str
    relative: bool = False
    factor: float | None = None
    always: float = 0.0


CHECKS = (
    Check("peers", ("case", "peer"), "seconds", relative=True),
    # Between runs on one machine, first rounds relative to the fastest other's differed by up to two.
    Check("peers", ("case", "peer"), "first_seconds", relative=True, factor=2.0),
    Check("peers", ("case", "peer"), "difference", factor=10.0, always=1e-4),
    Check("scaling", ("axis", "case"), "seconds", relative=True),
    Check("second_order", ("model", "support", "query", "k", "estimator"), "ratio"),
    Check("systems", ("model", "clients", "samples", "batch_size", "epochs", "case"), "ratio"),
    Check("accelerator rounds", ("precision", "case", "peer"), "seconds", relative=True),
    *(
        Check("static", ("target", "cohort", "case"), number, factor=1.05)
        for number in ("kernels", "waits", "step_bytes", "temp_bytes")
    ),
)
MAY_BE_ZERO = ("difference", "waits")


def benchmark(row: Row) -> str:
    """The benchmark of a row, with its part."""
    return f"{row.get('benchmark')} {row.get('part', '')}".strip()


def cases(check: Check, rows: Iterable[Row]) -> dict[Case, Row]:
    """By case, the rows that have the number of a check; the last of repeated rows counts."""
    found = {}
    for row in rows:
        given = {"precision": "float32", **row}  # as old rows, which do not say so
        if benchmark(row) != check.benchmark or not isinstance(row.get(check.number), (int, float, str)):
            continue
        # A text in place of a difference is the error of another simulator.
        if check.number == "difference" and isinstance(row["difference"], str):
            continue
        needed(given, check.keys, numbers=() if check.number in MAY_BE_ZERO else (check.number,))
        # PyTorch's forms and the textbook's reverse mode are not ours, and first order is 1.
        if check.benchmark == "second_order" and (row["estimator"] not in ESTIMATORS or row["estimator"] == "first order"):
            continue
        found[row.get("platform"), *(given[key] for key in check.keys)] = row
    if check.benchmark != "accelerator rounds":
        return found
    # Committed rows are of several days. Of PyTorch's, those of our row's day count.
    return {case: row for case, row in found.items() if row.get("commit") == found.get((*case[:-1], OURS), row).get("commit")}


def divisor(check: Check, case: Case, known: Mapping[Case, Row]) -> Case | None:
    """The case that a case is compared with, if any."""
    *group, name = case
    if check.benchmark != "scaling":
        others = [other for other in known if [*other[:-1]] == group and other[-1] != OURS]
        if name != OURS:
            return None
        if others:
            return min(others, key=lambda other: known[other][check.number])
        return (*group[:-1], "W2-50", OURS) if check.benchmark == "accelerator rounds" else None
    # Checkpoints depend on the disk.
    bases = {"cohort": "1", "population": "100", "devices": "1", "store": f"device,{name.partition(',')[2]}"}
    base = bases.get(group[-1], name.replace("skewed", "equal") if group[-1] == "skew" else None)
    return None if base is None else (*group, base)


def numbers(check: Check, known: Mapping[Case, Row]) -> dict[str, float]:
    """The numbers of a check by name."""
    found = {}
    for case, row in known.items():
        name, value = " ".join(map(str, (check.benchmark, *case))), row[check.number]
        if not check.relative:
            found[f"{name}: {check.number}"] = value
        elif (against := divisor(check, case, known)) in known and against != case:
            other = (
                "fastest other" if check.benchmark != "scaling" and against[-1] != OURS else " ".join(map(str, against[2:]))
            )
            # The row's own ratio is of one run.
            own = check.benchmark == "scaling" and row.get("against") == against[-1] and "ratio" in row
            found[f"{name}: {check.number} / {other}"] = row["ratio"] if own else value / known[against][check.number]
    return found


class Compared(NamedTuple):
    """A number before and now, and the most that it may be."""

    old: float
    new: float
    most: float

    @property
    def worse(self) -> bool:
        """Whether it grew too much, or is no number."""
        return not self.new <= self.most


def compare(old: Iterable[Row], new: Iterable[Row], allowance: float) -> tuple[dict[str, Compared], Counter[str]]:
    """(what both have, by name; how many numbers of the old rows the new ones lack, by benchmark)."""
    old, new = list(old), list(new)
    platforms = {row.get("platform") for row in new}
    both, lacking = {}, Counter[str]()
    for check in CHECKS:
        before, now = (cases(check, [row for row in rows if row.get("platform") in platforms]) for rows in (old, new))
        common = before.keys() & now.keys()
        first, second = (numbers(check, {case: rows[case] for case in rows if case in common}) for rows in (before, now))
        found = {
            name: Compared(first[name], value, max((check.factor or allowance) * first[name], check.always))
            for name, value in second.items()
            if name in first
        }
        both |= found
        lacking[check.benchmark] += len(numbers(check, before)) - len(found)
    return both, +lacking


def errors(rows: Iterable[Row]) -> list[str]:
    """What failed of this library, by the rows that are an error."""
    words = (
        "axis",
        "case",
        "cohort",
        "model",
        "method",
        "network",
        "support",
        "query",
        "k",
        "estimator",
        "flags",
        "precision",
    )
    return [
        f"{' '.join([benchmark(row), *(str(row[word]) for word in words if word in row)])}: {row['error']}"
        for row in rows
        if "error" in row and row.get("peer", OURS) == OURS
    ]


def main(
    new: Annotated[Path, typer.Argument(help="File with the new rows.", exists=True)],
    committed: Annotated[Path, typer.Option(help=f"Folder with the rows to compare with: {', '.join(FILES)}.")] = RESULTS,
    allowance: Annotated[
        float,
        typer.Option(
            help="Factor by which a ratio of times may grow. Two runs on one CPU differ by up to 1.3; on a GPU, PyTorch and "
            "rounds of a millisecond by up to 1.7."
        ),
    ] = 1.3,
) -> None:
    """Compares new rows with the committed ones; exits with 1 if something grew too much or failed.

    \b
    Examples:
      python benchmarks/check.py runs/benchmarks/rows.jsonl
      python benchmarks/check.py accelerator.jsonl --allowance 1.7

    \b
    Compared, on the same platform:
      peers         a round and (up to twice) the first round, relative to the
                    fastest other simulator; the difference of parameters
                    (up to ten times, and always up to 1e-4)
      scaling       cohort, population, store, skew, devices, relative to
                    their base
      second_order  every estimator relative to first order
      systems       every system relative to FedAvg
      accelerator   rounds relative to the fastest PyTorch, or to W2-50
      static        kernels, waits, bytes, memory (up to 1.05)

    Committed numbers that the new rows lack are counted. An error of this
    library fails.
    """
    checks.positive("--allowance", allowance)
    rows = read_rows([new])
    old = read_rows(path for name in FILES if (path := committed / name).exists())
    both, lacking = compare(old, rows, allowance)
    failed = errors(rows)
    if not both and not failed:
        raise typer.BadParameter(f"{new} and {committed} have nothing in common that is compared")
    console = Console()
    table = Table("what", "committed", "new", "at most")
    for name, one in both.items():
        mark = "red" if one.worse else "default"
        table.add_row(escape.console(name), f"{one.old:.4g}", f"[{mark}]{one.new:.4g}[/]", f"{one.most:.4g}")
    if both:
        console.print(table)
    worse = [name for name, one in both.items() if one.worse]
    for title, names in (("grew too much", worse), ("failed", failed)):
        for name in names:
            console.print(escape.console(f"{title}: {name}"), soft_wrap=True, highlight=False)
    if lacking:
        parts = ", ".join(f"{count} of {name}" for name, count in lacking.items())
        console.print(f"not compared, because the new rows lack it: {parts}", soft_wrap=True, highlight=False)
    if worse or failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    as_program(main)()
