"""Tests run in float64, on two CPU devices, with fast compilation, which takes most of their time."""

import gc
import itertools
import os
import pathlib
import platform

import jax
import numpy as np
import pytest
from jax._src import pjit
from jax._src.interpreters import pxla

from fedjax_meta import runtime

FLAGS = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):
    # XLA's older code generator compiles these small programs three times as fast, and in one piece. XLA aborts on a flag that
    # it does not know, so that versions in which these flags are untested run without them.
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    if platform.machine() == "x86_64":
        # Processors with wider vectors compile a tenth faster without them; the tests' arrays are small.
        FLAGS.append("--xla_cpu_max_isa=AVX2")
# XLA reads the flags when JAX starts its backend.
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)
runtime.use_all_cores()  # keeps the two devices, and turns the compilation cache on
# Tests compile many programs of a tenth of a second, some of them in several processes: the environment is for those they start.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
jax.config.update(
    "jax_persistent_cache_min_compile_time_secs", float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
)

_finished = itertools.count(1)

# JAX has no public name for its caches of lowered modules; a version that has others keeps what it lowers.
LOWERED = [
    getattr(module, name)
    for module, name in ((pjit, "_pjit_lower"), (pxla, "_cached_lowering_to_hlo"))
    if hasattr(getattr(module, name, None), "cache_clear")
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a file, which share compiled programs, in one process, unless they are in a group already."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses versions that ignore test groups; keeps the garbage collector from taking long."""
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        # pytest-xdist adds "@group" to a test's id. Without groups, each process compiles and sets up everything.
        raise pytest.UsageError(
            f"pytest-xdist ignores test groups under pytest {pytest.__version__}: use the versions of pyproject.toml"
        )
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # tracing makes many objects; fewer collections save a twentieth of the time


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers of one test: the same whichever tests run before it."""
    return np.random.default_rng(17)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Keeps the costs of a compilation from growing with the number of programs that were compiled before.

    JAX keeps the module of each program that it lowered, and thereby an MLIR context. Each context makes the next one slower:
    after 2,000 programs the smallest compilation takes twice the time. Compiled programs stay, unless there are too many.
    """
    if next(_finished) % 20:
        return
    for cache in LOWERED:
        cache.cache_clear()
    # A compiled program takes memory maps, of which Linux gives a process 65,530. What later tests need is compiled again.
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()
