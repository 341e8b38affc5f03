"""Each paper's protocol, compared with the numbers of the paper and its code."""

import jax
import numpy as np
import pytest

from fedjax_meta.data import Source, from_arrays, from_clients, from_partition, holdout, pixel_scaling, protocols
from fedjax_meta.data.builders import train_test_views
from fedjax_meta.task import Weighted

MNIST_TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
VIEWS = ("train", "support", "query", "test", "test_support", "test_query")


def _source(name, train, test, shape):
    """A data set of known class counts. The first three bytes of an image are its number, the fourth is its class."""

    def split(counts, first):
        y = np.random.default_rng(len(counts)).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
        x = np.zeros((len(y), *shape), np.uint8)
        number = np.arange(first, first + len(y))
        flat = x.reshape(len(y), -1)
        flat[:, 0], flat[:, 1], flat[:, 2], flat[:, 3] = number >> 16, (number >> 8) & 255, number & 255, y
        return x, y

    return Source(*split(train, 0), *split(test, sum(train)), len(train), name)


@pytest.fixture(scope="module")
def mnist():
    return _source("mnist", MNIST_TRAIN, MNIST_TEST, (2, 2, 1))


@pytest.fixture(scope="module")
def cifar():
    return _source("cifar10", (5000,) * 10, (1000,) * 10, (2, 2, 3))


def _rows(data, view, client):
    start, size = int(data.start[view][client]), int(data.sizes(view)[client])
    return slice(start, start + size)


def _numbers(data, view, client):
    flat = np.asarray(data.x)[_rows(data, view, client)].astype(int)
    flat = flat.reshape(len(flat), -1)
    return (flat[:, 0] << 16) + (flat[:, 1] << 8) + flat[:, 2]


def _counts(data, view):
    y = np.asarray(data.y)
    return np.stack([np.bincount(y[_rows(data, view, u)], minlength=data.num_classes) for u in range(data.num_clients)])


def _pairs(data, view):
    return {tuple(np.flatnonzero(row)) for row in _counts(data, view)}


def _check_views(data, support=0.2):
    """Support and query make up train, test_support and test_query make up test, and labels stay with their images."""
    for u in range(data.num_clients):
        for whole, first, second in (VIEWS[:3], VIEWS[3:]):
            joined = np.concatenate([_numbers(data, first, u), _numbers(data, second, u)])
            assert np.array_equal(joined, _numbers(data, whole, u))
            assert len(_numbers(data, first, u)) == max(int(support * len(joined) + 1e-9), 1)
    flat = np.asarray(data.x).reshape(len(data.y), -1)
    assert np.array_equal(flat[:, 3], data.y)
    assert data.views == VIEWS and isinstance(data.x, jax.Array) and data.x.dtype == np.uint8


# FedMeta-Per.


def test_fedmeta_per_on_mnist(mnist):
    p = protocols.fedmeta_per_clients(mnist)
    sizes = np.asarray(p.train.sizes("train")) + np.asarray(p.train.sizes("test"))
    assert (len(sizes), sizes.sum(), sizes.min(), sizes.max()) == (50, 70_000, 137, 5_201)
    assert sizes.std() == pytest.approx(1_424, abs=0.05)
    assert int(p.train.sizes("test")[0]) == 1_301 and int(p.train.sizes("train")[0]) == 3_900
    assert _pairs(p.train, "train") == {(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)}
    _check_views(p.train)
    numbers = np.concatenate([_numbers(p.train, v, u) for v in ("train", "test") for u in range(50)])
    assert np.array_equal(np.sort(numbers), np.arange(70_000))


def test_fedmeta_per_on_cifar10_has_the_numbers_of_table_2(cifar):
    p = protocols.fedmeta_per_clients(cifar)
    sizes = np.asarray(p.train.sizes("train")) + np.asarray(p.train.sizes("test"))
    assert (len(sizes), sizes.sum(), sizes.min(), sizes.max()) == (50, 52_497, 506, 1_986)
    assert sizes.mean() == pytest.approx(1_049.94, abs=0.005) and sizes.std() == pytest.approx(250.68, abs=0.005)
    pairs = [tuple(np.flatnonzero(row)) for row in _counts(p.train, "train")]
    assert len(set(pairs)) == 10 and all(pairs.count(pair) == 5 for pair in set(pairs))
    _check_views(p.train)
    # Stratified: each class of a client is cut at 75 %, up to one sample.
    train, test = _counts(p.train, "train"), _counts(p.train, "test")
    assert np.abs(train - 0.75 * (train + test)).max() <= 1
    assert np.array_equal(train.sum(1), (0.75 * sizes).astype(int))


@pytest.mark.parametrize(
    ("name", "options"),
    [("mnist", {"pairing": "2u+j"}), ("mnist", {"pairing": "u+j"}), ("cifar", {}), ("cifar", {"new_sizes": "stick"})],
)
def test_new_clients_of_fedmeta_per_share_the_test_parts_and_have_other_pairs(name, options, request):
    source = request.getfixturevalue(name)._replace(note="a set")
    p = protocols.fedmeta_per_clients(source, newcomers="unlike", **options)
    assert p.note == "a set. New clients hold pairs of classes that no training client has."
    assert p.new is not None and p.new.num_clients == 50 and p.new.views == ("support", "query")
    held_out = np.sort(np.concatenate([_numbers(p.train, "test", u) for u in range(50)]))
    given = np.sort(np.concatenate([_numbers(p.new, v, u) for v in p.new.views for u in range(50)]))
    as_training = name == "cifar" and not options  # each class is cut as for the clients that train, which leaves some samples
    assert np.array_equal(np.unique(given), given) and np.isin(given, held_out).all()
    assert 0.8 * len(held_out) < len(given) < len(held_out) if as_training else np.array_equal(given, held_out)
    whole = _counts(p.new, "support") + _counts(p.new, "query")
    assert ((whole > 0).sum(1) == 2).all()
    assert {tuple(np.flatnonzero(row)) for row in whole}.isdisjoint(_pairs(p.train, "train"))
    sizes = whole.sum(1)
    assert np.array_equal(p.new.sizes("support"), np.maximum(sizes // 5, 1))
    trained = np.asarray(p.train.sizes("train"))
    ratio = (sizes.std() / sizes.mean()) / (trained.std() / trained.mean())
    assert 0.7 < ratio < 1.5 if "new_sizes" not in options else ratio > 3


def test_new_clients_of_fedmeta_per_may_have_pairs_of_training_clients_unless_told_otherwise(mnist):
    """As published, the first order of the labels counts; seed 1 gives one that shares pairs."""
    given, left = (protocols.fedmeta_per_clients(mnist, **options) for options in ({"newcomers": "as published"}, {}))
    pairs = [_pairs(p.new, "query") for p in (given, left)]
    assert pairs[0] == pairs[1] and pairs[0] & _pairs(given.train, "train")


def test_orders_of_new_clients_stand_one_after_the_other(mnist):
    """Each order cuts all test parts again."""
    order = [3, 8, 0, 1, 4, 2, 5, 9, 6, 7]
    p = protocols.fedmeta_per_clients(mnist, orders=[order, list(range(10))])
    assert (
        p.orders == 2
        and p.new.num_clients == 100
        and "2 orders of the labels; of their pairs of classes, training clients have 2, 5, too." in p.note
    )
    whole = _counts(p.new, "support") + _counts(p.new, "query")
    pairs = [set(np.flatnonzero(row).tolist()) for row in whole]
    assert pairs[:50] == [{order[u % 10], order[(u + 1) % 10]} for u in range(50)]
    assert pairs[50:] == [{u % 10, (u + 1) % 10} for u in range(50)]
    _all_tests_in_each_order(p, 50)
    _sizes_by_the_authors_loop(p, whole, 50)


def test_clients_of_fl_imaml_have_neighbours_in_random_orders_and_support_of_each_class(mnist):
    """The loops of `gen_mnist.py` of the authors' study: 50 clients that train and 30 new ones, labels shuffled for both."""
    p = protocols.fl_imaml_clients(mnist, orders=2)
    assert (p.train.num_clients, p.new.num_clients, p.orders) == (50, 60, 2) and p.name.endswith("iMAML on mnist")
    _check_views(p.train)
    whole = _counts(p.new, "support") + _counts(p.new, "query")
    drawn = [
        [frozenset(np.flatnonzero(row).tolist()) for row in rows]
        for rows in (_counts(p.train, "train"), whole[:30], whole[30:])
    ]
    for pairs in drawn:
        assert pairs == pairs[:10] * (len(pairs) // 10) and len(set(pairs)) == 10
        # The ten pairs are one ring of all labels: u and u + 1 share a label, and so do the last and the first.
        assert all(len(pairs[u] & pairs[(u + 1) % 10]) == 1 for u in range(10)) and len(frozenset.union(*pairs)) == 10
    in_order = {frozenset({u, (u + 1) % 10}) for u in range(10)}
    assert len({frozenset(pairs) for pairs in drawn} | {frozenset(in_order)}) == 4
    # A fifth of each class, up to one sample.
    assert np.abs(_counts(p.new, "support") - 0.2 * whole).max() <= 1
    sizes = whole.sum(1)
    assert np.array_equal(p.new.sizes("support"), np.maximum(sizes // 5, 1))
    _all_tests_in_each_order(p, 30)
    _sizes_by_the_authors_loop(p, whole, 30)
    other = protocols.fl_imaml_clients(mnist, orders=2, seed=2)
    assert _pairs(other.train, "train") != _pairs(p.train, "train")


def test_clients_of_fl_imaml_may_misread_images_as_the_authors_do(cifar):
    """Channels first: torch's `reshape(3, 32, 32)` of values that are stored as [32, 32, 3]."""
    right, wrong = (protocols.fl_imaml_clients(cifar, misread=misread) for misread in (False, True))
    one, other = np.asarray(right.train.x[:5]), np.asarray(wrong.train.x[:5])
    assert one.shape == other.shape == (5, 2, 2, 3)
    for image, scrambled in zip(one, other, strict=True):
        flat = image.ravel().tolist()
        for c in range(3):
            assert scrambled[..., c].ravel().tolist() == flat[4 * c : 4 * c + 4]


def _all_tests_in_each_order(p: protocols.Protocol, many: int) -> None:
    """The new clients of each order, `many` of them, hold the test parts of all clients that train, none twice."""
    tests = np.sort(np.concatenate([_numbers(p.train, "test", u) for u in range(p.train.num_clients)]))
    for begin in range(0, p.new.num_clients, many):
        held = np.concatenate([_numbers(p.new, v, u) for v in p.new.views for u in range(begin, begin + many)])
        assert np.array_equal(np.sort(held), tests)


def _sizes_by_the_authors_loop(p: protocols.Protocol, whole: np.ndarray, many: int) -> None:
    generator = np.random.RandomState(1)
    for label, count in enumerate(_counts(p.train, "test").sum(0).tolist()):
        parts, rest = [], count
        for _ in range(2 * many // 10 - 1):
            parts.append(generator.randint(rest // 11, rest // 2))
            rest -= parts[-1]
        for block in (whole[:many, label], whole[many:, label]):
            assert block[block > 0].tolist() == [*parts, rest]


def test_the_seed_determines_fedmeta_per(mnist):
    one, same, other = (protocols.fedmeta_per_clients(mnist, seed=s) for s in (1, 1, 2))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(same), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(one.train.sizes("train"), other.train.sizes("train"))


def test_other_draws_of_fedmeta_per_may_keep_the_sizes(mnist):
    published = {"pairing": "u+j", "sizes": "stick in turn", "samples": "random"}
    first, second, other = (
        protocols.fedmeta_per_clients(mnist, seed=seed, **published, **given)
        for seed, given in ((1, {}), (2, {"sizes_seed": 1}), (2, {}))
    )
    for view in first.train.views:
        np.testing.assert_array_equal(first.train.sizes(view), second.train.sizes(view))
    assert not np.array_equal(first.train.sizes("train"), other.train.sizes("train"))
    assert not np.array_equal(first.train.x, second.train.x)


def test_fedmeta_per_on_a_small_set_has_samples_in_every_view():
    rng = np.random.default_rng(0)
    small = from_arrays(
        rng.integers(0, 256, (5000, 2, 2, 1), dtype=np.uint8), np.repeat(np.arange(10), 500), name="mnist_small"
    )
    p = protocols.fedmeta_per_clients(small)
    for data in (p.train, p.new):
        for view in data.views:
            assert int(np.min(data.sizes(view))) >= 1
        assert int(np.min(data.sizes(data.views[-1]))) >= 5
    sizes = np.asarray(p.train.sizes("train"))
    assert sizes.max() > 5 * sizes.min() and len(p.train.y) == 5000


def test_iid_control_and_centralised_split_of_fedmeta_per(mnist, cifar):
    data = protocols.fedmeta_per_iid_clients(mnist)
    sizes = np.asarray(data.sizes("train")) + np.asarray(data.sizes("test"))
    assert (sizes == 1_400).all() and (_counts(data, "train") > 0).all()
    _check_views(data)
    assert set(
        (np.asarray((d := protocols.fedmeta_per_iid_clients(cifar)).sizes("train")) + np.asarray(d.sizes("test"))).tolist()
    ) == {1200}
    one = protocols.fedmeta_per_iid_clients(mnist, num_clients=1, train=0.8)
    assert one.sizes("train").tolist() == [56_000] and one.sizes("test").tolist() == [14_000]


def test_pooled_is_the_union_of_every_view(mnist):
    train = protocols.fedmeta_per_clients(mnist).train
    one = protocols.pooled(train)
    assert one.num_clients == 1 and one.views == train.views and one.num_classes == train.num_classes
    for view in VIEWS:
        together = np.sort(np.concatenate([_numbers(train, view, u) for u in range(50)]))
        assert np.array_equal(np.sort(_numbers(one, view, 0)), together)
    assert np.array_equal(one.scale, train.scale)


def test_clients_that_have_only_some_views_are_pooled_too():
    """A client with a single held-out sample has no halves of it; views that are no halves of others are left out."""
    data = from_clients([(np.full((n, 2), n), np.arange(n) % 2) for n in (5, 20, 30)], num_classes=2)
    some = holdout.validation_samples(data, 0.2)
    one = protocols.pooled(some)
    assert one.views == some.views and "test_support" not in one.views

    def held(view):
        batch = view.full(chunk_size=60).get(0, 0)
        return np.asarray(batch.x)[np.asarray(batch.weight) > 0, 0].tolist()

    for view in one.views:
        assert sorted(held(one.client(0)[view])) == sorted(x for c in range(3) for x in held(some.client(c)[view]))
    bounds = {name: (np.asarray(data.start[name]), np.asarray(data.sizes(name))) for name in data.views}
    start, size = bounds["query"]
    odd = holdout.with_views(data, {name: bounds[name] for name in ("train", "support")} | {"query": (start, size + 1)})
    assert protocols.pooled(odd).views == ("train",)
    beside = {"support": (start, size), "query": (bounds["support"][0], bounds["support"][1])}  # in another order
    assert protocols.pooled(holdout.with_views(data, {"train": bounds["train"], **beside})).views == ("train",)
    with pytest.raises(ValueError, match="the data have no view 'train'"):
        protocols.pooled(holdout.with_views(data, {"test": bounds["test"]}))


# Scaling.

# Scaling.


def test_pixel_scaling_standardises_each_pixel():
    x = np.random.default_rng(0).integers(0, 256, (5000, 3, 2, 1), dtype=np.uint8)
    x[:, 0, 0] = 7
    scale = pixel_scaling(x, "pixel")
    z = (x.astype(np.float64) - scale["offset"]) * scale["scale"]
    expected = (x - x.mean(0)) / (x.astype(np.float64).std(0) + 0.001)
    assert z == pytest.approx(expected, abs=1e-3)
    # A constant pixel becomes 0 (up to the float32 offset), not NaN.
    assert np.abs(z[:, 0, 0]).max() < 1e-3


def test_pixel_scaling_does_not_depend_on_the_order(mnist):
    x = mnist.x_train
    one, other = pixel_scaling(x, "pixel"), pixel_scaling(x[::-1], "pixel")
    assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("scaling", "low", "high"), [("unit", 0, 1), ("half", -1, 1)])
def test_other_scalings(scaling, low, high):
    scale = pixel_scaling(np.zeros((1, 1, 1, 1), np.uint8), scaling)
    assert (0 - scale["offset"]) * scale["scale"] == pytest.approx(low)
    assert (255 - scale["offset"]) * scale["scale"] == pytest.approx(high)


def test_cifar_scaling_uses_the_usual_constants():
    scale = pixel_scaling(np.zeros((1, 2, 2, 3), np.uint8), "cifar")
    white = (255 - scale["offset"]) * scale["scale"]
    assert white == pytest.approx([(1 - 0.4914) / 0.2023, (1 - 0.4822) / 0.1994, (1 - 0.4465) / 0.2010], rel=1e-5)


# FedPAC, Per-FedAvg-Reptile, MTFL.


def test_fedpac_on_cifar10(cifar):
    p = protocols.fedpac_clients(cifar)
    train, test = _counts(p.train, "train"), _counts(p.train, "test")
    for i in range(20):
        group = list(protocols.FEDPAC_GROUPS[10][i % 5])
        for counts, uniform, dominant in ((train, 12, 160), (test, 6, 80)):
            expected = np.full(10, uniform)
            expected[group] += dominant
            assert np.array_equal(counts[i], expected)
    _check_views(p.train)
    # Training samples are from the official training split and local tests from the test split, each sample at most once.
    trained = np.concatenate([_numbers(p.train, "train", u) for u in range(20)])
    tested = np.concatenate([_numbers(p.train, "test", u) for u in range(20)])
    assert trained.max() < 50_000 <= tested.min()
    assert len(np.unique(trained)) == 12_000 and len(np.unique(tested)) == 6_000


def test_fedpac_on_emnist_has_three_groups_and_1000_samples_per_client():
    emnist = _source("emnist/byclass", (2000,) * 62, (1000,) * 62, (2, 2, 1))
    p = protocols.fedpac_clients(emnist, num_clients=6)
    counts = _counts(p.train, "train")
    assert (counts.sum(1) == 1000).all() and (np.asarray(p.train.sizes("test")) == 600).all()
    # 800 / 10 = 80 of each digit plus the uniform 3; 800 over 26 letters is 30 each and 20 more for the last.
    assert (counts[0, :10] == 83).all() and (counts[1, 10:35] == 33).all() and counts[1, 35] == 53 and counts[2, 61] == 67


def test_fedpac_on_fashion_mnist_shares_test_samples_and_says_so():
    fashion = _source("fashion_mnist", (6000,) * 10, (1000,) * 10, (2, 2, 1))
    p = protocols.fedpac_clients(fashion)
    assert (np.asarray(p.train.sizes("test")) == 600).all()
    tested = [_numbers(p.train, "test", u) for u in range(20)]
    assert all(len(np.unique(one)) == 600 for one in tested)
    different = len(np.unique(np.concatenate(tested)))
    assert different < 10_000 and f"12,000 tests: clients share its samples, {different:,} different ones" in p.note
    assert "share" not in protocols.fedpac_clients(fashion, test_size=300).note
    with pytest.raises(ValueError, match=r"class 0 has 6000 samples, but the clients ask for 7600.*share=True"):
        protocols.fedpac_clients(fashion, size=3000, test_size=300)
    trained = np.concatenate([_numbers(p.train, "train", u) for u in range(20)])
    assert len(np.unique(trained)) == 12_000


def test_concept_shift_of_fedpac_permutes_the_labels_of_each_group(cifar):
    plain, shifted = protocols.fedpac_clients(cifar), protocols.fedpac_clients(cifar, concept_groups=2)
    flat = np.asarray(shifted.train.x).reshape(len(shifted.train.y), -1)
    assert np.array_equal(shifted.train.x, plain.train.x)
    mappings = []
    for u in (0, 1, 2, 3):
        rows = slice(
            int(shifted.train.start["train"][u]), int(shifted.train.start["test"][u] + shifted.train.sizes("test")[u])
        )
        image, label = flat[rows, 3], np.asarray(shifted.train.y)[rows]
        mapping = np.array([label[image == c][0] for c in range(10)])
        assert np.array_equal(mapping[image], label)
        mappings.append(mapping.tolist())
    assert mappings[0] == mappings[2] == list(range(10)) and mappings[1] == mappings[3] != mappings[0]
    assert sorted(mappings[1]) == list(range(10))


def test_perfedavg_reptile_on_images(mnist):
    p = protocols.perfedavg_reptile_clients(mnist)
    train, test = np.asarray(p.train.sizes("train")), np.asarray(p.train.sizes("test"))
    sizes = train + test
    assert sizes.sum() == 70_000 and len(sizes) == 50 and sizes.min() >= 10
    assert np.array_equal(train, (sizes * 7) // 10)
    assert np.array_equal(p.train.sizes("test_support"), test * 3 // 10)
    assert np.array_equal(np.asarray(p.train.sizes("test_query")), test - test * 3 // 10)
    _check_views(p.train, support=0.3)
    # Dir_50(0.5): a share of a class has variance (1/50)(49/50) / 26.
    share = (_counts(p.train, "train") + _counts(p.train, "test")) / (np.array(MNIST_TRAIN) + MNIST_TEST)
    assert share.var() == pytest.approx(0.0196 / 26, rel=0.25)


def test_perfedavg_reptile_on_synthetic_clients():
    p = protocols.perfedavg_reptile_synthetic_clients(0.5, 0.5)
    sizes = np.asarray(p.train.sizes("train")) + np.asarray(p.train.sizes("test"))
    assert len(sizes) == 30 and sizes.min() >= 100 and sizes.max() <= 1000
    assert np.array_equal(p.train.sizes("train"), sizes * 7 // 10)
    assert p.train.x.shape[1] == 60 and p.train.num_classes == 10


def test_clients_whose_tests_are_dealt_train_on_a_mixture_of_their_classes_in_every_part(mnist):
    """The views are cut in storage order: within a client, samples must not stand class by class."""
    p = protocols.dealt_tests_clients(mnist, num_clients=100)
    _check_views(p.train)
    support, query = (_counts(p.train, view) for view in ("support", "query"))
    share = support.sum(1, keepdims=True) / (support + query).sum(1, keepdims=True)
    # The part of a class that is in the support view has a hypergeometric distribution; its deviation is below 0.2 here.
    often = support + query >= 50
    assert often.sum() > 100 and np.abs(support / np.maximum(support + query, 1) - share)[often].max() < 0.35


@pytest.mark.parametrize(("clients", "train", "test"), [(200, {300}, {50}), (400, {150}, {24, 25, 26})])
def test_mtfl_on_mnist(mnist, clients, train, test):
    p = protocols.mtfl_clients(mnist, num_clients=clients)
    assert p.train.num_clients == clients
    assert set(p.train.sizes("train").tolist()) == train and set(p.train.sizes("test").tolist()) == test
    assert p.noisy.size == 0
    _check_views(p.train)
    for view, total in (("train", range(60_000)), ("test", range(60_000, 70_000))):
        numbers = np.sort(np.concatenate([_numbers(p.train, view, u) for u in range(clients)]))
        assert np.array_equal(numbers, total)


def test_local_tests_of_mtfl_have_the_training_classes_if_shards_divide_classes(cifar):
    p = protocols.mtfl_clients(cifar)
    assert np.array_equal(_counts(p.train, "train"), 5 * _counts(p.train, "test"))
    assert (_counts(p.train, "train") > 0).sum(1).max() == 2


MIXED = {
    "mtfl": (lambda s: protocols.mtfl_clients(s, num_clients=200).train, ("support", "query")),
    "fedpac": (lambda s: protocols.fedpac_clients(s).train, ("support", "query")),
    "perfedavg_reptile": (lambda s: protocols.perfedavg_reptile_clients(s).train, ("train", "test")),
    "new clients of fedmeta_per": (lambda s: protocols.fedmeta_per_clients(s).new, ("support", "query")),
}
"""What makes clients, and two views that are parts of one."""


@pytest.mark.parametrize("name", MIXED)
def test_the_samples_of_a_client_do_not_stand_class_by_class(name, cifar):
    make, (one, other) = MIXED[name]
    data = make(cifar)
    first, second = _counts(data, one), _counts(data, other)
    share = first.sum(1, keepdims=True) / (first + second).sum(1, keepdims=True)
    # A class's part in the first view has a hypergeometric distribution around the share; its deviation is below 0.04 here.
    often = first + second >= 100
    assert often.sum() > 40 and np.abs(first / np.maximum(first + second, 1) - share)[often].max() < 0.17


def test_splits_of_fedpac_are_drawn_by_the_seed(cifar):
    one, other = (protocols.fedpac_clients(cifar, seed=seed).train for seed in (1, 2))
    assert np.array_equal(_counts(one, "train"), _counts(other, "train"))
    assert not set(_numbers(one, "train", 0)) <= set(_numbers(other, "train", 0))


def test_queries_that_a_new_client_has_adapted_on_are_counted_in_the_note(mnist):
    """As published, clients share samples, so that the test parts hold some several times."""
    new = protocols.fedmeta_per_clients(mnist, sizes="stick in turn", pairing="u+j")
    sides = [[_numbers(new.new, view, u) for view in ("support", "query")] for u in range(50)]
    twice = sum(int(np.isin(query, support).sum()) for support, query in sides)
    assert twice > 0 and f"{twice} of {sum(len(query) for _, query in sides)} queries of new clients" in new.note
    assert "share samples" not in protocols.fedmeta_per_clients(mnist).note


@pytest.mark.parametrize(
    ("samples", "clients", "steps"), [(60_000, 200, 15), (60_000, 400, 8), (50_000, 200, 12), (50_000, 400, 6)]
)
def test_local_steps_of_an_epoch_of_mtfl(samples, clients, steps):
    assert protocols.local_steps(samples, clients) == steps == int(np.round(samples / (clients * 20)))


def test_noise_of_mtfl_is_on_training_images_of_a_fifth_of_the_clients(mnist):
    clean, noisy = protocols.mtfl_clients(mnist), protocols.mtfl_clients(mnist, noisy=0.2)
    assert len(noisy.noisy) == len(set(noisy.noisy.tolist())) == 40
    assert np.array_equal(clean.train.y, noisy.train.y)
    before, after = np.asarray(clean.train.x), np.asarray(noisy.train.x)
    for u in range(200):
        assert np.array_equal(before[_rows(clean.train, "test", u)], after[_rows(noisy.train, "test", u)])
        changed = not np.array_equal(before[_rows(clean.train, "train", u)], after[_rows(noisy.train, "train", u)])
        assert changed == (u in noisy.noisy)
    # These images are nearly black: with standard deviation 3.0, half of the pixels are clipped to 0, and P(N > 1/3) = 0.369 of
    # them to 255.
    pixels = np.concatenate([after[_rows(noisy.train, "train", u)].reshape(-1, 4)[:, 0] for u in noisy.noisy])
    assert (pixels == 0).mean() == pytest.approx(0.5, abs=0.02) and (pixels == 255).mean() == pytest.approx(0.369, abs=0.02)


BAD = {
    "unknown pairing": (
        lambda s: protocols.fedmeta_per_clients(s, pairing="u"),
        "pairing='u' is unknown; allowed are 2u\\+j, u\\+j",
    ),
    "unknown newcomers": (lambda s: protocols.fedmeta_per_clients(s, newcomers="like"), "newcomers='like' is unknown"),
    "an order that lacks a class": (lambda s: protocols.fedmeta_per_clients(s, orders=[[0, 1]]), "orders=.* must be a number"),
    "no orders": (lambda s: protocols.fedmeta_per_clients(s, orders=0), "orders=0 must be an integer"),
    "no new clients": (lambda s: protocols.fl_imaml_clients(s, num_new=0), "num_new=0 must be an integer"),
    "misread rows": (
        lambda s: protocols.fl_imaml_clients(
            s._replace(x_train=s.x_train[:, 0, :, 0], x_test=s.x_test[:, 0, :, 0]), misread=True
        ),
        "misread=True is for images",
    ),
    "unknown sizes": (lambda s: protocols.fedmeta_per_clients(s, sizes="equal"), "sizes='equal' is unknown"),
    "unknown new_sizes": (lambda s: protocols.fedmeta_per_clients(s, new_sizes="equal"), "new_sizes='equal' is unknown"),
    "new clients not in tenths": (
        lambda s: protocols.fedmeta_per_clients(s, new_sizes="lognormal", num_clients=25),
        "num_clients=25 must be a multiple of 10",
    ),
    "unknown samples": (lambda s: protocols.fedmeta_per_clients(s, samples="last"), "samples='last' is unknown"),
    "random samples that nobody shares": (
        lambda s: protocols.fedmeta_per_clients(s, samples="random"),
        'needs sizes="stick in turn"',
    ),
    "unknown scaling": (lambda s: protocols.fedmeta_per_clients(s, scaling="z"), "scaling='z' is unknown"),
    "too many clients": (lambda s: protocols.fedmeta_per_clients(s, num_clients=70_000), "would be empty"),
    "too few classes for new clients": (
        lambda s: protocols.fedmeta_per_clients(
            from_arrays(s.x_train[:8000], np.arange(8000) % 4), num_clients=4, pairing="u+j", newcomers="unlike"
        ),
        "with 4 classes no pairs are left",
    ),
    "groups for other classes": (
        lambda s: protocols.fedpac_clients(from_arrays(s.x_train[:600], np.arange(600) % 4)),
        "groups must be given for 4 classes",
    ),
    "concentration": (lambda s: protocols.perfedavg_reptile_clients(s, concentration=0), "concentration=0 must be"),
    "noisy share": (lambda s: protocols.mtfl_clients(s, noisy=1.5), "noisy=1.5 must lie between 0 and 1"),
    "support share": (lambda s: protocols.mtfl_clients(s, support=0), "support=0 must lie strictly between 0 and 1"),
    "a word for a flag": (lambda s: protocols.fl_imaml_clients(s, misread="no"), "misread='no' must be True or False"),
    "too many shards": (lambda s: protocols.mtfl_clients(s, num_clients=6000), "12000 shards are more than the M=10000"),
    "floats": (
        lambda s: protocols.fedmeta_per_clients(s._replace(x_train=s.x_train / 255, x_test=s.x_test / 255)),
        "for uint8 images",
    ),
    "colours": (lambda s: protocols.fedpac_clients(s, scaling="cifar", size=10), "3 channels, not 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_names_the_argument(case, mnist):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call(mnist)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["stored bytes", "flat", "tree", "weighted targets"])
def test_pooled_clients_hold_the_samples_as_they_are(form):
    rng = np.random.default_rng(0)
    x, y, options = rng.integers(0, 256, (40, 4, 4, 1)).astype(np.uint8), np.arange(40) % 3, {}
    if form == "stored bytes":
        options = {"scale": "stored"}
    if form == "tree":
        x = {"item": np.arange(40, dtype=np.int32), "image": x.astype(np.float32)}
    if form == "weighted targets":
        y = Weighted(np.stack([y, y], 1), rng.random((40, 2)).astype(np.float32))
    sizes = np.array([25, 15])
    data = from_partition(x, y, np.arange(40), sizes, num_classes=3, views=train_test_views(sizes), **options)
    data = data.flat() if form == "flat" else data
    one = protocols.pooled(data)
    assert one.num_clients == 1 and one.sample_shapes == data.sample_shapes and one.num_classes == 3

    def held(client, view):
        """Bytes of the samples and targets of a client, as its batches have them."""
        batch = client[view].full(chunk_size=40).get(0, 0)
        rows = jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(batch.weight) > 0], (batch.x, batch.y))
        return [(leaf.dtype, sorted(map(bytes, leaf))) for leaf in jax.tree.leaves(rows)]

    for view in data.views:
        wanted = [held(data.client(c), view) for c in (0, 1)]
        together = [(kind, sorted(one + other)) for (kind, one), (_, other) in zip(*wanted, strict=True)]
        assert held(one.client(0), view) == together
