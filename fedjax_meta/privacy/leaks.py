"""Which parts of what leaves a client depend on its samples in another way than through private gradients.

The client rule is traced once, and the dependence on inputs and labels is followed through its operations. It ends at a private
gradient (`samples.private_gradient`), whose noise covers its batch if nothing else that it reads depends on samples. The number
of samples of each client counts as public. That rows of a batch are samples, and not mixtures of them, is not followed.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedjax_meta.privacy.samples import PRIVATE_GRADIENT


def dependent(program: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """For each output of a traced program, whether it depends on one of the marked inputs other than through private gradients.

    An operation depends on all of its inputs; loops, conditions and calls are entered. Where a condition or the number of turns
    of a loop depends on a marked input, so do all of its results.

    Args:
      program: what `jax.make_jaxpr` returns.
      inputs: a mark for each of its flat inputs.
    """
    return _through(program.jaxpr, list(inputs))


def _through(program: Jaxpr, inputs: list[bool]) -> list[bool]:
    marked = {var for var, mark in zip(program.invars, inputs, strict=True) if mark}

    def is_marked(var: Any) -> bool:
        return not isinstance(var, Literal) and var in marked

    for equation in program.eqns:
        given = [is_marked(var) for var in equation.invars]
        for var, mark in zip(equation.outvars, _of_operation(equation, given), strict=True):
            if mark:
                marked.add(var)
    return [is_marked(var) for var in program.outvars]


def _of_operation(equation: Any, given: list[bool]) -> list[bool]:
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    if not any(given):
        return [False] * count
    if str(params.get("name")).startswith(PRIVATE_GRADIENT):
        samples = int(params["name"].removeprefix(PRIVATE_GRADIENT))
        return [any(given[samples:])] * count
    if name == "while":
        return _of_while(params, given)
    if name == "scan":
        return _of_scan(params, given)
    if name == "cond":
        branches = [_through(branch.jaxpr, given[1:]) for branch in params["branches"]]
        return [given[0] or any(marks) for marks in zip(*branches, strict=True)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = getattr(params.get(key), "jaxpr", params.get(key))
        if inner is not None and len(inner.invars) == len(given) and len(inner.outvars) == count:
            return _through(inner, given)
    return [True] * count


def _of_while(params: Any, given: list[bool]) -> list[bool]:
    condition, body = params["cond_nconsts"], params["body_nconsts"]
    of_condition, of_body = given[:condition], given[condition : condition + body]
    carry = given[condition + body :]
    while True:
        new = [a or b for a, b in zip(carry, _through(params["body_jaxpr"].jaxpr, of_body + carry), strict=True)]
        if _through(params["cond_jaxpr"].jaxpr, of_condition + new)[0]:
            return [True] * len(carry)
        if new == carry:
            return carry
        carry = new


def _of_scan(params: Any, given: list[bool]) -> list[bool]:
    consts, carried = params["num_consts"], params["num_carry"]
    fixed, carry, rest = given[:consts], given[consts : consts + carried], given[consts + carried :]
    while True:
        result = _through(params["jaxpr"].jaxpr, fixed + carry + rest)
        new = [a or b for a, b in zip(carry, result[:carried], strict=True)]
        if new == carry:
            return new + result[carried:]
        carry = new


def marks_of(function: Any, marked: Any, *arguments: Any) -> Any:
    """The results of `function(*arguments)` as a tree of bools: `dependent` on the leaves of the arguments that `marked`, a tree
    like them, marks. Nothing is computed."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return jax.tree.unflatten(jax.tree.structure(shapes), dependent(program, jax.tree.leaves(marked)))
