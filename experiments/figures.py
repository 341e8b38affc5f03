"""Makes figures and tables of docs/ from runs of the studies `robustness` and `privacy`; `--help` lists them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedjax_meta import process, report
from fedjax_meta.study import Study, load, summary
from fedjax_meta.study.compare import Finished, finished
from fedjax_meta.study.folder import read_run
from fedjax_meta.study.job import Outcome
from fedjax_meta.study.tuning import KNOWN

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False, no_args_is_help=True)

PAGE = Path(__file__).parent.parent / "docs" / "robustness.md"
BLOCK = re.compile(r"<!-- run: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of the study.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


@app.callback()
def main() -> None:
    """Draws the figures of docs/robustness.md and docs/privacy.md from runs, and writes the tables of docs/robustness.md.

    `python -m experiments.figures robustness runs/robustness`

    `python -m experiments.figures privacy runs/privacy`
    """


def known(one: Finished) -> np.ndarray:
    """Mean accuracy over known clients by seed, in percent; NaN where a run diverged."""
    return np.mean(list(one.by_client(KNOWN).values()), axis=1)


@app.command()
def robustness(run: RunArgument, debug: DebugOption = False) -> None:
    """Draws RUN/robustness.png: the accuracy of honest clients as a heat map, systems by scenarios.

    `python -m experiments.figures robustness runs/robustness`

    `python -m experiments.figures robustness runs/quick --debug`
    """
    with process.one_line_errors(debug):
        titles, scenarios, values = accuracies(load(run / "study.yaml"), finished([run]))
        figure, axis = _axis(3.2 + 0.75 * len(scenarios), 1.6 + 0.3 * len(titles))
        axis.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for row, column in np.ndindex(values.shape):
            value = values[row, column]
            text, ink = ("-", "black") if np.isnan(value) else (f"{value:.0f}", "black" if value > 60 else "white")
            axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
        axis.set_xticks(range(len(scenarios)), scenarios, rotation=40, ha="right", fontsize=8)
        axis.set_yticks(range(len(titles)), titles, fontsize=8)
        axis.set_title("accuracy of honest clients (percent)", fontsize=9, loc="left")
        _save(figure, run / "robustness.png")


def accuracies(study: Study, found: Sequence[Finished]) -> tuple[list[str], list[str], np.ndarray]:
    """(systems, scenarios, mean accuracy of known clients in percent); NaN where a system was not run or diverged."""
    titles = [title for title in map(study.title_of, study.systems) if any(one.title == title for one in found)]
    scenarios = [name for name in study.scenarios if any(one.scenario == name for one in found)]
    values = np.full((len(titles), len(scenarios)), np.nan)
    for one in found:
        values[titles.index(one.title), scenarios.index(one.scenario)] = known(one).mean()
    return titles, scenarios, values


@app.command()
def shares(run: RunArgument, debug: DebugOption = False) -> None:
    """Draws RUN/robustness_shares.png: accuracy of honest clients against the share of attackers, one line per system.

    `python -m experiments.figures shares runs/shares`

    `python -m experiments.figures shares runs/quick --debug`
    """
    with process.one_line_errors(debug):
        lines = by_share(load(run / "study.yaml"), finished([run]))
        methods, rules = (list(dict.fromkeys(words)) for words in zip(*(title.split(", ", 1) for title in lines), strict=True))
        figure, axis = _axis(8.2, 3.8)
        for title, points in lines.items():
            method, rule = title.split(", ", 1)
            style = {"color": report.COLORS[rules.index(rule)], "linestyle": ("-", "--", ":", "-.")[methods.index(method) % 4]}
            axis.plot(*zip(*points, strict=True), marker="o", label=title, **style)
        axis.set(xlabel="clients that attack, percent", ylabel="accuracy of honest clients, percent", ylim=(0, 100))
        figure.legend(fontsize=8, frameon=False, loc="outside right upper")
        _save(figure, run / "robustness_shares.png")


def by_share(study: Study, found: Sequence[Finished]) -> dict[str, list[tuple[float, float]]]:
    """(share of attackers, mean accuracy of known clients) of each system in both percent, by title.

    Raises:
      ValueError: fewer than two shares, or several attacks of one share.
    """
    names = {study.title_of(name): name for name in study.systems}
    lines: dict[str, dict[float, float]] = {}
    for one in found:
        attack = study.system(names[one.title], one.scenario).federation.get("attack")
        share = 0.0 if attack is None else 100 * attack["attackers"]
        points = lines.setdefault(one.title, {})
        if share in points:
            raise ValueError(
                f"{one.title} has several scenarios with {share:g} % attackers: give a run of one partition, "
                "--variant shares --variant dirichlet"
            )
        points[share] = float(known(one).mean())
    if any(len(points) < 2 for points in lines.values()) or not lines:
        raise ValueError("this run has one share of attackers: give a run of --variant shares --variant dirichlet")
    return {title: sorted(points.items()) for title, points in lines.items()}


@app.command()
def tables(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder with the runs that the page names.")],
    page: Annotated[Path, typer.Argument(help="Page with lines `<!-- run: NAME -->` and `<!-- end -->`.")] = PAGE,
    debug: DebugOption = False,
) -> None:
    """Writes the tables of docs/robustness.md. The tables of RUNS/NAME go between `<!-- run: NAME -->` and `<!-- end -->`.

    `python -m experiments.figures tables runs/robustness`

    `python -m experiments.figures tables runs/robustness docs/robustness.md`
    """
    with process.one_line_errors(debug):
        text = page.read_text(encoding="utf-8")
        there = [name for name in BLOCK.findall(text) if (runs / name[0] / "run.json").is_file()]
        if not there:
            raise ValueError(f"{runs} holds no run that {page} names")
        page.write_text(BLOCK.sub(lambda block: written(block, runs / block[1]), text), encoding="utf-8")
        process.console.print(f"tables: {', '.join(name for name, _ in there)}", soft_wrap=True, markup=False)


def written(block: re.Match[str], run: Path) -> str:
    """A block of the page with the tables of a run; as it is where there is no such run."""
    if not (run / "run.json").is_file():
        return block[0]
    study, content = load(run / "study.yaml"), read_run(run)
    names = {study.title_of(name): name for name in study.systems}
    outcomes = [Outcome(one.scenario, names[one.title], [], {}, [], one.trials) for one in finished([run])]
    parts = []
    for table in summary.tables(study, outcomes):
        attacks = [name.partition("-")[2].replace("_", " ") or name for name in table.headings[1:]]
        title = table.title.replace(" in all scenarios", "")
        parts += [f"{title}:", report.markdown_table(["system", *attacks], table.rows)]
    command = re.sub(r" --(out|data-dir) \S+", "", content["command"]).replace("python -m fedjax_meta", "fedjax-meta")
    commit = (content["git"]["package"] or {"commit": "unknown"})["commit"][:10]
    parts.append(f"    {command}  # commit {commit}")
    return f"<!-- run: {block[1]} -->\n\n" + "\n\n".join(part.rstrip() for part in parts) + "\n\n<!-- end -->"


@app.command()
def privacy(run: RunArgument, debug: DebugOption = False) -> None:
    """Draws RUN/privacy.png: accuracy against epsilon, a line for each way of clipping; without noise, a line across.

    `python -m experiments.figures privacy runs/privacy`

    `python -m experiments.figures privacy runs/quick --debug`
    """
    with process.one_line_errors(debug):
        lines, across = curves(load(run / "study.yaml"), finished([run]))
        figure, axis = _axis(7, 4.2)
        for number, (clip, points) in enumerate(lines.items()):
            epsilon, mean, deviation = np.array(sorted(points)).T
            axis.errorbar(epsilon, mean, deviation, color=report.COLORS[number], marker="o", capsize=3, label=clip)
        for title, mean in across.items():
            axis.axhline(mean, color=report.MUTED, linestyle=":", linewidth=1.2, label=title)
        axis.set_xscale("log")
        ticks = sorted({point[0] for points in lines.values() for point in points})
        axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axis.set_xticks([], minor=True)
        axis.set(xlabel="epsilon", ylabel="accuracy (percent)")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
        _save(figure, run / "privacy.png")


def curves(study: Study, found: Sequence[Finished]) -> tuple[dict[str, list[tuple[float, float, float]]], dict[str, float]]:
    """(epsilon, mean and deviation over seeds by the name of the clip; means of systems without noise by title).

    Raises:
      ValueError: no system has noise by its epsilon.
    """
    lines: dict[str, list[tuple[float, float, float]]] = {}
    across: dict[str, float] = {}
    names = {study.title_of(name): name for name in study.systems}
    for one in found:
        chain: Sequence[Mapping[str, Any]] = study.system(names[one.title], one.scenario).federation.get("uploads") or ()
        values = known(one)
        epsilon = next((step["epsilon"] for step in chain if step.get("epsilon") is not None), None)
        if epsilon is None:
            across[one.title] = float(values.mean())
        else:
            clip = next(step["name"] for step in chain if "clip" in step["name"]).replace("_", " ")
            spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
            lines.setdefault(clip, []).append((float(epsilon), float(values.mean()), spread))
    if not lines:
        raise ValueError("no system of this run has noise that is given by its epsilon")
    return lines, across


def _axis(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    process.console.print(f"figure: {path}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    app()
