"""FedPAC: a shared extractor whose features are drawn to global class centroids, and for each client its own mixture of heads.

FedAvg averages whole models; here only the extractor is averaged. A client trains its head first and its extractor after it,
and the server gives each client the combination of all heads with the least bound on that client's test error.

Xu, Tong, Huang: "Personalized federated learning with feature alignment and classifier collaboration", ICLR 2023, arXiv
2306.11867, Algorithm 1; the combination is its equation 11 as the authors' code has it.

| paper | here | shape |
|---|---|---|
| theta, phi_i | leaves outside and inside `head` | |
| c_k | `Centroids.mean` | `[K, d]` |
| lambda | `alignment` | scalar |
| v_i, h_i | `Statistics.variance`, `Statistics.profile` | scalar, `[K d]` |
| alpha_i | a row of `simplex.mixtures` | `[C]` |
| E, eta_f, eta_g | `epochs`, `lr`, `head_lr` | |

Differs from the paper: the programmes are solved exactly up to a tolerance by pairwise steps rather than by a general convex
solver, so that the authors' repair of eigenvalues is not needed; weights below 0.001 are dropped as in their code. A class
that nobody of a cohort holds keeps its last centroid. The norms of the alignment term are divided by d, as in their code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import client_weight, combine
from fedjax_meta.algorithm import Algorithm, Cohort, FederationOptions, Received, State, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView, FederatedData
from fedjax_meta.simplex import mixtures
from fedjax_meta.task import Batch, Key, Task, Variables, weighted_mean


class Centroids(NamedTuple):
    """Mean feature of each class over all clients `[K, d]`, and whether it is known yet, bool `[K]`."""

    mean: jax.Array
    known: jax.Array


class Statistics(NamedTuple):
    """What the server needs to know of a client for the mixtures: v, a scalar, and h, `[K d]`."""

    variance: jax.Array
    profile: jax.Array


def statistics(sums: features.ClassSums) -> Statistics:
    """v = (1/n) (sum_k p_k E|z|^2_k - sum_k p_k^2 |mu_k|^2) and h_k = p_k mu_k, of features before training."""
    size = jnp.maximum(jnp.sum(sums.number), 1)
    profile = sums.total / size
    variance = (jnp.sum(sums.square) / size - jnp.sum(profile**2)) / size
    return Statistics(variance, profile.reshape(-1))


def mixing_matrix(stats: Statistics, returned: jax.Array, *, least: float = 1e-3) -> jax.Array:
    """Row-stochastic `[C, C]`: how much of each head each client gets; whoever did not return keeps its own."""
    weights = mixtures(stats.profile @ stats.profile.T, stats.variance, returned)
    weights = jnp.where(weights < least, 0, weights)
    return weights / jnp.sum(weights, 1, keepdims=True)


def aligned(sums: features.ClassSums, centroids: Centroids) -> jax.Array:
    """Where features are drawn to, `[K, d]`: the global centroid, or the client's own for a class that has none yet."""
    return jnp.where(centroids.known[:, None], centroids.mean, sums.mean())


def fedpac(
    task: Task,
    *,
    lr: Any = 0.02,
    head_lr: Any = 0.1,
    alignment: Any = 1.0,
    align: bool = True,
    collaborate: bool = True,
    epochs: int = 5,
    head_epochs: int = 1,
    batch_size: int = 50,
    head: masks.MaskSpec = "head",
    optimizer: Callable[[Any], optax.GradientTransformation] = lambda lr: optax.chain(
        optax.add_decayed_weights(5e-4), optax.sgd(lr, momentum=0.5)
    ),
    noise: float = 0.0,
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """FedPAC. The paper has no rule for new clients: one that never took part begins with the server's first head, which nobody
    has trained, and trains it on its support set.

    Args:
      task: a classifier with `features` and `head`.
      lr: learning rate of the extractor; may be traced, as the next two.
      head_lr: learning rate of the head.
      alignment: lambda, weight of the alignment term.
      align: whether features are drawn to the centroids; not in the first round, which knows none.
      collaborate: whether heads are combined; without it each client keeps its own (FedRep with alignment).
      epochs: passes over the train view for the extractor.
      head_epochs: passes for the head, before.
      batch_size: samples a step.
      head: mask of the leaves that the head consists of.
      optimizer: `lr -> optax transformation`, started fresh in each phase.
      noise: standard deviation of Gaussian noise on each feature mean that a client sends.
      weighting: how clients count in the mean of the extractors: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a task without features, a negative weight or noise, a rate or count out of range.
    """
    features.require(task, "fedpac")
    checks.positive("lr", lr)
    checks.positive("head_lr", head_lr)
    checks.not_negative("alignment", alignment)
    checks.not_negative("noise", noise)
    for name, value in (("epochs", epochs), ("head_epochs", head_epochs), ("batch_size", batch_size)):
        checks.count(name, value)
    own = masks.resolve(head, task, name="head")
    trainable = task.trainable(masks.variables_shape(task))
    head_leaves, body_leaves = (masks.intersection(mask, trainable) for mask in (own, masks.complement(own)))

    def train_head(key: Key, start: Variables, view: ClientView, needed: Any = True) -> tuple[Variables, jax.Array]:
        passes = {"epochs": head_epochs, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, start, view, optimizer(head_lr), head_leaves, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        head_key, body_key, noise_key = jax.random.split(key, 3)
        view, centroids = data["train"], received.extra
        before = features.class_sums(task, received.model, view)
        model, head_loss = train_head(head_key, received.model, view)
        strength = jnp.where(jnp.any(centroids.known), alignment, 0) if align else 0
        target = aligned(before, centroids)

        def penalty(z: jax.Array, batch: Batch) -> jax.Array:
            return strength * weighted_mean(jnp.mean((z - target[batch.y]) ** 2, -1), batch.weight)

        passes = {"epochs": epochs, "batch_size": batch_size}
        loss_function = features.penalised(task, penalty) if align else task.loss
        model, loss = local.train_epochs(body_key, loss_function, model, view, optimizer(lr), body_leaves, **passes)
        after = features.class_sums(task, model, view) if align else before
        if noise:
            before, after = (
                sums._replace(total=sums.total + noise * sums.number[:, None] * jax.random.normal(key, sums.total.shape))
                for key, sums in zip(jax.random.split(noise_key), (before, after), strict=True)
            )
        weight = client_weight(weighting, data)
        return Trained(
            model,
            weight,
            {"loss": loss, "head_loss": head_loss},
            statistics=(after.total, after.number) if align else (),
            statistics_weight=jnp.where(weight > 0, 1.0, 0.0),
            stacked=statistics(before) if collaborate else (),
        )

    def init_extra(model: Any, data: FederatedData) -> Centroids:
        classes, width = features.shape_in(task, model, data)
        return Centroids(jnp.zeros((classes, width)), jnp.zeros(classes, bool))

    def update_centroids(state: State, mean: Any, *_: Any) -> Centroids:
        if not align:
            return state.extra
        total, count = mean
        held = count > 0
        fresh = total / jnp.where(held, count, 1)[:, None]
        return Centroids(jnp.where(held[:, None], fresh, state.extra.mean), state.extra.known | held)

    def exchange(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[Any, Any]:
        del key, state, data
        return combine(mixing_matrix(cohort.stacked, cohort.returned), cohort.personal), cohort.memory

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        return train_head(key, received.model, support, ~received.seen)[0]

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=own,
        trainable=trainable,
        init_extra=init_extra,
        update_extra=update_centroids,
        collaborate=exchange if collaborate else None,
        **options,
    )
