"""CFL: FedAvg in clusters, the first of which has all clients; a cluster whose clients pull apart is split in two.

Sattler, Mueller, Samek: "Clustered federated learning: model-agnostic distributed multi-task optimization under privacy
constraints", 2019, arXiv 1910.01991; the steps are those of the authors' code, felisat/clustered-federated-learning,
fl_devices.py 62-151 and clustered_federated_learning.ipynb 221-266.

| paper | here | shape |
|---|---|---|
| theta_c | a stacked model | leaves `[M, ...]` |
| Delta theta_i | `Trained.stacked`, the update of all parameters | `[p]` |
| eps_1, eps_2 | `mean_norm`, `client_norm` of `Pull` | scalars |
| alpha_ij, c_1 and c_2 | cosines of updates and their `bipartition`, in `split_all` | `[C, C]`, bool `[C]` |

Differs from the code: at most `clusters` of them, a split acts from the next round on (there in its own round), the first part
keeps the number, and a member that is not in the cohort when its cluster splits stays with that part; optimisers start afresh in
each round (there they go on, with momentum 0.9 and each time 0.99 of the rate before). Each cluster has a server optimiser of its
own, whose state a new cluster inherits with the model of its parent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_meta import checks, features, local, masks
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.clusters import check_clusters, losses, shares
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


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


@described("clusters that split", "Sattler et al. 1910.01991")
@method_builder
def cfl(
    task: Task,
    *,
    clusters: int = 4,
    lr: Rate = 0.1,
    mean_norm: Rate = 0.4,
    client_norm: Rate = 1.6,
    least_size: int = 3,
    first_split: int = 20,
    epochs: int = 1,
    batch_size: int = 128,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """CFL. A known client tests with the model of its cluster; a new one, and a late joiner, takes the one of the least loss.

    Args:
      task: a task without buffers.
      clusters: M, the most clusters there may be; no more than clients.
      mean_norm, client_norm: a cluster is split when the mean update of its members is below the first, and the largest of a
        member above the second.
      least_size: members in the cohort that a cluster needs to be split, at least 3.
      first_split: finished rounds before which nothing is split.
      lr, epochs, batch_size, optimizer: as in `fedavg`; clients count equally.

    Raises:
      ValueError: a task with buffers, an option out of range; on `init`, more clusters than clients.
    """
    features.require_no_buffers(task, "cfl")
    checks.count("clusters", clusters)
    checks.not_negative("mean_norm", mean_norm)
    checks.not_negative("client_norm", client_norm)
    checks.count("least_size", least_size, least=3)
    checks.count("first_split", first_split, least=0)
    everything = masks.everything(task)

    def place(key: Key, received: Received, view: ClientView) -> tuple[jax.Array, jax.Array, Variables]:
        """(cluster, the cluster that it came from, the model); newcomers choose among the clusters that were trained."""
        each = losses(task, tagged(key, "cluster"), received.model, view, ~received.seen)
        nearest = jnp.argmin(jnp.where(received.extra, each, jnp.inf)).astype(jnp.int32)
        cluster = jnp.where(received.seen, received.memory.cluster, nearest)
        parent = jnp.where(received.seen, received.memory.parent, nearest)
        return cluster, parent, jax.tree.map(lambda leaf: leaf[cluster], received.model)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        cluster, parent, start = place(key, received, data["train"])
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, start, data["train"], optimizer(lr), everything, **passes)
        models = jax.tree.map(lambda all_, one: all_.at[cluster].set(one), received.model, model)
        update = ravel_pytree(optax.tree.sub(model, start))[0]
        membership = jax.nn.one_hot(cluster, clusters)
        metrics = {"loss": loss, **shares(membership)}
        return Trained(models, metrics, memory=Place(cluster, parent), statistics=membership, stacked=update)

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree]:
        del key, data
        now = cohort.memory
        free = 1 + jnp.maximum(jnp.max(jnp.where(state.seen, state.memory.cluster, 0)), jnp.max(now.cluster))
        due, pull = state.round >= first_split, Pull(mean_norm, client_norm, least_size)
        return cohort.personal, split_all(now, cohort.stacked, cohort.returned, free, due, pull, clusters)

    def inherit(before: State, after: State) -> jax.Array:
        """A cluster that had no client before the round is its parent from now on."""
        numbers = jnp.arange(clusters)

        def has(state: State) -> jax.Array:
            return state.seen[:, None] & (state.memory.cluster[:, None] == numbers)

        parent = jnp.max(jnp.where(has(after), after.memory.parent[:, None], 0), 0)
        return jnp.where(jnp.any(has(after), 0) & ~jnp.any(has(before), 0), parent, numbers)

    def init_extra(model: PyTree, data: FederatedData) -> jax.Array:
        check_clusters("clusters", clusters, model, data)
        return jnp.arange(clusters) == 0

    return Method(
        init=lambda key: jax.tree.map(lambda leaf: jnp.stack([leaf] * clusters), task.init(key)),
        client=client,
        personalize=lambda key, received, support: place(key, received, support)[2],
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), everything),
        weighting="uniform",
        init_memory=lambda key, model, num_clients: Place(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)),
        init_extra=init_extra,
        update_extra=lambda state, membership, weight, num_clients: state.extra | (membership > 0),
        # The server knows the clusters, and sends each client the model of its own.
        sends_statistics=False,
        travels=lambda models: (jax.tree.map(lambda leaf: leaf[0], models), ()),
        # A mean over all clients, by the share of those of a cluster, is the mean over these.
        divides_by_statistics=True,
        separate_models=True,
        inherit=inherit,
        collaborate=Collaboration(mix, reads="memory", gives="memory"),
        whole_population=True,
    )


REDUCES_TO = (Reduction("CFL of one cluster is FedAvg", "cfl", {"clusters": 1}, "fedavg", {"weighting": "uniform"}),)
