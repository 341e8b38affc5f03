"""Cohorts: distinct clients, all equally likely, at a cost that does not grow with the population."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedjax_meta as fm
from fedjax_meta import schedules
from tests import problems


def sample_cohort(key, clients, size):
    return schedules.uniform(key, 0, clients, size)


def _cohorts(draws, clients, size):
    keys = jax.random.split(jax.random.key(2), draws)
    return np.asarray(jax.jit(jax.vmap(lambda key: sample_cohort(key, clients, size)))(keys))


def _chi_square(counts):
    expected = counts.sum() / counts.size
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(("clients", "size"), [(7, 3), (50, 5), (1000, 10)])
def test_a_cohort_is_distinct_and_in_range(clients, size):
    cohorts = _cohorts(500, clients, size)
    assert cohorts.dtype == np.int32 and cohorts.min() >= 0 and cohorts.max() < clients
    assert all(len(set(cohort)) == size for cohort in cohorts.tolist())


def test_every_client_and_every_pair_is_equally_likely():
    # A chi-square of d degrees has mean d and variance 2 d: the seed is fixed and five deviations are allowed. Members of one
    # draw exclude each other, which makes the first statistic smaller, by (N - C) / (N - 1), and never larger.
    clients, draws = 9, 20_000
    cohorts = _cohorts(draws, clients, 2)
    assert _chi_square(np.bincount(cohorts.reshape(-1), minlength=clients)) < 8 + 5 * np.sqrt(16)
    pairs = np.sort(cohorts, 1) @ [clients, 1]
    counts = np.bincount(pairs, minlength=clients**2).reshape(clients, clients)[np.triu_indices(clients, 1)]
    assert counts.sum() == draws
    assert _chi_square(counts) < 35 + 5 * np.sqrt(70)


def test_the_whole_population_is_everyone():
    assert np.array_equal(sample_cohort(jax.random.key(0), 6, 6), np.arange(6))


def test_the_work_does_not_depend_on_the_population():
    def operations(clients):
        return jax.make_jaxpr(lambda key: sample_cohort(key, clients, 10))(jax.random.key(0)).jaxpr

    few, many = operations(100), operations(100_000_000)
    assert [str(e.primitive) for e in few.eqns] == [str(e.primitive) for e in many.eqns]
    largest = max(np.prod(v.aval.shape, initial=1) for e in many.eqns for v in e.outvars)
    assert largest <= 10 * 24  # the members of the cohort by the rounds of the shuffle


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (8, "cohort_size=8 is more than the N=7 clients"),
        (0, "cohort_size=0 must be an integer of at least 1"),
        (2.0, "cohort_size=2.0 must be an integer"),
        (True, "cohort_size=True must be an integer"),
    ],
)
def test_a_cohort_that_cannot_be_is_refused(size, message):
    with pytest.raises(ValueError, match=message):
        sample_cohort(jax.random.key(0), 7, size)


def test_sampling_can_be_vmapped_over_keys_and_its_key_decides():
    one, two = (np.asarray(sample_cohort(jax.random.key(i), 1000, 5)) for i in (0, 1))
    both = jax.vmap(lambda key: sample_cohort(key, 1000, 5))(jnp.stack([jax.random.key(0), jax.random.key(1)]))
    assert np.array_equal(both, [one, two]) and not np.array_equal(one, two)


def test_a_table_of_cohorts_is_replayed_from_its_start_again():
    table = np.array([[4, 1, 6], [0, 2, 3]])
    algorithm = problems.build("fedavg", cohort_size=3, schedule=schedules.given(table), devices=1)
    state, step = algorithm.init(jax.random.key(0), problems.data()), jax.jit(algorithm.round)
    for r in range(3):
        state, info = step(jax.random.key(r), state, problems.data())
        assert info.ids.tolist() == table[r % 2].tolist()


@pytest.mark.parametrize(
    ("table", "size", "message"),
    [
        ([[0.5, 1.0]], 2, r"cohorts must be integers \[rounds, C\], not float64\[1, 2\]"),
        ([[0, 1], [2, 2]], 2, "cohorts names a client twice in row 1"),
        ([[0, 1]], 3, "cohorts has rows of 2 clients, but cohort_size=3"),
        ([[0, 7]], 2, r"cohorts=.* must be integers in \[0, 7\)"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table, size, message):
    with pytest.raises(ValueError, match=message):
        fm.schedules.given(table)(jax.random.key(0), 0, 7, size)


def test_a_schedule_that_returns_another_number_of_ids_is_refused():
    algorithm = problems.build("fedavg", cohort_size=3, schedule=lambda key, r, n, c: jnp.arange(2))
    with pytest.raises(ValueError, match=r"schedule must return cohort_size=3 ids, not int\d+\[2\]"):
        algorithm.round(jax.random.key(0), algorithm.init(jax.random.key(0), problems.data()), problems.data())


def _poisson_cohorts(rate, clients, size, draws=4000):
    schedule = schedules.poisson(rate)

    def draw(key):
        return schedule(key, 0, clients, size), schedule.left_out(key, clients, size)

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(4), draws)))


def test_poisson_sampling_draws_each_client_by_itself():
    """Sizes follow Binomial(N, q), every client has the share q, and pairs are independent."""
    clients, rate, draws = 9, 0.3, 4000
    cohorts, left_out = _poisson_cohorts(rate, clients, clients)
    assert cohorts.dtype == np.int32 and not left_out.any()
    assert all(sorted(set(row[row >= 0])) == row[row >= 0].tolist() and set(row[row < 0]) <= {-1} for row in cohorts)
    drawn = np.array([np.isin(np.arange(clients), row) for row in cohorts])
    sizes = np.bincount(drawn.sum(1), minlength=clients + 1)
    expected = draws * stats.binom.pmf(np.arange(clients + 1), clients, rate)
    # The rare large cohorts together, so that every cell expects enough.
    assert stats.chisquare([*sizes[:7], sizes[7:].sum()], [*expected[:7], expected[7:].sum()]).pvalue > 1e-3
    assert np.all(np.abs(drawn.mean(0) - rate) < 4.5 * np.sqrt(rate * (1 - rate) / draws))
    correlations = np.corrcoef(drawn.T)[np.triu_indices(clients, 1)]
    assert np.all(np.abs(correlations) < 4.5 / np.sqrt(draws))


@pytest.mark.parametrize("rate", [0.5, 0.9, 1 - 2.0**-33])
def test_poisson_rates_above_a_half(rate):
    """Thresholds beyond the largest int32."""
    clients, draws = 8, 500
    cohorts, left_out = _poisson_cohorts(rate, clients, clients, draws)
    share = (cohorts >= 0).mean()
    assert not left_out.any() and abs(share - rate) <= 5 * np.sqrt(rate * (1 - rate) / (clients * draws))


def test_a_part_of_the_clients_is_a_population_whose_cohorts_are_drawn():
    """As many clients as slots are no cohort that was drawn before, and the divisor is of those that are drawn from."""
    data, schedule = problems.data(), schedules.poisson(0.25)
    algorithm = problems.build("fedavg", cohort_size=4, schedule=schedule)
    part = data.select(np.arange(4))
    assert part.drawn_from == 4 and data.drawn_from == data.num_clients > 4
    state = algorithm.init(jax.random.key(0), part)
    keys = [jax.random.key(number) for number in range(4)]
    found = [np.asarray(algorithm.round(key, state, part)[1].ids) for key in keys]
    np.testing.assert_array_equal(found, [np.asarray(algorithm.cohort(key, 0, 4)) for key in keys])
    assert len({tuple(ids) for ids in found}) > 1


def test_clients_without_a_slot_are_counted_and_any_client_may_be_one():
    clients, rate, slots = 6, 0.4, 3
    cohorts, left_out = _poisson_cohorts(rate, clients, slots)
    whole, _ = _poisson_cohorts(rate, clients, clients)
    drawn = (whole >= 0).sum(1)
    np.testing.assert_array_equal(left_out, np.maximum(drawn - slots, 0))
    np.testing.assert_array_equal((cohorts >= 0).sum(1), np.minimum(drawn, slots))
    assert all(set(part[part >= 0]) <= set(row) for part, row in zip(cohorts, whole, strict=True))
    shares = np.bincount(cohorts[cohorts >= 0], minlength=clients) / len(cohorts)
    assert np.ptp(shares) < 8 * np.sqrt(0.25 / len(cohorts))


def test_a_rate_of_one_takes_everyone():
    np.testing.assert_array_equal(schedules.poisson(1)(jax.random.key(0), 0, 5, 5), np.arange(5))


@pytest.mark.parametrize(
    ("rate", "clients", "rounds", "overflow"), [(0.1, 200, 300, 1e-9), (0.5, 20, 10, 1e-4), (0.9, 4, 9, 0.01)]
)
def test_a_capacity_is_the_smallest_whose_tail_is_small_enough(rate, clients, rounds, overflow):
    """Against the sum of binomial probabilities, in exact integers and fractions."""
    q = fractions.Fraction(rate)

    def tail(slots):
        others = clients - 1
        return rounds * sum(math.comb(others, k) * q**k * (1 - q) ** (others - k) for k in range(slots, clients))

    capacity = schedules.poisson_capacity(rate, clients, rounds, overflow)
    assert capacity == clients or tail(capacity) <= overflow
    assert tail(capacity - 1) > overflow


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: schedules.poisson(0), "rate=0 must be finite and above 0"),
        (lambda: schedules.poisson(1.5), "rate=1.5 must lie between 0 and 1"),
        (lambda: schedules.poisson(0.5)(jax.random.key(0), 0, 7, 3), "cohort_size=3 has fewer slots than the 3.5 clients"),
        (lambda: schedules.poisson(0.5)(jax.random.key(0), 0, 7, 8), "cohort_size=8 is more than the N=7 clients"),
        (lambda: schedules.poisson_capacity(0.1, 100, 10, 0.0), "overflow=0.0 must lie strictly between 0 and 1"),
    ],
)
def test_poisson_sampling_that_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_passes_over_clients_that_do_not_divide_leave_some_out():
    draw, key, orders = fm.schedules.passes(3), jax.random.key(0), set()
    for number in range(6):
        ids = np.concatenate([np.asarray(draw(key, 2 * number + place, 7, 3)) for place in (0, 1)])
        assert len(set(ids.tolist())) == 6 and ids.min() >= 0 and ids.max() < 7
        orders.add(tuple(ids.tolist()))
    assert len(orders) > 1


def test_passes_are_drawn_by_their_seed():
    one, other = (schedules.passes(seed)(jax.random.key(0), 0, 50, 20) for seed in (0, 3))
    assert not np.array_equal(one, other)


def test_a_capacity_has_room_for_the_expected_cohort():
    """However often it may overflow, so that `poisson` takes it."""
    assert schedules.poisson_capacity(0.5, 20, 1, 0.99) == 10
    for clients, capacity in ((20, 10), (4, 2)):
        assert schedules.poisson(0.5)(jax.random.key(0), 0, clients, capacity).shape == (capacity,)
