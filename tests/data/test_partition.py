"""Partitioners: no sample is assigned twice, the seed determines the result, sizes and class counts are as documented."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedjax_meta.data import holdout, slots
from fedjax_meta.data import partition as part
from fedjax_meta.data.registry import PARTITIONS

# For each partitioner: a call with (labels, clients, seed), and whether every sample is assigned.
PARTITIONERS = {
    "iid": (lambda y, n, seed: part.iid(y, n, seed=seed), True),
    "quantity_skew": (lambda y, n, seed: part.quantity_skew(y, n, concentration=0.4, seed=seed), True),
    "shards": (lambda y, n, seed: part.shards(y, part.shard_assignment(n, seed=seed), uneven=True), True),
    "dirichlet_classes": (lambda y, n, seed: part.dirichlet_classes(y, n, concentration=0.3, seed=seed), True),
    "dirichlet_clients": (lambda y, n, seed: part.dirichlet_clients(y, n, concentration=0.3, seed=seed), True),
    "natural": (lambda y, n, seed: part.natural(np.random.default_rng(seed).integers(0, n, len(y))), True),
    "stick_breaking": (
        lambda y, n, seed: slots.stick_breaking(y, slots.class_slots(n, y.max() + 1, stride=1), seed=seed, min_samples=1),
        False,
    ),
    "lognormal_classes": (
        lambda y, n, seed: slots.lognormal_classes(y, slots.class_slots(10, y.max() + 1, stride=1), seed=seed),
        False,
    ),
    "dominant_groups": (
        lambda y, n, seed: part.dominant_groups(
            np.random.default_rng(seed).permutation(y), n, groups=((0,), (1, 2)), size=len(y) // (4 * n), num_classes=3
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", PARTITIONERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_sample_is_assigned_twice_and_the_seed_determines_the_result(name, data):
    call, everything = PARTITIONERS[name]
    clients = data.draw(st.integers(2, 8), label="clients")
    seed = data.draw(st.integers(0, 2**31 - 1), label="seed")
    counts = data.draw(st.lists(st.integers(60, 200), min_size=3, max_size=3), label="counts")
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(3), counts))
    try:
        first = call(labels, clients, seed)
    except ValueError as error:
        # Classes that are too small for the request must be an error.
        assert "too few" in str(error) or "ask for" in str(error)
        assume(False)
    again = call(labels.copy(), clients, seed)
    assert np.array_equal(first.order, again.order) and np.array_equal(first.sizes, again.sizes)
    assert first.order.shape == (first.sizes.sum(),) and first.sizes.min() >= 1
    assert first.order.min() >= 0 and first.order.max() < len(labels)
    assert len(np.unique(first.order)) == len(first.order)
    if everything:
        assert len(first.order) == len(labels)
    mixed = first.shuffled(seed)
    assert np.array_equal(mixed.sizes, first.sizes)
    assert np.array_equal(mixed.class_counts(labels, 3), first.class_counts(labels, 3))
    with pytest.raises(ValueError, match=r"labels=.* must be integers in \[0, 2\)"):
        mixed.class_counts(labels, 2)


@pytest.mark.parametrize("name", ["iid", "quantity_skew", "shards", "dirichlet_classes", "dirichlet_clients"])
def test_another_seed_gives_another_partition(name):
    call, _ = PARTITIONERS[name]
    labels = np.repeat(np.arange(4), 100)
    one, other = call(labels, 5, 0), call(labels, 5, 1)
    assert not np.array_equal(one.order, other.order)


def test_shuffled_moves_samples_only_within_a_client():
    held = part.iid(np.zeros(100, int), 3, seed=0)
    mixed = held.shuffled(1)
    assert not np.array_equal(mixed.order, held.order)
    cuts = np.cumsum(held.sizes)[:-1]
    for before, after in zip(np.split(held.order, cuts), np.split(mixed.order, cuts), strict=True):
        assert np.array_equal(np.sort(before), np.sort(after))


def test_shuffle_is_uniform_over_the_orders_of_a_client():
    # Chi-square over the 6 orders of client 0's three samples: 5 degrees of freedom, 25.7 is its 1 - 1e-4 quantile.
    rng = np.random.default_rng(0)
    held = part.Partition(np.arange(5), np.array([3, 2]))
    seen = {order: 0 for order in itertools.permutations(range(3))}
    for _ in range(3000):
        seen[tuple(held.shuffled(rng).order[:3].tolist())] += 1
    assert sum((count - 500) ** 2 / 500 for count in seen.values()) < 25.7


def test_a_shuffle_of_very_many_clients_mixes_the_samples_of_each():
    """There, another sort is used than for fewer clients."""
    held = part.Partition(np.arange(140_000), np.full(70_000, 2))
    order = held.shuffled(0).order.reshape(-1, 2)
    assert (order.min(1) == 2 * np.arange(70_000)).all()
    assert (order[:, 0] > order[:, 1]).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("samples", "clients"), [(10, 3), (9, 3), (7, 7)])
def test_iid_sizes_differ_by_at_most_one(samples, clients):
    sizes = part.iid(np.zeros(samples, int), clients, seed=0).sizes
    assert sizes.sum() == samples and sizes.max() - sizes.min() <= 1


def test_shards_against_array_split():
    labels = np.random.default_rng(0).integers(0, 10, 999)
    assignment = part.shard_assignment(20, seed=5)
    held = part.shards(labels, assignment, uneven=True)
    pieces = np.array_split(np.argsort(labels, kind="stable"), 40)
    assert np.array_equal(held.order, np.concatenate([pieces[s] for s in assignment.ravel()]))


@pytest.mark.parametrize(("clients", "train", "test"), [(200, {300}, {50}), (400, {150}, {24, 25, 26})])
def test_shards_of_mnist_have_the_sizes_of_mtfl(clients, train, test):
    # 60,000 and 10,000 samples in 2W shards: 150 or 75 a training shard, 25 or 12 to 13 a test shard.
    assignment = part.shard_assignment(clients, seed=0)
    train_labels, test_labels = np.arange(60_000) // 6000, np.arange(10_000) // 1000
    held = part.shards(train_labels, assignment)
    local = part.shards(test_labels, assignment, uneven=True)
    assert set(held.sizes.tolist()) == train and set(local.sizes.tolist()) == test
    if clients == 200:
        # With shards and classes of equal size, the same assignment gives a client the same classes in its test.
        assert np.array_equal(held.class_counts(train_labels, 10), 6 * local.class_counts(test_labels, 10))


def test_dirichlet_classes_has_the_moments_of_its_shares():
    # A share of Dir_N(a) has mean 1/N and variance (1/N)(1 - 1/N) / (N a + 1).
    clients, concentration = 20, 0.5
    labels = np.repeat(np.arange(400), 1000)
    counts = part.dirichlet_classes(labels, clients, concentration=concentration, seed=0).class_counts(labels, 400)
    share = counts.T / 1000
    assert share.sum(1) == pytest.approx(1)
    assert share.mean(0) == pytest.approx(1 / clients, abs=0.015)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * concentration + 1)
    assert share.var() == pytest.approx(variance, rel=0.06)


def test_dirichlet_classes_fills_up_small_clients():
    labels = np.repeat(np.arange(3), 100)
    held = part.dirichlet_classes(labels, 40, concentration=0.05, seed=0, min_samples=6)
    assert held.sizes.min() == 6 and held.sizes.sum() == 300


def test_small_clients_are_filled_up_at_random_by_those_that_have_more():
    """Nobody gives what it needs itself, whoever has more gives in proportion, and all others keep what they drew."""
    labels, least = np.repeat(np.arange(40), 5000), 300
    drawn, filled = (
        part.dirichlet_classes(labels, 400, concentration=0.1, seed=3, min_samples=some).sizes for some in (1, least)
    )
    poor, spare = drawn < least, np.maximum(drawn - least, 0)
    assert drawn.min() > 1 and poor.sum() > 50 and drawn.sum() == filled.sum() == len(labels)
    assert (filled[poor] == least).all() and (filled[~poor] >= least).all() and (filled[~poor] <= drawn[~poor]).all()
    expected = spare * (least - drawn[poor]).sum() / spare.sum()
    for half in (slice(0, 200), slice(200, 400)):
        assert (drawn - filled)[half][~poor[half]].sum() == pytest.approx(expected[half].sum(), rel=0.05)
    assert (part.dirichlet_classes(labels, 400, concentration=0.1, seed=3, min_samples=500).sizes == 500).all()


def test_dirichlet_clients_range_from_one_class_to_the_mix_of_the_data_set():
    labels = np.repeat(np.arange(5), 2000)
    sizes = np.full(50, 20)
    single = part.dirichlet_clients(labels, 50, concentration=1e-3, sizes=sizes, seed=0).class_counts(labels, 5)
    mixed = part.dirichlet_clients(labels, 50, concentration=1e6, sizes=sizes, seed=0).class_counts(labels, 5)
    assert (single.max(1) == 20).mean() > 0.9
    # A multinomial of 20 over 5 equal classes: 4 each, variance 3.2.
    assert mixed.mean(0) == pytest.approx(4, abs=0.8) and mixed.var() == pytest.approx(3.2, rel=0.3)


def test_dirichlet_clients_have_the_mix_of_the_data_set_on_average():
    counts = np.array([5000, 2000, 1600, 1000, 400])
    labels = np.repeat(np.arange(5), counts)
    held = part.dirichlet_clients(labels, 100, concentration=5.0, sizes=np.full(100, 20), seed=0)
    assert held.class_counts(labels, 5).mean(0) / 20 == pytest.approx(counts / counts.sum(), abs=0.05)


@pytest.mark.parametrize(("name", "options"), [("dirichlet_classes", {"concentration": 1e6}), ("classes", {"per_client": 2})])
def test_which_samples_of_a_class_a_client_gets_is_drawn(name, options):
    """Not only how many: the samples of a class do not stand in the order of storage."""
    labels = np.repeat(np.arange(5), 400)
    drawn = [PARTITIONS[name](labels, 5, seed=seed, **options) for seed in (0, 1)]
    of = [np.split(held.order, np.cumsum(held.sizes)[:-1]) for held in drawn]
    for mine in of[0]:
        label = labels[mine[0]]
        same = np.sort(mine[labels[mine] == label])
        assert np.diff(same).max() > 1
    assert not any(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(*of, strict=True))


def test_dirichlet_clients_replace_an_exhausted_class_by_the_others():
    labels = np.array([0] * 5 + [1] * 95)
    held = part.dirichlet_clients(labels, 10, concentration=0.1, sizes=np.full(10, 10), seed=0)
    assert np.array_equal(np.sort(held.order), np.arange(100)) and (held.sizes == 10).all()


def test_what_replaces_an_exhausted_class_is_drawn_among_all_that_is_left():
    """Of clients with one class each, those of a class that is asked for too often get the mix of what nobody asked for."""
    labels = np.repeat(np.arange(4), 1000)
    held = part.dirichlet_clients(labels, 20, concentration=1e-5, sizes=np.full(20, 150), seed=2).class_counts(labels, 4)
    wanted = 150 * np.bincount(held.argmax(1), minlength=4)
    assert (wanted > 1000).sum() == 1 and wanted.sum() == 3000
    rich, others = wanted.argmax(), np.flatnonzero(wanted <= 1000)
    left = 1000 - wanted[others]
    replaced = held[held.argmax(1) == rich][:, others].sum(0)
    assert replaced == pytest.approx((wanted[rich] - 1000) * left / left.sum(), rel=0.25)


def test_dominant_groups_has_the_counts_of_fedpac():
    # 600 samples, 20 % uniform: 12 of each of ten classes, and 160 of each of the three classes of the group.
    groups = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))
    labels = np.repeat(np.arange(10), 5000)
    held = part.dominant_groups(labels, 20, groups=groups, size=600, first=2000)
    expected = np.full((20, 10), 12)
    for i in range(20):
        expected[i, list(groups[i % 5])] += 160
    assert np.array_equal(held.class_counts(labels, 10), expected)
    assert len(np.unique(held.order)) == 12_000


def test_dominant_groups_gives_the_remainder_to_the_last_class():
    # EMNIST-like: int(0.2 * 1000) = 200 over 62 classes is 3 each and 14 more for the last; 800 over 26 is 30 and 20 more.
    groups = (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62)))
    labels = np.repeat(np.arange(62), 200)
    counts = part.dominant_groups(labels, 3, groups=groups, size=1000, num_classes=62).class_counts(labels, 62)
    expected = np.full(62, 3)
    expected[61] += 14
    expected[10:36] += 30
    expected[35] += 20
    assert np.array_equal(counts[1], expected) and (counts.sum(1) == 1000).all()


def test_a_group_names_a_class_once():
    with pytest.raises(ValueError, match=r"the group \[0, 0, 1\] names a class twice"):
        part.dominant_groups(np.repeat(np.arange(3), 50), 3, groups=[[2], [0, 0, 1]], size=10)


def test_a_class_with_fewer_samples_than_clients_is_refused():
    labels = np.array([0] * 20 + [1] * 3)
    with pytest.raises(ValueError, match="class 1 has 3 samples for 4 clients: take fewer clients"):
        PARTITIONS["classes"](labels, 4, per_client=2, seed=0)


def test_dominant_groups_shares_samples_only_if_allowed():
    labels = np.repeat(np.arange(3), 50)
    options = dict(groups=((0, 1, 2),), size=60)
    with pytest.raises(ValueError, match=r"class 0 has 50 samples, but the clients ask for 60.*share=True"):
        part.dominant_groups(labels, 3, **options)
    shared = part.dominant_groups(labels, 3, share=True, **options)
    assert len(shared.order) == 180 and len(np.unique(shared.order)) == 150
    # No client holds a sample twice, and all samples are used before any is used again.
    for mine in np.split(shared.order, 3):
        assert len(np.unique(mine)) == 60


@pytest.mark.parametrize("labels", [np.repeat([0, 1, 3], 10), np.repeat([0, 1], 10)])
def test_dominant_groups_has_no_samples_of_a_class_without_any(labels):
    """Also where another class is shorter, and where the class is the last one."""
    options = {"groups": [[0, 1]], "size": 20, "uniform": 0.4, "share": True, "num_classes": 4}
    with pytest.raises(ValueError, match=r"class [23] has 0 samples, but the clients ask for .*; leave it out of groups"):
        part.dominant_groups(labels, 4, **options)


def test_small_classes_are_dealt_without_favour():
    """A hundred classes of ten samples and twenty clients of equal shares: about 50 each."""
    labels = np.repeat(np.arange(100), 10)
    sizes = part.dirichlet_classes(labels, 20, concentration=1000.0, seed=0).sizes
    assert sizes.min() > 30 and sizes.max() < 70
    drawn = [part.dirichlet_classes(labels, 20, concentration=1.0, seed=seed).sizes for seed in range(100)]
    np.testing.assert_allclose(np.mean(drawn, 0), 50, atol=5)  # standard error 1


def test_who_is_new_does_not_follow_from_the_classes():
    """As many clients as classes: the deck of classes and the order of clients are drawn from one seed."""
    labels = np.arange(1000) % 10
    classes = []
    for seed in range(400):
        held = PARTITIONS["classes"](labels, 10, seed=seed).class_counts(labels, 10) > 0
        classes.append(held[holdout.held_out(10, 0.2, seed)[0]].mean(0))
    share = np.mean(classes, 0)
    np.testing.assert_allclose(share, share.mean(), atol=0.06)  # standard error 0.013


def test_quantity_skew_sizes_have_the_moments_of_its_shares():
    sizes = np.stack([part.quantity_skew(np.zeros(10_000, int), 10, concentration=1.0, seed=s).sizes for s in range(300)])
    # Dir_10(1): mean 0.1, variance 0.1 * 0.9 / 11.
    assert sizes.sum(1).tolist() == [10_000] * 300
    assert (sizes / 10_000).var() == pytest.approx(0.09 / 11, rel=0.1)


def test_natural_is_one_client_per_writer_without_the_small_ones():
    writers = np.array(["anna", "bob", "anna", "carl", "bob", "anna"])
    held = part.natural(writers, min_samples=2)
    assert held.sizes.tolist() == [3, 2] and held.order.tolist() == [0, 2, 5, 1, 4]


def test_many_clients_need_no_loop_over_clients():
    # 100,000 clients keep the suite fast; the cost is linear except for sorting.
    labels = np.random.default_rng(0).integers(0, 10, 1_000_000).astype(np.int32)
    begin = time.perf_counter()
    for call in (
        lambda: part.iid(labels, 100_000, seed=0),
        lambda: part.dirichlet_classes(labels, 100_000, concentration=0.5, seed=0),
        lambda: part.dirichlet_clients(labels, 100_000, concentration=0.5, seed=0),
        lambda: part.shards(labels, part.shard_assignment(100_000, seed=0)),
        lambda: part.natural(np.arange(1_000_000) % 100_000),
        lambda: PARTITIONS["classes"](labels, 100_000, seed=0),
    ):
        held = call()
        assert len(held.sizes) == 100_000 and held.sizes.min() >= 1
        assert np.bincount(held.order, minlength=1_000_000).tobytes() == np.ones(1_000_000, np.int64).tobytes()
    # Each call takes 0.1 s or less, and "classes", which deals them one by one, a second; the square of that would take minutes.
    assert time.perf_counter() - begin < 20


LABELS = np.repeat(np.arange(4), 25)
BAD = {
    "no labels": (lambda: part.iid(np.zeros(0, int), 1, seed=0), r"labels must be integers \[M\] with M >= 1"),
    "labels as strings": (lambda: part.iid(np.array(["a", "b"]), 1, seed=0), r"labels must be integers.*return_inverse"),
    "labels with NaN": (lambda: part.iid(np.array([0.0, np.nan]), 1, seed=0), "labels must be integers"),
    "negative labels": (lambda: part.iid(np.array([0, -1]), 1, seed=0), "labels must not be negative, but one is -1"),
    "more clients than samples": (lambda: part.iid(LABELS, 101, seed=0), "num_clients=101.*M=100"),
    "no clients": (lambda: part.iid(LABELS, 0, seed=0), "num_clients=0 must be an integer of at least 1"),
    "alpha zero": (lambda: part.dirichlet_classes(LABELS, 5, concentration=0, seed=0), "concentration=0 must be .* above 0"),
    "alpha negative": (lambda: part.dirichlet_clients(LABELS, 5, concentration=-1, seed=0), "concentration=-1 must be"),
    "alpha NaN": (lambda: part.quantity_skew(LABELS, 5, concentration=np.nan, seed=0), "concentration=nan must be"),
    "min_samples too large": (
        lambda: part.dirichlet_classes(LABELS, 5, concentration=1, seed=0, min_samples=21),
        "num_clients=5.*21",
    ),
    "shards that do not divide": (lambda: part.shards(LABELS, part.shard_assignment(3, seed=0)), "M=100.*6 equal shards"),
    "more shards than samples": (lambda: part.shards(LABELS, part.shard_assignment(51, seed=0)), "102 shards are more"),
    "assignment with holes": (lambda: part.shards(LABELS, [[0, 2]]), "assignment must be a permutation"),
    "group of an unknown class": (
        lambda: part.dominant_groups(LABELS, 2, groups=((4,),), size=5),
        "groups=.* must be integers in",
    ),
    "uniform above one": (lambda: part.dominant_groups(LABELS, 2, groups=((0,),), size=5, uniform=1.1), "uniform=1.1"),
    "sizes beyond the data": (
        lambda: part.dirichlet_clients(LABELS, 2, concentration=1, seed=0, sizes=[60, 60]),
        "sizes must be N=2 counts.*M=100.*120",
    ),
    "no client is large enough": (lambda: part.natural(np.arange(5), min_samples=2), "min_samples=2 must be at most 1"),
    "features without type": (lambda: part.natural(np.array([None, 1], dtype=object)), "features must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_names_the_argument(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_classes_that_no_sample_has_change_nothing():
    """Some sets count from 1, and some leave classes out."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 400)
    gaps = np.array([1, 2, 5, 70, 71, 90_000])[labels]
    for rule, options in (("classes", {"per_client": 2}), ("dirichlet_classes", {"concentration": 0.3})):
        one, other = (PARTITIONS[rule](y, 20, seed=1, **options) for y in (labels, gaps))
        assert np.array_equal(one.order, other.order) and np.array_equal(one.sizes, other.sizes)


@pytest.mark.parametrize("rule", ["quantity_skew", "dirichlet_classes", "dirichlet_clients"])
def test_a_concentration_whose_shares_are_no_numbers_is_refused(rule):
    with pytest.raises(ValueError, match=r"concentration=1.7e\+308 must lie in"):
        getattr(part, rule)(np.arange(100) % 4, 10, concentration=1.7e308, seed=0)


def test_mixes_of_classes_have_the_variance_of_their_distribution():
    """Dirichlet-multinomial: n/K (1 - 1/K) (n + K alpha) / (1 + K alpha)."""
    labels, n, k, alpha = np.repeat(np.arange(5), 16_000), 20, 5, 0.5
    held = part.dirichlet_clients(labels, 2000, concentration=alpha, sizes=np.full(2000, n), seed=0)
    expected = n / k * (1 - 1 / k) * (n + k * alpha) / (1 + k * alpha)
    assert held.class_counts(labels, k).var(0).mean() == pytest.approx(expected, rel=0.08)
