"""How a point of a grid is chosen: on samples or clients that were held back, with halving, and with grids that move on."""

import dataclasses
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from fedjax_meta import report, sweeps
from fedjax_meta.data import FederatedData, holdout
from fedjax_meta.federation import Federation
from fedjax_meta.study import lookup
from fedjax_meta.study.parts import option_at
from fedjax_meta.study.scenario import Clients, Scenario
from fedjax_meta.study.study import Study, Tuning
from fedjax_meta.study.system import System

Json = Any

KNOWN, NEW = "known", "new"
VALIDATION, VALIDATION_CLIENTS = "validation", "validation clients"
"""Groups of tests: held-back samples of clients that train, and clients that were held out."""

Point = dict[str, float]


class Trial(NamedTuple):
    """One member of a finished sweep.

    Attributes:
      numbers: its hyper-parameters.
      seed: of the run.
      rows: its evaluations, see `report.compact`; they end early where halving, divergence or a goal stopped it.
      diverged: the round from which on it counts as diverged, see `report.diverged`; `None` if it does not.
    """

    numbers: dict[str, float]
    seed: int
    rows: list[dict[str, Json]]
    diverged: int | None


def last_scores(trial: Trial, test: Mapping[str, Any], score: str | None) -> np.ndarray:
    """A score of each client in a test of a trial; NaN if the trial diverged, whatever the model that was left scores."""
    values = report.main_score(test, score).values
    return values if trial.diverged is None else np.full_like(values, np.nan)


def without_loss(trials: Sequence[Trial]) -> str:
    """How many known clients had no finite loss at the end of diverged trials, in words; empty where training is to blame."""
    last = [trial.rows[-1] for trial in trials if trial.diverged is not None]
    return report.without_loss_words([report.without_loss(row, KNOWN) for row in last], KNOWN)


def points_of(system: System) -> list[Point]:
    """Every point of a system's grid; one without numbers if it has none.

    Raises:
      ValueError: a fraction where the option is a whole number.
    """
    whole = _of_type(system, int)
    values = {name: [_number(name, value, name in whole) for value in some] for name, some in system.grid.items()}
    return sweeps.grid(**values)


def shaping(system: System) -> tuple[str, ...]:
    """The names of a grid that decide what a program is: whole numbers (epochs, batch sizes) and shares that decide counts.

    Points that differ in them are separate programs. They are the options that a builder annotates as `int` or `float`; numbers
    that may be traced are `Rate`.
    """
    return _of_type(system, int, float)


def _of_type(system: System, *types: type) -> tuple[str, ...]:
    own = inspect.signature(lookup.method(system.method)).parameters
    kinds = {field.name: field.type for field in dataclasses.fields(Federation)}
    given = {name: option_at(system.federation, name) if "." in name else own.get(name) for name in system.grid}
    kinds |= {name: _kind(option, system.grid[name]) for name, option in given.items() if option is not None}
    several = {name: (kinds.get(name), *get_args(kinds.get(name))) for name in system.grid}
    # What may be an array, e.g. the options of Optax's optimisers, may be traced.
    return tuple(name for name, some in several.items() if jax.Array not in some and any(one in types for one in some))


def _kind(option: inspect.Parameter, values: Sequence[float]) -> Any:
    """What an option is annotated as. A user's own builder may not say it: whole numbers in place of one are taken for such."""
    if option.annotation is not option.empty and not isinstance(option.annotation, str):
        return option.annotation
    return int if type(option.default) is int and all(value == int(value) for value in values) else option.empty


def _number(name: str, value: float, whole: bool) -> float:
    if whole and value != int(value):
        raise ValueError(f"grid of {name} must hold whole numbers, not {value:g}")
    return int(value) if whole else float(value)


def data_for(tuning: Tuning, scenario: Scenario, clients: Clients) -> tuple[FederatedData, FederatedData | None]:
    """The clients that train in the trials, and those that are held out; `None` if there are none.

    Test samples take no part: a client that is held out adapts and is tested on its train samples.

    Raises:
      ValueError: a share that holds out nobody, or everybody.
    """
    if tuning.validation == "samples":
        return clients.tuning, None
    rest, held = holdout.new_clients(clients.tuning, tuning.clients, support=scenario.support, seed=scenario.seed)
    if held is None:
        raise ValueError(f"tuning.clients={tuning.clients} of {clients.tuning.num_clients} known clients holds out nobody")
    return rest, held


def noisy_in(tuning: Tuning, scenario: Scenario, clients: Clients) -> tuple[np.ndarray, np.ndarray]:
    """Positions of noisy clients among those that train in trials where some are held out, and among those that are held out."""
    held, rest = holdout.held_out(clients.tuning.num_clients, tuning.clients, scenario.seed)
    return np.flatnonzero(np.isin(rest, clients.noisy)), np.flatnonzero(np.isin(held, clients.noisy))


_GROUPS = {"samples": (VALIDATION,), "clients": (VALIDATION_CLIENTS,), "both": (VALIDATION, VALIDATION_CLIENTS)}


class Judged(NamedTuple):
    """A point of a grid and how good it was.

    Attributes:
      point: its numbers.
      score: mean over seeds, in percent if it is a share; NaN where one of them was not finite.
      kind: what the score is.
    """

    point: Point
    score: float
    kind: report.Kind


def score(row: Mapping[str, Json], tuning: Tuning) -> tuple[float, report.Kind]:
    """The score of an evaluation by which points are compared, in percent if it is a share, and what it is.

    The score is NaN where the run counts as diverged there, see `report.mean_score`.

    Args:
      row: of the evaluation, see `report.compact`.
      tuning: how, see `Study.tuned_by`.

    Raises:
      ValueError: it was not measured.
    """
    name = tuning.metric
    base = None if name is None else name.removesuffix("_mean")
    overall = name is not None and not name.endswith("_mean")
    groups = _GROUPS[tuning.validation]
    means = [report.mean_score(row, group, base, test=VALIDATION, overall=overall) for group in groups]
    return float(np.mean(means)), report.main_score(row["tests"][groups[0]], base).kind


def scores(trials: Sequence[Trial], tuning: Tuning) -> list[Judged]:
    """Every point that was trained to the end, or that diverged, whose score is NaN, in the order of the trials."""
    last = max(trial.rows[-1]["round"] for trial in trials)
    found: dict[tuple[tuple[str, float], ...], list[float]] = {}
    kind = score(trials[0].rows[-1], tuning)[1]
    for trial in trials:
        ended = trial.rows[-1]["round"] < last
        if not ended or trial.diverged is not None:
            # The model that a diverged run was left with may score well; its point counts as the worst all the same.
            value = float("nan") if trial.diverged is not None else score(trial.rows[-1], tuning)[0]
            found.setdefault(tuple(trial.numbers.items()), []).append(value)
    return [Judged(dict(point), float(np.mean(values)), kind) for point, values in found.items()]


def best(trials: Sequence[Trial], tuning: Tuning) -> Judged:
    """The point with the best mean score over the seeds, after the last round; a diverged trial counts as the worst."""
    judged = scores(trials, tuning)
    if all(math.isnan(one.score) for one in judged) and any(trial.diverged is None for trial in trials):
        warnings.warn(
            f"{judged[0].kind.name} is no number for some client at every point, so that no point is better than another: the "
            "first is taken; tune by another metric, tuning.metric=...",
            stacklevel=2,
        )
    return judged[judged[0].kind.best([one.score for one in judged])]


def rungs(points: int, rounds: int, halving: int | None) -> dict[int, int]:
    """After which rounds of a trial how many points go on; between 2 and `halving` points are trained to the end.

    Example:
      >>> rungs(8, 40, 2), rungs(4, 10, 2), rungs(3, 10, None)
      ({10: 4, 20: 2}, {5: 2}, {})
    """
    if halving is None or points <= 2:
        return {}
    steps = math.ceil(math.log(points, halving) - 1e-9) - 1
    found: dict[int, int] = {}
    for step in range(steps):
        points = max(2, math.ceil(points / halving))
        found[max(1, rounds // halving ** (steps - step))] = points
    return {number: left for number, left in found.items() if number < rounds}


def rounds_of_trials(points: int, study: Study) -> int:
    """The rounds of all trials of a grid of `points` that does not move on; 0 for a single point, which is not tried.

    Points that halving ends early have the rounds up to there.
    """
    if points < 2:
        return 0
    rounds = study.tuning.rounds or study.rounds
    ends, left, total, done = [*rungs(points, rounds, study.tuning.halving).items(), (rounds, 0)], points, 0, 0
    for end, after in ends:
        total, left, done = total + left * (end - done), after, end
    return total * len(study.tuning.seeds)


def goes_on(points: Sequence[Point | None], values: Sequence[float], most: int, kind: report.Kind) -> list[bool]:
    """Which members go on: those of the `most` points with the best mean score; earlier points win ties.

    Args:
      points: of each member; `None` for those that have ended.
      values: the score of each member.
      most: how many points go on.
      kind: what the score is.
    """
    found: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for point, value in zip(points, values, strict=True):
        if point is not None:
            found.setdefault(tuple(point.items()), []).append(value)
    left = {point: float(np.mean(some)) for point, some in found.items()}
    kept: list[tuple[tuple[str, float], ...]] = []
    while left and len(kept) < most:
        names = list(left)
        kept.append(names[kind.best(list(left.values()))])
        del left[kept[-1]]
    return [point is not None and tuple(point.items()) in kept for point in points]


def told_apart(trials: Sequence[Trial], tuning: Tuning) -> bool:
    """Whether the points of a grid differ in their score; those of local training do not on clients that were held out.

    Points that halving ended early are compared with those that were trained as far. All that diverged score the same.
    """
    for end in {trial.rows[-1]["round"] for trial in trials}:
        judged = scores([then for trial in trials if (then := _up_to(trial, end)).rows], tuning)
        if len({one.score if math.isfinite(one.score) else None for one in judged}) > 1:
            return True
    return False


EXPLODED = 10
"""Tables flag a validation loss above this multiple of the smallest loss at the first evaluation."""


def exploded(trials: Sequence[Trial], chosen: Point, tuning: Tuning) -> float | None:
    """The validation loss of a point that was chosen by another score, if it has grown beyond all measure, see `EXPLODED`.

    Args:
      trials: of a grid.
      chosen: the point that was chosen.
      tuning: how, see `Study.tuned_by`.
    """
    (group, *_), losses, first = _GROUPS[tuning.validation], [], math.inf
    for trial in trials:
        ends = [trial.rows[row]["tests"][group]["scores"].get("loss", math.nan) for row in (0, -1)]
        first = min(first, ends[0]) if math.isfinite(ends[0]) else first
        losses += ends[1:] if trial.numbers == chosen and trial.diverged is None else []
    most = max(losses, default=math.nan)
    return most if most > EXPLODED * first > 0 else None


def _up_to(trial: Trial, done: int) -> Trial:
    """A trial as it was after `done` rounds."""
    rows = [row for row in trial.rows if row["round"] <= done]
    return trial if len(rows) == len(trial.rows) else trial._replace(rows=rows, diverged=report.diverged(rows, VALIDATION))


def at_edge(points: Sequence[Point], chosen: Point) -> list[str]:
    """Names of the numbers that have several values, of which the chosen one is the least or the largest."""
    values = {name: {point[name] for point in points} for name in chosen}
    return [name for name, some in values.items() if len(some) > 1 and chosen[name] in (min(some), max(some))]


def next_points(points: Sequence[Point], chosen: Point, system: System, clients: Clients) -> list[Point]:
    """The points that extend a grid whose chosen value is at its end; none where it cannot be extended.

    The next value of a number follows by the ratio of the two values at that end. There is none from 0, where the signs differ,
    or if the method refuses it.
    """
    made: list[Point] = []
    for name in at_edge(points, chosen):
        values = sorted({point[name] for point in points})
        end, before = (values[-1], values[-2]) if chosen[name] == values[-1] else (values[0], values[1])
        if end * before <= 0:
            continue
        value = float(f"{end * (end / before):.3g}")
        value = round(value) if name in _of_type(system, int) else value
        others = {tuple(point.items()): point for point in ({**point, name: value} for point in [*points, *made])}
        fresh = [point for point in others.values() if point not in points and point not in made]
        try:
            for point in fresh:
                system.build(clients, **point)
        except ValueError:
            continue
        made += fresh
    return made


def words(study: Study, main: Sequence[str]) -> str:
    """A few sentences on how the grids of a study were searched; empty if there are none.

    Args:
      study: what was run.
      main: the main scores of its scenarios.
    """
    sizes = {name: len(points_of(system)) for name, system in study.systems.items()}
    if max(sizes.values()) == 1:
        return ""
    tuning = study.tuning
    where = {
        "samples": "train samples that were held back",
        "clients": f"known clients that were held out ({tuning.clients:g} of them)",
        "both": f"train samples that were held back and on known clients that were held out ({tuning.clients:g} of them)",
    }
    metric, rounds = study.tuned_by.metric, tuning.rounds or study.rounds
    if metric is None or metric.endswith("_mean"):
        names = main if metric is None else [metric.removesuffix("_mean")]
        by = f"{' and '.join(dict.fromkeys(name.replace('_', ' ') for name in names))} (mean over clients)"
    else:
        by = f"{metric.replace('_', ' ')} ({'over all samples' if metric == 'accuracy' else 'mean over clients'})"
    text = f"Grids were searched by {by} on {where[tuning.validation]}, after {rounds} round{'s' * (rounds != 1)}."
    if tuning.halving:
        text += f" Of a grid, the best 1/{tuning.halving} went on at each step."
    if tuning.extend:
        times = f"{tuning.extend} time{'' if tuning.extend == 1 else 's'}"
        text += f" A grid whose best value was at its end was extended, up to {times}."
    tuned = {name: size for name, size in sizes.items() if size > 1}
    if len(set(tuned.values())) > 1:
        text += (
            " The grids differ in size: "
            + "; ".join(f"{study.title_of(name)}: {size} points" for name, size in tuned.items())
            + "."
        )
    return text
