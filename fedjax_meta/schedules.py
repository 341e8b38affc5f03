"""Who takes part in which round.

A schedule is a pure function `(key, round, num_clients, cohort_size) -> ids`, int32 `[C]`, distinct but for -1, which marks an
empty slot; an option of every federation.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.asynchronous import Asynchronous, fedasync, fedbuff
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.types import Key

__all__ = [
    "Asynchronous",
    "Passes",
    "Poisson",
    "Schedule",
    "fedasync",
    "fedbuff",
    "given",
    "passes",
    "poisson",
    "poisson_capacity",
    "uniform",
]

Schedule = Callable[[Key, Any, int, int], jax.Array]
"""`(key, round, N, C) -> clients [C]`: positions of a cohort's clients in the data, which are ids unless some were selected."""


def uniform(key: Key, round_: Any, num_clients: int, cohort_size: int) -> jax.Array:
    """C distinct clients, uniformly at random, anew in each round; the cost does not depend on N. The key is consumed.

    Raises:
      ValueError: a cohort larger than the population.
    """
    del round_
    checks.count("cohort_size", cohort_size)
    checks.count("num_clients", num_clients)
    if cohort_size > num_clients:
        raise ValueError(
            f"cohort_size={cohort_size} is more than the N={num_clients} clients there are; Federation(cohort_size=...) sets it"
        )
    if cohort_size == num_clients:
        return jnp.arange(num_clients, dtype=jnp.int32)
    return permute(permutation_keys(key), jnp.arange(cohort_size, dtype=jnp.int32), num_clients)


def given(cohorts: Any) -> Schedule:
    """Cohorts from a table, one row per round, repeated from the start. Replays another program's cohorts.

    Clients are positions in the data, as in every schedule; of a run, `RoundInfo.positions` are these.

    Args:
      cohorts: int `[rounds, C]`, distinct in each row.

    Raises:
      ValueError: no table of integers, a client twice in a row; when run, another cohort size or an id beyond N.
    """
    table = checks.numeric("cohorts", cohorts)
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or not table.size:
        raise ValueError(f"cohorts must be integers [rounds, C], not {table.dtype}{list(table.shape)}")
    twice = [row for row, ids in enumerate(table) if len(set(ids.tolist())) < len(ids)]
    if twice:
        raise ValueError(f"cohorts names a client twice in row {twice[0]}")

    return partial(_given, table)


def _given(table: np.ndarray, key: Key, round_: Any, num_clients: int, cohort_size: int) -> jax.Array:
    del key
    if table.shape[1] != cohort_size:
        raise ValueError(f"cohorts has rows of {table.shape[1]} clients, but cohort_size={cohort_size}")
    checks.indices("cohorts", table, num_clients)
    return jnp.asarray(table, jnp.int32)[round_ % table.shape[0]]


@dataclasses.dataclass(frozen=True)
class Passes:
    """Shuffled passes over all clients, see `passes`.

    Attributes:
      seed: of the orders.
    """

    seed: int
    name = "passes"

    @property
    def config(self) -> Mapping[str, Any]:
        """The seed."""
        return {"seed": self.seed}

    def __call__(self, key: Key, round_: Any, num_clients: int, cohort_size: int) -> jax.Array:
        """The next C clients of this pass, in a new order for each pass."""
        del key
        checks.count("cohort_size", cohort_size)
        if cohort_size > num_clients:
            raise ValueError(f"cohort_size={cohort_size} is more than the N={num_clients} clients there are")
        number, place = jnp.divmod(round_, num_clients // cohort_size)
        order = permutation_keys(jax.random.fold_in(jax.random.key(self.seed), number))
        return permute(order, place * cohort_size + jnp.arange(cohort_size, dtype=jnp.int32), num_clients)


def passes(seed: int = 0) -> Passes:
    """Passes over the clients in random order: nobody takes part twice within floor(N / C) rounds, counted from round 0.

    Those N mod C clients that are last in an order sit out that pass. With `uploads.noise(z, tree=T)`, T being a divisor of
    floor(N / C), each client takes part once in a tree at most.

    Args:
      seed: of the orders.

    Raises:
      ValueError: a seed out of range; when run, a cohort larger than the population.
    """
    checks.seed("seed", seed, bits=32)
    return Passes(int(seed))


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Poisson sampling, see `poisson`.

    Attributes:
      rate: q.
    """

    rate: float
    name = "poisson"

    @property
    def config(self) -> Mapping[str, Any]:
        """The rate."""
        return {"rate": self.rate}

    def expected(self, num_clients: int) -> float:
        """The expected size of a cohort, q N: what a private sum is divided by."""
        return self.rate * num_clients

    def __call__(self, key: Key, round_: Any, num_clients: int, cohort_size: int) -> jax.Array:
        """The ids of the drawn clients in ascending order, then -1."""
        del round_
        self._check(num_clients, cohort_size)
        draws = self._draws(key, num_clients)
        # The smallest numbers: with more clients than slots, each of them is as likely to be left out.
        smallest, ids = jax.lax.top_k(~draws, cohort_size)
        ids = jnp.sort(jnp.where(self._drawn(~smallest), ids, num_clients))
        return jnp.where(ids < num_clients, ids, -1).astype(jnp.int32)

    def left_out(self, key: Key, num_clients: int, cohort_size: int) -> jax.Array:
        """How many clients were drawn that found no slot, int32; the key as in a call."""
        drawn = jnp.sum(self._drawn(self._draws(key, num_clients)), dtype=jnp.int32)
        return jnp.maximum(drawn - cohort_size, 0)

    def _draws(self, key: Key, num_clients: int) -> jax.Array:
        return jax.random.bits(key, (num_clients,), jnp.uint32)

    def _drawn(self, draws: jax.Array) -> jax.Array:
        # Rounded down: a rate that is 2^-32 smaller costs no privacy.
        threshold = math.floor(self.rate * 2.0**32)
        return draws < np.uint32(threshold) if threshold < 2**32 else jnp.ones(draws.shape, bool)

    def _check(self, num_clients: int, cohort_size: int) -> None:
        checks.count("cohort_size", cohort_size)
        if cohort_size > num_clients:
            raise ValueError(f"cohort_size={cohort_size} is more than the N={num_clients} clients there are")
        if cohort_size < self.expected(num_clients):
            raise ValueError(
                f"cohort_size={cohort_size} has fewer slots than the {self.expected(num_clients):.6g} clients that Poisson "
                f"sampling with rate={self.rate} draws on average: see schedules.poisson_capacity"
            )


def poisson(rate: float) -> Poisson:
    """Each client takes part with probability q, independently of others and of other rounds: what accountants call Poisson.

    The federation's `cohort_size` is the capacity C, a static number of slots; those that stay empty hold the id -1, and what
    they compute is masked. If more than C clients are drawn, C of them, uniformly, take part, and the others are left out and
    counted as `left_out` in the metrics of the round. `privacy.Poisson` adds the probability of that to delta, and
    `poisson_capacity` finds a C for which it is small. With `uploads.noise` the sum is divided by q N.

    Args:
      rate: q, in (0, 1]; a Python number.

    Raises:
      ValueError: `rate` out of range; when run, fewer slots than q N or more than N.
    """
    checks.positive("rate", rate)
    checks.share("rate", rate)
    return Poisson(float(rate))


def poisson_capacity(rate: float, num_clients: int, rounds: int, overflow: float) -> int:
    """The smallest capacity C that Poisson sampling exceeds in any of the rounds with a probability of at most `overflow`.

    It is `rounds * P[Binomial(N - 1, q) >= C]`, the tail that `privacy.Poisson` adds to delta.

    Args:
      rate, num_clients, rounds: q, N, R.
      overflow: in (0, 1), e.g. a thousandth of delta.

    Raises:
      ValueError: a value out of range.

    Example:
      >>> poisson_capacity(0.1, 1000, 300, 1e-9)
      172
    """
    poisson(rate)
    checks.count("num_clients", num_clients)
    checks.count("rounds", rounds)
    checks.fraction("overflow", overflow)
    from scipy import special

    sizes = np.arange(1, num_clients)
    tails = rounds * special.bdtrc(sizes - 1, num_clients - 1, rate)
    enough = sizes[(tails <= overflow) & (sizes >= rate * num_clients)]
    return int(enough[0]) if enough.size else num_clients
