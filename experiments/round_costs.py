"""Measures time and peak memory of a round of every system of a study; see `python -m experiments.round_costs --help`."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np
import typer

import fedjax_meta as fm
from fedjax_meta import disk, report, runtime
from fedjax_meta.process import command_line, console, one_line_errors
from fedjax_meta.study import Study, load, run
from fedjax_meta.study.tuning import points_of

# The repository of Nguyen et al. ("Improving federated learning by meta-learning"), experiment/{mnist,cifar}/log_*.csv: GiB in
# use on the GPU and seconds, by inner epochs, of MAML and of iMAML with 1, 5 and 10 CG steps.
_EPOCHS, _ROWS = (1, 5, 10, 15), ("maml", "imaml-1", "imaml-5", "imaml-10")
_LOGS = {
    "mnist": (
        (1.200, 1.372, 1.589, 1.806, *[1.206] * 12),
        (0.27, 0.83, 1.47, 2.22, 0.46, 0.93, 1.49, 2.10, 0.55, 1.01, 1.59, 2.15, 0.67, 1.15, 1.32, 2.30),
    ),
    "cifar10": (
        (1.661, 1.976, 2.370, 2.767, *[1.667] * 12),
        (0.52, 1.55, 2.92, 4.15, 0.79, 1.63, 2.64, 2.76, 1.05, 1.86, 2.79, 3.85, 1.35, 2.20, 3.18, 4.23),
    ),
}
LOGGED: dict[tuple[str, str], tuple[float, float]] = {
    (dataset, f"{row}-{epochs}"): (gibibytes[4 * i + j], seconds[4 * i + j])
    for dataset, (gibibytes, seconds) in _LOGS.items()
    for i, row in enumerate(_ROWS)
    for j, epochs in enumerate(_EPOCHS)
}
"""(GiB, seconds) by data set and by the name of the system in the study imaml."""


class Cost(NamedTuple):
    """The cost of one round whose clients run one after the other on one device.

    Attributes:
      seconds: median over the timed rounds.
      temp_bytes: peak of the temporary memory that XLA plans, without data, model and state.
    """

    seconds: float
    temp_bytes: int


def measure(algorithm: fm.Algorithm, data: fm.FederatedData, *, repeats: int = 5) -> Cost:
    """Times the round of an algorithm of one lane and one device; the cohorts are the same for every system."""
    key = jax.random.key(0)
    state = jax.jit(algorithm.init)(key, data)
    program = jax.jit(algorithm.round).lower(key, state, data).compile()
    memory = program.memory_analysis()
    seconds = []
    for number in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(program(jax.random.fold_in(key, number), state, data))
        seconds.append(time.perf_counter() - begin)
    return Cost(float(np.median(seconds[1:])), memory.temp_size_in_bytes if memory else 0)


def table(study: Study, *, data_dir: str | None, repeats: int) -> tuple[list[str], list[list[str]]]:
    """(headings, rows), one row for each scenario and system, with the first point of its grid."""
    rows = []
    for scenario, clients in run.build(study, data_dir).items():
        for name in study.systems_on(scenario):
            system = study.system(name, scenario)
            method, federation = system.parts(clients, **points_of(system)[0])
            alone = fm.federate(method, dataclasses.replace(federation, lanes=1, devices=1))
            with console.status(f"timing {study.title_of(name)}"):
                cost = measure(alone, clients.train, repeats=repeats)
            logged = LOGGED.get((study.scenarios[scenario].dataset, name.removeprefix("logged_")))
            row = [scenario, study.title_of(name), f"{1000 * cost.seconds:.0f}", f"{cost.temp_bytes / 1e6:.1f}"]
            rows.append([*row, *(("", "") if logged is None else (f"{logged[1]:.2f}", f"{logged[0]:.3f}"))])
    headings = ["scenario", "system", "ms a round", "peak MB", "logged: s", "logged: GiB"]
    kept = [i for i in range(6) if i < 4 or any(row[i] for row in rows)]
    return [headings[i] for i in kept], [[row[i] for i in kept] for row in rows]


NOTE = (
    "A round whose clients run one after the other on one device. Peak memory is what XLA plans for it, without data, model and "
    "state. Logged: running time, and memory in use on a GPU of 8 GiB, as the authors' repository has them; it does not say "
    "of what the time is."
)


def write_table(
    out: Path, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str, *, text_columns: int = 1
) -> None:
    """Writes a table as a page of Markdown, with what a reader must know, the machine and the command."""
    table = report.markdown_table(headings, rows, text_columns=text_columns)
    made = f"On {runtime.device_kinds()}; jax {jax.__version__}:"
    disk.write_text(out, "\n".join([f"# {title}", "", table, "", note, "", made, "", f"    {command_line(out)}", ""]))


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="A YAML file, or the name of a study of the package.")],
    variant: Annotated[list[str] | None, typer.Option("--variant", help="A named variant of the study.")] = None,
    systems: Annotated[str | None, typer.Option(help="Only these systems, separated by commas.", show_default=False)] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds to time.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write the table to.", show_default=False)] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of prepared data sets of tensorflow-datasets.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Prints time and peak memory of a round of every system of a study.

    `python -m experiments.round_costs quickstart --variant quick`

    `python -m experiments.round_costs imaml` (the paper's main claim: iMAML's memory does not grow with the inner epochs)
    """
    with one_line_errors(debug):
        wanted: Sequence[str] | None = None if systems is None else [name.strip() for name in systems.split(",")]
        chosen = load(study, variants=variant or (), systems=wanted)
        headings, rows = table(chosen, data_dir=data_dir, repeats=repeats)
        console.print(report.rich_table(chosen.title, headings, rows, text_columns=2))
        console.print(NOTE, style="dim")
        if out is not None:
            write_table(out, chosen.title, headings, rows, NOTE, text_columns=2)


if __name__ == "__main__":
    app()
