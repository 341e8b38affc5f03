"""The permutation that is never stored: a bijection for any size, and uniform."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_meta.data.shuffle import permuted, round_keys

PADDED = 4096
permuted_padded = jax.jit(lambda key, size: permuted(round_keys(key), jnp.arange(PADDED, dtype=jnp.int32), size))


@given(size=st.integers(1, PADDED), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=100, deadline=None)
def test_is_a_bijection_for_any_traced_size(size, seed):
    image = np.asarray(permuted_padded(jax.random.key(seed), size))
    assert np.array_equal(np.sort(image[:size]), np.arange(size))
    # Indices beyond the size give something inside the range, so that a padded batch reads no foreign sample.
    assert image.min() >= 0 and image.max() < size


def test_keys_of_each_element_agree_with_one_key_for_all():
    one, two = round_keys(jax.random.key(0)), round_keys(jax.random.key(1))
    index = jnp.array([3, 7, 0, 9])
    mixed = permuted(jnp.stack([one, two, one, two]), index, 10)
    expected = jnp.where(jnp.array([True, False, True, False]), permuted(one, index, 10), permuted(two, index, 10))
    assert np.array_equal(mixed, expected)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_elements_are_equally_likely(size):
    # Chi-square over size! orders. Its mean is d = size! - 1 and its variance 2 d; five deviations above the mean are rarer
    # than 1e-4 for all the d here, and the seed is fixed.
    draws = 24_000
    keys = round_keys(jax.random.key(42), (draws,))
    images = np.asarray(jax.vmap(lambda k: permuted(k, jnp.arange(size, dtype=jnp.int32), size))(keys))
    orders = list(itertools.permutations(range(size)))
    code = {order: i for i, order in enumerate(orders)}
    counts = np.bincount([code[tuple(image)] for image in images.tolist()], minlength=len(orders))
    expected = draws / len(orders)
    degrees = len(orders) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)


def test_every_element_goes_everywhere_in_a_larger_set():
    size, draws = 37, 20_000
    keys = round_keys(jax.random.key(7), (draws,))
    images = np.asarray(jax.vmap(lambda k: permuted(k, jnp.arange(size, dtype=jnp.int32), size))(keys))
    for element in (0, 17, 36):
        counts = np.bincount(images[:, element], minlength=size)
        assert ((counts - draws / size) ** 2 / (draws / size)).sum() < 36 + 5 * np.sqrt(72)
    # Two neighbours land beside each other as often as any two elements do: 2 / size.
    beside = (np.abs(images[:, 10] - images[:, 11]) == 1).mean()
    assert beside == pytest.approx(2 / size, abs=5 * np.sqrt(2 / size / draws))
