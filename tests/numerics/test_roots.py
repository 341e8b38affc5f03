"""Roots whose derivative at 0 counts as 0."""

import jax
import pytest

from fedjax_meta.numerics.roots import finite_at_zero


@pytest.mark.parametrize("power", [0.25, 0.5])
def test_a_power_below_1_has_a_finite_derivative_at_0_and_the_true_one_elsewhere(power):
    gradient = jax.grad(finite_at_zero(lambda x: (x * x) ** power))
    assert gradient(0.0) == 0
    assert gradient(3.0) == pytest.approx(2 * power * 3.0 ** (2 * power - 1), rel=1e-6)
