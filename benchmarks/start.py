"""What is not rounds: how long a command takes to its first saved round, and what a run's host does between compiled programs.

Starts are timed from the command to the first saved round, with empty caches (programs and decoded data) and with those that
this left. The host's share is that of the wall-clock in which `simulate` waits for no compiled program; dispatching one counts
as its time.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import _house
import jax
import numpy as np
import typer
from _measure import Spread, environment, write_row
from _workloads import WORKLOADS, Job, parameters
from rich.console import Console
from rich.table import Table

from fedjax_meta import checkpoint, evaluate, simulate

ROOT = Path(__file__).parents[1]


def first_round(experiment: str, folder: Path, cache: Path) -> float:
    """Seconds from the command to its first saved round, after which it is stopped.

    Raises:
      RuntimeError: it ended before; the message holds its last words.
    """
    command = [sys.executable, "-m", *shlex.split(f"experiments.{experiment}"), "--out", str(folder)]
    caches = {"FEDJAX_META_CACHE": str(cache), "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled")}
    with tempfile.TemporaryFile("w+") as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **caches}, stdout=log, stderr=log)
        try:
            while not any(folder.glob("state/*/1")):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError((log.read().strip() or f"{experiment} ended with code {process.returncode}")[-500:])
                time.sleep(0.01)
            return time.perf_counter() - begin
        finally:
            process.kill()
            process.wait()


def starts(experiment: str, repeats: int) -> dict[str, np.ndarray]:
    """Seconds to the first saved round with empty and with filled caches, `[repeats]` each, in turns."""
    seconds: dict[str, list[float]] = {"empty": [], "filled": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for state, times in seconds.items():
                times.append(first_round(experiment, Path(folder, state), Path(folder, "cache")))
    return {state: np.array(times) for state, times in seconds.items()}


class Clocked(simulate._Compiled):
    """A compiled program of `simulate` that adds up how long it and its like have run, from the call to the results."""

    running = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Runs it to its end, for which `simulate` waits anyway."""
        begin, compiled = time.perf_counter(), self.seconds
        results = jax.block_until_ready(super().__call__(*arguments))
        Clocked.running += time.perf_counter() - begin - (self.seconds - compiled)
        return results


def host_share(name: str, *, blocks: int, rounds: int, save: bool) -> dict[str, Any]:
    """Of a run of `blocks` blocks of `rounds` rounds, each followed by an evaluation; with `save`, also by saving the state.

    The first round is not counted, with which everything is compiled.
    """
    case = WORKLOADS[name]
    job = Job(case, *case.arrays(), parameters(case.model), shuffle=True, threads=1)
    algorithm, data = _house.algorithm(case), _house.federation(job)

    def measure(key: Any, state: Any, data: Any) -> Any:
        return evaluate.evaluate(algorithm, key, state, data, support="train", query="train")

    clocks: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(simulate, "_Compiled", Clocked))
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def on_record(state: Any, record: simulate.Record) -> None:
            if save:
                checkpoint.save(folder, state, [record.round], {})
            clocks.append((time.perf_counter(), Clocked.running))

        simulate.simulate(
            algorithm,
            data,
            key=jax.random.key(0),
            rounds=blocks * rounds,
            eval_every=rounds,
            evaluators={"test": simulate.Evaluator(measure, data, known=True)},
            on_record=on_record,
        )
    wall, running = np.subtract(clocks[-1], clocks[0])
    host = wall - running
    return {"blocks": blocks, "rounds": rounds, "seconds": wall, "host_seconds": host, "host_share": host / wall}


def main(
    experiment: Annotated[
        str, typer.Option(help='What is started, with its options, e.g. "fedmeta_per --dataset mnist" where data are at hand.')
    ] = "quickstart",
    repeats: Annotated[int, typer.Option(min=1, help="Starts with empty caches, and as many with filled ones.")] = 3,
    case: Annotated[str, typer.Option(help=f"Workload whose host is watched. {', '.join(WORKLOADS)}.")] = "W1",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of rounds, an evaluation after each.")] = 20,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in a block.")] = 20,
    output: Annotated[Path | None, typer.Option(help="File that gets a JSON line for each row.")] = None,
) -> None:
    """Times starts with and without filled caches, and the host's work between compiled programs."""
    if case not in WORKLOADS:
        raise typer.BadParameter(f"{case!r} is unknown; allowed are {', '.join(WORKLOADS)}", param_hint="--case")
    console = Console()
    with console.status(f"starting {experiment}"):
        times = starts(experiment, repeats)
    about = environment()  # only now, because it makes JAX take an accelerator
    table = Table("caches", "first saved round (s)", "quartiles", title=experiment)
    for state, seconds in times.items():
        spread = Spread.of(seconds)
        row = {"case": experiment, "caches": state, "seconds": spread.median, "low": spread.low, "high": spread.high}
        write_row(output, {"benchmark": "start", **row, **about})
        table.add_row(state, f"{spread.median:.2f}", f"{spread.low:.2f}-{spread.high:.2f}")
    console.print(table)
    table = Table("after a block", "run (s)", "host alone (ms a block)", "share", title=f"{case}, blocks of {rounds} rounds")
    for what, save in {"evaluation": False, "evaluation, saving": True}.items():
        with console.status(f"running {case}"):
            row = host_share(case, blocks=blocks, rounds=rounds, save=save)
        write_row(output, {"benchmark": "host", "case": case, "after": what, **row, **about})
        each = f"{1e3 * row['host_seconds'] / blocks:.1f}"
        table.add_row(what, f"{row['seconds']:.2f}", each, f"{row['host_share']:.2%}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
