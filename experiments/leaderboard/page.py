"""Makes the page docs/leaderboard.md from the committed raw results alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.leaderboard import board, changed, gaps, lessons, missing, newcomers, overview
from experiments.leaderboard.board import LOCAL, Line
from experiments.leaderboard.newcomers import Tested
from experiments.reproduce import page as results
from experiments.reproduce import run_list
from experiments.reproduce.run_list import Run
from fedjax_meta import disk, report
from fedjax_meta.study import compare, comparison

PAGE = board.DOCS / "leaderboard.md"
NEW = board.RAW / "new_clients"
REFERENCE = "fedavg_ft"
"""The system that differences are taken to."""
MORE = "_more"
"""Names the report of systems that were run again, or later, without the others."""


def write(chosen: Sequence[Run], listed: Sequence[Run], root: Path, data_dir: str | None = None) -> list[str]:
    """Writes raw results and reports of the scenarios of some runs, and the pages of all; says what became of each.

    What the folders do not have stays as it is, unless the list no longer has it.

    Args:
      chosen: the runs whose folders are read, if they are there and have a finished system.
      listed: all runs of the list.
      root: folder of the run folders.
      data_dir: where data sets are.
    """
    ran = [run for run in chosen if any((root / run.name / "results").glob("*/*.final.json"))]
    found = board.extract(ran, root, data_dir) if ran else {}
    said, committed, tested = [], board.read_lines(board.RAW), read_tested(NEW)
    for scenario, read in found.items():
        fresh = board.kept(read, committed.get(scenario, ()))
        lines = _with_committed(fresh, committed.get(scenario, ()), listed)
        tests = _tests(lines, fresh, committed.get(scenario, ()), tested.get(scenario, ()), root)
        disk.write_text(board.RAW / f"{scenario}.csv", board.to_csv(lines))
        if tests:
            disk.write_text(NEW / f"{scenario}.csv", newcomers.to_csv(tests))
        names, new = ({line.system for line in some} for some in (lines, [line for line in lines if line in fresh]))
        said.append(f"{scenario}: {len(names)} rows, {len(new)} of them new")
    for run in ran:
        systems, groups = compare.finished([root / run.name]), []
        for scenario in dict.fromkeys(one.scenario for one in systems):
            goal = board.target([line for line in found[scenario] if line.run == run.name])
            groups += compare.by_scenario([one for one in systems if one.scenario == scenario], target=goal)
        # A folder of some systems must not take the place of the report of all.
        whole = len(systems) >= sum(len(run.load().systems_on(scenario)) for scenario in run.load().scenarios)
        comparison.write(board.RAW / f"{run.name}{'' if whole else MORE}.html", groups)
    everything = (listed, board.read_lines(board.RAW), read_tested(NEW))
    for path, made_of in ((PAGE, page), (lessons.PAGE, lessons.page)):
        text = results.with_generated(path.read_text(encoding="utf-8"), made_of(*everything))
        disk.write_text(path, text)
        said.append(f"written: {path}")
    return said


def _with_committed(fresh: Sequence[Line], committed: Sequence[Line], listed: Sequence[Run]) -> list[Line]:
    """The lines of a scenario from run folders, and the committed ones of what the folders lack and the list still has."""
    there = {(line.run, line.system) for line in fresh}
    wanted = {(run.name, system) for run in listed for system in run.load().systems}
    kept = [line for line in committed if (line.run, line.system) in wanted - there]
    return board.joined([*fresh, *kept], [run.name for run in listed])


def _tests(
    lines: Sequence[Line], fresh: Sequence[Line], committed: Sequence[Line], tested: Sequence[Tested], root: Path
) -> list[Tested]:
    """Tests of new clients of a scenario's lines: of the folders of fresh lines, or the committed ones of the same training."""
    found: list[Tested] = []
    there, trained = {(line.run, line.system) for line in fresh}, {board.training(line) for line in committed}
    for row in dict.fromkeys((line.run, line.system) for line in lines):
        run, system = row
        mine = [one for one in newcomers.read(root / run) if one.system == system] if row in there else []
        if not mine and all(board.training(line) in trained for line in lines if (line.run, line.system) == row):
            mine = [one for one in tested if one.system == system]
        found += mine
    return found


def read_tested(folder: Path = NEW) -> dict[str, list[Tested]]:
    """The committed tests of new clients by scenario."""
    return {path.stem: newcomers.from_csv(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.csv"))}


def marked(markdown: str) -> str:
    """The page with a dagger at rows whose method's files or study have changed since they were made."""
    listed, lines = run_list.read_list(board.LIST), board.read_lines()
    rows = {(one.scenario, one.system) for one, what in changed.rows(listed, lines) if set(what) - {changed.RUNNER}}
    return results.with_generated(markdown, page(listed, lines, read_tested(), marks=rows))


# The page.


def page(
    listed: Sequence[Run],
    lines: Mapping[str, Sequence[Line]],
    tested: Mapping[str, Sequence[Tested]] | None = None,
    *,
    marks: Iterable[tuple[str, str]] = (),
) -> str:
    """The generated part of docs/leaderboard.md.

    Args:
      listed: all runs of the list.
      lines, tested: of each scenario.
      marks: scenario and system of rows that get a dagger.
    """
    order = [scenario for run in listed for scenario in run.load().scenarios]
    there = list(dict.fromkeys(one for one in order if one in lines))
    text = overview.section({scenario: lines[scenario] for scenario in there}, REFERENCE)
    for scenario in there:
        mine = {system for where, system in marks if where == scenario}
        text += _section(scenario, [run for run in listed if scenario in run.load().scenarios], lines[scenario], mine)
        text += _new_clients((tested or {}).get(scenario, ()), lines[scenario])
    text += missing.section(listed, lines, tested or {})
    return "\n".join(text)


def _section(scenario: str, runs: Sequence[Run], lines: Sequence[Line], marks: set[str]) -> list[str]:
    systems = board.by_system(lines)
    kind = lines[0].kind
    trained = {system: some for system, some in systems.items() if some[0].method}
    ranked = [
        *sorted(trained, key=lambda system: -board.worth(systems[system])),
        *(system for system in systems if system not in trained),
    ]
    text = [f"## {runs[0].title}", "", _facts(trained), ""]
    scores = [
        [_title(system, marks), *score_cells(systems[system], systems.get(REFERENCE, ())), points_cell(systems[system][0])]
        for system in ranked
    ]
    headings = [
        "system",
        f"known{kind.direction}",
        "worst 10 %",
        "new",
        f"known, minus {REFERENCE}",
        f"new, minus {REFERENCE}",
        "behind local",
        "points",
    ]
    text += [_table(headings, scores), ""]
    if any(some[0].edge for some in trained.values()):
        text += [f"Points are those of the grid that were tried; {gaps.END} the best one stands at an end of it.", ""]
    target, goal = board.target(lines), ""
    counted = any(not math.isnan(some[0].flops) for some in trained.values())
    nothing = {
        system: f"{' and '.join(groups)} clients not above the {board.constant(lines)[0].system}"
        for system, groups in board.not_above_constant(lines).items()
    }
    costs = [
        [_title(system, marks), *_costs(systems[system], target, "not counted" * counted, nothing.get(system, ""))]
        for system in ranked
        if system in trained
    ]
    headings = ["system", "chosen", "kB", "MFLOP", "rounds to target", "MB to target", "GFLOP to target", "remark"]
    if target is not None:
        local = next(line.system for line in lines if line.method == LOCAL)
        goal = (
            f" The target is {kind.text(target.value)}{' %' if kind.share else ''}, the last mean of {local}. Rounds to it are "
            f"those of the first test that reached it, mean over seeds; tests come after round 1 and every "
            f"{runs[0].load().eval_every} rounds."
        )
        if any(_own_target(line, target) for line in lines):
            goal += (
                " Rows whose remark has another target are of a run that trained locally once more, by its own commit; "
                "its local training is what they are behind or not."
            )
    text += [f"What it took: {_counted(trained)}.{goal}", "", _table(headings, costs, text_columns=2), ""]
    text += (
        ["† What the method or the scenario imports, or what the study says of them, has changed since.", ""] if marks else []
    )
    names = [f"{run}{more}.html" for run in dict.fromkeys(line.run for line in lines) for more in ("", MORE)]
    reports = [name for name in names if (board.RAW / name).is_file()]
    links = ", ".join(f"[{name}](leaderboard/{name})" for name in reports)
    older = (
        f" A report is as it was written. One with `{MORE}` is newer, and has some systems again; where it differs, the tables "
        "above go by it."
    )
    text += [
        f"Every number: [{scenario}.csv](leaderboard/{scenario}.csv); curves and clients: {links}."
        + older * any(name.endswith(f"{MORE}.html") for name in reports),
        "",
    ]
    return text


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    used = [column for column in range(len(headings)) if column == 0 or any(row[column] for row in rows)]
    return report.markdown_table(
        [headings[c] for c in used], [[row[c] for c in used] for row in rows], text_columns=text_columns
    )


def points_cell(line: Line) -> str:
    """How many points of its grid were tried, with a mark where the best stands at an end."""
    return f"{line.tried}{f' {gaps.END}' * bool(line.edge)}" if line.method else ""


def _counted(trained: Mapping[str, Sequence[Line]]) -> str:
    """What was counted of a client's round."""
    counted = sum(not math.isnan(some[0].flops) for some in trained.values())
    if not counted:
        return "bytes of a client in a round; FLOPs were not counted"
    return f"bytes of a client in a round, and its FLOPs, which were counted for {counted} of {len(trained)} systems"


def _title(system: str, marks: Iterable[str]) -> str:
    return f"{system} †" if system in marks else system


def _facts(trained: Mapping[str, Sequence[Line]]) -> str:
    lines = [line for some in trained.values() for line in some]
    first = next(iter(trained.values()))
    seeds = ", ".join(str(line.seed) for line in first)
    commits = _commits(c for line in lines for c in line.commit.split("+"))
    confirmed = [some[0] for some in trained.values() if some[0].again]
    if confirmed:
        commits += (
            f"; for the first seed of {len(confirmed)} systems, newer code gives the same on one machine, up to rounding: "
            f"{_commits(one.again for one in confirmed)}"
        )
    rounds = ", ".join(dict.fromkeys(str(line.rounds) for line in lines if line.system != "centralised"))
    tried = " to ".join(dict.fromkeys(str(end(line.tried for line in lines)) for end in (min, max)))
    versions = "; ".join(dict.fromkeys(f"{line.versions} on {line.device}" for line in lines))
    edge = sum(bool(some[0].edge) for some in trained.values())
    command = first[0].command.replace(first[0].system, "SYSTEM")
    return (
        f"{len(trained)} systems, {tried} points each, {rounds} rounds, seeds {seeds}; commit {commits}; {versions}. "
        f"{edge} systems chose a value at the end of their grid. A row by itself: `{command}`."
    )


def _commits(commits: Iterable[str]) -> str:
    return ", ".join(
        f"`{one.rstrip('*')[:12]}`{' with changes' if one.endswith('*') else ''}" for one in dict.fromkeys(commits)
    )


def score_cells(lines: Sequence[Line], reference: Sequence[Line]) -> list[str]:
    """Known, worst and new clients, known and new minus the reference, and who would do better alone."""
    kind = lines[0].kind
    cells = [kind.spread(*report.over_seeds([getattr(line, name) for line in lines])) for name in ("known", "worst", "new")]
    cells[0] = cells[0] or "diverged"
    cells += [_difference(lines, reference, name) for name in ("known", "new")]
    return [*cells, "" if math.isnan(lines[0].behind) else f"{lines[0].behind:.0f} %"]


def _difference(lines: Sequence[Line], reference: Sequence[Line], name: str) -> str:
    """The mean difference on the same seeds with its 95 % confidence interval, above 0 where the system is better."""
    if not reference or not lines[0].method or lines[0].system == reference[0].system:
        return ""
    found = gaps.of_lines(lines, reference, name)
    return "" if found is None else found.words


def _own_target(line: Line, target: compare.Target | None) -> bool:
    """Whether a row was measured by another local training than the one that gave the target."""
    return target is not None and line.target != target.value and not math.isnan(line.target)


def _divergence(lines: Sequence[Line]) -> list[str]:
    diverged = [line.diverged for line in lines if line.diverged]
    if not diverged:
        return []
    lost = dict.fromkeys(words.partition(": ")[2] for words in diverged)
    return [f"{len(diverged)} of {len(lines)} seeds diverged" + (f": {' or '.join(lost)}" if all(lost) else "")]


def _costs(lines: Sequence[Line], target: compare.Target | None, uncounted: str = "", remark: str = "") -> list[str]:
    first = lines[0]
    rounds = np.array([line.reached for line in lines])
    missed = int(np.isinf(rounds).sum())
    if first.method == LOCAL or np.isnan(rounds).any():
        to_target = ["", "", ""]
    elif missed:
        to_target = ["never" if missed == len(lines) else f"never in {missed} of {len(lines)}", "", ""]
    else:
        each = (1.0, first.bytes / 1e6, first.flops / 1e9)
        to_target = ["" if math.isnan(unit) else f"{rounds.mean() * unit:.3g}" for unit in each]
    remarks = _divergence(lines)
    remarks += [f"{name} at the end of its grid" for name in first.edge.split()]
    if _own_target(first, target):
        remarks.append(f"target {first.kind.text(first.target)}")
    remarks += [remark] if remark else []
    units = ((first.bytes / 1e3, ""), (first.flops / 1e6, uncounted))
    numbers = [unknown if math.isnan(value) else f"{value:.4g}" for value, unknown in units]
    return [first.chosen, *numbers, *to_target, "; ".join(remarks)]


def _new_clients(tested: Sequence[Tested], lines: Sequence[Line]) -> list[str]:
    """Tables of new clients by their samples and by how long they adapt; none if they were not tested so."""
    if not tested:
        return []
    kind, systems = lines[0].kind, list(dict.fromkeys(one.system for one in tested))
    trained = {line.system for line in lines if line.method}
    counts = [*sorted({one.samples for one in tested if one.samples}), 0]
    rows = [[system, *(_mean_of(tested, kind, system, count, "", 0) for count in counts)] for system in systems]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    words = f"{len(trained & {*systems})} of {len(trained)} systems were tested so, and those that use none are left out"
    text = [f"New clients by the number of samples that they adapt on; {words}:", ""]
    text += board.folded("The table", [_table(["system", *(str(count) if count else "all" for count in counts)], rows)])
    options = {one.system: one.option for one in tested if one.option}
    steps = sorted({one.steps for one in tested if one.option})
    rows = [
        [system, name, *(_mean_of(tested, kind, system, 0, name, number) for number in steps)]
        for system, name in options.items()
    ]
    if rows:
        text += ["New clients by how long they adapt on all of these samples:", ""]
        text += board.folded("The table", [_table(["system", "option", *map(str, steps)], rows, text_columns=2)])
    return text


def _mean_of(tested: Sequence[Tested], kind: report.Kind, system: str, samples: int, option: str, steps: int) -> str:
    wanted = (system, samples, option, steps)
    values = [one.score for one in tested if (one.system, one.samples, one.option, one.steps) == wanted]
    return kind.text(float(np.mean(values))) if values and np.isfinite(values).all() else ""
