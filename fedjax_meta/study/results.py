"""What a study found: a table of systems, its text, and the lines of a run's folder as a data frame."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_meta import costs, escape, privacy, report
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.study import draws, tuning
from fedjax_meta.study.run import KNOWN, NEW, Outcome, baselines
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study

if TYPE_CHECKING:
    import pandas


class Line(NamedTuple):
    """A row of a scenario's table; accuracies in percent, each with its sample standard deviation over seeds (NaN for one seed).

    Attributes:
      title: of the system.
      numbers: the chosen hyper-parameters, in words.
      known: mean over known clients.
      worst: mean over the tenth of known clients with the lowest accuracy.
      behind: share of the known clients that do worse than by local training alone, in percent; NaN without such a row.
      new: mean over new clients; NaN if there are none.
      up: bytes that a client uploads in a round; NaN for a row without training.
      seconds: wall-clock of all trials, without compilation.
      remark: "diverged at round R", "best at the end of its grid", or nothing.
    """

    title: str
    numbers: str
    known: tuple[float, float]
    worst: tuple[float, float]
    behind: float
    new: tuple[float, float]
    up: float
    seconds: float
    remark: str


LOCAL = "local_only"
"""The method that the others are held against, where a study has it."""

NOTHING = (float("nan"), float("nan"))


def lines(study: Study, scenario: str, clients: Clients, outcomes: Sequence[Outcome]) -> list[Line]:
    """The table of a scenario: its systems in the order of the study, and what takes no training."""
    mine = [outcome for outcome in outcomes if outcome.scenario == scenario]
    local = next((one for one in mine if study.systems[one.system].method == LOCAL), None)
    alone = None if local is None else _by_client(local, KNOWN)
    table = [_line(study, outcome, clients, alone) for outcome in mine]
    for title, groups in baselines(clients, study.seeds[0]).items():
        values = {group: 100 * float(np.mean(accuracy)) for group, accuracy in groups.items()}
        worst = 100 * _worst(groups[KNOWN])
        nan = float("nan")
        table.append(
            Line(title, "", (values[KNOWN], nan), (worst, nan), nan, (values.get(NEW, nan), nan), nan, 0.0, "no training")
        )
    return table


def _line(study: Study, outcome: Outcome, clients: Clients, alone: np.ndarray | None) -> Line:
    known = _by_client(outcome, KNOWN)
    system = study.system(outcome.system)
    algorithm = system.build(clients.task, **outcome.chosen)
    behind = float("nan") if alone is None else 100 * float(np.mean(known.mean(0) < alone.mean(0)))
    diverged = [trial.diverged for trial in outcome.final if trial.diverged is not None]
    remarks = [f"diverged at round {min(diverged)}"] if diverged else []
    remarks += [f"best {name} at the end of its grid" for name in outcome.at_edge]
    if not system.grid:
        remarks.append(f"preset {system.preset}" if system.preset else "not tuned")
    remarks += draws.remarks(outcome, clients)
    remarks += _privacy(algorithm, study.rounds, clients.train.num_clients)
    return Line(
        title=study.title_of(outcome.system),
        numbers=", ".join(f"{name}={value:g}" for name, value in outcome.chosen.items()),
        known=_over_seeds(100 * known.mean(1)),
        worst=_over_seeds(100 * np.array([_worst(run) for run in known])),
        behind=behind,
        new=_over_seeds(100 * _by_client(outcome, NEW).mean(1)) if clients.new is not None else NOTHING,
        up=float(costs.traffic(algorithm, clients.train).up),
        seconds=outcome.seconds[0],
        remark="; ".join(remarks),
    )


def _privacy(algorithm: Algorithm, rounds: int, num_clients: int) -> list[str]:
    """What the clients of a system with noise are promised, at delta = N^-1.1."""
    if not any(step["name"] == "noise" for step in algorithm.config["federation"]["uploads"]):
        return []
    try:
        found = privacy.spent(algorithm.config, rounds, num_clients, num_clients**-1.1)
    except ImportError as error:
        return [f"epsilon unknown: {error}"]
    return [] if found is None else [f"epsilon {found.epsilon:.3g}, delta {found.delta:.2g}"]


HEADINGS = ("system", "known", "worst 10 %", "new", "behind local", "upload", "chosen", "remark")
SCORES = (0, 1, 2, 3, 4)
"""The columns of the table of scores; the others say how a system was run, in a table of their own on a terminal."""


def words(line: Line) -> list[str]:
    """A line as text, in the order of `HEADINGS`."""
    return [
        line.title,
        _spread(line.known),
        _spread(line.worst),
        _spread(line.new),
        "" if np.isnan(line.behind) else f"{line.behind:.0f} %",
        "" if np.isnan(line.up) else f"{line.up / 1e3:.4g} kB",
        line.numbers,
        line.remark,
    ]


def markdown(study: Study, built: Mapping[str, Clients], outcomes: Sequence[Outcome], command: str) -> str:
    """The report as Markdown."""
    text = [f"# {escape.markdown(study.title)}", ""]
    for scenario, clients in built.items():
        table = [words(line) for line in lines(study, scenario, clients, outcomes)]
        text += [f"## {scenario}: {escape.markdown(clients.title)}", "", report.markdown_table(HEADINGS, table), ""]
        text += [clients.note, ""] if clients.note else []
    text += [explanation(study), "", *study.notes, "", f"    {command}", ""]
    return "\n".join(text)


def explanation(study: Study) -> str:
    """What the numbers of a table mean."""
    seeds = f"mean ± sample standard deviation over {len(study.seeds)} seeds" if len(study.seeds) > 1 else "one seed"
    text = f"Accuracy in percent after round {study.rounds}, mean over clients ({seeds})."
    text += f" {tuning.words(study)}".rstrip()
    if any(system.method == LOCAL for system in study.systems.values()):
        text += ' "behind local": known clients that do worse than by local training alone.'
    return text


def load(folder: str | Path) -> "pandas.DataFrame":
    """Every evaluation of a run: one row for each scenario, system, phase, member, round and group of clients.

    A run that was stopped may have evaluated a round twice; the last line counts.

    Raises:
      OSError: the folder holds no `metrics.jsonl`.
      ValueError: a line that is no JSON.
    """
    import pandas

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    path = Path(folder) / "metrics.jsonl"
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = report.numbers_again(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
        numbers = line["numbers"]
        for group, test in line["tests"].items():
            row = {key: line[key] for key in ("scenario", "system", "phase", "seed", "round", "seconds")}
            key = (*row.values(), tuple(numbers.items()), group)
            found[key] = {**row, **numbers, "clients": group, **test["scores"]}
    return pandas.DataFrame(list(found.values()))


def _by_client(outcome: Outcome, group: str) -> np.ndarray:
    """Accuracy `[seeds, N]` after the last round."""
    return np.array([trial.rows[-1]["tests"][group]["accuracy"] for trial in outcome.final], float)


def _worst(accuracy: np.ndarray) -> float:
    count = max(1, round(len(accuracy) / 10))
    return float(np.mean(np.sort(accuracy)[:count]))


def _over_seeds(values: np.ndarray) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def _spread(value: tuple[float, float]) -> str:
    mean, deviation = value
    if np.isnan(mean):
        return ""
    return f"{mean:.2f}" if np.isnan(deviation) else f"{mean:.2f} ±{deviation:.2f}"
