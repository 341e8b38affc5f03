"""Bytes follow from masks, slots and collaboration; counts here are made by hand from the layers' sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import aggregate, costs, masks, models, participation
from fedjax_meta.algorithm import Received, Trained, federated
from fedjax_meta.methods import fedavg, fedavg_adam, fedmeta_per, fedper, local_only, mtfl
from fedjax_meta.costs import RASPBERRY_PIS, Device, Traffic
from fedjax_meta.data import from_clients
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
        (partial(fedavg_adam, private="none"), 3 * (WEIGHTS + AFFINE) + STATISTICS + 1),
        (fedavg_adam, 3 * WEIGHTS + 1),
        (fedper, WEIGHTS + AFFINE + STATISTICS - 2010),
        (partial(fedmeta_per, learned_rates=True), 2 * (WEIGHTS + AFFINE - 2010) + STATISTICS),
        (local_only, 0),
    ],
)
def test_bytes_of_one_client(data, builder, numbers):
    assert costs.traffic(builder(models.mtfl_mlp()), data) == Traffic(FLOAT * numbers, FLOAT * numbers)


def test_personal_leaves_that_are_averaged_are_sent(data):
    sent = costs.traffic(fedper(models.mtfl_mlp(), average_personal=True), data)
    assert sent.up - sent.down == 2010 * FLOAT


def test_quantised_uploads(data):
    task = models.mtfl_mlp()
    plain, small = (costs.traffic(mtfl(task, upload_bits=bits), data) for bits in (None, 4))
    # 6 leaves: two numbers in full for each, and half a byte a weight.
    assert small.down == plain.down and small.up == WEIGHTS // 2 + 6 * 2 * FLOAT


def rules(**overrides):
    task = problems.task()
    everything = jax.tree.map(lambda _: True, masks.variables_shape(task))
    return {
        "init": task.init,
        "client": lambda key, received, data: Trained(
            jax.tree.map(lambda leaf: 0.9 * leaf, received.model), jnp.ones(()), {}, received.memory
        ),
        "personalize": lambda key, received, support: received.model,
        "predict": task.predict,
        "personal": masks.nothing(task),
        "trainable": everything,
        **overrides,
    }


def test_a_frozen_head_is_not_sent():
    def body_only(key, received: Received, data):
        return Trained(
            {**received.model, "body": jax.tree.map(lambda leaf: leaf - 1, received.model["body"])}, jnp.ones(()), {}
        )

    sent = costs.traffic(federated(**rules(client=body_only)), problems.data())
    assert sent == Traffic(24 * FLOAT, 24 * FLOAT)  # 5 x 4 weights and 4 shifts of the body; the head has 15


def test_what_clients_give_each_other_is_counted():
    """Heads are personal, but the server mixes them: they travel both ways. A memory that it only sees goes up alone."""

    def collaborate(key, state, cohort, data):
        mix = jnp.full((3, 3), 1 / 3) + 0 * jnp.sum(cohort.memory["seen"])
        return aggregate.combine(mix, cohort.personal), cohort.memory

    algorithm = federated(
        **rules(
            personal=masks.resolve("head", problems.task()),
            init_memory=lambda *_: {"seen": jnp.zeros(7), "unseen": jnp.zeros(11)},
            init_extra=lambda *_: jnp.zeros(2),
            collaborate=collaborate,
            cohort_size=3,
        )
    )
    body, head = 24, 15
    assert costs.traffic(algorithm, problems.data()) == Traffic(FLOAT * (body + 2 + head), FLOAT * (body + head + 7))


def test_statistics_and_what_stands_apart_are_counted():
    def client(key, received, data):
        model = jax.tree.map(lambda leaf: leaf - 1, received.model)
        return Trained(model, jnp.ones(()), {}, statistics=jnp.zeros(5), stacked=jnp.zeros(3, jnp.float32))

    sent = costs.traffic(federated(**rules(client=client)), problems.data())
    assert sent == Traffic(39 * FLOAT, (39 + 5) * FLOAT + 3 * 4)


def test_an_algorithm_that_does_not_tell():
    with pytest.raises(ValueError, match="exchange"):
        costs.traffic(fedavg(problems.task())._replace(exchange=None), problems.data())


def test_quantisation_is_unbiased_and_stays_in_range():
    rng = np.random.default_rng(0)
    tree = {"a": jnp.asarray(rng.normal(size=50)), "n": jnp.arange(3), "same": jnp.full(4, 0.3)}
    many = jax.vmap(lambda key: aggregate.quantized(key, tree, 2))(jax.random.split(jax.random.key(0), 4000))
    found = np.asarray(many["a"])
    low, high = float(tree["a"].min()), float(tree["a"].max())
    levels = low + (high - low) * np.arange(4) / 3
    assert np.max(np.min(np.abs(found[..., None] - levels), -1)) < 1e-12
    # The error is at most one level's width times a coin: its mean over 4,000 has a deviation below width / 2 / sqrt(4000).
    np.testing.assert_allclose(found.mean(0), tree["a"], atol=5 * (high - low) / 3 / 2 / np.sqrt(4000))
    np.testing.assert_array_equal(many["n"][7], tree["n"])
    np.testing.assert_array_equal(many["same"][7], tree["same"])


def test_training_with_quantised_uploads_keeps_variances_positive():
    task = problems.normed_task()
    algorithm = fedavg_adam(task, private="none", upload_bits=3, cohort_size=5)
    state = algorithm.init(jax.random.key(0), problems.data())
    step = jax.jit(algorithm.round)
    for r in range(3):
        state, _ = step(jax.random.key(r), state, problems.data())
    assert np.all(np.asarray(state.model.variables["batch_stats"]["bn1"]["var"]) > 0)
    assert all(np.all(np.asarray(leaf) >= 0) for leaf in jax.tree.leaves(state.model.slots[0].nu))
    with pytest.raises(ValueError, match="upload_bits=0"):
        fedavg(task, upload_bits=0)


def test_flops_of_a_dense_network(data):
    # Forward and two products back for each layer but the first, which has no gradient for its inputs; the rest is small.
    products = 20 * 2 * (2 * 784 * 200 + 3 * 200 * 200 + 3 * 200 * 10)
    assert costs.gradient_flops(models.mtfl_mlp(), data, 20) == pytest.approx(products, rel=0.02)


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
    """Independent < FL and MTFL with FedAvg < MTFL with FedAvg-Adam, and training is the largest share (S4 §5)."""
    task = models.mtfl_mlp()
    work = 15 * costs.gradient_flops(task, data, 20)
    times = [
        costs.round_time(costs.traffic(builder(task), data), work, RASPBERRY_PIS, cohort_size=10)
        for builder in (local_only, mtfl, fedavg_adam)
    ]
    assert times[0].total < times[1].total < times[2].total
    assert times[0].shares["train"] == 1 and times[1].shares["train"] > 0.5


def test_bad_rates():
    broken = costs.DeviceTestbed((Device("broken", 1, flops=0.0, down=1, up=1),), 1.0)
    with pytest.raises(ValueError, match="rates"):
        costs.round_time(Traffic(1, 1), 1.0, broken, cohort_size=1)
    with pytest.raises(ValueError, match="cohort_size=0"):
        costs.round_time(Traffic(1, 1), 1.0, RASPBERRY_PIS, cohort_size=0)
