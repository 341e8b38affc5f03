"""A new client of FedMeta-Per tries the personal part of every trained client and keeps the best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from tests import problems
from tests.methods.common import KEY, build, start

DATA = problems.data()


FAMILY = {
    "fedmeta_per": {"batch_size": None},
    "perfedavg": {"personal": "head"},
    "reptile": {"personal": "head", "batch_size": 128},
    "perfedavg_reptile": {"personal": "head"},
}


@pytest.mark.parametrize("score", ["online", "fitted"])
@pytest.mark.parametrize("name", FAMILY)
def test_a_new_client_takes_the_part_with_the_lowest_loss_of_those_that_were_trained_and_did_not_diverge(name, score):
    # One full-batch step of adaptation: no randomness, and a loss that can be taken by hand.
    algorithm = build(name, inner_lr=0.5, score=score, devices=1, **FAMILY[name])
    state = start(algorithm)
    rng = np.random.default_rng(3)
    heads = jax.tree.map(lambda leaf: jnp.asarray(1.5 * rng.normal(size=leaf.shape)), state.personal)
    diverged, unseen = 3, 5
    heads = jax.tree.map(lambda leaf: leaf.at[diverged].set(jnp.nan), heads)
    seen = jnp.ones(7, bool).at[unseen].set(False)

    samples = DATA.client(0)["test_support"]
    batch = samples.take(jnp.arange(samples.size), jnp.ones(samples.size))

    @jax.jit
    def tried(i):
        start = {"body": state.model["body"], "head": jax.tree.map(lambda leaf: leaf[i], heads["head"])}
        loss = lambda w: problems.task().loss(w, batch, KEY)[0]  # noqa: E731
        before, gradient = jax.value_and_grad(loss)(start)
        adapted = jax.tree.map(lambda w, g: w - 0.5 * g, start, gradient)
        return {"online": before, "fitted": loss(adapted)}, adapted

    both = [tried(i)[0] for i in range(7)]
    online, fitted = (np.array([float(one[kind]) for one in both]) for kind in ("online", "fitted"))
    assert np.nanargmin(online) != np.nanargmin(fitted)
    losses = online if score == "online" else fitted
    # The untrained part would be the best of all, were it in the choice.
    best = int(np.nanargmin(losses))
    heads = jax.tree.map(lambda leaf: leaf.at[unseen].set(leaf[best]).at[best].set(leaf[unseen]), heads)
    losses[[best, unseen]] = losses[[unseen, best]]
    expected = int(np.nanargmin(np.where(seen, losses, np.nan)))
    adapted = jax.jit(lambda state: algorithm.personalize(KEY, state, samples, None))(
        state._replace(personal=heads, seen=seen)
    )
    assert expected not in (diverged, unseen)
    assert problems.distance(adapted, tried(expected if expected != best else unseen)[1]) < 1e-12


def test_where_no_trained_part_gives_a_finite_loss_a_new_client_starts_from_the_initial_one():
    """The parts of client 0, which no round has asked, and of client 1, whose loss is not a number, are none to choose."""
    algorithm = build("fedmeta_per", inner_lr=0.1, batch_size=None, devices=1)
    state, samples = start(algorithm), DATA.client(0)["test_support"]
    expected = jax.jit(lambda state: algorithm.personalize(KEY, state, samples, None))(state)
    heads = jax.tree.map(lambda leaf: leaf.at[0].add(1.0).at[1].set(jnp.nan), state.personal)
    state = state._replace(personal=heads, seen=jnp.arange(7) == 1)
    found = jax.jit(lambda state: algorithm.personalize(KEY, state, samples, None))(state)
    assert problems.distance(found, expected) < 1e-12


def test_the_pull_of_a_test_counts_in_no_score_of_a_fitted_part():
    """One step, before which there is no pull: the losses before it, after it, and after it with the pull, choose three parts."""
    options = {"batch_size": None, "inner_epochs": 1, "prox_weight": 3.0, "inner_lr": 0.5, "personal": "head", "devices": 1}
    algorithms = {score: build("imaml", **options, score=score) for score in ("online", "fitted")}
    state = start(algorithms["online"])
    rng = np.random.default_rng(1)
    heads = jax.tree.map(lambda leaf: jnp.asarray(1.5 * rng.normal(size=leaf.shape)), state.personal)
    state = state._replace(personal=heads, seen=jnp.ones(7, bool))
    samples = DATA.client(0)["test_support"]
    batch = samples.take(jnp.arange(samples.size), jnp.ones(samples.size))

    @jax.jit
    @jax.vmap
    def tried(head):
        start = {"body": state.model["body"], "head": head}
        loss = lambda w: problems.task().loss(w, batch, KEY)[0]  # noqa: E731
        before, gradient = jax.value_and_grad(loss)(start)
        adapted = jax.tree.map(lambda w, g: w - 0.5 * g, start, gradient)
        return before, loss(adapted), loss(adapted) + fm.local.proximal_term(adapted, start, 3.0), adapted

    online, fitted, pulled, adapted = tried(heads["head"])
    best = {"online": int(np.argmin(online)), "fitted": int(np.argmin(fitted))}
    assert len({*best.values(), int(np.argmin(pulled))}) == 3
    for score, algorithm in algorithms.items():
        found = jax.jit(lambda state, algorithm=algorithm: algorithm.personalize(KEY, state, samples, None))(state)
        assert problems.distance(found, jax.tree.map(lambda leaf, k=best[score]: leaf[k], adapted)) < 1e-12
