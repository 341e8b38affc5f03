"""The command `fedjax-meta`, also `python -m fedjax_meta`: run, show and list."""

import contextlib
import dataclasses
import functools
import inspect
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer

from fedjax_meta import __version__, checks, escape, export, loggers, placement, runtime
from fedjax_meta.builders import about
from fedjax_meta.methods import METHODS
from fedjax_meta.process import Interrupted, Stopped, command_line, console, errors, one_line_errors, signals
from fedjax_meta.study import (
    catalogue,
    comparison,
    descriptions,
    draws,
    files,
    flags,
    index,
    page,
    presets,
    results,
    targets,
    terminal,
)
from fedjax_meta.study import clients as holdings
from fedjax_meta.study import compare as comparing
from fedjax_meta.study import folder as folders
from fedjax_meta.study import run as runs
from fedjax_meta.study.check import check
from fedjax_meta.study.export import of_run
from fedjax_meta.study.loggers import logged
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study, load, to_yaml

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False, no_args_is_help=True)

EXTENSIONS = 4
"""How often `--extend` extends a grid if the study does not say it."""

DIVERGED = 3
"""Exit code when every run diverged."""

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
    try:
        str(text).encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"must be UTF-8, because reports name the folder; got {str(text)!a}") from None
    return Path(text)


class Asked(NamedTuple):
    """What the options of a command ask for: a study, and what a folder of its runs is called."""

    study: Study
    name: str


def _asked(
    study: Annotated[
        Path | None,
        typer.Argument(
            metavar="[STUDY]",
            help="A YAML file, or the name of a study of the package (see `list studies`).",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="A named variant of the study, e.g. `quick`; can be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Same as `--variant quick`.")] = False,
    systems: Annotated[
        str | None,
        typer.Option(
            metavar="NAME(KEY=VALUE,...),...",
            help="Run only these systems of the study. Without a study: methods with their options.",
            show_default=False,
        ),
    ] = None,
    scenarios: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Only these scenarios of the study.", show_default=False),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Data set for all scenarios, without augmentation; see `list datasets`.", show_default=False),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="NAME(KEY=VALUE,...)",
            help="How all scenarios divide samples among clients; see `list partitions`.",
            show_default=False,
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients in all scenarios.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME(KEY=VALUE,...)", help="Model for all scenarios; see `list models`.", show_default=False),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Same as `--set rounds=N`; also limits tuning trials.", show_default=False)
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Same as `--set seeds=[...]`, e.g. 1,2,3.", show_default=False)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Override a field, e.g. `rounds=20` or `systems.fedavg.options.epochs=5`."
        ),
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help=f"Extend a grid, up to {EXTENSIONS} times, while its best value is at its end.")
    ] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices that share the work; by default all.", show_default=False)
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Where to keep client state: `device`, `host` (its memory) or `disk`.", show_default=False),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta at which to state the epsilon of systems with noise; by default N^-1.1 for N clients.",
            show_default=False,
        ),
    ] = None,
    on_divergence: Annotated[
        str | None,
        typer.Option(
            help="What to do when a run diverges: `continue` (default), or `stop` at the next evaluation.",
            show_default=False,
        ),
    ] = None,
) -> Asked:
    """What the options of `run`, `show` and `clients` describe."""
    named = str(study).partition("(")[0]
    if named in METHODS and str(study) not in files.packaged() and not Path(named).exists():
        raise ValueError(f"{study} is a method and no study: give --systems '{study}' and --dataset, or see list studies")
    fields = {"devices": devices, "store": store, "delta": delta, "on_divergence": on_divergence}
    short = [f"rounds={rounds}"] * (rounds is not None) + [f"seeds=[{seeds}]"] * (seeds is not None)
    short += [f"{name}={value}" for name, value in fields.items() if value is not None]
    scenario = flags.scenario(dataset=dataset, partition=partition, clients=clients, model=model)
    variants = [*(variant or ()), *(["quick"] if quick else [])]
    overrides = [*short, *(set_ or ())]
    chosen = load(study, overrides, variants=variants, systems=systems, scenarios=scenarios, scenario_fields=scenario)
    if rounds is not None and (chosen.tuning.rounds or 0) > rounds:
        chosen = dataclasses.replace(chosen, tuning=dataclasses.replace(chosen.tuning, rounds=rounds))
    if extend and not chosen.tuning.extend:
        chosen = dataclasses.replace(chosen, tuning=dataclasses.replace(chosen.tuning, extend=EXTENSIONS))
    return Asked(chosen, study.stem if study else "systems")


_OF_CLIENTS = ("study", "variant", "quick", "scenarios", "dataset", "partition", "clients", "model", "set_")
"""The options of `_asked` that clients depend on."""


def _of_a_study(command: Callable[..., None], *, only: Collection[str] = ()) -> Callable[..., None]:
    """Gives a command the options of `_asked`, whose result becomes its first argument, and `--debug`.

    Args:
      command: that asks for a study.
      only: these options, by their names in Python; all when empty.
    """
    described = {name: one for name, one in inspect.signature(_asked).parameters.items() if not only or name in only}
    _, *own = inspect.signature(command).parameters.values()
    debug = inspect.Parameter("debug", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=DebugOption)
    study, *options = described.values()
    # In the order of --help.
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (study, *own, *options, debug)]

    @functools.wraps(command)
    def with_options(*, debug: bool, **given: Any) -> None:
        with one_line_errors(debug):
            options = {option: given.pop(option) for option in described}
            if "systems" not in described and options["study"] is None:
                options["systems"] = "fedavg"  # a study has one; which one changes no client
            command(_asked(**options), **given)

    # Typer reads the options from these.
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


@app.command()
@_of_a_study
def run(
    asked: Asked,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", parser=_folder, help="Folder of the run; a run in this folder is continued.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and what it would cost, then stop.")] = False,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Share the run with other processes that use this command and the same --out."),
    ] = False,
    data_dir: DataDirOption = None,
    log: Annotated[
        str | None,
        typer.Option(help="Loggers: tensorboard, wandb, mlflow, trackio or module:Name; separate several with commas."),
    ] = None,
) -> None:
    """Tunes and trains every system of a study, and writes a report.

    `fedjax-meta run study.yaml --out runs/first`

    `fedjax-meta run study.yaml --rounds 20 --seeds 1,2,3 --set federation.cohort_size=5 --dry-run`

    `fedjax-meta run quickstart --quick`

    `fedjax-meta run --systems "fedper(lr=[0.03,0.1]), fedavg(aggregator=median)" --dataset digits --partition iid`
    """
    chosen = asked.study
    if shared and out is None:
        raise ValueError("--shared: processes share a run through its folder, so --out must name the folder")
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is no folder")
    makes = {} if log is None else loggers.made(log)
    runtime.use_all_cores()
    built = runs.build(chosen, data_dir)
    if dry_run:
        check(chosen, built)
        if out is not None:
            runs.check_folder(chosen, out, built)
    terminal.announce(chosen, built)
    if dry_run:
        terminal.estimates(chosen, built)
        return
    folder = out or Path("runs") / f"{asked.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    command = command_line(folder)
    configs = {system: dataclasses.asdict(chosen.system(system)) for system in chosen.systems}
    parts = functools.partial(folders.part, folder) if shared else None
    with (
        terminal.lines(chosen, built) as shown,
        logged(shown, folder, makes, configs, folder_of=parts) as watcher,
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
@_of_a_study
def show(asked: Asked) -> None:
    """Prints a study with all its fields, as YAML that you can run.

    `fedjax-meta show quickstart --quick`

    `fedjax-meta show study.yaml --set rounds=20`

    If a system leaves out an option, it has the default that `fedjax-meta list methods NAME` shows.
    """
    print(to_yaml(asked.study), end="")


@app.command()
@functools.partial(_of_a_study, only=_OF_CLIENTS)
def clients(
    asked: Asked,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw a picture: .png, .pdf or .svg; several scenarios add their names.",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Shows which samples the clients of a study have: sizes and classes of every view, and a picture.

    `fedjax-meta clients quickstart --out clients.png`

    `fedjax-meta clients --dataset mnist_small --partition "dirichlet_classes(concentration=0.3)" --out clients.png`

    Without a study, it shows the clients of a data set. Reports of runs have the same table and picture, without sample images.
    """
    scenarios = asked.study.scenarios
    paths = {name: _of_scenario(out, name, several=len(scenarios) > 1) for name in scenarios} if out else {}
    for path in paths.values():
        checks.writable("--out", path, endings=checks.FIGURES)
    for name, built in runs.build(asked.study, data_dir).items():
        terminal.table(holdings.table(name, built))
        console.print(f"targets: {escape.console(built.targets)}", style="dim", soft_wrap=True)
        if built.note:
            console.print(escape.console(built.note), style="dim", soft_wrap=True)
        if out:
            holdings.save(paths[name], built, images=True)
            console.print(f"picture: {escape.console(str(paths[name]))}", soft_wrap=True)


def _of_scenario(path: Path, scenario: str, *, several: bool) -> Path:
    return path.with_name(f"{path.stem}-{scenario.replace('/', '-')}{path.suffix}") if several else path


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
        for path in out or ():  # before a reader such as `head` ends the command
            comparison.write(path, groups)
        for rows in groups:
            for table in comparison.tables(rows):
                terminal.table(table)
            console.print(escape.console(" ".join(comparison.notes(rows))), style="dim")


@app.command("export")
def export_(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    system: Annotated[str, typer.Option(help="Name of the system in the study.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write, e.g. client3.safetensors.")],
    client: Annotated[
        str | None,
        typer.Option(help="Name of a known client, or its number; by default the server's model.", show_default=False),
    ] = None,
    new_client: Annotated[
        str | None, typer.Option(help="Name of a client that never trained, or its number.", show_default=False)
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
        found = of_run(folder, system, layout="flax", **wanted)  # type: ignore[arg-type]
        export.save(out, found.variables, found.about)
        if found.about["diverged"] is not None:
            errors.print(f"this run diverged at round {found.about['diverged']}", style="yellow")
        size = runtime.size_in_bytes(found.variables)
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
        found = index.runs_in(folder)
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


def _report(study: Study, folder: Path, built: Mapping[str, Clients], outcomes: list[runs.Outcome], command: str) -> None:
    """Prints and writes what a run found."""
    built, outcomes = draws.pooled(study, built, outcomes)
    found = results.tables(study, built, outcomes)
    terminal.outcome(study, built, outcomes, found)
    page.write_all(folder, study, built, outcomes, command, found=found)
    terminal.left_out(study, folder)


@contextlib.contextmanager
def _trained(
    study: Study, folder: Path, built: Mapping[str, Clients], command: str, watcher: runs.Watcher, shared: bool
) -> Iterator[list[runs.Outcome] | None]:
    """Runs a study, or shares in a run. The first SIGINT, SIGTERM or SIGHUP saves the run and ends it; a second ends it at once.

    When a terminal is closed, the kernel and the shell both send SIGHUP, so that a second one says nothing.
    """
    numbers: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        numbers.append(number)
        if len(numbers) > 1 and signal.Signals(number).name != "SIGHUP":
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
        try:
            if numbers:  # it came after the last round
                raise Interrupted(numbers[0])
            yield outcomes
        except KeyboardInterrupt as stop:
            number = getattr(stop, "number", signal.SIGINT)
            raise Stopped(f"stopped while the report was written. Write it with: {command}", number) from None
