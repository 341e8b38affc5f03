"""IFCA: several models at once; each client trains and uses the one that fits it best, and each is the mean over its clients.

Ghosh, Chung, Yin, Ramchandran: "An efficient framework for clustered federated learning", NeurIPS 2020, arXiv 2006.04088,
model averaging; the steps are those of the authors' code, jichan3751/ifca, mnist/train_cluster_mnist.py 299-350 and 370-402.

| paper | here | shape |
|---|---|---|
| theta_j | a stacked model | leaves `[M, ...]` |
| k | `clusters` | M |
| s_i | `membership` | `[M]`, one-hot |
| gamma, tau | `lr`, `epochs` | |

Differs from the paper: a cluster from which no client came keeps its model; models start from independent draws of `task.init`;
each cluster has a server optimiser of its own. `costs.traffic` counts M models up; the paper's client sends one with its s_i.
Differs from the code: a known client tests with the cluster of its train samples, a new one with that of its support set (there
by the loss on the test samples, line 401).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.clusters import check_clusters, losses, shares
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


def draw(task: Task, clusters: int, key: Key) -> PyTree:
    """Leaves `[M, ...]`: independent initial models; a single one is that of `task.init(key)`."""
    return jax.vmap(task.init)(key[None] if clusters == 1 else jax.random.split(key, clusters))


@described("the best of several models", "Ghosh et al. 2006.04088")
@method_builder
def ifca(
    task: Task,
    *,
    clusters: int = 2,
    lr: Rate = 0.1,
    epochs: int = 10,
    batch_size: int = 32,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "uniform",
) -> Method:
    """IFCA. A known client tests with the model that it trained last, a new one with that of the least loss on its support set.

    Args:
      task: a task without buffers.
      clusters: M, how many models; no more than clients. They all travel to each client.
      lr, epochs, batch_size, optimizer, weighting: as in `fedavg`.

    Raises:
      ValueError: a task with buffers, an option out of range; on `init`, more clusters than clients.
    """
    features.require_no_buffers(task, "ifca")
    checks.count("clusters", clusters)

    def nearest_to(key: Key, models: PyTree, view: ClientView, needed: Any = True) -> jax.Array:
        return jnp.argmin(losses(task, tagged(key, "cluster"), models, view, needed)).astype(jnp.int32)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        nearest = nearest_to(key, received.model, data["train"])
        start = jax.tree.map(lambda leaf: leaf[nearest], received.model)
        passes, everything = {"epochs": epochs, "batch_size": batch_size}, masks.everything(task)
        model, loss = local.train_epochs(key, task.loss, start, data["train"], optimizer(lr), everything, **passes)
        models = jax.tree.map(lambda all_, one: all_.at[nearest].set(one), received.model, model)
        membership = jax.nn.one_hot(nearest, clusters)
        return Trained(models, {"loss": loss, **shares(membership)}, memory=nearest, statistics=membership)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        chosen = nearest_to(key, received.model, support, ~received.seen)
        mine = jnp.where(received.seen, received.memory, chosen)
        return jax.tree.map(lambda leaf: leaf[mine], received.model)

    return Method(
        init=partial(draw, task, clusters),
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), masks.everything(task)),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: jnp.zeros((), jnp.int32),
        init_extra=partial(check_clusters, "clusters", clusters),
        # A mean over all clients, by the share of those of a cluster, is the mean over these.
        divides_by_statistics=True,
        separate_models=True,
    )


REDUCES_TO = (Reduction("IFCA with one cluster is FedAvg", "ifca", {"clusters": 1}, "fedavg", {"weighting": "uniform"}),)
