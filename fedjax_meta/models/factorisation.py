"""Matrix factorisation: ratings of items, with the vector of a user on her own device."""

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.models.functional import Criterion, from_functions
from fedjax_meta.task import Task
from fedjax_meta.tasks import squared_error
from fedjax_meta.types import Key, PyTree, Variables


def matrix_factorisation(items: int, *, width: int = 16, mean: float = 0.0, loss: Criterion | None = None) -> Task:
    """Ratings as mean + bias of the user + bias of the item + their vectors' product (Koren, Bell and Volinsky 2009).

    A client is a user, so that the model has the vector of ONE user: the layer `user`, the head. `fm.fedper(task)` keeps it with
    its client and shares the items (after federated collaborative filtering, Ammad-ud-din et al. 2019, arXiv 1901.09888);
    `fm.fedrep` and `fm.fedmeta_per` do the same with other local training.

    Inputs are a dict with items `[B]` in [0, items), predictions `[B]`. Weight decay is the optimiser's, e.g. `optax.adamw`.

    Args:
      items: I, the number of items.
      width: d, the size of the vectors.
      mean: what an unknown user gives an unknown item, e.g. the mean of the training ratings.
      loss: `(predictions, batch) -> scalar`; the mean squared error by default.

    Raises:
      ValueError: sizes below 1, a mean that is not finite.

    Example:
      >>> task = matrix_factorisation(5, width=2, mean=3.5)
      >>> task.predict(task.init(jax.random.key(0)), {"item": jnp.array([0, 4])}).shape
      (2,)
    """
    checks.count("items", items)
    checks.count("width", width)
    checks.finite("mean", mean)
    criterion = squared_error() if loss is None else loss

    def init(key: Key) -> Variables:
        of_items, of_user = jax.random.split(key)
        return {
            "items": {"vectors": 0.1 * jax.random.normal(of_items, (items, width)), "bias": jnp.zeros(items)},
            "user": {"vector": 0.1 * jax.random.normal(of_user, (width,)), "bias": jnp.zeros(())},
        }

    def features(variables: Variables, x: PyTree) -> jax.Array:
        item, of = x["item"], variables["items"]
        known = (item >= 0) & (item < items)  # else the rating is NaN, and not that of another item
        return jnp.where(known[..., None], jnp.concatenate([of["vectors"][item], of["bias"][item][..., None]], -1), jnp.nan)

    def head(variables: Variables, z: jax.Array) -> jax.Array:
        user = variables["user"]
        return mean + user["bias"] + z[..., -1] + z[..., :-1] @ user["vector"]

    return from_functions(
        init,
        lambda variables, x, *, train, key, weight: (head(variables, features(variables, x)), variables),
        {"item": jax.ShapeDtypeStruct((), jnp.int32)},
        features=features,
        head=head,
        layers=("items", "user"),
        loss=criterion,
        metrics=("mae", "rmse", "r2"),
    )
