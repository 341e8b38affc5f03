"""The workloads of `peers.py`: data, models, batches and steps that are the same for all simulators. Needs NumPy only.

Axis letters: N clients, C cohort, S samples of a client, B batch, T steps.
"""

import dataclasses
import difflib
import math
from typing import Any

import numpy as np

MODELS = {"mlp": ((28, 28, 1), 319_600), "lenet": ((32, 32, 3), 3_204_720), "mtfl_mlp": ((28, 28, 1), 879_200)}
"""By model, the shape of a sample and the floating-point operations of its forward and backward pass."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One case.

    Attributes:
      model: "mlp" (784-100-10), "lenet" (6 and 16 convolutions of 5x5, dense 120, 84, 10) or "mtfl_mlp" (784-200-200-10, a
        batch norm after the first activation).
      num_clients, samples, cohort_size: N, S and C.
      batch_size: B; for a meta-gradient, the samples of a support batch.
      rule: "fedavg" (one epoch of SGD), "private" (the same, with personal batch norms), or "first" or "exact": T outer steps.
        An outer step adapts the parameters by one step on a support batch, and then moves the parameters from before the
        adaptation along the first-order or exact meta-gradient of a query batch.
      query_size: samples of a query batch.
      lr: learning rate of all steps.
    """

    model: str
    num_clients: int
    samples: int
    cohort_size: int
    batch_size: int
    rule: str = "fedavg"
    query_size: int = 0
    lr: float = 0.01

    @property
    def steps(self) -> int:
        """T, a client's steps in a round."""
        return math.ceil(self.samples / (self.batch_size + self.query_size))

    @property
    def flops(self) -> float:
        """Floating-point operations of a round, model and gradients only; a Hessian-vector product counts as a gradient."""
        per_sample = MODELS[self.model][1]
        passes = self.samples + (self.steps * self.batch_size if self.rule == "exact" else 0)
        return self.cohort_size * passes * per_sample

    def support(self, step: int) -> slice:
        """The positions of a step's support batch among the client's samples."""
        begin = step * (self.batch_size + self.query_size)
        return slice(begin, begin + self.batch_size)

    def query(self, step: int) -> slice:
        """The positions of a step's query batch, which follows the support batch."""
        begin = self.support(step).stop
        return slice(begin, begin + self.query_size)

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Random (images uint8 `[N, S, H, W, channels]`, labels int32 `[N, S]`); cost does not depend on values."""
        rng = np.random.default_rng(seed)
        shape = (self.num_clients, self.samples)
        x = rng.integers(0, 256, (*shape, *MODELS[self.model][0]), dtype=np.uint8)
        return x, rng.integers(0, 10, shape, dtype=np.int32)


def _meta(model: str, steps: int, support: int, query: int, rule: str) -> Workload:
    return Workload(model, 10, steps * (support + query), 5, support, rule, query)


WORKLOADS = {
    "W1": Workload("mlp", 50, 1400, 5, 32),
    "W2-5": Workload("lenet", 50, 1050, 5, 32),
    "W2-50": Workload("lenet", 50, 1050, 50, 32),
    "W4": Workload("mlp", 1000, 100, 100, 20),
    # The small rate keeps results comparable: a batch norm after units that are rarely active amplifies rounding errors.
    "MTFL": Workload("mtfl_mlp", 200, 300, 100, 20, "private", lr=0.001),
    **{f"W3a-mlp-{rule}": _meta("mlp", 35, 32, 32, rule) for rule in ("first", "exact")},
    **{f"W3a-lenet-{rule}": _meta("lenet", 26, 32, 32, rule) for rule in ("first", "exact")},
    **{f"W3b-mlp-{rule}": _meta("mlp", 1, 280, 1120, rule) for rule in ("first", "exact")},
    **{f"W3b-lenet-{rule}": _meta("lenet", 1, 210, 840, rule) for rule in ("first", "exact")},
}


def workload(name: str) -> Workload:
    """One of `WORKLOADS` by name. A suffix "-C" (W1-500, W2-500) sets the cohort size to C, with at least C clients.

    Raises:
      ValueError: an unknown name.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    stem, _, cohort = name.rpartition("-")
    base = WORKLOADS.get(stem) or WORKLOADS.get(f"{stem}-5")
    if base is None or not cohort.isdecimal() or not 0 < int(cohort[:8]) < 10**7:
        near = difflib.get_close_matches(
            name, WORKLOADS, 1
        )  # by itself: processes of other simulators do not load the library
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"{name!r} is unknown{hint}; allowed are {', '.join(WORKLOADS)}, and each with a cohort size, e.g. W1-500"
        )
    return dataclasses.replace(base, cohort_size=int(cohort), num_clients=max(base.num_clients, int(cohort)))


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker runs.

    Attributes:
      workload: the case.
      x, y: its samples, as `Workload.arrays` returns them. In a comparison of results they are the samples of the cohort only,
        `[C, S, ...]`, in the order in which its clients use them.
      parameters: the initial parameters, by `layer/kernel` and `layer/bias` as the library stores them.
      shuffle: whether each client shuffles its samples in every round; false in a comparison of results.
      threads: threads of the simulator's matrix products.
      precision: of matrix products on an accelerator, "float32" or "tf32".
    """

    workload: Workload
    x: np.ndarray
    y: np.ndarray
    parameters: dict[str, Any]
    shuffle: bool
    threads: int
    precision: str = "float32"

    def cohort(self, rng: np.random.Generator) -> np.ndarray:
        """C random clients of the N, `[C]`."""
        return rng.permutation(len(self.x))[: self.workload.cohort_size]

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """The order in which a client uses its samples, `[S]`."""
        return rng.permutation(self.workload.samples) if self.shuffle else np.arange(self.workload.samples)


NORMS = {"bn1": 200}
"""Widths of the batch norms, by layer name. Scale, bias, running mean and variance of each are personal."""


def norm_start(part: str) -> int:
    """The initial value of all entries of a part of a batch norm."""
    return int(part in ("scale", "var"))


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters as the library stores them: outputs first, channels last."""
    if model == "mlp":
        kernels = {"fc1": (100, 784), "head": (10, 100)}
    elif model == "mtfl_mlp":
        kernels = {"fc1": (200, 784), "bn1": (200,), "fc2": (200, 200), "head": (10, 200)}
    else:
        kernels = {"conv1": (6, 5, 5, 3), "conv2": (16, 5, 5, 6), "fc1": (120, 400), "fc2": (84, 120), "head": (10, 84)}
    return {
        f"{layer}/{part}": shape[:1] if part == "bias" else shape
        for layer, shape in kernels.items()
        for part in ("scale" if layer in NORMS else "kernel", "bias")
    }


def parameters(model: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters, uniform within 1/sqrt(fan in); batch norms have their usual initial values."""
    rng = np.random.default_rng(seed)
    sizes = shapes(model)
    found = {}
    for name, shape in sizes.items():
        layer, part = name.split("/")
        if layer in NORMS:
            found[name] = np.full(shape, norm_start(part), np.float32)
        else:
            bound = 1 / math.sqrt(math.prod(sizes[f"{layer}/kernel"][1:]))
            found[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
    return found


def channels_first(values: np.ndarray) -> np.ndarray:
    """A parameter in PyTorch's layout, which has channels before rows and columns."""
    if values.ndim == 4:
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    if values.shape == (120, 400):
        return np.ascontiguousarray(values.reshape(120, 5, 5, 16).transpose(0, 3, 1, 2).reshape(120, 400))
    return values


def channels_last(values: np.ndarray) -> np.ndarray:
    """The inverse of `channels_first`."""
    if values.ndim == 4:
        return np.ascontiguousarray(values.transpose(0, 2, 3, 1))
    if values.shape == (120, 400):
        return np.ascontiguousarray(values.reshape(120, 16, 5, 5).transpose(0, 2, 3, 1).reshape(120, 400))
    return values
