import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.features import with_projection
from fedjax_meta.methods.moon import contrast
from fedjax_meta.task import weighted_mean
from tests import problems
from tests.methods.common import FULL, batch, build, of, padded, run, start, step

OPTIONS = {"cohort_size": 5, "devices": 1, "lr": 0.1, "batch_size": 8, "epochs": 2, "optimizer": optax.sgd}


def moon(task=None, **options):
    return build("moon", task, **(OPTIONS | options))


def test_the_contrast_is_a_softmax_over_two_cosines():
    rng = np.random.default_rng(0)
    z, towards, away = rng.normal(size=(3, 6, 5))

    def cosine(a, b):
        return np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    good, bad = np.exp(cosine(z, towards) / 0.5), np.exp(cosine(z, away) / 0.5)
    np.testing.assert_allclose(contrast(*map(jnp.asarray, (z, towards, away)), 0.5), -np.log(good / (good + bad)), atol=1e-12)


def test_features_that_are_all_zero_have_no_direction_and_a_finite_gradient():
    zero, some = jnp.zeros((1, 4)), jnp.ones((1, 4))
    value, slope = jax.value_and_grad(lambda z: contrast(z, some, -some, 0.5)[0])(zero)
    np.testing.assert_allclose(value, np.log(2))
    assert not np.any(slope)


def test_without_contrast_it_is_fedavg():
    state, average = run(moon(contrast_weight=0.0), 3), run(build("fedavg", **OPTIONS), 3)
    assert problems.distance(state.model, average.model) < 1e-12


def test_a_full_step_looks_at_the_global_and_the_last_local_model():
    options = {**OPTIONS, **FULL, "epochs": 1, "contrast_weight": 2.0}
    algorithm = moon(**options)
    state = run(algorithm, 1)
    after = run(algorithm, 1, state)
    task = problems.task()

    @jax.jit
    @jax.grad
    def slope(w, sent, last, samples):
        z, towards, away = (task.features(v, samples.x) for v in (w, sent, last))
        return task.loss(w, samples, None)[0] + 2.0 * weighted_mean(contrast(z, towards, away, 0.5), samples.weight)

    for client in (0, 6):
        gradient = slope(state.model, state.model, of(state.memory, client), padded(client))
        assert problems.distance(of(after.memory, client), step(state.model, 0.1, gradient)) < 1e-12


def test_the_projection_head_replaces_the_models_own():
    task = with_projection(problems.task(), 4, 3, projection=8)
    variables = task.init(jax.random.key(0))
    assert variables["base"]["head"] == {"w": None, "b": None}
    x = batch(0).x
    assert task.features(variables, x).shape == (x.shape[0], 8)
    np.testing.assert_allclose(task.head(variables, task.features(variables, x)), task.predict(variables, x))
    z = np.asarray(problems.task().features(problems.task().init(jax.random.key(1)) | variables["base"] | {"head": None}, x))
    one, two = variables["project1"], variables["project2"]
    hidden = np.maximum(z @ np.asarray(one["kernel"]).T + np.asarray(one["bias"]), 0)
    np.testing.assert_allclose(task.features(variables, x), hidden @ np.asarray(two["kernel"]).T + np.asarray(two["bias"]))
    algorithm = moon(task)
    assert problems.forms(start(algorithm)) == problems.forms(run(algorithm, 1))
    assert fm.masks.resolve("head", task)["head"] == {"kernel": True, "bias": True}


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="contrast_weight=-1"):
        moon(contrast_weight=-1)
    with pytest.raises(ValueError, match="temperature=0"):
        moon(temperature=0)
    with pytest.raises(ValueError, match="no features and head"):
        moon(problems.task()._replace(head=None))
