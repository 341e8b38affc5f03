"""What a study will cost, from one round of each system that is compiled and run on one device."""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import costs, runtime, sweeps
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.data import FederatedData, pooled
from fedjax_meta.study.flops import counted
from fedjax_meta.study.job import passes
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import Point, points_of, rounds_of_trials, shaping

LONG = 2.0
"""Seconds from which one call is enough to time a round."""

DRAWS = 100
"""Cohorts that are drawn until one has a client: under Poisson sampling a round may have none."""


class Estimate(NamedTuple):
    """What a system costs on a scenario.

    Attributes:
      shared: numbers of the server's model.
      personal: numbers that a client keeps.
      traffic: bytes of a client in a round, down and up.
      flops: of a client in the first round, on average over its cohort: matrix products and convolutions alone. Methods that
        do other work once they know a client, or every second round, need a mean over rounds: see `flops.of_rounds`. NaN if
        none of `DRAWS` cohorts had a client.
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
    key, cohort = _somebody(algorithm, data.num_clients)
    # Points of other epochs or batch sizes are programs of their own, and take another time.
    shapes = {tuple(point[key] for key in shaping(system)): point for point in reversed(points)}
    each = [measured_round(built(point), data, key) for point in shapes.values()]
    flops, seconds, compiled = (float(np.mean([one[i] for one in each])) for i in range(3))
    room = max(one[3] for one in each)
    members = max(trials, len(study.seeds))
    return Estimate(
        shared=sum(leaf.size for leaf in jax.tree.leaves(state.model)),
        personal=personal,
        traffic=costs.traffic(algorithm, data),
        flops=flops / cohort if cohort else np.nan,
        memory=members * runtime.size_in_bytes(state) + room * min(members, study.devices or len(runtime.default_devices())),
        programs=3 * ((len(shapes) if trials else 0) + 1),
        rounds=round(share * (rounds_of_trials(len(points), study) + study.rounds * len(study.seeds))),
        round_seconds=seconds,
        compile_seconds=compiled,
    )


def _somebody(algorithm: Algorithm, num_clients: int) -> tuple[jax.Array, int]:
    """(A key whose first cohort has a client, how many it has). Places that Poisson sampling leaves empty take no FLOPs."""
    for draw in range(DRAWS):
        key = jax.random.key(draw)
        cohort = int(np.sum(np.asarray(algorithm.cohort(key, 0, num_clients)) >= 0))
        if cohort:
            break
    return key, cohort


def measured_round(algorithm: Algorithm, data: FederatedData, key: jax.Array) -> tuple[float, float, float, int]:
    """(FLOPs of a round, seconds of a round, seconds of compilation, bytes that the program needs beside its arguments)."""
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
