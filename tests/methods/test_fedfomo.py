import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.methods.fedfomo import takeover
from tests import problems
from tests.methods.common import FULL, build, gradient, loss, of, personalized, run, start, step

OPTIONS = {"devices": 1, "lr": 0.1, "batch_size": 8, "epochs": 1}


def fedfomo(**options):
    return build("fedfomo", **(OPTIONS | options))


def length(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def test_weights_are_gains_by_distance_and_only_the_better_models_count():
    weight, share = takeover(jnp.array([0.6, -0.5, 0.2, 9.0]), jnp.array([2.0, 1.0, 1.0, 1.0]), jnp.array([1, 1, 1, 0], bool))
    np.testing.assert_allclose(weight, [0.3, -0.5, 0.2, 0])
    np.testing.assert_allclose(share, [0.6, 0, 0.4, 0])


def test_where_no_model_is_better_a_client_keeps_its_own():
    _, share = takeover(jnp.array([-1.0, 0.0, jnp.nan]), jnp.array([1.0, 0.0, 1.0]), jnp.ones(3, bool))
    np.testing.assert_array_equal(share, 0)


def test_alone_in_its_cohort_a_client_trains_locally():
    state = run(fedfomo(cohort_size=1, train_view="train"), 4)
    alone = run(build("local_only", cohort_size=1, **OPTIONS), 4)
    assert problems.distance(state.personal, alone.personal) < 1e-12


def test_a_round_written_out():
    algorithm = fedfomo(**{**FULL, "lr": 0.3})
    state = run(algorithm, 1)
    after = run(algorithm, 1, state)
    trained = [step(of(state.personal, i), 0.3, gradient(of(state.personal, i), i, "query")) for i in range(7)]
    took = 0
    for i in range(7):
        weights = np.zeros(7)
        for n in range(7):
            if n != i:
                apart = length(jax.tree.map(jnp.subtract, trained[n], trained[i]))
                weights[n] = (loss(trained[i], i, "support") - loss(trained[n], i, "support")) / apart
        np.testing.assert_allclose(after.memory[i] - state.memory[i], weights, atol=1e-10)
        share = np.maximum(weights, 0)
        share = share / share.sum() if share.sum() > 0 else share
        took += share.sum() > 0
        expected = jax.tree.map(
            lambda *leaves, share=share, i=i: (
                sum(s * leaf for s, leaf in zip(share, leaves, strict=True)) + (1 - share.sum()) * leaves[i]
            ),
            *trained,
        )
        assert problems.distance(of(after.personal, i), expected) < 1e-10
    assert took >= 3


def test_a_client_compares_with_the_models_that_it_downloads_and_preferences_choose_these():
    algorithm = fedfomo(**{**FULL, "lr": 0.3}, downloads=2, exploration=0.0)
    state = start(algorithm)
    liked = jnp.zeros((7, 7)).at[:, 2].set(5.0).at[:, 5].set(4.0)
    after = run(algorithm, 1, state._replace(memory=liked, seen=jnp.ones(7, bool)))
    changed = np.asarray(after.memory != liked)
    assert changed[[0, 1, 3, 4, 6]][:, [0, 1, 3, 4, 6]].sum() == 0
    assert changed[[0, 1, 3, 4, 6]][:, [2, 5]].all()


def test_a_new_client_weighs_all_models_on_its_support_set():
    algorithm = fedfomo(**{**FULL, "lr": 0.3})
    state = run(algorithm, 2)
    before = loss(state.model, 3, "test_support")
    gains = np.array([before - loss(of(state.personal, n), 3, "test_support") for n in range(7)])
    apart = np.array([length(jax.tree.map(jnp.subtract, of(state.personal, n), state.model)) for n in range(7)])
    share = np.maximum(gains / apart, 0)
    assert share.sum() > 0
    expected = jax.tree.map(lambda pool: jnp.tensordot(share / share.sum(), pool, 1), state.personal)
    assert problems.distance(personalized(algorithm, state, None, of_client=3), expected) < 1e-10


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="exploration=2"):
        fedfomo(exploration=2)
    with pytest.raises(ValueError, match="no view 'validation'"):
        run(fedfomo(validation_view="validation", cohort_size=2), 1)
