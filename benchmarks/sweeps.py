"""Compares the time of a grid of rates times seeds as one program with the same runs one after the other.

Both train FedAvg on the clients of workload W1 (50 clients of 1,400 images, cohorts of 5, one epoch in batches of 32). In the
second form, each run uses all devices and compiles separately. The sweep compiles once and trains whole members on each device.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from _measure import as_program, check_outputs, compile_anew, environment, write_row
from _workloads import WORKLOADS
from rich.console import Console

import fedjax_meta as fm
from fedjax_meta import models
from fedjax_meta.sweeps import grid, members, sweep

FEDERATION = fm.Federation(cohort_size=WORKLOADS["W1"].cohort_size)


def fedavg(lr: Any) -> fm.Method:
    """The method of both."""
    return fm.fedavg(models.mlp(), lr=lr, batch_size=WORKLOADS["W1"].batch_size)


def one_by_one(data: fm.FederatedData, rates: list[float], seeds: list[int], rounds: int) -> tuple[float, float, list[Any]]:
    """(seconds in all, seconds without compilation, the final models)."""
    begin, running, final = time.perf_counter(), 0.0, []
    for lr in rates:
        for seed in seeds:
            state, records = fm.simulate(
                fedavg(lr), data, key=jax.random.key(seed), rounds=rounds, eval_every=rounds, federation=FEDERATION
            )
            running += sum(record.seconds for record in records)
            final.append(jax.tree.map(np.asarray, state.model))
    return time.perf_counter() - begin, running, final


def together(data: fm.FederatedData, rates: list[float], seeds: list[int], rounds: int) -> tuple[float, float, list[Any]]:
    """The same as one sweep."""
    begin = time.perf_counter()
    state, records = sweep(
        fedavg, members(grid(lr=rates), seeds), data, rounds=rounds, eval_every=rounds, federation=FEDERATION
    )
    running = sum(record.seconds for history in records for record in history)
    model = jax.tree.map(np.asarray, state.model)
    final = [jax.tree.map(lambda leaf, m=m: leaf[m], model) for m in range(len(records))]
    return time.perf_counter() - begin, running, final


def main(
    rates: Annotated[int, typer.Option(min=1, help="Number of learning rates.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 50,
    samples: Annotated[
        int | None,
        typer.Option(
            min=40, max=WORKLOADS["W1"].samples, help="Images per client; by default those of W1.", show_default=False
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.", show_default=False)] = None,
) -> None:
    """Times 8 rates x 5 seeds of W1, 50 rounds each, as one program and one after the other.

    \b
    Examples:
      python benchmarks/sweeps.py
      python benchmarks/sweeps.py --rates 4 --seeds 2 --rounds 10
    """
    check_outputs(output)
    compile_anew()
    fm.use_all_cores()
    images, labels = WORKLOADS["W1"].arrays()
    data = fm.from_clients([(x[:samples], y[:samples]) for x, y in zip(images, labels, strict=True)], num_classes=10)
    points = np.geomspace(0.003, 0.3, rates).tolist()
    console = Console()
    results = {}
    for name, function in (("one by one", one_by_one), ("sweep", together)):
        total, running, final = function(data, points, list(range(seeds)), rounds)
        results[name] = (total, running, final)
        console.print(f"{name}: {total:.1f} s in all, {running:.1f} s without compilation")
    (alone, alone_running, first), (swept, swept_running, second) = results["one by one"], results["sweep"]
    apart = float(np.max(jax.tree.leaves(jax.tree.map(lambda a, b: np.max(np.abs(a - b)), first, second))))
    console.print(
        f"the sweep takes {100 * swept / alone:.0f} % of the time, {100 * swept_running / alone_running:.0f} % without "
        f"compilation; parameters differ by at most {apart:.1e}"
    )
    row = {"benchmark": "sweep", "rates": rates, "seeds": seeds, "rounds": rounds, "samples": samples}
    row |= {
        "largest_difference": apart,
        "one_by_one": alone,
        "one_by_one_running": alone_running,
        "sweep": swept,
        "sweep_running": swept_running,
    }
    write_row(output, {**row, **environment()})


if __name__ == "__main__":
    as_program(main)()
