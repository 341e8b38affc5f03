"""iMAML as a federated method: its limits, its proximal tests, and FedMeta's server form beside it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import fedjax_meta as fm
from tests import problems
from tests.methods.common import KEY, build, plus, run, start
from tests.methods.test_perfedavg import gradient

ALL = {"cohort_size": 7, "devices": 1}

FL_IMAML_MARCH = {
    "operator": "fl_imaml_march",
    "outer": "regularised",
    "warm_start": "gradient",
    "tolerance": 0.0,
    "negative_curvature": "continue",
    "inner_optimizer": optax.adam,
}
"""Options that reproduce the code behind the logs of Nguyen et al. (their commit 858f10a of 31 March 2023)."""

FL_IMAML = {
    "operator": "fl_imaml",
    "outer": "last_chunk",
    "warm_start": "gradient",
    "tolerance": 0.0,
    "negative_curvature": "continue",
}
"""Options that reproduce the gradient in the later code of Nguyen et al., with its errors; no logs of it are published."""


def query_gradients(model):
    return [gradient(model, problems.data().client(i)["query"]) for i in range(len(problems.SIZES))]


def test_an_infinite_proximal_weight_makes_it_gradient_descent_on_the_query_sets():
    algorithm = build(
        "imaml", prox_weight=1e10, inner_lr=1e-10, outer_lr=0.3, outer_optimizer=optax.sgd, batch_size=None, **ALL
    )
    model = start(algorithm).model
    sizes = jnp.asarray(problems.data().sizes("query"), float)
    step = jax.tree.map(lambda *g: jnp.tensordot(sizes / sizes.sum(), jnp.stack(g), 1), *query_gradients(model))
    assert problems.distance(run(algorithm, 1).model, plus(model, -0.3, step)) < 1e-8


def test_a_test_client_is_pulled_back_to_the_model_that_it_received():
    options = {"prox_weight": 3.0, "inner_lr": 0.1, "inner_epochs": 4, "batch_size": None, **ALL}
    algorithm = build("imaml", **options)
    state = start(algorithm)
    support = problems.data().client(2)["test_support"]
    phi = state.model
    for _ in range(4):
        phi = plus(phi, -0.1, plus(gradient(phi, support), 3.0, plus(phi, -1, state.model)))
    assert problems.distance(algorithm.personalize(KEY, state, support, 2), phi) < 1e-12
    assert problems.distance(algorithm.personalize(KEY, state, support, None), phi) < 1e-12
    free = build("imaml", test_prox_weight=0.0, **options)
    assert problems.distance(free.personalize(KEY, state, support, 2), phi) > 1e-3


def test_a_round_of_the_code_behind_the_logs_by_hand():
    """Adam inside, (1 + n) v + sum_b H_b v / lambda over the n support batches, the proximal term in the query's gradient."""
    rate, weight = 0.05, 2.0
    options = {**FL_IMAML_MARCH, "inner_lr": rate, "prox_weight": weight, "inner_epochs": 1, "batch_size": 100, "cg_steps": 40}
    algorithm = build("imaml", **options, outer_optimizer=optax.sgd, outer_lr=0.3, **ALL)
    theta, unravel = ravel_pytree(start(algorithm).model)
    new, total = jnp.zeros_like(theta), 0
    for client in range(len(problems.SIZES)):
        data = problems.data().client(client)

        def slope(phi, view, data=data):  # of the loss and the proximal term
            return ravel_pytree(gradient(unravel(phi), data[view]))[0] + weight * (phi - theta)

        # One batch, hence one step of a fresh Adam.
        first = slope(theta, "support")
        phi = theta - rate * first / (jnp.abs(first) + 1e-8)
        system = jnp.eye(len(theta)) + jax.jacobian(slope)(phi, "support") / weight
        moved = theta - 0.3 * jnp.linalg.solve(system, slope(phi, "query"))
        size = int(data["query"].size)
        new, total = new + size * moved, total + size
    assert jnp.max(jnp.abs(ravel_pytree(run(algorithm, 1).model)[0] - new / total)) < 1e-8


def test_the_code_behind_the_logs_adds_up_the_hessians_of_the_support_batches():
    """Without adaptation: (I + sum_b (H_b + lambda I) / lambda) v = g, the query's gradient being the mean of its batches."""
    options = {**FL_IMAML_MARCH, "inner_lr": 0.0, "prox_weight": 2.0, "inner_epochs": 3, "batch_size": 2, "cg_steps": 60}
    algorithm = build("imaml", **options, outer_optimizer=optax.sgd, outer_lr=0.3, **ALL)
    theta, unravel = ravel_pytree(start(algorithm).model)
    slope = jax.grad(lambda phi, batch: problems.task().loss(unravel(phi), batch, KEY)[0])
    hessian, slope = jax.jit(jax.jacobian(slope)), jax.jit(slope)
    new, total, most = jnp.zeros_like(theta), 0, 0
    for client in range(len(problems.SIZES)):
        views = [problems.data().client(client)[view] for view in ("support", "query")]
        support, query = ([view.in_order(2).get(b, 0) for b in range(-(-int(view.size) // 2))] for view in views)
        system = jnp.eye(len(theta)) * (1 + len(support)) + sum(hessian(theta, batch) for batch in support) / 2.0
        moved = theta - 0.3 * jnp.linalg.solve(system, sum(slope(theta, batch) for batch in query) / len(query))
        size, most = int(views[1].size), max(most, len(support))
        new, total = new + size * moved, total + size
    assert most > 2
    assert jnp.max(jnp.abs(ravel_pytree(run(algorithm, 1).model)[0] - new / total)) < 1e-8


def test_a_round_reports_how_each_client_s_linear_system_fared():
    """By the eigenvalues of I + H / lambda, which is not positive for three of the clients."""
    options = {"inner_lr": 0.0, "inner_epochs": 1, "batch_size": None, "cg_steps": 60, "tolerance": 1e-9, **ALL}
    theta, unravel = ravel_pytree(start(build("imaml", **options)).model)
    slope = lambda phi, client: ravel_pytree(gradient(unravel(phi), problems.data().client(client)["support"]))[0]  # noqa: E731
    lowest = np.array([np.linalg.eigvalsh(jax.jacobian(slope)(theta, i))[0] for i in range(len(problems.SIZES))])
    weight = -float(np.sort(lowest)[2:4].mean())
    algorithm = build("imaml", prox_weight=weight, **options)
    _, info = algorithm.round(KEY, start(algorithm), problems.data())
    ids = np.asarray(info.ids)
    np.testing.assert_array_equal(info.metrics["negative_curvature"], lowest[ids] < -weight)
    solved = np.asarray(info.metrics["negative_curvature"]) == 0
    residual, steps = (np.asarray(info.metrics[name]) for name in ("residual", "cg_steps"))
    assert (residual[solved] < 1e-9).all() and (residual[~solved] > 1e-3).all() and (steps[~solved] < len(theta)).all()


def test_what_an_own_estimator_reports_is_a_mean_over_meta_steps():
    class Told(NamedTuple):
        support_loss: jax.Array
        query_loss: jax.Array
        first_support_loss: jax.Array
        last_support_loss: jax.Array
        length: jax.Array

    def lengths(inner, **options):
        estimate = fm.meta.first_order(inner, **options)

        def told(loss, meta, support, query):
            found = estimate(loss, meta, support, query)
            return found._replace(info=Told(*found.info, optax.tree.norm(found.gradient)))

        return told

    def norms(steps):
        options = {"estimator": lengths, "inner_lr": 0.0, "outer_lr": 0.3, "outer_optimizer": optax.sgd, "batch_size": None}
        algorithm = build("fedmeta", meta_steps=steps, **options, **ALL)
        _, info = algorithm.round(KEY, start(algorithm), problems.data())
        return np.asarray(info.ids), np.asarray(info.metrics["length"])

    ids, one = norms(1)
    _, two = norms(2)
    model = start(build("fedmeta", **ALL)).model
    for place, client in enumerate(ids):
        first = gradient(model, problems.data().client(int(client))["query"])
        second = gradient(plus(model, -0.3, first), problems.data().client(int(client))["query"])
        lengths_by_hand = [float(optax.tree.norm(one)) for one in (first, second)]
        assert abs(one[place] - lengths_by_hand[0]) < 1e-9 and abs(two[place] - np.mean(lengths_by_hand)) < 1e-9


def test_the_gradient_of_the_published_code_is_another_one():
    options = {"outer_optimizer": optax.sgd, "outer_lr": 0.3, "inner_lr": 0.1, "inner_epochs": 2, "batch_size": 8, **ALL}
    proper, published = (run(build("imaml", **options, **more), 1).model for more in ({}, FL_IMAML))
    assert problems.distance(proper, published) > 1e-3


def test_the_server_form_of_fedmeta_descends_along_the_sum_over_its_cohort():
    algorithm = build("fedmeta_server", inner_lr=0.0, outer_lr=0.05, batch_size=None, **ALL)
    model = start(algorithm).model
    total = jax.tree.map(lambda *g: sum(g), *query_gradients(model))
    assert problems.distance(run(algorithm, 1).model, plus(model, -0.05, total)) < 1e-12


def test_the_server_form_takes_any_optimiser_and_keeps_its_state():
    algorithm = build("fedmeta_server", outer_optimizer=optax.adam, outer_lr=0.05, **ALL)
    after = run(algorithm, 2)
    assert any(int(leaf) == 2 for leaf in jax.tree.leaves(after.optimizer) if leaf.ndim == 0)


def test_the_server_form_of_imaml_descends_along_the_sum_over_its_cohort():
    options = {"inner_lr": 0.1, "inner_epochs": 2, "outer_lr": 0.05, "outer_optimizer": optax.sgd, "batch_size": None}
    of_clients, at_server = (
        build("imaml", **options, **ALL, weighting="uniform", **more)
        for more in ({}, {"outer_at": "server", "server_sum": True})
    )
    model, mean = start(of_clients).model, run(of_clients, 1).model
    assert problems.distance(run(at_server, 1).model, plus(model, 7, plus(mean, -1, model))) < 1e-12


def test_fedavg_with_one_update_takes_one_step_on_all_of_the_support_view():
    algorithm = build("fedavg_one_step", lr=0.2, batch_size=4, **ALL)
    state = start(algorithm)
    support = problems.data().client(3)["test_support"]
    expected = plus(state.model, -0.2, gradient(state.model, support))
    assert problems.distance(algorithm.personalize(KEY, state, support, 3), expected) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prox_weight": 0.0}, "prox_weight=0.0"),
        ({"test_prox_weight": -1.0}, "test_prox_weight=-1.0"),
        ({"cg_steps": 0}, "cg_steps=0"),
        ({"inner_epochs": 0}, "inner_epochs=0"),
        ({"operator": "other"}, "operator='other'"),
        ({"negative_curvature": "ignore"}, "negative_curvature='ignore'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_when_the_method_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        fm.imaml(problems.task(), **options)


def test_it_has_no_learned_rates():
    with pytest.raises(TypeError, match=r"imaml\(\) takes no 'learned_rates'"):
        fm.imaml(problems.task(), learned_rates=True)


@pytest.mark.parametrize("options", [{"operator": "fl_imaml"}, {"operator": "fl_imaml_march"}, {"outer": "last_chunk"}])
def test_what_goes_by_batches_is_refused_without_any(options):
    """Chunks of a full batch are as long as the platform and the largest client have them."""
    with pytest.raises(ValueError, match="goes by batches: give it a batch_size"):
        fm.imaml(problems.task(), batch_size=None, **options)
