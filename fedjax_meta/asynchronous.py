"""Asynchronous rounds in virtual time: FedBuff and FedAsync as schedules of a federation.

FedBuff: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: "Federated learning with buffered asynchronous aggregation",
AISTATS 2022, arXiv 2106.06639. FedAsync: Xie, Koyejo, Gupta: "Asynchronous federated optimization", 2019, arXiv 1903.03934.
Both kinds of updates are as in facebookresearch/FLSim, flsim/optimizers/async_aggregators.py, `AsyncAggregationType`.

Which client arrives when, and which model it started from, follows from the clients' times alone. The timetable is therefore made
before the run, and a round is one step of the server: the K clients that arrived since the last step train, each from the model
that it was given then. Past models are a part of the state, so that runs resume and are compiled as others are.
"""

import dataclasses
import heapq
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.types import Key, Rate

WEIGHTS = ("constant", "polynomial", "hinge")
"""How the weight of an update falls with its staleness."""

SAME_TIME = 1e-9
"""Part of the time up to which two clients arrive at the same time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Asynchronous:
    """A timetable: a `schedules.Schedule` that also knows how stale each update is.

    Attributes:
      cohorts: int32 `[rounds, K]`, who arrives before each step of the server, in ascending order.
      staleness: int32 `[rounds, K]`, steps of the server since these were given their model.
      times: `[rounds]`, virtual seconds at each step.
      num_clients: N, the clients whose times are known.
      most_stale: bound of the staleness; the state holds `most_stale + 1` models.
      mixes_models: whether the server moves towards the models of clients (FedAsync) or along their changes (FedBuff).
      staleness_weight, exponent, grace: s(tau), see `fedbuff`.
      name, config: for the record of a run.
    """

    cohorts: np.ndarray
    staleness: np.ndarray
    times: np.ndarray
    num_clients: int
    most_stale: int
    mixes_models: bool
    staleness_weight: str
    exponent: Rate
    grace: int
    name: str
    config: Mapping[str, Any]

    def __call__(self, key: Key, round_: Any, num_clients: int, cohort_size: int) -> jax.Array:
        """The ids of a round, int32 `[K]`; after its last row the timetable starts again."""
        del key
        if (num_clients, cohort_size) != (self.num_clients, self.cohorts.shape[1]):
            raise ValueError(
                f"{self.name} was made for N={self.num_clients} clients and a buffer of {self.cohorts.shape[1]}, but there are "
                f"N={num_clients} and cohort_size={cohort_size}"
            )
        return jnp.asarray(self.cohorts)[round_ % len(self.cohorts)]

    def lag(self, round_: Any, place: Any) -> jax.Array:
        """tau of the client at a place of the round's cohort, int32."""
        return jnp.asarray(self.staleness)[round_ % len(self.staleness), place]

    def weight(self, lag: jax.Array) -> jax.Array:
        """s(tau)."""
        if self.staleness_weight == "constant":
            return jnp.ones(jnp.shape(lag))
        if self.staleness_weight == "polynomial":
            return (1.0 + lag) ** -self.exponent
        return jnp.where(lag <= self.grace, 1.0, 1 / (self.exponent * jnp.maximum(lag - self.grace, 0) + 1.0))

    def seconds(self, round_: Any) -> jax.Array:
        """Virtual seconds at the end of a round."""
        runs, row = jnp.divmod(round_, len(self.times))
        return jnp.asarray(self.times)[row] + runs * self.times[-1]


def fedbuff(
    seconds: ArrayLike,
    *,
    rounds: int,
    buffer_size: int,
    concurrency: int,
    most_stale: int,
    staleness_weight: str = "polynomial",
    exponent: Rate = 0.5,
    grace: int = 0,
    seed: int = 0,
) -> Asynchronous:
    """FedBuff steps along the mean of s(tau) (w_then - w_i) whenever K updates came; the rate is `server_lr`.

    `concurrency` clients train at any time; when one arrives, a random idle one is given the model of that moment. A client whose
    update waits in the buffer is not idle. Clients that arrive at the same time are all handled before new work starts, so that K
    clients of equal speed are synchronous. Methods whose uploads are changes of shared parameters run in it (FedAvg, FedProx,
    FedPer, Ditto, FedMeta, ...); others are refused by name. Buffers of a model are averaged as they come.

    Args:
      seconds: `[N]`, the time that each client takes for its round, e.g. `costs.seconds_by_client(...)`.
      rounds: steps of the server in the timetable; in a longer run it starts again, as if all clients were given a model anew.
      buffer_size: K, the federation's `cohort_size`.
      concurrency: clients that train at a time, at most N.
      most_stale: the most steps that an update may lag behind; the state holds one model more than that.
      staleness_weight: s(tau): "constant" 1, "polynomial" (1 + tau)^-exponent, or "hinge": 1 up to `grace`, then
        1 / (exponent (tau - grace) + 1).
      exponent: above 0; may be traced.
      grace: steps that the hinge forgives.
      seed: of the choice of idle clients.

    Raises:
      ValueError: a value out of range, a staleness in the timetable beyond `most_stale`.

    Example:
      >>> timetable = fedbuff([1.0, 1.0, 5.0], rounds=4, buffer_size=1, concurrency=3, most_stale=8)
      >>> timetable.cohorts.ravel().tolist(), timetable.staleness.ravel().tolist(), timetable.times.tolist()
      ([0, 1, 0, 1], [0, 1, 0, 1], [1.0, 1.0, 2.0, 2.0])
    """
    checks.positive("seconds", seconds, each=True)
    times = checks.numeric("seconds", seconds)
    if times.ndim != 1 or not times.size:
        raise ValueError(f"seconds must have one time for each client, [N], not the shape {list(times.shape)}")
    checks.count("rounds", rounds)
    for word, count in (("buffer_size", buffer_size), ("concurrency", concurrency)):
        checks.count(word, count)
        if count > len(times):
            raise ValueError(f"{word}={count} is more than the N={len(times)} clients there are")
    checks.count("most_stale", most_stale, least=0)
    checks.one_of("staleness_weight", staleness_weight, WEIGHTS)
    checks.positive("exponent", exponent)
    checks.count("grace", grace, least=0)
    checks.seed("seed", seed, generator=False)
    cohorts, lags, when = _simulate(times, rounds, buffer_size, concurrency, np.random.default_rng(seed))
    if lags.max() > most_stale:
        raise ValueError(
            f"most_stale={most_stale} is too few: an update of round {int(np.argmax(lags.max(1) > most_stale)) + 1} lags "
            f"{lags[lags.max(1) > most_stale][0].max()} steps behind (the most is {lags.max()}); raise it, or lower concurrency"
        )
    shape = {"staleness_weight": staleness_weight, "exponent": exponent, "grace": grace}
    given = {"rounds": rounds, "buffer_size": buffer_size, "concurrency": concurrency, "most_stale": most_stale}
    config = {"seconds": times, **given, **shape, "seed": seed}
    return Asynchronous(
        cohorts, lags, when, len(times), most_stale, False, staleness_weight, exponent, grace, "fedbuff", config
    )


def fedasync(
    seconds: ArrayLike,
    *,
    rounds: int,
    concurrency: int,
    most_stale: int,
    staleness_weight: str = "polynomial",
    exponent: Rate = 0.5,
    grace: int = 0,
    seed: int = 0,
) -> Asynchronous:
    """FedAsync mixes in each model that arrives: w <- (1 - a s(tau)) w + a s(tau) w_i, a = `server_lr`; `cohort_size` is 1.

    Buffers, such as running statistics, are mixed with the same weights; if the server has an optimiser, with a = 1.

    Arguments and errors as in `fedbuff`. Methods whose clients send gradients in place of models are refused too.
    """
    timetable = fedbuff(
        seconds,
        rounds=rounds,
        buffer_size=1,
        concurrency=concurrency,
        most_stale=most_stale,
        staleness_weight=staleness_weight,
        exponent=exponent,
        grace=grace,
        seed=seed,
    )
    return dataclasses.replace(timetable, mixes_models=True, name="fedasync")


def _simulate(
    seconds: np.ndarray, rounds: int, buffer_size: int, concurrency: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cohorts, staleness, times) of the steps of the server."""
    under_way: list[tuple[float, int]] = []
    buffer: list[int] = []
    rows: list[tuple[np.ndarray, np.ndarray, float]] = []
    version, given = 0, np.zeros(len(seconds), int)
    idle = set(range(len(seconds)))

    def give(now: float) -> None:
        count = min(concurrency - len(under_way), len(idle))
        for client in rng.choice(sorted(idle), count, replace=False).tolist() if count else ():
            idle.remove(client)
            given[client] = version
            heapq.heappush(under_way, (now + float(seconds[client]), client))

    give(0.0)
    while len(rows) < rounds:
        now = under_way[0][0]
        arrived = []
        # Sums of times that are equal on paper differ by rounding, and differently in other units.
        while under_way and under_way[0][0] <= now * (1 + SAME_TIME):
            arrived.append(heapq.heappop(under_way)[1])
        for client in sorted(arrived):
            buffer.append(client)
            if len(buffer) == buffer_size:
                cohort = np.sort(buffer)
                rows.append((cohort, version - given[cohort], now))
                version += 1
                idle.update(buffer)
                buffer.clear()
        give(now)
    cohorts, lags, times = (np.array(part) for part in zip(*rows[:rounds], strict=True))
    return cohorts.astype(np.int32), lags.astype(np.int32), times
