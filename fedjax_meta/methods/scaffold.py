"""SCAFFOLD: FedAvg whose local steps are corrected by control variates, so that clients do not drift apart.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020,
arXiv 1910.06378, Algorithm 1.

| paper | here | shape |
|---|---|---|
| x, y_i | server's and client's model | |
| c | server's extra state | like the trainable leaves |
| c_i | a client's memory | like the trainable leaves |
| eta_l, eta_g | `lr`, `Federation(server_lr=eta_g)` | |
| K | steps of `epochs` passes | |
| option I, II | `control="gradient"`, `"path"` | |

Differs from the paper: buffers, which have no control variate, are averaged.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import ClientData
from fedjax_meta.keys import tagged
from fedjax_meta.methods.fedavg import fedavg
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Params, PyTree, Rate, Updates, Variables


@described("FedAvg with control variates", "Karimireddy et al. 1910.06378")
@method_builder
def scaffold(
    task: Task,
    *,
    lr: Rate = 0.01,
    epochs: int = 1,
    batch_size: int = 32,
    control: str = "path",
    finetune_epochs: int = 0,
    finetune_lr: Rate | None = None,
    finetune: masks.MaskSpec = "all",
) -> Method:
    """SCAFFOLD. All clients, known or new, test with the server's model, after fine-tuning if there is any.

    Local training is plain SGD and clients count equally: only then do the control variates average gradients.

    Args:
      task, lr, epochs, batch_size, finetune_epochs, finetune_lr, finetune: as in `fedavg`.
      control: how a client renews its control variate: "path", from the distance that it moved (option II), or "gradient", the
        full gradient at the server's model (option I).

    Raises:
      ValueError: an option out of range.
    """
    checks.one_of("control", control, ("path", "gradient"))
    base = fedavg(
        task,
        lr=lr,
        batch_size=batch_size,
        finetune_epochs=finetune_epochs,
        finetune_lr=finetune_lr,
        finetune=finetune,
        weighting="uniform",
    )
    trainable = task.trainable(masks.variables_shape(task))

    def corrected(correction: Updates) -> optax.GradientTransformation:
        add = optax.stateless(lambda gradient, _: optax.tree.add(gradient, correction))
        return optax.chain(add, optax.sgd(lr))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        c, own, train = received.extra, received.memory, data["train"]
        batches = train.epochs(tagged(key, "order"), batch_size, epochs)
        # y ← y - η (g(y) + c - c_i)
        step = corrected(optax.tree.sub(c, own))
        model, loss = local.train(tagged(key, "loss"), task.loss, received.model, batches, step, trainable)
        start, buffers = masks.split(received.model, trainable)
        if control == "path":
            # c_i ← c_i - c + (x - y) / (K η)
            path = optax.tree.sub(start, masks.split(model, trainable)[0])
            renewed = optax.tree.add(optax.tree.sub(own, c), optax.tree.scale(1 / (jnp.maximum(batches.steps, 1) * lr), path))
        else:
            gradient = jax.grad(local.parameter_loss(task, buffers))
            renewed = train.full().keyed(tagged(key, "control")).mean(lambda pair: gradient(start, pair), 0)
        renewed = jax.tree.map(lambda new, old: new.astype(old.dtype), renewed, own)
        # The server's c is a plain sum of changes, whatever weighting the federation has.
        counts = jnp.where(train.size > 0, 1.0, 0.0)
        change = optax.tree.sub(renewed, own)
        return Trained(model, {"loss": loss}, memory=renewed, statistics=change, statistics_weight=counts)

    def zeros(model: Variables) -> Params:
        return optax.tree.zeros_like(masks.split(model, trainable)[0])

    return dataclasses.replace(
        base,
        client=client,
        init_memory=lambda key, model, num_clients: zeros(model),
        memory_of_uploads=True,
        remember=lambda own, pseudo_gradient, change: optax.tree.add(own, change),
        init_extra=lambda model, data: zeros(model),
        update_extra=_update_control,
    )


def _update_control(state: State, change: PyTree, returned: Any, num_clients: int) -> PyTree:
    """c ← c + 1/N Σ (c_i⁺ - c_i), the sum over the cohort."""
    step = optax.tree.scale(returned / num_clients, change)
    return jax.tree.map(lambda old, by: (old + by).astype(old.dtype), state.extra, step)
