"""q-FedAvg: FedAvg in which clients with a higher loss count for more, by a power q of it.

Li, Sanjabi, Beirami, Smith: "Fair resource allocation in federated learning", ICLR 2020, arXiv 1905.10497; the steps are
those of the authors' code, litian96/fair_flearn, flearn/trainers/qffedavg.py 48-65 and fedbase.py 170-187.

| paper | here | shape |
|---|---|---|
| F_k | loss of the received model on all train samples | scalar |
| Delta w_k = L (w - w_k) | `slope` | like the model |
| Delta_k = F_k^q Delta w_k | the pseudo-gradient | like the model |
| h_k = q F_k^(q-1) |Delta w_k|^2 + L F_k^q | `statistics` | scalar |
| q, 1/L | `q`, `lr` | scalars |

w <- w - sum_k Delta_k / sum_k h_k. Differs from the paper: clients are sampled uniformly (there by their samples). F_k gets
1e-10 added, as in the code. Buffers are averaged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained, received_model
from fedjax_meta.data import ClientData
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Rate


@described("high losses count for more", "Li et al. 1905.10497")
@method_builder
def qfedavg(
    task: Task,
    *,
    lr: Rate = 0.1,
    q: Rate = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "uniform",
) -> Method:
    """q-FedAvg. Every client, known or new, tests with the server's model. Clients send a number that tells their loss.

    Args:
      task, epochs, batch_size, optimizer: as in `fedavg`.
      lr: rate of local training and 1 / L, above 0; may be traced, as `q`.
      q: fairness >= 0; 0 is FedAvg.
      weighting: what multiplies both sums; equally many for all clients in the paper.

    Raises:
      ValueError: an option out of range.
    """
    checks.not_negative("q", q)
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        start, buffers = masks.split(received.model, trainable)
        whole, of_parameters = data["train"].full().keyed(tagged(key, "fairness")), local.parameter_loss(task, buffers)
        passes = {"epochs": epochs, "batch_size": batch_size}
        value = whole.mean(lambda pair: of_parameters(start, pair), 0) + 1e-10
        model, loss = local.train_epochs(key, task.loss, received.model, data["train"], optimizer(lr), trainable, **passes)
        slope = jax.tree.map(lambda w, x: (w - x) / lr, received.model, model)
        square = optax.tree.norm(masks.split(slope, trainable)[0], squared=True)
        step = q * value ** (q - 1) * square + value**q / lr
        sent = jax.tree.map(lambda leaf: (value**q).astype(leaf.dtype) * leaf, slope)
        return Trained(model, {"loss": loss, "received_loss": value}, pseudo_gradient=sent, statistics=jnp.asarray(step))

    return Method(
        init=task.init,
        client=client,
        personalize=received_model,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        divides_by_statistics=True,
    )


REDUCES_TO = (Reduction("q-FedAvg with q = 0 is FedAvg", "qfedavg", {"q": 0.0}, "fedavg", {"weighting": "uniform"}),)
