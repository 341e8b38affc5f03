"""kNN-Per: FedAvg; at test time each client mixes the model's prediction with that of its own nearest neighbours.

Marfoq, Neglia, Vidal, Kameni: "Personalized federated learning through local memorization", ICML 2022, arXiv 2111.09360,
equations 7 and 8.

| paper | here | shape |
|---|---|---|
| datastore | `Datastore` | `[M, d]`, `[M]` |
| k, sigma | `neighbours`, `scale` | |
| lambda_m | `mixing`, or chosen from `grid` by each client | scalar |

Distances are squared and divided by d, as in the authors' code. That code tries the grid of lambda_m on the test set. Here, when
`mixing` is not given, a client keeps a share of its samples out of training and chooses it by their likelihood, each left out of
its own vote.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.methods.fedavg import fedavg
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Rate, Scalar, Variables


def in_fixed_order(index: jax.Array, size: Scalar) -> jax.Array:
    """Positions `index` of a random order of `size` samples that is the same in all rounds and tests."""
    return permute(permutation_keys(jax.random.key(0)), index, size)


def trained_on(size: Scalar, validation_share: Rate) -> jax.Array:
    """How many of a client's samples, the first ones of the fixed order, its model is trained on."""
    # Tolerance: 0.2 * 5 must be 1 despite rounding.
    return size - jnp.floor(validation_share * size + 1e-3).astype(jnp.int32)


def first_ones(view: ClientView, count: Scalar) -> ClientView:
    """The first `count` samples of a view in the fixed order."""
    return dataclasses.replace(view, size=count, order=partial(in_fixed_order, size=view.size))


class Datastore(NamedTuple):
    """What a client predicts with.

    Attributes:
      model: FedAvg's model.
      key: features of the client's samples, `[M, d]`.
      label: `[M]`.
      real: bool `[M]`, false for padding.
      mixing: lambda, the weight of the neighbours.
    """

    model: Variables
    key: jax.Array
    label: jax.Array
    real: jax.Array
    mixing: jax.Array


def votes(
    store: Datastore, queries: jax.Array, classes: int, neighbours: int, scale: Rate, itself: jax.Array | None = None
) -> jax.Array:
    """p(c) ∝ Σ over the k nearest with label c of exp(-|z - z_k|² / (d σ)), `[B, K]`, for queries `[B, d]`.

    `itself` `[B]` is the place of each query in the datastore, which is then left out.
    """
    square = jnp.sum(queries**2, -1)[:, None] + jnp.sum(store.key**2, -1)[None, :] - 2 * queries @ store.key.T
    usable = store.real[None, :]
    if itself is not None:
        usable = usable & (jnp.arange(store.key.shape[0])[None, :] != itself[:, None])
    score = jnp.where(usable, -jnp.maximum(square, 0) / (store.key.shape[-1] * scale), -jnp.inf)
    best, index = jax.lax.top_k(score, min(neighbours, store.key.shape[0]))
    # Relative to the nearest, so that neighbours that are all far away do not underflow together.
    weight = jnp.where(jnp.isfinite(best), jnp.exp(best - jnp.maximum(best[:, :1], jnp.finfo(best.dtype).min)), 0)
    by_class = jnp.einsum("bk,bkc->bc", weight, jax.nn.one_hot(store.label[index], classes))
    total = jnp.sum(by_class, -1, keepdims=True)
    return jnp.where(total > 0, by_class / jnp.maximum(total, 1e-30), 1 / classes)


@described("FedAvg and own neighbours", "Marfoq et al. 2111.09360")
@method_builder
def knn_per(
    task: Task,
    *,
    neighbours: int = 10,
    scale: Rate = 1.0,
    mixing: Rate | None = None,
    grid: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    validation_share: Rate = 0.2,
    capacity: int = 10_000,
    lr: Rate = 0.01,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    epochs: int = 1,
    batch_size: int = 32,
    weighting: str = "samples",
) -> Method:
    """kNN-Per, for known and new clients alike.

    The datastore is made of the support set, so the evaluation should be given all of a client's training samples as its
    support view.

    Args:
      task: a classifier with features.
      neighbours: k; where a client has fewer samples, all of them.
      scale: sigma, width of the kernel.
      mixing: lambda, from 0 (the model alone) to 1 (the neighbours alone); chosen by each client when not given.
      grid: what a client chooses from.
      validation_share: share of a client's samples, always the same ones, that its model is not trained on if it chooses lambda:
        the choice is made on them when the evaluation gives the train view as support (any other was not trained on anyway). A
        client of so few samples that none is left out, and any client with 0, chooses on all of its samples.
      capacity: largest number of samples of a client that will be stored.
      lr, optimizer, epochs, batch_size, weighting: as in `fedavg`, by which the model is trained.

    Raises:
      ValueError: a task without features, an option out of range; on `personalize`, a support view larger than `capacity`.
    """
    extract, head = features.require_features(task, "knn_per")
    checks.count("neighbours", neighbours)
    checks.count("capacity", capacity)
    checks.positive("scale", scale)
    checks.between("mixing", 0 if mixing is None else mixing, 0, 1)
    checks.between("grid", grid, 0, 1, each=True)
    traced = isinstance(validation_share, jax.core.Tracer)
    if not (traced or 0 <= validation_share < 1):
        raise ValueError(f"validation_share={validation_share} must be at least 0 and below 1")
    holds_out = mixing is None and (traced or validation_share > 0)
    base = fedavg(task, lr=lr, optimizer=optimizer, epochs=epochs, batch_size=batch_size, weighting=weighting)

    def both(store: Datastore, z: jax.Array, itself: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The probabilities by the model and by the neighbours, both `[B, K]`."""
        model = jax.nn.softmax(head(store.model, z))
        return model, votes(store, z, model.shape[-1], neighbours, scale, itself)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        view = data["train"]
        part = first_ones(view, trained_on(view.size, validation_share))
        return base.client(key, received, ClientData({**data.views, "train": part}))

    def chosen_mixing(store: Datastore, counts: jax.Array) -> jax.Array:
        """The lambda of the grid with the largest likelihood of the samples that count, each left out of its own vote."""
        model, near = both(store, store.key, jnp.arange(store.key.shape[0], dtype=jnp.int32))

        def likelihood(mixing: jax.Array) -> jax.Array:
            probability = jnp.take_along_axis(mixing * near + (1 - mixing) * model, store.label[:, None], 1)[:, 0]
            return jnp.sum(jnp.where(counts, jnp.log(probability + 1e-12), 0))

        tries = jnp.asarray(grid, store.key.dtype)
        return tries[jnp.argmax(jax.vmap(likelihood)(tries))]

    def personalize(key: Key, received: Received, support: ClientView) -> Datastore:
        if support.max_size > capacity:
            raise ValueError(f"a client's support view has up to {support.max_size} samples, more than capacity={capacity}")
        model, index = base.personalize(key, received, support), jnp.arange(support.max_size, dtype=jnp.int32)
        real = index < support.size
        samples = support.take(in_fixed_order(index, support.size) if holds_out else index, real)
        # Padding repeats samples, which must not count twice.
        keys = jnp.where(real[:, None], extract(model, samples.x), 0)
        store = Datastore(model, keys, jnp.where(real, samples.y, 0), real, jnp.zeros(()))
        if mixing is not None:
            return store._replace(mixing=jnp.asarray(mixing, keys.dtype))
        first = trained_on(support.size, validation_share)
        return store._replace(mixing=chosen_mixing(store, real & ((index >= first) | (first == support.size))))

    def predict(variables: Datastore, x: Any) -> jax.Array:
        """The logarithm of the mixed probabilities, `[B, K]`."""
        model, near = both(variables, extract(variables.model, x))
        return jnp.log(variables.mixing * near + (1 - variables.mixing) * model + 1e-12)

    train = client if holds_out else base.client
    return dataclasses.replace(base, client=train, personalize=personalize, predict=predict, needs_classes=True)


REDUCES_TO = (Reduction("kNN-Per without neighbours is FedAvg", "knn_per", {"mixing": 0.0}, "fedavg", {}),)
