import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.methods.fedrod import balanced_loss
from fedjax_meta.task import Batch, cross_entropy
from tests import problems
from tests.methods.common import FULL, batch, buffered, build, mean, of, padded, personalized, run, start, step

OPTIONS = {"cohort_size": 5, "devices": 1, "lr": 0.1, "batch_size": 8, "epochs": 2, "optimizer": optax.sgd}


def fedrod(**options):
    return build("fedrod", **(OPTIONS | options))


def test_the_balanced_softmax_weighs_classes_by_their_number():
    rng = np.random.default_rng(0)
    logits, y, counts = rng.normal(size=(6, 3)), rng.integers(0, 3, 6), np.array([5.0, 1.0, 9.0])
    weighted = counts**0.7 * np.exp(logits)
    expected = -np.mean(np.log(weighted[np.arange(6), y] / weighted.sum(1)))
    samples = Batch(None, jnp.asarray(y), jnp.ones(6))
    np.testing.assert_allclose(balanced_loss(jnp.asarray(logits), samples, jnp.asarray(counts), 0.7), expected, rtol=1e-12)


def test_the_hypernetwork_starts_with_the_scale_of_its_inputs():
    """He's: a variance of 2 by the number of inputs, which are the classes."""
    hidden = np.asarray(start(fedrod(classes=3, hyper_width=4000)).model.hyper["hidden"])
    assert hidden.shape == (4000, 3)
    np.testing.assert_allclose(np.mean(hidden**2), 2 / 3, rtol=0.05)


def test_a_client_of_one_class_does_not_train_the_generic_model_and_stays_finite():
    samples = Batch(None, jnp.array([1, 1, 0]), jnp.array([1.0, 1.0, 0.0]))
    counts = jnp.array([0.0, 2.0, 0.0])
    value, slope = jax.value_and_grad(balanced_loss)(jnp.ones((3, 3)), samples, counts, 1.0)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


def test_unbalanced_its_generic_model_is_that_of_fedavg():
    state, average = run(fedrod(balance=0.0), 3), run(build("fedavg", **OPTIONS), 3)
    assert problems.distance(state.model.generic, average.model) < 1e-12


def test_unbalanced_it_knows_classes_that_a_client_lacks():
    rng = np.random.default_rng(1)
    logits, y = jnp.asarray(rng.normal(size=(6, 3))), jnp.asarray(rng.integers(0, 2, 6))
    samples = Batch(None, y, jnp.ones(6))
    value = balanced_loss(logits, samples, jnp.array([4.0, 2.0, 0.0]), 0.0)
    np.testing.assert_allclose(value, cross_entropy(logits, samples), rtol=1e-12)


def test_one_full_step_of_generic_model_and_personal_head_written_out():
    algorithm = fedrod(**FULL, epochs=1, weighting="uniform")
    state = run(algorithm, 2)
    after = run(algorithm, 1, state)
    task, generic = problems.task(), state.model.generic
    means = []

    def balanced(w, samples, counts):
        return balanced_loss(task.predict(w, samples.x), samples, counts, 1.0)

    def residual(p, w, samples):
        z = task.features(w, samples.x)
        return cross_entropy(task.predict(w, samples.x) + z @ p["w"] + p["b"][None], samples)

    of_generic, of_head = jax.jit(jax.grad(balanced)), jax.jit(jax.grad(residual))
    for client in range(7):
        samples, own = padded(client), of(state.personal.personal, client)["head"]
        counts = np.bincount(batch(client).y, minlength=3).astype(float)
        means.append(step(generic, 0.1, of_generic(generic, samples, counts)))
        head = step(own, 0.1, of_head(own, generic, samples))
        assert problems.distance(of(after.personal.personal, client)["head"], head) < 1e-12
    assert problems.distance(after.model.generic, mean(means)) < 1e-12


def test_a_new_client_predicts_as_the_generic_model_does():
    algorithm = fedrod()
    state, x = run(algorithm, 3), batch(1).x
    generic = problems.task().predict(state.model.generic, x)
    np.testing.assert_allclose(algorithm.predict(personalized(algorithm, state, None, of_client=1), x), generic, atol=1e-12)
    assert np.max(np.abs(algorithm.predict(personalized(algorithm, state, 1), x) - generic)) > 1e-3


def test_with_a_hypernetwork_heads_follow_from_class_shares_alone():
    algorithm = fedrod(classes=3)
    state = run(algorithm, 8)
    by_train = personalized(algorithm, state, 1, "train")
    new = personalized(algorithm, state, None, "train", of_client=1)
    assert problems.leaves_equal(by_train, new)
    assert problems.distance(by_train.personal, personalized(algorithm, state, 5, "train").personal) > 1e-6
    assert problems.distance(start(algorithm).model.hyper["out"], state.model.hyper["out"]) > 1e-4


def test_with_a_hypernetwork_a_client_keeps_the_shares_of_its_train_samples():
    """Those of its support set at test may differ; a client that never trained has no others."""
    algorithm = fedrod(classes=3)
    state = run(algorithm, 8)
    train, support = (np.bincount(batch(1, name).y, minlength=3) for name in ("train", "test_support"))
    assert not np.allclose(train / train.sum(), support / support.sum())
    assert problems.leaves_equal(personalized(algorithm, state, 1, "test_support"), personalized(algorithm, state, 1, "train"))
    new = [personalized(algorithm, state, None, name, of_client=1) for name in ("test_support", "train")]
    assert problems.distance(*(model.personal for model in new)) > 1e-6


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="balance=-1"):
        fedrod(balance=-1)
    with pytest.raises(ValueError, match="classes=1"):
        fedrod(classes=1)
    with pytest.raises(ValueError, match="models without buffers"):
        fm.fedrod(buffered())
