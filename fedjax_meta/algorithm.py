"""The contract that every algorithm keeps, and the builder that puts one together from rules for ONE client.

A builder in `algorithms/` says what a client does in a round and what it does with a support set. `federated` adds what is the
same everywhere: who takes part, which leaves are averaged and which stay with their client, the server's step, and the place
where personal leaves wait for their client's next round.
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
      personal: personal leaves of all clients, each `[N, ...]`; `None` where a leaf is shared.
      seen: bool `[N]`, whether a client has taken part yet; until then it has the server's leaves.
      round: int32 scalar, rounds done.
    """

    model: Any
    optimizer: Any
    personal: Any
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


class Trained(NamedTuple):
    """What a client rule returns.

    Attributes:
      model: the client's model after its round, whole: its personal leaves are kept, the others are averaged.
      weight: how much the client counts in the average.
      metrics: diagnostics, a dict of scalars.
      pseudo_gradient: what the server's optimiser descends along, like `model`; `received - trained` when not given. An
        algorithm whose clients send gradients gives them here.
    """

    model: Any
    weight: jax.Array
    metrics: dict[str, jax.Array]
    pseudo_gradient: Any = None


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
    client: Callable[[Key, Any, ClientData], Trained],
    personalize: Callable[[Key, Any, ClientView], Variables],
    predict: Callable[[Variables, Any], jax.Array],
    personal: masks.Mask,
    trainable: masks.Mask,
    new_client: Callable[[Key, State, ClientView], Variables] | None = None,
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
      client: a client's round, `(key, model, data) -> Trained`; the model it receives has its own personal leaves in place.
      personalize: `(key, model, support) -> variables`, what a client does before it predicts.
      predict: `(variables, x) -> logits`.
      personal: mask over the model, true for leaves that stay with their client.
      trainable: mask over the model, true for leaves that the server optimiser may move; others (buffers) are averaged.
      new_client: `(key, state, support) -> variables` for a client never seen; `personalize` from the server's model when not
        given.
      cohort_size: C, clients in a round.
      server_optimizer: steps along the averaged pseudo-gradient; replacement by the average (`optax.sgd(1.0)`) when not given.
      average_personal: average personal leaves at the server too. A client that has taken part never reads that average; one
        that has not begins with it (S0's reference code). It costs upload and gives personal leaves away.
      own_at_test: a known client tests with its own personal leaves; else with the server's (as S0 tested FedPer).
      lanes, devices: how the work is laid out, see `engine.run_cohort`.

    Raises:
      ValueError: on `init` or `round`, a cohort larger than the population; masks of another structure than the model.
    """
    server = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    averaged = masks.everything_like(personal) if average_personal else masks.complement(personal)
    moved = masks.intersection(averaged, trainable)
    buffers = masks.intersection(averaged, masks.complement(trainable))

    def init_state(key: Key, data: FederatedData) -> State:
        model = replicate(init(key), devices)
        own = masks.split(model, personal)[0]
        population = data.num_clients
        return State(
            model=model,
            optimizer=server.init(masks.split(model, moved)[0]),
            personal=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (population, *leaf.shape)), own),
            seen=replicate(jnp.zeros(population, bool), devices),
            round=replicate(jnp.zeros((), jnp.int32), devices),
        )

    def received(state: State, seen: Any, own: Any) -> Any:
        """A client's model at the start of its round."""
        theirs, shared = masks.split(state.model, personal)
        return masks.merge(jax.tree.map(lambda mine, server: jnp.where(seen, mine, server), own, theirs), shared)

    def rule(key: Key, id_: jax.Array, own: Any, context: tuple[State, FederatedData]) -> ClientUpdate:
        state, data = context
        seen = state.seen.at[id_].get(mode="clip")
        start = received(state, seen, own)
        trained = client(key, start, data.client(id_))
        pseudo_gradient = trained.pseudo_gradient
        if pseudo_gradient is None:
            pseudo_gradient = jax.tree.map(jnp.subtract, start, trained.model)
        return ClientUpdate(
            upload=masks.split(pseudo_gradient, averaged)[0],
            weight=trained.weight,
            personal=masks.split(trained.model, personal)[0],
            metrics=trained.metrics,
        )

    def one_round(key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        cohort_key, client_key = jax.random.split(key)
        ids = sample_cohort(cohort_key, data.num_clients, cohort_size)
        own = jax.tree.map(lambda leaf: leaf[ids], state.personal)
        sizes = jnp.asarray(data.sizes(data.views[0]))[ids]
        # Personal leaves of the whole population stay out of what is handed to every client.
        context = (state._replace(personal=None), data)
        summed, own, metrics = run_cohort(rule, client_key, ids, sizes, own, context, lanes=lanes, devices=devices)
        step = mean(summed)
        moving, rest = masks.split(state.model, moved)
        updates, slots = server.update(masks.split(step, moved)[0], state.optimizer, moving)
        returned = jnp.all(jnp.stack(jax.tree.leaves(summed.weight)) > 0)
        stay_or = lambda new, old: jnp.where(returned, new, old)  # noqa: E731
        moving = jax.tree.map(stay_or, optax.apply_updates(moving, updates), moving)
        slots = jax.tree.map(stay_or, slots, state.optimizer)
        held, kept = masks.split(rest, buffers)
        held = jax.tree.map(jnp.subtract, held, masks.split(step, buffers)[0])
        new = State(
            model=masks.merge(moving, masks.merge(held, kept)),
            optimizer=slots,
            personal=jax.tree.map(lambda leaf, mine: leaf.at[ids].set(mine), state.personal, own),
            seen=state.seen.at[ids].set(True),
            round=state.round + 1,
        )
        return new, RoundInfo(ids, metrics)

    def adapt(key: Key, state: State, support: ClientView, client: Any) -> Variables:
        if client is None:
            return personalize(key, state.model, support) if new_client is None else new_client(key, state, support)
        if not own_at_test:
            return personalize(key, state.model, support)
        own = jax.tree.map(lambda leaf: leaf[client], state.personal)
        return personalize(key, received(state, state.seen[client], own), support)

    return Algorithm(init_state, one_round, adapt, predict)
