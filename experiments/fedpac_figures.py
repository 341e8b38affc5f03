"""Figures for the study of FedPAC: accuracy against the option that differs between scenarios, and the mixtures as a heat map.

`python -m experiments.fedpac_figures --help` lists the figures.
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

import fedjax_meta as fm
from fedjax_meta import process, report
from fedjax_meta.study import Study, load, tuning
from fedjax_meta.study.result_files import read_final

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False, no_args_is_help=True)

AXES = {
    "uniform": "share of samples that is uniform over the classes",
    "size": "samples a client",
    "concept_groups": "concepts",
}
"""The options of the scenarios that a figure may have below it, and what they are."""


@app.callback()
def main() -> None:
    """Figures beside the study of FedPAC.

    `python -m experiments.fedpac_figures curves runs/share`

    `python -m experiments.fedpac_figures mixing --data-dir DIR`
    """


@app.command()
def curves(
    run: Annotated[Path, typer.Argument(help="Folder of a run of the variant share, samples or concepts.")],
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Draws RUN/scenarios.png: accuracy after the last round by scenario; one line per system, mean and spread over seeds.

    `python -m experiments.fedpac_figures curves runs/share`

    `python -m experiments.fedpac --variant share --out runs/share` makes such a run.
    """
    with process.one_line_errors(debug):
        study = load(run / "study.yaml")
        axis, places = differing({name: dict(one.options) for name, one in study.scenarios.items()})
        found = {
            group: {name: mine for name in study.systems if (mine := last_scores(run, study, name, group))}
            for group in (tuning.KNOWN, tuning.NEW)
        }
        groups = [group for group, systems in found.items() if systems]
        if not groups:
            raise ValueError(f"{run} has no finished results yet")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5 * len(groups), 4.2), layout="constrained")
        panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
        for panel, group in zip(panels, groups, strict=True):
            for number, name in enumerate(study.systems):
                mine = found[group].get(name, {})
                at = [scenario for scenario in places if scenario in mine]
                if not at:
                    continue  # not finished yet
                means, deviations = zip(*(report.over_seeds(mine[scenario]) for scenario in at), strict=True)
                spreads = np.nan_to_num(deviations)
                style = {"color": report.COLORS[number % len(report.COLORS)], "marker": "o", "markersize": 3, "capsize": 2}
                label = study.title_of(name) + ("" if np.isfinite(means).any() else " (diverged)")
                panel.errorbar([places[one] for one in at], means, spreads, label=label, **style)
            panel.set(xlabel=AXES[axis], title=f"{group} clients")
            panel.grid(axis="y", color=report.GRID)
        panels[0].set_ylabel("mean accuracy of clients, %")
        panels[-1].legend(fontsize=7, frameon=False)
        figure.savefig(run / "scenarios.png", dpi=150)
        process.console.print(f"figure: {run / 'scenarios.png'}", soft_wrap=True, markup=False)


def last_scores(run: Path, study: Study, name: str, group: str) -> dict[str, np.ndarray]:
    """By scenario the mean over clients for each seed of a system, in percent; NaN for one that diverged, which is not drawn."""
    found = {}
    for scenario in study.scenarios:
        trials, _ = read_final(run, study, scenario, name)
        tests = [trial.rows[-1]["tests"].get(group) for trial in trials]
        if trials and tests[0] is not None:
            scores = [tuning.last_scores(trial, test, study.score) for trial, test in zip(trials, tests, strict=True)]
            found[scenario] = np.array([one.mean() for one in scores])
    return found


def differing(options: dict[str, dict[str, Any]]) -> tuple[str, dict[str, float]]:
    """(the option of `AXES` that differs between scenarios, its value by scenario).

    Raises:
      ValueError: none does, or several do.
    """
    axes = [axis for axis in AXES if len({one.get(axis) for one in options.values()}) > 1]
    if len(axes) != 1:
        several = ", ".join(axes) or "none"
        raise ValueError(f"the scenarios of this run must differ in one of {', '.join(AXES)}, not in {several}")
    return axes[0], {name: one[axes[0]] for name, one in options.items() if one.get(axes[0]) is not None}


@app.command()
def mixing(
    out: Annotated[Path, typer.Option(help="File of the picture.")] = Path("mixing.png"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate of the extractor.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Seed of the training.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a field of the study, as in fedjax-meta.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of prepared data sets of tensorflow-datasets.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Trains FedPAC and draws which heads each client receives; clients with the same group of classes are side by side.

    `python -m experiments.fedpac_figures mixing --data-dir DIR --rounds 50`

    `python -m experiments.fedpac_figures mixing --data-dir DIR --out heads.png`
    """
    with process.one_line_errors(debug):
        study = load("fedpac", [*(set_ or ()), "systems.fedpac.options.keep_mixing=true"], systems=["fedpac"])
        clients = next(iter(study.scenarios.values())).build(data_dir)
        algorithm = study.system("fedpac").build(clients.task, lr=lr)
        state, _ = fm.simulate(algorithm, clients.train, key=jax.random.key(seed), rounds=rounds, eval_every=rounds)
        matrix = np.asarray(state.memory)
        draw(out, matrix, groups_of(clients.train), f"Heads after round {rounds}: {clients.title}")
        process.console.print(f"figure: {out}", soft_wrap=True, markup=False)


def groups_of(data: fm.FederatedData) -> np.ndarray:
    """A number for the set of the three most frequent classes of each client, `[N]`."""
    y, classes = np.asarray(data.y), data.num_classes
    numbers = []
    for first, size in zip(np.asarray(data.start["train"]), np.asarray(data.size["train"]), strict=True):
        counts = np.bincount(y[first : first + size], minlength=classes)
        numbers.append(int(np.sort(np.argsort(-counts, kind="stable")[:3]) @ [classes**2, classes, 1]))
    return np.array(numbers)


def draw(path: Path, matrix: np.ndarray, groups: np.ndarray, title: str) -> None:
    """A heat map of row-stochastic weights `[N, N]`, clients sorted by group."""
    from matplotlib.figure import Figure

    order = np.argsort(groups, kind="stable")
    figure = Figure(figsize=(6, 5), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(matrix[np.ix_(order, order)], vmin=0, cmap="viridis")
    labels = [str(i) for i in order]
    axis.set(xticks=range(len(order)), yticks=range(len(order)), xticklabels=labels, yticklabels=labels, title=title)
    axis.set(xlabel="whose head", ylabel="client")
    axis.tick_params(labelsize=7)
    for edge in np.flatnonzero(np.diff(groups[order])) + 0.5:
        axis.axhline(edge, color="white", linewidth=0.6)
        axis.axvline(edge, color="white", linewidth=0.6)
    figure.colorbar(image, label="weight")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    app()
