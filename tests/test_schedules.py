"""Cohorts: distinct clients, all equally likely, at a cost that does not grow with the population."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
