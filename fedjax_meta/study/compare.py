"""Compares finished runs, of one study or of several, seed by seed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_meta import metrics, report
from fedjax_meta.study.run import KNOWN, NEW, Trial
from fedjax_meta.study.study import load


class Finished(NamedTuple):
    """The final runs of a system, as a folder holds them.

    Attributes:
      title: of the system; with the folder's name where several runs have a system of this title.
      scenario: its name in the study.
      fingerprint: of the clients' data: only systems of one fingerprint are compared.
      trials: one for each seed.
    """

    title: str
    scenario: str
    fingerprint: str
    trials: list[Trial]

    def by_client(self, group: str) -> dict[int, np.ndarray]:
        """Accuracy of each client `[N]` after the last round, by seed."""
        found = {}
        for trial in self.trials:
            test = trial.rows[-1]["tests"].get(group)
            if test is not None:
                found[trial.seed] = np.array(test["accuracy"], float)
        return found


class Difference(NamedTuple):
    """How a system compares with a reference on the same seeds; in points of accuracy, mean over clients.

    Attributes:
      mean: of the differences.
      margin: half the 95 % confidence interval of the mean (Student's t over the paired seeds); NaN for one seed.
      seeds: how many seeds both have.
      better: share of the clients that do better than with the reference, in percent.
    """

    mean: float
    margin: float
    seeds: int
    better: float

    @property
    def words(self) -> str:
        """E.g. "+2.10 ±0.80 (3 seeds)", with a star where the interval excludes 0."""
        if np.isnan(self.margin):
            return f"{self.mean:+.2f}"
        sure = "*" if abs(self.mean) > self.margin else ""
        return f"{self.mean:+.2f} ±{self.margin:.2f}{sure}"


def finished(folders: Sequence[str | Path]) -> list[Finished]:
    """The systems of some runs, in order.

    Raises:
      OSError: a folder that cannot be read.
      ValueError: a folder without a run, or without finished results.
    """
    found: list[tuple[Finished, str]] = []
    for folder in map(Path, folders):
        if not (folder / "run.json").is_file():
            raise ValueError(f"{folder} holds no run (no run.json)")
        study = load(folder / "study.yaml")
        before = len(found)
        for scenario in study.draws():
            for system in study.systems:
                path = folder / "results" / scenario / f"{system}.final.json"
                if not path.is_file():
                    continue
                content = json.loads(path.read_text(encoding="utf-8"))
                trials = [Trial(**trial) for trial in report.numbers_again(content["trials"]).values()]
                one = Finished(study.title_of(system), scenario, content["config"]["data"], trials)
                found.append((one, folder.name))
        if len(found) == before:
            raise ValueError(f"{folder} has no finished results yet")
    counts = [(one.title, one.fingerprint) for one, _ in found]
    return [
        one._replace(title=f"{one.title} ({name})") if counts.count((one.title, one.fingerprint)) > 1 else one
        for one, name in found
    ]


def difference(one: Finished, reference: Finished, group: str) -> Difference | None:
    """`one` minus `reference` on the seeds that both have; `None` if there are none."""
    mine, theirs = one.by_client(group), reference.by_client(group)
    seeds = sorted(set(mine) & set(theirs))
    if not seeds:
        return None
    gains = 100 * np.array([mine[seed] - theirs[seed] for seed in seeds])
    by_seed = gains.mean(1)
    margin = metrics.confidence_margin(by_seed)
    return Difference(float(by_seed.mean()), margin, len(seeds), 100 * float(np.mean(gains.mean(0) > 0)))


def table(systems: Sequence[Finished], *, target: float | None = None) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) for systems of one scenario; the first is the reference.

    Args:
      systems: at least one, all of one fingerprint.
      target: accuracy of known clients in percent; adds a column with the rounds to reach it.
    """
    headings = ["system", "seeds", "known", "minus first", "better", "new"]
    headings += [f"to {target:g} %"] if target is not None else []
    rows = []
    for one in systems:
        against = difference(one, systems[0], KNOWN)
        same = one is systems[0] or against is None
        row = [one.title, str(len(one.trials)), _interval(one, KNOWN)]
        row += ["" if same or against is None else against.words, "" if same or against is None else f"{against.better:.0f} %"]
        row += [_interval(one, NEW)]
        if target is not None:
            curves = [[row["tests"][KNOWN]["scores"]["accuracy_mean"] for row in trial.rows] for trial in one.trials]
            rounds = [row["round"] for row in one.trials[0].rows]
            reached = metrics.rounds_to_target(100 * np.array(curves, float), target, rounds=rounds)
            row.append(str(reached) if None not in reached.rounds else "never")
        rows.append(row)
    return headings, rows


def _interval(one: Finished, group: str) -> str:
    """Mean over clients and seeds, with half the 95 % confidence interval over seeds."""
    values = 100 * np.array([accuracy.mean() for accuracy in one.by_client(group).values()])
    if not values.size:
        return ""
    margin = metrics.confidence_margin(values)
    return f"{values.mean():.2f}" if np.isnan(margin) else f"{values.mean():.2f} ±{margin:.2f}"
