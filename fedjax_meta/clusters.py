"""Clusters of clients, each with a model of its own: which model fits a client, and which members of a cluster stay together."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import loops
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree


def losses(task: Task, key: Key, models: PyTree, view: ClientView, needed: Any = True) -> jax.Array:
    """The loss of each model on all samples of a view, `[M]`; 0 where it is not needed."""
    whole = view.in_chunks().as_one_step().keyed(key)
    whole = whole if needed is True else whole.only_if(needed)

    def step(t: Any, total: jax.Array) -> jax.Array:
        of_one = lambda model, pair: task.loss(model, *pair)[0].astype(total.dtype)  # noqa: E731
        return total + whole.mean(lambda pair: jax.vmap(of_one, (0, None))(models, pair), t)

    return loops.fori_loop(whole.steps, step, jnp.zeros(len(jax.tree.leaves(models)[0])))


def bipartition(similarity: jax.Array, members: jax.Array) -> jax.Array:
    """The members that complete linkage puts apart from the first of them when two clusters are left; bool `[C]`."""
    count = len(members)
    pairs = members[:, None] & members[None, :] & ~jnp.eye(count, dtype=bool)

    def join(_: Any, carry: Any) -> Any:
        distance, label = carry
        heads = members & (label == jnp.arange(count))
        one, other = jnp.divmod(jnp.argmin(distance), count)
        far = jnp.maximum(distance[one], distance[other]).at[one].set(jnp.inf)
        joined = distance.at[one].set(far).at[:, one].set(far).at[other].set(jnp.inf).at[:, other].set(jnp.inf)
        goes_on = jnp.sum(heads) > 2
        return jnp.where(goes_on, joined, distance), jnp.where(goes_on & (label == other), one, label)

    start = jnp.where(pairs, -similarity, jnp.inf), jnp.arange(count)
    label = jax.lax.fori_loop(0, max(count - 2, 0), join, start)[1]
    return members & (label != label[jnp.argmax(members)])


def check_clusters(name: str, clusters: int, model: PyTree, data: FederatedData) -> PyTree:
    """A `Method.init_extra` of nothing that raises `ValueError` for more clusters than clients."""
    del model
    if clusters > data.total_clients:
        raise ValueError(f"{name}={clusters} is more than the N={data.total_clients} clients there are")
    return ()
