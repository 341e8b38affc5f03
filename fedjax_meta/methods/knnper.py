"""kNN-Per: FedAvg, and at test time each client joins the model's prediction with that of its own nearest neighbours.

Marfoq, Neglia, Vidal, Kameni: "Personalized federated learning through local memorization", ICML 2022, arXiv 2111.09360,
equations 7 and 8.

| paper | here | shape |
|---|---|---|
| datastore | `Datastore` | `[M, d]`, `[M]` |
| k, sigma | `neighbours`, `scale` | |
| lambda_m | `mixing`, or chosen from `grid` by each client | scalar |

Differs from the paper: distances are squared and divided by d, as in the authors' code. When `mixing` is not given a client
chooses it by leave-one-out likelihood on its support set; the paper has a validation set, and the code tries the grid on the
test set.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks, features
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.algorithms.fedavg import fedavg
from fedjax_meta.data.federated import ClientView
from fedjax_meta.task import Key, Task, Variables


class Datastore(NamedTuple):
    """What a client predicts with.

    Attributes:
      model: FedAvg's model.
      key: features of the client's samples, `[M, d]`.
      label: `[M]`.
      real: bool `[M]`, false for padding.
      mixing: lambda, the weight of the neighbours.
    """

    model: Any
    key: jax.Array
    label: jax.Array
    real: jax.Array
    mixing: jax.Array


def knn_per(
    task: Task,
    *,
    neighbours: int = 10,
    scale: Any = 1.0,
    mixing: Any = None,
    grid: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    capacity: int = 10_000,
    **options: Any,
) -> Algorithm:
    """kNN-Per. Known and new clients are alike: the datastore is made of the support set, so give the evaluation all of a
    client's training samples as its support view.

    Args:
      task: a classifier with features.
      neighbours: k; where a client has fewer samples, all of them.
      scale: sigma, width of the kernel; may be traced, as `mixing`.
      mixing: lambda, from 0 (the model alone) to 1 (the neighbours alone); chosen by each client when not given.
      grid: what a client chooses from.
      capacity: largest number of samples of a client that will be stored.
      **options: those of `fedavg`.

    Raises:
      ValueError: a task without features, values out of range; on `personalize`, a support view larger than `capacity`.
    """
    extract, head = features.require(task, "knn_per")
    checks.count("neighbours", neighbours)
    checks.count("capacity", capacity)
    checks.positive("scale", scale)
    for name, values in (("mixing", 0 if mixing is None else mixing), ("grid", grid)):
        checks.between(name, values, 0, 1)
    base = fedavg(task, **options)

    def near(store: Datastore, queries: jax.Array, classes: int, itself: Any = None) -> jax.Array:
        """p(c) ∝ Σ over the k nearest with label c of exp(-|z - z_k|² / (d σ)), `[B, K]`; `itself [B]` is left out."""
        square = jnp.sum(queries**2, -1)[:, None] + jnp.sum(store.key**2, -1)[None, :] - 2 * queries @ store.key.T
        usable = store.real[None, :]
        if itself is not None:
            usable = usable & (jnp.arange(store.key.shape[0])[None, :] != itself[:, None])
        score = jnp.where(usable, -jnp.maximum(square, 0) / (store.key.shape[-1] * scale), -jnp.inf)
        best, index = jax.lax.top_k(score, min(neighbours, store.key.shape[0]))
        # A softmax, so that neighbours which are all far away still have a say between them.
        weight = jnp.where(jnp.isfinite(best), jnp.exp(best - jnp.maximum(best[:, :1], jnp.finfo(best.dtype).min)), 0)
        votes = jnp.einsum("bk,bkc->bc", weight, jax.nn.one_hot(store.label[index], classes))
        total = jnp.sum(votes, -1, keepdims=True)
        return jnp.where(total > 0, votes / jnp.maximum(total, 1e-30), 1 / classes)

    def mixed(store: Datastore, z: jax.Array, mixing: Any, itself: Any = None) -> jax.Array:
        model = jax.nn.softmax(head(store.model, z))
        return mixing * near(store, z, model.shape[-1], itself) + (1 - mixing) * model

    def personalize(key: Key, state: State, support: ClientView, client: Any) -> Variables:
        if support.max_size > capacity:
            raise ValueError(f"a client's support view has up to {support.max_size} samples, more than capacity={capacity}")
        model = base.personalize(key, state, support, client)
        index = jnp.arange(support.max_size, dtype=jnp.int32)
        real = index < support.size
        samples = support.take(index, real)
        # What stands in the padding is somebody's sample, and has no place in this client's datastore.
        keys, labels = jnp.where(real[:, None], extract(model, samples.x), 0), jnp.where(real, samples.y, 0)
        store = Datastore(model, keys, labels, real, jnp.zeros(()))
        if mixing is not None:
            return store._replace(mixing=jnp.asarray(mixing, keys.dtype))

        tries = jnp.asarray(grid, keys.dtype)
        model_share, near_share = mixed(store, keys, 0), mixed(store, keys, 1, index)

        def likelihood(mixing: jax.Array) -> jax.Array:
            probability = jnp.take_along_axis(mixing * near_share + (1 - mixing) * model_share, store.label[:, None], 1)[:, 0]
            return jnp.sum(jnp.where(store.real, jnp.log(probability + 1e-12), 0))

        return store._replace(mixing=tries[jnp.argmax(jax.vmap(likelihood)(tries))])

    def predict(variables: Datastore, x: Any) -> jax.Array:
        z = extract(variables.model, x)
        return jnp.log(mixed(variables, z, variables.mixing) + 1e-12)

    return base._replace(personalize=personalize, predict=predict)
