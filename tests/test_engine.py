"""The engine against plain loops: in every layout, each client runs once, counts once and gets its own results back."""

import dataclasses
import itertools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import engine, hardware, placement, rows, runtime
from fedjax_meta.aggregate import weigh
from fedjax_meta.engine import ClientUpdate
from tests import problems

KEY = jax.random.key(5)
IDS = np.array([9, 2, 14, 7, 0, 11, 3], np.int32)
SIZES = np.array([3, 50, 1, 8, 8, 21, 2], np.int32)


POPULATION = 16


def rule(key, id_, given, kept, context):
    """A client whose work is a loop of its own length and whose numbers depend on its id and its key."""
    steps = jnp.where(id_ >= 0, context["length"][id_], 0)
    noise = jax.random.normal(key) + jax.random.normal(kept["key"]) + given
    value = jax.lax.fori_loop(0, steps, lambda t, v: 0.9 * v + jnp.sin(id_ + t) * noise, kept["v"][0])
    upload = {"a": jnp.stack([value, 2 * value]), "b": noise}
    weight = {"a": steps.astype(float), "b": jnp.where(id_ < 0, 0.0, 1.0)}
    return ClientUpdate(
        sums=weigh(upload, weight),
        kept={**kept, "v": kept["v"] + value, "n": kept["n"] + 1, "even": ~kept["even"], "half": kept["half"] - 1},
        outputs=(steps, id_ % 2 == 0),
    )


def problem(population=POPULATION):
    """Context and rows of a population, of all types that a row may have, among them a negative zero."""
    length = np.zeros(population, np.int32)
    length[IDS] = SIZES
    ids = np.arange(population)
    kept = {
        "v": jnp.asarray(ids * 0.1)[:, None] * jnp.array([1.0, 2.0, -0.0]),
        "n": jnp.asarray(ids, jnp.int32),
        "even": jnp.asarray(ids % 2 == 0),
        "half": jnp.asarray(ids, jnp.bfloat16),
        "key": jax.random.split(jax.random.key(1), population),
        "pair": jnp.asarray(ids + 1j),
    }
    return {"length": jnp.asarray(length)}, kept


def plain(kept):
    """With keys and complex numbers as numbers."""
    return {
        **kept,
        "key": jax.random.key_data(kept["key"]),
        "half": kept["half"].astype(np.float32),
        "pair": jnp.stack([kept["pair"].real, kept["pair"].imag]).T,
    }


def run_cohort(ids=IDS, population=POPULATION, rule=rule, **options):
    """The cohort of this file, in another order or a part of it if asked for."""
    context, kept = problem(population)
    ids = jnp.asarray(ids)
    return engine.run_cohort(rule, KEY, ids, context["length"][ids], ids.astype(float) * 0.01, kept, ids, context, **options)


alone = jax.jit(rule)  # compiled once for all clients


def by_hand(ids=IDS, population=POPULATION):
    """The same cohort by a Python loop."""
    context, kept = problem(population)
    total, weight, outputs = {"a": np.zeros(2), "b": 0.0}, {"a": 0.0, "b": 0.0}, []
    for client in ids.tolist():
        mine = jax.tree.map(lambda leaf: leaf[client], kept)  # noqa: B023
        update = alone(jax.random.fold_in(KEY, client), jnp.int32(client), client * 0.01, mine, context)
        for part in total:
            total[part] = total[part] + np.asarray(update.sums.total[part])
            weight[part] += float(update.sums.weight[part])
        kept = jax.tree.map(lambda leaf, new: leaf.at[client].set(new), kept, update.kept)  # noqa: B023
        outputs.append(update.outputs)
    return total, weight, kept, jax.tree.map(lambda *leaves: np.stack(leaves), *outputs)


@pytest.mark.parametrize(
    ("devices", "lanes", "population", "room"),
    problems.chosen(
        # The population is divided among two devices, or not; few rows may travel, or none.
        (
            (*layout, *place)
            for layout in itertools.product([1, 2], [None, 1, 2, 3, 7, 100])
            for place in ((16, None), (17, None), (16, 2), (16, 0))
        ),
        lambda devices, lanes, population, room: lanes in (None, 2) or (population, room) == (16, None),
    ),
)
def test_a_cohort_is_a_loop_over_its_clients_whatever_the_layout(monkeypatch, lanes, devices, population, room):
    if room is not None:
        monkeypatch.setattr(rows, "REMOTE_BYTES", 0)
        monkeypatch.setattr(rows, "REMOTE_LEAST", room)
    run = jax.jit(lambda ids: run_cohort(ids, population, lanes=lanes, devices=devices))
    rest = np.setdiff1d(np.arange(population), IDS)
    for ids in (IDS, IDS[::-1]):
        summed, kept, outputs = run(ids)
        total, weight, after, expected = by_hand(ids, population)
        assert problems.distance(summed.total, total) < 1e-10
        assert problems.distance(summed.weight, weight) == 0
        assert problems.distance(plain(kept), plain(after)) < 1e-12
        assert problems.distance(outputs, expected) == 0
        assert jax.tree.map(lambda leaf: np.asarray(leaf)[rest].tobytes(), plain(kept)) == jax.tree.map(
            lambda leaf: np.asarray(leaf)[rest].tobytes(), plain(problem(population)[1])
        )


@pytest.mark.parametrize("population", [16, 17])
def test_rows_that_are_only_read_come_back_as_they_were_and_are_not_exchanged(population):
    def reader(*arguments):
        return rule(*arguments)._replace(kept=())

    run = jax.jit(lambda: run_cohort(population=population, rule=reader, devices=2))
    summed, kept, outputs = run()
    total, _, _, expected = by_hand(IDS, population)
    assert problems.distance(summed.total, total) < 1e-10
    assert problems.distance(outputs, expected) == 0
    assert problems.leaves_equal(plain(kept), plain(problem(population)[1]))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_client_without_a_row_reads_and_writes_none(devices, lanes):
    context, kept = problem()
    ids, sizes = jnp.array([-1, 5, -1]), jnp.array([0, 3, 0])
    given = ids.astype(float) * 0.01
    found = engine.run_cohort(rule, KEY, ids, sizes, given, kept, ids, context, lanes=lanes, devices=devices)[1]
    expected = alone(jax.random.fold_in(KEY, 5), jnp.int32(5), 0.05, jax.tree.map(lambda leaf: leaf[5], kept), context).kept
    kept = jax.tree.map(lambda leaf, new: leaf.at[5].set(new), kept, expected)
    assert problems.distance(plain(found), plain(kept)) < 1e-12


def test_a_client_rule_is_traced_once():
    traced = []

    def counted(*arguments):
        traced.append(1)
        return rule(*arguments)

    jax.jit(lambda: run_cohort(rule=counted, lanes=2, devices=2)).trace()
    assert len(traced) == 1
    with runtime.compiling_for("gpu"):  # where its memory is looked at before
        jax.jit(lambda: run_cohort(rule=counted, lanes=2, devices=1)).trace()
    assert len(traced) == 2


@pytest.mark.parametrize(
    ("precision", "preset"), [("float32", "Precision.HIGHEST"), ("tf32", "TF32_TF32_F32"), ("bfloat16", "BF16_BF16_F32")]
)
def test_a_precision_is_that_of_every_product(precision, preset):

    def product(key, id_, given, kept, context):
        return ClientUpdate(given @ given, kept, ())

    given = jnp.ones((2, 3, 3), jnp.float32)
    run = partial(engine.run_cohort, product, KEY, jnp.arange(2), jnp.ones(2, int), given, (), jnp.arange(2), ())
    with runtime.compiling_for("gpu"):
        assert preset in str(jax.make_jaxpr(lambda: run(precision=precision, lanes=1, devices=1)[0])())


def test_padding_is_not_counted_even_where_it_is_not_finite():
    def poison(key, id_, given, kept, context):
        sums = weigh(jnp.where(id_ < 0, jnp.nan, 1.0), jnp.where(id_ < 0, 0.0, 1.0))
        return ClientUpdate(sums, kept, jnp.where(id_ < 0, jnp.nan, 2.0))

    # Three lanes for four clients: two of the slots are padding.
    ids = jnp.arange(4)
    summed, kept, outputs = engine.run_cohort(poison, KEY, ids, jnp.ones(4, int), (), jnp.arange(4.0), ids, (), lanes=3)
    assert (float(summed.total), float(summed.weight)) == (4, 4)
    assert kept.tolist() == [0, 1, 2, 3] and outputs.tolist() == [2] * 4


assign = jax.jit(engine._assign, static_argnums=(1, 2))


def loads(sizes, lanes, devices):
    """(work of each device in units of its groups' largest members, members in the order of the slots)."""
    slots, groups = assign(jnp.asarray(sizes), lanes, devices)
    slots = np.asarray(slots).reshape(devices, -1, lanes)
    padded = np.append(sizes, 0)
    work = [sum(padded[group].max() for group in slots[d, : groups[d]]) for d in range(devices)]
    assert all((slots[d, groups[d] :] == len(sizes)).all() for d in range(devices))
    return work, slots[slots < len(sizes)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("lanes", "devices"), list(itertools.product([1, 2, 3], repeat=2)))
def test_every_member_is_assigned_once_and_work_is_within_grahams_bound(seed, lanes, devices):
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(3, 1.5, 8).astype(np.int32) + 1
    work, members = loads(sizes, lanes, devices)
    assert sorted(members.tolist()) == list(range(8))
    groups = [max(group) for group in np.split(np.sort(sizes)[::-1], range(lanes, 8, lanes))]
    best = min(
        max(sum(g for g, d in zip(groups, choice, strict=True) if d == device) for device in range(devices))
        for choice in itertools.product(range(devices), repeat=len(groups))
    )
    assert best <= max(work) <= best * (4 / 3 - 1 / (3 * devices)) + 1e-9


def test_one_large_client_gets_a_device_of_its_own():
    assert sorted(loads(np.array([10, 10, 40, 10, 10], np.int32), 1, 2)[0]) == [40, 40]
    assert loads(np.full(6, 7, np.int32), 1, 3)[0] == [14, 14, 14]


@pytest.mark.parametrize("size", [1, 5, 6, 7])
@pytest.mark.parametrize(("lanes", "devices"), list(itertools.product([1, 2, 3], repeat=2)))
def test_clients_of_equal_size_are_assigned_before_the_program_runs(size, lanes, devices):
    found = engine._assign_equal(size, lanes, devices)
    jax.tree.map(np.testing.assert_array_equal, found, assign(jnp.full(size, 9), lanes, devices))


@pytest.mark.parametrize("devices", [1, 2])
def test_no_sizes_stand_for_equal_ones(devices):
    context, kept = problem()

    def run(sizes):
        sums, after, outputs = engine.run_cohort(
            rule, KEY, jnp.asarray(IDS), sizes, IDS * 0.01, kept, jnp.asarray(IDS), context, devices=devices, lanes=2
        )
        return sums, plain(after), outputs

    jax.tree.map(np.testing.assert_array_equal, run(None), run(jnp.full(len(IDS), 4)))


def test_a_device_runs_only_its_own_groups(monkeypatch):
    # Padding groups must cost nothing: the loop runs over a device's own groups, not over the most that one could have.
    seen = []

    def counted(key, id_, *arguments):
        jax.debug.callback(lambda i: seen.append(int(i)), id_)
        return rule(key, id_, *arguments)

    jax.block_until_ready(run_cohort(rule=counted, lanes=1, devices=2))
    jax.effects_barrier()
    assert sorted(seen) == sorted(IDS.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": 0}, "lanes=0"),
        ({"devices": 3}, "devices=3, but JAX sees 2"),
        ({"devices": 0}, "devices=0 must be an integer of at least 1"),
        ({"devices": []}, "devices is empty: give at least one device, or None for all"),
        ({"devices": "cpu"}, "devices='cpu' must be an integer of at least 1"),
        ({"devices": jax.devices()[:1] * 2}, "devices holds a device twice"),
        ({"devices": [0, 1]}, "devices must be a number or hold devices such as jax.devices(), not 0"),
        ({"precision": "half"}, "precision='half' is unknown; allowed are float32, tf32, bfloat16"),
    ],
)
def test_an_impossible_layout_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run_cohort(**options)


def test_a_map_over_lanes_is_a_loop_and_refuses_none():
    inputs = {"x": jnp.arange(7.0), "n": jnp.arange(7)}
    expected = jnp.arange(7.0) ** 2 + jnp.arange(7)
    for lanes in (None, 1, 2, 7, 100):
        assert problems.leaves_equal(engine.map_clients(lambda one: one["x"] ** 2 + one["n"], inputs, lanes=lanes), expected)
    for lanes in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"lanes={lanes} must be an integer of at least 1"):
            engine.map_clients(lambda one: one, inputs, lanes=lanes)


def hungry(key, id_, given, kept, context):
    # A product that cannot be fused away: half a megabyte of float64 a client.
    square = jax.random.normal(key, (256, 256))
    return ClientUpdate(jnp.sum(square @ square @ square), (), ())


@pytest.fixture
def lanes_of(monkeypatch, tmp_path):
    """`(bytes, lanes that were asked for, bytes in use) -> lanes` of 64 hungry clients on one device."""
    monkeypatch.setenv(runtime.CACHE_VARIABLE, str(tmp_path))

    def lanes(limit, given=None, used=0):
        monkeypatch.setattr(engine, "memory", lambda device: limit and hardware.Memory(limit, used))
        group_of = lambda count: partial(engine._group, hungry, count)  # noqa: E731
        with runtime.compiling_for("gpu"):
            return engine._lanes(group_of, given, placement.client_mesh(1), KEY, jnp.arange(64), (), (), ())

    return lanes


def test_lanes_follow_the_memory(lanes_of):
    assert lanes_of(10**12) == 64
    some, half = lanes_of(64_000_000), lanes_of(32_000_000)
    assert 1 <= half < some < 64
    # A lane holds one to six squares of 0.52 MB at a time, of half of the memory.
    assert 32 / 3.2 <= some <= 32 / 0.52
    with engine.sharing_memory(2):
        assert lanes_of(64_000_000) == half  # each of two members of a sweep has half of the memory
    # What else is in the memory does not matter until less than so much is free.
    assert lanes_of(64_000_000, used=28_000_000) == some > lanes_of(64_000_000, used=50_000_000)
    assert lanes_of(1000) == 1
    assert lanes_of(10**12, 7) == 7 and lanes_of(10**12, 100) == 64
    with pytest.raises(
        ValueError, match=r"lanes=50 take 0.0\d+ GB on each device, but only 0.018 GB .* about lanes=\d+, or None"
    ):
        lanes_of(20_000_000, 50)


def test_lanes_are_asked_for_where_a_device_does_not_say_its_memory(lanes_of):
    assert lanes_of(None, 50) == 50
    with pytest.raises(ValueError, match="does not say how much memory it has: give lanes, e.g. lanes=64"):
        lanes_of(None)


def test_nothing_is_compiled_for_lanes_that_fit_for_certain_or_were_seen_before(lanes_of, monkeypatch):
    compiled = []
    compile_ = jax.stages.Lowered.compile
    counted = lambda self, options=None: compiled.append(1) or compile_(self, options)  # noqa: E731
    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    lanes_of(10**12)
    assert not compiled
    few = lanes_of(20_000_000)
    some = len(compiled)
    assert 1 <= some <= 4
    assert lanes_of(20_000_000) == few and len(compiled) == some


def test_lanes_are_found_under_a_sweep_of_traced_rates():
    def total(rate):
        def scaled(*arguments):
            update = rule(*arguments)
            total = jax.tree.map(lambda leaf: rate * leaf, update.sums.total)
            return update._replace(sums=dataclasses.replace(update.sums, total=total))

        return run_cohort(rule=scaled, devices=1)[0].total

    with runtime.compiling_for("gpu"):
        swept = jax.vmap(total)(jnp.array([1.0, 3.0]))
    assert (
        problems.distance(jax.tree.map(lambda leaf: leaf[1], swept), jax.tree.map(lambda leaf: 3 * leaf, by_hand()[0])) < 1e-9
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_round_updates_a_large_population_in_place(devices):
    population, each = 50_000, 400
    order, sizes = np.arange(population), np.ones(population, int)
    data = fm.from_partition(np.zeros((population, 2)), np.zeros(population, int), order, sizes, num_classes=2)

    def init(key):
        return {"body": jnp.zeros(2), "head": jnp.zeros((each, 2))}

    task = fm.classification(init, lambda v, x: x @ v["head"][:2] + v["body"][None], layers=("body", "head"))
    algorithm = problems.build("fedper", task, cohort_size=8, devices=devices)
    state = algorithm.init(KEY, data)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    data = placement.place_shared(data, places.round)
    block = jax.jit(
        lambda state, data: fm.blocks.run_rounds(algorithm, KEY, state, data, 3, most=3)[0],
        donate_argnums=0,
        out_shardings=places,
    )
    program = block.lower(state, data).compile()
    memory, kept = program.memory_analysis(), population * each * 2 * 8 // devices
    assert memory.alias_size_in_bytes >= kept
    assert memory.temp_size_in_bytes < kept / 10
    # Between devices go the cohort's rows and sums, never the population.
    shapes = r"= .*? (?:all-gather|all-reduce|collective-permute|all-to-all)\("
    moved = [shape for line in re.findall(shapes, program.as_text()) for shape in re.findall(r"\w\d+\[([\d,]*)\]", line)]
    assert bool(moved) == (devices > 1)
    # A number has 64 bits here, which are two words.
    assert all(math.prod(map(int, filter(None, shape.split(",")))) <= 8 * each * 2 * 2 for shape in moved)
    state = program(state, data)
    assert state.personal["head"].sharding.is_equivalent_to(places.personal["head"], 3)
    assert 8 <= int(jnp.sum(state.seen)) <= 24


def test_named_devices_run_a_cohort_where_they_are():
    second, data = jax.devices()[1:], problems.data()
    options = {"key": KEY, "rounds": 2, "eval_every": 2}
    anywhere, _ = fm.simulate(problems.build("fedper", cohort_size=3, devices=1), data, **options)
    there, _ = fm.simulate(problems.build("fedper", cohort_size=3, devices=second), data, **options)
    assert problems.leaves_equal(anywhere, there)
    assert all(leaf.devices() == set(second) for leaf in jax.tree.leaves(there))
    assert fm.Federation(devices=second).config["devices"] == [repr(second[0])]


@pytest.mark.parametrize("store", [None, "memory"])
@pytest.mark.parametrize("device", [0, 1])
def test_the_state_that_a_caller_gives_stays_whole_wherever_it_is(store, device):
    data, algorithm = problems.data(), problems.build("fedper", cohort_size=3, devices=2)
    options = {"key": KEY, "store": store}
    half, _ = fm.simulate(problems.build("fedper", cohort_size=3, devices=1), data, rounds=2, **options)
    given = jax.device_put(jax.tree.map(np.asarray, half), jax.devices()[device])
    fm.simulate(algorithm, data, rounds=4, state=given, **options)
    assert problems.leaves_equal(given, jax.tree.map(np.asarray, half))


def test_a_saved_state_resumes_on_another_number_of_devices():
    data = problems.data()
    options = {"key": KEY, "rounds": 4, "eval_every": 2}
    one, two = (problems.build("fedper", cohort_size=3, devices=devices) for devices in (1, 2))
    whole, _ = fm.simulate(one, data, **options)
    half, _ = fm.simulate(two, data, **(options | {"rounds": 2}))
    saved = jax.tree.map(np.asarray, half)
    resumed, _ = fm.simulate(one, data, state=saved, **options)
    assert problems.distance(resumed, whole) < 1e-10
    again, _ = fm.simulate(two, data, state=saved, **options)
    assert problems.distance(jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, whole)) < 1e-10
    assert again.round.sharding.device_set == set(jax.devices())
