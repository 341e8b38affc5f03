"""Tests of models against plain layers, finite differences, and the parameter counts of the papers."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from fedjax_meta import masks, models
from fedjax_meta.task import Batch, cross_entropy
from tests.references import gradient_and_curvature, xla_convolution, xla_pool

IMAGE = (14, 14, 2)
OF_PAPERS = ("mlp", "lenet", "fedpac_cnn", "mtfl_mlp", "mtfl_cnn", "elu_mlp", "logistic")


@pytest.fixture
def float32():
    with jax.enable_x64(False):
        yield


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def small_cnn(**options):
    """Two convolutions on 14x14x2 with outputs 12 and 5 wide; the second has an odd row that pooling drops."""
    layout = {"convs": ((3, 3, 0), (4, 4, 1)), "hidden": (6,), **options}
    module = models.Network(IMAGE, 3, **layout)
    return models.from_linen(module, IMAGE, layers=module.layers, features="features", head="head")


def batch_of(rng, rows, shape, classes, weight=None):
    weight = np.ones(rows) if weight is None else np.asarray(weight, float)
    return Batch(
        jnp.asarray(rng.normal(size=(rows, *shape))), jnp.asarray(rng.integers(0, classes, rows)), jnp.asarray(weight)
    )


def loss_and_gradient(task):
    """`(variables, batch) -> ((loss, updated variables), gradient)`, compiled."""
    return jax.jit(jax.value_and_grad(lambda variables, batch: task.loss(variables, batch, jax.random.key(0)), has_aux=True))


def primitives(jaxpr):
    """Names of all primitives in a jaxpr, including those of inner functions."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in jaxprs_in_params(equation.params):
            names |= primitives(inner)
    return names


# ------------------------------------------------------------------------------------------------------------ sizes and names


@pytest.mark.parametrize(
    ("build", "arguments", "parameters", "buffers"),
    [
        ("mlp", {}, 79_510, 0),
        ("lenet", {}, 62_006, 0),
        ("fedpac_cnn", {}, 107_690, 0),
        ("fedpac_cnn", {"image": (28, 28, 1)}, 117_066, 0),
        ("fedpac_cnn", {"image": (28, 28, 1), "classes": 62}, 123_774, 0),
        ("elu_mlp", {}, 68_270, 0),
        ("elu_mlp", {"inputs": 3072}, 251_310, 0),
        ("logistic", {}, 610, 0),
        ("mtfl_mlp", {}, 199_610, 400),
        ("mtfl_mlp", {"norm": "before"}, 199_610, 400),
        ("mtfl_cnn", {}, 1_204_874, 192),
        ("mtfl_cnn", {"norm": "before"}, 1_204_874, 192),
    ],
)
def test_parameter_counts_of_the_papers(build, arguments, parameters, buffers):
    variables = masks.variables_shape(models.MODELS[build](**arguments))
    assert count(variables["params"]) == parameters
    assert count(variables.get("batch_stats", {})) == buffers


@pytest.mark.parametrize(
    ("build", "word", "leaves"),
    [
        ("mlp", "head", 1_010),
        ("lenet", "last:1", 850),
        ("lenet", "last:2", 11_014),
        ("lenet", "last:3", 59_134),
        ("lenet", "first:2", 62_006 - 59_134),
        ("fedpac_cnn", "head", 1_290),
        ("mtfl_mlp", "bn_affine", 400),
        ("mtfl_mlp", "bn_stats", 400),
        ("mtfl_cnn", "bn_affine", 192),
        ("mtfl_cnn", "bn", 384),
    ],
)
def test_masks_select_as_many_leaves_as_in_the_papers(build, word, leaves):
    task = models.MODELS[build]()
    assert count(masks.split(masks.variables_shape(task), masks.resolve(word, task))[0]) == leaves


@pytest.mark.parametrize("build", OF_PAPERS)
def test_layers_are_listed_from_input_to_output_and_buffers_are_not_trainable(build):
    task = models.MODELS[build]()
    variables = masks.variables_shape(task)
    assert task.layers[-1] == "head"
    assert set(task.layers) == {name for name in variables["params"] if not name.startswith("bn")}
    trainable = task.trainable(variables)
    assert jax.tree.structure(trainable) == jax.tree.structure(variables)
    assert all(jax.tree.leaves(trainable["params"]))
    assert not any(jax.tree.leaves(trainable.get("batch_stats", {})))


@pytest.mark.parametrize("build", OF_PAPERS)
def test_predict_equals_head_of_features(build):
    task = models.MODELS[build]()
    shape = {"lenet": (32, 32, 3), "fedpac_cnn": (32, 32, 3), "mtfl_cnn": (32, 32, 3), "logistic": (60,)}.get(
        build, (28, 28, 1)
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, *shape)), jnp.float32)
    variables = jax.jit(task.init)(jax.random.key(1))
    logits = jax.jit(task.predict)(variables, x)
    features = jax.jit(task.features)(variables, x)
    assert logits.shape == (3, 10)
    assert build != "fedpac_cnn" or features.shape == (3, 128)
    np.testing.assert_allclose(logits, task.head(variables, features), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logits, jax.jit(lambda v, x: task.predict(v, x.reshape(3, -1)))(variables, x))


# ---------------------------------------------------------------------------------------------------- networks of fast layers


@pytest.mark.parametrize("form", ["banded", "im2col"])
def test_convolution_under_vmap_over_clients_uses_matrix_products_only(form):
    task = small_cnn(form=form)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(lambda *rows: jnp.stack(rows), *(batch_of(rng, 4, IMAGE, 3) for _ in range(3)))
    variables = jax.vmap(task.init)(jax.random.split(jax.random.key(0), 3))

    def step(variables, batch):
        return jax.grad(lambda v: task.loss(v, batch, jax.random.key(0))[0])(variables)

    names = primitives(jax.make_jaxpr(jax.vmap(step))(variables, batch).jaxpr)
    assert "dot_general" in names
    assert "conv_general_dilated" not in names
    assert " convolution(" not in jax.jit(jax.vmap(step)).lower(variables, batch).compile().as_text()
    assert "conv_general_dilated" in primitives(
        jax.make_jaxpr(small_cnn(form="lax").predict)(jax.jit(task.init)(jax.random.key(0)), batch.x[0]).jaxpr
    )


@pytest.mark.parametrize(
    ("activation", "norm"),
    [("relu", None), ("leaky_relu", None), ("elu", None), ("relu", "before"), ("elu", "after")],
)
def test_network_equals_plain_layers_in_order(activation, norm):
    """Plain XLA layers in the order of the paper's text, without reordering bias, activation and pooling."""
    task = small_cnn(activation=activation, normed=("conv1", "conv2", "fc1") if norm else (), norm=norm or "after")
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape) ** 2, jax.jit(task.init)(jax.random.key(0)))
    batch = batch_of(rng, 5, IMAGE, 3, [1, 1, 0, 1, 1])

    def batch_norm(h, p):
        w = batch.weight.reshape(-1, *[1] * (h.ndim - 1)) * jnp.ones_like(h)
        axes = tuple(range(h.ndim - 1))
        mean = jnp.sum(w * h, axes) / jnp.sum(w, axes)
        var = jnp.sum(w * (h - mean) ** 2, axes) / jnp.sum(w, axes)
        return (h - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["bias"]

    @jax.numpy_rank_promotion("allow")
    def written_out(params):
        act = models.ACTIVATIONS[activation]
        h = batch.x
        for i, padding in ((1, 0), (2, 1)):
            h = xla_convolution(h, params[f"conv{i}"]["kernel"], padding) + params[f"conv{i}"]["bias"]
            h = batch_norm(h, params[f"bn{i}"]) if norm == "before" else h
            h = xla_pool(act(h))
            h = batch_norm(h, params[f"bn{i}"]) if norm == "after" else h
        h = h.reshape(5, -1) @ params["fc1"]["kernel"].T + params["fc1"]["bias"]
        h = batch_norm(h, params["bn3"]) if norm == "before" else h
        h = act(h)
        h = batch_norm(h, params["bn3"]) if norm == "after" else h
        logits = jax.nn.log_softmax(h @ params["head"]["kernel"].T + params["head"]["bias"])
        return -jnp.sum(batch.weight * logits[jnp.arange(5), batch.y]) / 4

    def ours(params):
        return task.loss({**variables, "params": params}, batch, jax.random.key(0))[0]

    params = variables["params"]
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params)
    np.testing.assert_allclose(ours(params), written_out(params), rtol=1e-12)
    a, b = (gradient_and_curvature(scalar, params, direction) for scalar in (ours, written_out))
    for mine, reference in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------------------------------------- batch norm, padded rows


def test_batch_norm_in_evaluation_uses_running_statistics():
    task = models.mtfl_mlp(inputs=4)
    variables = jax.jit(task.init)(jax.random.key(0))
    stats = {"bn1": {"mean": jnp.full(200, 0.3), "var": jnp.full(200, 4.0)}}
    variables["batch_stats"] = stats
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    p = jax.tree.map(np.asarray, variables["params"])
    h = np.maximum(np.asarray(x) @ p["fc1"]["kernel"].T + p["fc1"]["bias"], 0)
    h = (h - 0.3) / np.sqrt(4 + 1e-5)
    h = np.maximum(h @ p["fc2"]["kernel"].T + p["fc2"]["bias"], 0)
    expected = h @ p["head"]["kernel"].T + p["head"]["bias"]
    np.testing.assert_allclose(task.predict(variables, x), expected, rtol=1e-4, atol=1e-6)


def test_a_batch_of_padding_alone_changes_no_variables():
    task = small_cnn(normed=("conv1", "conv2", "fc1"))
    variables = jax.jit(task.init)(jax.random.key(0))
    batch = batch_of(np.random.default_rng(0), 3, IMAGE, 3, [0, 0, 0])
    (loss, after), gradient = loss_and_gradient(task)(variables, batch)
    assert loss == 0
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, after, variables)))


@pytest.mark.parametrize(
    ("build", "options"),
    [("mlp", {}), ("lenet", {}), ("mtfl_mlp", {}), ("mtfl_cnn", {"norm": "after"}), ("mtfl_cnn", {"norm": "before"})],
)
def test_padded_rows_have_no_effect_at_all(build, options):
    image = (16, 16, 2)
    arguments = {"inputs": 512} if "mlp" in build else {"image": image}
    task = models.MODELS[build](**arguments, **options)
    rng = np.random.default_rng(0)
    variables = jax.jit(task.init)(jax.random.key(0))
    batch = batch_of(rng, 6, image, 10, [1, 1, 0, 1, 0, 1])
    padding = batch.weight == 0
    other = batch._replace(
        x=jnp.where(padding[:, None, None, None], 1e3 * jnp.asarray(rng.normal(size=batch.x.shape), jnp.float32), batch.x),
        y=jnp.where(padding, 255, batch.y),
    )

    everything = partial(loss_and_gradient(task), variables)
    first, second = everything(batch), everything(other)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, second)))
    dense = Batch(batch.x[~padding], batch.y[~padding], jnp.ones(4))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(everything(dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def test_running_statistics_are_exact_in_meta_gradients():
    """Evaluation-mode loss after one training step depends on the statistics that the step updated: finite differences."""
    task = small_cnn(activation="elu", normed=("conv1", "fc1"), norm="after")
    rng = np.random.default_rng(0)
    support, query = (batch_of(rng, 5, IMAGE, 3, weight) for weight in ([1, 1, 0, 1, 1], [1, 1, 1, 1, 1]))
    variables = jax.jit(task.init)(jax.random.key(0))

    def after_one_step(params):
        start = {**variables, "params": params}
        gradient, moved = jax.grad(lambda v: task.loss(v, support, jax.random.key(0)), has_aux=True)(start)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient["params"])
        logits = task.predict({**moved, "params": params}, query.x)
        return cross_entropy(logits, query)

    params = variables["params"]
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params)
    gradient = jax.jit(jax.grad(after_one_step))(params)
    slope = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    step = 1e-6
    ahead, behind = (
        jax.jit(after_one_step)(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction)) for s in (step, -step)
    )
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-5)


# -------------------------------------------------------------------------------------------------- initial values, precision


@pytest.mark.parametrize(
    ("build", "layer", "fan_in"), [("mlp", "fc1", 784), ("lenet", "conv2", 150), ("mtfl_cnn", "fc1", 2304)]
)
def test_torch_init_is_uniform_within_one_over_root_fan_in(build, layer, fan_in):
    bound = 1 / np.sqrt(fan_in)
    params = models.MODELS[build]().init(jax.random.key(0))["params"][layer]
    kernel = np.asarray(params["kernel"])
    assert np.abs(kernel).max() <= bound
    assert np.abs(kernel).max() > 0.98 * bound
    # The mean of n uniform draws has standard deviation bound / sqrt(3 n); their variance is bound^2 / 3.
    assert abs(kernel.mean()) < 4 * bound / np.sqrt(3 * kernel.size)
    assert abs(kernel.var() / (bound**2 / 3) - 1) < 4 * np.sqrt(0.8 / kernel.size)
    assert 0 < np.abs(np.asarray(params["bias"])).max() <= bound
    assert np.unique(params["bias"]).size > 1


def test_lecun_init_has_variance_one_over_fan_in_and_no_bias():
    params = models.lenet(init="lecun").init(jax.random.key(0))["params"]
    for layer, fan_in in (("conv2", 150), ("fc1", 400)):
        kernel = np.asarray(params[layer]["kernel"])
        assert abs(kernel.var() * fan_in - 1) < 4 * np.sqrt(2 / kernel.size)
        assert not np.any(params[layer]["bias"])


def test_initial_values_are_a_function_of_the_key():
    task = models.mlp(inputs=5, hidden=(4,), classes=3)
    one, same, other = (task.init(jax.random.key(seed)) for seed in (0, 0, 1))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, same)))
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


@pytest.mark.parametrize("build", ["mtfl_mlp", "lenet"])
def test_bfloat16_affects_products_but_not_parameters(build, float32):
    exact, rounded = (models.MODELS[build](dtype=dtype) for dtype in (None, jnp.bfloat16))
    shape = (784,) if build == "mtfl_mlp" else (32, 32, 3)
    batch = batch_of(np.random.default_rng(0), 8, shape, 10)
    variables = rounded.init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    results = []
    for task in (exact, rounded):
        (loss, after), gradient = loss_and_gradient(task)(variables, batch)
        assert {leaf.dtype for leaf in jax.tree.leaves((loss, after, gradient))} == {jnp.dtype("float32")}
        results.append((loss, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient["params"])])))
    (loss, gradient), (rounded_loss, rounded_gradient) = results
    assert loss != rounded_loss
    # bfloat16 has 8 bits of mantissa: a relative error of 2^-8 per product, averaged over many products.
    np.testing.assert_allclose(rounded_loss, loss, rtol=2e-2)
    assert jnp.linalg.norm(rounded_gradient - gradient) < 0.1 * jnp.linalg.norm(gradient)
    products = [e for e in jax.make_jaxpr(rounded.predict)(variables, batch.x).jaxpr.eqns if e.primitive.name == "dot_general"]
    assert products
    assert all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars)


# ------------------------------------------------------------------------------------------------------ a user's Flax modules


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(8, name="fc1")(x)))


class WithDropout(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=deterministic)(x))


class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x, training=False, weight=None):
        mask = None if weight is None else weight[:, None] > 0
        h = nn.BatchNorm(use_running_average=not training, momentum=0.9, name="bn1")(nn.Dense(4, name="fc1")(x), mask=mask)
        return nn.Dense(3, name="head")(h)


class WithBatchNormUnaware(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


def test_flax_module_without_flags_or_buffers():
    task = models.from_linen(Plain(), (4,), layers=("fc1", "head"))
    variables = jax.jit(task.init)(jax.random.key(0))
    batch = batch_of(np.random.default_rng(0), 5, (4,), 3)
    loss, after = task.loss(variables, batch, jax.random.key(1))
    assert jax.tree.structure(after) == jax.tree.structure(variables)
    logits = Plain().apply(variables, batch.x)
    np.testing.assert_array_equal(task.predict(variables, batch.x), logits)
    expected = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(5), batch.y])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert task.features is task.head is None


def test_flax_module_with_dropout_uses_its_key_in_training_only():
    task = models.from_linen(WithDropout(), (20,))
    variables = jax.jit(task.init)(jax.random.key(0))
    batch = batch_of(np.random.default_rng(0), 5, (20,), 3)
    one, same, other = (task.loss(variables, batch, jax.random.key(seed))[0] for seed in (0, 0, 1))
    assert one == same != other
    np.testing.assert_array_equal(task.predict(variables, batch.x), task.predict(variables, batch.x))


def test_flax_module_with_masked_batch_norm_ignores_padding():
    task = models.from_linen(WithBatchNorm(), (4,), layers=("fc1", "head"))
    variables = jax.jit(task.init)(jax.random.key(0))
    batch = batch_of(np.random.default_rng(0), 4, (4,), 3, [1, 1, 1, 0])
    loss, after = task.loss(variables, batch, jax.random.key(0))
    other_loss, other = task.loss(variables, batch._replace(x=batch.x.at[3].set(99)), jax.random.key(0))
    assert loss == other_loss
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, after, other)))
    assert not np.array_equal(after["batch_stats"]["bn1"]["mean"], variables["batch_stats"]["bn1"]["mean"])
    assert count(masks.split(variables, masks.resolve("bn", task))[0]) == 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.from_linen(WithBatchNormUnaware(), (4,)), "must take train .* and weight"),
        (lambda: models.from_linen(Plain(), (4,), layers=("fc1", "tail")), "names 'tail'.*fc1, head"),
        (lambda: models.from_linen(Plain(), (4,), features="body", head="head"), "features='body' is not a method"),
        (lambda: models.from_linen(Plain(), (4,), head="head"), "must be given together"),
        (lambda: models.mlp(inputs=0), "inputs=0 must be an integer of at least 1"),
        (lambda: models.mlp(hidden=(10, 0)), "hidden=0"),
        (lambda: models.mlp(classes=1), "classes=1"),
        (lambda: models.mlp(init="xavier"), "init='xavier' is unknown; allowed are torch, lecun"),
        (lambda: models.mlp(dtype=jnp.int8), "must be a floating-point type"),
        (lambda: models.lenet((8, 8, 3)), "too small"),
        (lambda: models.lenet((32, 32)), "must be .height, width, channels."),
        (lambda: models.lenet(form="fft"), "form='fft' is unknown; allowed are banded, im2col, lax"),
        (lambda: models.mtfl_cnn(norm="both"), "norm='both' is unknown; allowed are before, after"),
    ],
)
def test_wrong_arguments_raise_when_the_task_is_built(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_inputs_of_another_size_raise_with_both_shapes():
    task = models.mlp()
    with pytest.raises(ValueError, match=r"\(2, 100\) must be \[B, \*\(784,\)\]"):
        task.predict(jax.jit(task.init)(jax.random.key(0)), jnp.zeros((2, 100)))
