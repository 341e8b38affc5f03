"""Loggers: where the numbers of a run go while it trains, besides its folder.

A logger has three methods, see `Logger`; anything that has them is one. TensorBoard, Weights & Biases, MLflow and trackio are
here; each is imported when it is asked for. `logged` connects a logger with `simulate`, `study.loggers` several with a study.
"""

import contextlib
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from fedjax_meta import checks
from fedjax_meta.algorithm import State
from fedjax_meta.evaluation import Evaluation
from fedjax_meta.imports import imported
from fedjax_meta.simulation import Record

Json = Any
"""What a JSON text can hold."""
Steps = dict[int, dict[str, float]]
"""Values by name, by the round after which they were measured."""

FINISHED, DIVERGED, STOPPED, FAILED = "finished", "diverged", "stopped", "failed"


class Logger(Protocol):
    """Gets the numbers of one run."""

    def start(self, config: Mapping[str, Json]) -> None:
        """The run begins; `config` holds its hyper-parameters as JSON values."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after round `step`; steps never go back."""

    def finish(self, status: str) -> None:
        """The run ended: "finished", "diverged", "stopped" or "failed"."""


Make = Callable[[Path, str], Logger]
"""`(folder, name of the run) -> logger`."""


def _package(name: str, logger: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"the logger {logger} needs a package that is not installed: pip install {name}") from None


class TensorBoard:
    """Writes event files for TensorBoard to `folder/name` (package tensorboardX)."""

    def __init__(self, folder: str | Path, name: str = "") -> None:
        self._package = _package("tensorboardX", "tensorboard")
        self._folder = Path(folder) / name

    def start(self, config: Mapping[str, Json]) -> None:
        """Opens the run and writes the config."""
        # A run that is killed leaves all but the last second.
        self._writer = self._package.SummaryWriter(str(self._folder), flush_secs=1)
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values at a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        """Writes the status and closes the run."""
        self._writer.add_text("status", status)
        self._writer.close()


class WandB:
    """A run of Weights & Biases, kept in `folder/wandb`; offline unless the variable WANDB_MODE says something else."""

    def __init__(self, folder: str | Path, name: str = "") -> None:
        self._package = _package("wandb", "wandb")
        self._folder, self._name = Path(folder), name

    def start(self, config: Mapping[str, Json]) -> None:
        """Opens the run and writes the config."""
        self._folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        project = os.environ.get("WANDB_PROJECT", "fedjax_meta")
        self._run = self._package.init(
            project=project,
            name=self._name,
            dir=self._folder,
            config=dict(config),
            mode=mode,
            reinit="create_new",
            settings=self._package.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values at a step."""
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        """Writes the status and closes the run."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == FINISHED else 1)


class MLflow:
    """A run of MLflow in `folder/mlruns`, or at MLFLOW_TRACKING_URI where that is set."""

    def __init__(self, folder: str | Path, name: str = "") -> None:
        self._package = _package("mlflow", "mlflow")
        self._folder, self._name = Path(folder), name

    def start(self, config: Mapping[str, Json]) -> None:
        """Opens the run and writes the config."""
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if where is None:
            # MLflow asks for a database unless it is told that files will do.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = (self._folder / "mlruns").absolute().as_uri()
        self._client = self._package.MlflowClient(tracking_uri=where)
        self._id = self._client.create_run(self._experiment("fedjax_meta"), run_name=self._name).info.run_id
        for name, value in flat(config).items():
            self._client.log_param(self._id, self._allowed(name), value)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(name)
        except self._package.exceptions.MlflowException:
            found = self._client.get_experiment_by_name(name)  # a process that shares the run may have made it by now
            if found is None:
                raise
            return found.experiment_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values at a step."""
        now = int(1000 * time.time())
        metric = self._package.entities.Metric
        self._client.log_batch(
            self._id, metrics=[metric(self._allowed(name), value, now, step) for name, value in values.items()]
        )

    @staticmethod
    def _allowed(name: str) -> str:
        """A name of which MLflow takes every character."""
        return re.sub(r"[^\w./ -]", "_", name)

    def finish(self, status: str) -> None:
        """Writes the status and closes the run."""
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, {FINISHED: "FINISHED", STOPPED: "KILLED"}.get(status, "FAILED"))


class Trackio:
    """A run of trackio, in its own folder (TRACKIO_DIR); the project has the name of the run's folder."""

    def __init__(self, folder: str | Path, name: str = "") -> None:
        self._package = _package("trackio", "trackio")
        # A study gives RUN/logs/trackio.
        self._project, self._name = Path(folder).absolute().parent.parent.name or "fedjax_meta", name

    def start(self, config: Mapping[str, Json]) -> None:
        """Opens the run and writes the config."""
        run = self._name.replace("/", "-")
        self._run = self._package.init(self._project, name=run, config=flat(config), resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values at a step."""
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        """Writes the status and closes the run."""
        self._run.log({"finished": float(status == FINISHED)})
        self._run.finish()


LOGGERS: dict[str, Make] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
"""Loggers by the name that `--log` takes."""


def made(names: str) -> dict[str, Make]:
    """Loggers from their names: `"tensorboard,wandb"`, or `"package.module:Name"` for one of your own.

    Raises:
      ValueError: an unknown name, or something that is not there.
      ImportError: a package that is not installed; the message says how to install it.
    """
    checks.word("names of loggers", names)
    found: dict[str, Make] = {}
    for name in (part.strip() for part in names.split(",")):
        if ":" in name:
            found[name] = imported("logger", name)
            checks.function(f"logger {name}", found[name], ("folder", "name"), "a class with __init__(self, folder, name)")
            if isinstance(found[name], type):
                check_methods(name, found[name])
        else:
            checks.one_of("logger", name, [*LOGGERS, "module:Name"])
            found[name] = LOGGERS[name]
            found[name](Path(), "")  # says now, not after an hour, what is not installed
    return found


def check_methods(name: str, logger: Any) -> None:
    """Raises `ValueError` unless a logger, or its class, has the methods of `Logger`."""
    takes = {"start": "config", "log": "step, values", "finish": "status"}
    lacks = [f"{method}({takes[method]})" for method in takes if not callable(getattr(logger, method, None))]
    if lacks:
        raise ValueError(f"logger {name} has no {' and no '.join(lacks)}")


@contextlib.contextmanager
def logged(
    logger: Logger, config: Mapping[str, Json] | None = None, *, rounds: int | None = None, done: int = 0
) -> Iterator[Callable[[State, Record], None]]:
    """Lets a logger watch `simulate`.

    Args:
      logger: gets the training metrics of every round, and each evaluator's scores: `metrics.summary` of an `Evaluation`, and
        whatever else is a scalar.
      config: the hyper-parameters, e.g. `algorithm.config`.
      rounds: of the run; with it, a run that ends before (`should_stop`) is "stopped", else "finished".
      done: the finished rounds of the state that the run goes on from.

    Yields:
      What `simulate` takes as `on_record`.

    Example:
      ```
      with loggers.logged(loggers.TensorBoard("runs/tensorboard"), method.config, rounds=100) as on_record:
          fm.simulate(method, data, key=key, rounds=100, on_record=on_record)
      ```
    """
    status = FINISHED
    logger.start({} if config is None else config)

    def on_record(state: State, record: Record) -> None:
        nonlocal status, done
        del state
        done = record.round
        scores = {name: _scores(evaluation) for name, evaluation in record.evaluations.items()}
        log_steps(logger, by_step(record._asdict() | {"train": record.metrics}, scores))
        status = DIVERGED if any(fault.diverged for fault in record.faults) else FINISHED

    try:
        yield on_record
    except BaseException as error:
        with ending(error):
            logger.finish(STOPPED if isinstance(error, KeyboardInterrupt | SystemExit) else FAILED)
        raise
    logger.finish(STOPPED if status == FINISHED and rounds is not None and done < rounds else status)


@contextlib.contextmanager
def ending(error: BaseException) -> Iterator[None]:
    """Ends loggers after an error, which gets a note of theirs: it is the one that the user must see."""
    try:
        yield
    except Exception as another:
        error.add_note(f"A logger could not end its run either: {type(another).__name__}: {another}")


def by_step(row: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]]) -> Steps:
    """What a record tells, by round: `train/METRIC` of every round, `TEST/SCORE` and seconds after the last one.

    Args:
      row: `round`, `seconds`, `compile_seconds` and `train`, each training metric by round.
      scores: of each test.
    """
    last = int(row["round"])
    steps: Steps = {}
    for name, values in row["train"].items():
        for i, value in enumerate(values):
            steps.setdefault(last - len(values) + 1 + i, {})[f"train/{name}"] = float(value)
    end = steps.setdefault(last, {})
    end |= {f"{test}/{name}": float(value) for test, found in scores.items() for name, value in found.items()}
    end |= {name: float(row[name]) for name in ("seconds", "compile_seconds")}
    return dict(sorted(steps.items()))


def flat(config: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """Nested mappings as one, names joined by dots.

    Example:
      >>> flat({"lr": 0.1, "options": {"epochs": 2}})
      {'lr': 0.1, 'options.epochs': 2}
    """
    found: dict[str, Json] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def log_steps(logger: Logger, steps: Steps) -> None:
    """Gives a logger the values of several rounds."""
    for step, values in steps.items():
        logger.log(step, values)


def _scores(evaluation: Any) -> dict[str, float]:
    if isinstance(evaluation, Evaluation):
        return evaluation.summary()
    leaves: Sequence[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(evaluation)
    found = {jax.tree_util.keystr(path, simple=True, separator="/") or "value": np.asarray(leaf) for path, leaf in leaves}
    return {name: float(value.item()) for name, value in found.items() if value.size == 1}
