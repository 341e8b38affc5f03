"""Aggregators against NumPy and exact fractions: permutation of clients, weights of zero, scaling, empty cohorts, liars.

All inputs have one shape, so that each aggregator is compiled once.
"""

from fractions import Fraction
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_meta import aggregate

C, D = 7, 3
SHARES = (0.0, 0.1, 0.2, 0.29, 0.3, 0.4)
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)
UPLOADS = st.lists(NUMBERS, min_size=C * D, max_size=C * D).map(lambda values: np.array(values).reshape(C, D))
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(0.1, 1e3)), min_size=C, max_size=C).map(np.array)
SOME = WEIGHTS.filter(lambda weight: bool((weight > 0).any()))
ORDERS = st.permutations(range(C)).map(np.array)


@jax.jit
def _mean(uploads, weight):
    summed = jax.tree.map(lambda leaf: leaf.sum(0), jax.vmap(aggregate.weigh)(uploads, weight))
    return aggregate.mean(summed)


@cache
def _rule(name):
    """`(uploads [C, D], weights [C]) -> [D]`, compiled."""
    if name == "mean":
        return _mean
    return jax.jit(aggregate.median if name == "median" else aggregate.trimmed_mean(name))


RULES = ("mean", "median", *SHARES)


def _apply(name, uploads, weight):
    return np.asarray(_rule(name)(uploads, weight))


def _expected(name, uploads, weight):
    """The definition, in NumPy, over the clients that returned."""
    there = weight > 0
    values = np.sort(uploads[there], 0)
    if name == "mean":
        return (uploads[there] * weight[there, None]).sum(0) / weight.sum()
    if name == "median":
        return np.median(values, 0)
    cut = int(Fraction(str(name)) * len(values))
    return values[cut : len(values) - cut].mean(0)


def _close(a, b, uploads):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * max(1.0, float(np.abs(uploads[np.isfinite(uploads)]).max(initial=0))))


@pytest.mark.parametrize("name", RULES)
@given(uploads=UPLOADS, weight=SOME)
def test_equals_its_definition_and_stays_between_the_clients(name, uploads, weight):
    found = _apply(name, uploads, weight)
    _close(found, _expected(name, uploads, weight), uploads)
    there = uploads[weight > 0]
    slack = 1e-9 * max(1.0, float(np.abs(uploads).max()))
    assert (found >= there.min(0) - slack).all() and (found <= there.max(0) + slack).all()


@pytest.mark.parametrize("name", RULES)
@given(uploads=UPLOADS, weight=SOME, order=ORDERS)
def test_the_order_of_clients_changes_nothing(name, uploads, weight, order):
    moved, still = _apply(name, uploads[order], weight[order]), _apply(name, uploads, weight)
    _close(moved, still, uploads)
    if name == "median":
        assert np.array_equal(moved, still)


@pytest.mark.parametrize("name", RULES)
@given(uploads=UPLOADS, weight=SOME, factor=st.floats(1e-3, 1e3))
def test_scaling(name, uploads, weight, factor):
    """Of all weights: nothing changes. Of all uploads: the result scales."""
    still = _apply(name, uploads, weight)
    _close(_apply(name, uploads, factor * weight), still, uploads)
    _close(_apply(name, factor * uploads, weight), factor * still, factor * uploads)


@pytest.mark.parametrize("name", RULES)
@given(uploads=UPLOADS, weight=WEIGHTS, junk=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_a_client_of_weight_zero_has_no_effect(name, uploads, weight, junk):
    absent = np.where(weight[:, None] > 0, uploads, junk)
    assert np.array_equal(_apply(name, absent, weight), _apply(name, np.where(weight[:, None] > 0, uploads, 0), weight))


@pytest.mark.parametrize("name", RULES)
@given(uploads=UPLOADS, junk=st.sampled_from([0.0, np.nan, np.inf]))
def test_an_empty_cohort_gives_exactly_zero(name, uploads, junk):
    uploads[0] = junk
    assert np.array_equal(_apply(name, uploads, np.zeros(C)), np.zeros(D))


@pytest.mark.parametrize("name", RULES[1:])
@given(uploads=UPLOADS, weight=SOME, order=ORDERS, lie=st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30]))
def test_as_many_liars_as_promised_do_not_move_it_beyond_the_honest(name, uploads, weight, order, lie):
    """Fewer than half for the median, floor(share n) for the trimmed mean."""
    there = [i for i in order if weight[i] > 0]
    liars = there[: (len(there) - 1) // 2 if name == "median" else int(Fraction(str(name)) * len(there))]
    honest = uploads[[i for i in there if i not in liars]]
    uploads[liars] = lie
    found = _apply(name, uploads, weight)
    slack = 1e-9 * max(1.0, float(np.abs(honest).max()))
    assert (found >= honest.min(0) - slack).all() and (found <= honest.max(0) + slack).all()


@given(uploads=UPLOADS, order=ORDERS)
def test_mixtures_of_clients_are_the_matrix_product(uploads, order):
    matrix = np.eye(C)[order]
    assert np.array_equal(np.asarray(jax.jit(aggregate.combine)(matrix, uploads)), uploads[order])
