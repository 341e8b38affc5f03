"""What one learns from the leaderboard, docs/leaderboard_lessons.md: made of the committed raw results alone.

Rows that another study made than the one of this folder take no part: their settings are not those that the page speaks of.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import yaml

from experiments import _board as board
from experiments import _board_new as newcomers
from experiments import _standing as standing
from experiments._board import LOCAL, Line
from experiments._board_new import Tested
from fedjax_meta import metrics, report
from fedjax_meta.study import Study
from fedjax_meta.study.system import System

PAGE = board.HERE.parent / "docs" / "leaderboard_lessons.md"
ORDERINGS = board.HERE / "leaderboard_orderings.yaml"
BETTER, WORSE, OPEN = "better", "worse", "undecided"
CLOSE = 1.0
"""Points that count as no loss."""

SECOND_ORDER = [
    ("FedMeta(MAML)", "fedmeta", "fedmeta_fomaml"),
    ("FedMeta-Per(MAML)", "fedmeta_per", "fedmeta_per_fomaml"),
    ("Per-FedAvg, differences of gradients", "perfedavg", "perfedavg_fo"),
    ("Per-FedAvg, exact products", "perfedavg_exact", "perfedavg_fo"),
    ("implicit gradient", "imaml", "fedmeta_fomaml"),
    ("implicit gradient, own head", "imaml_per", "fedmeta_per_fomaml"),
]
"""What is compared, the system whose gradient knows curvature, and the one whose gradient does not."""

INSTEAD = [
    "fedmeta",
    "fedmeta_metasgd",
    "fedmeta_per",
    "fedmeta_server",
    "perfedavg",
    "mamlpp",
    "imaml",
    "fedmeta_fomaml",
    "perfedavg_fo",
    "reptile",
    "perfedavg_reptile",
]
"""Meta-learners that are held against fine-tuned FedAvg."""

Board = Mapping[str, Mapping[str, Sequence[Line]]]
"""By scenario and system: a line for each seed."""


class Gap(NamedTuple):
    """A paired difference over seeds, above 0 where the first system is better; in words, and what it says."""

    words: str
    verdict: str


def page(
    listed: Sequence[standing.Run], lines: Mapping[str, Sequence[Line]], tested: Mapping[str, Sequence[Tested]] | None = None
) -> str:
    """The generated part of the page.

    Args:
      listed: all runs of the list.
      lines, tested: the raw results of each scenario.
    """
    studies = [run.load() for run in listed]
    found = current(studies, lines)
    systems = {name: system for study in studies for name, system in study.systems.items()}
    text = ["## When second order pays", "", *_second_order(found), "## What new clients need", ""]
    text += _new_clients(found, systems, tested or {})
    text += ["## Which published orderings survive equal tuning", "", *_orderings(found)]
    text += ["## What rounding does", "", *_rounding(found), "## What was not run", ""]
    return "\n".join([*text, *_not_run(dict(zip((run.name for run in listed), studies, strict=True)), lines, found)])


def current(studies: Sequence[Study], lines: Mapping[str, Sequence[Line]]) -> Board:
    """The rows whose settings are those of the studies, in the order of these."""
    found: dict[str, dict[str, list[Line]]] = {}
    for study in studies:
        for scenario in study.scenarios:
            for system in study.systems_on(scenario):
                mine = [line for line in lines.get(scenario, ()) if line.method and line.system == system]
                if mine and mine[0].said == board.said(study, scenario, system):
                    found.setdefault(scenario, {})[system] = mine
    return found


def gap(first: Sequence[Line], second: Sequence[Line], name: str) -> Gap | None:
    """By how much the first system is better in "known" or "new", seed by seed; `None` where one of them has no number."""
    other, kind = {line.seed: getattr(line, name) for line in second}, first[0].kind
    gaps = np.array([getattr(line, name) - other[line.seed] for line in first if line.seed in other])
    if not gaps.size or not np.isfinite(gaps).all():
        return None
    gaps = gaps if kind.higher_is_better else -gaps
    mean, margin = float(gaps.mean()), metrics.confidence_margin(gaps)
    words = f"{kind.text(mean, sign=True)} [{kind.text(mean - margin, sign=True)}, {kind.text(mean + margin, sign=True)}]"
    return Gap(words, BETTER if mean - margin > 0 else WORSE if mean + margin < 0 else OPEN)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    return [report.markdown_table(headings, rows, text_columns=text_columns), ""] if rows else ["Nothing was run yet.", ""]


def _compared(found: Board, pairs: Sequence[tuple[str, str, str]]) -> tuple[list[str], list[list[str]], dict[str, int]]:
    """(headings, a row for each pair that was run on any scenario, how often the first was better, worse or neither)."""
    asked = [(scenario, name) for scenario in found for name in ("known", "new")]
    rows, counts = [], dict.fromkeys((BETTER, WORSE, OPEN), 0)
    for title, first, second in pairs:
        gaps = [
            gap(found[scenario][first], found[scenario][second], name) if {first, second} <= set(found[scenario]) else None
            for scenario, name in asked
        ]
        for one in gaps:
            if one is not None:
                counts[one.verdict] += 1
        if any(gaps):
            rows.append([title, *("" if one is None else one.words for one in gaps)])
    return ["", *(f"{scenario}, {name}" for scenario, name in asked)], rows, counts


def _second_order(found: Board) -> list[str]:
    headings, rows, counts = _compared(found, SECOND_ORDER)
    text = [
        "By how much a gradient that knows curvature is better than the first-order one of the same method: mean over seeds and "
        "its 95 % interval.",
        "",
        *_table(headings, rows),
    ]
    text += [_counted(counts, "the second order is better")] if rows else []
    headings, rows, counts = _compared(found, [(name, name, "fedavg_ft") for name in INSTEAD])
    text += ["By how much meta-learners are better than fine-tuned FedAvg, which adapts by as many passes:", ""]
    text += _table(headings, rows)
    return text + ([_counted(counts, "the meta-learner is better")] if rows else [])


def _counted(counts: Mapping[str, int], what: str) -> str:
    return (
        f"Of {sum(counts.values())} intervals, {counts[BETTER]} say that {what}, {counts[WORSE]} that it is worse, and "
        f"{counts[OPEN]} hold 0.\n"
    )


def _new_clients(found: Board, systems: Mapping[str, System], tested: Mapping[str, Sequence[Tested]]) -> list[str]:
    text = ["New clients by what they do before they are tested; the best, the median and the worst system of each kind:", ""]
    rows = []
    for scenario, of_systems in found.items():
        kinds: dict[str, dict[str, float]] = {}
        for name, some in of_systems.items():
            mean = float(np.mean([line.new for line in some]))
            if name in systems and np.isfinite(mean):
                kinds.setdefault(_does(systems[name]), {})[name] = mean
        for does, means in sorted(kinds.items()):
            kind = next(iter(of_systems.values()))[0].kind
            ranked = sorted(means, key=lambda name: means[name], reverse=kind.higher_is_better)
            ends = [f"{name} {kind.text(means[name])}" for name in (ranked[0], ranked[len(ranked) // 2], ranked[-1])]
            rows.append([scenario, does, str(len(ranked)), *ends])
    text += _table(["scenario", "before a test", "systems", "best", "median", "worst"], rows, 2)
    rows = [row for scenario in found if scenario in tested for row in _enough(scenario, tested[scenario], found[scenario])]
    text += [
        f"How many passes, and how many samples to adapt on, bring new clients within {CLOSE:g} of the best that a system "
        f"reaches with other numbers of them, and with how many samples it begins to be better than {LOCAL} with as many:",
        "",
    ]
    return text + _table(["scenario", "system", "passes", "samples", f"samples to beat {LOCAL}"], rows, 2)


def _does(system: System) -> str:
    option, count = newcomers.adapts_by(system)
    return "no gradient" if not option else "one gradient of each sample" if count == 1 else "ten gradients of each sample"


def _enough(scenario: str, tested: Sequence[Tested], of_systems: Mapping[str, Sequence[Line]]) -> Iterator[list[str]]:
    """A row of words for each system whose new clients were tested by samples or passes."""
    sign = 1 if next(iter(of_systems.values()))[0].kind.higher_is_better else -1

    def means(system: str, by: str) -> dict[int, float]:
        mine = [one for one in tested if one.system == system and bool(one.option) == (by == "steps")]
        return {
            number: sign * float(np.mean([one.score for one in mine if getattr(one, by) == number]))
            for number in sorted({getattr(one, by) for one in mine}, key=lambda number: number or np.inf)
        }

    def first(values: Mapping[int, float]) -> str:
        near = [number for number, value in values.items() if value >= max(values.values()) - CLOSE]
        return "" if not near else str(near[0] or "all")

    alone = means(LOCAL, "samples")
    for system in dict.fromkeys(one.system for one in tested if one.system in of_systems):
        samples = means(system, "samples")
        above = [number for number, value in samples.items() if value > alone.get(number, np.inf)]
        beats = "" if system == LOCAL or not alone else str(above[0] or "all") if above else "never"
        yield [scenario, system, first(means(system, "steps")), first(samples), beats]


def orderings() -> list[tuple[str, str, str, str]]:
    """(source, the better system, the worse one, "known" or "new"): what is published, pair by pair."""
    runs, pairs = {run.name: run for run in standing.read_list()}, []
    for entry in yaml.safe_load(ORDERINGS.read_text(encoding="utf-8")):
        if "systems" in entry:
            pairs += [(entry["source"], *pair, "known") for pair in itertools.pairwise(entry["systems"])]
            continue
        scores: dict[str, dict[str, float]] = {}
        for one in runs[entry["run"]].load().published:
            if one.score == "accuracy":
                scores.setdefault(one.clients, {})[one.system] = one.value
        for clients, values in scores.items():
            for one, other in itertools.combinations(values, 2):
                if values[one] != values[other]:
                    best, worst = (one, other) if values[one] > values[other] else (other, one)
                    pairs.append((entry["source"], best, worst, clients))
    return pairs


def _orderings(found: Board) -> list[str]:
    rows, turned = [], []
    pairs = orderings()
    for scenario, of_systems in found.items():
        for source in dict.fromkeys(pair[0] for pair in pairs):
            counts = dict.fromkeys((BETTER, WORSE, OPEN), 0)
            for _, best, worst, clients in (pair for pair in pairs if pair[0] == source):
                one = gap(of_systems[best], of_systems[worst], clients) if {best, worst} <= set(of_systems) else None
                if one is not None:
                    counts[one.verdict] += 1
                    if one.verdict == WORSE:
                        turned.append([scenario, source, f"{best} above {worst}", clients, one.words])
            if sum(counts.values()):
                rows.append([scenario, source, *(str(counts[verdict]) for verdict in (BETTER, OPEN, WORSE))])
    text = [
        "Pairs of systems of which a source prints that one is better. An order holds, or is turned, where the 95 % interval of "
        "the difference over seeds lies on one side of 0.",
        "",
        *_table(["scenario", "source", "hold", "undecided", "turned"], rows, 2),
    ]
    if turned:
        text += ["Turned:", "", *_table(["scenario", "source", "published", "clients", "difference"], turned, 4)]
    return text


def _rounding(found: Board) -> list[str]:
    """How far first seeds are from what they were when the same training was done again with sums in another order."""
    rows = []
    for scenario, systems in found.items():
        alike = [lines[0] for lines in systems.values() if lines[0].again]
        again = {system: lines for system, lines in systems.items() if not np.isnan(lines[0].moved)}
        if not again:
            continue
        kind = next(iter(again.values()))[0].kind
        moved = {system: abs(lines[0].moved) for system, lines in again.items()}
        most = max(moved, key=lambda system: moved[system])
        spreads = [float(np.std([line.known for line in lines], ddof=1)) for lines in again.values() if len(lines) > 1]
        numbers = [float(np.median(list(moved.values()))), float(np.median(spreads)) if spreads else np.nan]
        rows.append([scenario, str(len(alike)), str(len(alike) - len(again)), *map(kind.text, numbers)])
        rows[-1] += [f"{kind.text(moved[most])} ({most})"]
    if not rows:
        return ["No row was trained again yet.", ""]
    text = [
        "When the code changes, the first seed of a row is trained again (`--confirm`). Where nothing but the order of sums is",
        "another, by the code or by the kind of processor, the losses agree to single precision at first, and drift apart as",
        "training amplifies the last bit. How far the score of the known clients moved is noise beside that of the seeds.",
        "Systems that no bit changed of do not count in the moves. Those that came apart before the second test stand here if",
        "their own commit gives on this machine what the new code gives.",
        "",
    ]
    headings = ["scenario", "systems", "equal in every bit", "median move", "median std over seeds", "largest move"]
    return [*text, *_table(headings, rows, 1)]


def _not_run(studies: Mapping[str, Study], lines: Mapping[str, Sequence[Line]], found: Board) -> list[str]:
    rows = []
    for name, study in studies.items():
        for scenario in study.scenarios:
            wanted = study.systems_on(scenario)
            missing = [system for system in wanted if system not in found.get(scenario, {})]
            older = {line.system for line in lines.get(scenario, ())} & set(missing)
            if missing:
                rows.append([scenario, name, board.in_words(missing, wanted), str(len(older)) if older else ""])
    text = ["All of the list was run.", ""]
    return _table(["scenario", "run", "systems", "run with other settings"], rows, 3) if rows else text
