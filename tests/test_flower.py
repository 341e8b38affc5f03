"""Methods as Flower apps: the parameters of the simulation, through Flower's own messages."""

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import flower
from fedjax_meta.blocks import run_keys
from tests import problems
from tests.test_contract import method_of

KEY = jax.random.key(5)
FEDERATION = fm.Federation(cohort_size=4)
FAST = {"fedavg", "fedadam", "fedper", "scaffold", "ditto", "l2gd", "fedmeta_per_metasgd"}
REFUSED = {"afl", "cfl", "fedamp", "fedcac", "fedfomo", "fedpac", "heur_fedamp", "mocha", "pfedhn", "pfedhn_pc", "pfedsim"}


def simulated(method, rounds, federation=FEDERATION, key=KEY):
    """The states after each round, and the cohort's mean metrics."""
    algorithm = fm.federate(method, federation)
    init_key, round_key, _ = run_keys(key)
    state, found = jax.jit(algorithm.init)(init_key, problems.data()), []
    step = jax.jit(algorithm.round)
    for number in range(rounds):
        state, info = step(jax.random.fold_in(round_key, number), state, problems.data())
        found.append((state, {name: float(np.mean(values)) for name, values in info.metrics.items()}))
    return found


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Flower makes messages only inside a task."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def local_grid(app, count, *, broken=()):
    """Flower's grid in this process: nodes 100, 101, ... hold the clients in reverse, and what they get are copies."""
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.serverapp import Grid

    class Local(Grid):
        def __init__(self):
            who = {100 + i: {flower.PARTITION: count - 1 - i} for i in range(count)}
            self.contexts = {node: Context(1, node, config, RecordDict(), {}) for node, config in who.items()}
            self.sent = []

        def get_node_ids(self):
            return list(self.contexts)

        def send_and_receive(self, messages, *, timeout=None):
            replies = []
            for message in messages:
                self.sent.append(message)
                context = self.contexts[message.metadata.dst_node_id]
                if context.node_config[flower.PARTITION] in broken and message.metadata.message_type == "train":
                    replies.append(Message(Error(0, "out of power"), reply_to=message))
                else:
                    message.content = pickle.loads(pickle.dumps(message.content))
                    replies.append(app(message, context))
            return reversed(replies)

    Local.__abstractmethods__ = frozenset()
    return Local()


def fielded(method, rounds, federation=FEDERATION, *, key=KEY, data=None, **options):
    """The same as `simulated`, by the two apps; the states have no rows of clients."""
    data, found = problems.data() if data is None else data, []
    app = flower.client_app(method, data, federation=federation)
    serve = flower.server_app(
        method,
        data.select(np.array([2])),
        rounds=rounds,
        key=key,
        federation=federation,
        on_round=lambda state, metrics: found.append((state, metrics)),
    )
    grid = local_grid(app, data.num_clients, **options)
    serve(grid, None)
    return found, grid


@pytest.mark.parametrize("name", problems.sampled(FAST, without=REFUSED))
def test_three_rounds_give_the_parameters_of_the_simulation(name):
    method = method_of(name)
    assert flower.why_not(method, FEDERATION, problems.data()) is None
    expected = simulated(method, 3)
    found, grid = fielded(method, 3)
    for (state, metrics), (wanted, measured) in zip(found, expected, strict=True):
        for part in ("model", "optimizer", "extra", "round"):
            close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)  # noqa: E731
            jax.tree.map(close, getattr(state, part), getattr(wanted, part))
        assert metrics == pytest.approx(measured, rel=1e-6, nan_ok=True)
    # What clients keep is in their contexts, and equals the rows of the simulation.
    last = expected[-1][0]
    kept = {node.node_config[flower.PARTITION]: node.state for node in grid.contexts.values()}
    for i, seen in enumerate(np.asarray(last.seen)):
        assert ("kept" in kept[i]) == bool(seen)
        if seen:
            rows = jax.tree.leaves(jax.tree.map(lambda leaf, i=i: leaf[i], (last.personal, last.memory)))
            for row, array in zip(rows, kept[i]["kept"].to_numpy_ndarrays(), strict=True):
                plain = jax.random.key_data(row) if jax.dtypes.issubdtype(row.dtype, jax.dtypes.prng_key) else row
                np.testing.assert_allclose(array, plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("precision", "written"), [("float32", "Precision.HIGHEST"), ("tf32", "TF32")])
def test_a_node_computes_in_the_precision_of_the_federation(precision, written):
    node = flower._Node(method_of("fedavg"), fm.Federation(precision=precision), problems.data())
    with fm.runtime.compiling_for("gpu"):
        text = str(jax.make_jaxpr(node._program("product", lambda a: a @ a))(np.ones((2, 2))))
    assert written in text


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_whose_server_needs_more_are_refused_by_name(name):
    method = method_of(name)
    with pytest.raises(ValueError, match=f"{method.name} cannot run on Flower: the server"):
        flower.server_app(method, problems.data(), rounds=1, key=KEY)
    with pytest.raises(ValueError, match="cannot run on Flower"):
        flower.client_app(method, problems.data())


@pytest.mark.parametrize(
    ("option", "value"),
    [("aggregator", fm.aggregate.median), ("uploads", (fm.uploads.clip(1.0),)), ("average_personal", True)],
)
def test_federations_that_need_more_are_refused(option, value):
    with pytest.raises(ValueError, match=f"fedavg cannot run on Flower: a federation with {option}"):
        flower.client_app(method_of("fedavg"), problems.data(), federation=fm.Federation(**{option: value}))


def test_only_what_is_declared_travels():
    for name in ("fedper", "scaffold", "local_only", "fedbabu"):
        method = method_of(name)
        grid = fielded(method, 1)[1]
        down = next(m for m in grid.sent if m.metadata.message_type == "train").content["model"]
        bytes_ = sum(array.nbytes for array in down.to_numpy_ndarrays())
        assert bytes_ == fm.costs.traffic(fm.federate(method, FEDERATION), problems.data()).down


def test_a_client_that_fails_is_left_out_of_its_round():
    method = method_of("fedavg")
    ids = np.asarray(fm.federate(method, FEDERATION).cohort(jax.random.fold_in(run_keys(KEY)[1], 0), 0, 7))
    found, _ = fielded(method, 1, broken=[int(ids[0])])

    def without(key, client):
        return fm.participation.Participation(work=1.0, crashed=client == ids[0], returned=True)

    wanted = simulated(method, 1, fm.Federation(cohort_size=4, participation=without))[0][0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found[0][0].model, wanted.model)
    with pytest.raises(ValueError, match="every client failed in round 1: out of power"):
        fielded(method, 1, broken=range(7))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_clients_draw_from_keys_of_the_servers_kind(impl):
    key, method = jax.random.key(5, impl=impl), method_of("fedper")
    wanted, found = simulated(method, 2, key=key)[-1][0], fielded(method, 2, key=key)[0][-1][0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), found.model, wanted.model)


def test_clients_whose_training_broke_have_not_taken_part():
    data = problems.data()
    spoilt = dataclasses.replace(data, x=np.full_like(np.asarray(data.x), np.nan))
    found, grid = fielded(method_of("fedper"), 1, data=spoilt)
    assert np.isnan(found[0][1]["loss"])
    facts = [node.state["facts"]["seen"] for node in grid.contexts.values() if "facts" in node.state]
    assert facts == [False] * FEDERATION.cohort_size


def test_arrays_of_another_type_or_shape_are_refused():
    class Record:
        def __init__(self, *arrays):
            self._arrays = arrays

        def to_numpy_ndarrays(self):
            return list(self._arrays)

    like = {"a": np.zeros(4, np.float32), "b": jax.numpy.zeros(2, jax.numpy.bfloat16)}
    half = np.asarray(jax.numpy.array([1.5, -2.0], jax.numpy.bfloat16)).view("V2")
    tree = flower._tree(Record(np.arange(4, dtype=np.float32), half), like, "threefry2x32")
    assert tree["a"].tolist() == [0, 1, 2, 3] and tree["b"].tolist() == [1.5, -2.0]
    for odd in (np.ones(4, np.int32), np.ones(4), np.ones(1, np.float32), np.ones(8, np.float16)):
        with pytest.raises(ValueError, match=r"came where float32\[4\] was expected"):
            flower._tree(Record(odd, half), like, "threefry2x32")


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.clientapp", None)
    with pytest.raises(ImportError, match="pip install 'flwr"):
        flower.client_app(method_of("fedavg"), problems.data())


RAY = """
import sys

import jax
import numpy as np
from flwr.simulation import run_simulation

import fedjax_meta as fm
from fedjax_meta import flower
from fedjax_meta.study import from_tree
from tests.study.common import TREE

name = sys.argv[1]
clients = from_tree(TREE).scenarios["pairs"].build()
options = {"lr": 0.1, "batch_size": 20}
method, federation = fm.METHODS[name](clients.task, **options), fm.Federation(cohort_size=4, devices=1)
states = []
how = {"rounds": 3, "key": jax.random.key(1), "federation": federation}
run_simulation(
    flower.server_app(method, clients.train, on_round=lambda state, _: states.append(state), **how),
    flower.client_app(method, clients.train, federation=federation),
    num_supernodes=clients.train.num_clients,
    backend_config={"client_resources": {"num_cpus": 1}},
)
state, _ = fm.simulate(method, clients.train, **how)
assert len(states) == 3, len(states)
for part in ("model", "extra", "optimizer"):
    found, wanted = (jax.tree.leaves(getattr(one, part)) for one in (states[-1], state))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
print("the same parameters")
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper"])
def test_flowers_own_simulation_gives_the_parameters_of_ours(name):
    pytest.importorskip("flwr.simulation")
    pytest.importorskip("ray")
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", RAY, name],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, "PYTHONPATH": str(root), "FLWR_TELEMETRY_ENABLED": "0"},
        check=False,
    )
    assert run.returncode == 0 and "the same parameters" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]
