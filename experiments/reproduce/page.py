"""Which of the papers' numbers hold: a verdict on each published number, and the generated part of docs/results.md.

Tables, verdicts and totals are made only from extracts (`extracts.py`) and from the studies' published numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.reproduce import users
from experiments.reproduce.extracts import SCORES, places_of
from experiments.reproduce.run_list import Claim, Run
from experiments.reproduce.verdicts import NOT, ONE, ORDER, UNRUN, VERDICTS, WITHIN, measured, order, verdicts
from fedjax_meta import report
from fedjax_meta.study import Study, baselines, tuning
from fedjax_meta.study.files import DRAW

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
END_OF_GRID = "‡"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
HEADINGS = {
    "accuracy": "accuracy over samples",
    "accuracy_mean": "mean over clients",
    "accuracy_std": "deviation over clients",
    "f1_mean": "F1",
    "f1_std": "deviation of F1",
}


def page(runs: Sequence[Run], extracts: Mapping[str, Mapping[str, Any]]) -> str:
    """The generated part of docs/results.md."""
    sections = [_section(run, extracts.get(run.name)) for run in runs]
    totals = [
        [
            run.title,
            in_docs(run, extracts.get(run.name)),
            *(str(section.numbers.count(v) or "") for v in VERDICTS),
            _share(WITHIN, section.scores),
            _share(ORDER, section.orders),
        ]
        for run, section in zip(runs, sections, strict=True)
    ]
    text = [
        "## What stands",
        "",
        "How many published rows have which verdict, by the first score of their table; how many of the published numbers of all "
        "scores are within the spread; and how many of the orders that a paper asserts hold. The last two are of what was run "
        "with several seeds.",
        "",
    ]
    headings = ["run", "state", *VERDICTS, "all numbers within the spread", "orders that hold"]
    text += [report.markdown_table(headings, totals, text_columns=2), ""]
    for run, section in zip(runs, sections, strict=True):
        if run.name in extracts:
            text += section.lines
    waiting = [run for run in runs if run.name not in extracts]
    if waiting:
        text += [
            "## Not run yet",
            "",
            "`python -m experiments.reproduce --data-dir DIR` runs them in this order; hours on two cores.",
            "",
        ]
        rows = [[f"{run.title} ({run.name})", run.cost, f"{run.hours:g}"] for run in waiting]
        text += [report.markdown_table(["run", "cost by", "hours"], rows, text_columns=2), ""]
    return "\n".join(text)


def _share(word: str, words: Sequence[str]) -> str:
    """How many verdicts are `word`, of those that could be judged."""
    judged = [one for one in words if one not in (ONE, UNRUN)]
    return f"{judged.count(word)} of {len(judged)}" if judged else ""


def in_docs(run: Run, found: Mapping[str, Any] | None) -> str:
    """What of a run docs/results has: "not run", "4 of 8 rows, 1 seed" or "3 seeds"."""
    if found is None:
        return UNRUN
    study, seeds, draws = run.load(), len(found["seeds"]), len(found.get("draws", ()))
    wanted = sum(len(study.systems_on(scenario)) for scenario in study.scenarios) // max(draws, 1)
    part = "" if len(found["rows"]) == wanted else f"{len(found['rows'])} of {wanted} rows, "
    return f"{part}{seeds} seed{'s' * (seeds > 1)}{f' of {draws} draws' * (draws > 0)}"


class _Section(NamedTuple):
    """A run on the page.

    Attributes:
      lines: its text.
      numbers: verdicts on what its paper prints, of the first score of each table.
      scores: the same of every score.
      orders: verdicts on what its paper says of orders.
    """

    lines: list[str]
    numbers: list[str]
    scores: list[str]
    orders: list[str]


def _section(run: Run, found: Mapping[str, Any] | None) -> _Section:
    study = run.load()
    rows = {(row["scenario"], row["system"]): row for row in (found or {"rows": ()})["rows"]}
    lines = [f"## {run.title}", ""]
    told: list[str] = []
    every: list[str] = []
    orders: list[str] = []
    if found is not None:
        lines += [f"    {found['command']}", "", f"{_facts(found)}{_searched(found)}", ""]
    shown: set[tuple[str, str, str]] = set()
    for (scenario, clients, scores), numbers in published_tables(study).items():
        table, by_score = _against(run, study, rows, scenario, clients, scores, numbers)
        told += by_score[scores[0]].values()
        every += [word for words in by_score.values() for word in words.values()]
        lines += [f"### {_titled(study, scenario, f'{clients} clients')}", "", *table, ""]
        shown |= {(scenario, clients, system) for system in numbers}
    lines += _others(study, rows, shown)
    lines += _users(study, rows)
    for claim in run.claims:
        for scenario in claim.scenarios:
            sentence, word = _claim(claim, scenario, rows)
            orders.append(word)
            lines += [f"- {_titled(study, scenario, claim.says, ': ')}: **{word}**{sentence}"]
    lines += [""] if run.claims else []
    lines += [line for note in run.notes for line in (note.strip(), "")]
    return _Section(lines, told, every, orders)


def _facts(found: Mapping[str, Any]) -> str:
    rounds, seeds = found["rounds"], ", ".join(map(str, found["seeds"]))
    if "draws" in found:
        seeds += f", of each draw of the clients ({', '.join(map(str, found['draws']))})"
    several = len({row["scenario"] for row in found["rows"]}) > 1
    others = ""
    for part in found.get("before", ()):
        names = (f"{system} on {scenario}" if several else system for scenario, system in part["rows"])
        others += f" {', '.join(names)}: {_source(part)}."
    return f"{rounds} round{'s' * (rounds > 1)}; seeds {seeds}; {_source(found)}.{others}"


def _searched(found: Mapping[str, Any]) -> str:
    """Of how many rounds trials were, where they were shorter than runs: what is best early need not be best at the end."""
    rounds, seeds = found["trials"]["rounds"], found["trials"]["seeds"]
    if rounds >= found["rounds"] or not any(row["chosen"] for row in found["rows"]):
        return ""
    return f" Tuned options were chosen by trials of {rounds} rounds, with {seeds} seed{'s' * (seeds > 1)}."


def _source(part: Mapping[str, Any]) -> str:
    """The folder that rows are from, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    return (
        f"commit `{part['commit'][:12]}`{part['commit'][40:]}; configuration `{part['config']}`; "
        f"{part['hours']:.2f} h beside other work on {part['device']}; {versions}"
    )


def _titled(study: Study, scenario: str, words: str, join: str = ", ") -> str:
    """Words behind the name of the scenario they are about; alone, with a capital, where the study has no other."""
    only = len({name.partition(DRAW)[0] for name in study.scenarios}) == 1
    return words[:1].upper() + words[1:] if only else f"{scenario}{join}{words}"


def published_tables(study: Study) -> dict[tuple[str, str, tuple[str, ...]], dict[str, dict[str, float]]]:
    """The tables that a study says are published, by scenario, clients and scores: the numbers of each system, by score."""
    by_system: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in study.published:
        by_system.setdefault((one.scenario, one.clients, one.system), {})[one.score] = one.value
    tables: dict[tuple[str, str, tuple[str, ...]], dict[str, dict[str, float]]] = {}
    for (scenario, clients, system), numbers in by_system.items():
        tables.setdefault((scenario, clients, tuple(numbers)), {})[system] = numbers
    return tables


def _against(
    run: Run,
    study: Study,
    rows: Mapping[tuple[str, str], Mapping[str, Any]],
    scenario: str,
    clients: str,
    scores: Sequence[str],
    numbers: Mapping[str, Mapping[str, float]],
) -> tuple[list[str], dict[str, dict[str, str]]]:
    """A table of measured numbers with the published ones in brackets, and the verdicts by score and system."""
    found = {
        (system, score): measured(rows[scenario, system], clients, score)
        for system in numbers
        if (scenario, system) in rows
        for score in scores
    }
    by_score = {
        score: verdicts(
            {s: given[score] for s, given in numbers.items()}, {s: found[s, score] for s in numbers if (s, score) in found}
        )
        for score in scores
    }
    table = []
    for system, given in numbers.items():
        cells = [study.title_of(system)]
        for score in scores:
            cells.append(f"{found.get((system, score), '')} ({given[score]:.2f})".strip())
        word = by_score[scores[0]][system]
        off = found[system, scores[0]].mean - given[scores[0]] if (system, scores[0]) in found else math.nan
        distance = "" if word == WITHIN or math.isnan(off) else f", {off:+.2f} points"
        told = run.causes.get(system, "" if word == ONE else "cause unknown") if word in (ORDER, NOT, ONE) else ""
        cause = f": {told}" if told else ""
        table.append([*cells, f"{_in_words([by_score[score][system] for score in scores], distance)}{cause}"])
    headings = ["system", *(HEADINGS[score] for score in scores), "verdict"]
    return [report.markdown_table(headings, table)], by_score


def _in_words(words: Sequence[str], distance: str) -> str:
    """The verdict on a row: that on its first score, and how many of its scores are within the spread."""
    first, within = words[0], words.count(WITHIN)
    if len(words) == 1 or first in (ONE, UNRUN):
        return f"{first}{distance}"
    if within == len(words):
        return f"{'both' if within == 2 else f'all {within}'} numbers {WITHIN}"
    count = f"{within} of {len(words)} numbers"
    return f"first score {first}; {count}" if first == WITHIN else f"first score {first}{distance}; {count} {WITHIN}"


def _others(
    study: Study, rows: Mapping[tuple[str, str], Mapping[str, Any]], shown: Iterable[tuple[str, str, str]]
) -> list[str]:
    """Tables of what was run and has no published number."""
    lines, seen = [], set(shown)
    for scenario, systems in places_of(study).items():
        table = []
        for system in systems:
            row = rows.get((scenario, system))
            if row is None or all((scenario, clients, system) in seen for clients in ("known", "new") if clients in row):
                continue
            cells = [
                str(measured(row, clients, score)) if clients in row and _trained(study, system, clients) else ""
                for clients in ("known", "new")
                for score in _mean_and_deviation(row)
            ]
            ends = _at_edge(study, row)
            chosen = ", ".join(
                f"{name} {value:g}{f' {END_OF_GRID}' * (name in ends)}" for name, value in row["chosen"].items()
            )
            table.append([study.title_of(system), *cells, chosen])
        if table:
            headings = ["system", "known: mean over clients", "deviation", "new: mean over clients", "deviation", "chosen"]
            used = [c for c in range(len(headings)) if c == 0 or any(line[c] for line in table)]
            rows_shown = [[line[c] for c in used] for line in table]
            lines += [f"### {_titled(study, scenario, 'without a published number')}", ""]
            lines += [report.markdown_table([headings[c] for c in used], rows_shown), ""]
    return lines


def _trained(study: Study, system: str, clients: str) -> bool:
    """Whether clients have a model that was trained: new clients that train by themselves may have none."""
    return baselines.trained(clients, baselines.alone(study, system))


def _at_edge(study: Study, row: Mapping[str, Any]) -> Sequence[str]:
    """The numbers of which a row has the least or the largest value that was tried."""
    if "edge" in row:
        return row["edge"]
    points = tuning.points_of(study.systems[row["system"]])
    return tuning.at_edge(points, row["chosen"]) if len(points) == row["points"] else ()


def _mean_and_deviation(row: Mapping[str, Any]) -> tuple[str, str]:
    """The names of the scores that stand where nothing is published."""
    name = next(score.removesuffix("_mean") for score in row["known"] if score.endswith("_mean"))
    return f"{name}_mean", f"{name}_std"


def _users(study: Study, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """Tables of user accuracy, where it was recorded."""
    lines = []
    for scenario, systems in places_of(study).items():
        of_systems = {name: rows.get((scenario, name), {}).get("users") for name in systems}
        watched = [(study.title_of(name), scores) for name, scores in of_systems.items() if scores]
        if watched:
            lines += [f"### {_titled(study, scenario, 'user accuracy')}", "", report.markdown_table(*users.table(watched)), ""]
    return lines


def _claim(claim: Claim, scenario: str, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> tuple[str, str]:
    """(the numbers in words, the verdict)."""
    if any((scenario, system) not in rows for system in claim.systems):
        return "", UNRUN
    found = [_claimed(rows[scenario, system], claim) for system in claim.systems]
    sentence = f" ({', '.join(f'{system} {one.words}' for system, one in zip(claim.systems, found, strict=True))})"
    return sentence, order([one.values for one in found])


def _claimed(row: Mapping[str, Any], claim: Claim) -> users.Claimed:
    if claim.score not in SCORES:
        return users.claimed(row["users"], claim.score)
    sign = -1 if claim.score.endswith("_std") else 1
    values = [-math.inf if value is None else sign * value for value in row[claim.clients][claim.score]]
    return users.Claimed(values, str(measured(row, claim.clients, claim.score)))


def with_generated(text: str, generated: str) -> str:
    """The page with its generated part replaced.

    Raises:
      ValueError: it lacks one of the two marks.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page must hold the lines {BEGIN} and {END} once")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{generated.rstrip()}\n\n{END}{after}"
