"""Shared by all experiments: options, devices and cache, training runs with progress, resuming, and errors in one line."""

import contextlib
import functools
import inspect
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
from fedjax_meta import checkpoint, checks, report, runtime

console = Console()
errors = Console(stderr=True)

Json = Any
"""A value that JSON can hold."""

Rows = list[dict[str, Any]]
"""The evaluations of a training run, see `report.compact`."""

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
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in --out where it stopped.")]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Devices that share a cohort; when not given all (on a CPU its cores), but at most one for each client of a cohort.",
        show_default=False,
    ),
]
CacheOption = Annotated[
    bool, typer.Option("--compile-cache/--no-compile-cache", help="Keep compiled programs in the user's cache folder.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


class Test(NamedTuple):
    """What is measured during a training run, under one name of the report.

    Attributes:
      title: of the system.
      clients: which clients it is measured on, e.g. "local" or "new".
      evaluator: see `fedjax_meta.Evaluator`.
    """

    title: str
    clients: str
    evaluator: fm.Evaluator


class Plan(NamedTuple):
    """One training run, and the tests of all systems that share it.

    Attributes:
      name: of its results and its folder; unique in an experiment.
      title: what the progress display shows.
      algorithm: what trains.
      data: the clients that train.
      tests: by key of the metrics, e.g. "fedper/local".
      rounds, eval_every, seed, store: see `fedjax_meta.simulate`.
      config: what else the results depend on, e.g. the data set, as JSON values.
    """

    name: str
    title: str
    algorithm: fm.Algorithm
    data: fm.FederatedData
    tests: dict[str, Test]
    rounds: int
    eval_every: int
    seed: int
    config: Mapping[str, Json]
    store: str | None = None

    @property
    def full_config(self) -> dict[str, Json]:
        """Everything that the results depend on; a resumed run must agree in all of it."""
        run = {"tests": list(self.tests), "rounds": self.rounds, "eval_every": self.eval_every, "seed": self.seed}
        return {**self.config, "algorithm": self.algorithm.config, **run}


class Stopped(Exception):  # noqa: N818 - it is no error
    """The user stopped the experiment; the message says what is saved."""


@contextlib.contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns errors that a user can correct into one line on stderr and exit code 1; exit code 130 after Ctrl-C."""
    try:
        yield
    except Stopped as stop:
        errors.print(Text(str(stop), style="yellow"), soft_wrap=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        errors.print(Text("stopped; everything that was saved is still there", style="yellow"))
        raise typer.Exit(130) from None
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        if debug:
            raise
        errors.print(Text(f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}"), soft_wrap=True)
        raise typer.Exit(1) from None


def prepare(devices: int | None, compile_cache: bool, *, cohort_size: int) -> int:
    """Sets JAX up. Call it before anything is computed.

    Returns:
      How many devices share a cohort.

    Raises:
      ValueError: more devices than there are.
    """
    # More devices than cores only where the user asks for them.
    more = devices if devices is not None and devices > runtime.cores() else None
    fm.use_all_cores(cores=more, compile_cache=compile_cache)
    if not compile_cache:
        jax.config.update("jax_enable_compilation_cache", False)
    available = len(jax.devices())
    if devices is not None and devices > available:
        raise ValueError(f"--devices {devices}, but JAX sees {available} ({jax.devices()[0].platform})")
    return devices or min(available, cohort_size)


def build(method: str, task: fm.Task, **options: Any) -> fm.Algorithm:
    """A method of the registry in a federation.

    Args:
      method: name in `fedjax_meta.METHODS`.
      task: what is learned.
      **options: of the method and of `fedjax_meta.Federation`. An option that both take goes to the method.

    Raises:
      TypeError: an option that neither takes.
      ValueError: a value out of range.
    """
    taken = inspect.signature(fm.METHODS[method]).parameters
    federation = {name: options.pop(name) for name in list(options) if name not in taken and name in fm.federation.OPTIONS}
    return fm.federate(fm.METHODS[method](task, **options), fm.Federation(**federation))


def swept(algorithms: Sequence[fm.Algorithm]) -> dict[str, Json]:
    """The config that the algorithms of a sweep share, with lists of values where they differ."""
    configs = [algorithm.config for algorithm in algorithms]
    return {
        name: value if all(config[name] == value for config in configs) else [config[name] for config in configs]
        for name, value in configs[0].items()
    }


def open_folder(
    out: Path | None, default: str, *, resume: bool, options: Mapping[str, Json], algorithms: Mapping[str, Json]
) -> Path:
    """The folder of the experiment, with `config.json` in it.

    Args:
      out: as the user gave it; a new folder under runs/ when not given.
      default: how the name of a new folder begins.
      resume: whether the folder must have a run already.
      options: of the experiment.
      algorithms: the config of every algorithm by the name of its results, see `Algorithm.config`.

    Raises:
      ValueError: `--resume` without a folder that holds a run, or without `--resume` a folder that holds one.
      OSError: the folder cannot be written.
    """
    if resume and out is None:
        raise ValueError("--resume needs --out DIR, the folder of the run to continue")
    folder = out if out is not None else Path("runs") / f"{default}-{datetime.now():%Y%m%d-%H%M%S}"
    if resume and not (folder / "config.json").is_file():
        raise ValueError(f"there is no run to resume in {folder} (no config.json)")
    if not resume and (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a run already: add --resume to continue it, or give another --out")
    if resume:
        return folder  # its config.json says how the run began
    versions = {"python": platform.python_version(), "jax": jax.__version__, "fedjax_meta": fm.__version__}
    device = f"{jax.devices()[0].device_kind} x {jax.device_count()}"
    config = {"options": dict(options), "algorithms": dict(algorithms)}
    config |= {"versions": versions, "device": device, "command": command_line(folder)}
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


def remembered(folder: Path, name: str, config: Mapping[str, Json], compute: Callable[[], Json]) -> Json:
    """The result of one part of an experiment: as `metrics.json` has it, else computed and saved there at once.

    A run that was stopped thus resumes with its first unfinished part, and a result is never taken for one of another config.

    Args:
      folder: of the run.
      name: of the part; unique in the run.
      config: everything that the result depends on, as JSON values.
      compute: `() -> result`, a JSON value.

    Raises:
      Stopped: on Ctrl-C.
      ValueError: the part was computed with another config; the message names the first difference and both values.
      OSError: the result cannot be written.
    """
    path = folder / "metrics.json"
    parts = {part["name"]: part for part in json.loads(path.read_text())["runs"]} if path.is_file() else {}
    config = json.loads(json.dumps(config))
    if name in parts:
        different = checkpoint.first_difference(parts[name]["config"], config)
        if different is not None:
            field, old, new = different
            raise ValueError(
                f"cannot resume: {field} was {old!r} when {name} in {path} was written and is {new!r} now; "
                "use the same options or another folder"
            )
        return parts[name]["result"]
    try:
        result = compute()
    except KeyboardInterrupt:
        state = checkpoint.latest_round(folder / "state" / name)
        saved = f"finished results saved: {len(parts)}" + (f", and round {state} of {name}" if state else "")
        raise Stopped(f"stopped in {name}; {saved}. Continue with:\n  {command_line(folder, resume=True)}") from None
    parts[name] = {"name": name, "config": config, "result": result}
    lines = ",\n".join(json.dumps(part, separators=(",", ":")) for part in parts.values())
    checkpoint.write_text(path, f'{{"runs": [\n{lines}\n]}}\n')
    return result


def run_all(plans: Sequence[Plan], folder: Path) -> dict[str, Rows]:
    """Trains every plan that is not finished, saves its state after every evaluation, and returns the rows by plan name.

    Raises:
      Stopped: on Ctrl-C.
      ValueError, OSError: see `remembered` and `checkpoint`.
    """
    results: dict[str, Rows] = {}
    started = time.perf_counter()
    with _display(len(plans)) as display:
        for number, plan in enumerate(plans, 1):
            train = functools.partial(_train, plan, folder / "state" / plan.name, display, number)
            results[plan.name] = remembered(folder, plan.name, plan.full_config, train)
            display.end(plan, results[plan.name])
    console.print(f"[dim]{len(plans)} training runs in {_clock(time.perf_counter() - started)}[/dim]")
    return results


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> None:
    """Prints a table with as many of its columns, from the left, as the terminal has room for; into a file all of them."""
    whole = Console(file=console.file, width=max(console.width, 160)) if not console.is_terminal else console
    for count in range(len(headings), 1, -1):
        table = report.rich_table(title, headings[:count], [row[:count] for row in rows], text_columns=text_columns)
        if Measurement.get(whole, whole.options.update(width=1000), table).maximum <= whole.width:
            break
    whole.print(table)
    if count < len(headings):
        whole.print("[dim]A wider terminal shows more columns; all are in report.md.[/dim]")


def all_series(plans: Sequence[Plan], results: Mapping[str, Rows]) -> list[report.Series]:
    """The series of every test of every plan, in the order of the plans."""
    return [
        report.series(test.title, test.clients, plan.seed, results[plan.name], key)
        for plan in plans
        for key, test in plan.tests.items()
    ]


def times(results: Mapping[str, Rows]) -> tuple[float, float]:
    """(seconds of training and testing, seconds of compilation) of all runs."""
    rows = [row for run in results.values() for row in run]
    return sum(row["seconds"] for row in rows), sum(row["compile_seconds"] for row in rows)


def configs(plans: Sequence[Plan]) -> dict[str, Json]:
    """The config of every plan's algorithm by plan name, for `open_folder`."""
    return {plan.name: plan.algorithm.config for plan in plans}


def _train(plan: Plan, folder: Path, display: "_Display", number: int) -> Rows:
    """The rows of a plan, from its newest checkpoint on where there is one."""
    rows: Rows = []
    like = fm.host_store.state_shapes(plan.algorithm, jax.random.key(plan.seed), plan.data)
    config = plan.full_config
    saved = checkpoint.restore(folder, like, config, on_damage=lambda line: errors.print(Text(f"warning: {line}")))
    if saved is not None:
        rows = saved.records
    display.begin(plan, number, rows)

    def on_record(state: fm.State, record: fm.Record) -> None:
        rows[:] = [*map(report.without_confusion, rows), report.compact(record)]
        checkpoint.save(folder, state, rows, config)
        display.record(rows[-1])

    fm.simulate(
        plan.algorithm,
        plan.data,
        key=jax.random.key(plan.seed),
        rounds=plan.rounds,
        eval_every=plan.eval_every,
        evaluators={key: test.evaluator for key, test in plan.tests.items()},
        state=None if saved is None else saved.state,
        store=plan.store,
        on_record=on_record,
        on_progress=display.progress,
    )
    return rows


class _Display:
    """The live line of the run in progress, and one line for each finished run."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self._bar = progress
        self._runs = runs
        self._task: TaskID | None = None
        self._plan: Plan | None = None
        self._compiling = self._pause = 0.0
        self._first = 0
        self._clock: float | None = None

    def begin(self, plan: Plan, number: int, rows: Rows) -> None:
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
            self._pause = time.perf_counter() - self._clock  # The first test is compiled between round 1 and the others.
        self._bar.update(self._task, score=_score(row, self._plan), state=f"compiled in {self._compiling:.0f} s")

    def end(self, plan: Plan, rows: Rows) -> None:
        if self._task is not None:
            self._bar.update(self._task, visible=False)
        trained, compiled = times({"": rows})
        text = f"{plan.title}: {_score(rows[-1], plan)}  [dim]{_clock(trained)}, compiled in {_clock(compiled)}[/dim]"
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
    """Accuracy, loss, time left and compile time, as far as they are known."""

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
    """A duration in words.

    Example:
      >>> _clock(7.26), _clock(75), _clock(3720)
      ('7.3 s', '1 min 15 s', '1 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def evaluator(algorithm: fm.Algorithm, data: fm.FederatedData, *, devices: int | None, **options: Any) -> fm.Evaluator:
    """An `Evaluator` that calls `fedjax_meta.evaluate` with these options."""
    measure = functools.partial(fm.evaluate, algorithm, devices=devices, **options)
    return fm.Evaluator(measure, data, known=options.get("known", True))


def numbers(text: str, name: str, convert: Callable[[str], float] = int) -> list[Any]:
    """The values of a comma-separated option, each once.

    Raises:
      ValueError: a value that is not a number, no value, or the same value twice.

    Example:
      >>> numbers("1,2,3", "--seeds")
      [1, 2, 3]
    """
    try:
        values = [convert(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{name} {text!r} must be numbers separated by commas, e.g. 1,2,3") from None
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} {text!r} must name at least one value, and none twice")
    return values


def names(text: str, name: str, allowed: Iterable[str]) -> list[str]:
    """The words of a comma-separated option, each of which must be allowed.

    Raises:
      ValueError: a word that is not allowed.

    Example:
      >>> names("fl,mtfl", "--systems", ("fl", "mtfl", "fedprox"))
      ['fl', 'mtfl']
    """
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        checks.one_of(name, word, tuple(allowed))
    return words
