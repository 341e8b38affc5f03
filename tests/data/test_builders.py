"""Builders of federated data: the layout of the arrays, the default views and the input checks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_meta.data import from_clients, from_partition, train_test_views
from fedjax_meta.data.builders import nested_views
from tests.data.common import SIZES, seen


def test_memory_holds_each_sample_once_and_keeps_the_type():
    x = np.random.default_rng(0).integers(0, 256, (26, 4, 4, 1), dtype=np.uint8)
    data = from_partition(x, np.zeros(26, int), np.random.default_rng(1).permutation(26), SIZES)
    assert data.x.nbytes == x.nbytes and data.x.dtype == np.uint8
    assert data.num_clients == 4 and data.views == ("train",) and data.num_classes == 1


def test_samples_are_stored_in_the_given_order():
    x, y = np.arange(6.0)[:, None], np.array([0, 1, 2, 0, 1, 2])
    data = from_partition(x, y, [5, 0, 3, 3], [1, 3])
    assert np.asarray(data.x)[:, 0].tolist() == [5, 0, 3, 3] and np.asarray(data.y).tolist() == [2, 0, 0, 0]
    assert seen(data.client(1)["train"].in_order(2)) == [[0, 3], [3]]


@given(sizes=st.lists(st.integers(8, 500), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_default_views_are_the_fractions_of_fedmeta_per(sizes):
    views = train_test_views(sizes)
    for i, n in enumerate(sizes):
        cut = {name: (int(begin[i]), int(end[i])) for name, (begin, end) in views.items()}
        train = int(0.75 * n)
        assert cut["train"] == (0, train) and cut["test"] == (train, n)
        inner, outer = max(train // 5, 1), train + max((n - train) // 5, 1)
        assert cut["support"] == (0, inner) and cut["query"] == (inner, train)
        assert cut["test_support"] == (train, outer) and cut["test_query"] == (outer, n)


def test_shares_are_not_changed_by_binary_rounding():
    # 0.29 * 100 is 28.999999999999996 in binary.
    assert train_test_views([100], train=0.29)["train"][1].tolist() == [29]


def test_the_smallest_client_without_an_empty_view_has_five_samples():
    sizes = {n: min(int(end[0] - begin[0]) for begin, end in train_test_views([n]).values()) for n in (4, 5)}
    assert sizes == {4: 0, 5: 1}


def test_real_targets_are_kept():
    y = np.array([[0.5, 1.0], [2.0, -3.0]])
    data = from_partition(np.ones((2, 1)), y, [1, 0], [2], num_classes=0)
    batch = data.client(0)["train"].in_order(2).get(0)
    assert data.num_classes == 0 and np.asarray(batch.y).tolist() == [[2.0, -3.0], [0.5, 1.0]]


def test_from_clients_concatenates_the_clients_arrays():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 2)), rng.integers(0, 3, n)) for n in (10, 20)]
    data = from_clients(clients, num_classes=3)
    assert np.array_equal(data.x, np.concatenate([x for x, _ in clients]))
    assert np.asarray(data.sizes("train")).tolist() == [7, 15] and np.asarray(data.sizes("test_query")).tolist() == [2, 4]


def test_labels_of_several_integer_types_and_views_that_are_not_given():
    clients = [(np.ones((8, 2)), (np.arange(8) % 3).astype(kind)) for kind in (np.uint64, np.int64, np.uint8)]
    data = from_clients(clients, views=None)
    assert data.num_classes == 3 and data.views == from_clients(clients[1:]).views and "test" in data.views


def test_a_mapped_file_in_order_is_not_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(20.0).reshape(10, 2))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert np.shares_memory(from_partition(x, Y, ALL, [4, 6]).x, x)
    assert not np.shares_memory(from_partition(x, Y, ALL[::-1], [4, 6]).x, x)


X, Y = np.zeros((10, 2)), np.zeros(10, int)
ALL = np.arange(10)
BAD = {
    "labels as strings": (
        lambda: from_partition(X, np.array(["a"] * 10), ALL, [10]),
        "labels must be integers, not dtype <U1",
    ),
    "real labels": (lambda: from_partition(X, np.zeros(10), ALL, [10]), "labels must be integers"),
    "labels out of range": (
        lambda: from_partition(X, Y + 3, ALL, [10], num_classes=3),
        r"labels run from 3 to 3.*num_classes=3\)",
    ),
    "negative labels": (lambda: from_partition(X, Y - 1, ALL, [10]), "labels run from -1"),
    "NaN": (lambda: from_partition(X * np.nan, Y, ALL, [10]), "inputs hold NaN"),
    "mixed shapes": (lambda: from_partition([np.zeros((2, 2)), np.zeros((3, 3))], [0, 1], [0, 1], [2]), "x is not one array"),
    "objects": (lambda: from_partition(np.array([[None]] * 10), Y, ALL, [10]), "not dtype object"),
    "text as inputs": (lambda: from_partition(np.array([["a"]] * 10), Y, ALL, [10]), "inputs must be one numeric array"),
    "different lengths": (lambda: from_partition(X, Y[:9], ALL, [10]), r"\(10, 2\) and \(9,\)"),
    "an empty client": (lambda: from_partition(X, Y, ALL, [10, 0]), "client 1 has none"),
    "no clients": (
        lambda: from_partition(X, Y, ALL, []),
        r"sizes must be counts \[N\] of N >= 1 clients, not of shape \(0,\)",
    ),
    "another sum of sizes": (
        lambda: from_partition(X, Y, ALL, [9]),
        r"order has shape \(10,\), but the sizes sum to S=9",
    ),
    "unknown samples": (lambda: from_partition(X, Y, ALL + 1, [10]), "order names samples 1 to 10.*M=10"),
    "an empty view": (
        lambda: from_partition(X, Y, ALL, [9, 1], views=train_test_views([9, 1])),
        "view 'train' of client 1 is empty",
    ),
    "a view past the end": (
        lambda: from_partition(X, Y, ALL, [10], views={"train": ([0], [11])}),
        "view 'train' of client 0 reaches from 0 to 11, beyond",
    ),
    "a view of another number of clients": (
        lambda: from_partition(X, Y, ALL, [5, 5], views={"train": ([0], [5])}),
        r"view 'train' has begin \(1,\) and end \(1,\), but there are N=2 clients",
    ),
    "no views": (lambda: from_partition(X, Y, ALL, [10], views={}), "views is empty"),
    "fractional sizes": (
        lambda: from_partition(X, Y, ALL, [5.5, 4.5]),
        r"sizes must be one array of integers, not \[5.5, 4.5\]",
    ),
    "fractional number of classes": (
        lambda: from_partition(X, Y, ALL, [10], num_classes=2.0),
        "num_classes=2.0 must be an integer of at least 0",
    ),
    "a scale of another shape": (
        lambda: from_partition(X, Y, ALL, [10], scale=np.ones(3)),
        r"scale has shape \(3,\), which does not broadcast against one sample \(2,\)",
    ),
    "an offset that would add an axis": (
        lambda: from_partition(X[:, :1], Y, ALL, [10], offset=np.ones(3)),
        r"offset has shape \(3,\), which does not broadcast against one sample \(1,\)",
    ),
    "a scale of NaN": (lambda: from_partition(X, Y, ALL, [10], scale=np.nan), "scale holds NaN"),
    "uint8 and float clients": (
        lambda: from_clients([(X.astype(np.uint8), Y), (X, Y)]),
        "some clients' inputs are uint8",
    ),
    "an empty list of clients": (lambda: from_clients([]), "clients is empty"),
    "clients of mixed shape": (lambda: from_clients([(X, Y), (X[:, :1], Y)]), "clients' inputs differ in shape"),
    "a client's lengths differ": (lambda: from_clients([(X, Y[:9])]), "client 0 has 10 inputs and 9 labels"),
    "NaN targets": (lambda: from_partition(X, Y * np.nan, ALL, [10], num_classes=0), "targets hold NaN"),
    "share above one": (lambda: train_test_views([10], train=1.5), "train=1.5 must lie strictly between 0 and 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_names_the_argument(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_arrays_of_another_byte_order_and_type_are_taken():
    """As files of NetCDF and MATLAB have them."""
    x, y, order = np.arange(12, dtype=">f4").reshape(6, 2), np.arange(6, dtype=">i2") % 2, np.arange(6)
    data = from_partition(x, y, order, [4, 2])
    batch = data.client(0)["train"].in_order(4).get(0)
    assert np.array_equal(batch.x, x[:4].astype(np.float32)) and np.array_equal(batch.y, y[:4])
    # 8 bits would wrap around.
    assert nested_views(np.array([200], np.uint8), np.array([100], np.uint8))["test"][1] == 300
    assert nested_views([3, 4], [5, 6])["train"][1].tolist() == [3, 4]


def test_more_scales_than_inputs_are_an_error():
    x = (np.zeros((6, 2), np.float32), np.zeros((6, 3), np.float32))
    with pytest.raises(ValueError, match="scale=.* must name leaves of the inputs"):
        from_partition(x, np.arange(6) % 2, np.arange(6), [4, 2], scale=(0.5, 0.5, 0.5))


def test_labels_that_count_from_1_bring_a_note():
    x = np.zeros((6, 2), np.float32)
    with pytest.warns(UserWarning, match=r"labels run from 1 to 3, so that a model has 4 classes, class 0 among them"):
        assert from_clients([(x, [1, 2, 3, 1, 2, 3])]).num_classes == 4
    assert from_clients([(x, [1, 2, 3, 1, 2, 3])], num_classes=4).num_classes == 4
    tokens = np.tile([1, 2, 3], (6, 1))  # of which 0 may be padding
    assert from_clients([(tokens, tokens)], num_classes=4).num_classes == 4
