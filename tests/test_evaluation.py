"""Scores against scikit-learn and plain loops, and the evaluation of clients against a loop over them."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

import fedjax_meta as fm
from fedjax_meta import engine, evaluate
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.data import from_clients

RNG = np.random.default_rng(17)
KEY = jax.random.key(9)
K = 5


def _draw(own, size=60, classes=K):
    """Labels of the client's own classes, all present, and predictions of any class, mostly right."""
    own = np.asarray(own)
    true = np.concatenate([own, RNG.choice(own, size - own.size)])
    return true, np.where(RNG.random(size) < 0.5, true, RNG.integers(0, classes, size))


def _matrix(true, predicted, classes=K):
    return sklearn.metrics.confusion_matrix(true, predicted, labels=np.arange(classes))


CLIENTS = [_draw(own) for own in ([0, 1], [1, 4], [0, 2, 3], [3], range(K))]
CONFUSION = jnp.asarray(np.stack([_matrix(*client) for client in CLIENTS]), jnp.int32)


def _postprocessed(true, predicted, classes=K):
    """S0's rule in a plain loop: a stray prediction becomes the client's next class after the true one."""
    own = sorted(set(true.tolist()))
    out = []
    for t, p in zip(true.tolist(), predicted.tolist(), strict=True):
        others = [c % classes for c in range(t + 1, t + classes) if c % classes in own]
        out.append(p if p in own or not others else others[0])
    return np.array(out)


def test_accuracy_over_clients_and_over_samples():
    each = [sklearn.metrics.accuracy_score(*client) for client in CLIENTS]
    np.testing.assert_allclose(metrics.accuracy(CONFUSION), each, rtol=1e-12)
    # Clients of unequal size: the two means differ.
    uneven = CONFUSION.at[0].multiply(7)
    right = np.trace(np.asarray(uneven), axis1=1, axis2=2)
    assert float(metrics.micro_accuracy(uneven)) == pytest.approx(right.sum() / np.asarray(uneven).sum(), rel=1e-12)
    assert float(metrics.micro_accuracy(uneven)) != pytest.approx(np.mean(each), rel=1e-3)


def test_macro_f1_is_scikit_learns():
    expected = [sklearn.metrics.f1_score(true, predicted, average="macro") for true, predicted in CLIENTS]
    np.testing.assert_allclose(metrics.macro_f1(CONFUSION), expected, rtol=1e-12)


def test_scores_of_a_client_without_samples_are_zero_and_not_nan():
    nothing = jnp.zeros((1, K, K), jnp.int32)
    assert metrics.accuracy(nothing) == metrics.macro_f1(nothing) == metrics.micro_accuracy(nothing) == 0
    assert not np.any(metrics.within_own_classes(nothing))


def test_strays_go_to_another_own_class_and_accuracy_stays():
    after = metrics.within_own_classes(CONFUSION)
    expected = [_matrix(true, _postprocessed(true, predicted)) for true, predicted in CLIENTS]
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(metrics.accuracy(after), metrics.accuracy(CONFUSION))
    assert np.any(np.asarray(after) != np.asarray(CONFUSION))


def test_two_classes_as_s0_scores_them():
    """Every wrong prediction of a two-class client, whatever it was, counts as one of the other class."""
    true, predicted = CLIENTS[1]
    assert set(predicted.tolist()) - {1, 4}
    other = np.where(predicted == true, true, np.where(true == 1, 4, 1))
    f1 = sklearn.metrics.f1_score(true, other, average="macro")
    after = metrics.within_own_classes(CONFUSION)
    assert float(metrics.macro_f1(after)[1]) == pytest.approx(f1, rel=1e-12)
    assert f1 > float(metrics.macro_f1(CONFUSION)[1])


def test_a_client_of_one_class_keeps_its_predictions():
    np.testing.assert_array_equal(metrics.within_own_classes(CONFUSION)[3], CONFUSION[3])


def test_the_summary_has_population_deviations():
    loss = RNG.random(len(CLIENTS))
    numbers = metrics.summary(evaluation.Evaluation(CONFUSION, loss))
    each = np.asarray(metrics.accuracy(CONFUSION))
    f1 = [sklearn.metrics.f1_score(t, _postprocessed(t, p), average="macro") for t, p in CLIENTS]
    assert numbers["accuracy_std"] == pytest.approx(np.std(each), rel=1e-12)
    assert numbers["accuracy_mean"] == pytest.approx(np.mean(each), rel=1e-12)
    assert (numbers["f1_mean"], numbers["f1_std"]) == pytest.approx((np.mean(f1), np.std(f1)), rel=1e-12)
    assert numbers["loss"] == pytest.approx(np.mean(loss), rel=1e-12)


# An algorithm of one line: a client's model is a shift of the logits, made of everything that `personalize` is given.


def _clients(count=4):
    sizes = RNG.integers(16, 60, count)
    return [(RNG.normal(size=(n, K)), RNG.integers(0, K, n)) for n in sizes]


PAIRS = _clients()
DATA = from_clients(PAIRS, num_classes=K)
STATE = State(
    model=jnp.linspace(0, 1, K),
    optimizer=(),
    extra=(),
    personal=jnp.asarray(RNG.normal(size=(4, K))),
    memory=(),
    seen=jnp.ones(4, bool),
    round=jnp.zeros((), jnp.int32),
)


def _personalize(key, state, support, client):
    batch = support.in_order(64).get(0, 0)
    mean = jnp.sum(batch.x * batch.weight[:, None], 0) / jnp.sum(batch.weight)
    own = 0 if client is None else state.personal[client]
    return state.model + mean + own + 0.1 * jax.random.normal(key, (K,))


ALGORITHM = Algorithm(lambda *_: STATE, lambda *_: None, _personalize, lambda shift, x: x + shift[None])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ids", [None, [2, 0]])
@pytest.mark.parametrize("layout", [{"devices": 1}, {"devices": 2, "lanes": 2}], ids=str)
@pytest.mark.parametrize("many_bytes", [0, 2**26])
def test_evaluation_is_a_loop_over_clients(monkeypatch, known, ids, layout, many_bytes):
    monkeypatch.setattr(evaluate, "MANY_BYTES", many_bytes)
    result = jax.jit(
        lambda state, data: evaluation.evaluate(
            ALGORITHM, KEY, state, data, known=known, ids=None if ids is None else jnp.array(ids), batch_size=7, **layout
        )
    )(STATE, DATA)
    chosen = range(4) if ids is None else ids
    assert result.confusion.shape == (len(chosen), K, K)
    for row, i in enumerate(chosen):
        x, y = PAIRS[i]
        train = 3 * len(y) // 4
        support = train + max((len(y) - train) // 5, 1)
        noise = 0.1 * jax.random.normal(jax.random.fold_in(KEY, i), (K,))
        own = np.asarray(STATE.personal[i]) if known else 0
        logits = x[support:] + np.asarray(STATE.model) + x[train:support].mean(0) + own + np.asarray(noise)
        np.testing.assert_array_equal(result.confusion[row], _matrix(y[support:], logits.argmax(1)))
        loss = sklearn.metrics.log_loss(y[support:], np.exp(logits) / np.exp(logits).sum(1, keepdims=True), labels=range(K))
        assert float(result.loss[row]) == pytest.approx(loss, rel=1e-9)


def _run(algorithm=ALGORITHM, state=STATE, data=DATA, **options):
    return evaluation.evaluate(algorithm, KEY, state, data, devices=1, **options)


WIDE = ALGORITHM._replace(predict=lambda shift, x: jnp.pad(x + shift[None], ((0, 0), (0, 1))))
BAD = {
    "an unknown view": (lambda: _run(query="validation"), "no view 'validation'; they have train"),
    "an unknown support": (lambda: _run(support="validation"), "no view 'validation'; they have train"),
    "more clients than trained": (
        lambda: _run(state=STATE._replace(seen=jnp.ones(3, bool))),
        "known=True, but the data have 4 clients and the training had 3",
    ),
    "an id beyond": (lambda: _run(ids=[0, 4]), r"ids=\[0, 4\] must be integers in \[0, 4\)"),
    "a negative id": (lambda: _run(ids=np.array([-1])), r"ids=\[-1\] must be integers in \[0, 4\)"),
    "no batch": (lambda: _run(batch_size=0), "batch_size=0 must be an integer of at least 1"),
    "real targets": (lambda: _run(data=dataclasses.replace(DATA, num_classes=0)), "the data have real targets"),
    "logits of other classes": (
        lambda: _run(WIDE),
        r"predict gives \(11, 6\) for B=11 samples, but the data have K=5 classes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_evaluated_is_refused(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_many_rows_are_evaluated_where_they_are(devices, lanes):
    population, each = 30_000, 200
    data = fm.from_partition(np.ones((population, 2)), np.arange(population) % 2, np.arange(population), np.ones(population, int),
                       num_classes=2)  # fmt: skip

    def init(key):
        return {"body": jnp.zeros(2), "head": jax.random.normal(key, (each, 2))}

    task = fm.classification(init, lambda v, x: x @ v["head"][:2] + v["body"][None], layers=("body", "head"))
    algorithm = fm.fedper(task, cohort_size=8, devices=devices)
    state = algorithm.init(KEY, data)
    heads = jax.random.normal(jax.random.key(3), state.personal["head"].shape)
    heads = jax.device_put(heads, state.personal["head"].sharding)
    state = state._replace(personal={**state.personal, "head": heads}, seen=jnp.ones_like(state.seen))
    data = engine.place_shared(data, state.round.sharding)
    score = jax.jit(partial(evaluation.evaluate, algorithm, KEY, support="train", query="train", lanes=lanes, devices=devices))
    program = score.lower(state, data).compile()
    assert heads.nbytes > evaluate.MANY_BYTES
    assert program.memory_analysis().temp_size_in_bytes < heads.nbytes / 4
    assert not re.search(r"all-gather|all-to-all|collective-permute", program.as_text())
    found = program(state, data)
    predicted = np.argmax(np.asarray(heads)[:, :2].sum(1), 1)
    assert np.array_equal(np.argmax(found.confusion.sum(1), 1), predicted)
    assert np.array_equal(np.argmax(found.confusion.sum(2), 1), np.arange(population) % 2)
