"""Every method trains on the loss of its task: an augmentation or another criterion changes its result, or is refused by name."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import features
from fedjax_meta.data import transforms
from fedjax_meta.methods.fedem import responsibilities
from fedjax_meta.task import Batch, LogitsLoss, cross_entropy, require_parts, weighted_mean
from tests import problems
from tests.methods.common import KEY
from tests.test_contract import FEDERATION, build, run

OPAQUE_IS_REFUSED = ("apfl_outputs", "feddbe", "fedem", "fedpac", "fedproto", "fedrod", "gpfl", "fedgp", "mocha", "moon")
OWN_LOSS = {"fedgp": "a predictive loss", "mocha": "a hinge loss"}
CRITERION_IS_REFUSED = ("fedrod",)


def smoothed(logits, batch, amount=0.2):
    """Cross-entropy with a share of every label spread over all classes."""
    classes = logits.shape[-1]
    label = (1 - amount) * jax.nn.one_hot(batch.y, classes) + amount / classes
    return weighted_mean(optax.losses.softmax_cross_entropy(logits, label), batch.weight)


def noised(task, amount):
    return transforms.augmented(task, lambda key, x: x + amount * jax.random.normal(key, x.shape, x.dtype))


def with_criterion(task, criterion):
    return task._replace(loss=dataclasses.replace(task.loss, criterion=criterion))


def held(state):
    """Everything that the server and the clients hold."""
    return state.model, state.personal, state.memory


def rounds(method, count=3):
    """What is held after some rounds."""
    algorithm = fm.federate(method, fm.Federation(cohort_size=3, devices=1, lanes=1))
    return held(run(jax.jit(algorithm.round), jax.jit(algorithm.init)(KEY, problems.data()), count))


@pytest.mark.parametrize("name", problems.sampled(grouped=True))
def test_a_method_sees_the_loss_of_its_task(name):
    """Noise on the samples and label smoothing change it; both at 0 change nothing."""
    builder, plain = fm.METHODS[name], problems.task_of(name)
    if name in OWN_LOSS:
        for other in (noised(plain, 0.5), with_criterion(plain, smoothed)):
            with pytest.raises(ValueError, match=f"{name} minimises {OWN_LOSS[name]} of its own on the samples as they are"):
                builder(other)
        return

    def method(noise, smoothing):
        task = plain
        if name not in CRITERION_IS_REFUSED:
            task = with_criterion(task, lambda logits, batch: smoothed(logits, batch, smoothing))
        return builder(noised(task, noise), **problems.TRIED_WITH.get(name, {}))

    @jax.jit
    def changed(noise, smoothing, *arguments):
        return fm.federate(method(noise, smoothing), fm.Federation(**FEDERATION, devices=1, lanes=1)).round(*arguments)

    _, step, start = build(name)
    steps = (step, partial(changed, 0.0, 0.0), partial(changed, 0.5, 0.0), partial(changed, 0.0, 0.3))
    as_is, identity, augmented, smooth = (held(run(step, start, 3)) for step in steps)
    assert problems.distance(as_is, identity) < 1e-9
    assert problems.distance(identity, augmented) > 1e-7
    if name in CRITERION_IS_REFUSED:
        with pytest.raises(ValueError, match=rf"^{name} balances softmax cross-entropy, but .*another criterion"):
            builder(with_criterion(plain, smoothed))
    else:
        assert problems.distance(identity, smooth) > 1e-7


@pytest.mark.parametrize("name", fm.METHODS)
def test_an_opaque_loss_is_honoured_or_refused_by_name(name):
    task = problems.task_of(name)
    opaque = task._replace(loss=partial(task.loss))
    if name not in OPAQUE_IS_REFUSED:
        fm.METHODS[name](opaque)
        return
    with pytest.raises(ValueError, match=rf"^{name.replace('_outputs', '')}.*opaque function: give fm.task.LogitsLoss"):
        fm.METHODS[name](opaque)


def test_without_alignment_fedpac_takes_any_loss():
    task = problems.task()
    fm.fedpac(task._replace(loss=partial(task.loss)), align=False)


class _Dropping(nn.Module):
    rate: float = 0.5

    def setup(self):
        self.body, self.head = nn.Dense(4), nn.Dense(3)
        self.drop = nn.Dropout(self.rate)

    def features(self, x, *, train=False):
        return self.drop(nn.tanh(self.body(x)), deterministic=not train)

    def __call__(self, x, *, train=False):
        return self.head(self.features(x, train=train))


def dropping(rate=0.5):
    return fm.models.from_linen(_Dropping(rate), (5,), layers=("body", "head"), features="features", head="head")


@pytest.mark.parametrize("name", ["apfl_outputs", "fedem", "fedpac", "moon"])
def test_dropout_of_the_loss_is_honoured(name):
    with_dropout, without = (rounds(fm.METHODS[name](dropping(rate))) for rate in (0.5, 0.0))
    assert problems.distance(with_dropout, without) > 1e-4


def test_dropout_is_refused_where_logits_come_from_features():
    with pytest.raises(ValueError, match=r"fedrod computes logits as task.predict does, .*dropout"):
        fm.fedrod(dropping())
    with pytest.raises(ValueError, match=r"with_projection computes logits as task.predict does"):
        features.with_projection(dropping(), 4, 3)


def test_a_task_knows_whether_training_is_evaluation():
    assert problems.task().loss.as_predicted
    assert fm.models.mlp(inputs=5, classes=3).loss.as_predicted
    assert not problems.normed_task().loss.as_predicted
    assert not dropping().loss.as_predicted
    # The same steps with other constants are another model.
    for train_scale, same in ((2.0, False), (1.0, True)):
        scales = {True: train_scale * jnp.ones(5), False: jnp.ones(5)}

        def apply(variables, x, *, train, key, weight, scales=scales):
            return (x * scales[train]) @ variables["w"], variables

        start = lambda key: {"w": jnp.ones((5, 3))}  # noqa: E731
        assert fm.models.from_functions(start, apply, (5,)).loss.as_predicted == same


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("train_scale", [1.0, 2.0])
def test_constants_of_functions_that_are_jitted_make_another_model_too(kind, train_scale):
    """Such as logits that are adjusted in training only: methods that take logits from features must not lose that."""

    def scaled(by):
        factor = kind(np.full(3, by, np.float32))
        within = jax.jit(lambda x: x * factor)
        return jax.jit(lambda x: jax.lax.cond(x.shape[0] > 0, within, lambda x: x, x))

    of = {True: scaled(train_scale), False: scaled(1.0)}

    def apply(variables, x, *, train, key, weight):
        return of[train](x @ variables["head"]), variables

    task = fm.from_functions(
        lambda key: {"head": jax.random.normal(key, (5, 3))},
        apply,
        (5,),
        layers=("head",),
        features=lambda variables, x: x,
        head=lambda variables, z: of[False](z @ variables["head"]),
    )
    assert task.loss.as_predicted == (train_scale == 1.0)
    variables, batch = task.init(KEY), Batch(jax.random.normal(KEY, (4, 5)), jnp.array([0, 1, 2, 0]), jnp.ones(4))
    unpenalised = features.penalised(task, lambda z, batch: 0.0, "this test")
    np.testing.assert_allclose(unpenalised(variables, batch, KEY)[0], task.loss(variables, batch, KEY)[0], rtol=1e-6)


def test_the_penalised_loss_is_the_tasks_loss_plus_the_penalty_on_the_same_samples():
    """With an augmentation, label smoothing, and both ways to compute it: one forward pass, or two for a task with dropout."""
    batch = Batch(jax.random.normal(KEY, (6, 5)), jnp.array([0, 1, 2, 0, 1, 2]), jnp.array([1.0, 1, 1, 1, 1, 0]))
    for task in (problems.task(), dropping()):
        task = noised(with_criterion(task, smoothed), 0.3)  # noqa: PLW2901
        variables = task.init(KEY)
        seen, _ = task.loss.prepare(batch, KEY)
        assert float(jnp.max(jnp.abs(seen.x - batch.x))) > 0.1
        loss = features.penalised(task, lambda z, batch: jnp.sum(z**2) + jnp.sum(batch.x), "this test")
        expected = task.loss(variables, batch, KEY)[0] + jnp.sum(task.features(variables, seen.x) ** 2) + jnp.sum(seen.x)
        np.testing.assert_allclose(loss(variables, batch, KEY)[0], expected, rtol=1e-6)


def test_augmentations_of_augmentations_go_from_the_outer_to_the_inner_one():
    """As for an opaque loss: with the same key, the same samples in the same order."""
    first, second = (lambda key, x: 2 * x), (lambda key, x: x + jax.random.normal(key, x.shape))
    batch = Batch(jnp.ones((2, 5)), jnp.array([0, 1]), jnp.ones(2))
    clear = problems.task()
    opaque = clear._replace(loss=partial(clear.loss))
    variables, values = clear.init(KEY), []
    for task in (clear, opaque):
        twice = transforms.augmented(transforms.augmented(task, first), second)
        values.append(twice.loss(variables, batch, KEY)[0])
    key, _ = jax.random.split(KEY)
    by_hand = batch._replace(x=2 * (batch.x + jax.random.normal(key, batch.x.shape)))
    np.testing.assert_allclose(values, [clear.loss(variables, by_hand, KEY)[0]] * 2, rtol=1e-12)


def test_the_losses_of_samples_average_to_the_loss():
    logits = jax.random.normal(KEY, (5, 3))
    batch = Batch(None, jnp.array([0, 1, 2, 0, 7]), jnp.array([1.0, 1, 1, 1, 0]))
    for criterion in (cross_entropy, smoothed):
        losses = LogitsLoss(None, criterion).of_samples(logits, batch)
        np.testing.assert_allclose(jnp.mean(losses[:4]), criterion(logits, batch), rtol=1e-12)
        assert losses[4] == 0
    expected = -jax.nn.log_softmax(logits)[jnp.arange(4), batch.y[:4]]
    np.testing.assert_allclose(LogitsLoss(None, cross_entropy).of_samples(logits, batch)[:4], expected, rtol=1e-12)


def test_a_projected_task_keeps_criterion_and_augmentation():
    task = features.with_projection(noised(with_criterion(problems.task(), smoothed), 0.3), 4, 3, projection=8)
    variables = task.init(KEY)
    batch = Batch(jnp.ones((2, 5)), jnp.array([0, 1]), jnp.ones(2))
    seen, _ = require_parts(task, "this test").prepare(batch, KEY)
    assert float(jnp.max(jnp.abs(seen.x - 1))) > 0.1
    np.testing.assert_allclose(
        task.loss(variables, batch, KEY)[0], smoothed(task.predict(variables, seen.x), seen), rtol=1e-12
    )


def test_responsibilities_follow_the_criterion():
    """A loss that is scaled by 3 makes them sharper: q is proportional to pi exp(-3 l)."""
    task = problems.task()
    scaled = with_criterion(task, lambda logits, batch: 3 * cross_entropy(logits, batch))
    plain, sharp = (rounds(fm.fedem(task)) for task in (task, scaled))
    assert problems.distance(plain, sharp) > 1e-4
    losses, share = jnp.array([[1.0, 2.0]]), jnp.array([0.5, 0.5])
    np.testing.assert_allclose(responsibilities(3 * losses, share)[0, 0], 1 / (1 + np.exp(-3)), rtol=1e-12)
