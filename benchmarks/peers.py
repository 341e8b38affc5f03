"""Compares this library with PyTorch, Flower, pfl-research and FedJAX on the same data, model, batches and steps.

Each simulator runs in its own process. The simulators take turns, in a new random order each time. The first round, with
compilation, is reported separately. Results are compared too: all simulators repeat one round of this library on its batches.

The other simulators need `pip install torch "flwr[simulation]" pfl fedjax`. The program names and skips those that are missing.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from _measure import Spread, as_program, check_outputs, environment, product_ceiling, write_row
from _worker import MODULES
from _workloads import WORKLOADS, Job, parameters, workload
from rich.console import Console
from rich.table import Table

import fedjax_meta as fm
from fedjax_meta import checks, runtime

PACKAGES = {"Flower": "flwr", "pfl-research": "pfl", "FedJAX": "fedjax", "fedjax_meta": "fedjax_meta"}
"""The package of each simulator; PyTorch if not given."""
GRAPHS = "torch.compile(vmap, CUDA graphs)"
"""Only on an NVIDIA GPU."""
TORCH = ("fedjax_meta", "torch", "torch.func.vmap", "torch.compile(vmap)", GRAPHS)
SUPPORT = {"private": TORCH, "first": (*TORCH, "Flower"), "exact": (*TORCH, "Flower")}
"""The simulators that support a rule; all support "fedavg"."""
TRY_THREADS = ("torch", "torch.func.vmap", "pfl-research")
"""The simulators that use one thread or all cores, whichever is faster. Flower has one actor with one thread per core; compiled
code has the threads that it was compiled for, all cores."""


class Worker:
    """A simulator in its own process, which runs a round when asked."""

    def __init__(
        self, peer: str, name: str, threads: int, recorded: str = "", *, flags: str = "", precision: str = "float32"
    ) -> None:
        """Starts the process; arguments as in `_worker.main`, and more of XLA's flags."""
        self.peer, self.threads = peer, threads
        folder = Path(__file__).parent
        # The first round of every simulator includes compilation.
        settings = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        settings["FLWR_TELEMETRY_ENABLED"] = "0"
        settings["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        settings["PYTHONPATH"] = os.pathsep.join([str(folder.parent), str(folder), os.environ.get("PYTHONPATH", "")])
        settings["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        if peer not in ("fedjax_meta", "FedJAX"):
            settings["OMP_NUM_THREADS"] = str(threads)
        self._errors = tempfile.TemporaryFile("w+")  # deleted when the worker is
        self._process = subprocess.Popen(
            [sys.executable, str(folder / "_worker.py"), peer, name, str(threads), recorded, precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **settings},
        )
        self.seconds: list[float] = []

    def answer(self) -> dict[str, Any]:
        """The next answer of the process.

        Raises:
          RuntimeError: the process has ended; the message is its last line of output.
        """
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            lines = [line for line in self._errors.read().strip().splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else f"ended with exit status {self._process.returncode}")
        return json.loads(line)

    def _ask(self, line: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and `answer` says why
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self.answer()

    def round(self) -> float:
        """Runs one round and returns its seconds. Raises as `answer` does."""
        self.seconds.append(self._ask(f"round {self.threads}")["seconds"])
        return self.seconds[-1]

    def stop(self) -> dict[str, Any]:
        """Ends the process and returns its memory use. Raises as `answer` does."""
        memory = self._ask("stop")
        self._close()
        return memory

    def kill(self) -> None:
        """Ends the process immediately; another thread may wait for its answer."""
        self._process.kill()

    def end(self) -> None:
        """Ends the process immediately, and closes what led to it."""
        self.kill()
        self._close()

    def _close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def present(wanted: list[str] | None, every: Iterable[str], platform: str) -> tuple[list[str], dict[str, str]]:
    """(the simulators that can run here, why the others cannot).

    Args:
      wanted: simulators that a user named; `None` for those of `every` that can run.
      every: all simulators.
      platform: of JAX.

    Raises:
      ValueError: a simulator that a user named is none of `every`, or cannot run.
    """
    for peer in wanted or ():
        checks.one_of("--peer", peer, [*every])
    missing = {}
    for peer in wanted or every:
        package = PACKAGES.get(peer, "torch")
        if importlib.util.find_spec(package) is None:
            missing[peer] = f"the package {package} is not installed"
        elif peer == GRAPHS and platform != "gpu":
            missing[peer] = "there is no NVIDIA GPU"
    if wanted and missing:
        raise ValueError("; ".join(f"--peer {peer!r} cannot run: {why}" for peer, why in missing.items()))
    return [peer for peer in wanted or every if peer not in missing], missing


def threads_of(peer: str) -> int:
    """The number of threads that a simulator starts with."""
    return 1 if peer == "Flower" else runtime.cores()


def choose_threads(worker: Worker) -> None:
    """Sets one thread where that is faster than all cores. The second round may compile too and is not used."""
    worker.round()
    if worker.peer not in TRY_THREADS or worker.threads == 1:
        return
    trials = {}
    for threads in (worker.threads, 1):
        worker.threads = threads
        trials[threads] = min(worker.round(), worker.round())
    worker.threads = min(trials, key=trials.__getitem__)
    del worker.seconds[2:]


def differences(name: str, peers: list[str], folder: str) -> dict[str, float | str]:
    """For each simulator, the largest difference of a parameter from this library's after the same round, or an error message."""
    import _fedjax_meta_peer

    case = workload(name)
    expected = _fedjax_meta_peer.one_recorded_round(Job(case, *case.arrays(), parameters(case.model), shuffle=True, threads=1))
    file = f"{folder}/{name}.npz"
    np.savez(file, x=expected.pop("x"), y=expected.pop("y"))
    found: dict[str, float | str] = {}
    for peer in peers:
        worker = Worker(peer, name, threads_of(peer), file)
        try:
            worker.answer()
            worker.round()
            worker.stop()
            with np.load(f"{file}.{peer}.npz") as got:
                found[peer] = float(np.max([np.max(np.abs(got[leaf] - value)) for leaf, value in expected.items()]))
        except RuntimeError as error:
            worker.end()
            found[peer] = str(error)
    return found


def timed_rounds(
    name: str, peers: list[str], rounds: int, max_seconds: float, show: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Times rounds of every simulator in turns.

    Args:
      name: a workload.
      peers: the simulators.
      rounds: rounds to time.
      max_seconds: stop after this many seconds, but not before 3 rounds.
      show: called with a line about the progress.

    Returns:
      By simulator, its times, threads and memory, or an "error".
    """
    results: dict[str, dict[str, Any]] = {}
    workers: list[Worker] = []

    def or_error(worker: Worker, do: Callable[[], Any]) -> Any:
        """What a worker does; a worker that ends keeps the others from nothing."""
        try:
            return do()
        except RuntimeError as error:
            worker.end()
            results[worker.peer] = {"error": str(error), "threads": worker.threads}
            return None

    def start(worker: Worker) -> None:
        worker.answer()
        worker.round()
        choose_threads(worker)

    for peer in peers:
        show(f"{name}: first round of {peer}")
        workers.append(Worker(peer, name, threads_of(peer)))
        or_error(workers[-1], partial(start, workers[-1]))
    shuffle, deadline = np.random.default_rng(0), time.monotonic() + max_seconds
    for turn in range(rounds):
        if time.monotonic() > deadline and turn >= 3:
            break
        show(f"{name}: round {turn + 1} of {rounds}")
        for i in shuffle.permutation(len(workers)):
            if workers[i].peer not in results:
                or_error(workers[i], workers[i].round)
    for worker in workers:
        if worker.peer not in results and (memory := or_error(worker, worker.stop)) is not None:
            results[worker.peer] = {"times": np.array(worker.seconds), "threads": worker.threads, **memory}
    return results


def row_of(name: str, peer: str, result: dict[str, Any], ceiling: float) -> dict[str, Any]:
    """The row of one simulator on one workload."""
    case = workload(name)
    begin = {"benchmark": "peers", "case": name, "peer": peer, "threads": result.get("threads", threads_of(peer))}
    if "error" in result:
        return {**begin, "error": result["error"]}
    first, times = result["times"][0], result["times"][2:]
    spread = Spread.of(times)
    return {
        **begin,
        "first_seconds": round(float(first), 4),
        "seconds": spread.median,
        "low": spread.low,
        "high": spread.high,
        "min": float(times.min()),
        "rounds": len(times),
        "seconds_of_20": float(first + 19 * spread.median),
        "gflops": case.flops / spread.median / 1e9,
        "share_of_ceiling": case.flops / spread.median / 1e9 / ceiling,
        "memory_bytes": result["memory"],
        "device_bytes": result["device_bytes"],
    }


def main(
    case: Annotated[
        list[str] | None,
        typer.Option(help=f"Workloads; all by default. {', '.join(WORKLOADS)}; with a cohort size: W1-500, W2-500."),
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help=f"Simulators; all by default. {', '.join(MODULES)}.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds to time after the first two.")] = 10,
    max_seconds: Annotated[
        float, typer.Option(help="Seconds per workload after the first rounds; at least 3 rounds are timed.")
    ] = 600,
    compare: Annotated[bool, typer.Option(help="Also compare the results of all simulators after one round.")] = True,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.")] = None,
) -> None:
    """Times a round of every installed simulator on every workload, side by side.

    \b
    Examples:
      python benchmarks/peers.py --rounds 10
      python benchmarks/peers.py --case W1 --case W4 --peer fedjax_meta
    """
    console = Console(width=max(Console().width, 150))
    names = case or list(WORKLOADS)
    try:
        rules = {name: workload(name).rule for name in names}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--case") from None
    checks.positive("--max-seconds", max_seconds)
    check_outputs(output)
    fm.use_all_cores()
    there, missing = present(peer, MODULES, runtime.platform())
    for name, why in missing.items():
        console.print(f"{name} is left out: {why}")
    about, ceiling = environment(), product_ceiling()
    console.print(f"{about['processor']}, {about['device']}; large float32 matrix products {ceiling:.0f} GFLOP/s")
    table = Table()
    for heading in (
        "case",
        "simulator",
        "round (s)",
        "quartiles",
        "ratio to ours",
        "first (s)",
        "20 rounds (s)",
        "GFLOP/s (of ceiling)",
        "memory",
        "difference",
    ):
        table.add_column(heading, no_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            supported = [p for p in there if p in SUPPORT.get(rules[name], MODULES)]
            with console.status("") as status:
                status.update(f"{name}: comparing results")
                differ = differences(name, [p for p in supported if p != "fedjax_meta"], folder) if compare else {}
                results = timed_rounds(name, supported, rounds, max_seconds, status.update)
            rows = {p: row_of(name, p, results[p], ceiling) for p in supported}
            ours = rows.get("fedjax_meta", {}).get("seconds")
            for p, row in rows.items():
                row["difference"] = differ.get(p)
                write_row(output, {**row, "ceiling_gflops": ceiling, **about})
                table.add_row(*_cells(row, ours))
            table.add_section()
    console.print(table)


def _cells(row: dict[str, Any], ours: float | None) -> list[str]:
    difference = row["difference"]
    shown = "" if difference is None else difference[:60] if isinstance(difference, str) else f"{difference:.0e}"
    threads = "" if row["peer"] in ("fedjax_meta", "FedJAX") else f", {row['threads']} thr"
    begin = [row["case"], row["peer"] + threads]
    if "error" in row:
        return [*begin, row["error"][:60], *[""] * 6, shown]
    memory = row["device_bytes"] or row["memory_bytes"]
    return [
        *begin,
        f"{row['seconds']:.4f}",
        f"{row['low']:.4f}-{row['high']:.4f}",
        f"{row['seconds'] / ours:.2f}" if ours else "",
        f"{row['first_seconds']:.2f}",
        f"{row['seconds_of_20']:.2f}",
        f"{row['gflops']:.1f} ({row['share_of_ceiling']:.0%})",
        f"{memory / 1e9:.2f} GB",
        shown,
    ]


if __name__ == "__main__":
    as_program(main)()
