"""Whether an accelerator computes what a CPU does, and the same bits each time."""

import os
from functools import partial
from typing import Any

import _fedjax_meta_peer
import jax
import numpy as np
import systems
from _side_by_side import Clock, Ready, Row, in_process
from _workloads import Job, parameters, workload

import fedjax_meta as fm
from fedjax_meta import masks, models, runtime
from fedjax_meta.task import Batch
from fedjax_meta.types import PyTree

IMAGES = ("lenet", "fedpac_cnn", "mtfl_cnn")
NETWORKS = (*IMAGES, "char_lstm", "transformer")
"""Networks of which two rounds of FedAvg are repeated."""
CLIENTS = 4


def numbers(name: str, rows: int) -> Row:
    """The largest relative difference between accelerator and CPU of an image network's loss, gradient and product."""
    task = models.MODELS[name]()
    batch = image_batch(name, rows)
    key = jax.random.key(0)

    def all_three(key: jax.Array, batch: Batch) -> Any:
        variables = task.init(key)
        moving, fixed = masks.split(variables, task.trainable(variables))

        def loss(moving: Any) -> jax.Array:
            return task.loss(masks.merge(moving, fixed), batch, key)[0]

        gradient, product = jax.jvp(jax.grad(loss), (moving,), (moving,))
        return {"loss": loss(moving), "gradient": gradient, "product": product}

    found = []
    for device in _both():
        with runtime.compiling_for(device.platform), jax.default_device(device), jax.default_matmul_precision("float32"):
            given = (key, jax.device_put(batch, device))
            # As a run compiles it: XLA's own search takes a minute for a network.
            found.append(jax.device_get(runtime.compiled(jax.jit(partial(all_three)).lower(*given))(*given)))
    return {f"{part}_difference": _difference(found[0][part], found[1][part]) for part in found[0]}


def method(name: str, rows: int, rounds: int = 2) -> Row:
    """The largest relative difference between accelerator and CPU of a method's state and measures after some rounds.

    Four clients of five batches take part in each round.
    """
    built, data = _method(name, rows)
    found = [trained(built, data, rounds, CLIENTS, device) for device in _both()]
    return {
        "state_difference": _difference(found[0][0], found[1][0]),
        "measures_difference": _difference(found[0][1], found[1][1]),
    }


def _method(name: str, rows: int) -> tuple[fm.Method, fm.FederatedData]:
    samples = 5 * rows
    size = {"epochs": 2, "steps": 5, "cohort": CLIENTS, "samples": samples}
    parts = systems.Costs(**dict.fromkeys(systems.Costs._fields, 0) | size)
    return systems.method(name, models.MODELS["mlp"](), parts, rows), systems.client_data("mlp", CLIENTS, samples)


def trained(method: fm.Method, data: fm.FederatedData, rounds: int, cohort: int, device: jax.Device) -> tuple[PyTree, PyTree]:
    """(state, measures of known and new clients) after some rounds on a device."""
    with runtime.compiling_for(device.platform), jax.default_device(device):
        run = fm.federate(method, fm.Federation(cohort_size=cohort, devices=[device]))
        tests = {}
        for known in (True, False) if "support" in data.start else ():
            test = partial(fm.evaluate, run, support="support", query="query", known=known)
            tests[f"known {known}"] = fm.Evaluator(test, data, known=known)
        state, records = fm.simulate(run, data, key=jax.random.key(0), rounds=rounds, eval_every=rounds, evaluators=tests)
        return jax.device_get((jax.tree.map(_plain, state), records[-1].evaluations))


def twice(part: str, name: str, rows: int, flags: str) -> tuple[PyTree, PyTree]:
    """What training comes to on the accelerator, two times in this process, which compiles its programs once.

    Args:
      part: "method" (with an MLP, four clients), "network" (FedAvg, four clients) or "case" (of the workloads).
      name: its name.
      rows: samples of a batch.
      flags: of XLA's.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    rounds, cohort = 2, CLIENTS
    if part == "method":
        method, data = _method(name, rows)
    elif part == "network":
        method = fm.fedavg(models.MODELS[name](), lr=0.1, batch_size=rows)
        data = _tokens(rows) if name in ("char_lstm", "transformer") else systems.client_data("lenet", CLIENTS, 5 * rows)
    else:
        work = workload(name)
        job = Job(work, *work.arrays(), parameters(work.model), shuffle=True, threads=1)
        method, data, rounds, cohort = _fedjax_meta_peer.method(work), _fedjax_meta_peer.client_data(job), 3, work.cohort_size
    device = runtime.default_devices()[0]
    first, second = (trained(method, data, rounds, cohort, device) for _ in range(2))
    return first, second


def _tokens(rows: int) -> fm.FederatedData:
    rng = np.random.default_rng(0)
    pools = [tuple(rng.integers(0, 80, (2, 5 * rows, 40), dtype=np.int32)) for _ in range(CLIENTS)]
    return fm.from_clients(pools, num_classes=80)


def bits(clock: Clock, *arguments: Any) -> Ready:
    """Whether `twice(*arguments)` gives the same bits, and the same in another process; otherwise the largest difference."""
    (one, again), (other, _) = (in_process(clock, _sent, *arguments)()["found"] for _ in range(2))
    found: Row = {}
    for name, compared in (("repeated", again), ("other_process", other)):
        equal = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f"), one, compared)
        found[name] = all(jax.tree.leaves(equal))
        if not found[name]:
            found[f"{name}_difference"] = _difference(one, compared)
    return lambda: found


def _sent(*arguments: Any) -> Ready:
    """`twice`, whose trees become what a pipe can carry."""
    found = jax.tree.map(np.asarray, tuple(tuple(jax.tree.leaves(tree)) for tree in twice(*arguments)))
    return lambda: {"found": found}


def _both() -> tuple[jax.Device, jax.Device]:
    return jax.devices("cpu")[0], runtime.default_devices()[0]


def _plain(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def image_batch(name: str, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    shape = (28, 28, 1) if "mlp" in name else (32, 32, 3)
    x = rng.random((rows, *shape)).astype(np.float32)
    return Batch(x, rng.integers(0, 10, rows, dtype=np.int32), np.ones(rows, np.float32))


def _difference(expected: Any, found: Any) -> float:
    """The largest difference over all leaves, relative to the largest number of the leaf; not finite where numbers are not."""

    def gap(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        with np.errstate(invalid="ignore"):
            return np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(a), initial=0.0), 1e-30)

    # Not `max`, which drops a NaN that is not the first.
    return float(np.max(jax.tree.leaves(jax.tree.map(gap, expected, found)), initial=0.0))
