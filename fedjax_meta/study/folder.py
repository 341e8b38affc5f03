"""The folder of a run: what was run and where (`run.json`), its metrics as they come, and an index over runs."""

import dataclasses
import io
import json
import os
import platform
import subprocess
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import __version__, checkpoint, checks, costs, disk, report, runtime
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.privacy import Guarantee
from fedjax_meta.study import guarantees, lookup, own_code
from fedjax_meta.study.scenario import Clients, Scenario
from fedjax_meta.study.study import Study, load, to_yaml
from fedjax_meta.study.system import System
from fedjax_meta.study.tuning import KNOWN, Point, Trial, last_scores, points_of, rungs

Json = Any
Where = tuple[str, str, str]
"""Scenario, system and phase."""

PARTS = "parts"
"""In a run that processes share: a folder for each system, which is locked by the process that trains it."""

_MOST_DIFFERENCES = 4
_ENVIRONMENT = ("JAX_", "XLA_", "FEDJAX_META_", "CUDA_VISIBLE", "OMP_NUM", "TF_", "NVIDIA_TF32")
"""How the names of environment variables begin that may change numbers or speed."""


def check_run(study: Study, folder: Path, built: Mapping[str, Clients]) -> tuple[Json, dict[str, int]]:
    """What a run must have in common with one that its folder holds: (what stays as it is, rounds of its phases).

    Raises:
      ValueError: the folder holds another study; the message has each field that differs, with both values.
    """
    fixed, rounds = _fixed(study, built), {"final": study.rounds, "tuning": study.tuning.rounds or study.rounds}
    begun = _begun(folder)
    if (folder / "run.json").is_file() and begun:
        content = read_run(folder)
        _compare(folder, content, fixed, rounds, begun, cut=_cut(study, begun))
        fixed = {kind: {**content["fixed"].get(kind, {}), **given} for kind, given in fixed.items()}
    return fixed, rounds


def open_run(study: Study, folder: Path, built: Mapping[str, Clients], command: str) -> None:
    """Writes what the run is; where the folder holds a run, that must be an earlier state of this one.

    Args:
      study, built, command: what is run.
      folder: of the run; this process has it.

    Raises:
      ValueError: the folder holds another study; the message has each field that differs, with both values.
      OSError: it cannot be written.
    """
    path, started = folder / "run.json", _now()
    fixed, rounds = check_run(study, folder, built)
    before = read_run(folder) if path.is_file() and _begun(folder) else {}
    started = before.get("started", started)
    facts = {
        name: {
            "title": clients.title,
            "clients": clients.train.num_clients,
            "new clients": 0 if clients.new is None else clients.new.num_clients,
            "fingerprint": clients.fingerprint,
            **({"names": clients.names[0], "names of new clients": clients.names[1]} if clients.names[0] else {}),
        }
        for name, clients in built.items()
    }
    content = {
        "title": study.title,
        "started": started,
        "finished": None,
        "command": command,
        **environment(),
        "clients": facts,
        "traffic": {
            name: {
                system: sum(costs.traffic(_first(study.system(system, name), clients), clients.train))
                for system in study.systems_on(name)
                if not study.systems[system].pooled
            }
            for name, clients in built.items()
        },
        "systems": {
            name: resolved(study.system(name, scenario), built[scenario])
            for scenario in reversed(list(built))
            for name in study.systems_on(scenario)
        },
        "privacy": _promised(study, built),
        "rounds": rounds,
        "fixed": fixed,
        "own code": _own_code(study, before.get("own code", {})),
    }
    disk.write_text(folder / "study.yaml", to_yaml(study))
    _write(path, content)


def _own_code(study: Study, before: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The digests of a user's own code, one for each version that the run has seen; says where it has changed."""
    found = dict(before)
    for name, digest in own_code.digests(study).items():
        seen = before.get(name, [])
        if seen and seen[-1] != digest:
            warnings.warn(
                f"the code of {name} has changed since this run was begun: results that are finished stay as they are, and the "
                "rest goes on with the new code; give another --out to run all of it anew",
                stacklevel=2,
            )
        found[name] = [*seen, digest] if digest not in seen[-1:] else list(seen)
    return found


def changed_code(folder: Path, names: Iterable[str | None]) -> bool:
    """Whether a user's own code of one of these names has changed since the run was begun."""
    own = list(filter(lookup.is_own, names))
    return bool(own) and any(len(read_run(folder)["own code"][name]) > 1 for name in own)


def join_run(study: Study, folder: Path, built: Mapping[str, Clients]) -> None:
    """Compares a study with the run that other processes are at work on.

    Raises:
      ValueError: they run another one; the message has each field that differs, with both values.
    """
    clients = read_run(folder)["fixed"]["clients"]
    before = {**dataclasses.asdict(load(folder / "study.yaml")), "clients": {name: clients.get(name) for name in built}}
    now = {**dataclasses.asdict(study), "clients": {name: of.fingerprint for name, of in built.items()}}
    before["devices"] = now["devices"]  # machines may differ in these
    odd = list(checkpoint.differences(*(json.loads(json.dumps(one)) for one in (before, now))))
    if odd:
        raise ValueError(f"{folder} is at work, and all that share it must say the same: {_in_words(odd)}")


def part(folder: Path, scenario: str, system: str) -> Path:
    """Where a system's metrics are while processes share the run."""
    return folder / PARTS / scenario / system


def read_run(folder: Path) -> dict[str, Json]:
    """What `run.json` says.

    Raises:
      ValueError: it is damaged.
      OSError: it cannot be read.
    """
    return read_json(folder / "run.json", ("fixed", "command"))


def ending(folder: Path) -> str | None:
    """When the run was finished; `None` while it is not, or nothing is there.

    Raises:
      ValueError: `run.json` is damaged.
      OSError: it cannot be read.
    """
    path = folder / "run.json"
    if not path.is_file():
        return None
    return read_run(folder).get("finished")


AGAIN = "delete this file and run the study again into its folder"
"""The remedy for a damaged file."""


def read_json(path: Path, needs: Sequence[str]) -> dict[str, Json]:
    """A JSON object of a run's folder, with NaN and infinity as numbers again.

    Args:
      path: of the file.
      needs: keys that it must have.

    Raises:
      ValueError: no JSON, no object, or one without these keys; the message names the file.
      OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {checks.first_line(error)}; {AGAIN}") from None
    missing = [key for key in needs if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"{path} is damaged: it must be an object with {', '.join(needs)}; {AGAIN}")
    return content


def read_trials(path: Path) -> tuple[dict[str, Trial], dict[str, Json]]:
    """(the trials of a results file by label, all that it says).

    Raises:
      ValueError: it is damaged.
      OSError: it cannot be read.
    """
    content = read_json(path, ("trials", "config"))
    try:
        trials = {label: Trial(**trial) for label, trial in report.numbers_again(content["trials"]).items()}
        whole = bool(trials) and all(trial.rows[-1]["tests"] for trial in trials.values())
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} ({checks.first_line(error)}); {AGAIN}") from None
    if not whole:
        raise ValueError(f"{path} is damaged: it holds no tests; {AGAIN}")
    return trials, content


def note_points(path: Path, points: Sequence[Point]) -> None:
    """Says in the file of a grid's trials which points were searched last; it keeps those that were taken out of the grid."""
    content = read_json(path, ("trials", "config"))
    if content.get("points") != points:
        disk.write_text(path, json.dumps({**content, "points": list(points)}, allow_nan=False) + "\n")


def read_points(path: Path) -> list[Point]:
    """The points of a grid that were searched last, with those to which it moved on.

    Raises:
      ValueError: the file is damaged.
      OSError: it cannot be read.
    """
    trials, content = read_trials(path)
    tried = content.get("points") or [trial.numbers for trial in trials.values()]
    return [dict(point) for point in dict.fromkeys(tuple(point.items()) for point in tried)]


def read_final(folder: Path, study: Study, scenario: str, system: str) -> tuple[list[Trial], dict[str, Json]]:
    """(the final trials of a system, one for each seed that the study has and that is finished, all that their file says).

    A folder keeps what was taken out of its study; reports leave it out.

    Raises:
      ValueError: a file is damaged.
      OSError: it cannot be read.
    """
    path = folder / "results" / scenario / f"{system}.final.json"
    if not path.is_file():
        return [], {}
    trials, content = read_trials(path)
    found = [trial for trial in trials.values() if trial.seed in study.seeds]
    return sorted(found, key=lambda trial: study.seeds.index(trial.seed)), content


def close_run(folder: Path) -> None:
    """Says in `run.json` that everything is finished."""
    _write(folder / "run.json", {**read_run(folder), "finished": _now("milliseconds")})


def _write(path: Path, content: Json) -> None:
    disk.write_text(path, json.dumps(report.strict(content), indent=2, default=str, allow_nan=False) + "\n")


def _now(timespec: str = "seconds") -> str:
    return datetime.now().astimezone().isoformat(timespec=timespec)


def _fixed(study: Study, built: Mapping[str, Clients]) -> Json:
    """What cannot change once there are results."""
    fixed = {
        "scenarios": {
            name: _said(scenario, ("federation", "attackers", "server")) for name, scenario in study.scenarios.items()
        },
        "systems": {name: options_of(study.system(name)) for name in study.systems},
        "tuning": {key: getattr(study.tuning, key) for key in ("validation", "clients", "halving")},
        "clients": {name: clients.fingerprint for name, clients in built.items()},
    }
    return json.loads(json.dumps(fixed))


def options_of(system: System) -> dict[str, Json]:
    """What the results of a system depend on, apart from the numbers of its grid."""
    options = _said(system, ("pooled", "tested_with"))
    return {key: value for key, value in options.items() if key not in ("grid", "title", "scenarios")}


def _said(part: Scenario | System, optional: Sequence[str]) -> dict[str, Json]:
    """The fields of a part of a study, the optional ones only where they are set: the records of runs without them stay alike."""
    return {key: value for key, value in dataclasses.asdict(part).items() if value or key not in optional}


def _first(system: System, clients: Clients) -> Algorithm:
    return system.build(clients, **points_of(system)[0])


def resolved(system: System, clients: Clients) -> dict[str, Json]:
    """Every hyper-parameter of a system, defaults included; a list where it has a grid."""
    return {**_first(system, clients).config, "grid": {name: list(values) for name, values in system.grid.items()}}


def _promised(study: Study, built: Mapping[str, Clients]) -> dict[str, Json]:
    """By scenario and system with noise: what all rounds guarantee, and the epsilon of one round by itself."""
    found: dict[str, Json] = {}
    for scenario, clients in built.items():
        for name in study.systems_on(scenario):
            whole, one = (guarantees.of_system(study, scenario, name, clients, rounds) for rounds in (study.rounds, 1))
            if isinstance(whole, str):
                found.setdefault(scenario, {})[name] = whole
            elif isinstance(one, Guarantee) and whole is not None:
                found.setdefault(scenario, {})[name] = {**whole.config, "epsilon of a round": one.config["epsilon"]}
    return found


def _begun(folder: Path) -> set[str]:
    """The names of scenarios, and of "scenario/system", that have results or states."""
    found: set[str] = set()
    for kind in ("results", "state"):
        for path in (folder / kind).glob("*/*"):
            found |= {path.parent.name, f"{path.parent.name}/{path.name.partition('.')[0]}"}
    return found


def _cut(study: Study, begun: set[str]) -> bool:
    """Whether halving ends trials of what has begun early, after rounds that depend on how many there are."""
    rounds, halving = study.tuning.rounds or study.rounds, study.tuning.halving
    pairs = [(scenario, name) for scenario in study.scenarios for name in study.systems_on(scenario)]
    systems = {name for scenario, name in pairs if f"{scenario}/{name}" in begun}
    return any(rungs(len(points_of(study.systems[name])), rounds, halving) for name in systems)


def _compare(folder: Path, content: Json, fixed: Json, rounds: Mapping[str, int], begun: set[str], *, cut: bool) -> None:
    """Raises where a study contradicts what its folder has results of; `cut`: whether halving ended trials early."""
    there = sorted(name for name in begun if "/" not in name)
    if not {*there, *content["fixed"].get("scenarios", {})} & {*fixed["scenarios"]}:
        raise ValueError(f"{folder} holds another study, of {', '.join(there)}; give another folder")
    systems = {name.partition("/")[2] for name in begun}
    known = {"scenarios": begun, "systems": systems, "clients": begun, "tuning": set(fixed["tuning"])}
    odd: list[tuple[str, Json, Json]] = []
    for kind, given in fixed.items():
        before = content["fixed"].get(kind, {})
        both = [name for name in given if name in before and name in known[kind]]
        odd += [
            (f"{kind}.{name}", old, new)
            for name, old, new in checkpoint.differences({n: before[n] for n in both}, {n: given[n] for n in both})
            # Other scenarios have other clients.
            if kind != "clients" or not any(field.startswith(f"scenarios.{name}.") for field, _, _ in odd)
        ]
    for name, number in rounds.items():
        before = content.get("rounds", rounds).get(name, number)
        field = "rounds" if name == "final" else "tuning.rounds"
        if number < before:
            odd.append((f"{field} (a run takes more, not fewer)", before, number))
        elif number > before and name == "tuning" and cut:
            odd.append((f"{field} (halving ends trials after parts of them)", before, number))
    if odd:
        raise ValueError(f"{folder} holds another study: {_in_words(odd)}; give another folder")


def _in_words(odd: Sequence[tuple[str, Json, Json]]) -> str:
    words = [
        f"the data or the clients of scenario {field.removeprefix('clients.')} have changed"
        if field.startswith("clients.")
        else f"{field} was {old!r} and is {new!r} now"
        for field, old, new in odd[:_MOST_DIFFERENCES]
    ]
    return "; ".join(words) + (f"; and {len(odd) - _MOST_DIFFERENCES} more" if len(odd) > _MOST_DIFFERENCES else "")


# Where a run was made.


def environment() -> dict[str, Json]:
    """Versions, the machine, settings, and the commits of the package and of the working folder."""
    others = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "scipy")}
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)}
    return {
        "versions": {"python": platform.python_version(), "fedjax_meta": __version__, **others},
        "device": runtime.device_kinds(),
        "machine": {
            "system": platform.platform(),
            "cores": runtime.cores(),
            "name": platform.node(),
            "processor": processor(),
        },
        "environment": chosen,
        "x64": bool(jax.numpy.zeros(0).dtype == np.float64),
        "git": {"package": package_commit(), "working folder": commit(Path.cwd())},
    }


def processor() -> str:
    """The kind of processor that JAX computes on: numbers of another kind differ by rounding."""
    device = runtime.default_devices()[0]
    return cpu_model() if device.platform == "cpu" else device.device_kind


def cpu_model() -> str:
    """The name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def package_commit() -> dict[str, Json] | None:
    """The commit of the package's own repository, see `commit`; `None` where it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    return commit(root) if (root / ".git").exists() else None


def commit(folder: Path) -> dict[str, Json] | None:
    """The commit of a folder's git repository, and whether tracked files differ from it; `None` outside of one."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=30)
        return run.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or no commit
        return None


# Results as they come.


class Metrics:
    """`metrics.jsonl`: a line for each evaluation of each member, in the order in which they were made.

    A process that is killed may leave half a line, or lines of rounds that its checkpoint does not hold; `align` removes them, so
    that the file of a run that was killed is that of the run that was left alone.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._lines: list[tuple[tuple[Any, ...], str]] = []
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                where = (row["scenario"], row["system"], row["phase"])
                self._lines.append((_key(where, row["numbers"], row["seed"], row["round"]), line))
            except (ValueError, KeyError):  # half a line
                continue
        self._torn = text != "".join(f"{line}\n" for _, line in self._lines)

    def append(self, where: Where, found: Iterable[tuple[Trial, Mapping[str, Json]]]) -> None:
        """Adds a row of each trial."""
        fresh = [_line(where, trial, row) for trial, row in found]
        self._lines += fresh
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for _, line in fresh))

    def align(self, where: Where, trials: Sequence[Trial]) -> None:
        """Makes the lines of some trials those of their rows, and no others."""
        mine = {_key(where, trial.numbers, trial.seed, 0)[:-1] for trial in trials}
        rows = sorted({row["round"] for trial in trials for row in trial.rows})
        wanted = [
            _line(where, trial, row) for number in rows for trial in trials for row in trial.rows if row["round"] == number
        ]
        keys, there = {key for key, _ in wanted}, {key for key, _ in self._lines}
        kept = [(key, line) for key, line in self._lines if key[:-1] not in mine or key in keys]
        self._replace([*kept, *((key, line) for key, line in wanted if key not in there)])

    def keep_numbers(self, where: Where, numbers: Mapping[str, float]) -> None:
        """Removes the lines of members with other numbers, which are no longer chosen."""
        wanted = tuple(numbers.items())
        self._replace([(key, line) for key, line in self._lines if key[:3] != where or key[3] == wanted])

    def _replace(self, lines: list[tuple[tuple[Any, ...], str]]) -> None:
        if self._torn or lines != self._lines:
            self._lines, self._torn = lines, False
            disk.write_text(self._path, "".join(f"{line}\n" for _, line in lines))


def _key(where: Where, numbers: Mapping[str, float], seed: int, done: int) -> tuple[Any, ...]:
    return (*where, tuple(numbers.items()), seed, done)


def _line(where: Where, trial: Trial, row: Mapping[str, Json]) -> tuple[tuple[Any, ...], str]:
    scenario, system, phase = where
    content = {"scenario": scenario, "system": system, "phase": phase, "numbers": trial.numbers, "seed": trial.seed}
    text = json.dumps(report.strict({**content, **report.without_confusion(dict(row))}), allow_nan=False)
    return _key(where, trial.numbers, trial.seed, row["round"]), text


def save_clients(
    path: Path,
    trials: Sequence[Trial],
    samples: Mapping[str, np.ndarray],
    names: Mapping[str, Sequence[str]],
) -> None:
    """The results of each client after the last round: `PATH.npz`, which `report.load_clients` reads.

    It holds `seeds [S]`, and for each group of clients `GROUP_SCORE [S, N]` of every score (shares in [0, 1]) and
    `GROUP_samples [N]`; where some clients alone were scored, also `GROUP_ids [N]`, and where clients have names, `GROUP_name
    [N]`.

    Args:
      path: of the file, without its ending.
      trials: of the seeds.
      samples: of each group, the number of samples that its clients are tested on; groups that are not there are left out, such
        as new clients that do not train the model of their own that they are tested with.
      names: of each group whose clients have some.
    """
    arrays: dict[str, np.ndarray] = {"seeds": np.array([trial.seed for trial in trials])}
    for group in samples:
        tests = [trial.rows[-1]["tests"][group] for trial in trials]
        for name in report.score_names(tests[0]):
            found = [report.main_score(test, name) for test in tests]
            arrays[f"{group}_{name}"] = np.array([one.values / (100 if one.kind.share else 1) for one in found], np.float32)
        arrays[f"{group}_samples"] = np.asarray(samples[group], np.int64)
        if "ids" in tests[0]:
            arrays[f"{group}_ids"] = np.array(tests[0]["ids"], np.int64)
        if names.get(group):
            arrays[f"{group}_name"] = np.array(names[group], str)
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    disk.replace(path.with_name(f"{path.name}.npz"), [file.getbuffer()])


# An index over runs.


class Run(NamedTuple):
    """A folder of a run.

    Attributes:
      folder: where it is.
      title: of the study; empty where the folder cannot be read.
      started: date and time, as in `run.json`; empty where the folder cannot be read.
      state: "finished", "running", "stopped", or why the folder cannot be read.
      best: for each scenario with a result, its name, the system of the best main score over known clients, and that score with
        its name.
    """

    folder: Path
    title: str
    started: str
    state: str
    best: list[tuple[str, str, str]]


def index(root: Path) -> list[Run]:
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
    state = "finished" if content.get("finished") else "running" if disk.locked(folder) else "stopped"
    return Run(folder, study.title, content.get("started", ""), state, winners)
