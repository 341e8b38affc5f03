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

from fedjax_meta import checks, masks
from fedjax_meta.aggregate import mean, quantized
from fedjax_meta.data.federated import ClientData, ClientView, FederatedData
from fedjax_meta.engine import ClientUpdate, populate, replicate, run_cohort, sample_cohort
from fedjax_meta.participation import Participation
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
      ids: int32 `[C]`, who was asked.
      metrics: what the clients measured, each `[C]`, or a scalar for the cohort as a whole.
      returned: bool `[C]`, whose results reached the server; all when `None`.
    """

    ids: jax.Array
    metrics: dict[str, jax.Array]
    returned: jax.Array | None = None


class Exchange(NamedTuple):
    """What travels between the server and ONE client of a cohort in a round: trees of `jax.ShapeDtypeStruct`.

    Leaves that no client ever changes (a head that stays at its initial values) need not travel and are left out.

    Attributes:
      down: the shared leaves of the model, the server's extra state, and what `collaborate` sends back.
      averaged: what the client sends to be averaged.
      apart: what it sends that the server sees by itself: `stacked`, and what `collaborate` reads of it.
      upload_bits: bits of each number of `averaged`, where uploads are quantised.
    """

    down: Any
    averaged: Any
    apart: Any
    upload_bits: int | None


class Algorithm(NamedTuple):
    """A federated algorithm: four pure functions, and what it costs.

    Attributes:
      init: `(key, data) -> State`.
      round: `(key, state, data) -> (State, RoundInfo)`; the state keeps its structure, shapes and dtypes.
      personalize: `(key, state, support, client) -> variables`: the model that one client tests with, after whatever the
        algorithm does with its support view. `client` is the id of a client that could take part in training, or `None` for
        one never seen.
      predict: `(variables, x [B, ...]) -> logits [B, K]`.
      exchange: `data -> Exchange`, what a client sends and receives in a round; nothing is computed. See `costs.traffic`.
    """

    init: Callable[[Key, FederatedData], State]
    round: Callable[[Key, State, FederatedData], tuple[State, RoundInfo]]
    personalize: Callable[[Key, State, ClientView, Any], Variables]
    predict: Callable[[Variables, Any], jax.Array]
    exchange: Callable[[FederatedData], Exchange] | None = None


class Received(NamedTuple):
    """What ONE client has at hand when its round, or its test, begins.

    Attributes:
      model: the server's model with the client's own personal leaves in place.
      memory: the client's memory; as `init_memory` made it, for a client that never took part.
      extra: the server's extra state.
      round: int32 scalar, rounds done before this one.
    """

    model: Any
    memory: Any
    extra: Any
    round: jax.Array


class Trained(NamedTuple):
    """What ONE client hands back.

    Attributes:
      model: the client's model after its round, whole: its personal leaves are kept, the others are averaged.
      weight: how much the client counts in that average, a scalar.
      metrics: diagnostics, a dict of scalars.
      memory: the client's memory for its next round, in the structure of `init_memory`.
      pseudo_gradient: what the server's optimiser descends along, like `model`; the server's model minus the trained one when
        not given. An algorithm whose clients send gradients gives them here. Leaves that the optimiser may not move are not
        read: the values of `model` are averaged there.
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
    participation: Callable[[Key, jax.Array], Participation] | None
    upload_bits: int | None
    lanes: int | None
    devices: int | None
    precision: str


def federated(
    *,
    init: Callable[[Key], Any],
    client: Callable[[Key, Received, ClientData], Trained],
    personalize: Callable[[Key, Received, ClientView], Variables],
    predict: Callable[[Variables, Any], jax.Array],
    personal: masks.Mask,
    trainable: masks.Mask,
    new_client: Callable[[Key, State, ClientView], Variables] | None = None,
    init_memory: Callable[[Any], Any] = lambda model: (),
    init_extra: Callable[[Any], Any] = lambda model: (),
    update_extra: Callable[[State, Any, Any], Any] | None = None,
    collaborate: Callable[[Key, State, Cohort], tuple[Any, Any]] | None = None,
    cohort_size: int = 5,
    server_optimizer: optax.GradientTransformation | None = None,
    average_personal: bool = False,
    own_at_test: bool = True,
    participation: Callable[[Key, jax.Array], Participation] | None = None,
    upload_bits: int | None = None,
    lanes: int | None = None,
    devices: int | None = None,
    precision: str = "float32",
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
      init_memory: `model -> memory` of one client before its first round.
      init_extra: `model -> extra`, the server's.
      update_extra: `(state, mean statistics, summed statistics weight) -> extra`, after the model has moved: `state` has the
        new model and the old `extra`. The mean is 0 where the weight is.
      collaborate: `(key, state, cohort) -> (personal, memory)`, both `[C, ...]`: what clients get of each other, e.g. through
        a client x client matrix (`aggregate.combine`). `state` has the new model and extra.
      cohort_size: C, clients in a round.
      server_optimizer: steps along the averaged pseudo-gradient; replacement by the average (`optax.sgd(1.0)`) when not given.
      average_personal: average personal leaves at the server too. A client that has taken part never reads that average; one
        that has not begins with it (S0's reference code). It costs upload and gives personal leaves away.
      own_at_test: a known client tests with its own personal leaves; else with the server's (as S0 tested FedPer).
      participation: `(key, client id) -> Participation`, what becomes of a client that was asked; all do all their work and
        return when not given. A round from which nobody returns leaves everything but its number as it was, apart from what
        late clients keep for themselves. See `participation`.
      upload_bits: what is averaged is sent with this many bits a number (see `aggregate.quantized`).
      lanes, devices, precision: how the work is laid out and how exact its products are, see `engine.run_cohort`.

    Raises:
      ValueError: a count below 1; on `init`, clients that keep more bytes than are free; on `round`, a cohort larger than the
        population.
    """
    checks.count("cohort_size", cohort_size)
    for name, value in (("lanes", lanes), ("devices", devices), ("upload_bits", upload_bits)):
        if value is not None:
            checks.count(name, value)
    layout = {"lanes": lanes, "devices": devices, "precision": precision}
    server = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    averaged = masks.everything_like(personal) if average_personal else masks.complement(personal)
    moved = masks.intersection(averaged, trainable)
    buffers = masks.intersection(averaged, masks.complement(trainable))

    def init_state(key: Key, data: FederatedData) -> State:
        model = replicate(init(key), devices)
        own, memory = populate((masks.split(model, personal)[0], init_memory(model)), data.num_clients, devices)
        return State(
            model=model,
            optimizer=server.init(masks.split(model, moved)[0]),
            extra=replicate(init_extra(model), devices),
            personal=own,
            memory=memory,
            seen=replicate(jnp.zeros(data.num_clients, bool), devices),
            round=replicate(jnp.zeros((), jnp.int32), devices),
        )

    def receive(state: State, seen: Any, own: Any, memory: Any) -> Received:
        theirs, shared = masks.split(state.model, personal)
        own = jax.tree.map(lambda mine, server: jnp.where(seen, mine, server), own, theirs)
        return Received(masks.merge(own, shared), memory, state.extra, state.round)

    def rule(key: Key, id_: jax.Array, kept: Any, context: tuple[State, FederatedData]) -> ClientUpdate:
        state, data = context
        start = receive(state, state.seen.at[id_].get(mode="clip"), *kept)
        mine, did, reached = data.client(id_), True, True
        if participation is not None:
            participation_key, key = jax.random.split(key)
            part = participation(participation_key, id_)
            mine, did = mine.working(part.work), jnp.logical_not(part.crashed) & (part.work > 0)
            reached = did & part.returned
        if upload_bits is not None:
            quantize_key, key = jax.random.split(key)
        trained = client(key, start, mine)
        descent = trained.pseudo_gradient
        if descent is None:
            # From the server's own leaves, also where the client began with its own: what is averaged is where they ended.
            descent = jax.tree.map(jnp.subtract, state.model, trained.model)
        upload = (masks.merge(masks.split(descent, moved)[0], masks.split(trained.model, buffers)[0]), trained.statistics)
        weight = (trained.weight, trained.weight if trained.statistics_weight is None else trained.statistics_weight)
        after = (masks.split(trained.model, personal)[0], trained.memory)
        outputs = (trained.metrics, trained.stacked, (trained.weight > 0) & did, reached)
        return ClientUpdate(
            upload=upload if upload_bits is None else quantized(quantize_key, upload, upload_bits),
            weight=jax.tree.map(lambda w: jnp.where(reached, w, 0), weight),
            kept=jax.tree.map(lambda new, old: jnp.where(did, new, old), after, kept),
            outputs=jax.tree.map(jnp.asarray, outputs),
        )

    def step_server(state: State, averages: Any, any_weight: jax.Array) -> tuple[Any, Any]:
        """(model, optimiser slots) after the server's step; both as they were when no weight came in."""
        moving, rest = masks.split(state.model, moved)
        descent, held = masks.split(averages, moved)
        updates, slots = server.update(descent, state.optimizer, moving)
        model = masks.merge(optax.apply_updates(moving, updates), masks.merge(held, masks.split(rest, buffers)[1]))
        return jax.tree.map(lambda new, old: jnp.where(any_weight, new, old), (model, slots), (state.model, state.optimizer))

    def one_round(key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        cohort_key, client_key, collaborate_key = jax.random.split(key, 3)
        ids = sample_cohort(cohort_key, data.num_clients, cohort_size)
        kept = jax.tree.map(lambda leaf: leaf[ids], (state.personal, state.memory))
        sizes = jnp.asarray(data.sizes("train" if "train" in data.views else data.views[0]))[ids]
        # What the whole population keeps stays out of what is handed to every client.
        context = (state._replace(personal=None, memory=None), data)
        summed, kept, outputs = run_cohort(rule, client_key, ids, sizes, kept, context, **layout)
        metrics, stacked, took_part, reached = outputs
        averages, statistics = mean(summed)
        model, slots = step_server(state, averages, summed.weight[0] > 0)
        state = state._replace(model=model, optimizer=slots)
        if update_extra is not None:
            extra = update_extra(state, statistics, summed.weight[1])
            state = state._replace(extra=_where(jnp.any(reached), extra, state.extra))
        if collaborate is not None:
            own, memory = kept
            given = collaborate(collaborate_key, state, Cohort(ids, took_part & reached, own, memory, stacked))
            kept = given if participation is None else _where(reached, given, kept)
        personal, memory = jax.tree.map(lambda leaf, new: leaf.at[ids].set(new), (state.personal, state.memory), kept)
        seen = state.seen.at[ids].set(state.seen[ids] | took_part)
        state = state._replace(personal=personal, memory=memory, seen=seen, round=state.round + 1)
        return state, RoundInfo(ids, metrics, reached)

    def exchange(data: FederatedData) -> Exchange:
        state = jax.eval_shape(init_state, jax.random.key(0), data)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (state.personal, state.memory))
        moves = []

        def look(key: Key, id_: jax.Array, kept: Any, context: Any) -> ClientUpdate:
            start = receive(context[0], True, *kept)
            trained = client(key, start, context[1].client(id_))
            sends_gradient = trained.pseudo_gradient is not None
            # A leaf that a client hands back as it came is the very same object when the rule is traced.
            moves.append(jax.tree.map(lambda new, old: sends_gradient or new is not old, trained.model, start.model))
            return rule(key, id_, kept, context)

        update = jax.eval_shape(look, jax.random.key(0), jnp.zeros((), jnp.int32), one, (state, data))
        averages, statistics = update.upload
        down: Any = (masks.split(masks.split(state.model, personal)[1], moves[0])[0], state.extra)
        apart: Any = update.outputs[1]
        if collaborate is not None:
            each = Cohort(jnp.zeros((), jnp.int32), jnp.zeros((), bool), update.kept[0], update.kept[1], apart)
            cohort = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((cohort_size, *leaf.shape), leaf.dtype), each)
            read, given = _touched(collaborate, state, cohort)
            apart = (apart, masks.split(update.kept, read)[0])
            down = (*down, masks.split(update.kept, given)[0])
        return Exchange(down, (masks.split(averages, moves[0])[0], statistics), apart, upload_bits)

    def adapt(key: Key, state: State, support: ClientView, client: Any) -> Variables:
        if client is None and new_client is not None:
            return new_client(key, state, support)
        if client is None:
            return personalize(key, Received(state.model, init_memory(state.model), state.extra, state.round), support)
        checks.indices("client", client, state.seen.shape[0])
        own, memory = jax.tree.map(lambda leaf: leaf[client], (state.personal, state.memory))
        return personalize(key, receive(state, state.seen[client] & own_at_test, own, memory), support)

    return Algorithm(init_state, one_round, adapt, predict, exchange)


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the condition, whose axes are the leading ones of every leaf, holds."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(choose, new, old)


def _touched(collaborate: Callable[[Key, State, Cohort], Any], state: Any, cohort: Any) -> tuple[Any, Any]:
    """Masks over (personal, memory) of a cohort: what `collaborate` reads of it, and what it hands back changed."""
    kept = (cohort.personal, cohort.memory)
    jaxpr = jax.make_jaxpr(collaborate)(jax.random.key(0), state, cohort).jaxpr
    first = len(jax.tree.leaves((jax.random.key(0), state, cohort.ids, cohort.returned)))
    places, structure = jax.tree.flatten(kept)
    received = jaxpr.invars[first : first + len(places)]
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    given = [out is not came for out, came in zip(jaxpr.outvars, received, strict=True)]
    moved = {id(out) for out, changed in zip(jaxpr.outvars, given, strict=True) if changed}
    seen = [id(came) in read | moved for came in received]
    return jax.tree.unflatten(structure, seen), jax.tree.unflatten(structure, given)
