"""New clients with fewer samples to adapt on, and with other numbers of steps.

Finished models are tested. If the folder of a row is gone, its models are trained again at the point that the row names.
"""

import csv
import dataclasses
import inspect
import io
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.leaderboard import again, board
from experiments.leaderboard.board import Line
from experiments.reproduce.run_list import Run
from fedjax_meta import disk, report, sweeps
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.blocks import Compiled, run_keys
from fedjax_meta.data import FederatedData
from fedjax_meta.evaluation import evaluate
from fedjax_meta.keys import tagged
from fedjax_meta.methods import METHODS
from fedjax_meta.simulation import Record
from fedjax_meta.study import Study, compare
from fedjax_meta.study.export import restored
from fedjax_meta.study.job import final_phase
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.system import System, keywords
from fedjax_meta.study.tuning import NEW

SAMPLES = (1, 2, 5, 10, 20, 50)
"""Numbers of samples that a new client adapts on, beside all that it has; those that no client has are left out."""

STEPS = (1, 2, 5, 10, 20)
"""Passes or steps of its adaptation."""

ALONE = (50, 100)
"""More passes, for clients that train by themselves: what others brought along, they have to learn."""

TAKEN_BY = ("finetune_epochs", "new_client_epochs", "new_client_steps", "test_steps", "test_epochs")
"""The options that say how long a new client adapts; of a system, the first of its `tested_with`, or else the first of these that
its method takes and that is above 0."""


class Tested(NamedTuple):
    """A test of new clients.

    Attributes:
      system, seed: what was tested.
      samples: that a client adapts on at most; 0 for all.
      option, steps: the option that says how long it adapts and its value; "" and 0 as in the run.
      score: mean over new clients, in percent if it is a share.
    """

    system: str
    seed: int
    samples: int
    option: str
    steps: int
    score: float


def measure(run: Run, folder: Path, data_dir: str | None = None) -> None:
    """Tests the new clients of each finished system that has no such tests yet, for `new_clients.csv` of the folder."""
    found, built = read(folder), {}
    known = {one.system for one in found}
    for cell in board.cells_of(run, folder):
        scenario = cell.found.scenario
        if cell.system in known:
            continue
        if scenario not in built:
            built[scenario] = cell.study.scenarios[scenario].build(data_dir)
        if built[scenario].new is not None:
            one = tests(cell, built[scenario])
            found += one
            disk.write_text(folder / "new_clients.csv", to_csv(found))
            print(f"{scenario}, {cell.system}: {len(one)} tests of new clients", flush=True)


def measure_rows(run: Run, there: Iterable[str], data_dir: str | None = None) -> None:
    """Tests the new clients of each committed row of a run that has no such tests yet, for new_clients/ of docs/leaderboard.

    Its seeds are trained once more. Another code or machine gives other numbers: what becomes of the row's score is printed.

    Args:
      run: the run.
      there: systems that its folder has tests of.
      data_dir: where data sets are.
    """
    study, built, has = run.load(), {}, {*there}

    def lack(rows: Sequence[Line]) -> bool:
        known = {one.system for one in committed(rows[0].scenario)}
        return not np.isnan([line.new for line in rows]).all() and rows[0].system not in known | has

    for rows in board.rows_that_lack(run, study, lack):
        scenario, name = rows[0].scenario, rows[0].system
        if scenario not in built:
            built[scenario] = study.scenarios[scenario].build(data_dir)
        one = _of_rows(run, study, rows, built[scenario])
        disk.write_text(board.RAW / "new_clients" / f"{scenario}.csv", to_csv([*committed(scenario), *one]))
        print(f"{scenario}, {name}: {len(one)} tests of new clients; {_moved(rows, one)}", flush=True)


def committed(scenario: str) -> list[Tested]:
    """The committed tests of the new clients of a scenario."""
    return _in_file(board.RAW / "new_clients" / f"{scenario}.csv")


def _of_rows(run: Run, study: Study, rows: Sequence[Line], clients: Clients) -> list[Tested]:
    scenario, name = rows[0].scenario, rows[0].system
    point = board.chosen(rows[0], study.systems[name])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        alone = again.train(study, scenario, name, point, [line.seed for line in rows], clients, folder)
        (finished,) = compare.finished([folder])
        return tests(board.Cell(run, folder, alone, name, finished), clients)


def _moved(rows: Sequence[Line], tested: Sequence[Tested]) -> str:
    before = float(np.mean([line.new for line in rows]))
    now = float(np.mean([one.score for one in tested if not one.samples and not one.option]))
    return f"{now:.2f} with all samples, {before:.2f} in the row"


def tests(cell: board.Cell, clients: Clients) -> list[Tested]:
    """All tests of a system's new clients; those with all samples and no option repeat what the run found."""
    assert clients.new is not None
    final = final_phase(cell.study, cell.found.scenario, cell.system, clients)
    trials, (option, usual) = cell.found.trials, adapts_by(cell.study.systems[cell.system])
    states = [restored(final, cell.folder, trial.seed, clients) for trial in trials]

    def tested(algorithm: Algorithm, data: FederatedData, samples: Sequence[int]) -> list[Tested]:
        # One program for all seeds, which have the same numbers, and for all numbers of samples.
        test, made = Compiled(jax.jit(_test(algorithm, cell.study.metrics))), []
        for most in samples:
            for trial, (_, state) in zip(trials, states, strict=True):
                key = tagged(run_keys(jax.random.key(trial.seed))[2], NEW, state.round)
                found = test(key, state, fewer(data, most))
                made.append(Tested(cell.system, trial.seed, most, "", 0, _score(cell, found)))
        return made

    most = int(np.asarray(clients.new.sizes("support")).max())
    plain = sweeps.member_algorithm(final.build, states[0][0])
    made = tested(plain, clients.new, [0, *(number for number in SAMPLES if number < most)])
    as_in_the_run = made[: len(trials)]
    system = cell.study.system(cell.system, cell.found.scenario)
    for steps in (*STEPS, *(ALONE if cell.found.method == board.LOCAL else ())) if option else ():
        found = as_in_the_run
        if steps != usual:
            other = dataclasses.replace(system, tested_with={**system.tested_with, option: steps})
            found = tested(sweeps.alone(*other.tested_parts(clients, **trials[0].numbers)), clients.new, [0])
        made += [one._replace(option=option, steps=steps) for one in found]
    return made


def adapts_by(system: System) -> tuple[str, int]:
    """The option of a system that says how long its new clients adapt, and its value; "" and 0 if they do not."""
    takes = () if system.pooled else keywords(METHODS[system.method])
    resolved = {**defaults(system.method), **system.options, **system.tested_with}
    return next(
        ((name, resolved[name]) for name in (*system.tested_with, *TAKEN_BY) if name in takes and resolved[name]), ("", 0)
    )


def defaults(method: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    return {name: one.default for name, one in inspect.signature(METHODS[method]).parameters.items()}


def fewer(data: FederatedData, most: int) -> FederatedData:
    """The clients with at most so many samples in the view "support", the first ones; 0 leaves all."""
    if not most:
        return data
    return dataclasses.replace(data, size={**data.size, "support": jnp.minimum(data.size["support"], most)})


def _test(algorithm: Any, metrics: Sequence[str]) -> Any:
    return partial(
        evaluate, algorithm, support="support", query="query", known=False, metrics=tuple(metrics) or None, devices=1
    )


def _score(cell: board.Cell, evaluation: Any) -> float:
    found = jax.tree.map(np.asarray, evaluation)
    row = report.compact(Record(0, {}, {"it": found}, 0.0, 0.0, ()))["tests"]["it"]
    return report.main_score(row, cell.study.score).mean


def to_csv(tested: Iterable[Tested]) -> str:
    """Tests with a heading."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Tested._fields)
    writer.writerows([*one[:-1], f"{one.score:.6g}"] for one in tested)
    return file.getvalue()


def from_csv(text: str) -> list[Tested]:
    """The tests that `to_csv` wrote."""
    kinds = Tested.__annotations__
    return [Tested(**{name: kinds[name](cell) for name, cell in row.items()}) for row in csv.DictReader(io.StringIO(text))]


def read(folder: Path) -> list[Tested]:
    """The tests in a run's folder."""
    return _in_file(folder / "new_clients.csv")


def _in_file(path: Path) -> list[Tested]:
    return from_csv(path.read_text(encoding="utf-8")) if path.is_file() else []
