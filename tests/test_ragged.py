"""Loops of clients that run side by side and differ in length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import loops, meta, runtime, trajectory
from fedjax_meta.data import Batches

COUNTS = jnp.array([3, 0, 5, 1])
LONGEST = 5


def side_by_side(function, *inputs):
    return jax.vmap(function, axis_name=loops.LANES)(*inputs)


def one_by_one(function, *inputs):
    rows = [function(*row) for row in zip(*inputs, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def equations(jaxpr):
    """All equations, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def forward(count, start):
    return loops.fori_loop(count, lambda i, x: jnp.sin(x * (i + 1)), start)


def recorded(count, start):
    entry = {"x": jax.ShapeDtypeStruct((), start.dtype), "i": jax.ShapeDtypeStruct((2,), jnp.int32)}
    step = lambda i, x: (x * (i + 2), {"x": x, "i": jnp.full(2, i, jnp.int32)})  # noqa: E731
    last, read = loops.recorded_loop(count, step, start, entry, LONGEST)
    return last, [jax.tree.map(lambda leaf: jnp.where(i < count, leaf, 0), read(i)) for i in range(LONGEST)]  # noqa: B023


def backward(count, start):
    return loops.backward_loop(count, lambda i, x: 3 * x + i, start)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("function", [forward, recorded, backward])
def test_lanes_of_different_lengths_give_what_each_gives_alone(function, platform):
    starts = jnp.array([0.3, -1.0, 2.0, 0.7])
    alone = one_by_one(function, COUNTS, starts)
    with runtime.compiling_for(platform):
        together = side_by_side(function, COUNTS, starts)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        assert np.array_equal(a, b)


def test_what_a_finished_lane_computes_is_dropped_where_it_is_not_finite():
    found = side_by_side(lambda count: loops.fori_loop(count, lambda i, x: x / (2.0 - i), jnp.ones(())), jnp.array([2, 5]))
    assert found[0] == 0.5 and not np.isfinite(found[1])


def test_loops_of_one_length_select_nothing():
    program = jax.make_jaxpr(partial(side_by_side, lambda x: loops.fori_loop(4, lambda i, x: x * i, x)))(jnp.ones(3))
    assert "select_n" not in {equation.primitive.name for equation in equations(program.jaxpr)}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2)


SAMPLES = jax.random.normal(jax.random.key(0), (9, 6, 4))
PARAMS = {"w": jax.random.normal(jax.random.key(1), (4, 7)), "v": jnp.arange(7.0) / 7}


def meta_gradient(count, *, checkpoint_every=None):
    support = Batches(lambda step, chunk: SAMPLES[step], count, 9)
    linearise = partial(trajectory.exact_product, loss, None)
    adapted, losses, pull_back = trajectory.second_order_vjp(
        loss, PARAMS, support, meta.sgd(0.1), linearise=linearise, keep="parameters", checkpoint_every=checkpoint_every
    )
    return adapted, losses, pull_back(jax.tree.map(jnp.cos, adapted))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("every", [None, 2, 4])
def test_ragged_meta_gradients_are_those_of_each_client(every, platform):
    counts = jnp.array([9, 2, 5])
    alone = one_by_one(partial(meta_gradient, checkpoint_every=every), counts)
    with runtime.compiling_for(platform):
        together = side_by_side(partial(meta_gradient, checkpoint_every=every), counts)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_a_ragged_step_moves_no_trajectory():
    # A trajectory that is selected as a whole, or written where each lane is, is moved in every step: traffic of k^2.
    program = jax.make_jaxpr(partial(side_by_side, meta_gradient))(jnp.array([9, 2, 5]))
    moved = {
        equation.primitive.name: equation
        for equation in equations(program.jaxpr)
        if any(getattr(var.aval, "shape", None) in {(3, 9, 4, 7), (9, 3, 4, 7)} for var in equation.outvars)
    }
    assert "while" in moved and "select_n" not in moved
    # Written at one position for all lanes, which XLA does in place.
    assert len(moved["scatter"].invars[1].aval.shape) == 1
