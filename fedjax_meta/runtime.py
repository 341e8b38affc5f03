"""What JAX is told before it starts: one device for each core of a CPU, and compiled programs kept on disk.

XLA computes all but large matrix products on one core, so on a CPU a cohort is fast when every core is a device of its own.
Both settings give way to the user's: `JAX_NUM_CPU_DEVICES=1` (or XLA's own flag) and `JAX_COMPILATION_CACHE_DIR`, or
`JAX_ENABLE_COMPILATION_CACHE=false` for no cache at all.
"""

import logging
import os
from pathlib import Path

import jax

_log = logging.getLogger("fedjax_meta")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def configure() -> None:
    """Sets what the user has not set; `import fedjax_meta` calls it. Too late for the devices once JAX has started."""
    flagged = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 1 and not flagged:
        try:
            jax.config.update("jax_num_cpu_devices", cores())
        except RuntimeError:
            _log.info("JAX had started before fedjax_meta was imported: its CPU devices stay as they are")
    if jax.config.jax_compilation_cache_dir is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "fedjax_meta"))
        # A run compiles many small programs; JAX's own limit of one second would keep none of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
