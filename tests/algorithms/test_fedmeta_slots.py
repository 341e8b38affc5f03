"""What a client's outer optimiser remembers from round to round."""

import jax
import jax.numpy as jnp
import optax
import pytest

import fedjax_meta as fm
from tests import problems
from tests.test_contract import rounds

KEY = jax.random.key(3)
OPTIONS = {
    "cohort_size": 7, "devices": 1, "inner_lr": 0.1, "outer_lr": 0.3, "batch_size": None, "personal": "head",
}  # fmt: skip


def momentum(rate):
    return optax.sgd(rate, momentum=0.9)


def test_the_first_round_is_the_same_and_only_personal_leaves_remember_it():
    fresh, kept = (fm.fedmeta(problems.task(), outer_optimizer=momentum, outer_slots=s, **OPTIONS) for s in ("fresh", "kept"))
    one, other = rounds(fresh, 1), rounds(kept, 1)
    assert problems.distance(one.model, other.model) < 1e-12
    assert problems.distance(one.personal, other.personal) < 1e-12
    # From the same models, momentum adds 0.9 of the first step, -0.3 g, to the second step of the personal leaves alone.
    first = jax.tree.map(lambda new, old: new - old, other.personal, kept.init(KEY, problems.data()).personal)
    one, two = rounds(fresh, 1, one), rounds(kept, 1, other)
    assert problems.distance(one.model["body"], two.model["body"]) < 1e-12
    assert problems.distance(two.personal, jax.tree.map(lambda a, b: a + 0.9 * b, one.personal, first)) < 1e-12


def test_averaged_slots_are_the_weighted_mean_of_the_clients_and_count_rounds():
    algorithm = fm.fedmeta(problems.task(), outer_optimizer=momentum, outer_slots="averaged", weighting="uniform", **OPTIONS)
    start = algorithm.init(KEY, problems.data())
    one = rounds(algorithm, 1, start)
    # After one step the momentum is the gradient itself, and so is what the mean model has moved by, over -0.3.
    moved = (one.model["body"]["w"] - start.model["body"]["w"]) / -0.3
    trace = next(leaf for leaf in jax.tree.leaves(one.extra) if leaf.shape == moved.shape)
    assert float(jnp.max(jnp.abs(trace - moved))) < 1e-12
    adam = fm.fedmeta(problems.task(), learned_rates=True, outer_slots="averaged", **{**OPTIONS, "outer_lr": 0.01})
    after = rounds(adam, 2)
    assert [int(leaf) for leaf in jax.tree.leaves(after.extra) if leaf.ndim == 0] == [2]


def test_slots_that_nobody_could_average_are_refused():
    with pytest.raises(ValueError, match="outer_slots='averaged' needs outer_at='client'"):
        fm.fedmeta(problems.task(), outer_slots="averaged", outer_at="server")
    with pytest.raises(ValueError, match="outer_slots='stale' is unknown"):
        fm.fedmeta(problems.task(), outer_slots="stale")
