"""A method's client and server rules as a Flower `ClientApp` and `ServerApp` (package flwr), to field what was simulated.

The rules run unchanged: a client node calls `rounds.client.client_round` and keeps its personal leaves and memory in its context,
the server calls `rounds.server.next_state` on the sum of what came. What travels is what `costs.traffic` counts, and scalars.
Client i runs on the node whose config says `partition-id = i`; the server draws the cohorts that the simulation draws.

Only methods whose server needs averages alone run so. `why_not` says what the others need.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, masks, schedules
from fedjax_meta.algorithm import Aggregation, State
from fedjax_meta.blocks import run_keys
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.engine import in_precision
from fedjax_meta.federation import Federation
from fedjax_meta.keys import is_key, tagged
from fedjax_meta.masks import Role
from fedjax_meta.rounds import client as clients
from fedjax_meta.rounds import federate, server
from fedjax_meta.rounds.setting import CohortClient, Context, Kept, Outputs, Setting, rows_of
from fedjax_meta.types import Key, PyTree

_log = logging.getLogger("fedjax_meta")

PARTITION = "partition-id"
"""The entry of a node's config that says which client it is, as Flower's own simulation sets it."""

_TRAIN, _MIX, _WHO = "train", "train.mix", "query"


def why_not(method: Method, federation: Federation, data: FederatedData | None = None) -> str | None:
    """Why a method cannot run on Flower, in words that follow its name; `None` if it can.

    Args:
      method, federation: what should run.
      data: the clients; without them, what clients send separately is not known.
    """
    others = {
        "average_personal": False,
        "uploads": (),
        "aggregator": None,
        "attack": None,
        "participation": None,
        "schedule": schedules.uniform,
    }
    for name, plain in others.items():
        if getattr(federation, name) != plain:
            return f"a federation with {name} needs more of the server than an average"
    if method.travels is not None:
        return "the server sends other numbers than its model"
    if method.whole_population or (method.collaborate is not None and method.collaborate.reads):
        return "the server reads what each client keeps"
    if data is not None and jax.tree.leaves(federate(method, federation).exchange(data).separate):
        return "the server reads what each client sends by itself"
    return None


def client_app(
    method: Method, data: FederatedData | Callable[[int], FederatedData], *, federation: Federation | None = None
) -> Any:
    """The `ClientApp` of a method.

    Args:
      method: what clients do in a round.
      data: the clients, or a function that gives the data of one client, `ids=[i]` and `population=N` among them.
      federation: how rounds are run; the server's must be the same.

    Raises:
      ImportError: flwr is not installed.
      ValueError: a method whose server needs more than averages.
    """
    federation = Federation() if federation is None else federation
    if not isinstance(data, FederatedData):
        checks.function("data", data, ("client",), "lambda client: data.select([client])")
    _refuse(method, federation, data if isinstance(data, FederatedData) else None)
    flwr = _flower()
    node = _Node(method, federation, data)
    app = flwr.ClientApp()

    @app.query()
    def who(message: Any, context: Any) -> Any:
        return _reply(message, {PARTITION: int(context.node_config[PARTITION])})

    @app.train()
    def train(message: Any, context: Any) -> Any:
        return node.train(message, context)

    @app.train("mix")
    def mix(message: Any, context: Any) -> Any:
        return node.mix(message, context)

    return app


def server_app(
    method: Method,
    data: FederatedData,
    *,
    rounds: int,
    key: Key,
    federation: Federation | None = None,
    on_round: Callable[[State, Mapping[str, float]], None] | None = None,
    wait: float = 300.0,
) -> Any:
    """The `ServerApp` of a method.

    Args:
      method: what the server does with what clients send.
      data: tells the number of clients and the form of a sample; a subset, e.g. `data.select([0])`, is enough.
      rounds: how many.
      key: of the run; `simulate` with the same key finds the same parameters, up to the rounding of sums.
      federation: how rounds are run.
      on_round: called after each round with the state and the cohort's mean metrics, to show or to save. The rows of clients in
        the state stay empty: they are on the nodes.
      wait: seconds until all clients must be there.

    Raises:
      ImportError: flwr is not installed.
      ValueError: a method whose server needs more than averages. In a run also clients that never come, or a round in which every
        client failed.
    """
    federation = Federation() if federation is None else federation
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    _refuse(method, federation, data)
    checks.count("rounds", rounds)
    checks.prng_key("key", key)
    checks.positive("wait", wait)
    flwr = _flower()
    app = flwr.ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        del context
        _Server(method, federation, data, key).run(grid, rounds, on_round, wait)

    return app


def _refuse(method: Method, federation: Federation, data: FederatedData | None) -> None:
    checks.instance("method", method, Method, "fm.fedavg(task)")
    reason = why_not(method, federation, data)
    if reason is not None:
        raise ValueError(f"{method.name} cannot run on Flower: {reason}")


class _Server:
    """The server of a run."""

    def __init__(self, method: Method, federation: Federation, data: FederatedData, key: Key) -> None:
        self._setting, self._algorithm = Setting(method, federation), federate(method, federation)
        # The state has rows of one client, so that the data must say how many train.
        self._data = dataclasses.replace(data, drawn=data.total_clients)
        init_key, self._round_key, _ = run_keys(key)
        self._init_key, self._impl = init_key, str(jax.random.key_impl(init_key))
        one = data.select(np.zeros(1, np.int32))
        self._state = jax.jit(self._algorithm.init)(init_key, one)
        context = Context(_bare(self._state), one, jnp.zeros(1, jnp.int32), init_key)
        seen, kept = jax.tree.map(lambda leaf: leaf[0], (self._state.seen, rows_of(self._state)))
        rule = partial(clients.client_round, self._setting)
        self._shapes = jax.eval_shape(rule, init_key, jnp.int32(0), CohortClient(jnp.int32(0), seen), kept, context)
        self._step = jax.jit(in_precision(federation.precision, partial(server.next_state, self._setting)))

    def run(self, grid: Any, rounds: int, on_round: Callable[..., None] | None, wait: float) -> None:
        """All rounds."""
        nodes = self._nodes(grid, wait)
        for number in range(rounds):
            key = jax.random.fold_in(self._round_key, number)
            ids = np.asarray(self._algorithm.cohort(key, number, self._data.total_clients))
            asked = [nodes[int(i)] for i in ids]
            found = {one.metadata.src_node_id: one for one in _exchange(grid, asked, self._content(key), _TRAIN)}
            replies = [found.get(nodes[int(i)]) for i in ids]
            summed, outputs = self._collected(number, replies)
            moved = self._step(key, self._state, summed, outputs, jnp.asarray(ids, jnp.int32), self._data)
            self._state, metrics = moved, _means(outputs)
            if self._setting.method.collaborate is not None:
                back = [nodes[int(i)] for i, returned in zip(ids, np.asarray(outputs.returned), strict=True) if returned]
                metrics |= self._mixed(number, _exchange(grid, back, self._content(key, mixing=True), _MIX))
            self._state = moved._replace(round=moved.round + 1)
            if on_round is not None:
                on_round(self._state, metrics)

    def _mixed(self, number: int, replies: Sequence[Any]) -> dict[str, float]:
        """The means of what clients tell of their mixing; one that failed kept what it had."""
        told: dict[str, list[float]] = {}
        for reply in replies:
            if reply.has_error():
                _log.warning("round %d: a client kept what it had: %s", number + 1, reply.error.reason)
                continue
            for name, value in reply.content["config"].items():
                told.setdefault(name, []).append(float(value))
        return {name: float(np.mean(values)) for name, values in told.items()}

    def _nodes(self, grid: Any, wait: float) -> dict[int, int]:
        """The node of every client."""
        count, late = self._data.total_clients, time.monotonic() + wait
        nodes: dict[int, int] = {}
        while True:
            there = list(grid.get_node_ids())
            if len(there) >= count:
                replies = [one for one in _exchange(grid, there, _flower().RecordDict(), _WHO) if not one.has_error()]
                nodes = {int(one.content["config"][PARTITION]): one.metadata.src_node_id for one in replies}
            missing = sorted(set(range(count)) - set(nodes))
            if not missing:
                return nodes
            if time.monotonic() > late:
                raise ValueError(
                    f"{len(missing)} of {count} clients did not come in {wait:g} s, e.g. the one of {PARTITION} {missing[0]}"
                )
            time.sleep(0.5)

    def _content(self, key: Key, *, mixing: bool = False) -> Any:
        """What a client downloads."""
        flwr, setting = _flower(), self._setting
        common = masks.split(self._state.model, _common(setting))[0]
        extra = self._state.extra if setting.method.sends_extra or mixing else ()
        keys = {"key": _words(key), "init": _words(self._init_key), "impl": self._impl, "round": int(self._state.round)}
        return flwr.RecordDict({"model": _record((common, extra)), "config": flwr.ConfigRecord(keys)})

    def _collected(self, number: int, replies: Sequence[Any]) -> tuple[Any, Outputs]:
        """(the sum of the uploads, what is known of each client); a client that failed did not return."""
        failed = [one for one in replies if one is None or one.has_error()]
        if len(failed) == len(replies):
            reason = next((one.error.reason for one in failed if one is not None), "no replies")
            raise ValueError(f"every client failed in round {number + 1}: {reason}")
        sums, outputs = [], []
        shape = self._shapes.outputs
        for one in replies:
            if one is None or one.has_error():
                reason = "no reply" if one is None else one.error.reason
                _log.warning("round %d: a client is left out: %s", number + 1, reason)
                lost = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shape)
                outputs.append(lost._replace(broken=np.int32(-1)))
                continue
            found = _tree(one.content["upload"], (self._shapes.sums, shape), self._impl)
            sums.append(found[0])
            outputs.append(found[1])
        total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *sums)
        return total, jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *outputs)


class _Node:
    """What runs on the nodes. It is sent to other processes, so that its programs are compiled where they run."""

    def __init__(self, method: Method, federation: Federation, data: Any) -> None:
        self._setting, self._data = Setting(method, federation), data
        self._programs: dict[str, Any] = {}
        self._mine: dict[int, FederatedData] = {}

    def train(self, message: Any, context: Any) -> Any:
        """A client's round."""
        id_, data, state, key, seen, kept = self._received(message, context)

        def rule(key: Key, id_: jax.Array, seen: jax.Array, kept: Kept, state: State, data: FederatedData, whole: Key) -> Any:
            member, given = CohortClient(jnp.int32(0), seen), Context(state, data, id_[None], whole)
            return clients.client_round(self._setting, key, id_, member, kept, given)

        own = jax.random.fold_in(tagged(key, "clients"), id_)
        update = self._program("train", rule)(own, jnp.int32(id_), seen, kept, state, data, key)
        _keep(context, update.kept, bool(seen) or bool(update.outputs.took_part))
        flwr = _flower()
        content = flwr.RecordDict({"upload": _record((update.sums, update.outputs))})
        return flwr.Message(content, reply_to=message)

    def mix(self, message: Any, context: Any) -> Any:
        """What a client makes of its own rows after the server has moved, see `contract.Collaboration`."""
        id_, data, state, key, _, kept = self._received(message, context, mixing=True)

        def rule(key: Key, id_: jax.Array, kept: Kept, state: State, data: FederatedData) -> tuple[Kept, dict[str, jax.Array]]:
            yes, no = jnp.ones(1, bool), jnp.full(1, -1, jnp.int32)
            outputs = Outputs({}, (), yes, yes, no, ())
            rows = jax.tree.map(lambda leaf: leaf[None], kept)
            found = server.collaborate(self._setting, key, state, rows, outputs, id_[None], jnp.zeros(1, jnp.int32), data)
            return jax.tree.map(lambda leaf: leaf[0], found)

        new, diagnostics = self._program("mix", rule)(key, jnp.int32(id_), kept, state, data)
        _keep(context, new, True)
        return _reply(message, {name: float(value) for name, value in diagnostics.items()})

    def _program(self, name: str, function: Callable[..., Any]) -> Any:
        if name not in self._programs:
            self._programs[name] = jax.jit(in_precision(self._setting.federation.precision, function))
        return self._programs[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": {}}

    def _received(
        self, message: Any, context: Any, *, mixing: bool = False
    ) -> tuple[int, FederatedData, State, Key, jax.Array, Kept]:
        """(the client's id, its data, the state as it came, the round's key, whether it has taken part, what it kept)."""
        method, id_ = self._setting.method, int(context.node_config[PARTITION])
        data, config = self._of(id_), message.content["config"]
        impl = str(config["impl"])
        key, init_key = (_key(np.array(config[name], np.uint32), impl) for name in ("key", "init"))
        model = self._program("init", lambda key: method.init(tagged(key, "model")))(init_key)
        own = masks.split(model, self._setting.personal)[0]
        # Frozen leaves are those of the first model for ever, and a client that is new has its personal ones.
        common, rest = masks.split(model, _common(self._setting))
        extra = jax.eval_shape(lambda model: method.init_extra(model, data), model)
        sent = method.sends_extra or mixing
        common, came = _tree(message.content["model"], (common, extra if sent else ()), impl)
        zeros = partial(_zeros, impl=impl)
        extra = came if sent else jax.tree.map(zeros, extra)
        memory = jax.eval_shape(lambda key, model: method.init_memory(key, model, data.total_clients), key, model)
        seen, kept = jnp.asarray(False), Kept(own, jax.tree.map(zeros, memory), ())
        if "kept" in context.state:
            personal, memory = _tree(context.state["kept"], (kept.personal, kept.memory), impl)
            seen = jnp.asarray(bool(context.state["facts"]["seen"]))
            kept = kept._replace(personal=personal, memory=memory)
        nothing: Any = None
        rows = (nothing, nothing, nothing, nothing, nothing)
        state = State(masks.merge(common, rest), (), extra, Aggregation((), ()), *rows, jnp.int32(config["round"]))
        return id_, data, state, key, seen, kept

    def _of(self, id_: int) -> FederatedData:
        """The data of one client."""
        if id_ not in self._mine:
            given = self._data
            self._mine[id_] = given.select(np.array([id_], np.int32)) if isinstance(given, FederatedData) else given(id_)
            if self._mine[id_].num_clients != 1 or int(self._mine[id_].ids_of(np.zeros(1, np.int32))[0]) != id_:
                raise ValueError(f"the data of {PARTITION} {id_} must be those of the client with this id alone")
        return self._mine[id_]


def _means(outputs: Outputs) -> dict[str, float]:
    """Each metric's mean over the clients that returned; NaN if none did."""
    returned = np.asarray(outputs.returned)
    if not returned.any():
        return dict.fromkeys(outputs.metrics, float("nan"))
    return {name: float(np.mean(np.asarray(values)[returned])) for name, values in outputs.metrics.items()}


def _common(setting: Setting) -> Any:
    """The leaves that travel."""
    return masks.having(setting.method.roles, Role.SHARED, Role.BUFFER)


def _keep(context: Any, kept: Kept, seen: bool) -> None:
    flwr = _flower()
    context.state["kept"] = _record((kept.personal, kept.memory))
    context.state["facts"] = flwr.ConfigRecord({"seen": seen})


def _bare(state: State) -> State:
    """The state without rows and without what stays at the server."""
    nothing: dict[str, Any] = dict.fromkeys(("personal", "memory", "residual", "seen"))
    return state._replace(optimizer=(), aggregation=Aggregation((), ()), **nothing)


def _exchange(grid: Any, nodes: Sequence[int], content: Any, kind: str) -> Any:
    flwr = _flower()
    sent = [flwr.Message(content, message_type=kind, dst_node_id=node) for node in nodes]
    return grid.send_and_receive(sent)


def _reply(message: Any, facts: Mapping[str, float]) -> Any:
    flwr = _flower()
    return flwr.Message(flwr.RecordDict({"config": flwr.ConfigRecord(dict(facts))}), reply_to=message)


def _record(tree: PyTree) -> Any:
    """The leaves of a tree, in order."""
    flwr = _flower()
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]
    return flwr.ArrayRecord(numpy_ndarrays=[np.asarray(leaf) for leaf in leaves])


def _tree(record: Any, like: PyTree, impl: str) -> PyTree:
    """The inverse of `_record`; `like` has the structure and the types, of which NumPy does not know all, but not whose keys."""
    shapes, structure = jax.tree.flatten(like)
    arrays = record.to_numpy_ndarrays()
    if len(arrays) != len(shapes):
        raise ValueError(
            f"{len(arrays)} arrays came where {len(shapes)} were expected: do client and server run the same method?"
        )
    leaves = []
    for array, shape in zip(arrays, shapes, strict=True):
        if is_key(shape):
            leaves.append(_key(array, impl))
        else:
            # NumPy keeps bytes of bfloat16, but not their type.
            untyped = array.dtype.kind == "V" and array.dtype.itemsize == shape.dtype.itemsize
            typed = array.view(shape.dtype) if untyped else array
            if typed.dtype != shape.dtype or typed.shape != shape.shape:
                raise ValueError(
                    f"{array.dtype}{list(array.shape)} came where {shape.dtype}{list(shape.shape)} was expected: do client and "
                    "server run the same method in the same precision?"
                )
            leaves.append(jnp.asarray(typed))
    return jax.tree.unflatten(structure, leaves)


def _words(key: Key) -> list[int]:
    return [int(word) for word in np.asarray(jax.random.key_data(key)).reshape(-1)]


def _key(words: np.ndarray, impl: str) -> Key:
    return jax.random.wrap_key_data(jnp.asarray(words), impl=impl)


def _zeros(leaf: Any, impl: str) -> jax.Array:
    return jax.random.key(0, impl=impl) if is_key(leaf) else jnp.zeros(leaf.shape, leaf.dtype)


class _Names:
    """What this module uses of flwr."""

    def __init__(self) -> None:
        from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp

        self.ArrayRecord, self.ConfigRecord, self.Message, self.RecordDict = ArrayRecord, ConfigRecord, Message, RecordDict
        self.ClientApp, self.ServerApp = ClientApp, ServerApp


def _flower() -> Any:
    try:
        return _Names()
    except ImportError as error:
        raise ImportError(f"Flower apps need the package flwr: pip install 'flwr[simulation]' ({error})") from None
