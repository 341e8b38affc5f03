"""Functions whose square roots and quotients have the derivative 0 where it is infinite, at 0.

An optimiser like Adam divides by the root of a mean of squares. Where a gradient is exactly 0 (a pixel that is always black, a
dead unit), reverse mode takes the infinite derivative of the root times that of the square, 0, which is NaN. The limit is 0.

Clipping by a norm divides by that norm in a branch that it does not select where the norm is 0; reverse mode multiplies that
infinite derivative by 0. RAdam takes the root of a negative number in such a branch, so that the root is 0 here. A result that is
NaN because of such a root or quotient stays NaN.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def root(x: jax.Array, power: float) -> jax.Array:
    """x to a power, with the derivative 0 where that is not finite; 0 where x is negative and has no such power.

    Example:
      >>> jax.grad(lambda x: root(x * x, 0.5))(0.0).item()
      0.0
    """
    if power % 1 == 0:
        return x**power
    known: dict[float, Callable[[jax.Array], jax.Array]] = {0.5: jax.lax.sqrt, -0.5: jax.lax.rsqrt}
    taken = known.get(power, lambda x: x**power)
    return jnp.where(x < 0, 0, taken(jnp.where(x < 0, 1, x)))


@root.defjvp
def _root_jvp(power: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,) = primals
    value = root(x, power)
    # The slope is finite itself, so that it can be differentiated in its turn.
    slope = power * quotient(value, jnp.where(x == 0, 1, x))
    return value, jnp.where((x != 0) & jnp.isfinite(slope), slope, 1 if power == 1 else 0) * tangents[0]


@jax.custom_jvp
def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y, with the derivative 0 where that is not finite.

    Example:
      >>> jax.grad(lambda y: jnp.where(y == 0, 0, quotient(1.0, y)))(jnp.zeros(())).item()
      0.0
    """
    return x / y


@quotient.defjvp
def _quotient_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    value = quotient(x, y)
    divisor = jnp.where(y == 0, 1, y)
    of_x, of_y = (jnp.where((y != 0) & jnp.isfinite(slope), slope, 0) for slope in (1 / divisor, -value / divisor))
    return value, of_x * dx + of_y * dy


REPLACED = ("sqrt", "rsqrt", "pow", "integer_pow", "div")
"""Operations that `finite_at_zero` may replace."""

CALLS = ("jit", "pjit")
"""What releases of JAX call the operation of a jitted function."""


def finite_at_zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `root` and `quotient` in place of its own, also of those in calls and conditions, but not in loops.

    Its results are NaN where those of the function are.

    Example:
      >>> jax.grad(finite_at_zero(jnp.linalg.norm))(jnp.zeros(2)).tolist()
      [0.0, 0.0]
    """

    def evaluated(*arguments: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        if not any(equation.primitive.name in REPLACED for equation in _entered(program.jaxpr)):
            return function(*arguments)
        results = _evaluate(program.jaxpr, program.consts, jax.tree.leaves(arguments))
        plain = jax.tree.leaves(function(*jax.lax.stop_gradient(arguments)))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(_not_a_number_as, plain, results))

    return evaluated


def _entered(program: Jaxpr) -> Iterator[Any]:
    """The operations of a program and of the calls and conditions in it."""
    for equation in program.eqns:
        yield equation
        name, params = equation.primitive.name, equation.params
        programs = params["branches"] if name == "cond" else [params["jaxpr"]] if name in CALLS else []
        for inner in programs:
            yield from _entered(inner.jaxpr)


def _not_a_number_as(plain: Any, result: Any) -> Any:
    """The result, NaN where the plain one is, with the derivative of the result."""
    if not jnp.issubdtype(jnp.result_type(result), jnp.floating):
        return result
    return result + jnp.where(jnp.isnan(plain), plain, 0)


def _evaluate(program: Jaxpr, constants: Any, arguments: Any) -> list[Any]:
    values = dict(zip([*program.constvars, *program.invars], [*constants, *arguments], strict=True))
    for equation in program.eqns:
        given = [var.val if isinstance(var, Literal) else values[var] for var in equation.invars]
        values.update(zip(equation.outvars, _operate(equation, given), strict=True))
    return [var.val if isinstance(var, Literal) else values[var] for var in program.outvars]


def _operate(equation: Any, given: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in ("sqrt", "rsqrt"):
        return [root(*given, 0.5 if name == "sqrt" else -0.5)]
    if name == "div" and jnp.issubdtype(jnp.result_type(given[0]), jnp.floating):
        return [quotient(*given)]
    if name == "integer_pow" and params["y"] < 0:
        return [root(*given, params["y"])]
    if name == "pow" and isinstance(equation.invars[1], Literal):
        return [root(given[0], float(given[1]))]
    if name in CALLS:
        return _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, given)
    if name == "cond":
        branches = [lambda *rest, one=one: _evaluate(one.jaxpr, one.consts, rest) for one in params["branches"]]
        return jax.lax.switch(given[0], branches, *given[1:])
    # Releases of JAX differ: (functions, options), or the options alone.
    bound = equation.primitive.get_bind_params(params)
    functions, options = bound if isinstance(bound, tuple) else ((), bound)
    found = equation.primitive.bind(*functions, *given, **options)
    return found if equation.primitive.multiple_results else [found]
