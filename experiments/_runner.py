"""Shared by all experiments: options, devices and cache, training runs with progress, resuming, and errors in one line."""

import contextlib
import functools
import inspect
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Column
from rich.text import Text

import fedjax_meta as fm
from fedjax_meta import checkpoint, checks, process, report, runtime

console, errors, Stopped = process.console, process.errors, process.Stopped
one_line_errors, open_folder, command_line = process.one_line_errors, process.open_folder, process.command_line

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
ON_DIVERGENCE = ("continue", "stop")
DivergenceOption = Annotated[
    str,
    typer.Option(
        help="What to do when all systems of a training run have diverged: `continue` to the last round (they may recover), or "
        "`stop` this training run and go on with the others. Either way they are marked in tables and figures, and the exit "
        "code is 3 when all systems of all training runs have diverged."
    ),
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
      guarantee: `rounds -> privacy.Guarantee` of a system with noise, for the progress line and the record; `None` without.
    """

    name: str
    title: str
    algorithm: fm.Algorithm
    data: fm.FederatedData
    tests: dict[str, Test]
    rounds: int
    eval_every: int
    seed: int
    config: Mapping[str, Any]
    store: str | None = None
    guarantee: Callable[[int], fm.privacy.Guarantee] | None = None

    @property
    def full_config(self) -> dict[str, Any]:
        """Everything that the results depend on; a resumed run must agree in all of it."""
        run = {"tests": list(self.tests), "rounds": self.rounds, "eval_every": self.eval_every, "seed": self.seed}
        private = {} if self.guarantee is None else {"privacy": self.guarantee(self.rounds).config}
        return {**self.config, "algorithm": self.algorithm.config, **run, **private}


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


def swept(algorithms: Sequence[fm.Algorithm]) -> dict[str, Any]:
    """The config that the algorithms of a sweep share, with lists of values where they differ."""
    configs = [algorithm.config for algorithm in algorithms]
    return {
        name: value if all(config[name] == value for config in configs) else [config[name] for config in configs]
        for name, value in configs[0].items()
    }


def remembered(folder: Path, name: str, config: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """The result of one part of an experiment: as `metrics.json` has it, else computed and saved there at once.

    A run that was stopped thus resumes with its first unfinished part, and a result is never taken for one of another config.

    Args:
      folder: of the run.
      name: of the part; unique in the run.
      config: everything that the result depends on, as JSON values.
      compute: `() -> result`, a JSON value.

    Raises:
      Stopped: on Ctrl-C or SIGTERM.
      ValueError: the part was computed with another config; the message names the first difference and both values.
      OSError: the result cannot be written.
    """
    path = folder / "metrics.json"
    parts = {part["name"]: part for part in report.load(path)} if path.is_file() else {}
    config = json.loads(json.dumps(config))
    if name in parts:
        different = checkpoint.first_difference(report.strict(parts[name]["config"]), report.strict(config))
        if different is not None:
            field, old, new = different
            raise ValueError(
                f"cannot resume: {field} was {old!r} when {name} in {path} was written and is {new!r} now; "
                "use the same options or another folder"
            )
        return parts[name]["result"]
    try:
        result = compute()
    except KeyboardInterrupt as stop:
        state = checkpoint.latest_round(folder / "state" / name)
        saved = f"finished results saved: {len(parts)}" + (f", and round {state} of {name}" if state else "")
        command = command_line(folder, resume=True)
        number = getattr(stop, "number", signal.SIGINT)
        raise Stopped(f"stopped in {name}; {saved}. Continue with: {command}", number) from None
    process.started.clear()
    parts[name] = {"name": name, "config": config, "result": result}
    lines = ",\n".join(json.dumps(report.strict(part), separators=(",", ":"), allow_nan=False) for part in parts.values())
    checkpoint.write_text(path, f'{{"runs": [\n{lines}\n]}}\n')
    return result


def run_all(plans: Sequence[Plan], folder: Path, *, on_divergence: str = "continue") -> dict[str, Rows]:
    """Trains every plan that is not finished, saves its state after every evaluation, and returns the rows by plan name.

    Args:
      plans: the training runs.
      folder: of the experiment.
      on_divergence: "continue", or "stop" to end a plan at the evaluation after which all of its tests have diverged.

    Raises:
      Stopped: on Ctrl-C or SIGTERM.
      ValueError, OSError: see `remembered` and `checkpoint`.
    """
    results: dict[str, Rows] = {}
    started = time.perf_counter()
    with _display(len(plans)) as display:
        for number, plan in enumerate(plans, 1):
            train = functools.partial(_train, plan, folder / "state" / plan.name, display, number, on_divergence)
            with _shown_warnings():
                results[plan.name] = remembered(folder, plan.name, plan.full_config, train)
            display.end(plan, results[plan.name])
    console.print(f"[dim]{len(plans)} training runs in {_clock(time.perf_counter() - started)}[/dim]")
    return results


def check_titles(plans: Sequence[Plan]) -> None:
    """Refuses systems that a table could not tell apart; call it before the run has a folder.

    Raises:
      ValueError: two tests of the same title, clients and seed.
    """
    report.check_titles(
        [(test.title, f"{test.clients} clients", f"seed {plan.seed}") for plan in plans for test in plan.tests.values()]
    )


def exit_if_all_diverged(plans: Sequence[Plan], results: Mapping[str, Rows]) -> None:
    """Ends the process with exit code 3 if all systems of all plans diverged; call it when all is reported.

    Raises:
      typer.Exit: they did.
    """
    rounds = [report.diverged(results[plan.name], key) for plan in plans for key in plan.tests]
    exit_if_diverged([number is not None for number in rounds])


def exit_if_diverged(systems: Sequence[bool]) -> None:
    """Ends the process with exit code 3 if all systems diverged, each given as whether it did.

    Raises:
      typer.Exit: they did.
    """
    if systems and all(systems):
        errors.print(
            Text("all systems diverged: no score of this run means anything; smaller step sizes may help"), soft_wrap=True
        )
        raise typer.Exit(3)


def loading(dataset: str) -> Status:
    """A spinner while a data set is read; its name is text of the user."""
    return console.status(Text(f"loading {dataset}"))


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


def configs(plans: Sequence[Plan]) -> dict[str, Any]:
    """The config of every plan's algorithm by plan name, for `open_folder`."""
    return {plan.name: plan.algorithm.config for plan in plans}


def _train(plan: Plan, folder: Path, display: "_Display", number: int, on_divergence: str) -> Rows:
    """The rows of a plan, from its newest checkpoint on where there is one."""
    like = fm.host_store.state_shapes(plan.algorithm, jax.random.key(plan.seed), plan.data)
    config = plan.full_config
    saved = checkpoint.restore(folder, like, config, on_damage=_warn)
    # `part`: what is known of the rounds since the last evaluation, when a signal ended the run between two of them.
    known = {"rows": [], "part": None} if saved is None else saved.records
    rows: Rows = known["rows"]
    signals: list[int] = []
    display.begin(plan, number, rows)

    def on_signal(number: int, _: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:  # the user does not want to wait for the round to end
            raise process.Interrupted(number)
        display.stopping()

    def on_record(state: fm.State, record: fm.Record) -> None:
        row = report.joined(known["part"], report.compact(record))
        rows[:] = [*map(report.without_confusion, rows), row]
        known["part"] = None
        checkpoint.save(folder, state, known, config)
        display.record(row, _diverged(plan, rows))

    def ends_early() -> bool:
        return on_divergence == "stop" and _diverged(plan, rows)

    if ends_early():
        return rows
    with process.signals(on_signal):
        state, records = fm.simulate(
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
            should_stop=lambda: bool(signals) or ends_early(),
        )
        if records and records[-1].round > (rows[-1]["round"] if rows else 0):
            known["part"] = report.joined(known["part"], report.compact(records[-1]))
            checkpoint.save(folder, state, known, config)
    if signals:
        raise process.Interrupted(signals[0])
    return rows


def _diverged(plan: Plan, rows: Rows) -> bool:
    return bool(rows) and all(report.diverged(rows, key) is not None for key in plan.tests)


def _warn(text: str) -> None:
    errors.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


class _Warnings(logging.Handler):
    """Shows the library's warnings, e.g. of what is not finite, above the live line; no more than a screen can hold."""

    most = 20

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._shown += 1
        if self._shown <= self.most:
            _warn(record.getMessage())
        elif self._shown == self.most + 1:
            _warn("no more of these are shown; metrics.json lists all faults of a finished run")


@contextlib.contextmanager
def _shown_warnings() -> Iterator[None]:
    logger, handler = logging.getLogger("fedjax_meta"), _Warnings()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


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
        self._diverged = False

    def begin(self, plan: Plan, number: int, rows: Rows) -> None:
        self._plan, self._compiling, self._diverged = plan, 0.0, False
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
        process.started.clear()
        now = time.perf_counter()
        left = ""
        if self._clock is None:
            self._first, self._clock = done, now
        else:
            pace = (now - self._clock - self._pause) / max(done - self._first, 1)
            left = _clock(pace * (self._plan.rounds - done))
        loss = f"{metrics['loss'][-1]:.3f}" if "loss" in metrics else ""
        self._bar.update(self._task, completed=done, loss=loss, left=left)

    def stopping(self) -> None:
        """Tells the user that a signal came and what the run waits for."""
        self._bar.update(self._task, state="stopping after this piece of work; Ctrl-C again stops at once")

    def record(self, row: dict[str, Any], diverged: bool) -> None:
        if diverged and not self._diverged:
            _warn(f"{self._plan.title} has diverged at round {row['round']}")
        self._diverged = diverged
        self._compiling += row["compile_seconds"]
        if row["round"] == 1 and self._clock is not None:
            self._pause = time.perf_counter() - self._clock  # The first test is compiled between round 1 and the others.
        self._bar.update(self._task, score=_score(row, self._plan), state=f"compiled in {self._compiling:.0f} s")

    def end(self, plan: Plan, rows: Rows) -> None:
        if self._task is not None:
            self._bar.update(self._task, visible=False)
        trained, compiled = times({"": rows})
        text = Text(f"{plan.title}: {_score(rows[-1], plan)}  ")
        text.append(f"{_clock(trained)}, compiled in {_clock(compiled)}", style="dim")
        self._bar.console.print(text, soft_wrap=True)


def _score(row: Mapping[str, Any], plan: Plan) -> str:
    """The accuracy of the plan's first system on each group of clients."""
    first: dict[str, str] = {}
    for key, test in plan.tests.items():
        accuracy = row["tests"][key]["scores"]["accuracy"]
        first.setdefault(
            test.clients, f"{test.clients} " + (f"{100 * accuracy:.1f} %" if math.isfinite(accuracy) else "not finite")
        )
    measured = row["train"].get("user_accuracy")
    spent = [] if plan.guarantee is None else [f"epsilon {plan.guarantee(row['round']).epsilon:.3g}"]
    return ", ".join([*([f"UA {100 * measured[-1]:.1f} %"] if measured else []), *first.values(), *spent])


@contextlib.contextmanager
def _display(runs: int) -> Iterator[_Display]:
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
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
    if name == "--seeds":
        for seed in values:
            checks.seed(name, seed)
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
