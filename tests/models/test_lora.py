"""Low-rank adapters against products written out, reverse mode through an unrolled loop, and counts of bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import costs, local, lora, masks, meta, models, runtime
from fedjax_meta.data import Batches
from fedjax_meta.task import Batch
from tests import problems

KEY = jax.random.key(0)
TASK = models.elu_mlp(5, 3)
BASE = TASK.init(jax.random.key(7))
FC = "path:fc./kernel"


def adapted(**options):
    return lora.lora(TASK, BASE, **{"rank": 2, "targets": FC} | options)


def randomised(task, seed=0):
    """Variables of which no part is 0."""
    return jax.tree.map(
        lambda leaf: leaf + 0.3 * np.random.default_rng([seed, leaf.size]).normal(size=leaf.shape),
        task.init(jax.random.key(1)),
    )


def batch(rows=6, seed=0):
    rng = np.random.default_rng(seed)
    return Batch(jnp.asarray(rng.normal(size=(rows, 5))), jnp.asarray(rng.integers(0, 3, rows)), jnp.ones(rows))


def test_an_adapter_starts_as_the_base_model():
    task, x = adapted(), batch().x
    variables = task.init(jax.random.key(0))
    assert np.array_equal(task.predict(variables, x), TASK.predict(BASE, x))
    np.testing.assert_allclose(task.head(variables, task.features(variables, x)), task.predict(variables, x), atol=1e-12)


@pytest.mark.parametrize("inputs", ["last", "first"])
def test_an_adapted_matrix_is_the_base_and_a_scaled_product(inputs):
    task, x = adapted(alpha=6.0, inputs=inputs, train="head"), batch().x
    variables = randomised(task)
    full = jax.tree.map(np.array, BASE)
    for name in ("fc1", "fc2"):
        own = variables["adapters"]["params"][name]["kernel"]
        product = own["lora_B"] @ own["lora_A"] * (6.0 / 2)
        full["params"][name]["kernel"] += product.T if inputs == "first" else product
    full["params"]["head"] = variables["trained"]["params"]["head"]
    np.testing.assert_allclose(task.predict(variables, x), TASK.predict(full, x), atol=1e-12)


def test_merged_variables_are_those_of_the_base_task():
    """The base task predicts with them what the adapted one does; buffers and leaves that train whole come along."""
    base_task = problems.normed_task()
    base = base_task.init(jax.random.key(7))
    task = lora.lora(base_task, base, rank=1, targets="path:fc1/kernel", train="head", inputs="first")
    variables = jax.tree.map(lambda leaf: leaf + 0.3, task.init(jax.random.key(1)))
    found = lora.merged(task, variables)
    x = np.random.default_rng(0).normal(size=(4, 5))
    np.testing.assert_allclose(base_task.predict(found, x), task.predict(variables, x), rtol=0, atol=1e-14)
    product = variables["adapters"]["params"]["fc1"]["kernel"]
    expected = base["params"]["fc1"]["kernel"] + (product["lora_B"] @ product["lora_A"]).T
    np.testing.assert_allclose(found["params"]["fc1"]["kernel"], expected, rtol=0, atol=1e-14)
    assert np.all(found["params"]["head"]["bias"] == base["params"]["head"]["bias"] + 0.3)
    for given, kept, message in (
        (base_task, base, "task must be one that lora.lora returned"),
        (task, base, "variables must have the form of the task's"),
    ):
        with pytest.raises(ValueError, match=message):
            lora.merged(given, kept)


def test_gradients_are_those_of_the_product_by_the_chain_rule():
    task, given = adapted(), batch()
    variables = randomised(task)
    gradient = jax.grad(lambda v: task.loss(v, given, jax.random.key(0))[0])(variables)

    def merged():
        full = jax.tree.map(np.array, BASE)
        for name in ("fc1", "fc2"):
            own = variables["adapters"]["params"][name]["kernel"]
            full["params"][name]["kernel"] += own["lora_B"] @ own["lora_A"]
        return full

    of_base = jax.grad(lambda v: TASK.loss(v, given, jax.random.key(0))[0])(merged())
    for name in ("fc1", "fc2"):
        own, outer = variables["adapters"]["params"][name]["kernel"], of_base["params"][name]["kernel"]
        mine = gradient["adapters"]["params"][name]["kernel"]
        np.testing.assert_allclose(mine["lora_B"], outer @ own["lora_A"].T, atol=1e-12)
        np.testing.assert_allclose(mine["lora_A"], own["lora_B"].T @ outer, atol=1e-12)


def test_the_exact_meta_gradient_through_adapters_is_that_of_the_unrolled_loop():
    task, support, query = adapted(train="head"), batch(seed=1), batch(seed=2)
    params, buffers = masks.split(randomised(task), task.trainable(masks.variables_shape(task)))
    loss, key = local.parameter_loss(task, buffers), jax.random.key(3)

    def unrolled(params):
        adapted = params
        for _ in range(4):
            step = jax.grad(loss)(adapted, (support, key))
            adapted = jax.tree.map(lambda p, g: p - 0.4 * g, adapted, step)
        return loss(adapted, (query, key))

    steps = Batches(lambda step, chunk: (support, key), 4, 4)
    gradient = meta.exact(meta.sgd(0.4))(loss, params, steps, (query, key)).gradient
    assert problems.distance(gradient, jax.grad(unrolled)(params)) < 1e-10


def run(method, rounds=3, data=None):
    algorithm, data = fm.federate(method, fm.Federation(cohort_size=4, devices=1)), data or problems.data()
    state = algorithm.init(jax.random.key(0), data)
    after, step = state, jax.jit(algorithm.round)
    for number in range(rounds):
        after, _ = step(jax.random.key(number), after, data)
    return algorithm, state, after


@pytest.mark.parametrize(("personal", "shared"), [(lora.A, "lora_B"), (lora.B, "lora_A")])
def test_one_half_stays_with_its_client_and_the_other_is_shared(personal, shared):
    method = fm.fedavg(adapted(), personal=personal, lr=0.1, batch_size=8)
    _, state, after = run(method)
    moved = {
        "/".join(masks.path_names(path)): bool(jnp.any(leaf != other))
        for (path, leaf), other in zip(
            jax.tree_util.tree_leaves_with_path(after.model), jax.tree.leaves(state.model), strict=True
        )
    }
    assert {name.rsplit("/")[-1] for name, has in moved.items() if has} == {shared}
    sent = costs.traffic(method, problems.data())
    parts = task_bytes(adapted())
    assert sent.down == sent.up == parts[shared]


def task_bytes(task):
    sizes = {"lora_A": 0, "lora_B": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(masks.variables_shape(task)["adapters"]):
        sizes[masks.path_names(path)[-1]] += leaf.size * leaf.dtype.itemsize
    return sizes


def test_a_frozen_a_is_no_variable_and_is_drawn_from_its_seed_alone():
    one, other = adapted(frozen_a=3), adapted(frozen_a=4)
    names = {masks.path_names(path)[-1] for path, _ in jax.tree_util.tree_leaves_with_path(masks.variables_shape(one))}
    assert names == {"lora_B"}
    variables, x = randomised(one), batch().x
    assert np.array_equal(one.predict(variables, x), adapted(frozen_a=3).predict(variables, x))
    assert not np.allclose(one.predict(variables, x), other.predict(variables, x))
    sent = costs.traffic(fm.fedavg(one), problems.data())
    assert sent.up == task_bytes(adapted())["lora_B"]


FAMILIES = {
    "plain": lambda task: fm.fedavg(task, lr=0.02, batch_size=8),
    "personal mask": lambda task: fm.fedper(task, personal=lora.A, lr=0.1, batch_size=8),
    "exact meta-gradient": lambda task: fm.fedmeta(task, inner_lr=0.05, outer_lr=0.02, inner_steps=2, batch_size=8),
    "personal model": lambda task: fm.ditto(task, lr=0.1, batch_size=8),
    "features": lambda task: fm.fedpac(task, lr=0.1, epochs=1, batch_size=8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_methods_learns_adapters(family):
    task = adapted(train="head")
    algorithm, state, after = run(FAMILIES[family](task), rounds=12)
    test = jax.jit(lambda state: fm.evaluate(algorithm, jax.random.key(9), state, problems.data()).loss)
    assert np.mean(test(after)) < np.mean(test(state))


def test_the_base_is_stored_once_whatever_the_number_of_clients():
    """A method that keeps a model a client keeps its adapters; no leaf of a state has the form of a matrix of the base."""
    task = adapted()
    _, _, after = run(fm.ditto(task, lr=0.1, batch_size=8), rounds=1)
    base = {leaf.shape for leaf in jax.tree.leaves(BASE)}
    shapes = [leaf.shape for leaf in jax.tree.leaves(after)]
    assert not base & {shape[-2:] for shape in shapes if len(shape) > 1}
    adapters = runtime.size_in_bytes(masks.variables_shape(task))
    clients = problems.data().num_clients
    assert runtime.size_in_bytes(after) < (clients + 3) * adapters + 1000


def test_personalising_the_adapters_of_a_transformer_moves_under_two_percent_of_its_bytes():
    task = models.transformer(65, 80, width=128, heads=4, depth=4)
    base = task.init(jax.random.key(0))
    small = lora.lora(task, base, rank=4, targets="path:(query|value)/kernel")
    whole = runtime.size_in_bytes(base)
    assert runtime.size_in_bytes(masks.variables_shape(small)) < 0.02 * whole


def test_buffers_of_the_base_stay_buffers():
    base_task = problems.normed_task()
    base = base_task.init(jax.random.key(0))
    task = lora.lora(base_task, base, rank=1, targets="path:fc1/kernel", train="bn_affine")
    variables = task.init(jax.random.key(1))
    moves = task.trainable(variables)
    assert jax.tree.structure(moves) == jax.tree.structure(variables)
    assert not any(jax.tree.leaves(moves["trained"]["batch_stats"]))
    _, updated = task.loss(variables, batch(), jax.random.key(0))
    _, of_base = base_task.loss(base, batch(), jax.random.key(0))
    assert problems.distance(updated["trained"]["batch_stats"], of_base["batch_stats"]) < 1e-12
    assert problems.distance(updated["adapters"], variables["adapters"]) == 0


def test_an_opaque_loss_may_have_adapters_too():
    opaque = TASK._replace(loss=TASK.loss.__call__)
    variables, given, key = randomised(adapted()), batch(), jax.random.key(0)
    mine = lora.lora(opaque, BASE, rank=2, targets=FC).loss(variables, given, key)
    assert problems.distance(mine, adapted().loss(variables, given, key)) == 0


LENET = models.lenet()
BAD = {
    "a convolution": (
        lambda: lora.lora(LENET, LENET.init(jax.random.key(0)), targets="path:conv1/kernel"),
        "targets selects params/conv1/kernel, which is no matrix but float32[6, 5, 5, 3]",
    ),
    "a bias": (lambda: adapted(targets="path:fc1"), "targets selects params/fc1/bias, which is no matrix"),
    "trained twice": (lambda: adapted(train="all"), "targets selects params/fc1/kernel, which is trained whole"),
    "a rank too high": (lambda: adapted(rank=5), "rank=5 is not below the smaller side of params/fc1/kernel, [80, 5]"),
    "no matrix": (lambda: adapted(targets=None, rank=60), "there is no matrix to adapt whose smaller side is above rank=60"),
    "another base": (
        lambda: lora.lora(TASK, models.elu_mlp(6, 3).init(jax.random.key(0))),
        "base must have the form of the task",
    ),
    "no rank": (lambda: adapted(rank=0), "rank=0 must be an integer of at least 1"),
    "no scale": (lambda: adapted(alpha=-1.0), "alpha=-1.0 must be"),
    "unknown inputs": (lambda: adapted(inputs="rows"), "inputs='rows' is unknown"),
    "a module": (lambda: lora.lora(None, BASE), "lora's first argument must be a Task"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case):
    make, words = BAD[case]
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value).replace("float64", "float32")
    assert "\n" not in str(error.value)


def test_a_round_of_adapters_moves_under_two_percent_of_a_round_of_the_transformer():
    tokens = np.random.default_rng(0).integers(0, 65, (3, 12, 17)).astype(np.int32)
    data = fm.from_clients([(own[:, :-1], own[:, 1:]) for own in tokens], num_classes=65)
    task = models.transformer(65, 16, width=128, heads=4, depth=4)
    small = lora.lora(task, task.init(jax.random.key(0)), rank=4, targets="path:(query|value)/kernel")
    whole, moved = costs.traffic(fm.fedavg(task), data), costs.traffic(fm.fedavg(small), data)
    assert moved.down < 0.02 * whole.down
    assert moved.up < 0.02 * whole.up
    assert moved.up == 4 * 2 * 4 * (128 + 128) * jnp.result_type(float).itemsize


@pytest.mark.parametrize("frozen", [None, 3])
def test_a_model_that_is_one_matrix_may_have_an_adapter(frozen):
    base = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
    bare = fm.classification(lambda key: base, lambda w, x: x @ w)
    task, x = lora.lora(bare, base, rank=1, inputs="first", frozen_a=frozen), batch().x
    variables = randomised(task)
    a = task.init.__self__._frozen[()] if frozen is not None else variables["adapters"]["lora_A"]
    assert variables["adapters"]["lora_B"].shape == (3, 1) and a.shape == (1, 5)
    scale = (task.predict(variables, x) - x @ base) / (x @ (variables["adapters"]["lora_B"] @ a).T)
    np.testing.assert_allclose(scale, scale[0, 0], rtol=1e-9)
    np.testing.assert_allclose(lora.merged(task, variables), base + scale[0, 0] * (variables["adapters"]["lora_B"] @ a).T)


def test_each_a_is_drawn_uniformly_by_the_number_of_its_inputs_and_by_itself():
    wide = fm.classification(
        lambda key: {"one": jnp.zeros((64, 40)), "two": jnp.zeros((64, 40))}, lambda p, x: x @ (p["one"] + p["two"])
    )
    adapters = lora.lora(wide, wide.init(KEY), rank=4, inputs="first").init(KEY)["adapters"]
    one, two = (np.asarray(adapters[name]["lora_A"]) for name in ("one", "two"))
    assert not np.array_equal(one, two)
    assert all(0.9 / 8 < np.abs(a).max() <= 1 / 8 for a in (one, two))
