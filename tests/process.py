"""One process of a run over several, started by `test_distributed.py`."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils


def federation(**options):
    """8 clients of unequal size, which two processes can part, and an algorithm whose clients keep something."""
    import fedjax_meta as fm
    from tests import problems

    rng = np.random.default_rng(1)
    clients = []
    for i, size in enumerate((40, 8, 23, 90, 31, 12, 64, 27)):
        x = rng.normal(0.1 * i, 1, (size, 5))
        clients.append((x, np.argmax(x @ rng.normal(size=(5, 3)), 1)))
    return fm.fedper(problems.task(), cohort_size=5, lr=0.1, personal="head", **options), fm.from_clients(
        clients, num_classes=3
    )


def main(process: str, processes: str, address: str, folder: str, rounds: str, last: str = "") -> None:
    """Runs `rounds` rounds and saves the state every third; after round `last` the second process is lost."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, int(processes), int(process), heartbeat_timeout_seconds=10)
    import fedjax_meta as fm
    from fedjax_meta import engine

    # Clients are tested where they are, as many of them would be: each process then has the results of its own alone.
    fm.evaluate.MANY_BYTES = 0
    assert engine._least(float(process)) == 0
    algorithm, data = federation()
    test = partial(fm.evaluate.evaluate, algorithm, support="train", query="train")

    def save(state: fm.State, record: fm.simulate.Record) -> None:
        assert jax.device_count() == int(processes)
        assert not state.personal["head"]["w"].is_fully_addressable
        leaves = multihost_utils.process_allgather(jax.tree.leaves(state), tiled=True)
        if jax.process_index() == 0:
            found = record.evaluations["known"]
            np.savez(Path(folder) / "state.npz", *leaves, train_loss=record.metrics["loss"], **found._asdict())
        elif last and record.round >= int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    tests = {"known": fm.simulate.Evaluator(test, data, known=True)}
    options = {"rounds": int(rounds), "eval_every": 3, "evaluators": tests, "on_record": save}
    fm.simulate.simulate(algorithm, data, key=jax.random.key(3), **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
