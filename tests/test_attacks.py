"""Attacks: closed forms, who attacks, and what an attack does to a round of every method."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.flatten_util import ravel_pytree

import fedjax_meta as fm
from fedjax_meta import aggregate, attacks
from fedjax_meta.uploads import clip
from tests import problems
from tests.methods import common
from tests.test_contract import build, method_of

KEY = jax.random.key(6)
LIAR = 3
"""The client that attacks in most tests."""


def send_alone(attack, change, key=KEY):
    zeros = jax.tree.map(jnp.zeros_like, change)
    return attack.alone(key, jnp.ones((), bool), jax.tree.map(jnp.asarray, change), zeros)


def send_together(attack, changes, liars, returned=None, before=None):
    """What the clients of a cohort send, `[C, D]`, cut into two leaves on the way."""
    liars, changes = np.asarray(liars, bool), np.asarray(changes, float)
    returned = np.ones(len(changes), bool) if returned is None else returned
    before = np.zeros_like(changes) if before is None else before
    cut = lambda array: {"a": jnp.asarray(array[:, :2]), "b": jnp.asarray(array[:, 2:, None])}  # noqa: E731
    sent = jax.jit(attack.together)(jnp.asarray(liars), jnp.asarray(returned), cut(changes + before), cut(before))
    return np.concatenate([sent["a"], sent["b"][..., 0]], 1)


# Closed forms.


def test_sign_flip_and_gaussian_in_closed_form():
    change = {"a": np.array([1.0, -2.0], np.float32), "n": np.array([3, 4])}
    flipped = send_alone(attacks.sign_flip((0,), scale=10.0), change)
    assert flipped["a"].tolist() == [-10, 20] and flipped["n"].tolist() == [3, 4]
    assert flipped["a"].dtype == jnp.float32
    noise = send_alone(attacks.gaussian((0,), deviation=3.0), {"a": np.full(40_000, 7.0), "b": np.full(40_000, 7.0)})
    for leaf in noise.values():
        # A mean of 40,000 draws has a standard error of 0.015, their deviation one of 0.011.
        assert abs(np.mean(leaf)) < 0.06 and abs(np.std(leaf) - 3) < 0.05
    assert abs(np.corrcoef(noise["a"], noise["b"])[0, 1]) < 0.02
    assert abs(np.std(send_alone(attacks.gaussian((0,)), {"a": np.zeros(40_000)})["a"]) - 1) < 0.02
    # Numbers of 16 bits are rounded once, after all else.
    change = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.bfloat16)
    wanted = (-3.3 * change.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(send_alone(attacks.sign_flip((0,), scale=3.3), {"a": change})["a"], wanted)


def test_an_attack_acts_on_the_difference_from_what_was_there_before(rng):
    sent, before = jnp.array([3.0, 5.0]), jnp.array([2.0, 7.0])
    attack = attacks.sign_flip((0,), scale=2.0)
    assert attack.alone(KEY, jnp.ones((), bool), sent, before).tolist() == [0, 11]
    assert attack.alone(KEY, jnp.zeros((), bool), sent, before).tolist() == [3, 5]
    changes, own = rng.normal(size=(5, 4)), rng.normal(size=(5, 4))
    got = send_together(attacks.ipm((0,), scale=0.3), changes, [1, 0, 0, 0, 1], before=own)
    np.testing.assert_allclose(got[[0, 4]], own[[0, 4]] - 0.3 * changes[1:4].mean(0), rtol=1e-12)
    np.testing.assert_allclose(got[1:4], (changes + own)[1:4], rtol=0, atol=0)


@pytest.mark.parametrize("missing", [(), (1, 6)], ids=str)
def test_attacks_that_see_others_read_honest_clients_that_returned_and_nobody_else(missing, rng):
    changes, liars = rng.normal(size=(9, 5)), np.isin(np.arange(9), (0, 6))
    returned = ~np.isin(np.arange(9), missing)
    honest = changes[returned & ~liars]
    spoilt = np.where(returned[:, None], changes, np.nan)
    spoilt[liars] *= 100
    mean, deviation = honest.mean(0), honest.std(0)
    n, m = returned.sum(), (returned & liars).sum()
    z = scipy.stats.norm.ppf((n - m - (np.floor(n / 2 + 1) - m)) / (n - m))
    expected = {
        attacks.ipm((0,), scale=2.0): -2 * mean,
        attacks.alie((0,), z=1.5): mean - 1.5 * deviation,
        attacks.alie((0,)): mean - z * deviation,
    }
    for attack, lie in expected.items():
        got = send_together(attack, spoilt, liars, returned)
        np.testing.assert_allclose(got[returned & liars], np.tile(lie, (m, 1)), rtol=1e-10)
        np.testing.assert_array_equal(got[~liars], spoilt[~liars])


@pytest.mark.parametrize(("clients", "liars"), [(50, 24), (20, 4), (11, 5), (50, 12)])
def test_the_largest_z_is_the_papers_quantile(clients, liars):
    supporters = clients // 2 + 1 - liars
    expected = scipy.stats.norm.ppf((clients - liars - supporters) / (clients - liars))
    assert float(attacks.largest_z(clients, liars)) == pytest.approx(expected, rel=1e-6)
    # With half of the clients or more there is no bound.
    assert float(attacks.largest_z(10, 8)) == pytest.approx(scipy.stats.norm.ppf(1 - 1e-6), rel=1e-6)
    assert np.isfinite(attacks.largest_z(1, 1))


def search(fits):
    """The largest gamma that fits, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(200):
        low, high = ((low + high) / 2, high) if fits((low + high) / 2) else (low, (low + high) / 2)
    return low


@pytest.mark.parametrize("direction", attacks.together.DIRECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_min_max_and_min_sum_go_as_far_as_a_search_finds(direction, seed):
    changes, liars = np.random.default_rng(seed).normal(0.3, 1, (8, 5)), np.isin(np.arange(8), (2, 7))
    honest = changes[~liars]
    mean = honest.mean(0)
    p = {"deviation": -honest.std(0), "sign": -np.sign(mean), "unit": -mean / np.linalg.norm(mean)}[direction]
    square = ((honest[:, None] - honest[None]) ** 2).sum(-1)
    distances = lambda gamma: ((mean + gamma * p - honest) ** 2).sum(-1)  # noqa: E731
    far = search(lambda gamma: distances(gamma).max() <= square.max())
    much = search(lambda gamma: distances(gamma).sum() <= square.sum(1).max())
    for attack, gamma in ((attacks.min_max, far), (attacks.min_sum, much)):
        got = send_together(attack((2, 7), direction=direction), changes, liars)
        np.testing.assert_allclose(got[liars], np.tile(mean + gamma * p, (2, 1)), rtol=1e-8)


def test_attackers_that_see_nobody_stay_honest(rng):
    changes = rng.normal(size=(3, 4))
    for make in (attacks.ipm, attacks.alie, attacks.min_max, attacks.min_sum):
        np.testing.assert_array_equal(send_together(make((0,)), changes, np.ones(3)), changes)
        alone = send_together(make((0,)), changes, [1, 0, 1], np.array([True, True, False]))
        assert np.isfinite(alone).all()


@pytest.mark.parametrize("make", [attacks.ipm, attacks.alie, attacks.min_max, attacks.min_sum, attacks.gaussian])
def test_clients_that_send_nothing_cannot_lie(make):
    federation = {"cohort_size": 3, "devices": 1, "lanes": 1}
    plain, attacked = (
        fm.federate(method_of("local_only"), fm.Federation(**federation, attack=attack)) for attack in (None, make((0,)))
    )
    data = problems.data()
    results = [of.round(jax.random.key(1), of.init(jax.random.key(0), data), data)[0] for of in (plain, attacked)]
    assert problems.distance(*results) == 0


# Who attacks, and on which data.


def test_attackers_are_ids_or_a_share():
    assert np.flatnonzero(attacks.sign_flip((5, 2)).members(7)).tolist() == [2, 5]
    some = attacks.sign_flip(0.2, seed=4).members(50)
    assert some.sum() == 10 and np.array_equal(some, attacks.ipm(0.2, seed=4).members(50))
    assert not np.array_equal(some, attacks.sign_flip(0.2, seed=5).members(50))
    assert attacks.sign_flip(0.29).members(100).sum() == 29 and attacks.sign_flip(0.5).members(7).sum() == 4
    assert not attacks.sign_flip(()).members(7).any() and not attacks.sign_flip(0.0).members(7).any()


def samples(attack, id_, attacker, view="train"):
    client = attack.poisoned(problems.data().client(id_), jnp.asarray(id_), jnp.asarray(attacker), 3)
    return client, client[view].in_order(128).get(0)


@pytest.mark.parametrize(("mapping", "expected"), [(None, [2, 1, 0]), ((1, 2, 2), [1, 2, 2])])
def test_label_flip_changes_the_labels_of_attackers_in_every_batch(mapping, expected):
    attack, plain = attacks.label_flip((1,), mapping=mapping), problems.data().client(1)["train"]
    honest = plain.in_order(128).get(0)
    client, batch = samples(attack, 1, True)
    np.testing.assert_array_equal(batch.y, np.array(expected)[honest.y])
    np.testing.assert_array_equal(batch.x, honest.x)
    assert problems.leaves_equal(samples(attack, 1, False)[1], honest)
    key = jax.random.key(2)
    for mine, own in ((client["train"].epochs(key, 8), plain.epochs(key, 8)), (client["train"].full(), plain.full())):
        np.testing.assert_array_equal(mine.get(1).y, np.array(expected)[own.get(1).y])
    shared = client.working(0.5)["train"].epochs(key, 8)
    assert int(shared.steps) < int(plain.epochs(key, 8).steps)
    np.testing.assert_array_equal(shared.get(1).y, np.array(expected)[plain.epochs(key, 8).get(1).y])


def test_a_backdoor_puts_its_pattern_on_the_same_share_of_samples_every_time():
    attack = attacks.backdoor((1,), target=2, size=1, value=7.0, share=0.3)
    client, batch = samples(attack, 3, True)
    honest = samples(attack, 3, False)[1]
    marked = np.asarray(batch.x[:, -1] == 7)
    size = int(client["train"].size)
    assert 0.15 < marked[:size].mean() < 0.45
    assert (batch.y[marked] == 2).all() and np.array_equal(batch.y[~marked], honest.y[~marked])
    np.testing.assert_array_equal(batch.x[:, :-1], honest.x[:, :-1])
    assert problems.leaves_equal(batch, samples(attack, 3, True)[1])
    picked = client["train"].take(jnp.array([5, 0, 17]), jnp.ones(3))
    assert problems.leaves_equal(picked.x, batch.x[jnp.array([5, 0, 17])])
    other = samples(dataclasses.replace(attack, seed=1), 3, True)[1]
    assert not np.array_equal(other.x[:, -1] == 7, marked)


def test_a_backdoor_marks_half_of_a_clients_samples_with_ones_and_each_view_and_client_by_itself():
    x = np.full((400, 6), 0.5)
    data = fm.from_clients([(x, np.arange(400) % 3)] * 2, num_classes=3)
    size = int(data.size["train"][0])

    def marked(id_, view):
        of_view = attacks.backdoor((0, 1), size=2).poisoned(data.client(id_), jnp.asarray(id_), jnp.asarray(True), 3)[view]
        batch = of_view.in_order(400).get(0)
        np.testing.assert_array_equal(np.unique(batch.x[:, -4:]), [0.5, 1.0])
        np.testing.assert_array_equal(batch.x[:, :-4], 0.5)
        return np.asarray(batch.x[:size, -1] == 1)

    first = marked(0, "train")
    assert 0.35 < first.mean() < 0.65
    for other in (marked(1, "train"), marked(0, "test")):
        assert np.mean(other[:90] == first[:90]) < 0.8


def images():
    x = np.random.default_rng(8).integers(0, 200, (60, 6, 5, 1)).astype(np.uint8)
    return fm.from_clients([(x[:30], np.arange(30) % 3), (x[30:], np.arange(30) % 3)], num_classes=3)


def test_stamped_data_have_the_pattern_that_attackers_train_on_where_they_are_tested():
    data = images()
    marked = attacks.stamped(data, size=2)
    batch, honest, trained = (
        view.in_order(64).get(0)
        for view in (
            marked.client(1)["test_query"],
            data.client(1)["test_query"],
            attacks.backdoor((1,), size=2, share=1.0).poisoned(data.client(1), jnp.asarray(1), jnp.asarray(True), 3)[
                "test_query"
            ],
        )
    )
    size = int(data.size["test_query"][1])
    np.testing.assert_allclose(batch.x[:size, -2:, -2:], np.ones((size, 2, 2, 1)), rtol=1e-6)
    np.testing.assert_array_equal(batch.x[:, :-2], honest.x[:, :-2])
    np.testing.assert_array_equal(batch.x[:, :, :-2], honest.x[:, :, :-2])
    np.testing.assert_allclose(batch.x[:size], trained.x[:size], rtol=1e-6)
    np.testing.assert_array_equal(batch.y, honest.y)
    changed = np.flatnonzero((np.asarray(marked.x) != np.asarray(data.x)).any((1, 2, 3)))
    tests = [np.arange(s, s + n) for s, n in zip(data.start["test_query"], data.size["test_query"], strict=True)]
    assert set(changed) == set(np.concatenate(tests)) and marked.x.dtype == np.uint8


def test_success_of_a_backdoor_counts_samples_of_other_classes_only():
    confusion = np.array([[[4, 0, 1], [0, 5, 3], [0, 0, 9]], [[1, 0, 0], [2, 0, 0], [5, 0, 5]]])
    assert attacks.backdoor_success(confusion, 2) == pytest.approx((1 + 3) / (5 + 8 + 1 + 2))


# Rounds.


def of_fedavg(attack, **options):
    """The model after one round of FedAvg with full gradients, and every client's pseudo-gradient."""
    algorithm = common.build(
        "fedavg", federation=fm.Federation(cohort_size=7, devices=1, attack=attack, **options), batch_size=128, lr=0.1
    )
    state = common.start(algorithm)
    own = [jax.tree.map(lambda g: 0.1 * g, common.gradient(state.model, i)) for i in range(7)]
    return state.model, common.run(algorithm, 1, state).model, own


def average(trees, weights):
    return jax.tree.map(lambda *leaves: np.average(np.stack(leaves), axis=0, weights=weights), *trees)


def test_a_round_with_a_sign_flip_written_out():
    """The mean of the pseudo-gradients, weighted by samples, in which client 3's is -4 times what it would be."""
    model, after, own = of_fedavg(attacks.sign_flip((LIAR,), scale=4.0))
    own[LIAR] = jax.tree.map(lambda leaf: -4 * leaf, own[LIAR])
    mean = average(own, problems.data().size["train"])
    assert problems.distance(after, jax.tree.map(jnp.subtract, model, mean)) < 1e-12


def test_a_boost_multiplies_what_an_attacker_sends():
    model, after, own = of_fedavg(attacks.backdoor((LIAR,), size=1, share=0.0, boost=5.0))
    own[LIAR] = jax.tree.map(lambda leaf: 5 * leaf, own[LIAR])
    mean = average(own, problems.data().size["train"])
    assert problems.distance(after, jax.tree.map(jnp.subtract, model, mean)) < 1e-12


def test_noise_of_attackers_differs_between_clients_and_between_rounds():
    spread = lambda stacked, weights: jax.tree.map(lambda leaf: leaf.std(0), stacked)  # noqa: E731
    model, after, _ = of_fedavg(attacks.gaussian(1.0), aggregator=spread)
    moved = jax.tree.map(jnp.subtract, model, after)
    assert all(np.all(leaf > 0.1) for leaf in jax.tree.leaves(moved))
    algorithm = problems.build("fedavg", cohort_size=7, devices=1, attack=attacks.gaussian(1.0))
    step, states = jax.jit(algorithm.round), [algorithm.init(KEY, problems.data())]
    for r in range(2):
        states.append(step(jax.random.fold_in(KEY, r), states[-1], problems.data())[0])
    moves = [jax.tree.map(jnp.subtract, new.model, old.model) for old, new in itertools.pairwise(states)]
    assert all(np.all(np.abs(a - b) > 1e-6) for a, b in zip(*map(jax.tree.leaves, moves), strict=True))


NOT_FINITE = {
    "alone": attacks.Attack(name="nan", attackers=(LIAR,), lie=lambda key, change: [jnp.nan * leaf for leaf in change]),
    "together": attacks.Attack(
        name="nan",
        attackers=(LIAR,),
        conspire=lambda changes, honest, liars: [jnp.full(leaf.shape[1:], jnp.inf) for leaf in changes],
    ),
}


@pytest.mark.parametrize(
    ("name", "aggregator"),
    [("fedavg", None), ("fedavg", aggregate.median), ("scaffold", None), ("scaffold", aggregate.median), ("fedamp", None)],
    ids=["fedavg", "fedavg-median", "scaffold", "scaffold-median", "fedamp"],
)
@pytest.mark.parametrize("way", NOT_FINITE)
def test_a_lie_that_is_not_finite_is_left_out_and_told(name, aggregator, way):
    """The server goes on as if the liar had not returned."""
    options = {"cohort_size": 7, "devices": 1, "aggregator": aggregator}
    lost = lambda key, client: fm.Participation(returned=client != LIAR)  # noqa: E731
    data, found = problems.data(), []
    for more in ({"attack": NOT_FINITE[way]}, {"participation": lost}):
        algorithm = problems.build(name, **options, **more)
        state = algorithm.init(KEY, data)
        for _ in range(2):
            state, info = jax.jit(algorithm.round)(KEY, state, data)
        found.append((state, info))
    (told, info), (silent, without) = found
    assert problems.distance(told.model, silent.model) < 1e-12 and problems.distance(told.extra, silent.extra) < 1e-12
    np.testing.assert_array_equal(info.returned, without.returned)
    others = np.asarray(info.ids) != LIAR
    assert problems.distance(*(jax.tree.map(lambda leaf: leaf[:LIAR], s.personal) for s in (told, silent))) < 1e-12
    names = algorithm.checked(data)[0]
    clients = np.asarray(info.faults.clients)
    assert (clients[others] == -1).all() and names[clients[~others][0]].startswith("['upload']")


@pytest.mark.parametrize("way", ["lie", "conspire"])
def test_a_lie_about_what_a_transformation_measures_is_left_out_too(way):
    """The bits of adaptive clipping are the only numbers without an axis here."""
    lies = {
        "lie": lambda key, change: [leaf * jnp.nan if leaf.ndim == 0 else leaf for leaf in change],
        "conspire": lambda changes, honest, liars: [jnp.nan * leaf[0] if leaf.ndim == 1 else leaf[0] for leaf in changes],
    }
    clipping = fm.uploads.adaptive_clip(1.0, reproducible=True)
    attack = attacks.Attack(name="bit", attackers=(LIAR,), **{way: lies[way]})
    algorithm = problems.build("fedavg", cohort_size=7, devices=1, uploads=(clipping,), attack=attack)
    state, info = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), problems.data())
    assert np.isfinite(state.aggregation.uploads[0]["norm"])
    np.testing.assert_array_equal(info.returned, np.asarray(info.ids) != LIAR)


def test_attackers_that_diverged_are_no_part_of_a_conspiracy():
    """Without `drop_nonfinite`, they send what they have; others agree upon what they see."""
    changes = np.array([[np.nan] * 4, [9.0] * 4, [2.0] * 4, [4.0] * 4])
    found = send_together(attacks.ipm((0, 1), scale=2.0), changes, [1, 1, 0, 0])
    np.testing.assert_allclose(found[1], -6.0)


def test_a_round_with_inner_product_manipulation_written_out_for_a_mean_and_a_median():
    lie = jax.tree.map(lambda *leaves: -0.5 * sum(leaves) / 6, *(of_fedavg(None)[2][i] for i in range(7) if i != LIAR))
    for aggregator in (None, aggregate.median):
        model, after, own = of_fedavg(attacks.ipm((LIAR,)), aggregator=aggregator)
        own[LIAR] = lie
        mean = average(own, problems.data().size["train"])
        wanted = mean if aggregator is None else jax.tree.map(lambda *leaves: np.median(np.stack(leaves), 0), *own)
        assert problems.distance(after, jax.tree.map(jnp.subtract, model, wanted)) < 1e-12


LIKE_FEDAVG = {
    "fedavg": {"weighting": "uniform"},
    "ifca": {"clusters": 1},
    "qfedavg": {"q": 0.0},
    "fedas": {"align_epochs": 0, "fisher": False, "head": "none"},
    "fednova": {"weighting": "uniform"},
}
"""Methods that are FedAvg with these options and one step a round, but send how much a client counts as statistics."""


@pytest.mark.parametrize(
    ("attack", "rule"),
    problems.chosen(
        itertools.product([attacks.sign_flip((0, 1)), attacks.ipm((0, 1), scale=0.5)], [None, aggregate.median]),
        lambda attack, rule: (attack.name == "sign_flip") == (rule is None),
    ),
)
def test_a_liar_counts_as_much_as_if_it_were_honest(attack, rule):
    moves = {}
    for name, options in LIKE_FEDAVG.items():
        federation = fm.Federation(cohort_size=7, attack=attack, aggregator=rule)
        algorithm = fm.federate(fm.METHODS[name](problems.task(), lr=0.3, epochs=1, batch_size=128, **options), federation)
        begun = algorithm.init(KEY, problems.data())
        state, _ = jax.jit(algorithm.round)(KEY, begun, problems.data())
        moves[name] = ravel_pytree(state.model)[0] - ravel_pytree(begun.model)[0]
    assert np.linalg.norm(moves["fedavg"]) > 0.05
    for name, move in moves.items():
        np.testing.assert_allclose(move, moves["fedavg"], rtol=0, atol=1e-7, err_msg=name)


def test_a_round_of_fednova_with_a_sign_flip_written_out():
    """The step is that of honest numbers of steps: the mean of them, times the mean of changes divided by each client's own."""

    def moved(cohort, attack):
        federation = fm.Federation(cohort_size=len(cohort), schedule=fm.schedules.given([cohort]), attack=attack)
        method = fm.fednova(problems.task(), lr=0.3, batch_size=16, weighting="uniform")
        algorithm = fm.federate(method, federation)
        begun = algorithm.init(KEY, problems.data())
        state, info = jax.jit(algorithm.round)(KEY, begun, problems.data())
        return ravel_pytree(state.model)[0] - ravel_pytree(begun.model)[0], info.metrics["normaliser"]

    alone, steps = map(np.array, zip(*(moved([i], None) for i in range(3)), strict=True))
    assert len({*steps.ravel().tolist()}) > 1
    found, _ = moved([0, 1, 2], attacks.sign_flip((1,)))
    signs = np.array([[1], [-1], [1]])
    np.testing.assert_allclose(found, np.mean(steps) * np.mean(signs * alone / steps, 0), rtol=0, atol=1e-7)


def test_a_client_that_trains_on_flipped_labels_written_out():
    model, after, own = of_fedavg(attacks.label_flip((LIAR,)))
    batch = common.padded(LIAR)
    flipped = common.gradient_on(model, batch._replace(y=2 - batch.y))
    own[LIAR] = jax.tree.map(lambda g: 0.1 * g, flipped)
    mean = average(own, problems.data().size["train"])
    assert problems.distance(after, jax.tree.map(jnp.subtract, model, mean)) < 1e-12


def test_an_attacker_does_not_clip_itself_and_norm_bounding_does_it_at_the_server():
    moved = {}
    for name, options in {
        "client": {"uploads": (clip(1e-3),)},
        "server": {"aggregator": aggregate.norm_bounding(1e-3), "weighting": "uniform"},
    }.items():
        model, after, _ = of_fedavg(attacks.sign_flip((LIAR,), scale=1e4), **options)
        moved[name] = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (model, after)), strict=True)))
    assert moved["server"] <= 1e-3 + 1e-9 < 1 < moved["client"]


def test_a_buffer_is_attacked_by_how_much_it_moved():
    """A batch norm's running averages of the liar become old - 3 (new - old), and the server averages the values."""
    normed = problems.normed_task()

    def flat_loss(variables, batch, key):
        value, buffers = normed.loss(variables, batch, key)
        return 0 * value, buffers

    task = normed._replace(loss=flat_loss)
    plain, lying = (
        problems.build("fedavg", of=task, cohort_size=7, devices=1, weighting="uniform", batch_size=128, attack=attack)
        for attack in (None, attacks.sign_flip((LIAR,), scale=3.0))
    )
    start = jax.jit(plain.init)(KEY, problems.data())
    alone = problems.build("fedavg", of=task, cohort_size=1, devices=1, batch_size=128, schedule=lambda *_: jnp.array([LIAR]))
    old, mean, bad, own = (
        fm.masks.split(state.model, fm.masks.complement(task.trainable(start.model)))[0]
        for state in (start, *(jax.jit(a.round)(KEY, start, problems.data())[0] for a in (plain, lying, alone)))
    )
    expected = jax.tree.map(lambda o, m, v: m + ((o - 3 * (v - o)) - v) / 7, old, mean, own)
    assert problems.distance(old, own) > 0.01
    assert problems.distance(bad, expected) < 1e-12


@cache
def step_of(name, kind):
    """`(state, strength) -> state` after a round of all seven clients, of which client 3 attacks; strength -1 is none."""

    def one_round(state, strength):
        attack = {
            "lie": lambda: attacks.sign_flip((LIAR,), scale=strength),
            "conspire": lambda: attacks.ipm((LIAR,), scale=strength),
        }[kind]()
        algorithm = fm.federate(method_of(name), fm.Federation(cohort_size=7, devices=1, lanes=1, attack=attack))
        return algorithm.round(KEY, state, problems.data())[0]

    return jax.jit(one_round)


def begin(name):
    """The first state, which is the same for any cohort, and the method in a federation without attackers."""
    return build(name)[2], fm.federate(method_of(name), fm.Federation(cohort_size=7, devices=1, lanes=1))


def got_by_others(state):
    rows = jax.tree.map(lambda leaf: np.delete(np.asarray(leaf), LIAR, 0), (state.personal, state.memory))
    return state.model, state.extra, rows


SENDS_NOTHING = {"local_only", "mocha"}  # MOCHA: only in a round that updates the relations, the tenth by default
SEPARATE = ("fedavg", "fedamp", "fedfomo", "fedpac", "l2gd", "scaffold", "pfedhn")
"""One method of each way to send: to be averaged, models, validated models, heads and statistics, values, variates, others."""


@pytest.fixture(params=problems.sampled({*problems.FIRST, *SEPARATE}, grouped=True))
def name(request):
    return request.param


def check_a_liar_changes_what_others_get_and_not_what_it_keeps(name, kind):
    step, start = step_of(name, kind), begin(name)[0]
    weak, strong = step(start, 1.0), step(start, 5.0)
    assert (problems.distance(got_by_others(weak), got_by_others(strong)) > 1e-9) is (name not in SENDS_NOTHING)
    kept = (problems.at((state.personal, state.memory), LIAR) for state in (weak, strong))
    assert problems.leaves_equal(*kept)
    return step, start


@pytest.mark.parametrize("name", problems.sampled(SEPARATE[:3], grouped=True))
def test_one_liar_changes_what_others_get_and_not_what_it_keeps(name):
    step, start = check_a_liar_changes_what_others_get_and_not_what_it_keeps(name, "lie")
    if name in SEPARATE:
        # A flipped sign times -1 is the honest upload.
        honest = jax.jit(begin(name)[1].round)(KEY, start, problems.data())[0]
        assert problems.distance(got_by_others(step(start, -1.0)), got_by_others(honest)) < 1e-10


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SEPARATE])
def test_liars_that_see_others_change_what_others_get_and_not_what_they_keep(name):
    check_a_liar_changes_what_others_get_and_not_what_it_keeps(name, "conspire")


def test_every_kind_of_attack_fits_every_method(name):
    start, _ = begin(name)
    flip, gaussian, alie = (make((LIAR,)) for make in (attacks.label_flip, attacks.gaussian, attacks.alie))
    attack = dataclasses.replace(flip, lie=gaussian.lie, conspire=alie.conspire)
    algorithm = fm.federate(method_of(name), fm.Federation(cohort_size=7, devices=1, lanes=1, attack=attack))
    after = jax.eval_shape(algorithm.round, KEY, start, problems.data())[0]
    assert problems.forms(after) == problems.forms(start)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SEPARATE])
def test_without_attackers_the_program_is_the_same(name):
    start, plain = begin(name)
    program = lambda algorithm: jax.jit(algorithm.round).lower(KEY, start, problems.data()).as_text()  # noqa: E731
    expected = program(plain)
    for make in (attacks.alie, attacks.sign_flip, attacks.backdoor):
        nobody = fm.Federation(cohort_size=7, devices=1, lanes=1, attack=make(()))
        same = program(fm.federate(method_of(name), nobody)) == expected
        assert same


@pytest.mark.parametrize("kind", ["lie", "conspire"])
def test_what_the_server_of_fedpac_sees_separately_is_a_lie_too(kind):
    """Heads are read by the collaboration, and variances and profiles are sent beside: both change the others' mixtures."""
    seen = []
    method = method_of("fedpac")

    def spy(key, state, cohort, data):
        jax.debug.callback(lambda *arrays: seen.append(arrays), cohort.stacked.variance, cohort.personal["head"]["b"])
        return method.collaborate.mix(key, state, cohort, data)

    spied = dataclasses.replace(method, collaborate=method.collaborate._replace(mix=spy))
    attack = attacks.sign_flip((LIAR,), scale=2.0) if kind == "lie" else attacks.ipm((LIAR,), scale=2.0)
    for option in (None, attack):
        algorithm = fm.federate(spied, fm.Federation(cohort_size=7, devices=1, attack=option))
        start = algorithm.init(KEY, problems.data())
        jax.block_until_ready(jax.jit(algorithm.round)(KEY, start, problems.data()))
    jax.effects_barrier()
    (variance, head), (lied_variance, lied_head) = (tuple(map(np.asarray, arrays)) for arrays in seen)
    first, others = np.asarray(start.model["head"]["b"]), np.arange(7) != LIAR
    np.testing.assert_allclose(lied_variance[others], variance[others], rtol=1e-10)
    np.testing.assert_allclose(lied_head[others], head[others], rtol=1e-10)
    changed, moved = (
        (variance[LIAR], head[LIAR] - first) if kind == "lie" else (variance[others].mean(), (head[others] - first).mean(0))
    )
    np.testing.assert_allclose(lied_variance[LIAR], -2 * changed, rtol=1e-9)
    np.testing.assert_allclose(lied_head[LIAR], first - 2 * moved, rtol=1e-9)


def test_attackers_outside_the_cohort_or_that_do_not_return_change_nothing():
    attack = attacks.sign_flip((LIAR,), scale=50.0)
    lost = lambda key, client: fm.Participation(returned=client != LIAR)  # noqa: E731
    for options in ({"schedule": lambda *_: jnp.array([0, 1, 5])}, {"participation": lost}):
        size = 3 if "schedule" in options else 7
        for aggregator in (None, aggregate.krum(0)):
            states = [
                jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), problems.data())[0]
                for algorithm in (
                    problems.build("fedavg", cohort_size=size, devices=1, aggregator=aggregator, attack=option, **options)
                    for option in (None, attack)
                )
            ]
            assert problems.distance(*(state.model for state in states)) < 1e-12


@pytest.mark.parametrize("name", ["fednova", "ifca", "fedpac"])
def test_the_uploads_of_others_keep_every_bit(name):
    """Quotients that attackers may lie about are rounded, which must not touch the sums of the honest."""
    states = [
        jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), problems.data())[0]
        for algorithm in (
            problems.build(name, cohort_size=3, devices=1, attack=attack, schedule=lambda *_: jnp.array([0, 1, 5]))
            for attack in (attacks.sign_flip(()), attacks.sign_flip((LIAR,)))
        )
    ]
    assert problems.leaves_equal(states[0].model, states[1].model)


def test_lanes_and_devices_change_no_attack():
    for make in (attacks.gaussian, attacks.min_max, attacks.backdoor):
        states = []
        for devices, lanes in ((1, 1), (2, 2)):
            federation = fm.Federation(cohort_size=5, devices=devices, lanes=lanes, attack=make(0.5))
            algorithm = fm.federate(method_of("fedavg"), federation)
            state = algorithm.init(KEY, problems.data())
            for _ in range(2):
                state = jax.jit(algorithm.round)(jax.random.fold_in(KEY, state.round), state, problems.data())[0]
            states.append(state)
        assert problems.distance(*(state.model for state in states)) < 1e-10


def test_fltrust_in_a_round_trains_on_the_servers_samples_and_withstands_most_clients():
    data = problems.data()
    rule = aggregate.fltrust(data.client(5))
    attack = attacks.sign_flip((0, 1, 2, 3), scale=10.0)
    model, after, own = of_fedavg(attack, aggregator=rule)
    reference = own[5]
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])  # noqa: E731
    trust = [max(flat(g) @ flat(reference) * sign, 0) for g, sign in zip(own, [-1] * 4 + [1] * 3, strict=True)]
    norm = lambda tree: np.linalg.norm(flat(tree))  # noqa: E731
    trust = np.array(trust) / [norm(g) * norm(reference) for g in own]
    scaled = [sign * norm(reference) / norm(g) * flat(g) for g, sign in zip(own, [-1] * 4 + [1] * 3, strict=True)]
    np.testing.assert_allclose(flat(model) - flat(after), trust @ np.array(scaled) / trust.sum(), rtol=1e-9, atol=1e-12)


def test_centered_clipping_in_rounds_starts_from_the_last_aggregate():
    algorithm = problems.build(
        "fedavg", cohort_size=7, devices=1, lr=0.1, batch_size=128, aggregator=aggregate.centered_clipping(1e-4)
    )
    state = start = algorithm.init(KEY, problems.data())
    norms = []
    for _ in range(3):
        before = state.model
        state = jax.jit(algorithm.round)(jax.random.fold_in(KEY, state.round), state, problems.data())[0]
        norms.append(float(fm.aggregate.distances.norms(jax.tree.map(lambda a, b: (a - b)[None], before, state.model))[0]))
    # Gradients are long beside the radius and hardly change, so that each round adds the first round's step to the last step.
    assert 1e-5 < norms[0] <= 1e-4 + 1e-12
    np.testing.assert_allclose(norms, norms[0] * np.array([1, 2, 3]), rtol=1e-2)
    assert problems.forms(start) == problems.forms(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attacks.sign_flip((0, 0)), r"attackers=\(0, 0\) must be distinct client ids"),
        (lambda: attacks.sign_flip((0.5, 1.0)), "must be distinct client ids"),
        (lambda: attacks.sign_flip((-1,)), "must be distinct client ids"),
        (lambda: attacks.sign_flip(3), "attackers=3 must be distinct client ids, .* or a share"),
        (lambda: attacks.sign_flip(1.5), "attackers=1.5 must lie between 0 and 1"),
        (lambda: attacks.sign_flip((7,)).members(7), r"attackers=\(7,\) must be ids of the N=7 clients"),
        (lambda: attacks.sign_flip(0.1, seed=-1), "seed=-1"),
        (lambda: attacks.sign_flip(0.1, scale=0), "scale=0 must be finite and above 0"),
        (lambda: attacks.gaussian(0.1, deviation=-1), "deviation=-1"),
        (lambda: attacks.alie(0.1, z=-1), "z=-1"),
        (lambda: attacks.ipm(0.1, scale=0), "scale=0"),
        (lambda: attacks.min_max(0.1, direction="up"), "direction='up' is unknown; allowed are deviation, sign, unit"),
        (lambda: attacks.min_sum(0.1, direction="up"), "direction='up' is unknown"),
        (lambda: attacks.backdoor(0.1, target=-1), "target=-1"),
        (lambda: attacks.backdoor(0.1, size=0), "size=0"),
        (lambda: attacks.backdoor(0.1, share=2), "share=2"),
        (lambda: attacks.backdoor(0.1, boost=0), "boost=0"),
        (lambda: samples(attacks.backdoor((0,), target=3), 0, True), "target=3 must be one of the K=3 classes"),
        (lambda: samples(attacks.label_flip((0,), mapping=(0, 1)), 0, True), "must give a class for each of the K=3 classes"),
        (
            lambda: attacks.label_flip((0,)).poisoned(problems.data().client(0), 0, True, 0)["train"].full().get(0),
            "label_flip needs class labels",
        ),
        (lambda: attacks.stamped(problems.data(), "exam"), "no view 'exam'"),
        (lambda: fm.Federation(attack="sign_flip"), "attack='sign_flip' must be an attack"),
        (
            lambda: fm.Federation(attack=attacks.ipm(0.1), uploads=(clip(1.0), fm.uploads.noise(1.0))),
            "ipm sends what no client clips or rounds, which noise cannot stand",
        ),
        (lambda: fm.Federation(attack=attacks.sign_flip(0.1), uploads=(fm.uploads.mask(16),)), "which mask cannot stand"),
        (lambda: attacks.parse("flip:attackers=0.1"), "attack='flip' is unknown; allowed are label_flip"),
        (lambda: attacks.parse("ipm"), "ipm needs attackers: ipm:attackers=VALUE"),
        (lambda: attacks.parse("ipm:attackers=0.1,sale=3"), "no 'sale'.*did you mean 'scale'"),
    ],
)
def test_what_an_attack_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_registered_attack_can_be_made_from_text_and_is_in_the_record():
    for name in attacks.ATTACKS:
        assert attacks.parse(f"{name}:attackers=(0, 2)").name == name
    config = fm.Federation(attack=attacks.parse("sign_flip:attackers=0.2,scale=10,seed=3")).config
    assert config["attack"] == {"name": "sign_flip", "attackers": 0.2, "seed": 3, "scale": 10}


def test_label_flips_and_backdoors_go_with_noise_and_masks():
    for attack in (attacks.label_flip(0.3), attacks.backdoor(0.3)):
        fm.Federation(attack=attack, uploads=(clip(1.0), fm.uploads.noise(1.0), fm.uploads.mask(16)))


@pytest.mark.parametrize(
    "way",
    [{}, {"uploads": (clip(1e6),)}, {"uploads": (fm.uploads.sparsify(1.0),)}, {"aggregator": aggregate.norm_bounding(1e6)}],
    ids=["values", "clip", "sparsify", "norm bounding"],
)
@pytest.mark.parametrize("make", [lambda: attacks.sign_flip((0,), scale=2.0), lambda: attacks.ipm((0,), scale=2.0)])
def test_a_lie_about_own_leaves_is_one_about_how_they_moved(make, way):
    """Averaged personal leaves: an attacker's are compared with its own from before the round, by hand."""
    both = fm.schedules.given([[0, 1]])
    options = {"average_personal": True, "weighting": "uniform", "lr": 0.2}
    run = problems.build("fedper", cohort_size=2, devices=1, schedule=both, attack=make(), **options, **way)
    data = problems.data()
    first, _ = run.round(jax.random.key(1), run.init(jax.random.key(3), data), data)
    second, _ = run.round(jax.random.key(2), first, data)
    old, new = (np.asarray(state.personal["head"]["w"])[:2] for state in (first, second))
    assert np.abs(old[0] - old[1]).max() > 1e-3
    moved = new[0] - old[0] if make().name == "sign_flip" else new[1] - old[1]
    np.testing.assert_allclose(second.model["head"]["w"], (old[0] - 2 * moved + new[1]) / 2, rtol=1e-9)
