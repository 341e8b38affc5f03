import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.keys import tagged
from tests import problems
from tests.methods.common import KEY, build, compiled, gradient, of, personalized, run, start, step

OPTIONS = {"devices": 1, "lr": 0.1, "batch_size": 8}


def l2gd(**options):
    return build("l2gd", **(OPTIONS | {"cohort_size": 7} | options))


def coins(count, probability):
    """Whether each round pulls, as the rounds of `run` see it."""
    keys = [jax.random.fold_in(KEY, r) for r in range(count)]
    return [bool(jax.random.bernoulli(tagged(tagged(key, "shared"), "coin"), probability)) for key in keys]


def test_without_a_pull_rounds_that_train_are_local_training_and_others_do_nothing():
    algorithm, alone = l2gd(pull=0.0, cohort_size=4), build("local_only", cohort_size=4, **OPTIONS)
    sides = coins(6, 0.5)
    assert 0 < sum(sides) < 6
    state, expected = start(algorithm), start(alone)
    one, other = compiled(algorithm), compiled(alone)
    for r, pulls in enumerate(sides):
        key = jax.random.fold_in(KEY, r)
        before = state
        state, _ = one(key, state, problems.data())
        if pulls:
            assert problems.leaves_equal(before.personal, state.personal)
        else:
            expected, _ = other(key, expected, problems.data())
    assert problems.distance(state.personal, expected.personal) < 1e-12


@pytest.mark.parametrize(("pull_per", "pull"), [("step", 6.0), ("round", 1.5)])
def test_a_round_that_pulls_moves_every_model_towards_the_mean(pull_per, pull):
    # Share α λ / (n p) = lr λ (1 - p) / p, times the steps of 2 passes in batches of 8; never past the mean.
    algorithm = l2gd(pull=pull, pull_per=pull_per, epochs=2, new_client_epochs=0)
    steps = 2 * np.ceil(np.asarray(problems.data().sizes("train")) / 8) if pull_per == "round" else np.ones(7)
    share = np.minimum(0.1 * pull * steps, 1)
    assert pull_per == "step" or (np.any(share == 1) and np.any(share < 1))
    r = next(r for r, pulls in enumerate(coins(9, 0.5)) if pulls and r > 0)
    state = run(algorithm, r)
    after, info = algorithm.round(jax.random.fold_in(KEY, r), state, problems.data())
    np.testing.assert_allclose(np.asarray(info.metrics["pulled"])[np.argsort(info.ids)], share)
    mean = jax.tree.map(lambda pool: jnp.mean(pool, 0, keepdims=True), state.personal)
    expected = jax.tree.map(lambda x, m: x - share.reshape((-1,) + (1,) * (x.ndim - 1)) * (x - m), state.personal, mean)
    assert problems.distance(state.personal, after.personal) > 1e-4
    assert problems.distance(after.personal, expected) < 1e-12


def test_a_new_client_starts_at_the_mean_and_a_known_one_has_its_own():
    algorithm = l2gd(pull=0.5, new_client_epochs=0)
    state = run(algorithm, 4)
    assert problems.leaves_equal(personalized(algorithm, state, None, of_client=2), state.extra)
    assert problems.leaves_equal(personalized(algorithm, state, 2), of(state.personal, 2))


def test_a_new_client_trains_from_the_mean_and_a_known_one_does_not_train():
    algorithm = l2gd(pull=0.5, new_client_epochs=3, batch_size=128)
    state = run(algorithm, 4)
    expected = state.extra
    for _ in range(3):
        expected = step(expected, 0.1, gradient(expected, 2, "test_support"))
    assert problems.distance(personalized(algorithm, state, None, of_client=2), expected) < 1e-12
    assert problems.leaves_equal(personalized(algorithm, state, 2), of(state.personal, 2))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="probability=1"):
        l2gd(probability=1)
    with pytest.raises(ValueError, match="pull=100"):
        l2gd(pull=100)
    with pytest.raises(ValueError, match="pull=-1"):
        l2gd(pull=-1)
    with pytest.raises(ValueError, match="pull_per='epoch'"):
        l2gd(pull_per="epoch")


def test_the_pull_of_selected_clients_follows_their_own_sizes():
    some = np.array([6, 2, 4])
    data = problems.data().select(some)
    algorithm = build("l2gd", lr=0.01, pull=1.0, probability=0.999, batch_size=8, cohort_size=3, devices=1)
    _, info = algorithm.round(KEY, algorithm.init(KEY, data), data)
    sizes = np.asarray(problems.data().sizes("train"))[np.asarray(info.ids)]
    np.testing.assert_allclose(info.metrics["pulled"], 0.01 * 1.0 * 0.001 / 0.999 * -(-sizes // 8), rtol=1e-5)
