"""Devices as callers give them: platforms, memory, what is refused."""

import types

import jax
import pytest

from fedjax_meta import hardware, layers, runtime


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
