"""The batches of a client's view: which samples they hold, in which order, and what padding does."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_meta as fm
from fedjax_meta import placement, runtime
from fedjax_meta.data import ClientView, chunk_length, from_partition
from tests.data.common import flat, numbered, seen


@partial(jax.jit, static_argnames=("batch", "epochs"))
def _epoch_batches(key, start, size, batch, epochs):
    """All steps of a client with up to 40 samples, from one compiled program for all sizes."""
    x = jnp.arange(100, dtype=jnp.float32)[:, None]
    batches = ClientView(x, jnp.zeros(100, jnp.int32), None, None, start, size, 40).epochs(key, batch, epochs)
    return batches.steps, jax.vmap(lambda step: batches.get(step, 0))(jnp.arange(batches.max_steps))


@pytest.mark.parametrize(("batch", "epochs"), [(1, 1), (4, 2), (7, 3), (64, 2)])
@given(start=st.integers(0, 60), size=st.integers(1, 40), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_an_epoch_contains_each_sample_once(batch, epochs, start, size, seed):
    steps, batches = _epoch_batches(jax.random.key(seed), start, size, batch, epochs)
    per_epoch = -(-size // batch)
    assert steps == epochs * per_epoch and len(batches.weight) == epochs * -(-40 // batch)
    # No client has more than 40 samples, and padding would be computed like samples.
    assert batches.weight.shape[1] == min(batch, 40)
    numbers, real = np.asarray(batches.x)[..., 0], np.asarray(batches.weight) > 0
    for epoch in range(epochs):
        rows = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert sorted(numbers[rows][real[rows]]) == list(range(start, start + size))
        # Only the last batch of an epoch is partial.
        assert real[rows][:-1].all()


def test_each_epoch_has_a_new_order():
    steps = seen(numbered(np.array([64])).client(0)["train"].epochs(jax.random.key(0), 64, 2))
    assert steps[0] != steps[1] and steps[0] != sorted(steps[0])


def test_endless_batches_are_full_and_each_pass_is_complete():
    size, batch, steps = 7, 5, 14
    view = numbered(np.array([3, size])).client(1)["train"]
    numbers = flat(view.endless(jax.random.key(0), batch, steps))
    assert len(numbers) == batch * steps
    for begin in range(0, len(numbers), size):
        assert sorted(numbers[begin : begin + size]) == list(range(3, 3 + size))


def test_endless_batches_continue_where_they_stopped():
    view = numbered(np.array([7])).client(0)["train"]
    key = jax.random.key(3)
    whole = flat(view.endless(key, 5, 6))
    parts = flat(view.endless(key, 5, 2)) + flat(view.endless(key, 5, 4, first=10))
    assert whole == parts


def test_chunks_are_longer_on_accelerators():
    x, y = np.arange(1000.0)[:, None], np.zeros(1000, np.int32)
    view = ClientView(jnp.asarray(x), jnp.asarray(y), None, None, 0, 1000, 1000)
    for platform, longest in (("cpu", 96), ("gpu", 512), ("tpu", 512)):
        with runtime.compiling_for(platform):
            (rows,) = view.in_chunks().get(0, 0).y.shape
            assert 0.9 * longest <= rows <= longest == chunk_length()
            assert view.full().get(0, 0).y.shape == (rows,)
    assert view.in_chunks(700).get(0, 0).y.shape == (500,)


def test_full_steps_cover_the_view_in_chunks():
    view = numbered().client(1)["train"]
    batches = view.full(steps=2, chunk_size=5)
    chunks = [batches.get(1, c) for c in range(int(batches.chunks))]
    numbers = np.concatenate([np.asarray(b.x)[np.asarray(b.weight) > 0, 0] for b in chunks])
    assert batches.steps == 2 and numbers.tolist() == list(range(5, 17))
    mean = batches.mean(lambda b: jnp.sum(b.x[:, 0] * b.weight) / jnp.sum(b.weight), 0)
    assert float(mean) == pytest.approx(np.mean(np.arange(5, 17)))


def test_a_partial_batch_counts_by_its_samples_or_like_a_full_one():
    # Batches 5 to 9, 10 to 14, and 15 and 16, with means 7, 12 and 15.5.
    batches = numbered().client(1)["train"].in_order(5)
    mean = partial(jnp.average, axis=0)
    by_samples = batches.as_one_step().mean(lambda b: mean(b.x[:, 0], weights=b.weight), 0)
    equal = batches.as_one_step(equal_weights=True).mean(lambda b: mean(b.x[:, 0], weights=b.weight), 0)
    assert float(by_samples) == pytest.approx(10.5) and float(equal) == pytest.approx(11.5)


def test_steps_in_chunks_become_one_step_of_all_their_samples():
    view = numbered().client(1)["train"]
    twice = view.full(2, chunk_size=5)
    for batches, times in ((view.full(chunk_size=5), 1), (twice, 2), (twice.as_one_step(3), 6)):
        one = batches.as_one_step(2)
        held = [sample for chunk in range(int(one.chunks)) for sample in _numbers(one.get(1, chunk))]
        assert sorted(held) == sorted([*range(5, 17)] * times) and (one.steps, one.max_steps) == (2, 2)
        assert float(one.mean(lambda b: jnp.average(b.x[:, 0], weights=b.weight), 0)) == pytest.approx(10.5)
    with pytest.raises(ValueError, match="equal_weights=True counts batches, but a step of these has several chunks"):
        view.full(chunk_size=5).as_one_step(equal_weights=True)


def _numbers(batch):
    return np.asarray(batch.x)[np.asarray(batch.weight) > 0, 0].tolist()


def test_a_share_of_the_work_limits_training_and_not_evaluation():
    data = numbered().client(1)
    part, key = data.working(1 / 3)["train"], jax.random.key(0)
    # 12 samples in batches of 4, three epochs: nine steps.
    assert int(part.epochs(key, 4, 3).steps) == 3 and int(part.endless(key, 4, 10).steps) == 4
    assert int(part.full(7).steps) == 3 and int(part.in_order(4).steps) == 3
    assert seen(part.epochs(key, 4, 3)) == seen(data["train"].epochs(key, 4, 3))[:3]
    assert int(dataclasses.replace(part, work=0.0).epochs(key, 4).steps) == 0
    # Nobody works more than all.
    assert int(data.working(2.0)["train"].epochs(key, 4, 3).steps) == 9


def test_padding_has_no_weight_and_is_finite():
    batch = numbered().client(2)["train"].in_order(4).get(0, 0)
    assert np.asarray(batch.weight).tolist() == [1, 0, 0, 0] and float(batch.x[0, 0]) == 17
    assert np.isfinite(batch.x).all()


def test_uint8_inputs_are_scaled_in_a_batch():
    x = np.array([[0], [51], [255]], np.uint8)
    images = from_partition(x[..., None, None], [0, 0, 0], [0, 1, 2], [3])
    assert np.asarray(images.client(0)["train"].in_order(3).get(0).x)[:, 0, 0, 0] == pytest.approx([0, 0.2, 1])
    pixels = from_partition(x, [0, 0, 0], [0, 1, 2], [3], scale=1 / 255)
    assert np.asarray(pixels.client(0)["train"].in_order(3).get(0).x)[:, 0] == pytest.approx([0, 0.2, 1])
    tokens = from_partition(x, [0, 0, 0], [0, 1, 2], [3], scale="stored").client(0)["train"].in_order(3).get(0).x
    assert tokens.dtype == np.uint8 and tokens[:, 0].tolist() == [0, 51, 255]
    data = from_partition(x, [0, 0, 0], [0, 1, 2], [3], offset=np.array([51.0]), scale=np.array([0.5]))
    assert np.asarray(data.client(0)["train"].in_order(3).get(0).x)[:, 0] == pytest.approx([-25.5, 0, 102])


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1e-6, 1), (0.3, 4), (1 / 3, 4), (0.5, 6), (1.0, 12)])
def test_a_share_of_a_pass_is_a_random_part_of_the_samples_rounded_up(share, count):
    x = jnp.arange(12, dtype=jnp.float32)[:, None]
    view = ClientView(x, jnp.zeros(12, jnp.int32), None, None, 0, 12, 12)
    drawn = []
    for seed in (0, 1):
        batches = view.epochs(jax.random.key(seed), 5, 2, share=share)
        assert batches.steps == 2 * -(-count // 5)
        for epoch in range(2):
            steps = [batches.get(epoch * -(-count // 5) + step, 0) for step in range(-(-count // 5))]
            rows = [float(row) for batch in steps for row in np.asarray(batch.x)[np.asarray(batch.weight) > 0, 0]]
            assert len(rows) == len(set(rows)) == count
            drawn.append(tuple(sorted(rows)))
    assert (len(set(drawn)) == 1) == (count in (0, 12))


def test_flat_samples_give_the_same_batches(rng):
    """Inputs of several leaves, one of which is an image with a scale of its own."""
    image = rng.integers(0, 255, (30, 4, 3, 2), dtype=np.uint8)
    x = {"image": image, "age": rng.normal(size=30), "tokens": np.arange(60).reshape(30, 2)}
    scale = {"image": np.full((4, 3, 1), 0.5), "age": None, "tokens": None}
    offset = {"image": np.arange(24.0).reshape(4, 3, 2), "age": None, "tokens": None}
    clients = [({name: leaf[i::3] for name, leaf in x.items()}, np.arange(10) % 2) for i in range(3)]
    data = fm.from_clients(clients, num_classes=2)
    data = dataclasses.replace(data, scale=scale, offset=offset)
    rows = data.flat()
    assert rows.x["image"].shape == (30, 24) and rows.flat() is rows
    assert rows.sample_shapes == data.sample_shapes == ((), (4, 3, 2), (2,))
    for client in range(3):
        one, other = (of.client(client)["train"].in_order(4).get(1) for of in (data, rows))
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_round_with_flat_samples_is_the_same(rng):
    clients = [(rng.integers(0, 255, (6, 4, 4, 1), dtype=np.uint8), np.arange(6) % 2) for _ in range(3)]
    data = fm.from_clients(clients, num_classes=2)
    algorithm = fm.federate(fm.fedavg(fm.models.logistic(16, 2), lr=0.1), fm.Federation(cohort_size=2))
    state = algorithm.init(jax.random.key(0), data)
    found = [algorithm.round(jax.random.key(1), state, of)[0].model for of in (data, placement.laid_out(data, "tpu"))]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert placement.laid_out(data, "cuda") is data


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_mean_over_many_chunks_of_16_bits_is_the_mean(dtype):
    data = fm.from_clients([(np.ones((60_000, 1), np.float32), np.arange(60_000) % 2)], num_classes=2)
    batches = data.client(0)["train"].full()
    found = jax.jit(lambda: batches.mean(lambda batch: {"a": jnp.asarray(100, dtype), "b": jnp.mean(batch.x)}, 0))()
    assert found["a"].dtype == dtype and found["a"] == 100 and found["b"] == 1


@pytest.mark.parametrize("size", [3, 10, 60])
def test_a_view_that_counts_once_gives_weight_to_each_sample_of_a_batch_once(size):
    data = from_partition(np.arange(size, dtype=float)[:, None], np.zeros(size, int), np.arange(size), [size])
    plain = data.client(0)
    for t in range(6):
        batch, once = (one["train"].endless(jax.random.key(3), 16, 6).get(t, 0) for one in (plain, plain.counting_once()))
        x, weight = np.asarray(once.x)[:, 0].astype(int), np.asarray(once.weight)
        assert np.array_equal(x, np.asarray(batch.x)[:, 0]) and np.all(np.asarray(batch.weight) == 1)
        assert sorted(x[weight == 1]) == sorted(set(x)) and set(weight) <= {0, 1}
    passes = plain.counting_once()["train"].epochs(jax.random.key(3), 16)
    weights = [np.asarray(passes.get(t, 0).weight) for t in range(int(passes.steps))]
    assert sum(map(np.sum, weights)) == size  # padding hides no sample


def test_values_beside_the_samples_follow_the_order_of_the_view():
    """The view has the samples 3, ..., 9 backwards; beside the one at each place stands a hundred times that place."""
    view = dataclasses.replace(numbered(np.array([3, 7])).client(1)["train"], order=lambda index: 6 - index)
    view = dataclasses.replace(view, beside={"place": 100 * jnp.arange(7)})
    batches, rows = view.epochs(jax.random.key(0), 4), []
    for step in range(2):
        batch = batches.get(step, 0)
        (_, beside), real = batch.y, np.asarray(batch.weight) > 0
        rows += [*zip(np.asarray(batch.x)[real, 0].tolist(), np.asarray(beside["place"])[real].tolist(), strict=True)]
    assert sorted(rows) == [(9 - place, 100 * place) for place in reversed(range(7))]


def test_each_pass_of_an_endless_sequence_has_an_order_of_its_own():
    rows = flat(numbered(np.array([16])).client(0)["train"].endless(jax.random.key(0), 16, 3))
    assert len({tuple(rows[i : i + 16]) for i in (0, 16, 32)}) == 3
