"""Clusters of clients: which model fits a client, which members of a cluster stay together, and whom a client goes with."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import loops
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate


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


class Place(NamedTuple):
    """Where clients are: a cluster, and the cluster that this was split from; int32 of any shape."""

    cluster: jax.Array
    parent: jax.Array


class Pull(NamedTuple):
    """When a cluster is split: it has enough members, and its mean update is small, but that of a member is large.

    Attributes:
      mean_norm: above the norm of the mean (eps_1 of CFL).
      client_norm: below the largest norm (eps_2).
      least_size: so many members are enough.
    """

    mean_norm: Rate
    client_norm: Rate
    least_size: int

    def apart(self, updates: jax.Array, length: jax.Array, members: jax.Array) -> jax.Array:
        """Whether it is, from the updates `[C, p]`, their norms `[C]` and who is a member, bool `[C]`."""
        size = jnp.sum(members)
        mean = jnp.linalg.norm(members @ updates) / jnp.maximum(size, 1)
        largest = jnp.max(jnp.where(members, length, 0))
        return (mean < self.mean_norm) & (largest > self.client_norm) & (size >= self.least_size)


def split_all(
    place: Place,
    updates: jax.Array,
    valid: jax.Array,
    free: jax.Array,
    due: jax.Array,
    pull: Pull,
    clusters: int,
) -> Place:
    """Where clients are after the clusters that pull apart were split in two, by the cosines of updates.

    Args:
      place: of each client, `[C]`.
      updates: `[C, p]`.
      valid: bool `[C]`, which clients count; the others stay.
      free: the first number that no cluster has; numbers end at `clusters` - 1, and with them the splits.
      due: whether there are splits at all.
      pull: which clusters are split.
      clusters: M, the most clusters.
    """
    length = jnp.sqrt(jnp.sum(updates**2, 1))
    product = jnp.dot(updates, updates.T, precision=jax.lax.Precision.HIGHEST)
    similarity = product / (length[:, None] * length[None, :] + 1e-12)

    def split(number: jax.Array, carry: Any) -> Any:
        now, free = carry
        members = valid & (place.cluster == number)
        apart = pull.apart(updates, length, members) & due & (free < clusters)
        leaves = bipartition(similarity, members) & apart
        moved = Place(jnp.where(leaves, free, now.cluster), jnp.where(leaves, number, now.parent))
        return moved, free + apart.astype(free.dtype)

    return jax.lax.fori_loop(0, clusters, split, (place, free))[0]


def overlaps(marks: jax.Array) -> jax.Array:
    """O_ij = 1 - |m_i - m_j|_1 / (2 |m_i|_1), `[C, C]`, of bools `[C, p]`; 0 for a client without any mark (FedCAC)."""
    m = marks.astype(jnp.result_type(float))
    size = jnp.sum(m, 1)
    apart = size[:, None] + size[None, :] - 2 * jnp.dot(m, m.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(size[:, None] > 0, 1 - apart / (2 * jnp.maximum(size, 1)[:, None]), 0)


def partners(overlap: jax.Array, valid: jax.Array, progress: jax.Array) -> jax.Array:
    """Whose models client i averages: itself, and those with O_ij >= mean + progress (max - mean); rows `[C, C]` sum to 1."""
    pairs = valid[:, None] & valid[None, :] & ~jnp.eye(len(valid), dtype=bool)
    mean = jnp.sum(jnp.where(pairs, overlap, 0)) / jnp.maximum(jnp.sum(pairs), 1)
    largest = jnp.max(jnp.where(pairs, overlap, -jnp.inf))
    chosen = pairs & (overlap >= mean + progress * (largest - mean)) | jnp.eye(len(valid), dtype=bool)
    return chosen / jnp.sum(chosen, 1, keepdims=True)


def cosines_of(vectors: jax.Array) -> jax.Array:
    """Of each pair, the cosine, or the mean of the cosines of rows: `[C, C]` from vectors `[C, p]`, or rows `[C, K, d]`."""
    vectors = vectors.astype(jnp.promote_types(vectors.dtype, jnp.float32))  # in 16 bits, cosines near 1 are 1
    norm = jnp.sqrt(jnp.sum(vectors**2, -1))
    unit = vectors / jnp.where(norm > 0, norm, 1)[..., None]
    if vectors.ndim == 2:
        return jnp.dot(unit, unit.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.einsum("ikd,jkd->ij", unit, unit, precision=jax.lax.Precision.HIGHEST) / vectors.shape[1]


def similar_clients(cosine: jax.Array, valid: jax.Array) -> jax.Array:
    """pFedSim's S_ij = -log(1 - min(max(0, cosine), 0.9999)) over the valid clients, S_ii = -log(1 - 0.9999), rows normalised.

    Args:
      cosine: `[C, C]`.
      valid: bool `[C]`, whose models came; the others keep their own.
    """
    most, cosine = 0.9999, cosine.astype(jnp.promote_types(cosine.dtype, jnp.float32))
    weight = jnp.where(valid[:, None] & valid[None, :], -jnp.log1p(-jnp.clip(cosine, 0, most)), 0)
    weight = jnp.where(jnp.eye(len(valid), dtype=bool), -jnp.log1p(-jnp.full((), most, weight.dtype)), weight)
    return weight / jnp.sum(weight, 1, keepdims=True)


def check_clusters(name: str, clusters: int, model: PyTree, data: FederatedData) -> PyTree:
    """A `Method.init_extra` of nothing that raises `ValueError` for more clusters than clients."""
    del model
    if clusters > data.total_clients:
        raise ValueError(f"{name}={clusters} is more than the N={data.total_clients} clients there are")
    return ()
