"""A run of four algorithms with checkpoints, started as a process by the tests that kill it.

`python -m tests.runs FOLDER [--devices N] [--rounds R] [--every E] [--die SAVE CALL]`. With --die the process kills itself in its
SAVE-th save, at the CALL-th call that touches the disk.
"""

import argparse
import functools
import json
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


def train(name: str, folder: Path, *, rounds: int, every: int, devices: int, numbers: list[int]) -> list[dict[str, Any]]:
    """The rows of one run, from its newest checkpoint on where there is one; `numbers` are the signals that came."""
    import fedjax_meta as fm
    from fedjax_meta import checkpoint, report
    from fedjax_meta.process import Stopped
    from tests import problems

    algorithm = problems.build(name, cohort_size=3, devices=devices)
    data, key = jax.tree.map(np.asarray, problems.data()), jax.random.key(1)
    measure = functools.partial(fm.evaluate, algorithm, devices=devices, support="train", query="train")
    states, config = folder / "state" / name, {**algorithm.config, "devices": devices, "rounds": rounds, "every": every}
    saved = checkpoint.restore(states, fm.host_store.state_shapes(algorithm, key, data), config)
    known: dict[str, Any] = {"rows": [], "part": None} if saved is None else saved.records

    def on_record(state: fm.State, record: fm.Record) -> None:
        row = report.joined(known["part"], report.compact(record))
        known.update(rows=[*map(report.without_confusion, known["rows"]), row], part=None)
        checkpoint.save(states, state, known, config)

    state, records = fm.simulate(
        algorithm,
        data,
        key=key,
        rounds=rounds,
        eval_every=every,
        evaluators={"local": fm.Evaluator(measure, data, known=True)},
        state=None if saved is None else saved.state,
        store=str(folder.parent / "rows") if PLANS[name] == "files" else PLANS[name],
        on_record=on_record,
        should_stop=lambda: bool(numbers),
    )
    if records and records[-1].round > (known["rows"][-1]["round"] if known["rows"] else 0):
        known["part"] = report.joined(known["part"], report.compact(records[-1]))
        checkpoint.save(states, state, known, config)
    if numbers:
        raise Stopped(f"stopped in {name}", numbers[0])
    return known["rows"]


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
    from fedjax_meta import checkpoint, disk, report
    from fedjax_meta.process import one_line_errors, signals

    fm.use_all_cores()  # keeps the devices, and turns the compilation cache on
    if given.die is not None:
        disk.os = checkpoint.os = dying = DyingOs(*given.die)  # type: ignore[attr-defined]
        save = checkpoint.save

        def counted(*arguments: Any, **options: Any) -> Path:
            dying.saves += 1
            return save(*arguments, **options)

        checkpoint.save = counted
    numbers: list[int] = []
    with one_line_errors(debug=False), signals(lambda number, _: numbers.append(number)):
        disk.lock(given.folder)
        print("begins", flush=True)
        path = given.folder / "metrics.json"
        runs = report.numbers_again(json.loads(path.read_text())["runs"]) if path.is_file() else []
        for name in given.names.split(","):
            if all(run["name"] != name for run in runs):
                how = {"rounds": given.rounds, "every": given.every, "devices": given.devices}
                runs.append({"name": name, "result": train(name, given.folder, **how, numbers=numbers)})
                disk.write_text(path, json.dumps(report.strict({"runs": runs}), allow_nan=False) + "\n")


if __name__ == "__main__":
    import typer

    try:
        main()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
