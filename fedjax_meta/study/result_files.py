"""Files of results in the folder of a run: trials of a system, its metrics as they come, and the scores of each client."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_meta import checks, disk, report
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import Point, Trial

Json = Any
Where = tuple[str, str, str]
"""Scenario, system and phase."""

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


class Metrics:
    """`metrics.jsonl`: a line for each evaluation of each member, in the order in which they were made.

    A process that is killed may leave half a line, or lines of rounds that its checkpoint does not hold; `align` removes them, so
    that the file of a run that was killed is that of the run that was left alone.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._lines: list[tuple[tuple[Any, ...], str]] = []
        text = self._path.read_text(encoding="utf-8", errors="replace") if self._path.is_file() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                where = (row["scenario"], row["system"], row["phase"])
                self._lines.append((_key(where, row["numbers"], row["seed"], row["round"]), line))
            except (ValueError, KeyError, TypeError, AttributeError):  # half a line, or one that is none of ours
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
