"""What `federate` does around the rules of one client, with rules so small that every round has a closed form.

Client i holds i + 1 samples, all of value i. In most tests its round adds `(i + 1)^2 (round + 1)` to every leaf that it
received, so that the order of rounds, the weights and the start of each leaf can all be told from the result.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import aggregate, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.contract import Collaboration, Method, Trained, keep_mean
from fedjax_meta.federation import OPTIONS, Federation
from fedjax_meta.rounds import federate
from tests import problems

KEY = jax.random.key(1)
N = 4
SIZES = np.arange(N) + 1
VALUES = np.repeat(np.arange(N), SIZES)
DATA = fm.from_partition(
    VALUES[:, None].astype(float), np.zeros(len(VALUES), int), np.arange(len(VALUES)), SIZES, num_classes=1
)
START = {"shared": jnp.array([1.0, -1.0]), "own": jnp.array(5.0), "buffer": jnp.array(2.0)}
PERSONAL = {"shared": False, "own": True, "buffer": False}
TRAINABLE = {"shared": True, "own": True, "buffer": False}


def _who(data):
    return data["train"].in_order(4).get(0, 0).x[0, 0]


def _gain(i, r=0):
    return (i + 1) ** 2 * (r + 1)


def _adds(weight=None, **more):
    """The rule of the header; `more` are further fields of `Trained`, as functions of (received, data, trained model)."""

    def client(key, received, data):
        del key
        gain = _gain(_who(data), received.round)
        model = jax.tree.map(lambda leaf: leaf + gain, received.model)
        extra = {name: value(received, data, model) for name, value in more.items()}
        return Trained(model, {"gain": gain}, **extra, weight=None if weight is None else jnp.asarray(weight(data), float))

    return client


def _build(client=None, **options):
    defaults = {
        "init": lambda key: START,
        "client": client or _adds(),
        "personalize": lambda key, received, support: received.model,
        "predict": lambda model, x: x,
        "roles": masks.roles(PERSONAL, TRAINABLE),
    }
    federation = {"cohort_size": N, "devices": 1}
    federation |= {name: options.pop(name) for name in OPTIONS if name in options and name != "weighting"}
    if "collaborate" in options:
        options["collaborate"] = Collaboration(options["collaborate"], reads="personal+memory", gives="personal+memory")
    return federate(Method(**(defaults | options)), Federation(**federation))


def _run(algorithm, rounds=1, state=None, data=DATA):
    step = jax.jit(algorithm.round)
    state = algorithm.init(KEY, data) if state is None else state
    for r in range(rounds):
        state, info = step(jax.random.fold_in(KEY, r), state, data)
    return state, info


def _tested(algorithm, state, client):
    return algorithm.personalize(KEY, state, DATA.client(0)["train"], client)


def test_two_rounds_of_all_clients():
    state, info = _run(_build(), 2)
    by_samples = [np.average(_gain(np.arange(N), r), weights=SIZES) for r in (0, 1)]
    np.testing.assert_allclose(state.model["shared"], np.array([1.0, -1.0]) + sum(by_samples), rtol=1e-14)
    np.testing.assert_allclose(state.model["buffer"], 2 + sum(by_samples), rtol=1e-14)
    # What is personal is summed up by its own client, and the server's stays as it was.
    np.testing.assert_allclose(state.personal["own"], 5 + _gain(np.arange(N)) * 3, rtol=1e-14)
    assert state.model["own"] == 5 and state.round == 2 and bool(jnp.all(state.seen))
    assert state.personal["shared"] is state.personal["buffer"] is None
    np.testing.assert_array_equal(info.metrics["gain"], _gain(info.ids, 1))


def test_only_the_cohort_moves_and_a_first_participation_starts_from_the_servers_leaves():
    algorithm = _build(cohort_size=2)
    state, info = _run(algorithm)
    ids, absent = np.asarray(info.ids), np.setdiff1d(np.arange(N), np.asarray(info.ids))
    np.testing.assert_array_equal(state.seen, np.isin(np.arange(N), ids))
    np.testing.assert_allclose(state.model["buffer"], 2 + np.average(_gain(ids), weights=SIZES[ids]), rtol=1e-14)
    # The server's personal leaf changes under clients that never took part: they begin with the new value, not with the one
    # that lay in their place when the run began.
    state = state._replace(model={**state.model, "own": jnp.array(100.0)})
    after, _ = _run(_build(), 1, state)
    np.testing.assert_allclose(after.personal["own"][absent], 100 + _gain(absent, 1), rtol=1e-14)
    np.testing.assert_allclose(after.personal["own"][ids], 5 + _gain(ids) + _gain(ids, 1), rtol=1e-14)


def test_averaged_personal_leaves_are_the_mean_of_the_trained_ones():
    """The server holds the mean of the cohort's trained leaves, whatever these started from."""
    algorithm = _build(average_personal=True, cohort_size=2)
    state, own, server = algorithm.init(KEY, DATA), {}, 5.0
    step = jax.jit(algorithm.round)
    for r in range(4):
        state, info = step(jax.random.fold_in(KEY, r), state, DATA)
        for i in np.asarray(info.ids).tolist():
            own[i] = own.get(i, server) + _gain(i, r)
        server = np.average([own[i] for i in np.asarray(info.ids).tolist()], weights=SIZES[np.asarray(info.ids)])
        np.testing.assert_allclose(state.model["own"], server, rtol=1e-14)
    for i, value in own.items():
        np.testing.assert_allclose(state.personal["own"][i], value, rtol=1e-14)


@pytest.mark.parametrize("own_at_test", [True, False])
def test_which_personal_leaves_a_client_tests_with(own_at_test):
    algorithm = _build(cohort_size=2, average_personal=True, own_at_test=own_at_test)
    state, info = _run(algorithm)
    seen, absent = int(info.ids[0]), int(np.setdiff1d(np.arange(N), np.asarray(info.ids))[0])
    assert float(state.model["own"]) != float(state.personal["own"][seen])
    expected = state.personal["own"][seen] if own_at_test else state.model["own"]
    assert _tested(algorithm, state, seen)["own"] == expected
    for client in (absent, None):
        assert _tested(algorithm, state, client)["own"] == state.model["own"]
    assert problems.leaves_equal(_tested(algorithm, state, seen)["shared"], state.model["shared"])


@pytest.mark.parametrize("client", [4, -1])
def test_a_client_that_does_not_exist_cannot_test(client):
    algorithm = _build()
    with pytest.raises(ValueError, match=rf"client={client} must be an integer in \[0, 4\)"):
        _tested(algorithm, algorithm.init(KEY, DATA), client)


def test_a_round_from_which_no_client_returns_leaves_server_and_momentum_alone():
    server = {"server_optimizer": optax.adam, "server_lr": 0.3}
    before, _ = _run(_build(**server), 2)
    after, _ = _run(_build(_adds(weight=lambda data: 0), **server), 1, before)
    assert problems.leaves_equal((after.model, after.optimizer, after.seen), (before.model, before.optimizer, before.seen))
    assert before.optimizer[0].count == 2 and after.round == 3


def test_a_client_of_weight_0_counts_for_nothing_even_if_it_diverged():
    def client(key, received, data):
        trained = _adds()(key, received, data)
        lost = _who(data) == 2
        model = jax.tree.map(lambda leaf: jnp.where(lost, jnp.nan, leaf), trained.model)
        return trained._replace(model=model, weight=jnp.where(lost, 0, data["train"].size))

    state, _ = _run(_build(client))
    rest = np.array([0, 1, 3])
    np.testing.assert_allclose(state.model["buffer"], 2 + np.average(_gain(rest), weights=SIZES[rest]), rtol=1e-14)
    assert state.seen.tolist() == [True, True, False, True]


def test_a_client_of_weight_0_keeps_what_it_had():
    client = _adds(
        weight=lambda data: jnp.where(_who(data) == 2, 0, data["train"].size),
        memory=lambda received, data, model: received.memory + 1,
    )
    state, info = _run(_build(client, init_memory=lambda *_: jnp.array(7.0)), 2)
    counts = np.array([1, 1, 0, 1])
    np.testing.assert_allclose(state.personal["own"], 5 + 3 * counts * _gain(np.arange(N)), rtol=1e-14)
    # Client 2 has not taken part: its row is not in use, and its memory would start at 7.
    assert state.memory.tolist() == [9, 9, 0, 9] and state.seen.tolist() == [True, True, False, True]
    assert info.returned.tolist() == (counts[info.ids] > 0).tolist()


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (lambda old: {"a": old["a"], "b": old["b"].astype(jnp.float32)}, r"\['b'\] is float32\[3\], not float64\[3\]"),
        (lambda old: {"a": old["a"][None], "b": old["b"]}, r"\['a'\] is int32\[1\], not int32\[\]"),
        (lambda old: {"a": old["a"]}, r"\['b'\] is missing"),
        (lambda old: old | {"c": old["a"]}, r"\['c'\] does not belong there"),
        (lambda old: (), r"\['a'\] is missing"),
    ],
)
def test_a_memory_that_changes_its_form_is_refused_by_leaf(memory, message):
    algorithm = _build(
        _adds(memory=lambda received, data, model: memory(received.memory)),
        init_memory=lambda *_: {"a": jnp.zeros((), jnp.int32), "b": jnp.zeros(3)},
    )
    state = algorithm.init(KEY, DATA)
    with pytest.raises(ValueError, match="a client's memory must keep the form of init_memory: " + message):
        algorithm.round(KEY, state, DATA)


def test_a_memory_that_is_no_tree_of_arrays_is_refused():
    @dataclasses.dataclass
    class Mem:
        count: int = 0

    with pytest.raises(ValueError, match=r"init_memory of method\['kept'\] must be an array of numbers, not .*Mem"):
        _build(_adds(), init_memory=lambda *_: {"kept": Mem()}).init(KEY, DATA)


def test_metrics_of_a_client_are_scalars():
    def client(key, received, data):
        return Trained(received.model, {"gain": jnp.zeros(2)})

    with pytest.raises(ValueError, match=r"metric 'gain' of a client of \w* must be a scalar, not of shape \(2,\)"):
        _run(_build(client))


@pytest.mark.parametrize("leaf", [jnp.array([True, False]), jnp.arange(2), jax.random.key(3)], ids=["bool", "int", "key"])
def test_frozen_leaves_may_be_of_any_type(leaf):
    trainable = {**TRAINABLE, "fixed": False}
    roles = masks.roles(
        {**PERSONAL, "fixed": False}, trainable, frozen={**jax.tree.map(lambda _: False, TRAINABLE), "fixed": True}
    )

    def client(key, received, data):
        return Trained({**received.model, "shared": received.model["shared"] + 1}, {})

    start = {**START, "fixed": leaf}
    state, _ = _run(_build(client, init=lambda key: start, roles=roles))
    np.testing.assert_allclose(state.model["shared"], START["shared"] + 1)
    assert state.model["fixed"].dtype == leaf.dtype and bool(jnp.all(state.model["fixed"] == leaf))


def test_a_model_or_a_mixture_of_another_form_is_refused_by_leaf():
    def client(key, received, data):
        return Trained({**received.model, "own": received.model["own"].astype(jnp.float16)}, {})

    state = _build().init(KEY, DATA)
    with pytest.raises(ValueError, match=r"a client returns: \['own'\] is float16\[\], not float64\[\]"):
        _build(client).round(KEY, state, DATA)
    with pytest.raises(ValueError, match=r"what collaborate returns: \[0\]\['own'\] is float64\[\], not float64\[4\]"):
        _build(collaborate=lambda key, state, cohort, data: ({**cohort.personal, "own": START["own"]}, ())).round(
            KEY, state, DATA
        )


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("aggregator", "expected"),
    [
        (aggregate.median, np.median),
        (aggregate.trimmed_mean(0.3), lambda values: np.sort(values)[1:-1].mean()),
    ],
    ids=["median", "trimmed"],
)
def test_an_aggregator_stands_in_for_the_mean_whatever_the_samples(aggregator, expected, devices):
    client = _adds(statistics=lambda received, data, model: _who(data))
    algorithm = _build(
        client,
        aggregator=aggregator,
        devices=devices,
        lanes=devices,
        init_extra=lambda *_: jnp.zeros(()),
        update_extra=lambda state, mean, weight, clients: mean + 1000 * weight,
    )
    state, _ = _run(algorithm)
    gain = expected(_gain(np.arange(N)))
    np.testing.assert_allclose(state.model["shared"], np.array([1.0, -1.0]) + gain, rtol=1e-14)
    np.testing.assert_allclose(state.model["buffer"], 2 + gain, rtol=1e-14)
    np.testing.assert_allclose(state.extra, expected(np.arange(N)) + 1000 * SIZES.sum(), rtol=1e-14)
    np.testing.assert_allclose(state.personal["own"], 5 + _gain(np.arange(N)), rtol=1e-14)


def test_an_aggregator_ignores_clients_that_did_not_return():
    """Clients 1 to 3 count; a round from which none returns changes nothing."""
    client = _adds(weight=lambda data: jnp.where(_who(data) == 0, 0, 1))
    state, _ = _run(_build(client, aggregator=aggregate.median))
    np.testing.assert_allclose(state.model["buffer"], 2 + _gain(2), rtol=1e-14)
    after, _ = _run(_build(_adds(weight=lambda data: 0), aggregator=aggregate.median), 1, state)
    assert problems.leaves_equal(after.model, state.model)


def test_the_server_optimiser_moves_what_is_trainable_and_buffers_are_averaged():
    """A first step of Adam is lr g / (|g| + eps), whatever the length of g; the buffer moves by the whole mean."""
    state, _ = _run(_build(server_optimizer=optax.adam, server_lr=0.25))
    mean = np.average(_gain(np.arange(N)), weights=SIZES)
    np.testing.assert_allclose(state.model["shared"], np.array([1.0, -1.0]) + 0.25, rtol=1e-7)
    np.testing.assert_allclose(state.model["buffer"], 2 + mean, rtol=1e-14)


def test_momentum_is_carried_from_round_to_round():
    state, _ = _run(_build(server_optimizer=partial(optax.sgd, momentum=0.5), server_lr=0.1), 2)
    first, second = (np.average(_gain(np.arange(N), r), weights=SIZES) for r in (0, 1))
    expected = np.array([1.0, -1.0]) + 0.1 * first + 0.1 * (0.5 * first + second)
    np.testing.assert_allclose(state.model["shared"], expected, rtol=1e-14)


def test_a_pseudo_gradient_is_what_the_server_descends():
    def gradient(received, data, model):
        who = _who(data)
        send = {
            "shared": jnp.stack([who, -2 * who]),
            "own": jnp.nan * who,
            "buffer": received.model["buffer"] - model["buffer"],
        }
        return send

    state, _ = _run(_build(_adds(pseudo_gradient=gradient), server_lr=0.5))
    mean = np.average(np.arange(N), weights=SIZES)
    np.testing.assert_allclose(state.model["shared"], [1 - 0.5 * mean, -1 + mean], rtol=1e-14)
    # Personal leaves are not sent, so that the NaN in their place does no harm.
    np.testing.assert_allclose(state.personal["own"], 5 + _gain(np.arange(N)), rtol=1e-14)


def test_a_sum_of_pseudo_gradients_is_over_those_that_returned():
    gradient = lambda received, data, model: {**model, "shared": jnp.stack([_who(data), -2 * _who(data)])}  # noqa: E731
    late = lambda key, id_: fm.Participation(returned=id_ != 3)  # noqa: E731
    rules = {"weighting": "uniform", "sums_pseudo_gradients": True, "participation": late}
    state, _ = _run(_build(_adds(pseudo_gradient=gradient), server_lr=0.1, **rules))
    total = 0 + 1 + 2
    np.testing.assert_allclose(state.model["shared"], [1 - 0.1 * total, -1 + 0.2 * total], rtol=1e-14)


@pytest.mark.parametrize("prefix", [True, False])
def test_statistics_are_averaged_with_weights_of_their_own(prefix):
    """Each part counts with its own weight; `update_extra` sees the moved model, the old extra and the summed weights."""
    other = lambda data: jnp.where(_who(data) == 1, 0.0, 10.0 - _who(data))  # noqa: E731
    client = _adds(
        statistics=lambda received, data, model: {
            "a": jnp.stack([_who(data)] * 2),
            "b": _who(data) ** 2 + received.extra["b"],
        },
        **(
            {"statistics_weight": lambda received, data, model: {"a": other(data), "b": 1.0 * (_who(data) < 0)}}
            if prefix
            else {}
        ),
    )
    calls = {"init_extra": lambda *_: {"a": jnp.zeros(2), "b": jnp.array(7.0), "w": jnp.zeros(()), "shared": jnp.zeros(2)}}

    def update_extra(state, mean, weight, clients):
        total = weight["a"] if prefix else weight
        return {"a": mean["a"], "b": state.extra["b"] + mean["b"], "w": total, "shared": state.model["shared"]}

    state, _ = _run(_build(client, update_extra=update_extra, **calls))
    who = np.arange(N)
    if prefix:
        weights = np.where(who == 1, 0, 10 - who)
        expected = {"a": np.full(2, np.average(who, weights=weights)), "b": 7.0, "w": weights.sum()}
    else:
        expected = {
            "a": np.full(2, np.average(who, weights=SIZES)),
            "b": 14 + np.average(who**2, weights=SIZES),
            "w": SIZES.sum(),
        }
    assert problems.distance(state.extra, expected | {"shared": state.model["shared"]}) < 1e-13


def test_under_a_rule_statistics_count_where_their_weight_is_above_0():
    """Clients 2 and 3; the server sees the sum of their weights, as the rule sees them alone."""
    client = _adds(
        statistics=lambda received, data, model: _who(data),
        statistics_weight=lambda received, data, model: _who(data) - 1,
    )
    keeps = {"init_extra": lambda *_: jnp.zeros(2), "update_extra": lambda state, mean, weight, _: jnp.stack([mean, weight])}
    state, _ = _run(_build(client, aggregator=aggregate.median, **keeps))
    np.testing.assert_allclose(state.extra, [2.5, 3.0], rtol=1e-14)


def test_clients_remember():
    """A client's memory goes on from where it stopped, and a client that never took part has a fresh one."""
    client = _adds(memory=lambda received, data, model: received.memory * 2 + _who(data))
    algorithm = _build(
        client,
        init_memory=lambda *_: jnp.array(1.0),
        cohort_size=2,
        personalize=lambda key, received, support: received.memory,
    )
    state = algorithm.init(KEY, DATA)
    step, expected = jax.jit(algorithm.round), np.ones(N)
    for r in range(3):
        state, info = step(jax.random.fold_in(KEY, r), state, DATA)
        ids = np.asarray(info.ids)
        expected[ids] = 2 * expected[ids] + ids
    np.testing.assert_array_equal(np.asarray(state.memory)[state.seen], expected[state.seen])
    assert not np.all(state.seen)
    assert [float(_tested(algorithm, state, i)) for i in range(N)] == expected.tolist()
    assert float(_tested(algorithm, state, None)) == 1


def test_clients_collaborate_after_the_server_has_moved():
    """Clients get a mixture of each other's personal leaves; the server's new model and what clients sent are at hand.

    Client 0, of weight 0, keeps what it had, and that is what the others see of it.
    """
    matrix = np.random.default_rng(0).dirichlet(np.ones(N), N)

    def collaborate(key, state, cohort, *_):
        own = combine(jnp.asarray(matrix)[cohort.ids][:, cohort.ids], cohort.personal)
        return own, cohort.memory + cohort.stacked + state.model["buffer"] + 100 * cohort.returned

    client = _adds(
        weight=lambda data: jnp.where(_who(data) == 0, 0, data["train"].size),
        memory=lambda received, data, model: received.memory,
        stacked=lambda received, data, model: 1000 * _who(data),
    )
    state, _ = _run(_build(client, init_memory=lambda *_: jnp.zeros(()), collaborate=collaborate))
    who = np.arange(N)
    own = 5 + np.where(who > 0, _gain(who), 0)
    np.testing.assert_allclose(state.personal["own"], np.where(who > 0, matrix @ own, own), rtol=1e-14)
    buffer = 2 + np.average(_gain(who[1:]), weights=SIZES[1:])
    np.testing.assert_allclose(state.memory, np.where(who > 0, 1000 * who + buffer + 100, 0), rtol=1e-14)


def test_a_new_client_may_have_a_rule_of_its_own():
    algorithm = _build(new_client=lambda key, population, support: population.personal["own"].sum())
    state, _ = _run(algorithm)
    assert float(_tested(algorithm, state, None)) == 5 * N + _gain(np.arange(N)).sum()
    assert _tested(algorithm, state, 1)["own"] == 5 + _gain(1)


def test_a_rule_may_return_plain_numbers():
    def client(key, received, data):
        return Trained(received.model, {"one": 1.0}, stacked=2, weight=1.0)

    state, info = _run(_build(client, collaborate=lambda key, state, cohort, data: (cohort.personal, cohort.memory)))
    assert info.metrics["one"].tolist() == [1.0] * N and bool(jnp.all(state.seen))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohort_size": 0}, "cohort_size=0 must be an integer of at least 1"),
        ({"cohort_size": 2.5}, "cohort_size=2.5 must be an integer of at least 1"),
        ({"lanes": 0}, "lanes=0 must be an integer of at least 1"),
        ({"devices": 0}, "devices=0 must be an integer of at least 1"),
    ],
)
def test_counts_are_checked_when_an_algorithm_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        _build(**options)


def test_server_rules_see_no_rows_and_must_keep_the_form_of_their_state():
    def update_extra(state, mean, weight, clients):
        assert state.personal is None and state.memory is None
        return jnp.zeros(3)

    algorithm = _build(init_extra=lambda *_: jnp.zeros(2), update_extra=update_extra)
    with pytest.raises(ValueError, match=r"what update_extra of method returns: .* is float64\[3\], not float64\[2\]"):
        algorithm.round(KEY, algorithm.init(KEY, DATA), DATA)


def test_a_pseudo_gradient_of_another_form_is_refused():
    algorithm = _build(_adds(pseudo_gradient=lambda received, data, model: {**model, "shared": jnp.zeros(())}))
    with pytest.raises(ValueError, match=r"the pseudo-gradient of a client: \['shared'\] is float64\[\], not float64\[2\]"):
        algorithm.round(KEY, algorithm.init(KEY, DATA), DATA)


def test_a_state_of_other_uploads_is_refused():
    state = _build(uploads=(fm.uploads.clip(1.0),)).init(KEY, DATA)
    with pytest.raises(ValueError, match="the state is of a federation with 1 upload transformations, not 0"):
        _build().round(KEY, state, DATA)


def test_evaluation_uses_the_devices_of_its_federation_and_its_options():
    algorithm = problems.build("fedper", cohort_size=3, devices=1)
    state, _ = fm.simulate(algorithm, problems.data(), key=KEY, rounds=2)
    own = fm.evaluate(algorithm, KEY, state, problems.data())
    server = fm.Federation(own_at_test=False, devices=1)
    other = fm.evaluate(fm.fedper(problems.task()), KEY, state, problems.data(), federation=server)
    assert not np.array_equal(own.confusion, other.confusion)


# ------------------------------------------------------------------------------------------- what a method forgets or misspells

_SENDS = {"statistics": lambda received, data, model: jnp.ones(2)}
_STACKS = {"stacked": lambda received, data, model: jnp.ones(2)}
_NOTHING = {"init_extra": lambda model, data: jnp.zeros(2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "sample"}, "weighting='sample' is unknown"),
        ({"predict": None}, "predict must be a function, not None"),
        ({"update_extra": keep_mean, **_NOTHING}, "update_extra=keep_mean needs statistics_renew_extra=True"),
        ({"travels": 5}, "travels of method must be a function, not 5"),
        ({"update_extra": 5}, "update_extra of method must be a function, not 5"),
        ({"divides_by_statistics": "no"}, "divides_by_statistics='no' must be True or False"),
        ({"refuses": "clip"}, "refuses='clip' of method must be a mapping, e.g. {'clip': 'why'}"),
        ({"refuses": {"clipp": "why"}}, r"refuses of method='clipp' is unknown \(did you mean 'clip'\?\)"),
        ({"client": _adds(**_SENDS)}, "clients of method send statistics that nothing reads"),
        ({"client": _adds(**_STACKS)}, "clients of method send stacked values that nothing reads"),
        (
            {"client": _adds(), "update_extra": keep_mean, "statistics_renew_extra": True, **_NOTHING},
            "with update_extra=keep_mean, statistics of clients must have the form of init_extra",
        ),
        ({"collaborate": lambda key, state, cohort, data: cohort.personal}, "what collaborate of method returns must be"),
        ({"collaborate": lambda key, state, cohort, data: None}, "what collaborate of method returns must be"),
        (
            {"collaborate": lambda key, state, cohort, data: (cohort.personal, cohort.memory, {"gain": jnp.zeros(2)})},
            "collaborate of method measures 'gain', which is a metric of its clients, too: give theirs another name",
        ),
    ],
)
def test_what_a_method_forgets_or_misspells_is_one_line_that_names_it(options, message):
    with pytest.raises(ValueError, match=message) as error:
        algorithm = _build(**options)
        jax.eval_shape(algorithm.round, KEY, jax.eval_shape(algorithm.init, KEY, DATA), DATA)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("server_optimizer", optax.adam, r"server_optimizer must be an optimiser with its rate, e.g. optax.adam\(0.1\)"),
        ("collaborate", print, r"collaborate must be fm.Collaboration\(mix, reads=..., gives=...\)"),
    ],
)
def test_fields_that_a_federation_has_otherwise(field, given, message):
    parts = {"init": lambda key: START, "client": _adds(), "personalize": fm.received_model, "predict": lambda variables, x: x}
    with pytest.raises(ValueError, match=message):
        Method(**parts, roles=masks.roles(PERSONAL, TRAINABLE), **{field: given})


@pytest.mark.parametrize(
    ("name", "federation"),
    [
        ("aggregator", {"aggregator": aggregate.median}),
        ("participation", {"participation": fm.participation.unreliable(late=0.5)}),
        ("attack", {"attack": fm.attacks.sign_flip(0.5)}),
        ("a part of the clients", {"cohort_size": 2}),
        ("a part of the clients", {"schedule": fm.schedules.given([[0, 1]]), "cohort_size": 2}),
        ("a part of the clients", {"schedule": fm.schedules.poisson(0.5)}),
    ],
)
def test_a_method_may_refuse_parts_of_a_federation(name, federation):
    with pytest.raises(ValueError, match="method .*: it says so"):
        algorithm = _build(refuses={name: "it says so"}, **{"cohort_size": N, **federation})
        jax.eval_shape(algorithm.init, KEY, DATA)
    algorithm = _build(refuses={name: "it says so"}, cohort_size=N)
    jax.eval_shape(algorithm.init, KEY, DATA)
