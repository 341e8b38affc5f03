"""Where the systems of another run stand among the committed rows of the leaderboard."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.leaderboard import board, gaps, page
from experiments.leaderboard.board import LOCAL, Line
from experiments.reproduce import extracts
from experiments.reproduce.run_list import Run
from fedjax_meta import disk, escape, report
from fedjax_meta.study import load

YOURS = " (yours)"
"""Follows the names of the run's systems."""


def write(folder: Path, listed: Sequence[Run]) -> tuple[list[report.Table], Path]:
    """The tables of a run's scenarios, which are also written into its folder, and that file."""
    found, path = tables(folder, listed), folder / "leaderboard.md"
    text = ["# Beside the leaderboard", "", explanation(), ""]
    for one in found:
        text += [f"## {escape.markdown(one.title)}", "", report.markdown_table(one.headings, one.rows), ""]
    disk.write_text(path, "\n".join(text))
    return found, path


def explanation() -> str:
    """What the tables mean."""
    return (
        "Scores are in percent where they are shares; ± is the sample standard deviation over seeds. Differences are taken seed "
        "by seed, with the 95 % interval of their mean; above 0, the row is better. Points are those of the grid that were "
        f"tried; {gaps.END} the best one stands at an end of it. Behind local are the known clients that would do better by the "
        "local training of the row's own run."
    )


def tables(folder: Path, listed: Sequence[Run]) -> list[report.Table]:
    """A table for each scenario of a run: its systems and the committed rows, by the scores of known clients.

    Args:
      folder: of the run; its study lies over that of the leaderboard (`extends`) and has systems of its own.
      listed: all runs of the list.

    Raises:
      ValueError: no run, no scenario of the leaderboard, nothing finished; clients, rounds, seeds or tuning other than
        those of the rows.
    """
    if not (folder / "study.yaml").is_file():
        raise ValueError(f"{folder} holds no run (no study.yaml)")
    study, committed = load(folder / "study.yaml"), board.read_lines()
    scenarios = [name for name in study.scenarios if name in committed]
    if not scenarios:
        raise ValueError(
            f"{folder} has none of the leaderboard's scenarios ({', '.join(committed)}): "
            "its study must extend experiments/leaderboard.yaml"
        )
    cells = board.cells_of(Run(name=folder.name, title="", study=str(folder / "study.yaml"), hours=0, cost=""), folder)
    found = []
    for scenario in scenarios:
        mine = [cell for cell in cells if cell.found.scenario == scenario]
        if not mine:
            raise ValueError(f"{folder} has no finished system on {scenario}")
        _check_alike(folder, scenario, listed, committed[scenario], mine[0].found.fingerprint)
        found.append(_table(scenario, board.trained(mine), committed[scenario]))
    return found


def _check_alike(folder: Path, scenario: str, listed: Sequence[Run], rows: Sequence[Line], fingerprint: str) -> None:
    """Raises `ValueError` unless the run has the clients, rounds, seeds, cohorts, model and tuning of the committed rows."""
    run = next(run for run in listed if scenario in run.load().scenarios)
    # Other systems of that name may have other options; the local training is what all are measured by.
    local = [name for name, system in run.load().systems.items() if system.method == LOCAL]
    extracts.check_same(dataclasses.replace(run, systems=local[:1]), folder)
    if fingerprint != rows[0].data:
        raise ValueError(
            f"{folder}: the clients of {scenario} are not those of the leaderboard: {fingerprint}, not {rows[0].data}"
        )


def _table(scenario: str, own: Sequence[Line], committed: Sequence[Line]) -> report.Table:
    systems = board.by_system([*(line._replace(system=line.system + YOURS) for line in own), *committed])
    reference = _reference(systems)
    headings = ["system", "place", f"known{own[0].kind.direction}", "worst 10 %", "new"]
    headings += [f"{group}, minus {reference}" for group in ("known", "new")] + ["behind local", "points"]
    rows, place = [], 0
    for name in sorted(systems, key=lambda name: -board.worth(systems[name])):
        counts = bool(systems[name][0].method) and math.isfinite(board.worth(systems[name]))
        place += counts
        rows.append(
            [
                name,
                str(place) if counts else "",
                *page.score_cells(systems[name], () if name == reference else systems[reference]),
                page.points_cell(systems[name][0]),
            ]
        )
    return report.Table(headings, rows, scenario).used()


def _reference(systems: Mapping[str, Sequence[Line]]) -> str:
    """What differences are taken to: the first of the run's systems that the leaderboard does not have."""
    own = [name for name in systems if name.endswith(YOURS)]
    new = [name for name in own if name.removesuffix(YOURS) not in systems and systems[name][0].method != LOCAL]
    return next(iter(new), page.REFERENCE)
