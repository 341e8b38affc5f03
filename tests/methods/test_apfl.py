import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from tests import problems
from tests.methods.common import FULL, batch, buffered, build, gradient, of, personalized, run, step

OPTIONS = {"cohort_size": 5, "devices": 1, "lr": 0.1, "batch_size": 8}


def apfl(task=None, **options):
    return build("apfl", task, **(OPTIONS | options))


@pytest.mark.parametrize("mix", ["weights", "outputs"])
def test_the_global_part_is_fedavg_whatever_the_share(mix):
    average = run(build("fedavg", **OPTIONS, weighting="uniform"), 3)
    for share in (0.0, 0.3):
        assert problems.distance(run(apfl(share=share, mix=mix), 3).model, average.model) < 1e-12


def test_a_share_of_one_is_local_training():
    # All clients start in the first round: a late one would start from a model that others have trained.
    everyone = {**OPTIONS, "cohort_size": 7}
    state = run(apfl(**everyone, share=1.0, share_lr=0.0), 3)
    alone = run(build("local_only", **everyone), 3)
    assert problems.distance(state.memory.model, alone.personal) < 1e-12


def test_share_and_personal_model_of_a_round_written_out():
    algorithm = apfl(**FULL, share=0.6, share_lr=0.5)
    state = run(algorithm, 2)
    after = run(algorithm, 1, state)
    for client in (1, 3):
        own, w = of(state.memory, client), state.model
        mixed = jax.tree.map(lambda v, w, a=own.share: a * v + (1 - a) * w, own.model, w)
        slope = sum(
            jnp.sum((v - w) * g)
            for v, w, g in zip(*map(jax.tree.leaves, (own.model, w, gradient(mixed, client))), strict=True)
        )
        share = jnp.clip(own.share - 0.5 * slope, 0, 1)
        assert abs(share - own.share) > 1e-6
        mixed = jax.tree.map(lambda v, w, a=share: a * v + (1 - a) * w, own.model, w)
        expected = step(own.model, 0.1 * share, gradient(mixed, client))
        np.testing.assert_allclose(of(after.memory.share, client), share, atol=1e-12)
        assert problems.distance(of(after.memory.model, client), expected) < 1e-12


def test_share_and_model_take_their_first_step_on_the_same_batch_with_the_same_dropout():
    slope = jnp.array([1.0, -2.0, 0.5])

    def loss(variables, batch, key):
        return jax.random.uniform(key) * slope @ variables["w"], variables

    task = fm.Task(lambda key: {"w": jnp.ones(3)}, loss, lambda variables, x: x[:, :3] * variables["w"])
    algorithm = apfl(task, **FULL, share=0.6, share_lr=0.5)
    first = run(algorithm, 1)
    after = run(algorithm, 1, first)
    for client in (1, 3):
        own, new, w = of(first.memory, client), of(after.memory, client), first.model["w"]
        by_share = (own.share - new.share) / (0.5 * slope @ (own.model["w"] - w))
        by_model = (own.model["w"] - new.model["w"]) / (0.1 * new.share * slope)
        assert 0 < new.share < 1
        np.testing.assert_allclose(by_model, by_share, rtol=1e-9)


def test_for_a_linear_model_mixing_weights_is_mixing_outputs():
    task = fm.classification(
        lambda key: {"w": jax.random.normal(key, (5, 3))}, lambda variables, x: x @ variables["w"], layers=("w",)
    )
    one, other = run(apfl(task), 3), run(apfl(task, mix="outputs"), 3)
    assert problems.distance((one.model, one.memory), (other.model, other.memory)) < 1e-10
    x = batch(2).x
    a, b = (
        algorithm.predict(personalized(algorithm, state, 2), x)
        for algorithm, state in ((apfl(task), one), (apfl(task, mix="outputs"), other))
    )
    np.testing.assert_allclose(a, b, atol=1e-9)


def test_a_new_client_trains_its_own_part_from_the_global_model():
    algorithm = apfl(**FULL, share=0.25, share_lr=0.5)
    state = run(algorithm, 2)
    # At first v = w, so the mixture is w too; v moves by its share of the step, and the mixture by that share again.
    expected = step(state.model, 0.1 * 0.25**2, gradient(state.model, 2, "test_support"))
    assert problems.distance(personalized(algorithm, state, None, of_client=2), expected) < 1e-12


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"share=1.5 must lie in \[0, 1\]"):
        apfl(share=1.5)
    with pytest.raises(ValueError, match="models without buffers"):
        apfl(buffered(), mix="outputs")
