import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.methods.fedamp import attention, cosine_attention, warn_if_capped
from tests import problems
from tests.methods.common import FULL, KEY, build, gradient, of, personalized, run, start, step

OPTIONS = {"cohort_size": 5, "devices": 1, "lr": 0.1, "batch_size": 8, "epochs": 2}
WHOLE = {**FULL, "step": 0.5, "prox_weight": 0.4, "width": 2.0, "new_client_epochs": 0}
W = np.random.default_rng(0).normal(size=(4, 6))
ALL = jnp.ones(4, bool)


def fedamp(**options):
    return build("fedamp", **(OPTIONS | options))


def test_attention_is_the_kernels_derivative():
    # A(x) = 1 - exp(-x / σ), so A'(x) = exp(-x / σ) / σ.
    matrix = np.asarray(attention(jnp.asarray(W @ W.T), ALL, step=0.8, width=5.0, relative=False))
    for i in range(4):
        others = [0.8 * np.exp(-np.sum((W[i] - W[j]) ** 2) / 5) / 5 for j in range(4) if j != i]
        np.testing.assert_allclose(np.delete(matrix[i], i), others, rtol=1e-10)
        np.testing.assert_allclose(matrix[i, i], 1 - sum(others), rtol=1e-10)


def test_attention_never_leaves_a_negative_share_and_relative_distances_have_no_unit():
    matrix = np.asarray(attention(jnp.asarray(W @ W.T), ALL, step=1e4, width=5.0, relative=False))
    assert matrix.min() >= 0
    np.testing.assert_allclose(matrix.sum(1), 1)
    small, large = (attention(jnp.asarray(c * W @ W.T), ALL, step=0.5, width=1.0, relative=True) for c in (1e-3, 1e6))
    np.testing.assert_allclose(small, large, rtol=1e-9)


@pytest.mark.parametrize("count", [2, 5, 20, 50])
def test_by_default_a_client_has_a_share_in_its_own_mixture_whatever_the_cohort(count):
    """ξ_ij = exp(-d_ij / σ) / C of the C that returned, so the own share is at least 1 / C; for a step of 1 it is 0."""
    w = np.random.default_rng(1).normal(size=(count + 1, 30))
    valid = np.arange(count + 1) < count
    options = {"width": 1.0, "relative": True}
    matrix = np.asarray(attention(jnp.asarray(w @ w.T), jnp.asarray(valid), step=None, **options))[:count, :count]
    assert np.diag(matrix).min() >= 1 / count
    square = np.sum((w[:count, None] - w[None, :count]) ** 2, -1)
    square = square / (square.sum() / (count * (count - 1)))
    expected = np.exp(-square) / count
    np.testing.assert_allclose(matrix[~np.eye(count, dtype=bool)], expected[~np.eye(count, dtype=bool)], rtol=1e-10)
    fixed = np.asarray(attention(jnp.asarray(w @ w.T), jnp.asarray(valid), step=1.0, **options))[:count, :count]
    assert (np.diag(fixed).max() < 1e-12) == (count >= 5)


def test_a_step_that_must_be_capped_is_warned_about():
    """(C - 1) exp(-1) > 1 from C = 4 on."""
    with pytest.warns(UserWarning, match=r"fedamp: with step=1\.0 and width=1\.0 .* sum to 1\.47 or more in a cohort of 5"):
        algorithm = problems.build("fedamp", step=1.0, cohort_size=5, devices=1)
        jax.eval_shape(algorithm.round, KEY, start(algorithm), problems.data())
    for alpha, count in ((1.0, 3), (0.1, 20), (None, 50)):
        warn_if_capped(alpha, 1.0, count)


def test_heuristic_attention_is_a_softmax_of_cosines():
    matrix = np.asarray(cosine_attention(jnp.asarray(W @ W.T), ALL, width=3.0, own_share=0.25))
    unit = W / np.linalg.norm(W, axis=1, keepdims=True)
    for i in range(4):
        score = np.exp(3 * np.delete(unit @ unit[i], i))
        np.testing.assert_allclose(np.delete(matrix[i], i), 0.75 * score / score.sum(), rtol=1e-10)
        assert matrix[i, i] == 0.25


def test_a_client_that_did_not_return_is_in_no_mixture():
    valid = jnp.array([True, False, True, True])
    for matrix in (
        attention(jnp.asarray(W @ W.T), valid, step=1.0, width=5.0, relative=True),
        cosine_attention(jnp.asarray(W @ W.T), valid, width=1.0, own_share=0.5),
        cosine_attention(jnp.asarray(W @ W.T), jnp.array([False, True, False, False]), width=1.0, own_share=0.5),
    ):
        np.testing.assert_allclose(jnp.sum(matrix, 1), 1)
        assert not np.any(np.delete(np.asarray(matrix)[:, 1], 1))


@pytest.mark.parametrize("kernel", ["exponential", "cosine"])
def test_without_the_pull_it_is_local_training(kernel):
    state = run(fedamp(prox_weight=0.0, kernel=kernel), 3)
    assert problems.distance(state.personal, run(build("local_only", **OPTIONS), 3).personal) < 1e-12


def test_with_all_weight_on_the_own_model_a_client_is_pulled_to_where_its_round_starts():
    state = run(build("heur_fedamp", own_share=1.0, prox_weight=0.5, **OPTIONS), 3)
    other = run(build("fedprox", personal="all", prox_weight=0.5, **OPTIONS), 3)
    assert problems.distance(state.personal, other.personal) < 1e-12


def test_a_round_written_out():
    algorithm = fedamp(**WHOLE)
    state = run(algorithm, 2)
    after = run(algorithm, 1, state)
    trained = []
    for i in range(7):
        theta, cloud = of(state.personal, i), of(state.memory, i)
        for _ in range(2):
            pulled = jax.tree.map(lambda g, t, u: g + 0.8 * (t - u), gradient(theta, i), theta, cloud)
            theta = step(theta, 0.1, pulled)
        assert problems.distance(of(after.personal, i), theta) < 1e-12
        trained.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(theta)]))
    flat = np.stack(trained)
    matrix = attention(jnp.asarray(flat @ flat.T), jnp.ones(7, bool), step=0.5, width=2.0, relative=True)
    clouds = np.concatenate([np.reshape(leaf, (7, -1)) for leaf in jax.tree.leaves(after.memory)], 1)
    np.testing.assert_allclose(clouds, matrix @ flat, atol=1e-9)


def test_a_round_reports_the_own_shares():
    state = start(fedamp(cohort_size=5))
    shares = []
    for alpha in (None, 1e4):
        method = fm.fedamp(problems.task(), relative=False, step=alpha)
        info = jax.jit(fm.federate(method, fm.Federation(cohort_size=5, devices=1)).round)(KEY, state, problems.data())[1]
        shares.append(info.metrics["own_share"])
    assert np.all(shares[0] >= 0.2) and np.all(np.abs(shares[1]) < 1e-12)


def test_a_new_client_starts_at_the_mean_of_the_cohorts_models():
    algorithm = fedamp(**WHOLE)
    state = run(algorithm, 1)
    sizes = np.asarray(problems.data().sizes("train"), float)
    mean = jax.tree.map(lambda pool: jnp.tensordot(sizes / sizes.sum(), pool, 1), state.personal)
    assert problems.distance(personalized(algorithm, state, None, of_client=0), mean) < 1e-12
    assert problems.leaves_equal(personalized(algorithm, state, 2), of(state.personal, 2))
    assert problems.leaves_equal(personalized(algorithm, start(algorithm), None, of_client=0), start(algorithm).model)


def test_a_new_client_is_pulled_to_the_mean_as_it_trains_and_a_known_one_does_not_train():
    algorithm = fedamp(**WHOLE | {"new_client_epochs": 2})
    state = run(algorithm, 2)
    theta = state.extra
    for _ in range(2):
        pulled = jax.tree.map(lambda g, t, u: g + 0.8 * (t - u), gradient(theta, 0, "test_support"), theta, state.extra)
        theta = step(theta, 0.1, pulled)
    assert problems.distance(personalized(algorithm, state, None, of_client=0), theta) < 1e-12
    assert problems.leaves_equal(personalized(algorithm, state, 2), of(state.personal, 2))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="prox_weight=-1"):
        fedamp(prox_weight=-1)
    with pytest.raises(ValueError, match="kernel='box'"):
        fedamp(kernel="box")
