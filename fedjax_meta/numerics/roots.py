"""Functions whose square roots have the derivative 0 where it is infinite, at 0.

An optimiser like Adam divides by the root of a mean of squares. Where a gradient is exactly 0 (a pixel that is always black, a
dead unit), reverse mode takes the infinite derivative of the root times that of the square, 0, which is NaN. The limit is 0.

RAdam also takes the root of a negative number, in a branch that it does not select. Reverse mode multiplies that NaN by 0, so
that the root is 0 here. A result that is NaN because of such a root stays NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from fedjax_meta.dependence import operations


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
    value = root(primals[0], power)
    slope = power * (value / primals[0])
    return value, jnp.where(jnp.isfinite(slope), slope, 1 if power == 1 else 0) * tangents[0]


def finite_at_zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `root` in place of its square roots, also of those in calls and conditions, but not in loops.

    Its results are NaN where those of the function are.

    Example:
      >>> jax.grad(finite_at_zero(jnp.linalg.norm))(jnp.zeros(2)).tolist()
      [0.0, 0.0]
    """

    def evaluated(*arguments: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(program.jaxpr, program.consts, jax.tree.leaves(arguments))
        if any(one.primitive.name in ("sqrt", "rsqrt", "pow") for one in operations(program.jaxpr)):
            plain = jax.tree.leaves(function(*jax.lax.stop_gradient(arguments)))
            results = list(map(_not_a_number_as, plain, results))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return evaluated


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
    if name == "pow" and isinstance(equation.invars[1], Literal):
        return [root(given[0], float(given[1]))]
    if name in ("jit", "pjit"):
        return _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, given)
    if name == "cond":
        branches = [lambda *rest, one=one: _evaluate(one.jaxpr, one.consts, rest) for one in params["branches"]]
        return jax.lax.switch(given[0], branches, *given[1:])
    # Releases of JAX differ: (functions, options), or the options alone.
    bound = equation.primitive.get_bind_params(params)
    functions, options = bound if isinstance(bound, tuple) else ((), bound)
    found = equation.primitive.bind(*functions, *given, **options)
    return found if equation.primitive.multiple_results else [found]
