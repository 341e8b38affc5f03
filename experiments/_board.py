"""What the leaderboard found: a line of raw numbers for each system and seed, read from the folders of runs."""

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

from experiments import _standing as standing
from fedjax_meta import checkpoint, report
from fedjax_meta.methods import METHODS
from fedjax_meta.study import Study, baselines, compare, load, tuning
from fedjax_meta.study import folder as folders
from fedjax_meta.study.scenario import TESTED_ON
from fedjax_meta.study.step import counted
from fedjax_meta.study.study import to_tree

HERE = Path(__file__).parent
LIST = HERE / "leaderboard_runs.yaml"
RAW = HERE.parent / "docs" / "leaderboard"
LOCAL = "local_only"
"""The method whose first system sets the target, and says who would do better alone."""

NAN = math.nan


class Line(NamedTuple):
    """A system with a seed on a scenario; scores in percent where they are shares, NaN where the run diverged or has none.

    Attributes:
      scenario, system, method, seed: what was run; rows without training have no method.
      chosen: the point of the grid, as in `lr=0.1`; tried: how many points there were; edge: the numbers of which
        the least or the largest of at least three values was chosen.
      rounds: of the run.
      known, worst, new: means over known clients, over the tenth of them with the worst scores, and over new clients.
      behind: share of the known clients that do worse than by local training, in percent; of the mean over seeds.
      bytes: of a client in a round, down and up; flops: of a client in a round, mean over the rounds of a run, matrix products
        and convolutions.
      target: what the known clients should reach, the last mean of local training; reached: the round of the first evaluation at
        which they do, infinity if never.
      diverged: the round from which on; empty if it did not.
      score, higher, share: the name of the score, whether higher is better, whether it is a share.
      data: the fingerprint of the clients; run: the entry of the list.
      commit: by which the system was trained, several with "+" if it went on with another; made: the digest of what the method
        imports, and runner: of the rest, see `fedjax_meta.study.made`; said: of what the study says of the system, see `said`.
      again: the commit by which the first seed came out alike once more, see `Again`; the digests are then those of that commit.
      moved: what rounding did to the score of that seed; NaN if no bit of it changed.
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
    rounds: int = 0
    known: float = NAN
    worst: float = NAN
    new: float = NAN
    behind: float = NAN
    bytes: float = NAN
    flops: float = NAN
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


def unlisted(listed: Sequence[standing.Run]) -> list[str]:
    """The methods of the package that no run of the list has."""
    return sorted(set(METHODS) - {system.method for run in listed for system in run.load().systems.values()})


def said(study: Study, scenario: str, system: str) -> str:
    """The digest of what a study says of a system on a scenario, as far as its numbers depend on it."""
    tree = to_tree(study)
    # How often a grid may move on does not change the numbers of the points; those that it added are in `tried`.
    parts = [*(tree[name] for name in ("rounds", "seeds", "federation")), {**tree["tuning"], "extend": 0}]
    own = {name: value for name, value in tree["systems"][system].items() if name != "title"}
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


# Systems that were trained once more.


class Again(NamedTuple):
    """What became of the first seed of a finished system when it was trained once more, with other code.

    Attributes:
      commit: of that code; method, runner: its digests, see `fedjax_meta.study.made`.
      seed: that was trained; score: its last mean over known clients, in percent if it is a share; before: what that was.
      same: whether every last score of every client is the same, bit for bit.
      apart: of each test in order, the largest difference of a client's loss, relative to 1 or the loss if that is larger.
      scored_alike: whether the other scores are the same in every test whose losses are.
      here: the score where the row's own commit trained it again too, on the same machine, and `same`, `apart` and `scored_alike`
        compare with that; NaN where they compare with the row.
    """

    commit: str
    method: str
    runner: str
    seed: int
    score: float
    before: float
    same: bool
    apart: list[float]
    scored_alike: bool = True
    here: float = NAN

    @property
    def moved(self) -> float:
        """How far the score is from the row's; NaN if no bit of any score changed."""
        return NAN if self.same and math.isnan(self.here) else self.score - self.before

    @property
    def alike(self) -> bool:
        """Whether the trainings are the same up to rounding: near each other as long as training has not amplified it."""
        first = next((number for number, gap in enumerate(self.apart) if gap), 0)
        near = all(gap <= most for gap, most in zip(self.apart[first:], ROUNDING, strict=False))
        return self.same or (self.scored_alike and near)


ROUNDING = (1e-4, 1e-2)
"""What losses may differ by in the first test in which they differ, and in the next one, if sums were made in another order."""

_AGAIN = "again.json"


def read_again(folder: Path) -> dict[str, dict[str, Again]]:
    """What was trained once more of a run's folder, by scenario and system."""
    path = folder / _AGAIN
    tree = report.numbers_again(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    return {scenario: {system: Again(**one) for system, one in some.items()} for scenario, some in tree.items()}


def write_again(folder: Path, tree: Mapping[str, Mapping[str, Again]]) -> None:
    """Writes what `read_again` reads."""
    plain = {scenario: {system: one._asdict() for system, one in some.items()} for scenario, some in tree.items()}
    checkpoint.write_text(folder / _AGAIN, json.dumps(report.strict(plain), indent=1) + "\n")


def commit_of(made: Mapping[str, Any]) -> str:
    """The commit of results, with a star where tracked files differed from it."""
    return (made["commit"] or "unknown") + "*" * bool(made["dirty"])


# From run folders to lines.


class Cell(NamedTuple):
    """A finished system of a run's folder."""

    run: standing.Run
    folder: Path
    study: Study
    system: str
    found: compare.Finished

    @property
    def makers(self) -> list[dict[str, Any]]:
        """By what it was trained, see `fedjax_meta.study.made`; several if it went on with other code."""
        path = self.folder / "results" / self.found.scenario / f"{self.system}.final.json"
        return json.loads(path.read_text(encoding="utf-8"))["made"]

    @property
    def points(self) -> list[tuning.Point]:
        """What was tried of the grid."""
        path = self.folder / "results" / self.found.scenario / f"{self.system}.tuning.json"
        if not path.is_file():
            return tuning.points_of(self.study.systems[self.system])
        trials, _ = folders.read_trials(path)
        return [dict(point) for point in dict.fromkeys(tuple(trial.numbers.items()) for trial in trials.values())]

    def digests(self, again: Again | None) -> tuple[str, str]:
        """Of the method and of the rest, of the code that trained it last or found it alike."""
        if again is not None and again.alike:
            return again.method, again.runner
        return self.makers[-1]["method"], self.makers[-1]["runner"]


def extract(runs: Sequence[standing.Run], root: Path, data_dir: str | None = None) -> dict[str, list[Line]]:
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
            found.setdefault(scenario, []).extend(_lines(here, data_dir))
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


def cells_of(run: standing.Run, folder: Path) -> list[Cell]:
    """The finished systems in a run's folder; none where there is no run.

    Raises:
      ValueError: the folder holds another study than the list.
    """
    if not (folder / "run.json").is_file():
        return []
    standing.check_same(run, folder)
    study = load(folder / "study.yaml")
    names = [
        name
        for scenario in study.scenarios
        for name in study.systems
        if (folder / "results" / scenario / f"{name}.final.json").is_file()
    ]
    found = compare.finished([folder]) if names else []
    return [Cell(run, folder, study, name, one) for name, one in zip(names, found, strict=True)]


def _lines(cells: Sequence[Cell], data_dir: str | None) -> list[Line]:
    """Lines of one scenario of one run."""
    systems = [cell.found for cell in cells]
    local = next((cell.found for cell in cells if cell.found.method == LOCAL), None)
    target = None
    if local is not None:
        target = compare.Target(float(np.mean([scores.mean() for scores in local.by_client(compare.KNOWN).values()])))
        target = target if math.isfinite(target.value) else None
    lines = []
    for cell, row in zip(cells, compare.compared(systems, target=target), strict=True):
        lines += _of_cell(cell, row, NAN if target is None else target.value)
    return [*lines, *_untrained(cells[0], data_dir)]


def _of_cell(cell: Cell, row: compare.Row, target: float) -> list[Line]:
    scenario, kind = row.system.scenario, row.system.kind
    content = folders.read_run(cell.folder)
    makers = cell.makers
    again = read_again(cell.folder).get(scenario, {}).get(cell.system)
    confirmed = again if again is not None and again.alike else None
    digests = cell.digests(again)
    points = cell.points
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
                edge=" ".join(_at_edge(points, trial.numbers)),
                rounds=trial.rows[-1]["round"],
                known=float(row.known[number]),
                worst=float(row.worst[number]),
                new=float(row.new[number]) if row.new.size else NAN,
                behind=row.behind.get(LOCAL, NAN),
                bytes=row.system.traffic,
                target=target,
                reached=reached,
                diverged="" if trial.diverged is None else str(trial.diverged),
                **_kind_fields(kind),
                **_where(cell, content, makers),
                commit="+".join(dict.fromkeys(map(commit_of, makers))),
                made=digests[0],
                runner=digests[1],
                said=said(cell.study, scenario, cell.system),
                again=confirmed.commit if confirmed else "",
                moved=confirmed.moved if confirmed else NAN,
                command=command(cell.run, cell.system),
            )
        )
    return lines


def _at_edge(points: Sequence[tuning.Point], chosen: tuning.Point) -> list[str]:
    """As `tuning.at_edge`, of numbers with at least three values: with two there is nothing but ends."""
    return [name for name in tuning.at_edge(points, chosen) if len({point[name] for point in points}) > 2]


def _kind_fields(kind: report.Kind) -> dict[str, Any]:
    return {"score": kind.name, "higher": kind.higher_is_better, "share": kind.share}


def _where(cell: Cell, content: Mapping[str, Any], makers: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    versions = " ".join(f"{name}={content['versions'][name]}" for name in ("python", "jax", "optax", "numpy"))
    kinds = dict.fromkeys(maker["processor"] for maker in makers if "processor" in maker)
    device = " and ".join(kinds) or str(content["device"])
    return {"data": cell.found.fingerprint, "run": cell.run.name, "versions": versions, "device": device}


def command(run: standing.Run, system: str) -> str:
    """The command that tunes and trains one system of a run, with the same numbers."""
    alone = dataclasses.replace(run, systems=[system])
    return shlex.join(["fedjax-meta", "run", *alone.arguments(), "--out", f"runs/{run.name}-{system}"])


def _untrained(cell: Cell, data_dir: str | None) -> list[Line]:
    """The rows that take no training."""
    study, scenario = cell.study, cell.found.scenario
    clients = study.scenarios[scenario].build(data_dir)
    lines = []
    asked, scored = TESTED_ON[study.scenario(scenario).adapt_on], counted(study, scenario, clients, clients.train)
    for title, groups in baselines.measured(clients, study.seeds[0], study.metrics, asked, scored).items():
        known, new = (report.main_score(groups[g], study.score) if g in groups else None for g in (compare.KNOWN, compare.NEW))
        lines.append(
            Line(
                scenario=scenario,
                system=title,
                method="",
                seed=study.seeds[0],
                known=known.mean,
                worst=known.kind.worst_tenth(known.values),
                new=NAN if new is None else new.mean,
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
        writer.writerow([_cell(value) for value in line])
    return file.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"


def from_csv(text: str) -> list[Line]:
    """The lines that `to_csv` wrote."""
    read = {float: lambda cell: float(cell) if cell else NAN, bool: lambda cell: cell == "True", int: int, str: str}
    kinds = Line.__annotations__
    return [Line(**{name: read[kinds[name]](cell) for name, cell in row.items()}) for row in csv.DictReader(io.StringIO(text))]


def read_lines(folder: Path | None = None) -> dict[str, list[Line]]:
    """The committed lines by scenario, of `RAW` when no folder is given."""
    files = sorted((RAW if folder is None else folder).glob("*.csv"))
    return {path.stem: from_csv(path.read_text(encoding="utf-8")) for path in files}


def rows_that_lack(run: standing.Run, study: Study, lack: Callable[[Sequence[Line]], bool]) -> Iterator[list[Line]]:
    """The committed lines of each system of a run that lack something; those whose study has changed since are named instead."""
    for scenario, lines in read_lines().items():
        mine = [line for line in lines if line.run == run.name and line.method and line.system in study.systems]
        for system in dict.fromkeys(line.system for line in mine):
            rows = [line for line in mine if line.system == system]
            if lack(rows) and rows[0].said == said(study, scenario, system):
                yield rows
            elif lack(rows):
                print(f"{scenario}, {system}: not measured, the study has changed since", flush=True)


def target(lines: Sequence[Line]) -> compare.Target | None:
    """What the known clients of a scenario should reach; `None` without local training."""
    known = [line.target for line in lines if not math.isnan(line.target)]
    return compare.Target(known[0]) if known else None
