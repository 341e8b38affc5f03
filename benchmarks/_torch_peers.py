"""PyTorch in four forms: one client after the other, `torch.func.vmap` over the cohort, and the compiled vmap, the last also with
CUDA graphs.

The form with CUDA graphs has not run yet.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from _workloads import NORMS, Job, channels_first, channels_last, norm_start, shapes
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# All simulators compute in float32 unless a job says otherwise. Flower's actors and pfl-research import this module too.
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.benchmark = True


def network(model: str) -> nn.Module:
    """The workload's network. It pools before ReLU, which gives the same numbers with less work."""
    if model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    if model == "mtfl_mlp":
        first = (nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.BatchNorm1d(200))
        return nn.Sequential(*first, nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    convolutions = (nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU())
    dense = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(*convolutions, nn.Flatten(), *dense)


def load(net: nn.Module, job: Job) -> list[torch.Tensor]:
    """Copies the job's parameters into a network and returns the network's parameters."""
    net.to(DEVICE)
    parameters = list(net.parameters())
    with torch.no_grad():
        for name, parameter in zip(shapes(job.workload.model), parameters, strict=True):
            parameter.copy_(torch.from_numpy(channels_first(job.parameters[name])))
    return parameters


def named(job: Job, parameters: Iterable[Any]) -> dict[str, np.ndarray]:
    """Parameters of a network with the library's names and layout."""
    arrays = [value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value for value in parameters]
    return {name: channels_last(value) for name, value in zip(shapes(job.workload.model), arrays, strict=True)}


def samples(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples in the network's layout: float32 `[N, S, channels, H, W]` in [0, 1], int64 `[N, S]`."""
    x = torch.from_numpy(np.ascontiguousarray(np.moveaxis(job.x, -1, 2))).to(DEVICE).float().div_(255)
    return x, torch.from_numpy(job.y).to(DEVICE).long()


@torch.no_grad()
def descend(parameters: list[torch.Tensor], gradients: Any, lr: float) -> None:
    """One step of SGD, in place."""
    torch._foreach_add_(parameters, gradients, alpha=-lr)


def epoch(net: nn.Module, parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor, job: Job, order: Any) -> None:
    """One client's local update in FedAvg, in place: one pass of SGD over `x [S, ...]` in the given order."""
    for index in torch.from_numpy(order).to(x.device).split(job.workload.batch_size):
        batch = (x[index], y[index]) if job.shuffle else (x[index[0] : index[-1] + 1], y[index[0] : index[-1] + 1])
        loss = functional.cross_entropy(net(batch[0]), batch[1])
        descend(parameters, torch.autograd.grad(loss, parameters), job.workload.lr)


def meta_steps(net: nn.Module, parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor, job: Job) -> None:
    """One client's local update in a meta-gradient workload, in place."""
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
    """Runs one client after the other. Returns (the server's parameters, a function that runs a round)."""
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


def compiled(advance: Callable[..., Any], peer: str) -> Callable[..., Any]:
    """The step of a cohort, compiled as the form `peer` has it."""
    if "compile" not in peer:
        return advance
    if "graphs" not in peer:
        return torch.compile(advance, dynamic=False)
    graphed = torch.compile(advance, dynamic=False, mode="reduce-overhead")

    def step(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        # The next call overwrites what a graph returned, and takes it as an argument.
        return tree_map(torch.clone, graphed(*arguments))

    return step


def vmapped(job: Job, peer: str) -> tuple[list[torch.Tensor], Callable[[np.random.Generator], None]]:
    """Runs the cohort under vmap, with each step compiled as `peer` has it. Returns as `sequential` does."""
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

    advance = compiled(vmap(step if case.rule == "fedavg" else meta_step), peer)

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


Private = tuple[list[torch.Tensor], list[torch.Tensor], Callable[[np.random.Generator], None]]
"""(shared parameters, `PARTS` of all clients' batch norms `[N, width]`, a function that runs a round)."""

PARTS = ("scale", "bias", "mean", "var")
"""The parts of a batch norm, in the order in which they are stored."""


def all_norms(job: Job) -> list[torch.Tensor]:
    """The initial batch norms of all clients."""
    return [torch.full((len(job.x), NORMS["bn1"]), float(norm_start(part)), device=DEVICE) for part in PARTS]


def sequential_private(job: Job) -> Private:
    """`sequential` for clients with personal batch norms."""
    net = network(job.workload.model)
    everything = load(net, job)
    norm = net[3]
    inside = [norm.weight, norm.bias, norm.running_mean, norm.running_var]
    local = [p for p in everything if p is not norm.weight and p is not norm.bias]
    server, own = [p.detach().clone() for p in local], all_norms(job)
    x, y = samples(job)

    def one_round(rng: np.random.Generator) -> None:
        total = [torch.zeros_like(p) for p in server]
        for client in job.cohort(rng):
            with torch.no_grad():
                torch._foreach_copy_([*local, *inside], [*server, *(part[client] for part in own)])
            epoch(net, everything, x[client], y[client], job, job.order(rng))
            with torch.no_grad():
                torch._foreach_add_(total, local, alpha=1 / job.workload.cohort_size)
                torch._foreach_copy_([part[client] for part in own], inside)
        torch._foreach_copy_(server, total)

    return server, own, one_round


def vmapped_private(job: Job, peer: str) -> Private:
    """`vmapped` for clients with personal batch norms.

    The batch norm is written out, because PyTorch's updates its statistics in place.
    """
    case = job.workload
    everything = [p.detach().clone() for p in load(network(case.model), job)]
    server, own = everything[:2] + everything[4:], all_norms(job)
    x, y = samples(job)

    def loss(parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
        w1, b1, w2, b2, w3, b3, scale, bias = parameters
        h = functional.relu(functional.linear(x.flatten(1), w1, b1))
        var, mean = torch.var_mean(h, 0, correction=0)
        h = (h - mean) * torch.rsqrt(var + 1e-5) * scale + bias
        h = functional.relu(functional.linear(h, w2, b2))
        return functional.cross_entropy(functional.linear(h, w3, b3), y), (mean, var)

    def step(parameters: list[torch.Tensor], mean: Any, var: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        gradients, (batch_mean, batch_var) = grad(loss, has_aux=True)(parameters, x, y)
        unbiased = batch_var * (case.batch_size / (case.batch_size - 1))
        moved = [p - case.lr * g for p, g in zip(parameters, gradients, strict=True)]
        return moved, mean + 0.1 * (batch_mean - mean), var + 0.1 * (unbiased - var)

    advance = compiled(vmap(step), peer)

    @torch.no_grad()
    def one_round(rng: np.random.Generator) -> None:
        cohort = torch.from_numpy(job.cohort(rng)).to(DEVICE)
        order = torch.from_numpy(np.stack([job.order(rng) for _ in range(case.cohort_size)])).to(DEVICE)
        parameters = [p.expand(case.cohort_size, *p.shape).contiguous() for p in server]
        scale, bias, mean, var = (part[cohort] for part in own)
        parameters += [scale, bias]
        for t in range(case.steps):
            index = order[:, t * case.batch_size : (t + 1) * case.batch_size]
            parameters, mean, var = advance(parameters, mean, var, x[cohort[:, None], index], y[cohort[:, None], index])
        torch._foreach_copy_(server, [p.mean(0) for p in parameters[:-2]])
        for part, values in zip(own, (*parameters[-2:], mean, var), strict=True):
            part[cohort] = values

    return server, own, one_round


def serve(peer: str, job: Job, turns: Any) -> None:
    """Runs rounds when the parent asks for them."""
    torch.set_num_threads(job.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job.precision == "tf32"
    if "compile" not in peer:  # compiled code has a fixed number of threads
        turns.set_threads = torch.set_num_threads
    own: list[torch.Tensor] = []
    if job.workload.rule == "private":
        made = sequential_private(job) if peer == "torch" else vmapped_private(job, peer)
        server, own, one_round = made
    else:
        server, one_round = sequential(job) if peer == "torch" else vmapped(job, peer)
    rng = np.random.default_rng(0)
    for _ in turns:
        one_round(rng)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    if own:
        shared = [name for name in shapes(job.workload.model) if name.split("/")[0] not in NORMS]
        names = shared + [f"bn1/{part}" for part in PARTS]
        turns.results = {name: value.detach().cpu().numpy() for name, value in zip(names, [*server, *own], strict=True)}
    else:
        turns.results = named(job, server)
    if DEVICE.type == "cuda":
        turns.device_bytes = torch.cuda.max_memory_allocated()
