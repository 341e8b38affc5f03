"""The contract that every algorithm keeps, and the builder that puts one together from rules for ONE client.

A builder in `algorithms/` says what a client does in a round and what it does with a support set. `federated` adds what is the
same everywhere: who takes part, which leaves are averaged and which stay with their client, the server's step, and the places
where personal leaves and client memories wait for their client's next round.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, masks
from fedjax_meta.aggregate import Aggregator, mean, quantized
from fedjax_meta.data.federated import ClientData, ClientView, FederatedData
from fedjax_meta.engine import ClientUpdate, populate, replicate, run_cohort, sample_cohort
from fedjax_meta.participation import Participation
from fedjax_meta.privacy import Privacy, clipped, noised
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
      returned: bool `[C]`, whose results reached the server and count there; all when `None`.
      places: int32 `[C]`, which clients of the data they are; differs from `ids` where the data are a part of all clients, and
        is the same when `None`.
    """

    ids: jax.Array
    metrics: dict[str, jax.Array]
    returned: jax.Array | None = None
    places: jax.Array | None = None


class Exchange(NamedTuple):
    """What travels between the server and ONE client of a cohort in a round: trees of `jax.ShapeDtypeStruct`.

    Leaves that no client ever changes (a head that stays at its initial values) need not travel and are left out.

    Attributes:
      down: the shared leaves of the model, the server's extra state, and what `collaborate` sends back.
      averaged: what the client sends to be averaged, or aggregated in another way.
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
        algorithm does with its support view. `client` is the row, in the state at hand, of a client that could take part in
        training, or `None` for one never seen. It is no id: the state may hold the rows of some clients, or of this one alone.
      predict: `(variables, x [B, ...]) -> logits [B, K]`.
      exchange: `data -> Exchange`, what a client sends and receives in a round; nothing is computed. See `costs.traffic`.
      cohort: `(round's key, N) -> ids [C]`, whom that round asks. A round among these clients alone (`data.select(ids)` and their
        rows of the state) is the round among all, so that the others need not be on a device. See `store`.
    """

    init: Callable[[Key, FederatedData], State]
    round: Callable[[Key, State, FederatedData], tuple[State, RoundInfo]]
    personalize: Callable[[Key, State, ClientView, Any], Variables]
    predict: Callable[[Variables, Any], jax.Array]
    exchange: Callable[[FederatedData], Exchange] | None = None
    cohort: Callable[[Key, int], jax.Array] | None = None


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
      weight: how much the client counts in that average, a scalar; with 0, as without samples, it did not take part, and
        what it keeps stays as it was.
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
      ids: int32 `[C]`, who they are in the whole population.
      places: int32 `[C]`, which clients of the data at hand they are; differs from `ids` where these are a part of all.
      returned: bool `[C]`, whose results reached the server and weigh more than 0.
      personal: personal leaves after training.
      memory: memories after training.
      stacked: what the clients sent of themselves.
    """

    ids: jax.Array
    places: jax.Array
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
    aggregator: Aggregator | None
    privacy: Privacy | None
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
    init_memory: Callable[[Key, Any, int], Any] = lambda key, model, num_clients: (),
    init_extra: Callable[[Any, FederatedData], Any] = lambda model, data: (),
    update_extra: Callable[[State, Any, Any, int], Any] | None = None,
    collaborate: Callable[[Key, State, Cohort, FederatedData], tuple[Any, Any]] | None = None,
    cohort_size: int = 5,
    server_optimizer: optax.GradientTransformation | None = None,
    average_personal: bool = False,
    own_at_test: bool = True,
    participation: Callable[[Key, jax.Array], Participation] | None = None,
    upload_bits: int | None = None,
    aggregator: Aggregator | None = None,
    privacy: Privacy | None = None,
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
      init_memory: `(key, model, num_clients) -> memory` of one client before its first round; the key is its own.
      init_extra: `(model, data) -> extra`, the server's; of the data it may use shapes.
      update_extra: `(state, mean statistics, summed statistics weight, N) -> extra`, after the model has moved: `state` has the
        new model and the old `extra`. The mean is 0 where the weight is.
      collaborate: `(key, state, cohort, data) -> (personal, memory)`, both `[C, ...]`: what clients get of each other, e.g.
        through a client x client matrix (`aggregate.combine`). `state` has the new model and extra.
      cohort_size: C, clients in a round.
      server_optimizer: steps along the averaged pseudo-gradient; replacement by the average (`optax.sgd(1.0)`) when not given.
      average_personal: average personal leaves at the server too. A client that has taken part never reads that average; one
        that has not begins with it (S0's reference code). It costs upload and gives personal leaves away.
      own_at_test: a known client tests with its own personal leaves; else with the server's (as S0 tested FedPer).
      participation: `(key, client id) -> Participation`, what becomes of a client that was asked; all do all their work and
        return when not given. A round from which nobody returns leaves everything but its number as it was, apart from what
        late clients keep for themselves. See `participation`.
      upload_bits: what is averaged is sent with this many bits a number (see `aggregate.quantized`).
      aggregator: `(stacked uploads [C, ...], weights [C]) -> upload` in place of the weighted mean, also of statistics:
        `aggregate.median`, `aggregate.trimmed_mean(share)`. It takes memory for C uploads, where the mean takes one.
      privacy: clips what is averaged and adds noise to the mean, see `privacy.Privacy`. Clients then count alike.
      lanes, devices, precision: how the work is laid out and how exact its products are, see `engine.run_cohort`.

    Raises:
      ValueError: a count below 1, privacy together with what it cannot cover; on `init`, clients that keep more bytes than are
        free; on `round`, a cohort larger than the population, a client that hands back another structure, shape or type.
    """
    checks.count("cohort_size", cohort_size)
    for name, value in (("lanes", lanes), ("devices", devices), ("upload_bits", upload_bits)):
        if value is not None:
            checks.count(name, value)
    if privacy is not None:
        privacy.check()
        if aggregator is not None:
            raise ValueError("privacy is for the mean: its noise says nothing of another aggregator")
        if collaborate is not None:
            raise ValueError(
                "privacy covers what is averaged; clients of this algorithm also send what each is seen by itself"
            )
    server = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    averaged = masks.everything_like(personal) if average_personal else masks.complement(personal)
    moved = masks.intersection(averaged, trainable)
    buffers = masks.intersection(averaged, masks.complement(trainable))

    def moves(before: Any, after: Any) -> Any:
        """By how much a model descended."""
        return jax.tree.map(jnp.subtract, before, after)

    def init_state(key: Key, data: FederatedData) -> State:
        model = replicate(init(key), devices)
        memory_key = jax.random.fold_in(key, 1)

        def begin(id_: jax.Array) -> tuple[Any, Any]:
            memory = init_memory(jax.random.fold_in(memory_key, id_), model, data.total_clients)
            return jax.tree.map(jnp.asarray, (masks.split(model, personal)[0], memory))

        # Whoever takes a part of the clients has looked whether all of them fit where they wait.
        own, memory = populate(begin, data.who(jnp.arange(data.num_clients)), devices, look_first=data.ids is None)
        return State(
            model=model,
            optimizer=server.init(masks.split(model, moved)[0]),
            extra=replicate(init_extra(model, data), devices),
            personal=own,
            memory=memory,
            seen=replicate(jnp.zeros(data.num_clients, bool), devices),
            round=replicate(jnp.zeros((), jnp.int32), devices),
        )

    def receive(state: State, seen: Any, own: Any, memory: Any, shared_key: Key) -> Received:
        theirs, shared = masks.split(state.model, personal)
        own = jax.tree.map(lambda mine, server: jnp.where(seen, mine, server), own, theirs)
        return Received(masks.merge(own, shared), memory, state.extra, state.round, seen, shared_key)

    def rule(key: Key, id_: jax.Array, kept: Any, context: tuple[State, FederatedData, Key]) -> ClientUpdate:
        state, data, shared_key = context
        place, seen, kept = kept
        start = receive(state, seen, kept[0], kept[1], shared_key)
        mine, did, reached = data.client(jnp.where(id_ < 0, -1, place)), True, True
        if participation is not None:
            participation_key, key = jax.random.split(key)
            part = participation(participation_key, id_)
            mine, did = mine.working(part.work), jnp.logical_not(part.crashed) & (part.work > 0)
            reached = did & part.returned
        if upload_bits is not None:
            quantize_key, key = jax.random.split(key)
        trained = client(key, start, mine)
        _must_fit("the model that a client hands back", trained.model, start.model)
        _must_fit("a client's memory must stay as init_memory made it", trained.memory, kept[1])
        descent = trained.pseudo_gradient
        if descent is None:
            # From the server's own leaves, also where the client began with its own: what is averaged is where they ended.
            descent = moves(state.model, trained.model)
        held = masks.split(trained.model if privacy is None else moves(state.model, trained.model), buffers)[0]
        upload: Any = (masks.merge(masks.split(descent, moved)[0], held), trained.statistics)
        weight: Any = (trained.weight, trained.weight if trained.statistics_weight is None else trained.statistics_weight)
        weight = jax.tree.map(lambda w: jnp.where(reached, w, 0), weight)
        if upload_bits is not None:
            upload = quantized(quantize_key, upload, upload_bits)
        if privacy is not None:
            upload = clipped(upload, privacy.clip_norm)
            weight = jax.tree.map(lambda w: jnp.where(w > 0, 1.0, 0.0), weight)
        apart: Any = ()
        if aggregator is not None:
            apart, upload, weight = (upload, weight), (), ()
        # A client without samples has learned nothing, whatever its rule made of it.
        took_part = (trained.weight > 0) & did
        after = (masks.split(trained.model, personal)[0], trained.memory)
        outputs = (trained.metrics, trained.stacked, took_part, took_part & reached, apart)
        return ClientUpdate(
            upload=upload,
            weight=weight,
            kept=(place, seen, jax.tree.map(lambda new, old: jnp.where(took_part, new, old), after, kept)),
            outputs=jax.tree.map(jnp.asarray, outputs),
        )

    def aggregated(key: Key, model: Any, summed: Any, apart: Any) -> tuple[tuple[Any, Any], Any]:
        """((mean of the model's part, mean of the statistics), summed weight of the statistics)."""
        if aggregator is not None:
            uploads, weights = apart
            total = jax.tree.map(lambda w: jnp.sum(w, where=w > 0), weights[1])
            return jax.tree.map(lambda w, part: aggregator(part, w), weights, uploads), total
        if privacy is None:
            return mean(summed), summed.weight[1]
        # A fixed divisor: that of the weights that came in would tell who did not return.
        summed = replace(summed, weight=jax.tree.map(lambda w: jnp.full_like(w, cohort_size), summed.weight))
        averages, statistics = noised(key, mean(summed), privacy.noise_multiplier * privacy.clip_norm / cohort_size)
        descent, change = masks.split(averages, moved)
        return (masks.merge(descent, moves(masks.split(model, buffers)[0], change)), statistics), summed.weight[1]

    def step_server(state: State, averages: Any, any_weight: Any) -> tuple[Any, Any]:
        """(model, optimiser slots) after the server's step; both as they were when no weight came in."""
        moving, rest = masks.split(state.model, moved)
        descent, held = masks.split(averages, moved)
        updates, slots = server.update(descent, state.optimizer, moving)
        model = masks.merge(optax.apply_updates(moving, updates), masks.merge(held, masks.split(rest, buffers)[1]))
        return jax.tree.map(lambda new, old: jnp.where(any_weight, new, old), (model, slots), (state.model, state.optimizer))

    def cohort(key: Key, num_clients: int) -> jax.Array:
        return sample_cohort(jax.random.split(key, 4)[0], num_clients, cohort_size)

    def one_round(key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        _, client_key, shared_key, noise_key = jax.random.split(key, 4)
        places = cohort(key, data.num_clients)
        ids, rows = data.who(places), rows_of(state, data, places)
        state = jax.tree.map(jnp.asarray, state)
        seen, kept = jax.tree.map(lambda leaf: leaf[rows], (state.seen, (state.personal, state.memory)))
        sizes = jnp.asarray(data.sizes("train" if "train" in data.views else data.views[0]))[places]
        # What the whole population keeps stays out of what is handed to every client.
        context = (state._replace(personal=None, memory=None), data, shared_key)
        summed, (*_, kept), outputs = run_cohort(
            rule, client_key, ids, sizes, (places, seen, kept), context, lanes=lanes, devices=devices, precision=precision
        )
        metrics, stacked, took_part, returned, apart = outputs
        (averages, statistics), statistics_weight = aggregated(noise_key, state.model, summed, apart)
        # Noise comes in every round: none would tell that nobody returned.
        some = jnp.any(returned) | (privacy is not None)
        model, slots = step_server(state, averages, some)
        state = state._replace(model=model, optimizer=slots)
        if update_extra is not None:
            extra = update_extra(state, statistics, statistics_weight, data.total_clients)
            state = state._replace(extra=_where(some, extra, state.extra))
        if collaborate is not None:
            given = collaborate(shared_key, state, Cohort(ids, places, returned, kept[0], kept[1], stacked), data)
            _must_fit("what collaborate hands back", given, kept)
            kept = _where(returned, given, kept)
        personal, memory = jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), (state.personal, state.memory), kept)
        state = state._replace(
            personal=personal, memory=memory, seen=state.seen.at[rows].set(seen | took_part), round=state.round + 1
        )
        return state, RoundInfo(ids, metrics, returned, places)

    def exchange(data: FederatedData) -> Exchange:
        state = jax.eval_shape(init_state, jax.random.key(0), data)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (state.personal, state.memory))
        changed: list[Any] = []

        def look(key: Key, id_: jax.Array, kept: Any, context: Any) -> ClientUpdate:
            start = receive(context[0], True, kept[0], kept[1], context[2])
            trained = client(key, start, context[1].client(id_))
            sends_gradient = trained.pseudo_gradient is not None
            # A leaf that a client hands back as it came is the very same object when the rule is traced.
            changed.append(jax.tree.map(lambda new, old: sends_gradient or new is not old, trained.model, start.model))
            return rule(key, id_, (id_, jnp.ones((), bool), kept), context)

        update = jax.eval_shape(look, jax.random.key(0), jnp.zeros((), jnp.int32), one, (state, data, jax.random.key(0)))
        averages, statistics = update.upload if aggregator is None else update.outputs[4][0]
        down: Any = (masks.split(masks.split(state.model, personal)[1], changed[0])[0], state.extra)
        apart: Any = update.outputs[1]
        if collaborate is not None:
            who, after = jnp.zeros((), jnp.int32), update.kept[2]
            each = Cohort(who, who, jnp.zeros((), bool), after[0], after[1], apart)
            those = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((cohort_size, *leaf.shape), leaf.dtype), each)
            read, given = _touched(collaborate, state, those, data)
            apart = (apart, masks.split(after, read)[0])
            down = (*down, masks.split(after, given)[0])
        return Exchange(down, (masks.split(averages, changed[0])[0], statistics), apart, upload_bits)

    def adapt(key: Key, state: State, support: ClientView, client: Any) -> Variables:
        if client is None and new_client is not None:
            return new_client(key, state, support)
        if client is None:
            memory = init_memory(jax.random.fold_in(key, 1), state.model, state.seen.shape[0])
            stranger = Received(state.model, memory, state.extra, state.round, jnp.zeros((), bool), key)
            return personalize(key, stranger, support)
        checks.indices("client", client, state.seen.shape[0])
        row: Any = jax.tree.map(lambda leaf: jnp.asarray(leaf)[client], (state.seen, state.personal, state.memory))
        return personalize(key, receive(state, row[0] & own_at_test, row[1], row[2], key), support)

    return Algorithm(init_state, one_round, adapt, predict, exchange, cohort)


def rows_of(state: State, data: FederatedData, places: jax.Array) -> jax.Array:
    """Which rows of a state those clients of the data have, int32 like `places`.

    Where the data are a part of all clients, a state may hold everybody's rows, or those of this part in its order.

    Raises:
      ValueError: it holds neither.
    """
    rows = state.seen.shape[0]
    if data.ids is None or rows == data.num_clients < data.total_clients:
        return places
    if rows != data.total_clients:
        raise ValueError(
            f"the state has rows of {rows} clients, but the data are {data.num_clients} of {data.total_clients} clients: it must "
            "have those of the ones or of the others"
        )
    return data.who(places)


def _must_fit(what: str, given: Any, wanted: Any) -> None:
    odd = checks.mismatch(given, wanted)
    if odd is not None:
        raise ValueError(f"{what}: {odd}")


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the condition, whose axes are the leading ones of every leaf, holds."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(choose, new, old)


def _touched(collaborate: Callable[..., Any], state: Any, cohort: Any, data: Any) -> tuple[Any, Any]:
    """Masks over (personal, memory) of a cohort: what `collaborate` reads of it, and what it hands back changed."""
    kept = (cohort.personal, cohort.memory)
    jaxpr = jax.make_jaxpr(collaborate)(jax.random.key(0), state, cohort, data).jaxpr
    first = len(jax.tree.leaves((jax.random.key(0), state, cohort.ids, cohort.places, cohort.returned)))
    places, structure = jax.tree.flatten(kept)
    received = jaxpr.invars[first : first + len(places)]
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    given = [out is not came for out, came in zip(jaxpr.outvars, received, strict=True)]
    moved = {id(out) for out, changed in zip(jaxpr.outvars, given, strict=True) if changed}
    seen = [id(came) in read | moved for came in received]
    return jax.tree.unflatten(structure, seen), jax.tree.unflatten(structure, given)
