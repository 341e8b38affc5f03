"""How the time of a round grows: with the cohort, with the population, where it waits, with uneven clients, with devices.

Each axis is one row a point: seconds a round (median and quartiles), compile seconds, memory. Clients are those of the MLP
workload (100 samples, batches of 20) unless said.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from _measure import Spread, environment, interleaved, write_row
from rich.console import Console
from rich.table import Table

from fedjax_meta import Algorithm, engine, fedavg, federate, fedper, models, runtime, simulate, store
from fedjax_meta.data import FederatedData

AXES = ("cohort", "population", "store", "skew", "devices")
SKEWED = tuple(int(size) for size in np.geomspace(135, 5201, 50))
"""Sizes of 50 clients that spread as the MNIST clients of Nguyen and Cao do: 135 to 5,201 samples."""


def federation(sizes: Any, *, pool: int = 20_000) -> FederatedData:
    """Clients with this many random images each; they share a pool of images, so that 10^6 clients take little memory."""
    rng = np.random.default_rng(0)
    sizes = np.asarray(sizes)
    total = int(sizes.sum())
    pool = min(pool, total)
    data = federate(
        rng.integers(0, 256, (pool, 784), dtype=np.uint8), rng.integers(0, 10, pool), np.arange(pool), [pool], num_classes=10
    )
    begin = ((np.cumsum(sizes) - sizes) % (pool - sizes.max() + 1)).astype(np.int32)
    return FederatedData(
        x=data.x,
        y=data.y,
        offset=data.offset,
        scale=data.scale,
        start={"train": begin},
        size={"train": sizes.astype(np.int32)},
        max_size=(("train", int(sizes.max())),),
        num_classes=10,
    )


class Run:
    """An algorithm on some clients, compiled, ready to run a block of rounds at a time."""

    def __init__(self, algorithm: Algorithm, data: FederatedData, rounds: int = 1, scale: float = 1.0) -> None:
        """`rounds` in each call; times are multiplied by `scale`."""
        key = jax.random.key(0)
        state = algorithm.init(key, data)
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        # A copy: two leaves of a state may be one array at first, which cannot be donated twice.
        self._state = jax.device_put(state, places, may_alias=False)
        self._unit = scale / rounds
        self._rest = engine.share((data, key, np.int32(rounds)), places.round)

        def block(state: Any, data: FederatedData, key: Any, count: Any) -> Any:
            return simulate.run_rounds(algorithm, key, state, data, count, most=rounds)[0]

        begin = time.perf_counter()
        jitted = jax.jit(block, donate_argnums=0, out_shardings=places)
        self._program = jitted.lower(self._state, *self._rest).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.temp_bytes = self._program.memory_analysis().temp_size_in_bytes
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((self._state.personal, self._state.memory)))

    def __call__(self) -> None:
        """One block, to its end; every call has the same cohorts."""
        first = jax.device_put(np.int32(0), self._state.round.sharding)
        self._state = jax.block_until_ready(self._program(self._state._replace(round=first), *self._rest))

    def row(self, seconds: np.ndarray) -> dict[str, Any]:
        """Of times of whole blocks."""
        spread = Spread.of(seconds * self._unit)
        return {
            "seconds": spread.median,
            "low": spread.low,
            "high": spread.high,
            "compile_seconds": round(self.compile_seconds, 3),
            "temp_bytes": self.temp_bytes,
            "state_bytes": self.state_bytes,
        }


Cases = dict[str, Callable[[], Run]]


def mlp_rounds(cohort: int, **options: Any) -> Algorithm:
    """FedAvg on the MLP."""
    return fedavg(models.mlp(), cohort_size=cohort, **{"batch_size": 20, **options})


def cohort_cases(most: int) -> Cases:
    """Cohorts of 1 to 4,096."""
    data = federation(np.full(4096, 100))
    return {str(c): lambda c=c: Run(mlp_rounds(c), data) for c in (1, 4, 16, 64, 256, 1024, 4096) if c <= most}


def population_cases(most: int) -> Cases:
    """Rounds of 100 among 10^2 to 10^6 clients with personal heads."""
    rule = fedper(models.mlp(), batch_size=20, cohort_size=100)
    return {
        str(n): lambda n=n: Run(rule, federation(np.full(n, 100))) for n in (100, 1000, 10_000, 100_000, 10**6) if n <= most
    }


def store_rows(most: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Rounds of 100 clients with personal heads, where the others wait on the device, in the host's memory or in files."""
    rule, block = fedper(models.mlp(), batch_size=20, cohort_size=100), 20
    few = min(1000, most)
    rows = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        # The largest memory last: what is read is the peak so far.
        for where, count in (
            ("device", few),
            ("memory", few),
            (folder, few),
            (folder, most),
            ("memory", most),
            ("device", most),
        ):
            waits = None if where == "device" else where
            data = federation(np.full(count, 100))
            begun = time.perf_counter()
            _, records = simulate.simulate(
                rule, data, key=jax.random.key(0), rounds=block * (repeats + 1), eval_every=block, store=waits
            )
            total = time.perf_counter() - begun
            timed = records[2:]  # after round 1 and the block that it is in
            spread = Spread.of(np.array([record.seconds / block for record in timed]))
            trained, compiled = sum(r.seconds for r in records), sum(r.compile_seconds for r in records)
            rows[f"{'files' if where == folder else where}, {count}"] = {
                "seconds": spread.median,
                "low": spread.low,
                "high": spread.high,
                "compile_seconds": round(compiled, 3),
                "init_seconds": round(total - trained - compiled, 3),
                "state_bytes": count * store.row_bytes(store.shapes(rule, jax.random.key(0), data)),
                "peak_bytes": peak_bytes(),
            }
    return rows


def peak_bytes() -> int:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def skew_cases() -> Cases:
    """Uneven clients, and equal ones with as many samples; times are for cohorts that hold what a cohort of equal ones does.

    On several devices uneven clients may fill the time in which equal ones, five on two devices, leave one idle. What unevenness
    costs by itself is seen on one device.
    """
    rounds, cohort = 50, 5
    uneven = np.array(SKEWED)
    keys = [jax.random.split(jax.random.fold_in(jax.random.key(0), r), 3)[0] for r in range(rounds)]
    drawn = np.mean([uneven[np.asarray(engine.sample_cohort(key, len(uneven), cohort))].sum() for key in keys])
    equal = np.full(len(uneven), round(uneven.mean()))
    layouts: dict[str, int | None] = {"": None, ", 1 device": 1} if jax.device_count() > 1 else {"": None}
    cases: Cases = {}
    for where, devices in layouts.items():
        rule = mlp_rounds(cohort, batch_size=32, devices=devices)
        cases["equal" + where] = lambda rule=rule: Run(rule, federation(equal, pool=100_000), rounds)
        cases["skewed" + where] = lambda rule=rule: Run(
            rule, federation(uneven, pool=100_000), rounds, float(cohort * equal[0] / drawn)
        )
    return cases


def base(axis: str, point: str, first: str) -> str:
    """With which point one is compared: the first; uneven clients with equal ones on as many devices."""
    return point.replace("skewed", "equal") if axis == "skew" and point.startswith("skewed") else first


def one_count_of_devices() -> None:
    """Prints the row of the devices that this process was started with."""
    data = federation(np.full(1000, 100))
    run = Run(mlp_rounds(100), data)
    print(json.dumps(run.row(interleaved({"": run}, repeats=10)[""])))


def on_devices(count: int) -> dict[str, Any]:
    """The row of `count` devices, from a process of its own where they are a CPU's."""
    if not runtime.on_cpu():
        data = federation(np.full(1000, 100))
        run = Run(mlp_rounds(100, devices=count), data)
        return run.row(interleaved({"": run}, repeats=10)[""])
    command = [sys.executable, __file__, "--worker"]
    environment_ = {**os.environ, "JAX_NUM_CPU_DEVICES": str(count)}
    done = subprocess.run(command, env=environment_, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(
    axis: Annotated[list[str] | None, typer.Option(help=f"What grows; all by default. {', '.join(AXES)}.")] = None,
    most: Annotated[int, typer.Option(help="Largest population; 10^6 takes 4 GB.")] = 10**6,
    cohort: Annotated[int, typer.Option(help="Largest cohort.")] = 4096,
    repeats: Annotated[int, typer.Option(min=3, help="Times each point is timed.")] = 10,
    output: Annotated[Path | None, typer.Option(help="File that gets a JSON line for each row.")] = None,
    worker: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Times rounds along one or more axes of scale."""
    if worker:
        one_count_of_devices()
        return
    console, about = Console(width=max(Console().width, 120)), environment()
    axes = axis or list(AXES)
    for name in axes:
        if name in ("population", "store") and most < 100:
            raise typer.BadParameter(f"{most} clients are too few for cohorts of 100", param_hint="--most")
        if name not in AXES:
            raise typer.BadParameter(f"{name!r} is unknown; allowed are {', '.join(AXES)}", param_hint="--axis")
        table = Table(name, "round (s)", "quartiles", "ratio", "compile (s)", "kept by clients", "peak memory")
        rows = {}
        with console.status(f"{name}: compiling and timing"):
            if name == "devices":
                rows = {str(n): on_devices(n) for n in (1, 2, 4, 8) if runtime.on_cpu() or n <= jax.device_count()}
            elif name == "store":
                rows = store_rows(most, repeats)
            else:
                cases = {"cohort": lambda: cohort_cases(cohort), "population": lambda: population_cases(most)}
                runs = {point: build() for point, build in cases.get(name, skew_cases)().items()}
                times = interleaved(runs, repeats=repeats if name != "skew" else 3)
                rows = {point: run.row(times[point]) for point, run in runs.items()}
        for point, row in rows.items():
            peak = row.setdefault("peak_bytes", peak_bytes())
            against = base(name, point, next(iter(rows)))
            row |= {"against": against, "ratio": row["seconds"] / rows[against]["seconds"]}
            write_row(output, {"benchmark": "scaling", "axis": name, "case": point, **row, **about})
            spread = f"{row['low']:.4f}-{row['high']:.4f}"
            kept = f"{row['state_bytes'] / 1e9:.3f} GB"
            compile_ = f"{row['compile_seconds']:.1f}"
            ratio = f"{row['ratio']:.2f} of {against}"
            table.add_row(point, f"{row['seconds']:.4f}", spread, ratio, compile_, kept, f"{peak / 1e9:.1f} GB")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
