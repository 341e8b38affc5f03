"""Presets: tuned hyper-parameters of a method on a scenario, with where they come from; a study uses them by name.

A file holds the presets of one scenario, by system. `save` writes one from a finished run. A name, `SCENARIO/SYSTEM`, is looked
up as the path of a file, then in `presets/` of the working folder, then in the package.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedjax_meta import checks, disk
from fedjax_meta.study import files

Json = Any

_log = logging.getLogger("fedjax_meta")

_NO_PRESETS = (yaml.YAMLError, UnicodeDecodeError, RecursionError, AttributeError, KeyError, TypeError)
"""What comes of reading presets from a file that holds none."""

HERE, PACKAGED = Path("presets"), Path(__file__).parent / "presets"


class Preset(NamedTuple):
    """Tuned values.

    Attributes:
      name: `SCENARIO/SYSTEM`.
      method: name in `METHODS`, or "module:name".
      options: of the method, as the study gave them.
      rates: how rates change over the rounds, likewise.
      chosen: the values that were found.
      score: by which they were chosen, mean over the tuning's seeds, in percent if it is a share.
      metric: what that score is, with its unit.
      facts: all else that the file says: scenario, federation, tuning, study, command, commit, versions.
    """

    name: str
    method: str
    options: Mapping[str, Json]
    rates: Mapping[str, Json]
    chosen: Mapping[str, float]
    score: float
    metric: str
    facts: Mapping[str, Json]

    @property
    def commit(self) -> str:
        """Where it comes from, for a list: the commit of the package, or its version where it was installed."""
        package = (self.facts.get("git") or {}).get("package") or {}
        version = (self.facts.get("versions") or {}).get("fedjax_meta", "unknown")
        return f"commit {package['commit'][:8]}" if "commit" in package else f"version {version}"

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value:g}" for name, value in self.chosen.items())
        values += "".join(f", {name} changes over the rounds" for name in self.rates)
        metric, percent, _ = self.metric.partition(", %")
        return f"{self.method}: {values}; {metric} {self.score:.4g}{' %' if percent else ''}"


def find(name: str) -> Preset:
    """The preset of a name.

    Raises:
      ValueError: there is none; the message has the nearest one that there is.
    """
    checks.word("preset", name)
    scenario, _, system = name.rpartition("/")
    for path in (Path(f"{scenario}.yaml"), HERE / f"{scenario}.yaml", PACKAGED / f"{scenario}.yaml"):
        if scenario and path.is_file():
            found = read(path, scenario)
            checks.one_of(f"system of preset {scenario}", system, found)
            return found[system]
    others = known()
    checks.one_of("preset", name, others)
    return others[name]


def known() -> dict[str, Preset]:
    """The presets of the package and of `presets/` in the working folder, by name; the latter come first."""
    found: dict[str, Preset] = {}
    for folder in (PACKAGED, HERE):
        for path in sorted(folder.glob("*.yaml")):
            found |= {f"{path.stem}/{system}": preset for system, preset in read(path, path.stem).items()}
    return found


def read(path: Path, scenario: str) -> dict[str, Preset]:
    """The presets of a file, by system.

    Raises:
      ValueError: it is no file of presets.
    """
    try:
        tree = files.parsed(path.read_text(encoding="utf-8"))
        shared = {name: value for name, value in tree.items() if name != "systems"}
        return {
            name: Preset(
                f"{scenario}/{name}",
                entry["method"],
                dict(entry["options"]),
                dict(entry.get("rates", {})),
                {option: _number(value) for option, value in entry["chosen"].items()},
                _number(entry["score"]),
                entry.get("metric", "accuracy, %"),
                {**shared, "federation": entry["federation"], "at the end of its grid": entry["at the end of its grid"]},
            )
            for name, entry in tree["systems"].items()
        }
    except _NO_PRESETS as error:
        raise ValueError(f"{path} is no file of presets: {' '.join(str(error).split())}") from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{checks.shown(value)} is no number")
    return value


def write(path: Path, tree: Mapping[str, Json], *, keep: bool = False) -> None:
    """Writes a file of presets.

    Args:
      path: of the file.
      tree: what it says.
      keep: whether systems that an earlier file has, and `tree` has not, stay.

    Raises:
      OSError: it cannot be written.
    """
    if keep and path.is_file():
        try:
            before = files.parsed(path.read_text(encoding="utf-8"))
            tree = {**tree, "systems": {**before["systems"], **tree["systems"]}}
        except _NO_PRESETS as error:  # a run of hours must not end here
            _log.warning("%s is no file of presets and is written anew: %s", path, checks.first_line(error))
    disk.write_text(path, files.text_of(json.loads(json.dumps(tree))))


def save(run: Path, to: Path, name: str | None = None) -> list[Path]:
    """Copies the presets of a finished run, one file for each scenario.

    Args:
      run: folder of the run.
      to: folder of the files.
      name: of the file, where the run has one scenario; data set and scenario when not given.

    Returns:
      The files.

    Raises:
      ValueError: the run tuned nothing, or has several scenarios and one name.
      OSError: a file cannot be written.
    """
    found = sorted((run / "presets").glob("*.yaml"))
    if not found:
        raise ValueError(f"{run} holds no tuned values: it must be a finished run of a study with grids")
    if name is not None and len(found) > 1:
        raise ValueError(f"{run} has the scenarios {', '.join(path.stem for path in found)}: one name does not do for all")
    if name is not None and not name.replace("-", "_").isidentifier():
        raise ValueError(f"name={checks.shown(name)} must be made of letters, digits, _ and -")
    made = []
    for path in found:
        read(path, path.stem)
        tree = files.parsed(path.read_text(encoding="utf-8"))
        made.append(to / f"{name or '{}-{}'.format(Path(tree['scenario']['dataset']).stem, path.stem)}.yaml")
        write(made[-1], tree)
    return made
