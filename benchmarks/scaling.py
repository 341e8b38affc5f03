"""Times rounds along axes of scale: cohort, population, place of the clients' rows, skew of client sizes, devices.

Each point of an axis is one row: seconds per round (median and quartiles), compile seconds, memory. Unless stated otherwise,
clients have 100 samples and train the MLP in batches of 20. The last axis times checkpoints of large populations.
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
from _measure import Spread, as_program, check_outputs, compile_anew, environment, interleaved, write_row
from rich.console import Console
from rich.table import Table

import fedjax_meta as fm
from fedjax_meta import checkpoint, checks, host_store, models, placement, runtime
from fedjax_meta.blocks import run_rounds
from fedjax_meta.types import Key, Scalar

AXES = ("cohort", "population", "store", "skew", "devices", "checkpoint")
SKEWED = tuple(int(size) for size in np.geomspace(135, 5201, 50))
"""Sizes of 50 clients, from 135 to 5,201 samples like the MNIST clients of FedMeta-Per (Nguyen and Cao)."""


def client_data(sizes: Any, *, pool: int = 20_000) -> fm.FederatedData:
    """Clients with `sizes [N]` random images, taken from one pool of images so that 10^6 clients need little memory."""
    rng = np.random.default_rng(0)
    sizes = np.asarray(sizes)
    total = int(sizes.sum())
    pool = min(pool, total)
    x, y = rng.integers(0, 256, (pool, 784), dtype=np.uint8), rng.integers(0, 10, pool)
    data = fm.from_partition(x, y, np.arange(pool), [pool], num_classes=10, scale=1 / 255)
    begin = ((np.cumsum(sizes) - sizes) % (pool - sizes.max() + 1)).astype(np.int32)
    return fm.FederatedData(
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
    """An algorithm on some clients, compiled; a call runs one block of rounds."""

    def __init__(self, algorithm: fm.Algorithm, data: fm.FederatedData, rounds: int = 1, scale: float = 1.0) -> None:
        """Compiles it.

        Args:
          algorithm: what to run.
          data: its clients.
          rounds: rounds in a block.
          scale: factor by which times are multiplied.
        """
        key = jax.random.key(0)
        # Leaves that a program returns are arrays of their own, which may be donated.
        self._state = jax.jit(algorithm.init)(key, data)
        places = jax.tree.map(lambda leaf: leaf.sharding, self._state)
        self._unit = scale / rounds
        self._rest = placement.place_shared((data, key, np.int32(rounds)), places.round)

        def block(state: fm.State, data: fm.FederatedData, key: Key, count: Scalar) -> fm.State:
            return run_rounds(algorithm, key, state, data, count, most=rounds)[0]

        begin = time.perf_counter()
        jitted = jax.jit(block, donate_argnums=0, out_shardings=places)
        self._program = runtime.compiled(jitted.lower(self._state, *self._rest))  # as `simulate` does
        self.compile_seconds = time.perf_counter() - begin
        self.temp_bytes = self._program.memory_analysis().temp_size_in_bytes
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((self._state.personal, self._state.memory)))

    def __call__(self) -> None:
        """Runs one block and waits for it; every call has the same cohorts."""
        first = jax.device_put(np.int32(0), self._state.round.sharding)
        self._state = jax.block_until_ready(self._program(self._state._replace(round=first), *self._rest))

    def row(self, seconds: np.ndarray) -> dict[str, Any]:
        """The row of some times of whole blocks."""
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


def mlp_rounds(cohort: int, *, batch_size: int = 20, devices: int | None = None) -> fm.Algorithm:
    """FedAvg on the MLP."""
    method = fm.fedavg(models.mlp(), batch_size=batch_size)
    return fm.federate(method, fm.Federation(cohort_size=cohort, devices=devices))


def personal_heads() -> fm.Algorithm:
    """FedPer on the MLP, with cohorts of 100."""
    return fm.federate(fm.fedper(models.mlp(), batch_size=20), fm.Federation(cohort_size=100))


def cohort_cases(max_cohort: int) -> Cases:
    """Cohorts of 1 to 4,096."""
    data = client_data(np.full(4096, 100))
    return {str(c): lambda c=c: Run(mlp_rounds(c), data) for c in (1, 4, 16, 64, 256, 1024, 4096) if c <= max_cohort}


def population_cases(max_clients: int) -> Cases:
    """Cohorts of 100 from populations of 10^2 to 10^6 clients with personal heads."""
    algorithm = personal_heads()
    counts = [n for n in (100, 1000, 10_000, 100_000, 10**6) if n <= max_clients]
    return {str(n): lambda n=n: Run(algorithm, client_data(np.full(n, 100))) for n in counts}


def store_rows(max_clients: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Cohorts of 100 clients with personal heads; the rows of all clients are on the device, in host memory or in files."""
    algorithm, block = personal_heads(), 20
    few, many = min(1000, max_clients), max_clients
    rows = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        # In order of memory, because the process reports its peak so far.
        for where, count in (
            ("device", few),
            ("memory", few),
            (folder, few),
            (folder, many),
            ("memory", many),
            ("device", many),
        ):
            store = None if where == "device" else where
            data = client_data(np.full(count, 100))
            begin = time.perf_counter()
            _, records = fm.simulate(
                algorithm, data, key=jax.random.key(0), rounds=block * (repeats + 1), eval_every=block, store=store
            )
            total = time.perf_counter() - begin
            timed = records[2:]  # without round 1 and the rest of its block
            spread = Spread.of(np.array([record.seconds / block for record in timed]))
            trained, compiled = sum(r.seconds for r in records), sum(r.compile_seconds for r in records)
            rows[f"{'files' if where == folder else where}, {count}"] = {
                "seconds": spread.median,
                "low": spread.low,
                "high": spread.high,
                "compile_seconds": round(compiled, 3),
                "init_seconds": round(total - trained - compiled, 3),
                "state_bytes": count * host_store.row_bytes(host_store.state_shapes(algorithm, jax.random.key(0), data)),
                "peak_bytes": peak_bytes(),
            }
    return rows


def checkpoint_rows(max_clients: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds to save the state of clients with personal heads, whole and after ten rounds of 100, and to restore it.

    What is saved is synced and read back.
    """
    algorithm, rows = personal_heads(), {}
    train = jax.jit(_ten_rounds, donate_argnums=0)
    for count in (n for n in (1000, 100_000, 10**6) if n <= max_clients):
        state = jax.block_until_ready(jax.jit(algorithm.init)(jax.random.key(0), client_data(np.full(count, 100))))
        seconds: dict[str, list[float]] = {"save": [], "save part": [], "restore": []}
        for number in range(repeats):
            with tempfile.TemporaryDirectory(dir=".") as folder:
                for name in ("save", "save part"):
                    begin = time.perf_counter()
                    checkpoint.save(folder, state, [], {}, keep=1)
                    seconds[name].append(time.perf_counter() - begin)
                    if name == "save":
                        state = jax.block_until_ready(train(state, jax.random.key(number)))
                begin = time.perf_counter()
                assert checkpoint.restore(folder, state, {}) is not None
                seconds["restore"].append(time.perf_counter() - begin)
        for name, values in seconds.items():
            spread = Spread.of(np.array(values))
            rows[f"{name}, {count}"] = {
                "seconds": spread.median,
                "low": spread.low,
                "high": spread.high,
                "compile_seconds": 0.0,
                "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves((state.personal, state.memory))),
                "peak_bytes": peak_bytes(),
            }
    return rows


def _ten_rounds(state: fm.State, key: jax.Array) -> fm.State:
    """A state as after ten rounds of 100 clients, as far as a checkpoint is concerned: their rows are others."""
    ids = jax.random.randint(key, (1000,), 0, state.seen.shape[0])
    personal = jax.tree.map(lambda leaf: leaf.at[ids].add(1), state.personal)
    return state._replace(personal=personal, round=state.round + 10)


def peak_bytes() -> int:
    """The peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def skew_cases() -> Cases:
    """Clients of skewed and of equal sizes, with equal totals; times are scaled to the samples of a cohort of equal clients.

    Five equal clients leave one of two devices idle for part of a round; skewed clients may fill that time. One device shows the
    cost of skew alone.
    """
    rounds, cohort = 50, 5
    skewed = np.array(SKEWED)
    equal = np.full(len(skewed), round(skewed.mean()))
    round_keys = [jax.random.fold_in(jax.random.key(0), r) for r in range(rounds)]
    cohorts = [np.asarray(mlp_rounds(cohort).cohort(key, r, len(skewed))) for r, key in enumerate(round_keys)]
    scale = float(cohort * equal[0] / np.mean([skewed[ids].sum() for ids in cohorts]))
    layouts: dict[str, int | None] = {"": None, ", 1 device": 1} if jax.device_count() > 1 else {"": None}
    cases: Cases = {}
    for suffix, devices in layouts.items():
        algorithm = mlp_rounds(cohort, batch_size=32, devices=devices)
        cases["equal" + suffix] = lambda run=algorithm: Run(run, client_data(equal, pool=100_000), rounds)
        cases["skewed" + suffix] = lambda run=algorithm: Run(run, client_data(skewed, pool=100_000), rounds, scale)
    return cases


def base(axis: str, point: str, first: str) -> str:
    """The point that a point is compared with.

    The first; for skewed clients, equal clients on the same devices; for a checkpoint, the same of few clients.
    """
    if axis == "checkpoint":
        return f"{point.partition(',')[0]}, 1000"
    return point.replace("skewed", "equal") if axis == "skew" and point.startswith("skewed") else first


def one_count_of_devices() -> None:
    """Prints the row of the devices of this process."""
    data = client_data(np.full(1000, 100))
    run = Run(mlp_rounds(100), data)
    print(json.dumps(run.row(interleaved({"": run}, repeats=10)[""])))


def on_devices(count: int) -> dict[str, Any]:
    """The row of `count` devices; CPU devices need a new process, because their number is fixed when JAX starts."""
    if not runtime.on_cpu():
        data = client_data(np.full(1000, 100))
        run = Run(mlp_rounds(100, devices=count), data)
        return run.row(interleaved({"": run}, repeats=10)[""])
    command = [sys.executable, __file__, "--worker"]
    variables = {**os.environ, "JAX_NUM_CPU_DEVICES": str(count)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(
    axis: Annotated[list[str] | None, typer.Option(help=f"Axes to time; all by default. {', '.join(AXES)}.")] = None,
    max_clients: Annotated[int, typer.Option(min=1, help="Largest population; 10^6 clients take 4 GB.")] = 10**6,
    max_cohort: Annotated[int, typer.Option(min=1, help="Largest cohort of the cohort axis.")] = 4096,
    repeats: Annotated[int, typer.Option(min=3, help="Number of times that each point is timed.")] = 10,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.")] = None,
    worker: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Times rounds along one or more axes of scale.

    \b
    Examples:
      python benchmarks/scaling.py --axis population
      python benchmarks/scaling.py --axis store --repeats 3
    """
    axes = axis or list(AXES)
    for name in axes:
        least = {"population": 100, "store": 100, "checkpoint": 1000}.get(name, 1)
        if max_clients < least:
            raise typer.BadParameter(
                f"max_clients={max_clients} must be at least {least} on the axis {name}", param_hint="--max-clients"
            )
        checks.one_of("--axis", name, AXES)
    check_outputs(output)
    compile_anew()
    fm.use_all_cores()
    if worker:
        one_count_of_devices()
        return
    console, about = Console(width=max(Console().width, 120)), environment()
    for name in axes:
        table = Table(name, "seconds", "quartiles", "ratio", "compile (s)", "clients' rows", "peak memory")
        rows = {}
        with console.status(f"{name}: compiling and timing"):
            if name == "devices":
                rows = {str(n): on_devices(n) for n in (1, 2, 4, 8) if runtime.on_cpu() or n <= jax.device_count()}
            elif name == "store":
                rows = store_rows(max_clients, repeats)
            elif name == "checkpoint":
                rows = checkpoint_rows(max_clients, repeats)
            else:
                cases = {"cohort": lambda: cohort_cases(max_cohort), "population": lambda: population_cases(max_clients)}
                runs, peaks = {}, {}
                for point, build in cases.get(name, skew_cases)().items():
                    runs[point] = build()
                    runs[point]()
                    peaks[point] = peak_bytes()  # of the process so far, in which the points before are still there
                times = interleaved(runs, repeats=repeats if name != "skew" else 3)
                rows = {point: run.row(times[point]) | {"peak_bytes": peaks[point]} for point, run in runs.items()}
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
    as_program(main)()
