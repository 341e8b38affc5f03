"""Descriptions of accelerators that need not exist here: JAX compiles for them with the extra `accelerator-aot`."""

import os
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from fedjax_meta import checks, runtime

# libtpu would otherwise ask a cloud's metadata server what machine this is, and let one process at a time load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there is no driver whose version could be asked for
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

# Without the versions of driver and runtime, XLA puts no loop into a CUDA graph.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184 device_address_bits: 64
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""


class Target(NamedTuple):
    """A kind of accelerator.

    Attributes:
      platform, topology, config: what `jax.experimental.topologies.get_topology_desc` takes; `topology` is of four devices.
      flops: FLOP/s of float32 products. A TPU computes each in six passes of bfloat16.
      bandwidth: bytes a second of its memory.
    """

    platform: str
    topology: str
    config: str | None
    flops: float
    bandwidth: float


TARGETS = {
    "h200": Target("cuda", "1x4x1", _H200, 67e12, 4.8e12),
    "v5e": Target("tpu", "v5e:2x2", None, 197e12 / 6, 819e9),
    "v6e": Target("tpu", "v6e:2x2", None, 918e12 / 6, 1640e9),
}
"""Vendors' figures for rates (data sheets of the H200 SXM and of Cloud TPU)."""


def described(name: str, count: int = 1) -> list[jax.Device]:
    """`count` devices (1 to 4) of a target, for which programs can be lowered and compiled.

    Raises:
      ValueError: an unknown target, more than four devices, or a topology that the compiler does not know.
      RuntimeError: the compiler of that target is not installed.
    """
    checks.one_of("target", name, TARGETS)
    if not 1 <= count <= 4:
        raise ValueError(f"count={count} must be from 1 to 4: a described machine has four devices")
    target = TARGETS[name]
    if target.config is not None and count == 1:
        target = target._replace(topology="1x1x1")
    return topology(target)[:count]


def topology(target: Target) -> list[jax.Device]:
    """The devices of a described machine.

    Raises:
      ValueError: a topology that the compiler does not know.
      RuntimeError: the compiler is not installed.
    """
    runtime.default_devices()  # JAX finds its plugins when it starts
    options: dict[str, Any] = {} if target.config is None else {"target_config": target.config}
    if target.config is None:
        options["topology_name"] = target.topology
    else:
        options["topology"] = target.topology
    try:
        return list(topologies.get_topology_desc(platform=target.platform, **options).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError, ValueError) as error:
        words = str(error)
        if "INVALID_ARGUMENT" in words or "topology shape" in words:
            raise ValueError(f"no {target.platform} topology {target.topology!r}: {words.splitlines()[0]}") from error
        raise RuntimeError(
            f"no compiler for {target.platform} is installed (pip install 'fedjax_meta[accelerator-aot]'): {words}"
        ) from error
