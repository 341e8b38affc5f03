"""Identities between methods: with one option at an extreme, one becomes another.

Each file of a method declares its identities in `REDUCES_TO`; the sweep runs them all. The others are written out by hand.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.masks import Role
from tests import problems

KEY = jax.random.key(3)
COMMON = {"lr": 0.05, "outer_lr": 0.3, "inner_lr": 0.1, "epochs": 2, "batch_size": 8}
"""Given to both methods of an identity, where they take it and the identity does not say otherwise."""


def rounds(algorithm: fm.Algorithm, count: int, state=None) -> fm.State:
    """`count` rounds from the first state."""
    step, data = jax.jit(algorithm.round), problems.data()
    state = algorithm.init(KEY, data) if state is None else state
    for _ in range(count):
        state, _ = step(jax.random.fold_in(KEY, state.round), state, data)
    return state


def _task(case):
    """MTFL and FedBN need batch norms; both methods of an identity get the same task."""
    files = {fm.METHODS[name].__module__.split(".")[-1] for name in (case.method, case.other)}
    return problems.normed_task() if "mtfl" in files else problems.task()


def _method(task, name, options, other_options):
    takes = inspect.signature(fm.METHODS[name]).parameters
    common = {key: value for key, value in COMMON.items() if key in takes and key not in other_options}
    return fm.METHODS[name](task, **(common | dict(options)))


def _variables(model):
    """The task's variables in the model of any method."""
    for name in ("params", "variables", "generic"):
        if hasattr(model, name):
            return getattr(model, name)
    return model


@pytest.mark.parametrize("case", fm.REDUCTIONS, ids=[case.says for case in fm.REDUCTIONS])
def test_identity(case):
    methods = [
        _method(_task(case), case.method, case.options, case.other_options),
        _method(_task(case), case.other, case.other_options, case.options),
    ]
    federation = fm.Federation(cohort_size=5, devices=1)
    one, two = (fm.federate(method, federation) for method in methods)
    first = one.init(KEY, problems.data())
    a, b = rounds(one, 3, first), rounds(two, 3)
    assert problems.distance(_variables(a.model), _variables(b.model)) < 1e-12
    tests = [
        jax.jit(lambda state, one=one: one.predict(one.personalize(KEY, state, _support(), 2), _inputs()))(state)
        for one, state in ((one, a), (two, b))
    ]
    if case.tests_alike:
        assert problems.distance(*map(jax.nn.log_softmax, tests)) < 1e-10
    moved = jax.tree.leaves(fm.masks.having(methods[0].roles, Role.SHARED, Role.BUFFER))
    if any(moved):
        assert problems.distance(a.model, first.model) > 1e-6


def _support():
    return problems.data().client(2)["test_support"]


def _inputs():
    return problems.data().client(2)["test_query"].in_order(8).get(0, 0).x


META = {"outer_optimizer": optax.sgd, "outer_lr": 0.3, "batch_size": 8}


def _mean_of_steps(start, view, rate, by_samples):
    """The model after one gradient step of every client on one view, averaged: written out client by client."""
    task, data = problems.task(), problems.data()
    gradient = jax.jit(jax.grad(lambda w, batch: task.loss(w, batch, KEY)[0]))
    weights, models = [], []
    for i in range(data.num_clients):
        samples = data.client(i)[view]
        # Padded to one size, so that the gradient is compiled once.
        slope = gradient(start, samples.in_order(128).get(0, 0))
        models.append(jax.tree.map(lambda w, g: w - rate * g, start, slope))
        weights.append(float(samples.size) if by_samples else 1.0)
    share = jnp.array(weights) / sum(weights)
    return jax.tree.map(lambda *leaves: jnp.tensordot(share, jnp.stack(leaves), 1), *models)


def test_maml_without_adaptation_is_gradient_descent_on_the_query_sets():
    algorithm = problems.build("fedmeta", inner_lr=0.0, devices=1, **{**META, "batch_size": None, "cohort_size": 7})
    start = algorithm.init(KEY, problems.data())
    expected = _mean_of_steps(start.model, "query", 0.3, by_samples=True)
    assert problems.distance(rounds(algorithm, 1, start).model, expected) < 1e-12


def test_one_epoch_of_one_full_batch_with_equal_weights_is_fedsgd():
    options = {"cohort_size": 7, "lr": 0.2, "weighting": "uniform", "batch_size": int(problems.SIZES.max())}
    algorithm = problems.build("fedavg", devices=1, **options)
    start = algorithm.init(KEY, problems.data())
    expected = _mean_of_steps(start.model, "train", 0.2, by_samples=False)
    assert problems.distance(rounds(algorithm, 1, start).model, expected) < 1e-12


def test_the_servers_sum_of_gradients_is_c_times_their_mean():
    one = problems.build("fedmeta_server", devices=1, cohort_size=5, inner_lr=0.1, outer_lr=0.1, batch_size=8)
    options = {"outer_at": "server", "weighting": "uniform", "inner_lr": 0.1, **META, "outer_lr": 0.5}
    other = problems.build("fedmeta", devices=1, cohort_size=5, **options)
    assert problems.distance(rounds(one, 2).model, rounds(other, 2).model) < 1e-12


def test_a_server_that_descends_at_rate_1_replaces():
    options = {"lr": 0.05, "epochs": 2, "batch_size": 8, "devices": 1}
    one, other = problems.build("fedavg", server_lr=1.0, **options), problems.build("fedavg", **options)
    assert problems.leaves_equal(rounds(one, 2).model, rounds(other, 2).model)


def test_meta_sgd_that_has_not_moved_its_rates_is_maml():
    # Both see the same gradient of the parameters in the first round, and only then do the rates move.
    maml = rounds(problems.build("fedmeta", inner_lr=0.1, devices=1, **META), 1)
    learned = rounds(problems.build("fedmeta_metasgd", inner_lr=0.1, devices=1, **META), 1)
    assert problems.distance(learned.model.params, maml.model) < 1e-12
    assert problems.distance(learned.model.rates, jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), maml.model)) > 1e-4


def test_local_only_never_moves_the_shared_model_and_trains_each_client_alone():
    data = problems.data()
    algorithm = problems.build("local_only", lr=0.05, epochs=2, batch_size=8, cohort_size=7, devices=1)
    start = algorithm.init(KEY, data)
    after = rounds(algorithm, 2, start)
    assert problems.leaves_equal(after.model, start.model)
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], after.personal) for i in (0, 1))
    assert problems.distance(first, second) > 1e-3


def test_all_registered_identities_are_of_registered_methods():
    assert {name for case in fm.REDUCTIONS for name in (case.method, case.other)} <= set(fm.METHODS)
    assert len(fm.REDUCTIONS) >= 10
    assert np.unique([case.says for case in fm.REDUCTIONS]).size == len(fm.REDUCTIONS)
