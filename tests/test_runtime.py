"""JAX's devices and cache, each in a process of its own, and the limits of a job, from files like those of Linux."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import runtime


@pytest.fixture
def control_group(tmp_path, monkeypatch):
    """A job's control group inside another one."""
    outer = tmp_path / "job"
    inner = outer / "step"
    inner.mkdir(parents=True)
    monkeypatch.setattr(runtime, "_control_groups", lambda: [inner, outer, tmp_path])
    return outer, inner


def test_a_jobs_share_of_the_cores_counts(control_group, monkeypatch):
    outer, inner = control_group
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert runtime.cores() == 64
    (inner / "cpu.max").write_text("max 100000\n")
    assert runtime.cores() == 64
    (outer / "cpu.max").write_text("250000 100000\n")
    assert runtime.cores() == 3
    (inner / "cpu.max").write_text("20000 100000\n")
    assert runtime.cores() == 1


def test_a_jobs_memory_limit_counts(control_group):
    outer, inner = control_group
    assert runtime.host_bytes() >= runtime.free_host_bytes() > 2**20
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("500\n")
    assert runtime.free_host_bytes() > 2**20
    (outer / "memory.max").write_text("10000\n")
    (outer / "memory.current").write_text("7000\n")
    assert runtime.free_host_bytes() == 3000
    (outer / "memory.stat").write_text("anon 4000\ninactive_file 1500\nactive_file 10\n")
    assert runtime.free_host_bytes() == 4500
    assert runtime.host_bytes() == 10000  # whatever is free


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_memory_that_was_freed_goes_back_to_the_system():
    """300 MB of small blocks, of which every thousandth stays, so that the heap cannot shrink from its end."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [bytes(1500) for _ in range(200_000)]
    kept = blocks[::1000]
    del blocks
    before = resident()
    runtime.give_back_free_memory()
    assert resident() < before - 200e6 and len(kept) == 200


def test_the_groups_of_a_process_are_its_own_and_those_above_it(monkeypatch):
    monkeypatch.setattr(runtime, "_read", lambda file: "4:memory:/x\n0::/slurm/job_7/step_0\n")
    groups = [str(group) for group in runtime._control_groups()]
    assert groups == [f"/sys/fs/cgroup{end}" for end in ("/slurm/job_7/step_0", "/slurm/job_7", "/slurm", "")]


def run(code: str, **environment: str) -> str:
    """Runs `code` in a new process without the caller's JAX settings; what it prints to stderr."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=Path(__file__).parent.parent,
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_importing_changes_no_setting_and_starts_no_backend():
    run("""
import importlib, pkgutil
import jax
before = dict(jax.config.values)
import fedjax_meta
for module in pkgutil.walk_packages(fedjax_meta.__path__, "fedjax_meta."):
    importlib.import_module(module.name)
assert dict(jax.config.values) == before
jax.config.update("jax_num_cpu_devices", 3)  # JAX refuses this once its backend has started
assert jax.device_count() == 3
""")


def test_all_cores_become_devices_and_programs_are_kept(tmp_path):
    code = """
import jax
from pathlib import Path
from fedjax_meta import runtime
runtime.cores = lambda: 3
assert [runtime.use_all_cores(), runtime.use_all_cores()] == [3, 3]
folder = Path(jax.config.jax_compilation_cache_dir)
assert folder == runtime.cache_folder() / "compiled"
assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.2
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x + 1)(1.0)
assert list(folder.iterdir())
assert jax.device_count() == runtime.use_all_cores() == 3
"""
    run(code, FEDJAX_META_CACHE=str(tmp_path), XLA_FLAGS="")


def test_the_users_settings_stay(tmp_path):
    code = """
import sys, jax
from fedjax_meta import runtime
settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
before = [getattr(jax.config, name) for name in settings]
assert runtime.use_all_cores() == runtime.use_all_cores(cores=5) == 2
assert [getattr(jax.config, name) for name in settings] == before
assert jax.device_count() == 2
"""
    run(code, JAX_NUM_CPU_DEVICES="2", JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    run(code.replace("cores()", "cores(compile_cache=False)"), XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path))  # fmt: skip
    run("""
import jax
from fedjax_meta import runtime
jax.config.update("jax_num_cpu_devices", 2)
assert runtime.use_all_cores(compile_cache=False) == 2
assert runtime.use_all_cores(cores=3, compile_cache=False) == 3
assert jax.config.jax_compilation_cache_dir is None
assert jax.device_count() == 3
""")


def test_too_late_is_refused_unless_the_devices_are_as_asked():
    run("""
import jax
from fedjax_meta import runtime
jax.numpy.ones(2)
assert runtime.use_all_cores(cores=1) == 1
try:
    runtime.use_all_cores(cores=4)
except RuntimeError as error:
    assert str(error) == (
        "JAX has already started with 1 CPU device(s), not 4: call use_all_cores() before anything is computed"
    ), error
else:
    raise AssertionError("nothing was raised")
""", XLA_FLAGS="")  # fmt: skip


def test_a_number_of_cores_below_one_is_refused():
    with pytest.raises(ValueError, match="cores=0 must be an integer of at least 1"):
        runtime.use_all_cores(cores=0)


def test_idle_cores_are_logged_once_unless_the_user_chose_the_devices():
    code = """
from fedjax_meta import runtime
runtime.cores = lambda: 4
runtime.log_idle_cores()
runtime.log_idle_cores()
"""
    assert run(code, XLA_FLAGS="").splitlines() == [
        "JAX computes on 1 of 4 cores: call fedjax_meta.use_all_cores() before anything is computed, or set "
        "JAX_NUM_CPU_DEVICES=1 to keep it so"
    ]
    assert run(code, JAX_NUM_CPU_DEVICES="1") == ""
    assert run(code.replace("= lambda: 4", "= lambda: 4; runtime.use_all_cores()")) == ""


def test_a_loop_of_ones_own_is_never_more_than_a_round_ahead_of_its_devices():
    run("""
import jax, numpy as np
import fedjax_meta as fm
from fedjax_meta import models
fm.use_all_cores(cores=2, compile_cache=False)
rng = np.random.default_rng(0)
data = fm.from_clients([(rng.normal(size=(60, 64)), rng.integers(0, 3, 60)) for _ in range(6)], num_classes=3)
algorithm = fm.federate(fm.fedavg(models.mlp(inputs=64, classes=3), epochs=5, batch_size=5))
step = jax.jit(algorithm.round)
state = algorithm.init(jax.random.key(0), data)
ahead = []
for i in range(20):
    made = state
    state, _ = step(jax.random.key(i), state, data)
    assert len(state.round.sharding.device_set) == 2
    assert made.round.is_ready()
    ahead.append(not state.round.is_ready())
assert any(ahead[1:])  # a round takes longer than to hand it on: Python is ahead
""")


SAME_BITS = {"xla_gpu_autotune_level": "0", "xla_gpu_deterministic_ops": True}


@pytest.mark.parametrize(
    ("platform", "flags", "once", "expected"),
    [
        ("cpu", "", False, {"xla_backend_optimization_level": "2"}),
        ("cpu", "--xla_cpu_enable_fast_math=false", True, {"xla_backend_optimization_level": "1"}),
        ("cpu", "--xla_backend_optimization_level=0", False, None),
        ("gpu", "", False, {"xla_gpu_enable_triton_gemm": False, **SAME_BITS}),
        ("gpu", "", True, {"xla_gpu_enable_triton_gemm": False, **SAME_BITS}),
        ("gpu", "--xla_gpu_enable_triton_gemm=true", False, SAME_BITS),
        ("tpu", "", True, None),
    ],
)
def test_a_programs_options_are_the_platforms_and_the_users_come_first(platform, flags, once, expected, monkeypatch):
    given = []
    monkeypatch.setenv("XLA_FLAGS", flags)
    lowered = mock.Mock(compile=lambda *options: given.extend(options))
    with runtime.compiling_for(platform):
        runtime.compiled(lowered, once=once)
    assert given == [expected]


def test_a_program_of_either_level_computes_the_same():
    lowered = jax.jit(lambda x: jnp.sort(x)[::-1] @ x).lower(np.arange(5.0))
    assert [float(runtime.compiled(lowered, once=once)(np.arange(5.0))) for once in (True, False)] == [10.0, 10.0]
