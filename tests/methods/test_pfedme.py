import jax
import jax.numpy as jnp
import pytest

import fedjax_meta as fm
from tests import problems
from tests.methods.common import FULL, KEY, build, gradient, loss, personalized, run, start, step


def pfedme(**options):
    return build("pfedme", **({**FULL, "lr": 0.05, "prox_weight": 2.0} | options))


def test_the_gradient_of_the_envelope_points_away_from_the_personal_model():
    # F(w) = min_θ f(θ) + λ/2 |θ - w|² has the gradient λ (w - θ(w)); against central differences of F.
    algorithm = pfedme(inner_steps=600)
    state = start(algorithm)

    def theta(w):
        return personalized(algorithm, state._replace(model=w), 3)

    def envelope(w):
        found = theta(w)
        apart = sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(w), strict=True))
        return loss(found, 3, "test_support") + apart

    envelope = jax.jit(envelope)
    keys = iter(jax.random.split(KEY, 9))
    direction = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), state.model)
    ahead, behind = (step(state.model, -sign * 1e-4, direction) for sign in (1, -1))
    slope = (envelope(ahead) - envelope(behind)) / 2e-4
    terms = jax.tree.map(lambda w, t, d: jnp.sum(2.0 * (w - t) * d), state.model, theta(state.model), direction)
    assert abs(slope - sum(jax.tree.leaves(terms))) < 1e-6


def test_a_round_of_one_batch_written_out():
    # One client whose batch is all of its samples, so that their order does not matter.
    x, y = problems.data().x[:24], problems.data().y[:24]
    views = {"train": ([0], [24]), "support": ([0], [12]), "query": ([12], [24])}
    data = fm.from_clients([(x, y)], num_classes=3, views={k: tuple(map(jnp.array, v)) for k, v in views.items()})
    options = {"inner_steps": 2, "local_rounds": 1, "batch_size": 24, "cohort_size": 1, "outer_lr": 0.1}
    algorithm = pfedme(**options)
    w = algorithm.init(KEY, data).model
    samples = data.client(0)["train"].take(jnp.arange(24), jnp.ones(24))
    theta = w
    for _ in range(2):
        g = jax.grad(lambda v: problems.task().loss(v, samples, KEY)[0])(theta)
        theta = jax.tree.map(lambda t, g, w: t - 0.05 * (g + 2.0 * (t - w)), theta, g, w)
    expected = jax.tree.map(lambda w, t: w - 0.1 * 2.0 * (w - t), w, theta)
    assert problems.distance(run(algorithm, 1, data=data).model, expected) < 1e-12


def test_new_and_known_clients_find_their_models_alike():
    algorithm = pfedme(inner_steps=1)
    state = start(algorithm)
    expected = step(state.model, 0.05, gradient(state.model, 5, "test_support"))
    for client in (5, None):
        assert problems.distance(personalized(algorithm, state, client, of_client=5), expected) < 1e-12


def test_local_models_that_stay_with_their_clients_written_out():
    """Two rounds of two clients as MTFL's authors have it; one inner step, batches of all samples, one rate, weight decay."""
    eta, weight, decay, sizes = 0.05, 2.0, 0.1, (24, 24)
    parts = [(problems.data().x[i * 24 : (i + 1) * 24], problems.data().y[i * 24 : (i + 1) * 24]) for i in range(2)]
    views = {name: (jnp.zeros(2, int), jnp.array(sizes)) for name in ("train", "support", "query", "test_support")}
    data = fm.from_clients(parts, num_classes=3, views=views)
    options = {"inner_steps": 1, "local_rounds": 2, "batch_size": 24, "cohort_size": 2, "outer_lr": eta, "lr": eta}
    algorithm = pfedme(keep_local=True, weight_decay=decay, **options)
    state = run(algorithm, 2, data=data)

    server = start(algorithm).model
    own = [server, server]
    gradient = jax.jit(jax.grad(lambda v, samples: problems.task().loss(v, samples, KEY)[0]))
    for _ in range(2):
        for i in range(2):
            theta, samples = server, data.client(i)["train"].take(jnp.arange(24), jnp.ones(24))
            for _ in range(2):
                g = gradient(theta, samples)
                theta = jax.tree.map(lambda t, g, w: t - eta * (g + weight * (t - w) + decay * t), theta, g, own[i])
                own[i] = jax.tree.map(lambda w, t: w - eta * weight * (w - t), own[i], theta)
        server = jax.tree.map(lambda a, b: (a + b) / 2, *own)
    assert problems.distance(state.model, server) < 1e-12
    assert problems.distance(own[0], own[1]) > 1e-3
    support = data.client(1)["test_support"]
    assert problems.distance(algorithm.personalize(KEY, state, support, 1), own[1]) < 1e-12
    assert problems.distance(algorithm.personalize(KEY, state, support, None), server) < 1e-12


def test_a_weight_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="prox_weight=0"):
        pfedme(prox_weight=0)
    with pytest.raises(ValueError, match="weight_decay=-0.1"):
        pfedme(weight_decay=-0.1)
