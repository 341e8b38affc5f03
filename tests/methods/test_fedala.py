import jax
import numpy as np
import pytest

from tests import problems
from tests.methods.common import FULL, KEY, build, compiled, gradient, of, personalized, run, start, step

WHOLE = {**FULL, "lr": 0.3, "weight_lr": 20.0, "sample_share": 1.0, "most_passes": 3, "tolerance": 0.0}
"""Full gradients; weights take three steps in a client's first phase, because no deviation is below 0."""


def fedala(**options):
    return build("fedala", **(WHOLE | options))


def blend(own, sent, weights):
    """Theta_i + (Theta - Theta_i) * W in the head; the body is the global one."""
    head = {leaf: own[leaf] + (sent["head"][leaf] - own[leaf]) * weights[leaf] for leaf in sent["head"]}
    return {"body": sent["body"], "head": head}


def learn(own, sent, weights, client, passes, view="train", rate=20.0):
    """W <- clip(W - eta * dL/dTheta_hat * (Theta - Theta_i), 0, 1), a number of times."""
    for _ in range(passes):
        slope = gradient(blend(own, sent, weights), client, view)["head"]
        moved = {leaf: slope[leaf] * (sent["head"][leaf] - own[leaf]) for leaf in own}
        weights = {leaf: np.clip(weights[leaf] - rate * moved[leaf], 0, 1) for leaf in own}
    return weights


def passes_of_rounds(algorithm, count):
    state, passes = start(algorithm), []
    for _ in range(count):
        state, info = compiled(algorithm)(jax.random.fold_in(KEY, state.round), state, problems.data())
        passes.append(np.asarray(info.metrics["ala_passes"]).tolist())
    return passes


def test_three_rounds_written_out():
    """Round 1 is FedAvg's: no client has a local model. In round 2 weights take three steps from 1, in round 3 one more."""
    algorithm, share = fedala(), problems.data().size["train"] / np.sum(problems.data().size["train"])
    state = start(algorithm)
    own, weights = [None] * 7, [jax.tree.map(np.ones_like, state.model["head"])] * 7
    for passes in (0, 3, 1):
        sent, state, trained = state.model, run(algorithm, 1, state), []
        for i in range(7):
            weights[i] = learn(own[i], sent, weights[i], i, passes)
            begin = blend(own[i], sent, weights[i]) if passes else sent
            trained.append(step(begin, 0.3, gradient(begin, i)))
            own[i] = trained[i]["head"]
            assert problems.distance(of(state.memory.weights, i)["head"], weights[i]) < 1e-12
            assert problems.distance(of(state.memory.model, i)["head"], own[i]) < 1e-12
        mean = jax.tree.map(lambda *leaves: sum(s * leaf for s, leaf in zip(share, leaves, strict=True)), *trained)
        assert problems.distance(state.model, mean) < 1e-12
    found = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(weights)])
    assert np.any(found == 0) and np.any(found == 1) and np.any((found > 0.01) & (found < 0.99))


def test_weights_train_to_convergence_once_and_then_for_one_pass():
    assert passes_of_rounds(fedala(window=4, most_passes=50, tolerance=9.0), 4) == [[0] * 7, [4] * 7, [1] * 7, [1] * 7]
    converging = np.array(passes_of_rounds(fedala(window=4, most_passes=500, tolerance=1e-4), 2)[1])
    assert np.all((converging > 4) & (converging < 500)) and len(set(converging.tolist())) > 1


def test_known_clients_test_with_their_initialised_model_and_new_ones_with_the_servers():
    algorithm = fedala()
    state = run(algorithm, 2)
    own, weights = of(state.memory.model, 4)["head"], of(state.memory.weights, 4)["head"]
    expected = blend(own, state.model, learn(own, state.model, weights, 4, 1, "test_support"))
    assert problems.distance(personalized(algorithm, state, 4), expected) < 1e-12
    assert problems.distance(personalized(algorithm, state, None, of_client=4), state.model) < 1e-12


@pytest.mark.parametrize(
    ("option", "value"),
    [("weight_lr", -1), ("sample_share", 1.5), ("sample_share", 0.0), ("window", 1), ("tolerance", -1), ("most_passes", 0)],
)
def test_a_wrong_argument_is_named(option, value):
    with pytest.raises(ValueError, match=f"{option}={value} must"):
        fedala(**{option: value})
