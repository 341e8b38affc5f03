"""Devices as callers give them: platforms, memory, what is refused."""

import types

import jax
import jax.numpy as jnp
import pytest

from fedjax_meta import hardware, layers, runtime
from fedjax_meta.task import Batch, cross_entropy
from tests import problems


def device(platform="gpu", kind="NVIDIA H200 141GB HBM3e", stats=None):
    """The parts of a device that are asked for."""

    def memory_stats():
        if stats == "described":
            raise jax.errors.JaxRuntimeError("MemoryStats is only supported for addressable PjRt devices.")
        return stats

    return types.SimpleNamespace(platform=platform, device_kind=kind, memory_stats=memory_stats)


def test_the_platform_is_that_of_the_devices_a_caller_gives_and_of_jax_elsewhere():
    assert runtime.platform() == "cpu" and runtime.on_cpu()
    with runtime.compiling_for("tpu"):
        assert not runtime.on_cpu() and layers.default_form() in layers.FORMS
        with hardware.computing_on(jax.devices()):
            assert runtime.platform() == "cpu"
        with hardware.computing_on(1), hardware.computing_on(None):
            assert runtime.platform() == "tpu"
    assert runtime.platform() == "cpu"


def test_free_memory_is_what_a_device_says_or_what_its_kind_has():
    assert hardware.free_bytes(device(stats={"bytes_limit": 100, "bytes_in_use": 30})) == 70
    # JAX takes three quarters of a GPU's memory unless it is told otherwise.
    assert hardware.free_bytes(device(stats="described")) == 141 * 10**9 * 3 // 4
    assert hardware.free_bytes(device("tpu", "TPU v5 lite", {})) == 16 * 2**30
    assert hardware.free_bytes(device("tpu", "TPU v5", None)) == 95 * 2**30
    assert hardware.free_bytes(device("gpu", "a card of tomorrow")) is None
    assert 0 < hardware.free_bytes(jax.devices()[0]) < 2**50


def test_devices_of_two_platforms_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "Device", types.SimpleNamespace)
    with pytest.raises(ValueError, match="devices are of several platforms, gpu and tpu: a program is for one"):
        hardware.check([device("tpu"), device("gpu")])


@pytest.mark.parametrize("begin", ["epochs", "share", "endless"])
def test_positions_that_are_computed_before_the_loop_are_those_of_each_step(begin):
    view = problems.data().client(1)["train"]

    def batches():
        if begin == "endless":
            return view.endless(jax.random.key(3), 16, 5, first=7)
        return view.epochs(jax.random.key(3), 16, 3, share=0.6 if begin == "share" else None)

    here = batches()
    with runtime.compiling_for("gpu"):
        there = batches()
    assert int(here.steps) == int(there.steps) > 4
    for step in range(int(here.steps)):
        assert problems.leaves_equal(here.get(step, 0), there.get(step, 0))
        assert jnp.sum(there.get(step, 0).weight) > 0


def test_the_loss_of_an_accelerator_is_that_of_a_cpu():
    logits, labels = 3 * jax.random.normal(jax.random.key(1), (9, 4)), jnp.arange(9) % 4
    batch = Batch(jnp.zeros(()), labels, jnp.arange(9.0))
    value = jax.value_and_grad(lambda logits: cross_entropy(logits, batch))
    expected = value(logits)
    with runtime.compiling_for("tpu"):
        assert problems.distance(value(logits), expected) < 1e-14
        primitives = str(jax.make_jaxpr(value)(logits))
    assert "gather" not in primitives and "scatter" not in primitives
