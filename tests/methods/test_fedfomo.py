import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.methods.fedfomo import downloaded, takeover
from tests import problems
from tests.methods.common import FULL, KEY, build, gradient, loss, of, personalized, run, start, step

OPTIONS = {"devices": 1, "lr": 0.1, "batch_size": 8, "epochs": 1}


def fedfomo(**options):
    return build("fedfomo", **(OPTIONS | options))


def length(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def absolute(tree):
    return float(sum(np.sum(np.abs(leaf)) for leaf in jax.tree.leaves(tree)))


def test_weights_are_gains_by_distance_and_only_the_better_models_count():
    weight, share = takeover(jnp.array([0.6, -0.5, 0.2, 9.0]), jnp.array([2.0, 1.0, 1.0, 1.0]), jnp.array([1, 1, 1, 0], bool))
    np.testing.assert_allclose(weight, [0.3, -0.5, 0.2, 0])
    np.testing.assert_allclose(share, [0.6, 0, 0.4, 0])


def test_where_no_model_is_better_a_client_keeps_its_own():
    _, share = takeover(jnp.array([-1.0, 0.0, jnp.nan]), jnp.array([1.0, 0.0, 1.0]), jnp.ones(3, bool))
    np.testing.assert_array_equal(share, 0)


@pytest.mark.parametrize("reference", ["before", "trained"])
def test_alone_in_its_cohort_a_client_trains_locally(reference):
    """By the paper, as long as training lowers its validation loss, which it does here; else the round is undone."""
    options = {"cohort_size": 1, **OPTIONS, "batch_size": 128, "train_view": "train", "validation_view": "train"}
    state = run(fedfomo(**options, reference=reference), 4)
    alone = run(build("local_only", **{**OPTIONS, "cohort_size": 1, "batch_size": 128}), 4)
    assert problems.distance(state.personal, alone.personal) < 1e-12


@pytest.mark.parametrize("reference", ["before", "trained"])
def test_training_that_makes_a_client_worse_is_undone_by_the_papers_rule_alone(reference):
    """One client, and a step so long that its validation loss rises."""
    algorithm = fedfomo(**{**FULL, "cohort_size": 1, "lr": 300.0}, reference=reference, validation_view="train")
    before, after = start(algorithm), run(algorithm, 1)
    (client,) = np.flatnonzero(after.seen)
    trained = step(before.model, 300.0, gradient(before.model, client, "query"))
    assert loss(trained, client) > loss(before.model, client)
    expected = before.model if reference == "before" else trained
    assert problems.distance(of(after.personal, client), expected) < 1e-10


@pytest.mark.parametrize("reference", ["before", "trained"])
def test_a_round_written_out(reference):
    algorithm = fedfomo(**{**FULL, "lr": 0.3}, reference=reference)
    state = run(algorithm, 1)
    after = run(algorithm, 1, state)
    before = [of(state.personal, i) for i in range(7)]
    trained = [step(before[i], 0.3, gradient(before[i], i, "query")) for i in range(7)]
    took = kept = 0
    for i in range(7):
        compared = before[i] if reference == "before" else trained[i]
        weights = np.zeros(7)
        for n in range(7):
            if n != i or reference == "before":
                apart = length(jax.tree.map(jnp.subtract, trained[n], compared))
                weights[n] = (loss(compared, i, "support") - loss(trained[n], i, "support")) / apart
        np.testing.assert_allclose(after.memory.preference[i] - state.memory.preference[i], weights, atol=1e-10)
        share = np.maximum(weights, 0)
        share = share / share.sum() if share.sum() > 0 else share
        took += share.sum() > 0
        kept += share[i] > 0
        expected = jax.tree.map(
            lambda own, *leaves, share=share: sum(s * w for s, w in zip(share, leaves, strict=True)) + (1 - share.sum()) * own,
            compared,
            *trained,
        )
        assert problems.distance(of(after.personal, i), expected) < 1e-10
    assert took >= 3
    # By the paper, a client's own training counts beside that of others.
    assert (kept >= 3) == (reference == "before")


def test_each_download_has_a_coin_of_its_own():
    """Of 2 downloads among 6 with preferences 5 > 4 > ...: the numbers of explored ones are binomial, not both or none."""
    preference, valid = jnp.arange(6.0), jnp.array([1, 1, 1, 1, 0, 1], bool)
    draw = jax.jit(jax.vmap(lambda key: downloaded(key, preference, valid, 2, 0.5)))
    chosen = np.asarray(draw(jax.random.split(KEY, 4000)))
    assert np.all(chosen[:, 0] != chosen[:, 1]) and not np.any(chosen == 4)
    # The first is 5 unless its coin explores (1/2) and draws one of the other 4 (4/5).
    assert np.mean(chosen[:, 0] == 5) == pytest.approx(0.6, abs=0.03)
    # The second by preference is 3 after 5, or 5 after another; exploring draws one of the 4 that are left.
    first = chosen[:, 0] == 5
    assert np.mean(chosen[first, 1] == 3) == pytest.approx(0.5 + 0.5 / 4, abs=0.03)
    assert np.mean(chosen[~first, 1] == 5) == pytest.approx(0.5 + 0.5 / 4, abs=0.04)
    assert np.asarray(downloaded(KEY, preference, valid, 3, 0.0)).tolist() == [5, 3, 2]
    assert sorted(np.asarray(downloaded(KEY, preference, valid, None, 1.0)).tolist()) == list(range(6))


def test_a_client_compares_with_the_models_that_it_downloads_and_preferences_choose_these():
    algorithm = fedfomo(**{**FULL, "lr": 0.3}, downloads=2, exploration=0.0)
    state = start(algorithm)
    liked = jnp.zeros((7, 7)).at[:, 2].set(5.0).at[:, 5].set(4.0)
    memory = state.memory._replace(
        preference=liked, before=jax.tree.map(lambda leaf: jnp.repeat(leaf[None], 7, 0), state.model)
    )
    after = run(algorithm, 1, state._replace(memory=memory, seen=jnp.ones(7, bool)))
    changed = np.asarray(after.memory.preference != liked)
    # The own trained model is always weighed.
    assert (changed[[0, 1, 3, 4, 6]][:, [0, 1, 3, 4, 6]] == np.eye(5, dtype=bool)).all()
    assert changed[[0, 1, 3, 4, 6]][:, [2, 5]].all()


def test_exploration_falls_round_by_round_to_none():
    """With probabilities 1, 0.5 and then 0, preferences decide nothing in the first round and everything from the third on."""
    algorithm = fedfomo(**{**FULL, "lr": 0.3}, downloads=1, exploration=1.0, exploration_decay=0.5)
    state = start(algorithm)
    before = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], 7, 0), state.model)
    memory = state.memory._replace(preference=jnp.zeros((7, 7)).at[:, 2].set(5.0), before=before)
    state = state._replace(memory=memory, seen=jnp.ones(7, bool))
    others, preferred = [0, 1, 3, 4, 5, 6], {}
    for number in (0, 1, 2, 3, 4):
        after = run(algorithm, 1, state._replace(round=jnp.full_like(state.round, number)))
        preferred[number] = np.asarray(after.memory.preference != memory.preference)[others, 2].sum()
    assert [preferred[number] == 6 for number in (0, 2, 3, 4)] == [False, True, True, True]
    # A half of the 6 explores, and one of these 3 in 6 draws client 2.
    assert preferred[0] < preferred[1] < 6


@pytest.mark.parametrize(("distance", "length"), [("euclidean", length), ("absolute", absolute)])
def test_a_new_client_weighs_all_models_on_its_support_set(distance, length):
    algorithm = fedfomo(**{**FULL, "lr": 0.3}, distance=distance)
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
    with pytest.raises(ValueError, match="reference='after'"):
        fedfomo(reference="after")
    with pytest.raises(ValueError, match="no view 'validation'"):
        run(fedfomo(validation_view="validation", cohort_size=2), 1)
