"""The container of all clients: views, batches, padding, and its checks at the door."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_meta.data.federated import ClientView, federate, from_clients, train_test_views

SIZES = np.array([5, 12, 1, 8])


def _numbered(sizes=SIZES, **options):
    """Clients whose inputs are the numbers 0, 1, 2, ... in storage order, so that a batch says which samples it holds."""
    total = int(np.sum(sizes))
    x = np.arange(total, dtype=np.float32)[:, None]
    return federate(x, np.arange(total) % 3, np.arange(total), sizes, num_classes=3, **options)


def _seen(batches):
    """The numbers of the real samples of each step."""
    steps = []
    for step in range(int(batches.steps)):
        batch = batches.get(step, 0)
        steps.append(np.asarray(batch.x)[np.asarray(batch.weight) > 0, 0].astype(int).tolist())
    return steps


def _joined(batches):
    return [number for step in _seen(batches) for number in step]


def test_memory_holds_each_sample_once_and_keeps_the_type():
    x = np.random.default_rng(0).integers(0, 256, (26, 4, 4, 1), dtype=np.uint8)
    data = federate(x, np.zeros(26, int), np.random.default_rng(1).permutation(26), SIZES)
    assert data.x.nbytes == x.nbytes and data.x.dtype == np.uint8
    assert data.num_clients == 4 and data.views == ("train",) and data.num_classes == 1


def test_layout_follows_the_order():
    x, y = np.arange(6.0)[:, None], np.array([0, 1, 2, 0, 1, 2])
    data = federate(x, y, [5, 0, 3, 3], [1, 3])
    assert np.asarray(data.x)[:, 0].tolist() == [5, 0, 3, 3] and np.asarray(data.y).tolist() == [2, 0, 0, 0]
    assert _seen(data.client(1)["train"].in_order(2)) == [[0, 3], [3]]


@partial(jax.jit, static_argnames=("batch", "epochs"))
def _epoch_batches(key, start, size, batch, epochs):
    """All steps that a client of up to 40 samples can have, from one compiled program for all sizes."""
    x = jnp.arange(100, dtype=jnp.float32)[:, None]
    batches = ClientView(x, jnp.zeros(100, jnp.int32), None, None, start, size, 40).epochs(key, batch, epochs)
    return batches.steps, jax.vmap(lambda step: batches.get(step, 0))(jnp.arange(batches.max_steps))


@pytest.mark.parametrize(("batch", "epochs"), [(1, 1), (4, 2), (7, 3), (64, 2)])
@given(start=st.integers(0, 60), size=st.integers(1, 40), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_each_sample_is_seen_once_an_epoch(batch, epochs, start, size, seed):
    steps, batches = _epoch_batches(jax.random.key(seed), start, size, batch, epochs)
    a_pass = -(-size // batch)
    assert steps == epochs * a_pass and len(batches.weight) == epochs * -(-40 // batch)
    numbers, real = np.asarray(batches.x)[..., 0], np.asarray(batches.weight) > 0
    for epoch in range(epochs):
        rows = slice(epoch * a_pass, (epoch + 1) * a_pass)
        assert sorted(numbers[rows][real[rows]]) == list(range(start, start + size))
        # Only the last batch of a pass is partial.
        assert real[rows][:-1].all()


def test_epochs_are_shuffled_anew():
    seen = _seen(_numbered(np.array([64])).client(0)["train"].epochs(jax.random.key(0), 64, 2))
    assert seen[0] != seen[1] and seen[0] != sorted(seen[0])


def test_wrapped_batches_are_full_and_each_pass_is_complete():
    size, batch, steps = 7, 5, 14
    view = _numbered(np.array([3, size])).client(1)["train"]
    seen = _joined(view.wrapped(jax.random.key(0), batch, steps))
    assert len(seen) == batch * steps
    for begin in range(0, len(seen), size):
        assert sorted(seen[begin : begin + size]) == list(range(3, 3 + size))


def test_wrapped_batches_go_on_where_they_stopped():
    view = _numbered(np.array([7])).client(0)["train"]
    key = jax.random.key(3)
    whole = _joined(view.wrapped(key, 5, 6))
    parts = _joined(view.wrapped(key, 5, 2)) + _joined(view.wrapped(key, 5, 4, first=10))
    assert whole == parts


def test_full_steps_go_through_the_view_in_chunks():
    view = _numbered().client(1)["train"]
    batches = view.full(steps=2, chunk_size=5)
    chunks = [batches.get(1, c) for c in range(int(batches.chunks))]
    seen = np.concatenate([np.asarray(b.x)[np.asarray(b.weight) > 0, 0] for b in chunks])
    assert batches.steps == 2 and seen.tolist() == list(range(5, 17))
    mean = batches.mean(lambda b: jnp.sum(b.x[:, 0] * b.weight) / jnp.sum(b.weight), 0)
    assert float(mean) == pytest.approx(np.mean(np.arange(5, 17)))


def test_padding_has_no_weight_and_stays_inside_the_data():
    batch = _numbered().client(2)["train"].in_order(4).get(0, 0)
    assert np.asarray(batch.weight).tolist() == [1, 0, 0, 0] and float(batch.x[0, 0]) == 17
    assert np.isfinite(batch.x).all()


def test_nobody_has_no_samples():
    view = _numbered().client(-1)["train"]
    assert int(view.size) == 0 and not np.asarray(view.in_order(4).get(0, 0).weight).any()


def test_client_may_be_traced():
    data = jax.tree.map(jnp.asarray, _numbered())

    @jax.jit
    def total(i):
        batch = data.client(i)["train"].in_order(16).get(0, 0)
        return jnp.sum(batch.x[:, 0] * batch.weight)

    starts = np.cumsum(SIZES) - SIZES
    assert [float(total(i)) for i in range(4)] == [np.arange(a, a + n).sum() for a, n in zip(starts, SIZES, strict=True)]


def test_bytes_are_scaled_when_a_batch_is_taken():
    x = np.array([[0], [51], [255]], np.uint8)
    assert np.asarray(federate(x, [0, 0, 0], [0, 1, 2], [3]).client(0)["train"].in_order(3).get(0).x)[:, 0] == pytest.approx(
        [0, 0.2, 1]
    )
    data = federate(x, [0, 0, 0], [0, 1, 2], [3], offset=np.array([51.0]), scale=np.array([0.5]))
    assert np.asarray(data.client(0)["train"].in_order(3).get(0).x)[:, 0] == pytest.approx([-25.5, 0, 102])


@given(sizes=st.lists(st.integers(8, 500), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_views_are_the_fractions_of_s0(sizes):
    views = train_test_views(sizes)
    for i, n in enumerate(sizes):
        cut = {name: (int(begin[i]), int(end[i])) for name, (begin, end) in views.items()}
        train = int(0.75 * n)
        assert cut["train"] == (0, train) and cut["test"] == (train, n)
        inner, outer = max(train // 5, 1), train + max((n - train) // 5, 1)
        assert cut["support"] == (0, inner) and cut["query"] == (inner, train)
        assert cut["test_support"] == (train, outer) and cut["test_query"] == (outer, n)


def test_shares_are_not_spoilt_by_binary_fractions():
    # 0.29 * 100 is 28.999999999999996 in binary.
    assert train_test_views([100], train=0.29)["train"][1].tolist() == [29]


def test_real_targets_are_kept():
    y = np.array([[0.5, 1.0], [2.0, -3.0]])
    data = federate(np.ones((2, 1)), y, [1, 0], [2], num_classes=0)
    batch = data.client(0)["train"].in_order(2).get(0)
    assert data.num_classes == 0 and np.asarray(batch.y).tolist() == [[2.0, -3.0], [0.5, 1.0]]


def test_from_clients_equals_federate_of_the_joined_arrays():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 2)), rng.integers(0, 3, n)) for n in (10, 20)]
    data = from_clients(clients, num_classes=3)
    assert np.array_equal(data.x, np.concatenate([x for x, _ in clients]))
    assert np.asarray(data.sizes("train")).tolist() == [7, 15] and np.asarray(data.sizes("test_query")).tolist() == [2, 4]


X, Y = np.zeros((10, 2)), np.zeros(10, int)
ALL = np.arange(10)
BAD = {
    "labels as strings": (lambda: federate(X, np.array(["a"] * 10), ALL, [10]), "labels must be integers, not dtype <U1"),
    "real labels": (lambda: federate(X, np.zeros(10), ALL, [10]), "labels must be integers"),
    "labels out of range": (lambda: federate(X, Y + 3, ALL, [10], num_classes=3), r"labels run from 3 to 3.*num_classes=3\)"),
    "negative labels": (lambda: federate(X, Y - 1, ALL, [10]), "labels run from -1"),
    "NaN": (lambda: federate(X * np.nan, Y, ALL, [10]), "inputs hold NaN"),
    "mixed shapes": (lambda: federate([np.zeros((2, 2)), np.zeros((3, 3))], [0, 1], [0, 1], [2]), "x is not one array"),
    "objects": (lambda: federate(np.array([[None]] * 10), Y, ALL, [10]), "not dtype object"),
    "text as inputs": (lambda: federate(np.array([["a"]] * 10), Y, ALL, [10]), "inputs must be one numeric array"),
    "lengths that differ": (lambda: federate(X, Y[:9], ALL, [10]), r"\(10, 2\) and \(9,\)"),
    "an empty client": (lambda: federate(X, Y, ALL, [10, 0]), "client 1 has none"),
    "no clients": (lambda: federate(X, Y, ALL, []), "every client needs at least 1 sample"),
    "sizes that do not sum": (lambda: federate(X, Y, ALL, [9]), r"order has shape \(10,\), but the sizes sum to S=9"),
    "unknown samples": (lambda: federate(X, Y, ALL + 1, [10]), "order names samples 1 to 10.*M=10"),
    "an empty view": (
        lambda: federate(X, Y, ALL, [9, 1], views=train_test_views([9, 1])),
        "view 'train' of client 1 is empty",
    ),
    "a view beyond": (lambda: federate(X, Y, ALL, [10], views={"train": ([0], [11])}), "view 'train' reaches beyond"),
    "a view of other clients": (
        lambda: federate(X, Y, ALL, [5, 5], views={"train": ([0], [5])}),
        r"view 'train' has begin \(1,\) and end \(1,\), but there are N=2 clients",
    ),
    "no views": (lambda: federate(X, Y, ALL, [10], views={}), "views is empty"),
    "half a sample": (lambda: federate(X, Y, ALL, [5.5, 4.5]), "sizes must hold integers, not dtype float64"),
    "half a class": (lambda: federate(X, Y, ALL, [10], num_classes=2.0), "num_classes=2.0 must be an integer of at least 0"),
    "a scale of other shape": (
        lambda: federate(X, Y, ALL, [10], scale=np.ones(3)),
        r"scale has shape \(3,\), which does not broadcast against one sample \(2,\)",
    ),
    "an offset that would add an axis": (
        lambda: federate(X[:, :1], Y, ALL, [10], offset=np.ones(3)),
        r"offset has shape \(3,\), which does not broadcast against one sample \(1,\)",
    ),
    "a scale of NaN": (lambda: federate(X, Y, ALL, [10], scale=np.nan), "scale holds NaN"),
    "bytes and numbers": (
        lambda: from_clients([(X.astype(np.uint8), Y), (X, Y)]),
        "some clients' inputs are uint8",
    ),
    "a client beyond": (lambda: federate(X, Y, ALL, [10]).client(1), "index=1, but there are N=1 clients"),
    "no clients given": (lambda: from_clients([]), "clients is empty"),
    "clients of mixed shape": (lambda: from_clients([(X, Y), (X[:, :1], Y)]), "clients' inputs differ in shape"),
    "client lengths differ": (lambda: from_clients([(X, Y[:9])]), "client 0 has 10 inputs and 9 labels"),
    "NaN targets": (lambda: federate(X, Y * np.nan, ALL, [10], num_classes=0), "targets hold NaN"),
    "share above one": (lambda: train_test_views([10], train=1.5), "train=1.5 must lie strictly between 0 and 1"),
    "an unknown view": (lambda: federate(X, Y, ALL, [10]).sizes("query"), "no view 'query'; they have train"),
    "an unknown view of a client": (lambda: federate(X, Y, ALL, [10]).client(0)["query"], "no view 'query'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_line(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_some_clients_are_the_same_clients_with_or_without_a_copy_of_their_samples():
    """Views and batches by comparison with the whole; a part of a part is still a part of the whole."""
    sizes = np.array([9, 16, 12, 8])
    whole = _numbered(sizes, views=train_test_views(sizes))
    chosen = np.array([3, 1])
    assert whole.room(2) == 28 and whole.room(4) == 45
    for part in (whole.select(chosen), whole.extract(chosen, 28), jax.jit(whole.select)(chosen)):
        assert (part.num_clients, part.total_clients) == (2, 4)
        np.testing.assert_array_equal(part.ids, chosen)
        for place, client in enumerate(chosen):
            for view in whole.views:
                key = jax.random.key(place)
                mine, same = part.client(place)[view], whole.client(int(client))[view]
                assert _seen(mine.epochs(key, 3, 2)) == _seen(same.epochs(key, 3, 2))
                assert _seen(mine.in_order(4)) == _seen(same.in_order(4))
    copy = whole.extract(chosen, 30)
    assert copy.x.shape == (30, 1) and (copy.x[24:] == 0).all()
    for part in (copy.select(np.array([1])), copy.extract(np.array([1]), 16)):
        assert np.asarray(part.ids).tolist() == [1] and part.total_clients == 4
        assert _seen(part.client(0)["train"].in_order(4)) == _seen(whole.client(1)["train"].in_order(4))
