"""Small extracts of the folders of the papers' runs, from which docs/results.md is made.

An extract (docs/results/NAME.json) holds the scores of every system, seed by seed, with the commit and a fingerprint of the
configuration. Its rows may come from several run folders.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reproduce import users
from experiments.reproduce.run_list import Run
from fedjax_meta import report
from fedjax_meta.study import Study, load, tuning
from fedjax_meta.study import folder as folders
from fedjax_meta.study.files import DRAW
from fedjax_meta.study.result_files import read_points
from fedjax_meta.study.study import to_tree

EXTRACTS = Path(__file__).parents[2] / "docs" / "results"
SCORES = ("accuracy", "accuracy_mean", "accuracy_std", "f1_mean", "f1_std")


def extract(run: Run, folder: Path) -> dict[str, Any]:
    """The results in a run's folder; systems that are not finished are left out.

    Raises:
      ValueError: the folder holds another study than the list's.
      OSError: it holds none.
    """
    study = run.load()
    check_same(run, folder)
    held = load(folder / "study.yaml")
    content = folders.read_run(folder)
    commits = content["git"]["package"] or {"commit": "unknown", "dirty": False}
    rows: list[dict[str, Any]] = []
    seconds = 0.0
    for scenario in study.scenarios:
        for system in study.systems_on(scenario):
            path = folder / "results" / scenario / f"{system}.final.json"
            # What the folder's own study does not have was made with other settings, or by an earlier list.
            if scenario not in held.scenarios or system not in held.systems or not is_finished(path, study, system):
                continue
            row, spent = _row(path, study, _orders(study, scenario), run.targets)
            rows.append({"scenario": scenario, "system": system, **row})
            seconds += spent
    rows = _of_draws(study, rows) if study.data_seeds else rows
    rows = [{**row, "settings": settings_of(study, row["scenario"], row["system"])} for row in rows]
    return {
        "command": run.command,
        "commit": commits["commit"] + (" with changes" if commits["dirty"] else ""),
        "config": hashlib.sha256(json.dumps(content["fixed"], sort_keys=True).encode()).hexdigest()[:16],
        "data": {name: clients["fingerprint"] for name, clients in content["clients"].items()},
        "versions": {name: content["versions"][name] for name in ("python", "jax", "optax", "numpy")},
        "device": content["device"],
        "rounds": study.rounds,
        "seeds": list(study.seeds),
        **({"draws": list(study.data_seeds)} if study.data_seeds else {}),
        "trials": {"rounds": study.tuning.rounds or study.rounds, "seeds": len(study.tuning.seeds)},
        "hours": round(seconds / 3600, 3),
        "rows": rows,
    }


def is_finished(path: Path, study: Study, system: str) -> bool:
    """Whether a file holds the final runs of a system with all seeds and rounds of a study; one that was extended may not yet."""
    if not path.is_file():
        return False
    content = json.loads(path.read_text(encoding="utf-8"))
    # Central training counts passes of its own.
    whole = study.systems[system].pooled or content["rounds"] == study.rounds
    return whole and {*study.seeds} <= {trial["seed"] for trial in content["trials"].values()}


PART = ("commit", "config", "versions", "device", "hours")
"""What is told of the folder that rows are from."""


def joined(run: Run, found: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """An extract, and the rows of one from before that it lacks, if they were made with its data and the settings of the list.

    The entry "before" says from which folders these rows are.
    """
    if before is None:
        return found
    study = run.load()
    other = {name.partition(DRAW)[0] for name, of in before["data"].items() if found["data"].get(name, of) != of}
    kept = {_place(row): row for row in _valid(run, study, before) if row["scenario"] not in other}
    rows = kept | {_place(row): row for row in found["rows"]}
    parts = [*before.get("before", ()), {**{name: before[name] for name in PART}, "rows": _of_its_folder(before)}]
    left = {_place(row) for row in kept.values()} - {_place(row) for row in found["rows"]}
    parts = [{**part, "rows": [place for place in part["rows"] if tuple(place) in left]} for part in parts]
    in_order = [(scenario, system) for scenario, systems in places_of(study).items() for system in systems]
    return {
        **found,
        "data": {**{name: of for name, of in before["data"].items() if name.partition(DRAW)[0] not in other}, **found["data"]},
        **({"before": told} if (told := [part for part in parts if part["rows"]]) else {}),
        "rows": [rows[place] for place in in_order if place in rows],
    }


def places_of(study: Study) -> dict[str, list[str]]:
    """The systems of each scenario; the draws of a scenario are one."""
    return {name.partition(DRAW)[0]: list(study.systems_on(name)) for name in study.scenarios}


def hours_of(found: Mapping[str, Any]) -> float:
    """Hours of all folders that the rows of an extract are from."""
    return found["hours"] + sum(part["hours"] for part in found.get("before", ()))


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["scenario"], row["system"]


def _of_its_folder(found: Mapping[str, Any]) -> list[list[str]]:
    """The [scenario, system] of the rows of an extract that are not from before."""
    others = {tuple(place) for part in found.get("before", ()) for place in part["rows"]}
    return [list(_place(row)) for row in found["rows"] if _place(row) not in others]


def _valid(run: Run, study: Study, found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of an extract that were made with the settings of the list; older ones do not tell theirs, but their command."""
    places = {(scenario, system) for scenario, systems in places_of(study).items() for system in systems}
    same = found["command"] == run.command and (found["rounds"], found["seeds"]) == (study.rounds, list(study.seeds))
    return [
        row
        for row in found["rows"]
        if _place(row) in places and (row["settings"] == settings_of(study, *_place(row)) if "settings" in row else same)
    ]


def missing(run: Run, found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The (scenario, system) of which an extract lacks a row with the settings of the list; the draws of a scenario are one."""
    study = run.load()
    has = set(map(_place, _valid(run, study, found))) if found is not None else set()
    return [(scenario, name) for scenario, names in places_of(study).items() for name in names if (scenario, name) not in has]


def settings_of(study: Study, scenario: str, system: str) -> str:
    """A fingerprint of all that a study says of one system on one scenario, or on all of its draws.

    How far its grid may move on is not part of it.
    """
    tree = to_tree(study)
    said = {name: tree[name] for name in ("rounds", "seeds", "data_seeds", "federation", "metrics")}
    said["user_accuracy"] = study.user_accuracy_of(system)
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
    """Raises `ValueError` where a folder holds another study than the list's. It may have fewer systems, and their scenarios."""
    study, held = run.load(), load(folder / "study.yaml")
    wanted, made = to_tree(study), to_tree(held)
    made["tuning"] |= {"extend": wanted["tuning"]["extend"]}  # the same command goes on with it
    wanted["scenarios"] = {name: of for name, of in wanted["scenarios"].items() if name in made["scenarios"]}
    for tree in (wanted, made):  # where a system is run changes none of its results
        tree["systems"] = {name: {**of, "scenarios": None} for name, of in tree["systems"].items()}
    tuned = ["tuning"] if any(system.grid for system in study.systems.values()) else []
    for field in ("rounds", "seeds", "scenarios", "federation", *tuned):
        if wanted[field] != made[field]:
            raise ValueError(f"{folder} holds another study than {run.name} of the list: {field} differs")
    for scenario in study.scenarios:
        for system in study.systems_on(scenario):
            there = (folder / "results" / scenario / f"{system}.final.json").is_file() and system in made["systems"]
            if there and wanted["systems"][system] != made["systems"][system]:
                raise ValueError(f"{folder} holds another study than {run.name} of the list: system {system} differs")


def _orders(study: Study, scenario: str) -> int:
    """How many draws of new clients a scenario has."""
    given = study.scenarios[scenario].options.get("orders", 1)
    return given if isinstance(given, int) else len(given)


def _row(path: Path, study: Study, orders: int, targets: Sequence[float]) -> tuple[dict[str, Any], float]:
    """(the scores of a system in percent, seconds of all its trials); of the seeds that the study has."""
    trials = _trials(path, study.seeds)
    spent = sum(row["seconds"] + row["compile_seconds"] for trial in trials for row in trial["rows"])
    tuned = path.with_name(path.name.replace(".final.", ".tuning."))
    points = []
    if tuned.is_file():
        points, tried = read_points(tuned), _trials(tuned, study.tuning.seeds)
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


def _trials(path: Path, seeds: Sequence[int]) -> list[Any]:
    """The trials of a file that are of these seeds."""
    every = report.numbers_again(json.loads(path.read_text(encoding="utf-8"))["trials"]).values()
    return [trial for trial in every if trial["seed"] in seeds]


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
        words = {"mean": lambda values: values.mean(1), "std": lambda values: values.std(1)}
        return {f"{name}_{word}": over(values) for name, values in by_order.items() for word, over in words.items()}
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
