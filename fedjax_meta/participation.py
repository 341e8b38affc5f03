"""Clients of a round that do part of their work, return late or crash.

A rule is a pure function `(key, client id) -> Participation`, an option of every federation. Weights are renormalised over the
clients that return, because the server takes the mean of the uploads that reach it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.types import Key, Rate, Scalar


class Participation(NamedTuple):
    """How ONE client takes part in a round; every entry may be traced.

    Attributes:
      work: share of its training steps that the client does, in [0, 1], rounded up to whole steps; with 0 it does not take
        part. Methods with a fixed number of meta-steps in a round (Per-FedAvg) do all of these.
      returned: whether its upload reaches the server in time. A late client keeps its personal leaves and memory as trained.
      crashed: whether it fails: nothing reaches the server, and its personal leaves and memory stay as they were.
    """

    work: Scalar = 1.0
    returned: Scalar = True
    crashed: Scalar = False


Rule = Callable[[Key, jax.Array], Participation]
"""`(key, client id) -> Participation`; the key belongs to the round and the client."""


def unreliable(*, late: Rate = 0.0, crashed: Rate = 0.0) -> Rule:
    """Clients crash or are late at random, independently of each other and of earlier rounds.

    Args:
      late: the probability that a client that does not crash is late, in [0, 1].
      crashed: the probability that a client crashes, in [0, 1].

    Raises:
      ValueError: a probability outside [0, 1].
    """
    for name, value in (("late", late), ("crashed", crashed)):
        checks.share(name, value)

    return functools.partial(_unreliable, late=late, crashed=crashed)


def _unreliable(key: Key, client: jax.Array, *, late: Rate, crashed: Rate) -> Participation:
    del client
    fails, misses = jax.random.uniform(key, (2,)) < jnp.array([crashed, late])
    return Participation(returned=jnp.logical_not(misses), crashed=fails)


def stragglers(share: Rate, *, epochs: int) -> Rule:
    """FedProx's stragglers: some clients do only 1 to E-1 of their E epochs, each number equally likely.

    They return the result of those epochs (Li et al., arXiv 1812.06127). The paper makes an exact share of the cohort
    stragglers; here each client is one with probability `share`.

    Args:
      share: the probability that a client is a straggler, in [0, 1].
      epochs: E, at least 2, as the method was given.

    Raises:
      ValueError: `share` outside [0, 1], or `epochs` below 2.
    """
    checks.share("share", share)
    checks.count("epochs", epochs, least=2)

    return functools.partial(_stragglers, share=share, epochs=epochs)


def _stragglers(key: Key, client: jax.Array, *, share: Rate, epochs: int) -> Participation:
    del client
    slow_key, amount_key = jax.random.split(key)
    done = jax.random.randint(amount_key, (), 1, epochs) / epochs
    return Participation(work=jnp.where(jax.random.uniform(slow_key) < share, done, 1.0))


def deadline(seconds: ArrayLike, *, limit: Rate, partial: bool) -> Rule:
    """Clients of known speed, and a server that waits for `limit` seconds.

    Args:
      seconds: `[N]`, the time that each client takes for a whole round (see `costs.DeviceTestbed`). A federation refuses data
        with another number of clients.
      limit: the seconds after which the server stops waiting.
      partial: slow clients stop at the limit, after a share `limit / seconds` of their steps, and upload the result; otherwise
        they are late.

    Raises:
      ValueError: a time that is not above 0, times that are not `[N]`, `partial` that is no bool.
    """
    checks.positive("seconds", seconds, each=True)
    times = checks.numeric("seconds", seconds)
    if times.ndim != 1 or not times.size:
        raise ValueError(f"seconds must have one time for each client, [N], not the shape {list(times.shape)}")
    checks.positive("limit", limit)
    checks.flag("partial", partial)
    return Deadline(times, limit, partial)


@dataclasses.dataclass(frozen=True, eq=False)
class Deadline:
    """The rule that `deadline` makes, whose arguments are these fields."""

    seconds: np.ndarray
    limit: Rate
    partial: bool
    name: str = dataclasses.field(default="deadline", init=False)

    @property
    def num_clients(self) -> int:
        """N, the number of clients whose times are known."""
        return len(self.seconds)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments, for the record of a run."""
        return {"seconds": self.seconds, "limit": self.limit, "partial": self.partial}

    def __call__(self, key: Key, client: jax.Array) -> Participation:
        """How client `client` takes part."""
        del key
        share = jnp.minimum(self.limit / jnp.asarray(self.seconds)[client], 1)
        return Participation(work=share) if self.partial else Participation(returned=share >= 1)
