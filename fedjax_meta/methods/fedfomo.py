"""FedFomo: no global model; each client takes over from the others what lowers its own validation loss.

Zhang, Sapra, Fidler, Yeung, Alvarez: "Personalized federated learning with first order model optimization", ICLR 2021, arXiv
2012.08565, equations 3 to 5.

| paper | here | shape |
|---|---|---|
| theta_i | personal leaves (all) | |
| w_n | a row of the mixing matrix | `[C]` |
| P | `preference`, a client's memory | `[N]` |
| M, epsilon | `downloads`, `exploration` | |

Differs from the paper: clients exchange models at the end of a round rather than at the beginning of the next, so a client
tests with what it took over. A client compares with its own model as it is after training. Exploration falls by
`exploration_decay` a round, to 0.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.algorithm import Algorithm, Cohort, FederationOptions, Received, State, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView, FederatedData
from fedjax_meta.engine import map_lanes
from fedjax_meta.task import Key, Task, Variables


def takeover(gain: jax.Array, distance: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weights, their share of what is taken over): w_n = gain_n / distance_n, and the positive ones normalised; all `[C]`.

    `gain` is the client's own validation loss less that of model n. Where nobody is better all shares are 0.
    """
    sound = valid & (distance > 0) & jnp.isfinite(gain)
    weight = jnp.where(sound, gain / jnp.where(sound, distance, 1), 0)
    positive = jnp.maximum(weight, 0)
    total = jnp.sum(positive)
    return weight, jnp.where(total > 0, positive / jnp.where(total > 0, total, 1), 0)


def fedfomo(
    task: Task,
    *,
    lr: Any = 0.1,
    epochs: int = 5,
    batch_size: int = 50,
    downloads: int | None = None,
    exploration: float = 0.3,
    exploration_decay: float = 0.05,
    train_view: str = "query",
    validation_view: str = "support",
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """FedFomo. A client never seen weighs all clients' models on its support set, against the initial model.

    Args:
      task: what is learned.
      lr: learning rate; may be traced.
      epochs: passes over the train view.
      batch_size: samples a step.
      downloads: M, models that a client gets to see in a round; those of the whole cohort when not given.
      exploration: epsilon, how likely a client draws its M models at random instead of by its preferences.
      exploration_decay: by how much that falls each round.
      train_view, validation_view: disjoint views, to train on and to weigh models on (the paper: 80 % and 20 %).
      optimizer: `lr -> optax transformation`, started fresh in every round.
      **options: those of `federated`.

    Raises:
      ValueError: a rate or count out of range; on `round`, a view that the data do not have.
    """
    checks.positive("lr", lr)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.between("exploration", exploration, 0, 1)
    checks.between("exploration_decay", exploration_decay, 0, 1)
    if downloads is not None:
        checks.count("downloads", downloads)
    trainable = task.trainable(masks.variables_shape(task))

    def validation_loss(model: Variables, view: ClientView, key: Key) -> jax.Array:
        return view.full().mean(lambda batch: task.loss(model, batch, key)[0], 0)

    def compare(own: Any, others: Any, valid: jax.Array, view: ClientView, key: Key) -> tuple[jax.Array, jax.Array]:
        """`takeover` of one client from models `[M, ...]`."""
        before = validation_loss(own, view, key)
        loss = jax.lax.map(lambda model: validation_loss(model, view, key), others)
        distance = jax.lax.map(lambda model: optax.tree.norm(optax.tree.sub(model, own)), others)
        return takeover(before - loss, distance, valid)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        passes = {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, received.model, data[train_view], optimizer(lr), trainable, **passes)
        size = jnp.asarray(data[validation_view].size, jnp.result_type(float))
        return Trained(model, size, {"loss": loss}, memory=received.memory)

    def exchange(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[Any, Any]:
        count = cohort.ids.shape[0]
        seen = min(downloads or count, count)
        epsilon = jnp.maximum(exploration - exploration_decay * state.round, 0)

        def one(entry: Any) -> tuple[jax.Array, jax.Array]:
            place, preference = entry
            coin_key, draw_key, loss_key = jax.random.split(jax.random.fold_in(key, cohort.ids[place]), 3)
            # Ties, as of all preferences at first, are broken at random.
            chance = jax.random.uniform(draw_key, (count,))
            rank = jnp.where(jax.random.bernoulli(coin_key, epsilon), 0, preference[cohort.ids])
            valid = cohort.returned & (jnp.arange(count) != place)
            chosen = jnp.lexsort((chance, rank, valid))[::-1][:seen]
            own = jax.tree.map(lambda leaf: leaf[place], cohort.personal)
            view = data.client(cohort.places[place])[validation_view]
            others = jax.tree.map(lambda leaf: leaf[chosen], cohort.personal)
            weight, share = compare(own, others, valid[chosen] & cohort.returned[place], view, loss_key)
            row = jnp.zeros(count).at[chosen].set(share)
            return row.at[place].add(1 - jnp.sum(share)), preference.at[cohort.ids[chosen]].add(weight)

        matrix, preference = map_lanes(one, (jnp.arange(count), cohort.memory), lanes=options.get("lanes"))
        return combine(matrix, cohort.personal), preference

    def new_client(key: Key, state: State, support: ClientView) -> Variables:
        _, share = compare(state.model, state.personal, state.seen, support, key)
        keep = 1 - jnp.sum(share)
        return jax.tree.map(lambda own, pool: keep * own + jnp.tensordot(share, pool, 1), state.model, state.personal)

    return federated(
        init=task.init,
        client=client,
        personalize=lambda key, received, support: received.model,
        predict=task.predict,
        personal=masks.everything(task),
        trainable=trainable,
        new_client=new_client,
        init_memory=lambda key, model, num_clients: jnp.zeros(num_clients),
        collaborate=exchange,
        **options,
    )
