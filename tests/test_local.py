"""Local training against the same steps written out in NumPy, on least squares, where every step has a closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_meta import local
from fedjax_meta.data import Batches, from_partition
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task, weighted_mean
from tests import problems

KEY = jax.random.key(5)
SIZES = np.array([5, 12, 1, 8])
STARTS = np.cumsum(SIZES) - SIZES
X = np.random.default_rng(2).normal(1.0, 2.0, (SIZES.sum(), 3))
DATA = from_partition(X, np.zeros(len(X), int), np.arange(len(X)), SIZES, num_classes=1)
START = {"w": jnp.array([1.0, -2.0, 0.5]), "frozen": jnp.array(3.0), "mean": jnp.zeros(3)}
MOVES = {"w": True, "frozen": False, "mean": False}


def _loss(variables, batch, key):
    """1/2 E||frozen w - x||^2, and a running mean of the inputs as the buffer."""
    del key
    rows = jnp.sum((variables["frozen"] * variables["w"][None] - batch.x) ** 2, -1) / 2
    mean = jnp.sum(batch.x * batch.weight[:, None], 0) / jnp.maximum(jnp.sum(batch.weight), 1)
    return weighted_mean(rows, batch.weight), {**variables, "mean": 0.9 * variables["mean"] + 0.1 * mean}


def _by_hand(batches, rate, momentum=0.0):
    """The same in NumPy; `batches` are lists of rows."""
    w, mean, losses = np.array(START["w"]), np.zeros(3), []
    velocity = np.zeros(3)
    for rows in batches:
        losses.append(((3 * w - rows) ** 2).sum(1).mean() / 2)
        velocity = momentum * velocity + 3 * (3 * w - rows).mean(0)
        w, mean = w - rate * velocity, 0.9 * mean + 0.1 * rows.mean(0)
    return w, mean, np.mean(losses)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_training_is_sgd_over_ragged_clients_and_partial_batches(momentum):
    optimizer = optax.sgd(0.05, momentum=momentum)
    step = jax.jit(lambda i: local.train(KEY, _loss, START, DATA.client(i)["train"].in_order(4), optimizer, MOVES))
    for i, (begin, size) in enumerate(zip(STARTS, SIZES, strict=True)):
        after, loss = step(i)
        own = X[begin : begin + size]
        w, mean, expected = _by_hand([own[t : t + 4] for t in range(0, size, 4)], 0.05, momentum)
        np.testing.assert_allclose(after["w"], w, rtol=1e-12)
        # The buffer followed the loss and the frozen leaf did not move, though its gradient is not 0.
        np.testing.assert_allclose(after["mean"], mean, rtol=1e-12)
        assert after["frozen"] == 3.0
        assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_training_for_epochs_takes_their_batches_and_none_when_there_is_no_need():
    view, passes = DATA.client(1)["train"], {"epochs": 2, "batch_size": 5}
    batches = view.epochs(tagged(KEY, "order"), 5, 2)
    expected = local.train(tagged(KEY, "loss"), _loss, START, batches, optax.sgd(0.05), MOVES)

    @jax.jit
    def trained(needed):
        return local.train_epochs(KEY, _loss, START, view, optax.sgd(0.05), MOVES, needed=needed, **passes)

    assert problems.distance(trained(True), expected) < 1e-14
    assert problems.distance(expected[0], START) > 0.1
    assert problems.leaves_equal(trained(False)[0], START)
    still, loss = local.train_epochs(KEY, _loss, START, view, optax.sgd(0.05), MOVES, epochs=0, batch_size=5)
    assert still is START
    assert loss == 0


def test_shuffled_epochs_are_the_batches_that_they_say():
    batches = DATA.client(1)["train"].epochs(KEY, 5, 2)
    rows = [np.asarray(b.x)[np.asarray(b.weight) > 0] for b in (batches.get(t, 0) for t in range(int(batches.steps)))]
    assert [len(r) for r in rows] == [5, 5, 2, 5, 5, 2]
    after, _ = jax.jit(lambda: local.train(KEY, _loss, START, batches, optax.sgd(0.05), MOVES))()
    np.testing.assert_allclose(after["w"], _by_hand(rows, 0.05)[0], rtol=1e-12)


def test_a_client_without_samples_does_nothing():
    after, loss = jax.jit(
        lambda i: local.train(KEY, _loss, START, DATA.client(i)["train"].epochs(KEY, 4), optax.adam(1.0), MOVES)
    )(-1)
    assert problems.leaves_equal(after, START) and loss == 0


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_full_batch_in_chunks_is_one_big_batch(chunk):
    """Each step contracts by 1 - 9 lr towards the least-squares solution mean(x) / 3, whatever the chunks."""
    after, _ = jax.jit(
        lambda: local.train(KEY, _loss, START, DATA.client(1)["train"].full(3, chunk_size=chunk), optax.sgd(0.05), MOVES)
    )()
    solution = X[5:17].mean(0) / 3
    np.testing.assert_allclose(after["w"], solution + (1 - 9 * 0.05) ** 3 * (np.array(START["w"]) - solution), rtol=1e-12)


def test_a_proximal_term_moves_the_solution_towards_its_anchor():
    """The minimiser of 1/2||3w - m||^2 + mu/2||w - a||^2 is (3m + mu a) / (9 + mu); a step contracts by 1 - lr (9 + mu)."""
    mu, anchor = 2.5, jnp.array([4.0, 0.0, -1.0])
    loss = local.proximal(_loss, {**START, "w": anchor}, mu)
    after, value = jax.jit(lambda: local.train(KEY, loss, START, DATA.client(3)["train"].full(2), optax.sgd(0.04), MOVES))()
    mean, start = X[18:].mean(0), np.array(START["w"])
    solution = (3 * mean + mu * np.array(anchor)) / (9 + mu)
    ratio = 1 - 0.04 * (9 + mu)
    np.testing.assert_allclose(after["w"], solution + ratio**2 * (start - solution), rtol=1e-12)
    # Buffers are at their start in the anchor and moved on in the loss; the value is that of before each update.
    values = []
    for t, buffer in enumerate((np.zeros(3), 0.1 * mean)):
        w = solution + ratio**t * (start - solution)
        plain = ((3 * w - X[18:]) ** 2).sum(1).mean() / 2
        values.append(plain + mu / 2 * (((w - np.array(anchor)) ** 2).sum() + (buffer**2).sum()))
    assert float(value) == pytest.approx(np.mean(values), rel=1e-12)


def test_every_batch_has_a_key_of_its_own():
    def noisy(variables, batch, key):
        del batch
        return jnp.zeros(()), {"drawn": jnp.roll(variables["drawn"], 1).at[0].set(jax.random.uniform(key))}

    batches = DATA.client(1)["train"].epochs(KEY, 2)
    after, _ = jax.jit(lambda: local.train(KEY, noisy, {"drawn": jnp.zeros(6)}, batches, optax.sgd(1.0), {"drawn": False}))()
    assert len(np.unique(after["drawn"])) == 6


def test_the_loss_of_the_parameters_alone_holds_the_buffers():
    task = Task(init=lambda key: START, loss=_loss, predict=lambda v, x: x)
    buffers = {"w": None, "frozen": START["frozen"], "mean": START["mean"]}
    parameters = {"w": START["w"], "frozen": None, "mean": None}
    batch = Batch(jnp.asarray(X[:4]), jnp.zeros(4, int), jnp.array([1.0, 1.0, 1.0, 0.0]))
    gradient = jax.grad(local.parameter_loss(task, buffers))(parameters, (batch, KEY))
    np.testing.assert_allclose(gradient["w"], 3 * (3 * np.array(START["w"]) - X[:3].mean(0)), rtol=1e-12)
    assert gradient["frozen"] is gradient["mean"] is None


def test_numbered_batches_know_their_step_and_weigh_chunks_by_real_samples():
    """Two chunks of 2 and 1 real samples: the mean of (value + 10 step) is ((2 v_0 + v_1) / 3) + 10 step."""
    weights, values = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), jnp.array([3.0, 6.0])
    batches = Batches(lambda step, chunk: Batch(values[chunk], values[chunk], weights[chunk]), steps=3, max_steps=3, chunks=2)
    for step in (0, 2):
        found = batches.numbered().mean(lambda pair: pair[0].x + 10.0 * pair[1], step)
        assert float(found) == pytest.approx(4 + 10 * step)


def test_leaves_that_are_no_floats_are_those_of_the_last_chunk_with_samples():
    """A counter of steps, beyond what float32 holds; a mean would cut fractions off."""
    weights = jnp.array([[0.5, 0.5], [0.2, 0.1], [0.0, 0.0]])
    many = 2**24 + 1
    batches = Batches(lambda step, chunk: Batch(weights[chunk], chunk, weights[chunk]), steps=1, max_steps=1, chunks=3)
    count, even = batches.mean(lambda batch: (jnp.int32(many) + batch.y, batch.y % 2 == 0), 0)
    assert int(count) == many + 1 and not even and count.dtype == jnp.int32 and even.dtype == bool


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": optax.adam}, "optimizer must be one of optax, built with its rate, e.g. optax.sgd.0.1., not"),
        ({"optimizer": optax.lbfgs()}, "optimizer: it needs value= and grad= and value_fn= at each step"),
        ({"loss": lambda *given: _loss(*given)[0]}, r"must return \(loss, variables\), not"),
        ({"variables": START | {"w": jnp.arange(3)}}, r"must be floating-point to be differentiated, but \['w'\] is int"),
    ],
    ids=["a factory", "a line search", "a loss alone", "integers"],
)
def test_training_refuses_what_it_cannot_train_with(changes, message):
    given = {"loss": _loss, "variables": START, "optimizer": optax.sgd(0.1)} | changes
    with pytest.raises(ValueError, match=message):
        local.train(KEY, batches=DATA.client(0)["train"].in_order(4), trainable=MOVES, **given)
