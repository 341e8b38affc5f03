"""What the leaderboard lacks: systems of the list that were not run, and missing measurements of systems that were run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from experiments.leaderboard import board
from experiments.leaderboard.board import LOCAL, Line
from experiments.leaderboard.newcomers import Tested
from experiments.reproduce.run_list import Run
from fedjax_meta import report
from fedjax_meta.study import Study


def rows_there(run: Run, lines: Mapping[str, Sequence[Line]]) -> str:
    """How many of a run's systems have a row: "0 of 27"."""
    wanted, missing = _rows_of(run, lines)
    return f"{len(wanted) - len(missing)} of {len(wanted)}"


def _rows_of(run: Run, lines: Mapping[str, Sequence[Line]]) -> tuple[list[str], list[str]]:
    """(the systems of a run, one for each scenario, those without a row)."""
    study = run.load()
    wanted = [(scenario, system) for scenario in study.scenarios for system in study.systems_on(scenario)]
    missing = [system for scenario, system in wanted if system not in {line.system for line in lines.get(scenario, ())}]
    return [system for _, system in wanted], missing


def lacking(runs: Sequence[Run], lines: Mapping[str, Sequence[Line]]) -> list[Run]:
    """The runs with systems without a current row, with these systems and their share of the hours.

    Those whose best value is at an end of a grid that may move further now are among them, and so is the local training that a
    run measures its systems by.
    """
    found = []
    for run in runs:
        study = run.load()
        places = [(scenario, system) for scenario in study.scenarios for system in study.systems_on(scenario)]
        names = {system for scenario, system in places if _is_lacking(run, study, scenario, system, lines.get(scenario, ()))}
        if names:
            local = [name for name, system in study.systems.items() if system.method == LOCAL][:1]
            systems = [name for name in study.systems if name in {*names, *local}]
            hours = round(run.hours * len(systems) / len(study.systems), 2)
            found.append(dataclasses.replace(run, systems=systems, hours=hours))
    return found


def _is_lacking(run: Run, study: Study, scenario: str, system: str, lines: Sequence[Line]) -> bool:
    rows = [line for line in lines if line.system == system]
    mine = [line for line in rows if line.run == run.name]
    if not mine:
        return not rows
    could_move_on = bool(mine[0].edge) and mine[0].extend < study.tuning.extend
    return could_move_on or mine[0].said != board.said(study, scenario, system)


def section(listed: Sequence[Run], lines: Mapping[str, Sequence[Line]], tested: Mapping[str, Sequence[Tested]]) -> list[str]:
    """The lines of the section; none where nothing is missing."""
    text = [*_not_trained(listed, lines), *_not_measured(listed, lines, tested), *_not_listed(listed)]
    return ["## Not run yet", "", *text] if text else []


def _not_trained(listed: Sequence[Run], lines: Mapping[str, Sequence[Line]]) -> list[str]:
    rows = []
    for run in listed:
        wanted, missing = _rows_of(run, lines)
        if missing:
            rows.append([run.name, run.title, board.in_words(missing, wanted), run.cost, f"{run.hours:g}"])
    if not rows:
        return []
    words = "`python -m experiments.leaderboard --data-dir DIR` runs them in this order; hours of a whole entry on two cores."
    table = report.markdown_table(["run", "title", "systems", "cost by", "hours"], rows, text_columns=4)
    return [words, "", table, ""]


def _not_listed(listed: Sequence[Run]) -> list[str]:
    """By scenario, the systems that the list asks for on other scenarios alone."""
    wanted: dict[str, list[str]] = {}
    for run in listed:
        study = run.load()
        for scenario in study.scenarios:
            wanted.setdefault(scenario, []).extend(study.systems_on(scenario))
    everywhere = list(dict.fromkeys(name for some in wanted.values() for name in some))
    rows = []
    for scenario, some in wanted.items():
        others = [name for name in everywhere if name not in some]
        if others:
            rows.append([scenario, ", ".join(others), f"{len(others)} of {len(everywhere)}"])
    if not rows:
        return []
    words = (
        "Systems that the list asks for on other scenarios alone. "
        "`--variant` and `--systems` choose them from the study `experiments/leaderboard.yaml`."
    )
    table = report.markdown_table(["scenario", "systems", "not listed"], rows, text_columns=2)
    return [words, "", *board.folded("The table", table.splitlines()), ""]


def _not_measured(
    listed: Sequence[Run], lines: Mapping[str, Sequence[Line]], tested: Mapping[str, Sequence[Tested]]
) -> list[str]:
    """By scenario, the measurements that finished systems lack, and the runs that they are of."""
    pooled = {
        (run.name, name)
        for run in listed
        if any(line.run == run.name for some in lines.values() for line in some)
        for name, system in run.load().systems.items()
        if system.pooled
    }
    rows = []
    for scenario, some in lines.items():
        firsts = list({line.system: line for line in reversed(some) if line.method}.values())[::-1]
        known = {one.system for one in tested.get(scenario, ())}
        counted = [line for line in firsts if (line.run, line.system) not in pooled]
        new = [line for line in firsts if not math.isnan(line.new)]
        for what, of, there in (
            ("FLOPs", counted, [not math.isnan(line.flops) for line in counted]),
            ("new clients", new, [line.system in known for line in new]),
        ):
            without = [line for line, one in zip(of, there, strict=True) if not one]
            if without:
                names = board.in_words([line.system for line in without], [line.system for line in of])
                runs = ",".join(dict.fromkeys(line.run for line in without))
                rows.append([scenario, what, names, runs, f"{len(without)} of {len(of)}"])
    if not rows:
        return []
    words = (
        "Measurements that rows lack. `python -m experiments.leaderboard --data-dir DIR --only RUNS --count-flops` counts FLOPs, "
        "for which it trains again only methods whose numbers of steps follow from parameters; with `--new-clients` in its "
        "place, new clients are tested with fewer samples and other steps, for which all seeds are trained once more where the "
        "folder of the run is gone. Central training has no client whose FLOPs could be counted."
    )
    table = report.markdown_table(["scenario", "measurement", "systems", "RUNS", "missing"], rows, text_columns=4)
    return [words, "", table, ""]
