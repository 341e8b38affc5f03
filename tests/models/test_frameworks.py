"""Models of every framework as tasks: against the framework's own results, and in every family of methods."""

import itertools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedjax_meta as fm
from fedjax_meta import local, masks, meta
from fedjax_meta.data import Batches
from fedjax_meta.models import functional
from fedjax_meta.task import Batch
from tests import problems
from tests.models import frameworks

KEY = jax.random.key(0)
FRAMEWORKS = ("linen", "nnx", "equinox", "own")
PLAIN, NORMED = frameworks.plain(), frameworks.normed()


def batch(rows, real):
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(rows, 5)))
    x = x.at[real:].set(50.0)  # what stands in a row of padding must not matter
    return Batch(x, jnp.asarray(rng.integers(0, 3, rows)), jnp.asarray(np.arange(rows) < real, float))


def real_rows(batch):
    rows = batch.weight > 0
    return Batch(batch.x[rows], batch.y[rows], batch.weight[rows])


# ---------------------------------------------------------------------------------------------------- against the frameworks


def test_outputs_and_gradients_are_those_of_nnx():
    task, x = PLAIN["nnx"], real_rows(batch(6, 6)).x
    variables = task.init(jax.random.key(0))
    module = frameworks.NNX(nnx.Rngs(jax.random.key(0)), normed=False)
    assert problems.distance(nnx.to_pure_dict(nnx.state(module, nnx.Param)), variables["params"]) == 0
    np.testing.assert_allclose(task.predict(variables, x), module(x), atol=1e-12)
    gradient = jax.grad(lambda v: jnp.sum(task.predict(v, x) ** 2))(variables)["params"]
    own = nnx.grad(lambda module: jnp.sum(module(x) ** 2))(module)
    assert problems.distance(gradient, nnx.to_pure_dict(own)) < 1e-10


def test_outputs_and_gradients_are_those_of_equinox():
    task, x = PLAIN["equinox"], real_rows(batch(6, 6)).x
    variables, module = task.init(jax.random.key(0)), frameworks.Equinox(jax.random.key(0))
    np.testing.assert_allclose(task.predict(variables, x), jax.vmap(module)(x), atol=1e-12)
    gradient = jax.grad(lambda v: jnp.sum(task.predict(v, x) ** 2))(variables)["params"]
    own = eqx.filter_grad(lambda module: jnp.sum(jax.vmap(module)(x) ** 2))(module)
    assert problems.distance(gradient, own) < 1e-10
    assert eqx.combine(variables["params"], module)(x[0]).shape == (3,)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_statistics_of_padded_batches_are_those_that_equinox_has_of_the_real_rows(mode):
    make = eqx.nn.make_with_state(lambda key: frameworks.NormedEquinox(key, mode))
    task, padded = fm.from_equinox(make, (5,), **frameworks.SPLIT), batch(7, 5)
    model, state = make(jax.random.key(0))
    variables = task.init(jax.random.key(0))
    for step in range(3):  # the running statistics of the first batch are special in mode "ema"
        loss, variables = task.loss(variables, padded._replace(x=padded.x + step), jax.random.key(step))
        x = real_rows(padded).x + step
        normed = jax.vmap(lambda row, state: model.norm(model.fc1(row), state), (0, None), (0, None), axis_name="batch")
        _, state = normed(x, state)
        assert np.isfinite(loss)
    mine = jax.tree.leaves(variables["batch_stats"])
    theirs = jax.tree.leaves(state)
    for a, b in zip(sorted(map(np.sum, mine)), sorted(float(np.sum(leaf)) for leaf in theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    inference = eqx.nn.inference_mode(model)
    expected = jax.vmap(lambda row: inference(row, state)[0], axis_name="batch")(x)
    np.testing.assert_allclose(task.predict(variables, x), expected, atol=1e-6)


def test_batch_statistics_of_padded_batches_are_those_that_nnx_has_of_the_real_rows():
    task, padded = NORMED["nnx"], batch(7, 5)
    module = frameworks.NNX(nnx.Rngs(jax.random.key(0)), normed=True)
    module.norm(module.fc1(real_rows(padded).x).astype(jnp.float32))
    _, variables = task.loss(task.init(jax.random.key(0)), padded, jax.random.key(1))
    assert problems.distance(variables["batch_stats"], nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))) < 1e-6
    module.eval()
    np.testing.assert_allclose(task.predict(variables, padded.x), module(padded.x), atol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_padding_changes_neither_loss_nor_gradient_nor_buffers(framework):
    task = NORMED[framework]
    padded = batch(7, 5)
    other = padded._replace(x=padded.x.at[5:].set(-3.0))
    variables, key = task.init(jax.random.key(0)), jax.random.key(2)
    results = [jax.value_and_grad(task.loss, has_aux=True)(variables, given, key) for given in (padded, other)]
    assert problems.distance(*results) < 1e-9
    assert problems.distance(results[0][0][1], variables) > 1e-4  # the buffers did move


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_evaluation_has_no_dropout_and_training_draws_it_from_the_key(framework):
    task, given = NORMED[framework], batch(6, 6)
    variables = task.init(jax.random.key(0))
    logits = [task.loss.logits(variables, given, jax.random.key(seed))[0] for seed in (0, 0, 1)]
    assert np.array_equal(logits[0], logits[1])
    assert not np.allclose(logits[0], logits[2])
    assert np.array_equal(task.predict(variables, given.x), task.predict(variables, given.x))
    assert not task.loss.as_predicted
    assert PLAIN[framework].loss.as_predicted


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_row_has_a_dropout_of_its_own(framework):
    task, row = NORMED[framework], batch(1, 1)
    alike = jax.tree.map(lambda leaf: jnp.repeat(leaf, 16, 0), row)
    logits, _ = task.loss.logits(task.init(jax.random.key(0)), alike, jax.random.key(1))
    assert len(np.unique(np.asarray(logits), axis=0)) > 1


def test_random_streams_of_one_module_differ():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(64, 2, rngs=rngs)
            self.first, self.second = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jnp.stack([self.first(x), self.second(x)], -1) + 0 * self.head(x)[:, None]

    task = fm.models.from_nnx(Two, (64,), loss=lambda outputs, batch: jnp.mean(outputs))
    outputs, _ = task.loss.logits(task.init(jax.random.key(0)), Batch(jnp.ones((1, 64)), jnp.zeros(1), jnp.ones(1)), KEY)
    assert set(np.unique(outputs)) == {0.0, 2.0} and (outputs[..., 0] != outputs[..., 1]).any()


def test_a_counter_that_was_averaged_is_the_nearest_whole_number():
    def apply(variables, x, *, train, key, weight):
        return x @ variables["w"] * variables["n"], variables

    start = lambda key: {"w": jnp.ones((5, 3)), "n": jnp.int32(2)}  # noqa: E731
    task = fm.from_functions(start, apply, (5,), trainable=lambda variables: {"w": True, "n": False})
    averaged = {**task.init(KEY), "n": jnp.asarray(2.6)}
    assert np.array_equal(task.predict(averaged, jnp.ones((1, 5))), np.full((1, 3), 15.0))


def test_a_linen_module_may_say_how_its_parameters_are_partitioned():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            start = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(3, kernel_init=start, name="head")(x)

    data = problems.data()
    with pytest.raises(ValueError, match="names 'body', but the parameters are called .*head"):
        fm.models.from_linen(Boxed(), (5,), layers=("body",))
    state, _ = fm.simulate(fm.fedper(fm.models.from_linen(Boxed(), (5,), layers=("head",))), data, key=KEY, rounds=1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.personal))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loss_without_dropout_needs_no_key(framework):
    task, given = PLAIN[framework], batch(6, 6)
    variables = task.init(jax.random.key(0))
    assert task.loss(variables, given, None)[0] == task.loss(variables, given, jax.random.key(0))[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_losses_of_real_targets_have_names(framework):
    given = batch(7, 5)._replace(y=jnp.asarray(np.random.default_rng(8).normal(scale=3, size=(7, 3))))
    for name, of_error in (("squared", lambda e: e**2), ("huber", lambda e: jnp.where(e < 1, e**2 / 2, e - 0.5))):
        task = frameworks.plain(loss=name)[framework]
        variables = task.init(jax.random.key(0))
        error = jnp.abs(task.predict(variables, given.x) - given.y)[:5]
        np.testing.assert_allclose(task.loss(variables, given, jax.random.key(1))[0], of_error(error).mean(), rtol=1e-6)
        assert task.metrics == ("mae", "rmse", "r2")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("tasks", [PLAIN, NORMED], ids=["plain", "normed"])
def test_predict_is_head_of_features_and_layers_are_masks(framework, tasks):
    task, x = tasks[framework], batch(6, 6).x
    variables = task.init(jax.random.key(0))
    np.testing.assert_allclose(task.head(variables, task.features(variables, x)), task.predict(variables, x), atol=1e-12)
    head = masks.split(variables, masks.resolve("head", task))[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(head)) == (12 if framework == "own" else 15)


def test_batch_norms_of_all_frameworks_are_found_by_the_mask_of_batch_norms():
    for framework in FRAMEWORKS[:3]:
        task = NORMED[framework]
        affine = masks.split(masks.variables_shape(task), masks.resolve("bn_affine", task))[0]
        assert [leaf.shape for leaf in jax.tree.leaves(affine)] == [(4,), (4,)]


# ------------------------------------------------------------------------------------------------------ in families of methods

FAMILIES = {
    "plain": lambda task: fm.fedavg(task, lr=0.1, batch_size=8),
    "personal mask": lambda task: fm.fedper(task, lr=0.1, batch_size=8),
    "exact meta-gradient": lambda task: fm.fedmeta_per(task, inner_lr=0.1, outer_lr=0.05, inner_steps=2, batch_size=8),
    "personal model": lambda task: fm.ditto(task, lr=0.1, batch_size=8),
    "features": lambda task: fm.fedpac(task, lr=0.1, epochs=1, batch_size=8),
}


@pytest.mark.parametrize(
    ("framework", "family"),
    problems.chosen(
        itertools.product(FRAMEWORKS, FAMILIES),
        lambda framework, family: family == "exact meta-gradient" or (framework, family) == ("own", "features"),
    ),
)
def test_every_family_of_methods_learns_with_every_framework(framework, family):
    task = PLAIN[framework] if family == "features" else NORMED[framework]
    algorithm, data = fm.federate(FAMILIES[family](task), fm.Federation(cohort_size=4, devices=1)), problems.data()
    state = algorithm.init(jax.random.key(0), data)
    after, step = state, jax.jit(algorithm.round)
    for number in range(15):
        after, info = step(jax.random.key(number), after, data)
    assert problems.forms(after) == problems.forms(state)
    assert np.asarray(info.returned).all()
    test = jax.jit(lambda state: fm.evaluate(algorithm, jax.random.key(9), state, data).loss)
    assert np.mean(test(after)) < np.mean(test(state))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_meta_gradient_is_that_of_the_unrolled_inner_loop(framework):
    """`meta.exact` against reverse mode, with dropout and batch statistics in the loss."""
    task, support, query = NORMED[framework], batch(7, 5), batch(6, 6)
    params, buffers = masks.split(task.init(jax.random.key(0)), task.trainable(masks.variables_shape(task)))
    loss, key = local.parameter_loss(task, buffers), jax.random.key(3)

    def unrolled(params):
        adapted = params
        for _ in range(3):
            step = jax.grad(loss)(adapted, (support, key))
            adapted = jax.tree.map(lambda p, g: p - 0.4 * g, adapted, step)
        return loss(adapted, (query, key))

    steps = Batches(lambda step, chunk: (support, key), 3, 3)
    gradient = meta.exact(meta.sgd(0.4))(loss, params, steps, (query, key)).gradient
    expected = jax.grad(unrolled)(params)
    assert problems.distance(gradient, expected) < (1e-5 if framework == "nnx" else 1e-10)  # its batch norm is in float32
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected)) > 1e-2


# ------------------------------------------------------------------------------------------------------------------- bad input


class Unweighted(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(5, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class OfBatches(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(5, 3, key=key)

    def __call__(self, x):
        return jax.vmap(self.linear)(x)


BAD = {
    "an NNX module": (lambda: fm.from_nnx(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), (5,)), "make must be a function of rngs"),
    "NNX statistics without weight": (
        lambda: fm.from_nnx(Unweighted, (5,)),
        "has batch statistics, so its __call__ must take weight",
    ),
    "no NNX module": (lambda: fm.from_nnx(lambda rngs: 3, (5,)), "make must return an nnx.Module, not "),
    "an Equinox module": (
        lambda: fm.from_equinox(eqx.nn.Linear(5, 3, key=jax.random.key(0)), (5,)),
        "make must be a function of a key that builds the module",
    ),
    "Equinox without its state": (
        lambda: fm.from_equinox(frameworks.NormedEquinox, (5,)),
        "has a state (batch norm?): give make=eqx.nn.make_with_state(NormedEquinox)",
    ),
    "an Equinox module of a batch": (
        lambda: fm.from_equinox(OfBatches, (5,)),
        "OfBatches must take one sample, without the axis of a batch, here (5,): ",
    ),
    "no Equinox module": (lambda: fm.from_equinox(lambda key: 3, (5,)), "make must return an equinox.Module"),
    "an unknown layer": (
        lambda: fm.from_equinox(frameworks.Equinox, (5,), layers=("conv",)),
        "layers=('conv',) names 'conv', but the variables are called",
    ),
    "an unknown feature method": (
        lambda: fm.from_nnx(lambda rngs: frameworks.NNX(rngs, False), (5,), features="body", head="head"),
        "features='body' is not a method of NNX",
    ),
    "an unknown head": (
        lambda: fm.from_linen(frameworks.Linen(False), (5,), features="features", head="nope"),
        "head='nope' is not a method or submodule of Linen",
    ),
    "features without head": (
        lambda: fm.from_equinox(frameworks.Equinox, (5,), features="features"),
        "features='features' and head=None must be given together",
    ),
    "a Linen class": (lambda: fm.from_linen(nn.Dense, (5,)), "module must be a Module"),
    "a size of 0": (lambda: fm.from_linen(nn.Dense(3), (np.int64(0),)), "sample_shape=0 must be an integer"),
    "no sample": (lambda: fm.from_linen(nn.Dense(3), "five"), "sample_shape='five' must be a tuple of sizes"),
    "an apply that drops variables": (
        lambda: fm.from_functions(frameworks.own_init, lambda v, x, *, train, key, weight: (x, {}), (5,)),
        "the variables that apply returns must have the form of those that it gets",
    ),
    "an apply that returns outputs alone": (
        lambda: fm.from_functions(frameworks.own_init, lambda v, x, *, train, key, weight: x, (5,)),
        "apply must return (outputs, variables), not ",
    ),
    "an apply without its flags": (
        lambda: fm.from_functions(frameworks.own_init, lambda v, x, *, key: (x, v), (5,)),
        "apply must be a function (variables, x, *, train, key, weight), but it takes no train, weight",
    ),
    "no apply": (lambda: fm.from_functions(frameworks.own_init, None, (5,)), "apply=None must be a function"),
}


def test_sizes_may_be_numpy_integers():
    size = np.prod((2, 2))
    for make in (
        lambda n: fm.models.mlp(n, (5,), 3),
        lambda n: fm.models.lenet((5 * n, 20, 1), 3),
        lambda n: fm.from_linen(nn.Dense(3), (n,)),
        lambda n: fm.from_functions(frameworks.own_init, frameworks.own_apply, (n + 1,), trainable=frameworks.own_trainable),
    ):
        found, wanted = (jax.eval_shape(make(n).init, jax.random.key(0)) for n in (size, int(size)))
        assert found == wanted
    pair = functional.samples((np.zeros(4), np.int64(3)), 2)
    assert [leaf.shape for leaf in pair] == [(2, 4), (2,)]  # a form beside one of an array


def test_a_model_that_is_jitted_returns_the_leaves_that_it_got():
    apply = jax.jit(frameworks.own_apply, static_argnames="train")
    task = fm.from_functions(frameworks.own_init, apply, (5,), trainable=frameworks.own_trainable)
    plain = fm.from_functions(frameworks.own_init, frameworks.own_apply, (5,), trainable=frameworks.own_trainable)
    variables, rows = task.init(KEY), batch(6, 4)
    (loss, after), (wanted, then) = (jax.jit(one.loss)(variables, rows, KEY) for one in (task, plain))
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    assert problems.distance(after, then) < 1e-12


class AllFlags(nn.Module):
    """Takes every flag that modules are given."""

    @nn.compact
    def __call__(self, x, train=False, deterministic=True, weight=None):
        mask = None if weight is None else weight[:, None] > 0
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x, mask=mask))


def test_a_module_may_take_train_and_deterministic():
    task = fm.from_linen(AllFlags(), (5,))
    assert task.predict(task.init(jax.random.key(0)), jnp.ones((2, 5))).shape == (2, 3)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case):
    make, words = BAD[case]
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
