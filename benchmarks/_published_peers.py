"""The published workloads of federated averaging in PyTorch, one client after the other, and in Flower.

`_blazefl_peer` has the same workloads in BlazeFL.
"""

import copy
import functools
import importlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Work(NamedTuple):
    """A workload. All clients have the same number of samples.

    Attributes:
      layers: of the network.
      shape: of an image, channels first.
      clients, cohort: how many there are, and how many train in a round.
      train, test: samples of a client.
      pool: test samples of the server.
      epochs, batch_size, lr: of local training.
      test_every: rounds between tests of the server's model; 0 for none.
    """

    layers: Callable[[], list[nn.Module]]
    shape: tuple[int, int, int]
    clients: int
    cohort: int
    train: int
    test: int
    pool: int
    epochs: int
    batch_size: int
    lr: float
    test_every: int


def _convolutions(channels: int, first: int, second: int) -> list[nn.Module]:
    """Two layers, each with pooling before ReLU, which gives the same numbers with less work."""
    return [
        *(nn.Conv2d(channels, first, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(first, second, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
    ]


def _dense(*sizes: int) -> list[nn.Module]:
    return [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())][:-1]


WORK = {
    "A": Work(lambda: [*_convolutions(3, 6, 16), *_dense(400, 120, 84, 10)], (3, 32, 32), 100, 100, 500, 0, 0, 5, 50, 0.1, 0),
    "B": Work(lambda: [nn.Flatten(), *_dense(784, 10)], (1, 28, 28), 1000, 10, 60, 0, 10_000, 1, 10, 0.03, 20),
    "D": Work(lambda: [*_convolutions(1, 32, 64), *_dense(1024, 512, 10)], (1, 28, 28), 20, 20, 2625, 875, 0, 1, 10, 0.005, 1),
}
"""The cases of federated averaging."""


def _samples(work: Work) -> dict[str, np.ndarray]:
    """Random images and labels: of clients `[N, S, ...]`, and of the server."""
    rng = np.random.default_rng(0)
    sizes = {"x": (work.clients, work.train + work.test), "pool_x": (work.pool,)}
    images = {name: rng.integers(0, 256, (*size, *work.shape), dtype=np.uint8) for name, size in sizes.items()}
    return images | {name.replace("x", "y"): rng.integers(0, 10, size) for name, size in sizes.items()}


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(images in [0, 1], labels) of stored ones."""
    return torch.from_numpy(np.array(x)).float().div_(255), torch.from_numpy(np.array(y))


def train(work: Work, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """A client's local training, in place."""
    parameters = list(net.parameters())
    for _ in range(work.epochs):
        for index in torch.randperm(len(y)).split(work.batch_size):
            gradients = torch.autograd.grad(functional.cross_entropy(net(x[index]), y[index]), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-work.lr)


def _tests(work: Work, samples: dict[str, np.ndarray], net: nn.Module) -> float:
    """The accuracy of the server's model on all test samples."""
    x = np.concatenate([samples["x"][:, work.train :].reshape(-1, *work.shape), samples["pool_x"]])
    y = np.concatenate([samples["y"][:, work.train :].reshape(-1), samples["pool_y"]])
    with torch.no_grad():
        right = [(net(a).argmax(1) == b).sum() for a, b in zip(*(part.split(500) for part in tensors(x, y)), strict=True)]
    return float(sum(right)) / len(y)


def run(peer: str, case: str, rounds: int, threads: int, on_round: Callable[[int], None]) -> None:
    """Trains, and calls `on_round` with the number of finished rounds, after a test where there is one."""
    work, samples = WORK[case], _samples(WORK[case])
    torch.set_num_threads(threads)
    net, rng = nn.Sequential(*work.layers()), np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        if peer == "PyTorch":
            start = _sequential(work, samples)
        else:
            make = _flower if peer == "Flower" else importlib.import_module("_blazefl_peer").start
            start = make(case, samples, threads, Path(folder))
        for number, average in enumerate(start(net, rounds, rng), 1):
            with torch.no_grad():
                for parameter, value in zip(net.parameters(), average, strict=True):
                    parameter.copy_(value)
            if not work.test_every:
                on_round(number)
            elif number in (1, rounds) or number % work.test_every == 0:
                _tests(work, samples, net)
                on_round(number)


Rounds = Callable[[nn.Module, int, np.random.Generator], Iterator[list[torch.Tensor]]]
"""(the server's model, rounds, generator) -> the mean of the clients' parameters after each round."""


def _sequential(work: Work, samples: dict[str, np.ndarray]) -> Rounds:
    clients = [tensors(x[: work.train], y[: work.train]) for x, y in zip(samples["x"], samples["y"], strict=True)]

    def rounds(net: nn.Module, count: int, rng: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        for _ in range(count):
            total = [torch.zeros_like(parameter) for parameter in net.parameters()]
            for client in rng.choice(work.clients, work.cohort, replace=False):
                local = copy.deepcopy(net)
                train(work, local, *clients[client])
                with torch.no_grad():
                    torch._foreach_add_(total, list(local.parameters()), alpha=1 / work.cohort)
            yield total

    return rounds


def saved(work: Work, samples: dict[str, np.ndarray], folder: Path) -> None:
    """Puts the clients' training samples in the files that `prepared` reads."""
    np.save(folder / "x.npy", samples["x"][:, : work.train])
    np.save(folder / "y.npy", samples["y"][:, : work.train])


@functools.cache
def prepared(folder: str, case: str, threads: int) -> tuple[Any, ...]:
    """(network, images, labels) of a process that trains clients, made once."""
    torch.set_num_threads(threads)
    return nn.Sequential(*WORK[case].layers()), np.load(f"{folder}/x.npy", mmap_mode="r"), np.load(f"{folder}/y.npy")


def _flower(case: str, samples: dict[str, np.ndarray], cores: int, folder: Path) -> Rounds:
    """One actor with one thread a core; actors read the images of their clients from a file."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    work, client_app, server_app = WORK[case], ClientApp(), ServerApp()
    saved(work, samples, folder)
    place = str(folder)

    @client_app.train()
    def train_client(message: Message, context: Context) -> Message:
        net, x, y = prepared(place, case, 1)
        client = int(context.node_config["partition-id"])
        with torch.no_grad():
            for parameter, sent in zip(net.parameters(), message.content["model"].values(), strict=True):
                parameter.copy_(torch.from_numpy(sent.numpy()))
        train(work, net, *tensors(x[client], y[client]))
        reply = ArrayRecord([parameter.detach().numpy() for parameter in net.parameters()])
        return Message(content=RecordDict({"model": reply}), reply_to=message)

    def rounds(net: nn.Module, count: int, rng: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        import queue
        import threading

        # Flower calls the server; its rounds are handed out one by one.
        done: queue.Queue[list[torch.Tensor] | BaseException] = queue.Queue()
        go: queue.Queue[None] = queue.Queue()

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:
            while len(nodes := list(grid.get_node_ids())) < work.clients:
                time.sleep(0.1)
            for _ in range(count):
                record = RecordDict({"model": ArrayRecord([parameter.detach().numpy() for parameter in net.parameters()])})
                chosen = [nodes[i] for i in rng.choice(work.clients, work.cohort, replace=False)]
                replies = list(grid.send_and_receive([Message(record, node, "train") for node in chosen]))
                found = [[array.numpy() for array in reply.content["model"].values()] for reply in replies]
                if len(found) != len(chosen):
                    raise RuntimeError(f"only {len(found)} of {len(chosen)} clients answered")
                done.put([torch.from_numpy(np.mean(parts, axis=0)) for parts in zip(*found, strict=True)])
                go.get()

        def simulate() -> None:
            config = {
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": cores, "log_to_driver": False},
            }
            try:
                run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=config)
            except BaseException as error:
                done.put(error)

        thread = threading.Thread(target=simulate)
        thread.start()
        for _ in range(count):
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found
            go.put(None)
        thread.join()

    return rounds
