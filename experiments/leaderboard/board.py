"""Raw results of the leaderboard: one line of numbers for each system and seed, read from the folders of runs."""

import csv
import dataclasses
import hashlib
import io
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.reproduce import extracts
from experiments.reproduce.run_list import Run
from fedjax_meta import disk, report
from fedjax_meta.methods import METHODS
from fedjax_meta.study import Study, baselines, compare, load, tuning
from fedjax_meta.study import folder as folders
from fedjax_meta.study.job import scored_clients
from fedjax_meta.study.result_files import read_final, read_points
from fedjax_meta.study.scenario import TESTED_ON
from fedjax_meta.study.study import to_tree
from fedjax_meta.study.system import System

HERE = Path(__file__).parent
LIST = HERE / "runs.yaml"
DOCS = HERE.parents[1] / "docs"
RAW = DOCS / "leaderboard"
LOCAL = "local_only"
"""The method whose first system sets the target, and says who would do better alone."""

NAN = math.nan


class Line(NamedTuple):
    """A system with a seed on a scenario; scores in percent where they are shares, NaN where the run diverged or has none.

    Attributes:
      scenario, system, method, seed: what was run; rows without training have no method.
      chosen: the point of the grid, as in `lr=0.1`; tried: how many points there were; edge: the numbers of which
        the least or the largest value was chosen; extend: how often the grid might move on.
      rounds: of the run.
      known, worst, new: means over known clients, over the tenth of them with the worst scores, and over new clients.
      behind: share of the known clients that do worse than by local training, in percent; of the mean over seeds.
      bytes: of a client in a round, down and up; flops: of a client in a round, mean over the rounds of a run, matrix products
        and convolutions.
      negative_curvature: in what share of its implicit gradients the operator was not positive, in percent; NaN for methods
        without such gradients, and where it was not recorded.
      target: what the known clients should reach, the last mean of local training; reached: the round of the first evaluation at
        which they do, infinity if never.
      diverged: the round from which on, and known clients without a finite loss if not all are; empty if it did not.
      score, higher, share: the name of the score, whether higher is better, whether it is a share.
      data: the fingerprint of the clients; run: the entry of the list.
      commit: by which the system was trained, several with "+" if it went on with another; made: the digest of what the method
        imports, and runner: of the rest, see `fedjax_meta.study.made`; said: of what the study says of the system, see `said`.
      again: the commit by which the first seed came out alike once more, see `again.py`; the digests are then those of that
        commit.
      moved: how far the known clients' score of that seed was then from this line's; NaN if the line came out as it is.
      versions: of the run; device: the kind of processor, or of device where that is not known; command: that trains this system
        alone.
    """

    scenario: str
    system: str
    method: str
    seed: int
    chosen: str = ""
    tried: int = 0
    edge: str = ""
    extend: int = 0
    rounds: int = 0
    known: float = NAN
    worst: float = NAN
    new: float = NAN
    behind: float = NAN
    bytes: float = NAN
    flops: float = NAN
    negative_curvature: float = NAN
    target: float = NAN
    reached: float = NAN
    diverged: str = ""
    score: str = "accuracy"
    higher: bool = True
    share: bool = True
    data: str = ""
    run: str = ""
    commit: str = ""
    made: str = ""
    runner: str = ""
    said: str = ""
    again: str = ""
    moved: float = NAN
    versions: str = ""
    device: str = ""
    command: str = ""

    @property
    def kind(self) -> report.Kind:
        """What the score is."""
        return report.Kind(self.score, self.higher, self.share)


def unlisted(listed: Sequence[Run]) -> list[str]:
    """The methods of the package that no run of the list has."""
    return sorted(set(METHODS) - {system.method for run in listed for system in run.load().systems.values()})


def said(study: Study, scenario: str, system: str) -> str:
    """The digest of what a study says of a system on a scenario, as far as its numbers depend on it."""
    tree = to_tree(study)
    # How often a grid may move on does not change the numbers of the points; those that it added are in `tried`.
    parts = [*(tree[name] for name in ("rounds", "seeds", "federation")), {**tree["tuning"], "extend": 0}]
    # Rates that do not change leave the digests of before there was this field as they were.
    own = {name: value for name, value in tree["systems"][system].items() if name != "title" and (name != "rates" or value)}
    text = json.dumps([*parts, tree["scenarios"][scenario], own], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_words(systems: Sequence[str], of: Sequence[str]) -> str:
    """Some of several systems: "all", "all but a, b" or "a, b"."""
    others = [name for name in of if name not in systems]
    if len(others) < len(systems):
        return "all but " + ", ".join(others) if others else "all"
    return ", ".join(systems)


def folded(words: str, lines: Sequence[str]) -> list[str]:
    """Lines of Markdown that a reader unfolds."""
    return [f'<details markdown="1"><summary>{words}</summary>', "", "\n".join(lines).rstrip(), "", "</details>", ""]


def commit_of(made: Mapping[str, Any]) -> str:
    """The commit of results, with a star where tracked files differed from it."""
    return (made["commit"] or "unknown") + "*" * bool(made["dirty"])


# From run folders to lines.


class Cell(NamedTuple):
    """A finished system of a run's folder."""

    run: Run
    folder: Path
    study: Study
    system: str
    found: compare.Finished

    @property
    def final(self) -> Path:
        """The file of its final runs."""
        return self.folder / "results" / self.found.scenario / f"{self.system}.final.json"

    @property
    def makers(self) -> list[dict[str, Any]]:
        """By what it was trained, see `fedjax_meta.study.made`; several if it went on with other code."""
        return json.loads(self.final.read_text(encoding="utf-8"))["made"]

    @property
    def points(self) -> list[tuning.Point]:
        """What was tried of the grid."""
        path = self.folder / "results" / self.found.scenario / f"{self.system}.tuning.json"
        if not path.is_file():
            return tuning.points_of(self.study.systems[self.system])
        return read_points(path)


def extract(runs: Sequence[Run], root: Path, data_dir: str | None = None) -> dict[str, list[Line]]:
    """The lines of each scenario of the runs that `root` holds, run by run: finished systems, and rows that take no training.

    A run is measured by its own local training: the target, and who would do better alone.

    Raises:
      ValueError: a folder that holds another study than the list, or nothing that is finished.
    """
    found: dict[str, list[Line]] = {}
    for run in runs:
        cells = cells_of(run, root / run.name)
        for scenario in dict.fromkeys(cell.found.scenario for cell in cells):
            here = [cell for cell in cells if cell.found.scenario == scenario]
            found.setdefault(scenario, []).extend([*trained(here), *_untrained(here[0], data_dir)])
    if not found:
        raise ValueError(f"{root} holds no results of {', '.join(run.name for run in runs)}")
    return found


def joined(lines: Iterable[Line], order: Sequence[str]) -> list[Line]:
    """The lines of a scenario from several runs, by the order of these; of a system that several have, those of the first run.

    Raises:
      ValueError: the runs have different clients.
    """
    place = {name: number for number, name in enumerate(order)}
    ordered = sorted(lines, key=lambda line: (not line.method, place[line.run]))
    if len({line.data for line in ordered}) > 1:
        raise ValueError(
            f"the runs of {ordered[0].scenario} have different clients: {', '.join({line.run: 0 for line in ordered})}"
        )
    first: dict[str, str] = {}
    return [line for line in ordered if first.setdefault(line.system, line.run) == line.run]


def cells_of(run: Run, folder: Path) -> list[Cell]:
    """The finished systems in a run's folder; none where there is no run.

    Raises:
      ValueError: the folder holds another study than the list.
    """
    if not (folder / "run.json").is_file():
        return []
    extracts.check_same(run, folder)
    study = load(folder / "study.yaml")
    names = [
        name
        for scenario in study.scenarios
        for name in study.systems_on(scenario)
        if read_final(folder, study, scenario, name)[0]
    ]
    found = compare.finished([folder]) if names else []
    cells = [Cell(run, folder, study, name, one) for name, one in zip(names, found, strict=True)]
    return [cell for cell in cells if extracts.is_finished(cell.final, study, cell.system)]


def trained(cells: Sequence[Cell]) -> list[Line]:
    """Lines of the systems of one scenario of one run."""
    systems = [cell.found for cell in cells]
    local = next((cell.found for cell in cells if cell.found.method == LOCAL), None)
    target = None
    if local is not None:
        target = compare.Target(float(np.mean([scores.mean() for scores in local.by_client(compare.KNOWN).values()])))
        target = target if math.isfinite(target.value) else None
    lines = []
    for cell, row in zip(cells, compare.compared(systems, target=target), strict=True):
        lines += _of_cell(cell, row, NAN if target is None else target.value)
    return lines


def _of_cell(cell: Cell, row: compare.Row, target: float) -> list[Line]:
    scenario, kind = row.system.scenario, row.system.kind
    content = folders.read_run(cell.folder)
    makers, points = cell.makers, cell.points
    lines = []
    for number, trial in enumerate(row.system.trials):
        reached = NAN if row.reached is None else float(row.reached.rounds[number])
        lines.append(
            Line(
                scenario=scenario,
                system=cell.system,
                method=row.system.method,
                seed=trial.seed,
                chosen=" ".join(f"{name}={value:g}" for name, value in trial.numbers.items()),
                tried=len(points),
                edge=" ".join(tuning.at_edge(points, trial.numbers)),
                extend=cell.study.tuning.extend,
                rounds=trial.rows[-1]["round"],
                **scores_of(row, number),
                behind=row.behind.get(LOCAL, NAN),
                bytes=row.system.traffic,
                negative_curvature=report.negative_curvature(trial.rows),
                target=target,
                reached=reached,
                **_kind_fields(kind),
                **_where(cell, content, makers),
                commit="+".join(dict.fromkeys(map(commit_of, makers))),
                made=makers[-1]["method"],
                runner=makers[-1]["runner"],
                said=said(cell.study, scenario, cell.system),
                command=command(cell.run, cell.system),
            )
        )
    return lines


def scores_of(row: compare.Row, number: int) -> dict[str, Any]:
    """The fields of a line that say how a trial came out."""
    trial = row.system.trials[number]
    lost = tuning.without_loss([trial])
    return {
        "known": float(row.known[number]),
        "worst": float(row.worst[number]),
        "new": float(row.new[number]) if row.new.size else NAN,
        "diverged": "" if trial.diverged is None else f"{trial.diverged}: {lost}" if lost else str(trial.diverged),
    }


def _kind_fields(kind: report.Kind) -> dict[str, Any]:
    return {"score": kind.name, "higher": kind.higher_is_better, "share": kind.share}


def _where(cell: Cell, content: Mapping[str, Any], makers: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    versions = " ".join(f"{name}={content['versions'][name]}" for name in ("python", "jax", "optax", "numpy"))
    kinds = dict.fromkeys(maker["processor"] for maker in makers if "processor" in maker)
    device = " and ".join(kinds) or str(content["device"])
    return {"data": cell.found.fingerprint, "run": cell.run.name, "versions": versions, "device": device}


def command(run: Run, system: str) -> str:
    """The command that tunes and trains one system of a run, with the same numbers."""
    alone = dataclasses.replace(run, systems=[system])
    return shlex.join(["fedjax-meta", "run", *alone.arguments(), "--out", f"runs/{run.name}-{system}"])


def _untrained(cell: Cell, data_dir: str | None) -> list[Line]:
    """The rows that take no training."""
    study, scenario = cell.study, cell.found.scenario
    clients = study.scenarios[scenario].build(data_dir)
    lines = []
    asked, scored = TESTED_ON[study.scenario(scenario).adapt_on], scored_clients(study, scenario, clients, clients.train)
    for title, groups in baselines.measured(clients, study.seeds[:1], study.metrics, asked, scored).items():
        known = report.main_score(groups[compare.KNOWN][0], study.score)
        new = report.main_score(groups[compare.NEW][0], study.score).mean if compare.NEW in groups else NAN
        lines.append(
            Line(
                scenario=scenario,
                system=title,
                method="",
                seed=study.seeds[0],
                known=known.mean,
                worst=known.kind.worst_tenth(known.values),
                new=new,
                **_kind_fields(known.kind),
                **_where(cell, folders.read_run(cell.folder)),
            )
        )
    return lines


# Lines as files.


def to_csv(lines: Iterable[Line]) -> str:
    """Lines with a heading; a NaN is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Line._fields)
    for line in lines:
        writer.writerow([written(value) for value in line])
    return file.getvalue()


def written(value: Any) -> Any:
    """A value of a line as it is written."""
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"


def from_csv(text: str) -> list[Line]:
    """The lines that `to_csv` wrote."""
    read: dict[type, Callable[[str], Any]] = {
        float: lambda cell: float(cell) if cell else NAN,
        bool: lambda cell: cell == "True",
        int: int,
        str: str,
    }
    kinds = Line.__annotations__
    return [Line(**{name: read[kinds[name]](cell) for name, cell in row.items()}) for row in csv.DictReader(io.StringIO(text))]


def read_lines(folder: Path | None = None) -> dict[str, list[Line]]:
    """The committed lines by scenario, of `RAW` when no folder is given."""
    files = sorted((RAW if folder is None else folder).glob("*.csv"))
    return {path.stem: from_csv(path.read_text(encoding="utf-8")) for path in files}


def rows_that_lack(run: Run, study: Study, lack: Callable[[Sequence[Line]], bool]) -> Iterator[list[Line]]:
    """The committed lines of each system of a run that lack something; those whose study has changed since are named instead."""
    for scenario, lines in read_lines().items():
        mine = [line for line in lines if line.run == run.name and line.method and line.system in study.systems]
        for system in dict.fromkeys(line.system for line in mine):
            rows = [line for line in mine if line.system == system]
            if lack(rows) and rows[0].said == said(study, scenario, system):
                yield rows
            elif lack(rows):
                print(f"{scenario}, {system}: not measured, the study has changed since", flush=True)


def rewrite(row: Line, **fields: Any) -> None:
    """Gives the committed lines of a row other fields."""
    lines = read_lines()[row.scenario]
    mine = (row.run, row.system)
    lines = [line._replace(**fields) if (line.run, line.system) == mine else line for line in lines]
    disk.write_text(RAW / f"{row.scenario}.csv", to_csv(lines))


def kept(fresh: Sequence[Line], committed: Iterable[Line]) -> list[Line]:
    """Fresh lines with what was found out later about committed ones of the same training: FLOPs, and which code gives it too.

    Where other code trained a committed row again with the same results for all seeds, that row stays, and is confirmed by it.
    Then the fresh line says how it compares with local training.
    """
    rows = _by_row(committed)
    known: dict[tuple[tuple[str, str], int], tuple[Line, bool]] = {}
    for row, lines in _by_row(fresh).items():
        old = {line.seed: line for line in rows.get(row, ())}
        same = {line.seed: _result(line) for line in lines} == {seed: _result(line) for seed, line in old.items()}
        known |= {(row, seed): (line, same) for seed, line in old.items()}

    def with_later(line: Line) -> Line:
        old, same = known.get(((line.run, line.system), line.seed), (None, False))
        if old is not None and training(line) == training(old):
            confirmed = {name: getattr(old, name) for name in ("again", "moved", "made", "runner")} if old.again else {}
            return line._replace(flops=old.flops, **confirmed)
        if old is not None and same:
            names = ("tried", "edge", "extend", "made", "runner")
            beside = () if math.isnan(line.behind) else ("behind", "target", "reached")
            return old._replace(again=line.commit, moved=NAN, **{name: getattr(line, name) for name in (*names, *beside)})
        return line

    return list(map(with_later, fresh))


def by_system(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """The lines of each system of a scenario."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.system, []).append(line)
    return found


def worth(lines: Sequence[Line], group: str = "known") -> float:
    """The mean over seeds of a system's score, the more the better; minus infinity where it is not finite."""
    mean = float(np.mean([getattr(line, group) for line in lines]))
    return (mean if lines[0].kind.higher_is_better else -mean) if math.isfinite(mean) else -math.inf


def constant(lines: Iterable[Line]) -> list[Line]:
    """The lines of a scenario for clients that always predict what is most frequent among their samples."""
    return [line for line in lines if not line.method and line.system != baselines.UNTRAINED]


def not_above_constant(lines: Sequence[Line]) -> dict[str, list[str]]:
    """The systems of a scenario whose mean is not above that of a constant prediction, and on which clients ("known", "new")."""
    least, found = constant(lines), {}
    for system, mine in by_system(line for line in lines if line.method).items():
        behind = [group for group in ("known", "new") if least and -math.inf < worth(mine, group) <= worth(least, group)]
        if behind:
            found[system] = behind
    return found


def _by_row(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """The lines of each system of a run."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line.run, line.system), []).append(line)
    return found


def _result(line: Line) -> tuple[str, ...]:
    return (line.chosen, line.said, line.data, *(str(written(score)) for score in (line.known, line.worst, line.new)))


def training(line: Line) -> tuple[str, ...]:
    """By what two lines tell of one training."""
    return (line.run, line.system, str(line.seed), line.chosen, line.commit, line.said, str(written(line.known)))


def chosen(row: Line, system: System) -> tuning.Point:
    """The point of a grid that a row says, in the types of the grid."""
    words = [word.split("=") for word in row.chosen.split()]
    return {name: type(system.grid[name][0])(float(value)) for name, value in words}


def target(lines: Sequence[Line]) -> compare.Target | None:
    """What the known clients of a scenario should reach; `None` without local training."""
    known = [line.target for line in lines if not math.isnan(line.target)]
    return compare.Target(known[0]) if known else None
