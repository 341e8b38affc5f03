"""One training run on all devices of one machine or of several: a script to copy.

    python run.py --out runs/first
    srun python run.py --distributed --out /shared/runs/first

It saves its state every `--save-every` rounds, and at once when it is told to
end (SIGTERM, Ctrl-C). The same command goes on. The scores are part of what it
saves, and metrics.jsonl is written from them.
"""

import argparse
import json
import os
import signal
import traceback
from functools import partial
from pathlib import Path

import jax
from jax.experimental import multihost_utils

import fedjax_meta as fm
from fedjax_meta import checkpoint, disk, metrics
from fedjax_meta.data.synthetic import synthetic


def main() -> None:
    """Trains FedPer on a synthetic federation; put your own data and method here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run, which all processes see")
    parser.add_argument("--rounds", type=int, default=100, help="of the whole run (100)")
    parser.add_argument("--save-every", type=int, default=20, help="rounds between two saved states (20)")
    parser.add_argument("--distributed", action="store_true", help="several processes: this script is started once for each")
    parser.add_argument("--address", help="of the first process, host:port; SLURM, Open MPI and TPU slices need none")
    parser.add_argument("--processes", type=int, help="how many; as for --address")
    parser.add_argument("--process", type=int, help="the number of this one, from 0; as for --address")
    options = parser.parse_args()
    if options.distributed:  # before anything is computed
        jax.distributed.initialize(options.address, options.processes, options.process, heartbeat_timeout_seconds=30)
    fm.use_all_cores()
    first = jax.process_index() == 0
    if first:
        disk.lock(options.out)

    data = synthetic(0.5, 0.5, seed=0, num_clients=32)
    method = fm.fedper(fm.models.mlp(60, (32,), 10), lr=0.1)
    federation = fm.Federation(cohort_size=8)
    algorithm = fm.federate(method, federation)
    config = {**algorithm.config, "seed": 0, "clients": data.num_clients}
    known = fm.simulation.Evaluator(partial(fm.evaluate, method, support="train", query="test"), data, known=True)

    def save(state: fm.State, record: fm.simulation.Record) -> None:
        """All processes fetch the state together; the first one writes it."""
        whole = multihost_utils.process_allgather(state, tiled=True) if options.distributed else state
        if not first:
            return
        if record.evaluations:
            scores = metrics.accuracy(record.evaluations["known"].confusion)
            lines.append({"round": record.round, "accuracy": float(scores.mean()), "worst": float(scores.min())})
            print(f"round {record.round}: accuracy {100 * lines[-1]['accuracy']:.1f} %", flush=True)
        checkpoint.save(options.out / "state", whole, lines, config)
        write_lines()

    def write_lines() -> None:
        disk.write_text(options.out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    told = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    shapes = jax.eval_shape(algorithm.init, jax.random.key(0), data)
    found = checkpoint.restore(options.out / "state", shapes, config)
    lines = [] if found is None else found.records
    if first:
        write_lines()  # it may have been killed before it could
        print(f"{jax.device_count()} devices of {jax.process_count()} processes", flush=True)
        print("from the beginning" if found is None else f"going on after round {found.round}", flush=True)
    state, records = fm.simulate(
        algorithm,
        data,
        key=jax.random.key(0),
        rounds=options.rounds,
        eval_every=options.save_every,
        evaluators={"known": known},
        state=None if found is None else found.state,
        on_record=save,
        should_stop=lambda: bool(told),
    )
    if records and not records[-1].evaluations:  # stopped between two evaluations
        save(state, records[-1])
    if first and int(state.round) < options.rounds:
        print(f"stopped after round {int(state.round)}; the same command goes on", flush=True)
    elif first:
        (options.out / "finished").touch()  # for the script that queues the job again


if __name__ == "__main__":
    try:
        main()
    except Exception:
        if jax.process_count() == 1:
            raise
        # Without this, JAX would wait here for the other processes, which wait for this one. They notice by its heartbeat.
        traceback.print_exc()
        os._exit(1)
