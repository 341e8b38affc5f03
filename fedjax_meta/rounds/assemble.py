"""`federate`: a method in a federation as an `Algorithm`."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from fedjax_meta import checks, hardware, loops, masks, placement
from fedjax_meta.algorithm import (
    Aggregation,
    Algorithm,
    Exchange,
    RoundInfo,
    State,
    check_state,
    check_support,
    row_ids,
)
from fedjax_meta.builders import PRIVATE
from fedjax_meta.contract import Method, Population
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.federation import Federation, check_data
from fedjax_meta.keys import is_key, tagged
from fedjax_meta.masks import Role
from fedjax_meta.placement import replicate
from fedjax_meta.rounds import client as clients
from fedjax_meta.rounds import ratios, stale
from fedjax_meta.rounds.leaks import refuse_leaks
from fedjax_meta.rounds.round import drawn_ids, of_server, one_round
from fedjax_meta.rounds.setting import Setting, rows_of
from fedjax_meta.rounds.trees import leaf_names, parts
from fedjax_meta.types import Key, PyTree, Variables


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
    rounds = _Rounds(Setting(method, federation))
    for_devices = hardware.computing_on(federation.devices)
    return Algorithm(
        init=for_devices(rounds.init),
        round=for_devices(rounds.round),
        personalize=rounds.personalize,
        predict=method.predict,
        exchange=rounds.exchange,
        cohort=rounds.cohort,
        config={**method.config, "federation": federation.config},
        checked=rounds.checked,
        devices=federation.devices,
        lanes=federation.lanes,
        needs_all_rows=method.whole_population,
        task=method.task,
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Rounds:
    """The functions of an `Algorithm`."""

    setting: Setting

    def init(self, key: Key, data: FederatedData) -> State:
        setting, method, devices = self.setting, self.setting.method, self.setting.federation.devices
        check_data(method, setting.federation, data)
        model = replicate(loops.strongly_typed(method.init(tagged(key, "model"))), devices)
        self._check_model(model)
        own = masks.split(model, setting.personal)[0]
        fresh = jax.eval_shape(lambda key, model: self._first_memory(key, model, data.total_clients), key, model)
        upload, weight = self._upload_shape(model, data)
        residual = jax.eval_shape(setting.chain.init_memory, setting.sent(upload))

        def begin(id_: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
            del id_
            return own, jax.tree.map(_blank, fresh), jax.tree.map(_blank, residual)

        rows = placement.populate(begin, data.ids_of(jnp.arange(data.num_clients)), devices)
        state = State(
            model=model,
            optimizer=setting.server.init(masks.split(model, setting.shared)[0]),
            extra=replicate(method.init_extra(model, data), devices),
            aggregation=replicate(self._init_aggregation(tagged(key, "aggregation"), model, upload, weight), devices),
            personal=rows[0],
            memory=rows[1],
            residual=rows[2],
            seen=replicate(jnp.zeros(data.num_clients, bool), devices),
            ids=replicate(jnp.asarray(row_ids(data)), devices),
            round=replicate(jnp.zeros((), jnp.int32), devices),
        )
        if PRIVATE in method.config:
            refuse_leaks(setting, state, data)
        return state

    def cohort(self, key: Key, round_: Any, num_clients: int) -> jax.Array:
        return drawn_ids(self.setting, key, round_, num_clients)

    def round(self, key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
        return one_round(self.setting, key, state, data)

    def personalize(
        self, key: Key, state: State, support: ClientView, client: Any, num_clients: int | None = None
    ) -> Variables:
        check_support(support)
        setting, method, count = self.setting, self.setting.method, state.seen.shape[0]
        model = jax.eval_shape(method.init, key)
        own = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), masks.split(model, setting.personal)[0]
        )
        check_state(state, state._replace(model=model, personal=own))
        total = count if num_clients is None else num_clients
        if client is not None:
            checks.indices("client", client, count)
            seen, kept = jax.tree.map(lambda leaf: jnp.asarray(leaf)[client], (state.seen, rows_of(state)))
            seen = seen & setting.federation.own_at_test
            received = clients.receive(setting, key, state, seen, kept, total, tagged(key, "shared"))
            return method.personalize(tagged(key, "personalize"), received, support)
        new_client = setting.federation.new_client or method.new_client
        if callable(new_client):
            # Noise does not cover what clients keep.
            rows = (None, None) if setting.chain.fixed_divisor else (state.personal, state.memory)
            population = Population(
                state.model, state.extra, rows[0], rows[1], state.seen, state.round, setting.federation.lanes
            )
            return new_client(tagged(key, "personalize"), population, support)
        received = clients.receive_fresh(setting, key, state.model, state.extra, state.round, total)
        return method.personalize(tagged(key, "personalize"), received, support)

    def exchange(self, data: FederatedData) -> Exchange:
        setting, method = self.setting, self.setting.method
        state, trained, (personal, memory) = self._shapes(data)
        common = masks.split(state.model, masks.having(method.roles, Role.SHARED, Role.BUFFER))[0]
        up = masks.split(state.model, masks.union(setting.shared, setting.buffers))[0]
        if method.travels is not None:
            common, sent = jax.eval_shape(method.travels, state.model)
            up = (sent, masks.split(state.model, setting.personal)[0]) if setting.federation.average_personal else sent
        given = ()
        if method.collaborate is not None:
            given = parts({"personal": personal, "memory": memory}, method.collaborate.gives)
        extra = state.extra if method.sends_extra else ()
        statistics = trained.statistics if method.sends_statistics else ()
        separate = (trained.stacked, setting.read(personal, memory))
        return Exchange((common, extra, given), (up, statistics), separate, setting.chain.message)

    def checked(self, data: FederatedData) -> tuple[Sequence[str], Sequence[str]]:
        state, trained, _ = self._shapes(data)
        upload, weights = self._sent_shapes(state.model, data)
        sent = (upload, upload) if self.setting.federation.uploads else upload
        result = clients.result_of(self.setting, trained, weights, sent)
        return leaf_names(result), leaf_names(of_server(state))

    def _shapes(self, data: FederatedData) -> tuple[State, Any, tuple[PyTree, PyTree]]:
        """Of the state, of what a client returns, and of its own (personal leaves, memory)."""
        state = jax.eval_shape(self.init, jax.random.key(0), data)
        train = partial(clients.train_first_client, self.setting, data=data)
        trained = jax.eval_shape(train, jax.random.key(0), state.model)
        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (state.personal, state.memory))
        return state, trained, row

    def _check_model(self, model: PyTree) -> None:
        wrong = checks.misplaced_leaf(self.setting.method.roles, model)
        if wrong is not None:
            raise ValueError(f"the roles of {self.setting.method.name} must have one at every leaf of its model, but {wrong}")
        odd = next((role for role in jax.tree.leaves(self.setting.method.roles) if not isinstance(role, masks.Role)), None)
        if odd is not None:
            raise ValueError(
                f"the roles of {self.setting.method.name} must be masks.Role, not {checks.shown(odd)}: masks.roles(personal, "
                "trainable) makes them of masks"
            )
        leaves, roles = jax.tree_util.tree_leaves_with_path(model), jax.tree.leaves(self.setting.method.roles)
        for (path, leaf), role in zip(leaves, roles, strict=True):
            if role in (masks.Role.SHARED, masks.Role.BUFFER) and not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} of the model is {leaf.dtype}{list(leaf.shape)}, which cannot be averaged: "
                    "it must be floating-point, personal or frozen"
                )

    def _first_memory(self, key: Key, model: PyTree, num_clients: int) -> PyTree:
        memory = self.setting.method.init_memory(key, model, num_clients)
        checks.arrays(f"init_memory of {self.setting.method.name}", memory)
        return memory

    def _upload_shape(self, model: PyTree, data: FederatedData) -> tuple[PyTree, PyTree]:
        """`_sent_shapes`, or nothing where no transformation and no rule asks for them: training is traced for it."""
        needed = self.setting.federation.uploads or self.setting.rule is not None
        return self._sent_shapes(model, data) if needed else (((), ()), ())

    def _sent_shapes(self, model: PyTree, data: FederatedData) -> tuple[PyTree, PyTree]:
        """Shapes of what a client sends to be averaged, and of its weights."""
        setting = self.setting

        def upload(key: Key, model: PyTree) -> PyTree:
            trained = clients.train_first_client(setting, key, model, data)
            extra = setting.method.init_extra(model, data)
            return clients.upload_of(setting, model, extra, trained), clients.weights_of(setting, trained, data.client(0))

        return jax.eval_shape(upload, jax.random.key(0), model)

    def _init_aggregation(self, key: Key, model: PyTree, upload: PyTree, weight: PyTree) -> Aggregation:
        chain, rule, past = self.setting.chain, self.setting.rule, stale.begin(self.setting, model)
        sent = self.setting.sent(upload)
        kept = chain.init_server(tagged(key, "uploads"), sent)
        if rule is None:
            return Aggregation(kept, (), past)
        residual, carries = jax.eval_shape(chain.init_memory, sent), self.setting.carries(upload)
        measured = jax.eval_shape(partial(chain.client, carries=carries), key, sent, residual, kept)[1]
        weight = (*weight, jax.ShapeDtypeStruct((), jnp.result_type(float)))
        parts, weights = jax.eval_shape(partial(ratios.split, self.setting), (*upload, measured), weight)
        shapes = cast(Any, jax.tree.structure(weights)).flatten_up_to(parts)
        return Aggregation(kept, tuple(rule.init(shape) if jax.tree.leaves(shape) else () for shape in shapes), past)


def _blank(leaf: Any) -> jax.Array:
    """Zeros where a client's first memory will be."""
    if is_key(leaf):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)
