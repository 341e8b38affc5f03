"""What every experiment shares: devices, compile cache, runs with progress and checkpoints, resuming, errors in one line."""

import contextlib
import functools
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

import fedjax_meta as fm
from fedjax_meta import checkpoint, checks, report
from fedjax_meta.simulate import Evaluator, Record, simulate

console = Console()
errors = Console(stderr=True)

OutOption = Annotated[
    Path | None, typer.Option(help="Folder of this run; a new one under runs/ when not given.", show_default=False)
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Where tensorflow-datasets keeps prepared sets; FEDJAX_META_DATA_DIR, TFDS_DATA_DIR or ~/tensorflow_datasets "
        "when not given.",
        show_default=False,
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it stopped.")]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Devices that share a round; all by default, a CPU's cores each being one, but no more than a round has clients.",
        show_default=False,
    ),
]
CacheOption = Annotated[
    bool, typer.Option("--compile-cache/--no-compile-cache", help="Keep compiled programs in the user's cache folder.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


class Test(NamedTuple):
    """What is measured after a training run, under one name of the report.

    Attributes:
      title: of the system.
      clients: which clients it is measured on.
      evaluator: see `simulate.Evaluator`.
    """

    title: str
    clients: str
    evaluator: Evaluator


class Plan(NamedTuple):
    """One training run, and the tests of all systems that share it.

    Attributes:
      name: of its folder; unique in an experiment.
      title: what the progress display shows.
      algorithm: what trains.
      data: on what.
      tests: by key of the metrics, e.g. "fedper/local".
      rounds, eval_every, seed, store: see `simulate.simulate`.
      config: what a resumed run must have in common with the one it goes on with, as JSON values.
    """

    name: str
    title: str
    algorithm: fm.Algorithm
    data: fm.FederatedData
    tests: dict[str, Test]
    rounds: int
    eval_every: int
    seed: int
    config: dict[str, Any]
    store: str | None = None


class Stopped(Exception):  # noqa: N818 - it is no error
    """The user stopped the experiment; the message says what is saved."""


@contextlib.contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns the errors that a user can do something about into one line on stderr and exit code 1; 130 when interrupted."""
    try:
        yield
    except Stopped as stop:
        errors.print(Text(str(stop), style="yellow"), soft_wrap=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        errors.print(Text("stopped; what was saved before is still there", style="yellow"))
        raise typer.Exit(130) from None
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        if debug:
            raise
        errors.print(Text(f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}"), soft_wrap=True)
        raise typer.Exit(1) from None


def prepare(devices: int | None, compile_cache: bool, *, cohort_size: int) -> int:
    """Sets JAX up; to be called before anything is computed. Returns how many devices share a round.

    `import fedjax_meta` has made a device of every core of a CPU; more are made here where they are asked for.
    """
    settings: Any = jax.config
    if devices is not None and settings.jax_num_cpu_devices < devices:
        jax.config.update("jax_num_cpu_devices", devices)
    if not compile_cache:
        jax.config.update("jax_enable_compilation_cache", False)
    available = len(jax.devices())
    if devices is not None and devices > available:
        raise ValueError(f"--devices {devices}, but JAX sees {available} ({jax.devices()[0].platform})")
    return devices or min(available, cohort_size)


def open_folder(out: Path | None, default: str, *, resume: bool, options: Mapping[str, Any]) -> Path:
    """The folder of the experiment, with `config.json` in it.

    Raises:
      ValueError: `--resume` without a folder that has something to resume, or a folder in use without it.
      OSError: the folder cannot be written.
    """
    if resume and out is None:
        raise ValueError("--resume needs --out DIR, the folder of the run to go on with")
    folder = out if out is not None else Path("runs") / f"{default}-{datetime.now():%Y%m%d-%H%M%S}"
    if resume and not (folder / "config.json").is_file():
        raise ValueError(f"there is no run to resume in {folder} (no config.json)")
    if not resume and (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a run already: add --resume to go on with it, or give another --out")
    if resume:
        return folder  # its config.json says how it began
    versions = {"python": platform.python_version(), "jax": jax.__version__, "fedjax_meta": fm.__version__}
    device = f"{jax.devices()[0].device_kind} x {jax.device_count()}"
    config = {"options": dict(options), "versions": versions, "device": device, "command": command_line(folder)}
    checkpoint.write_text(folder / "config.json", json.dumps(config, indent=2, default=str) + "\n")
    return folder


def command_line(folder: Path, *, resume: bool = False) -> str:
    """The command that runs this experiment in `folder`, for a shell."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else ["python", sys.argv[0]]
    given = [word for word in sys.argv[1:] if word != "--resume"]
    if not any(word == "--out" or word.startswith("--out=") for word in given):
        given += ["--out", str(folder)]
    return shlex.join([*program, *given, *(["--resume"] if resume else [])])


def run_all(plans: Sequence[Plan], folder: Path, *, resume: bool) -> dict[str, list[dict[str, Any]]]:
    """Trains every plan, saves after every evaluation, and returns the rows of each (see `report.compact`) by plan name.

    Rows and options of finished runs are in `metrics.json` as soon as they are there.

    Raises:
      Stopped: on Ctrl-C.
      ValueError, OSError: see `checkpoint`.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    started = time.perf_counter()
    with _display(len(plans)) as display:
        for number, plan in enumerate(plans, 1):
            try:
                results[plan.name] = _run(plan, folder / "state" / plan.name, display, number, resume=resume)
            except KeyboardInterrupt:
                saved = checkpoint.latest_round(folder / "state" / plan.name)
                where = f"round {saved} of {plan.title!r}" if saved else "the runs before it"
                raise Stopped(
                    f"stopped in run {number} of {len(plans)}; saved up to {where}. Go on with:\n"
                    f"  {command_line(folder, resume=True)}"
                ) from None
            save_metrics(folder, plans, results)
    console.print(f"[dim]{len(plans)} training runs in {_clock(time.perf_counter() - started)}[/dim]")
    return results


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table with as many of its columns, from the left, as the terminal has room for; all of them into a file."""
    whole = Console(file=console.file, width=max(console.width, 160)) if not console.is_terminal else console
    for count in range(len(headings), 1, -1):
        table = report.rich_table(title, headings[:count], [row[:count] for row in rows])
        if Measurement.get(whole, whole.options.update(width=1000), table).maximum <= whole.width:
            break
    whole.print(table)
    if count < len(headings):
        whole.print("[dim]A wider terminal shows more columns; all are in report.md.[/dim]")


def save_metrics(folder: Path, plans: Sequence[Plan], results: Mapping[str, list[dict[str, Any]]]) -> None:
    """Writes `metrics.json`: one object a training run, with its config and rows."""
    runs = [
        {"name": plan.name, "seed": plan.seed, "config": plan.config, "rows": results[plan.name]}
        for plan in plans
        if plan.name in results
    ]
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs)
    checkpoint.write_text(folder / "metrics.json", f'{{"format": 1, "runs": [\n{lines}\n]}}\n')


def all_series(plans: Sequence[Plan], results: Mapping[str, list[dict[str, Any]]]) -> list[report.Series]:
    """The series of every test of every plan, in the order of the plans."""
    return [
        report.series(test.title, test.clients, plan.seed, results[plan.name], key)
        for plan in plans
        for key, test in plan.tests.items()
    ]


def times(results: Mapping[str, list[dict[str, Any]]]) -> tuple[float, float]:
    """(seconds of training and testing, seconds of compilation) of all runs."""
    rows = [row for run in results.values() for row in run]
    return sum(row["seconds"] for row in rows), sum(row["compile_seconds"] for row in rows)


def _run(plan: Plan, folder: Path, display: "_Display", number: int, *, resume: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    state = None
    if resume:
        key = jax.random.key(plan.seed)
        like = fm.store.shapes(plan.algorithm, key, plan.data)
        saved = checkpoint.restore(folder, like, plan.config, on_damage=lambda line: errors.print(Text(f"warning: {line}")))
        if saved is not None:
            rows, state = saved.records, saved.state
    display.begin(plan, number, rows)
    if not rows or rows[-1]["round"] < plan.rounds:

        def on_record(state: fm.State, record: Record) -> None:
            rows[:] = [*map(report.without_confusion, rows), report.compact(record)]
            checkpoint.save(folder, state, rows, plan.config)
            display.record(rows[-1])

        simulate(
            plan.algorithm,
            plan.data,
            key=jax.random.key(plan.seed),
            rounds=plan.rounds,
            eval_every=plan.eval_every,
            evaluators={key: test.evaluator for key, test in plan.tests.items()},
            state=state,
            store=plan.store,
            on_record=on_record,
            on_progress=display.progress,
        )
    display.end(rows)
    return rows


class _Display:
    """The live line of the run that is going on, and one line for each that is done."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self._bar = progress
        self._runs = runs
        self._task = TaskID(-1)
        self._plan: Any = None
        self._compiling = self._pause = 0.0
        self._first = 0
        self._clock: float | None = None

    def begin(self, plan: Plan, number: int, rows: list[dict[str, Any]]) -> None:
        self._plan, self._compiling = plan, 0.0
        done = rows[-1]["round"] if rows else 0
        self._first, self._clock, self._pause = done, None, 0.0
        self._task = self._bar.add_task(
            f"{number}/{self._runs} {plan.title}",
            total=plan.rounds,
            completed=done,
            loss="",
            score="",
            left="",
            state="compiling",
        )
        if rows:
            self._bar.update(self._task, score=_score(rows[-1], plan))

    def progress(self, done: int, metrics: Mapping[str, np.ndarray]) -> None:
        now = time.perf_counter()
        left = ""
        if self._clock is None:
            self._first, self._clock = done, now
        else:
            pace = (now - self._clock - self._pause) / max(done - self._first, 1)
            left = _clock(pace * (self._plan.rounds - done))
        loss = f"{metrics['loss'][-1]:.3f}" if "loss" in metrics else ""
        self._bar.update(self._task, completed=done, loss=loss, left=left)

    def record(self, row: dict[str, Any]) -> None:
        self._compiling += row["compile_seconds"]
        if row["round"] == 1 and self._clock is not None:
            self._pause = time.perf_counter() - self._clock  # the first test is compiled between round 1 and the others
        self._bar.update(self._task, score=_score(row, self._plan), state=f"compiled in {self._compiling:.0f} s")

    def end(self, rows: list[dict[str, Any]]) -> None:
        trained, compiled = times({"": rows})
        text = (
            f"{self._plan.title}: {_score(rows[-1], self._plan)}  [dim]{_clock(trained)}, compiled in {_clock(compiled)}[/dim]"
        )
        self._bar.update(self._task, visible=False)
        self._bar.console.print(text, soft_wrap=True)


def _score(row: Mapping[str, Any], plan: Plan) -> str:
    """The accuracy of the plan's first system on each group of clients."""
    first: dict[str, str] = {}
    for key, test in plan.tests.items():
        first.setdefault(test.clients, f"{test.clients} {100 * row['tests'][key]['scores']['accuracy']:.1f} %")
    measured = row["train"].get("user_accuracy")
    return ", ".join([*([f"UA {100 * measured[-1]:.1f} %"] if measured else []), *first.values()])


@contextlib.contextmanager
def _display(runs: int) -> Iterator[_Display]:
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *([BarColumn(bar_width=16)] if console.width >= 120 else []),
        TextColumn("round {task.completed}/{task.total}"),
        TimeElapsedColumn(),
        _Fields(table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    ]
    with Progress(*columns, console=console, transient=True, refresh_per_second=4, expand=True) as progress:
        yield _Display(progress, runs)


class _Fields(TextColumn):
    """Those of accuracy, loss, time left and compile time that are known, the most wanted first."""

    def __init__(self, table_column: Column) -> None:
        super().__init__("", table_column=table_column)

    def render(self, task: Task) -> Text:
        known = task.fields
        parts = [
            known["score"],
            known["loss"] and f"loss {known['loss']}",
            known["left"] and f"{known['left']} left",
            known["state"],
        ]
        return Text(" | ".join(part for part in parts if part))


def _clock(seconds: float) -> str:
    """A time as people say it.

    Example:
      >>> _clock(7.26), _clock(75), _clock(3720)
      ('7.3 s', '1 min 15 s', '1 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def evaluator(algorithm: fm.Algorithm, data: Any, *, devices: int | None, **options: Any) -> Evaluator:
    """An `Evaluator` of `evaluate.evaluate`; `options` are its."""
    measure = functools.partial(fm.evaluate.evaluate, algorithm, devices=devices, **options)
    return Evaluator(measure, data, known=options.get("known", True))


def numbers(text: str, name: str, convert: Callable[[str], Any] = int) -> list[Any]:
    """The values of a comma-separated option, each once.

    Raises:
      ValueError: one that is not a number, none at all, or one twice.

    Example:
      >>> numbers("1,2,3", "--seeds")
      [1, 2, 3]
    """
    try:
        values = [convert(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{name} {text!r} must be numbers with commas between, e.g. 1,2,3") from None
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} {text!r} must name at least one value, and none twice")
    return values


def names(text: str, name: str, allowed: Iterable[str]) -> list[str]:
    """The words of a comma-separated option, each one of those that are allowed.

    Raises:
      ValueError: another word.

    Example:
      >>> names("fl,mtfl", "--systems", ("fl", "mtfl", "fedprox"))
      ['fl', 'mtfl']
    """
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        checks.one_of(name, word, tuple(allowed))
    return words
