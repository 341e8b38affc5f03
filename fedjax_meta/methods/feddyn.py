"""FedDyn: FedAvg whose local losses are bent by a memory of past updates, so that local and global optima agree.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: "Federated learning based on dynamic regularization", ICLR 2021, arXiv
2111.04263; the steps are those of the authors' code, alpemreacar/FedDyn, utils_methods.py 373-401 and utils_general.py 190-225.

| paper | here | shape |
|---|---|---|
| theta^t | `received.model` | like the model |
| -grad L_k / alpha | a client's memory, sum of its updates theta_k - theta | like the trainable leaves |
| -h / alpha | the server's extra state, mean of these over all N | like the trainable leaves |
| alpha | `alpha` | scalar |

theta_k minimises L_k + alpha <theta_k, memory> + alpha/2 |theta_k - theta|^2, and the server sends the mean theta_k of the cohort
plus the extra state. Differs from the paper: nothing. Differs from the authors' code: one alpha for all clients (there it is
divided by a client's share of the samples, line 387: `mean_samples`) and no clipping of gradients (there to norm 10, before alpha
theta is added, utils_general.py 224: `clip`); tests with the server's model (there with the mean of the cohort, and of all
clients' last models). Buffers are averaged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Trained, received_model
from fedjax_meta.data import ClientData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Params, PyTree, Rate, Updates, Variables


@described("losses bent by past updates", "Acar et al. 2111.04263")
@method_builder
def feddyn(
    task: Task,
    *,
    lr: Rate = 0.1,
    alpha: Rate = 0.01,
    mean_samples: Rate | None = None,
    clip: Rate | None = None,
    epochs: int = 5,
    batch_size: int = 50,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """FedDyn. Every client, known or new, tests with the server's model; a client that joins late starts with a memory of 0.

    Clients count equally, whatever their samples: only then does the extra state average their memories.

    Args:
      task, lr, epochs, batch_size, optimizer: as in `fedavg`.
      alpha: weight of the dynamic regulariser, above 0: the paper divides by it. May be traced, as the next two.
      mean_samples: the mean number of training samples of all N clients. If it is given, a client of n samples has alpha *
        mean_samples / n, as in the authors' code; else all have one alpha (the paper).
      clip: norm to which gradients are clipped, with alpha (memory - theta^t) but without alpha theta_k, as in the authors' code;
        not at all when not given (the paper).

    Raises:
      ValueError: an option out of range.
    """
    checks.positive("alpha", alpha)
    for name, value in (("mean_samples", mean_samples), ("clip", clip)):
        if value is not None:
            checks.positive(name, value)
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        start = masks.split(received.model, trainable)[0]

        # A client without samples does not train.
        mine = alpha if mean_samples is None else alpha * mean_samples / jnp.maximum(data["train"].size, 1)

        def bend(gradient: Updates, theta: Params) -> Updates:
            if clip is None:
                return jax.tree.map(lambda g, m, w, w0: g + mine * (m + w - w0), gradient, received.memory, theta, start)
            linear = jax.tree.map(lambda g, m, w0: g + mine * (m - w0), gradient, received.memory, start)
            linear = jax.tree.map(lambda g: g.astype(jnp.result_type(g, clip)), linear)  # optax mixes no types
            clipped = optax.clip_by_global_norm(clip).update(linear, optax.EmptyState())[0]
            return jax.tree.map(lambda g, w: g + mine * w, clipped, theta)

        step, passes = optax.chain(optax.stateless(bend), optimizer(lr)), {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, received.model, data["train"], step, trainable, **passes)
        moved = optax.tree.sub(masks.split(model, trainable)[0], start)
        # The server divides the sum of the updates by N, so it must know how many came.
        counts = jnp.where(data["train"].size > 0, 1.0, 0.0)
        return Trained(model, {"loss": loss}, memory=optax.tree.add(received.memory, moved), statistics_weight=counts)

    def direction(
        state: State, pseudo_gradient: Updates, nothing: PyTree, returned: Any, num_clients: int
    ) -> tuple[Updates, PyTree]:
        del nothing
        mean = optax.tree.sub(state.extra, optax.tree.scale(returned / num_clients, pseudo_gradient))
        mean = jax.tree.map(lambda new, old: new.astype(old.dtype), mean, state.extra)
        return optax.tree.sub(pseudo_gradient, mean), mean

    def zeros(model: Variables) -> Params:
        return optax.tree.zeros_like(masks.split(model, trainable)[0])

    return Method(
        init=task.init,
        client=client,
        personalize=received_model,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting="uniform",
        init_memory=lambda key, model, num_clients: zeros(model),
        memory_of_uploads=True,
        remember=lambda memory, pseudo_gradient, nothing: optax.tree.sub(memory, masks.split(pseudo_gradient, trainable)[0]),
        init_extra=lambda model, data: zeros(model),
        direction=direction,
        update_extra=lambda state, mean, weight, num_clients: mean,
        sends_extra=False,
        refuses={
            "weighting": "its extra state is the mean of the clients' memories only if all clients count alike",
            "feedback": "h_i follows what was sent, so that the next change has what was left out: give feedback=False",
        },
    )
