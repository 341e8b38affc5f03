"""One simulator in its own process: it runs one round when the parent asks for it, and reports the time.

Separate processes keep threads, memory, settings and failures apart. The parent lets the simulators take turns, so that a change
in the machine's speed affects all of them alike. Answers are lines of JSON; what a simulator prints goes to stderr.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _workloads import Job, parameters, workload

MODULES = {
    "fedjax_meta": "_fedjax_meta_peer",
    "torch": "_torch_peers",
    "torch.func.vmap": "_torch_peers",
    "torch.compile(vmap)": "_torch_peers",
    "torch.compile(vmap, CUDA graphs)": "_torch_peers",
    "Flower": "_flower_peer",
    "pfl-research": "_pfl_peer",
    "FedJAX": "_fedjax_peer",
}
"""The module of each simulator."""


class Turns(Iterator[None]):
    """Iterates once for each round that the parent asks for; the time from one iteration to the next is the time of a round."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._begin = 0.0
        self.results: dict[str, np.ndarray] = {}
        self.device_bytes: int | None = None
        self.set_threads: Callable[[int], None] = lambda threads: None

    def send(self, **message: Any) -> None:
        """Sends a JSON line to the parent."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def __next__(self) -> None:
        if self._begin:
            self.send(seconds=time.perf_counter() - self._begin)
        else:
            self.send(ready=True)
        command, _, threads = sys.stdin.readline().strip().partition(" ")
        if command != "round":
            raise StopIteration
        self.set_threads(int(threads))
        self._begin = time.perf_counter()


def main(peer: str, name: str, threads: str, recorded: str, precision: str) -> None:
    """Runs the simulator `peer` on the workload `name`.

    Args:
      peer: a key of `MODULES`.
      name: a workload.
      threads: threads of matrix products, as text.
      recorded: "", or a file with the samples of a comparison of results. The results are written beside it.
      precision: of matrix products, as in `Job`.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns = Turns(out)
    case = workload(name)
    if recorded:
        with np.load(recorded) as file:
            job = Job(case, file["x"], file["y"], dict(parameters(case.model)), shuffle=False, threads=int(threads))
    else:
        job = Job(case, *case.arrays(), parameters(case.model), shuffle=True, threads=int(threads), precision=precision)
    importlib.import_module(MODULES[peer]).serve(peer, job, turns)
    if recorded and turns.results:
        np.savez(f"{recorded}.{peer}.npz", **turns.results)
    turns.send(device_bytes=turns.device_bytes, memory=_peak_bytes())


def _peak_bytes() -> int:
    """Peak resident memory in bytes of this process and its descendants (actors); 0 on systems without /proc."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        parents[int(entry)] = int(fields["PPid"])
        peaks[int(entry)] = int(fields.get("VmHWM", "0 kB").split()[0]) * 1024

    def descends(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return sum(peak for pid, peak in peaks.items() if descends(pid))


if __name__ == "__main__":
    main(*sys.argv[1:])
