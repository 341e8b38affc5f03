"""What a study will cost: FLOPs against a count by hand, and the rest of an estimate."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.methods import METHODS
from fedjax_meta.study import estimate, flops
from fedjax_meta.study.tuning import points_of
from tests import problems
from tests.study.common import TREE, study
from tests.test_contract import make


def counted(function, *arguments):
    results, found = jax.jit(flops.counted(function))(*arguments)
    expected = function(*arguments)
    assert problems.distance(results, expected) < 1e-6  # counting changes no result
    return float(found)


def test_products_are_counted_as_often_as_loops_turn_and_branches_are_taken():
    a, b = np.ones((2, 3)), np.ones((3, 5))
    assert counted(lambda a, b: a @ b, a, b) == 2 * 2 * 3 * 5
    assert counted(lambda a, n: jax.lax.fori_loop(0, n, lambda i, s: s + jnp.sum(a @ a.T), 0.0), a, 7) == 7 * 2 * 2 * 2 * 3
    assert counted(lambda a: jax.lax.scan(lambda s, row: (s + row @ row, row), 0.0, a), a) == 2 * 2 * 3
    for taken, wanted in ((True, 24), (False, 0)):
        assert counted(lambda a, t: jax.lax.cond(t, lambda: jnp.sum(a @ a.T), lambda: 0.0), a, taken) == wanted
    assert counted(jax.grad(jax.checkpoint(lambda a: jnp.sum(jnp.sin(a @ np.ones((3, 5)))))), a) > 2 * 2 * 3 * 5
    # Three lanes with counters of their own turn as often as the longest one, and each keeps its own result.
    lanes = jax.vmap(lambda a, n: jax.lax.fori_loop(0, n, lambda i, s: s + jnp.sum(a @ a.T), 0.0))
    assert counted(lanes, np.arange(18.0).reshape(3, 2, 3), np.array([1, 5, 3])) == 5 * 3 * 2 * 2 * 2 * 3
    image, kernel = np.ones((1, 6, 6, 2)), np.ones((3, 3, 2, 4))

    def convolution(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert counted(convolution, image, kernel) == 2 * (4 * 4 * 4) * (3 * 3 * 2)


def test_products_whose_results_nobody_uses_do_not_count():
    """Also those in loops, and where what they would give to is carried on."""
    a = np.ones((2, 3))

    def function(a, n):
        unused = jnp.sum(a @ a.T @ a)

        def turn(i, carry):
            used, _, further = carry
            return used + jnp.sum(a @ a.T), further, jnp.sum(jnp.outer(a[0], a[1]) @ a.T) + unused

        return jax.lax.fori_loop(0, n, turn, (0.0, 0.0, 0.0))[0]

    assert counted(function, a, 7) == 7 * 2 * 2 * 2 * 3
    # The derivative along a direction of a gradient needs no gradient of the parameters at the point itself.
    w, x = np.ones((3, 4)), np.ones((5, 3))
    loss = lambda w: jnp.sum(jnp.sin(x @ w))  # noqa: E731
    product = 2 * 5 * 3 * 4
    assert counted(lambda w: jax.jvp(jax.grad(loss), (w,), (w,))[1], w) == 3 * product  # x w, x v, and x^T of what follows


def test_products_that_cannot_be_counted_are_refused():
    algorithm, data = make("fedavg", devices=2, lanes=1), problems.data()
    with pytest.raises(ValueError, match=r"products inside shard_map cannot be counted.*devices=1"):
        flops.of_rounds(algorithm, data, 1)


def test_rounds_are_counted_without_what_their_count_does_not_depend_on():
    """CG ends when it has converged, so that its parameters count; FedALA's count needs to know whom the server has seen."""

    def trained(algorithm, data, rounds):
        key, found = jax.random.key(3), []
        state, program = algorithm.init(key, data), jax.jit(flops.counted(algorithm.round))
        for number in range(rounds):
            (state, _), one = program(jax.random.fold_in(key, number), state, data)
            found.append(float(one))
        return found

    data, federation = problems.data(), fm.Federation(cohort_size=4, devices=1, lanes=1)
    estimator = partial(fm.implicit.implicit_gradient, prox_weight=1.0, cg_steps=20, tolerance=0.03)
    converged = METHODS["fedmeta"](problems.task(), estimator=estimator, inner_steps=2)
    for method in (converged, *(METHODS[name](problems.task(), batch_size=32) for name in ("fedala", "ditto", "fedpac"))):
        algorithm = fm.federate(method, federation)
        found = flops.of_rounds(algorithm, data, 4, seed=3).tolist()
        assert found == trained(algorithm, data, 4) and len(set(found)) > 1


def test_a_round_of_a_linear_model_costs_what_its_gradients_cost():
    """d=64 pixels, K=10: a batch of B takes 2BdK forwards and 2BdK backwards; the gradient of the samples is not needed."""
    clients = study().scenarios["pairs"].build()
    found = estimate.of_system(study(), "pairs", "local", clients)
    sizes, batch, cohort = np.asarray(clients.train.size["train"]), 20, 4
    a_batch = 4 * batch * 64 * 10
    least, most = (np.sort(-(-sizes // batch))[::step][:cohort].mean() * a_batch for step in (1, -1))
    assert least * 0.99 <= found.flops <= most * 1.01
    assert (found.shared, found.personal, found.rounds, found.programs) == (650, 650, 4 * 2, 3)
    assert found.round_seconds > 0 and found.seconds(2) == pytest.approx(found.seconds(1) / 2)
    assert found.traffic == fm.costs.traffic(study().system("local").build(clients.task), clients.train)


def test_rounds_of_a_method_that_learns_weights_of_known_clients_cost_more():
    """FedALA learns its weights where a client was there before, so that its first round costs what FedAvg's costs."""
    data, found = problems.data(), {}
    for name in ("fedavg", "fedala"):
        method = METHODS[name](problems.task(), batch_size=32)
        algorithm = fm.federate(method, fm.Federation(cohort_size=data.num_clients, devices=1, lanes=1))
        found[name] = flops.of_rounds(algorithm, data, 3)
    assert found["fedavg"].shape == (3,) and len(set(found["fedavg"])) == 1
    assert found["fedala"][1] > 1.5 * found["fedala"][0] == 1.5 * found["fedavg"][0]


@pytest.mark.parametrize("name", problems.sampled({"fedpac"}))
def test_a_round_of_every_method_is_counted(name):
    algorithm, data = make(name, devices=1, lanes=1), problems.data()
    state = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    (after, _), found = jax.eval_shape(flops.counted(algorithm.round), jax.random.key(0), state, data)
    assert problems.forms(after) == problems.forms(state) and found.shape == ()


def test_places_that_poisson_sampling_leaves_empty_cost_nothing():
    fixed, poisson = study(), study(federation={"cohort_size": 8, "schedule": {"name": "poisson", "rate": 0.2}})
    clients = fixed.scenarios["pairs"].build()
    drawn = poisson.system("local", "pairs").build(clients).cohort(jax.random.key(0), 0, clients.train.num_clients)
    assert 0 < np.sum(np.asarray(drawn) >= 0) < 8
    of_client = [estimate.of_system(one, "pairs", "local", clients).flops for one in (fixed, poisson)]
    assert of_client[1] == pytest.approx(of_client[0], rel=0.02)
    for rate, expected in ((0.02, of_client[0]), (1e-7, np.nan)):
        rare = study(federation={"cohort_size": 4, "schedule": {"name": "poisson", "rate": rate}})
        first = rare.system("local", "pairs").build(clients).cohort(jax.random.key(0), 0, clients.train.num_clients)
        assert (np.asarray(first) < 0).all()
        assert estimate.of_system(rare, "pairs", "local", clients).flops == pytest.approx(expected, rel=0.1, nan_ok=True)


def test_tuning_counts():
    clients = study().scenarios["pairs"].build()
    found = estimate.of_system(study(), "pairs", "fedavg", clients)
    assert (found.rounds, found.programs) == (2 * 3 + 4 * 2, 6)
    assert points_of(study().system("fedavg")) == [{"lr": lr} for lr in TREE["systems"]["fedavg"]["grid"]["lr"]]


def test_every_run_that_is_trained_side_by_side_holds_a_state_and_each_device_one_round():
    clients = study().scenarios["pairs"].build()

    def memory(**changes):
        return estimate.of_system(study(**changes), "pairs", "local", clients).memory

    algorithm = study().system("local", "pairs").build(clients)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients.train)
    keys = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    of_state = sum(keys(leaf).nbytes for leaf in jax.tree.leaves(state))
    two, three = (memory(seeds=seeds, devices=1) for seeds in ([1, 2], [1, 2, 3]))
    assert three - two == of_state
    room = two - 2 * of_state
    assert room > 0 and memory(seeds=[1, 2, 3], devices=2) == 3 * of_state + 2 * room
