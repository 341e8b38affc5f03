"""A run with a host store equals the run on the device, which holds only the rows of a cohort."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import checkpoint, costs, host_store, placement
from fedjax_meta.algorithm import ROWS
from fedjax_meta.data import capacity
from fedjax_meta.rows import positions_among
from fedjax_meta.simulation import Evaluator, simulate
from tests import problems

KEY = jax.random.key(11)
SYSTEMS = {
    "fedper": {},
    "scaffold": {},  # memories, and a server that counts the whole population
    "fedfomo": {},  # memories [N] long, and clients that name each other
}


def _algorithm(name, **options):
    return problems.build(name, **({"cohort_size": 4, "devices": 1} | options))


def _tests(algorithm, *, new=False, devices=1):
    def measure(known):
        return lambda key, state, data: fm.evaluate(algorithm, key, state, data, known=known, devices=devices)

    tests = {"known": Evaluator(measure(True), problems.data(), known=True)}
    return tests | ({"new": Evaluator(measure(False), problems.data(), known=False)} if new else {})


def _run(name, rounds=9, new=True, **options):
    algorithm = _algorithm(name)
    tests = _tests(algorithm, new=new)
    return simulate(algorithm, problems.data(), key=KEY, rounds=rounds, eval_every=4, evaluators=tests, **options)


@cache
def _on_device(name):
    return _run(name)


def _close(a, b):
    """States and records of two runs, but for the clock."""
    (first, records), (second, others) = a, b
    assert problems.distance(*jax.tree.map(np.asarray, (first, second))) < 1e-10
    assert [record.round for record in records] == [record.round for record in others]
    for mine, theirs in zip(records, others, strict=True):
        assert problems.distance((mine.metrics, mine.evaluations), (theirs.metrics, theirs.evaluations)) < 1e-10


@pytest.mark.parametrize(
    ("name", "where"),
    problems.chosen(
        itertools.product(SYSTEMS, ["memory", "files"]), lambda name, where: (name == "fedfomo") == (where == "memory")
    ),
)
def test_a_run_with_a_host_store_is_the_run_on_the_device(name, where, tmp_path):
    """Nine rounds of four among seven clients: a client is often in two rounds that follow each other."""
    kept = _run(name, store="memory" if where == "memory" else tmp_path / "clients")
    _close(kept, _on_device(name))
    rows = jax.tree.leaves([getattr(kept[0], field) for field in ROWS])
    assert all(isinstance(leaf, np.memmap if where == "files" else np.ndarray) for leaf in rows)


def test_a_schedule_of_ones_own_runs_in_a_store_as_on_the_device():
    table = np.array([[5, 1, 6, 0], [2, 4, 1, 3]])
    algorithm = _algorithm("fedper", schedule=fm.schedules.given(table))
    runs = [simulate(algorithm, problems.data(), key=KEY, rounds=5, store=store)[0] for store in ("memory", None)]
    assert problems.distance(*(jax.tree.map(np.asarray, run) for run in runs)) < 1e-10
    assert np.all(np.asarray(runs[0].seen))


@pytest.mark.parametrize("samples", ["host", "device"])
@pytest.mark.parametrize(
    ("schedule", "size", "part"),
    [
        # Cohorts of everyone, in an order that is not the population's.
        (fm.schedules.given([[2, 0, 3, 1]]), 4, None),
        (fm.schedules.passes(3), 4, None),
        (fm.schedules.poisson(0.5), 4, None),
        # Empty places, and a part of the clients, from which alone the cohorts come.
        (fm.schedules.poisson(0.4), 3, None),
        (fm.schedules.poisson(0.5), 3, [5, 1, 6, 2]),
    ],
)
def test_a_cohort_in_a_store_has_its_own_rows_whatever_its_order_and_size(schedule, size, part, samples):
    data = problems.clients_of([12, 9, 15, 10] if part is None else [12, 9, 15, 10, 11, 13, 9, 14])
    data = jax.tree.map(np.asarray, data) if samples == "host" else jax.device_put(data)
    data = data if part is None else data.select(np.array(part))
    # A private sum is divided by the expected size of a cohort, which depends on the number of clients.
    private = (fm.uploads.clip(1.0), fm.uploads.noise(0.1, reproducible=True)) if part else ()
    algorithm = _algorithm("fedper", cohort_size=size, schedule=schedule, uploads=private)
    _close(*(simulate(algorithm, data, key=KEY, rounds=4, store=store) for store in ("memory", None)))


@pytest.mark.parametrize("method", [fm.fedpac(problems.task(), keep_mixing=True), fm.fedfomo(problems.task())])
def test_tests_of_some_known_clients_know_how_many_trained(method):
    data, federation = problems.clients_of([12, 9, 15, 10, 11, 13, 9]), fm.Federation(cohort_size=3)
    some = Evaluator(
        lambda key, state, data: fm.evaluate(method, key, state, data, federation=federation),
        dataclasses.replace(problems.clients_of([12, 9, 15, 10]), population=7),
        known=True,
    )
    options = {"key": KEY, "rounds": 2, "federation": federation, "evaluators": {"some": some}}
    _close(*(simulate(method, data, store=store, **options) for store in ("memory", None)))


@pytest.mark.parametrize("samples", ["host", "device"])
def test_clients_that_were_selected_are_tested_in_a_store_as_on_the_device(samples, monkeypatch):
    monkeypatch.setattr(host_store, "_PART_BYTES", 400)
    data = problems.clients_of([12, 9, 15, 10, 11, 13, 9, 14])
    data = (jax.tree.map(np.asarray, data) if samples == "host" else jax.device_put(data)).select(np.array([5, 1, 6, 2]))
    algorithm = _algorithm("fedper", cohort_size=2)
    tests = {"known": Evaluator(lambda key, state, data: fm.evaluate(algorithm, key, state, data), data, known=True)}
    _close(*(simulate(algorithm, data, key=KEY, rounds=3, evaluators=tests, store=store) for store in ("memory", None)))


def test_tests_in_parts_and_several_devices_change_nothing(monkeypatch):
    monkeypatch.setattr(host_store, "_PART_BYTES", 400)
    monkeypatch.setattr(fm.simulation, "_DRAWN_AHEAD", 3)
    parts = list(host_store.client_ranges(7, host_store.row_bytes(_algorithm("fedper").init(KEY, problems.data()))))
    assert 1 < len(parts[0]) < 7 and len(parts[-1]) < len(parts[0])
    algorithm = _algorithm("fedper", devices=2)
    run = simulate(
        algorithm, problems.data(), key=KEY, rounds=9, eval_every=4, evaluators=_tests(algorithm, devices=2), store="memory"
    )
    _close(run, _run("fedper", new=False))


@pytest.mark.parametrize("samples", ["host", "device"])
def test_a_device_holds_only_the_rows_of_a_cohort_and_where_samples_are_on_the_host_only_its_samples(samples, monkeypatch):
    algorithm, data = _algorithm("fedper"), problems.data()
    data = jax.device_put(data) if samples == "device" else jax.tree.map(np.asarray, data)
    before, seen, copies = {id(array) for array in jax.live_arrays()}, set(), set()
    cut = host_store.cohort_data

    def noted(data, ids, room):
        part = cut(data, ids, room)
        copies.add((type(part.x), part.x.shape))
        return part

    monkeypatch.setattr(host_store, "cohort_data", noted)

    def look(state, record):
        seen.update(array.shape for array in jax.live_arrays() if id(array) not in before and array.ndim > 1)

    run = simulate(algorithm, data, key=KEY, rounds=9, eval_every=4, store="memory", on_record=look)
    assert problems.distance(*jax.tree.map(np.asarray, (run[0], _run("fedper", new=False)[0]))) < 1e-10
    assert any(shape[0] == 4 for shape in seen)
    assert not any(shape[0] == data.num_clients for shape in seen)
    room = capacity(data, 4)
    assert room < len(data.x) and data.x.shape not in seen
    assert copies == ({(np.ndarray, (room, *data.x.shape[1:]))} if samples == "host" else {(type(data.x), data.x.shape)})


@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_killed_run_resumes_bit_for_bit(where, tmp_path, monkeypatch):
    place = "memory" if where == "memory" else tmp_path / "clients"
    algorithm, whole = _algorithm("scaffold"), _run("scaffold", store=place)

    def kill(state, record):
        checkpoint.save(tmp_path / "saved", state, [], {})
        if record.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run("scaffold", store=place, on_record=kill)
    # A device without room for all rows can resume, too.
    monkeypatch.setattr(placement, "free_bytes", lambda device: 0)
    like = host_store.state_shapes(algorithm, KEY, problems.data())
    saved = checkpoint.restore(tmp_path / "saved", like, {})
    assert saved.round == 4
    again, records = _run("scaffold", store=place, state=saved.state)
    assert problems.leaves_equal(again, whole[0])
    assert problems.leaves_equal(records[-1].evaluations, whole[1][-1].evaluations)
    # What was saved may also go on on the device.
    monkeypatch.undo()
    assert problems.distance(_run("scaffold", state=saved.state)[0], whole[0]) < 1e-10


def test_a_client_that_breaks_is_named_where_the_device_has_no_room_for_all_rows(monkeypatch):
    algorithm, data = _algorithm("fedper"), problems.data()
    x = np.array(data.x)
    x[int(data.start["train"][0]) :][: int(data.size["train"][0])] = np.nan
    odd = dataclasses.replace(data, x=x)
    monkeypatch.setattr(placement, "free_bytes", lambda device: 0)
    _, records = simulate(algorithm, odd, key=KEY, rounds=4, store="memory")
    assert any(fault.clients == (0,) and fault.leaf for record in records for fault in record.faults)
    assert min(costs.traffic(algorithm, data)) > 0
    for run in (lambda: simulate(algorithm, data, key=KEY, rounds=1), lambda: algorithm.init(KEY, data.select(np.arange(5)))):
        with pytest.raises(ValueError, match="but only 0 bytes are free"):
            run()


def test_truncated_rows_on_disk_are_refused(tmp_path):
    run = _run("fedper", rounds=1, store="memory")
    path = checkpoint.save(tmp_path, run[0], [], {})
    like = jax.eval_shape(_algorithm("fedper").init, KEY, problems.data())
    odd = like._replace(seen=jax.ShapeDtypeStruct((7,), jnp.int8))
    with pytest.raises(ValueError, match=r"\.seen is bool\[7\], not int8\[7\]"):
        checkpoint.restore(tmp_path, odd, {})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="truncated"):
        checkpoint.restore(tmp_path, like, {})


@pytest.mark.parametrize("count", [3, 40])
def test_known_clients_of_very_uneven_size_are_tested_in_parts(count, monkeypatch):
    """The last client is the largest, and would not fit twice where the last part is filled up."""
    monkeypatch.setattr(host_store, "_PART_BYTES", 20_000)
    rng = np.random.default_rng(count)
    sizes = [12] * (count - 1) + [300]
    data = fm.from_clients([(rng.normal(size=(n, 5)), rng.integers(0, 3, n)) for n in sizes], num_classes=3)
    algorithm = _algorithm("fedper", cohort_size=2)
    test = Evaluator(lambda key, state, data: fm.evaluate(algorithm, key, state, data, devices=1), data, known=True)
    runs = [
        simulate(algorithm, data, key=KEY, rounds=3, evaluators={"known": test}, store=place) for place in ("memory", None)
    ]
    _close(*runs)


@pytest.mark.parametrize("name", problems.chosen([(name,) for name in SYSTEMS], lambda name: name == "scaffold"))
def test_the_final_state_is_a_state_like_any_other(name):
    algorithm, data = _algorithm(name), problems.data()
    state, _ = _run(name, store="memory")
    other, _ = _on_device(name)
    for options in ({}, {"ids": jnp.array([5, 2])}, {"known": False}):
        scores = [fm.evaluate(algorithm, KEY, one, data, devices=1, **options) for one in (state, other)]
        assert problems.distance(*scores) < 1e-10
    key = jax.random.fold_in(KEY, 99)
    (mine, info), (theirs, same) = (algorithm.round(key, one, data) for one in (state, other))
    assert problems.distance(*jax.tree.map(np.asarray, ((mine, info), (theirs, same)))) < 1e-10


def test_a_part_of_the_clients_finds_its_rows_in_a_state_of_all():
    """Evaluation of two selected clients is that of these two among all, and a round among four changes their rows alone."""
    algorithm, data = _algorithm("fedper"), problems.data()
    state, _ = _run("fedper")
    chosen = np.array([5, 2])
    whole = fm.evaluate(algorithm, KEY, state, data, devices=1)
    part = fm.evaluate(algorithm, KEY, state, data.select(chosen), devices=1)
    assert problems.distance(part, jax.tree.map(lambda leaf: leaf[chosen], whole)) < 1e-12
    after, info = algorithm.round(KEY, state, data.select(np.array([5, 2, 0, 1])))
    assert sorted(info.ids.tolist()) == [0, 1, 2, 5]
    for row in range(7):
        same = problems.leaves_equal(*(jax.tree.map(lambda leaf, i=row: leaf[i], one.personal) for one in (state, after)))
        assert same == (row in (3, 4, 6))
    with pytest.raises(ValueError, match="data have 2 clients of a population of 5 and the training had 7"):
        fm.evaluate(algorithm, KEY, state, dataclasses.replace(data.select(chosen), population=5))


def test_rows_read_too_early_are_replaced_by_the_result_of_the_round_before():
    again = positions_among(np.array([7, 2, 5]), np.array([5, 9, 7]))
    np.testing.assert_array_equal(again, [2, -1, 0])
    came, before = {"a": jnp.array([[1.0], [2.0], [3.0]])}, {"a": jnp.array([[10.0], [20.0], [30.0]])}
    np.testing.assert_array_equal(host_store.newest_rows(came, before, jnp.asarray(again))["a"], [[30.0], [2.0], [10.0]])


def test_what_a_store_cannot_hold_is_refused(monkeypatch, tmp_path):
    algorithm, data = _algorithm("fedper"), problems.data()
    everything = dataclasses.replace(fm.fedper(problems.task()), whole_population=True)
    with pytest.raises(ValueError, match="fedper reads what all clients keep in each round"):
        simulate(everything, data, key=KEY, rounds=1, store="memory")
    rounds_done = lambda key, state, data: state.round  # noqa: E731
    for test, message in (
        (
            Evaluator(rounds_done, data, known=True),
            r"'t' must return leaves \[N, ...\], .* for 7 clients",
        ),
        (Evaluator(rounds_done, data), "'t' must say whether its clients are known"),
        (
            Evaluator(rounds_done, (data, 1), known=True),
            "'t' of known clients must have FederatedData",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(algorithm, data, key=KEY, rounds=1, evaluators={"t": test}, store="memory")
    some = Evaluator(lambda key, state, data: state.seen, data.select(np.array([5, 2])), known=True)
    with pytest.raises(ValueError, match="'t' of known clients must have the data of all clients that train"):
        simulate(algorithm, data, key=KEY, rounds=1, evaluators={"t": some}, store="memory")
    with pytest.raises(ValueError, match="with a store, all clients must be in their order"):
        simulate(algorithm, data.select(np.array([3, 0, 1, 2, 4, 5, 6])), key=KEY, rounds=1, store="memory")
    for trained, tested in ((data.select(np.arange(5)), data), (data, problems.clients_of([12, 9, 15, 10, 11]))):
        known = Evaluator(rounds_done, tested, known=True)
        numbers = f"have {tested.num_clients} clients and the training had {trained.num_clients}: give known=False"
        with pytest.raises(ValueError, match=numbers):
            simulate(algorithm, trained, key=KEY, rounds=1, evaluators={"t": known}, store="memory")
    keyed = fm.Method(
        init=lambda key: {"w": jnp.zeros(2)},
        client=lambda key, received, data: fm.Trained(received.model, {}, received.memory),
        personalize=fm.received_model,
        predict=lambda model, x: x,
        roles={"w": fm.masks.Role.SHARED},
        init_memory=lambda key, model, num_clients: key,
    )
    with pytest.raises(ValueError, match="PRNG key"):
        simulate(keyed, data, key=KEY, rounds=1, store="memory")
    monkeypatch.setattr(fm.runtime, "free_host_bytes", lambda: 200)
    with pytest.raises(ValueError, match=r"N=7 clients, .* but only 200 bytes are free"):
        simulate(algorithm, data, key=KEY, rounds=1, store="memory")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        simulate(algorithm, data, key=KEY, rounds=1, store=tmp_path / "file")
