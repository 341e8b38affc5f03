"""Models in half precision, the precision of products, and losses that are not finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import runtime
from fedjax_meta.methods.pfedsim import cosines_of, similar_clients
from tests import problems
from tests.methods.common import KEY


def halved(task, dtype):
    """The task with parameters, inputs and logits in a short type."""

    def cast(tree):
        return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)

    def of_cast(function):
        return lambda variables, x: function(variables, cast(x))

    def logits(variables, batch, key):
        return task.loss.logits(variables, batch._replace(x=cast(batch.x)), key)

    return task._replace(
        init=lambda key: cast(task.init(key)),
        loss=dataclasses.replace(task.loss, logits=logits),
        predict=of_cast(task.predict),
        features=of_cast(task.features),
    )


# All lower types follow the same rules of promotion. Tests run in JAX's 64-bit mode, so that float32 is one, too.
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, *(pytest.param(one, marks=pytest.mark.long) for one in (jnp.float16, jnp.float32))]
)
@pytest.mark.parametrize("name", problems.sampled())
def test_a_method_keeps_the_types_of_a_model_in_lower_precision(name, dtype):
    task = halved(problems.task_of(name), dtype)
    algorithm, data = fm.federate(fm.METHODS[name](task), fm.Federation(cohort_size=3, devices=1, lanes=1)), problems.data()
    state = jax.eval_shape(algorithm.init, KEY, data)
    if name == "perfedavg" and dtype != jnp.float32:  # differences of gradients vanish in 16 bits
        with pytest.raises(ValueError, match="compute in float32"):
            jax.eval_shape(algorithm.round, KEY, state, data)
        return
    after, _ = jax.eval_shape(algorithm.round, KEY, state, data)
    assert problems.forms(after) == problems.forms(state)

    def tested(state, x):
        return algorithm.predict(algorithm.personalize(KEY, state, data.client(1)["test_support"], 1), x)

    jax.eval_shape(tested, state, data.x[:3])


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fedadam", "b1", 0.9),
        ("fedavgm", "momentum", 0.9),
        ("feddyn", "clip", 1.0),
        ("fednova", "momentum", 0.5),
        ("pfedme", "outer_lr", 0.005),
        ("pfedme", "prox_weight", 15.0),
    ],
)
def test_a_rate_that_is_traced_keeps_the_types_too(name, option, value):
    """A traced rate is an array of float32 or more, which makes sums with 16 bits wider; a Python number does not."""
    task, data = halved(problems.task_of(name), jnp.bfloat16), problems.data()

    def one_round(rate):
        algorithm = fm.federate(fm.METHODS[name](task, **{option: rate}), fm.Federation(cohort_size=3, devices=1, lanes=1))
        state = algorithm.init(KEY, data)
        return state, algorithm.round(KEY, state, data)[0]

    before, after = jax.eval_shape(one_round, jnp.float32(value))
    assert problems.forms(after) == problems.forms(before)


@pytest.mark.parametrize(("name", "dtype"), [("scaffold", jnp.bfloat16), ("imaml", jnp.float16)])
def test_a_round_in_half_precision_is_near_that_in_double_precision(name, dtype):
    options = {"scaffold": {"lr": 0.3}, "imaml": {"inner_lr": 0.1, "outer_lr": 0.1}}[name]
    states = []
    for task in (problems.task(), halved(problems.task(), dtype)):
        algorithm = fm.federate(fm.METHODS[name](task, **options), fm.Federation(cohort_size=7, devices=1))
        state = algorithm.init(KEY, problems.data())
        after, _ = jax.jit(algorithm.round)(KEY, state, problems.data())
        states.append((state.model, after.model))
    moved = problems.distance(*states[0])
    assert moved > 0.05
    assert problems.distance(states[0][1], states[1][1]) < 0.2 * moved


def test_a_client_whose_loss_is_not_a_number_sends_no_number():
    """The implicit gradient of NaN is NaN, not 0: only so can the server see that it must not count it."""
    x = np.asarray(problems.data().x).copy()
    start, size = (int(part["train"][3]) for part in (problems.data().start, problems.data().size))
    x[start : start + size] = np.nan
    data = dataclasses.replace(problems.data(), x=x)
    method = fm.imaml(problems.task(), inner_lr=0.1)
    algorithm = fm.federate(method, fm.Federation(cohort_size=7, devices=1))
    state = algorithm.init(KEY, data)
    received = fm.contract.Received(state.model, (), (), state.round, jnp.zeros((), bool), KEY)
    trained = jax.jit(lambda i: method.client(KEY, received, data.client(i)))
    assert all(bool(jnp.all(jnp.isnan(leaf))) for leaf in jax.tree.leaves(trained(3).model))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(trained(5).model))


def products(jaxpr):
    """The precision of every matrix product of a program, with the shapes of its operands."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"], [variable.aval.shape for variable in equation.invars]
        for value in equation.params.values():
            for leaf in jax.tree.leaves(value, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
                inner = getattr(leaf, "jaxpr", leaf)
                if hasattr(inner, "eqns"):
                    yield from products(inner)


@pytest.mark.parametrize("name", ["fedamp", "mocha", "cfl", "fedpac", "scaffold"])
def test_an_accelerator_multiplies_as_exactly_at_the_server_as_at_clients(name):
    with runtime.compiling_for("gpu"):
        algorithm, data = fm.federate(fm.METHODS[name](problems.task()), fm.Federation(cohort_size=3)), problems.data()
        state = jax.eval_shape(algorithm.init, KEY, data)
        found = list(products(jax.make_jaxpr(algorithm.round)(KEY, state, data).jaxpr))
    assert found and not [shapes for precision, shapes in found if precision is None]


def test_models_of_16_bits_that_are_nearly_alike_have_a_similarity():
    """In 16 bits 0.9999 is 1, whose logarithm pFedSim would take at 0."""
    rows = jax.random.normal(jax.random.key(0), (1, 3, 8)) + 1e-3 * jax.random.normal(jax.random.key(1), (4, 3, 8))
    exact = similar_clients(cosines_of(rows.astype(jnp.float32)), jnp.ones(4, bool))
    for form in (jnp.bfloat16, jnp.float16):
        found = similar_clients(cosines_of(rows.astype(form)), jnp.ones(4, bool))
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, atol=0.02)
        assert np.isfinite(similar_clients(jnp.ones((4, 4), form), jnp.ones(4, bool))).all()
