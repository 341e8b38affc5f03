"""Which of the papers' numbers hold: small extracts of run folders, a verdict on each published number, and the page with both.

An extract (docs/results/NAME.json) holds the scores of every system, seed by seed, with the commit and a fingerprint of the
configuration. Its rows may come from several run folders. Tables, verdicts and totals are made only from extracts and from the
studies' published numbers.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from experiments import _user_accuracy as users
from experiments._verdicts import NOT, ONE, ORDER, UNRUN, VERDICTS, WITHIN, measured, order, verdicts
from fedjax_meta import report
from fedjax_meta.study import Study, baselines, load, tuning
from fedjax_meta.study import folder as folders
from fedjax_meta.study.study import DRAW, to_tree

HERE = Path(__file__).parent
LIST = HERE / "reproduce.yaml"
PAGE = HERE.parent / "docs" / "results.md"
EXTRACTS = HERE.parent / "docs" / "results"
END_OF_GRID = "‡"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
SCORES = ("accuracy", "accuracy_mean", "accuracy_std", "f1_mean", "f1_std")
HEADINGS = {
    "accuracy": "accuracy over samples",
    "accuracy_mean": "mean over clients",
    "accuracy_std": "deviation over clients",
    "f1_mean": "F1",
    "f1_std": "deviation of F1",
}


class Claim(NamedTuple):
    """What a paper says of an order, where it prints no numbers.

    Attributes:
      says: in words.
      systems: names in the study, the best first.
      scenarios: on which it is said.
      clients, score: of a test; or a score of user accuracy, "user_accuracy" or "rounds to 95". Deviations are better if small.
    """

    says: str
    systems: list[str]
    scenarios: list[str]
    clients: str = "known"
    score: str = "accuracy_mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """An entry of the list.

    Attributes:
      name: of its folder and of its extract.
      title: of its section.
      study: name of a study of the package.
      variants, systems, settings, seeds: as `fedjax-meta run` takes them.
      hours: measured or estimated on two cores, see `cost`.
      cost: where `hours` is from.
      causes: by system, why a published number is not reproduced.
      notes: sentences below the tables.
      claims: orders that the paper asserts.
      targets: user accuracies in percent to which rounds are counted.
    """

    name: str
    title: str
    study: str
    hours: float
    cost: str
    variants: list[str] = dataclasses.field(default_factory=list)
    systems: list[str] = dataclasses.field(default_factory=list)
    settings: list[str] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)
    causes: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    claims: list[Claim] = dataclasses.field(default_factory=list)
    targets: list[float] = dataclasses.field(default_factory=list)

    def arguments(self) -> list[str]:
        """What follows `fedjax-meta run`, without folders."""
        words = [self.study]
        for variant in self.variants:
            words += ["--variant", variant]
        words += ["--systems", ",".join(self.systems)] if self.systems else []
        words += ["--seeds", ",".join(map(str, self.seeds))] if self.seeds else []
        for setting in self.settings:
            words += ["--set", setting]
        return words

    def load(self) -> Study:
        """The study as the command runs it."""
        seeds = [f"seeds={self.seeds}"] if self.seeds else []
        return load(self.study, [*seeds, *self.settings], variants=self.variants, systems=self.systems or None)


def read_list(path: Path = LIST) -> list[Run]:
    """The runs in order of priority.

    Raises:
      ValueError: an entry with an unknown or a missing field.
    """
    runs = []
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        try:
            claims = [Claim(**claim) for claim in entry.get("claims", ())]
            runs.append(Run(name=name, **{**entry, "claims": claims}))
        except TypeError as error:
            raise ValueError(f"{path.name}: {name}: {error}") from None
    return runs


# Extracts.


def extract(run: Run, folder: Path) -> dict[str, Any]:
    """The results in a run's folder; systems that are not finished are left out.

    Raises:
      ValueError: the folder holds another study than the list's.
      OSError: it holds none.
    """
    study = run.load()
    check_same(run, folder)
    content = folders.read_run(folder)
    commits = content["git"]["package"] or {"commit": "unknown", "dirty": False}
    rows: list[dict[str, Any]] = []
    seconds = 0.0
    for scenario in study.scenarios:
        for system in study.systems_on(scenario):
            path = folder / "results" / scenario / f"{system}.final.json"
            if not path.is_file():
                continue
            row, spent = _row(path, _orders(study, scenario), run.targets)
            rows.append({"scenario": scenario, "system": system, **row})
            seconds += spent
    rows = _of_draws(study, rows) if study.data_seeds else rows
    rows = [{**row, "settings": settings_of(study, row["scenario"], row["system"])} for row in rows]
    return {
        "command": " ".join(["fedjax-meta run", *run.arguments()]),
        "commit": commits["commit"] + (" with changes" if commits["dirty"] else ""),
        "config": hashlib.sha256(json.dumps(content["fixed"], sort_keys=True).encode()).hexdigest()[:16],
        "data": {name: clients["fingerprint"] for name, clients in content["clients"].items()},
        "versions": {name: content["versions"][name] for name in ("python", "jax", "optax", "numpy")},
        "device": content["device"],
        "rounds": study.rounds,
        "seeds": list(study.seeds),
        **({"draws": list(study.data_seeds)} if study.data_seeds else {}),
        "hours": round(seconds / 3600, 3),
        "rows": rows,
    }


PART = ("commit", "config", "versions", "device", "hours")
"""What is told of the folder that rows are from."""


def joined(run: Run, found: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """An extract, and the rows of one from before that it lacks, if they were made with its data and the settings of the list.

    The entry "before" says where these rows are from.
    """
    if before is None or any(found["data"].get(name, of) != of for name, of in before["data"].items()):
        return found
    study = run.load()
    rows = {_place(row): row for row in _valid(study, before)} | {_place(row): row for row in found["rows"]}
    parts = [*before.get("before", ()), {**{name: before[name] for name in PART}, "systems": _of_its_folder(before)}]
    kept = {system for place, system in rows if (place, system) not in set(map(_place, found["rows"]))}
    parts = [{**part, "systems": [name for name in part["systems"] if name in kept]} for part in parts]
    in_order = [(place, system) for place, systems in _places(study).items() for system in systems]
    return {
        **found,
        "data": {**before["data"], **found["data"]},
        **({"before": told} if (told := [part for part in parts if part["systems"]]) else {}),
        "rows": [rows[one] for one in in_order if one in rows],
    }


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["scenario"], row["system"]


def _of_its_folder(found: Mapping[str, Any]) -> list[str]:
    """The systems of an extract whose rows are not from before."""
    others = {name for part in found.get("before", ()) for name in part["systems"]}
    return [name for name in dict.fromkeys(row["system"] for row in found["rows"]) if name not in others]


def _valid(study: Study, found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of an extract that were made with the settings of a study."""
    places = {(place, system) for place, systems in _places(study).items() for system in systems}
    return [row for row in found["rows"] if _place(row) in places and row.get("settings") == settings_of(study, *_place(row))]


def missing(run: Run, found: Mapping[str, Any] | None) -> list[str]:
    """The systems of which an extract lacks a row with the settings of the list; rows that do not tell theirs count by name."""
    study = run.load()
    rows = [] if found is None else [*_valid(study, found), *(row for row in found["rows"] if "settings" not in row)]
    has = set(map(_place, rows))
    lacking = {system for place, systems in _places(study).items() for system in systems if (place, system) not in has}
    return [name for name in study.systems if name in lacking]


def settings_of(study: Study, scenario: str, system: str) -> str:
    """A fingerprint of all that a study says of one system on one scenario, or on all of its draws.

    How far its grid may move on is not part of it.
    """
    tree = to_tree(study)
    said = {name: tree[name] for name in ("rounds", "seeds", "data_seeds", "federation", "metrics", "user_accuracy")}
    said["scenarios"] = [of for name, of in tree["scenarios"].items() if name.partition(DRAW)[0] == scenario]
    said["system"] = {name: of for name, of in tree["systems"][system].items() if name not in ("title", "scenarios")}
    if study.systems[system].grid:
        said["tuning"] = {name: value for name, value in tree["tuning"].items() if name != "extend"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _of_draws(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each system with the runs of all draws of its clients; systems of which a draw is missing are left out.

    A run counts the mean over its orders of the labels; these are those of all draws, moved to one mean.
    """
    joined = []
    for scenario, system in dict.fromkeys((row["scenario"].partition(DRAW)[0], row["system"]) for row in rows):
        parts = [row for row in rows if (row["scenario"].partition(DRAW)[0], row["system"]) == (scenario, system)]
        if len(parts) < len(study.data_seeds):
            continue
        row = {"scenario": scenario, "system": system, **{name: parts[0][name] for name in ("chosen", "points", "edge")}}
        for clients in ("known", "new"):
            if clients in parts[0]:
                row[clients] = {name: [v for part in parts for v in part[clients][name]] for name in parts[0][clients]}
        if "orders" in parts[0]:
            row["orders"] = {name: _moved([part["orders"][name] for part in parts]) for name in parts[0]["orders"]}
        joined.append(row)
    return joined


def _moved(draws: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The orders of all draws without what sets the draws apart: their spread is that of the orders of one draw.

    Example:
      >>> _moved([[1.0, 3.0], [7.0, 9.0]])
      [4.0, 6.0, 4.0, 6.0]
    """
    values = np.array(draws, float)  # None is NaN
    moved = values - values.mean(1, keepdims=True) + values.mean()
    return [round(value, 3) if np.isfinite(value) else None for value in moved.ravel().tolist()]


def check_same(run: Run, folder: Path) -> None:
    """Raises `ValueError` where a folder holds another study than the list's; systems that it has no results of may differ."""
    study = run.load()
    wanted, made = to_tree(study), to_tree(load(folder / "study.yaml"))
    made["tuning"] |= {"extend": wanted["tuning"]["extend"]}  # the same command goes on with it
    tuned = ["tuning"] if any(system.grid for system in study.systems.values()) else []
    for field in ("rounds", "seeds", "scenarios", "federation", *tuned):
        if wanted[field] != made[field]:
            raise ValueError(f"{folder} holds another study than {run.name} of the list: {field} differs")
    for scenario in study.scenarios:
        for system in study.systems_on(scenario):
            there = (folder / "results" / scenario / f"{system}.final.json").is_file()
            if there and wanted["systems"][system] != made["systems"].get(system):
                raise ValueError(f"{folder} holds another study than {run.name} of the list: system {system} differs")


def _orders(study: Study, scenario: str) -> int:
    """How many draws of new clients a scenario has."""
    given = study.scenarios[scenario].options.get("orders", 1)
    return given if isinstance(given, int) else len(given)


def _row(path: Path, orders: int, targets: Sequence[float]) -> tuple[dict[str, Any], float]:
    """(the scores of a system in percent, seconds of all its trials)."""
    trials = report.numbers_again(json.loads(path.read_text(encoding="utf-8"))["trials"]).values()
    spent = sum(row["seconds"] + row["compile_seconds"] for trial in trials for row in trial["rows"])
    tuned = path.with_name(path.name.replace(".final.", ".tuning."))
    points = []
    if tuned.is_file():
        tried = report.numbers_again(json.loads(tuned.read_text(encoding="utf-8"))["trials"]).values()
        points = [dict(point) for point in sorted({tuple(trial["numbers"].items()) for trial in tried})]
        spent += sum(row["seconds"] + row["compile_seconds"] for trial in tried for row in trial["rows"])
    trials = sorted(trials, key=lambda trial: trial["seed"])
    chosen = trials[0]["numbers"]
    row: dict[str, Any] = {"chosen": chosen, "points": len(points), "edge": tuning.at_edge(points, chosen) if points else []}
    if watched := users.extract(trials, targets):
        row["users"] = watched
    for clients in ("known", "new"):
        tests = [trial["rows"][-1]["tests"].get(clients) for trial in trials]
        if tests[0] is None:
            continue
        scores = [
            _scores(test, orders if clients == "new" else 1, diverged=trial["diverged"] is not None)
            for trial, test in zip(trials, tests, strict=True)
        ]
        by_order = {name: np.array([one[name] for one in scores]) for name in scores[0]}  # [seeds, orders]
        row[clients] = {name: _rounded(values.mean(1)) for name, values in by_order.items()}
        if clients == "new" and orders > 1:
            row["orders"] = {name: _rounded(values.mean(0)) for name, values in by_order.items()}
    return row, spent


def _rounded(values: np.ndarray) -> list[float | None]:
    return [round(100 * float(value), 3) if np.isfinite(value) else None for value in values]


def _scores(test: Mapping[str, Any], orders: int, *, diverged: bool = False) -> dict[str, np.ndarray]:
    """Scores of each order `[orders]`: `SCORES`, or mean and deviation of each share that the study measures in their place.

    Deviations are those of the population, as papers give them. What a diverged run predicts is no score: all are NaN.
    """
    if diverged:
        return {name: np.full(orders, np.nan) for name in _scores(test, orders)}
    if "confusion" not in test:
        shares = {name: one["values"] for name, one in test["metrics"].items() if one["share"]}
        by_order = {name: np.array(values, float).reshape(orders, -1) for name, values in shares.items()}
        words = {"mean": np.mean, "std": np.std}
        return {f"{name}_{word}": over(values, 1) for name, values in by_order.items() for word, over in words.items()}
    accuracy, f1 = (np.array(test[name], float).reshape(orders, -1) for name in ("accuracy", "f1"))
    samples = np.array(test["confusion"]).sum((1, 2)).reshape(orders, -1)
    over_samples = (accuracy * samples).sum(1) / samples.sum(1)
    return dict(zip(SCORES, (over_samples, accuracy.mean(1), accuracy.std(1), f1.mean(1), f1.std(1)), strict=True))


def write_extract(found: Mapping[str, Any], path: Path) -> None:
    """Writes an extract, a line for each system."""
    rows = ",\n".join("  " + json.dumps(row) for row in found["rows"])
    head = {key: value for key, value in found.items() if key != "rows"}
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read_extracts(folder: Path = EXTRACTS) -> dict[str, dict[str, Any]]:
    """Extracts by the name of their run."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


# The page.


def page(runs: Sequence[Run], extracts: Mapping[str, Mapping[str, Any]]) -> str:
    """The generated part of docs/results.md."""
    sections = [_section(run, extracts.get(run.name)) for run in runs]
    totals = [
        [
            run.title,
            in_docs(run, extracts.get(run.name)),
            *(str(section.numbers.count(v) or "") for v in VERDICTS),
            _share(WITHIN, section.scores),
            _share(ORDER, section.orders),
        ]
        for run, section in zip(runs, sections, strict=True)
    ]
    text = [
        "## What stands",
        "",
        "How many published rows have which verdict, by the first score of their table; how many of the published numbers of all "
        "scores are within the spread; and how many of the orders that a paper asserts hold. The last two are of what was run "
        "with several seeds.",
        "",
    ]
    headings = ["run", "state", *VERDICTS, "all numbers within the spread", "orders that hold"]
    text += [report.markdown_table(headings, totals, text_columns=2), ""]
    for run, section in zip(runs, sections, strict=True):
        if run.name in extracts:
            text += section.lines
    waiting = [run for run in runs if run.name not in extracts]
    if waiting:
        text += [
            "## Not run yet",
            "",
            "`python -m experiments.reproduce --data-dir DIR` runs them in this order; hours on two cores.",
            "",
        ]
        rows = [[f"{run.title} ({run.name})", run.cost, f"{run.hours:g}"] for run in waiting]
        text += [report.markdown_table(["run", "cost by", "hours"], rows, text_columns=2), ""]
    return "\n".join(text)


def _share(word: str, words: Sequence[str]) -> str:
    """How many verdicts are `word`, of those that could be judged."""
    judged = [one for one in words if one not in (ONE, UNRUN)]
    return f"{judged.count(word)} of {len(judged)}" if judged else ""


def in_docs(run: Run, found: Mapping[str, Any] | None) -> str:
    """What of a run docs/results has: "not run", "4 of 8 rows, 1 seed" or "3 seeds"."""
    if found is None:
        return UNRUN
    study, seeds, draws = run.load(), len(found["seeds"]), len(found.get("draws", ()))
    wanted = sum(len(study.systems_on(scenario)) for scenario in study.scenarios) // max(draws, 1)
    part = "" if len(found["rows"]) == wanted else f"{len(found['rows'])} of {wanted} rows, "
    return f"{part}{seeds} seed{'s' * (seeds > 1)}{f' of {draws} draws' * (draws > 0)}"


class _Section(NamedTuple):
    """A run on the page.

    Attributes:
      lines: its text.
      numbers: verdicts on what its paper prints, of the first score of each table.
      scores: the same of every score.
      orders: verdicts on what its paper says of orders.
    """

    lines: list[str]
    numbers: list[str]
    scores: list[str]
    orders: list[str]


def _section(run: Run, found: Mapping[str, Any] | None) -> _Section:
    study = run.load()
    rows = {(row["scenario"], row["system"]): row for row in (found or {"rows": ()})["rows"]}
    lines = [f"## {run.title}", ""]
    told: list[str] = []
    every: list[str] = []
    orders: list[str] = []
    if found is not None:
        lines += [f"    {found['command']}", "", _facts(found), ""]
    shown: set[tuple[str, str, str]] = set()
    for (scenario, clients, scores), numbers in published_tables(study).items():
        table, by_score = _against(run, study, rows, scenario, clients, scores, numbers)
        told += by_score[scores[0]].values()
        every += [word for words in by_score.values() for word in words.values()]
        lines += [f"### {_titled(study, scenario, f'{clients} clients')}", "", *table, ""]
        shown |= {(scenario, clients, system) for system in numbers}
    lines += _others(study, rows, shown)
    lines += _users(study, rows)
    for claim in run.claims:
        for scenario in claim.scenarios:
            sentence, word = _claim(claim, scenario, rows)
            orders.append(word)
            lines += [f"- {_titled(study, scenario, claim.says, ': ')}: **{word}**{sentence}"]
    lines += [""] if run.claims else []
    lines += [line for note in run.notes for line in (note.strip(), "")]
    return _Section(lines, told, every, orders)


def _facts(found: Mapping[str, Any]) -> str:
    rounds, seeds = found["rounds"], ", ".join(map(str, found["seeds"]))
    if "draws" in found:
        seeds += f", of each draw of the clients ({', '.join(map(str, found['draws']))})"
    others = "".join(f" {', '.join(part['systems'])}: {_source(part)}." for part in found.get("before", ()))
    return f"{rounds} round{'s' * (rounds > 1)}; seeds {seeds}; {_source(found)}.{others}"


def _source(part: Mapping[str, Any]) -> str:
    """The folder that rows are from, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    return (
        f"commit `{part['commit'][:12]}`{part['commit'][40:]}; configuration `{part['config']}`; "
        f"{part['hours']:.2f} h beside other work on {part['device']}; {versions}"
    )


def _titled(study: Study, scenario: str, words: str, join: str = ", ") -> str:
    """Words behind the name of the scenario they are about; alone, with a capital, where the study has no other."""
    only = len({name.partition(DRAW)[0] for name in study.scenarios}) == 1
    return words[:1].upper() + words[1:] if only else f"{scenario}{join}{words}"


def published_tables(study: Study) -> dict[tuple[str, str, tuple[str, ...]], dict[str, dict[str, float]]]:
    """The tables that a study says are published, by scenario, clients and scores: the numbers of each system, by score."""
    by_system: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in study.published:
        by_system.setdefault((one.scenario, one.clients, one.system), {})[one.score] = one.value
    tables: dict[tuple[str, str, tuple[str, ...]], dict[str, dict[str, float]]] = {}
    for (scenario, clients, system), numbers in by_system.items():
        tables.setdefault((scenario, clients, tuple(numbers)), {})[system] = numbers
    return tables


def _against(
    run: Run,
    study: Study,
    rows: Mapping[tuple[str, str], Mapping[str, Any]],
    scenario: str,
    clients: str,
    scores: Sequence[str],
    numbers: Mapping[str, Mapping[str, float]],
) -> tuple[list[str], dict[str, dict[str, str]]]:
    """A table of measured numbers with the published ones in brackets, and the verdicts by score and system."""
    found = {
        (system, score): measured(rows[scenario, system], clients, score)
        for system in numbers
        if (scenario, system) in rows
        for score in scores
    }
    by_score = {
        score: verdicts(
            {s: given[score] for s, given in numbers.items()}, {s: found[s, score] for s in numbers if (s, score) in found}
        )
        for score in scores
    }
    table = []
    for system, given in numbers.items():
        cells = [study.title_of(system)]
        for score in scores:
            cells.append(f"{found.get((system, score), '')} ({given[score]:.2f})".strip())
        word = by_score[scores[0]][system]
        off = found[system, scores[0]].mean - given[scores[0]] if (system, scores[0]) in found else math.nan
        distance = "" if word == WITHIN or math.isnan(off) else f", {off:+.2f} points"
        cause = f": {run.causes.get(system, 'cause unknown')}" if word in (ORDER, NOT) else ""
        table.append([*cells, f"{_in_words([by_score[score][system] for score in scores], distance)}{cause}"])
    headings = ["system", *(HEADINGS[score] for score in scores), "verdict"]
    return [report.markdown_table(headings, table)], by_score


def _in_words(words: Sequence[str], distance: str) -> str:
    """The verdict on a row: that on its first score, and how many of its scores are within the spread."""
    first, within = words[0], words.count(WITHIN)
    if len(words) == 1 or first in (ONE, UNRUN):
        return f"{first}{distance}"
    if within == len(words):
        return f"{'both' if within == 2 else f'all {within}'} numbers {WITHIN}"
    count = f"{within} of {len(words)} numbers"
    return f"first score {first}; {count}" if first == WITHIN else f"first score {first}{distance}; {count} {WITHIN}"


def _others(
    study: Study, rows: Mapping[tuple[str, str], Mapping[str, Any]], shown: Iterable[tuple[str, str, str]]
) -> list[str]:
    """Tables of what was run and has no published number."""
    lines, seen = [], set(shown)
    for scenario, systems in _places(study).items():
        table = []
        for system in systems:
            row = rows.get((scenario, system))
            if row is None or all((scenario, clients, system) in seen for clients in ("known", "new") if clients in row):
                continue
            cells = [
                str(measured(row, clients, score)) if clients in row and _trained(study, system, clients) else ""
                for clients in ("known", "new")
                for score in _mean_and_deviation(row)
            ]
            ends = _at_edge(study, row)
            chosen = ", ".join(
                f"{name} {value:g}{f' {END_OF_GRID}' * (name in ends)}" for name, value in row["chosen"].items()
            )
            table.append([study.title_of(system), *cells, chosen])
        if table:
            headings = ["system", "known: mean over clients", "deviation", "new: mean over clients", "deviation", "chosen"]
            used = [c for c in range(len(headings)) if c == 0 or any(line[c] for line in table)]
            cells = [[line[c] for c in used] for line in table]
            lines += [f"### {_titled(study, scenario, 'without a published number')}", ""]
            lines += [report.markdown_table([headings[c] for c in used], cells), ""]
    return lines


def _trained(study: Study, system: str, clients: str) -> bool:
    """Whether clients have a model that was trained: new clients that train by themselves may have none."""
    return baselines.trained(clients, baselines.alone(study, system))


def _at_edge(study: Study, row: Mapping[str, Any]) -> Sequence[str]:
    """The numbers of which a row has the least or the largest value that was tried."""
    if "edge" in row:
        return row["edge"]
    points = tuning.points_of(study.systems[row["system"]])
    return tuning.at_edge(points, row["chosen"]) if len(points) == row["points"] else ()


def _places(study: Study) -> dict[str, list[str]]:
    """The systems of each scenario; the draws of a scenario are one."""
    return {name.partition(DRAW)[0]: list(study.systems_on(name)) for name in study.scenarios}


def _mean_and_deviation(row: Mapping[str, Any]) -> tuple[str, str]:
    """The names of the scores that stand where nothing is published."""
    name = next(score.removesuffix("_mean") for score in row["known"] if score.endswith("_mean"))
    return f"{name}_mean", f"{name}_std"


def _users(study: Study, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """Tables of user accuracy, where it was recorded."""
    lines = []
    for scenario, systems in _places(study).items():
        of_systems = {name: rows.get((scenario, name), {}).get("users") for name in systems}
        watched = [(study.title_of(name), scores) for name, scores in of_systems.items() if scores]
        if watched:
            lines += [f"### {_titled(study, scenario, 'user accuracy')}", "", report.markdown_table(*users.table(watched)), ""]
    return lines


def _claim(claim: Claim, scenario: str, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> tuple[str, str]:
    """(the numbers in words, the verdict)."""
    if any((scenario, system) not in rows for system in claim.systems):
        return "", UNRUN
    found = [_claimed(rows[scenario, system], claim) for system in claim.systems]
    sentence = f" ({', '.join(f'{system} {one.words}' for system, one in zip(claim.systems, found, strict=True))})"
    return sentence, order([one.values for one in found])


def _claimed(row: Mapping[str, Any], claim: Claim) -> users.Claimed:
    if claim.score not in SCORES:
        return users.claimed(row["users"], claim.score)
    sign = -1 if claim.score.endswith("_std") else 1
    values = [-math.inf if value is None else sign * value for value in row[claim.clients][claim.score]]
    return users.Claimed(values, str(measured(row, claim.clients, claim.score)))


def with_generated(text: str, generated: str) -> str:
    """The page with its generated part replaced.

    Raises:
      ValueError: it lacks one of the two marks.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page must hold the lines {BEGIN} and {END} once")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{generated.rstrip()}\n\n{END}{after}"
