"""The exact meta-gradient through an LSTM of 256 states equals reverse mode, in memory that grows with the root of the steps."""

import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_meta import meta

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the benchmarks import each other from their folder

import inner_length
from second_order import reverse_over_reverse


@pytest.mark.parametrize("steps", [1, 8, pytest.param(64, marks=pytest.mark.long)])
def test_the_gradient_is_that_of_reverse_mode(steps):
    loss, theta, support, query = inner_length.problem(256, 2, 6)
    own = jax.jit(lambda *given: inner_length.checkpointed(steps)(loss, *given).gradient)(theta, support, query)
    other = reverse_over_reverse(meta.sgd(inner_length.RATE), steps=steps)
    wanted = jax.jit(lambda *given: other(loss, *given).gradient)(theta, support, query)
    own, wanted = (np.asarray(ravel_pytree(tree)[0]) for tree in (own, wanted))
    assert own.dtype == np.float64 and np.linalg.norm(own - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("steps", [64, 1000])
def test_memory_is_that_of_first_order_and_three_roots_of_the_steps(steps):
    with jax.enable_x64(False):
        found = inner_length.memory(steps, 256, 4, 20)
    assert found["exact"] <= found["first order"] + 3 * math.sqrt(steps) * found["tree"]
    assert found["exact"] < found["reverse mode"] / 4
