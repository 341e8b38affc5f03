"""What new clients need: results of their tests with fewer samples and with other numbers of passes."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from experiments.leaderboard import board, gaps, newcomers
from experiments.leaderboard.board import LOCAL, Line
from experiments.leaderboard.gaps import BETTER, OPEN, WORSE, Gap
from experiments.leaderboard.newcomers import Tested
from fedjax_meta import report
from fedjax_meta.study.system import System

CLOSE = 1.0
"""Points that count as no loss."""

NO_GRADIENT = ("fedem",)
"""Methods whose new clients take steps, but none along a gradient: FedEM's find shares of the models."""

SHOWN = (1, 5, 20, 0)
"""Numbers of samples in the first table; 0 for all."""

Board = Mapping[str, Mapping[str, Sequence[Line]]]
Scores = dict[str, dict[int, dict[int, float]]]
"""By system, number (0 for all) and seed."""


def section(
    found: Board,
    systems: Mapping[str, System],
    tested: Mapping[str, Sequence[Tested]],
    unsound: Mapping[str, Collection[str]],
) -> list[str]:
    """The lines of the section.

    Args:
      found: the rows of each scenario.
      systems: of the studies.
      tested: of each scenario.
      unsound: the systems of each scenario that comparisons should not rest on.
    """
    there = [scenario for scenario in found if scenario in tested]
    if not there:
        return ["New clients were not tested with fewer samples yet.", ""]
    tables = _Tables()
    for scenario in there:
        mine = [one for one in tested[scenario] if one.system in found[scenario]]
        tables.add(scenario, found[scenario], systems, mine, unsound[scenario])
    text = [
        "The best systems that take no gradient before they are tested and the best that do, by the number of samples that a new "
        "client has to adapt on, beside a client that trains by itself. How many of those that adapt are better or worse than "
        f"FedAvg's model as it is, of all and of sound pairs; {gaps.END} not sound.{_of_tested(found, tested)}",
        "",
        f"For these tests the chosen point was trained again. Where that went differently, scores with all samples are not those "
        f"of the rows.{_apart(found, tested)}",
        "",
    ]
    return text + tables.text()


@dataclasses.dataclass
class _Tables:
    """What the section's tables say, each a list to which every scenario adds.

    Attributes:
      rows: by the number of samples, see `_row`.
      alone: how far clients come that train by themselves.
      tuned, untold: fine-tuned against plain FedAvg, and the scenarios where they cannot be compared.
      own: how many systems need how many passes, by scenario.
      enough: by system, what it needs.
    """

    rows: list[list[str]] = dataclasses.field(default_factory=list)
    alone: list[str] = dataclasses.field(default_factory=list)
    tuned: list[list[str]] = dataclasses.field(default_factory=list)
    untold: list[str] = dataclasses.field(default_factory=list)
    own: list[tuple[str, dict[int, int]]] = dataclasses.field(default_factory=list)
    enough: list[list[str]] = dataclasses.field(default_factory=list)

    def add(
        self,
        scenario: str,
        found: Mapping[str, Sequence[Line]],
        systems: Mapping[str, System],
        tested: Sequence[Tested],
        ends: Collection[str],
    ) -> None:
        """Adds a scenario, with its rows, its tests of new clients, and the systems that are marked."""
        kind = next(iter(found.values()))[0].kind
        samples, passes = _by_samples(tested), _by_passes(tested)
        adapt = [
            name
            for name in samples
            if newcomers.adapts_by(systems[name])[0] and systems[name].method not in (LOCAL, *NO_GRADIENT)
        ]
        plain = [name for name in samples if name not in adapt and systems[name].method != LOCAL and not systems[name].pooled]
        numbers = sorted({number for some in samples.values() for number in some}, key=_in_order)
        alone = [
            (mean, -number, name)
            for name, of_numbers in passes.items()
            if systems[name].method == LOCAL
            for number, mean in _means(of_numbers, kind).items()
        ]
        self.rows.extend(_row(scenario, number, samples, adapt, plain, kind, ends) for number in SHOWN if number in numbers)
        if alone:
            mean, number, name = max(alone)
            self.alone.append(f"{scenario} {kind.text(abs(mean))} ({name}, {-number} passes)")
        if _rate(found, "fedavg") == _rate(found, "fedavg_ft"):
            self.tuned.extend(_fine_tuning(scenario, numbers, samples, kind, ends))
        else:
            self.untold.append(scenario)
        self.own.extend(_own_best(scenario, {name: passes[name] for name in adapt if name in passes}, kind))
        needs = _enough(scenario, samples, passes, kind)
        self.enough.extend([where, _marked(system, ends), *words] for where, system, *words in needs)

    def text(self) -> list[str]:
        """The tables with the sentences between them."""
        counted = [BETTER, OPEN, WORSE, *(f"{word}, sound" for word in (BETTER, OPEN, WORSE))]
        headings = ["scenario", "samples", "best without a gradient", "best that adapts", *counted, LOCAL]
        text = [report.markdown_table(headings, self.rows, text_columns=1), ""]
        if self.alone:
            words = "By the best number of passes over all samples that was tested, clients that train alone reach"
            text += [f"{words}: {'; '.join(self.alone)}.", ""]
        if self.tuned:
            headings = ["scenario", "fine-tuning is worse", "undecided", "better"]
            text += [
                "FedAvg's model, trained at the same rate, fine-tuned by ten passes or as it is (fedavg\\_ft minus fedavg), by "
                "the number of samples:",
                "",
                report.markdown_table(headings, self.tuned, text_columns=4),
                "",
            ]
        if self.tuned and self.untold:
            text += [f"Left out are scenarios where the two are trained with different rates: {', '.join(self.untold)}.", ""]
        if self.own:
            numbers = sorted({number for _, systems in self.own for number in systems})
            table = [[scenario, *(str(systems.get(number, 0)) for number in numbers)] for scenario, systems in self.own]
            text += [
                f"How many passes bring a system that adapts within {CLOSE:g} point (percent of accuracy) of the best that it "
                "reaches with any number of them (systems by the least number):",
                "",
                report.markdown_table(["scenario", *map(str, numbers)], table, text_columns=1),
                "",
            ]
        headings = ["scenario", "system", "passes", "samples", f"better than {LOCAL} from"]
        return [
            *text,
            f"By system: the passes, and the samples, that bring it within {CLOSE:g} point of its own best, and the number of "
            f"samples from which on its mean stays above that of {LOCAL} with as many. Left out are systems whose new clients "
            "take the model as it is.",
            "",
            *board.folded("The table", [report.markdown_table(headings, self.enough, text_columns=2)]),
        ]


def _in_order(number: int) -> float:
    return number or np.inf


def _by_samples(tested: Sequence[Tested]) -> Scores:
    """By the number of samples that clients adapt on."""
    return _by([(one, one.samples) for one in tested if not one.option])


def _by_passes(tested: Sequence[Tested]) -> Scores:
    """By the number of passes or steps on all samples."""
    return _by([(one, one.steps) for one in tested if one.option])


def _by(numbered: Sequence[tuple[Tested, int]]) -> Scores:
    found: Scores = {}
    for one, number in numbered:
        found.setdefault(one.system, {}).setdefault(number, {})[one.seed] = one.score
    return {system: dict(sorted(some.items(), key=lambda item: _in_order(item[0]))) for system, some in found.items()}


def _means(of_numbers: Mapping[int, Mapping[int, float]], kind: report.Kind) -> dict[int, float]:
    """Means over seeds, larger ones better; without those that are not finite."""
    sign = 1 if kind.higher_is_better else -1
    means = {number: sign * float(np.mean(list(by_seed.values()))) for number, by_seed in of_numbers.items()}
    return {number: mean for number, mean in means.items() if np.isfinite(mean)}


def _row(
    scenario: str,
    number: int,
    samples: Scores,
    adapt: Sequence[str],
    plain: Sequence[str],
    kind: report.Kind,
    ends: Collection[str],
) -> list[str]:
    def best(names: Sequence[str]) -> str:
        means = {name: found[number] for name in names if number in (found := _means(samples[name], kind))}
        top = max(means, key=lambda name: means[name], default="")
        return f"{_marked(top, ends)} {kind.text(abs(means[top]))}" if means else ""

    as_it_is = samples.get("fedavg", {}).get(number, {})
    found = [_gap(name, "fedavg", samples[name][number], as_it_is, kind, ends) for name in adapt if number in samples[name]]
    alone = samples.get(LOCAL, {}).get(number, {})
    local = kind.text(float(np.mean(list(alone.values())))) if alone else ""
    counted = [*gaps.counts(found), *gaps.counts(gaps.sound(found))]
    return [scenario, str(number or "all"), best(plain), best(adapt), *map(str, counted), local]


def _gap(
    first: str, second: str, one: Mapping[int, float], other: Mapping[int, float], kind: report.Kind, ends: Collection[str]
) -> Gap | None:
    """The difference of two systems' scores by seed."""
    found = gaps.between(one, other, kind)
    return None if found is None else found._replace(sound=not {first, second} & {*ends})


def _marked(name: str, ends: Collection[str]) -> str:
    return f"{name} {gaps.END}" if name in ends else name


def _apart(found: Board, tested: Mapping[str, Sequence[Tested]]) -> str:
    """By how much means of these tests with all samples and of the rows differ at most, in words."""
    words = []
    for scenario, systems in found.items():
        kind, gap = next(iter(systems.values()))[0].kind, {}
        for name, lines in systems.items():
            scores = [one.score for one in tested.get(scenario, ()) if (one.system, one.samples, one.option) == (name, 0, "")]
            moved = abs(float(np.mean(scores)) - float(np.mean([line.new for line in lines]))) if scores else np.nan
            if np.isfinite(moved):
                gap[name] = moved
        most = max(gap, key=lambda name: gap[name], default="")
        if most and gap[most] > 0.005:
            words.append(f"{scenario} {kind.text(gap[most])} ({most})")
    return f" Means differ by at most: {'; '.join(words)}." if words else ""


def _of_tested(found: Board, tested: Mapping[str, Sequence[Tested]]) -> str:
    """The scenarios of which some systems were not tested, in words."""
    counts = {scenario: len({one.system for one in tested.get(scenario, ())} & {*found[scenario]}) for scenario in found}
    some = [
        f"{count} of {len(found[scenario])} on {scenario}"
        for scenario, count in counts.items()
        if count < len(found[scenario])
    ]
    return f" Not all systems were tested: {', '.join(some)}." if some else ""


def _rate(lines: Mapping[str, Sequence[Line]], system: str) -> str:
    """The chosen point of a system; nothing where it was not run."""
    return lines[system][0].chosen if system in lines else ""


def _fine_tuning(
    scenario: str, numbers: Sequence[int], samples: Scores, kind: report.Kind, ends: Collection[str]
) -> list[list[str]]:
    """For which numbers of samples fine-tuned FedAvg is worse or better than FedAvg."""
    verdicts: dict[str, list[str]] = {WORSE: [], OPEN: [], BETTER: []}
    for number in numbers:
        one, other = (samples.get(name, {}).get(number, {}) for name in ("fedavg_ft", "fedavg"))
        found = gaps.between(one, other, kind)
        if found is not None:
            verdicts[found.verdict].append(str(number or "all"))
    title = f"{scenario} {gaps.END}" if {"fedavg", "fedavg_ft"} & {*ends} else scenario
    return [[title, *map(", ".join, verdicts.values())]] if any(verdicts.values()) else []


def _own_best(scenario: str, passes: Scores, kind: report.Kind) -> list[tuple[str, dict[int, int]]]:
    """How many systems need how many passes."""
    least = [_first(means) for of_numbers in passes.values() if (means := _means(of_numbers, kind))]
    return [(scenario, {number: least.count(number) for number in sorted(set(least))})] if least else []


def _first(means: Mapping[int, float]) -> int:
    """The least number whose mean is near the best one."""
    return next(number for number, mean in means.items() if mean >= max(means.values()) - CLOSE)


def _enough(scenario: str, samples: Scores, passes: Scores, kind: report.Kind) -> Iterator[list[str]]:
    """A row of words for each system whose scores depend on samples or passes."""
    alone = _means(samples[LOCAL], kind) if LOCAL in samples else {}
    for system, of_numbers in samples.items():
        means = _means(of_numbers, kind)
        by_passes = _means(passes.get(system, {}), kind)
        if not means or (len(set(means.values())) == 1 and not by_passes):
            continue
        # Where either mean is not finite, the system is not better.
        both = [number for number in of_numbers if number in samples.get(LOCAL, {})]
        last = [number for number in both if not means.get(number, np.nan) > alone.get(number, np.nan)]
        above = [number for number in both if not last or _in_order(number) > _in_order(last[-1])]
        beats = "" if system == LOCAL or not alone else str(above[0] or "all") if above else "never"
        of_passes = str(_first(by_passes)) if by_passes else ""
        yield [scenario, system, of_passes, str(_first(means) or "all"), beats]
