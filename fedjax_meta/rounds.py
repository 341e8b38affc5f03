"""Puts a method and a federation together.

A round samples a cohort, lets the engine run the method's client rule for each of its members, averages what they upload, lets
the server step, and writes back what the clients keep.
"""

import dataclasses
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, engine, masks
from fedjax_meta.aggregate import WEIGHTINGS, WeightedSum, client_weight, mean, weigh
from fedjax_meta.algorithm import ROWS, Algorithm, Exchange, RoundInfo, State, check_support, state_rows
from fedjax_meta.contract import Cohort, Method, Population, Received, Trained, no_memory
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.engine import ClientUpdate, replicate, run_cohort
from fedjax_meta.federation import Federation
from fedjax_meta.keys import tagged
from fedjax_meta.masks import Role
from fedjax_meta.types import Key, Mask, PyTree, Variables
from fedjax_meta.uploads import Chain, ServerContext


def federate(method: Method, federation: Federation | None = None) -> Algorithm:
    """A method in a federation, ready to run.

    Args:
      method: what a paper says, e.g. `fedavg(task)`.
      federation: how its rounds are run; `Federation()` when not given.

    Raises:
      ValueError: a federation that the method cannot run in; on `init`, clients that keep more bytes than are free; on `round`, a
        cohort larger than the population, a client that returns another structure, shape or type.
      TypeError: arguments of another kind.
    """
    federation = Federation() if federation is None else federation
    if not isinstance(method, Method):
        given = method.__name__ if callable(method) and hasattr(method, "__name__") else type(method).__name__
        raise TypeError(f"federate takes a method such as fm.fedavg(task), not {given}")
    if not isinstance(federation, Federation):
        raise TypeError(f"federate takes a Federation, not {type(federation).__name__}")
    rounds = _Rounds(method, federation)
    return Algorithm(
        init=rounds.init,
        round=rounds.round,
        personalize=rounds.personalize,
        predict=method.predict,
        exchange=rounds.exchange,
        cohort=rounds.cohort,
        config={**method.config, "federation": federation.config},
        devices=federation.devices,
        lanes=federation.lanes,
        needs_all_rows=method.whole_population,
    )


def as_algorithm(given: Method | Algorithm, federation: Federation | None = None) -> Algorithm:
    """An algorithm as it is, or a method in a federation.

    Raises:
      TypeError: neither; a federation beside an algorithm, which has one.
    """
    if not isinstance(given, Algorithm):
        return federate(given, federation)
    if federation is not None:
        raise TypeError("federation=... goes with a method; this is an algorithm, which has its federation already")
    return given


class Kept(NamedTuple):
    """What ONE client keeps from round to round, and where.

    Attributes:
      place: its position in the data.
      seen: whether it has taken part.
      personal, memory, residual: as in `State`.
    """

    place: jax.Array
    seen: jax.Array
    personal: PyTree
    memory: PyTree
    residual: PyTree


class Outputs(NamedTuple):
    """What the server sees of each client, stacked to `[C, ...]` by the engine.

    Attributes:
      metrics, stacked: as in `Trained`.
      took_part: whether the client did any of its round.
      returned: whether its upload reached the server.
      upload: its upload and weights, for an aggregator that needs all of them at once.
    """

    metrics: dict[str, jax.Array]
    stacked: PyTree
    took_part: jax.Array
    returned: jax.Array
    upload: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class _Rounds:
    """The functions of an `Algorithm`, and what follows from method and federation together."""

    method: Method
    federation: Federation

    def __post_init__(self) -> None:
        if self.method.collaborate is not None:
            for words in (self.method.collaborate.reads, self.method.collaborate.gives):
                _parts({"personal": (), "memory": ()}, words)
            if self.method.collaborate.reads:
                self._refuse_hiding_uploads()
        if self.method.travels is not None and self.federation.uploads:
            raise ValueError(
                f"{self.method.name} sends other numbers than those that the simulation averages: uploads= cannot change them"
            )
        f = self.federation
        if self.method.server_optimizer is not None and f.server_lr is not None and f.server_optimizer is None:
            raise ValueError(
                f"{self.method.name} has a server optimiser of its own: server_lr={f.server_lr} alone would replace it by "
                "SGD; give server_optimizer too, or set the rate in the method"
            )

    @cached_property
    def personal(self) -> Mask:
        return masks.having(self.method.roles, Role.PERSONAL)

    @cached_property
    def shared(self) -> Mask:
        """The leaves that the server optimiser moves."""
        return masks.having(self.method.roles, Role.SHARED)

    @cached_property
    def buffers(self) -> Mask:
        """The leaves that the server replaces by their average."""
        averaged = (Role.BUFFER, Role.PERSONAL) if self.federation.average_personal else (Role.BUFFER,)
        return masks.having(self.method.roles, *averaged)

    @cached_property
    def chain(self) -> Chain:
        return Chain(self.federation.uploads)

    @cached_property
    def server(self) -> optax.GradientTransformation:
        f = self.federation
        optimizer = optax.sgd(1.0) if self.method.server_optimizer is None else self.method.server_optimizer
        if f.server_lr is not None:
            optimizer = (optax.sgd if f.server_optimizer is None else f.server_optimizer)(f.server_lr)
        return optimizer

    def init(self, key: Key, data: FederatedData) -> State:
        method, devices = self.method, self.federation.devices
        model = replicate(method.init(tagged(key, "model")), devices)
        self._check_model(model)
        if method.needs_classes and data.num_classes == 0:
            raise ValueError(f"{method.name} needs class labels, but the data have real targets (num_classes is 0)")
        own = masks.split(model, self.personal)[0]
        fresh = jax.eval_shape(lambda key, model: method.init_memory(key, model, data.total_clients), key, model)
        residual = jax.eval_shape(self.chain.init_memory, self._upload_shape(model, data))

        def begin(id_: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
            del id_
            return own, jax.tree.map(_blank, fresh), jax.tree.map(_blank, residual)

        # Memory was already checked when `data` is a subset.
        rows = engine.populate(begin, data.ids_of(jnp.arange(data.num_clients)), devices, look_first=data.ids is None)
        return State(
            model=model,
            optimizer=self.server.init(masks.split(model, self.shared)[0]),
            extra=replicate(method.init_extra(model, data), devices),
            personal=rows[0],
            memory=rows[1],
            residual=rows[2],
            seen=replicate(jnp.zeros(data.num_clients, bool), devices),
            round=replicate(jnp.zeros((), jnp.int32), devices),
        )

    def _refuse_hiding_uploads(self) -> None:
        hiding = sorted({"noise", "mask"} & {transform.name for transform in self.federation.uploads})
        if hiding:
            raise ValueError(
                f"{self.method.name} lets the server see what each client sends by itself, which {' and '.join(hiding)} "
                "cannot cover"
            )

    def cohort(self, key: Key, round_: Any, num_clients: int) -> jax.Array:
        f = self.federation
        ids = f.schedule(tagged(key, "cohort"), round_, num_clients, f.cohort_size)
        if ids.shape != (f.cohort_size,) or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"schedule must return cohort_size={f.cohort_size} ids, not {ids.dtype}{list(ids.shape)}")
        return ids

    def round(self, key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        f = self.federation
        if data.ids is not None and data.num_clients == f.cohort_size:
            # The data are those of a cohort that was drawn before, as a host store does.
            places = jnp.arange(f.cohort_size, dtype=jnp.int32)
        else:
            places = self.cohort(key, state.round, data.num_clients)
        ids, rows = data.ids_of(places), state_rows(state, data, places)
        state = jax.tree.map(jnp.asarray, state)
        sizes = jnp.asarray(data.sizes("train" if "train" in data.views else data.views[0]))[places]
        before = Kept(places, *(jax.tree.map(lambda leaf: leaf[rows], getattr(state, name)) for name in Kept._fields[1:]))
        if len(before.residual) != len(f.uploads):
            raise ValueError(
                f"the state is of a federation with {len(before.residual)} upload transformations, not {len(f.uploads)}"
            )
        # Rows of the whole population stay out of what every client gets.
        context = _Context(_without_rows(state), data, ids, key)
        summed, kept, outputs = run_cohort(
            self._client_round,
            tagged(key, "clients"),
            ids,
            sizes,
            before,
            context,
            lanes=f.lanes,
            devices=f.devices,
            precision=f.precision,
        )
        (average, statistics), weight = self._aggregate(key, summed, outputs, ids, data)
        # Noise comes in every round: a round without it would tell that no client returned.
        some = jnp.any(outputs.returned) | self.chain.fixed_divisor
        if self.method.sums_pseudo_gradients:
            count = f.cohort_size if self.chain.fixed_divisor else jnp.sum(outputs.returned)
            moving, held = masks.split(average, self.shared)
            average = masks.merge(jax.tree.map(lambda leaf: leaf * jnp.asarray(count, leaf.dtype), moving), held)
        moved = self._step_server(state, average, statistics, weight, data.total_clients, some)
        kept, diagnostics = self._collaborate(key, moved, kept, outputs, ids, data)
        after = kept._replace(seen=before.seen | outputs.took_part)
        new = {
            name: jax.tree.map(lambda leaf, row: leaf.at[rows].set(row), getattr(state, name), getattr(after, name))
            for name in Kept._fields[1:]
        }
        return moved._replace(round=state.round + 1, **new), RoundInfo(
            ids, outputs.metrics | diagnostics, outputs.returned, places
        )

    def personalize(
        self, key: Key, state: State, support: ClientView, client: Any, num_clients: int | None = None
    ) -> Variables:
        check_support(support)
        method, rows = self.method, state.seen.shape[0]
        total = rows if num_clients is None else num_clients
        if client is not None:
            checks.indices("client", client, rows)
            row = jax.tree.map(lambda leaf: jnp.asarray(leaf)[client], Kept(jnp.arange(rows), *_rows(state)))
            received = self._receive(key, state, row._replace(seen=row.seen & self.federation.own_at_test), total)
            return method.personalize(tagged(key, "personalize"), received, support)
        new_client = self.federation.new_client or method.new_client
        if new_client is not None:
            population = Population(
                state.model, state.extra, state.personal, state.memory, state.seen, state.round, self.federation.lanes
            )
            return new_client(tagged(key, "personalize"), population, support)
        memory = method.init_memory(tagged(key, "memory"), state.model, total)
        received = Received(state.model, memory, state.extra, state.round, jnp.zeros((), bool), tagged(key, "shared"))
        return method.personalize(tagged(key, "personalize"), received, support)

    def exchange(self, data: FederatedData) -> Exchange:
        method = self.method
        state = jax.eval_shape(self.init, jax.random.key(0), data)
        trained = jax.eval_shape(partial(self._train_anyone, data=data), jax.random.key(0), state.model)
        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (state.personal, state.memory))
        kept = dict(zip(("personal", "memory"), row, strict=True))
        common = masks.split(state.model, masks.having(method.roles, Role.SHARED, Role.BUFFER))[0]
        up = masks.split(state.model, masks.union(self.shared, self.buffers))[0]
        if method.travels is not None:
            common, sent = jax.eval_shape(method.travels, state.model)
            up = (sent, masks.split(state.model, self.personal)[0]) if self.federation.average_personal else sent
        given, read = (), ()
        if method.collaborate is not None:
            given, read = (_parts(kept, names) for names in (method.collaborate.gives, method.collaborate.reads))
        extra = state.extra if method.sends_extra else ()
        statistics = trained.statistics if method.sends_statistics else ()
        return Exchange((common, extra, given), (up, statistics), (trained.stacked, read), self.chain.message)

    def _check_model(self, model: PyTree) -> None:
        wrong = checks.misplaced_leaf(self.method.roles, model)
        if wrong is not None:
            raise ValueError(f"the roles of {self.method.name} must have one at every leaf of its model, but {wrong}")

    def _train_anyone(self, key: Key, model: PyTree, data: FederatedData) -> Trained:
        """The first round of a client, for its shapes."""
        method, memory_key = self.method, tagged(key, "memory")
        memory = jax.tree.map(jnp.asarray, method.init_memory(memory_key, model, data.total_clients))
        extra, round_ = method.init_extra(model, data), jnp.zeros((), jnp.int32)
        received = Received(model, memory, extra, round_, jnp.zeros((), bool), tagged(key, "shared"))
        return method.client(tagged(key, "train"), received, data.client(0))

    def _upload_shape(self, model: PyTree, data: FederatedData) -> PyTree:
        """Shapes of what a client sends to be averaged, needed where a transformation keeps something of it."""
        if not self.federation.uploads:
            return ()

        def upload(key: Key, model: PyTree) -> PyTree:
            return self._upload(model, self.method.init_extra(model, data), self._train_anyone(key, model, data))

        return jax.eval_shape(upload, jax.random.key(0), model)

    def _receive(self, key: Key, state: State, row: Kept, num_clients: int) -> Received:
        """What a client starts from: its own leaves and memory if it has taken part, else the server's and fresh ones."""
        theirs, common = masks.split(state.model, self.personal)
        model = masks.merge(_where(row.seen, row.personal, theirs), common)
        fresh = self.method.init_memory(tagged(key, "memory"), model, num_clients)
        _must_fit(f"the state's memory is not that of {self.method.name}", row.memory, fresh)
        fresh = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), fresh, row.memory)
        return Received(model, _where(row.seen, row.memory, fresh), state.extra, state.round, row.seen, tagged(key, "shared"))

    def _client_round(self, key: Key, id_: jax.Array, kept: Kept, context: "_Context") -> ClientUpdate:
        """What the engine runs for each client: the method's rule, and what becomes of its result."""
        state, data = context.state, context.data
        client, works, arrives = self._fate(key, id_, data.client(jnp.where(id_ < 0, -1, kept.place)))
        received = self._receive(key, state, kept, data.total_clients)
        received = received._replace(shared_key=tagged(context.key, "shared"))
        trained = self.method.client(tagged(key, "train"), received, client)
        self._check(trained, received, kept)
        if jax.tree.leaves(trained.stacked):
            self._refuse_hiding_uploads()
        own_weight = self._weight(trained, client)
        # A client without samples has learned nothing, whatever its rule made of it.
        took_part = (own_weight > 0) & works
        returned = took_part & arrives
        upload = self._upload(state.model, state.extra, trained)
        upload, residual, residual_if_lost = self.chain.client(tagged(key, "uploads"), upload, kept.residual)
        residual = _where(returned, residual, residual_if_lost)
        weight: Any = (own_weight, own_weight if trained.statistics_weight is None else trained.statistics_weight)
        weight = jax.tree.map(lambda w: jnp.where(returned, w, 0), weight)
        new = (masks.split(trained.model, self.personal)[0], trained.memory, residual)
        new = _where(took_part, new, (kept.personal, kept.memory, kept.residual))
        sums, separate = self._sent(upload, weight, returned, id_, context)
        outputs = Outputs(trained.metrics, trained.stacked, took_part, returned, separate)
        kept = Kept(kept.place, kept.seen, *new)
        return ClientUpdate(sums, kept, jax.tree.map(jnp.asarray, outputs))

    def _fate(self, key: Key, id_: jax.Array, client: ClientData) -> tuple[ClientData, Any, Any]:
        """(the client with its share of the work, whether it works at all, whether its upload would arrive)."""
        if self.federation.participation is None:
            return client, True, id_ >= 0
        part = self.federation.participation(tagged(key, "participation"), id_)
        works = jnp.logical_not(part.crashed) & (part.work > 0)
        return client.working(part.work), works, (id_ >= 0) & part.returned

    def _sent(
        self, upload: PyTree, weight: PyTree, returned: jax.Array, id_: jax.Array, context: "_Context"
    ) -> tuple[PyTree, PyTree]:
        """(what is added up over the cohort, what an aggregator gets of each client)."""
        if self.chain.fixed_divisor:
            weight = jax.tree.map(lambda w: jnp.where(w > 0, 1.0, 0.0), weight)
        if self.federation.aggregator is not None:
            return (), (upload, weight)
        sums = weigh(upload, weight)
        if self.chain.masks_uploads:
            sums = self.chain.encode(tagged(context.key, "masks"), sums, self._most(context.data), id_, context.ids)
            sums = jax.tree.map(lambda leaf: jnp.where(returned, leaf, 0), sums)
        return sums, ()

    def _check(self, trained: Any, received: Received, kept: Kept) -> None:
        """Raises an error in one line for a client rule that returns something else than it should."""
        if not isinstance(trained, Trained) or not isinstance(trained.metrics, dict):
            raise TypeError(f"the client rule of {self.method.name} must return Trained(model, metrics), metrics being a dict")
        _must_fit("the model that a client returns", trained.model, received.model)
        if self.method.init_memory is no_memory and jax.tree.leaves(trained.memory):
            raise ValueError(f"clients of {self.method.name} keep a memory: give Method(init_memory=...) its first value")
        _must_fit("a client's memory must keep the form of init_memory", trained.memory, kept.memory)
        if trained.pseudo_gradient is not None:
            sent = (masks.split(tree, self.shared)[0] for tree in (trained.pseudo_gradient, received.model))
            _must_fit("the pseudo-gradient of a client", *sent)

    def _weight(self, trained: Trained, client: ClientData) -> jax.Array:
        if trained.weight is not None:
            return trained.weight
        weighting = self.federation.weighting or self.method.weighting
        weight = client_weight(weighting, client)
        return weight if "train" not in client.views else jnp.where(client["train"].size > 0, weight, 0)

    def _most(self, data: FederatedData) -> float:
        """The largest weight that a client can have."""
        view = WEIGHTINGS[self.federation.weighting or self.method.weighting]
        return 1.0 if view is None else float(dict(data.max_size)[view])

    def _upload(self, model: PyTree, extra: PyTree, trained: Trained) -> PyTree:
        """(the model's part, statistics): shared leaves as a pseudo-gradient, buffers as values or by how much they fell."""
        fell = jax.tree.map(jnp.subtract, model, trained.model)
        descent = fell if trained.pseudo_gradient is None else trained.pseudo_gradient
        held = fell if self.chain.sends_differences else trained.model
        part = masks.merge(masks.split(descent, self.shared)[0], masks.split(held, self.buffers)[0])
        statistics = trained.statistics
        if self.chain.sends_differences and self.method.statistics_renew_extra:
            statistics = jax.tree.map(lambda new, old: new - old.astype(new.dtype), statistics, extra)
        return part, statistics

    def _aggregate(
        self, key: Key, summed: Any, outputs: Outputs, ids: jax.Array, data: FederatedData
    ) -> tuple[tuple[PyTree, PyTree], PyTree]:
        """((average of the model's part, average of the statistics), summed weight of the statistics)."""
        aggregator = self.federation.aggregator
        if aggregator is None:
            summed = self._total(key, summed, outputs.returned, ids, data)
            average, total = mean(summed), summed.weight[1]
        else:
            uploads, weights = outputs.upload
            average = jax.tree.map(lambda w, part: aggregator(part, w), weights, uploads)
            total = jax.tree.map(lambda w: jnp.sum(w, where=w > 0), weights[1])
        context = ServerContext(self.federation.cohort_size, self.chain.clip_norm, ids, outputs.returned)
        return self.chain.server(tagged(key, "server uploads"), average, context), total

    def _total(self, key: Key, summed: WeightedSum, returned: jax.Array, ids: jax.Array, data: FederatedData) -> WeightedSum:
        """The weighted sum over the cohort, without masks and with the divisor that the upload transformations ask for."""
        if self.chain.masks_uploads:
            forms = jax.tree.unflatten(jax.tree.structure(summed.total), summed.dtypes)
            total = jax.tree.map(lambda form: jnp.promote_types(form, jnp.float32), forms)
            weight = jax.tree.map(lambda _: jnp.result_type(float), summed.weight)
            like = dataclasses.replace(summed, total=total, weight=weight)
            summed = self.chain.decode(tagged(key, "masks"), summed, self._most(data), ids, returned, like)
        if self.chain.fixed_divisor:
            # The weights that came in would tell which clients did not return.
            weight = jax.tree.map(lambda w: jnp.full_like(w, self.federation.cohort_size), summed.weight)
            summed = dataclasses.replace(summed, weight=weight)
        return summed

    def _step_server(
        self, state: State, average: PyTree, statistics: PyTree, weight: PyTree, num_clients: int, some: jax.Array
    ) -> State:
        """The state after the server's step, with the clients' old rows; unchanged unless `some` upload came."""
        moving, rest = masks.split(state.model, self.shared)
        descent, held = masks.split(average, self.shared)
        updates, slots = self.server.update(descent, state.optimizer, moving)
        buffers, still = masks.split(rest, self.buffers)
        held = masks.split(held, self.buffers)[0]
        if self.chain.sends_differences:
            held = jax.tree.map(jnp.subtract, buffers, held)
        model = masks.merge(optax.apply_updates(moving, updates), masks.merge(held, still))
        model, slots = _where(some, (model, slots), (state.model, state.optimizer))
        state = state._replace(model=model, optimizer=slots)
        if self.method.update_extra is None:
            return state
        if self.chain.sends_differences and self.method.statistics_renew_extra:
            statistics = jax.tree.map(lambda change, old: old.astype(change.dtype) + change, statistics, state.extra)
        extra = self.method.update_extra(_without_rows(state), statistics, weight, num_clients)
        _must_fit(f"what update_extra of {self.method.name} returns", extra, state.extra)
        return state._replace(extra=_where(some, extra, state.extra))

    def _collaborate(
        self, key: Key, state: State, kept: Kept, outputs: Outputs, ids: jax.Array, data: FederatedData
    ) -> tuple[Kept, dict[str, jax.Array]]:
        """(what clients keep after they got something of each other, unchanged for those that did not return; diagnostics)."""
        if self.method.collaborate is None:
            return kept, {}
        cohort = Cohort(ids, kept.place, outputs.returned, kept.personal, kept.memory, outputs.stacked, self.federation.lanes)
        visible = state if self.method.whole_population else _without_rows(state)
        result = self.method.collaborate.mix(tagged(key, "shared"), visible, cohort, data)
        given, diagnostics = result[:2], result[2] if len(result) > 2 else {}
        _must_fit("what collaborate returns", given, (kept.personal, kept.memory))
        personal, memory = _where(outputs.returned, given, (kept.personal, kept.memory))
        return kept._replace(personal=personal, memory=memory), diagnostics


class _Context(NamedTuple):
    """What every client of a cohort reads: the server's state, the data, the cohort's ids, the round's key."""

    state: State
    data: FederatedData
    ids: jax.Array
    key: Key


def _rows(state: State) -> tuple[PyTree, ...]:
    """What clients keep, in the order of `Kept`."""
    return state.seen, state.personal, state.memory, state.residual


def _without_rows(state: State) -> State:
    nothing: dict[str, Any] = dict.fromkeys(ROWS)
    return state._replace(**nothing)


def _blank(leaf: Any) -> jax.Array:
    """Zeros where a client's first memory will be."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _parts(kept: dict[str, PyTree], names: str) -> tuple[PyTree, ...]:
    """The parts that a `Collaboration` names, e.g. "personal+memory"."""
    chosen = [name for name in names.split("+") if name]
    for name in chosen:
        checks.one_of("what a collaboration reads or gives", name, kept)
    return tuple(kept[name] for name in chosen)


def _must_fit(what: str, given: PyTree, wanted: PyTree) -> None:
    odd = checks.mismatch(given, wanted)
    if odd is not None:
        raise ValueError(f"{what}: {odd}")


def _where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the condition, whose axes are the leading ones of every leaf, holds."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        shape = jnp.shape(condition)
        return jnp.where(jnp.reshape(condition, shape + (1,) * (jnp.ndim(a) - len(shape))), a, b)

    return jax.tree.map(choose, new, old)
