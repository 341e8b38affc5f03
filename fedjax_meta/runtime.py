"""The machine that JAX runs on: its cores and memory, JAX's CPU devices and compilation cache, and the cache folder.

XLA computes all but large matrix products on one core, so on a CPU a cohort is fast when every core is a JAX device of its own.
`use_all_cores` sets JAX up that way. Importing the package changes no setting.
"""

import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import gc
import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import find_top_trace

from fedjax_meta import checks
from fedjax_meta.types import PyTree

CACHE_VARIABLE = "FEDJAX_META_CACHE"
"""Environment variable that names the folder for compiled programs and decoded data sets."""

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_log = logging.getLogger("fedjax_meta")


def cache_folder() -> Path:
    """The folder for files that can be recomputed: the one that `FEDJAX_META_CACHE` names, else one in the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedjax_meta"
    return base.expanduser()


def default_devices() -> list[jax.Device]:
    """JAX's own devices, which are used where a caller gives none."""
    return jax.devices()


def device_kinds() -> str:
    """Kind and number of JAX's devices in words, for the record of a run."""
    available = default_devices()
    return f"{available[0].device_kind} x {len(available)}"


def platform() -> str:
    """The platform of the program that is being traced: "cpu", "gpu" or "tpu"; see `hardware.computing_on`."""
    return _platform.get() or default_devices()[0].platform


def on_cpu() -> bool:
    """Whether the program that is being traced is for a CPU."""
    return platform() == "cpu"


_COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    # LLVM's higher levels take longer and gain nothing.
    "cpu": {"xla_backend_optimization_level": "2"},
    # XLA would search among Triton kernels for each product, which takes most of the time to compile. On an H200 rounds of 50
    # clients take as long with cuBLAS's. Of these it would choose the fastest, which is another one in the next process, and
    # sums of a scatter would come in any order: two runs would differ. Neither gains time there.
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0", "xla_gpu_deterministic_ops": True},
}
"""By platform, what differs from XLA's defaults. `docs/benchmarks.md` has the times."""


def compiled(lowered: jax.stages.Lowered, *, once: bool = False) -> jax.stages.Compiled:
    """Compiles a program for `platform()`, with less work than XLA does by default.

    An option in the environment (`XLA_FLAGS=--xla_backend_optimization_level=3`) comes first.

    Args:
      lowered: the program.
      once: whether it will be called once, so that compiling it takes longer than running it.
    """
    return lowered.compile(compiler_options(once=once) or None)


def compiling(lowered: jax.stages.Lowered) -> concurrent.futures.Future[jax.stages.Compiled]:
    """`compiled` on a thread of its own, beside which this one may trace other programs.

    Programs are lowered by whoever calls this: settings such as `jax.enable_x64` belong to a thread.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1, "compile")
    future = pool.submit(lowered.compile, compiler_options() or None)
    pool.shutdown(wait=False)  # after this one
    return future


def compiler_options(*, once: bool = False) -> dict[str, str | bool]:
    """What `compiled` asks of XLA; without the options that the environment has."""
    options = _COMPILER_OPTIONS.get(platform(), {})
    if once and on_cpu():
        options = options | {"xla_backend_optimization_level": "1"}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def tracing() -> bool:
    """Whether this runs under a transformation of JAX, such as `jit`, `vmap` or `grad`, of which it becomes a part."""
    return type(find_top_trace(())).__name__ != "EvalTrace"


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """What is traced inside is for this platform."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def least_of_processes(number: float) -> float:
    """The minimum over the processes of this run, which must all do the same; all of them must call it."""
    if jax.process_count() == 1:
        return number
    with jax.ensure_compile_time_eval():
        return float(np.min(multihost_utils.process_allgather(np.float32(number))))


def cores() -> int:
    """The number of processor cores that this process may use, within the limits of its container or job."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            allowed = min(allowed, max(1, math.ceil(int(quota) / int(period))))
    return allowed


_ALIGNMENT = 64
"""XLA reads memory of the host in place if it begins at a multiple of so many bytes."""


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that is not filled yet, which the devices of a CPU host read in place."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Whether the devices of a CPU host read an array in place."""
    return array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0


def size_in_bytes(tree: PyTree) -> int:
    """Bytes of a pytree of arrays or shapes.

    Example:
      >>> size_in_bytes({"a": np.ones(10, np.float32), "b": np.ones(3, np.float32)})
      52
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def host_bytes() -> int:
    """The bytes of memory of this host, within the limits of the process's container or job."""
    limits = [_read(group / "memory.max").strip() for group in _control_groups()]
    return min([_physical_bytes(), *(int(limit) for limit in limits if limit.isdecimal())])


def free_host_bytes() -> int:
    """The bytes of host memory that this process can still allocate, within the limits of its container or job."""
    free = _physical_bytes()
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable"):
            free = int(line.split()[1]) * 1024
    for group in _control_groups():
        limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            # The kernel drops inactive file pages when memory is needed; MemAvailable counts them as free too.
            idle = [line.split()[1] for line in _read(group / "memory.stat").splitlines() if line.startswith("inactive_file ")]
            free = min(free, int(limit) - int(used) + sum(map(int, idle)))
    return max(free, 0)


def give_back_free_memory() -> None:
    """Returns freed memory that glibc keeps for later to the operating system; does nothing with another C library.

    Compilers allocate and free many small blocks on many threads, of which glibc keeps most: about 100 MB for each system of a
    small study.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_groups() -> list[Path]:
    """The Linux control groups (version 2) of this process, from its own up to the root."""
    lines = [line for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")]
    if not lines:
        return []
    root = Path("/sys/fs/cgroup")
    own = root / lines[0][3:].lstrip("/")
    return [group for group in (own, *own.parents) if group == root or root in group.parents]


def _read(file: Path) -> str:
    """The text of a system file; empty when the file does not exist."""
    return file.read_text() if file.exists() else ""


def use_all_cores(*, cores: int | None = None, compile_cache: bool = True) -> int:
    """Makes every core a JAX CPU device and keeps compiled programs on disk. Call it before anything is computed.

    It does not start JAX's backend, so `jax.distributed.initialize` may follow it. A second such call changes nothing. What has
    been imported so far is kept out of Python's garbage collection (`gc.freeze`), which takes a twentieth of the time to trace
    and compile otherwise.

    Args:
      cores: the number of CPU devices; the cores that this process may use when not given. The environment overrides it
        (`JAX_NUM_CPU_DEVICES`, or `--xla_force_host_platform_device_count` in `XLA_FLAGS`). When it is not given, so does
        `jax_num_cpu_devices` in `jax.config`.
      compile_cache: keep compiled programs in `cache_folder()`. `JAX_COMPILATION_CACHE_DIR` names another folder, and
        `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.

    Returns:
      The number of CPU devices of this process.

    Raises:
      RuntimeError: JAX has already started with another number of CPU devices.
      ValueError: `cores` is not an integer of at least 1.
    """
    if cores is not None:
        checks.count("cores", cores)
    wanted = _devices_wanted(cores)
    if _jax_has_started():
        present = _cpu_devices()
        if present not in (None, wanted):
            raise RuntimeError(
                f"JAX has already started with {present} CPU device(s), not {wanted}: call use_all_cores() before anything is "
                "computed"
            )
    else:
        jax.config.update("jax_num_cpu_devices", wanted)
        gc.freeze()
    if compile_cache and _setting("jax_compilation_cache_dir") is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            # A run compiles many small programs; JAX's default of one second would keep none of them.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return wanted


@functools.cache  # once a process
def log_idle_cores() -> None:
    """Logs a warning, once, when JAX computes on one CPU device, several cores are allowed and the user chose no number."""
    if on_cpu() and jax.local_device_count() == 1 and _devices_chosen() is None and cores() > 1:
        _log.warning(
            "JAX computes on 1 of %d cores: call fedjax_meta.use_all_cores() before anything is computed, or set "
            "JAX_NUM_CPU_DEVICES=1 to keep it so",
            cores(),
        )


def _devices_wanted(given: int | None) -> int:
    chosen = _devices_chosen()
    in_environment = "JAX_NUM_CPU_DEVICES" in os.environ or _flagged_devices() is not None
    if chosen is not None and (given is None or in_environment):
        return chosen
    return cores() if given is None else given


def _devices_chosen() -> int | None:
    """The number of CPU devices that JAX's setting or XLA's flag asks for; `None` when neither does."""
    configured = _setting("jax_num_cpu_devices")
    return configured if configured >= 1 else _flagged_devices()


def _flagged_devices() -> int | None:
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(flags[-1]) if flags else None


def _jax_has_started() -> bool:
    """Whether JAX has started its backend, after which the number of CPU devices is fixed."""
    before = _setting("jax_num_cpu_devices")
    # JAX has no public function for this, but it refuses another number of devices once it has started.
    try:
        jax.config.update("jax_num_cpu_devices", max(before, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def _cpu_devices() -> int | None:
    """This process's CPU devices; `None` when `JAX_PLATFORMS` leaves out the CPU. Starts JAX's backend."""
    try:
        return len(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return None


def _setting(name: str) -> Any:
    """A value of `jax.config`, whose attributes a type checker does not see."""
    return getattr(jax.config, name)
