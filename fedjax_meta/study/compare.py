"""Compares finished runs, of one study or of several, seed by seed and client by client.

Runs of the same seed share their initial model, cohorts and batches where their federations ask for the same cohorts, so that
differences are taken between pairs. ± is the sample standard deviation over seeds; intervals are written [low, high].
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import checkpoint, checks, metrics, report
from fedjax_meta.study import page, results
from fedjax_meta.study.figures import Shown
from fedjax_meta.study.run import KNOWN, NEW, Trial
from fedjax_meta.study.study import Study, load

NAN = float("nan")


class Finished(NamedTuple):
    """The final runs of a system, as a folder holds them.

    Attributes:
      title: of the system; with the folder's name where several runs have a system of this title.
      scenario: its name in the study.
      fingerprint: of the clients' data: only systems of one fingerprint are compared.
      trials: one for each seed.
      method: name in `METHODS`.
      cohorts: what the cohorts of a seed depend on.
      traffic: bytes of a client in a round, down and up; NaN where the folder does not say it.
      alone: the groups of clients that train by themselves with it.
    """

    title: str
    scenario: str
    fingerprint: str
    trials: list[Trial]
    method: str = ""
    cohorts: str = ""
    traffic: float = NAN
    alone: tuple[str, ...] = ()

    def by_client(self, group: str) -> dict[int, np.ndarray]:
        """Accuracy of each client `[N]` after the last round, by seed."""
        found = {}
        for trial in self.trials:
            test = trial.rows[-1]["tests"].get(group)
            if test is not None:
                found[trial.seed] = np.array(test["accuracy"], float)
        return found

    @property
    def rounds(self) -> int:
        """After which the clients were tested last."""
        return max(trial.rows[-1]["round"] for trial in self.trials)


class Difference(NamedTuple):
    """How a system compares with a reference on the same seeds, in points of accuracy, mean over clients.

    Attributes:
      mean: of the differences.
      margin: half the 95 % confidence interval of the mean (Student's t over the paired seeds); NaN for one seed.
      seeds: how many seeds both have.
      better, worse: shares of the clients that do better and worse than with the reference, mean over seeds, in percent.
      p_seeds: of the paired t-test over seeds, two-sided; NaN for one seed.
      p_clients: of Wilcoxon's signed-rank test over clients (mean over seeds), two-sided. Clients share what the server sends,
        so that it speaks of these clients and not of other trainings.
    """

    mean: float
    margin: float
    seeds: int
    better: float
    worse: float
    p_seeds: float
    p_clients: float


class Reached(NamedTuple):
    """What each seed took until the known clients' mean accuracy reached a target; infinity for one that never did.

    Attributes:
      rounds, megabytes, seconds: `[seeds]`; bytes of a client that takes part in every round, both ways.
    """

    rounds: np.ndarray
    megabytes: np.ndarray
    seconds: np.ndarray


class Row(NamedTuple):
    """A system in a comparison; accuracies in percent, `known` and `new` by seed.

    Attributes:
      system: what is compared.
      known, new: mean over clients, `[seeds]`; `new` is empty without new clients.
      worst: mean over the tenth of known clients with the lowest accuracy, `[seeds]`.
      variance: of accuracy over known clients, `[seeds]`.
      against: the reference; `None` for itself and where no seed is common.
      against_new: the same for new clients.
      behind: by method, the share of known clients that do worse than with it.
      reached: `None` without a target.
    """

    system: Finished
    known: np.ndarray
    new: np.ndarray
    worst: np.ndarray
    variance: np.ndarray
    against: Difference | None
    against_new: Difference | None
    behind: dict[str, float]
    reached: Reached | None


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
        traffic = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("traffic", {})
        before = len(found)
        for scenario in study.scenarios:
            for name in study.systems:
                path = folder / "results" / scenario / f"{name}.final.json"
                if path.is_file():
                    bytes_ = float(traffic.get(scenario, {}).get(name, NAN))
                    found.append((_finished(study, scenario, name, path, bytes_), folder.name))
        if len(found) == before:
            raise ValueError(f"{folder} has no finished results yet")
    counts = [(one.title, one.fingerprint) for one, _ in found]
    return [
        one._replace(title=f"{one.title} ({name})") if counts.count((one.title, one.fingerprint)) > 1 else one
        for one, name in found
    ]


def _finished(study: Study, scenario: str, name: str, path: Path, traffic: float) -> Finished:
    content = json.loads(path.read_text(encoding="utf-8"))
    trials = [Trial(**trial) for trial in report.numbers_again(content["trials"]).values()]
    federation = study.system(name).federation
    cohorts = {"cohort_size": 5, "schedule": "uniform", "participation": None}
    cohorts = {key: federation.get(key, default) for key, default in cohorts.items()}
    return Finished(
        study.title_of(name),
        scenario,
        content["config"]["data"],
        trials,
        study.systems[name].method,
        json.dumps(cohorts, sort_keys=True),
        traffic,
        results.alone(study, name),
    )


def difference(one: Finished, reference: Finished, group: str) -> Difference | None:
    """`one` minus `reference` on the seeds that both have; `None` if there are none."""
    mine, theirs = one.by_client(group), reference.by_client(group)
    seeds = sorted(set(mine) & set(theirs))
    if not seeds:
        return None
    gains = 100 * np.array([mine[seed] - theirs[seed] for seed in seeds])
    by_seed, by_client = gains.mean(1), gains.mean(0)
    better, worse = (100 * float(np.mean(hit)) for hit in (by_client > 0, by_client < 0))
    margin = metrics.confidence_margin(by_seed)
    return Difference(float(by_seed.mean()), margin, len(seeds), better, worse, paired_t(by_seed), signed_rank(by_client))


def paired_t(differences: np.ndarray) -> float:
    """The two-sided p-value of Student's paired t-test for differences `[n]`; NaN for fewer than two, or a NaN."""
    from scipy import stats

    count = differences.size
    if count < 2 or not np.isfinite(differences).all():
        return NAN
    error = float(differences.std(ddof=1)) / np.sqrt(count)
    if error == 0:
        return 1.0 if differences[0] == 0 else 0.0
    return float(2 * stats.t.sf(abs(differences.mean()) / error, count - 1))


def signed_rank(differences: np.ndarray) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test for differences `[n]`, those that are 0 left out; 1 if all are 0."""
    from scipy import stats

    if not np.isfinite(differences).all():
        return NAN
    moved = differences[differences != 0]
    if not moved.size:
        return 1.0
    ties = len(np.unique(np.abs(moved))) < moved.size
    return float(stats.wilcoxon(moved, method="asymptotic" if ties or moved.size > 50 else "exact").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests, adjusted for their number (Holm 1979); NaN stays, and does not count.

    Example:
      >>> [round(p, 3) for p in holm([0.01, 0.04, float("nan"), 0.03])]
      [0.03, 0.06, nan, 0.06]
    """
    order = [i for i in np.argsort(p_values) if np.isfinite(p_values[i])]
    adjusted, least = list(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def by_scenario(systems: Sequence[Finished], *, reference: str | None = None, target: float | None = None) -> list[list[Row]]:
    """The numbers of systems, those of one fingerprint together; arguments as in `compared`.

    Raises:
      ValueError: no such reference, a target that is not finite.
    """
    if reference is not None:
        checks.one_of("reference", reference, [one.title for one in systems])
    groups = []
    for fingerprint in dict.fromkeys(one.fingerprint for one in systems):
        mine = [one for one in systems if one.fingerprint == fingerprint]
        here = reference if reference in [one.title for one in mine] else None
        groups.append(compared(mine, reference=here, target=target))
    return groups


def compared(systems: Sequence[Finished], *, reference: str | None = None, target: float | None = None) -> list[Row]:
    """The numbers of systems of one scenario.

    Args:
      systems: at least one, all of one fingerprint.
      reference: title of the one that the others are held against; the first when not given.
      target: accuracy of known clients in percent.

    Raises:
      ValueError: no such reference, a target that is not finite.
    """
    titles = [one.title for one in systems]
    if reference is not None:
        checks.one_of("reference", reference, titles)
    if target is not None:
        checks.finite("target", target)
    first = systems[0 if reference is None else titles.index(reference)]
    held = {method: next((one for one in systems if one.method == method), None) for method in results.REFERENCES}
    rows = []
    for one in systems:
        known = [100 * accuracy for accuracy in one.by_client(KNOWN).values()]
        behind = {}
        for method, other in held.items():
            found = None if other is None or other is one else difference(one, other, KNOWN)
            if found is not None and np.isfinite(found.mean):
                behind[method] = found.worse
        rows.append(
            Row(
                one,
                np.array([accuracy.mean() for accuracy in known]),
                np.array([100 * accuracy.mean() for accuracy in one.by_client(NEW).values()]),
                np.array([results.worst_tenth(accuracy) for accuracy in known]),
                np.array([accuracy.var() for accuracy in known]),
                None if one is first else difference(one, first, KNOWN),
                None if one is first else difference(one, first, NEW),
                behind,
                None if target is None else reached(one, target),
            )
        )
    return rows


def reached(one: Finished, target: float) -> Reached:
    """When the mean accuracy of known clients was first at least the target, in percent, seed by seed."""
    rounds, seconds = [], []
    for trial in one.trials:
        scores = 100 * np.array([row["tests"][KNOWN]["scores"]["accuracy_mean"] for row in trial.rows], float)
        hits, clock = np.flatnonzero(scores >= target), np.cumsum([row["seconds"] for row in trial.rows])
        rounds.append(float(trial.rows[hits[0]]["round"]) if hits.size else np.inf)
        seconds.append(float(clock[hits[0]]) if hits.size else np.inf)
    # Without the condition, a system that sends nothing would take infinity times 0.
    megabytes = [number * one.traffic / 1e6 if np.isfinite(number) else np.inf for number in rounds]
    return Reached(np.array(rounds), np.array(megabytes), np.array(seconds))


class Table(NamedTuple):
    """A part of a comparison, as text."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(rows: Sequence[Row], *, target: float | None = None) -> list[Table]:
    """A comparison as tables that fit a terminal of 80 columns. Columns that would be empty are left out."""
    systems = [row.system for row in rows]
    scores = [
        [
            row.system.title,
            str(row.system.rounds) if len({one.rounds for one in systems}) > 1 else "",
            str(len(row.known)),
            _spread(row.known),
            _interval(_mean(row.known), metrics.confidence_margin(row.known)),
            _spread(row.new),
            f"{_mean(row.known) - _mean(row.new):+.2f}" if row.new.size else "",
        ]
        for row in rows
    ]
    headings = ["system", "rounds", "seeds", "known", "95 % interval", "new", "gap"]
    found = [Table(f"{systems[0].scenario}: accuracy, %", *_used(headings, scores))]
    over = [
        [row.system.title, _spread(row.worst), _spread(row.variance), *(_share(row.behind, m) for m in results.REFERENCES)]
        for row in rows
    ]
    headings = ["system", "worst 10 %", "variance", "behind local", "behind FedAvg"]
    found.append(Table("Over known clients", *_used(headings, over)))
    reference = next((row.system.title for row in rows if row.against is None), systems[0].title)
    found += [part for part in (_differences(rows, reference, group) for group in (KNOWN, NEW)) if part.rows]
    if target is not None:
        reaching = [
            [row.system.title, *(_reached(values) for values in row.reached)] for row in rows if row.reached is not None
        ]
        found.append(Table(f"To reach {target:g} %", *_used(["system", "rounds", "MB", "seconds"], reaching)))
    return found


def _differences(rows: Sequence[Row], reference: str, group: str) -> Table:
    pairs = [(row.system.title, row.against if group == KNOWN else row.against_new) for row in rows]
    found = [(title, one) for title, one in pairs if one is not None]
    p_seeds, p_clients = (holm([getattr(one, name) for _, one in found]) for name in ("p_seeds", "p_clients"))
    lines = [
        [title, f"{one.mean:+.2f}", _interval(one.mean, one.margin, sign=True), _p(seeds), _p(clients), f"{one.better:.0f} %"]
        for (title, one), seeds, clients in zip(found, p_seeds, p_clients, strict=True)
    ]
    headings = ["system", "points", "95 % interval", "p (seeds)", "p (clients)", "better"]
    return Table(f"Minus {reference}, {group} clients, same seeds", *_used(headings, lines))


def notes(rows: Sequence[Row], *, target: float | None = None) -> list[str]:
    """What a reader must know of these tables."""
    said = []
    if any(row.known.size > 1 for row in rows):
        said.append("± is the sample standard deviation over seeds; intervals are of the mean over seeds (Student's t).")
    said.append('"variance" is over clients, in squared points.')
    if any(row.new.size for row in rows):
        said.append('"gap" is known minus new.')
    if any(row.behind for row in rows):
        said.append('"behind": known clients that do worse than with it, mean over seeds.')
    if any(row.against is not None for row in rows):
        said.append(
            '"better": clients that gain. p-values are two-sided, of a paired t-test over seeds and of Wilcoxon\'s signed-rank '
            "test over clients (mean over seeds), adjusted for the number of rows (Holm)."
        )
    first = next((row.system for row in rows if row.against is None), rows[0].system)
    for row in rows:
        if row.against is not None and row.system.cohorts != first.cohorts:
            said.append(f"{row.system.title} trained on other cohorts than {first.title}: they share seeds, not cohorts.")
        diverged = [trial.diverged for trial in row.system.trials if trial.diverged is not None]
        if diverged:
            said.append(f"{row.system.title}: {len(diverged)} of {len(row.system.trials)} seeds diverged.")
    if target is not None:
        said.append(
            "MB: of a client in every round, down and up. Seconds: training and testing of one run, without compilation."
        )
    return said


def markdown(groups: Sequence[Sequence[Row]], *, target: float | None = None) -> str:
    """The comparison as Markdown, one group of rows for each scenario."""
    text = ["# Comparison", ""]
    for rows in groups:
        for table in tables(rows, target=target):
            text += [f"## {table.title}", "", report.markdown_table(table.headings, table.rows), ""]
        text += [" ".join(notes(rows, target=target)), ""]
    return "\n".join(text)


def html(groups: Sequence[Sequence[Row]], *, target: float | None = None) -> str:
    """The comparison as a page with the figures of the systems, see `page`."""
    body: list[str] = []
    for rows in groups:
        shown = [
            Shown(row.system.title, number, row.system.trials, traffic=row.system.traffic, alone=row.system.alone)
            for number, row in enumerate(rows)
        ]
        colors = {one.title: one.color for one in shown}
        body.append(f"<h2>{page.text(rows[0].system.scenario)}</h2>")
        for table in tables(rows, target=target):
            body += [f"<h3>{page.text(table.title)}</h3>", page.table(table.headings, table.rows, colors)]
        body += [f'<p class="muted">{page.text(" ".join(notes(rows, target=target)))}</p>', *page.drawn(shown)]
    return page.document("Comparison", body)


def comma_separated(groups: Sequence[Sequence[Row]]) -> str:
    """Every number of the comparison, one line for each system; empty where it is not known."""
    lines = [_numbers(row) for rows in groups for row in rows]
    names = list(dict.fromkeys(name for line in lines for name in line))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: "" if isinstance(value, float) and np.isnan(value) else value for key, value in line.items()})
    return file.getvalue()


WRITERS = (".md", ".csv", ".html")


def write(path: Path, groups: Sequence[Sequence[Row]], *, target: float | None = None) -> None:
    """Writes a comparison as .md, .csv or .html, by the name of the file.

    Raises:
      ValueError: another ending.
      OSError: the file cannot be written.
    """
    check_path(path)
    if path.suffix == ".csv":
        text = comma_separated(groups)
    else:
        text = (markdown if path.suffix == ".md" else html)(groups, target=target)
    checkpoint.write_text(path, text)


def check_path(path: Path) -> None:
    """Raises `ValueError` for a file that `write` does not know."""
    if path.suffix not in WRITERS:
        raise ValueError(f"{path} must end with one of {', '.join(WRITERS)}")


def _numbers(row: Row) -> dict[str, Any]:
    one = row.system
    line: dict[str, Any] = {"scenario": one.scenario, "data": one.fingerprint, "system": one.title, "method": one.method}
    line |= {"rounds": one.rounds, "seeds": len(row.known), "bytes_a_round": one.traffic}
    for name in ("known", "new", "worst", "variance"):
        values = getattr(row, name)
        line |= {f"{name}_mean": _mean(values), f"{name}_std": _deviation(values)}
        line[f"{name}_margin"] = metrics.confidence_margin(values)
    line["gap"] = _mean(row.known) - _mean(row.new)
    line |= {f"behind_{method}": row.behind.get(method, NAN) for method in results.REFERENCES}
    for name, found in (("known", row.against), ("new", row.against_new)):
        numbers: Mapping[str, Any] = dict.fromkeys(Difference._fields, NAN) if found is None else found._asdict()
        line |= {f"{name}_difference_{key}": value for key, value in numbers.items()}
    if row.reached is not None:
        for name, values in row.reached._asdict().items():
            line |= {f"target_{name}_mean": _mean(values), f"target_{name}_std": _deviation(values)}
        line["target_missed"] = int(np.isinf(row.reached.rounds).sum())
    return line


def _used(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) of the columns that hold something."""
    columns = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    return [headings[column] for column in columns], [[row[column] for column in columns] for row in rows]


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if values.size else NAN


def _deviation(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if values.size > 1 and np.isfinite(values).all() else NAN


def _spread(values: np.ndarray) -> str:
    if not values.size:
        return ""
    if not np.isfinite(values).all():
        return "diverged"
    return f"{_mean(values):.2f}" + (f" ±{_deviation(values):.2f}" if values.size > 1 else "")


def _interval(mean: float, margin: float, *, sign: bool = False) -> str:
    form = "+.2f" if sign else ".2f"
    return "" if np.isnan(margin) else f"[{mean - margin:{form}}, {mean + margin:{form}}]"


def _share(behind: Mapping[str, float], method: str) -> str:
    return f"{behind[method]:.0f} %" if method in behind else ""


def _p(value: float) -> str:
    return "" if np.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _reached(values: np.ndarray) -> str:
    missed = int(np.isinf(values).sum())
    if missed:
        return "never" if missed == values.size else f"never in {missed} of {values.size}"
    if np.isnan(values).any():
        return ""
    return f"{_mean(values):.4g}" + (f" ±{_deviation(values):.2g}" if values.size > 1 else "")
