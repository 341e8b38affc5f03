"""Flower's simulation engine: the server sends the model to Ray actors, which train it with plain PyTorch."""

import functools
import os
import time
from typing import Any

import numpy as np
import torch
from _torch_peers import DEVICE, epoch, load, meta_steps, named, network, samples
from _workloads import Job
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

# One per core. `fedjax_meta.runtime.cores` also reads quotas, but importing it would add to Flower's memory.
ACTORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _prepared(file: str) -> tuple[Any, ...]:
    """(job, network, its parameters, images, labels, generator) of an actor, made once."""
    with np.load(file, allow_pickle=True) as saved:
        job: Job = saved["job"].item()
    torch.set_num_threads(job.threads)
    net = network(job.workload.model)
    return job, net, load(net, job), *samples(job), np.random.default_rng()


def _client_app(file: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        job, net, local, x, y, rng = _prepared(file)
        client = int(context.node_config["partition-id"])
        with torch.no_grad():
            for parameter, sent in zip(local, message.content["model"].values(), strict=True):
                parameter.copy_(torch.from_numpy(sent.numpy()))
        if job.workload.rule == "fedavg":
            epoch(net, local, x[client], y[client], job, job.order(rng))
        else:
            meta_steps(net, local, x[client], y[client], job)
        reply = ArrayRecord([p.detach().cpu().numpy() for p in local])
        return Message(content=RecordDict({"model": reply}), reply_to=message)

    return app


def serve(peer: str, job: Job, turns: Any) -> None:
    """Runs rounds when the parent asks for them."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/job.npz"
        np.savez(file, job=np.array(job, dtype=object))
        net = network(job.workload.model)
        server = [p.detach().cpu().numpy() for p in load(net, job)]
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            nonlocal server
            while len(nodes := list(grid.get_node_ids())) < len(job.x):
                time.sleep(0.1)
            rng = np.random.default_rng(0)
            for _ in turns:
                record = RecordDict({"model": ArrayRecord(server)})
                chosen = [nodes[i] for i in job.cohort(rng)]
                replies = list(grid.send_and_receive([Message(record, node, "train") for node in chosen]))
                clients = [[array.numpy() for array in reply.content["model"].values()] for reply in replies]
                if len(clients) != len(chosen):
                    raise RuntimeError(f"only {len(clients)} of {len(chosen)} clients answered")
                server = [np.mean(parts, axis=0) for parts in zip(*clients, strict=True)]
            turns.results = named(job, server)

        resources = {"num_cpus": 1, "num_gpus": 1 / ACTORS if DEVICE.type == "cuda" else 0.0}
        config = {"client_resources": resources, "init_args": {"num_cpus": ACTORS, "log_to_driver": False}}
        run_simulation(app, _client_app(file), num_supernodes=len(job.x), backend_config=config)
