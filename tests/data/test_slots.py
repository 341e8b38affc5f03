"""Partitions with fixed classes per client, compared with the numbers of FedMeta-Per and with a plain loop."""

import numpy as np
import pytest

from fedjax_meta.data import slots

MNIST_COUNTS = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)
MNIST = np.repeat(np.arange(10), MNIST_COUNTS)
CIFAR = np.repeat(np.arange(10), 6000)


def test_lognormal_classes_gives_table_2_of_fedmeta_per_from_label_counts():
    sizes = slots.lognormal_classes(CIFAR, slots.class_slots(50, 10, stride=1), seed=1).sizes
    assert (len(sizes), sizes.sum(), sizes.min(), sizes.max()) == (50, 52_497, 506, 1_986)
    assert sizes.mean() == pytest.approx(1_049.94, abs=0.005) and sizes.std() == pytest.approx(250.68, abs=0.005)


def test_stick_breaking_matches_fedmeta_per_on_mnist():
    pairs = slots.class_slots(50, 10)
    held = slots.stick_breaking(MNIST, pairs, seed=1)
    sizes = held.sizes
    assert (sizes.sum(), sizes.min(), sizes.mean(), sizes.max()) == (70_000, 137, 1_400, 5_201)
    assert sizes.std() == pytest.approx(1_424.0, abs=0.05)
    # Table 2 prints min 135, mean 1,398, std 1,424. One sample less in each slot gives these, with sizes from 135 to 5,199.
    assert (sizes - 2).min() == 135 and (sizes - 2).mean() == 1_398
    counts = held.class_counts(MNIST, 10)
    assert counts[0].tolist() == [1688, 3513, 0, 0, 0, 0, 0, 0, 0, 0]
    assert ((counts > 0).sum(1) == 2).all()
    assert int(0.25 * sizes[0]) + 1 == 1_301  # its test part, sizes[0] - int(0.75 * sizes[0])
    assert {tuple(np.flatnonzero(row)) for row in counts} == {(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)}


def test_neighbouring_pairs_of_fedmeta_per_are_ten_with_the_known_spread():
    held = slots.stick_breaking(MNIST, slots.class_slots(50, 10, stride=1), seed=1)
    assert held.sizes.std() == pytest.approx(1_366, abs=0.5)
    assert len({tuple(np.flatnonzero(row)) for row in held.class_counts(MNIST, 10)}) == 10


def test_stick_breaking_against_a_plain_loop():
    labels = np.random.default_rng(3).integers(0, 3, 400)
    pairs = np.array([[0, 1], [1, 2], [2, 0], [0, 1]])
    generator = np.random.RandomState(9)
    held = {u: [] for u in range(4)}
    for c in range(3):
        pool = np.flatnonzero(labels == c).tolist()
        takers = [u for u in range(4) if c in pairs[u]]
        lengths, rest = [], len(pool)
        for _ in takers[1:]:
            lengths.append(generator.randint(rest // (len(takers) + 1), rest // 2))
            rest -= lengths[-1]
        for u, length in zip(takers, [*lengths, rest], strict=True):
            held[u] += [pool.pop(0) for _ in range(length)]
    result = slots.stick_breaking(labels, pairs, seed=9)
    for u, mine in enumerate(np.split(result.order, np.cumsum(result.sizes)[:-1])):
        assert sorted(mine.tolist()) == sorted(held[u])


QUERY_OF_THE_LOGS = """3121, 2945, 1792, 2485, 1285, 968, 2360, 2858, 2074, 2245, 1939, 1057, 917, 1514, 1647, 968, 676, 909, 304,
    1475, 704, 558, 363, 397, 494, 349, 122, 192, 366, 436, 312, 142, 140, 236, 243, 182, 184, 121, 354, 144, 81, 172, 161, 253,
    101, 237, 254, 421, 508, 193"""


def test_parts_in_turn_give_the_sizes_of_the_logs_of_fedmeta_per():
    """`python -m experiments.published_cohorts` finds these sizes of the query sets, and ten pairs (u, u + 1)."""
    pairs = slots.class_slots(50, 10, stride=1)
    held = slots.stick_breaking(MNIST, pairs, seed=1, in_turn=True)
    train = (0.75 * held.sizes).astype(int)
    logged = np.array(QUERY_OF_THE_LOGS.split(","), int)
    assert np.abs(train - (0.2 * train).astype(int) - logged).max() <= 2
    np.testing.assert_array_equal(held.sizes, slots.stick_breaking(MNIST, slots.class_slots(50, 10), seed=1).sizes)
    counts = held.class_counts(MNIST, 10)
    assert all(set(np.flatnonzero(row)) == set(pair) for row, pair in zip(counts, pairs, strict=True))
    assert counts[0].tolist() == [1688, 3513, 0, 0, 0, 0, 0, 0, 0, 0]


def test_parts_in_turn_against_a_plain_loop():
    labels = np.random.default_rng(3).integers(0, 3, 400)
    pairs = np.array([[0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [2, 0]])
    generator = np.random.RandomState(9)
    parts = []
    for c in range(3):
        rest, part = int((labels == c).sum()), []
        for _ in range(3):
            part.append(generator.randint(rest // 5, rest // 2))
            rest -= part[-1]
        parts.append([*part, rest])
    turns = [parts[c][turn] for turn in range(4) for c in range(3)]
    held = [[i for c in pair for i in np.flatnonzero(labels == c)[: turns.pop(0)]] for pair in pairs]
    result = slots.stick_breaking(labels, pairs, seed=9, in_turn=True)
    for mine, wanted in zip(np.split(result.order, np.cumsum(result.sizes)[:-1]), held, strict=True):
        assert sorted(mine.tolist()) == sorted(wanted)


def test_samples_at_random_are_of_the_class_none_twice_and_as_many():
    pairs = slots.class_slots(50, 10, stride=1)
    first = slots.stick_breaking(MNIST, pairs, seed=1, in_turn=True)
    drawn, other = (slots.stick_breaking(MNIST, pairs, seed=1, in_turn=True, at_random=seed) for seed in (1, 2))
    np.testing.assert_array_equal(drawn.sizes, first.sizes)
    np.testing.assert_array_equal(drawn.class_counts(MNIST, 10), first.class_counts(MNIST, 10))
    np.testing.assert_array_equal(drawn.sizes, other.sizes)
    assert drawn.order.tolist() != other.order.tolist()
    of_clients = np.split(drawn.order, np.cumsum(drawn.sizes)[:-1])
    assert all(len(np.unique(mine)) == len(mine) for mine in of_clients)
    # Among the first samples of a class, clients share all that the smaller one has; among others hardly any by chance.
    counts = drawn.class_counts(MNIST, 10)
    for one, two, digit in ((10, 20, 0), (14, 24, 5)):
        a, b = (of_clients[u][MNIST[of_clients[u]] == digit] for u in (one, two))
        expected = counts[one, digit] * counts[two, digit] / np.bincount(MNIST)[digit]
        assert abs(len(np.intersect1d(a, b)) - expected) < 4 * expected**0.5


def test_stick_breaking_gives_every_client_min_samples():
    labels = np.repeat(np.arange(10), 50)
    pairs = slots.class_slots(20, 10)
    counts = slots.stick_breaking(labels, pairs, seed=0, min_samples=5).class_counts(labels, 10)
    assert counts[counts > 0].min() >= 5 and counts.sum() == 500


def test_new_pairs_differ_from_all_training_pairs():
    pairs = slots.class_slots(50, 10, stride=1)
    for seed in range(20):
        new = slots.new_client_slots(pairs, 10, np.random.default_rng(seed))
        assert {frozenset(p) for p in new.tolist()}.isdisjoint(frozenset(p) for p in pairs.tolist())


def test_published_newcomers_get_neighbours_in_a_plain_shuffle():
    """As the authors draw them: no order is refused, so that most of them share a pair with training clients."""
    pairs = slots.class_slots(50, 10, stride=1)
    shared = []
    for seed in range(200):
        new = slots.new_client_slots(pairs, 10, np.random.default_rng(seed), newcomers="as published")
        order = np.random.default_rng(seed).permutation(10)
        assert new.tolist() == [[order[u % 10], order[(u + 1) % 10]] for u in range(50)]
        shared.append(slots.shared_pairs(pairs, new))
    # Of 10 pairs each is a pair of training clients with probability 10 / 45.
    assert np.mean(shared) == pytest.approx(10 * 10 / 45, abs=0.3)


LABELS = np.repeat(np.arange(4), 25)
BAD = {
    "more classes than exist": (lambda: slots.class_slots(5, 10, per_client=11), "per_client=11 must not exceed.*10"),
    "a class without samples": (lambda: slots.stick_breaking(LABELS, [[3, 4]], seed=0), "slots name class 4"),
    "parts in turn of classes with 2 and 1 holders": (
        lambda: slots.stick_breaking(LABELS, [[0, 1], [0, 2]], seed=0, in_turn=True),
        "slots that hold every class equally often",
    ),
    "a part in turn that its class has not": (
        lambda: slots.stick_breaking(np.repeat([0, 1], [1000, 5]), [[0, 1], [1, 0]], seed=0, in_turn=True),
        "larger than the class of its slot",
    ),
    "random samples that nobody shares": (
        lambda: slots.stick_breaking(LABELS, [[0, 1], [0, 1]], seed=0, at_random=1),
        "at_random needs in_turn=True",
    ),
    "a class twice": (lambda: slots.stick_breaking(LABELS, [[3, 3]], seed=0), "a class twice"),
    "an empty client": (lambda: slots.stick_breaking(LABELS, slots.class_slots(100, 4), seed=0), "would be empty"),
    "min_samples too large for a class": (
        lambda: slots.stick_breaking(LABELS, slots.class_slots(4, 4, stride=1), seed=0, min_samples=13),
        "class 0 has 25 samples, too few for min_samples=13 of 2 clients",
    ),
    "clients not in tenths": (lambda: slots.lognormal_classes(CIFAR, slots.class_slots(12, 10), seed=1), "multiple of 10"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_and_names_the_argument(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
