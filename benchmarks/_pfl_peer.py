"""pfl-research's simulator with its PyTorch model and federated averaging."""

from typing import Any

import numpy as np
import torch
from _torch_peers import DEVICE, load, named, network, samples
from _workloads import Job
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional


class _Model(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {}


class _Turn(TrainingProcessCallback):
    def __init__(self, turns: Any) -> None:
        self._turns = turns

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        return next(self._turns, "stop") == "stop", Metrics()


def serve(peer: str, job: Job, turns: Any) -> None:
    """Runs rounds when the parent asks for them."""
    case = job.workload
    if case.rule != "fedavg":
        raise ValueError(f"pfl-research supports rule='fedavg' only, not {case.rule!r}")
    torch.set_num_threads(job.threads)
    turns.set_threads = torch.set_num_threads
    net = network(case.model)
    parameters = load(net, job)
    x, y = samples(job)
    rng = np.random.default_rng(0)

    def make_dataset(user: int) -> Dataset:
        if not job.shuffle:
            return Dataset(raw_data=[x[user], y[user]])
        order = torch.from_numpy(job.order(rng)).to(x.device)
        return Dataset(raw_data=[x[user][order], y[user][order]])

    population = FederatedDataset(make_dataset, get_user_sampler("minimize_reuse", list(range(len(x)))))
    module = _Model(net)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    backend = SimulatedBackend(training_data=population, val_data=population)
    rounds = NNAlgorithmParams(
        central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=case.cohort_size, val_cohort_size=0
    )
    train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=case.lr, local_batch_size=case.batch_size)
    next(turns)
    FederatedAveraging().run(rounds, backend, model, train, NNEvalHyperParams(local_batch_size=None), [_Turn(turns)])
    turns.results = named(job, parameters)
    if DEVICE.type == "cuda":
        turns.device_bytes = torch.cuda.max_memory_allocated()
