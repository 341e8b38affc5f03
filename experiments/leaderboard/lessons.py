"""Makes the page docs/leaderboard_lessons.md from the committed raw results alone.

Rows of a study other than the one in this folder are left out: they do not have the settings that the page is about.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import yaml

from experiments.leaderboard import adapting, board, gaps, newcomers
from experiments.leaderboard.board import Line
from experiments.leaderboard.gaps import Gap
from experiments.leaderboard.newcomers import Tested
from experiments.reproduce import page as results
from experiments.reproduce import run_list
from experiments.reproduce.run_list import Run
from fedjax_meta import report
from fedjax_meta.study import Study
from fedjax_meta.study.system import System

PAGE = board.DOCS / "leaderboard_lessons.md"
ORDERINGS = board.HERE / "orderings.yaml"
SECOND_ORDER = [
    ("FedMeta(MAML)", "fedmeta", "fedmeta_fomaml"),
    ("FedMeta-Per(MAML)", "fedmeta_per", "fedmeta_per_fomaml"),
    ("Per-FedAvg, differences of gradients", "perfedavg", "perfedavg_fo"),
    ("Per-FedAvg, exact products", "perfedavg_exact", "perfedavg_fo"),
]
"""A method, the system with its second-order gradient, and the one with its first-order gradient."""

IMPLICIT = [
    ("iMAML against FOMAML", "imaml", "fedmeta_fomaml"),
    ("iMAML against FOMAML, own head", "imaml_per", "fedmeta_per_fomaml"),
]
"""Methods with another inner problem than the first-order one that they are compared with."""

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
"""Meta-learners that are compared with FedAvg."""

REFERENCES = ["fedavg_ft", "fedavg"]

Board = Mapping[str, Mapping[str, Sequence[Line]]]
"""By scenario and system: a line for each seed."""

Unsound = Mapping[str, Collection[str]]
"""By scenario, the systems that comparisons should not rest on, see `_left_out`."""


def page(
    listed: Sequence[Run], lines: Mapping[str, Sequence[Line]], tested: Mapping[str, Sequence[Tested]] | None = None
) -> str:
    """The generated part of the page.

    Args:
      listed: all runs of the list.
      lines, tested: the raw results of each scenario.
    """
    studies = [run.load() for run in listed]
    found = current(studies, lines)
    systems = {name: system for study in studies for name, system in study.systems.items()}
    nothing = {scenario: _learned_nothing(lines[scenario], of, systems) for scenario, of in found.items()}
    unsound = {scenario: {*nothing[scenario], *(name for name in of if of[name][0].edge)} for scenario, of in found.items()}
    text = ["## What the counts leave out", "", *_left_out(found, lines, nothing)]
    text += ["## When second order pays", "", *_second_order(found, unsound)]
    text += ["## When meta-learning pays", "", *_meta_learning(found, unsound)]
    text += ["## What new clients need", "", *adapting.section(found, systems, tested or {}, unsound)]
    text += ["## Which published orderings survive", "", *_orderings(found, unsound)]
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


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    return [report.markdown_table(headings, rows, text_columns=text_columns), ""] if rows else ["Nothing was run yet.", ""]


GROUPS = ("known", "new")


class _Compared(NamedTuple):
    """Pairs of systems on all scenarios that have both.

    Attributes:
      gaps: by pair and scenario, on known and on new clients.
      flops: by pair, of a round of the first system over one of the second, wherever both were counted.
    """

    gaps: dict[str, dict[str, list[Gap | None]]]
    flops: dict[str, list[float]]

    def all(self) -> list[Gap]:
        """Every gap."""
        return [one for of_pair in self.gaps.values() for some in of_pair.values() for one in some if one is not None]

    def on(self, scenario: str) -> list[Gap | None]:
        """The gaps of all pairs on one scenario."""
        return [one for of_pair in self.gaps.values() for one in of_pair.get(scenario, ())]

    def intervals(self, scenarios: Iterable[str]) -> list[str]:
        """A table of all intervals."""
        used = [scenario for scenario in scenarios if any(self.on(scenario))]
        headings = ["", *(f"{scenario}, {name}" for scenario in used for name in GROUPS)]
        rows = [
            [title, *(_marked(one) for scenario in used for one in of_pair.get(scenario, [None] * len(GROUPS)))]
            for title, of_pair in self.gaps.items()
        ]
        return _table(headings, rows)


def _marked(one: Gap | None) -> str:
    return "" if one is None else one.words + f" {gaps.END}" * (not one.sound)


def _compared(found: Board, pairs: Sequence[tuple[str, str, str]], unsound: Unsound) -> _Compared:
    by_pair: dict[str, dict[str, list[Gap | None]]] = {}
    flops: dict[str, list[float]] = {}
    for title, first, second in pairs:
        for scenario, systems in found.items():
            if first in systems and second in systems:
                one, other = systems[first], systems[second]
                by_pair.setdefault(title, {})[scenario] = [
                    gaps.of_lines(one, other, name, unsound[scenario]) for name in GROUPS
                ]
                ratio = _ratio(systems, first, second)
                flops.setdefault(title, []).extend([ratio] if np.isfinite(ratio) else [])
    return _Compared(by_pair, flops)


def _ratio(systems: Mapping[str, Sequence[Line]], first: str, second: str) -> float:
    """The FLOPs of one system over those of another; NaN where one of them has none."""
    one, other = (systems[name][0].flops if name in systems else math.nan for name in (first, second))
    return one / other


def _said(some: Iterable[Gap | None]) -> tuple[int, int, int, int]:
    """How many there are, and how many say better, worse, and nothing."""
    better, undecided, worse = gaps.counts(some)
    return better + undecided + worse, better, worse, undecided


def _sound(some: Iterable[Gap | None], better: str) -> str:
    """The same of sound pairs, in a sentence."""
    count, up, down, undecided = _said(gaps.sound(some))
    return f"Of sound pairs, {up} of {count} {better}, {down} that it is worse, and {undecided} contain 0."


def _counts(some: Iterable[Gap | None]) -> list[str]:
    """Better, undecided and worse, of all pairs and of sound ones."""
    there = list(some)
    return [*map(str, gaps.counts(there)), *map(str, gaps.counts(gaps.sound(there)))]


def _twice(words: Sequence[str]) -> list[str]:
    """The headings of `_counts`."""
    return [*words, *(f"{word}, sound" for word in words)]


COUNTED = _twice([gaps.BETTER, gaps.OPEN, gaps.WORSE])


def _learned_nothing(
    lines: Sequence[Line], found: Mapping[str, Sequence[Line]], systems: Mapping[str, System]
) -> dict[str, list[str]]:
    """The systems that adapt to a client and yet are not above a constant prediction, and on which clients.

    A model that all clients share is no such system: it does not know which classes a client has, and the constant does.
    """
    behind = board.not_above_constant(lines)
    return {name: behind[name] for name in found if name in behind and newcomers.adapts_by(systems[name])[0]}


def _left_out(
    found: Board, lines: Mapping[str, Sequence[Line]], nothing: Mapping[str, Mapping[str, Sequence[str]]]
) -> list[str]:
    """What a sound pair is, which systems learned nothing, and which have no score."""
    text = [
        f"Tables count twice: all pairs of systems, and those that are sound. A pair is not sound ({gaps.END}) if the best value "
        "of one of the two stands at an end of its grid, or if one of the two adapts and yet learned nothing: on known or on new "
        "clients, its mean is not above that of a constant prediction, which is for each client what is most frequent there.",
        "",
    ]
    rows = []
    for scenario in found:
        least = board.constant(lines[scenario])
        for group in GROUPS:
            names = [name for name, groups in nothing[scenario].items() if group in groups]
            if names:
                rows.append([scenario, group, least[0].kind.text(getattr(least[0], group)), ", ".join(names)])
    if rows:
        text += ["Systems that learned nothing:", ""]
        text += [report.markdown_table(["scenario", "clients", "constant prediction", "systems"], rows, text_columns=4), ""]
    lost = [
        f"{name} on {scenario}"
        for scenario, systems in found.items()
        for name, mine in systems.items()
        if any(line.diverged for line in mine)
    ]
    if lost:
        text += [
            "A system that diverged has no score, even if only one of its known clients has no finite loss, in one seed. No "
            f"count below has it: {', '.join(lost)}.",
            "",
        ]
    return text


def _by_chance(some: Sequence[Gap | None]) -> str:
    """How many intervals would not contain 0 if all systems were equal."""
    count, *_ = _said(some)
    return f" If the systems of all pairs were equal, about {0.05 * count:.0f} of {count} intervals would leave out 0."


def _second_order(found: Board, unsound: Unsound) -> list[str]:
    every = _compared(found, SECOND_ORDER, unsound)
    if not every.gaps:
        return ["Nothing was run yet.", ""]
    pairs = [pair[1:] for pair in SECOND_ORDER]
    counted = [where for where, of in found.items() if any(np.isfinite(_ratio(of, *pair)) for pair in pairs)] or [
        "nowhere yet"
    ]
    words = "between the second-order and the first-order gradient of one method"
    text = [
        f"Of {{}} intervals {words}, {{}} say that the second order is better, {{}} that it is worse, and {{}} contain 0.".format(
            *_said(every.all())
        )
        + f" {_sound(every.all(), 'say that the second order is better')} "
        f"The other pairs might turn out differently with other rates.{_by_chance(every.all())}",
        "",
        f"By method, with what a round costs (FLOPs, second order over first, where both were counted: {', '.join(counted)}):",
        "",
    ]
    rows = [
        [title, *_counts(one for some in of_pair.values() for one in some), _range(every.flops[title])]
        for title, of_pair in every.gaps.items()
    ]
    text += _table(["", *COUNTED, "times the FLOPs"], rows)
    used = [scenario for scenario in found if any(every.on(scenario))]
    text += ["By scenario:", "", *_table(["", *COUNTED], [[scenario, *_counts(every.on(scenario))] for scenario in used])]
    text += board.folded(
        f"By how much, mean over seeds and its 95 % interval; {gaps.END} not sound",
        every.intervals(found),
    )
    implicit = _compared(found, IMPLICIT, unsound)
    if implicit.gaps:
        words = "{1} of {0} intervals say that it is better, {2} that it is worse, and {3} contain 0."
        text += [
            "Implicit gradients are another method: their inner problem has a proximal term. Of iMAML against first-order MAML, "
            f"{words.format(*_said(implicit.all()))} {_sound(implicit.all(), 'say that it is better')}" + _not_positive(found),
            "",
            *board.folded("The intervals", implicit.intervals(found)),
        ]
    return text


def _not_positive(found: Board) -> str:
    """How often iMAML's linear systems had an operator that is not positive, where rows say so."""
    shares = [
        f"{np.mean([line.negative_curvature for line in of[name]]):.0f} % of those of {name} on {scenario}"
        for scenario, of in found.items()
        for _, name, _ in IMPLICIT
        if name in of and not math.isnan(of[name][0].negative_curvature)
    ]
    if not shares:
        return ""
    return f" Conjugate gradients need a positive operator. That of its linear systems was not, in {'; '.join(shares)}."


def _range(ratios: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))) if ratios else {}
    return " to ".join(ends)


def _meta_learning(found: Board, unsound: Unsound) -> list[str]:
    """Meta-learners against FedAvg, fine-tuned and as it is."""
    rows, text, totals = [], [], []
    for reference in REFERENCES:
        every = _compared(found, [(name, name, reference) for name in INSTEAD], unsound)
        rows += [[scenario, reference, *_counts(every.on(scenario))] for scenario in found if any(every.on(scenario))]
        if every.gaps:
            words = "{1} of {0} intervals say better, {2} worse, and {3} contain 0"
            totals.append(
                f"- against {reference}: {words.format(*_said(every.all()))}; of sound pairs, "
                f"{words.format(*_said(gaps.sound(every.all())))}"
            )
            words = f"By how much against {reference}; {gaps.END} not sound"
            text += board.folded(words, every.intervals(found))
    if not rows:
        return ["Nothing was run yet.", ""]
    order = list(found)
    rows.sort(key=lambda row: order.index(row[0]))
    return [
        "How often meta-learners are better or worse than FedAvg: with fine-tuning by as many gradients of a sample "
        "(`fedavg_ft`), and without. All intervals of a scenario share one reference, so they are not independent. "
        "Over all scenarios:",
        "",
        *totals,
        "",
        *_table(["scenario", "against", *COUNTED], rows, 2),
        *text,
    ]


class Order(NamedTuple):
    """What a source prints: that one system is better than another.

    Attributes:
      source: in words.
      best, worst: systems.
      clients: "known" or "new".
      by: how many points are printed between them; NaN where it prints no numbers.
      but: scenarios on whose data the source prints another order.
    """

    source: str
    best: str
    worst: str
    clients: str
    by: float = math.nan
    but: tuple[str, ...] = ()


def orderings() -> list[Order]:
    """What is published, pair by pair; numbers are compared within a table, where one protocol gave them."""
    runs, pairs = {run.name: run for run in run_list.read_list()}, []
    for entry in yaml.safe_load(ORDERINGS.read_text(encoding="utf-8")):
        if "systems" in entry:
            but = tuple(entry.get("but", ()))
            pairs += [Order(entry["source"], *pair, "known", but=but) for pair in itertools.pairwise(entry["systems"])]
            continue
        names = entry.get("names", {})
        for (_, clients, scores), numbers in results.published_tables(runs[entry["run"]].load()).items():
            if "accuracy" not in scores:
                continue
            values = {names.get(system, system): given["accuracy"] for system, given in numbers.items()}
            for one, other in itertools.combinations(values, 2):
                if values[one] != values[other]:
                    best, worst = (one, other) if values[one] > values[other] else (other, one)
                    pairs.append(Order(entry["source"], best, worst, clients, abs(values[one] - values[other])))
    return pairs


BY = ((1.0, "at most 1"), (2.0, "1 to 2"), (5.0, "2 to 5"), (math.inf, "more than 5"), (math.nan, "no number"))
"""Groups of published differences, in points."""


def _orderings(found: Board, unsound: Unsound) -> list[str]:
    pairs = orderings()
    tried: list[tuple[str, Order, Gap]] = []
    for scenario, systems in found.items():
        for order in pairs:
            if order.best in systems and order.worst in systems and scenario not in order.but:
                one = gaps.of_lines(systems[order.best], systems[order.worst], order.clients, unsound[scenario])
                tried += [] if one is None else [(scenario, order, one)]
    if not tried:
        return ["Nothing was run yet.", ""]
    there = {system for systems in found.values() for system in systems}
    lacking = sorted({system for order in pairs for system in (order.best, order.worst)} - there)
    text = [
        "A source prints that one system of a pair is better than the other. Here they compete on other data sets, networks and "
        "numbers of clients, and most adapt longer before a test (ten gradients of a sample). So equal tuning is not all that "
        "differs. An order holds if the 95 % interval of the difference over seeds lies on its side of 0, "
        "is turned if it lies on the other side, and is undecided if it contains 0.",
        "",
        f"Of {_survive(tried)}. Only by sound pairs: of {_survive([one for one in tried if one[2].sound])}."
        + _both_ways(tried)
        + (f" Pairs with systems that the leaderboard lacks are left out: {', '.join(lacking)}." if lacking else ""),
        "",
        "By the difference that the source prints, in points. A pair counts once for each source that prints it, and scenario:",
        "",
    ]
    headings = ["", *_twice(["hold", "undecided", "turned"])]
    rows, below = [], -math.inf
    for most, words in BY:
        some = [one for _, order, one in tried if below < order.by <= most or (math.isnan(most) and math.isnan(order.by))]
        rows += [[words, *_counts(some)]] if some else []
        below = most
    text += _table(headings, rows)
    rows = [
        [scenario, source, *_counts(mine)]
        for scenario in found
        for source in dict.fromkeys(order.source for order in pairs)
        if (mine := [one for where, order, one in tried if (where, order.source) == (scenario, source)])
    ]
    text += ["By source:", "", *_table(["scenario", "source", *headings[1:]], rows, 2)]
    turned = [
        [scenario, order.source, f"{order.best} above {order.worst}", order.clients, _marked(one)]
        for scenario, order, one in tried
        if one.verdict == gaps.WORSE
    ]
    if turned:
        table = _table(["scenario", "source", "published", "clients", "difference"], turned, 4)
        text += board.folded(f"What is turned; {gaps.END} not sound", table)
    return text


def _both_ways(tried: Sequence[tuple[str, Order, Gap]]) -> str:
    """How many pairs the sources print in both directions."""
    pairs = {(order.best, order.worst, order.clients) for _, order, _ in tried}
    count = sum((worst, best, clients) in pairs for best, worst, clients in pairs) // 2
    if not count:
        return ""
    twice = "One comparison is" if count == 1 else f"{count} comparisons are"
    return f" {twice} printed in both directions by different tables, so that one of the two pairs cannot hold."


def _survive(tried: Sequence[tuple[str, Order, Gap]]) -> str:
    """How many pairs hold, are turned, both or neither, in words."""
    verdicts: dict[tuple[str, str, str], set[str]] = {}
    for _, order, one in tried:
        verdicts.setdefault((order.best, order.worst, order.clients), set()).add(one.verdict)
    holds, turns = ({pair for pair, some in verdicts.items() if verdict in some} for verdict in (gaps.BETTER, gaps.WORSE))
    return (
        f"{len(verdicts)} pairs, {len(holds - turns)} hold on one scenario or more and are turned on none, "
        f"{len(turns - holds)} are turned and hold nowhere, {len(holds & turns)} do both, and "
        f"{len(verdicts) - len(holds | turns)} are undecided everywhere"
    )


def _rounding(found: Board) -> list[str]:
    """How far first seeds are from what they were when the same training was done again with sums in another order."""
    rows = []
    for scenario, systems in found.items():
        alike = [lines[0] for lines in systems.values() if lines[0].again]
        again = {system: lines for system, lines in systems.items() if not np.isnan(lines[0].moved)}
        if not alike:
            continue
        if not again:
            rows.append([scenario, str(len(alike)), str(len(alike)), "", "", ""])
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
        "When the code changes, the first seed of a row is trained again (`--confirm`). If only the order of summation differs,",
        "because of the code or of the kind of processor, the losses agree to single precision at first. Training then amplifies",
        "the last bit, and they drift apart. The table says how far the score of the known clients moved, beside its spread over",
        'the seeds. "The same" are systems whose row came out as it is; they are left out of the moves. The others are in this',
        "table only if the commit that made their row gives the same numbers as the new code, both on the machine of the check.",
        "",
    ]
    headings = ["scenario", "systems", "the same", "median move", "median std over seeds", "largest move"]
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
    columns = 4 if any(row[3] for row in rows) else 3
    headings = ["scenario", "run", "systems", "run with other settings"]
    return _table(headings[:columns], [row[:columns] for row in rows], 3) if rows else text
