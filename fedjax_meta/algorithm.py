"""The contract that every algorithm keeps, and the builder that puts one together from rules for ONE client.

A builder in `algorithms/` says what a client does in a round and what it does with a support set. `federated` adds what is the
same everywhere: who takes part, which leaves are averaged and which stay with their client, the server's step, and the places
where personal leaves and client memories wait for their client's next round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import masks
from fedjax_meta.aggregate import mean
from fedjax_meta.data.federated import ClientData, ClientView, FederatedData
from fedjax_meta.engine import ClientUpdate, replicate, run_cohort, sample_cohort
from fedjax_meta.task import Key, Variables


class State(NamedTuple):
    """What the next round reads.

    Attributes:
      model: the server's model, whole. Leaves that are never averaged keep their initial values here.
      optimizer: slots of the server optimiser.
      extra: what else the server keeps and sends to its clients (control variates, centroids, averaged moments).
      personal: personal leaves of all clients, each `[N, ...]`; `None` where a leaf is shared.
      memory: what else each client keeps from round to round (a second model, its control variate), leaves `[N, ...]`.
      seen: bool `[N]`, whether a client has taken part yet; until then it has the server's leaves.
      round: int32 scalar, rounds done.
    """

    model: Any
    optimizer: Any
    extra: Any
    personal: Any
    memory: Any
    seen: jax.Array
    round: jax.Array


class RoundInfo(NamedTuple):
    """Diagnostics of one round; nothing reads them back.

    Attributes:
      ids: int32 `[C]`, who took part.
      metrics: what the clients measured, each `[C]`.
    """

    ids: jax.Array
    metrics: dict[str, jax.Array]


class Algorithm(NamedTuple):
    """A federated algorithm: four pure functions.

    Attributes:
      init: `(key, data) -> State`.
      round: `(key, state, data) -> (State, RoundInfo)`; the state keeps its structure, shapes and dtypes.
      personalize: `(key, state, support, client) -> variables`: the model that one client tests with, after whatever the
        algorithm does with its support view. `client` is the id of a client that could take part in training, or `None` for
        one never seen.
      predict: `(variables, x [B, ...]) -> logits [B, K]`.
    """

    init: Callable[[Key, FederatedData], State]
    round: Callable[[Key, State, FederatedData], tuple[State, RoundInfo]]
    personalize: Callable[[Key, State, ClientView, Any], Variables]
    predict: Callable[[Variables, Any], jax.Array]


class Received(NamedTuple):
    """What ONE client has at hand when its round, or its test, begins.

    Attributes:
      model: the server's model with the client's own personal leaves in place.
      memory: the client's memory; as `init_memory` made it, for a client that never took part.
      extra: the server's extra state.
      round: int32 scalar, rounds done before this one.
      seen: bool scalar, whether the client has taken part before; its memory is fresh otherwise.
      shared_key: the same for every client of a round, and for `collaborate`: for coins that all must see alike. In a test,
        the test's own key.
    """

    model: Any
    memory: Any
    extra: Any
    round: jax.Array
    seen: Any
    shared_key: Key


class Trained(NamedTuple):
    """What ONE client hands back.

    Attributes:
      model: the client's model after its round, whole: its personal leaves are kept, the others are averaged.
      weight: how much the client counts in that average, a scalar.
      metrics: diagnostics, a dict of scalars.
      memory: the client's memory for its next round, in the structure of `init_memory`.
      pseudo_gradient: what the server's optimiser descends along, like `model`; `received - trained` when not given. An
        algorithm whose clients send gradients gives them here.
      statistics: what else is averaged over the cohort, any pytree.
      statistics_weight: how much the client counts there: a scalar or a prefix tree of `statistics`; `weight` when not given.
      stacked: what the server must see of every client by itself, any pytree; it arrives as `[C, ...]`.
    """

    model: Any
    weight: jax.Array
    metrics: dict[str, jax.Array]
    memory: Any = ()
    pseudo_gradient: Any = None
    statistics: Any = ()
    statistics_weight: Any = None
    stacked: Any = ()


class Cohort(NamedTuple):
    """What the server holds of a cohort after a round, leaves `[C, ...]` in the order of `ids`.

    Attributes:
      ids: int32 `[C]`.
      returned: bool `[C]`, whose weight is above 0.
      personal: personal leaves after training.
      memory: memories after training.
      stacked: what the clients sent of themselves.
    """

    ids: jax.Array
    returned: jax.Array
    personal: Any
    memory: Any
    stacked: Any


class FederationOptions(TypedDict, total=False):
    """Options of `federated` that every builder takes and hands on."""

    cohort_size: int
    server_optimizer: optax.GradientTransformation
    average_personal: bool
    own_at_test: bool
    lanes: int | None
    devices: int | None


def federated(
    *,
    init: Callable[[Key], Any],
    client: Callable[[Key, Received, ClientData], Trained],
    personalize: Callable[[Key, Received, ClientView], Variables],
    predict: Callable[[Variables, Any], jax.Array],
    personal: masks.Mask,
    trainable: masks.Mask,
    new_client: Callable[[Key, State, ClientView], Variables] | None = None,
    init_memory: Callable[[Key, Any, int], Any] = lambda key, model, num_clients: (),
    init_extra: Callable[[Any, FederatedData], Any] = lambda model, data: (),
    update_extra: Callable[[State, Any, Any], Any] | None = None,
    collaborate: Callable[[Key, State, Cohort, FederatedData], tuple[Any, Any]] | None = None,
    cohort_size: int = 5,
    server_optimizer: optax.GradientTransformation | None = None,
    average_personal: bool = False,
    own_at_test: bool = True,
    lanes: int | None = None,
    devices: int | None = None,
) -> Algorithm:
    """Puts an algorithm together.

    Args:
      init: `key -> model`, the tree that the rules below work on (the task's variables, or those and more).
      client: a client's round, `(key, received, data) -> Trained`.
      personalize: `(key, received, support) -> variables`, what a client does before it predicts.
      predict: `(variables, x) -> logits`.
      personal: mask over the model, true for leaves that stay with their client.
      trainable: mask over the model, true for leaves that the server optimiser may move; others (buffers) are averaged.
      new_client: `(key, state, support) -> variables` for a client never seen; `personalize` from the server's model and a
        fresh memory when not given.
      init_memory: `(key, model, num_clients) -> memory` of one client before its first round; the key is its own.
      init_extra: `(model, data) -> extra`, the server's; of the data it may use shapes.
      update_extra: `(state, mean statistics, summed statistics weight) -> extra`, after the model has moved: `state` has the
        new model and the old `extra`. The mean is 0 where the weight is.
      collaborate: `(key, state, cohort, data) -> (personal, memory)`, both `[C, ...]`: what clients get of each other, e.g.
        through a client x client matrix (`aggregate.combine`). `state` has the new model and extra.
      cohort_size: C, clients in a round.
      server_optimizer: steps along the averaged pseudo-gradient; replacement by the average (`optax.sgd(1.0)`) when not given.
      average_personal: average personal leaves at the server too. A client that has taken part never reads that average; one
        that has not begins with it (S0's reference code). It costs upload and gives personal leaves away.
      own_at_test: a known client tests with its own personal leaves; else with the server's (as S0 tested FedPer).
      lanes, devices: how the work is laid out, see `engine.run_cohort`.

    Raises:
      ValueError: on `round`, a cohort larger than the population.
    """
    server = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    averaged = masks.everything_like(personal) if average_personal else masks.complement(personal)
    moved = masks.intersection(averaged, trainable)
    buffers = masks.intersection(averaged, masks.complement(trainable))

    def init_state(key: Key, data: FederatedData) -> State:
        model = replicate(init(key), devices)
        own = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (data.num_clients, *leaf.shape)), masks.split(model, personal)[0]
        )
        memory = jax.vmap(lambda key: init_memory(key, model, data.num_clients))(
            jax.random.split(jax.random.fold_in(key, 1), data.num_clients)
        )
        return State(
            model=model,
            optimizer=server.init(masks.split(model, moved)[0]),
            extra=replicate(init_extra(model, data), devices),
            personal=own,
            memory=replicate(memory, devices),
            seen=replicate(jnp.zeros(data.num_clients, bool), devices),
            round=replicate(jnp.zeros((), jnp.int32), devices),
        )

    def receive(state: State, seen: Any, own: Any, memory: Any, shared_key: Key) -> Received:
        theirs, shared = masks.split(state.model, personal)
        own = jax.tree.map(lambda mine, server: jnp.where(seen, mine, server), own, theirs)
        return Received(masks.merge(own, shared), memory, state.extra, state.round, seen, shared_key)

    def rule(key: Key, id_: jax.Array, kept: Any, context: tuple[State, FederatedData, Key]) -> ClientUpdate:
        state, data, shared_key = context
        start = receive(state, state.seen.at[id_].get(mode="clip"), kept[0], kept[1], shared_key)
        trained = client(key, start, data.client(id_))
        descent = trained.pseudo_gradient
        if descent is None:
            descent = jax.tree.map(jnp.subtract, start.model, trained.model)
        statistics_weight = trained.weight if trained.statistics_weight is None else trained.statistics_weight
        return ClientUpdate(
            upload=(masks.split(descent, averaged)[0], trained.statistics),
            weight=(trained.weight, statistics_weight),
            kept=(masks.split(trained.model, personal)[0], trained.memory),
            outputs=(trained.metrics, trained.stacked, trained.weight > 0),
        )

    def step_server(state: State, descent: Any, returned: jax.Array) -> tuple[Any, Any]:
        """(model, optimiser slots) after the server's step; both as they were when nobody returned."""
        moving, rest = masks.split(state.model, moved)
        updates, slots = server.update(masks.split(descent, moved)[0], state.optimizer, moving)
        held, untouched = masks.split(rest, buffers)
        held = jax.tree.map(jnp.subtract, held, masks.split(descent, buffers)[0])
        model = masks.merge(optax.apply_updates(moving, updates), masks.merge(held, untouched))
        return jax.tree.map(lambda new, old: jnp.where(returned, new, old), (model, slots), (state.model, state.optimizer))

    def one_round(key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        cohort_key, client_key, shared_key = jax.random.split(key, 3)
        ids = sample_cohort(cohort_key, data.num_clients, cohort_size)
        kept = jax.tree.map(lambda leaf: leaf[ids], (state.personal, state.memory))
        sizes = jnp.asarray(data.sizes("train" if "train" in data.views else data.views[0]))[ids]
        # What the whole population keeps stays out of what is handed to every client.
        context = (state._replace(personal=None, memory=None), data, shared_key)
        summed, kept, outputs = run_cohort(rule, client_key, ids, sizes, kept, context, lanes=lanes, devices=devices)
        metrics, stacked, returned = outputs
        descent, statistics = mean(summed)
        model, slots = step_server(state, descent, jnp.any(returned))
        state = state._replace(model=model, optimizer=slots)
        if update_extra is not None:
            state = state._replace(extra=update_extra(state, statistics, summed.weight[1]))
        if collaborate is not None:
            kept = collaborate(shared_key, state, Cohort(ids, returned, kept[0], kept[1], stacked), data)
        personal, memory = jax.tree.map(lambda leaf, new: leaf.at[ids].set(new), (state.personal, state.memory), kept)
        seen = state.seen.at[ids].set(state.seen[ids] | returned)
        return state._replace(personal=personal, memory=memory, seen=seen, round=state.round + 1), RoundInfo(ids, metrics)

    def adapt(key: Key, state: State, support: ClientView, client: Any) -> Variables:
        if client is None and new_client is not None:
            return new_client(key, state, support)
        if client is None:
            memory = init_memory(jax.random.fold_in(key, 1), state.model, state.seen.shape[0])
            stranger = Received(state.model, memory, state.extra, state.round, jnp.zeros((), bool), key)
            return personalize(key, stranger, support)
        own, memory = jax.tree.map(lambda leaf: leaf[client], (state.personal, state.memory))
        return personalize(key, receive(state, state.seen[client] & own_at_test, own, memory, key), support)

    return Algorithm(init_state, one_round, adapt, predict)
