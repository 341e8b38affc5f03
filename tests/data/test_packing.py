"""Copies of a few clients' samples."""

import jax
import numpy as np
import pytest

from fedjax_meta.data import capacity, pack, train_test_views
from tests.data.common import numbered, seen

SIZES = np.array([9, 16, 12, 8])


@pytest.fixture
def whole():
    return numbered(SIZES, views=train_test_views(SIZES))


def test_capacity_is_the_number_of_samples_of_the_largest_clients(whole):
    assert capacity(whole, 2) == 28 and capacity(whole, 4) == 45


def test_the_copy_holds_these_clients_samples_and_zeros(whole):
    copy = pack(whole, np.array([3, 1]), 30)
    assert copy.x.shape == (30, 1) and copy.x[:24, 0].tolist() == [*range(37, 45), *range(9, 25)] and (copy.x[24:] == 0).all()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(copy))


@pytest.mark.parametrize("how", ["select", "pack"])
def test_a_subset_of_a_copy_keeps_the_ids_of_the_whole(how, whole):
    copy = pack(whole, np.array([3, 1]), 30)
    subset = copy.select(np.array([1])) if how == "select" else pack(copy, np.array([1]), 16)
    assert np.asarray(subset.ids).tolist() == [1] and subset.total_clients == 4
    assert seen(subset.client(0)["train"].in_order(4)) == seen(whole.client(1)["train"].in_order(4))


def test_too_small_a_capacity_is_an_error(whole):
    with pytest.raises(ValueError, match="capacity=23 must be at least 24"):
        pack(whole, np.array([3, 1]), 23)
