"""The figure of docs/robustness.md from a run of the study `robustness`: systems in rows, attacks in columns.

`python -m experiments.robustness_figure runs/robustness` writes `robustness.png` into the folder.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedjax_meta import process
from fedjax_meta.study import load
from fedjax_meta.study.compare import finished

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def accuracies(run: Path) -> tuple[list[str], list[str], np.ndarray]:
    """(systems, scenarios, mean accuracy of known clients in percent); NaN where a system was not run or diverged."""
    study, found = load(run / "study.yaml"), finished([run])
    titles = [title for title in map(study.title_of, study.systems) if any(one.title == title for one in found)]
    scenarios = [name for name in study.scenarios if any(one.scenario == name for one in found)]
    values = np.full((len(titles), len(scenarios)), np.nan)
    for one in found:
        scores = [trial.rows[-1]["tests"]["known"]["scores"]["accuracy_mean"] for trial in one.trials]
        values[titles.index(one.title), scenarios.index(one.scenario)] = 100 * np.mean(scores)
    return titles, scenarios, values


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Folder of a run of the study.")],
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Draws RUN/robustness.png: the accuracy of honest clients as a heat map, systems by scenarios."""
    with process.one_line_errors(debug):
        titles, scenarios, values = accuracies(run)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.2 + 0.75 * len(scenarios), 1.6 + 0.3 * len(titles)), layout="constrained")
        axis = figure.subplots()
        axis.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for row, column in np.ndindex(values.shape):
            value = values[row, column]
            text, ink = ("-", "black") if np.isnan(value) else (f"{value:.0f}", "black" if value > 60 else "white")
            axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
        axis.set_xticks(range(len(scenarios)), scenarios, rotation=40, ha="right", fontsize=8)
        axis.set_yticks(range(len(titles)), titles, fontsize=8)
        axis.set_title("accuracy of honest clients (percent)", fontsize=9, loc="left")
        figure.savefig(run / "robustness.png", dpi=150)
        process.console.print(f"figure: {run / 'robustness.png'}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    app()
