from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_meta import masks
from tests import problems
from tests.methods.common import batch, build, of, personalized, run, start

OPTIONS = {"cohort_size": 3, "devices": 1, "lr": 0.2, "batch_size": 8}


def lg_fedavg(**options):
    return build("lg_fedavg", **(OPTIONS | options))


def test_the_head_is_averaged_and_the_body_stays():
    state = run(lg_fedavg(), 2)
    other = run(build("fedavg", personal="body", **OPTIONS), 2)
    assert problems.leaves_equal((state.model, state.personal), (other.model, other.personal))
    body = masks.resolve("body", problems.task())
    assert problems.leaves_equal(masks.split(state.model, body)[0], masks.split(start(lg_fedavg()).model, body)[0])


def test_clients_count_as_asked():
    """By their samples or alike; they have unequal numbers of samples."""
    by_samples, alike, other = (
        run(one, 1).model
        for one in (
            lg_fedavg(),
            lg_fedavg(weighting="uniform"),
            build("fedavg", personal="body", weighting="uniform", **OPTIONS),
        )
    )
    assert problems.leaves_equal(alike, other)
    assert problems.distance(by_samples, alike) > 1e-4


@pytest.mark.parametrize("vote", ["mean", "majority"])
def test_a_new_client_asks_all_clients_that_have_trained(vote):
    algorithm = lg_fedavg(vote=vote)
    state = run(algorithm, 1)
    x = batch(4).x
    logits = np.asarray(algorithm.predict(personalized(algorithm, state, None, of_client=4), x))
    assert 0 < int(state.seen.sum()) < 7
    total = 0
    for client in np.flatnonzero(state.seen):
        members = masks.merge(of(state.personal, client), masks.split(state.model, masks.resolve("body", problems.task()))[1])
        share = jax.nn.softmax(problems.task().predict(members, x))
        total = total + (share if vote == "mean" else jax.nn.one_hot(jnp.argmax(share, -1), 3))
    np.testing.assert_allclose(np.exp(logits), total / int(state.seen.sum()), atol=1e-12)


def test_before_the_first_round_a_new_client_has_the_initial_model():
    algorithm = lg_fedavg()
    state, x = start(algorithm), batch(4).x
    logits = algorithm.predict(personalized(algorithm, state, None, of_client=4), x)
    np.testing.assert_allclose(logits, jax.nn.log_softmax(problems.task().predict(state.model, x)), atol=1e-12)


def test_its_optimizer_and_its_fine_tuning_are_those_of_fedavg_with_an_own_body():
    options = {"optimizer": partial(optax.sgd, momentum=0.9), "epochs": 2, "finetune_epochs": 2, "finetune": "head"}
    algorithm, other = lg_fedavg(**options), build("fedavg", personal="body", **OPTIONS, **options)
    state, same = run(algorithm, 2), run(other, 2)
    assert problems.leaves_equal((state.model, state.personal), (same.model, same.personal))
    (client, *_) = np.flatnonzero(state.seen)
    tuned = personalized(algorithm, state, client)
    assert problems.leaves_equal(tuned, personalized(other, state, client))
    assert problems.leaves_equal(tuned["body"], of(state.personal, client)["body"])
    assert problems.distance(tuned["head"], state.model["head"]) > 1e-3


def test_an_unknown_vote_is_refused():
    with pytest.raises(ValueError, match="vote='loud'"):
        lg_fedavg(vote="loud")
