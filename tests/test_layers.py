"""Tests of layers against XLA's convolution and pooling, and against PyTorch's formulas in NumPy."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedjax_meta import layers, loops, runtime
from tests.references import gradient_and_curvature, xla_convolution, xla_pool

# ------------------------------------------------------------------------------------------------ convolution, pooling, dense


SHAPES = [
    # height, width, channels, outputs, kernel, padding
    (12, 12, 3, 6, 5, 0),
    (14, 14, 6, 16, 5, 0),
    (7, 9, 2, 5, 3, 1),
    (5, 6, 1, 40, 2, 0),
    (6, 8, 3, 4, 1, 0),
]


PLATFORMS = ("cpu", "gpu")
"""Whose order of work a test traces; both run on the CPU."""


@pytest.mark.parametrize(
    ("form", "platform"), [*((form, "cpu") for form in layers.FORMS), ("banded", "gpu"), ("im2col", "gpu")]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_convolution_equals_xla_in_value_gradient_and_curvature(shape, form, platform):
    height, width, channels, outputs, size, padding = shape
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, height, width, channels)))
    kernel = jnp.asarray(rng.normal(size=(outputs, size, size, channels)))

    def agree(ours, theirs):
        np.testing.assert_allclose(ours(x, kernel), theirs(x, kernel), rtol=1e-12, atol=1e-12)
        weights = jnp.asarray(rng.normal(size=theirs(x, kernel).shape))
        direction = tuple(jnp.asarray(rng.normal(size=a.shape)) for a in (x, kernel))
        a, b = (
            gradient_and_curvature(scalar, (x, kernel), direction)
            for scalar in (
                lambda pair: jnp.sum(weights * jnp.sin(ours(*pair))),
                lambda pair: jnp.sum(weights * jnp.sin(theirs(*pair))),
            )
        )
        for mine, reference in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(mine, reference, rtol=1e-10, atol=1e-10)

    with runtime.compiling_for(platform):
        agree(
            lambda x, kernel: layers.convolution(x, kernel, padding=padding, form=form),
            lambda x, kernel: xla_convolution(x, kernel, padding),
        )
        agree(
            lambda x, kernel: layers.pool_windows(layers.convolution_windows(x, kernel, padding=padding, form=form)),
            lambda x, kernel: xla_pool(xla_convolution(x, kernel, padding)),
        )


@pytest.mark.parametrize("platform", PLATFORMS)
@given(st.tuples(*[st.integers(1, 9)] * 2), st.integers(1, 4), st.integers(1, 70), st.integers(1, 5), st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_banded_convolution_equals_xla_for_any_shape(platform, image, channels, outputs, size, padding):
    height, width = image
    if min(height, width) + 2 * padding < size + 1:
        return
    rng = np.random.default_rng(height * width)
    x = jnp.asarray(rng.integers(-4, 5, (1, height, width, channels)), jnp.float32)
    kernel = jnp.asarray(rng.integers(-4, 5, (outputs, size, size, channels)), jnp.float32)

    # Small integers are summed exactly, whatever the order.
    @jax.jit
    def both(x, kernel):
        ours = partial(layers.convolution, padding=padding, form="banded")(x, kernel)
        pooled = layers.pool_windows(layers.convolution_windows(x, kernel, padding=padding, form="banded"))
        theirs = xla_convolution(x, kernel, padding)
        return (ours, pooled), (theirs, xla_pool(theirs))

    with runtime.compiling_for(platform):
        ours, theirs = both(x, kernel)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("outputs", [6, 40])  # fewer and more than a warp
def test_a_layer_of_several_clients_has_the_same_gradient_and_curvature_on_a_gpu(outputs, pool):
    rng = np.random.default_rng(0)
    layer = layers.Conv(outputs, size=3, padding=1, pool=pool)
    x = jnp.asarray(rng.normal(size=(3, 2, 6, 6, 2)))
    one = {"kernel": jnp.asarray(rng.normal(size=(3, outputs, 3, 3, 2))), "bias": jnp.asarray(rng.normal(size=(3, outputs)))}

    def scalar(pair):
        return jnp.sum(jnp.sin(jax.vmap(lambda p, x: layer.apply({"params": p}, x), axis_name=loops.LANES)(*pair)))

    found = []
    for platform in PLATFORMS:
        with runtime.compiling_for(platform):
            found.append(gradient_and_curvature(scalar, (one, x), (one, x)))
    for mine, reference in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(5,), (0, 3, 5), (2, 5), (2, 3, 5)])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_dense_layer_takes_any_number_of_axes(platform, shape):
    layer = layers.Dense(6)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    variables = layer.init(jax.random.key(0), x)
    with runtime.compiling_for(platform):
        found = layer.apply(variables, x)
    expected = np.asarray(x) @ np.asarray(variables["params"]["kernel"]).T + np.asarray(variables["params"]["bias"])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("outputs", [6, 40])
@pytest.mark.parametrize("pool", [False, True])
def test_images_on_an_explicit_mesh(outputs, pool):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    layer = layers.Conv(outputs, size=3, padding=1, pool=pool)
    x = jnp.ones((4, 6, 6, 2))
    variables = layer.init(jax.random.key(0), x)
    gradient = jax.grad(lambda variables, x: jnp.mean(layer.apply(variables, x) ** 2))
    expected = gradient(variables, x)
    with jax.set_mesh(mesh):
        whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("x",)))
        variables, x = jax.device_put(variables, whole), jax.device_put(x, split)
        for platform in PLATFORMS:
            with runtime.compiling_for(platform):
                found = jax.jit(partial(gradient))(variables, x)
            for mine, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(mine, reference, rtol=1e-10, atol=1e-12)


def test_a_gpu_adds_up_the_gradient_of_few_clients_in_several_pieces():
    def pieces(clients, rows, matrix):
        def one(_):
            found.append(layers._pieces(rows, matrix))
            return 0

        found = []
        jax.vmap(one, axis_name=loops.LANES)(jnp.zeros(clients))
        return found[0]

    assert layers._pieces(3136, (48, 144)) == 1  # a CPU
    with runtime.compiling_for("gpu"):
        # 3 tiles of 64x64 a client; an H200 runs 264 at a time.
        assert [pieces(clients, 3136, (48, 144)) for clients in (5, 50, 88, 500)] == [8, 2, 1, 1]
        assert pieces(5, 900, (48, 144)) == 6  # the largest number up to 8 that divides the rows
        assert pieces(5, 3136, (512, 2304)) == 1


@pytest.mark.parametrize("form", [None, *layers.FORMS])
def test_a_kernel_that_does_not_fit_is_refused(form):
    x, kernel = jnp.zeros((2, 4, 4, 1)), jnp.zeros((3, 5, 5, 1))
    with pytest.raises(ValueError, match="a kernel of 5x5 does not fit into 4x4 pixels"):
        layers.convolution(x, kernel, form=form)
    with pytest.raises(ValueError, match="a kernel of 4x4 and a 2x2 pooling does not fit into 4x4 pixels"):
        layers.convolution_windows(x, kernel[:, :4, :4], form=form)
    assert layers.convolution(x, kernel, padding=1, form=form).shape == (2, 2, 2, 3)
    with pytest.raises(ValueError, match="form"):
        layers.convolution(x, kernel, form="foo")


@pytest.mark.parametrize("block", [2, 4, 12])
def test_block_size_does_not_change_the_result(block):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-4, 5, (2, 14, 14, 3)), jnp.float32)
    kernel = jnp.asarray(rng.integers(-4, 5, (8, 3, 3, 3)), jnp.float32)
    windows = layers.convolution_windows(x, kernel, form="banded", block=block)
    assert windows.shape == (2, 6, 12 // block, 4, block // 2, 8)
    np.testing.assert_array_equal(layers.pool_windows(windows), xla_pool(xla_convolution(x, kernel, 0)))


def test_max_pool_equals_reduce_window_in_value_gradient_and_curvature():
    rng = np.random.default_rng(0)
    x, direction = (jnp.asarray(rng.normal(size=(2, 7, 6, 3))) for _ in range(2))
    weights = jnp.asarray(rng.normal(size=(2, 3, 3, 3)))
    np.testing.assert_array_equal(layers.max_pool(x), xla_pool(x))
    ours, theirs = (lambda x, pool=pool: jnp.sum(weights * jnp.sin(pool(x))) for pool in (layers.max_pool, xla_pool))
    for a, b in zip(*(gradient_and_curvature(scalar, x, direction) for scalar in (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


gradient_of_pooled_sum = jax.jit(jax.grad(lambda x: layers.max_pool(x).sum()))


@given(st.lists(st.integers(0, 2), min_size=16, max_size=16))
@settings(max_examples=30, deadline=None)
def test_the_first_of_equal_entries_gets_the_whole_gradient(entries):
    x = np.array(entries, np.float32).reshape(1, 4, 4, 1)
    gradient = np.asarray(gradient_of_pooled_sum(jnp.asarray(x)))
    for i in (0, 2):
        for j in (0, 2):
            expected = np.zeros(4)
            expected[np.argmax(x[0, i : i + 2, j : j + 2, 0].ravel())] = 1
            np.testing.assert_array_equal(gradient[0, i : i + 2, j : j + 2, 0].ravel(), expected)


def test_all_forms_break_ties_the_same_way():
    """The image has pairs of equal columns and the kernel is 1x1, so every pooling window has its maximum twice."""
    x = jnp.repeat(jnp.arange(18.0).reshape(1, 6, 3, 1), 2, axis=2)
    kernel = jnp.array([1.0, 2.0]).reshape(2, 1, 1, 1)

    def gradient(form):
        return jax.grad(lambda x: layers.pool_windows(layers.convolution_windows(x, kernel, form=form)).sum())(x)

    expected = np.zeros((6, 6))
    expected[1::2, 0::2] = 3
    for form in layers.FORMS:
        np.testing.assert_array_equal(gradient(form)[0, :, :, 0], expected)


def test_dense_kernel_has_outputs_first():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, 4)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_allclose(layers.dense(jnp.asarray(x), jnp.asarray(kernel)), x @ kernel.T, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------------- batch norm


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_vectors_of_tokens_are_the_same_on_an_accelerator(platform):
    """In value, gradient and curvature, beside Flax's layer."""
    tokens = jnp.array([[3, 0, 3, 6], [1, 3, -1, 7]])  # the last two are none of the seven
    table = jax.random.normal(jax.random.key(0), (7, 5))

    def value(table, layer):
        found = layer.apply({"params": {"embedding": table}}, tokens)
        return jnp.sum(jnp.sin(found[0])) + jnp.sum(found[1, :2] ** 3)

    def everything(table, layer):
        gradient = jax.grad(value)
        return value(table, layer), gradient(table, layer), jax.jvp(lambda t: gradient(t, layer), (table,), (table**2,))[1]

    expected = everything(table, nn.Embed(7, 5))
    with runtime.compiling_for(platform):
        found = everything(table, layers.Embed(7, 5))
        outside = layers.Embed(7, 5).apply({"params": {"embedding": table}}, tokens)[1, 2:]
    assert np.isnan(outside).all()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def apply_batch_norm(x, weight, stats=None, affine=(1.0, 0.0)):
    channels = x.shape[-1]
    variables = {
        "params": {"scale": jnp.full(channels, affine[0]), "bias": jnp.full(channels, affine[1])},
        "batch_stats": stats or {"mean": jnp.zeros(channels), "var": jnp.ones(channels)},
    }
    y, moved = layers.BatchNorm().apply(variables, x, train=True, weight=weight, mutable=["batch_stats"])
    return y, moved["batch_stats"]


def torch_batch_norm(x, mean, var, scale, shift):
    """PyTorch's documented training step over the given rows: momentum 0.1, eps 1e-5, unbiased running variance."""
    flat = x.reshape(-1, x.shape[-1])
    y = (x - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5) * scale + shift
    return y, 0.9 * mean + 0.1 * flat.mean(0), 0.9 * var + 0.1 * flat.var(0, ddof=1)


@pytest.mark.parametrize("shape", [(6, 3), (6, 4, 5, 3)])
@pytest.mark.parametrize("weight", [[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0], None])
def test_batch_norm_equals_pytorchs_formula_on_the_real_rows(shape, weight):
    rng = np.random.default_rng(0)
    x = rng.normal(2, 3, shape)
    stats = {"mean": rng.normal(size=3), "var": rng.uniform(1, 2, 3)}
    real = np.ones(6, bool) if weight is None else np.array(weight, bool)
    expected, mean, var = torch_batch_norm(x[real], stats["mean"], stats["var"], 1.5, -0.5)
    weight = None if weight is None else jnp.asarray(weight, float)
    y, moved = apply_batch_norm(jnp.asarray(x), weight, jax.tree.map(jnp.asarray, stats), (1.5, -0.5))
    np.testing.assert_allclose(y[real], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moved["mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(moved["var"], var, rtol=1e-12)


def test_a_batch_of_padding_alone_does_not_change_the_statistics():
    x = jnp.ones((3, 2)) * 5
    stats = {"mean": jnp.array([1.0, 2.0]), "var": jnp.array([3.0, 4.0])}
    y, moved = apply_batch_norm(x, jnp.zeros(3), stats)
    np.testing.assert_array_equal(moved["mean"], stats["mean"])
    np.testing.assert_array_equal(moved["var"], stats["var"])
    assert np.all(np.isfinite(y))


def test_a_single_real_entry_uses_its_biased_variance():
    _, moved = apply_batch_norm(jnp.array([[3.0], [7.0]]), jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(moved["mean"], [0.3], rtol=1e-6)
    np.testing.assert_allclose(moved["var"], [0.9], rtol=1e-6)
