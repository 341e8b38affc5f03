"""Clipping and noise against closed forms, and what they do to a federation of clients with known uploads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import aggregate, privacy
from fedjax_meta.privacy import Privacy
from tests import problems
from tests.test_algorithm import START, N, _adds, _build, _gain, _run, _who

KEY = jax.random.key(2)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e15])
def test_a_tree_is_cut_to_the_norm_and_keeps_its_direction(scale):
    tree = {"a": scale * jnp.array([[1.0, -2.0]]), "b": scale * jnp.array(2.0, jnp.float32)}
    cut = privacy.clipped(tree, 0.5)
    factor = min(1, 0.5 / (3 * scale))
    assert problems.distance(cut, jax.tree.map(lambda leaf: factor * leaf, tree)) < 1e-6 * min(scale, 1)
    assert problems.forms(cut) == problems.forms(tree)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_cut_to_nothing(value):
    cut = privacy.clipped({"a": jnp.array([1.0, value]), "b": jnp.ones(())}, 1.0)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(cut))
    assert np.all(privacy.clipped({"a": jnp.zeros(2)}, 1.0)["a"] == 0)


def test_noise_has_the_deviation_asked_for_and_is_another_for_every_leaf():
    tree = {"a": jnp.full(20_000, 3.0), "b": jnp.full(20_000, 3.0), "c": jnp.full(20_000, 3.0, jnp.float32)}
    added = jax.tree.map(lambda leaf: np.asarray(leaf, float) - 3, privacy.noised(KEY, tree, 0.7))
    for noise in added.values():
        assert abs(noise.mean()) < 5 * 0.7 / np.sqrt(20_000)
        assert abs(noise.std() - 0.7) < 5 * 0.7 / np.sqrt(2 * 20_000)
    assert abs(np.corrcoef(added["a"], added["b"])[0, 1]) < 5 / np.sqrt(20_000)


def _lengths(norm):
    """Each client adds its gain to three shared numbers (two and the buffer): how much is left of that, [N]."""
    return np.minimum(1, norm / (np.sqrt(3) * _gain(np.arange(N)))) * _gain(np.arange(N))


def test_without_noise_the_server_moves_by_the_sum_of_what_was_cut_over_the_cohort():
    """Whatever the samples, and whoever does not return: the divisor is C = 4."""
    state, _ = _run(_build(privacy=Privacy(5.0, 0.0)))
    np.testing.assert_allclose(state.model["shared"], START["shared"] + _lengths(5.0).sum() / 4, rtol=1e-12)
    np.testing.assert_allclose(state.model["buffer"], 2 + _lengths(5.0).sum() / 4, rtol=1e-12)
    np.testing.assert_allclose(state.personal["own"], 5 + _gain(np.arange(N)), rtol=1e-12)
    client = _adds(weight=lambda data: jnp.where(_who(data) == 3, 0, data["train"].size))
    state, _ = _run(_build(client, privacy=Privacy(5.0, 0.0)))
    np.testing.assert_allclose(state.model["buffer"], 2 + _lengths(5.0)[:3].sum() / 4, rtol=1e-12)


def test_statistics_share_the_norm_and_count_as_the_cohort():
    client = _adds(statistics=lambda received, data, model: jnp.full((), 100.0))
    extras = {
        "init_extra": lambda *_: jnp.zeros(2),
        "update_extra": lambda state, mean, weight, clients: jnp.stack([mean, weight]),
    }
    state, _ = _run(_build(client, privacy=Privacy(5.0, 0.0), **extras))
    factor = 5 / np.sqrt(3 * _gain(np.arange(N)) ** 2 + 100**2)
    np.testing.assert_allclose(state.extra, [100 * factor.mean(), 4], rtol=1e-12)
    np.testing.assert_allclose(state.model["buffer"], 2 + (factor * _gain(np.arange(N))).mean(), rtol=1e-12)


def test_one_client_moves_the_server_by_no_more_than_its_share():
    """Whatever client 2 sends: sensitivity S / C in the norm over all that is averaged."""

    def client(value):
        def rule(key, received, data):
            trained = _adds()(key, received, data)
            sent = jax.tree.map(lambda leaf: jnp.where(_who(data) == 2, value, leaf), trained.model)
            return trained._replace(model=sent)

        return rule

    def model(value):
        state, _ = _run(_build(client(value), privacy=Privacy(2.0, 0.0)))
        return jnp.concatenate([state.model["shared"], state.model["buffer"][None]])

    moved = [float(jnp.linalg.norm(model(value) - model(jnp.nan))) for value in (-1e12, 0.5, 1e6)]
    assert max(moved) <= 2.0 / 4 * (1 + 1e-9) and max(moved) > 0.49


def test_a_round_adds_noise_even_when_nobody_returns_and_another_in_every_round():
    """Deviation z S / C = 3 * 2 / 4; the optimiser's step along it is as it is along a gradient."""
    options = {"init": lambda key: START | {"shared": jnp.zeros(20_000)}, "privacy": Privacy(2.0, 3.0)}
    algorithm = _build(_adds(weight=lambda data: 0), server_optimizer=optax.sgd(0.5), **options)
    one, _ = _run(algorithm)
    two, _ = _run(algorithm, 2)
    first, second = np.asarray(one.model["shared"]), np.asarray(two.model["shared"] - one.model["shared"])
    for noise in (first, second):
        assert abs(noise.std() - 0.75) < 5 * 0.75 / np.sqrt(2 * 20_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)


@pytest.mark.parametrize("name", ["scaffold", "fedmeta_per_metasgd", "pfedhn"])
def test_uploads_of_any_algorithm_can_be_clipped_noised_and_stacked(name):
    """Loose enough a norm and without noise, private is the plain mean of clients that count alike."""
    options = {"cohort_size": 7, "devices": 1, "lanes": 2}
    choices = {"privacy": Privacy(1e9, 0.0)}, {"aggregator": aggregate.trimmed_mean(0.0)}, {"privacy": Privacy(0.5, 0.1)}
    data, runs = problems.data(), []
    for more in choices:
        algorithm = fm.ALGORITHMS[name](problems.task(), **options, **more)
        state, step = jax.jit(algorithm.init)(KEY, data), jax.jit(algorithm.round)
        for r in range(2):
            state, _ = step(jax.random.fold_in(KEY, r), state, data)
        runs.append(state)
    loose, stacked, private = runs
    assert problems.distance(loose.model, stacked.model) < 1e-10
    assert problems.distance(loose.model, private.model) > 1e-6
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(private))


def test_bytes_are_those_of_the_plain_algorithm():
    plain, robust, private = (
        fm.costs.traffic(fm.scaffold(problems.task(), cohort_size=5, **more), problems.data())
        for more in ({}, {"aggregator": aggregate.median}, {"privacy": Privacy(1.0, 1.0)})
    )
    assert plain == robust == private


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fm.fedavg(problems.task(), privacy=Privacy(0.0, 1.0)), "clip_norm=0.0 must be finite and above 0"),
        (
            lambda: fm.fedavg(problems.task(), privacy=Privacy(1.0, -1.0)),
            "noise_multiplier=-1.0 must be finite and at least 0",
        ),
        (lambda: fm.fedamp(problems.task(), privacy=Privacy(1.0, 1.0)), "privacy covers what is averaged"),
        (
            lambda: fm.fedavg(problems.task(), privacy=Privacy(1.0, 1.0), aggregator=aggregate.median),
            "privacy is for the mean",
        ),
    ],
)
def test_what_privacy_cannot_cover_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
