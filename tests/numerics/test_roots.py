"""Roots and quotients whose derivatives at 0 count as 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta.numerics.roots import finite_at_zero, quotient, root


@pytest.mark.parametrize("power", [0.25, 0.5])
def test_a_power_below_1_has_a_finite_derivative_at_0_and_the_true_one_elsewhere(power):
    gradient = jax.grad(finite_at_zero(lambda x: (x * x) ** power))
    assert gradient(0.0) == 0
    assert gradient(3.0) == pytest.approx(2 * power * 3.0 ** (2 * power - 1), rel=1e-6)


@pytest.mark.parametrize("power", [0.5, -0.5, -1])
def test_second_derivatives_are_finite_at_0_too(power):
    square = lambda x: jnp.where(x == 0, 0, root(x * x, power))  # noqa: E731
    for twice in (jax.grad(jax.grad(square)), jax.jacfwd(jax.jacfwd(square)), jax.jacfwd(jax.grad(square))):
        assert twice(0.0) == 0
        assert twice(3.0) == pytest.approx(2 * power * (2 * power - 1) * 3.0 ** (2 * power - 2), abs=1e-12)


def test_a_quotient_has_its_derivatives_except_at_0():
    assert jax.grad(quotient, (0, 1))(3.0, 4.0) == pytest.approx((1 / 4, -3 / 16))
    assert jax.grad(jax.grad(quotient, 1), 1)(3.0, 4.0) == pytest.approx(2 * 3 / 64)
    three, zero = jnp.array(3.0), jnp.array(0.0)
    assert jax.grad(quotient, (0, 1))(three, zero) == (0, 0)
    assert jax.grad(jax.grad(quotient, 1), 1)(three, zero) == 0


@pytest.mark.parametrize("inverse", [lambda y: 1 / y, lambda y: y**-1, lambda y: jax.lax.integer_pow(y, -2), jax.lax.rsqrt])
def test_an_inverse_in_a_branch_that_is_not_selected_spreads_no_nan(inverse):
    safe = finite_at_zero(lambda y: jnp.where(y == 0, 5 * y, inverse(y)))
    assert jax.grad(safe)(jnp.array(0.0)) == 5
    assert jax.grad(safe)(jnp.array(2.0)) == pytest.approx(jax.grad(inverse)(2.0), rel=1e-12)


def test_integers_are_divided_as_they_were():
    assert finite_at_zero(lambda n: jax.lax.div(n, jnp.int32(3)))(jnp.int32(7)) == 2


@pytest.mark.parametrize("function", [jax.lax.rsqrt, jnp.sqrt, lambda x: 1 / x, lambda x: x**0.3])
def test_values_are_those_of_the_function(function):
    x = jnp.array([0.0, 4.0, 1e-300, jnp.inf])
    np.testing.assert_array_equal(finite_at_zero(function)(x), function(x))


def test_conditions_and_calls_are_entered():
    def function(x, y):
        return jax.lax.cond(x > 1, jax.jit(lambda x, y: y * jnp.sqrt(x - 4)), lambda x, y: 3 * x, x, y)

    found = jax.grad(finite_at_zero(function), (0, 1))
    assert found(jnp.array(4.0), jnp.array(2.0)) == (0, 0)  # the slope of the root is infinite
    assert found(jnp.array(8.0), jnp.array(2.0)) == pytest.approx((0.5, 2))
    assert found(jnp.array(0.5), jnp.array(2.0)) == (3, 0)
