"""Times the start of an experiment, and the host's work between compiled programs.

A start lasts from the command to the first saved round. It is timed with empty caches (compiled programs and decoded data), and
again with the caches that this run filled. The host's share is the share of the wall-clock time in which `simulate` runs no
compiled program. Dispatching a program counts as running it.
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

import _fedjax_meta_peer
import jax
import numpy as np
import typer
from _measure import Spread, as_program, check_outputs, environment, write_row
from _workloads import WORKLOADS, Job, parameters
from rich.console import Console
from rich.table import Table

import fedjax_meta as fm
from fedjax_meta import checkpoint, checks, simulation
from fedjax_meta.types import Key

ROOT = Path(__file__).parents[1]


def first_round(experiment: str, folder: Path, cache: Path) -> float:
    """Seconds from the command to its first saved round; then stops it.

    Args:
      experiment: the name of a module in `experiments`, with its options.
      folder: where the experiment saves its results.
      cache: the folder for compiled programs and decoded data.

    Raises:
      RuntimeError: the command ended without a saved round; the message is the end of its output.
    """
    command = [sys.executable, "-m", *shlex.split(f"experiments.{experiment}"), "--out", str(folder)]
    # A folder of JAX's own would take the place of the one in `cache`.
    variables = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    variables["FEDJAX_META_CACHE"] = str(cache)
    with tempfile.TemporaryFile("w+") as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)
        try:
            while not any(folder.glob("state/**/1.ckpt")):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(
                        (log.read().strip() or f"{experiment} ended with exit status {process.returncode}")[-500:]
                    )
                time.sleep(0.01)
            return time.perf_counter() - begin
        finally:
            process.kill()
            process.wait()


def starts(experiment: str, repeats: int) -> dict[str, np.ndarray]:
    """Seconds to the first saved round with empty and with filled caches, `[repeats]` each, timed in turns."""
    seconds: dict[str, list[float]] = {"empty": [], "filled": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for state, times in seconds.items():
                times.append(first_round(experiment, Path(folder, state), Path(folder, "cache")))
    return {state: np.array(times) for state, times in seconds.items()}


class Clocked(simulation.Compiled):
    """A compiled program of `simulate` that adds its run time, from the call to the results, to a total of all programs."""

    running = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program and waits for its results, as `simulate` does anyway."""
        begin, compiled = time.perf_counter(), self.seconds
        results = jax.block_until_ready(super().__call__(*arguments))
        Clocked.running += time.perf_counter() - begin - (self.seconds - compiled)
        return results


def host_share(name: str, *, blocks: int, rounds: int, save: bool) -> dict[str, Any]:
    """Times a run of `simulate` and its host's work.

    The first round, which compiles the programs, is not counted.

    Args:
      name: a workload.
      blocks: number of blocks of rounds; an evaluation follows each.
      rounds: rounds in a block.
      save: whether to save the state after each evaluation.
    """
    case = WORKLOADS[name]
    job = Job(case, *case.arrays(), parameters(case.model), shuffle=True, threads=1)
    algorithm, data = _fedjax_meta_peer.algorithm(job), _fedjax_meta_peer.client_data(job)

    def measure(key: Key, state: fm.State, data: fm.FederatedData) -> fm.Evaluation:
        return fm.evaluate(algorithm, key, state, data, support="train", query="train")

    clocks: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(simulation, "Compiled", Clocked))
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def on_record(state: fm.State, record: fm.Record) -> None:
            if save:
                checkpoint.save(folder, state, [record.round], {})
            clocks.append((time.perf_counter(), Clocked.running))

        fm.simulate(
            algorithm,
            data,
            key=jax.random.key(0),
            rounds=blocks * rounds,
            eval_every=rounds,
            evaluators={"test": fm.Evaluator(measure, data, known=True)},
            on_record=on_record,
        )
    wall, running = np.subtract(clocks[-1], clocks[0])
    host = wall - running
    return {"blocks": blocks, "rounds": rounds, "seconds": wall, "host_seconds": host, "host_share": host / wall}


def main(
    experiment: Annotated[
        str,
        typer.Option(
            help='Experiment to start, with its options, e.g. "fedmeta_per --systems fedavg" if the data are installed.'
        ),
    ] = "quickstart",
    repeats: Annotated[
        int, typer.Option(min=1, help="Number of starts with empty caches; as many starts with filled caches follow.")
    ] = 3,
    case: Annotated[str, typer.Option(help=f"Workload of the host's share. {', '.join(WORKLOADS)}.")] = "W1",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of rounds; an evaluation follows each.")] = 20,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in a block.")] = 20,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.")] = None,
) -> None:
    """Times starts with empty and with filled caches, and the host's work between compiled programs.

    \b
    Examples:
      python benchmarks/start.py
      python benchmarks/start.py --case W4 --repeats 3
    """
    fm.use_all_cores()
    checks.one_of("--case", case, WORKLOADS)
    words = shlex.split(experiment)
    studies = {path.stem for path in (ROOT / "fedjax_meta" / "studies").glob("*.yaml")}
    programs = sorted(path.stem for path in (ROOT / "experiments").glob("*.py") if path.stem in studies)
    checks.one_of("--experiment", words[0] if words else "", programs)
    check_outputs(output)
    console = Console()
    with console.status(f"starting {experiment}"):
        times = starts(experiment, repeats)
    about = environment()  # after the starts, because it starts JAX, which takes memory of an accelerator
    table = Table("caches", "first saved round (s)", "quartiles", title=experiment)
    for state, seconds in times.items():
        spread = Spread.of(seconds)
        row = {"case": experiment, "caches": state, "seconds": spread.median, "low": spread.low, "high": spread.high}
        write_row(output, {"benchmark": "start", **row, **about})
        table.add_row(state, f"{spread.median:.2f}", f"{spread.low:.2f}-{spread.high:.2f}")
    console.print(table)
    table = Table("after a block", "run (s)", "host (ms per block)", "share", title=f"{case}, blocks of {rounds} rounds")
    for after, save in {"evaluation": False, "evaluation, saving": True}.items():
        with console.status(f"running {case}"):
            row = host_share(case, blocks=blocks, rounds=rounds, save=save)
        write_row(output, {"benchmark": "host", "case": case, "after": after, **row, **about})
        per_block = f"{1e3 * row['host_seconds'] / blocks:.1f}"
        table.add_row(after, f"{row['seconds']:.2f}", per_block, f"{row['host_share']:.2%}")
    console.print(table)


if __name__ == "__main__":
    as_program(main)()
