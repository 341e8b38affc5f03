"""The derivatives that the written-out rounds use, against finite differences, and the model against the library's."""

import jax
import numpy as np

from fedjax_meta.task import Batch
from tests.whole_rounds import world
from tests.whole_rounds.world import flat, gradient, hessian_times, loss, near, task, view

VARIABLES = task().init(jax.random.key(0))
W = flat(VARIABLES)
SAMPLES = view(0, "train")


def differences(function, w, step=1e-5):
    return np.stack([(function(w + step * e) - function(w - step * e)) / (2 * step) for e in np.eye(len(w))])


def test_both_models_are_the_same():
    x, y = SAMPLES
    value, _ = task().loss(VARIABLES, Batch(x, y, np.ones(len(y))), jax.random.key(0))
    near(value, loss(W, SAMPLES), 1e-12)
    near(task().features(VARIABLES, x), world.features(W, x), 1e-12)


def test_the_gradient_is_the_slope_of_the_loss():
    near(gradient(W, SAMPLES), differences(lambda w: loss(w, SAMPLES), W), 1e-8)


def test_the_hessian_is_the_slope_of_the_gradient():
    near(world.hessian(W, SAMPLES), differences(lambda w: gradient(w, SAMPLES), W), 1e-8)
    v = np.cos(np.arange(len(W)))
    near(hessian_times(W, v, SAMPLES), world.hessian(W, SAMPLES) @ v, 1e-12)


def test_masks_fit_the_leaves():
    assert np.array_equal(W[world.BODY], flat(VARIABLES["body"]))
    assert np.array_equal(W[world.HEAD], flat(VARIABLES["head"]))
