import jax
import jax.numpy as jnp
import pytest

from tests import problems
from tests.methods.common import FULL, KEY, build, compiled, gradient, mean, of, run, start, step


def scaffold(**options):
    return build("scaffold", **({**FULL, "lr": 0.2} | options))


def with_controls(state):
    """A state of clients that have taken part, with random control variates, and their mean at the server."""
    keys = iter(jax.random.split(KEY, 99))
    memory = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), state.memory)
    mean_control = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), memory)
    return state._replace(memory=memory, extra=mean_control, seen=jnp.ones_like(state.seen))


@pytest.mark.parametrize("control", ["path", "gradient"])
def test_one_full_step_of_all_clients_is_fedsgd_whatever_the_controls_are(control):
    # The corrections c - c_i sum to 0 over all clients when c is their mean.
    algorithm = scaffold(control=control)
    state = with_controls(start(algorithm))
    after = run(algorithm, 1, state)
    gradients = [gradient(state.model, client) for client in range(7)]
    assert problems.distance(after.model, step(state.model, 0.2, mean(gradients))) < 1e-12
    # Both options renew c_i to the gradient that the one step went along, and c to their mean.
    for client in range(7):
        assert problems.distance(of(after.memory, client), gradients[client]) < 1e-10
    assert problems.distance(after.extra, mean(gradients)) < 1e-10


def test_two_steps_and_a_part_of_the_clients_written_out():
    algorithm = scaffold(epochs=2, cohort_size=3, server_lr=0.5)
    state = with_controls(start(algorithm))
    after, info = compiled(algorithm)(KEY, state, problems.data())
    moved, changes = [], []
    for client in info.ids.tolist():
        own, y = of(state.memory, client), state.model
        for _ in range(2):
            y = step(y, 0.2, jax.tree.map(lambda g, c, ci: g + c - ci, gradient(y, client), state.extra, own))
        renewed = jax.tree.map(lambda ci, c, x, y: ci - c + (x - y) / 0.4, own, state.extra, state.model, y)
        assert problems.distance(of(after.memory, client), renewed) < 1e-10
        moved.append(jax.tree.map(jnp.subtract, state.model, y))
        changes.append(jax.tree.map(jnp.subtract, renewed, own))
    assert problems.distance(after.model, step(state.model, 0.5, mean(moved))) < 1e-12
    expected = jax.tree.map(lambda c, change: c + 3 / 7 * change, state.extra, mean(changes))
    assert problems.distance(after.extra, expected) < 1e-10


def test_the_servers_control_variate_is_a_plain_sum_whatever_the_weighting():
    equal, by_samples = (run(scaffold(cohort_size=3, weighting=weighting), 1) for weighting in ("uniform", "samples"))
    assert problems.distance(equal.model, by_samples.model) > 1e-4
    assert problems.distance(equal.extra, by_samples.extra) < 1e-12


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match="control='III'"):
        scaffold(control="III")
