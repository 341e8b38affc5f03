"""FedFomo: no global model; each client takes over from the others what lowers its own validation loss.

Zhang, Sapra, Fidler, Yeung, Alvarez: "Personalized federated learning with first order model optimization", ICLR 2021, arXiv
2012.08565, equations 3 to 5.

| paper | here | shape |
|---|---|---|
| theta_i | personal leaves (all) | |
| theta_i^(t-1), before this round's training | `Own.before` | like the model |
| w_n | a row of the mixing matrix | `[C]` |
| P | `Own.preference`, kept by the server | `[N]` |
| M, epsilon | `downloads`, `exploration` | |

A client weighs the models that it downloads, and its own trained one, against its model from before the round's training; where
none is better, the round's training is undone. Differs from the paper: clients exchange models at the end of a round rather
than at the beginning of the next, so a client tests with what it took over. Exploration falls by `exploration_decay` a round,
to 0. The authors' code measures distances by the sum of absolute differences by default, here it is the Euclidean norm, as the
method is commonly given. The code's preferences grow by the weights divided by the size of their sum, which changes who is
downloaded from later, here by the weights.

`reference="trained"` is another rule: a client weighs the others' models against its own as it is after training, which then
counts 0 as soon as anybody is better, and keeps that one where nobody is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Population, Received, Trained, received_model
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.engine import map_clients
from fedjax_meta.keys import tagged
from fedjax_meta.numerics.axes import leading
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Scalar, Variables


class Own(NamedTuple):
    """A client's memory.

    Attributes:
      preference: P, for each of the N clients, `[N]`.
      before: the model that the client weighs others against; nothing with `reference="trained"`.
    """

    preference: jax.Array
    before: PyTree


def takeover(gain: jax.Array, distance: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How much a client takes over of each model: w_n = gain_n / distance_n, of which the positive ones are normalised.

    Args:
      gain: `[M]`, the validation loss of the client's reference model less that of model n.
      distance: `[M]`, between the reference model and model n.
      valid: bool `[M]`, which models count.

    Returns:
      (weights w `[M]`, shares `[M]`); where no model is better, all shares are 0.
    """
    sound = valid & (distance > 0) & jnp.isfinite(gain)
    weight = jnp.where(sound, gain / jnp.where(sound, distance, 1), 0)
    positive = jnp.maximum(weight, 0)
    total = jnp.sum(positive)
    return weight, jnp.where(total > 0, positive / jnp.where(total > 0, total, 1), 0)


DISTANCES: dict[str, Callable[[PyTree], jax.Array]] = {
    "euclidean": optax.tree.norm,
    "absolute": lambda tree: sum((jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)), jnp.zeros(())),
    "squared": lambda tree: optax.tree.norm(tree, squared=True),
}
"""How far apart two models are, from their difference; the last two are `l1` and `l2` of the authors' code."""


def compare(
    task: Task,
    key: Key,
    reference: Variables,
    others: PyTree,
    valid: jax.Array,
    view: ClientView,
    lanes: int | None,
    distance: str = "euclidean",
) -> tuple[jax.Array, jax.Array]:
    """`takeover` of one client from models, leaves `[M, ...]`, by their losses on its validation view."""

    def validation_loss(model: Variables) -> jax.Array:
        # The same key for all models, so that they are compared under the same dropout.
        return view.full().mean(lambda batch: task.loss(model, batch, jax.random.clone(key))[0], 0)

    def apart_from(model: Variables) -> jax.Array:
        return DISTANCES[distance](optax.tree.sub(model, reference))

    loss, apart = map_clients(lambda model: (validation_loss(model), apart_from(model)), others, lanes=lanes)
    return takeover(validation_loss(reference) - loss, apart, valid)


def downloaded(key: Key, preference: jax.Array, valid: jax.Array, count: int | None, epsilon: Scalar) -> jax.Array:
    """The places of the models that a client downloads, `[M]`, one coin each: at random with probability epsilon, else the
    preferred one of the rest. Those that are not valid come last.

    Args:
      key: consumed.
      preference: `[C]`.
      valid: bool `[C]`.
      count: M, all C when `None`.
      epsilon: probability of a random draw.
    """
    size = preference.shape[0]
    count = size if count is None else min(count, size)
    # Ties, such as between all preferences at first, are broken at random.
    coin_key, chance_key = jax.random.split(key)
    explores = jax.random.bernoulli(coin_key, epsilon, (count,))
    by_chance = jax.random.uniform(chance_key, (size,))
    orders = jnp.stack([jnp.lexsort((by_chance, preference, valid))[::-1], jnp.lexsort((by_chance, valid))[::-1]])

    def draw(taken: jax.Array, explores: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.where(explores, orders[1], orders[0])
        place = order[jnp.argmax(~taken[order])]
        return taken.at[place].set(True), place

    return jax.lax.scan(draw, jnp.zeros(size, bool), explores)[1]


def candidates(
    key: Key,
    place: jax.Array,
    preference: jax.Array,
    returned: jax.Array,
    downloads: int | None,
    epsilon: Scalar,
    *,
    own: bool,
) -> tuple[jax.Array, jax.Array]:
    """(places of the models that the client at `place` weighs, which of them count); with `own`, its own is among them.

    Args:
      key, preference, downloads, epsilon: as in `downloaded`.
      place: of the client in the cohort.
      returned: bool `[C]`, whose models came; if the client's own did not, none counts.
      own: whether it weighs its own model too.
    """
    count = returned.shape[0]
    places = jnp.arange(count)
    others = returned & (places != place)
    if count > 1 and (downloads is None or downloads >= count - 1):
        # Nothing to choose.
        chosen = places if own else places[:-1] + (places[:-1] >= place)
        usable = (returned if own else others)[chosen]
    else:
        chosen = downloaded(key, preference, others, downloads, epsilon)
        usable = others[chosen]
        if own:
            chosen, usable = jnp.append(chosen, place), jnp.append(usable, True)
    return chosen, usable & returned[place]


@described("takes models that help", "Zhang et al. 2012.08565")
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
    reference: str = "before",
    distance: str = "euclidean",
    train_view: str = "query",
    validation_view: str = "support",
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """FedFomo. A new client weighs all clients' models on its support set, against the initial model.

    One of the N that no round has asked yet tests with the initial model.

    Args:
      task, lr, epochs, batch_size, optimizer: as in `fedavg`.
      downloads: M, how many models a client downloads in a round; those of the whole cohort when not given. `costs.traffic`
        counts the mixture alone, because it is what the simulation hands to a client.
      exploration: epsilon, the probability that a download is drawn at random instead of by the client's preferences.
      exploration_decay: by how much that falls each round.
      reference: what a client weighs models against: its own "before" the round's training (the authors' default), which it
        keeps from then on, with its trained one always among the candidates; or its own "trained" one.
      distance: between models: "euclidean", "absolute" (the authors' code) or "squared" (that code with l2).
      train_view, validation_view: disjoint views, to train on and to weigh models on (the authors' code: 80 % and 20 %).

    Raises:
      ValueError: an option out of range; on `round`, a view that the data do not have.
    """
    checks.between("exploration", exploration, 0, 1)
    checks.between("exploration_decay", exploration_decay, 0, 1)
    checks.one_of("reference", reference, ("before", "trained"))
    checks.one_of("distance", distance, DISTANCES)
    if downloads is not None:
        checks.count("downloads", downloads)
    keeps = reference == "before"
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        view, passes = data[train_view], {"epochs": epochs, "batch_size": batch_size}
        model, loss = local.train_epochs(key, task.loss, received.model, view, optimizer(lr), trainable, **passes)
        return Trained(model, {"loss": loss}, memory=received.memory._replace(before=received.model if keeps else ()))

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree]:
        """Lets each client take over from the models that it downloads, and updates its preferences."""
        count = cohort.ids.shape[0]
        epsilon = jnp.maximum(exploration - exploration_decay * state.round, 0)

        def one(entry: tuple[jax.Array, Own]) -> tuple[PyTree, jax.Array]:
            place, memory = entry
            id_ = cohort.ids[place]
            choice, liked = tagged(key, "downloads", id_), memory.preference[cohort.ids]
            chosen, usable = candidates(choice, place, liked, cohort.returned, downloads, epsilon, own=keeps)
            start = memory.before if keeps else jax.tree.map(lambda leaf: leaf[place], cohort.personal)
            # As many as there are stand in their order.
            everyone = len(chosen) == count
            models = cohort.personal if everyone else jax.tree.map(lambda leaf: leaf[chosen], cohort.personal)
            view = data.client(cohort.positions[place])[validation_view]
            weight, share = compare(task, tagged(key, "loss", id_), start, models, usable, view, 1, distance)
            row, stays = jnp.zeros(count).at[chosen].add(share), 1 - jnp.sum(share)
            preference = memory.preference.at[cohort.ids[chosen]].add(weight)
            # Nobody is better: what a client keeps is what it compared with.
            return (row, stays), preference

        (matrix, stays), preference = map_clients(one, (jnp.arange(count), cohort.memory), lanes=cohort.lanes)
        if not keeps:
            return combine(matrix + jnp.diag(stays), cohort.personal), cohort.memory._replace(preference=preference)
        taken = combine(matrix, cohort.personal)

        def chosen_or_before(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(leading(stays > 0.5, new), old, new)

        return jax.tree.map(chosen_or_before, taken, cohort.memory.before), cohort.memory._replace(preference=preference)

    def new_client(key: Key, population: Population, support: ClientView) -> Variables:
        start, pool = population.model, population.personal
        _, share = compare(task, tagged(key, "loss"), start, pool, population.seen, support, population.lanes, distance)
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
        sends_statistics=False,
        init_memory=lambda key, model, num_clients: Own(jnp.zeros(num_clients), model if keeps else ()),
        # The preferences stay at the server, and models from before training with their clients.
        collaborate=Collaboration(mix, reads="personal", gives="personal"),
        new_client=new_client,
        new_client_reads="personal",
    )
