"""What a study found: a table of systems, its text, and the lines of a run's folder as a data frame."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_meta import costs, escape, privacy, report
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.study import draws, parts, summary, tuning
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

REFERENCES = (LOCAL, "fedavg")
"""The methods against which a report says who gains and who loses."""

NOTHING = (float("nan"), float("nan"))


def lines(study: Study, scenario: str, clients: Clients, outcomes: Sequence[Outcome]) -> list[Line]:
    """The table of a scenario: its systems in the order of the study, and what takes no training."""
    mine = [outcome for outcome in outcomes if outcome.scenario == scenario]
    local = next((one for one in mine if study.systems[one.system].method == LOCAL), None)
    base = None if local is None else _by_client(local, KNOWN)
    table = [_line(study, outcome, clients, base) for outcome in mine]
    for title, groups in baselines(clients, study.seeds[0]).items():
        values = {group: 100 * float(np.mean(accuracy)) for group, accuracy in groups.items()}
        worst = 100 * worst_tenth(groups[KNOWN])
        nan = float("nan")
        table.append(
            Line(title, "", (values[KNOWN], nan), (worst, nan), nan, (values.get(NEW, nan), nan), nan, 0.0, "no training")
        )
    return table


def _line(study: Study, outcome: Outcome, clients: Clients, base: np.ndarray | None) -> Line:
    known = _by_client(outcome, KNOWN)
    system = study.system(outcome.system, outcome.scenario)
    algorithm = system.build(clients, **outcome.chosen)
    itself = system.method == LOCAL
    behind = float("nan") if base is None or itself else 100 * float(np.mean(known.mean(0) < base.mean(0)))
    diverged = [trial.diverged for trial in outcome.final if trial.diverged is not None]
    remarks = [f"diverged at round {min(diverged)}"] if diverged else []
    remarks += [f"best {name} at the end of its grid" for name in outcome.at_edge]
    if itself and clients.new is not None and NEW not in alone(study, outcome.system):
        remarks.append("new clients do not train")
    if not system.grid:
        remarks.append(f"preset {system.preset}" if system.preset else "not tuned")
    remarks += draws.remarks(outcome, clients)
    count = clients.train.num_clients
    remarks += _privacy(algorithm, study.rounds, count, parts.delta_of(system.federation, count))
    remarks += summary.remarks(study, outcome)
    return Line(
        title=study.title_of(outcome.system),
        numbers=", ".join(f"{name}={value:g}" for name, value in outcome.chosen.items()),
        known=_over_seeds(100 * known.mean(1)),
        worst=_over_seeds(100 * np.array([worst_tenth(run) for run in known])),
        behind=behind,
        new=_over_seeds(100 * _by_client(outcome, NEW).mean(1)) if clients.new is not None else NOTHING,
        up=float(costs.traffic(algorithm, clients.train).up),
        seconds=outcome.seconds[0],
        remark="; ".join(remarks),
    )


def alone(study: Study, system: str) -> tuple[str, ...]:
    """The groups whose clients train by themselves with a system; new clients only if they are given epochs."""
    if study.systems[system].method != LOCAL:
        return ()
    options = study.systems[system].options
    epochs = options.get("new_client_epochs")
    return (KNOWN, NEW) if (options.get("finetune_epochs") if epochs is None else epochs) else (KNOWN,)


def _privacy(algorithm: Algorithm, rounds: int, num_clients: int, delta: float) -> list[str]:
    """What the clients of a system with noise are promised."""
    if not any(step["name"] == "noise" for step in algorithm.config["federation"]["uploads"]):
        return []
    try:
        found = privacy.spent(algorithm.config, rounds, num_clients, delta)
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


def tables(study: Study, built: Mapping[str, Clients], outcomes: Sequence[Outcome]) -> dict[str, list[Line]]:
    """The table of each scenario, see `lines`."""
    return {scenario: lines(study, scenario, clients, outcomes) for scenario, clients in built.items()}


GAIN_HEADINGS = ("system", "held against", "clients", "lose", "median", "greatest loss", "greatest gain")


def gains(study: Study, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Who gains and who loses against local training and against FedAvg, where the study has them, in `GAIN_HEADINGS`.

    Args:
      study: what was run.
      outcomes: of one scenario.
    """
    rows = []
    for method in REFERENCES:
        reference = next((one for one in outcomes if study.systems[one.system].method == method), None)
        for one in outcomes:
            if reference is None or one is reference:
                continue
            for group in alone(study, reference.system) if method == LOCAL else (KNOWN, NEW):
                if any(group not in trial.rows[-1]["tests"] for other in (one, reference) for trial in other.final):
                    continue
                gain = 100 * (_by_client(one, group).mean(0) - _by_client(reference, group).mean(0))
                if not np.isfinite(gain).all():
                    continue
                least, most = int(gain.argmin()), int(gain.argmax())
                ends = [f"{gain[i]:+.1f} (client {i})" for i in (least, most)]
                share = f"{100 * np.mean(gain < 0):.0f} %"
                titles = study.title_of(one.system), study.title_of(reference.system)
                rows.append([*titles, group, share, f"{np.median(gain):+.1f}", *ends])
    return rows


PUBLISHED_HEADINGS = ("system", "scenario", "clients", "score", "published", "measured", "difference", "note")


def published(study: Study, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The published numbers beside the measured ones, in `PUBLISHED_HEADINGS`."""
    rows = []
    for row in study.published:
        found = [one for one in outcomes if (one.system, one.scenario) == (row.system, row.scenario)]
        tests = [trial.rows[-1]["tests"].get(row.clients, {}).get("scores", {}) for one in found for trial in one.final]
        values = 100 * np.array([scores.get(row.score, np.nan) for scores in tests], float)
        measured = difference = "not run"
        if values.size:
            measured, difference = _spread(_over_seeds(values)) or "diverged", f"{values.mean() - row.value:+.2f}"
        told = [f"{row.value:.2f}", measured, difference if np.isfinite(values).all() else "", row.note]
        rows.append([study.title_of(row.system), row.scenario, row.clients, row.score, *told])
    return rows


def markdown(
    study: Study,
    built: Mapping[str, Clients],
    outcomes: Sequence[Outcome],
    command: str,
    *,
    found: Mapping[str, Sequence[Line]] | None = None,
    figures: Sequence[str] = (),
) -> str:
    """The report as Markdown.

    Args:
      study, built, outcomes: what was run, and what came of it.
      command: that was given.
      found: the `tables`, if they are at hand.
      figures: files to show, as paths from the report.
    """
    found = tables(study, built, outcomes) if found is None else found
    text = [f"# {escape.markdown(study.title)}", "", explanation(study), ""]
    for scenario, clients in built.items():
        table = [words(line) for line in found[scenario]]
        text += [f"## {scenario}: {escape.markdown(clients.title)}", "", report.markdown_table(HEADINGS, table), ""]
        text += [clients.note, ""] if clients.note else []
        changes = gains(study, [one for one in outcomes if one.scenario == scenario])
        if changes:
            text += ["Points of accuracy, mean over seeds:", ""]
            text += [report.markdown_table(GAIN_HEADINGS, changes, text_columns=3), ""]
    for one in summary.tables(study, outcomes):
        text += [f"## {one.title}", "", report.markdown_table(one.headings, one.rows), ""]
    if study.published:
        rows = published(study, outcomes)
        text += ["## Published beside measured", "", report.markdown_table(PUBLISHED_HEADINGS, rows, text_columns=4), ""]
    text += [line for path in figures for line in (f"![{Path(path).stem}]({path})", "")]
    text += [line for note in study.notes for line in (note, "")] + [f"    {command}", ""]
    return "\n".join(text)


def latex(study: Study, built: Mapping[str, Clients], found: Mapping[str, Sequence[Line]]) -> str:
    """The scores of each scenario as a LaTeX table; it needs the package booktabs."""
    parts = [r"% \usepackage{booktabs}"]
    for scenario, clients in built.items():
        table = [[words(line)[column] for column in SCORES] for line in found[scenario]]
        used = [column for column in range(len(SCORES)) if column == 0 or any(row[column] for row in table)]
        lines = [[escape.latex(cell) for cell in row] for row in ([HEADINGS[SCORES[c]] for c in used], *_of(table, used))]
        rows = [" & ".join(row) + r" \\" for row in lines]
        caption = f"{study.title}: {clients.title}. {explanation(study)}"
        parts += [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape.latex(caption)}}}",
            rf"\label{{tab:{re.sub('[^A-Za-z0-9]+', '-', scenario)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(used) - 1)}}}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    return "\n".join(parts) + "\n"


def _of(table: Sequence[Sequence[str]], columns: Sequence[int]) -> list[list[str]]:
    return [[row[column] for column in columns] for row in table]


def explanation(study: Study) -> str:
    """What the numbers of a table mean; the one place that says what ± is."""
    text = f"Accuracy in percent after round {study.rounds}, mean over clients"
    text += f"; ± is the sample standard deviation over {len(study.seeds)} seeds." if len(study.seeds) > 1 else " (one seed)."
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


def worst_tenth(accuracy: np.ndarray) -> float:
    """The mean over the tenth of the clients `[N]` with the lowest accuracy; at least one."""
    count = max(1, round(len(accuracy) / 10))
    return float(np.mean(np.sort(accuracy)[:count]))


def _over_seeds(values: np.ndarray) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def _spread(value: tuple[float, float]) -> str:
    mean, deviation = value
    if np.isnan(mean):
        return ""
    return f"{mean:.2f}" if np.isnan(deviation) else f"{mean:.2f} ±{deviation:.2f}"
