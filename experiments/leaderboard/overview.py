"""All scenarios at a glance: the systems that each of them has, by their mean place."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.leaderboard import board, gaps
from experiments.leaderboard.board import Line
from fedjax_meta import report

LEAST = 20
"""A scenario with fewer systems is left out: hardly a system would be on all."""

Systems = Mapping[str, Sequence[Line]]
"""By name, the lines of each system of a scenario."""


def section(lines: Mapping[str, Sequence[Line]], reference: str) -> list[str]:
    """One table for known and one for new clients; none for fewer than two scenarios.

    Args:
      lines: of each scenario.
      reference: the system that all are held against.
    """
    scenarios = {scenario: board.by_system(line for line in some if line.method) for scenario, some in lines.items()}
    scenarios = {scenario: systems for scenario, systems in scenarios.items() if len(systems) >= LEAST}
    if len(scenarios) < 2:
        return []
    first, *others = scenarios.values()
    common = [name for name in first if all(name in systems for systems in others)]
    words = (
        f"The {len(common)} systems that {', '.join(scenarios)} all have, ordered by their mean place. Their place among these "
        "is in brackets. A place says nothing about distances, and three seeds do not tell neighbours apart. So the third column "
        f"counts the scenarios in which the 95 % interval of the difference to {reference} says better, nothing, or worse. "
        "If all systems were equal, one of twenty intervals would say something. A system that diverged has no interval."
    )
    text = ["## At a glance", "", words, ""]
    for group in ("known", "new"):
        text += [f"{group.capitalize()} clients:", "", _table(scenarios, common, group, reference), ""]
    if any(_diverged(systems[name]) for systems in scenarios.values() for name in common):
        text += ["diverged: in at least one seed, a known client or more had no finite loss; remarks below say how many.", ""]
    if any(systems[name][0].edge for systems in scenarios.values() for name in common):
        text += [
            f"{gaps.END} The best value of a rate, or of another number that was tuned, stands at the end of its grid.",
            "",
        ]
    return text


def _table(scenarios: Mapping[str, Systems], common: Sequence[str], group: str, reference: str) -> str:
    places = {
        name: [_place(systems, name, common, group) for systems in scenarios.values()]
        for name in common
        if all(_is_measured(systems[name], group) for systems in scenarios.values())
    }
    rows = []
    for name in sorted(places, key=lambda name: np.mean(places[name])):
        found = [gaps.of_lines(systems[name], systems[reference], group) for systems in scenarios.values()]
        better, undecided, worse = gaps.counts(found)
        against = "" if name == reference else f"{better} better, {undecided} undecided, {worse} worse"
        cells = [
            f"{_text(systems[name], group)} ({place})" for systems, place in zip(scenarios.values(), places[name], strict=True)
        ]
        rows.append([name, f"{np.mean(places[name]):.1f}", against, *cells])
    headings = ["system", "mean place", f"against {reference}", *scenarios]
    return report.markdown_table(headings, rows)


def _place(systems: Systems, name: str, common: Sequence[str], group: str) -> int:
    """1 for the best; systems with the same score share a place, whatever the rounding of their means."""
    return 1 + sum(board.worth(systems[other], group) > board.worth(systems[name], group) + 1e-9 for other in common)


def _is_measured(lines: Sequence[Line], group: str) -> bool:
    return _diverged(lines) or not any(math.isnan(getattr(line, group)) for line in lines)


def _diverged(lines: Sequence[Line]) -> bool:
    return any(line.diverged for line in lines)


def _text(lines: Sequence[Line], group: str) -> str:
    mean = float(np.mean([getattr(line, group) for line in lines]))
    text = "diverged" if math.isnan(mean) else lines[0].kind.text(mean)
    return f"{text} {gaps.END}" if lines[0].edge else text
