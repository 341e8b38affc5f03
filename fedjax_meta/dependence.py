"""Traced programs: their operations, and which of their results depend on which inputs; nothing is computed.

An operation depends on all of its inputs; loops, conditions and calls are entered. Where a condition or the number of turns of a
loop depends on a marked input, so do all of its results.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

Rule = Callable[[Any, list[bool]], list[bool] | None]
"""`(equation, marks of its inputs) -> marks of its results`; `None` where it is an operation like any other."""


def no_rule(equation: Any, given: list[bool]) -> None:
    """All operations are alike."""
    del equation, given


def operations(program: Jaxpr) -> Iterator[Any]:
    """The operations of a program, those of the programs that they hold included."""
    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from operations(inner)


def dependent(program: ClosedJaxpr, inputs: Sequence[bool], rule: Rule = no_rule) -> list[bool]:
    """For each output of a traced program, whether it depends on one of the marked inputs.

    Args:
      program: what `jax.make_jaxpr` returns.
      inputs: a mark for each of its flat inputs.
      rule: for operations where the dependence ends.
    """
    return _through(program.jaxpr, list(inputs), rule)


def marks_of(function: Any, marked: Any, *arguments: Any, rule: Rule = no_rule) -> Any:
    """The results of `function(*arguments)` as a tree of bools: `dependent` on the leaves of the arguments that `marked`, a tree
    like them, marks.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return jax.tree.unflatten(jax.tree.structure(shapes), dependent(program, jax.tree.leaves(marked), rule))


def _through(program: Jaxpr, inputs: list[bool], rule: Rule) -> list[bool]:
    marked = {var for var, mark in zip(program.invars, inputs, strict=True) if mark}

    def is_marked(var: Any) -> bool:
        return not isinstance(var, Literal) and var in marked

    for equation in program.eqns:
        given = [is_marked(var) for var in equation.invars]
        for var, mark in zip(equation.outvars, _of_operation(equation, given, rule), strict=True):
            if mark:
                marked.add(var)
    return [is_marked(var) for var in program.outvars]


def _of_operation(equation: Any, given: list[bool], rule: Rule) -> list[bool]:
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    if not any(given):
        return [False] * count
    found = rule(equation, given)
    if found is not None:
        return found
    if name == "while":
        return _of_while(params, given, rule)
    if name == "scan":
        return _of_scan(equation, given, rule)
    if name == "cond":
        branches = [_through(branch.jaxpr, given[1:], rule) for branch in params["branches"]]
        return [given[0] or any(marks) for marks in zip(*branches, strict=True)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        inner = getattr(params.get(key), "jaxpr", params.get(key))
        if inner is not None and len(inner.invars) == len(given) and len(inner.outvars) == count:
            return _through(inner, given, rule)
    return [True] * count


def _of_while(params: Any, given: list[bool], rule: Rule) -> list[bool]:
    condition, body = params["cond_nconsts"], params["body_nconsts"]
    of_condition, of_body = given[:condition], given[condition : condition + body]
    carry = given[condition + body :]
    while True:
        new = [a or b for a, b in zip(carry, _through(params["body_jaxpr"].jaxpr, of_body + carry, rule), strict=True)]
        if _through(params["cond_jaxpr"].jaxpr, of_condition + new, rule)[0]:
            return [True] * len(carry)
        if new == carry:
            return carry
        carry = new


def parts_of_scan(equation: Any) -> tuple[int, int]:
    """(number of constants, number of carried values) of a `scan`; they come first among its inputs, and its rows last.

    They are read from shapes, since JAX names them differently from one version to the next: in the scan's body, a row has one
    axis less than outside.
    """
    body = equation.params["jaxpr"].jaxpr

    def carried_or_constant(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(one.aval.ndim == other.aval.ndim for one, other in zip(outside, inside, strict=True))

    carried = carried_or_constant(equation.outvars, body.outvars)
    return carried_or_constant(equation.invars, body.invars) - carried, carried


def _of_scan(equation: Any, given: list[bool], rule: Rule) -> list[bool]:
    consts, carried = parts_of_scan(equation)
    fixed, carry, rest = given[:consts], given[consts : consts + carried], given[consts + carried :]
    while True:
        result = _through(equation.params["jaxpr"].jaxpr, fixed + carry + rest, rule)
        new = [a or b for a, b in zip(carry, result[:carried], strict=True)]
        if new == carry:
            return new + result[carried:]
        carry = new
