"""User accuracy as a metric of each round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import Federation, evaluation, federate, metrics, schedules, simulate
from fedjax_meta.keys import tagged
from tests import problems


def measured(excluded=(), name="fedper", rounds=3, **options):
    algorithm = evaluation.with_user_accuracy(problems.build(name, lr=0.1, cohort_size=4, **options), excluded=excluded)
    state = algorithm.init(jax.random.key(0), problems.data())
    step = jax.jit(algorithm.round)
    for r in range(rounds):
        before = state
        state, info = step(jax.random.key(r), state, problems.data())
    return algorithm, before, state, info


def test_excluded_clients_do_not_count():
    algorithm, before, _, info = measured()
    test = jax.jit(lambda state: evaluation.evaluate(algorithm, jax.random.key(0), state, problems.data(), query="test"))
    scores = test(before)
    by_client = np.asarray(metrics.accuracy(scores.confusion))
    ids = np.asarray(info.ids)
    assert float(info.metrics["user_accuracy"]) == pytest.approx(by_client[ids].mean())
    out = ids[:2]
    *_, info = measured(out)
    assert float(info.metrics["user_accuracy"]) == pytest.approx(by_client[ids[2:]].mean())
    assert float(info.metrics["user_accuracy_std"]) == pytest.approx(by_client[ids[2:]].std())
    *_, info = measured(ids)
    assert np.isnan(info.metrics["user_accuracy"])


def test_by_default_no_sample_is_both_adapted_on_and_tested():
    """Random labels can be learned by heart, but not foretold."""
    rng = np.random.default_rng(0)
    data = fm.from_clients([(rng.normal(size=(60, 40)), rng.integers(0, 2, 60)) for _ in range(20)], num_classes=2)
    task = fm.classification(lambda key: {"head": jnp.zeros((40, 2))}, lambda p, x: x @ p["head"], layers=("head",))
    by_heart = fm.fedavg(task, lr=0.5, finetune_epochs=100, finetune_lr=0.5)
    algorithm = fm.with_user_accuracy(federate(by_heart, Federation(cohort_size=20)))
    _, info = jax.jit(algorithm.round)(jax.random.key(1), algorithm.init(jax.random.key(0), data), data)
    assert float(info.metrics["user_accuracy"]) < 0.57


def test_measuring_changes_no_training():
    plain = problems.build("fedavg", lr=0.1, cohort_size=4)
    state = plain.init(jax.random.key(0), problems.data())
    step = jax.jit(plain.round)
    for r in range(3):
        state, _ = step(jax.random.key(r), state, problems.data())
    assert problems.leaves_equal(state, measured(name="fedavg")[2])


def test_it_is_recorded_for_every_round():
    algorithm = evaluation.with_user_accuracy(problems.build("fedavg", lr=0.5, cohort_size=7))
    _, records = simulate(algorithm, problems.data(), key=jax.random.key(0), rounds=5, eval_every=3)
    scores = np.concatenate([record.metrics["user_accuracy"] for record in records])
    # Before any training it is the accuracy of the initial model, all clients taking part.
    x, y, start, size = problems.data().x, problems.data().y, problems.data().start["test"], problems.data().size["test"]
    model = problems.task().init(tagged(tagged(jax.random.key(0), "init"), "model"))
    hit = np.argmax(problems.task().predict(model, x), 1) == y
    assert scores.shape == (5,) and scores[0] == pytest.approx(
        np.mean([hit[a : a + n].mean() for a, n in zip(start, size, strict=True)])
    )
    assert len(set(scores.tolist())) > 1


def test_it_is_refused_where_clients_start_from_other_models_than_are_tested():
    task, data = problems.task(), problems.data()
    with pytest.raises(ValueError, match=r"Federation\(own_at_test=False\) tests others"):
        evaluation.with_user_accuracy(federate(fm.fedper(task), Federation(cohort_size=4, own_at_test=False)))
    table = schedules.fedbuff([1.0] * data.num_clients, rounds=4, buffer_size=1, concurrency=4, most_stale=10)
    algorithm = evaluation.with_user_accuracy(federate(fm.fedavg(task), Federation(cohort_size=1, schedule=table)))
    state = algorithm.init(jax.random.key(0), data)
    with pytest.raises(ValueError, match="past ones in asynchronous rounds"):
        algorithm.round(jax.random.key(0), state, data)


def test_empty_places_of_a_cohort_do_not_count_with_and_without_a_compiled_round():
    data = problems.data()
    federation = Federation(cohort_size=6, schedule=schedules.poisson(0.3))
    algorithm = evaluation.with_user_accuracy(federate(fm.fedavg(problems.task()), federation))
    state = algorithm.init(jax.random.key(0), data)
    plain, compiled = (one(jax.random.key(3), state, data)[1] for one in (algorithm.round, jax.jit(algorithm.round)))
    assert -1 in np.asarray(plain.ids)
    assert float(plain.metrics["user_accuracy"]) == pytest.approx(float(compiled.metrics["user_accuracy"]))


def test_bad_exclusions():
    with pytest.raises(ValueError, match="all N=7 clients"):
        measured(range(7))
    with pytest.raises(ValueError, match="ids of the N=7"):
        measured([7])
    with pytest.raises(ValueError, match="no view 'validation'"):
        algorithm = evaluation.with_user_accuracy(problems.build("fedavg"), query="validation")
        algorithm.round(jax.random.key(0), algorithm.init(jax.random.key(0), problems.data()), problems.data())


def test_empty_places_of_a_cohort_are_nobody_in_a_host_store_too():
    """Where an empty place is read as the last client, that client is measured with the row of an earlier round."""
    federation = Federation(cohort_size=6, schedule=schedules.poisson(0.5), devices=1)
    algorithm = evaluation.with_user_accuracy(federate(fm.fedper(problems.task(), lr=0.5, batch_size=8), federation))
    runs = [
        fm.simulate(algorithm, problems.data(), key=jax.random.key(3), rounds=30, eval_every=30, store=store)
        for store in (None, "memory")
    ]
    on_device, on_host = (np.concatenate([record.metrics["user_accuracy"] for record in records]) for _, records in runs)
    np.testing.assert_allclose(on_device, on_host, atol=1e-12)


def test_excluded_clients_are_named_by_id_where_some_are_selected():
    some = np.array([5, 1, 6, 2])
    data, plain = problems.data().select(some), problems.build("fedavg", lr=0.1, cohort_size=4)
    algorithm = evaluation.with_user_accuracy(plain, excluded=(5,))
    state = algorithm.init(jax.random.key(0), data)
    _, info = algorithm.round(jax.random.key(1), state, data)
    each = np.asarray(metrics.accuracy(fm.evaluate(plain, jax.random.key(0), state, data, query="test").confusion))
    assert float(info.metrics["user_accuracy"]) == pytest.approx(float(np.mean(each[some != 5])))


def test_clients_that_diverged_have_no_accuracy():
    """A model of NaN predicts the first class, which is right now and then."""
    federation = Federation(cohort_size=7, server_optimizer=lambda rate: optax.scale(jnp.nan * rate), server_lr=1.0)
    algorithm = evaluation.with_user_accuracy(federate(fm.fedavg(problems.task()), federation))
    _, records = simulate(algorithm, problems.data(), key=jax.random.key(0), rounds=2, eval_every=2)
    scores = np.concatenate([record.metrics["user_accuracy"] for record in records])
    assert np.isfinite(scores[0]) and np.isnan(scores[1])
