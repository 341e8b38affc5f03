import jax
import pytest

from tests import problems
from tests.methods.common import FULL, build, gradient, of, personalized, run, start, step

OPTIONS = {"cohort_size": 5, "devices": 1, "lr": 0.05, "epochs": 2, "batch_size": 8}


WHOLE = {**FULL, "epochs": 1, "personal_epochs": 2, "personal_lr": 0.1, "prox_weight": 0.7}


def descend(v, w, client, view):
    """Two full steps v ← v - η (∇f(v) + λ (v - w))."""
    for _ in range(2):
        v = step(v, 0.1, jax.tree.map(lambda g, v, w: g + 0.7 * (v - w), gradient(v, client, view), v, w))
    return v


def ditto(**options):
    return build("ditto", **(OPTIONS | options))


def test_the_global_model_is_that_of_fedavg():
    state, average = run(ditto(prox_weight=3.0), 3), run(build("fedavg", **OPTIONS), 3)
    assert problems.distance(state.model, average.model) < 1e-14


def test_without_a_proximal_term_personal_models_are_those_of_local_training():
    # All clients start in the first round: a late one would start from a model that others have trained.
    everyone = {**OPTIONS, "cohort_size": 7}
    state, alone = run(ditto(**everyone, prox_weight=0.0), 3), run(build("local_only", **everyone), 3)
    assert problems.distance(state.memory, alone.personal) < 1e-12


def test_a_strong_proximal_term_holds_personal_models_at_the_model_that_was_sent():
    options = {"cohort_size": 7, "lr": 0.01}
    sent = run(ditto(**options), 3).model
    weak, strong = run(ditto(prox_weight=0.0, **options), 4), run(ditto(prox_weight=99.0, **options), 4)

    def away(state):
        return max(problems.distance(of(state.memory, i), sent) for i in range(7))

    assert away(strong) < away(weak) / 20


def test_two_full_steps_written_out():
    # v1 = v0 - η (∇f(v0) + λ (v0 - w)); after a round v0 and w differ.
    algorithm = ditto(**WHOLE)
    state = run(algorithm, 1)
    after = run(algorithm, 1, state)
    for client in (0, 4):
        expected = descend(of(state.memory, client), state.model, client, "train")
        assert problems.distance(of(after.memory, client), expected) < 1e-12


def test_known_clients_test_with_their_own_model_and_others_make_one_from_the_global():
    algorithm = ditto(**WHOLE)
    state = run(algorithm, 2)
    assert problems.leaves_equal(personalized(algorithm, state, 4), of(state.memory, 4))
    made = personalized(algorithm, state, None, of_client=4)
    expected = descend(state.model, state.model, 4, "test_support")
    assert problems.distance(made, expected) < 1e-12
    early = start(algorithm)._replace(model=state.model)
    assert problems.distance(personalized(algorithm, early, 4), made) < 1e-12


def test_a_late_client_starts_its_own_model_from_the_model_that_it_receives():
    algorithm = ditto(**WHOLE)
    state = run(algorithm, 2)
    late = state._replace(seen=state.seen.at[4].set(False))
    after = run(algorithm, 1, late)
    expected = descend(state.model, state.model, 4, "train")
    assert problems.distance(of(after.memory, 4), expected) < 1e-12


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="prox_weight=-1"):
        ditto(prox_weight=-1)
