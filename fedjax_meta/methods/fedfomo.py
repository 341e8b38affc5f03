"""FedFomo: no global model; each client takes over from the others what lowers its own validation loss.

Zhang, Sapra, Fidler, Yeung, Alvarez: "Personalized federated learning with first order model optimization", ICLR 2021, arXiv
2012.08565, equations 3 to 5.

| paper | here | shape |
|---|---|---|
| theta_i | personal leaves (all) | |
| w_n | a row of the mixing matrix | `[C]` |
| P | a client's memory, kept by the server | `[N]` |
| M, epsilon | `downloads`, `exploration` | |

Differs from the paper: clients exchange models at the end of a round rather than at the beginning of the next, so a client
tests with what it took over. A client compares with its own model as it is after training. Exploration falls by
`exploration_decay` a round, to 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.algorithm import State
from fedjax_meta.builders import method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Population, Received, Trained, received_model
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.engine import map_clients
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Scalar, Variables


def takeover(gain: jax.Array, distance: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How much a client takes over of each model: w_n = gain_n / distance_n, of which the positive ones are normalised.

    Args:
      gain: `[M]`, the client's own validation loss less that of model n.
      distance: `[M]`, between the client's own model and model n.
      valid: bool `[M]`, which models count.

    Returns:
      (weights w `[M]`, shares `[M]`); where no model is better, all shares are 0.
    """
    sound = valid & (distance > 0) & jnp.isfinite(gain)
    weight = jnp.where(sound, gain / jnp.where(sound, distance, 1), 0)
    positive = jnp.maximum(weight, 0)
    total = jnp.sum(positive)
    return weight, jnp.where(total > 0, positive / jnp.where(total > 0, total, 1), 0)


def compare(
    task: Task, key: Key, own: Variables, others: PyTree, valid: jax.Array, view: ClientView, lanes: int | None
) -> tuple[jax.Array, jax.Array]:
    """`takeover` of one client from other models, leaves `[M, ...]`, by their losses on its validation view."""

    def validation_loss(model: Variables) -> jax.Array:
        # The same key for all models, so that they are compared under the same dropout.
        return view.full().mean(lambda batch: task.loss(model, batch, jax.random.clone(key))[0], 0)

    def distance(model: Variables) -> jax.Array:
        return optax.tree.norm(optax.tree.sub(model, own))

    loss, apart = map_clients(lambda model: (validation_loss(model), distance(model)), others, lanes=lanes)
    return takeover(validation_loss(own) - loss, apart, valid)


@method_builder
def fedfomo(
    task: Task,
    *,
    lr: Rate = 0.1,
    epochs: int = 5,
    batch_size: int = 50,
    downloads: int | None = None,
    exploration: Scalar = 0.3,
    exploration_decay: Scalar = 0.05,
    train_view: str = "query",
    validation_view: str = "support",
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """FedFomo. A client that never took part weighs all clients' models on its support set, against the initial model.

    Args:
      task, lr, epochs, batch_size, optimizer: as in `fedavg`.
      downloads: M, how many models a client downloads in a round; those of the whole cohort when not given.
      exploration: epsilon, the probability that a client draws its M models at random instead of by its preferences.
      exploration_decay: by how much that falls each round.
      train_view, validation_view: disjoint views, to train on and to weigh models on (the paper: 80 % and 20 %).

    Raises:
      ValueError: an option out of range; on `round`, a view that the data do not have.
    """
    checks.between("exploration", exploration, 0, 1)
    checks.between("exploration_decay", exploration_decay, 0, 1)
    if downloads is not None:
        checks.count("downloads", downloads)
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        view, passes = data[train_view], {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, received.model, view, optimizer(lr), trainable, **passes)
        return Trained(model, {"loss": loss}, memory=received.memory)

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree]:
        """Lets each client take over from the models that it downloads, and updates its preferences."""
        count = cohort.ids.shape[0]
        epsilon = jnp.maximum(exploration - exploration_decay * state.round, 0)

        def one(entry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            place, preference = entry
            id_ = cohort.ids[place]
            explores = jax.random.bernoulli(tagged(key, "explore", id_), epsilon)
            # Ties, such as between all preferences at first, are broken at random.
            chance = jax.random.uniform(tagged(key, "ties", id_), (count,))
            valid = cohort.returned & (jnp.arange(count) != place)
            chosen = jnp.lexsort((chance, jnp.where(explores, 0, preference[cohort.ids]), valid))[::-1][:downloads]
            own = jax.tree.map(lambda leaf: leaf[place], cohort.personal)
            others = jax.tree.map(lambda leaf: leaf[chosen], cohort.personal)
            view = data.client(cohort.places[place])[validation_view]
            usable = valid[chosen] & cohort.returned[place]
            weight, share = compare(task, tagged(key, "loss", id_), own, others, usable, view, lanes=1)
            row = jnp.zeros(count).at[chosen].set(share)
            return row.at[place].add(1 - jnp.sum(share)), preference.at[cohort.ids[chosen]].add(weight)

        matrix, preference = map_clients(one, (jnp.arange(count), cohort.memory), lanes=cohort.lanes)
        return combine(matrix, cohort.personal), preference

    def new_client(key: Key, population: Population, support: ClientView) -> Variables:
        start, pool = population.model, population.personal
        _, share = compare(task, tagged(key, "loss"), start, pool, population.seen, support, population.lanes)
        keep = 1 - jnp.sum(share)
        return jax.tree.map(lambda own, models: keep * own + jnp.tensordot(share, models, 1), start, pool)

    return Method(
        init=task.init,
        client=client,
        personalize=received_model,
        predict=task.predict,
        roles=masks.roles(masks.everything(task), trainable),
        # Nothing is averaged, so that a weight says only whether a client takes part.
        weighting="uniform",
        init_memory=lambda key, model, num_clients: jnp.zeros(num_clients),
        # The preferences stay at the server.
        collaborate=Collaboration(mix, reads="personal", gives="personal"),
        new_client=new_client,
        new_client_reads="personal",
    )
