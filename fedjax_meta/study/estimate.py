"""What a study will cost, from one round of each system that is compiled and run on one device."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedjax_meta import costs, runtime, sweeps
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.data import FederatedData, pooled
from fedjax_meta.dependence import parts_of_scan
from fedjax_meta.keys import is_key
from fedjax_meta.study.job import passes
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import Point, points_of, rounds_of_trials, shaping

_INNER = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr"}
_INNER |= {"checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "remat": "jaxpr"}
_INNER |= {"custom_vmap_call": "call"}
"""Primitives that call a program, and the name of its parameter."""

LONG = 2.0
"""Seconds from which one call is enough to time a round."""


class Estimate(NamedTuple):
    """What a system costs on a scenario.

    Attributes:
      shared: numbers of the server's model.
      personal: numbers that a client keeps.
      traffic: bytes of a client in a round, down and up.
      flops: of a client in the first round, on average over its cohort: matrix products and convolutions alone. Methods that
        do other work once they know a client, or every second round, need a mean over rounds: see `flops_of_rounds`.
      memory: bytes of the states of the largest sweep, and of what one round needs beside them on each device.
      programs: to compile.
      rounds: of all trials and final runs together.
      round_seconds: of one round of one run on one device, measured.
      compile_seconds: of that round's program, measured.
    """

    shared: int
    personal: int
    traffic: costs.Traffic
    flops: float
    memory: int
    programs: int
    rounds: int
    round_seconds: float
    compile_seconds: float

    def seconds(self, devices: int) -> float:
        """Of everything, without tests: runs share the devices, and programs are compiled side by side."""
        return (self.rounds * self.round_seconds + self.programs * self.compile_seconds) / devices


def of_system(study: Study, scenario: str, name: str, clients: Clients) -> Estimate:
    """Builds, compiles and runs one round of a system on a scenario.

    Raises:
      ValueError: what the system refuses.
    """
    system = study.system(name, scenario)
    points = points_of(system)
    data, share = clients.train, 1.0
    if system.pooled:
        share = passes(system, clients, data)
        data = pooled(data)

    def built(point: Point) -> Algorithm:
        method, federation = system.parts(clients, **point)
        return sweeps.alone(method, dataclasses.replace(federation, cohort_size=1) if system.pooled else federation)

    algorithm = built(points[0])
    state = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    personal = sum(leaf.size for leaf in jax.tree.leaves((state.personal, state.memory))) // data.num_clients
    trials = len(points) * len(study.tuning.seeds) if len(points) > 1 else 0
    # Points of other epochs or batch sizes are programs of their own, and take another time.
    shapes = {tuple(point[key] for key in shaping(system)): point for point in reversed(points)}
    each = [measured_round(built(point), data) for point in shapes.values()]
    flops, seconds, compiled = (float(np.mean([one[i] for one in each])) for i in range(3))
    room = max(one[3] for one in each)
    members = max(trials, len(study.seeds))
    cohort = len(np.asarray(algorithm.cohort(jax.random.key(0), 0, data.num_clients)))
    return Estimate(
        shared=sum(leaf.size for leaf in jax.tree.leaves(state.model)),
        personal=personal,
        traffic=costs.traffic(algorithm, data),
        flops=flops / cohort,
        memory=members * _bytes(state) + room * min(members, study.devices or len(runtime.default_devices())),
        programs=3 * ((len(shapes) if trials else 0) + 1),
        rounds=round(share * (rounds_of_trials(len(points), study) + study.rounds * len(study.seeds))),
        round_seconds=seconds,
        compile_seconds=compiled,
    )


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * (4 if is_key(leaf) else leaf.dtype.itemsize) for leaf in jax.tree.leaves(shapes))


def measured_round(algorithm: Algorithm, data: FederatedData) -> tuple[float, float, float, int]:
    """(FLOPs of a round, seconds of a round, seconds of compilation, bytes that the program needs beside its arguments)."""
    key = jax.random.key(0)
    state = jax.jit(algorithm.init)(key, data)
    started = time.perf_counter()
    program: Any = jax.jit(counted(algorithm.round)).lower(key, state, data).compile()
    compiled = time.perf_counter() - started
    started = time.perf_counter()
    (state, _), flops = jax.block_until_ready(program(key, state, data))
    seconds = time.perf_counter() - started
    if seconds < LONG:  # the first call of a short round is no measure
        started = time.perf_counter()
        jax.block_until_ready(program(key, state, data))
        seconds = time.perf_counter() - started
    found = program.memory_analysis()
    return float(flops), seconds, compiled, 0 if found is None else int(found.temp_size_in_bytes)


def flops_of_rounds(algorithm: Algorithm, data: FederatedData, rounds: int, seed: int = 0) -> np.ndarray:
    """FLOPs of each of the first rounds of a run, `[rounds]`: matrix products and convolutions of its whole cohort.

    Raises:
      ValueError: an algorithm for several devices.
    """
    key = jax.random.key(seed)
    state = jax.jit(algorithm.init)(key, data)
    program, found = jax.jit(counted(algorithm.round)), []
    for number in range(rounds):
        (state, _), flops = program(jax.random.fold_in(key, number), state, data)
        found.append(float(flops))
    return np.array(found)


def counted(function: Callable[..., Any]) -> Callable[..., tuple[Any, jax.Array]]:
    """The function, with the FLOPs of its matrix products and convolutions as a second result.

    They are counted while the program runs, so that loops count as often as they turn and branches only where they are taken.

    Example:
      >>> a = np.ones((2, 3), np.float32)
      >>> float(counted(lambda a, n: jax.lax.fori_loop(0, n, lambda i, s: s + jnp.sum(a @ a.T), 0.0))(a, 5)[1])
      120.0
    """

    def run(*arguments: Any) -> tuple[Any, jax.Array]:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        with jax.enable_x64(True):  # some programs have parts in float64
            results, flops = _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), results), flops

    return run


def _run(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> tuple[list[Any], jax.Array]:
    """Evaluates a program, equation by equation: (results, FLOPs)."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    total = jnp.zeros((), jnp.float32)
    for equation in jaxpr.eqns:
        results, flops = _equation(equation, [read(atom) for atom in equation.invars])
        total = total + flops
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars], total


def _closed(program: Any) -> tuple[Any, Sequence[Any]]:
    return (program.jaxpr, program.consts) if hasattr(program, "jaxpr") else (program, ())


def _equation(equation: Any, given: list[Any]) -> tuple[list[Any], Any]:
    name, options = equation.primitive.name, equation.params
    if name in _INNER:
        return _run(*_closed(options[_INNER[name]]), given)
    if name == "while":
        return _while(options, given)
    if name == "scan":
        return _scan(equation, given)
    if name == "cond":
        branches = [lambda *rest, one=one: _run(*_closed(one), rest) for one in options["branches"]]
        return jax.lax.switch(given[0], branches, *given[1:])
    if _multiplies(options):
        raise ValueError(f"products inside {name} cannot be counted; a round's can on one device: Federation(devices=1)")
    results = equation.primitive.bind(*given, **equation.primitive.get_bind_params(options))
    results = list(results) if equation.primitive.multiple_results else [results]
    return results, _products(name, options, given, results)


def _products(name: str, options: dict[str, Any], given: list[Any], results: list[Any]) -> float:
    if name == "dot_general":
        contracted = options["dimension_numbers"][0][0]
        return 2.0 * results[0].size * float(np.prod([given[0].shape[axis] for axis in contracted]))
    if name == "conv_general_dilated":
        features = given[1].shape[options["dimension_numbers"].rhs_spec[0]]
        return 2.0 * results[0].size * given[1].size / features
    return 0.0


def _multiplies(options: dict[str, Any]) -> bool:
    """Whether the programs that an equation holds have matrix products or convolutions."""
    held = [_closed(one)[0] for value in options.values() for one in (value if isinstance(value, tuple) else (value,))]
    equations = [equation for program in held for equation in getattr(program, "eqns", ())]
    return any(one.primitive.name in ("dot_general", "conv_general_dilated") or _multiplies(one.params) for one in equations)


def _while(options: dict[str, Any], given: list[Any]) -> tuple[list[Any], Any]:
    first, second = options["cond_nconsts"], options["cond_nconsts"] + options["body_nconsts"]
    asked, used, start = given[:first], given[first:second], given[second:]

    def going(carry: Any) -> Any:
        return _run(*_closed(options["cond_jaxpr"]), [*asked, *carry[0]])[0][0]

    def body(carry: Any) -> Any:
        results, flops = _run(*_closed(options["body_jaxpr"]), [*used, *carry[0]])
        # A loop under `vmap` has an answer for each lane. It turns until all have ended; those that have keep their values.
        turns = going(carry)
        if turns.ndim:
            results = [
                jnp.where(turns.reshape(*turns.shape, *[1] * (new.ndim - turns.ndim)), new, old)
                for new, old in zip(results, carry[0], strict=True)
            ]
        return results, carry[1] + flops

    return jax.lax.while_loop(lambda carry: jnp.any(going(carry)), body, (start, jnp.zeros((), jnp.float32)))


def _scan(equation: Any, given: list[Any]) -> tuple[list[Any], Any]:
    (consts, count), options = parts_of_scan(equation), equation.params
    used, start, rows = given[:consts], given[consts : consts + count], given[consts + count :]

    def body(carry: Any, row: Any) -> Any:
        results, flops = _run(*_closed(options["jaxpr"]), [*used, *carry[0], *row])
        return (results[:count], carry[1] + flops), results[count:]

    begin = (start, jnp.zeros((), jnp.float32))
    (end, flops), made = jax.lax.scan(body, begin, rows, length=options["length"], reverse=options["reverse"])
    return [*end, *made], flops
