"""What becomes of clients that were asked: some do part of their work, return too late, or fail.

A participation is a pure function `(key, client id) -> Participation`, an option of every algorithm. Weights are
renormalised over those who return, because the server takes a mean over what comes in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.task import Key


class Participation(NamedTuple):
    """What becomes of ONE client in a round; every entry may be traced.

    Attributes:
      work: share of its training steps that the client does, in [0, 1], rounded up to whole steps; with 0 it does not take
        part.
      returned: whether its upload reaches the server in time. One that is late keeps its own leaves and memory as trained.
      crashed: whether it fails: nothing reaches the server and what it kept stays as it was.
    """

    work: Any = 1.0
    returned: Any = True
    crashed: Any = False


Rule = Callable[[Key, jax.Array], Participation]


def unreliable(*, late: Any = 0.0, crashed: Any = 0.0) -> Rule:
    """Every client that is asked crashes with one probability, independently, and else is late with another.

    Raises:
      ValueError: a probability outside [0, 1].
    """
    for name, value in (("late", late), ("crashed", crashed)):
        checks.share(name, value)

    def rule(key: Key, client: jax.Array) -> Participation:
        del client
        fails, misses = jax.random.uniform(key, (2,)) < jnp.array([crashed, late])
        return Participation(returned=jnp.logical_not(misses), crashed=fails)

    return rule


def stragglers(share: Any, *, epochs: int) -> Rule:
    """FedProx's stragglers: each client is one with probability `share` and then does 1 to E-1 of its E epochs, all as likely.

    They return what they have (Li et al., arXiv 1812.06127). The paper makes an exact share of the cohort stragglers.

    Args:
      share: the probability, in [0, 1].
      epochs: E, at least 2: the epochs that the algorithm was given.

    Raises:
      ValueError: a share or a count out of range.
    """
    checks.share("share", share)
    checks.count("epochs", epochs, least=2)

    def rule(key: Key, client: jax.Array) -> Participation:
        del client
        slow_key, amount_key = jax.random.split(key)
        done = jax.random.randint(amount_key, (), 1, epochs) / epochs
        return Participation(work=jnp.where(jax.random.uniform(slow_key) < share, done, 1.0))

    return rule


def deadline(seconds: Any, *, limit: Any, partial: bool) -> Rule:
    """Clients of known speed and a server that waits `limit` seconds for them.

    Args:
      seconds: `[N]`, how long each client takes for a whole round (see `costs.DeviceTestbed`).
      limit: when the server stops waiting.
      partial: slow clients stop in time and send what they have, a share `limit / seconds` of their steps; else they are late.

    Raises:
      ValueError: times that are not above 0.
    """
    checks.positive("seconds", seconds)
    checks.positive("limit", limit)
    seconds = jnp.asarray(seconds)

    def rule(key: Key, client: jax.Array) -> Participation:
        del key
        share = jnp.minimum(limit / seconds[client], 1)
        return Participation(work=share) if partial else Participation(returned=share >= 1)

    return rule
