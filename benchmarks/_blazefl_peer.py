"""The published workloads of federated averaging in BlazeFL: its pool of processes, one per core, parameters in shared memory.

BlazeFL needs Python 3.12 or newer.
"""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from _published_peers import WORK, Rounds, prepared, saved, tensors, train
from blazefl.core import IPCMode, ProcessPoolClientTrainer, SHMHandle, deserialize_model, serialize_model
from torch import multiprocessing, nn


@dataclasses.dataclass
class Parameters:
    """What travels in either direction: all parameters as one vector, or the place where they are."""

    values: torch.Tensor | SHMHandle


@dataclasses.dataclass
class Client:
    """What a process needs to know of a client."""

    number: int
    case: str
    folder: str


class Trainer(ProcessPoolClientTrainer[Parameters, Parameters, Client]):
    """A client's local training, for BlazeFL's pool."""

    def __init__(self, case: str, folder: Path, net: nn.Module, cores: int) -> None:
        self.num_parallels, self.device, self.device_count = cores, "cpu", 0
        self.ipc_mode, self.share_dir = IPCMode.SHARED_MEMORY, folder
        self.cache: list[Parameters] = []
        self._manager = multiprocessing.Manager()  # the event lives in its process
        self.stop_event = self._manager.Event()
        self._case, self._size = case, len(serialize_model(net))

    def get_client_config(self, cid: int) -> Client:
        """What a process needs to know of a client."""
        return Client(cid, self._case, str(self.share_dir))

    def prepare_uplink_package_buffer(self) -> Parameters:
        """Where a client puts its parameters."""
        return Parameters(torch.zeros(self._size))

    @staticmethod
    def worker(
        config: Client, payload: Parameters, device: str, stop_event: threading.Event, *, shm_buffer: Parameters | None = None
    ) -> Parameters:
        """Trains a client and puts its parameters in the buffer."""
        del device, stop_event
        net, x, y = prepared(config.folder, config.case, 1)
        deserialize_model(net, payload.values)
        train(WORK[config.case], net, *tensors(x[config.number], y[config.number]))
        assert shm_buffer is not None and isinstance(shm_buffer.values, torch.Tensor)
        shm_buffer.values.copy_(serialize_model(net))
        return Parameters(SHMHandle())


def start(case: str, samples: dict[str, np.ndarray], cores: int, folder: Path) -> Rounds:
    """Rounds of a workload; the processes read the images of their clients from a file."""
    work = WORK[case]
    saved(work, samples, folder)

    def rounds(net: nn.Module, count: int, rng: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        trainer = Trainer(case, folder, net, cores)
        sizes = [parameter.numel() for parameter in net.parameters()]
        for _ in range(count):
            trainer.cache.clear()
            chosen = [int(client) for client in rng.choice(work.clients, work.cohort, replace=False)]
            trainer.local_process(Parameters(serialize_model(net)), chosen)
            mean = torch.stack([found.values for found in trainer.cache]).mean(0)
            yield [part.view(p.shape) for part, p in zip(mean.split(sizes), net.parameters(), strict=True)]

    return rounds
