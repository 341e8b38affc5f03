"""Finished systems trained once more after the code has changed, to see whether their rows still hold.

A digest of the source says that a change may have changed a number, not that it did. A row whose first seed comes out the same is
as good as made by the new code: bit for bit, or up to rounding, which a long training amplifies (see `board.Again`).
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import _board as board
from experiments import _standing as standing
from fedjax_meta import report
from fedjax_meta.study import made
from fedjax_meta.study import run as runner
from fedjax_meta.study.folder import read_trials
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.tuning import Trial


class _Silent(runner.Watcher):
    """Shows nothing."""


def confirm(run: standing.Run, folder: Path, data_dir: str | None = None) -> None:
    """Trains the first seed of each finished system that this code has neither trained nor tried, and saves what comes out."""
    done = board.read_again(folder)
    built: dict[str, Clients] = {}
    for cell in board.cells_of(run, folder):
        scenario, now = cell.found.scenario, made.made(cell.found.method)
        last = done.setdefault(scenario, {}).get(cell.system)
        if (now["method"], now["runner"]) in (cell.digests(last), last and (last.method, last.runner)):
            continue
        if scenario not in built:
            built[scenario] = cell.study.scenarios[scenario].build(data_dir)
        before = cell.found.trials[0]
        after = _trained(cell, before, built[scenario])
        found = board.Again(
            commit=board.commit_of(now),
            method=now["method"],
            runner=now["runner"],
            seed=before.seed,
            score=_mean(cell, after),
            before=_mean(cell, before),
            same=_tests(after.rows[-1]) == _tests(before.rows[-1]),
            apart=_apart(before, after),
            scored_alike=_scored_alike(before, after),
        )
        done[scenario][cell.system] = found
        board.write_again(folder, done)
        words = "the same" if found.same else "the same up to rounding" if found.alike else "CHANGED"
        gaps = ", ".join(f"{gap:.0e}" for gap in found.apart)
        print(
            f"{scenario}, {cell.system}: {words}; {found.before:.6g}, now {found.score:.6g}; losses apart {gaps}", flush=True
        )


def _trained(cell: board.Cell, before: Trial, clients: Clients) -> Trial:
    """A trial once more, by the same study with one system, one point and one seed."""
    scenario, study = cell.found.scenario, cell.study
    system = dataclasses.replace(study.systems[cell.system], grid={name: [value] for name, value in before.numbers.items()})
    alone = dataclasses.replace(
        study, seeds=[before.seed], systems={cell.system: system}, scenarios={scenario: study.scenarios[scenario]}
    )
    with tempfile.TemporaryDirectory() as place:
        runner.run(alone, Path(place) / "run", watcher=_Silent(), clients={scenario: clients})
        trials, _ = read_trials(Path(place) / "run" / "results" / scenario / f"{cell.system}.final.json")
    (trial,) = trials.values()
    return trial


def _tests(row: Mapping[str, Any]) -> str:
    """The scores of every client in an evaluation, without means over clients, as text in which NaN equals NaN."""
    tests = {group: {**test, "scores": None} for group, test in row["tests"].items()}
    return json.dumps(tests, sort_keys=True)


def _apart(before: Trial, after: Trial) -> list[float]:
    """See `board.Again`; infinity where one has no finite loss and the other has, or other rounds were tested."""
    if [row["round"] for row in before.rows] != [row["round"] for row in after.rows]:
        return [float("inf")]
    found = []
    for old, new in zip(before.rows, after.rows, strict=True):
        gaps = [_gap(np.array(test["loss"]), np.array(new["tests"][group]["loss"])) for group, test in old["tests"].items()]
        found.append(max(gaps))
    return found


def _scored_alike(before: Trial, after: Trial) -> bool:
    """See `board.Again`."""
    pairs = zip(before.rows, after.rows, _apart(before, after), strict=False)
    return all(_tests(old) == _tests(new) for old, new, gap in pairs if gap == 0)


def _gap(old: np.ndarray, new: np.ndarray) -> float:
    gap = np.abs(new - old) / np.maximum(np.abs(old), 1)
    gap[~np.isfinite(old) & ~np.isfinite(new)] = 0
    return float(np.max(np.where(np.isnan(gap), np.inf, gap)))


def _mean(cell: board.Cell, trial: Trial) -> float:
    return float(report.main_score(trial.rows[-1]["tests"][runner.KNOWN], cell.study.score).mean)
