"""Epsilon against closed forms, numerical integrals and a second accountant."""

import math
import sys

import numpy as np
import pytest
from scipy import integrate, stats

from fedjax_meta import privacy, schedules
from fedjax_meta.privacy import Everyone, FixedSize, Poisson
from fedjax_meta.privacy.accounting import replaced_delta


def normal(center, deviation):
    return stats.norm(center, deviation).pdf


def mixed(share, one, other):
    return lambda x: share * one(x) + (1 - share) * other(x)


def hockey_stick(alpha, p, q, reach=30.0):
    """`integral of max(p - alpha q, 0)`."""
    x = np.linspace(-reach, reach, 40_001)
    return integrate.simpson(np.maximum(p(x) - alpha * q(x), 0), x=x)


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
def test_the_delta_of_a_gaussian_mechanism_is_its_hockey_stick_divergence(noise, epsilon):
    exact = hockey_stick(math.exp(epsilon), normal(1, noise), normal(0, noise))
    assert privacy.gaussian_delta(epsilon, noise) == pytest.approx(exact, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.0, 1, 1e-5), (5.0, 100, 1e-6), (0.3, 3, 0.01), (30.0, 10, 1e-3)])
def test_epsilon_without_sampling_is_exact_and_below_what_renyi_divergence_gives(noise, rounds, delta):
    """Rounds of Gaussian mechanisms are one with `z / sqrt(R)`. Its Renyi divergence of order a is `a R / (2 z^2)`."""
    found = privacy.epsilon(noise, rounds, delta, Everyone()).epsilon
    assert privacy.gaussian_delta(found, noise / math.sqrt(rounds)) == pytest.approx(delta, rel=1e-8)
    orders = np.linspace(1.01, 500, 50_000)
    renyi = np.min(orders * rounds / (2 * noise**2) + math.log(1 / delta) / (orders - 1))
    assert 0.5 * renyi < found < renyi
    dp = pytest.importorskip("dp_accounting")
    assert found == pytest.approx(dp.get_epsilon_gaussian(noise / math.sqrt(rounds), delta), rel=1e-6)
    accountant = dp.pld.PLDAccountant()
    accountant.compose(dp.GaussianDpEvent(noise), rounds)
    assert found == pytest.approx(accountant.get_epsilon(delta), rel=1e-3, abs=1e-4)


def test_no_privacy_is_needed_where_delta_alone_is_enough():
    assert privacy.epsilon(30.0, 1, 0.2, Everyone()).epsilon == 0
    assert privacy.epsilon(1.0, 0, 1e-5, FixedSize(10, 2)).epsilon == 0
    assert privacy.epsilon(0.0, 1, 1e-5, FixedSize(10, 2)).epsilon == math.inf


@pytest.mark.parametrize("accountant", privacy.ACCOUNTANTS)
def test_fifty_clients_in_cohorts_of_five(accountant):
    """N = 50, C = 5, z = 1, 300 rounds, delta = N^-1.1: by Renyi divergences 8.0 by Poisson sampling and 224 at fixed size."""
    pytest.importorskip("dp_accounting")
    poisson, fixed = (
        privacy.epsilon(1.0, 300, 50**-1.1, sampling, accountant=accountant).epsilon
        for sampling in (Poisson(0.1), FixedSize(50, 5))
    )
    if accountant == "rdp":
        assert (round(poisson, 1), round(fixed)) == (8.0, 224)
    else:
        assert 6.6 < poisson < 6.8 and 40 < fixed < 48


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (0.6, 0.5), (3.0, 0.02)])
def test_one_round_of_poisson_sampling_is_the_worse_of_two_mixtures(noise, rate):
    pytest.importorskip("dp_accounting")
    without, with_ = normal(0, noise), mixed(rate, normal(1, noise), normal(0, noise))
    for delta in (1e-2, 1e-4):
        found = privacy.epsilon(noise, 1, delta, Poisson(rate)).epsilon

        def worse(epsilon):
            return max(hockey_stick(math.exp(epsilon), *pair) for pair in ((with_, without), (without, with_)))

        assert worse(found) <= delta * (1 + 1e-4)
        assert found < 0.002 or worse(found - 0.002) > delta


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (2.0, 0.5), (0.7, 1.0)])
def test_one_round_of_fixed_size_holds_for_every_kind_of_other_clients(noise, rate):
    """One client's upload goes from u to u', both of norm at most 1, in the cohort with probability C / N. The others send v
    each: sums are `(C - 1) v + u` with the client and `C v` without it. The bound holds for all, and it is met where v = u'.
    """
    met = 0.0
    for alpha in np.exp([0.0, 0.3, 1.0, 2.5]):
        bound = replaced_delta(math.log(alpha), rate, noise / 2)
        for u, other in ((1.0, -1.0), (1.0, 0.0), (-0.5, 1.0)):
            for v in np.linspace(-1, 1, 9):
                # Relative to (C - 1) v, with and without the client.
                one, two = (mixed(rate, normal(x, noise), normal(v, noise)) for x in (u, other))
                exact = hockey_stick(alpha, one, two)
                assert exact <= bound * (1 + 1e-6) + 1e-12
                met = max(met, exact / bound)
    assert met > 1 - 1e-6


def composed_delta(epsilon, p, q, rounds, reach, up, step=2e-3):
    """Delta of rounds whose outputs have the cumulative distributions p and q, by convolution of losses that are rounded `up`
    or down to a grid; p and q have densities with a loss that grows with x."""
    x = np.linspace(-reach, reach, 400_001)
    mass_p, mass_q = np.diff(p(x)), np.diff(q(x))
    real = (mass_p > 1e-300) & (mass_q > 1e-300)
    losses = np.log(mass_p[real] / mass_q[real])
    # Within a cell the loss of a point differs from the cell's mean by less than a grid step: one more keeps the side.
    index = (np.ceil(losses / step) + 1 if up else np.floor(losses / step) - 1).astype(int)
    low, high = index.min(), index.max()
    size = 2 ** math.ceil(math.log2(rounds * (high - low) + 1))
    mass = np.fft.irfft(np.fft.rfft(np.bincount(index - low, mass_p[real], size)) ** rounds, size)
    grid = (np.arange(size) + rounds * low) * step
    above = grid > epsilon
    return float(np.sum(np.maximum(mass[above], 0) * -np.expm1(epsilon - grid[above])))


def test_rounds_of_poisson_sampling_lie_between_two_roundings_of_a_second_accountant():
    pytest.importorskip("dp_accounting")
    noise, rate, rounds, delta = 1.2, 0.2, 20, 1e-4
    found = privacy.epsilon(noise, rounds, delta, Poisson(rate)).epsilon
    without = stats.norm(0, noise).cdf

    def with_(x):
        return rate * stats.norm(1, noise).cdf(x) + (1 - rate) * without(x)

    upper = composed_delta(found, with_, without, rounds, 14.0, True, step=1e-3)
    lower = composed_delta(found, with_, without, rounds, 14.0, False, step=1e-3)
    assert lower <= delta <= upper < 1.2 * lower


def test_rounds_of_fixed_size_lie_above_the_worst_case_and_below_renyi():
    """The client leaves u for u' = v, what all others send: `P = q N(2, z) + (1 - q) N(0, z)` against `N(0, z)` in every round is
    one true pair, so that no epsilon may be below it. Renyi divergences (Wang, Balle, Kasiviswanathan 2019) lie above."""
    pytest.importorskip("dp_accounting")
    noise, rate, rounds, delta = 4.0, 0.1, 30, 1e-4
    sampling = FixedSize(50, 5)
    found = privacy.epsilon(noise, rounds, delta, sampling).epsilon
    without = stats.norm(0, noise).cdf

    def with_(x):
        return rate * stats.norm(2, noise).cdf(x) + (1 - rate) * without(x)

    assert composed_delta(found, with_, without, rounds, 45.0, False, step=2e-4) <= delta
    assert composed_delta(0.8 * found, with_, without, rounds, 45.0, False, step=2e-4) > delta
    assert found < privacy.epsilon(noise, rounds, delta, sampling, accountant="rdp").epsilon


def test_a_cohort_of_all_clients_is_a_gaussian_mechanism_of_twice_the_sensitivity():
    """Seen by the loss distribution as a limit, and by the closed form."""
    pytest.importorskip("dp_accounting")
    whole = privacy.epsilon(6.0, 50, 1e-5, FixedSize(10_000, 10_000)).epsilon
    assert whole == pytest.approx(privacy.gaussian_epsilon(1e-5, 3 / math.sqrt(50)), rel=1e-12)
    assert privacy.epsilon(6.0, 50, 1e-5, FixedSize(10_000, 9_999)).epsilon == pytest.approx(whole, rel=2e-3)
    for rate in (0.999, 1.0):
        assert privacy.epsilon(6.0, 50, 1e-5, Poisson(rate)).epsilon == pytest.approx(
            privacy.gaussian_epsilon(1e-5, 6 / math.sqrt(50)), rel=3e-3
        )


@pytest.mark.parametrize("sampling", [Poisson(0.1), FixedSize(50, 5), Everyone()])
def test_more_noise_and_fewer_rounds_are_more_private_even_where_nothing_is(sampling):
    pytest.importorskip("dp_accounting")
    values = [privacy.epsilon(z, 10, 1e-3, sampling).epsilon for z in (0.001, 0.05, 0.3, 1.0, 5.0, 100.0)]
    assert values == sorted(values, reverse=True) and all(map(math.isfinite, values))
    rounds = [privacy.epsilon(2.0, r, 1e-3, sampling).epsilon for r in (1, 3, 30)]
    assert rounds == sorted(rounds)


@pytest.mark.parametrize("sampling", [Poisson(0.05), FixedSize(200, 10), Everyone()])
def test_the_noise_for_an_epsilon_is_the_smallest_of_three_digits(sampling):
    pytest.importorskip("dp_accounting")
    target = 3.0
    noise = privacy.noise_for(target, 20, 1e-4, sampling)
    step = 10.0 ** (math.floor(math.log10(noise)) - 2)
    assert privacy.epsilon(noise, 20, 1e-4, sampling).epsilon <= target
    assert privacy.epsilon(noise - step, 20, 1e-4, sampling).epsilon > target
    assert abs(noise / step - round(noise / step)) < 1e-6


def test_full_cohorts_are_a_part_of_delta():
    pytest.importorskip("dp_accounting")
    capacity = schedules.poisson_capacity(0.1, 300, 40, 1e-7)
    slots = privacy.epsilon(1.0, 40, 1e-5, Poisson(0.1, 300, capacity))
    assert slots.overflow == pytest.approx(40 * stats.binom.sf(capacity - 1, 299, 0.1), rel=1e-9) and slots.overflow <= 1e-7
    assert slots.epsilon == privacy.epsilon(1.0, 40, 1e-5 - slots.overflow, Poisson(0.1)).epsilon
    assert privacy.epsilon(1.0, 40, 1e-5, Poisson(0.1, 300, 300)).overflow == 0
    with pytest.raises(ValueError, match="overflow with probability .* in 40 rounds, which delta=1e-05 does not cover"):
        privacy.epsilon(1.0, 40, 1e-5, Poisson(0.1, 300, 40))


def test_a_guarantee_says_what_it_is_about():
    found = privacy.epsilon(2.0, 3, 1e-5, Everyone())
    assert str(found) == (
        f"epsilon {found.epsilon:.4g} at delta 1e-05; one client, present or sending zeros; no credit for sampling; noise "
        "multiplier 2, 3 rounds; closed form (Balle and Wang 2018)"
    )
    assert found.config["relation"] == "one client, present or sending zeros" and found.config["rounds"] == 3
    assert privacy.epsilon(0.0, 3, 1e-5, FixedSize(9, 2)).config["epsilon"] == "inf"
    assert FixedSize(9, 2).relation == "replace one client"


def test_without_its_package_the_accountant_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'fedjax_meta\[privacy\]'"):
        privacy.epsilon(1.2345, 7, 1e-5, Poisson(0.1))
    assert privacy.epsilon(1.2345, 7, 1e-5, Everyone()).epsilon > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: privacy.epsilon(-1.0, 1, 1e-5, Everyone()), "noise=-1.0 must be finite and at least 0"),
        (lambda: privacy.epsilon(1.0, 1, 0.0, Everyone()), "delta=0.0 must lie strictly between 0 and 1"),
        (lambda: privacy.epsilon(1.0, 1.5, 0.1, Everyone()), "rounds=1.5 must be an integer of at least 0"),
        (lambda: privacy.epsilon(1.0, 1, 0.1, 0.1), "sampling=0.1 must be a Poisson, FixedSize, Everyone or Trees"),
        (
            lambda: privacy.epsilon(1.0, 1, 0.1, Everyone(), accountant="prv"),
            "accountant='prv' is unknown; allowed are pld, rdp",
        ),
        (lambda: privacy.noise_for(0.0, 1, 0.1, Everyone()), "target=0.0 must be finite and above 0"),
        (lambda: Poisson(0.0), "rate=0.0 must be finite and above 0"),
        (lambda: Poisson(0.5, num_clients=10), "num_clients and capacity of Poisson sampling go together"),
        (lambda: FixedSize(5, 6), "cohort_size=6 is more than the N=5 clients"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("delta", "noise", "words"), [(1.0, 1e-5, "delta=1.0"), (0.0, 1.0, "delta=0.0"), (1e-5, -1.0, "noise=-1.0")]
)
def test_arguments_of_the_gaussian_mechanism_in_another_order_are_refused(delta, noise, words):
    """They would give an epsilon of 0."""
    with pytest.raises(ValueError, match=words):
        privacy.gaussian_epsilon(delta, noise)
