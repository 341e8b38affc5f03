import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.task import cross_entropy
from tests import problems
from tests.methods.common import FULL, KEY, batch, buffered, build, of, padded, personalized, run, start, step

OPTIONS = {"cohort_size": 5, "devices": 1, "lr": 0.1, "batch_size": 8}


def fedem(**options):
    return build("fedem", **(OPTIONS | options))


def sample_losses(models, samples):
    """`[B, M]`, component by component."""
    columns = []
    for m in range(len(jax.tree.leaves(models)[0])):
        logits = np.asarray(problems.task().predict(of(models, m), samples.x))
        probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        columns.append(-np.log(probability[np.arange(len(samples.y)), np.asarray(samples.y)]))
    return np.stack(columns, 1)


def expectation(models, share, samples):
    joint = share * np.exp(-sample_losses(models, samples))
    return joint / joint.sum(1, keepdims=True)


def test_with_one_component_it_is_fedavg():
    algorithm, average = fedem(components=1), build("fedavg", **OPTIONS)
    first = start(average)
    state = run(algorithm, 3, start(algorithm)._replace(model=jax.tree.map(lambda leaf: leaf[None], first.model)))
    assert problems.distance(of(state.model, 0), run(average, 3, first).model) < 1e-12
    np.testing.assert_array_equal(state.memory.share, 1)


def test_components_start_differently():
    model = start(fedem()).model
    assert problems.distance(of(model, 0), of(model, 1)) > 0.1


@pytest.mark.parametrize("most", [None, 0.05])
def test_a_round_of_expectation_and_maximisation_written_out(most):
    """Each component's gradient is clipped by its own norm: it has an optimiser of its own."""
    clip = optax.identity() if most is None else optax.clip_by_global_norm(most)
    algorithm = fedem(**FULL, weighting="uniform", optimizer=lambda rate: optax.chain(clip, optax.sgd(rate)))
    state = run(algorithm, 2)
    after = run(algorithm, 1, state)
    moved, clipped = [], 0

    @jax.jit
    @jax.grad
    def slope(w, samples, number):
        # `cross_entropy` divides by the sum of the weights, the paper by the number of samples.
        return jnp.sum(samples.weight) / number * cross_entropy(problems.task().predict(w, samples.x), samples)

    for client in range(7):
        share, number = np.asarray(state.memory.share[client]), len(batch(client).y)
        q = expectation(state.model, share, padded(client))[:number]
        np.testing.assert_allclose(after.memory.share[client], q.mean(0), atol=1e-12)
        for m in range(3):
            weighted = padded(client)._replace(weight=np.pad(q[:, m], (0, len(padded(client).y) - number)))
            model = of(state.model, m)
            gradient = slope(model, weighted, number)
            norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
            shorter = 1 if most is None else min(1, most / norm)
            clipped += shorter < 1
            moved.append(step(model, 0.1 * shorter, gradient))
    assert (clipped > 10) == (most is not None)
    for m in range(3):
        expected = jax.tree.map(lambda *leaves: sum(leaves) / 7, *moved[m::3])
        assert problems.distance(of(after.model, m), expected) < 1e-12


def test_prediction_mixes_probabilities_by_the_clients_shares():
    algorithm = fedem(test_steps=4)
    state, x = run(algorithm, 3), batch(1).x
    client = int(np.flatnonzero(state.seen)[0])
    predicted = np.exp(algorithm.predict(personalized(algorithm, state, client), x))
    expected = sum(
        share * np.asarray(jax.nn.softmax(problems.task().predict(of(state.model, m), x)))
        for m, share in enumerate(state.memory.share[client])
    )
    np.testing.assert_allclose(predicted, expected, atol=1e-12)


def test_a_new_client_finds_its_shares_and_the_models_do_not_move():
    algorithm = fedem()
    state = run(algorithm, 3)
    share = np.full(3, 1 / 3)
    for _ in range(10):
        share = expectation(state.model, share, batch(2, "test_support")).mean(0)
    variables = personalized(algorithm, state, None, of_client=2)
    np.testing.assert_allclose(variables.share, share, atol=1e-12)
    assert problems.leaves_equal(variables.components, state.model)


def test_a_client_without_samples_mixes_equally():
    algorithm = fedem(test_steps=4)
    state, data = run(algorithm, 1), problems.data()
    support = data.client(2)["test_support"]
    empty = dataclasses.replace(support, size=jnp.zeros_like(support.size))
    np.testing.assert_array_equal(algorithm.personalize(KEY, state, empty, None).share, np.full(3, 1 / 3))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="components=0"):
        fedem(components=0)
    with pytest.raises(ValueError, match="models without buffers"):
        fm.METHODS["fedem"](buffered())
