"""FedJAX 0.0.17: its federated averaging with the backend that compiles a client's step, on one device.

Its backend for several devices calls functions that JAX 0.10 no longer has (`jax.device_put_sharded`). Its batches are always
full: a client's last batch starts a second pass over the samples.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _workloads import Job

# FedJAX uses a name that JAX has removed.
jax.tree_map = jax.tree.map
# All simulators compute in float32.
jax.config.update("jax_default_matmul_precision", "float32")

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402


def _logits(model: str, p: Any, x: jax.Array) -> jax.Array:
    if model == "lenet":
        for layer in ("conv1", "conv2"):
            kernel = p[f"{layer}/kernel"].transpose(1, 2, 3, 0)
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = jax.nn.relu(x + p[f"{layer}/bias"])
    x = x.reshape(x.shape[0], -1)
    for layer in ("fc1",) if model == "mlp" else ("fc1", "fc2"):
        x = jax.nn.relu(x @ p[f"{layer}/kernel"].T + p[f"{layer}/bias"])
    return x @ p["head/kernel"].T + p["head/bias"]


def serve(peer: str, job: Job, turns: Any) -> None:
    """Runs rounds when the parent asks for them."""
    case = job.workload
    if case.rule != "fedavg":
        raise ValueError(f"FedJAX supports rule='fedavg' only, not {case.rule!r}")

    def loss(parameters: Any, batch: Any) -> jax.Array:
        score = jax.nn.log_softmax(_logits(case.model, parameters, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(score, batch["y"][:, None], 1))

    order = fedjax.ShuffleRepeatBatchHParams(batch_size=case.batch_size, num_epochs=1, skip_shuffle=not job.shuffle)
    x = job.x.astype(np.float32) / 255
    clients = [fedjax.ClientDataset({"x": x[i], "y": job.y[i]}) for i in range(len(x))]
    rng = np.random.default_rng(0)
    with fedjax.for_each_client_backend("jit"):
        algorithm = fed_avg.federated_averaging(
            lambda parameters, batch, key: jax.grad(loss)(parameters, batch),
            fedjax.optimizers.sgd(case.lr),
            fedjax.optimizers.sgd(1.0),
            order,
        )
        state = algorithm.init({name: jnp.asarray(value) for name, value in job.parameters.items()})
        for number, _ in enumerate(turns):
            keys = jax.random.split(jax.random.PRNGKey(number), case.cohort_size)
            cohort = [(b"%d" % i, clients[i], key) for i, key in zip(job.cohort(rng), keys, strict=True)]
            state, _ = algorithm.apply(state, cohort)
            jax.block_until_ready(state.params)
    turns.device_bytes = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    turns.results = {name: np.asarray(value) for name, value in state.params.items()}
