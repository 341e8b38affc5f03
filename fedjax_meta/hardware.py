"""The devices that a program is for, as a caller gives them: a number, or a list of devices, which may be described only.

What is fast on one platform is not on another, so some choices (lanes, the form of a convolution, the length of a chunk) follow
the platform. It is that of the devices that a caller gives to a federation, and JAX's default where none are given. Nothing is
asked of JAX's backend otherwise, so that a program can be lowered and compiled on a machine without its devices, see
`jax.experimental.topologies`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import checks, runtime

Devices = int | Sequence[jax.Device] | None
"""How many of JAX's devices, or which devices; all of JAX's when `None`."""

GIB = 2**30
"""Bytes of a GiB."""
MEMORY = {
    "TPU v2": 8 * GIB,
    "TPU v3": 16 * GIB,
    "TPU v4": 32 * GIB,
    "TPU v5 lite": 16 * GIB,
    "TPU v5": 95 * GIB,
    "TPU v5p": 95 * GIB,
    "TPU v6 lite": 32 * GIB,
    "NVIDIA A100": 40 * GIB,
    "NVIDIA H100": 80 * GIB,
    "NVIDIA H200": 141 * 10**9,
}
"""Bytes of a device whose kind begins so (the longest beginning counts), for devices that do not say it or are only described."""

_PRECISIONS = {"tpu": ("float32", "bfloat16")}
"""Of matrix products, where a platform has not all of `engine.PRECISIONS`."""


def check(devices: Any) -> Devices:
    """Validates `devices`; returns a sequence as a tuple. Does not start a JAX backend.

    Raises:
      ValueError: no integer of at least 1, no device, what is no device, one device twice, or devices of two platforms.
    """
    if devices is None:
        return None
    if not isinstance(devices, (list, tuple, np.ndarray)):
        checks.count("devices", devices)
        return devices
    given: tuple[Any, ...] = tuple(devices)
    if not given:
        raise ValueError("devices is empty: give at least one device, or None for all")
    for device in given:
        if not isinstance(device, jax.Device):
            raise ValueError(f"devices must be a number or hold devices such as jax.devices(), not {checks.shown(device)}")
    platforms = sorted({device.platform for device in given})
    if len(platforms) > 1:
        raise ValueError(f"devices are of several platforms, {' and '.join(platforms)}: a program is for one")
    if len(set(given)) < len(given):
        raise ValueError(f"devices holds a device twice: {checks.shown(given)}")
    return given


def chosen(devices: Devices = None) -> tuple[jax.Device, ...]:
    """The devices themselves.

    Raises:
      ValueError: as in `check`, more than there are, or a number so small that a process of the run has none (a list is taken as
        it is).
    """
    devices = check(devices)
    if isinstance(devices, tuple):
        return devices
    available = runtime.default_devices()
    if devices is None:
        return tuple(available)
    assert isinstance(devices, int)
    if devices > len(available):
        raise ValueError(f"devices={devices}, but JAX sees {len(available)} ({available[0].platform})")
    idle = {device.process_index for device in available} - {device.process_index for device in available[:devices]}
    if idle:
        raise ValueError(
            f"devices={devices} leaves process {min(idle)} of the {jax.process_count()} of this run without a device: give more, "
            "or start fewer processes"
        )
    return tuple(available[:devices])


def given(devices: Devices) -> bool:
    """Whether a caller named the devices, and did not only count them."""
    return devices is not None and not isinstance(devices, (int, np.integer))


@contextlib.contextmanager
def computing_on(devices: Devices) -> Iterator[None]:
    """What is traced inside is for these devices; for those around it when `None` or a number.

    A function that is jitted by itself keeps the form in which it was first traced.
    """
    with runtime.compiling_for(chosen(devices)[0].platform) if given(devices) else contextlib.nullcontext():
        yield


def check_precision(precision: str) -> None:
    """Raises `ValueError` for a precision of matrix products that the platform does not have."""
    platform = runtime.platform()
    allowed = _PRECISIONS.get(platform, (precision,))
    if precision not in allowed:
        raise ValueError(f"precision={precision!r} is none of a {platform.upper()}'s; it has {' and '.join(allowed)}")


class Memory(NamedTuple):
    """Bytes of a device that JAX may use, and those of them that are in use."""

    limit: int
    used: int


def memory(device: jax.Device) -> Memory | None:
    """The memory of a device; on a CPU, that of the host. `None` where nothing is known of it."""
    if device.platform == "cpu":
        return Memory(runtime.host_bytes(), runtime.host_bytes() - runtime.free_host_bytes())
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # the device is only described
        stats = None
    if stats and "bytes_limit" in stats:
        return Memory(stats["bytes_limit"], stats.get("bytes_in_use", 0))
    kinds = [kind for kind in MEMORY if device.device_kind.startswith(kind)]
    if not kinds:
        return None
    # JAX takes three quarters of a GPU's memory unless it is told otherwise.
    return Memory(MEMORY[max(kinds, key=len)] * (3 if device.platform == "gpu" else 4) // 4, 0)


def free_bytes(device: jax.Device) -> int | None:
    """Free bytes on a device; on a CPU, of the host's memory. `None` where nothing is known of them."""
    known = memory(device)
    return None if known is None else known.limit - known.used
