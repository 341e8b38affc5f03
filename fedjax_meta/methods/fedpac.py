"""FedPAC: features of a shared extractor are pulled towards global class centroids; each client gets its own mixture of heads.

FedAvg averages whole models; here only the extractor is averaged. A client trains its head first and its extractor after it,
and the server gives each client the combination of all heads with the least bound on that client's test error.

Xu, Tong, Huang: "Personalized federated learning with feature alignment and classifier collaboration", ICLR 2023, arXiv
2306.11867, Algorithm 1; the combination is its equation 11 as in the authors' code.

| paper | here | shape |
|---|---|---|
| theta, phi_i | leaves outside and inside `head` | |
| c_k | `Centroids.mean` | `[K, d]` |
| lambda | `alignment` | scalar |
| v_i, h_i | `Statistics.variance`, `Statistics.profile` | scalar, `[K d]` |
| alpha_i | a row of `simplex.mixtures` | `[C]` |
| E, eta_f, eta_g | `epochs`, `lr`, `head_lr` | |

Differs from the paper: the quadratic programmes are solved by an active-set method rather than by a general convex solver, so
that the eigenvalue repair of the authors' code is not needed; weights below 0.001 are dropped as in their code, unless the client
would do better with its own head alone. A class that no client of a cohort holds keeps its last centroid. The norms of the
alignment term are divided by d, as in their code. Centroids and variances of features are of samples without augmentation;
their code takes them from the loader that augments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import Ratio, combine
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Reduction, Trained, no_extra, no_memory
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.features import Centroids
from fedjax_meta.keys import tagged
from fedjax_meta.numerics.simplex import bounds, mixtures
from fedjax_meta.task import Batch, Task, require_parts, weighted_mean
from fedjax_meta.types import Key, PyTree, Rate, Variables


class Statistics(NamedTuple):
    """What the server needs to know of a client for the mixtures.

    Attributes:
      variance: v, a scalar.
      profile: h, `[K d]`.
    """

    variance: jax.Array
    profile: jax.Array


def statistics(sums: features.ClassSums) -> Statistics:
    """v = (1/n) (sum_k p_k E|z|^2_k - sum_k p_k^2 |mu_k|^2) and h_k = p_k mu_k, of features before training."""
    size = jnp.maximum(jnp.sum(sums.number), 1)
    profile = sums.total / size
    variance = (jnp.sum(sums.square) / size - jnp.sum(profile**2)) / size
    return Statistics(variance, profile.reshape(-1))


class Mixing(NamedTuple):
    """How much of each head each client gets.

    Attributes:
      matrix: `[C, C]`, rows sum to 1.
      gap: `[C]`, how far a client's bound may lie above its minimum, relative to itself, before small weights are dropped.
    """

    matrix: jax.Array
    gap: jax.Array


def mixing(stats: Statistics, returned: jax.Array, *, least: float = 1e-3) -> Mixing:
    """How much of each head each client gets. No client is worse off than with its own head, by the bound that is minimised.

    Args:
      stats: of each client, leaves `[C, ...]`.
      returned: bool `[C]`; a client that did not return keeps its own head.
      least: weights below this are dropped.
    """
    weights, gap = mixtures(stats.profile, stats.variance, returned)
    dropped = jnp.where(weights < least, 0, weights)
    total = jnp.sum(dropped, 1)
    dropped = dropped / jnp.where(total > 0, total, 1)[:, None]
    worse = (total == 0) | ~(bounds(dropped, stats.profile, stats.variance) <= jnp.maximum(stats.variance, 0))
    return Mixing(jnp.where(worse[:, None], weights, dropped), gap)


def aligned(sums: features.ClassSums, centroids: Centroids) -> jax.Array:
    """What features are pulled towards, `[K, d]`: the global centroid, or the client's own for a class that has none yet."""
    return jnp.where(centroids.known[:, None], centroids.mean, sums.mean())


def paper_sgd(rate: Rate) -> optax.GradientTransformation:
    """SGD with momentum 0.5 and weight decay 5e-4, as in the authors' code."""
    return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.5))


def aligned_loss(task: Task, before: features.ClassSums, centroids: Centroids, weight: Rate) -> local.Loss:
    """The task's loss, with features pulled towards the centroids once there are any."""
    strength = jnp.where(jnp.any(centroids.known), weight, 0)
    target = aligned(before, centroids)

    def penalty(z: jax.Array, batch: Batch) -> jax.Array:
        return strength * weighted_mean(jnp.mean((z - target[batch.y]) ** 2, -1), batch.weight)

    return features.penalised(task, penalty, "fedpac")


def noisy(key: Key, sums: features.ClassSums, deviation: float) -> features.ClassSums:
    """With Gaussian noise on each feature mean."""
    if not deviation:
        return sums
    noise = deviation * jax.random.normal(key, sums.total.shape)
    return sums._replace(total=sums.total + sums.number[:, None] * noise)


def sent_statistics(key: Key, sums: features.ClassSums, deviation: float) -> Statistics:
    """The statistics of noisy means, with the variance of the clean ones."""
    return statistics(noisy(key, sums, deviation))._replace(variance=statistics(sums).variance)


def _mix_heads(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    del key, state, data
    matrix, gap = mixing(cohort.stacked, cohort.returned)

    def by_id(row: jax.Array) -> jax.Array:
        # An empty place of the cohort has the id -1, which would be the last client.
        columns = jnp.where(cohort.ids < 0, row.shape[1], cohort.ids)
        return jnp.zeros_like(row).at[:, columns].set(matrix.astype(row.dtype), mode="drop")

    memory = jax.tree.map(by_id, cohort.memory)
    metrics = {"own_head_share": jnp.diagonal(matrix), "mixing_gap": gap}
    return combine(matrix, cohort.personal), memory, metrics


@described("aligned features, mixed heads", "Xu et al. 2306.11867")
@method_builder
def fedpac(
    task: Task,
    *,
    lr: Rate = 0.02,
    head_lr: Rate = 0.1,
    alignment: Rate = 1.0,
    align: bool = True,
    collaborate: bool = True,
    epochs: int = 5,
    head_epochs: int = 1,
    new_client_epochs: int | None = None,
    batch_size: int = 50,
    head: masks.MaskSpec = "head",
    optimizer: Callable[[Any], optax.GradientTransformation] = paper_sgd,
    noise: float = 0.0,
    keep_mixing: bool = False,
    weighting: str = "samples",
) -> Method:
    """FedPAC.

    The paper has no rule for new clients: a client that never took part starts with the server's initial head, which was never
    trained, and trains it on its support set. A round takes `head_epochs + epochs` passes, 1 + 5 in the paper; for as many
    gradients as `fedavg(epochs=E)`, let them sum to E.

    Args:
      task: a classifier with `features` and `head`.
      lr, epochs: learning rate of the extractor, and passes over the train view for it.
      head_lr, head_epochs: the same for the head, which is trained first.
      new_client_epochs: passes of a client that never took part over its support set; `head_epochs` when not given.
      alignment: lambda >= 0, weight of the alignment term.
      align: whether features are pulled towards the centroids; there are none yet in the first round.
      collaborate: whether heads are combined; without it each client keeps its own (FedRep with alignment).
      batch_size, optimizer: as in `fedavg`; the optimiser starts afresh for head and extractor.
      weighting: as in `fedavg`; it also weighs what clients say of the centroids, which are the paper's with "samples".
      head: mask of the leaves that the head consists of.
      noise: standard deviation of Gaussian noise on each feature mean that a client sends. The variance v, a scalar, is that of
        the clean features: from noisy means it would be too small, or negative.
      keep_mixing: whether each client's memory is its row alpha_i of the last round in which it took part, `[N]`, so that
        `state.memory` is the matrix of all clients, e.g. for a heat map.

    A round reports `own_head_share`, alpha_ii, and `mixing_gap`, by how much a client's quadratic programme may lie
    above its minimum.

    Raises:
      ValueError: a task without features, one with an opaque loss unless `align=False`, an option out of range.
    """
    features.require_features(task, "fedpac")
    if align:
        require_parts(task, "fedpac")
    checks.not_negative("alignment", alignment)
    checks.not_negative("noise", noise)
    checks.count("head_epochs", head_epochs)
    if new_client_epochs is not None:
        checks.count("new_client_epochs", new_client_epochs)
    own, trainable = masks.resolve(head, task, name="head"), task.trainable(masks.variables_shape(task))
    head_leaves, body_leaves = (masks.intersection(mask, trainable) for mask in (own, masks.complement(own)))

    def train_head(
        key: Key, start: Variables, view: ClientView, epochs: int, needed: Any = True
    ) -> tuple[Variables, jax.Array]:
        passes: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, start, view, optimizer(head_lr), head_leaves, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        view, passes = data["train"], {"epochs": epochs, "batch_size": batch_size}
        before = features.class_sums(task, received.model, view)
        model, head_loss = train_head(tagged(key, "head"), received.model, view, head_epochs)
        loss = aligned_loss(task, before, received.extra, alignment) if align else task.loss
        # The round's own key, so that without alignment the batches are those of FedRep.
        model, value = local.train_epochs(key, loss, model, view, optimizer(lr), body_leaves, **passes)
        after = noisy(tagged(key, "noise after"), features.class_sums(task, model, view), noise) if align else None
        size = jnp.maximum(view.size, 1)
        return Trained(
            model,
            {"loss": value, "head_loss": head_loss},
            memory=received.memory,
            # Sums of features, which count as the client does. Each is of one sample, so that a clipped upload has room for more.
            statistics=Ratio(after.total / size, after.number / size) if after else (),
            stacked=sent_statistics(tagged(key, "noise before"), before, noise) if collaborate else (),
        )

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        passes = head_epochs if new_client_epochs is None else new_client_epochs
        return train_head(key, received.model, support, passes, ~received.seen)[0]

    def init_memory(key: Key, model: Variables, num_clients: int) -> PyTree:
        return jnp.zeros(num_clients) if keep_mixing and collaborate else no_memory(key, model, num_clients)

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(own, trainable),
        weighting=weighting,
        init_memory=init_memory,
        init_extra=partial(features.no_centroids, task) if align else no_extra,
        update_extra=features.renewed_centroids if align else None,
        collaborate=Collaboration(_mix_heads, reads="personal", gives="personal") if collaborate else None,
        needs_classes=True,
    )


REDUCES_TO = (
    Reduction(
        "FedPAC without alignment and collaboration is FedRep",
        "fedpac",
        {"align": False, "collaborate": False, "optimizer": optax.sgd, "head_lr": 0.2, "head_epochs": 2, "epochs": 2},
        "fedrep",
        {"optimizer": optax.sgd, "head_lr": 0.2, "head_epochs": 2, "body_epochs": 2},
    ),
    Reduction("an alignment of weight 0 is no alignment", "fedpac", {"alignment": 0.0}, "fedpac", {"align": False}),
)
