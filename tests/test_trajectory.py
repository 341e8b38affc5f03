"""Tests of the backward pass of the inner loop: `jax.vjp` of the unrolled loop, storage options, memory by XLA's analysis."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_meta import meta, trajectory
from fedjax_meta.task import Batch
from tests.test_meta import RULES, after_adaptation, assert_close, batch, network, normal, parameters, several, start_of


def unrolled(theta: Any, inner: trajectory.InnerOptimizer, steps: int, *, constant: bool) -> Any:
    """phi_k by a plain loop; with `constant`, the inner gradients are held constant."""
    phi = inner.start(theta)
    state = inner.init(theta, phi)
    for t in range(steps):
        gradient = jax.grad(network)(phi, batch(10 + t, 6))
        gradient = jax.lax.stop_gradient(gradient) if constant else gradient
        phi, state = inner.update(theta, gradient, state, phi)
    return phi


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "adam", "Meta-SGD"])
def test_pull_back_equals_that_of_the_unrolled_loop_for_any_cotangent(name: str, k: int) -> None:
    inner = RULES[name]()
    support, theta = several(10, k, k), start_of(inner)
    cotangents = [jax.tree.map(lambda p, s=s: np.cos(s * p), parameters()) for s in (3, 8)]
    linearise = partial(trajectory.exact_product, network, None)

    @jax.jit
    def both(theta: Any) -> Any:
        adapted, losses, pull_back = trajectory.second_order_vjp(
            network, theta, support, inner, linearise=linearise, keep="smaller", checkpoint_every=None
        )
        expected, reference = jax.vjp(lambda theta: unrolled(theta, inner, k, constant=False), theta)
        plain = trajectory.run_inner(network, theta, support, inner)
        back = [(pull_back(v), reference(v)[0]) for v in cotangents]
        return ((adapted, losses), plain), (adapted, expected), *back

    for ours, theirs in both(theta):
        assert_close(ours, theirs, 1e-10)


@pytest.mark.parametrize("name", ["sgd", "Meta-SGD"])
def test_first_order_pull_back_holds_the_inner_gradients_constant(name: str) -> None:
    inner = RULES[name]()
    cotangent = jax.tree.map(lambda p: np.cos(3 * p), parameters())

    @jax.jit
    def both(theta: Any) -> Any:
        adapted, _, pull_back = trajectory.first_order_vjp(network, theta, several(10, 3, 3), inner)
        expected, reference = jax.vjp(lambda theta: unrolled(theta, inner, 3, constant=True), theta)
        return (adapted, pull_back(cotangent)), (expected, reference(cotangent)[0])

    assert_close(*both(start_of(inner)), 1e-12)


@pytest.mark.parametrize("scale", [np.ones(()), jnp.array(1.0), 1.0], ids=["strong", "weak", "a number"])
@pytest.mark.parametrize("k", [4, 5])
def test_segments_record_alike_also_outside_of_a_program(k: int, scale: Any) -> None:
    """The last segment of five steps has one step, and a weak type lasts for one step."""
    weights = {"w": normal(0, 50, 40) / 7, "v": normal(1, 40) / 7, "scale": scale}
    sample = {"x": normal(2, 4, 50), "y": np.ones(4)}

    def loss(p: Any, b: Any) -> Any:
        return jnp.mean((jnp.tanh(b["x"] @ p["w"]) @ p["v"] * p["scale"] - b["y"]) ** 2)

    def gradient(**way: Any) -> Any:
        return meta.exact(meta.sgd(0.01), steps=k, **way)(loss, weights, sample, sample).gradient

    assert_close(gradient(checkpoint_every=2, keep="linearisation"), gradient(), 1e-12)


@pytest.mark.parametrize(("name", "k"), [("sgd", 1), ("rate per entry", 4), ("adam", 3), ("Meta-SGD, head only", 4)])
def test_storage_options_do_not_change_the_gradient(name: str, k: int) -> None:
    inner = RULES[name]()
    support, query = several(10, k, k), batch(99, 9)
    ways: list[dict[str, Any]] = [{"keep": "linearisation"}, {"checkpoint_every": 2}]
    ways += [{"checkpoint_every": 9, "keep": "linearisation"}] if k > 1 else []
    ways += [{"keep": "parameters"}]
    target = partial(after_adaptation, inner=inner, support=support, query=query)

    @jax.jit
    def gradients(theta: Any) -> Any:
        exact = [meta.exact(inner, **way)(network, theta, support, query).gradient for way in ways]
        return jax.grad(target)(theta), exact

    reference, exact = gradients(start_of(inner))
    for gradient in exact:
        assert_close(gradient, reference, 1e-10)


@pytest.mark.parametrize("way", [{"keep": "parameters"}, {"keep": "linearisation"}, {"checkpoint_every": 2}])
def test_the_number_of_steps_may_differ_between_clients(way: dict[str, Any]) -> None:
    """Under vmap inside `lax.scan`, clients take 1 to 4 of at most 4 steps; the rate is traced too."""
    query = batch(99, 9)

    def client(steps: jax.Array, rate: jax.Array) -> Any:
        support = several(10, steps, 4)
        result = meta.exact(meta.sgd(rate), **way)(network, parameters(), support, query)
        target = partial(after_adaptation, inner=meta.sgd(rate), support=support, query=query)
        return result.gradient, jax.grad(target)(parameters())

    def scanned(carry: jax.Array, rate: jax.Array) -> Any:
        return carry, jax.vmap(client, in_axes=(0, None))(jnp.arange(1, 5), rate)

    rates = jnp.array([0.2, 0.5])
    _, (gradients, references) = jax.jit(lambda rates: jax.lax.scan(scanned, jnp.zeros(()), rates))(rates)
    assert_close(gradients, references, 1e-10)


def test_memory_of_many_steps_is_first_order_plus_the_trajectory() -> None:
    """By XLA's analysis, k = 32 steps need at most 40 parameter trees more than first order. Checkpoints need fewer still, and
    so do the linearisations of a network with few activations."""
    theta = {"body": {"w": normal(0, 400, 50), "b": normal(1, 50)}, "head": {"w": normal(2, 50, 3), "b": normal(3, 3)}}
    samples = Batch(normal(4, 32, 400), jnp.zeros(32, jnp.int32), jnp.ones(32))
    tree = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(theta))

    def temporary(estimate: meta.Estimator) -> float:
        compiled = jax.jit(partial(estimate, network)).lower(theta, samples, samples).compile()
        return compiled.memory_analysis().temp_size_in_bytes / tree

    rule = meta.sgd(0.1)
    first_order = temporary(meta.first_order(rule, steps=32))
    assert 30 <= temporary(meta.exact(rule, steps=32, keep="parameters")) <= first_order + 40
    assert temporary(meta.exact(rule, steps=32, checkpoint_every=6, keep="parameters")) <= first_order + 15
    assert temporary(meta.exact(rule, steps=32)) <= first_order + 15


def quantised_momentum() -> optax.GradientTransformation:
    """Momentum stored as int8: an integer state that depends on gradients."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        moved = jax.tree.map(lambda m, g: jnp.round(0.9 * m + 10 * g).astype(jnp.int8), state, updates)
        return jax.tree.map(lambda m: -m / 10.0, moved), moved

    return optax.GradientTransformation(lambda p: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int8), p), update)


def counting() -> optax.GradientTransformation:
    """Gradient descent that counts the steps with a large gradient."""

    def update(updates: Any, count: jax.Array, params: Any = None) -> Any:
        large = optax.tree.norm(updates) > 1
        return jax.tree.map(lambda g: -g, updates), jnp.where(large, count + 1, count)

    return optax.GradientTransformation(lambda p: jnp.zeros((), jnp.int32), update)


def test_integer_state_that_depends_on_gradients_raises() -> None:
    with pytest.raises(ValueError, match="integers that depend on gradients"):
        meta.exact(meta.optimizer(lambda rate: quantised_momentum(), 0.1))(network, parameters(), batch(1, 6), batch(2, 9))
    # A step count does not depend on gradients, and a count of events only through a comparison, which has no derivative.
    several = lambda rate: optax.MultiSteps(optax.sgd(rate), 2).gradient_transformation()  # noqa: E731
    for factory in (optax.adam, lambda rate: counting(), lambda rate: optax.apply_if_finite(optax.sgd(rate), 3), several):
        jax.eval_shape(partial(meta.exact(meta.optimizer(factory, 0.1)), network), parameters(), batch(1, 6), batch(2, 9))


@pytest.mark.parametrize("normalise", [False, True])
def test_the_difference_step_has_the_length_that_is_said(normalise: bool) -> None:
    """For x^4 central differences at distance h along a unit vector give 12 x^2 + 4 h^2."""
    x, delta, outer = 0.7, 0.01, jnp.array([30.0])
    support = meta.as_batches(jnp.zeros(1), 1)
    rule = trajectory.difference_product
    product = rule(lambda p, _: jnp.sum(p**4), None, support, 0, jnp.array([x]), delta=delta, normalise=normalise)[2]
    length = delta * (1 if normalise else 30)
    for size in (1e-3, 0.4, 5.0):
        np.testing.assert_allclose(product(jnp.array([size]), outer), [size * (12 * x**2 + 4 * length**2)], rtol=1e-9)
