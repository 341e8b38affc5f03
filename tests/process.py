"""One process of a run over several processes, started by `test_distributed.py`."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils


def federation(**options):
    """8 clients of unequal size, which two processes can divide, and a method with personal leaves."""
    import fedjax_meta as fm
    from tests import problems

    rng = np.random.default_rng(1)
    clients = []
    for i, size in enumerate((40, 8, 23, 90, 31, 12, 64, 27)):
        x = rng.normal(0.1 * i, 1, (size, 5))
        clients.append((x, np.argmax(x @ rng.normal(size=(5, 3)), 1)))
    return problems.build("fedper", cohort_size=5, lr=0.1, **options), fm.from_clients(clients, num_classes=3)


def main(process: str, processes: str, address: str, folder: str, rounds: str, last: str = "") -> None:
    """Runs until round `rounds`, from the last checkpoint on; saves every third; after `last` the second process kills itself."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, int(processes), int(process), heartbeat_timeout_seconds=10)
    import fedjax_meta as fm
    from fedjax_meta import checkpoint, hardware, runtime, simulation, sweeps
    from tests import problems

    fm.use_all_cores()  # keeps the one device, and turns the compilation cache on
    assert runtime.least_of_processes(float(process)) == 0
    refused("devices=1 leaves process 1 of the 2 of this run without a device", hardware.chosen, 1)
    method, data = federation()
    members, build = (
        sweeps.members(sweeps.grid(lr=[0.1]), [0]),
        lambda lr: (fm.fedavg(problems.task(), lr=lr), fm.Federation()),
    )
    refused("a sweep is run by one process", sweeps.sweep, build, members, data, rounds=1)
    test = partial(fm.evaluate, method, support="train", query="train")

    def save(state: fm.State, record: simulation.Record) -> None:
        assert jax.device_count() == int(processes)
        assert not state.personal["head"]["w"].is_fully_addressable
        whole = multihost_utils.process_allgather(state, tiled=True)
        if jax.process_index() == 0:
            checkpoint.save(Path(folder) / "state", jax.tree.map(jnp.asarray, whole), [], {"seed": 3})
            found = record.evaluations["known"]
            np.savez(Path(folder) / "state.npz", *jax.tree.leaves(whole), train_loss=record.metrics["loss"], **found._asdict())
        elif last and record.round >= int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    tests = {"known": simulation.Evaluator(test, data, known=True)}
    options = {"rounds": int(rounds), "eval_every": 3, "evaluators": tests, "on_record": save}
    # One process alone shows its progress, the other one alone may stop the run; neither changes a number.
    options |= {"on_progress": lambda done, metrics: None} if process == "0" else {"should_stop": lambda: False}
    like = jax.eval_shape(method.init, jax.random.key(0), data)
    found = checkpoint.restore(Path(folder) / "state", like, {"seed": 3})
    print("training", flush=True)
    fm.simulate(method, data, key=jax.random.key(3), state=None if found is None else found.state, **options)


def refused(words: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Fails unless a call raises a `ValueError` of these words."""
    try:
        call(*arguments, **options)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


if __name__ == "__main__":
    main(*sys.argv[1:])
