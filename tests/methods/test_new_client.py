"""A new client of FedMeta-Per tries the personal part of every trained client and keeps the best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import problems
from tests.methods.common import KEY, build, start

DATA = problems.data()


@pytest.mark.parametrize("score", ["online", "fitted"])
def test_a_new_client_takes_the_part_with_the_lowest_loss_of_those_that_were_trained_and_did_not_diverge(score):
    # One full-batch step of adaptation: no randomness, and a loss that can be taken by hand.
    algorithm = build("fedmeta_per", inner_lr=0.1, batch_size=None, score=score, devices=1)
    state = start(algorithm)
    rng = np.random.default_rng(3)
    heads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), state.personal)
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
        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, start, gradient)
        return before if score == "online" else loss(adapted), adapted

    losses = np.array([float(tried(i)[0]) for i in range(7)])
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
