"""Counts the FLOPs of a client in a round for committed rows."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from experiments.leaderboard import board
from experiments.leaderboard.board import Line
from experiments.reproduce.run_list import Run
from fedjax_meta import sweeps
from fedjax_meta.study import flops
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.system import System


def count(run: Run, data_dir: str | None = None) -> None:
    """Counts the FLOPs of each committed row of a run that has none, and writes them to docs/leaderboard/.

    A row says what is needed: the study, the point that was chosen, and the seed. It is the mean over all rounds, because some
    methods do other work once they know a client, or in some rounds alone. Only methods whose numbers of steps follow from
    parameters are trained for it.
    """
    study, built = run.load(), {}

    def lack(rows: Sequence[Line]) -> bool:
        return math.isnan(rows[0].flops) and not study.systems[rows[0].system].pooled

    for first, *_ in board.rows_that_lack(run, study, lack):
        scenario = first.scenario
        if scenario not in built:
            built[scenario] = study.scenarios[scenario].build(data_dir)
        found = _of_row(first, study.system(first.system, scenario), built[scenario])
        board.rewrite(first, flops=found)
        print(f"{scenario}, {first.system}: {found / 1e6:.4g} MFLOP of a client in a round", flush=True)


def _of_row(row: Line, system: System, clients: Clients) -> float:
    algorithm = sweeps.alone(*system.parts(clients, **board.chosen(row, system)))  # on one device
    cohort = len(np.asarray(algorithm.cohort(jax.random.key(0), 0, clients.train.num_clients)))
    return float(np.mean(flops.of_rounds(algorithm, clients.train, row.rounds, row.seed))) / cohort
