"""Where arrays lie: rows in equal parts or on every device, data once for all devices of a host."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fedjax_meta as fm
from fedjax_meta import placement
from tests import problems

KEY = jax.random.key(5)


def test_rows_are_partitioned_over_devices_and_their_size_is_logged_before_they_are_allocated(caplog):
    each = {"w": jnp.ones((3, 4)), "n": jnp.zeros((), jnp.int32)}
    with caplog.at_level(logging.INFO, "fedjax_meta"):
        population = placement.populate(lambda _: each, jnp.arange(10), 2)
    # 12 float64 and one int32: 100 bytes a client.
    assert "1 kB on this host (N=10 clients, 100 bytes each, 2 parts on 2 devices)" in caplog.text
    assert caplog.records[-1].levelno == logging.INFO
    assert {shard.data.shape for shard in population["w"].addressable_shards} == {(5, 3, 4)}
    assert {shard.data.shape for shard in placement.populate(lambda _: each, jnp.arange(9), 2)["w"].addressable_shards} == {
        (9, 3, 4)
    }
    assert placement.populate(lambda _: (), jnp.arange(10), 2) == ()


def test_rows_beyond_the_free_memory_are_refused_with_numbers(monkeypatch, caplog):
    monkeypatch.setattr(placement, "free_bytes", lambda device: 5_000_000)
    data, algorithm = problems.data(), problems.build("fedper", cohort_size=2)
    assert algorithm.init(KEY, data).seen.shape == (7,)
    placement.announce("800 kB", 800_000, 5_000_000)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(ValueError, match=r"takes 6 MB on this host \(N=1000 .*, but only 5 MB are free"):
        placement.populate(lambda _: jnp.ones(750), jnp.arange(1000), 1)
    with pytest.raises(ValueError, match=r"takes 6.012 MB on this host \(N=501 .* 1 parts on 2 devices"):
        placement.populate(lambda _: jnp.ones(750), jnp.arange(501), 2)


def test_host_devices_read_one_copy_of_the_data():
    whole = NamedSharding(placement.client_mesh(2), PartitionSpec())
    shared = placement.place_shared({"x": np.arange(1000.0), "key": KEY}, whole)
    first, second = (shard.data.unsafe_buffer_pointer() for shard in shared["x"].addressable_shards)
    assert first == second
    assert shared["x"].tolist() == list(range(1000))
    assert shared["key"] == KEY


@pytest.mark.parametrize("devices", [1, 2])
def test_host_devices_read_samples_where_they_are(devices):
    """Odd sizes, so that no array is aligned by chance; none is copied."""
    x = np.arange(33 * 7, dtype=np.float32).reshape(33, 7)
    data = fm.from_partition(x, np.zeros(33, int), np.arange(33)[::-1], np.full(3, 11), num_classes=2)
    placed = placement.place_shared(data, NamedSharding(placement.client_mesh(devices), PartitionSpec()))
    assert {shard.data.unsafe_buffer_pointer() for shard in placed.x.addressable_shards} == {data.x.ctypes.data}
    assert (np.asarray(placed.x) == x[::-1]).all()
