"""Samples that are held back for the choice of hyper-parameters."""

import numpy as np
import pytest

from fedjax_meta.data import from_clients, from_partition, holdout
from fedjax_meta.study.scenario import Scenario


def clients(*sizes):
    sizes = np.array(sizes)
    x = np.zeros((sizes.sum(), 2), np.float32)
    return from_partition(x, np.arange(len(x)) % 2, np.arange(len(x)), sizes, num_classes=2)


def test_the_view_that_is_scored_is_never_empty():
    data = clients(3, 4, 6, 32)
    held = holdout.validation_samples(data, 0.2, scored="test_query")
    assert np.asarray(held.sizes("test_query")).min() >= 1 and np.asarray(held.sizes("train")).min() >= 1
    whole = np.asarray(data.sizes("train"))
    assert (np.asarray(held.sizes("train")) + np.asarray(held.sizes("test")) == whole).all()
    # Who tests on all held-back samples needs one.
    held = holdout.validation_samples(data, 0.2)
    assert np.asarray(held.sizes("test")).tolist() == [1, 1, 1, 6]
    assert "test_query" not in held.views  # of one sample, nothing would be left to score
    assert all(np.asarray(held.sizes(view)).min() > 0 for view in held.views if view.startswith("test"))


@pytest.mark.parametrize("scored", ["test", "test_query"])
@pytest.mark.parametrize("smallest", [3, 4, 5, 6])
def test_no_view_is_without_samples(smallest, scored):
    held = holdout.validation_samples(clients(smallest, 20, 21), 0.2, scored=scored)
    assert all(np.asarray(held.sizes(view)).min() > 0 for view in held.views)
    two = smallest > (3 if scored == "test_query" else 2)
    assert ("query" in held.views) == two and int(np.asarray(held.sizes("train"))[0]) >= 1 + two


def test_clients_that_are_too_small_are_named():
    with pytest.raises(ValueError, match="client 1 has 2 train samples: validation on 'test_query' needs at least 3"):
        holdout.validation_samples(clients(9, 2), 0.2, scored="test_query")


def test_a_study_that_adapts_on_a_part_of_the_test_samples_tunes_on_some():
    scenario = Scenario(dataset="mnist_small", partition="iid", clients=300, adapt_on="test_support", new=0.0)
    assert np.asarray(scenario.build().tuning.sizes("test_query")).min() >= 1


def _numbered(views):
    """4 clients of 40 samples; client c holds the numbers from 100 c on."""
    x = np.concatenate([100.0 * client + np.arange(40.0) for client in range(4)])[:, None]
    views = {name: (np.full(4, begin), np.full(4, end)) for name, (begin, end) in views.items()}
    return from_partition(x, np.zeros(160, int), np.arange(160), np.full(4, 40), num_classes=2, views=views)


def test_new_clients_have_their_own_samples_alone():
    data = _numbered({"train": (0, 30), "test": (30, 40)})
    _, new = holdout.new_clients(data, 0.25, seed=0)
    begin, end = int(new.start["support"][0]), int(new.start["query"][0] + new.size["query"][0])
    assert end - begin == 40 and len({int(x) // 100 for x in np.asarray(data.x)[begin:end, 0]}) == 1
    for odd in (_numbered({"test": (0, 10), "train": (10, 40)}), data.limited("train", 5)):
        with pytest.raises(ValueError, match="the test samples of client 0 do not follow its training samples"):
            holdout.new_clients(odd, 0.25, seed=0)
    for support in (2.0, float("nan"), -1):
        with pytest.raises(ValueError, match="support="):
            holdout.new_clients(data, 0.25, support=support, seed=0)
    with pytest.raises(ValueError, match="view 'test'"):
        holdout.new_clients(_numbered({"train": (0, 40)}), 0.25, seed=0)


def test_clients_that_stay_have_ids_of_their_own():
    some = from_clients([(np.full((20, 2), float(c)), np.arange(20) % 2) for c in range(5)]).select(np.array([4, 2, 0, 1]))
    rest, new = holdout.new_clients(some, 0.25, seed=0)
    for data in (rest, new):
        assert data.ids is None and data.total_clients == data.num_clients
        assert data.ids_of(np.arange(data.num_clients)).tolist() == list(range(data.num_clients))


@pytest.mark.parametrize("count", [10, 30])
def test_a_generator_draws_other_new_clients_each_time(count):
    data = from_clients([(np.full((8, 1), i), np.arange(8) % 2) for i in range(count)], num_classes=2)
    rng = np.random.default_rng(0)
    drawn = [np.asarray(holdout.new_clients(data, 0.3, seed=rng)[1].start["support"]).tolist() for _ in range(2)]
    assert drawn[0] != drawn[1] and len(drawn[0]) == len(drawn[1]) == 0.3 * count
    first, second = (holdout.held_out(count, 0.3, rng)[0].tolist() for _ in range(2))
    assert first != second and len(first) == len(second) == 0.3 * count


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_noisy_clients_are_not_those_that_validation_holds_out(seed):
    """Else trials would train on clean clients alone, and be judged by noisy ones."""
    options = {"dataset": "mnist_small", "partition": "iid", "clients": 50, "new": 0.2, "seed": seed}
    plain, noisy = Scenario(**options).build(), Scenario(**options, shift="noise").build()
    x, y = (np.asarray(one.train.x, float) for one in (plain, noisy))
    start, size = np.asarray(plain.train.start["train"]), np.asarray(plain.train.sizes("train"))
    hit = {c for c in range(len(start)) if np.abs(x - y)[start[c] : start[c] + size[c]].max() > 0}
    held = set(holdout.held_out(plain.train.num_clients, 0.2, seed)[0].tolist())
    assert len(hit) == len(held) == 8 and hit != held


def test_validation_samples_are_the_last_of_the_train_view_and_none_of_them_trains():
    x = np.arange(60.0)[:, None]
    views = {"train": (np.zeros(2, int), np.array([20, 30])), "test": (np.array([20, 30]), np.array([25, 35]))}
    data = from_partition(x, np.zeros(60, int), np.arange(60), np.array([25, 35]), num_classes=2, views=views)
    held = holdout.validation_samples(data, 0.2)

    def of(view, client):
        begin = int(held.start[view][client])
        return held.x[begin : begin + int(held.size[view][client]), 0].tolist()

    for client, (first, cut, end) in enumerate(((0, 16, 20), (25, 49, 55))):
        assert of("train", client) == list(range(first, cut)) and of("test", client) == list(range(cut, end))
        assert of("support", client) + of("query", client) == of("train", client)
        assert of("test_support", client) + of("test_query", client) == of("test", client)


def test_the_support_of_a_new_client_is_its_share_in_spite_of_rounding():
    """0.29 of 100 is 28.999999999999996 in floating point."""
    views = {"train": (np.zeros(4, int), np.full(4, 75)), "test": (np.full(4, 75), np.full(4, 100))}
    data = from_partition(np.zeros((400, 1)), np.zeros(400, int), np.arange(400), np.full(4, 100), num_classes=2, views=views)
    assert holdout.new_clients(data, 0.25, support=0.29, seed=0)[1].sizes("support").tolist() == [29]
