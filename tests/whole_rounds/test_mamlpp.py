"""Two rounds of MAML++ and ANIL.

MAML++ (AntreasAntoniou/HowToTrainYourMAMLPytorch): phi_t = phi_{t-1} - r_t g_t, one rate for each leaf and step; the loss is
sum_t v_t f(phi_t; query). By the chain rule, from the last step back: c = c + v_t grad f(phi_t; query), the slope of a rate is
-c . g_t over its leaf, and c = c - H_t (r_t c). The clients' SGD steps on theta and r are averaged by their query samples.
ANIL is the same with one rate, of which only the head's entries move in the inner steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import multistep
from fedjax_meta.methods.mamlpp import _last
from tests.whole_rounds.world import (
    COHORTS,
    HEAD,
    KNOWN,
    LATE,
    NEW,
    QUERY_SIZES,
    Library,
    check,
    gradient,
    hessian_times,
    near,
    task,
    two_rounds,
    view,
)

STEPS, RATE, BETA, SERVER, ROUNDS = 3, 0.2, 0.3, 0.7, 4
LEAF = np.repeat([0, 1, 2], [12, 3, 12])


def importance(round_):
    """The published schedule, written as its loop over steps."""
    decay, least = 1 / STEPS / ROUNDS, 0.03 / STEPS
    weights = np.full(STEPS, 1 / STEPS)
    weights[:-1] = np.maximum(weights[:-1] - round_ * decay, least)
    weights[-1] = min(weights[-1] + round_ * (STEPS - 1) * decay, 1 - (STEPS - 1) * least)
    return weights if round_ < ROUNDS else np.eye(STEPS)[-1]


def adapted(theta, rates, batch):
    """[phi_0, ..., phi_S]."""
    path = [theta]
    for t in range(STEPS):
        path.append(path[-1] - rates[:, t][LEAF] * gradient(path[-1], batch))
    return path


def test_two_rounds_of_mamlpp():
    method = fm.mamlpp(
        task(),
        inner_lr=RATE,
        outer_lr=BETA,
        inner_steps=STEPS,
        outer_optimizer=optax.sgd,
        step_weights=multistep.annealed(ROUNDS),
    )
    library = Library(method, server_lr=SERVER)
    start = library.w
    near(start[27:], np.full(3 * STEPS, RATE))

    def client(round_, i, w, memory):
        theta, rates, weights = w[:27], w[27:].reshape(3, STEPS), importance(round_)
        support, query = view(i, "support"), view(i, "query")
        path, cotangent, slopes = adapted(theta, rates, support), np.zeros(27), np.zeros((3, STEPS))
        for t in range(STEPS, 0, -1):
            cotangent = cotangent + weights[t - 1] * gradient(path[t], query)
            step = gradient(path[t - 1], support)
            slopes[:, t - 1] = [-np.sum((cotangent * step)[leaf == LEAF]) for leaf in range(3)]
            cotangent = cotangent - hessian_times(path[t - 1], rates[:, t - 1][LEAF] * cotangent, support)
        return w - BETA * np.r_[cotangent, slopes.ravel()], None

    after = two_rounds(start, client, QUERY_SIZES, personal=np.zeros(36, bool), server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        check(state, number + 1, model=after[number][0])
    w = after[-1][0]
    assert np.ptp(w[27:]) > 1e-3
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), adapted(w[:27], w[27:].reshape(3, STEPS), view(i, "test_support"))[-1])


def test_two_rounds_of_anil():
    options = {"inner_lr": RATE, "outer_lr": BETA, "inner_steps": STEPS, "outer_optimizer": optax.sgd, "batch_size": None}
    library = Library(fm.anil(task(), **options), server_lr=SERVER)
    rates = np.outer([0, RATE, RATE], np.ones(STEPS))

    def client(round_, i, w, memory):
        path = adapted(w, rates, view(i, "support"))
        cotangent = gradient(path[-1], view(i, "query"))
        for phi in reversed(path[:-1]):
            cotangent = cotangent - hessian_times(phi, RATE * np.where(HEAD, cotangent, 0), view(i, "support"))
        return w - BETA * cotangent, None

    after = two_rounds(library.w, client, QUERY_SIZES, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        check(state, number + 1, model=after[number][0])
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), adapted(after[-1][0], rates, view(i, "test_support"))[-1])


@pytest.mark.parametrize("round_", [0, 1, 3, 4, 50])
def test_the_importance_of_steps_is_the_published_one(round_):
    found = np.asarray(multistep.annealed(ROUNDS)(round_, STEPS))
    near(found, importance(round_))
    near(found.sum(), 1.0)
    assert len(COHORTS) < ROUNDS


def test_without_weights_the_last_step_counts_alone():
    np.testing.assert_array_equal(_last(jnp.int32(0), 4), [0, 0, 0, 1])


def test_an_estimator_for_every_step_takes_nothing_else():
    start = task().init(fm.keys.tagged(jax.random.key(0), "w"))
    loss = lambda w, batch: sum((leaf**2).sum() for leaf in jax.tree.leaves(w))  # noqa: E731
    batch = np.zeros(1)
    estimate = multistep.multi_step(fm.meta.sgd(0.1))
    with pytest.raises(ValueError, match=r"needs an EveryStep\(query, weights\)"):
        estimate(loss, start, batch, batch)
    with pytest.raises(ValueError, match=r"one for each of the 1 inner steps, not \[2\]"):
        estimate(loss, start, batch, multistep.EveryStep(batch, np.ones(2)))
    with pytest.raises(ValueError, match="an optimiser with a state of its own"):
        momentum = fm.meta.optimizer(lambda rate: optax.sgd(rate, momentum=0.9), 0.1)
        multistep.multi_step(momentum)(loss, start, batch, multistep.EveryStep(batch, np.ones(1)))


def test_each_step_descends_on_its_own_batch():
    """Against the derivative of the unrolled loop, for steps on unlike batches."""
    rng = np.random.default_rng(5)
    batches, query = (jnp.asarray(rng.normal(size=shape)) for shape in ((3, 4), (4,)))
    weights, w = jnp.array([0.2, 0.3, 0.5]), jnp.asarray(rng.normal(size=4))
    loss = lambda w, batch: jnp.sum((w - batch) ** 4) + jnp.prod(w)  # noqa: E731

    def unrolled(w):
        total = 0
        for weight, batch in zip(weights, batches, strict=True):
            w = w - 0.01 * jax.grad(loss)(w, batch)
            total += weight * loss(w, query)
        return total, w

    support = fm.data.Batches(lambda step, chunk: batches[step], 3, 3)
    result = multistep.multi_step(fm.meta.sgd(0.01))(loss, w, support, multistep.EveryStep(query, weights))
    (_, adapted), gradient = jax.value_and_grad(unrolled, has_aux=True)(w)
    near(result.adapted, adapted)
    near(result.gradient, gradient, 1e-9)


def pulled(strength):
    """Inner gradient descent that is pulled towards theta, as in docs/meta_gradients.md."""

    def update(meta, gradient, state, phi):
        return phi - 0.05 * (gradient + strength * (phi - meta)), state

    return fm.meta.InnerOptimizer(lambda meta: meta, lambda meta, phi: (), update, learned=True)


def decaying():
    return fm.meta.optimizer(lambda rate: optax.sgd(lambda step: rate / (1 + step)), 0.05)


STEPS_OF = {
    "pulled towards theta": (pulled(0.7), lambda w, g, t, theta: w - 0.05 * (g + 0.7 * (w - theta))),
    "a schedule": (decaying(), lambda w, g, t, theta: w - 0.05 / (1 + t) * g),
    "optax": (fm.meta.optimizer(optax.sgd, 0.05), lambda w, g, t, theta: w - 0.05 * g),
}


@pytest.mark.parametrize("steps", [3, 2])
@pytest.mark.parametrize("name", STEPS_OF)
def test_each_optimizer_without_floats_descends_on_every_step(name, steps):
    """Against the derivative of the unrolled loop; also of a client that has fewer steps than others."""
    inner, step = STEPS_OF[name]
    rng = np.random.default_rng(6)
    batches, query = (jnp.asarray(rng.normal(size=shape)) for shape in ((3, 4), (4,)))
    weights, theta = jnp.array([0.2, 0.3, 0.5]), jnp.asarray(rng.normal(size=4))
    loss = lambda w, batch: jnp.sum((w - batch) ** 4) / 9 + jnp.prod(w)  # noqa: E731

    def unrolled(theta):
        total, w, losses = 0, theta, []
        for t, (weight, batch) in enumerate(zip(weights, batches, strict=True)):
            value, slope = jax.value_and_grad(loss)(w, batch)
            if t < steps:
                w, losses = step(w, slope, t, theta), [*losses, value]
            total += weight * loss(w, query)
        return total, (w, losses)

    def estimated(steps):
        support = fm.data.Batches(lambda step, chunk: batches[step], steps, 3)
        return multistep.multi_step(inner)(loss, theta, support, multistep.EveryStep(query, weights))

    (total, (adapted, losses)), gradient = jax.value_and_grad(unrolled, has_aux=True)(theta)
    for result in (jax.jit(estimated)(steps), jax.jit(lambda: estimated(steps))()):
        for found, expected in ((result.adapted, adapted), (result.gradient, gradient), (result.info.query_loss, total)):
            near(found, expected, 1e-9)
        near(
            jnp.array([result.info.first_support_loss, result.info.last_support_loss]),
            jnp.array([losses[0], losses[-1]]),
            1e-9,
        )
        near(result.info.support_loss, sum(losses) / steps, 1e-9)


def test_batches_for_a_hessian_are_left_alone():
    batch, query, w = jnp.ones(4), jnp.zeros(4), jnp.arange(4.0)
    loss = lambda w, batch: jnp.sum((w - batch) ** 4)  # noqa: E731
    estimate = multistep.multi_step(fm.meta.sgd(0.01))
    one, other = (
        estimate(loss, w, support, multistep.EveryStep(query, jnp.ones(1))).gradient
        for support in (batch, fm.meta.WithHessian(batch, batch))
    )
    assert np.array_equal(one, other)
