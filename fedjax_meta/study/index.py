"""An index over the runs below a folder."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_meta import checks, disk, report
from fedjax_meta.study.folder import error_of, read_run
from fedjax_meta.study.result_files import read_final
from fedjax_meta.study.study import load
from fedjax_meta.study.tuning import KNOWN, last_scores


class Run(NamedTuple):
    """A folder of a run.

    Attributes:
      folder: where it is.
      title: of the study; empty where the folder cannot be read.
      started: date and time, as in `run.json`; empty where the folder cannot be read.
      state: "finished", "running", "stopped", "failed" with the error, or why the folder cannot be read.
      best: for each scenario with a result, its name, the system of the best main score over known clients, and that score with
        its name.
    """

    folder: Path
    title: str
    started: str
    state: str
    best: list[tuple[str, str, str]]


def runs_in(root: Path) -> list[Run]:
    """The runs below a folder, or in it, the newest first.

    Raises:
      OSError: there is no such folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    found = [_run_or_why(path.parent) for path in sorted(root.rglob("run.json"))]
    return sorted(found, key=lambda run: run.started, reverse=True)


def _run_or_why(folder: Path) -> Run:
    # A damaged file, or a method of the user's own that is gone, says nothing about the other runs.
    try:
        return _run(folder)
    except (ValueError, OSError) as error:
        return Run(folder, "", "", f"cannot be read: {checks.first_line(error)}", [])


def _run(folder: Path) -> Run:
    content, study = read_run(folder), load(folder / "study.yaml")
    winners = []
    for scenario in study.scenarios:
        names, means, kind = [], [], None
        for name in study.systems_on(scenario):
            tests = [(trial, trial.rows[-1]["tests"][KNOWN]) for trial in read_final(folder, study, scenario, name)[0]]
            if not tests:
                continue
            means.append(float(np.mean([last_scores(*one, study.score).mean() for one in tests])))
            names.append(name)
            kind = report.main_score(tests[0][1], study.score).kind
        if kind is not None and np.isfinite(means).any():
            winner = kind.best(means)
            title = study.title_of(names[winner])
            winners.append((scenario, title, f"{kind.words} {kind.text(means[winner])}{' %' if kind.share else ''}"))
    if content.get("finished"):
        state = "finished"
    elif disk.locked(folder):
        state = "running"
    else:
        error = error_of(folder)
        state = "stopped" if error is None else f"failed: {error}"
    return Run(folder, study.title, content.get("started", ""), state, winners)
