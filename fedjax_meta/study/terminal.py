"""What a command prints about a study: before it runs, while it runs, and what came of it."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from fedjax_meta import costs, escape, placement, report, runtime
from fedjax_meta.data.targets import LABELS, REAL
from fedjax_meta.process import console
from fedjax_meta.simulation import Record
from fedjax_meta.study import estimate, guarantees, results, summary
from fedjax_meta.study import run as runs
from fedjax_meta.study.check import named
from fedjax_meta.study.job import passes
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import KNOWN, points_of, rounds_of_trials

QUIET = 60.0
"""Seconds without a line after which one is printed, where the output is no terminal."""


def announce(study: Study, built: Mapping[str, Clients]) -> None:
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
                exchange = algorithm.exchange(clients.train)
                sent = sum(leaf.size for leaf in jax.tree.leaves(exchange.down))
                state = jax.eval_shape(algorithm.init, jax.random.key(0), clients.train)
            model = sum(leaf.size for leaf in jax.tree.leaves(state.model))
            own = sum(leaf.size for leaf in jax.tree.leaves((state.personal, state.memory))) // clients.train.num_clients
            total = rounds_of_trials(len(points), study) + study.rounds * len(study.seeds)
            down, up = ("" if system.pooled else placement.amount(value) for value in costs.traffic_of(exchange))
            if system.pooled:
                total = round(total * passes(system, clients, clients.train))
            sizes = (f"{count:,}" for count in (model, 0 if system.pooled else sent, own))
            more = " or more" if len(points) > 1 and study.tuning.extend else ""  # a grid that moves on has more points
            rows.append([study.title_of(name), *sizes, down, up, str(len(points)), f"{total:,}{more}"])
        headings = ("system", "model", "shared", "personal", "download", "upload", "grid", "rounds in all")
        table(report.Table(headings, rows))
        for name in study.systems_on(scenario):
            said = guarantees.said(study, scenario, name, clients, study.rounds)
            if said:
                console.print(escape.console(f"{study.title_of(name)}: {said} in {study.rounds} rounds"), soft_wrap=True)


def estimates(study: Study, built: Mapping[str, Clients]) -> None:
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
        table(report.Table(headings, rows, f"{scenario}: what it will cost"))
    console.print(
        f"About {max(total / 60, 0.1):.1f} minutes in all on {devices} device{'s' * (devices > 1)}, without tests and the "
        "report. To measure this, one round of each system was compiled and run here on one device. FLOPs: matrix products and "
        "convolutions of one client, counted in that round. Memory: the states of the largest sweep, and what its rounds need "
        "in addition.",
        style="dim",
    )


def outcome(
    study: Study, built: Mapping[str, Clients], outcomes: Sequence[runs.Outcome], found: Mapping[str, Sequence[results.Line]]
) -> None:
    """What a run found: the tables of each scenario, and what their columns mean."""
    for scenario, of_scenario in built.items():
        whole, kind = results.table(found[scenario]), found[scenario][0].kind
        title = f"{scenario}: {of_scenario.title}. {kind.label}{kind.direction}"
        table(whole.only(results.SCORES)._replace(title=title))
        others = results.other_scores(found[scenario])
        if others.rows:
            table(others)
        table(whole.only(results.HOW)._replace(title="How they were run"))
    for one in summary.tables(study, outcomes):
        table(one)
    console.print(escape.console(results.explanation(study, found)), style="dim")


def left_out(study: Study, folder: Path) -> None:
    """Names scenarios and systems of earlier commands that a report has no rows of."""
    finished = {(path.parent.name, path.name.partition(".")[0]) for path in (folder / "results").glob("*/*.final.json")}
    scenarios = {f"scenario {scenario}" for scenario, _ in finished if scenario not in study.scenarios}
    systems = {
        system if system not in study.systems else f"{system} on {scenario}"
        for scenario, system in finished
        if scenario in study.scenarios and system not in study.systems_on(scenario)
    }
    left = [*sorted(scenarios), *sorted(systems)]
    if left:
        them = "it" if len(left) == 1 else "them"
        text = (
            f"This report leaves out {', '.join(left)}, although the folder has results of {them}; so do compare and export. Run "
            "all of the study to include everything."
        )
        console.print(escape.console(text), soft_wrap=True)


@contextlib.contextmanager
def lines(study: Study, built: Mapping[str, Clients]) -> Iterator[runs.Watcher]:
    """Prints the progress of a run, until the block ends."""
    shown = _Lines(study, built)
    try:
        yield shown
    finally:
        shown.silence()


class _Lines(runs.Watcher):
    """One line for each sweep in progress, renewed in place on a terminal; elsewhere one for each evaluation, and each minute.

    What takes minutes itself, such as a compilation or a test, is said while it lasts.
    """

    def __init__(self, study: Study, built: Mapping[str, Clients]) -> None:
        self._study, self._built = study, built
        self._what, self._rounds, self._members, self._tested = "", 0, 0, frozenset[int]()
        self._pace = _Pace(0)
        self._shown, self._system, self._spent = 0.0, ("", ""), ""
        self._later: threading.Timer | None = None
        self._latest = ""

    def begin(
        self, scenario: str, system: str, phase: str, members: int, rounds: int, done: int, tested: Sequence[int]
    ) -> None:
        self._what = f"{scenario}, {self._study.title_of(system)}, {phase} ({members} run{'' if members == 1 else 's'})"
        self._rounds, self._members, self._tested = rounds, members, frozenset(tested)
        self._pace = _Pace(done)
        self._system, self._spent = (scenario, system) if phase == "final" else ("", ""), ""
        self._say(f"{self._what}: compiling", at_once=True)

    def progress(self, done: int, metrics: Mapping[str, np.ndarray]) -> None:
        self._pace.trained(done)
        loss = f", loss {np.mean(metrics['loss'][:, -1]):.3f}" if "loss" in metrics else ""
        tests = done in self._tested
        left = self._pace.left(self._rounds, sum(number >= done for number in self._tested))
        now = f"{', testing' if tests else ''}{'' if left is None else f', {_in_words(left)} left'}"
        self._say(f"{self._what}: round {done}/{self._rounds}{loss}{now}{self._spent}", at_once=tests)

    def record(self, done: int, records: Sequence[Record]) -> None:
        self._pace.tested()
        scenario, system = self._system
        said = guarantees.said(self._study, scenario, system, self._built[scenario], done) if system else ""
        self._spent = f"; after round {done}: {said}" if said else ""
        if not console.is_terminal:
            self.silence()
            fewer = f", {len(records)} left" if len(records) < self._members else ""
            console.print(escape.console(f"{self._what}: round {done}/{self._rounds}{fewer}{f'; {said}' if said else ''}"))

    def end(self, outcome: runs.Outcome) -> None:
        found = results.by_client(outcome.final, KNOWN, self._study.score)
        mean, unit = float(found.values.mean()), " %" if found.kind.share else ""
        lost = report.no_number(any(trial.diverged is not None for trial in outcome.final))
        score = f"{found.kind.words} {found.kind.text(mean)}{unit}" if np.isfinite(mean) else lost
        numbers = ", ".join(f"{name}={value:g}" for name, value in outcome.chosen.items())
        title = f"{outcome.scenario}, {self._study.title_of(outcome.system)}"
        self._clear()
        console.print(escape.console(f"{title}: {score}{f' at {numbers}' if numbers else ''}"))

    def wait(self, others: Sequence[tuple[str, str]]) -> None:
        names = ", ".join(f"{scenario}, {self._study.title_of(system)}" for scenario, system in others)
        self._clear()
        console.print(escape.console(f"waiting for systems that other processes train: {names}"))

    def silence(self) -> None:
        """Prints nothing more of what was said last."""
        if self._later is not None:
            self._later.cancel()
        self._later = None

    def _say(self, text: str, *, at_once: bool = False) -> None:
        """Shows how far it is; on a terminal a few times a second, or at once, elsewhere when a minute has brought no line."""
        self._latest = text
        if not console.is_terminal:
            if self._later is None:
                self._later = threading.Timer(QUIET, self._print_latest)
                self._later.daemon = True
                self._later.start()
        elif at_once or time.perf_counter() - self._shown >= 0.2:
            self._shown = time.perf_counter()
            sys.stdout.write("\r\x1b[2K" + text[: console.width - 1])
            sys.stdout.flush()

    def _print_latest(self) -> None:
        self._later = None
        console.print(escape.console(self._latest))

    def _clear(self) -> None:
        self.silence()
        if console.is_terminal:
            sys.stdout.write("\r\x1b[2K")


class _Pace:
    """How long the rounds and the tests of a sweep take."""

    def __init__(self, done: int) -> None:
        self._done, self._before = done, time.perf_counter()
        self._pieces, self._rounds, self._seconds, self._test = 0, 0, 0.0, 0.0

    def trained(self, done: int) -> None:
        """The rounds up to `done` are finished."""
        seconds = self._lap()
        if self._pieces:  # the first rounds waited for their program
            self._rounds += done - self._done
            self._seconds += seconds
        self._pieces += 1
        self._done = done

    def tested(self) -> None:
        """A test is finished."""
        self._test = self._lap()

    def left(self, rounds: int, tests: int) -> float | None:
        """Seconds until so many rounds are finished, with so many tests that take as long as the last; `None` if unknown."""
        return self._seconds / self._rounds * (rounds - self._done) + self._test * tests if self._rounds else None

    def _lap(self) -> float:
        before, self._before = self._before, time.perf_counter()
        return self._before - before


def _in_words(seconds: float) -> str:
    """A time as precise as an estimate of it can be."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def table(shown: report.Table) -> None:
    """Prints a table."""
    console.print(report.rich_table(shown.title, shown.headings, shown.rows))
    console.print()
