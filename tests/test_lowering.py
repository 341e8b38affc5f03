"""Rounds and evaluations of every method lower for a GPU and a TPU where neither is, and ask nothing of their host.

All are lowered in the ordinary suite, and one trace serves both platforms. Nothing is compiled for them here:
`test_accelerators.py` does that in the long tier, and tests programs for several devices.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import runtime
from tests import problems
from tests.test_contract import make

PLATFORMS = ("cuda", "tpu")
KEY = jax.random.key(0)
EQUAL = ("fedmeta_per", "fedpac", "scaffold")
"""Methods whose round between equal clients, as a GPU has it, is compiled and run in the ordinary suite."""


def abstract(tree):
    """The forms of a tree of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype)), tree)


def lowered(function, *arguments) -> str:
    """The program for both platforms."""
    with runtime.compiling_for("gpu"):
        traced = jax.jit(function).trace(KEY, *arguments)
    return traced.lower(lowering_platforms=PLATFORMS).as_text()


def check(program: str) -> None:
    assert "callback" not in program
    assert not re.search(r"feature_group_count = (?!1 )\d+", program)


def problem(name):
    algorithm, data = make(name, devices=1, lanes=2), abstract(problems.data())
    return algorithm, jax.eval_shape(algorithm.init, KEY, data), data


@pytest.mark.parametrize("name", fm.METHODS)
def test_every_program_of_a_method_lowers_for_accelerators(name):
    """The rounds of two members of a sweep, which are lanes there, and the evaluations of known and new clients.

    All in one program, which takes less time than three, and in float32, as accelerators have it.
    """

    def programs(key, state, data):
        def rounds(state):
            return jax.lax.fori_loop(0, 2, lambda _, state: algorithm.round(key, state, data)[0], state)

        evaluations = [fm.evaluate(algorithm, key, state, data, known=known) for known in (True, False)]
        return jax.vmap(rounds)(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)), evaluations

    with jax.enable_x64(False):
        algorithm, *arguments = problem(name)
        check(lowered(programs, *arguments))


def test_a_program_is_made_for_the_platform_it_is_lowered_for():
    algorithm, *arguments = problem("fedavg")
    here = jax.jit(algorithm.round).trace(KEY, *arguments).lower().as_text()
    assert lowered(algorithm.round, *arguments) != here
    with (
        pytest.raises(ValueError, match="precision='tf32' is none of a TPU's; it has float32 and bfloat16"),
        runtime.compiling_for("tpu"),
    ):
        jax.eval_shape(make("fedavg", devices=1, lanes=1, precision="tf32").round, KEY, *arguments)


@pytest.mark.parametrize("name", ["fedavg", "fedmeta_per"])
def test_a_training_loop_has_a_known_number_of_steps_where_all_clients_have_as_many_samples(name):
    """A loop whose number of steps is a value of the program makes a GPU ask its host after each; that over groups is left."""

    def unknown(sizes):
        algorithm, data = make(name, devices=1, lanes=2), abstract(problems.clients_of(sizes))
        program = lowered(algorithm.round, jax.eval_shape(algorithm.init, KEY, data), data)
        return len(re.findall(r"cond \{\s+%\w+ = stablehlo\.compare LT, %iterArg\w*, %iterArg", program))

    assert unknown([97] * 7) == 1
    assert unknown([97] * 6 + [90]) > 1


@pytest.mark.parametrize("name", problems.sampled(EQUAL))
def test_where_all_clients_have_as_many_samples_an_accelerator_knows_its_steps_and_finds_the_same(name):
    """The program for a GPU is run here; one place of its second group of lanes is empty."""
    data = problems.clients_of([61] * 7)
    assert data.same_size == data.views
    algorithm = make(name, devices=1, lanes=2, cohort_size=5)
    state = jax.jit(algorithm.init)(KEY, data)
    expected = jax.jit(algorithm.round)(KEY, state, data)
    with runtime.compiling_for("gpu"):
        found = jax.jit(partial(algorithm.round))(KEY, state, data)  # another function than the one that is compiled already
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)
