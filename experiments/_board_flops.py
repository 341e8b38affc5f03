"""FLOPs of a client in a round, counted for committed rows while their first seed is trained once more."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from experiments import _board as board
from experiments import _standing as standing
from experiments._board import Line
from fedjax_meta import checkpoint, sweeps
from fedjax_meta.study import estimate
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.system import System


def count(run: standing.Run, data_dir: str | None = None) -> None:
    """Counts the FLOPs of each committed row of a run that has none, and writes them to docs/leaderboard/.

    A row says what is needed: the study, the point that was chosen, and the seed. It is the mean over all rounds, because some
    methods do other work once they know a client, or in some rounds alone.
    """
    study, built = run.load(), {}

    def lack(rows: Sequence[Line]) -> bool:
        return math.isnan(rows[0].flops) and not study.systems[rows[0].system].pooled

    for first, *_ in board.rows_that_lack(run, study, lack):
        scenario = first.scenario
        if scenario not in built:
            built[scenario] = study.scenarios[scenario].build(data_dir)
        flops = _of_row(first, study.system(first.system, scenario), built[scenario])
        lines = board.read_lines()[scenario]
        lines = [
            line._replace(flops=flops) if line.run == run.name and line.system == first.system else line for line in lines
        ]
        checkpoint.write_text(board.RAW / f"{scenario}.csv", board.to_csv(lines))
        print(f"{scenario}, {first.system}: {flops / 1e6:.4g} MFLOP of a client in a round", flush=True)


def _of_row(row: Line, system: System, clients: Clients) -> float:
    algorithm = sweeps.alone(*system.parts(clients, **chosen(row, system)))  # on one device
    cohort = len(np.asarray(algorithm.cohort(jax.random.key(0), 0, clients.train.num_clients)))
    return float(np.mean(estimate.flops_of_rounds(algorithm, clients.train, row.rounds, row.seed))) / cohort


def chosen(row: Line, system: System) -> dict[str, Any]:
    """The point of a grid that a row says, in the types of the grid."""
    words = [word.split("=") for word in row.chosen.split()]
    return {name: type(system.grid[name][0])(float(value)) for name, value in words}


def kept(fresh: Iterable[Line], committed: Sequence[Line]) -> list[Line]:
    """Fresh lines with the FLOPs of committed ones of the same code, study and point."""
    known = {_same(line): line.flops for line in committed}
    return [line._replace(flops=known.get(_same(line), math.nan)) for line in fresh]


def _same(line: Line) -> tuple[str, ...]:
    return (line.run, line.system, line.chosen, line.made, line.said)
