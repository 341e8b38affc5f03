import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.methods.knn_per import Datastore, first_ones, in_fixed_order, trained_on, votes
from tests import problems
from tests.methods.common import KEY, batch, build, personalized, run, start

OPTIONS = {"cohort_size": 5, "devices": 1, "lr": 0.1, "batch_size": 8}


def knn_per(**options):
    return build("knn_per", **(OPTIONS | options))


def test_without_neighbours_it_is_fedavg():
    options = OPTIONS | {"optimizer": partial(optax.sgd, momentum=0.9), "epochs": 2}
    algorithm, average = build("knn_per", mixing=0.0, **options), build("fedavg", **options)
    state = run(algorithm, 2)
    assert problems.leaves_equal(state, run(average, 2))
    x = batch(3).x
    expected = jax.nn.softmax(average.predict(state.model, x))
    np.testing.assert_allclose(np.exp(algorithm.predict(personalized(algorithm, state, 3), x)), expected, atol=1e-9)


def held_out(size, share):
    """Positions of the samples that are kept for the choice of the share."""
    return np.asarray(in_fixed_order(jnp.arange(size), size))[size - int(share * size) :]


def test_the_model_never_sees_the_samples_that_its_share_is_chosen_on():
    """Other labels of these samples change nothing in any round, and other labels of the rest do."""
    algorithm, data = knn_per(cohort_size=7, validation_share=0.25), problems.data()
    start, size = (int(part["train"][3]) for part in (data.start, data.size))
    kept = held_out(size, 0.25)
    assert len(kept) == int(0.25 * size) and len(set(kept.tolist())) == len(kept)
    states = []
    for places in ([], kept, np.setdiff1d(np.arange(size), kept)[:1]):
        y = np.asarray(data.y).copy()
        y[start + np.asarray(places, int)] = (y[start + np.asarray(places, int)] + 1) % 3
        states.append(run(algorithm, 3, data=dataclasses.replace(data, y=y)))
    assert problems.leaves_equal(states[0].model, states[1].model)
    assert problems.distance(states[0].model, states[2].model) > 1e-6


def test_an_epoch_goes_once_through_the_samples_that_are_trained_on():
    view = problems.data().client(2)["train"]
    size = int(view.size)
    part = first_ones(view, trained_on(view.size, 0.3))
    batches = part.epochs(KEY, 8)
    seen = [batches.get(t, 0) for t in range(int(batches.steps))]
    x = np.concatenate([np.asarray(b.x)[np.asarray(b.weight) > 0] for b in seen])
    kept = np.setdiff1d(np.arange(size), held_out(size, 0.3))
    expected = np.asarray(problems.data().x)[int(view.start) + kept]
    np.testing.assert_array_equal(x[np.lexsort(x.T)], expected[np.lexsort(expected.T)])


def neighbours_share(model, client, queries, count, scale, *, leave_out=False):
    """p(c), query by query."""
    task, samples = problems.task(), batch(client, "train")
    stored, labels = np.asarray(task.features(model, samples.x)), np.asarray(samples.y)
    result = np.zeros((len(queries), 3))
    for row, z in enumerate(np.asarray(task.features(model, queries))):
        distance = np.sum((stored - z) ** 2, 1) / (stored.shape[1] * scale)
        if leave_out:
            distance[row] = np.inf
        for near in np.argsort(distance)[:count]:
            result[row, labels[near]] += np.exp(-distance[near])
    return result / result.sum(1, keepdims=True)


def test_prediction_mixes_model_and_neighbours():
    algorithm = knn_per(neighbours=5, scale=0.2, mixing=0.3)
    state, x = run(build("fedavg", **OPTIONS), 2), batch(3, "test_query").x
    # The largest client has more samples than this one, so part of the datastore is padding.
    variables = personalized(algorithm, state, 3, "train")
    model = jax.nn.softmax(problems.task().predict(state.model, x))
    expected = 0.3 * neighbours_share(state.model, 3, x, 5, 0.2) + 0.7 * np.asarray(model)
    np.testing.assert_allclose(np.exp(algorithm.predict(variables, x)), expected, atol=1e-9)
    new = personalized(algorithm, state, None, "train", of_client=3)
    np.testing.assert_allclose(np.exp(algorithm.predict(new, x)), expected, atol=1e-9)
    small = personalized(algorithm, state, 0, "train")
    assert int(small.real.sum()) < small.real.shape[0]
    x = batch(0, "test_query").x
    expected = 0.3 * neighbours_share(state.model, 0, x, 5, 0.2) + 0.7 * np.asarray(
        jax.nn.softmax(problems.task().predict(state.model, x))
    )
    np.testing.assert_allclose(np.exp(algorithm.predict(small, x)), expected, atol=1e-9)


@pytest.mark.parametrize("validation_share", [0.0, 0.25])
def test_a_client_chooses_the_share_with_the_best_leave_one_out_likelihood(validation_share):
    """Of all its samples, or of those that its model was not trained on."""
    algorithm = knn_per(neighbours=5, scale=0.2, validation_share=validation_share)
    state = run(build("fedavg", **OPTIONS), 2)
    for client in (0, 3):
        samples = batch(client, "train")
        near = neighbours_share(state.model, client, samples.x, 5, 0.2, leave_out=True)
        model = np.asarray(jax.nn.softmax(problems.task().predict(state.model, samples.x)))
        rows, y = np.arange(len(samples.y)), np.asarray(samples.y)
        tries = np.arange(11) / 10
        counts = held_out(len(y), validation_share) if validation_share else rows
        scores = [np.sum(np.log((m * near + (1 - m) * model)[rows, y] + 1e-12)[counts]) for m in tries]
        chosen = personalized(algorithm, state, client, "train").mixing
        np.testing.assert_allclose(chosen, tries[np.argmax(scores)], atol=1e-9)


def test_a_client_too_small_to_leave_a_sample_out_chooses_on_all():
    """0.1 of 8 samples is none, so that the choice is that of a share of 0: all for the neighbours, since the model is wrong."""
    few, x = np.array([0, 1, 4, 5]), np.asarray(problems.data().x)
    state = run(build("fedavg", **OPTIONS), 2)
    y = np.argmin(np.asarray(problems.task().predict(state.model, x[few])), 1)
    data = fm.from_clients(
        [(np.r_[x[few], x[few] + 1e-3], np.r_[y, y])], num_classes=3, views={"train": (np.array([0]), np.array([8]))}
    )
    found = []
    for share in (0.0, 0.1):
        algorithm = knn_per(neighbours=1, validation_share=share)
        found.append(float(algorithm.personalize(KEY, state, data.client(0)["train"], None).mixing))
    assert found == [1, 1]


def test_a_share_of_samples_is_rounded_down_but_for_the_rounding_of_the_machine():
    """0.29 * 100 is 28.999999999999996."""
    sizes, shares = (100, 5, 4, 10, 7), (0.29, 0.2, 0.2, 0.3, 0.5)
    kept = [n - int(trained_on(jnp.asarray(n), share)) for n, share in zip(sizes, shares, strict=True)]
    assert kept == [29, 1, 0, 3, 3]


def test_neighbours_that_are_all_far_away_still_vote():
    keys = jnp.array([[1e3, 0.0], [0.0, 1.1e3], [0.0, 9e9]])
    store = Datastore(None, keys, jnp.array([2, 1, 0]), jnp.array([True, True, False]), jnp.zeros(()))
    found = votes(store, jnp.array([[0.0, 0.0], [10.0, 900.0]]), 3, 2, 1.0)
    np.testing.assert_allclose(found, [[0, 0, 1], [0, 1, 0]], atol=1e-12)


def test_a_client_with_fewer_samples_than_neighbours_uses_all_of_them():
    algorithm = knn_per(neighbours=500, scale=0.2, mixing=1.0)
    state, x = run(build("fedavg", **OPTIONS), 2), batch(0, "test_query").x
    expected = neighbours_share(state.model, 0, x, 500, 0.2)
    predicted = np.exp(algorithm.predict(personalized(algorithm, state, 0, "train"), x))
    np.testing.assert_allclose(predicted, expected, atol=1e-9)


def test_a_datastore_beyond_the_limit_is_refused_with_both_numbers():
    algorithm = knn_per(capacity=20)
    with pytest.raises(ValueError, match=r"up to \d+ samples, more than capacity=20"):
        personalized(algorithm, start(algorithm), 0, "train")
    with pytest.raises(ValueError, match="validation_share=1"):
        knn_per(validation_share=1)
    with pytest.raises(ValueError, match="neighbours=0"):
        knn_per(neighbours=0)
