"""Plain PyTorch one client after the other, `torch.func.vmap` over the cohort, and that compiled."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from _workloads import LAYERS, Job, channels_first, channels_last
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def network(model: str) -> nn.Module:
    """The workload's network; pooling stands before ReLU, which gives the same numbers with less work."""
    if model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    convolutions = (nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU())
    dense = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(*convolutions, nn.Flatten(), *dense)


def load(net: nn.Module, job: Job) -> list[torch.Tensor]:
    """Puts the job's parameters into a network; returns them."""
    names = [f"{layer}/{part}" for layer in LAYERS[job.workload.model] for part in ("kernel", "bias")]
    net.to(DEVICE)
    parameters = list(net.parameters())
    with torch.no_grad():
        for name, parameter in zip(names, parameters, strict=True):
            parameter.copy_(torch.from_numpy(channels_first(job.parameters[name])))
    return parameters


def named(job: Job, parameters: Iterable[Any]) -> dict[str, np.ndarray]:
    """Parameters of a network by the names and in the layout of the library."""
    names = [f"{layer}/{part}" for layer in LAYERS[job.workload.model] for part in ("kernel", "bias")]
    arrays = [value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value for value in parameters]
    return {name: channels_last(value) for name, value in zip(names, arrays, strict=True)}


def samples(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples as the network reads them: float32 `[N, S, channels, H, W]` in [0, 1], int64 `[N, S]`."""
    x = torch.from_numpy(np.ascontiguousarray(np.moveaxis(job.x, -1, 2))).to(DEVICE).float().div_(255)
    return x, torch.from_numpy(job.y).to(DEVICE).long()


@torch.no_grad()
def descend(parameters: list[torch.Tensor], gradients: Any, lr: float) -> None:
    """One step of SGD, in place."""
    torch._foreach_add_(parameters, gradients, alpha=-lr)


def epoch(net: nn.Module, parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor, job: Job, order: Any) -> None:
    """FedAvg's work for one client, in place: one pass of SGD over `x [S, ...]` in the given order."""
    for index in torch.from_numpy(order).to(x.device).split(job.workload.batch_size):
        batch = (x[index], y[index]) if job.shuffle else (x[index[0] : index[-1] + 1], y[index[0] : index[-1] + 1])
        loss = functional.cross_entropy(net(batch[0]), batch[1])
        descend(parameters, torch.autograd.grad(loss, parameters), job.workload.lr)


def meta_steps(net: nn.Module, parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor, job: Job) -> None:
    """The meta-gradient workloads' work for one client, in place."""
    case = job.workload
    names = [name for name, _ in net.named_parameters()]
    for step in range(case.steps):
        support, query = case.support(step), case.query(step)
        loss = functional.cross_entropy(net(x[support]), y[support])
        exact = case.rule == "exact"
        inner = torch.autograd.grad(loss, parameters, create_graph=exact)
        adapted = [p - case.lr * g for p, g in zip(parameters, inner, strict=True)]
        if not exact:
            adapted = [p.detach().requires_grad_() for p in adapted]
        logits = functional_call(net, dict(zip(names, adapted, strict=True)), (x[query],))
        loss = functional.cross_entropy(logits, y[query])
        descend(parameters, torch.autograd.grad(loss, parameters if exact else adapted), case.lr)


def sequential(job: Job) -> tuple[list[torch.Tensor], Callable[[np.random.Generator], None]]:
    """One client after the other."""
    net = network(job.workload.model)
    local = load(net, job)
    server = [p.detach().clone() for p in local]
    x, y = samples(job)

    def one_round(rng: np.random.Generator) -> None:
        total = [torch.zeros_like(p) for p in server]
        for client in job.cohort(rng):
            with torch.no_grad():
                torch._foreach_copy_(local, server)
            if job.workload.rule == "fedavg":
                epoch(net, local, x[client], y[client], job, job.order(rng))
            else:
                meta_steps(net, local, x[client], y[client], job)
            with torch.no_grad():
                torch._foreach_add_(total, local, alpha=1 / job.workload.cohort_size)
        torch._foreach_copy_(server, total)

    return server, one_round


def vmapped(job: Job, compiled: bool) -> tuple[list[torch.Tensor], Callable[[np.random.Generator], None]]:
    """The whole cohort side by side; with `compiled`, every step is one compiled function."""
    case = job.workload
    net = network(case.model)
    server = [p.detach().clone() for p in load(net, job)]
    names = [name for name, _ in net.named_parameters()]
    x, y = samples(job)

    def loss(parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(net, dict(zip(names, parameters, strict=True)), (x,)), y)

    def step(parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        gradients = grad(loss)(parameters, x, y)
        return [p - case.lr * g for p, g in zip(parameters, gradients, strict=True)]

    def meta_step(parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        support, query = (x[: case.batch_size], y[: case.batch_size]), (x[case.batch_size :], y[case.batch_size :])
        if case.rule == "exact":
            gradients = grad(lambda p: loss(step(p, *support), *query))(parameters)
        else:
            gradients = grad(loss)(step(parameters, *support), *query)
        return [p - case.lr * g for p, g in zip(parameters, gradients, strict=True)]

    advance = vmap(step if case.rule == "fedavg" else meta_step)
    if compiled:
        advance = torch.compile(advance, dynamic=False)

    @torch.no_grad()
    def one_round(rng: np.random.Generator) -> None:
        cohort = torch.from_numpy(job.cohort(rng)).to(DEVICE)
        order = torch.from_numpy(np.stack([job.order(rng) for _ in range(case.cohort_size)])).to(DEVICE)
        parameters = [p.expand(case.cohort_size, *p.shape).contiguous() for p in server]
        for t in range(case.steps):
            if case.rule == "fedavg":
                index = order[:, t * case.batch_size : (t + 1) * case.batch_size]
                parameters = advance(parameters, x[cohort[:, None], index], y[cohort[:, None], index])
            else:
                taken = slice(case.support(t).start, case.query(t).stop)
                parameters = advance(parameters, x[cohort, taken], y[cohort, taken])
        torch._foreach_copy_(server, [p.mean(0) for p in parameters])

    return server, one_round


def serve(peer: str, job: Job, turns: Any) -> None:
    """Runs rounds as the parent asks for them."""
    torch.set_num_threads(job.threads)
    if "compile" not in peer:  # the number of threads is compiled in
        turns.set_threads = torch.set_num_threads
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    server, one_round = sequential(job) if peer == "torch" else vmapped(job, compiled="compile" in peer)
    rng = np.random.default_rng(0)
    for _ in turns:
        one_round(rng)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    turns.results = named(job, server)
    if DEVICE.type == "cuda":
        turns.device_bytes = torch.cuda.max_memory_allocated()
