"""How a point of a grid is chosen: on samples or clients that were held back, with halving, and with grids that move on."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import sweeps
from fedjax_meta.data import FederatedData, holdout
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
      rows: its evaluations, see `report.compact`; they end early where halving stopped it.
      diverged: the round from which on it counts as diverged, see `report.diverged`; `None` if it does not.
    """

    numbers: dict[str, float]
    seed: int
    rows: list[dict[str, Json]]
    diverged: int | None


def points_of(system: System) -> list[Point]:
    """Every point of a system's grid; one without numbers if it has none."""
    return sweeps.grid(**{name: [float(value) for value in values] for name, values in system.grid.items()})


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


def score(row: Mapping[str, Json], tuning: Tuning) -> float:
    """The score of an evaluation by which points are compared; -1, less than any, where it is not finite."""
    groups = {"samples": (VALIDATION,), "clients": (VALIDATION_CLIENTS,), "both": (VALIDATION, VALIDATION_CLIENTS)}
    value = float(np.mean([row["tests"][group]["scores"][tuning.metric] for group in groups[tuning.validation]]))
    return value if math.isfinite(value) else -1.0


def scores(trials: Sequence[Trial], tuning: Tuning) -> list[tuple[Point, float]]:
    """The mean score over seeds of every point that was trained to the end, in the order of the trials."""
    last = max(trial.rows[-1]["round"] for trial in trials)
    found: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for trial in trials:
        if trial.rows[-1]["round"] == last:
            found.setdefault(tuple(trial.numbers.items()), []).append(score(trial.rows[-1], tuning))
    return [(dict(point), float(np.mean(values))) for point, values in found.items()]


def best(trials: Sequence[Trial], tuning: Tuning) -> Point:
    """The point with the highest mean score over the seeds, after the last round; a diverged trial counts as the worst."""
    return max(scores(trials, tuning), key=lambda found: found[1])[0]


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


def goes_on(points: Sequence[Point | None], values: Sequence[float], most: int) -> list[bool]:
    """Which members go on: those of the `most` points with the highest mean score; earlier points win ties.

    Args:
      points: of each member; `None` for those that have ended.
      values: the score of each member.
      most: how many points go on.
    """
    found: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for point, value in zip(points, values, strict=True):
        if point is not None:
            found.setdefault(tuple(point.items()), []).append(value)
    kept = sorted(found, key=lambda point: -float(np.mean(found[point])))[:most]
    return [point is not None and tuple(point.items()) in kept for point in points]


def at_edge(points: Sequence[Point], chosen: Point) -> list[str]:
    """Names of the numbers that have several values, of which the chosen one is the least or the largest."""
    values = {name: {point[name] for point in points} for name in chosen}
    return [name for name, some in values.items() if len(some) > 1 and chosen[name] in (min(some), max(some))]


def next_points(points: Sequence[Point], chosen: Point, system: System, clients: Clients) -> list[Point]:
    """The points with which a grid moves on where the chosen value is at its end; none where it cannot.

    A number moves on by the ratio of the two values at that end. It cannot from 0, where the signs differ, or to a value that the
    method refuses.
    """
    made: list[Point] = []
    for name in at_edge(points, chosen):
        values = sorted({point[name] for point in points})
        end, before = (values[-1], values[-2]) if chosen[name] == values[-1] else (values[0], values[1])
        if end * before <= 0:
            continue
        value = float(f"{end * (end / before):.3g}")
        others = {tuple(point.items()): point for point in ({**point, name: value} for point in [*points, *made])}
        fresh = [point for point in others.values() if point not in points and point not in made]
        try:
            for point in fresh:
                system.build(clients, **point)
        except ValueError:
            continue
        made += fresh
    return made


def words(study: Study) -> str:
    """One or two sentences on how the grids of a study were searched; empty if there are none."""
    sizes = {name: len(points_of(system)) for name, system in study.systems.items()}
    if max(sizes.values()) == 1:
        return ""
    tuning = study.tuning
    where = {
        "samples": "train samples that were held back",
        "clients": f"known clients that were held out ({tuning.clients:g} of them)",
        "both": f"train samples that were held back and on known clients that were held out ({tuning.clients:g} of them)",
    }
    text = (
        f"Grids were searched by {tuning.metric} on {where[tuning.validation]}, after {tuning.rounds or study.rounds} rounds."
    )
    if tuning.halving:
        text += f" Of a grid, the best 1/{tuning.halving} went on at each step."
    if tuning.extend:
        text += f" A grid whose best value was at its end moved on, up to {tuning.extend} times."
    tuned = {name: size for name, size in sizes.items() if size > 1}
    if len(set(tuned.values())) > 1:
        text += (
            " The grids differ in size: " + ", ".join(f"{study.title_of(name)} {size}" for name, size in tuned.items()) + "."
        )
    return text
