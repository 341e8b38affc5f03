"""Runs workloads for which other simulators published times: process start, data, compilation, rounds and tests.

Each case is a separate process with empty caches. Pixels and labels are random, with the shape and number of the published data
set: time does not depend on their values, and nothing is downloaded. Published times are from other machines. They show what a
workload is known to take; do not divide by them. With `--peers`, PyTorch (one client after the other), Flower and BlazeFL run
the cases of federated averaging on this machine, if they are installed.
"""

import dataclasses
import importlib.util
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

import numpy as np
import typer
from _measure import as_program, check_outputs, environment, write_row
from rich.console import Console
from rich.table import Table

from fedjax_meta import checks, runtime


@dataclasses.dataclass(frozen=True)
class Case:
    """A published workload.

    Attributes:
      what: the workload.
      published: who published which time, on what.
      run: trains, and calls its argument with the number of finished rounds after each test.
      rounds: how many.
    """

    what: str
    published: str
    run: Callable[[int, Callable[[int], None]], None]
    rounds: int


def _images(seed: int, count: int, shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), rng.integers(0, classes, count, dtype=np.int32)


def _federation(x: np.ndarray, y: np.ndarray, order: np.ndarray, sizes: np.ndarray, classes: int, test: float = 0.0) -> Any:
    from fedjax_meta.data import from_partition, train_test_views

    views = train_test_views(sizes, train=1 - test) if test else {"train": (np.zeros(len(sizes), int), sizes)}
    return from_partition(x, y, order, sizes, num_classes=classes, views=views, offset=0.0, scale=1 / 255)


def _pool(x: np.ndarray, y: np.ndarray, classes: int) -> Any:
    """Test samples as one client."""
    from fedjax_meta.data import from_partition

    whole, one = (np.zeros(1, int), np.array([len(y)])), (np.zeros(1, int), np.ones(1, int))
    views = {"support": one, "query": whole}
    sizes = np.array([len(y)])
    return from_partition(x, y, np.arange(len(y)), sizes, num_classes=classes, views=views, offset=0.0, scale=1 / 255)


def _simulate(method: Any, data: Any, rounds: int, on_round: Callable[[int], None], *, cohort: int, **options: Any) -> None:
    import jax

    import fedjax_meta as fm

    federation = fm.Federation(cohort_size=cohort, **options.pop("federation", {}))
    options = {"eval_every": 1, **options}
    fm.simulate(
        method,
        data,
        key=jax.random.key(0),
        rounds=rounds,
        federation=federation,
        on_record=lambda state, record: on_round(record.round),
        **options,
    )


def _blazefl(rounds: int, on_round: Callable[[int], None]) -> None:
    import fedjax_meta as fm
    from fedjax_meta import models
    from fedjax_meta.data import partition

    x, y = _images(0, 50_000, (32, 32, 3), 10)
    held = partition.shards(y, partition.shard_assignment(100, per_client=2, seed=0))
    data = _federation(x, y, held.order, held.sizes, 10)
    method = fm.fedavg(models.lenet(), lr=0.1, epochs=5, batch_size=50)
    _simulate(method, data, rounds, on_round, cohort=100)


def _flute(rounds: int, on_round: Callable[[int], None]) -> None:
    from functools import partial

    import fedjax_meta as fm
    from fedjax_meta import models

    x, y = _images(0, 60_000, (28, 28, 1), 10)
    data = _federation(x, y, np.arange(60_000), np.full(1000, 60), 10)
    method = fm.fedavg(models.logistic(inputs=784), lr=0.03, epochs=1, batch_size=10)
    pool = _pool(*_images(1, 10_000, (28, 28, 1), 10), 10)
    test = fm.Evaluator(partial(fm.evaluate, method, support="support", query="query", known=False), pool)
    _simulate(method, data, rounds, on_round, cohort=10, eval_every=20, evaluators={"test": test})


def _fedjax(rounds: int, on_round: Callable[[int], None]) -> None:
    from functools import partial

    import optax

    import fedjax_meta as fm
    from fedjax_meta import models

    rng = np.random.default_rng(0)
    sizes = np.maximum(rng.multinomial(671_585, np.full(3400, 1 / 3400)), 20)
    # The images are not kept beside the federation's: half a gigabyte.
    data = _federation(*_images(1, int(sizes.sum()), (28, 28, 1), 62), np.arange(sizes.sum()), sizes, 62)
    method = fm.apfl(models.mlp(hidden=(200, 200), classes=62), lr=0.001, share=0.5, share_lr=0.0, batch_size=20)
    adam = partial(optax.adam, b1=0.9, b2=0.99, eps=0.01)
    _simulate(method, data, rounds, on_round, cohort=340, federation={"server_optimizer": adam, "server_lr": 1.0})


def _pfllib(rounds: int, on_round: Callable[[int], None]) -> None:
    from functools import partial

    import fedjax_meta as fm
    from fedjax_meta import models
    from fedjax_meta.data import partition

    x, y = _images(0, 70_000, (28, 28, 1), 10)
    held = partition.shards(y, partition.shard_assignment(20, per_client=2, seed=0)).shuffled(0)
    data = _federation(x, y, held.order, held.sizes, 10, test=0.25)
    network = models.Network((28, 28, 1), 10, convs=((32, 5, 0), (64, 5, 0)), hidden=(512,))
    task = models.from_linen(network, (28, 28, 1), layers=network.layers)
    method = fm.fedavg(task, lr=0.005, epochs=1, batch_size=10)
    test = fm.Evaluator(partial(fm.evaluate, method, support="train", query="test"), data)
    _simulate(method, data, rounds, on_round, cohort=20, evaluators={"test": test})


CASES = {
    "A": Case(
        "CIFAR-10's shape, 100 clients x 500 in 200 shards, all take part, 5 epochs, batch 50, rate 0.1, LeNet",
        "BlazeFL's benchmark: BlazeFL 30 s at 16-way, Flower at best 93 s (a server of 64 or more cores)",
        _blazefl,
        5,
    ),
    "B": Case(
        "MNIST's shape, 1,000 clients, 10 a round, batch 10, rate 0.03, logistic regression, tests every 20 rounds",
        "FLUTE's benchmark: FLUTE 3 min 20 s, Flower 30 min 14 s (CPU)",
        _flute,
        100,
    ),
    "C": Case(
        "EMNIST's shape, 3,400 clients, 340 a round, batch 20, APFL of an MLP 784-200-200-62, server Adam",
        "FedJAX's APFL: 4.99 s a round and a checkpoint of 2.52 GB (laptop, 4 cores)",
        _fedjax,
        5,
    ),
    "D": Case(
        "MNIST's shape, 20 clients, all take part, PFLlib's CNN, batch 10, rate 0.005, tested every round",
        "PFLlib's quick start: 17 to 18 s a round (RTX 5090, PFLlib issue 253)",
        _pfllib,
        3,
    ),
}


FEDERATED_AVERAGING = ("A", "B", "D")
OURS = "fedjax_meta"
PEERS = {"PyTorch": "torch", "Flower": "flwr", "BlazeFL": "blazefl"}
"""Packages of the simulators that can run beside this library."""


def worker(case: str, rounds: int, peer: str, threads: int) -> None:
    """Runs a case and prints, as JSON, when its rounds had ended and how much memory it took."""
    ends: list[tuple[int, float]] = []

    def on_round(done: int) -> None:
        ends.append((done, time.time()))

    if peer == OURS:
        import fedjax_meta as fm

        fm.use_all_cores()
        CASES[case].run(rounds, on_round)
    else:
        import _published_peers

        _published_peers.run(peer, case, rounds, threads, on_round)
    print(json.dumps({"ends": ends, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def measure(case: str, rounds: int, peer: str = OURS, threads: int = 1) -> dict[str, Any]:
    """Runs a case in a process of its own with empty caches.

    Returns:
      `seconds` from the start of the process to its end, `first_seconds` to the end of the first round, `round_seconds` the
      median of the later ones (each with its test; NaN where there are none), `bytes` the most memory that the process had (for
      Flower and BlazeFL without the processes that train).

    Raises:
      RuntimeError: the process failed; the message is the end of its output.
    """
    with tempfile.TemporaryDirectory() as cache:
        variables = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        begin = time.time()
        done = subprocess.run(
            [sys.executable, __file__, "--worker", case, "--rounds", str(rounds), "--peer", peer, "--threads", str(threads)],
            check=False,
            env={**variables, "FEDJAX_META_CACHE": cache},
            capture_output=True,
            text=True,
        )
        seconds = time.time() - begin
    if done.returncode != 0:
        raise RuntimeError(f"case {case}, {peer}: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    rounds_done, times = np.array(found["ends"]).T
    later = np.diff(times) / np.diff(rounds_done)
    return {
        "peer": peer,
        "threads": threads,
        "seconds": seconds,
        "first_seconds": times[0] - begin,
        "round_seconds": float(np.median(later)) if len(later) else float("nan"),
        "bytes": found["bytes"],
    }


def contestants(case: str, peers: bool) -> list[tuple[str, list[int]]]:
    """The simulators that run a case, and the numbers of threads of which the faster one counts."""
    found = [(OURS, [runtime.cores()])]
    if not peers or case not in FEDERATED_AVERAGING:
        return found
    threads = {peer: sorted({1, runtime.cores()}) if peer == "PyTorch" else [runtime.cores()] for peer in PEERS}
    return found + [(peer, threads[peer]) for peer, package in PEERS.items() if importlib.util.find_spec(package)]


def main(
    case: Annotated[list[str] | None, typer.Option(help="A, B, C or D; by default all.", show_default=False)] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds, instead of the published number.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of processes per case; the median counts.")] = 1,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also run PyTorch, Flower and BlazeFL, if installed, on the same workloads.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.", show_default=False)] = None,
    peer: Annotated[str, typer.Option(hidden=True)] = OURS,
    threads: Annotated[int, typer.Option(hidden=True)] = 1,
    worker_: Annotated[str | None, typer.Option("--worker", hidden=True)] = None,
) -> None:
    """Times workloads that other simulators published, from process start to the last test.

    \b
    Examples:
      python benchmarks/published.py --case A --case B
      python benchmarks/published.py --rounds 2 --peers
    """
    if worker_ is not None:
        worker(worker_, CASES[worker_].rounds if rounds is None else rounds, peer, threads)
        return
    check_outputs(output)
    chosen = list(CASES) if case is None else case
    for name in chosen:
        checks.one_of("--case", name, CASES)
    console = Console()
    headings = ("case", "simulator", "rounds", "all (s)", "first round (s)", "a round (s)", "memory (GB)")
    table = Table(*headings, box=None)
    for simulator, package in PEERS.items() if peers else ():
        if importlib.util.find_spec(package) is None:
            console.print(f"{simulator} is left out: {package} is not installed")
    for name in chosen:
        count = CASES[name].rounds if rounds is None else rounds
        console.print(f"{name}: {CASES[name].what}\n   {CASES[name].published}", soft_wrap=True)
        if peers and name not in FEDERATED_AVERAGING:
            console.print(f"{name} is a personalised method, which the others do not bring along")
        for simulator, allowed in contestants(name, peers):
            tried = [[measure(name, count, simulator, threads) for _ in range(repeats)] for threads in allowed]
            runs = min(tried, key=lambda runs: float(np.median([run["seconds"] for run in runs])))
            shown = ("seconds", "first_seconds", "round_seconds", "bytes")
            median = {key: float(np.median([run[key] for run in runs])) for key in shown}
            for run in runs:
                write_row(output, {"benchmark": "published", "case": name, "rounds": count, **run, **environment()})
            times = (f"{median[key]:.2f}" for key in shown[:-1])
            table.add_row(name, simulator, str(count), *times, f"{median['bytes'] / 1e9:.2f}")
    console.print(table)


if __name__ == "__main__":
    as_program(main)()
