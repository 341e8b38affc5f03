"""FLOPs of a program: those of its matrix products and convolutions, counted while it runs.

So loops count as often as they turn, and branches only where they are taken. Products whose results nobody uses do not count: XLA
leaves them out. `of_rounds` does not compute what its count does not depend on: where no number of steps follows from parameters,
nothing is trained.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import jaxprs_in_params

from fedjax_meta.algorithm import Algorithm
from fedjax_meta.data import FederatedData
from fedjax_meta.dependence import operations, parts_of_scan

_INNER = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr"}
_INNER |= {"checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "remat": "jaxpr"}
_INNER |= {"custom_vmap_call": "call"}
"""Primitives that call a program, and the name of its parameter."""

_LOOPS = ("while", "scan", "cond")
_PRODUCTS = ("dot_general", "conv_general_dilated")

DEAD, USED, COMPUTED = 0, 1, 2
"""What becomes of a value: nobody uses it; a result of the program depends on it, so that products count; it is computed too."""

Marks = Sequence[int]
"""One of these for each of some values."""


def counted(function: Callable[..., Any]) -> Callable[..., tuple[Any, jax.Array]]:
    """The function, with the FLOPs of its matrix products and convolutions as a second result.

    Raises:
      ValueError: products that cannot be counted, those of several devices.

    Example:
      >>> a = np.ones((2, 3), np.float32)
      >>> float(counted(lambda a, n: jax.lax.fori_loop(0, n, lambda i, s: s + jnp.sum(a @ a.T), 0.0))(a, 5)[1])
      120.0
    """

    def run(*arguments: Any) -> tuple[Any, jax.Array]:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results, flops = _Counter(closed)(jax.tree.leaves(arguments), [COMPUTED] * len(closed.jaxpr.outvars))
        return jax.tree.unflatten(jax.tree.structure(shape), results), flops

    return run


def of_rounds(algorithm: Algorithm, data: FederatedData, rounds: int, seed: int = 0) -> np.ndarray:
    """FLOPs of each of the first rounds of a run, `[rounds]`: matrix products and convolutions of its whole cohort.

    Raises:
      ValueError: an algorithm for several devices.
    """
    key = jax.random.key(seed)
    shapes, tree = jax.tree.flatten(jax.eval_shape(algorithm.init, key, data))

    def one_round(key: jax.Array, state: Sequence[Any], data: FederatedData) -> list[Any]:
        return jax.tree.leaves(algorithm.round(key, jax.tree.unflatten(tree, state), data))

    closed = jax.make_jaxpr(one_round)(key, shapes, data)
    counter, reported = _Counter(closed), [USED] * (len(closed.jaxpr.outvars) - len(shapes))
    kept = [USED] * len(shapes)  # computed are the leaves of the state that numbers of turns depend on
    while (more := _most(kept, counter.inputs([*kept, *reported])[1 : 1 + len(kept)])) != kept:
        kept = more

    def chosen(leaves: Sequence[Any]) -> list[Any]:
        return [leaf if keep == COMPUTED else None for leaf, keep in zip(leaves, kept, strict=True)]

    @jax.jit
    def count(key: jax.Array, state: list[Any], data: FederatedData) -> tuple[list[Any], jax.Array]:
        results, flops = counter([key, *state, *jax.tree.leaves(data)], [*kept, *reported])
        return results[: len(kept)], flops

    state = jax.jit(lambda key, data: chosen(jax.tree.leaves(algorithm.init(key, data))))(key, data)
    found = []
    for number in range(rounds):
        state, flops = count(jax.random.fold_in(key, number), state, data)
        found.append(float(flops))
    return np.array(found)


class _Step(NamedTuple):
    """An equation of a program, with marks of its results and of its inputs."""

    equation: Any
    outs: Marks
    needed: Marks


class _Plan(NamedTuple):
    """What a program has to do for some of its results, and for the count.

    Attributes:
      steps: those that are computed or count, in order.
      inputs: marks of the program's.
    """

    steps: list[_Step]
    inputs: list[int]


class _Counter:
    """Runs a traced program for some of its results, and counts."""

    def __init__(self, program: core.ClosedJaxpr) -> None:
        self.program = program
        self.plans: dict[tuple[int, tuple[int, ...]], _Plan] = {}

    def inputs(self, outs: Marks) -> list[int]:
        """Marks of the inputs that follow from those of the results."""
        return self._plan(self.program.jaxpr, outs).inputs

    def __call__(self, arguments: Sequence[Any], outs: Marks) -> tuple[list[Any], jax.Array]:
        """(results, `None` where they are not computed; FLOPs). Arguments that nothing is computed from may be anything."""
        with jax.enable_x64(True):  # some programs have parts in float64
            return self._run(self.program.jaxpr, self.program.consts, arguments, outs)

    # What has to be done.

    def _plan(self, program: core.Jaxpr, outs: Marks) -> _Plan:
        place = id(program), tuple(outs)
        if place not in self.plans:
            self.plans[place] = self._planned(program, outs)
        return self.plans[place]

    def _planned(self, program: core.Jaxpr, wanted: Marks) -> _Plan:
        marks: dict[Any, int] = {}
        steps = []

        def mark(variables: Sequence[Any], given: Marks) -> None:
            for var, new in zip(variables, given, strict=True):
                if not isinstance(var, core.Literal):
                    marks[var] = max(marks.get(var, DEAD), new)

        mark(program.outvars, wanted)
        for equation in reversed(program.eqns):
            outs = [marks.get(var, DEAD) for var in equation.outvars]
            if max(outs, default=DEAD) == DEAD:
                continue
            needed = self._needed(equation, outs)
            mark(equation.invars, needed)
            if COMPUTED in outs or _multiplies(equation):
                steps.append(_Step(equation, outs, needed))
        return _Plan(steps[::-1], [marks.get(var, DEAD) for var in program.invars])

    def _needed(self, equation: Any, outs: Marks) -> list[int]:
        """Marks of the inputs of an equation whose results have marks."""
        name, options = equation.primitive.name, equation.params
        if name in _INNER:
            return self._plan(_closed(options[_INNER[name]])[0], outs).inputs
        if name in _LOOPS and _multiplies(equation):
            if name == "cond":
                return [COMPUTED, *_most(*(self._plan(one.jaxpr, outs).inputs for one in options["branches"]))]
            return self._of_while(options, outs)[1] if name == "while" else self._of_scan(equation, outs)[1]
        return [max(outs)] * len(equation.invars)  # shapes alone say what a product costs

    def _of_while(self, options: dict[str, Any], outs: Marks) -> tuple[list[int], list[int]]:
        """Marks of (the carried values, the inputs) of a loop."""
        first, own = options["cond_nconsts"], options["body_nconsts"]
        asked = self._plan(options["cond_jaxpr"].jaxpr, [COMPUTED]).inputs
        carry = _most(outs, asked[first:])
        while True:
            used = self._plan(options["body_jaxpr"].jaxpr, carry).inputs
            more = _most(carry, used[own:])
            if more == carry:
                return carry, [*asked[:first], *used[:own], *carry]
            carry = more

    def _of_scan(self, equation: Any, outs: Marks) -> tuple[list[int], list[int]]:
        """Marks of (the carried values, the inputs) of a loop."""
        consts, count = parts_of_scan(equation)
        carry = list(outs[:count])
        while True:
            used = self._plan(equation.params["jaxpr"].jaxpr, [*carry, *outs[count:]]).inputs
            more = _most(carry, used[consts : consts + count])
            if more == carry:
                return carry, [*used[:consts], *carry, *used[consts + count :]]
            carry = more

    # Doing it.

    def _run(
        self, program: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], wanted: Marks
    ) -> tuple[list[Any], Any]:
        values: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *arguments], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        total = jnp.zeros((), jnp.float32)
        for equation, outs, needed in self._plan(program, wanted).steps:
            given = [read(atom) if need == COMPUTED else None for atom, need in zip(equation.invars, needed, strict=True)]
            results, flops = self._equation(equation, given, outs)
            total = total + flops
            values |= zip(equation.outvars, results, strict=True)
        return [read(atom) if want == COMPUTED else None for atom, want in zip(program.outvars, wanted, strict=True)], total

    def _equation(self, equation: Any, given: list[Any], outs: Marks) -> tuple[list[Any], Any]:
        name, options = equation.primitive.name, equation.params
        if name in _INNER:
            return self._run(*_closed(options[_INNER[name]]), given, outs)
        if name in _LOOPS and _multiplies(equation):
            if name == "cond":
                return self._cond(options, given, outs)
            return self._while(options, given, outs) if name == "while" else self._scan(equation, given, outs)
        if name not in _PRODUCTS and _multiplies(equation):
            raise ValueError(f"products inside {name} cannot be counted; a round's can on one device: Federation(devices=1)")
        if COMPUTED not in outs:
            return [None] * len(outs), _flops(equation)
        results = equation.primitive.bind(*given, **equation.primitive.get_bind_params(options))
        return list(results) if equation.primitive.multiple_results else [results], _flops(equation)

    def _cond(self, options: dict[str, Any], given: list[Any], outs: Marks) -> tuple[list[Any], Any]:
        def branch(program: Any) -> Callable[[list[Any]], tuple[list[Any], Any]]:
            def run(rest: list[Any]) -> tuple[list[Any], Any]:
                results, flops = self._run(*_closed(program), rest, outs)
                return _chosen(results, outs), flops

            return run

        results, flops = jax.lax.switch(given[0], [branch(one) for one in options["branches"]], given[1:])
        return _spread(results, outs), flops

    def _while(self, options: dict[str, Any], given: list[Any], outs: Marks) -> tuple[list[Any], Any]:
        first, second = options["cond_nconsts"], options["cond_nconsts"] + options["body_nconsts"]
        asked, used, start = given[:first], given[first:second], given[second:]
        kept = self._of_while(options, outs)[0]

        def going(carry: Any) -> Any:
            return self._run(*_closed(options["cond_jaxpr"]), [*asked, *_spread(carry[0], kept)], [COMPUTED])[0][0]

        def body(carry: Any) -> Any:
            results, flops = self._run(*_closed(options["body_jaxpr"]), [*used, *_spread(carry[0], kept)], kept)
            results = _chosen(results, kept)
            # A loop under `vmap` has an answer for each lane. It turns until all have ended; those that have keep their values.
            turns = going(carry)
            if turns.ndim:
                results = [
                    jnp.where(turns.reshape(*turns.shape, *[1] * (new.ndim - turns.ndim)), new, old)
                    for new, old in zip(results, carry[0], strict=True)
                ]
            return results, carry[1] + flops

        begin = (_chosen(start, kept), jnp.zeros((), jnp.float32))
        end, flops = jax.lax.while_loop(lambda carry: jnp.any(going(carry)), body, begin)
        return _spread(end, kept), flops

    def _scan(self, equation: Any, given: list[Any], outs: Marks) -> tuple[list[Any], Any]:
        (consts, count), options = parts_of_scan(equation), equation.params
        used, start, rows = given[:consts], given[consts : consts + count], given[consts + count :]
        kept, made = self._of_scan(equation, outs)[0], outs[count:]

        def body(carry: Any, row: Any) -> Any:
            arguments = [*used, *_spread(carry[0], kept), *row]
            results, flops = self._run(*_closed(options["jaxpr"]), arguments, [*kept, *made])
            return (_chosen(results[:count], kept), carry[1] + flops), _chosen(results[count:], made)

        begin = (_chosen(start, kept), jnp.zeros((), jnp.float32))
        (end, flops), results = jax.lax.scan(body, begin, rows, length=options["length"], reverse=options["reverse"])
        return [*_spread(end, kept), *_spread(results, made)], flops


def _most(*marks: Marks) -> list[int]:
    return list(map(max, zip(*marks, strict=True)))


def _chosen(values: Sequence[Any], marks: Marks) -> list[Any]:
    """Those that are computed."""
    return [value for value, mark in zip(values, marks, strict=True) if mark == COMPUTED]


def _spread(values: Sequence[Any], marks: Marks) -> list[Any]:
    """The inverse of `_chosen`, with `None` for the others."""
    rest = iter(values)
    return [next(rest) if mark == COMPUTED else None for mark in marks]


def _closed(program: Any) -> tuple[Any, Sequence[Any]]:
    return (program.jaxpr, program.consts) if hasattr(program, "jaxpr") else (program, ())


def _flops(equation: Any) -> float:
    """FLOPs of a product or a convolution, by its shapes; 0 of all other operations."""
    name, options = equation.primitive.name, equation.params
    if name not in _PRODUCTS:
        return 0.0
    (left, right), result = (var.aval for var in equation.invars), equation.outvars[0].aval
    if name == "dot_general":
        return 2.0 * result.size * float(np.prod([left.shape[axis] for axis in options["dimension_numbers"][0][0]]))
    return 2.0 * result.size * right.size / right.shape[options["dimension_numbers"].rhs_spec[0]]


def _multiplies(equation: Any) -> bool:
    """Whether an equation is a product or a convolution, or holds programs that have some."""
    inner = (one for program in jaxprs_in_params(equation.params) for one in operations(program))
    return any(one.primitive.name in _PRODUCTS for one in (equation, *inner))
