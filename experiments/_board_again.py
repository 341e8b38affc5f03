"""Finished systems trained once more after the code has changed, to see whether their rows still hold.

A digest of the source says that a change may have changed a number, not that it did. A row whose first seed comes out the same is
as good as made by the new code: bit for bit, or up to rounding, which a long training amplifies (see `board.Again`).

Another processor or version of JAX changes numbers too. Where a row does not come out, its own commit trains it again on this
machine: if both codes give the same, the code is not what changed the row.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import _board as board
from experiments import _standing as standing
from fedjax_meta import report
from fedjax_meta.study import Study, made
from fedjax_meta.study import run as runner
from fedjax_meta.study.folder import read_trials
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.tuning import KNOWN, Point, Trial


class _Silent(runner.Watcher):
    """Shows nothing."""


def confirm(run: standing.Run, folder: Path, data_dir: str | None = None) -> None:
    """Trains the first seed of each finished system that this code has neither trained nor tried, and saves what comes out."""
    done = board.read_again(folder)
    built: dict[str, Clients] = {}
    for cell in board.cells_of(run, folder):
        scenario, now = cell.found.scenario, made.made(cell.found.method, cell.study.scenario(cell.found.scenario))
        last = done.setdefault(scenario, {}).get(cell.system)
        if (now["method"], now["runner"]) in (cell.digests(last), last and (last.method, last.runner)):
            continue
        if scenario not in built:
            built[scenario] = cell.study.scenarios[scenario].build(data_dir)
        before = cell.found.trials[0]
        after = _trained(cell, before, built[scenario])
        now_is = {"commit": board.commit_of(now), "method": now["method"], "runner": now["runner"], "seed": before.seed}
        scores = {"score": _mean(cell, after), "before": _mean(cell, before)}
        found = board.Again(**now_is, **scores, **_compared(before, after))
        if not found.alike and (old := by_its_own_code(cell, before, data_dir)) is not None:
            found = board.Again(**now_is, **scores, **_compared(old, after), here=_mean(cell, old))
        done[scenario][cell.system] = found
        board.write_again(folder, done)
        words = "the same" if found.same else "the same up to rounding" if found.alike else "CHANGED"
        if not np.isnan(found.here):
            words += f" as by its own commit on this machine ({found.here:.6g})"
        gaps = ", ".join(f"{gap:.0e}" for gap in found.apart)
        print(
            f"{scenario}, {cell.system}: {words}; {found.before:.6g}, now {found.score:.6g}; losses apart {gaps}", flush=True
        )


def train(
    study: Study, scenario: str, system: str, point: Point, seeds: Sequence[int], clients: Clients, folder: Path
) -> Study:
    """Trains one system of a study with one point of its grid, into a folder; returns the study of that folder."""
    one = dataclasses.replace(study.systems[system], grid={name: [value] for name, value in point.items()})
    alone = dataclasses.replace(
        study, seeds=list(seeds), systems={system: one}, scenarios={scenario: study.scenarios[scenario]}
    )
    runner.run(alone, folder, watcher=_Silent(), clients={scenario: clients})
    return alone


def _trained(cell: board.Cell, before: Trial, clients: Clients) -> Trial:
    """A trial once more."""
    scenario = cell.found.scenario
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        train(cell.study, scenario, cell.system, before.numbers, [before.seed], clients, folder)
        trials, _ = read_trials(folder / "results" / scenario / f"{cell.system}.final.json")
    (trial,) = trials.values()
    return trial


def by_its_own_code(cell: board.Cell, before: Trial, data_dir: str | None = None) -> Trial | None:
    """A trial once more, by the code that made it, in a process of its own.

    `None` where that code cannot be had: several codes made the row, tracked files differed from the commit, or the repository
    does not have it; and where it cannot train the system any more. Both are printed.
    """
    makers = {None if maker["dirty"] else maker["commit"] for maker in cell.makers}
    name, scenario = cell.system, cell.found.scenario
    if len(makers) != 1 or None in makers:
        print(f"{scenario}, {name}: no single commit made it", flush=True)
        return None
    grid = json.dumps({number: [value] for number, value in before.numbers.items()})
    with tempfile.TemporaryDirectory() as place:
        code, out = Path(place) / "code", Path(place) / "run"
        train = [sys.executable, "-m", "fedjax_meta", "run", str(cell.folder.resolve() / "study.yaml"), "--systems", name]
        train += ["--set", f"seeds=[{before.seed}]", "--set", f"systems.{name}.grid={grid}", "--out", str(out)]
        train += [] if data_dir is None else ["--data-dir", str(Path(data_dir).resolve())]
        commands = [
            ["git", "clone", "--quiet", "--shared", "--no-checkout", str(made.ROOT.parent), str(code)],
            ["git", "-C", str(code), "checkout", "--quiet", *map(str, makers)],
            train,
        ]
        for command in commands:
            cwd = code if command is train else None
            ended = subprocess.run(
                command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(code)}, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                last = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
                print(f"{scenario}, {name}: its commit cannot train it: {' '.join(last)}", flush=True)
                return None
        trials, _ = read_trials(out / "results" / scenario / f"{name}.final.json")
    (trial,) = trials.values()
    return trial


def _compared(before: Trial, after: Trial) -> dict[str, Any]:
    """What `board.Again` says of two trainings."""
    return {
        "same": _tests(after.rows[-1]) == _tests(before.rows[-1]),
        "apart": _apart(before, after),
        "scored_alike": _scored_alike(before, after),
    }


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
    return float(report.main_score(trial.rows[-1]["tests"][KNOWN], cell.study.score).mean)
