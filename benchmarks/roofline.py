"""Draws a roofline from rows of `peers.py`: the rate of each simulator below the measured rate of large matrix products."""

import math
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import numpy as np
import typer
from _measure import as_program, check_outputs, copy_rate, needed, read_rows
from _workloads import MODELS, shapes, workload

mpl.use("Agg")
from matplotlib import pyplot as plt


def intensity(name: str) -> float:
    """FLOPs per byte that a step must move at least: parameters read and written, gradients, samples."""
    case = workload(name)
    parameters = 4 * sum(math.prod(shape) for shape in shapes(case.model).values())
    sample = math.prod(MODELS[case.model][0])
    moved = 3 * parameters + sample * (case.batch_size + case.query_size)
    return case.flops / case.cohort_size / case.steps / moved


def main(
    rows: Annotated[Path, typer.Argument(help="File with rows of peers.py.", exists=True)],
    figure: Annotated[Path, typer.Option(help="File of the figure.")] = Path("roofline.png"),
) -> None:
    """Draws rate over intensity, with the measured ceilings of matrix products and of copying.

    \b
    Examples:
      python benchmarks/roofline.py rows.jsonl
      python benchmarks/roofline.py rows.jsonl --figure roofline.png
    """
    read = [row for row in read_rows([rows]) if row.get("benchmark") == "peers" and "seconds" in row]
    if not read:
        raise typer.BadParameter(f"{rows} has no rows of peers.py")
    for row in read:
        needed(row, ("case", "peer"), numbers=("gflops", "ceiling_gflops"))
        intensity(row["case"])
    check_outputs(figure=figure)
    ceiling, copying = read[-1]["ceiling_gflops"], copy_rate()
    axis = plt.figure(figsize=(8, 5), layout="constrained").add_subplot()
    span = np.geomspace(1, 300)
    axis.loglog(span, np.minimum(ceiling, copying * span), color="black", label="measured ceilings")
    for peer in dict.fromkeys(row["peer"] for row in read):
        mine = [row for row in read if row["peer"] == peer]
        marker = "*" if peer == "fedjax_meta" else "."
        axis.loglog(
            [intensity(row["case"]) for row in mine], [row["gflops"] for row in mine], marker, markersize=9, label=peer
        )
    for case in dict.fromkeys(row["case"] for row in read):
        axis.annotate(case, (intensity(case), ceiling * 1.1), rotation=60, fontsize=7)
    axis.set(xlabel="FLOP / byte", ylabel="GFLOP / s")
    axis.legend(fontsize=8)
    figure.parent.mkdir(parents=True, exist_ok=True)
    axis.figure.savefig(figure, dpi=150)


if __name__ == "__main__":
    as_program(main)()
