import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_meta import masks
from tests import problems
from tests.methods.common import FULL, build, gradient, mean, of, personalized, run, start, step

HEAD = masks.resolve("head", problems.task())
OPTIONS = {**FULL, "lr": 0.1, "head_lr": 0.4, "head_epochs": 2, "new_client_epochs": 1, "optimizer": optax.sgd}
OPTIONS["weighting"] = "uniform"


def only(mask, tree):
    return jax.tree.map(lambda keep, leaf: leaf if keep else jnp.zeros_like(leaf), mask, tree)


def test_head_then_body_written_out():
    algorithm = build("fedrep", **OPTIONS)
    first = start(algorithm).model
    after = run(algorithm, 1)
    bodies = []
    for client in range(7):
        model = first
        for _ in range(2):
            model = step(model, 0.4, only(HEAD, gradient(model, client)))
        assert problems.distance(of(after.personal, client), masks.split(model, HEAD)[0]) < 1e-12
        # The body's step sees the new head.
        bodies.append(step(model, 0.1, only(masks.complement(HEAD), gradient(model, client))))
    assert problems.distance(masks.split(after.model, HEAD)[1], masks.split(mean(bodies), HEAD)[1]) < 1e-12
    assert problems.leaves_equal(masks.split(after.model, HEAD)[0], masks.split(first, HEAD)[0])


def test_a_new_client_fits_a_head_and_leaves_the_body():
    algorithm = build("fedrep", **OPTIONS)
    state = run(algorithm, 1)
    new = personalized(algorithm, state, None, of_client=3)
    assert problems.distance(new, step(state.model, 0.4, only(HEAD, gradient(state.model, 3, "test_support")))) < 1e-12
    known = personalized(algorithm, state, 3)
    assert problems.leaves_equal(masks.split(known, HEAD)[0], of(state.personal, 3))


def test_fedbabu_never_trains_the_head_until_the_test():
    algorithm = build("fedbabu", **FULL, optimizer=optax.sgd, lr=0.1, finetune_epochs=1)
    first, state = start(algorithm).model, run(algorithm, 1)
    assert problems.leaves_equal(masks.split(state.model, HEAD)[0], masks.split(first, HEAD)[0])
    bodies = [step(first, 0.1, only(masks.complement(HEAD), gradient(first, client))) for client in range(7)]
    assert problems.distance(state.model, mean(bodies)) < 1e-12
    sent = build("fedbabu", **FULL).exchange(problems.data())
    assert sent.down[0]["head"] == sent.averaged[0]["head"] == {"w": None, "b": None}
    expected = step(state.model, 0.1, gradient(state.model, 2, "test_support"))
    for client in (2, None):
        assert problems.distance(personalized(algorithm, state, client, of_client=2), expected) < 1e-12


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="head_epochs=-1"):
        build("fedrep", head_epochs=-1)
    with pytest.raises(ValueError, match="finetune='tail'"):
        build("fedbabu", finetune="tail")
