from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import features, masks
from fedjax_meta.aggregate import Ratio
from fedjax_meta.contract import Received
from fedjax_meta.methods.fedpac import Centroids, Statistics, aligned, mixing, sent_statistics, statistics
from fedjax_meta.numerics.simplex import mixtures
from tests import problems
from tests.methods.common import FULL, KEY, batch, build, of, personalized, run, start

OPTIONS = {**FULL, "lr": 0.1, "head_lr": 0.3, "epochs": 2, "head_epochs": 1, "optimizer": optax.sgd}


def fedpac(**options):
    return build("fedpac", **(OPTIONS | options))


def class_features(variables, client):
    """(features, labels) of a client's train view, as arrays."""
    samples = batch(client)
    return np.asarray(problems.task().features(variables, samples.x)), np.asarray(samples.y)


def reference_statistics(variables, client):
    """v and h of the paper, class by class."""
    z, y = class_features(variables, client)
    spread, profile = 0.0, []
    for k in range(3):
        of_class, share = z[y == k], np.mean(y == k)
        mean = of_class.mean(0) if len(of_class) else np.zeros(z.shape[1])
        second = np.mean(np.sum(of_class**2, 1)) if len(of_class) else 0
        spread += share * second - share**2 * mean @ mean
        profile.append(share * mean)
    return spread / len(y), np.concatenate(profile)


def test_class_sums_and_statistics_are_those_of_the_paper():
    variables = start(fedpac()).model
    for client in (0, 3):
        sums = features.class_sums(problems.task(), variables, problems.data().client(client)["train"], batch_size=7)
        z, y = class_features(variables, client)
        np.testing.assert_allclose(sums.number, np.bincount(y, minlength=3))
        np.testing.assert_allclose(sums.total, [z[y == k].sum(0) for k in range(3)], atol=1e-12)
        v, h = reference_statistics(variables, client)
        stats = statistics(sums)
        np.testing.assert_allclose(stats.variance, v, rtol=1e-12)
        np.testing.assert_allclose(stats.profile, h, atol=1e-12)
        assert v > 0


def test_the_programme_from_the_gram_matrix_is_equation_11():
    # P_jl = [j = l] v_j + Σ_k <h_i - h_j, h_i - h_l>, and `mixtures` minimises α' P α.
    rng = np.random.default_rng(1)
    v, h = rng.uniform(0.1, 1, 4), rng.normal(size=(4, 6))
    stats = Statistics(jnp.asarray(v), jnp.asarray(h))
    matrix = np.asarray(mixing(stats, jnp.ones(4, bool), least=0).matrix)
    for i in range(4):
        apart = h[i] - h
        quadratic = np.diag(v) + apart @ apart.T
        slope = 2 * quadratic @ matrix[i]
        # Kuhn-Tucker: all weights that are not 0 have the same slope, the smallest one.
        assert np.all(slope[matrix[i] > 0] < slope.min() + 1e-5)


def test_small_weights_are_dropped_and_rows_sum_to_one():
    h = jnp.array([[0.0], [0.0], [30.0]])
    stats = Statistics(jnp.array([1.0, 1.0, 1.0]), h)
    assert 0 < mixtures(h, stats.variance).weights[0, 2] < 2e-3
    matrix = mixing(stats, jnp.ones(3, bool), least=2e-3).matrix
    assert matrix[0, 2] == 0
    np.testing.assert_allclose(jnp.sum(matrix, 1), 1, atol=1e-15)


def test_a_weight_of_exactly_the_least_one_stays():
    rng = np.random.default_rng(2)
    stats = Statistics(jnp.asarray(rng.uniform(0.1, 1, 4)), jnp.asarray(0.1 * rng.normal(size=(4, 6))))
    weights = np.asarray(mixtures(stats.profile, stats.variance).weights)
    least = float(np.sort(weights[0])[1])
    kept = np.asarray(mixing(stats, jnp.ones(4, bool), least=least).matrix)[0]
    assert np.sum(weights[0] < least) == 1 and np.sum(kept > 0) == 3


def test_small_weights_stay_where_their_loss_would_cost_more_than_the_own_head():
    """40 clients of unequal variance and one mean: weights are proportional to 1 / v, and 39 of 40 fall below `least`."""
    v = np.full(40, 100.0)
    v[1] = 1.0
    stats = Statistics(jnp.asarray(v), jnp.zeros((40, 2)))
    matrix = np.asarray(mixing(stats, jnp.ones(40, bool), least=0.01).matrix)
    np.testing.assert_allclose(matrix[0, 1], 1, atol=1e-6)
    # With `least` above every weight nothing would be left of any row.
    matrix = np.asarray(mixing(stats, jnp.ones(40, bool), least=2.0).matrix)
    np.testing.assert_allclose(matrix, np.tile(1 / v / np.sum(1 / v), (40, 1)), atol=1e-3)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)


def test_heads_are_combined_by_statistics_from_before_training():
    together, alone = run(fedpac(), 1), run(fedpac(collaborate=False), 1)
    first = start(fedpac()).model
    v, h = zip(*(reference_statistics(first, i) for i in range(7)), strict=True)
    matrix = np.asarray(mixing(Statistics(jnp.array(v), jnp.array(h)), jnp.ones(7, bool)).matrix)
    assert np.count_nonzero(matrix) > 7
    expected = jax.tree.map(lambda leaf: np.tensordot(matrix, leaf, 1), alone.personal)
    assert problems.distance(together.personal, expected) < 1e-9
    assert problems.distance(together.model, alone.model) < 1e-12


def test_a_round_reports_its_mixture_and_can_keep_it():
    """`memory` is the matrix of all clients by their ids; clients that take no part keep their row."""
    algorithm = fedpac(keep_mixing=True, cohort_size=4)
    first, data = start(algorithm), problems.data()
    state, info = jax.jit(algorithm.round)(KEY, first, data)
    ids = np.asarray(info.ids)
    v, h = zip(*(reference_statistics(first.model, i) for i in ids), strict=True)
    matrix = np.asarray(mixing(Statistics(jnp.array(v), jnp.array(h)), jnp.ones(4, bool)).matrix)
    expected = np.zeros((7, 7))
    expected[np.ix_(ids, ids)] = matrix
    np.testing.assert_allclose(state.memory, expected, atol=1e-5)
    np.testing.assert_allclose(info.metrics["own_head_share"], np.diagonal(matrix), atol=1e-5)
    assert np.all(np.asarray(info.metrics["mixing_gap"]) <= 1.01e-12)
    plain = run(fedpac(cohort_size=4), 2)
    assert problems.distance(plain.personal, run(algorithm, 2).personal) < 1e-9
    assert not jax.tree.leaves(plain.memory)


def test_empty_places_of_a_cohort_leave_what_is_kept_alone():
    """Their id is -1, which is no client, not the last one."""
    schedule = lambda key, r, n, c: jnp.array([5, 6, -1, -1], jnp.int32)  # noqa: E731
    algorithm = fedpac(keep_mixing=True, cohort_size=4, schedule=schedule)
    state, info = jax.jit(algorithm.round)(KEY, start(algorithm), problems.data())
    np.testing.assert_allclose(np.diagonal(state.memory)[5:], np.asarray(info.metrics["own_head_share"])[:2], atol=1e-6)
    np.testing.assert_allclose(state.memory.sum(1)[5:], 1, atol=1e-5)


def test_centroids_are_the_class_means_over_all_samples():
    # The extractor does not move here, so means weighted by class counts are the means of the pooled samples.
    state = run(fedpac(lr=1e-30), 1)
    parts = [class_features(state.model, client) for client in range(7)]
    z, y = (np.concatenate(values) for values in zip(*parts, strict=True))
    np.testing.assert_allclose(state.extra.mean, [z[y == k].mean(0) for k in range(3)], atol=1e-12)
    assert bool(jnp.all(state.extra.known))


def test_centroids_count_clients_as_models_do():
    """With equal weights, a client of few samples says as much of the centroids as one of many."""
    state = run(fedpac(lr=1e-30, weighting="uniform"), 1)
    total, number = np.zeros((3, 4)), np.zeros(3)
    for client in range(7):
        z, y = class_features(state.model, client)
        total += np.array([z[y == k].sum(0) for k in range(3)]) / len(y)
        number += np.bincount(y, minlength=3) / len(y)
    np.testing.assert_allclose(state.extra.mean, total / number[:, None], atol=1e-12)
    assert problems.distance(state.extra.mean, run(fedpac(lr=1e-30), 1).extra.mean) > 1e-3


def test_a_class_without_samples_has_no_centroid_and_does_no_harm():
    clients = [(np.asarray(batch(i).x), np.asarray(batch(i).y)) for i in range(3)]
    data = fm.from_clients([(x[y != 1], y[y != 1]) for x, y in clients], num_classes=3)
    state = run(fedpac(cohort_size=3), 3, data=data)
    assert state.extra.known.tolist() == [True, False, True]
    assert not np.any(state.extra.mean[1])
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.model))


def test_a_class_without_a_global_centroid_is_pulled_to_the_clients_own():
    sums = features.ClassSums(jnp.array([2.0, 4.0]), jnp.array([[2.0, 4.0], [8.0, 0.0]]), jnp.zeros(2))
    centroids = Centroids(jnp.array([[9.0, 9.0], [0.0, 0.0]]), jnp.array([True, False]))
    np.testing.assert_array_equal(aligned(sums, centroids), [[9, 9], [2, 0]])


def test_alignment_starts_in_the_second_round_and_pulls_features_to_the_centroids():
    one_strong, one_none = run(fedpac(alignment=5.0), 1), run(fedpac(alignment=0.0), 1)
    assert problems.distance(one_strong.model, one_none.model) < 1e-14
    strong, none = run(fedpac(alignment=5.0), 6), run(fedpac(alignment=0.0), 6)

    def spread(state):
        parts = [class_features(state.model, client) for client in range(7)]
        z, y = (np.concatenate(values) for values in zip(*parts, strict=True))
        return sum(np.sum((z[y == k] - z[y == k].mean(0)) ** 2) for k in range(3))

    assert spread(strong) < 0.8 * spread(none)


def test_without_weight_alignment_is_off_and_without_both_parts_it_is_fedrep():
    off = run(fedpac(align=False, collaborate=False), 3)
    zero = run(fedpac(alignment=0.0, collaborate=False), 3)
    assert problems.distance((off.model, off.personal), (zero.model, zero.personal)) < 1e-12
    other = build("fedrep", **FULL, lr=0.1, head_lr=0.3, head_epochs=1, body_epochs=2, optimizer=optax.sgd)
    state = run(other, 3)
    assert problems.distance((off.model, off.personal), (state.model, state.personal)) < 1e-12


def test_noise_moves_centroids_and_not_the_extractor():
    plain, noisy = run(fedpac(collaborate=False), 1), run(fedpac(collaborate=False, noise=0.5), 1)
    assert problems.distance(plain.model, noisy.model) == 0
    assert problems.distance(plain.extra.mean, noisy.extra.mean) > 1e-3


def test_noise_covers_the_means_and_leaves_the_variance():
    """v from noisy means would be negative here: the noise adds 12 * 0.1 * 4 to their squared norms, on average."""
    sums = features.class_sums(problems.task(), start(fedpac()).model, problems.data().client(3)["train"])
    clean, sent = statistics(sums), sent_statistics(KEY, sums, 2.0)
    assert sent.variance == clean.variance > 0
    assert float(jnp.max(jnp.abs(sent.profile - clean.profile))) > 0.1
    noisy_sums = sums._replace(total=sent.profile.reshape(3, 4) * jnp.sum(sums.number))
    assert float(statistics(noisy_sums).variance) < 0
    assert problems.leaves_equal(sent_statistics(KEY, sums, 0.0), clean)


def test_what_a_client_sends_of_its_features_has_noise_of_its_own_each_time():
    """The extractor does not move here, so that the means of before and after training are the same but for their noise."""
    method, task = fm.fedpac(problems.task(), noise=0.5, lr=1e-30, batch_size=128), problems.task()
    model = task.init(KEY)
    extra = method.init_extra(model, problems.data())
    received = Received(model, (), extra, jnp.zeros((), int), jnp.zeros((), bool), KEY)
    sent = jax.jit(lambda received: method.client(KEY, received, problems.data().client(3)))(received)
    clean = statistics(features.class_sums(task, model, problems.data().client(3)["train"])).profile
    before, after = (np.ravel(one) - clean for one in (sent.stacked.profile, sent.statistics.total))
    assert min(np.max(np.abs(one)) for one in (before, after, before - after)) > 0.01


def test_a_new_client_trains_the_servers_head_and_a_known_one_keeps_its_own():
    algorithm = fedpac()
    state = run(algorithm, 2)
    head, body = masks.split(personalized(algorithm, state, 2), masks.resolve("head", problems.task()))
    assert problems.leaves_equal(head, of(state.personal, 2))
    new_head, new_body = masks.split(personalized(algorithm, state, None, of_client=2), masks.resolve("head", problems.task()))
    assert problems.leaves_equal(new_body, body)
    assert problems.distance(new_head, masks.split(state.model, masks.resolve("head", problems.task()))[0]) > 1e-4


def test_a_new_client_makes_passes_of_its_own():
    """Three full steps of the head on its support set, by plain gradients."""
    algorithm = fedpac(new_client_epochs=3)
    state = run(algorithm, 2)
    task, samples = problems.task(), batch(2, "test_support")
    head = masks.resolve("head", task)
    model = state.model
    for _ in range(3):
        slope = jax.grad(lambda variables: task.loss(variables, samples, KEY)[0])(model)
        model = jax.tree.map(lambda w, g, moves: w - 0.3 * g if moves else w, model, slope, head)
    assert problems.distance(personalized(algorithm, state, None, of_client=2), model) < 1e-9
    assert problems.leaves_equal(of(run(fedpac(), 2).personal, 2), of(state.personal, 2))  # rounds are as they were


def test_wrong_arguments_are_named():
    for wrong, text in (
        ({"alignment": -1}, "alignment=-1"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"head_lr": 0}, "head_lr=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"new_client_epochs": 0}, "new_client_epochs=0"),
        ({"head": "tail"}, "head='tail'"),
    ):
        with pytest.raises(ValueError, match=text):
            fedpac(**wrong)
    with pytest.raises(ValueError, match="no features and head"):
        fm.METHODS["fedpac"](problems.task()._replace(features=None))
    with pytest.raises(ValueError, match="cohort_size=9"):
        algorithm = fedpac(cohort_size=9)
        algorithm.round(KEY, start(algorithm), problems.data())


def test_a_class_that_the_cohort_lacks_keeps_its_centroid():
    before = Centroids(jnp.array([[1.0], [2.0], [0.0]]), jnp.array([True, True, False]))
    sums = Ratio(jnp.array([[6.0], [0.0], [8.0]]), jnp.array([2.0, 0.0, 4.0]))
    after = features.renewed_centroids(SimpleNamespace(extra=before), sums, None, 5)
    assert after.mean.tolist() == [[3.0], [2.0], [2.0]] and after.known.tolist() == [True] * 3
