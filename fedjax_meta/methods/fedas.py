"""FedAS: FedPer whose clients first bring the received body near to their own last one, weighted by their Fisher information.

Yang, Huang, Ye: "FedAS: bridging inconsistency in personalized federated learning", CVPR 2024; the steps are those of the
authors' code, xiyuanyang45/FedAS, system/flcore/clients/clientas.py 48-120 and 171-232, servers/serveras.py 44-59.

| paper | here | shape |
|---|---|---|
| phi_i | leaves inside `head`, personal | |
| theta_i^{t-1} | a client's memory, its last body | leaves outside `head` |
| local prototypes | class means of the features of that body | `[K, d]` |
| trace of the Fisher information | `fisher`, the weight of a client | scalar |

Before training, the body takes steps of SGD on the sum over the classes of a batch of the mean squared distance between features
and local prototype. After it, `fisher` is the sum over batches of the squared norm of the gradient of the loss. Differs from the
code: each client aligns a copy of the server's body (there the server's own, clientas.py 212-227, so that a client starts from
the alignments of those before it), the gradient is that of the task's loss (there the cross-entropy), and a client without a last
body does not align.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, loops, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, PyTree, Rate, Scalar, Variables


def by_classes(value: jax.Array, batch: Batch, classes: int) -> jax.Array:
    """The sum over the classes of a batch of the mean of a value `[B]` over a class: each class counts as much as the others."""
    member = jax.nn.one_hot(batch.y, classes) * batch.weight[:, None]
    each = jnp.sum(member * (1 / jnp.maximum(jnp.sum(member, 0), 1)), 1)
    return jnp.sum(jnp.where(batch.weight > 0, value * each, 0))


def fisher_trace(task: Task, key: Key, model: Variables, view: ClientView, batch_size: int) -> jax.Array:
    """Sum over the batches of a pass of |gradient of the loss|^2, of all trainable leaves."""
    parameters, buffers = masks.split(model, task.trainable(model))
    batches, slope = view.in_order(batch_size).keyed(key), jax.grad(local.parameter_loss(task, buffers))

    def step(t: Scalar, total: jax.Array) -> jax.Array:
        square = optax.tree.norm(slope(parameters, batches.get(t, 0)), squared=True)
        return total + square.astype(total.dtype)

    return loops.fori_loop(batches.steps, step, jnp.zeros(()))


@described("body brought near, by Fisher", "Yang et al. (CVPR 2024)")
@method_builder
def fedas(
    task: Task,
    *,
    lr: Rate = 0.005,
    align_lr: Rate = 0.01,
    align_epochs: int = 1,
    fisher: bool = True,
    head: masks.MaskSpec = "head",
    epochs: int = 1,
    batch_size: int = 10,
    align_batch_size: int = 16,
    new_client_epochs: int = 1,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """FedAS. A known client tests with the received body and its head; one that never took part fits the head to its support set.

    The authors' code tests before clients receive the new body, so with the body that they trained last.

    Args:
      task: a classifier with features and named layers.
      lr, epochs, batch_size, optimizer: as in `fedavg`.
      align_lr, align_epochs, align_batch_size: rate, passes and samples a step of the alignment; 0 passes leave it out.
      fisher: whether clients count by the trace of their Fisher information; equally without.
      head: mask of the leaves that stay with their client.
      new_client_epochs: passes over the support set by which a new client fits its head.

    Raises:
      ValueError: a task without features, an option out of range.
    """
    extract, _ = features.require_features(task, "fedas")
    checks.positive("align_lr", align_lr)
    checks.count("align_epochs", align_epochs, least=0)
    checks.count("align_batch_size", align_batch_size)
    own, trainable = masks.resolve(head, task, name="head"), task.trainable(masks.variables_shape(task))
    body, moves_head = masks.intersection(masks.complement(own), trainable), masks.intersection(own, trainable)

    def kept(model: Variables) -> PyTree:
        return masks.split(model, own)[1] if align_epochs else ()

    def align(key: Key, received: Received, view: ClientView) -> Variables:
        last = masks.merge(received.memory, masks.split(received.model, own)[0])
        wanted = features.class_sums(task, last, view).mean()

        def loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
            away = jnp.mean((extract(variables, batch.x) - wanted[batch.y]) ** 2, -1)
            return by_classes(away, batch, len(wanted)), variables

        passes = {"epochs": align_epochs, "batch_size": align_batch_size, "needed": received.seen}
        return local.train_epochs(key, loss, received.model, view, optax.sgd(align_lr), body, **passes)[0]

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        view, passes = data["train"], {"epochs": epochs, "batch_size": batch_size}
        start = align(tagged(key, "align"), received, view) if align_epochs else received.model
        model, loss = local.train_epochs(key, task.loss, start, view, optimizer(lr), trainable, **passes)
        amount = fisher_trace(task, tagged(key, "fisher"), model, view, batch_size) if fisher else jnp.ones(())
        pseudo_gradient = jax.tree.map(lambda w, x: amount.astype(w.dtype) * (w - x), received.model, model)
        return Trained(
            model, {"loss": loss, "fisher": amount}, memory=kept(model), pseudo_gradient=pseudo_gradient, statistics=amount
        )

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        passes = {"epochs": new_client_epochs, "batch_size": batch_size, "needed": ~received.seen}
        return local.train_epochs(key, task.loss, received.model, support, optimizer(lr), moves_head, **passes)[0]

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(own, trainable),
        weighting="uniform",
        init_memory=lambda key, model, num_clients: kept(model),
        divides_by_statistics=True,
        needs_classes=True,
    )


REDUCES_TO = (
    Reduction(
        "FedAS without alignment and Fisher weights is FedPer",
        "fedas",
        {"align_epochs": 0, "fisher": False},
        "fedper",
        {"weighting": "uniform"},
    ),
)
