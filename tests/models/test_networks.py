"""Sequence, sensor and residual models against NumPy, XLA's convolution and counts of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import features, layers, masks, models
from fedjax_meta.models import images
from fedjax_meta.models.convolutional import _Strided
from fedjax_meta.models.recurrent import Recurrent


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# ------------------------------------------------------------------------------------------------------------------- recurrent


def lstm(p, x):
    hidden = p["state_kernel"].shape[1]
    h = c = np.zeros((len(x), hidden))
    states = []
    for t in range(x.shape[1]):
        z = x[:, t] @ p["kernel"].T + p["bias"] + h @ p["state_kernel"].T
        i, f, g, o = (z[:, k * hidden : (k + 1) * hidden] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.stack(states, 1)


def gru(p, x):
    hidden = p["state_kernel"].shape[1]
    h, states = np.zeros((len(x), hidden)), []
    kernels = [p["kernel"][k * hidden : (k + 1) * hidden] for k in range(3)]
    owns = [p["state_kernel"][k * hidden : (k + 1) * hidden] for k in range(3)]
    b = [p["bias"][k * hidden : (k + 1) * hidden] for k in range(3)]
    for t in range(x.shape[1]):
        r = sigmoid(x[:, t] @ kernels[0].T + b[0] + h @ owns[0].T)
        z = sigmoid(x[:, t] @ kernels[1].T + b[1] + h @ owns[1].T)
        n = np.tanh(x[:, t] @ kernels[2].T + b[2] + r * (h @ owns[2].T + p["state_bias"]))
        h = (1 - z) * n + z * h
        states.append(h)
    return np.stack(states, 1)


@pytest.mark.parametrize(("cell", "reference"), [("lstm", lstm), ("gru", gru)])
def test_recurrent_layers_are_the_equations(cell, reference):
    layer, x = Recurrent(5, cell, forget=0.7), normal(0, 3, 6, 4)
    params = layer.init(jax.random.key(1), x)["params"]
    np.testing.assert_allclose(layer.apply({"params": params}, x), reference(jax.tree.map(np.asarray, params), x), atol=1e-12)


def test_the_forget_bias_is_raised_and_all_else_starts_within_the_bound():
    params = Recurrent(16, forget=1.0).init(jax.random.key(0), normal(0, 1, 2, 3))["params"]
    bias = np.array(params["bias"])
    bias[16:32] -= 1
    assert np.abs(bias).max() <= 0.25
    assert max(np.abs(leaf).max() for leaf in (params["kernel"], params["state_kernel"])) <= 0.25


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        # embedding 80 x 8; LSTMs 4 x 256 x (8 + 256 + 1) and 4 x 256 x (256 + 256 + 1); head 257 x 80
        (models.char_lstm(every=False), 640 + 271_360 + 525_312 + 20_560),
        (models.char_lstm(90), 720 + 271_360 + 525_312 + 23_130),
        (models.char_lstm(65, hidden=128, depth=1), 520 + 4 * 128 * 137 + 129 * 65),
        (models.char_gru(65, hidden=128), 520 + 3 * 128 * 137 + 128 + 129 * 65),
        (
            models.transformer(65, 80, width=64, heads=2, depth=2),
            65 * 64 + 80 * 64 + 2 * (12 * 64**2 + 13 * 64) + 128 + 65 * 65,
        ),
        (models.sensor_cnn(), 32 * 9 * 9 + 32 + 64 * 9 * 32 + 64 + 128 * 26 * 64 + 128 + 129 * 6),
        (models.resnet18(), 11_173_962),
    ],
    ids=["LEAF", "FedJAX", "one layer", "GRU", "transformer", "sensors", "ResNet-18"],
)
def test_numbers_of_parameters(task, parameters):
    assert count(masks.variables_shape(task)) == parameters


SEQUENCES = {
    "lstm": lambda **options: models.char_lstm(11, 7, embedding=3, hidden=5, depth=2, **options),
    "gru": lambda **options: models.char_gru(11, 7, embedding=3, hidden=5, **options),
    "transformer": lambda: models.transformer(11, 7, width=8, heads=2, depth=2),
}


@pytest.mark.parametrize("model", SEQUENCES)
def test_an_output_depends_on_its_token_and_earlier_ones_alone(model):
    task = SEQUENCES[model]()
    variables = task.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7))
    changed = tokens.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = (np.asarray(task.predict(variables, jnp.asarray(t))) for t in (tokens, changed))
    assert before.shape == (2, 7, 11)
    np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-12)
    assert (np.abs(before[:, 4:] - after[:, 4:]).max((0, 2)) > 1e-6).all()
    # A shorter sequence gives the same outputs: nothing depends on padding at the end.
    np.testing.assert_allclose(task.predict(variables, jnp.asarray(tokens[:, :3])), before[:, :3], atol=1e-12)


@pytest.mark.parametrize(("init", "factor"), [("lecun", 1), ("torch", 3)])
def test_strided_convolutions_start_as_dense_layers_do(init, factor):
    """Variance 1 / fan in, or a third of it for the uniform start."""
    params = models.sensor_cnn((128, 9), 6, convs=((256, 9),), init=init).init(jax.random.key(0))["params"]
    for name, fan_in in (("conv1", 81), ("fc1", params["fc1"]["kernel"].shape[-1])):
        np.testing.assert_allclose(np.var(params[name]["kernel"]) * fan_in * factor, 1, rtol=0.05)


def test_a_token_that_is_none_has_no_vector():
    embed = layers.Embed(5, 3)
    variables = embed.init(jax.random.key(0), jnp.zeros(2, int))
    found = np.asarray(embed.apply(variables, jnp.array([-1, 5, 2])))
    assert np.isnan(found[:2]).all() and np.array_equal(found[2], variables["params"]["embedding"][2])
    one = layers.Embed(1, 3)
    found = np.asarray(one.apply(one.init(jax.random.key(0), jnp.zeros(2, int)), jnp.array([0, 1])))
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_an_item_that_is_none_has_no_rating():
    task = models.matrix_factorisation(5, width=2)
    found = np.asarray(task.predict(task.init(jax.random.key(0)), {"item": jnp.array([4, 5, 99, -1])}))
    assert np.isfinite(found[0]) and np.isnan(found[1:]).all()


@pytest.mark.parametrize(
    ("module", "x", "words"),
    [
        (models.CharacterNetwork(9, cell="LSTM"), jnp.zeros((1, 4), int), "cell='LSTM' is unknown"),
        (layers.Dense(3, start="pytorch"), jnp.zeros((1, 4)), "start='pytorch' is unknown"),
        (models.Network((4,), 3, hidden=(5,), norm="Before"), jnp.zeros((1, 4)), "norm='Before' is unknown"),
        (models.Network((4,), 3, hidden=(5,), normed=("fc7",)), jnp.zeros((1, 4)), "normed='fc7' is unknown"),
        (models.Network((4,), 3, hidden=(5,), activation="gelu"), jnp.zeros((1, 4)), "activation='gelu' is unknown"),
    ],
)
def test_a_misspelt_word_is_not_taken_for_another(module, x, words):
    with pytest.raises(ValueError) as error:
        module.init(jax.random.key(0), x)
    assert words in str(error.value)


def test_predicting_after_the_last_token_alone_is_the_last_of_all_predictions():
    every, last = SEQUENCES["lstm"](), SEQUENCES["lstm"](every=False)
    variables, x = every.init(jax.random.key(0)), jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 7)))
    np.testing.assert_allclose(last.predict(variables, x), every.predict(variables, x)[:, -1], atol=1e-12)


def test_the_transformer_is_its_equations():
    task, width, heads = SEQUENCES["transformer"](), 8, 2
    variables = task.init(jax.random.key(0))
    noise = jax.tree.map(lambda leaf: leaf + 0.1 * normal(leaf.size, *leaf.shape), variables)
    p = jax.tree.map(np.asarray, noise)["params"]
    tokens = np.random.default_rng(0).integers(0, 11, (1, 5))

    def norm(q, x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-6) * q["scale"] + q["bias"]

    def dense(q, x):
        return x @ q["kernel"].T + q["bias"]

    x = p["embed"]["embedding"][tokens[0]] + p["position"][:5]
    for name in ("block1", "block2"):
        q = p[name]
        z = norm(q["norm1"], x)
        read = np.zeros((5, width))
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            query, key, value = (dense(q[n], z)[:, part] for n in ("query", "key", "value"))
            for t in range(5):
                scores = np.exp(query[t] @ key[: t + 1].T / np.sqrt(width / heads))
                read[t, part] = scores / scores.sum() @ value[: t + 1]
        x = x + dense(q["out"], read)
        inner = dense(q["inner1"], norm(q["norm2"], x))
        inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + dense(q["inner2"], inner)
    expected = dense(p["head"], norm(p["norm"], x))
    np.testing.assert_allclose(task.predict(noise, jnp.asarray(tokens))[0], expected, atol=1e-9)


# --------------------------------------------------------------------------------------------------------------- convolutional


@pytest.mark.parametrize(
    ("shape", "size", "stride", "padding"), [((9, 8), 3, 2, 1), ((9, 8), 1, 2, 0), ((6, 7), 3, 1, 1), ((20,), 5, 2, 2)]
)
def test_strided_convolutions_are_those_of_xla(shape, size, stride, padding):
    layer, x = _Strided(4, size, stride, padding), normal(0, 2, *shape, 3)
    kernel = layer.init(jax.random.key(0), x)["params"]["kernel"]
    letters = "NHWC"[: 1 + len(shape)] + "C" if len(shape) == 1 else "NHWC"
    kernels = "OHI" if len(shape) == 1 else "OHWI"
    expected = jax.lax.conv_general_dilated(
        x, kernel, (stride,) * len(shape), [(padding, padding)] * len(shape), dimension_numbers=(letters, kernels, letters)
    )
    np.testing.assert_allclose(layer.apply({"params": {"kernel": kernel}}, x), expected, atol=1e-12)


def test_the_sensor_network_pools_after_each_convolution():
    task = models.sensor_cnn((20, 2), 3, convs=((4, 3), (5, 3)), hidden=(6,))
    variables, x = task.init(jax.random.key(0)), normal(0, 2, 20, 2)
    p, h = jax.tree.map(np.asarray, variables)["params"], x
    for name in ("conv1", "conv2"):
        kernel = p[name]["kernel"]
        z = np.stack([np.einsum("bki,oki->bo", h[:, t : t + 3], kernel) for t in range(h.shape[1] - 2)], 1) + p[name]["bias"]
        z = z[:, : z.shape[1] // 2 * 2]
        h = np.maximum(z.reshape(len(z), -1, 2, z.shape[-1]).max(2), 0)
    h = np.maximum(h.reshape(len(h), -1) @ p["fc1"]["kernel"].T + p["fc1"]["bias"], 0)
    np.testing.assert_allclose(task.features(variables, x), h, atol=1e-12)
    np.testing.assert_allclose(task.predict(variables, x), h @ p["head"]["kernel"].T + p["head"]["bias"], atol=1e-12)


def test_a_head_of_the_sensor_network_may_be_several_dense_layers():
    task = models.sensor_cnn((20, 2), 3, convs=((4, 3),), hidden=(6, 5), head_layers=3)
    assert task.layers == ("conv1", "head")
    variables, x = task.init(jax.random.key(0)), normal(0, 2, 20, 2)
    z, head = np.asarray(task.features(variables, x)), jax.tree.map(np.asarray, variables["params"]["head"])
    assert z.shape == (2, 9 * 4) and list(head) == ["fc1", "fc2", "fc3"]
    for name, width in (("fc1", 6), ("fc2", 5)):
        z = np.maximum(z @ head[name]["kernel"].T + head[name]["bias"], 0)
        assert z.shape == (2, width)
    np.testing.assert_allclose(task.predict(variables, x), z @ head["fc3"]["kernel"].T + head["fc3"]["bias"], atol=1e-12)
    personal = masks.resolve("head", task)["params"]
    assert all(jax.tree.leaves(personal["head"])) and not any(jax.tree.leaves(personal["conv1"]))
    assert features.head_shape(task, "gpfl") == (3, 36)


@pytest.mark.long
def test_a_residual_network_of_images_has_an_output_a_class_and_gradients_everywhere():
    task = models.resnet18((8, 8, 3), 5, width=4)
    variables, x = task.init(jax.random.key(0)), jnp.asarray(normal(0, 2, 8, 8, 3))
    assert task.predict(variables, x).shape == (2, 5)
    gradient = jax.grad(lambda v: jnp.sum(task.predict(v, x) ** 2))(variables)
    assert all(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(
        task.predict(variables, x)[:1], task.predict(variables, x[:1]), atol=1e-9
    )  # no batch statistics


OTHERS = {
    **SEQUENCES,
    "sensors": lambda: models.sensor_cnn((20, 2), 3, convs=((4, 3), (5, 3)), hidden=(6,)),
    "ResNet": lambda: models.resnet18((8, 8, 3), 5, width=4),
    "factors": lambda: models.matrix_factorisation(9, width=3, mean=1.0),
}
INPUTS = {"sensors": normal(0, 2, 20, 2), "ResNet": normal(0, 2, 8, 8, 3), "factors": {"item": np.array([8, 2])}}


@pytest.mark.parametrize("model", OTHERS)
def test_a_prediction_is_the_head_of_the_features_and_layers_are_in_the_paths(model):
    task, x = OTHERS[model](), INPUTS.get(model, np.array([[1, 2, 3], [4, 5, 6]]))
    variables = task.init(jax.random.key(0))
    np.testing.assert_allclose(task.head(variables, task.features(variables, x)), task.predict(variables, x), atol=1e-12)
    for depth in range(1, len(task.layers) + 1):
        assert any(jax.tree.leaves(masks.resolve(f"last:{depth}", task)))
    assert task.loss.as_predicted


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.char_lstm(1), "vocabulary=1 must be an integer of at least 2"),
        (lambda: models.char_lstm(hidden=0), "hidden=0 must be an integer of at least 1"),
        (lambda: models.char_gru(every="last"), "every='last' must be True or False"),
        (lambda: models.transformer(heads=3), "heads=3 must divide width=128"),
        (lambda: models.sensor_cnn((9, 3)), "window=(9, 3) is too short for the convolutions"),
        (lambda: models.sensor_cnn(128), "window=128 must be (samples in time, channels)"),
        (lambda: models.sensor_cnn(hidden=5), "hidden=5 must be a tuple"),
        (lambda: models.sensor_cnn(head_layers=3), "head_layers=3, but with the output there are 2 dense layers"),
        (lambda: models.sensor_cnn(convs=(32, 9)), "convs=(32, 9) must have (outputs, kernel size) of each convolution"),
        (lambda: models.sensor_cnn(convs=((32, 9, 1),)), "must have (outputs, kernel size) of each convolution"),
        (lambda: models.resnet18(groups=3), "groups=3 must divide width=64"),
        (lambda: models.resnet18((32, 32)), "image=(32, 32) must be (height, width, channels)"),
        (
            lambda: SEQUENCES["transformer"]().predict(
                SEQUENCES["transformer"]().init(jax.random.key(0)), jnp.zeros((1, 8), int)
            ),
            "is longer than the 7 positions of this transformer",
        ),
    ],
)
def test_bad_sizes_are_refused_in_one_line(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)


# --------------------------------------------------------------------------------------------------------------- factorisation


def test_matrix_factorisation_is_its_formula_and_learns_the_tastes_of_its_clients():
    rng = np.random.default_rng(0)
    items, tastes = rng.normal(size=(12, 2)), rng.normal(size=(8, 2))
    clients = []
    for taste in tastes:
        seen = rng.permutation(np.repeat(np.arange(12), 3))
        clients.append(({"item": seen.astype(np.int32)}, (3 + items[seen] @ taste).astype(np.float32)))
    data = fm.from_clients(clients, num_classes=0)
    task = models.matrix_factorisation(12, width=3, mean=3.0)
    variables = task.init(jax.random.key(0))
    p, item = jax.tree.map(np.asarray, variables), np.array([4, 0])
    expected = 3 + p["user"]["bias"] + p["items"]["bias"][item] + p["items"]["vectors"][item] @ p["user"]["vector"]
    np.testing.assert_allclose(task.predict(variables, {"item": jnp.asarray(item)}), expected, atol=1e-12)

    def error(method):
        algorithm = fm.federate(method, fm.Federation(cohort_size=4, devices=1))
        state = algorithm.init(jax.random.key(1), data)
        state, _ = jax.lax.scan(
            lambda state, key: (algorithm.round(key, state, data)[0], None), state, jax.random.split(jax.random.key(2), 60)
        )
        return float(np.mean(fm.evaluate(algorithm, jax.random.key(3), state, data).metrics["rmse"].values))

    personal, shared = error(fm.fedper(task, lr=0.2, batch_size=8)), error(fm.fedavg(task, lr=0.2, batch_size=8))
    assert personal < 0.5 * shared


def test_next_token_models_are_trained_and_scored_by_tokens():
    """A cycle of tokens that only a model that reads its input can continue."""
    rng = np.random.default_rng(0)
    clients = []
    for _ in range(4):
        start = rng.integers(0, 5, (24, 1))
        tokens = (start + np.arange(7)) % 5
        clients.append((tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)))
    data = fm.from_clients(clients, num_classes=5)
    task = models.char_gru(5, 6, embedding=4, hidden=8)
    algorithm = fm.federate(
        fm.fedmeta_per(task, inner_lr=0.5, outer_lr=0.05, batch_size=8), fm.Federation(cohort_size=4, devices=1)
    )
    state = algorithm.init(jax.random.key(1), data)
    step = jax.jit(algorithm.round)
    for number in range(30):
        state, _ = step(jax.random.key(number), state, data)
    scores = fm.evaluate(algorithm, jax.random.key(3), state, data).metrics
    assert np.mean(scores["token_accuracy"].values) > 0.95
    assert np.mean(scores["perplexity"].values) < 2


def test_where_positions_and_tastes_start():
    """Positions of a transformer are normal with a deviation of 0.02, vectors of users and of items with 0.1."""
    variables = models.transformer(5, 400, width=64, heads=2, depth=1).init(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    positions = [leaf for path, leaf in leaves if "position" in jax.tree_util.keystr(path)]
    assert [leaf.shape for leaf in positions] == [(400, 64)] and np.std(positions[0]) == pytest.approx(0.02, rel=0.05)
    of = models.matrix_factorisation(50, width=1000).init(jax.random.key(0))
    assert np.std(of["user"]["vector"]) == pytest.approx(0.1, rel=0.1) == np.std(of["items"]["vectors"])


def test_the_slope_of_a_leaky_unit_is_that_of_fedpacs_code():
    assert float(images.ACTIVATIONS["leaky_relu"](-1.0)) == pytest.approx(-0.01)
