"""The folder of a run: what is run there, and by which code, in `run.json` and `study.yaml`."""

import contextlib
import dataclasses
import json
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fedjax_meta import checkpoint, checks, costs, disk, report
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.privacy import Guarantee
from fedjax_meta.study import guarantees, lookup, own_code
from fedjax_meta.study.environment import environment
from fedjax_meta.study.result_files import read_json
from fedjax_meta.study.scenario import Clients, Scenario
from fedjax_meta.study.study import Study, load, to_yaml
from fedjax_meta.study.system import System
from fedjax_meta.study.tuning import points_of, rungs

Json = Any

PARTS = "parts"
"""In a run that processes share: a folder for each system, which is locked by the process that trains it."""

ERROR = "error.txt"
"""The error that ended the run, until somebody continues it."""

_MOST_DIFFERENCES = 4


def check_run(study: Study, folder: Path, built: Mapping[str, Clients]) -> tuple[Json, dict[str, int]]:
    """What a run must have in common with one that its folder holds: (what stays as it is, rounds of its phases).

    Raises:
      ValueError: the folder holds another study (the message has each field that differs, with both values), or a `study.yaml`
        that no run wrote.
    """
    fixed, rounds = _fixed(study, built), {"final": study.rounds, "tuning": study.tuning.rounds or study.rounds}
    begun, there, described = _begun(folder), (folder / "run.json").is_file(), folder / "study.yaml"
    # A start that was killed may have left the same text without the other file.
    if described.is_file() and not there and described.read_bytes() != to_yaml(study).encode():
        raise ValueError(f"{described} is no file of a run, and would be overwritten: give another folder")
    if there and begun:
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
      ValueError: see `check_run`.
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
    (folder / ERROR).unlink(missing_ok=True)


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


def close_run(folder: Path) -> None:
    """Says in `run.json` that everything is finished."""
    _write(folder / "run.json", {**read_run(folder), "finished": _now("milliseconds")})
    (folder / ERROR).unlink(missing_ok=True)


def note_error(folder: Path, error: Exception) -> None:
    """Writes down the error that ends a run: its first line, the time and the traceback."""
    said = f"{type(error).__name__}: {checks.first_line(error)}"
    text = "\n".join([said, _now(), "", *traceback.format_exception(error)])
    with contextlib.suppress(OSError):  # the run may have ended because the disk is full; its own error is the one to raise
        disk.write_text(folder / ERROR, text)


def error_of(folder: Path) -> str | None:
    """The first line of the error that ended a run; `None` if none did."""
    path = folder / ERROR
    return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0] if path.is_file() else None


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
    options = _said(system, ("pooled", "rates", "tested_with"))
    return {key: value for key, value in options.items() if key not in ("grid", "title", "scenarios")}


def _said(part: Scenario | System, optional: Sequence[str]) -> dict[str, Json]:
    """The fields of a part of a study, the optional ones only where they are set: the records of runs without them stay alike."""
    return {key: value for key, value in dataclasses.asdict(part).items() if value or key not in optional}


def _first(system: System, clients: Clients) -> Algorithm:
    return system.build(clients, **points_of(system)[0])


def resolved(system: System, clients: Clients) -> dict[str, Json]:
    """Every hyper-parameter of a system, defaults included: those of a grid at its first point, and the grid itself."""
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
