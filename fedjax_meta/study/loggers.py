"""Loggers of a study: every trial and every final run gets some of its own."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedjax_meta import process, report
from fedjax_meta.loggers import (
    DIVERGED,
    FAILED,
    FINISHED,
    STOPPED,
    Json,
    Logger,
    Make,
    by_step,
    check_methods,
    ending,
    log_steps,
)
from fedjax_meta.study import phase

_STOPS = (KeyboardInterrupt, SystemExit, process.Stopped, phase.Stopped)
"""How a run ends that somebody stopped."""


class Logged:
    """A watcher of `study.run.run` that gives every run of a study loggers of its own.

    It reads the lines that the run appends to its `metrics.jsonl`, so that what is logged is what is saved.
    """

    def __init__(
        self,
        watcher: Any,
        folder: Path,
        loggers: Mapping[str, Make],
        configs: Mapping[str, Mapping[str, Json]],
        *,
        folder_of: Callable[[str, str], Path] | None = None,
    ) -> None:
        """Wraps a watcher.

        Args:
          watcher: is told everything too.
          folder: of the run; loggers write to `folder/logs`.
          loggers: see `loggers.made`.
          configs: what each system is, by name.
          folder_of: `(scenario, system) -> folder` of the system's metrics, where each system has its own.
        """
        self._watcher, self._folder, self._loggers, self._configs = watcher, folder, loggers, configs
        self._folder_of = folder_of or (lambda scenario, system: folder)
        self._open: dict[str, list[Logger]] = {}
        self._status: dict[str, str] = {}

    def begin(self, scenario: str, system: str, *facts: Any) -> None:
        """Ends the runs of the sweep before; what is in the metrics by now was logged when it came."""
        self.finish()
        self._lines = self._folder_of(scenario, system) / "metrics.jsonl"
        self._read = self._lines.stat().st_size if self._lines.is_file() else 0
        self._watcher.begin(scenario, system, *facts)

    def progress(self, *facts: Any) -> None:
        """Nothing is logged between evaluations."""
        self._watcher.progress(*facts)

    def record(self, *facts: Any) -> None:
        """Logs the lines that are new."""
        with self._lines.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        for line in new.decode().splitlines():
            self._line(report.numbers_again(json.loads(line)))
        self._watcher.record(*facts)

    def end(self, outcome: Any) -> None:
        """Ends the runs of a system."""
        self.finish()
        self._watcher.end(outcome)

    def wait(self, *facts: Any) -> None:
        """Nothing is logged while other processes train."""
        self._watcher.wait(*facts)

    def finish(self, status: str | None = None) -> None:
        """Ends all runs that are open; by default each as its last evaluation says."""
        failed: Exception | None = None
        while self._open:
            name, loggers = self._open.popitem()
            for logger in loggers:
                try:
                    logger.finish(status or self._status[name])
                except Exception as error:  # the other runs end, too
                    failed = failed or error
        if failed is not None:
            raise failed

    def _line(self, line: dict[str, Any]) -> None:
        point = ",".join([*(f"{name}={value:g}" for name, value in line["numbers"].items()), f"seed={line['seed']}"])
        name = "/".join([line["scenario"], line["system"], line["phase"], point])
        if name not in self._open:
            config = {key: line[key] for key in ("scenario", "system", "phase", "seed", "numbers")}
            self._open[name] = []
            for kind, make in self._loggers.items():
                logger = make(self._folder / "logs" / kind.replace(":", "."), name)
                check_methods(kind, logger)
                logger.start({**config, "options": self._configs[line["system"]]})
                self._open[name].append(logger)  # one that cannot start is not ended
        scores = {group: test["scores"] for group, test in line["tests"].items()}
        for logger in self._open[name]:
            log_steps(logger, by_step(line, scores))
        self._status[name] = FINISHED if report.diverged([line], next(iter(scores))) is None else DIVERGED


@contextlib.contextmanager
def logged(
    watcher: Any,
    folder: Path,
    loggers: Mapping[str, Make],
    configs: Mapping[str, Mapping[str, Json]],
    *,
    folder_of: Callable[[str, str], Path] | None = None,
) -> Iterator[Any]:
    """The watcher as it is, or with loggers if there are any, whose open runs end with the block; see `Logged`."""
    if not loggers:
        yield watcher
        return
    watched = Logged(watcher, folder, loggers, configs, folder_of=folder_of)
    try:
        yield watched
    except BaseException as error:
        with ending(error):
            watched.finish(STOPPED if isinstance(error, _STOPS) else FAILED)
        raise
    watched.finish()
