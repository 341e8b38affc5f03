"""Finds rows whose programs later code has left as they were. Nothing is trained, so that a row takes seconds."""

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


def clear(run: Run, data_dir: str | None = None) -> None:
    """Makes committed rows of a run current again whose method's files have changed, but not their programs.

    The programs of this code are compared with those of the last commit that had the files of the row. Rows whose programs differ
    stay marked; `again.confirm` trains these.
    """
    study = run.load()
    by_commit: dict[str | None, list[Line]] = {}
    for row, *_ in board.rows_that_lack(run, study, lambda rows: changed.METHOD in changed.what_changed(rows[0], study)):
        by_commit.setdefault(changed.last_commit(row, study.scenario(row.scenario)), []).append(row)
    for commit, rows in by_commit.items():
        for row, same in zip(rows, _same(commit, rows, study, data_dir), strict=True):
            if same:
                board.rewrite(row, made=made.digests(row.method, study.scenario(row.scenario))["method"])
            words = "the same programs as at" if same else "OTHER PROGRAMS, or none to compare, than at"
            print(f"{row.scenario}, {row.system}: {words} {(commit or 'no commit')[:12]}", flush=True)


def _same(commit: str | None, rows: Sequence[Line], study: Study, data_dir: str | None) -> list[bool]:
    """Whether this code gives each row the programs that a commit gave it."""
    if commit is None:
        return [False] * len(rows)
    commands = [again.words(row, board.chosen(row, study.systems[row.system]), data_dir) for row in rows]
    before, now = (_digests(source, commands) for source in (changed.source(commit), made.ROOT))
    return [bool(old) and old == new for old, new in zip(before, now, strict=True)]


def _digests(package: Path | None, commands: Sequence[Sequence[str]]) -> list[str]:
    """See `programs`; an empty one where the source is not to be had, or gives no programs."""
    if package is None:
        return [""] * len(commands)
    ended = subprocess.run(
        [sys.executable, "-P", programs.__file__],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        input=json.dumps(commands),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ended.stdout.split("\n")[: len(commands)]
