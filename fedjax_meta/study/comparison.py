"""A comparison of runs as tables: for a terminal, and as Markdown, CSV and HTML."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_meta import disk, escape, metrics, report
from fedjax_meta.report.frames import USER_ACCURACY
from fedjax_meta.study import page, results, tuning
from fedjax_meta.study.compare import NAN, Difference, Row, holm
from fedjax_meta.study.figures import Shown
from fedjax_meta.study.tuning import KNOWN, NEW


def tables(rows: Sequence[Row]) -> list[report.Table]:
    """A comparison as tables that fit a terminal of 80 columns. Columns that would be empty are left out."""
    systems = [row.system for row in rows]
    kind = systems[0].kind
    scores = [
        [
            row.system.title,
            str(row.system.rounds) if len({one.rounds for one in systems}) > 1 else "",
            str(len(row.known)),
            _spread(row, row.known),
            _interval(report.over_seeds(row.known)[0], metrics.confidence_margin(row.known), kind, ends=_range(kind)),
            _spread(row, row.new),
            "" if np.isnan(_gap(row)) else kind.text(_gap(row), sign=True),
        ]
        for row in rows
    ]
    headings = ["system", "rounds", "seeds", "known", "95 % interval", "new", "gap"]
    found = [report.Table(headings, scores, f"{systems[0].scenario}: {kind.label}{kind.direction}").used()]
    over = [
        [
            row.system.title,
            _spread(row, row.worst),
            _spread(row, row.variance),
            *(_share(row.behind, m) for m in results.REFERENCES),
        ]
        for row in rows
    ]
    headings = ["system", "worst 10 %", "variance", "behind local", "behind FedAvg"]
    found.append(report.Table(headings, over, "Over known clients").used())
    found += [part for part in (_differences(rows, group) for group in (KNOWN, NEW)) if part.rows]
    met = [(row.system.title, row.reached) for row in rows if row.reached is not None]
    if met:
        target, share = met[0][1].target, met[0][1].kind.share
        reaching = [[title, *map(_reached, (one.rounds, one.megabytes, one.seconds))] for title, one in met]
        goal = f"{target.name.replace('_', ' ')} " if target.name else ""
        title = f"To reach {goal}{target.value:g}{' %' if share else ''}"
        found.append(report.Table(["system", "rounds", "MB", "seconds"], reaching, title).used())
    return found


def _differences(rows: Sequence[Row], group: str) -> report.Table:
    pairs = [(row.system.title, row.against if group == KNOWN else row.against_new) for row in rows]
    found = [(title, one) for title, one in pairs if one is not None]
    p_seeds, p_clients = (holm([getattr(one, name) for _, one in found]) for name in ("p_seeds", "p_clients"))
    kind, unknown = rows[0].system.kind, "one diverged" if any(map(_diverged, rows)) else "not finite"
    lines = [
        [
            title,
            kind.text(one.mean, sign=True) if np.isfinite(one.mean) else unknown,
            _interval(one.mean, one.margin, kind, sign=True, ends=(-100, 100) if kind.share else (-np.inf, np.inf)),
            _p(seeds),
            _p(clients),
            f"{one.better:.0f} %" if np.isfinite(one.better) else "",
        ]
        for (title, one), seeds, clients in zip(found, p_seeds, p_clients, strict=True)
    ]
    headings = ["system", "points" if kind.share else kind.words, "95 % interval", "p (seeds)", "p (clients)", "better"]
    return report.Table(headings, lines, f"Minus {rows[0].reference}, {group} clients, same seeds").used()


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of these tables."""
    said = []
    if any(row.known.size > 1 for row in rows):
        said.append("± is the sample standard deviation over seeds; intervals are of the mean over seeds (Student's t).")
    if any(row.known.size == 2 for row in rows):
        said.append(
            "Two seeds are too few: their intervals reach 9 standard deviations to each side, those of five seeds 1.2."
        )
    differences = [one for row in rows for one in (row.against, row.against_new) if one is not None]
    fewer = min((one.seeds for one in differences), default=0)
    if fewer and any(fewer < row.known.size for row in rows):
        said.append(f"Differences are over the seeds that both systems have, {fewer} where they are fewest.")
    kind = rows[0].system.kind
    if kind.name == "f1" and "f1" not in rows[0].system.trials[0].rows[-1]["tests"][KNOWN].get("metrics", {}):
        said.append("F1 is within the classes that a client has, as FedMeta-Per takes it, see metrics.within_own_classes.")
    said.append(f'"variance" is over clients, in squared {"points" if rows[0].system.kind.share else "units"}.')
    if not rows[0].system.kind.higher_is_better:
        said.append(f"Lower {rows[0].system.kind.words} is better: a difference below 0 is a gain.")
    if any(np.isfinite(_gap(row)) for row in rows):
        said.append('"gap" is known minus new.')
    if any(row.behind for row in rows):
        said.append('"behind X": known clients that do worse than with X, mean over seeds.')
    if any(row.against is not None for row in rows):
        said.append(
            '"better": clients that gain. p-values are two-sided, of a paired t-test over seeds and of Wilcoxon\'s signed-rank '
            "test over clients (mean over seeds), adjusted for the number of rows (Holm). Intervals are not adjusted."
        )
    first = next(row.system for row in rows if row.system.title == row.reference)
    for row in rows:
        if row.against is not None and row.system.cohorts != first.cohorts:
            said.append(f"{row.system.title} trained on other cohorts than {first.title}: they share seeds, not cohorts.")
        diverged = [trial.diverged for trial in row.system.trials if trial.diverged is not None]
        if diverged:
            lost = tuning.without_loss(row.system.trials)
            seeds = f"{row.system.title}: {len(diverged)} of {len(row.system.trials)} seeds diverged"
            said.append(f"{seeds}: {lost}." if lost else f"{seeds}.")
    reached = next((row.reached for row in rows if row.reached is not None), None)
    if reached is not None:
        central = [row.system.title for row in rows if row.reached is not None and row.system.pooled]
        said += [
            f"Rounds of {title} are passes of central training, which are not those of a federation." for title in central
        ]
        if reached.kind.share and 0 < reached.target.value <= 1:
            said.append(f"Targets of shares are in percent: the one here is {reached.target.value:g} %.")
        if reached.target.name != USER_ACCURACY:  # which is known of every round
            said.append("Rounds are those of tests, so that they are as fine as the tests are close.")
        others = [row.system.title for row in rows if row.reached is None]
        if others:
            said.append(f"User accuracy was not recorded of {', '.join(others)}.")
        said.append(
            "MB: of a client in every round, down and up. Seconds: training and testing, without compilation; seeds that trained "
            "side by side share their wall-clock, so compare systems with equally many."
        )
    return said


def markdown(groups: Sequence[Sequence[Row]]) -> str:
    """The comparison as Markdown, one group of rows for each scenario."""
    text = ["# Comparison", ""]
    for rows in groups:
        for table in tables(rows):
            text += [f"## {escape.markdown(table.title)}", "", report.markdown_table(table.headings, table.rows), ""]
        text += [escape.markdown(" ".join(notes(rows))), ""]
    return "\n".join(text)


def html(groups: Sequence[Sequence[Row]]) -> str:
    """The comparison as a page with the figures of the systems, see `page`."""
    body: list[str] = []
    titles = dict.fromkeys(row.system.title for rows in groups for row in rows)
    colors = {title: number for number, title in enumerate(titles)}
    for rows in groups:
        systems = [row.system for row in rows]
        shown = [Shown(s.title, colors[s.title], s.trials, traffic=s.traffic, alone=s.alone, score=s.score) for s in systems]
        body.append(f"<h2>{page.text(rows[0].system.scenario)}</h2>")
        for table in tables(rows):
            body += [f"<h3>{page.text(table.title)}</h3>", page.table(table, colors)]
        body += [f'<p class="muted">{page.text(" ".join(notes(rows)))}</p>', *page.drawn(shown)]
    return page.document("Comparison", body)


def comma_separated(groups: Sequence[Sequence[Row]]) -> str:
    """Every number of the comparison, one line for each system; empty where it is not known."""
    lines = [line for rows in groups for line in _adjusted([_numbers(row) for row in rows])]
    names = list(dict.fromkeys(name for line in lines for name in line))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: "" if isinstance(value, float) and np.isnan(value) else value for key, value in line.items()})
    return file.getvalue()


def _adjusted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of a scenario with p-values adjusted for the number of rows, as in the tables, and without."""
    for group in ("known", "new"):
        for test in ("p_seeds", "p_clients"):
            name = f"{group}_difference_{test}"
            for line, value in zip(lines, holm([line[name] for line in lines]), strict=True):
                line[f"{name}_unadjusted"], line[name] = line[name], value
    return lines


WRITERS = {".md": markdown, ".csv": comma_separated, ".html": html}


def write(path: Path, groups: Sequence[Sequence[Row]]) -> None:
    """Writes a comparison as .md, .csv or .html, by the name of the file.

    Raises:
      ValueError: another ending.
      OSError: the file cannot be written.
    """
    check_path(path)
    disk.write_text(path, WRITERS[path.suffix](groups))


def check_path(path: Path) -> None:
    """Raises `ValueError` for a file that `write` does not know."""
    if path.suffix not in WRITERS:
        raise ValueError(f"{path} must end with one of {', '.join(WRITERS)}")


def _numbers(row: Row) -> dict[str, Any]:
    one = row.system
    line: dict[str, Any] = {"scenario": one.scenario, "data": one.fingerprint, "system": one.title, "method": one.method}
    line |= {"score": one.kind.name, "higher_is_better": one.kind.higher_is_better}
    line |= {"rounds": one.rounds, "seeds": len(row.known), "bytes_a_round": one.traffic}
    for name in ("known", "new", "worst", "variance"):
        values = getattr(row, name)
        line |= _over_seeds(name, values)
        line[f"{name}_margin"] = metrics.confidence_margin(values)
    line["gap"] = _gap(row)
    line |= {f"behind_{method}": row.behind.get(method, NAN) for method in results.REFERENCES}
    for name, found in (("known", row.against), ("new", row.against_new)):
        numbers: Mapping[str, Any] = dict.fromkeys(Difference._fields, NAN) if found is None else found._asdict()
        line |= {f"{name}_difference_{key}": value for key, value in numbers.items()}
    if row.reached is not None:
        for name in ("rounds", "megabytes", "seconds"):
            line |= _over_seeds(f"target_{name}", getattr(row.reached, name))
        line["target_missed"] = int(np.isinf(row.reached.rounds).sum())
    return line


def _over_seeds(name: str, values: np.ndarray) -> dict[str, float]:
    mean, deviation = report.over_seeds(values)
    return {f"{name}_mean": mean, f"{name}_std": deviation}


def _gap(row: Row) -> float:
    """Known minus new; NaN where one is not known."""
    return report.over_seeds(row.known)[0] - report.over_seeds(row.new)[0]


def _spread(row: Row, values: np.ndarray) -> str:
    words = row.system.kind.spread(*report.over_seeds(values))
    return (words or report.no_number(_diverged(row))) if values.size else ""


def _diverged(row: Row) -> bool:
    """Whether a seed of a system did."""
    return any(trial.diverged is not None for trial in row.system.trials)


RANGES = {"rmse": (0, np.inf), "mae": (0, np.inf), "perplexity": (1, np.inf), "r2": (-np.inf, 1)}
"""The lowest and highest value of the package's metrics that are no shares."""


def _range(kind: report.Kind) -> tuple[float, float]:
    return (0, 100) if kind.share else RANGES.get(kind.name, (-np.inf, np.inf))


def _interval(
    mean: float, margin: float, kind: report.Kind, *, sign: bool = False, ends: tuple[float, float] = (-np.inf, np.inf)
) -> str:
    """An interval in words, within the `ends` of a score: Student's t knows of none."""
    low, high = max(mean - margin, ends[0]), min(mean + margin, ends[1])
    return "" if np.isnan(margin) else f"[{kind.text(low, sign=sign)}, {kind.text(high, sign=sign)}]"


def _share(behind: Mapping[str, float], method: str) -> str:
    return f"{behind[method]:.0f} %" if method in behind else ""


def _p(value: float) -> str:
    return "" if np.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _reached(values: np.ndarray) -> str:
    missed = int(np.isinf(values).sum())
    if missed:
        return "never" if missed == values.size else f"never in {missed} of {values.size}"
    mean, deviation = report.over_seeds(values)
    return f"{mean:.4g} ±0" if deviation == 0 else report.Kind("", False, False).spread(mean, deviation)
