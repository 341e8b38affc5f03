"""Rows that later code, or another study, may have changed.

A row has digests of the source that made it. If they differ from those of this source, the rule for digests may have changed and
not the source. Then today's rule computes the digests again, from the source of the row's own commit.
"""

import atexit
import functools
import io
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.leaderboard import board
from experiments.leaderboard.board import Line
from experiments.reproduce.run_list import Run
from fedjax_meta.study import Study, made
from fedjax_meta.study.scenario import Scenario

METHOD, RUNNER = "the method's files", "the runner"

OLDEST = 100
"""How many commits of the package are looked at for the last one at which a row was current."""


def rows(listed: Sequence[Run], lines: Mapping[str, Sequence[Line]]) -> Iterator[tuple[Line, list[str]]]:
    """The first lines of rows that were made by other code or another study than that of this folder, and what changed."""
    studies = {run.name: run.load() for run in listed if run.name in {line.run for some in lines.values() for line in some}}
    for some in lines.values():
        for first in {line.system: line for line in reversed(some) if line.method}.values():
            what = what_changed(first, studies.get(first.run))
            if what:
                yield first, what


def in_words(listed: Sequence[Run], lines: Mapping[str, Sequence[Line]]) -> list[str]:
    """What `rows` finds, a line each."""
    return [
        f"{first.scenario}, {first.system}: {' and '.join(what)} changed since {(first.again or first.commit)[:12]}"
        for first, what in rows(listed, lines)
    ]


def what_changed(line: Line, study: Study | None) -> list[str]:
    """What is not as it was when a line was made, in words."""
    if study is None or line.scenario not in study.scenarios or line.system not in study.systems:
        return ["the study"]
    place = study.scenario(line.scenario)
    now = made.digests(line.method, place)
    own = {"method": line.made, "runner": line.runner}
    then = [own if own == now else _of_commit(commit, line.method, place) or own for commit in _commits(line)]
    what = [
        word
        for part, word in {"method": METHOD, "runner": RUNNER}.items()
        if own[part] != now[part] and any(one[part] != now[part] for one in then)
    ]
    same = line.said == board.said(study, line.scenario, line.system)
    return what if same else [*what, "the study"]


def last_commit(line: Line, place: Scenario) -> str | None:
    """The last commit of the package with the files of a line's method as they were for the line.

    Where none of the last `OLDEST` ones has them, it is the one that made the line; `None` where several did, or it is not to be
    had.
    """
    own = _commits(line)
    made_by = [_of_commit(commit, line.method, place) for commit in own]
    wanted = {line.made, *(one["method"] for one in made_by if one is not None)}
    command = ["git", "-C", str(made.ROOT.parent), "log", f"-n{OLDEST}", "--format=%H", "--", made.ROOT.name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    for commit in ended.stdout.split():
        found = _of_commit(commit, line.method, place)
        if found is not None and found["method"] in wanted:
            return commit
    return own[0] if len(own) == 1 and source(own[0]) is not None else None


def _commits(line: Line) -> list[str]:
    return (line.again or line.commit).split("+")


def _of_commit(commit: str, method: str, place: Scenario) -> dict[str, str] | None:
    """The digests of the source of a commit; `None` where it cannot be had, or has no such method or tables."""
    package = source(commit)
    if package is None:
        return None
    try:
        return made.digests(method, place, package)
    except FileNotFoundError:
        return None


@functools.cache
def source(commit: str) -> Path | None:
    """The package of a commit, in a folder that goes with this process.

    `None` where the repository lacks it, or tracked files differed from it: then the name is none of a commit.
    """
    command = ["git", "-C", str(made.ROOT.parent), "archive", "--format=tar", commit, made.ROOT.name]
    ended = subprocess.run(command, capture_output=True, check=False)
    if ended.returncode:
        return None
    place = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as file:
        file.extractall(place, filter="data")
    return Path(place) / made.ROOT.name
