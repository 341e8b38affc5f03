"""The machine below JAX: what it is told before it starts, and what of it this process may use.

XLA computes all but large matrix products on one core, so on a CPU a cohort is fast when every core is a device of its own, and
compiled programs are kept on disk. Both settings give way to the user's: `JAX_NUM_CPU_DEVICES=1` (or XLA's own flag) and
`JAX_COMPILATION_CACHE_DIR`, or `JAX_ENABLE_COMPILATION_CACHE=false` for no cache at all.
"""

import logging
import math
import os
from pathlib import Path
from typing import Any

import jax

CACHE_VARIABLE = "FEDJAX_META_CACHE"
"""Environment variable with the folder of what can be computed again: compiled programs, decoded data sets."""

_log = logging.getLogger("fedjax_meta")


def cache_folder() -> Path:
    """Where what can be computed again is kept: the variable's folder, or one in the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedjax_meta"
    return base.expanduser()


def on_cpu() -> bool:
    """Whether JAX computes on a CPU."""
    return jax.default_backend() == "cpu"


def cores() -> int:
    """Processor cores that this process may use, a container's or job's share of them included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            allowed = min(allowed, max(1, math.ceil(int(quota) / int(period))))
    return allowed


def free_host_bytes() -> int:
    """Bytes that this process can still take of the host's memory, a container's or job's limit included."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable"):
            free = int(line.split()[1]) * 1024
    for group in _control_groups():
        limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            # Files that were read and are not in use give way, and count as free on the whole host too.
            idle = [line.split()[1] for line in _read(group / "memory.stat").splitlines() if line.startswith("inactive_file ")]
            free = min(free, int(limit) - int(used) + sum(map(int, idle)))
    return max(free, 0)


def _control_groups() -> list[Path]:
    """Linux' control groups (version 2) that this process is in, from its own to the root's."""
    lines = [line for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")]
    if not lines:
        return []
    root = Path("/sys/fs/cgroup")
    own = root / lines[0][3:].lstrip("/")
    return [group for group in (own, *own.parents) if group == root or root in group.parents]


def _read(file: Path) -> str:
    """What a file of the system says; nothing where there is none."""
    return file.read_text() if file.exists() else ""


def configure() -> None:
    """Sets what the user has not set; `import fedjax_meta` calls it. Too late for the devices once JAX has started."""
    flagged = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    settings: Any = jax.config  # its values are attributes that a type checker does not see
    if settings.jax_num_cpu_devices < 1 and not flagged:
        try:
            jax.config.update("jax_num_cpu_devices", cores())
        except RuntimeError:
            _log.info("JAX had started before fedjax_meta was imported: its CPU devices stay as they are")
    if settings.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        # A run compiles many small programs; JAX's own limit of one second would keep none of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
