"""Tests of `Task`: the mean over real rows, the loss of a user's own model, and the check of builder arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_meta.models import Network
from fedjax_meta.task import Batch, Task, Weighted, classification, cross_entropy, require_task, weighted_mean
from fedjax_meta.tasks import regression


@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans()), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_weighted_mean_is_the_mean_of_the_real_rows(rows):
    values, real = np.array([v for v, _ in rows], np.float32), np.array([r for _, r in rows])
    expected = values[real].mean() if real.any() else 0
    np.testing.assert_allclose(
        weighted_mean(jnp.asarray(values), jnp.asarray(real, jnp.float32)), expected, rtol=1e-5, atol=1e-5
    )


def test_weighted_mean_accepts_fractional_weights():
    """Mixture responsibilities may sum to less than 1 in a small batch; the result must still be a mean."""
    assert weighted_mean(jnp.array([2.0, 4.0]), jnp.array([0.1, 0.3])) == pytest.approx(3.5)


def test_an_empty_batch_has_loss_and_gradient_zero():
    batch = Batch(None, jnp.array([0, 1]), jnp.zeros(2))
    loss, gradient = jax.value_and_grad(cross_entropy)(jnp.ones((2, 3)), batch)
    assert loss == 0
    assert not np.any(gradient)


def test_cross_entropy_and_its_gradient_in_closed_form():
    """The loss is log sum exp(z) - z_y and its gradient softmax(z) - onehot(y), each divided by the number of real rows."""
    logits = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0], [9.0, 9.0, 9.0]], np.float32)
    y, weight = np.array([1, 0, 2]), np.array([1.0, 1.0, 0.0], np.float32)
    loss, gradient = jax.value_and_grad(cross_entropy)(jnp.asarray(logits), Batch(None, jnp.asarray(y), jnp.asarray(weight)))
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log(softmax[[0, 1], [1, 0]]).mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, (softmax - np.eye(3)[y]) * weight[:, None] / 2, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_an_invalid_label_in_a_padded_row_changes_nothing(label):
    logits = jnp.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    of = jax.value_and_grad(cross_entropy)
    loss, gradient = of(logits, Batch(None, jnp.array([1, label]), jnp.array([1.0, 0.0])))
    alone, gradient_alone = of(logits[:1], Batch(None, jnp.array([1]), jnp.ones(1)))
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    np.testing.assert_allclose(gradient, jnp.concatenate([gradient_alone, jnp.zeros((1, 3))]), rtol=1e-6)


@pytest.mark.parametrize("missing", ["row", "entry"])
def test_a_missing_target_is_in_no_gradient(missing):
    task = regression(lambda key: {"w": jnp.ones((3, 2))}, lambda v, x: x @ v["w"])
    y, weight = np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((2, 2))
    rows, held = jnp.ones(2), y.copy()
    if missing == "row":
        y, rows = np.where([[True], [False]], y, np.nan), jnp.array([1.0, 0.0])
        held = np.where([[True], [False]], held, 0)
    else:
        weight[1, 0] = 0
        y, held = np.where(weight > 0, y, np.nan), np.where(weight > 0, held, 0)

    def gradient(values):
        batch = Batch(jnp.ones((2, 3)), Weighted(jnp.asarray(values), jnp.asarray(weight)), rows)
        return jax.grad(lambda v: task.loss(v, batch, jax.random.key(0))[0])(task.init(jax.random.key(0)))["w"]

    assert np.isfinite(gradient(y)).all() and np.array_equal(gradient(y), gradient(held))


def test_classification_of_a_users_own_model():
    task = classification(
        lambda key: {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros((1, 3))},
        lambda p, x: x @ p["w"] + p["b"],
        layers=("w",),
    )
    variables = task.init(jax.random.key(0))
    x, y = jnp.eye(4), jnp.array([0, 1, 2, 0])
    loss, after = task.loss(variables, Batch(x, y, jnp.ones(4)), jax.random.key(1))
    # The inputs are the rows of the identity, so the logits are the rows of w.
    expected = -jnp.mean(jax.nn.log_softmax(variables["w"])[jnp.arange(4), y])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert after is variables
    assert task.trainable(variables) == {"w": True, "b": True}
    assert task.features is task.head is None
    assert task.layers == ("w",)


def test_a_method_builder_refuses_anything_but_a_task():
    def predict(variables, x):
        return x

    require_task("fedavg", classification(lambda key: {}, predict))
    for value, words in (
        (predict, r"e\.g\. fm\.classification\(init, predict\), not a function"),
        (Task, "not the class Task"),
        (None, "not an object of type NoneType"),
        (Network((4,), 3), r"e\.g\. fm\.models\.from_linen\(module, sample_shape\), not an object of type Network"),
    ):
        with pytest.raises(ValueError, match=f"fedavg's first argument must be a Task, .*{words}"):
            require_task("fedavg", value)
