"""Tests run in float64, on two CPU devices, and compile fast: what they cost is compilation."""

import os

import jax
import pytest

FLAGS = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):
    # The other of XLA's two code generators compiles these small programs three times as fast, and in one piece. XLA aborts
    # on a flag that it does not know, so versions in which nobody has tried these go without.
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
# XLA reads them when the first array is made.
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a file, which share compiled programs, in one process, if they are in no other group already."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
