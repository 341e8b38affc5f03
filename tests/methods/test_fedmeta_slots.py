"""What a client's outer optimiser remembers from round to round."""

import jax
import jax.numpy as jnp
import optax
import pytest

import fedjax_meta as fm
from tests import problems
from tests.methods.common import build, run, start

OPTIONS = {
    "cohort_size": 7, "devices": 1, "inner_lr": 0.1, "outer_lr": 0.3, "batch_size": None, "personal": "head",
}  # fmt: skip


def momentum(rate):
    return optax.sgd(rate, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "more"), [("fedmeta", {}), ("imaml", {"inner_epochs": 1}), ("perfedavg", {"local_steps": 1})], ids=str
)
def test_the_first_round_is_the_same_and_only_personal_leaves_remember_it(name, more):
    options = {"outer_optimizer": momentum, **OPTIONS, **more}
    fresh, kept = (build(name, outer_slots=slots, **options) for slots in ("fresh", "kept"))
    one, other = run(fresh, 1), run(kept, 1)
    assert problems.distance(one.model, other.model) < 1e-12
    assert problems.distance(one.personal, other.personal) < 1e-12
    # From the same models, momentum adds 0.9 of the first step, -0.3 g, to the second step of the personal leaves alone.
    first = jax.tree.map(lambda new, old: new - old, other.personal, start(kept).personal)
    one, two = run(fresh, 1, one), run(kept, 1, other)
    assert problems.distance(one.model["body"], two.model["body"]) < 1e-12
    assert problems.distance(two.personal, jax.tree.map(lambda a, b: a + 0.9 * b, one.personal, first)) < 1e-12


def test_averaged_slots_are_the_weighted_mean_of_the_clients_and_count_rounds():
    algorithm = build("fedmeta", outer_optimizer=momentum, outer_slots="averaged", weighting="uniform", **OPTIONS)
    none, one = start(algorithm), run(algorithm, 1)
    # After one step the momentum is the gradient itself, and so is what the mean model has moved by, over -0.3.
    moved = (one.model["body"]["w"] - none.model["body"]["w"]) / -0.3
    trace = next(leaf for leaf in jax.tree.leaves(one.extra) if leaf.shape == moved.shape)
    assert float(jnp.max(jnp.abs(trace - moved))) < 1e-12
    adam = build("fedmeta", learned_rates=True, outer_slots="averaged", **{**OPTIONS, "outer_lr": 0.01})
    after = run(adam, 2)
    assert [int(leaf) for leaf in jax.tree.leaves(after.extra) if leaf.ndim == 0] == [2]


def test_a_server_descends_with_the_outer_optimiser_and_goes_on_with_its_state():
    """Rate 0.3 by default, not the rate 1 of models that replace a model; momentum is the server's over rounds."""
    at_server, at_client = (
        build("fedmeta", outer_optimizer=optax.sgd, outer_at=place, **OPTIONS) for place in ("server", "client")
    )
    none, first = start(at_server), run(at_server, 1)
    second = run(at_server, 1, first)
    assert problems.distance(second.model, run(at_client, 2).model) < 1e-12
    # With momentum the second step has 0.9 of the first on top.
    remembers = build("fedmeta", outer_optimizer=momentum, outer_at="server", **OPTIONS)
    expected = jax.tree.map(lambda two, one, none: two + 0.9 * (one - none), second.model, first.model, none.model)
    assert problems.distance(run(remembers, 2).model, expected) < 1e-12


def test_slots_that_cannot_be_averaged_are_refused():
    with pytest.raises(ValueError, match="outer_slots='averaged' needs outer_at='client'"):
        fm.fedmeta(problems.task(), outer_slots="averaged", outer_at="server")
    with pytest.raises(ValueError, match="outer_slots='stale' is unknown"):
        fm.fedmeta(problems.task(), outer_slots="stale")
