"""Trains committed rows again after the code has changed, to see whether they still hold.

A digest of the source says that a change may have changed a number, not that it did. If the first seed of a row gives the same
numbers again, the row is as good as if the new code had made it.

Rounding, another processor and another version of JAX change numbers too. So if a row gives other numbers, its own commit trains
it again on this machine. If both versions of the code give the same numbers, the row stays. "The same" allows another order of
sums, which a long training amplifies.
"""

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.leaderboard import board, changed
from experiments.leaderboard.board import NAN, Line
from experiments.reproduce.run_list import Run
from fedjax_meta.study import Study, compare, made
from fedjax_meta.study import run as runner
from fedjax_meta.study.result_files import read_trials
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.tuning import Point, Trial

ROUNDING = (1e-4, 1e-2)
"""What losses may differ by in the first test in which they differ, and in the next one, if sums were made in another order."""


class Again(NamedTuple):
    """A training once more, compared with that of the row's own commit on the same machine.

    Attributes:
      same: whether every last score of every client is the same, bit for bit.
      apart: of each test in order, the largest difference of a client's loss, relative to 1 or the loss if that is larger.
      scored_alike: whether the other scores are the same in every test whose losses are.
    """

    same: bool
    apart: list[float]
    scored_alike: bool = True

    @property
    def alike(self) -> bool:
        """Whether the trainings are the same up to rounding: near each other as long as training has not amplified it."""
        first = next((number for number, gap in enumerate(self.apart) if gap), 0)
        near = all(gap <= most for gap, most in zip(self.apart[first:], ROUNDING, strict=False))
        return self.same or (self.scored_alike and near)

    @property
    def gaps(self) -> str:
        """How far the losses are apart, in words."""
        return ", ".join(f"{gap:.0e}" for gap in self.apart)


def confirm(run: Run, data_dir: str | None = None) -> None:
    """Trains the first seed of each committed row of a run that other code made, and says what comes out.

    Rows that come out the same, or by their own commit as by this code, get the digests of this code in docs/leaderboard/.
    """
    study, built = run.load(), {}
    for rows in board.rows_that_lack(run, study, lambda rows: bool(changed.what_changed(rows[0], study))):
        row = rows[0]
        if row.scenario not in built:
            built[row.scenario] = study.scenarios[row.scenario].build(data_dir)
        point = board.chosen(row, study.systems[row.system])
        scores, after = _trained(study, row, point, built[row.scenario])
        same, words = _numbers(row) == _numbers(row._replace(**scores)), "the same"
        if not same:
            before = by_its_own_code(row, point, data_dir)
            found = None if before is None else compared(before, after)
            same = found is not None and found.alike
            words = _in_words(found)
        if same:
            now = made.made(row.method, study.scenario(row.scenario))
            moved = NAN if words == "the same" else scores["known"] - row.known
            fields = {"again": board.commit_of(now), "made": now["method"], "runner": now["runner"], "moved": moved}
            board.rewrite(row, **fields)
        print(f"{row.scenario}, {row.system}: {words}; {row.known:.6g}, now {scores['known']:.6g}", flush=True)


def _in_words(found: Again | None) -> str:
    if found is None:
        return "OTHER NUMBERS, and nothing to hold them against"
    if not found.alike:
        return f"CHANGED by the code; losses apart {found.gaps}"
    return f"as by its own commit on this machine{'' if found.same else ', up to rounding'}"


def _numbers(row: Line) -> list[str]:
    """What a training decides of a row, as it is written."""
    return [board.written(value) for value in (row.known, row.worst, row.new, row.diverged)]


def _trained(study: Study, row: Line, point: Point, clients: Clients) -> tuple[dict[str, Any], Trial]:
    """What this code makes of the row of a seed, and the training."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        train(study, row.scenario, row.system, point, [row.seed], clients, folder)
        (finished,) = compare.finished([folder])
        (found,) = compare.compared([finished])
        (trial,) = finished.trials
        return board.scores_of(found, 0), trial


def train(
    study: Study, scenario: str, system: str, point: Point, seeds: Sequence[int], clients: Clients, folder: Path
) -> Study:
    """Trains one system of a study with one point of its grid, into a folder; returns the study of that folder."""
    one = dataclasses.replace(study.systems[system], grid={name: [value] for name, value in point.items()})
    alone = dataclasses.replace(
        study, seeds=list(seeds), systems={system: one}, scenarios={scenario: study.scenarios[scenario]}
    )
    runner.run(alone, folder, clients={scenario: clients})
    return alone


def words(row: Line, point: Point, data_dir: str | None = None) -> list[str]:
    """What follows `fedjax-meta run` to train the seed of a row alone, with the point that was chosen; without a folder."""
    found = shlex.split(row.command)[2:]
    at = found.index("--out")
    grid = json.dumps({number: [value] for number, value in point.items()})
    found[at : at + 2] = ["--set", f"seeds=[{row.seed}]", "--set", f"systems.{row.system}.grid={grid}"]
    return found + ([] if data_dir is None else ["--data-dir", str(Path(data_dir).resolve())])


def by_its_own_code(row: Line, point: Point, data_dir: str | None = None) -> Trial | None:
    """The training of a row once more, by the commit that made it, in a process of its own.

    `None` where that code cannot be had: several commits made the row, tracked files differed from the commit, or the repository
    does not have it; and where it cannot train the system any more. Both are printed.
    """
    name = row.system
    if not row.commit.isalnum() or row.commit == "unknown":
        print(f"{row.scenario}, {name}: no single commit made it", flush=True)
        return None
    with tempfile.TemporaryDirectory() as place:
        code = Path(place) / "code"
        commands = [
            ["git", "clone", "--quiet", "--shared", "--no-checkout", str(made.ROOT.parent), str(code)],
            ["git", "-C", str(code), "checkout", "--quiet", row.commit],
        ]
        for command in commands:
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                print(f"{row.scenario}, {name}: its commit cannot train it: {_last_line(ended)}", flush=True)
                return None
        return by_code("its commit", code, row, words(row, point, data_dir), cwd=code)


def by_code(
    whose: str, code: Path, row: Line, command: Sequence[str], *, cwd: Path | None = None, float64: bool = False
) -> Trial | None:
    """The one training that `fedjax-meta run` makes with the words of a row (see `words`), in a process of its own.

    Args:
      whose: what the code is, for the message.
      code: the folder of the package to run.
      row: what is trained.
      command: the words.
      cwd: where it runs; here if not given.
      float64: whether to compute in float64.

    Returns:
      The training; `None` if that code cannot make it, which is printed.
    """
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "fedjax_meta", "run", *command, "--out", str(out)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(code), **({"JAX_ENABLE_X64": "1"} if float64 else {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            print(f"{row.scenario}, {row.system}: {whose} cannot train it: {_last_line(ended)}", flush=True)
            return None
        (path,) = (out / "results").glob("*/*.final.json")
        trials, _ = read_trials(path)
    (trial,) = trials.values()
    return trial


def _last_line(ended: "subprocess.CompletedProcess[str]") -> str:
    return " ".join((ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:])


def compared(before: Trial, after: Trial) -> Again:
    """What becomes of a training."""
    return Again(_tests(after.rows[-1]) == _tests(before.rows[-1]), _apart(before, after), _scored_alike(before, after))


def _tests(row: Mapping[str, Any]) -> str:
    """The scores of every client in an evaluation, without means over clients, as text in which NaN equals NaN."""
    tests = {group: {**test, "scores": None} for group, test in row["tests"].items()}
    return json.dumps(tests, sort_keys=True)


def _apart(before: Trial, after: Trial) -> list[float]:
    """See `Again`; infinity where one has no finite loss and the other has, or other rounds were tested."""
    if [row["round"] for row in before.rows] != [row["round"] for row in after.rows]:
        return [math.inf]
    found = []
    for old, new in zip(before.rows, after.rows, strict=True):
        gaps = [_gap(np.array(test["loss"]), np.array(new["tests"][group]["loss"])) for group, test in old["tests"].items()]
        found.append(max(gaps))
    return found


def _scored_alike(before: Trial, after: Trial) -> bool:
    """See `Again`."""
    pairs = zip(before.rows, after.rows, _apart(before, after), strict=False)
    return all(_tests(old) == _tests(new) for old, new, gap in pairs if gap == 0)


def _gap(old: np.ndarray, new: np.ndarray) -> float:
    gap = np.abs(new - old) / np.maximum(np.abs(old), 1)
    gap[~np.isfinite(old) & ~np.isfinite(new)] = 0
    return float(np.max(np.where(np.isnan(gap), np.inf, gap)))
