"""Bytes follow from masks, slots and collaboration; counts here are made by hand from the layers' sizes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import costs, masks, models, participation
from fedjax_meta.contract import Collaboration, Method, Trained, received_model
from fedjax_meta.costs import RASPBERRY_PIS, Device, Traffic
from fedjax_meta.data import from_clients
from fedjax_meta.federation import Federation
from fedjax_meta.methods import (
    fedamp,
    fedavg,
    fedavg_adam,
    fedbabu,
    fedmeta_per_metasgd,
    fedper,
    local_only,
    mtfl,
    mtfl_fedavg_adam,
    pfedhn,
)
from fedjax_meta.rounds import federate
from fedjax_meta.task import classification
from fedjax_meta.uploads.quantize import quantize, quantized
from tests import problems

WEIGHTS, AFFINE, STATISTICS = 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10, 400, 400
FLOAT = 8  # the tests run in float64


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return from_clients([(rng.normal(size=(30, 784)), np.arange(30) % 10) for _ in range(4)])


@pytest.mark.parametrize(
    ("builder", "numbers"),
    [
        (fedavg, WEIGHTS + AFFINE + STATISTICS),
        (partial(mtfl, private="none"), WEIGHTS + AFFINE + STATISTICS),
        (partial(mtfl, private="bn_stats"), WEIGHTS + AFFINE),
        (partial(mtfl, private="bn_affine"), WEIGHTS + STATISTICS),
        (partial(mtfl, private="bn"), WEIGHTS),
        # Federated Adam: two moments of every trainable leaf that is shared, and the step count.
        (fedavg_adam, 3 * (WEIGHTS + AFFINE) + STATISTICS + 1),
        (mtfl_fedavg_adam, 3 * WEIGHTS + 1),
        (fedper, WEIGHTS + AFFINE + STATISTICS - 2010),
        (fedmeta_per_metasgd, 2 * (WEIGHTS + AFFINE - 2010) + STATISTICS),
        (local_only, 0),
        # Its own model up and a mixture down; the mean for new clients stays at the server.
        (fedamp, WEIGHTS + AFFINE + STATISTICS),
        # The head never moves: it is known from the start.
        (fedbabu, WEIGHTS + AFFINE + STATISTICS - 2010),
    ],
)
def test_bytes_of_one_client(data, builder, numbers):
    assert costs.traffic(builder(models.mtfl_mlp()), data) == Traffic(FLOAT * numbers, FLOAT * numbers)


def test_personal_leaves_that_are_averaged_are_sent(data):
    averaged = federate(fedper(models.mtfl_mlp()), Federation(average_personal=True))
    sent = costs.traffic(averaged, data)
    assert sent.up - sent.down == 2010 * FLOAT


def test_a_hypernetwork_sends_the_weights_that_it_generates():
    """A client downloads its model of 39 parameters and uploads by how much it moved; the hypernetwork stays at the server."""
    assert costs.traffic(pfedhn(problems.task()), problems.data()) == Traffic(39 * FLOAT, 39 * FLOAT)


@pytest.mark.parametrize("name", ["fedamp", "l2gd"])
def test_a_model_that_serves_as_statistic_and_for_collaboration_is_sent_once(name):
    assert costs.traffic(problems.build(name), problems.data()) == Traffic(39 * FLOAT, 39 * FLOAT)


BODY, MODEL, CLASSES, FEATURES = 24, 39, 3, 4
HEAD = MODEL - BODY
BYTES = {
    # (down, up). Some methods send one number more: an amount of a client, or its loss.
    "feddyn": (FLOAT * MODEL, FLOAT * MODEL),
    "scaffold": (FLOAT * 2 * MODEL, FLOAT * 2 * MODEL),
    "fednova": (FLOAT * MODEL, FLOAT * (MODEL + 1)),
    "qfedavg": (FLOAT * MODEL, FLOAT * (MODEL + 1)),
    # lambda_k comes down; up go lambda_k as what divides the sum, the same as what is projected, and the loss.
    "afl": (FLOAT * (MODEL + 1), FLOAT * (MODEL + 3)),
    "ditto": (FLOAT * MODEL, FLOAT * MODEL),
    "fedala": (FLOAT * MODEL, FLOAT * MODEL),
    "moon": (FLOAT * MODEL, FLOAT * MODEL),
    "knn_per": (FLOAT * MODEL, FLOAT * MODEL),
    "fedrod": (FLOAT * MODEL, FLOAT * MODEL),
    "heur_fedamp": (FLOAT * MODEL, FLOAT * MODEL),
    "fedfomo": (FLOAT * MODEL, FLOAT * MODEL),
    "lg_fedavg": (FLOAT * HEAD, FLOAT * HEAD),
    "fedas": (FLOAT * BODY, FLOAT * (BODY + 1)),
    # The server's model in the warm-up, the mixture after it; one model up.
    "pfedsim": (FLOAT * MODEL, FLOAT * MODEL),
    # The global and the customised model; a model up and a bit, here a byte, for each critical entry.
    "fedcac": (FLOAT * 2 * MODEL, FLOAT * MODEL + MODEL),
    "fedproto": (FLOAT * CLASSES * FEATURES + CLASSES, FLOAT * (CLASSES * FEATURES + CLASSES)),
    "feddbe": (FLOAT * (MODEL + FEATURES) + 1, FLOAT * (MODEL + FEATURES)),
    # Embeddings of the classes, and two dense layers with scale and shift, beside the body.
    "gpfl": (FLOAT * (BODY + CLASSES * FEATURES + 2 * (FEATURES**2 + 3 * FEATURES)),) * 2,
    # A linear model of the features and a 1 for each class.
    "mocha": (FLOAT * CLASSES * (FEATURES + 1),) * 2,
    # The model of a client's cluster; a byte a cluster says which there are, two numbers of 4 where the client is and was.
    "cfl": (FLOAT * MODEL + 4 + 8, FLOAT * MODEL + 8),
    # All models and, up, which of them the client took.
    "ifca": (FLOAT * 2 * MODEL, FLOAT * (2 * MODEL + 2)),
    "fedem": (FLOAT * 3 * MODEL,) * 2,
    "fedgp": (FLOAT * BODY,) * 2,
    # Beside the body: centroids and which are known; the head, sums and numbers of each class, v and h. A mixed head comes back.
    "fedpac": (FLOAT * (MODEL + CLASSES * FEATURES) + CLASSES, FLOAT * (MODEL + 2 * CLASSES * FEATURES + CLASSES + 1)),
    # A rate for each of 5 steps of each of 4 leaves.
    "mamlpp": (FLOAT * (MODEL + 4 * 5),) * 2,
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_methods_that_send_more_or_less_than_a_model(name):
    assert costs.traffic(problems.build(name), problems.data()) == Traffic(*BYTES[name])


def rules(**overrides):
    task = problems.task()
    everything = masks.everything(task)
    fields = {
        "init": task.init,
        "client": lambda key, received, data: Trained(
            jax.tree.map(lambda leaf: leaf + 0.0, received.model), {}, received.memory
        ),
        "personalize": received_model,
        "predict": task.predict,
        "roles": masks.roles(masks.nothing(task), everything),
    }
    return Method(**(fields | overrides))


def test_bytes_follow_from_roles_and_not_from_what_a_rule_returns():
    """A rule that returns the model as it came, or a copy of it, sends the same: its shared leaves."""
    same = costs.traffic(rules(client=lambda key, received, data: Trained(received.model, {})), problems.data())
    assert costs.traffic(rules(), problems.data()) == same == Traffic(39 * FLOAT, 39 * FLOAT)


def test_frozen_leaves_are_not_sent():
    task = problems.task()
    head = masks.resolve("head", task)
    roles = masks.roles(masks.nothing(task), masks.everything(task), frozen=head)
    assert costs.traffic(rules(roles=roles), problems.data()) == Traffic(24 * FLOAT, 24 * FLOAT)


@pytest.mark.parametrize(
    ("reads", "gives", "up", "down"),
    [("personal", "personal", 15, 15), ("personal", "memory", 15, 18), ("personal+memory", "", 33, 0), ("", "memory", 0, 18)],
)
def test_what_clients_give_each_other_is_counted_as_declared(reads, gives, up, down):
    """Heads of 15 numbers are personal and memories have 18; the body has 24 and the server's extra state 2."""
    task = problems.task()
    method = rules(
        roles=masks.roles(masks.resolve("head", task), masks.everything(task)),
        init_memory=lambda *_: {"a": jnp.zeros(7), "b": jnp.zeros(11)},
        init_extra=lambda *_: jnp.zeros(2),
        collaborate=Collaboration(lambda key, state, cohort, data: (cohort.personal, cohort.memory), reads, gives),
    )
    body = 24
    assert costs.traffic(method, problems.data()) == Traffic(FLOAT * (body + 2 + down), FLOAT * (body + up))
    silent = dataclasses.replace(method, sends_extra=False)
    assert costs.traffic(silent, problems.data()).down == FLOAT * (body + down)


def test_statistics_and_what_is_sent_separately_are_counted():
    def client(key, received, data):
        return Trained(received.model, {}, statistics=jnp.zeros(5), stacked=jnp.zeros(3, jnp.float32))

    sent = costs.traffic(rules(client=client), problems.data())
    assert sent == Traffic(39 * FLOAT, (39 + 5) * FLOAT + 3 * 4)


def test_quantisation_is_unbiased_and_stays_in_range():
    rng = np.random.default_rng(0)
    tree = {"a": jnp.asarray(rng.normal(size=50)), "n": jnp.arange(3), "same": jnp.full(4, 0.3)}
    many = jax.vmap(lambda key: quantized(key, tree, 2))(jax.random.split(jax.random.key(0), 4000))
    found = np.asarray(many["a"])
    low, high = float(tree["a"].min()), float(tree["a"].max())
    levels = low + (high - low) * np.arange(4) / 3
    assert np.max(np.min(np.abs(found[..., None] - levels), -1)) < 1e-12
    # The error is at most one level's width times a coin: its mean over 4,000 has a deviation below width / 2 / sqrt(4000).
    np.testing.assert_allclose(found.mean(0), tree["a"], atol=5 * (high - low) / 3 / 2 / np.sqrt(4000))
    np.testing.assert_array_equal(many["n"][7], tree["n"])
    np.testing.assert_array_equal(many["same"][7], tree["same"])


def test_training_with_quantised_uploads_keeps_variances_positive():
    algorithm = problems.build(fedavg_adam, problems.normed_task(), cohort_size=5, uploads=(quantize(3),))
    state = algorithm.init(jax.random.key(0), problems.data())
    step = jax.jit(algorithm.round)
    for r in range(3):
        state, _ = step(jax.random.key(r), state, problems.data())
    assert np.all(np.asarray(state.model.variables["batch_stats"]["bn1"]["var"]) > 0)
    assert all(np.all(np.asarray(leaf) >= 0) for leaf in jax.tree.leaves(state.model.slots[0].nu))


def test_flops_of_a_dense_network(data):
    # Forward and two products back for each layer but the first, which has no gradient for its inputs; the rest is small.
    products = 20 * 2 * (2 * 784 * 200 + 3 * 200 * 200 + 3 * 200 * 10)
    assert costs.gradient_flops(models.mtfl_mlp(), data, 20) == pytest.approx(products, rel=0.02)


@pytest.mark.parametrize("length", [3, 20])
def test_flops_of_a_scan_count_in_each_turn(length):
    """The same network with its loop written out; a scan adds the steps that take and put its rows."""

    def recurrent(written_out):
        def step(hidden, x, weights):
            return jnp.tanh(hidden @ weights + x)

        def predict(variables, x):
            rows, hidden = x.swapaxes(0, 1), jnp.zeros((len(x), 32))
            if written_out:
                for row in rows:
                    hidden = step(hidden, row, variables["w"])
            else:
                hidden = jax.lax.scan(lambda h, row: (step(h, row, variables["w"]), None), hidden, rows)[0]
            return hidden @ variables["v"]

        return classification(lambda key: {"w": jnp.ones((32, 32)), "v": jnp.ones((32, 3))}, predict)

    rng = np.random.default_rng(0)
    sequences = from_clients([(rng.normal(size=(8, length, 32)), rng.integers(0, 3, 8))], num_classes=3)
    found, wanted = (costs.gradient_flops(recurrent(written_out), sequences, 8) for written_out in (False, True))
    assert found == pytest.approx(wanted, rel=0.15)
    # Forward and two products back, but none for the first hidden state.
    products = (3 * length - 1) * 2 * 8 * 32 * 32
    assert products < wanted < 1.2 * products


def test_time_of_a_round():
    slow, fast = Device("slow", 1, flops=1e6, down=100, up=50), Device("fast", 3, flops=4e6, down=100, up=100)
    testbed = costs.DeviceTestbed((slow, fast), aggregation=1000)
    time = costs.round_time(Traffic(300, 200), 2e6, testbed, cohort_size=5)
    assert time == (3.0, 2.0, 4.0, 1.0) and time.total == 10
    assert time.shares == {"download": 0.3, "train": 0.2, "upload": 0.4, "aggregate": 0.1}
    seconds = costs.seconds_by_client(Traffic(300, 200), 2e6, testbed, num_clients=8)
    assert seconds.tolist() == [9.0] * 2 + [5.5] * 6
    late = participation.deadline(seconds, limit=6.0, partial=False)
    assert [bool(late(jax.random.key(0), i).returned) for i in (1, 2)] == [False, True]


def test_the_papers_order_on_the_testbed(data):
    """Independent < FL and MTFL with FedAvg < MTFL with FedAvg-Adam, and training is the largest share (MTFL §5)."""
    task = models.mtfl_mlp()
    work = 15 * costs.gradient_flops(task, data, 20)
    times = [
        costs.round_time(costs.traffic(builder(task), data), work, RASPBERRY_PIS, cohort_size=10)
        for builder in (local_only, mtfl, mtfl_fedavg_adam)
    ]
    assert times[0].total < times[1].total < times[2].total
    assert times[0].shares["train"] == 1 and times[1].shares["train"] > 0.5


def test_bad_rates():
    broken = costs.DeviceTestbed((Device("broken", 1, flops=0.0, down=1, up=1),), 1.0)
    with pytest.raises(ValueError, match="rates"):
        costs.round_time(Traffic(1, 1), 1.0, broken, cohort_size=1)
    with pytest.raises(ValueError, match="cohort_size=0"):
        costs.round_time(Traffic(1, 1), 1.0, RASPBERRY_PIS, cohort_size=0)
