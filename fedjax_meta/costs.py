"""Costs of a round: bytes that a client downloads and uploads, and the wall-clock on a testbed of slow devices.

Bytes follow from what a method declares that it exchanges (`Algorithm.exchange`): the roles of leaves, averaged optimiser slots,
statistics and collaboration. They leave out scalar weights and diagnostics. MTFL (arXiv 2007.09236, §5) gives the shares of
download, training, upload and aggregation on a testbed of Raspberry Pis; `DeviceTestbed` models one.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedjax_meta import checks, runtime
from fedjax_meta.algorithm import Algorithm, Exchange
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.federation import Federation
from fedjax_meta.local import parameter_loss
from fedjax_meta.masks import split, variables_shape
from fedjax_meta.rounds import as_algorithm
from fedjax_meta.task import Batch, Task, require_task


class Traffic(NamedTuple):
    """Bytes of one client in one round.

    Attributes:
      down: downloaded from the server.
      up: uploaded to the server.
    """

    down: int
    up: int


def traffic(method: Method | Algorithm, data: FederatedData, *, federation: Federation | None = None) -> Traffic:
    """Bytes down and up of a client in a round, after the federation's upload transformations; nothing is computed."""
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    return traffic_of(as_algorithm(method, federation).exchange(data))


def traffic_of(exchange: Exchange) -> Traffic:
    """`traffic`, of what `Algorithm.exchange` says."""
    up = sum(exchange.message(leaf).bytes for leaf in jax.tree.leaves(exchange.averaged))
    return Traffic(runtime.size_in_bytes(exchange.down), up + runtime.size_in_bytes(exchange.separate))


def gradient_flops(task: Task, data: FederatedData, batch_size: int) -> float:
    """FLOPs of the gradient of one batch, as XLA counts them before it optimises; those of a scan count in each of its turns.

    Convolutions count in the form in which the task computes them: `form="lax"` has the fewest. XLA counts a loop of another
    kind, whose number of turns the program does not hold, once.
    """
    require_task("gradient_flops", task)
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.count("batch_size", batch_size)
    variables = variables_shape(task)
    parameters, buffers = split(variables, task.trainable(variables))

    def gradient(parameters: Any, buffers: Any, index: jax.Array) -> Any:
        batch = data.client(0)[data.views[0]].take(index, jnp.ones(batch_size))
        return jax.grad(parameter_loss(task, buffers))(parameters, (Batch(*batch), jax.random.key(0)))

    index = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    return _flops(jax.make_jaxpr(gradient)(parameters, buffers, index))


def _flops(program: core.ClosedJaxpr) -> float:
    """XLA's count, which has the body of a scan once, with the other turns."""
    bodies = [(scan.params["length"], scan.params["jaxpr"]) for scan in _scans(program.jaxpr)]
    return _by_xla(program) + sum(turns * _flops(body) - _by_xla(body) for turns, body in bodies)


def _by_xla(program: core.ClosedJaxpr) -> float:
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in program.jaxpr.invars]
    counted: Any = jax.jit(core.jaxpr_as_fun(program)).lower(*shapes).cost_analysis()
    return float(counted.get("flops", 0.0))


def _scans(program: core.Jaxpr) -> Iterator[Any]:
    """The scans of a program, those in programs that it calls included, and those within a scan left out."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            for inner in core.jaxprs_in_params(equation.params):
                yield from _scans(inner)


class Device(NamedTuple):
    """A class of client devices.

    Attributes:
      name: for tables.
      share: of the clients, relative to the other classes.
      flops: floating-point operations a second that training reaches.
      down, up: bytes a second.
    """

    name: str
    share: float
    flops: float
    down: float
    up: float


class DeviceTestbed(NamedTuple):
    """Client devices, and the bytes of uploads that the server averages in a second."""

    devices: tuple[Device, ...]
    aggregation: float


RASPBERRY_PIS = DeviceTestbed(
    (
        Device("Raspberry Pi 2B", share=0.5, flops=0.15e9, down=2.5e6, up=2.5e6),
        Device("Raspberry Pi 3B", share=0.5, flops=0.3e9, down=2.5e6, up=2.5e6),
    ),
    aggregation=0.5e9,
)
"""Like MTFL's testbed: half 2B, half 3B, on Wi-Fi. The rates are assumptions of this library, not measurements of the paper."""


class RoundTime(NamedTuple):
    """Seconds of a synchronous round, as the slowest class of devices spends them, and the server's."""

    download: float
    train: float
    upload: float
    aggregate: float

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return sum(self)

    @property
    def shares(self) -> dict[str, float]:
        """Each part of the round as a share of the whole."""
        return {name: value / self.total for name, value in self._asdict().items()}


def _check_testbed(bytes_: Any, testbed: Any) -> None:
    checks.instance("bytes_", bytes_, Traffic, "traffic(algorithm, data)")
    checks.instance("testbed", testbed, DeviceTestbed, "costs.RASPBERRY_PIS")
    if not testbed.devices or not all(isinstance(device, Device) for device in testbed.devices):
        raise ValueError("testbed.devices must hold at least one costs.Device")
    checks.not_negative("bytes_", list(bytes_), each=True)


def client_times(bytes_: Traffic, flops: float, testbed: DeviceTestbed) -> list[RoundTime]:
    """What a client of each class of devices spends in a round of `flops` operations; without the server's part."""
    checks.positive("flops", flops)
    _check_testbed(bytes_, testbed)
    checks.positive("rates", [rate for device in testbed.devices for rate in device[1:]], each=True)
    return [
        RoundTime(bytes_.down / device.down, flops / device.flops, bytes_.up / device.up, 0.0) for device in testbed.devices
    ]


def round_time(bytes_: Traffic, flops: float, testbed: DeviceTestbed, *, cohort_size: int) -> RoundTime:
    """A synchronous round in which every class of devices has a client: the server waits for the slowest.

    Args:
      bytes_: see `traffic`.
      flops: operations of a client's round, e.g. its gradients times `gradient_flops`.
      testbed: the devices.
      cohort_size: C, how many uploads the server averages.

    Raises:
      ValueError: rates or counts that are not above 0.

    Example:
      >>> round_time(Traffic(0, 0), 4e9, RASPBERRY_PIS, cohort_size=10).shares["train"]
      1.0
    """
    checks.count("cohort_size", cohort_size)
    _check_testbed(bytes_, testbed)
    checks.positive("aggregation", testbed.aggregation)
    slowest = max(client_times(bytes_, flops, testbed), key=lambda time: time.total)
    return slowest._replace(aggregate=cohort_size * bytes_.up / testbed.aggregation)


def seconds_by_client(bytes_: Traffic, flops: float, testbed: DeviceTestbed, *, num_clients: int) -> np.ndarray:
    """Seconds that each client takes for a round, `[N]`, for `participation.deadline`; device classes get their shares of N."""
    checks.count("num_clients", num_clients)
    total = np.array([time.total for time in client_times(bytes_, flops, testbed)])
    shares = np.array([device.share for device in testbed.devices], float)
    middle = (np.arange(num_clients) + 0.5) / num_clients
    return total[np.searchsorted(np.cumsum(shares / shares.sum()), middle)]
