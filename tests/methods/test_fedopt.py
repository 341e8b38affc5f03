"""Server optimisers against the formulas of "Adaptive federated optimization", Algorithm 2, in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_meta.data import from_clients
from fedjax_meta.federation import Federation
from fedjax_meta.methods import fedadagrad, fedadam, fedavg, fedavgm, fedprox, fedyogi
from fedjax_meta.methods.fedopt import adaptive, fedopt
from fedjax_meta.rounds import federate
from fedjax_meta.task import Task


def reference(rule, deltas, x, *, lr, b1, b2, tau, v):
    m = np.zeros_like(x)
    for delta in deltas:
        m = b1 * m + (1 - b1) * delta
        square = delta**2
        if rule == "adagrad":
            v = v + square
        elif rule == "adam":
            v = b2 * v + (1 - b2) * square
        else:
            v = v - (1 - b2) * square * np.sign(v - square)
        x = x + lr * m / (np.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("initial", [None, 0.0, 0.3])
@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_formulas(rule, initial):
    rng = np.random.default_rng(0)
    x, deltas = rng.normal(size=7), rng.normal(size=(5, 7))
    lr, b1, b2, tau = 0.3, 0.8, 0.7, 0.05
    expected = reference(rule, deltas, x, lr=lr, b1=b1, b2=b2, tau=tau, v=np.full(7, tau**2 if initial is None else initial))
    with jax.enable_x64(True):
        server = adaptive(rule, lr, b1=b1, b2=b2, tau=tau, initial=initial)
        found = jnp.asarray(x)
        slots = server.init(found)
        for delta in deltas:
            updates, slots = server.update(jnp.asarray(-delta), slots, found)
            found = optax.apply_updates(found, updates)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_sum_of_squares_is_not_corrected():
    """Adagrad's first step from v = 0 is the sign of the pseudo-gradient, whatever b2 is."""
    for b2 in (0.9, 0.999):
        server = adaptive("adagrad", 0.1, b1=0.0, b2=b2, tau=1e-9, initial=0.0, bias_correction=True)
        updates, _ = server.update(jnp.array([2.0, -3.0]), server.init(jnp.zeros(2)))
        np.testing.assert_allclose(updates, [-0.1, 0.1], rtol=1e-6)


@pytest.fixture(scope="module")
def quadratics():
    """Clients of 10, 20 and 40 samples around their own centre; a full-batch step of rate lr goes the share lr of the way."""
    rng = np.random.default_rng(1)
    sizes = np.array([10, 20, 40])
    data = from_clients(
        [(rng.normal(loc=i, size=(n, 4)).astype(np.float32), np.zeros(n, int)) for i, n in enumerate(sizes)],
        views={"train": (0 * sizes, sizes)},
        num_classes=1,
    )

    def loss(variables, batch, key):
        residual = batch.weight[:, None] * (variables[None] - batch.x)
        return 0.5 * jnp.sum(residual**2) / jnp.sum(batch.weight), variables

    task = Task(lambda key: jnp.zeros(4), loss, lambda v, x: jnp.zeros((x.shape[0], 1)))
    return task, data, sizes


def trained(method, data, rounds=4, **federation):
    """The model after some rounds of all three clients."""
    algorithm = federate(method, Federation(cohort_size=3, **federation))
    state = algorithm.init(jax.random.key(0), data)
    step = jax.jit(algorithm.round)
    for r in range(rounds):
        state, _ = step(jax.random.key(r), state, data)
    return np.asarray(jax.tree.leaves(state.model)[0])


OPTIONS = {"batch_size": 64, "lr": 0.5}


@pytest.mark.parametrize(
    ("builder", "rule", "b1"), [(fedadam, "adam", 0.9), (fedyogi, "yogi", 0.9), (fedadagrad, "adagrad", 0.0)]
)
def test_rounds(quadratics, builder, rule, b1):
    task, data, _ = quadratics
    # Delta is the sample-weighted mean of 0.5 (centre - x), that is 0.5 (mean of all samples - x).
    x, m, v, mean = np.zeros(4), np.zeros(4), np.full(4, 1e-6), np.asarray(data.x).mean(0)
    for _ in range(4):
        delta = 0.5 * (mean - x)
        m, square = b1 * m + (1 - b1) * delta, delta**2
        v = {"adam": 0.99 * v + 0.01 * square, "yogi": v - 0.01 * square * np.sign(v - square), "adagrad": v + square}[rule]
        x = x + 0.1 * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(trained(builder(task, **OPTIONS), data), x, rtol=2e-4)


def test_momentum(quadratics):
    task, data, _ = quadratics
    x, velocity, mean = np.zeros(4), np.zeros(4), np.asarray(data.x).mean(0)
    for _ in range(4):
        velocity = 0.9 * velocity + 0.5 * (mean - x)
        x = x + 0.7 * velocity
    np.testing.assert_allclose(trained(fedavgm(task, server_lr=0.7, **OPTIONS), data), x, rtol=1e-5)


def test_without_momentum_it_is_averaging(quadratics):
    task, data, _ = quadratics
    np.testing.assert_array_equal(
        trained(fedavgm(task, momentum=0.0, **OPTIONS), data), trained(fedavg(task, **OPTIONS), data)
    )


@pytest.mark.parametrize("method", [fedavg, partial(fedprox, epochs=1, prox_weight=0.0)])
def test_a_federation_gives_any_method_an_adaptive_server(quadratics, method):
    task, data, _ = quadratics
    server = {"server_optimizer": partial(adaptive, "adam"), "server_lr": 0.1}
    np.testing.assert_array_equal(trained(method(task, **OPTIONS), data, **server), trained(fedadam(task, **OPTIONS), data))


@pytest.mark.parametrize("builder", [fedadagrad, fedadam, fedyogi])
def test_the_initial_second_moment_is_the_one_that_was_given(quadratics, builder):
    task, data, _ = quadratics
    for initial, expected in ((None, 0.05**2), (0.3, 0.3)):
        state = federate(builder(task, tau=0.05, initial=initial), Federation(cohort_size=3)).init(jax.random.key(0), data)
        np.testing.assert_allclose(state.optimizer.second, expected, rtol=1e-6)


def test_rates_may_be_traced(quadratics):
    task, data, _ = quadratics

    def run(server_lr, tau):
        algorithm = federate(fedadam(task, server_lr=server_lr, tau=tau, **OPTIONS), Federation(cohort_size=3))
        return algorithm.round(jax.random.key(0), algorithm.init(jax.random.key(0), data), data)[0].model

    swept = jax.jit(jax.vmap(run))(jnp.array([0.1, 0.2]), jnp.array([1e-3, 1e-2]))
    np.testing.assert_allclose(swept[1], run(0.2, 1e-2), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "adamw"}, "rule='adamw'.*adagrad, adam, yogi"),
        ({"server_lr": 0.0}, "server_lr=0"),
        ({"tau": -1.0}, "tau=-1"),
        ({"b1": 1.5}, "b1=1.5"),
        ({"initial": -1.0}, "initial=-1"),
    ],
)
def test_bad_arguments(quadratics, options, message):
    with pytest.raises(ValueError, match=message):
        fedopt(quadratics[0], **options)


def test_bad_momentum(quadratics):
    with pytest.raises(ValueError, match="momentum=1.5"):
        fedavgm(quadratics[0], momentum=1.5)


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_a_parameter_that_did_not_move_stays(rule):
    server, x = adaptive(rule, 0.3, initial=0.0), jnp.array([1.0, 2.0])
    updates, slots = server.update(jnp.array([0.0, 0.5]), server.init(x), x)
    assert float(updates[0]) == 0 and float(slots.second[0]) == 0 and float(updates[1]) < 0
