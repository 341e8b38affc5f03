"""The command `fedjax-meta`, also `python -m fedjax_meta`: run, show and list."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import jax
import numpy as np
import typer

from fedjax_meta import __version__, checks, costs, escape, export, loggers, placement, report, runtime
from fedjax_meta.builders import about
from fedjax_meta.data.targets import LABELS, REAL
from fedjax_meta.methods import METHODS
from fedjax_meta.process import Interrupted, Stopped, command_line, console, errors, one_line_errors, signals
from fedjax_meta.simulation import Record
from fedjax_meta.study import (
    baselines,
    catalogue,
    comparison,
    descriptions,
    draws,
    estimate,
    files,
    flags,
    guarantees,
    page,
    presets,
    results,
    summary,
    targets,
)
from fedjax_meta.study import compare as comparing
from fedjax_meta.study import folder as folders
from fedjax_meta.study import run as runs
from fedjax_meta.study.check import check, named
from fedjax_meta.study.export import of_run
from fedjax_meta.study.job import passes
from fedjax_meta.study.loggers import logged
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study, load, to_yaml
from fedjax_meta.study.tuning import KNOWN, NEW, points_of, rounds_of_trials

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False, no_args_is_help=True)

EXTENSIONS = 4
"""How often `--extend` extends a grid if the study does not say it."""

DIVERGED = 3
"""Exit code when every run diverged."""

StudyArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[STUDY]",
        help="A YAML file, or the name of a study of the package (see `list studies`). Without it: the methods of --systems.",
        show_default=False,
    ),
]
DatasetOption = Annotated[
    str | None, typer.Option(help="Data set for all scenarios, without augmentation; see `list datasets`.", show_default=False)
]
PartitionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME(KEY=VALUE,...)",
        help="How all scenarios divide samples among clients; see `list partitions`.",
        show_default=False,
    ),
]
ClientsOption = Annotated[int | None, typer.Option(min=1, help="Number of clients in all scenarios.", show_default=False)]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="NAME(KEY=VALUE,...)", help="Model for all scenarios; see `list models`.", show_default=False),
]
VariantOption = Annotated[
    list[str] | None, typer.Option("--variant", help="A named variant of the study, e.g. `quick`; can be repeated.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Same as `--variant quick`.")]
SystemsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME(KEY=VALUE,...),...",
        help="Run only these systems of the study. Without a study: methods with their options.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a field, e.g. `rounds=20` or `systems.fedavg.options.epochs=5`."
    ),
]
RoundsOption = Annotated[
    int | None, typer.Option(min=1, help="Same as `--set rounds=N`; also limits tuning trials.", show_default=False)
]
SeedsOption = Annotated[str | None, typer.Option(help="Same as `--set seeds=[...]`, e.g. 1,2,3.", show_default=False)]
ExtendOption = Annotated[
    bool, typer.Option("--extend", help=f"Extend a grid, up to {EXTENSIONS} times, while its best value is at its end.")
]
DevicesOption = Annotated[
    int | None, typer.Option(min=1, help="Number of devices that share the work; by default all.", show_default=False)
]
StoreOption = Annotated[
    str | None,
    typer.Option(help="Where to keep client state: `device`, `host` (its memory) or `disk`.", show_default=False),
]
DeltaOption = Annotated[
    float | None,
    typer.Option(
        help="Delta at which to state the epsilon of systems with noise; by default N^-1.1 for N clients.", show_default=False
    ),
]
OnDivergenceOption = Annotated[
    str | None,
    typer.Option(
        help="What to do when a run diverges: `continue` (default), or `stop` at the next evaluation.",
        show_default=False,
    ),
]
DataDirOption = Annotated[
    str | None,
    typer.Option(help="Folder with data sets of tensorflow-datasets, LEAF, PFLlib and others.", show_default=False),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedjax_meta {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Compares methods of federated meta-learning and personalised federated learning.

    `fedjax-meta run quickstart --quick`

    `fedjax-meta list methods`

    `fedjax-meta run STUDY.yaml --dry-run` shows what a study would run and what it would cost.
    """


def _folder(text: str | Path) -> Path:
    """The folder of an option. An empty text is refused: it is most often an unset shell variable, not the current folder."""
    if text == "":
        raise typer.BadParameter("must name a folder, got an empty text")
    return Path(text)


@app.command()
def run(
    study: StudyArgument = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", parser=_folder, help="Folder of the run; a run in this folder is continued.", show_default=False
        ),
    ] = None,
    variant: VariantOption = None,
    quick: QuickOption = False,
    systems: SystemsOption = None,
    dataset: DatasetOption = None,
    partition: PartitionOption = None,
    clients: ClientsOption = None,
    model: ModelOption = None,
    rounds: RoundsOption = None,
    seeds: SeedsOption = None,
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and what it would cost, then stop.")] = False,
    extend: ExtendOption = False,
    devices: DevicesOption = None,
    store: StoreOption = None,
    delta: DeltaOption = None,
    on_divergence: OnDivergenceOption = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Share the run with other processes that use this command and the same --out."),
    ] = False,
    data_dir: DataDirOption = None,
    log: Annotated[
        str | None,
        typer.Option(help="Loggers: tensorboard, wandb, mlflow, trackio or module:Name; separate several with commas."),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Tunes and trains every system of a study, and writes a report.

    `fedjax-meta run study.yaml --out runs/first`

    `fedjax-meta run study.yaml --rounds 20 --seeds 1,2,3 --set federation.cohort_size=5 --dry-run`

    `fedjax-meta run quickstart --quick`

    `fedjax-meta run --systems "fedper(lr=[0.03,0.1]), fedavg(aggregator=median)" --dataset digits --partition iid`
    """
    with one_line_errors(debug):
        if shared and out is None:
            raise ValueError("--shared: processes share a run through its folder, so --out must name the folder")
        chosen = _chosen(
            study,
            variant=variant,
            quick=quick,
            systems=systems,
            dataset=dataset,
            partition=partition,
            clients=clients,
            model=model,
            rounds=rounds,
            seeds=seeds,
            set_=set_,
            extend=extend,
            devices=devices,
            store=store,
            delta=delta,
            on_divergence=on_divergence,
        )
        makes = loggers.made(log) if log else {}
        runtime.use_all_cores()
        built = runs.build(chosen, data_dir)
        if dry_run:
            check(chosen, built)
            if out is not None:
                folders.check_run(chosen, out, built)
        _announce(chosen, built)
        if dry_run:
            _print_estimates(chosen, built)
            return
        folder = out or Path("runs") / f"{study.stem if study else 'systems'}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        command = command_line(folder)
        configs = {name: dataclasses.asdict(chosen.system(name)) for name in chosen.systems}
        parts = partial(folders.part, folder) if shared else None
        with (
            logged(_Lines(chosen, built), folder, makes, configs, folder_of=parts) as watcher,
            _trained(chosen, folder, built, command, watcher, shared) as outcomes,
        ):
            if outcomes is not None:
                _report(chosen, folder, built, outcomes, command)
        where = escape.console(str(folder / "report.html"))
        if outcomes is None:
            console.print(f"\nall systems are finished; another process wrote {where}", soft_wrap=True)
            return
        console.print(f"\nopen {where}; metrics and states are in the same folder", soft_wrap=True)
        if all(trial.diverged is not None for outcome in outcomes for trial in outcome.final):
            errors.print("error: every run diverged", style="red")
            raise typer.Exit(DIVERGED)


@app.command()
def show(
    study: StudyArgument = None,
    variant: VariantOption = None,
    quick: QuickOption = False,
    systems: SystemsOption = None,
    dataset: DatasetOption = None,
    partition: PartitionOption = None,
    clients: ClientsOption = None,
    model: ModelOption = None,
    rounds: RoundsOption = None,
    seeds: SeedsOption = None,
    set_: SetOption = None,
    extend: ExtendOption = False,
    devices: DevicesOption = None,
    store: StoreOption = None,
    delta: DeltaOption = None,
    on_divergence: OnDivergenceOption = None,
    debug: DebugOption = False,
) -> None:
    """Prints a study with all its fields, as YAML that you can run.

    `fedjax-meta show quickstart --quick`

    `fedjax-meta show study.yaml --set rounds=20`

    If a system leaves out an option, it has the default that `fedjax-meta list methods NAME` shows.
    """
    with one_line_errors(debug):
        chosen = _chosen(
            study,
            variant=variant,
            quick=quick,
            systems=systems,
            dataset=dataset,
            partition=partition,
            clients=clients,
            model=model,
            rounds=rounds,
            seeds=seeds,
            set_=set_,
            extend=extend,
            devices=devices,
            store=store,
            delta=delta,
            on_divergence=on_divergence,
        )
        print(to_yaml(chosen), end="")


def _chosen(
    study: Path | None,
    *,
    variant: Sequence[str] | None,
    quick: bool,
    systems: str | None,
    dataset: str | None,
    partition: str | None,
    clients: int | None,
    model: str | None,
    rounds: int | None,
    seeds: str | None,
    set_: Sequence[str] | None,
    extend: bool,
    **fields: Any,
) -> Study:
    """The study that the options of `run` and `show` describe; given `fields` override those of the study."""
    short = [f"rounds={rounds}"] * (rounds is not None) + [f"seeds=[{seeds}]"] * (seeds is not None)
    short += [f"{name}={value}" for name, value in fields.items() if value is not None]
    scenario = flags.scenario(dataset=dataset, partition=partition, clients=clients, model=model)
    variants = [*(variant or ()), *(["quick"] if quick else [])]
    chosen = load(study, [*short, *(set_ or ())], variants=variants, systems=systems, scenario_fields=scenario)
    if rounds is not None and (chosen.tuning.rounds or 0) > rounds:
        chosen = dataclasses.replace(chosen, tuning=dataclasses.replace(chosen.tuning, rounds=rounds))
    if extend and not chosen.tuning.extend:
        chosen = dataclasses.replace(chosen, tuning=dataclasses.replace(chosen.tuning, extend=EXTENSIONS))
    return chosen


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="[SCORE=]NUMBER",
            help="A score to reach, e.g. 80 or user_accuracy=95 (percent) or rmse=0.9; adds rounds, bytes and time to reach it.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Score to compare; by default the main score of the first study that names one.", show_default=False
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="System that the others are compared with; by default the first system.", show_default=False),
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Also write the comparison to a file: .md, .csv or .html.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Compares the systems of finished runs with a reference system, by seed and by client.

    `fedjax-meta compare runs/first runs/second --target 80 --out page.html`

    `fedjax-meta compare runs/first --reference fedavg --out table.csv`
    """
    with one_line_errors(debug):
        for path in out or ():
            comparison.check_path(path)
        goal = None if target is None else targets.target(target)
        groups = comparing.by_scenario(comparing.finished(folders, score=metric), reference=reference, target=goal)
        for rows in groups:
            for table in comparison.tables(rows):
                _print_table(table)
            console.print(escape.console(" ".join(comparison.notes(rows))), style="dim")
        for path in out or ():
            comparison.write(path, groups)


@app.command("export")
def export_(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    system: Annotated[str, typer.Option(help="Name of the system in the study.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write, e.g. client3.safetensors.")],
    client: Annotated[
        str | None, typer.Option(help="Number or name of a known client; by default the server's model.", show_default=False)
    ] = None,
    new_client: Annotated[
        str | None, typer.Option(help="Number or name of a client that never trained.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the run; by default the first seed of the study.", show_default=False)
    ] = None,
    scenario: Annotated[str | None, typer.Option(help="Scenario, if the study has several.", show_default=False)] = None,
    data_dir: DataDirOption = None,
    debug: DebugOption = False,
) -> None:
    """Writes a trained model to a safetensors file. Flax, PyTorch and NumPy can read it.

    `fedjax-meta export runs/first --system fedper --out server.safetensors`

    `fedjax-meta export runs/first --system fedper --client 3 --out c3.safetensors`
    """
    with one_line_errors(debug):
        wanted = {"scenario": scenario, "seed": seed, "client": client, "new_client": new_client, "data_dir": data_dir}
        found = of_run(folder, system, **wanted)  # type: ignore[arg-type]
        export.save(out, found.variables, found.about)
        if found.about["diverged"] is not None:
            errors.print(f"this run diverged at round {found.about['diverged']}", style="yellow")
        size = costs.size_in_bytes(found.variables)
        console.print(escape.console(f"{out}: {found.about['client']}, {found.about['system']}, {placement.amount(size)}"))


@app.command("runs")
def runs_(
    folder: Annotated[Path, typer.Argument(help="Folder that contains runs.")] = Path("runs"),
    debug: DebugOption = False,
) -> None:
    """Lists the runs in a folder: title, date, state and the best system of each scenario.

    `fedjax-meta runs`

    `fedjax-meta runs /scratch/runs`
    """
    with one_line_errors(debug):
        found = folders.index(folder)
        for one in found:
            when = f"{one.started[:16].replace('T', ' ')}  " if one.started else ""
            console.print(f"[bold]{escape.console(str(one.folder))}[/bold]  {when}{escape.console(one.state)}", soft_wrap=True)
            if one.title:
                console.print(f"  {escape.console(one.title)}")
            for scenario, system, value in one.best:
                console.print(f"  {escape.console(f'{scenario}: best is {system}, {value} over known clients')}")
        if not found:
            console.print(f"{escape.console(str(folder))} contains no runs")


@app.command()
def preset(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    to: Annotated[Path, typer.Option(help="Folder for the presets.")] = presets.HERE,
    name: Annotated[
        str | None, typer.Option(help="Name for the preset, if the run has a single scenario.", show_default=False)
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Saves the tuned values of a run as presets. Studies in this folder use them by name.

    `fedjax-meta preset runs/first`

    `fedjax-meta preset runs/first --to presets --name pairs`

    To use a preset, write `preset: mnist_small-pairs/fedavg` in a system.
    """
    with one_line_errors(debug):
        for path in presets.save(run, to, name):
            for system, found in presets.read(path, path.stem).items():
                console.print(escape.console(f"{path.stem}/{system}  {found}"), soft_wrap=True)


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(help="What to list: studies, methods, partitions, models, masks, shifts, parts, datasets or presets."),
    ] = "methods",
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Name of a method, partition, model, shift or part, or `module:name`: lists its options.",
            show_default=False,
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Lists names that a study can use, with one line each, or the options of one name.

    `fedjax-meta list partitions`

    `fedjax-meta list methods fedper`
    """
    kinds: dict[str, Callable[[], Mapping[str, tuple[str, str]]]] = {
        "studies": lambda: {name: (_title(text), "") for name, text in files.packaged().items()},
        "methods": lambda: {name: about(builder) for name, builder in METHODS.items()},
        "partitions": lambda: descriptions.PARTITIONS,
        "models": lambda: descriptions.MODELS,
        "masks": lambda: {name: (words, "") for name, words in catalogue.MASKS.items()},
        "shifts": lambda: descriptions.SHIFTS,
        "parts": lambda: descriptions.PARTS,
        "datasets": lambda: descriptions.DATASETS,
        "presets": lambda: {name: (str(found), found.commit) for name, found in presets.known().items()},
    }
    with one_line_errors(debug):
        checks.one_of("what to list", what, kinds)
        if name is None:
            found = catalogue.lines(dict(kinds[what]()), wrap=what in ("studies", "presets"))
        else:
            found = catalogue.options(what, name, width=console.width)
        for line in found:
            console.print(escape.console(line), soft_wrap=True, highlight=False)
        if what == "datasets":
            console.print(descriptions.PREPARED_NOTE, style="dim")


def _title(text: str) -> str:
    tree = files.parsed(text)
    names = ", ".join(tree.get("variants") or ())
    return f"{tree['title']}{f' (variants: {names})' if names else ''}"


def _announce(study: Study, built: Mapping[str, Clients]) -> None:
    """What will run: clients, parameters, bytes and programs."""
    for scenario, clients in built.items():
        new = 0 if clients.new is None else clients.new.num_clients
        console.print(
            f"[bold]{escape.console(scenario)}[/bold]: {escape.console(clients.title)}; "
            f"{clients.train.num_clients} known, {new} new; {clients.targets}",
            soft_wrap=True,
        )
        # The line above says what the targets are, too.
        note = "; ".join(part for part in clients.note.split("; ") if not part.startswith((f"{LABELS}, ", f"{REAL}, ")))
        if note:
            console.print(escape.console(note), style="dim", soft_wrap=True)
        rows = []
        for name in study.systems_on(scenario):
            system = study.system(name, scenario)
            with named(study, scenario, name):
                points = points_of(system)
                algorithm = system.build(clients, **points[0])
                bytes_ = costs.traffic(algorithm, clients.train)
                sent = sum(leaf.size for leaf in jax.tree.leaves(algorithm.exchange(clients.train)[0]))
                state = jax.eval_shape(algorithm.init, jax.random.key(0), clients.train)
            model = sum(leaf.size for leaf in jax.tree.leaves(state.model))
            own = sum(leaf.size for leaf in jax.tree.leaves((state.personal, state.memory))) // clients.train.num_clients
            total = rounds_of_trials(len(points), study) + study.rounds * len(study.seeds)
            down, up = ("" if system.pooled else placement.amount(value) for value in bytes_)
            if system.pooled:
                total = round(total * passes(system, clients, clients.train))
            sizes = (f"{count:,}" for count in (model, 0 if system.pooled else sent, own))
            more = " or more" if len(points) > 1 and study.tuning.extend else ""  # a grid that moves on has more points
            rows.append([study.title_of(name), *sizes, down, up, str(len(points)), f"{total:,}{more}"])
        headings = ("system", "model", "shared", "personal", "download", "upload", "grid", "rounds in all")
        _print_table(report.Table(headings, rows))
        for name in study.systems_on(scenario):
            said = guarantees.said(study, scenario, name, clients, study.rounds)
            if said:
                console.print(escape.console(f"{study.title_of(name)}: {said} in {study.rounds} rounds"), soft_wrap=True)


def _print_estimates(study: Study, built: Mapping[str, Clients]) -> None:
    """What a study will cost, measured on one round of each system."""
    devices, total = study.devices or len(runtime.default_devices()), 0.0
    for scenario, clients in built.items():
        rows = []
        for name in study.systems_on(scenario):
            with console.status(f"one round of {escape.console(study.title_of(name))}"):
                found = estimate.of_system(study, scenario, name, clients)
            total += found.seconds(devices)
            numbers = (f"{found.flops:.2g}", f"{found.memory / 1e6:.1f} MB", str(found.programs))
            times = (f"{1e3 * found.round_seconds:.1f} ms", f"{found.seconds(devices):.0f} s")
            rows.append([study.title_of(name), *numbers, *times])
        headings = ("system", "FLOPs", "memory", "programs", "a round", "in all")
        _print_table(report.Table(headings, rows, f"{scenario}: what it will cost"))
    console.print(
        f"About {max(total / 60, 0.1):.1f} minutes in all on {devices} device{'s' * (devices > 1)}, without tests and the "
        "report. To measure this, one round of each system was compiled and run here on one device. FLOPs: matrix products and "
        "convolutions of one client, counted in that round. Memory: the states of the largest sweep, and what its rounds need "
        "in addition.",
        style="dim",
    )


def _report(study: Study, folder: Path, built: Mapping[str, Clients], outcomes: list[runs.Outcome], command: str) -> None:
    """Prints and writes what a run found."""
    built, outcomes = draws.pooled(study, built, outcomes)
    found = results.tables(study, built, outcomes)
    for scenario, of_scenario in built.items():
        whole, kind = results.table(found[scenario]), found[scenario][0].kind
        title = f"{scenario}: {of_scenario.title}. {kind.label}{kind.direction}"
        _print_table(whole.only(results.SCORES)._replace(title=title))
        others = results.other_scores(found[scenario])
        if others.rows:
            _print_table(others)
        _print_table(whole.only(results.HOW)._replace(title="How they were run"))
    for one in summary.tables(study, outcomes):
        _print_table(one)
    console.print(escape.console(results.explanation(study, found)), style="dim")
    series = _series(study, outcomes)
    scores = list(dict.fromkeys(one.kind.name for one in series))
    for score in scores:
        name = "figure.png" if len(scores) == 1 else f"figure-{score}.png"
        report.save_figure(folder / name, [one for one in series if one.kind.name == score], title=study.title)
    page.write_all(folder, study, built, outcomes, command, found=found)
    finished = {path.name.partition(".")[0] for path in (folder / "results").glob("*/*.final.json")}
    left = ", ".join(sorted(finished - set(study.systems)))
    if left:
        text = (
            f"This report leaves out {left}, although the folder has their results; so do compare and export. Run all systems to "
            "include them."
        )
        console.print(escape.console(text), soft_wrap=True)


@contextlib.contextmanager
def _trained(
    study: Study, folder: Path, built: Mapping[str, Clients], command: str, watcher: runs.Watcher, shared: bool
) -> Iterator[list[runs.Outcome] | None]:
    """Runs a study, or shares in a run. The first SIGINT or SIGTERM saves the run and ends it; a second one ends it at once."""
    numbers: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        numbers.append(number)
        if len(numbers) > 1:
            raise Interrupted(number)

    options: dict[str, Any] = {"watcher": watcher, "clients": built, "command": command, "should_stop": lambda: bool(numbers)}
    with contextlib.ExitStack() as stack:
        try:
            with signals(on_signal):
                if shared:
                    outcomes = stack.enter_context(runs.shared(study, folder, **options))
                else:
                    outcomes = runs.run(study, folder, **options)
        except runs.Stopped as stop:
            raise Stopped(f"stopped in {stop}; everything is saved. Continue with: {command}", numbers[0]) from None
        yield outcomes


def _print_table(table: report.Table) -> None:
    console.print(report.rich_table(table.title, table.headings, table.rows))
    console.print()


def _series(study: Study, outcomes: Sequence[runs.Outcome]) -> list[report.Series]:
    """For the figure: the final runs, one scenario after the other."""
    many = len(study.scenarios) > 1
    return [
        report.series(
            study.title_of(one.system),
            f"{one.scenario}, {group}" if many else group,
            # Draws have the same seeds: their runs are numbered.
            number if study.data_seeds else trial.seed,
            trial.rows,
            group,
            study.score,
            run=KNOWN,
        )
        for one in outcomes
        for number, trial in enumerate(one.final)
        for group in (KNOWN, NEW)
        if group in trial.rows[-1]["tests"] and baselines.trained(group, baselines.alone(study, one.system))
    ]


class _Lines(runs.Watcher):
    """One line for each sweep in progress, renewed in place on a terminal; one line for each evaluation elsewhere."""

    def __init__(self, study: Study, built: Mapping[str, Clients]) -> None:
        self._study, self._built = study, built
        self._what, self._rounds, self._started, self._first, self._members = "", 0, 0.0, 0, 0
        self._shown, self._system, self._spent = 0.0, ("", ""), ""

    def begin(self, scenario: str, system: str, phase: str, members: int, rounds: int, done: int) -> None:
        self._what = f"{scenario}, {self._study.title_of(system)}, {phase} ({members} run{'' if members == 1 else 's'})"
        self._rounds, self._started, self._first, self._members = rounds, time.perf_counter(), done, members
        self._system, self._spent = (scenario, system) if phase == "final" else ("", ""), ""
        self._say(f"{self._what}: compiling")

    def progress(self, done: int, metrics: Mapping[str, np.ndarray]) -> None:
        pace = (time.perf_counter() - self._started) / max(done - self._first, 1)
        loss = f", loss {np.mean(metrics['loss'][:, -1]):.3f}" if "loss" in metrics else ""
        self._say(f"{self._what}: round {done}/{self._rounds}{loss}, {pace * (self._rounds - done):.0f} s left{self._spent}")

    def record(self, done: int, records: Sequence[Record]) -> None:
        scenario, system = self._system
        said = guarantees.said(self._study, scenario, system, self._built[scenario], done) if system else ""
        self._spent = f"; after round {done}: {said}" if said else ""
        if not console.is_terminal:
            fewer = f", {len(records)} left" if len(records) < self._members else ""
            console.print(escape.console(f"{self._what}: round {done}/{self._rounds}{fewer}{f'; {said}' if said else ''}"))

    def end(self, outcome: runs.Outcome) -> None:
        found = results.by_client(outcome.final, KNOWN, self._study.score)
        mean, unit = float(found.values.mean()), " %" if found.kind.share else ""
        score = "diverged" if np.isnan(mean) else f"{found.kind.words} {found.kind.text(mean)}{unit}"
        numbers = ", ".join(f"{name}={value:g}" for name, value in outcome.chosen.items())
        title = f"{outcome.scenario}, {self._study.title_of(outcome.system)}"
        self._clear()
        console.print(escape.console(f"{title}: {score}{f' at {numbers}' if numbers else ''}"))

    def wait(self, others: Sequence[tuple[str, str]]) -> None:
        names = ", ".join(f"{scenario}, {self._study.title_of(system)}" for scenario, system in others)
        self._clear()
        console.print(escape.console(f"waiting for systems that other processes train: {names}"))

    def _say(self, text: str) -> None:
        now = time.perf_counter()
        if console.is_terminal and now - self._shown > 0.2:
            self._shown = now
            sys.stdout.write("\r\x1b[2K" + text[: console.width - 1])
            sys.stdout.flush()

    def _clear(self) -> None:
        if console.is_terminal:
            sys.stdout.write("\r\x1b[2K")
