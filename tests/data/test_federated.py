"""The container of all clients: single clients and subsets of clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.data import pack, train_test_views
from tests.data.common import SIZES, numbered, seen


def test_a_negative_index_is_a_client_without_samples():
    view = numbered().client(-1)["train"]
    assert int(view.size) == 0 and not np.asarray(view.in_order(4).get(0, 0).weight).any()


def test_the_index_of_a_client_may_be_traced():
    data = jax.tree.map(jnp.asarray, numbered())

    @jax.jit
    def total(i):
        batch = data.client(i)["train"].in_order(16).get(0, 0)
        return jnp.sum(batch.x[:, 0] * batch.weight)

    starts = np.cumsum(SIZES) - SIZES
    assert [float(total(i)) for i in range(4)] == [np.arange(a, a + n).sum() for a, n in zip(starts, SIZES, strict=True)]


@pytest.mark.parametrize("how", ["select", "traced", "pack"])
def test_a_subset_has_the_ids_views_and_batches_of_its_clients(how):
    sizes = np.array([9, 16, 12, 8])
    whole = numbered(sizes, views=train_test_views(sizes))
    chosen = np.array([3, 1])
    subset = {"select": whole.select, "traced": jax.jit(whole.select), "pack": lambda ids: pack(whole, ids, 28)}[how](chosen)
    assert (subset.num_clients, subset.total_clients) == (2, 4)
    np.testing.assert_array_equal(subset.ids, chosen)
    for position, client in enumerate(chosen):
        for view in whole.views:
            key = jax.random.key(position)
            ours, expected = subset.client(position)[view], whole.client(int(client))[view]
            assert seen(ours.epochs(key, 3, 2)) == seen(expected.epochs(key, 3, 2))
            assert seen(ours.in_order(4)) == seen(expected.in_order(4))


BAD = {
    "index out of range": (lambda: numbered().client(4), "index=4, but there are N=4 clients"),
    "unknown view": (lambda: numbered().sizes("query"), "no view 'query'; they have train"),
    "unknown view of a client": (lambda: numbered().client(0)["query"], "no view 'query'"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_names_the_argument(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
