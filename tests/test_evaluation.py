"""The evaluation of clients against a plain loop over them."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics

import fedjax_meta as fm
from fedjax_meta import evaluation, export, placement, runtime, sweeps
from fedjax_meta.algorithm import Aggregation, Algorithm, State
from fedjax_meta.data import from_clients
from fedjax_meta.rows import REMOTE_BYTES
from fedjax_meta.task import Weighted, entry_weights, targets, weighted_mean
from tests import problems

KEY = jax.random.key(9)
K = 5


def _matrix(true, predicted, classes=K):
    return sklearn.metrics.confusion_matrix(true, predicted, labels=np.arange(classes))


def _clients(count=4):
    rng = np.random.default_rng(17)
    return [(rng.normal(size=(n, K)), rng.integers(0, K, n)) for n in rng.integers(16, 60, count)]


PAIRS = _clients()
DATA = from_clients(PAIRS, num_classes=K)
STATE = State(
    model=jnp.linspace(0, 1, K),
    optimizer=(),
    extra=(),
    aggregation=Aggregation((), ()),
    personal=jnp.asarray(np.random.default_rng(18).normal(size=(4, K))),
    memory=(),
    residual=(),
    seen=jnp.ones(4, bool),
    ids=jnp.arange(4, dtype=jnp.int32),
    round=jnp.zeros((), jnp.int32),
)


def _personalize(key, state, support, client, num_clients=None):
    batch = support.in_order(64).get(0, 0)
    mean = jnp.sum(batch.x * batch.weight[:, None], 0) / jnp.sum(batch.weight)
    own = 0 if client is None else state.personal[client]
    return state.model + mean + own + 0.1 * jax.random.normal(key, (K,))


ALGORITHM = Algorithm(
    init=lambda *_: STATE,
    round=lambda *_: None,
    personalize=_personalize,
    predict=lambda shift, x: x + shift[None],
    exchange=lambda *_: None,
    cohort=lambda *_: None,
    config={},
)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ids", [None, [2, 0]])
@pytest.mark.parametrize("layout", [{"devices": 1}, {"devices": 2, "lanes": 2}], ids=str)
def test_evaluation_is_a_loop_over_clients(known, ids, layout):
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


WIDE = dataclasses.replace(ALGORITHM, predict=lambda shift, x: jnp.pad(x + shift[None], ((0, 0), (0, 1))))
BAD = {
    "an unknown view": (lambda: _run(query="validation"), "no view 'validation'; they have train"),
    "an unknown support": (lambda: _run(support="validation"), "no view 'validation'; they have train"),
    "more clients than trained": (
        lambda: _run(state=STATE._replace(seen=jnp.ones(3, bool), ids=jnp.arange(3))),
        "known=True, but the data have 4 clients and the training had 3: give known=False",
    ),
    "fewer clients than trained": (
        lambda: _run(data=from_clients(PAIRS[:3], num_classes=K)),
        "known=True, but the data have 3 clients and the training had 4: give known=False",
    ),
    "an id beyond": (lambda: _run(ids=[0, 4]), r"ids=\[0, 4\] must be integers in \[0, 4\)"),
    "a negative id": (lambda: _run(ids=np.array([-1])), r"ids=\[-1\] must be integers in \[0, 4\)"),
    "no batch": (lambda: _run(batch_size=0), "batch_size=0 must be an integer of at least 1"),
    "real targets": (lambda: _run(data=dataclasses.replace(DATA, num_classes=0)), "the data have real targets"),
    "logits of other classes": (
        lambda: _run(WIDE),
        r"predict gives \(\d+, 6\) for B=\d+ samples, but the data have K=5 classes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_evaluated_is_refused(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("some", ["selected", "of a population"])
def test_some_known_clients_may_say_that_they_are_some(some):
    first = (
        DATA.select([2, 0])
        if some == "selected"
        else dataclasses.replace(from_clients(PAIRS[:2], num_classes=K), population=4)
    )
    whole = _run()
    places = [2, 0] if some == "selected" else [0, 1]
    assert problems.distance(_run(data=first), problems.at(whole, places)) < 1e-12


def _network(width, builder):
    task = fm.classification(
        lambda key: {"w": jax.random.normal(key, (5, width)), "head": jnp.ones((width, 3))},
        lambda v, x: jnp.tanh(x @ v["w"]) @ v["head"],
        layers=("w", "head"),
    )
    return fm.federate(builder(task))


FOREIGN = {
    "without personal leaves": (_network(4, fm.fedavg), _network(4, fm.fedper), ".personal['head'] is missing"),
    "with personal leaves": (_network(4, fm.fedper), _network(4, fm.fedavg), ".personal['head'] does not belong there"),
    "of another width": (_network(4, fm.fedavg), _network(3, fm.fedavg), ".model['head'] is float64[4, 3], not float64[3, 3]"),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("known", [True, False])
def test_a_state_of_another_method_or_model_is_refused_in_one_line(case, known):
    of, asked, message = FOREIGN[case]
    state = of.init(KEY, problems.data())
    with pytest.raises(ValueError, match=re.escape(f"state does not fit: {message}; is it of another algorithm")) as error:
        evaluation.evaluate(asked, KEY, state, problems.data(), known=known, devices=1)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="state does not fit"):
        export.personal(asked, KEY, state, problems.data(), 1, support="test_support", known=known)


def test_the_model_of_a_newcomer_is_asked_for_as_such():
    algorithm = problems.build("fedper")
    state, new = algorithm.init(KEY, problems.data()), problems.clients_of([12, 9, 15])
    with pytest.raises(ValueError, match="data have 3 clients and the training had 7: give known=False"):
        export.personal(algorithm, KEY, state, new, 1, support="test_support")
    export.personal(algorithm, KEY, state, new, 1, support="test_support", known=False)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_many_rows_are_evaluated_where_they_are(devices, lanes):
    population, each = 40_000, 200
    order, sizes = np.arange(population), np.ones(population, int)
    data = fm.from_partition(np.ones((population, 2)), order % 2, order, sizes, num_classes=2)

    def init(key):
        return {"body": jnp.zeros(2), "head": jax.random.normal(key, (each, 2))}

    task = fm.classification(init, lambda v, x: x @ v["head"][:2] + v["body"][None], layers=("body", "head"))
    algorithm = problems.build("fedper", task, cohort_size=8, devices=devices)
    state = algorithm.init(KEY, data)
    heads = jax.random.normal(jax.random.key(3), state.personal["head"].shape)
    heads = jax.device_put(heads, state.personal["head"].sharding)
    state = state._replace(personal={**state.personal, "head": heads}, seen=jnp.ones_like(state.seen))
    data = placement.place_shared(data, state.round.sharding)
    score = jax.jit(partial(evaluation.evaluate, algorithm, KEY, support="train", query="train", lanes=lanes, devices=devices))
    program = score.lower(state, data).compile()
    assert heads.nbytes > REMOTE_BYTES
    assert program.memory_analysis().temp_size_in_bytes < heads.nbytes / 4
    assert not re.search(r"all-gather|all-to-all|collective-permute", program.as_text())
    found = program(state, data)
    predicted = np.argmax(np.asarray(heads)[:, :2].sum(1), 1)
    assert np.array_equal(np.argmax(found.confusion.sum(1), 1), predicted)
    assert np.array_equal(np.argmax(found.confusion.sum(2), 1), np.arange(population) % 2)


@pytest.mark.parametrize("given", [None, 2])
def test_the_devices_and_lanes_of_the_algorithm_are_used_unless_others_are_given(monkeypatch, given):
    class SeenError(Exception):
        pass

    def run_cohort(*arguments, lanes, devices):
        raise SeenError(lanes, devices)

    monkeypatch.setattr(evaluation, "run_cohort", run_cohort)
    algorithm = problems.build("fedavg", cohort_size=3, devices=1, lanes=3)
    state = jax.eval_shape(algorithm.init, KEY, problems.data())
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    with pytest.raises(SeenError) as seen:
        evaluation.evaluate(algorithm, KEY, state, problems.data(), devices=given, lanes=given)
    assert seen.value.args == ((3, 1) if given is None else (2, 2))


@pytest.mark.parametrize("trained_on", [1, 2])
def test_a_state_is_tested_on_other_devices_than_those_that_trained_it(trained_on):
    data = problems.data()
    algorithm = problems.build("fedper", cohort_size=2, devices=trained_on)
    state, _ = fm.simulate(algorithm, data, key=KEY, rounds=1)
    test = partial(evaluation.evaluate, algorithm, KEY, state, data, support="support", query="query")
    expected = test().loss
    for devices in (1, 2, jax.devices()[1:], jax.devices()[::-1]):
        np.testing.assert_allclose(test(devices=devices).loss, expected, rtol=1e-6)
    ids = jax.device_put(jnp.arange(data.num_clients), jax.devices()[1])
    np.testing.assert_allclose(test(devices=1, ids=ids).loss, expected, rtol=1e-6)


@pytest.mark.parametrize("trained_on", [1, 2])
def test_a_test_becomes_part_of_a_transformation(trained_on):
    """Under `linearize` and its like, what is compiled by itself at other times is a part of the whole."""
    data = problems.data()
    trained, algorithm = (problems.build("fedper", cohort_size=2, devices=devices) for devices in (trained_on, 1))
    state, _ = fm.simulate(trained, data, key=KEY, rounds=1)

    def loss(model):
        test = partial(evaluation.evaluate, algorithm, KEY, state._replace(model=model), data)
        return jnp.mean(test(support="support", query="query").loss)

    expected = loss(state.model)
    for transformed in (
        lambda: jax.linearize(loss, state.model)[0],
        lambda: jax.jvp(loss, (state.model,), (state.model,))[0],
        lambda: jax.lax.cond(True, lambda: loss(state.model), lambda: 0.0),
        lambda: jax.checkpoint(loss)(state.model),
        lambda: jax.vmap(lambda one: loss(jax.tree.map(lambda leaf: one * leaf, state.model)))(jnp.ones(2))[1],
    ):
        np.testing.assert_allclose(transformed(), expected, rtol=1e-6)


def test_a_test_outside_of_a_program_is_compiled_like_a_run(monkeypatch):
    """Otherwise a GPU would search among matrix products for a minute."""
    assert np.isfinite(_run().loss).all()
    monkeypatch.setattr(runtime, "compiler_options", lambda **_: {"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        _run()
    assert np.isfinite(jax.jit(lambda state: _run(state=state).loss)(STATE)).all()  # the caller's program has its own


def test_metrics_of_a_task_without_predictions_are_refused():
    data = problems.data()
    task = fm.from_loss(lambda key: {"w": jnp.zeros(())}, lambda variables, batch, key: variables["w"] ** 2)
    algorithm = fm.federate(fm.fedavg(task), fm.Federation(cohort_size=2))
    state = algorithm.init(jax.random.key(0), data)
    assert np.isfinite(fm.evaluate(algorithm, jax.random.key(1), state, data).loss).all()
    with pytest.raises(ValueError, match="'accuracy' scores predictions, which the task has none of"):
        fm.evaluate(algorithm, jax.random.key(1), state, data, metrics=("accuracy",))


def test_the_loss_of_weighted_entries_does_not_depend_on_the_size_of_batches():
    """Sequences of 1 and of 10 real tokens; the criterion is a plain function, a mean over the real tokens of a batch."""
    rng, lengths = np.random.default_rng(0), np.array([1, 10, 1, 10, 1, 10])
    x, y = rng.integers(0, 5, (6, 10)), rng.integers(0, 3, (6, 10))
    real = np.arange(10) < lengths[:, None]

    def criterion(logits, batch):
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets(batch))
        return weighted_mean(losses, entry_weights(batch, losses))

    views = {view: (np.zeros(1, int), np.array([6])) for view in ("train", "test_support", "test_query")}
    data = fm.from_partition(x, Weighted(y, real), np.arange(6), np.array([6]), num_classes=3, views=views)
    init = lambda key: {"table": jax.random.normal(key, (5, 3))}  # noqa: E731
    method = fm.fedavg(fm.classification(init, lambda p, tokens: p["table"][tokens], loss=criterion))
    state = fm.federate(method, fm.Federation(cohort_size=1)).init(KEY, data)
    logits = np.asarray(state.model["table"])[x]
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, y[..., None], -1)[..., 0]
    for size in (1, 2, 4, 6):
        found = fm.evaluate(method, KEY, state, data, metrics=("token_accuracy",), batch_size=size).loss
        assert float(found[0]) == pytest.approx(np.average(losses, weights=real), rel=1e-9)


@pytest.mark.parametrize("where", ["on a device", "in a program", "on the host"])
def test_a_training_on_some_clients_tests_each_with_its_own_row_and_others_with_none(where):
    """Client by client: those that trained in any order, and others like clients that have not taken part yet."""
    algorithm = fm.federate(fm.ditto(problems.task(), batch_size=20, epochs=1), fm.Federation(cohort_size=3, devices=1))
    data, trained, tested = problems.data(), [4, 1, 6], [6, 2, 1, 0]
    state = jax.jit(algorithm.init)(KEY, data.select(trained))
    for i in range(2):
        state, _ = jax.jit(algorithm.round)(jax.random.fold_in(KEY, i), state, data.select(trained))
    np.testing.assert_array_equal(state.ids, trained)
    if where == "on the host":
        state = state._replace(**{name: jax.tree.map(np.array, getattr(state, name)) for name in fm.algorithm.ROWS})
    evaluate = partial(fm.evaluate, algorithm)
    found = (jax.jit(evaluate) if where == "in a program" else evaluate)(KEY, state, data.select(tested)).confusion
    unseen = state._replace(seen=jnp.zeros(3, bool))
    for place, client in enumerate(tested):
        mine, key = data.client(client), jax.random.fold_in(KEY, client)
        row = trained.index(client) if client in trained else 0
        start = state if client in trained else unseen
        variables = algorithm.personalize(key, start, mine["test_support"], row, data.num_clients)
        batch = mine["test_query"].in_order(64).get(0, 0)
        real = np.asarray(batch.weight) > 0
        predicted = np.argmax(algorithm.predict(variables, batch.x), -1)
        np.testing.assert_array_equal(found[place], _matrix(np.asarray(batch.y)[real], predicted[real], 3))
    own = export.personal(algorithm, KEY, state, data.select([1, 6]), 1, support="test_support")
    mine = algorithm.personalize(jax.random.fold_in(KEY, 6), state, data.client(6)["test_support"], 2, data.num_clients)
    assert problems.distance(own, mine) < 1e-12
    with pytest.raises(ValueError, match="the state has no row of client 2"):
        export.personal(algorithm, KEY, state, data.select([2]), 0, support="test_support")


def test_a_run_does_not_go_on_with_other_clients():
    algorithm = fm.federate(fm.ditto(problems.task(), batch_size=20, epochs=1), fm.Federation(cohort_size=3, devices=1))
    data = problems.data()
    state, _ = fm.simulate(algorithm, data.select([4, 1, 6]), key=KEY, rounds=1)
    with pytest.raises(ValueError, match="row 0 of the state is of client 4, but there the data have client 1"):
        fm.simulate(algorithm, data.select([1, 4, 6]), key=KEY, rounds=2, state=state)
    members = [sweeps.Member({"lr": 0.1}, 1)]
    build = lambda lr: fm.ditto(problems.task(), batch_size=20, epochs=1, lr=lr)  # noqa: E731
    options = {"federation": fm.Federation(cohort_size=3)}
    state, _ = sweeps.sweep(build, members, data.select([4, 1, 6]), rounds=1, **options)
    with pytest.raises(ValueError, match="row 2 of the state is of client 6, but there the data have client 5"):
        sweeps.sweep(build, members, data.select([4, 1, 5]), rounds=2, state=state, **options)
    with pytest.raises(ValueError, match="the state holds the 1 members of a sweep"):
        fm.evaluate(algorithm, KEY, state, data)
    twice = "client 4 was selected 2 times: select each client once"
    with pytest.raises(ValueError, match=twice):
        fm.simulate(algorithm, data.select([4, 1, 4]), key=KEY, rounds=1)
    with pytest.raises(ValueError, match=twice):
        sweeps.sweep(build, members, data.select([4, 1, 4]), rounds=1, **options)


def test_clients_that_are_numbered_anew_are_not_taken_for_those_that_trained():
    """Data of as many clients as the state has rows, whose ids are others."""
    algorithm = fm.federate(fm.ditto(problems.task(), batch_size=20, epochs=1), fm.Federation(cohort_size=3, devices=1))
    trained = problems.data().select([4, 1, 6])
    other = problems.clients_of([30, 40, 50])
    state, _ = fm.simulate(algorithm, trained, key=KEY, rounds=1)
    message = "known=True, but client 6 trained, and the data number their clients from 0 to 2"
    for use in (
        lambda: fm.evaluate(algorithm, KEY, state, other),
        lambda: export.personal(algorithm, KEY, state, other, 0, support="test_support"),
        lambda: fm.simulate(
            algorithm,
            trained,
            key=KEY,
            rounds=1,
            evaluators={"known": fm.Evaluator(lambda key, state, data: state.round, other, known=True)},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            use()
