"""The permutation is a bijection for any size, and uniform."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_meta.data.shuffle import permutation_keys, permute

PADDED = 4096
permute_padded = jax.jit(lambda key, size: permute(permutation_keys(key), jnp.arange(PADDED, dtype=jnp.int32), size))


@given(size=st.integers(1, PADDED), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=100, deadline=None)
def test_is_a_bijection_for_any_traced_size(size, seed):
    image = np.asarray(permute_padded(jax.random.key(seed), size))
    assert np.array_equal(np.sort(image[:size]), np.arange(size))
    # An index outside the range gives an image inside it, so that a padded batch reads no other client's samples.
    assert image.min() >= 0 and image.max() < size


def test_separate_keys_per_element_agree_with_one_key_for_all():
    one, two = permutation_keys(jax.random.key(0)), permutation_keys(jax.random.key(1))
    index = jnp.array([3, 7, 0, 9])
    mixed = permute(jnp.stack([one, two, one, two]), index, 10)
    expected = jnp.where(jnp.array([True, False, True, False]), permute(one, index, 10), permute(two, index, 10))
    assert np.array_equal(mixed, expected)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_elements_are_equally_likely(size):
    # Chi-square over size! orders with mean d = size! - 1 and variance 2 d. For all d here, five standard deviations above the
    # mean have probability below 1e-4, and the seed is fixed.
    draws = 24_000
    keys = permutation_keys(jax.random.key(42), (draws,))
    images = np.asarray(jax.vmap(lambda k: permute(k, jnp.arange(size, dtype=jnp.int32), size))(keys))
    orders = list(itertools.permutations(range(size)))
    code = {order: i for i, order in enumerate(orders)}
    counts = np.bincount([code[tuple(image)] for image in images.tolist()], minlength=len(orders))
    expected = draws / len(orders)
    degrees = len(orders) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)


def test_each_element_of_a_larger_set_is_uniform():
    size, draws = 37, 20_000
    keys = permutation_keys(jax.random.key(7), (draws,))
    images = np.asarray(jax.vmap(lambda k: permute(k, jnp.arange(size, dtype=jnp.int32), size))(keys))
    for element in (0, 17, 36):
        counts = np.bincount(images[:, element], minlength=size)
        assert ((counts - draws / size) ** 2 / (draws / size)).sum() < 36 + 5 * np.sqrt(72)
    # Two neighbours stay neighbours with the probability of any two elements: 2 / size.
    beside = (np.abs(images[:, 10] - images[:, 11]) == 1).mean()
    assert beside == pytest.approx(2 / size, abs=5 * np.sqrt(2 / size / draws))
