"""iMAML as a federated method: its limits, its proximal tests, and FedMeta's server form beside it."""

import jax
import jax.numpy as jnp
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
