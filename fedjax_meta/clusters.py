"""What methods with several models at the server share: the loss of each on a client's samples, metrics, and a check."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import loops
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree


def losses(task: Task, key: Key, models: PyTree, view: ClientView, needed: Any = True) -> jax.Array:
    """The loss of each model on all samples of a view, `[M]`; 0 where it is not needed, and infinite where it is no number.

    A client chooses the least, and `argmin` alone would choose NaN first.
    """
    whole = view.in_chunks().as_one_step().keyed(key)
    whole = whole if needed is True else whole.only_if(needed)

    def step(t: Any, total: jax.Array) -> jax.Array:
        of_one = lambda model, pair: task.loss(model, *pair)[0].astype(total.dtype)  # noqa: E731
        return total + whole.mean(lambda pair: jax.vmap(of_one, (0, None))(models, pair), t)

    each = loops.fori_loop(whole.steps, step, jnp.zeros(len(jax.tree.leaves(models)[0])))
    return jnp.where(jnp.isnan(each), jnp.inf, each)


def shares(membership: jax.Array) -> dict[str, jax.Array]:
    """A client's metrics `cluster_0` to `cluster_<M-1>`, whose means over a cohort are the shares of its clients by cluster.

    Args:
      membership: `[M]`, 1 for the cluster that the client trained and 0 for the others.
    """
    return {f"cluster_{m}": of_one for m, of_one in enumerate(membership)}


def check_clusters(name: str, clusters: int, model: PyTree, data: FederatedData) -> PyTree:
    """A `Method.init_extra` of nothing that raises `ValueError` for more clusters than clients."""
    del model
    if clusters > data.total_clients:
        raise ValueError(f"{name}={clusters} is more than the N={data.total_clients} clients there are")
    return ()
