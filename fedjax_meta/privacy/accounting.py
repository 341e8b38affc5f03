"""What a run with noise guarantees: (epsilon, delta) for a client, by how cohorts are drawn.

Each function takes the noise multiplier z of `uploads.noise`: the noise on the SUM of a cohort has the deviation z S, where S
bounds the norm of one upload. What that means depends on the sampling, which is therefore an argument and a part of the result:

- `Poisson`: each client is in a cohort with probability q, independently. Neighbours differ in one client, added or removed;
  the sum moves by at most S.
- `FixedSize`: C of N clients, uniformly, without replacement. Neighbours differ in what one client holds; N and C stay. The
  sum moves by at most 2 S. For alpha >= 1, `H_alpha(M(D) || M(D')) <= q H_beta(G || G')` with `q = C / N`,
  `beta = 1 + (alpha - 1) / q` and G, G' the Gaussian mechanism without sampling (Balle, Barthe, Gaboardi, "Privacy amplification
  by subsampling", NeurIPS 2018, arXiv 1807.01647, sampling without replacement); the relation is symmetric, which gives the
  divergences of alpha < 1. Rounds compose as pairs with these divergences do (Zhu, Dong, Wang, "Optimal accounting of
  differential privacy via characteristic function", AISTATS 2022, arXiv 2106.08567).
- `Everyone`: every client is in every cohort, or who is in it is known or follows another rule. Neighbours differ in one client,
  added or removed, whose uploads count as zeros; the sum moves by at most S. No sampling is credited, so that this holds for
  any schedule that does not look at data.

- `Trees`: sums over rounds are noised by a tree, and a client is in each tree once at most. Neighbours as for `Everyone`, and no
  sampling is credited.

In all of them the divisor of the sum is fixed and public. Composition needs the package dp-accounting (extra `privacy`), but for
`Everyone` and `Trees`, which have a closed form (Balle, Wang, "Improving the Gaussian mechanism for differential privacy", ICML
2018, arXiv 1805.06530).
"""

import dataclasses
import functools
import importlib
import math
from typing import Any

import numpy as np

from fedjax_meta import checks

ACCOUNTANTS = ("pld", "rdp")
"""Privacy loss distributions, which are tight, or Renyi divergences of integer orders, which are looser."""


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Each of N clients is in a cohort with probability `rate`, independently: `schedules.poisson`.

    Attributes:
      rate: q, in (0, 1].
      num_clients, capacity: N, and the slots C of a cohort; given both or neither. With them, the probability that in any round
        more clients are drawn than there are slots is a part of delta.

    Raises:
      ValueError: a value out of range.
    """

    rate: float
    num_clients: int | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        checks.share("rate", self.rate)
        checks.positive("rate", self.rate)
        if (self.num_clients is None) != (self.capacity is None):
            raise ValueError("num_clients and capacity of Poisson sampling go together: give both or neither")
        for name in ("num_clients", "capacity"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name))

    relation = "add or remove one client"

    def overflow(self, rounds: int) -> float:
        """The probability that the guarantee does not cover: that OTHER clients fill all slots in one of the rounds.

        While they do not, one client's draw decides about that client alone, and the mechanism is the one without capacity.
        """
        if self.num_clients is None or self.capacity is None or self.capacity >= self.num_clients:
            return 0.0
        from scipy import special

        return min(1.0, rounds * float(special.bdtrc(self.capacity - 1, self.num_clients - 1, self.rate)))

    def __str__(self) -> str:
        where = "" if self.num_clients is None else f" of N={self.num_clients} clients into C={self.capacity} slots"
        return f"Poisson sampling with rate {self.rate:.6g}{where}"


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """C of N clients, uniformly without replacement: `schedules.uniform`.

    Raises:
      ValueError: a cohort larger than the population.
    """

    num_clients: int
    cohort_size: int

    def __post_init__(self) -> None:
        checks.count("num_clients", self.num_clients)
        checks.count("cohort_size", self.cohort_size)
        if self.cohort_size > self.num_clients:
            raise ValueError(f"cohort_size={self.cohort_size} is more than the N={self.num_clients} clients there are")

    relation = "replace one client"

    def overflow(self, rounds: int) -> float:
        """0: a cohort always fits."""
        del rounds
        return 0.0

    def __str__(self) -> str:
        return f"cohorts of fixed size, C={self.cohort_size} of N={self.num_clients} without replacement"


@dataclasses.dataclass(frozen=True)
class Everyone:
    """Every client in every round; a bound for every schedule that does not look at data."""

    relation = "one client, present or sending zeros"

    def overflow(self, rounds: int) -> float:
        """0: a cohort always fits."""
        del rounds
        return 0.0

    def __str__(self) -> str:
        return "no credit for sampling"


@dataclasses.dataclass(frozen=True)
class Trees:
    """`uploads.noise(z, tree=T)`, each client at most once in a tree, whatever the order: `schedules.passes`.

    One upload counts in at most ceil(log2(T + 1)) nodes, so that a tree is one Gaussian mechanism with z over the root of that
    (Kairouz et al. 2021, appendix D).

    Attributes:
      rounds: T of a tree.

    Raises:
      ValueError: a count out of range.
    """

    rounds: int

    def __post_init__(self) -> None:
        checks.count("rounds", self.rounds)

    relation = "one client, present or sending zeros"

    @property
    def depth(self) -> int:
        """Nodes above a round, its own included."""
        return self.rounds.bit_length()

    def overflow(self, rounds: int) -> float:
        """0: a cohort always fits."""
        del rounds
        return 0.0

    def __str__(self) -> str:
        return f"once at most in each tree of {self.rounds} rounds, no credit for sampling"


Sampling = Poisson | FixedSize | Everyone | Trees
"""How cohorts are drawn."""


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, and what it is about.

    Attributes:
      epsilon, delta: of all rounds together; `inf` without noise.
      relation: what neighbours differ in.
      sampling: how cohorts are drawn, in words.
      accountant: what computed epsilon.
      noise: the noise multiplier.
      rounds: how many.
      overflow: the part of delta that covers cohorts larger than their capacity.
    """

    epsilon: float
    delta: float
    relation: str
    sampling: str
    accountant: str
    noise: float
    rounds: int
    overflow: float = 0.0

    def __str__(self) -> str:
        of_overflow = f" ({self.overflow:.1e} of it for full cohorts)" if self.overflow else ""
        return (
            f"epsilon {self.epsilon:.4g} at delta {self.delta:.3g}{of_overflow}; {self.relation}; {self.sampling}; noise "
            f"multiplier {self.noise:.4g}, {self.rounds} rounds; {self.accountant}"
        )

    @property
    def config(self) -> dict[str, Any]:
        """Every field as a JSON value; infinity as text."""
        values = dataclasses.asdict(self)
        return {name: str(value) if value == math.inf else value for name, value in values.items()}


def epsilon(noise: float, rounds: int, delta: float, sampling: Sampling, *, accountant: str = "pld") -> Guarantee:
    """Epsilon of `rounds` rounds.

    Args:
      noise: z, at least 0.
      rounds: R, at least 0.
      delta: in (0, 1), the part for overflow included.
      sampling: `Poisson`, `FixedSize`, `Everyone` or `Trees`.
      accountant: of `ACCOUNTANTS`; `Everyone` and `Trees` have a closed form and need none.

    Raises:
      ValueError: a value out of range; a capacity whose overflow is as probable as delta.
      ImportError: dp-accounting is not installed.

    Example:
      >>> round(epsilon(1.0, 1, 1e-5, Everyone()).epsilon, 4)
      4.3772
    """
    checks.not_negative("noise", noise)
    checks.count("rounds", rounds, least=0)
    checks.fraction("delta", delta)
    checks.one_of("accountant", accountant, ACCOUNTANTS)
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling={sampling!r} must be a Poisson, FixedSize, Everyone or Trees of fedjax_meta.privacy")
    overflow = sampling.overflow(rounds)
    if overflow >= delta:
        raise ValueError(
            f"{sampling} overflow with probability {overflow:.2g} in {rounds} rounds, which delta={delta} does not cover: give "
            "more slots (schedules.poisson_capacity) or a larger delta"
        )
    if rounds == 0:
        value, how = 0.0, "no rounds"
    elif noise == 0:
        value, how = math.inf, "no noise"
    else:
        value, how = _composed(float(noise), int(rounds), delta - overflow, sampling, accountant)
    return Guarantee(value, float(delta), sampling.relation, str(sampling), how, float(noise), int(rounds), overflow)


def noise_for(target: float, rounds: int, delta: float, sampling: Sampling, *, accountant: str = "pld") -> float:
    """The noise multiplier z that `rounds` rounds need for epsilon <= `target`: the smallest one, rounded up to 3 digits.

    Args, errors: as in `epsilon`.

    Example:
      >>> noise_for(4.38, 1, 1e-5, Everyone())
      1.0
    """
    from scipy import optimize

    checks.positive("target", target)
    checks.count("rounds", rounds)
    if not 1e-6 <= target <= 1e12:
        raise ValueError(
            f"target={target:g} must lie between 1e-6 and 1e12: beyond, an epsilon says nothing and has no accountant"
        )

    def excess(log_noise: float) -> float:
        found = epsilon(math.exp(log_noise), rounds, delta, sampling, accountant=accountant).epsilon
        return math.log(max(found, 1e-12)) - math.log(target)

    low, high = 0.0, 0.0
    while excess(high) > 0:
        high += 1.0
    while excess(low) < 0:
        low -= 1.0
    found = math.exp(float(optimize.brentq(excess, low, high, xtol=3e-4)))
    step = 10.0 ** (math.floor(math.log10(found)) - 2)
    steps = math.ceil(found / step * (1 - 1e-9)) - 1
    while excess(math.log(steps * step)) > 0:
        steps += 1
    return float(f"{steps * step:.6g}")


def gaussian_delta(epsilon: Any, noise: float) -> Any:
    """The exact delta of the Gaussian mechanism whose noise has `noise` times the deviation of its sensitivity.

    `Phi(m/2 - e/m) - exp(e) Phi(-m/2 - e/m)` with `m = 1 / noise` (Balle, Wang 2018).
    """
    from scipy import special

    move = 1 / noise
    with np.errstate(over="ignore", invalid="ignore"):
        other = np.exp(epsilon + special.log_ndtr(-move / 2 - epsilon / move))
        return np.maximum(np.exp(special.log_ndtr(move / 2 - epsilon / move)) - other, 0)


def gaussian_epsilon(delta: float, noise: float) -> float:
    """The exact epsilon of the Gaussian mechanism, see `gaussian_delta`; 0 where delta is large enough without it.

    Infinity where the noise is less than 1e-100 times its sensitivity.

    Raises:
      ValueError: a delta outside of (0, 1), noise below 0.
    """
    from scipy import optimize

    checks.fraction("delta", delta)
    checks.not_negative("noise", noise)
    if noise < 1e-100:
        return math.inf
    if gaussian_delta(0.0, noise) <= delta:
        return 0.0
    # log(delta) < -t^2 / 2 for the upper end: Phi(-t) < exp(-t^2 / 2).
    high = (math.sqrt(-2 * math.log(delta)) + 1 / noise) / noise + 1 / noise**2
    return float(optimize.brentq(lambda value: float(gaussian_delta(value, noise)) - delta, 0.0, high, xtol=1e-12))


@functools.lru_cache(maxsize=256)
def _composed(noise: float, rounds: int, delta: float, sampling: Sampling, accountant: str) -> tuple[float, str]:
    """(epsilon, the accountant in words)."""
    if isinstance(sampling, Trees):
        noise, rounds, sampling = noise / math.sqrt(sampling.depth), -(-rounds // sampling.rounds), Everyone()
    relative = noise / 2 if isinstance(sampling, FixedSize) else noise
    unsampled = gaussian_epsilon(delta, relative / math.sqrt(rounds)), "closed form (Balle and Wang 2018)"
    if isinstance(sampling, Everyone):
        return unsampled
    rate = sampling.rate if isinstance(sampling, Poisson) else sampling.cohort_size / sampling.num_clients
    # Where one round loses as much, sampling helps nobody, and its numbers overflow.
    if rate == 1 or _largest_loss(rate, relative) > 500:
        return unsampled
    if accountant == "rdp":
        return _renyi(relative, rounds, delta, sampling), "RDP accountant (dp-accounting)"
    return _loss_distribution(relative, rounds, delta, rate, sampling), "PLD accountant (dp-accounting)"


def _renyi(noise: float, rounds: int, delta: float, sampling: Poisson | FixedSize) -> float:
    dp = _library()
    event = dp.GaussianDpEvent(noise)
    if isinstance(sampling, Poisson):
        relation, event = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.PoissonSampledDpEvent(sampling.rate, event)
    else:
        relation = dp.NeighboringRelation.REPLACE_ONE
        event = dp.SampledWithoutReplacementDpEvent(sampling.num_clients, sampling.cohort_size, event)
    orders = [*range(2, 65), *range(72, 257, 8), 320, 384, 448, 512]
    accountant = dp.rdp.RdpAccountant(orders, relation)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))


def _loss_distribution(noise: float, rounds: int, delta: float, rate: float, sampling: Poisson | FixedSize) -> float:
    dp = _library()
    most = _largest_loss(rate, noise)
    step = _interval(most)
    if isinstance(sampling, Poisson):
        accountant = dp.pld.PLDAccountant(value_discretization_interval=step)
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), rounds)
        return float(accountant.get_epsilon(delta))
    places = math.ceil(most / step)
    gains = replaced_delta(step * np.arange(places + 1), rate, noise)
    # H_a(Q || P) = 1 - a + a H_(1/a)(P || Q): the relation is symmetric.
    losses = -step * np.arange(places, 0, -1)
    falls = -np.expm1(losses) + np.exp(losses) * gains[:0:-1]
    deltas = np.minimum.accumulate(np.clip(np.concatenate([falls, gains]), 0, 1))
    mass = dp.pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -places, places, deltas)
    whole = dp.pld.privacy_loss_distribution.PrivacyLossDistribution(mass).self_compose(rounds)
    return float(whole.get_epsilon_for_delta(delta))


def replaced_delta(epsilon: Any, rate: float, noise: float) -> Any:
    """Delta of one round of a Gaussian mechanism on a share `rate` of the clients, one of which is replaced; epsilon >= 0.

    `noise` is the noise's deviation over the largest change of the sum, which is z / 2 for uploads that are clipped.
    """
    return rate * gaussian_delta(np.log1p(np.expm1(epsilon) / rate), noise)


def _largest_loss(rate: float, noise: float) -> float:
    """An epsilon of one round at a delta of about exp(-50)."""
    alone = 10.5 / noise + 0.5 / noise**2
    return alone + math.log(rate) if alone > 500 else math.log1p(rate * math.expm1(alone))


def _interval(most: float) -> float:
    """The grid of losses: 1e-4, or coarser where losses are so large that nobody cares; rounding is pessimistic."""
    return max(1e-4, most / 2**16)


def _library() -> Any:
    try:
        dp = importlib.import_module("dp_accounting")
        importlib.import_module("dp_accounting.rdp")
        importlib.import_module("dp_accounting.pld")
        importlib.import_module("dp_accounting.pld.pld_pmf")
    except ImportError as error:
        raise ImportError(
            "epsilon under sampling needs the package dp-accounting: pip install 'fedjax_meta[privacy]'"
        ) from error
    return dp
