"""Identities between algorithms: with one knob at an extreme, one becomes another."""

import jax
import jax.numpy as jnp
import optax
import pytest

import fedjax_meta as fm
from tests import problems
from tests.test_contract import rounds

KEY = jax.random.key(3)
COMMON = {"cohort_size": 5, "devices": 1}
LOCAL = {**COMMON, "lr": 0.05, "epochs": 2, "batch_size": 8}
META = {**COMMON, "outer_optimizer": optax.sgd, "outer_lr": 0.3, "batch_size": 8}

# (what it says, one algorithm, the algorithm that it must equal)
IDENTITIES = [
    ("FedProx with mu=0 is FedAvg", lambda t: fm.fedprox(t, prox_weight=0, **LOCAL), lambda t: fm.fedavg(t, **LOCAL)),
    (
        "FedPer with nothing personal is FedAvg",
        lambda t: fm.fedper(t, personal="none", **LOCAL),
        lambda t: fm.fedavg(t, **LOCAL),
    ),
    (
        "a server that descends at rate 1 replaces",
        lambda t: fm.fedavg(t, server_optimizer=optax.sgd(1.0), **LOCAL),
        lambda t: fm.fedavg(t, **LOCAL),
    ),
    (
        "FedMeta-Per with nothing personal is FedMeta",
        lambda t: fm.fedmeta_per(t, personal="none", inner_lr=0.1, **META),
        lambda t: fm.fedmeta(t, inner_lr=0.1, **META),
    ),
    (
        "a gradient step at the server is the mean of gradient steps at the clients",
        lambda t: fm.fedmeta(t, inner_lr=0.1, outer_at="server", server_optimizer=optax.sgd(0.3), **META),
        lambda t: fm.fedmeta(t, inner_lr=0.1, **META),
    ),
    (
        "first-order is exact when adaptation stands still",
        lambda t: fm.fedmeta(t, inner_lr=0.0, estimator=fm.meta.first_order, **META),
        lambda t: fm.fedmeta(t, inner_lr=0.0, **META),
    ),
]


@pytest.mark.parametrize("case", IDENTITIES, ids=[case[0] for case in IDENTITIES])
def test_identity(case):
    _, one, other = case
    a, b = rounds(one(problems.task()), 3), rounds(other(problems.task()), 3)
    assert problems.distance(a.model, b.model) < 1e-12
    assert problems.distance(a.model, one(problems.task()).init(KEY, problems.data()).model) > 1e-3


def _mean_of_steps(start, view, rate, by_samples):
    """The model after one gradient step of every client on one view, averaged: written out client by client."""
    task, data = problems.task(), problems.data()
    weights, models = [], []
    for i in range(data.num_clients):
        samples = data.client(i)[view]
        batch = samples.take(jnp.arange(samples.size), jnp.ones(samples.size))
        gradient = jax.grad(lambda w, batch=batch: task.loss(w, batch, KEY)[0])(start)
        models.append(jax.tree.map(lambda w, g: w - rate * g, start, gradient))
        weights.append(float(samples.size) if by_samples else 1.0)
    share = jnp.array(weights) / sum(weights)
    return jax.tree.map(lambda *leaves: jnp.tensordot(share, jnp.stack(leaves), 1), *models)


def test_maml_without_adaptation_is_gradient_descent_on_the_query_sets():
    algorithm = fm.fedmeta(problems.task(), inner_lr=0.0, **{**META, "batch_size": None, "cohort_size": 7})
    start = algorithm.init(KEY, problems.data())
    expected = _mean_of_steps(start.model, "query", 0.3, by_samples=True)
    assert problems.distance(rounds(algorithm, 1, start).model, expected) < 1e-12


def test_one_epoch_of_one_full_batch_with_equal_weights_is_fedsgd():
    options = {**COMMON, "cohort_size": 7, "lr": 0.2, "weighting": "uniform", "batch_size": int(problems.SIZES.max())}
    algorithm = fm.fedavg(problems.task(), **options)
    start = algorithm.init(KEY, problems.data())
    expected = _mean_of_steps(start.model, "train", 0.2, by_samples=False)
    assert problems.distance(rounds(algorithm, 1, start).model, expected) < 1e-12


def test_meta_sgd_that_has_not_moved_its_rates_is_maml():
    # Both see the same gradient of the parameters in the first round, and only then do the rates move.
    task = problems.task()
    maml = rounds(fm.fedmeta(task, inner_lr=0.1, **META), 1)
    learned = rounds(fm.fedmeta(task, inner_lr=0.1, learned_rates=True, **META), 1)
    assert problems.distance(learned.model.params, maml.model) < 1e-12
    assert problems.distance(learned.model.rates, jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), maml.model)) > 1e-4


def test_local_only_never_moves_the_shared_model_and_trains_each_client_alone():
    data = problems.data()
    algorithm = fm.local_only(problems.task(), **{**LOCAL, "cohort_size": 7})
    start = algorithm.init(KEY, data)
    after = rounds(algorithm, 2, start)
    assert problems.leaves_equal(after.model, start.model)
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], after.personal) for i in (0, 1))
    assert problems.distance(first, second) > 1e-3
