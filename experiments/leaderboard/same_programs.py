"""Finds rows that later code has left as they were: by their programs, which takes seconds a row, or by their first rounds.

Programs may differ and still compute the same, e.g. when the state of the clients got one more array.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.leaderboard import again, board, changed, programs
from experiments.leaderboard.board import Line
from experiments.reproduce.run_list import Run
from fedjax_meta.study import Study, made

START = 2
"""So many rounds are the first ones. In the second, clients come back, and rounding has not been amplified yet."""


def clear(run: Run, data_dir: str | None = None, start: bool = False) -> None:
    """Makes committed rows of a run current again whose method's files have changed, but not what they compute.

    This code is compared with the last commit that had the files of the row. Rows that differ stay marked; `again.confirm` trains
    these.

    Args:
      run: of the list.
      data_dir: the folder of the data sets.
      start: train the first rounds of the row's first seed by both, and compare the scores of every client, up to rounding (see
        `again.Again`), in float64; else compare the programs.
    """
    study, what = run.load(), "first rounds" if start else "programs"
    by_commit: dict[str | None, list[Line]] = {}
    for row, *_ in board.rows_that_lack(run, study, lambda rows: changed.METHOD in changed.what_changed(rows[0], study)):
        by_commit.setdefault(changed.last_commit(row, study.scenario(row.scenario)), []).append(row)
    for commit, rows in by_commit.items():
        for some in [[row] for row in rows] if start else [rows]:  # a row that takes minutes is written when it is done
            for row, (same, more) in zip(some, _same(commit, some, study, data_dir, start), strict=True):
                if same:
                    board.rewrite(row, made=made.digests(row.method, study.scenario(row.scenario))["method"])
                words = f"the same {what} as at" if same else f"OTHER {what.upper()}, or none to compare, than at"
                print(f"{row.scenario}, {row.system}: {words} {(commit or 'no commit')[:12]}{more}", flush=True)


def _same(commit: str | None, rows: Sequence[Line], study: Study, data_dir: str | None, start: bool) -> list[tuple[bool, str]]:
    """Whether this code gives each row what a commit gave it, and more words about that."""
    package = None if commit is None else changed.source(commit)
    if package is None:
        return [(False, "")] * len(rows)
    commands = [again.words(row, board.chosen(row, study.systems[row.system]), data_dir) for row in rows]
    if start:
        first = ["--set", f"rounds={START}", "--set", "eval_every=1"]
        return [_same_start(package, row, [*words, *first]) for row, words in zip(rows, commands, strict=True)]
    before, now = (_digests(source, commands) for source in (package, made.ROOT))
    return [(bool(old) and old == new, "") for old, new in zip(before, now, strict=True)]


def _same_start(package: Path, row: Line, words: Sequence[str]) -> tuple[bool, str]:
    """Whether two versions of the code give a training the same scores, and how far its losses are apart after each round."""
    sources = {"its commit": package, "this code": made.ROOT}
    before, now = (again.by_code(whose, source.parent, row, words, float64=True) for whose, source in sources.items())
    if before is None or now is None:
        return False, ""
    found = again.compared(before, now)
    return found.alike, f"; losses apart {found.gaps}"


def _digests(package: Path, commands: Sequence[Sequence[str]]) -> list[str]:
    """See `programs`; an empty one where the source gives no programs."""
    ended = subprocess.run(
        [sys.executable, "-P", programs.__file__],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        input=json.dumps(commands),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ended.stdout.split("\n")[: len(commands)]
