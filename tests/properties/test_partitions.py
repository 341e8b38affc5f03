"""Partitions and the data built from them: every sample where it belongs, the seed alone decides, sizes as documented."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedjax_meta as fm
from fedjax_meta.data import partition as part

PARTITIONERS = {
    "iid": lambda y, n, seed: part.iid(y, n, seed=seed),
    "quantity_skew": lambda y, n, seed: part.quantity_skew(y, n, concentration=0.5, seed=seed, min_samples=2),
    "shards": lambda y, n, seed: part.shards(y, part.shard_assignment(n, seed=seed), uneven=True),
    "dirichlet_classes": lambda y, n, seed: part.dirichlet_classes(y, n, concentration=0.5, seed=seed, min_samples=2),
    "dirichlet_clients": lambda y, n, seed: part.dirichlet_clients(y, n, concentration=0.5, seed=seed),
}
"""All of these give every sample to one client."""

CLIENTS, SEEDS = st.integers(1, 8), st.integers(0, 2**31)
LABELS = st.lists(st.integers(0, 4), min_size=16, max_size=60).map(np.array)


@pytest.mark.parametrize("name", PARTITIONERS)
@given(labels=LABELS, clients=CLIENTS, seed=SEEDS)
def test_every_sample_has_one_owner_and_the_seed_decides(name, labels, clients, seed):
    held = PARTITIONERS[name](labels, clients, seed)
    assert sorted(held.order.tolist()) == list(range(len(labels)))
    assert len(held.sizes) == clients and held.sizes.sum() == len(labels) and held.sizes.min() >= 1
    again = PARTITIONERS[name](labels, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(held, again, strict=True))
    counts = held.class_counts(labels, 5)
    assert (counts.sum(1) == held.sizes).all() and (counts.sum(0) == np.bincount(labels, minlength=5)).all()


@given(labels=LABELS, clients=CLIENTS, seed=SEEDS)
def test_sizes_are_as_documented(labels, clients, seed):
    assert np.ptp(PARTITIONERS["iid"](labels, clients, seed).sizes) <= 1
    assert np.ptp(PARTITIONERS["dirichlet_clients"](labels, clients, seed).sizes) <= 1
    assert np.ptp(PARTITIONERS["shards"](labels, clients, seed).sizes) <= 2
    for name in ("quantity_skew", "dirichlet_classes"):
        assert PARTITIONERS[name](labels, clients, seed).sizes.min() >= 2


@given(labels=LABELS, clients=CLIENTS, seed=SEEDS, other=SEEDS)
def test_a_shuffle_stays_within_each_client(labels, clients, seed, other):
    held = PARTITIONERS["dirichlet_classes"](labels, clients, seed)
    mixed = held.shuffled(other)
    assert np.array_equal(mixed.sizes, held.sizes)
    ends = np.cumsum(held.sizes)[:-1]
    for before, after in zip(np.split(held.order, ends), np.split(mixed.order, ends), strict=True):
        assert sorted(before) == sorted(after)


@given(labels=LABELS, clients=st.integers(1, 2), seed=SEEDS, train=st.floats(0.3, 0.7), support=st.floats(0.2, 0.5))
def test_clients_hold_their_samples_and_views_cut_them_without_overlap(labels, clients, seed, train, support):
    held = PARTITIONERS["iid"](labels, clients, seed)
    x = np.arange(len(labels), dtype=np.float32)[:, None]
    views = fm.data.train_test_views(held.sizes, train=train, support=support)
    data = fm.from_partition(x, labels, *held, num_classes=5, views=views)
    ends = np.cumsum(held.sizes)[:-1]
    for client, mine in enumerate(np.split(held.order, ends)):

        def of(view, client=client):
            begin, size = int(data.start[view][client]), int(data.size[view][client])
            assert np.array_equal(data.y[begin : begin + size], labels[data.x[begin : begin + size, 0].astype(int)])
            return data.x[begin : begin + size, 0].astype(int).tolist()

        assert of("train") + of("test") == mine.tolist()
        assert of("support") + of("query") == of("train")
        assert of("test_support") + of("test_query") == of("test")
        assert abs(len(of("train")) - train * len(mine)) <= 1
