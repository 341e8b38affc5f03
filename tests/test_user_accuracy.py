"""User accuracy as a round's metric, and rounds to a target over seeds."""

import math

import jax
import numpy as np
import pytest

from fedjax_meta import evaluate, simulate
from fedjax_meta.algorithms import fedavg, fedper
from tests import problems


def measured(excluded=(), builder=fedper, rounds=3, **options):
    algorithm = evaluate.with_user_accuracy(builder(problems.task(), lr=0.1, cohort_size=4, **options), excluded=excluded)
    state = algorithm.init(jax.random.key(0), problems.data())
    step = jax.jit(algorithm.round)
    for r in range(rounds):
        before = state
        state, info = step(jax.random.key(r), state, problems.data())
    return algorithm, before, state, info


def test_excluded_clients_do_not_count():
    algorithm, before, _, info = measured()
    test = jax.jit(lambda state: evaluate.evaluate(algorithm, jax.random.key(0), state, problems.data(), query="test"))
    scores = test(before)
    by_client = np.asarray(evaluate.accuracy(scores.confusion))
    ids = np.asarray(info.ids)
    assert float(info.metrics["user_accuracy"]) == pytest.approx(by_client[ids].mean())
    out = ids[:2]
    *_, info = measured(out)
    assert float(info.metrics["user_accuracy"]) == pytest.approx(by_client[ids[2:]].mean())
    *_, info = measured(ids)
    assert np.isnan(info.metrics["user_accuracy"])


def test_measuring_changes_no_training():
    plain = fedavg(problems.task(), lr=0.1, cohort_size=4)
    state = plain.init(jax.random.key(0), problems.data())
    step = jax.jit(plain.round)
    for r in range(3):
        state, _ = step(jax.random.key(r), state, problems.data())
    assert problems.leaves_equal(state, measured(builder=fedavg)[2])


def test_it_is_recorded_for_every_round():
    algorithm = evaluate.with_user_accuracy(fedavg(problems.task(), lr=0.5, cohort_size=7))
    _, records = simulate.simulate(algorithm, problems.data(), key=jax.random.key(0), rounds=5, eval_every=3)
    scores = np.concatenate([record.metrics["user_accuracy"] for record in records])
    # Before any training it is the accuracy of the initial model, all clients taking part.
    x, y, start, size = problems.data().x, problems.data().y, problems.data().start["test"], problems.data().size["test"]
    model = problems.task().init(jax.random.split(jax.random.key(0), 3)[0])
    hit = np.argmax(problems.task().predict(model, x), 1) == y
    assert scores.shape == (5,) and scores[0] == pytest.approx(
        np.mean([hit[a : a + n].mean() for a, n in zip(start, size, strict=True)])
    )
    assert len(set(scores.tolist())) > 1


def test_bad_exclusions():
    with pytest.raises(ValueError, match="all N=7 clients"):
        measured(range(7))
    with pytest.raises(ValueError, match="ids of the N=7"):
        measured([7])
    with pytest.raises(ValueError, match="no view 'validation'"):
        algorithm = evaluate.with_user_accuracy(fedavg(problems.task()), query="validation")
        algorithm.round(jax.random.key(0), algorithm.init(jax.random.key(0), problems.data()), problems.data())


def test_rounds_to_target():
    runs = [[0.2, 0.6, 0.4, 0.9], [0.1, 0.2, 0.3, 0.7], [0.7, 0.0, 0.0, 0.0]]
    found = evaluate.rounds_to_target(runs, 0.6)
    assert found.rounds == (2, 4, 1) and found.mean == pytest.approx(7 / 3)
    # Student's t with 2 degrees of freedom, by scipy-free arithmetic: 4.303 * s / sqrt(3), s^2 = 7/3.
    assert found.margin == pytest.approx(4.303 * math.sqrt(7 / 3 / 3), rel=1e-6)
    assert evaluate.rounds_to_target(runs, 0.7, rounds=[1, 20, 40, 60]).rounds == (60, 60, 1)


def test_a_target_never_reached_is_never_the_last_round():
    found = evaluate.rounds_to_target([[0.2, 0.6], [0.2, 0.4]], 0.6)
    assert found.rounds == (2, None) and found.mean == math.inf and math.isnan(found.margin)
    assert str(found) == "never in 2 rounds (1 of 2 runs)"
    assert evaluate.rounds_to_target([np.nan, np.nan], 0.0).rounds == (None,)


def test_bad_targets():
    with pytest.raises(ValueError, match="at least one score"):
        evaluate.rounds_to_target([], 0.5)
    with pytest.raises(ValueError, match="target=nan"):
        evaluate.rounds_to_target([0.1], math.nan)
    with pytest.raises(ValueError, match="R=2 scores"):
        evaluate.rounds_to_target([0.1, 0.2], 0.1, rounds=[1])
