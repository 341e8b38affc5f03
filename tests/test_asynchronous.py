"""Asynchronous schedules: the timetable against a plain simulation, rounds against NumPy, and what is refused.

FedBuff (facebookresearch/FLSim, flsim/optimizers/async_aggregators.py): the server steps along the mean of s(tau) (w_then - w_i)
of K arrivals. FedAsync: w = (1 - a s(tau)) w + a s(tau) w_i.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import aggregate, costs, schedules, uploads
from tests import problems
from tests.whole_rounds.world import (
    HEAD,
    KEY,
    NOTHING,
    TRAIN,
    N,
    data,
    descend,
    epochs,
    flat,
    flat_rows,
    near,
    order_key,
    task,
)

SECONDS = np.array([1.0, 1.6, 2.3, 3.1, 7.0])
OPTIONS = {"rounds": 7, "buffer_size": 2, "concurrency": 4, "most_stale": 6}


def plainly(seconds, rounds, size):
    """Arrivals when every client that is not in the buffer trains: (cohorts, staleness, times), client by client in time."""
    finish, version_of, version, buffer, rows = seconds.copy(), np.zeros(len(seconds), int), 0, [], []
    while len(rows) < rounds:
        now = finish.min()
        for i in np.flatnonzero(np.isclose(finish, now, rtol=1e-9, atol=0)):
            buffer.append(i)
            finish[i] = np.inf
            if len(buffer) == size:
                rows.append((sorted(buffer), [version - version_of[j] for j in sorted(buffer)], now))
                version += 1
                for j in buffer:
                    finish[j] = -1
                buffer = []
        free = finish == -1
        finish[free], version_of[free] = now + seconds[free], version
    return tuple(np.array(part) for part in zip(*rows, strict=True))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_timetable_of_all_clients_is_that_of_a_plain_simulation(size):
    table = schedules.fedbuff(SECONDS, rounds=30, buffer_size=size, concurrency=5, most_stale=40)
    for found, expected in zip((table.cohorts, table.staleness, table.times), plainly(SECONDS, 30, size), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert (table.staleness.max() > 0) == (size < 5)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_clients_train_at_a_time_as_may_and_staleness_counts_steps(concurrency):
    table = schedules.fedbuff(SECONDS, rounds=60, buffer_size=2, concurrency=concurrency, most_stale=60, seed=3)
    steps = np.r_[0.0, table.times]
    version = np.arange(60)[:, None] - table.staleness
    # A client arrives after it was given its model, between that step of the server and the next, by its own time.
    arrival = table.times[:, None]
    began = steps[version]
    assert np.all(began + SECONDS[table.cohorts] <= arrival + 1e-9)
    assert all(len(set(row)) == 2 for row in table.cohorts.tolist())
    assert set(np.unique(table.cohorts)) == set(range(5))
    # Somebody is always idle, so that as many train as may, also while others wait in the buffer; at the end, some are not done.
    work, end = np.sum(SECONDS[table.cohorts]), table.times[-1]
    assert concurrency * (end - SECONDS.max()) <= work <= concurrency * end + 1e-9


def test_clients_of_one_speed_are_synchronous():
    table = schedules.fedbuff(np.full(7, 2.0), rounds=3, buffer_size=7, concurrency=7, most_stale=0)
    assert not table.staleness.any() and table.times.tolist() == [2.0, 4.0, 6.0]
    method = fm.fedavg(problems.task(), lr=0.1, epochs=2)
    states = []
    for schedule in (table, schedules.uniform):
        algorithm = fm.federate(method, fm.Federation(cohort_size=7, schedule=schedule, devices=1))
        state, step = algorithm.init(KEY, problems.data()), jax.jit(algorithm.round)
        for number in range(3):
            state, _ = step(jax.random.fold_in(KEY, number), state, problems.data())
        states.append(state)
    assert problems.leaves_equal(states[0].model, states[1].model)
    assert states[1].aggregation.past == ()


@pytest.mark.parametrize("unit", [0.1, 1 / 3, 1e-7, 1e6])
def test_a_timetable_does_not_depend_on_the_unit_of_time(unit):
    """In tenths, three rounds of the fast clients are not one of the slow client, but for rounding."""
    options = {"rounds": 40, "buffer_size": 1, "concurrency": 3, "most_stale": 40}
    seconds = np.array([1.0, 1.0, 3.0, 2.0])
    one, other = (schedules.fedbuff(times, **options) for times in (seconds, seconds * unit))
    np.testing.assert_array_equal(one.cohorts, other.cohorts)
    np.testing.assert_array_equal(one.staleness, other.staleness)
    np.testing.assert_allclose(one.times * unit, other.times)


def run(algorithm, count, state=None):
    state, step, infos = algorithm.init(KEY, data()) if state is None else state, jax.jit(algorithm.round), []
    for _ in range(count):
        state, info = step(jax.random.fold_in(KEY, state.round), state, data())
        infos.append(info)
    return state, infos


NORM = 0.2
"""To which some changes are clipped."""


@pytest.mark.parametrize("personal", [NOTHING, HEAD], ids=["fedavg", "fedper"])
@pytest.mark.parametrize("weight", ["polynomial", "hinge", "constant"])
def test_rounds_of_fedbuff(personal, weight):
    table = schedules.fedbuff(SECONDS, **OPTIONS, staleness_weight=weight, exponent=0.7, grace=1)
    method = (fm.fedper if personal.any() else fm.fedavg)(task(), lr=0.2, epochs=2, batch_size=4)
    # A client clips what it sends, and the server weighs that.
    clips = {"uploads": (uploads.clip(NORM),)} if weight == "hinge" else {}
    algorithm = fm.federate(method, fm.Federation(cohort_size=2, schedule=table, server_lr=0.8, devices=1, **clips))
    models, own = [flat(algorithm.init(KEY, data()).model)], {}
    for t, (ids, lags) in enumerate(zip(table.cohorts.tolist(), table.staleness.tolist(), strict=True)):
        falls, trained = [], {}
        for i, lag in zip(ids, lags, strict=True):
            given = models[t - lag]
            start = np.where(personal, own.get(i, given), given)
            trained[i] = descend(start, 0.2, epochs(order_key(t, i), i, "train", 4, 2))
            s = {"polynomial": (1 + lag) ** -0.7, "hinge": 1 if lag <= 1 else 1 / (0.7 * (lag - 1) + 1), "constant": 1}[weight]
            fall = np.where(personal, 0, given - trained[i])
            falls.append(s * fall * (min(1, NORM / np.linalg.norm(fall)) if clips else 1))
        fall = np.average(falls, 0, [TRAIN[i] for i in ids])
        models.append(np.where(personal, models[-1], models[-1] - 0.8 * fall))
        own |= trained
    assert table.staleness.max() > 2
    state, infos = run(algorithm, OPTIONS["rounds"])
    near(flat(state.model), models[-1])
    near(flat_rows(state.personal), np.array([own[i] for i in range(N)])[:, personal])
    for t, info in enumerate(infos):
        np.testing.assert_array_equal(info.metrics["staleness"], table.staleness[t])
        near(info.metrics["virtual_seconds"], table.times[t])


def test_rounds_of_fedasync():
    table = schedules.fedasync(SECONDS, rounds=7, concurrency=4, most_stale=6)
    federation = fm.Federation(cohort_size=1, schedule=table, server_lr=0.6, devices=1)
    algorithm = fm.federate(fm.fedavg(task(), lr=0.2, batch_size=4), federation)
    models = [flat(algorithm.init(KEY, data()).model)]
    for t, ((i,), (lag,)) in enumerate(zip(table.cohorts.tolist(), table.staleness.tolist(), strict=True)):
        trained = descend(models[t - lag], 0.2, epochs(order_key(t, i), i, "train", 4))
        share = 0.6 / np.sqrt(1 + lag)
        models.append((1 - share) * models[-1] + share * trained)
    assert table.staleness.max() > 2
    near(flat(run(algorithm, 7)[0].model), models[-1])


def test_a_rate_that_changes_by_rounds_is_that_of_the_round_in_which_a_client_began():
    table = schedules.fedasync(SECONDS, rounds=7, concurrency=4, most_stale=6, staleness_weight="constant")
    method = fm.rates.scheduled(fm.fedavg, task(), rates={"lr": lambda round_: 0.3 * 0.5**round_}, batch_size=4)
    algorithm = fm.federate(method, fm.Federation(cohort_size=1, schedule=table, server_lr=0.6, devices=1))
    models = [flat(algorithm.init(KEY, data()).model)]
    for t, ((i,), (lag,)) in enumerate(zip(table.cohorts.tolist(), table.staleness.tolist(), strict=True)):
        trained = descend(models[t - lag], 0.3 * 0.5 ** (t - lag), epochs(order_key(t, i), i, "train", 4))
        models.append(0.4 * models[-1] + 0.6 * trained)
    near(flat(run(algorithm, 7)[0].model), models[-1])


@pytest.mark.parametrize("weight", ["polynomial", "hinge"])
def test_a_timetable_of_fedasync_is_that_of_a_buffer_of_one(weight):
    """Its idle clients are chosen by the same seed, and its updates count as much."""
    options = {"rounds": 12, "concurrency": 3, "most_stale": 12, "staleness_weight": weight, "exponent": 0.8, "grace": 1}
    mixed = schedules.fedasync(SECONDS, **options, seed=5)
    one, other = (schedules.fedbuff(SECONDS, **options, buffer_size=1, seed=seed) for seed in (5, 0))
    np.testing.assert_array_equal(mixed.cohorts, one.cohorts)
    np.testing.assert_array_equal(mixed.staleness, one.staleness)
    assert (one.cohorts != other.cohorts).any()
    for lag in range(5):
        s = (1 + lag) ** -0.8 if weight == "polynomial" else 1 / (0.8 * max(lag - 1, 0) + 1)
        near(mixed.weight(jnp.asarray(lag)), s)


@pytest.mark.parametrize("chain", [(), (uploads.clip(100.0),)], ids=["values", "differences"])
@pytest.mark.parametrize("server", ["plain", "momentum"])
def test_fedasync_mixes_buffers_like_models(chain, server):
    """Every client adds its number of samples to the buffer that it was given."""
    data = fm.from_clients([(np.ones((20 + i, 3)), np.ones(20 + i, int)) for i in range(4)], num_classes=2)

    def client(key, received, samples):
        return fm.Trained(received.model | {"b": received.model["b"] + samples["train"].size}, {})

    method = fm.Method(
        init=lambda key: {"w": jnp.zeros((3, 2)), "b": jnp.zeros(())},
        client=client,
        personalize=fm.received_model,
        predict=lambda variables, x: x @ variables["w"],
        roles=fm.masks.roles({"w": False, "b": False}, {"w": True, "b": False}),
    )
    table = schedules.fedasync([1.0, 1.5, 3, 4], rounds=8, concurrency=4, most_stale=10)
    optimizer = {} if server == "plain" else {"server_optimizer": partial(optax.sgd, momentum=0.9)}
    federation = fm.Federation(cohort_size=1, schedule=table, server_lr=0.6, uploads=chain, **optimizer)
    state, _ = fm.simulate(method, data, key=jax.random.key(0), rounds=8, federation=federation)
    versions, sizes = [0.0], data.sizes("train")
    for (i,), (lag,) in zip(table.cohorts, table.staleness, strict=True):
        share = (0.6 if server == "plain" else 1.0) / np.sqrt(1 + lag)
        versions.append((1 - share) * versions[-1] + share * (versions[len(versions) - 1 - lag] + sizes[i]))
    assert table.staleness.max() > 1
    assert float(state.model["b"]) == pytest.approx(versions[-1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"uploads": (uploads.clip(1e6),)},
        {"uploads": (uploads.sparsify(1.0),)},
    ],
    ids=["values", "clip", "sparsify"],
)
def test_fedbuff_averages_buffers_as_they_come(options):
    """A running variance goes half of the way to 0.1 at each client; how it travels must not matter."""
    data = fm.from_clients([(np.ones((20, 3)), np.ones(20, int))] * 4, num_classes=2)

    def client(key, received, samples):
        return fm.Trained(received.model | {"var": 0.5 * received.model["var"] + 0.05}, {})

    method = fm.Method(
        init=lambda key: {"w": jnp.zeros((3, 2)), "var": jnp.ones(())},
        client=client,
        personalize=fm.received_model,
        predict=lambda variables, x: x @ variables["w"],
        roles=fm.masks.roles({"w": False, "var": False}, {"w": True, "var": False}),
    )
    table = schedules.fedbuff([1.0, 1.5, 3, 4], rounds=8, buffer_size=2, concurrency=4, most_stale=10)
    federation = fm.Federation(cohort_size=2, schedule=table, server_lr=1.0, devices=1, **options)
    state, _ = fm.simulate(method, data, key=jax.random.key(0), rounds=8, federation=federation)
    versions = [1.0]
    for lags in table.staleness:
        versions.append(np.mean([0.5 * versions[len(versions) - 1 - lag] + 0.05 for lag in lags]))
    assert table.staleness.max() > 1
    assert float(state.model["var"]) == pytest.approx(versions[-1])


def test_a_timetable_starts_again_after_its_last_row():
    table = schedules.fedbuff(SECONDS, **{**OPTIONS, "rounds": 3})
    algorithm = fm.federate(fm.fedavg(task(), lr=0.2), fm.Federation(cohort_size=2, schedule=table, devices=1))
    _, infos = run(algorithm, 5)
    assert [info.ids.tolist() for info in infos[3:]] == table.cohorts[:2].tolist()
    assert [info.metrics["staleness"].tolist() for info in infos[3:]] == table.staleness[:2].tolist()
    assert table.staleness[2].any() and not table.staleness[0].any()
    near(infos[4].metrics["virtual_seconds"], table.times[2] + table.times[1])


def test_a_resumed_run_on_other_devices_or_in_a_host_store_is_the_same():
    table = schedules.fedbuff(SECONDS, **OPTIONS)
    build = lambda **o: fm.federate(fm.ditto(task()), fm.Federation(cohort_size=2, schedule=table, **o))  # noqa: E731
    whole, _ = run(build(devices=1, lanes=1), 6)
    half, _ = run(build(devices=1, lanes=1), 3)
    assert problems.leaves_equal(run(build(devices=1, lanes=1), 3, half)[0], whole)
    assert problems.distance(run(build(devices=2, lanes=2), 6)[0], whole) < 1e-10
    host = jax.tree.map(np.asarray, data())
    stored, _ = fm.simulate(build(devices=1, lanes=1), host, key=KEY, rounds=6, store="memory")
    plain, _ = fm.simulate(build(devices=1, lanes=1), host, key=KEY, rounds=6)
    assert problems.distance(stored, plain) < 1e-12


def test_only_what_the_server_changes_has_a_past():
    """A large frozen base (LoRA) and personal leaves would be kept once for each version."""
    algorithm = fm.federate(fm.fedper(task()), fm.Federation(cohort_size=2, schedule=schedules.fedbuff(SECONDS, **OPTIONS)))
    state = jax.eval_shape(algorithm.init, KEY, data())
    personal, shared = fm.masks.split(state.model, fm.masks.resolve("head", task()))
    versions = OPTIONS["most_stale"] + 1
    kept = [leaf.shape for leaf in jax.tree.leaves(state.aggregation.past)]
    assert jax.tree.leaves(personal) and kept == [(versions, *leaf.shape) for leaf in jax.tree.leaves(shared)]


def test_a_client_that_breaks_leaves_the_past_finite():
    table = schedules.fedbuff(SECONDS, **OPTIONS)
    algorithm = fm.federate(
        fm.fedavg(task(), lr=0.2), fm.Federation(cohort_size=2, schedule=table, devices=1, max_dropped=1.0)
    )
    x = np.array(data().x)
    x[: int(data().size["train"][0])] = np.nan
    state, step = algorithm.init(KEY, data()), jax.jit(algorithm.round)
    for _ in range(6):
        state, _ = step(jax.random.fold_in(KEY, state.round), state, dataclasses.replace(data(), x=jnp.asarray(x)))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.aggregation.past))


def test_every_method_runs_or_is_refused_by_name():
    table = schedules.fedbuff(np.arange(1.0, 8), rounds=4, buffer_size=3, concurrency=5, most_stale=5)
    refused = set()
    for name, builder in fm.METHODS.items():
        method = builder(problems.task_of(name))
        try:
            algorithm = fm.federate(method, fm.Federation(cohort_size=3, schedule=table, devices=1))
        except ValueError as error:
            assert str(error).startswith(name) and "uploads are changes of shared leaves alone" in str(error)
            refused.add(name)
            continue
        state = jax.eval_shape(algorithm.init, KEY, problems.data())
        after, _ = jax.eval_shape(algorithm.round, KEY, state, problems.data())
        assert problems.forms(after) == problems.forms(state)
    assert {"scaffold", "feddyn", "fednova", "qfedavg", "fedpac", "ifca", "pfedhn", "fedamp"} <= refused
    assert not refused & {
        "fedavg",
        "fedprox",
        "ditto",
        "fedper",
        "fedrep",
        "fedmeta",
        "fedmeta_server",
        "anil",
        "fedadam",
        "moon",
    }


def test_gradients_are_no_models_to_mix():
    table = schedules.fedasync(np.arange(1.0, 8), rounds=4, concurrency=5, most_stale=9)
    algorithm = fm.federate(fm.fedmeta_server(problems.task()), fm.Federation(cohort_size=1, schedule=table, devices=1))
    with pytest.raises(ValueError, match="fedmeta_server send gradients, but fedasync mixes their models"):
        jax.eval_shape(algorithm.round, KEY, jax.eval_shape(algorithm.init, KEY, problems.data()), problems.data())


def test_the_testbed_gives_the_times():
    traffic = costs.traffic(fm.fedavg(problems.task()), problems.data())
    seconds = costs.seconds_by_client(traffic, 1e9, costs.RASPBERRY_PIS, num_clients=7)
    table = schedules.fedbuff(seconds, rounds=50, buffer_size=1, concurrency=7, most_stale=20)
    # The faster half takes half of the time, and so arrives about twice as often.
    fast = seconds < seconds.max()
    counts = np.bincount(table.cohorts.ravel(), minlength=7)
    assert counts[fast].mean() > 1.5 * counts[~fast].mean()


FEDBUFF = {"rounds": 5, "buffer_size": 2, "concurrency": 4, "most_stale": 6}
BAD = [
    ({"seconds": [1.0, 0.0]}, "seconds=.* must be finite and above 0"),
    ({"seconds": [[1.0, 2.0]]}, r"one time for each client, \[N\], not the shape \[1, 2\]"),
    ({"rounds": 0}, "rounds=0 must be an integer of at least 1"),
    ({"buffer_size": 6}, "buffer_size=6 is more than the N=5 clients"),
    ({"concurrency": 6}, "concurrency=6 is more than the N=5 clients"),
    ({"most_stale": -1}, "most_stale=-1 must be an integer of at least 0"),
    ({"most_stale": 1, "rounds": 20}, r"most_stale=1 is too few: an update of round \d+ lags \d steps behind"),
    ({"staleness_weight": "linear"}, "staleness_weight='linear' is unknown; allowed are constant, polynomial, hinge"),
    ({"exponent": 0}, "exponent=0 must be finite and above 0"),
    ({"grace": -1}, "grace=-1 must be an integer of at least 0"),
    ({"seed": -1}, "seed=-1 must be an integer of at least 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_wrong_argument_is_named(options, message):
    given = {"seconds": SECONDS, **FEDBUFF, **options}
    with pytest.raises(ValueError, match=message):
        schedules.fedbuff(given.pop("seconds"), **given)


def test_what_cannot_go_with_it_is_refused():
    table = schedules.fedbuff(SECONDS, **FEDBUFF)
    with pytest.raises(
        ValueError, match="fedbuff was made for N=5 clients and a buffer of 2, but there are N=5 and cohort_size=3"
    ):
        run(fm.federate(fm.fedavg(task()), fm.Federation(cohort_size=3, schedule=table, devices=1)), 1)
    noisy = fm.Federation(cohort_size=2, schedule=table, uploads=(uploads.clip(1.0), uploads.noise(1.0)))
    with pytest.raises(ValueError, match="fedbuff draws no cohorts at random, which noise needs"):
        fm.federate(fm.fedavg(task()), noisy)
    # The rule would see s(tau) times a change.
    for rule in (aggregate.norm_bounding(1.0), aggregate.centered_clipping(), aggregate.fltrust(data().client(0))):
        with pytest.raises(ValueError, match=f"{rule.name} would bound changes that fedbuff has weighed by their staleness"):
            fm.federate(fm.fedavg(task()), fm.Federation(cohort_size=2, schedule=table, aggregator=rule))
    with pytest.raises(ValueError, match="average_personal takes means of whole leaves"):
        fm.federate(fm.fedper(task()), fm.Federation(cohort_size=2, schedule=table, average_personal=True))


# Every client adds 1 to `w` and to the buffer `b` that it was given.
FOUR = [(np.ones((20, 3)), np.ones(20, int))] * 4
WAYS = {
    "values": {},
    "clip": {"uploads": (uploads.clip(1e6),)},
    "sparsify": {"uploads": (uploads.sparsify(1.0),)},
}
"""Ways of uploads, none of which changes a number."""


def adder():
    def client(key, received, samples):
        return fm.Trained(jax.tree.map(lambda leaf: leaf + 1, received.model), {})

    return fm.Method(
        init=lambda key: {"w": jnp.zeros((3, 2)), "b": jnp.zeros(())},
        client=client,
        personalize=fm.received_model,
        predict=lambda variables, x: x @ variables["w"],
        roles=fm.masks.roles({"w": False, "b": False}, {"w": True, "b": False}),
    )


def added(table, **options):
    """The model after all rounds of a schedule."""
    federation = fm.Federation(cohort_size=table.cohorts.shape[1], schedule=table, **options)
    data = fm.from_clients(FOUR, num_classes=2)
    return fm.simulate(adder(), data, key=jax.random.key(0), rounds=len(table.cohorts), federation=federation)[0].model


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (schedules.fedasync([1.0, 1.5, 3, 4], rounds=8, concurrency=4, most_stale=10), "staleness"),
        (schedules.fedasync([1.0, 1.5, 3, 4], rounds=8, concurrency=4, most_stale=10), "virtual_seconds"),
        (schedules.poisson(0.25), "left_out"),
    ],
)
def test_a_metric_of_clients_may_not_hide_one_of_the_round(schedule, name):
    method = dataclasses.replace(
        adder(), client=lambda key, received, samples: fm.Trained(received.model, {name: jnp.zeros(())})
    )
    algorithm = fm.federate(method, fm.Federation(cohort_size=1, schedule=schedule))
    data = fm.from_clients(FOUR, num_classes=2)
    with pytest.raises(ValueError, match=f"a round of .* measures '{name}', which is a metric of its clients, too"):
        jax.eval_shape(lambda: algorithm.round(jax.random.key(0), algorithm.init(jax.random.key(0), data), data))


@pytest.mark.parametrize(("most", "diverged"), [(0.5, True), (1.0, False)])
def test_cohorts_of_one_may_be_left_out_without_end(most, diverged):
    """Client 1 always breaks; the others add 1."""

    def client(key, received, samples):
        step = jnp.where(samples["train"].size > 20, jnp.nan, 1.0)
        return fm.Trained(jax.tree.map(lambda leaf: leaf + step, received.model), {})

    table = schedules.fedasync([1.0, 1.5, 3, 4], rounds=8, concurrency=4, most_stale=10)
    clients = [(np.ones((20 + 20 * (i == 1), 3)), np.ones(20 + 20 * (i == 1), int)) for i in range(4)]
    federation = fm.Federation(cohort_size=1, schedule=table, max_dropped=most)
    method, data = dataclasses.replace(adder(), client=client), fm.from_clients(clients, num_classes=2)
    state, (*_, record) = fm.simulate(method, data, key=jax.random.key(0), rounds=8, eval_every=8, federation=federation)
    lost = [place + 1 for place, (i,) in enumerate(table.cohorts) if i == 1]
    assert lost and [(fault.round, fault.diverged) for fault in record.faults] == [(place, diverged) for place in lost]
    assert problems.finite(state)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attack", [fm.attacks.sign_flip((1,)), fm.attacks.ipm((1,), scale=1.0)], ids=["alone", "together"])
def test_an_attacker_lies_about_the_buffers_that_it_was_given(attack, way):
    """The attacker takes 1 from it in place of adding it."""
    table = schedules.fedbuff([1.0, 1.5, 3, 4], rounds=8, buffer_size=2, concurrency=4, most_stale=10)
    assert any(1 in ids and lag[ids.tolist().index(1)] for ids, lag in zip(table.cohorts, table.staleness, strict=True))
    versions = [0.0]
    for ids, lags in zip(table.cohorts, table.staleness, strict=True):
        given = [versions[len(versions) - 1 - lag] for lag in lags]
        versions.append(np.mean([b + (-1 if i == 1 else 1) for i, b in zip(ids, given, strict=True)]))
    assert float(added(table, server_lr=1.0, attack=attack, **WAYS[way])["b"]) == pytest.approx(versions[-1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("attack", "step"), [(None, 1), (fm.attacks.sign_flip((1,)), -1), (fm.attacks.gaussian((1,), deviation=1e-12), 0)]
)
def test_fedasync_mixes_what_a_client_made_of_the_model_that_it_was_given(attack, step, way):
    """Shared leaves and buffers alike, by hand: client 1 moves by `step`, the others by 1."""
    table = schedules.fedasync([1.0, 1.5, 3, 4], rounds=8, concurrency=4, most_stale=10)
    versions = [0.0]
    for (i,), (lag,) in zip(table.cohorts, table.staleness, strict=True):
        share = 0.6 / np.sqrt(1 + lag)
        trained = versions[len(versions) - 1 - lag] + (step if i == 1 else 1)
        versions.append((1 - share) * versions[-1] + share * trained)
    model = added(table, server_lr=0.6, attack=attack, **WAYS[way])
    for leaf in jax.tree.leaves(model):
        np.testing.assert_allclose(leaf, versions[-1], rtol=1e-9)


def test_fedasync_clips_what_a_client_changed_not_how_far_the_server_moved_on():
    """Nobody moves by more than the norm of the clip, but the server is far from where slow clients began."""
    table = schedules.fedasync([1.0, 1.1, 1.2, 9], rounds=40, concurrency=4, most_stale=40)
    norm = np.sqrt(7)  # of a change by 1 in w and b
    free, clipped = (added(table, server_lr=0.6, uploads=(uploads.clip(most),)) for most in (1e6, 1.01 * norm))
    assert table.staleness.max() > 20
    assert problems.distance(free, clipped) < 1e-12


def test_the_oldest_model_that_is_kept_is_that_of_the_stalest_update():
    """Over many times as many rounds as models are kept."""
    options = {"rounds": 30, "concurrency": 4}
    most = int(schedules.fedasync([1.0, 1.5, 3, 4], **options, most_stale=30).staleness.max())
    table = schedules.fedasync([1.0, 1.5, 3, 4], **options, most_stale=most)
    versions = [0.0]
    for lag in table.staleness[:, 0]:
        share = 0.6 / np.sqrt(1 + lag)
        versions.append((1 - share) * versions[-1] + share * (versions[len(versions) - 1 - lag] + 1))
    assert 1 < most < 10 and (table.staleness[most + 1 :] == most).any()
    np.testing.assert_allclose(added(table, server_lr=0.6)["w"], versions[-1], rtol=1e-9)


def test_a_step_for_which_nobody_returns_is_a_version_like_any_other():
    """Clients 2 and 3 are always late: after their steps the server stands where it was, and that is what others are given."""
    table = schedules.fedasync([1.0, 1.5, 3, 4], rounds=12, concurrency=4, most_stale=10)
    versions, lost, starts = [0.0], set(), set()
    for (i,), (lag,) in zip(table.cohorts, table.staleness, strict=True):
        given = len(versions) - 1 - lag
        share = 0.6 / np.sqrt(1 + lag) if i < 2 else 0
        starts |= {given} if i < 2 else set()
        versions.append((1 - share) * versions[-1] + share * (versions[given] + 1))
        lost |= {len(versions) - 1} if i > 1 and versions[-1] > 0 else set()
    assert lost & starts, "somebody must be given a version that the server did not move to"
    model = added(table, server_lr=0.6, participation=lambda key, id_: fm.Participation(returned=id_ < 2))
    for leaf in jax.tree.leaves(model):
        np.testing.assert_allclose(leaf, versions[-1], rtol=1e-9)


def test_a_rule_of_the_server_gets_changes_weighed_by_their_staleness_and_buffers_as_they_are():
    """The largest of two: of changes, which are sent as falls, that is the one of the stalest."""
    largest = lambda stacked, weights: jax.tree.map(lambda leaf: jnp.max(leaf, 0), stacked)  # noqa: E731
    table = schedules.fedbuff([1.0, 1.5, 3, 4], rounds=8, buffer_size=2, concurrency=4, most_stale=10, exponent=0.7)
    w, b = 0.0, [0.0]
    for lags in table.staleness:
        w += 0.8 * np.min((1.0 + lags) ** -0.7)
        b.append(max(b[len(b) - 1 - lag] + 1 for lag in lags))
    assert table.staleness.max() > 1
    model = added(table, server_lr=0.8, aggregator=largest)
    np.testing.assert_allclose(model["w"], w, rtol=1e-9)
    np.testing.assert_allclose(model["b"], b[-1], rtol=1e-9)
