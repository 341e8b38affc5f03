"""A run of four algorithms through the runner of the experiments, started as a process by the tests that kill it.

`python -m tests.runs FOLDER [--devices N] [--rounds R] [--every E] [--die SAVE CALL]`. With --die the process kills itself in its
SAVE-th save, at the CALL-th call that touches the disk.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

PLANS = {"fedavg": None, "scaffold": "memory", "fedmeta_per": None, "fedper": "files"}
"""The algorithms, and where each keeps the rows of its clients: on the device when `None`."""


class DyingOs:
    """The module os, in which the process dies at a call; a write writes half of its bytes before."""

    def __init__(self, save: int, call: int) -> None:
        self.saves, self.calls, self.save, self.call = 0, 0, save, call

    def __getattr__(self, name: str) -> Any:
        whole = getattr(os, name)
        if name not in ("open", "write", "fsync", "close", "replace", "mkdir", "unlink", "listdir"):
            return whole

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += self.saves == self.save
            if self.calls == self.call:
                if name == "write":
                    whole(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*arguments, **options)

        return counted


def main() -> None:
    """Runs all plans, or goes on with them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--names", default=",".join(PLANS))
    parser.add_argument("--die", type=int, nargs=2, default=None)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", given.devices)
    import fedjax_meta as fm
    from experiments import _runner as runner
    from fedjax_meta import checkpoint, disk
    from tests import problems

    fm.use_all_cores()  # keeps the devices, and turns the compilation cache on
    if given.die is not None:
        disk.os = checkpoint.os = dying = DyingOs(*given.die)  # type: ignore[attr-defined]
        save = checkpoint.save

        def counted(*arguments: Any, **options: Any) -> Path:
            dying.saves += 1
            return save(*arguments, **options)

        checkpoint.save = counted
    data = jax.tree.map(np.asarray, problems.data())
    plans = []
    for name in given.names.split(","):
        algorithm = problems.build(name, cohort_size=3, devices=given.devices)
        test = runner.evaluator(algorithm, data, devices=given.devices, support="train", query="train")
        store = PLANS[name]
        plans.append(
            runner.Plan(
                name=name,
                title=name,
                algorithm=algorithm,
                data=data,
                tests={f"{name}/local": runner.Test(name, "local", test)},
                rounds=given.rounds,
                eval_every=given.every,
                seed=1,
                config={"devices": given.devices},
                store=str(given.folder.parent / "rows") if store == "files" else store,
            )
        )
    with runner.one_line_errors(debug=False):
        resume = (given.folder / "config.json").exists()
        folder = runner.open_folder(given.folder, "runs", resume=resume, options={}, algorithms=runner.configs(plans))
        print("begins", flush=True)
        runner.run_all(plans, folder)


if __name__ == "__main__":
    import typer

    try:
        main()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
