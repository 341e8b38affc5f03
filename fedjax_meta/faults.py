"""What was not finite in a round, in words: which clients, which leaf, which round."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_meta.algorithm import Algorithm
from fedjax_meta.blocks import Log
from fedjax_meta.data import FederatedData

_log = logging.getLogger("fedjax_meta")

_MOST_WARNINGS = 3
"""Faults that are logged one by one for each stretch of rounds."""


class Fault(NamedTuple):
    """Something that was not finite in a round.

    Attributes:
      round: its number, the first round is 1.
      what: "clients left out", "server not finite" or "loss not finite".
      clients: ids of the clients that it concerns.
      leaf: where: the path of the first leaf that was not finite, or the name of the metric.
      diverged: whether the round counts as diverged, see `algorithm.Faults`.
    """

    round: int
    what: str
    clients: tuple[int, ...]
    leaf: str
    diverged: bool

    def __str__(self) -> str:
        who = f" ({', '.join(map(str, self.clients[:5]))}{', ...' if len(self.clients) > 5 else ''})" if self.clients else ""
        leaf = self.leaf if "finite" in self.what else f"{self.leaf} is not finite"
        return f"round {self.round}: {self.what}{who}: {leaf}{', diverged' if self.diverged else ''}"


LeafNames = Callable[[], tuple[Sequence[str], Sequence[str]]]
"""`() -> (names of a client's leaves, names of the server's leaves)`."""


def leaf_names(algorithm: Algorithm, data: FederatedData) -> LeafNames:
    """What `faults_in` calls the leaves; found out when it is first asked, because training is traced for it."""
    return functools.cache(lambda: ([], []) if algorithm.checked is None else algorithm.checked(data))


def faults_in(log: Log, done: int, leaves: LeafNames, *, run: str = "") -> list[Fault]:
    """The faults of a few rounds, the first of which is round `done + 1`; they are also logged, with the name of the run.

    Args:
      log, done: the rounds.
      leaves: see `leaf_names`.
      run: its name.
    """
    prefix = f"{run}: " if run else ""
    found: list[Fault] = []
    empty = np.zeros(len(log.some), bool)
    clients, server, diverged = (None, None, empty) if log.faults is None else log.faults
    if clients is not None and server is not None and ((clients >= 0).any() or (server >= 0).any()):
        names = leaves()
        for r in np.flatnonzero((clients >= 0).any(1) | (server >= 0)):
            for leaf in np.unique(clients[r][clients[r] >= 0]):
                who = tuple(sorted(log.ids[r][clients[r] == leaf].tolist()))
                found.append(Fault(done + int(r) + 1, "clients left out", who, names[0][int(leaf)], bool(diverged[r])))
            if server[r] >= 0:
                found.append(Fault(done + int(r) + 1, "server not finite", (), names[1][server[r]], True))
    for name, values in log.metrics.items():
        if "loss" in name:
            odd = np.flatnonzero(log.some & ~np.isfinite(values))
            found += [Fault(done + int(r) + 1, "loss not finite", (), name, bool(diverged[r])) for r in odd]
    found.sort(key=lambda fault: fault.round)
    for fault in found[:_MOST_WARNINGS]:
        _log.warning("%s%s", prefix, fault)
    if len(found) > _MOST_WARNINGS:
        _log.warning("%sand %d more until round %d", prefix, len(found) - _MOST_WARNINGS, done + len(log.some))
    return found
