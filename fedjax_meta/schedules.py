"""Who takes part in which round.

A schedule is a pure function `(key, round, num_clients, cohort_size) -> ids`, int32 `[C]`, distinct; an option of every
federation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.types import Key

Schedule = Callable[[Key, Any, int, int], jax.Array]


def uniform(key: Key, round_: Any, num_clients: int, cohort_size: int) -> jax.Array:
    """C distinct clients, uniformly at random, anew in each round; the cost does not depend on N. The key is consumed.

    Raises:
      ValueError: a cohort larger than the population.
    """
    del round_
    checks.count("cohort_size", cohort_size)
    checks.count("num_clients", num_clients)
    if cohort_size > num_clients:
        raise ValueError(f"cohort_size={cohort_size} is more than the N={num_clients} clients there are")
    if cohort_size == num_clients:
        return jnp.arange(num_clients, dtype=jnp.int32)
    return permute(permutation_keys(key), jnp.arange(cohort_size, dtype=jnp.int32), num_clients)


def given(cohorts: Any) -> Schedule:
    """The cohorts of a table, round after round, and from its start again after its last row: replays the draws of another code.

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
