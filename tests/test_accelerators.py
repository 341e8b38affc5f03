"""Every program compiles for accelerators that are described and not at hand; needs the extra `accelerator-aot`.

The compilers are the real ones; nothing runs. Those of a GPU and of a TPU are tested apart, because each has packages of its own.
"""

import re
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the benchmarks import each other from their folder

import _hlo
import static
from _targets import TARGETS, Target, described, topology

import fedjax_meta as fm
from fedjax_meta import engine, hardware, runtime
from tests import problems
from tests.test_contract import make

pytestmark = pytest.mark.long
PLATFORM = {"h200": "gpu", "v5e": "tpu"}


@cache
def missing(name):
    """Why there are no devices of a target; `None` if there are."""
    try:
        described(name, 4)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PLATFORM])
def target(request):
    if missing(request.param) is not None:
        pytest.skip(missing(request.param))
    # JAX cannot read a program back from its cache for a device that is only described.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    with jax.enable_x64(False):
        yield request.param
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def abstract(tree, place):
    """Forms of a tree of arrays, in float32, on a device."""

    def form(leaf):
        key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        dtype = leaf.dtype if key else jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=place)

    return jax.tree.map(form, tree)


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def check(program):
    for line in _hlo.Program(program.as_text()).instructions():
        assert "callback" not in line.rest
        if line.operation == "convolution":
            assert not re.search(r"(feature|batch)_group_count=(?!1\b)", line.rest)


def problem(name, devices, **options):
    place = NamedSharding(Mesh(np.array(devices), ("clients",)), PartitionSpec())
    if len(devices) == 1:
        place = SingleDeviceSharding(devices[0])
    algorithm, data = make(name, devices=devices, **options), problems.data()
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(algorithm.init, key, abstract(data, None))
    return algorithm, abstract((key, state, data), place)


@pytest.mark.parametrize("name", fm.METHODS)
def test_every_program_of_a_method_compiles(target, name):
    algorithm, arguments = problem(name, described(target))
    assert hardware.chosen(algorithm.devices)[0].platform == PLATFORM[target]
    check(compiled(algorithm.round, *arguments))
    with hardware.computing_on(
        algorithm.devices
    ):  # with the library's options, and above without them, as in a user's program
        check(runtime.compiled(jax.jit(algorithm.round).lower(*arguments)))
    for known in (True, False):
        check(compiled(lambda key, state, data: fm.evaluate(algorithm, key, state, data, known=known), *arguments))  # noqa: B023


@pytest.mark.parametrize("name", ["fedavg", "fedmeta_per", "fedpac"])
def test_devices_meet_once_a_round_for_each_type_of_number(target, name):
    algorithm, arguments = problem(name, described(target, 4), lanes=2)
    lines = _hlo.Program(compiled(algorithm.round, *arguments).as_text()).instructions()
    types = [
        tuple(sorted(set(re.findall(r"\b([a-z]+\d*)\[", line.form))))
        for line in lines
        if line.operation in ("all-reduce", "all-reduce-start")
    ]
    assert types and len(types) == len(set(types)), types


@pytest.mark.parametrize("case", ["W2", "FedMeta-Per"])
def test_a_cohort_of_500_fits_a_device(target, case):
    """`test_static.py` holds the committed rows of all cases against the same memory."""
    if (target, case) == ("v5e", "FedMeta-Per"):
        pytest.skip("its program for a TPU is not compiled: docs/benchmarks.md")
    device = described(target)[0]
    row = static.measure(case, 500, target)
    assert row["temp_bytes"] + row["argument_bytes"] < hardware.free_bytes(device)


@pytest.mark.parametrize("precision", engine.PRECISIONS)
def test_a_precision_compiles_or_is_refused_by_name(target, precision):
    algorithm, arguments = problem("fedavg", described(target), precision=precision)
    if (target, precision) == ("v5e", "tf32"):
        with pytest.raises(ValueError, match="precision='tf32' is none of a TPU's"):
            compiled(algorithm.round, *arguments)
    else:
        check(compiled(algorithm.round, *arguments))


def test_a_topology_that_does_not_exist_is_refused(target):
    with pytest.raises(ValueError, match="no (cuda|tpu) topology '9x9x0'"):
        topology(TARGETS[target]._replace(topology="9x9x0"))


def test_a_target_without_a_compiler_says_what_to_install():
    with pytest.raises(
        RuntimeError, match=r"no compiler for rocm is installed \(pip install 'fedjax_meta\[accelerator-aot\]'\)"
    ):
        topology(Target("rocm", "1x1x1", "", 1.0, 1.0))
    with pytest.raises(ValueError, match="target='h9' is unknown; allowed are h200, v5e, v6e"):
        described("h9")
