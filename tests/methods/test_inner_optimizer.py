"""Any optax optimiser in the inner loop, with any estimator, against finite differences and rounds written out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import fedjax_meta as fm
from fedjax_meta import local, masks, meta
from fedjax_meta.implicit import implicit_gradient
from tests import problems
from tests.methods.common import KEY, batch

FACTORIES = {
    "adam": optax.adam,
    "adamw": partial(optax.adamw, weight_decay=0.1),
    "momentum": partial(optax.sgd, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop,
    "adagrad": optax.adagrad,
    "clipped adam": lambda rate: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(rate)),
    "adam with clipped blocks": lambda rate: optax.chain(optax.clip_by_block_rms(0.01), optax.adam(rate)),
    "adafactor": partial(optax.adafactor, multiply_by_parameter_scale=False),
    "skipping": lambda rate: optax.apply_if_finite(optax.amsgrad(rate), 3),
}
BASE = {"inner_lr": 0.05, "batch_size": None, "inner_steps": 3, "outer_lr": 1.0, "outer_optimizer": optax.sgd}


def black(task):
    """The task with an input that is always 0, so that a row of its first layer has no gradient at all."""
    hide = lambda x: x.at[:, 2].set(0)  # noqa: E731
    return fm.classification(task.init, lambda variables, x: task.predict(variables, hide(x)), layers=task.layers)


def adapted_loss(task, factory, steps=3):
    """The query loss after plain optax steps on the support set, in one piece: what `fedmeta` differentiates."""
    support, query = batch(1, "support"), batch(1, "query")

    def loss(variables):
        optimizer = factory(0.05)
        slots = optimizer.init(variables)
        for _ in range(steps):
            gradient = jax.grad(lambda v: task.loss(v, support, KEY)[0])(variables)
            change, slots = optimizer.update(gradient, slots, variables)
            variables = optax.apply_updates(variables, change)
        return task.loss(variables, query, KEY)[0]

    return loss


def one_client(method, variables):
    """By how much client 1's model falls in a round."""
    received = fm.contract.Received(variables, (), (), jnp.zeros((), jnp.int32), jnp.zeros((), bool), KEY)
    trained = jax.jit(lambda: method.client(KEY, received, problems.data().client(1)))()
    return jax.tree.map(jnp.subtract, variables, trained.model)


@pytest.mark.parametrize("hidden", [False, True], ids=["all inputs", "an input that is always 0"])
@pytest.mark.parametrize("name", FACTORIES)
def test_the_meta_gradient_through_an_optimizer_is_exact(name, hidden):
    """Second-order terms through its state among them: central differences of the whole adaptation, in float64."""
    task = black(problems.task()) if hidden else problems.task()
    variables = task.init(KEY)
    # A start away from the zeros of the biases.
    variables = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(KEY, leaf.shape), variables)
    found, back = ravel_pytree(one_client(fm.fedmeta(task, inner_optimizer=FACTORIES[name], **BASE), variables))
    assert np.all(np.isfinite(found))
    loss, flat = jax.jit(lambda flat: adapted_loss(task, FACTORIES[name])(back(flat))), ravel_pytree(variables)[0]
    step = 1e-6
    expected = np.array([(loss(flat.at[k].add(step)) - loss(flat.at[k].add(-step))) / (2 * step) for k in range(flat.size)])
    np.testing.assert_allclose(found, expected, atol=3e-7 * max(1, np.max(np.abs(expected))))
    if hidden:
        np.testing.assert_allclose(back(found)["body"]["w"][2], 0, atol=1e-12)


def test_the_first_order_and_reptile_follow_the_same_steps():
    """FOMAML is the query gradient at the adapted model, Reptile the way to it."""
    task, variables = problems.task(), problems.task().init(KEY)
    optimizer, adapted = optax.adam(0.05), variables
    slots = optimizer.init(adapted)
    for _ in range(3):
        gradient = jax.grad(lambda v: task.loss(v, batch(1, "support"), KEY)[0])(adapted)
        change, slots = optimizer.update(gradient, slots, adapted)
        adapted = optax.apply_updates(adapted, change)
    query = jax.grad(lambda v: task.loss(v, batch(1, "query"), KEY)[0])(adapted)
    first = one_client(fm.fedmeta_fomaml(task, inner_optimizer=optax.adam, **BASE), variables)
    assert problems.distance(first, query) < 1e-12
    reptile = one_client(fm.fedmeta(task, inner_optimizer=optax.adam, estimator=meta.reptile_gradient, **BASE), variables)
    assert problems.distance(reptile, jax.tree.map(jnp.subtract, variables, adapted)) < 1e-12


def test_hessian_free_through_adam_tends_to_exact():
    task, variables = problems.task(), problems.task().init(KEY)
    exact, free = (
        one_client(fm.fedmeta(task, inner_optimizer=partial(optax.adam, eps=1e-3), estimator=estimator, **BASE), variables)
        for estimator in (meta.exact, partial(meta.hessian_free, delta=1e-4))
    )
    assert problems.distance(exact, free) < 1e-4
    plain = one_client(fm.fedmeta_fomaml(task, inner_optimizer=partial(optax.adam, eps=1e-3), **BASE), variables)
    assert problems.distance(exact, plain) > 1e-3


def test_the_implicit_gradient_at_adams_solution_is_that_of_the_solution():
    """iMAML reads only where the inner loop ends: (I + H / lambda)^-1 times the query gradient there, by a dense solve."""
    task, variables, weight = problems.task(), problems.task().init(KEY), 2.0
    estimator = partial(implicit_gradient, prox_weight=weight, cg_steps=60, tolerance=1e-12)
    options = {**BASE, "inner_steps": 400, "inner_lr": 0.01}
    found, back = ravel_pytree(
        one_client(fm.fedmeta(task, inner_optimizer=optax.adam, estimator=estimator, **options), variables)
    )
    loss = local.parameter_loss(task, masks.split(variables, masks.everything_like(variables))[1])
    sample = (batch(1, "support"), KEY)
    theta = ravel_pytree(variables)[0]
    inner = lambda flat: loss(back(flat), sample) + weight / 2 * jnp.sum((flat - theta) ** 2)  # noqa: E731
    phi = theta
    for _ in range(20):
        phi = phi - jnp.linalg.solve(jax.hessian(inner)(phi), jax.grad(inner)(phi))
    query = jax.grad(lambda flat: loss(back(flat), (batch(1, "query"), KEY)))(phi)
    expected = jnp.linalg.solve(jax.hessian(inner)(phi) / weight, query)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["reptile", "perfedavg_reptile", "perfedavg", "imaml", "fedmeta_per"])
def test_the_meta_family_takes_an_inner_optimizer(name):
    task, states = problems.task(), []
    for factory in (None, optax.sgd, optax.adam):
        algorithm = problems.build(name, of=task, inner_lr=0.05, inner_optimizer=factory, cohort_size=3, devices=1)
        state = algorithm.init(KEY, problems.data())
        states.append(jax.jit(algorithm.round)(KEY, state, problems.data())[0].model)
    assert problems.distance(states[0], states[1]) < 1e-12 < problems.distance(states[0], states[2])


def test_learned_rates_are_those_of_plain_steps():
    with pytest.raises(ValueError, match="inner_optimizer and learned_rates=True exclude each other"):
        fm.fedmeta_metasgd(problems.task(), inner_optimizer=optax.adam)
