"""Five clients, a small network with its derivatives in NumPy, and two rounds of a method beside them.

The tests of this folder write out what a paper says, round after round, and compare it with the whole state of the library.
They share with it the order of the batches (`epochs` below asks `ClientView` for them) and the initial parameters, and
nothing else.

Parameters are one vector in the order of the library's leaves: body.w [3, 4], head.b [3], head.w [4, 3].
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_meta as fm
from fedjax_meta.data import Batches
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task

N, INPUTS, WIDTH, CLASSES = 5, 3, 4, 3
COHORTS = ((4, 0, 2), (2, 1, 4))
"""Clients 2 and 4 train twice, at other places of the cohort; 1 joins late and 3 never."""
SIZES, TRAIN, SUPPORT, TEST_SUPPORT = ([31, 26, 35, 24, 18], [22, 17, 29, 15, 11], [7, 9, 10, 5, 6], [5, 6, 3, 7, 5])
KEY, TEST_KEY = jax.random.key(11), jax.random.key(12)
KNOWN, LATE, NEW = 2, 1, 3
"""Who is tested: a client of both rounds, one of the second, and the samples of one that never took part."""

BODY = np.arange(INPUTS * WIDTH + CLASSES + WIDTH * CLASSES) < INPUTS * WIDTH
HEAD = ~BODY
NOTHING = np.zeros_like(BODY)


# ------------------------------------------------------------------------------------------------------ the model, by hand


def unpack(w):
    return w[:12].reshape(INPUTS, WIDTH), w[12:15], w[15:].reshape(WIDTH, CLASSES)


def pack(body, bias, head):
    return np.concatenate([body.ravel(), bias.ravel(), head.ravel()])


def features(w, x):
    """z = tanh(x A)."""
    return np.tanh(x @ unpack(w)[0])


def probabilities(w, x, offset=0.0):
    """softmax(z W + b), with an offset to the logits."""
    _, bias, head = unpack(w)
    logits = features(w, x) @ head + bias + offset
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def loss(w, batch):
    """Mean cross-entropy."""
    x, y = batch
    return -np.mean(np.log(probabilities(w, x)[np.arange(len(y)), y]))


def gradient(w, batch, share=1.0, offset=0.0):
    """By the chain rule; `share` weighs the samples."""
    x, y = batch
    _, _, head = unpack(w)
    z, dl = features(w, x), (probabilities(w, x, offset) - np.eye(CLASSES)[y]) * np.reshape(share, (-1, 1)) / len(y)
    return pack(x.T @ (dl @ head.T * (1 - z**2)), dl.sum(0), z.T @ dl)


def hessian_times(w, v, batch):
    """The derivative of `gradient` along v."""
    x, y = batch
    (_, _, head), (v_body, v_bias, v_head) = unpack(w), unpack(v)
    z, p = features(w, x), probabilities(w, x)
    dl = (p - np.eye(CLASSES)[y]) / len(y)
    rz = (1 - z**2) * (x @ v_body)
    rl = rz @ head + z @ v_head + v_bias
    rdl = p * (rl - (p * rl).sum(1, keepdims=True)) / len(y)
    ra = (rdl @ head.T + dl @ v_head.T) * (1 - z**2) - dl @ head.T * 2 * z * rz
    return pack(x.T @ ra, rdl.sum(0), rz.T @ dl + z.T @ rdl)


def hessian(w, batch):
    return np.stack([hessian_times(w, unit, batch) for unit in np.eye(len(w))])


def descend(w, rate, batches, where=None, pull=0.0, anchor=None):
    """Gradient steps on the entries of a mask, with `pull * (w - anchor)` added to the gradient."""
    for batch in batches:
        step = gradient(w, batch) + (0 if anchor is None else pull * (w - anchor))
        w = w - rate * np.where(True if where is None else where, step, 0)
    return w


def momentum_sgd(w, rate, batches, where, gradient=gradient, momentum=0.5, decay=0.0):
    """m = momentum m + g + decay w, w = w - rate m, on the entries of a mask."""
    m = np.zeros_like(w)
    for batch in batches:
        m = momentum * m + np.where(where, gradient(w, batch) + decay * w, 0)
        w = w - rate * m
    return w


# ------------------------------------------------------------------------------------------------- the same for the library


def _init(key):
    body, head, bias = jax.random.split(key, 3)
    return {
        "body": {"w": jax.random.normal(body, (INPUTS, WIDTH))},
        "head": {"w": jax.random.normal(head, (WIDTH, CLASSES)), "b": jax.random.normal(bias, (CLASSES,))},
    }


def _features(variables, x):
    return jnp.tanh(x @ variables["body"]["w"])


def _head(variables, z):
    return z @ variables["head"]["w"] + variables["head"]["b"][None]


@cache
def task() -> Task:
    base = fm.classification(_init, lambda variables, x: _head(variables, _features(variables, x)), layers=("body", "head"))
    return base._replace(features=_features, head=_head)


def _samples():
    rng = np.random.default_rng(5)
    for i, size in enumerate(SIZES):
        x = rng.normal(0.3 * i, 1, (size, INPUTS))
        y = np.argmax(x @ rng.normal(size=(INPUTS, CLASSES)) + rng.normal(size=(size, CLASSES)), 1)
        # The clients of the first round lack class 2, the others have every class.
        yield x, np.where(y == 2, 0, y) if i in COHORTS[0] else np.r_[0, 1, 2, y[3:]]


SAMPLES = list(_samples())


@cache
def data() -> fm.FederatedData:
    """Views whose shares differ between clients, so that no two views give the same weights."""
    zero, sizes, train, support, tested = (np.array(v) for v in ([0] * N, SIZES, TRAIN, SUPPORT, TEST_SUPPORT))
    views = {
        "train": (zero, train),
        "support": (zero, support),
        "query": (support, train),
        "test": (train, sizes),
        "test_support": (train, train + tested),
        "test_query": (train + tested, sizes),
    }
    return fm.from_clients(SAMPLES, num_classes=CLASSES, views=views)


def view(i, name):
    """All samples of a view, (x, y)."""
    ends = {"train": (0, TRAIN), "support": (0, SUPPORT), "query": (SUPPORT, TRAIN)}
    begin, end = ends[name] if name in ends else (TRAIN, [a + b for a, b in zip(TRAIN, TEST_SUPPORT, strict=True)])
    begin, end = (part if part == 0 else part[i] for part in (begin, end))
    return SAMPLES[i][0][begin:end], SAMPLES[i][1][begin:end]


def cut(batch, size):
    """A batch in pieces of `size` samples, in order; the last may be smaller."""
    return [tuple(part[begin : begin + size] for part in batch) for begin in range(0, len(batch[1]), size)]


QUERY_SIZES = [a - b for a, b in zip(TRAIN, SUPPORT, strict=True)]


# ---------------------------------------------------------------------------------------------------- the library's batches


@cache
def _listing(name, make):
    def all_batches(key, client):
        batches = make(data().client(client)[name], key)
        return batches.steps, jax.lax.map(lambda t: batches.get(t, 0), jnp.arange(batches.max_steps))

    return jax.jit(all_batches)


def batches_of(key, i, name, make):
    """What `make(view, key)`, which is cached by identity, gives client i: a list of (x, y) of its real samples."""
    steps, all_ = _listing(name, make)(key, i)
    x, y, weight = (np.asarray(part) for part in all_)
    return [(x[t][weight[t] > 0], y[t][weight[t] > 0]) for t in range(int(steps))]


@cache
def _epochs(size, count):
    def make(view, key) -> Batches:
        return view.epochs(key, size, count)

    return make


@cache
def _endless(size, count):
    def make(view, key) -> Batches:
        return view.endless(key, size, count)

    return make


def epochs(key, i, name, size, count=1):
    """The batches of shuffled passes; each must hold its whole view once, and only the last of a pass may be partial."""
    listed = batches_of(key, i, name, _epochs(size, count))
    steps = -(-len(view(i, name)[1]) // size)
    assert len(listed) == count * steps
    for start in range(0, len(listed), steps):
        passed = np.concatenate([x for x, _ in listed[start : start + steps]])
        assert np.array_equal(np.sort(passed, 0), np.sort(view(i, name)[0], 0))
        assert [len(y) for _, y in listed[start : start + steps - 1]] == [size] * (steps - 1)
    return listed


def endless(key, i, name, size, count):
    listed = batches_of(key, i, name, _endless(size, count))
    assert [len(y) for _, y in listed] == [size] * count
    return listed


def client_key(round_, i):
    """The key that a client rule gets."""
    return tagged(jax.random.fold_in(tagged(jax.random.fold_in(KEY, round_), "clients"), i), "train")


def order_key(round_, i):
    """The key of the batches of a client rule that trains once."""
    return tagged(client_key(round_, i), "order")


def test_key():
    """The key that a rule of tests gets."""
    return tagged(TEST_KEY, "personalize")


test_key.__test__ = False


# ------------------------------------------------------------------------------------------------------ rounds on both sides


def _schedule(key, round_, num_clients, cohort_size):
    return jnp.asarray(COHORTS, jnp.int32)[round_]


class Library:
    """Two rounds of a method, and what its clients test with.

    Attributes:
      start, first, last: the states before, between and after the rounds.
      infos: what the two rounds reported.
    """

    def __init__(self, method, **federation):
        self.algorithm = fm.federate(method, fm.Federation(cohort_size=3, schedule=_schedule, devices=1, **federation))
        self.start = jax.jit(self.algorithm.init)(KEY, data())
        one_round = jax.jit(self.algorithm.round)
        self.first, one = one_round(jax.random.fold_in(KEY, 0), self.start, data())
        self.last, two = one_round(jax.random.fold_in(KEY, 1), self.first, data())
        self.infos = one, two
        assert [info.ids.tolist() for info in self.infos] == [list(cohort) for cohort in COHORTS]

    @property
    def w(self):
        return flat(self.start.model)

    def tested(self, i, state=None):
        """What client i tests with; a client that never took part has no row of its own."""
        known = i != NEW
        personalize = jax.jit(
            lambda state, i: self.algorithm.personalize(
                TEST_KEY, state, data().client(i)["test_support"], i if known else None
            )
        )
        return flat(personalize(self.last if state is None else state, i))


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)] or [np.zeros(0)])


def flat_rows(tree):
    return np.concatenate([np.asarray(leaf).reshape(N, -1) for leaf in jax.tree.leaves(tree)] or [np.zeros((N, 0))], 1)


def rows(kept, blank):
    """[N, ...]: what each client kept, `blank` for those that keep nothing yet."""
    return np.stack([kept.get(i, blank) for i in range(N)])


def two_rounds(w, client, weight, *, personal=NOTHING, server_lr=1.0):
    """Two rounds whose server steps towards the weighted mean of the clients' models.

    Args:
      w: the initial model.
      client: `(round, i, model, memory or None) -> (model, memory)`.
      weight: of each client.
      personal: mask of the entries that stay with their client.

    Returns:
      a list of (w, personal entries by client, memory by client), after each round.
    """
    own, memory, after = {}, {}, []
    for round_, cohort in enumerate(COHORTS):
        trained = {}
        for i in cohort:
            trained[i], memory[i] = client(round_, i, np.where(personal, own.get(i, w), w), memory.get(i))
        mean = np.average([trained[i] for i in cohort], 0, [weight[i] for i in cohort])
        w = np.where(personal, w, w + server_lr * (mean - w))
        own = own | trained
        after.append((w, dict(own), dict(memory)))
    return after


def near(given, expected, tolerance=1e-9):
    """Raises unless both have the same shape and agree to a tolerance."""
    given, expected = np.asarray(given, float), np.asarray(expected, float)
    assert given.shape == expected.shape, f"{given.shape} is not {expected.shape}"
    gap = np.max(np.abs(given - expected), initial=0)
    assert gap < tolerance, f"the largest difference is {gap:.3g}"


def check(state, round_, *, model, personal=None, memory=None, extra=(), optimizer=()):
    """Compares every leaf of a state, flat; rows are [N, ...]."""
    nothing = np.zeros((N, 0))
    near(flat(state.model), model)
    near(flat_rows(state.personal), nothing if personal is None else personal)
    near(flat_rows(state.memory), nothing if memory is None else memory)
    near(flat_rows(state.residual), nothing)
    near(flat(state.extra), np.asarray(extra, float))
    near(flat(state.optimizer), np.asarray(optimizer, float))
    took_part = {i for cohort in COHORTS[:round_] for i in cohort}
    assert np.asarray(state.seen).tolist() == [i in took_part for i in range(N)]
    assert int(state.round) == round_


def agree(library, after, *, personal=NOTHING, blank=None, **server):
    """Compares both states of a `Library` with what `two_rounds` gave.

    Args:
      library: the library's side.
      after: what `two_rounds` gave.
      personal: mask of the entries that stay with their client.
      blank: the row of a client without a memory; no client has one when not given.
      server: what the server keeps beside the model, as in `check`.
    """
    for number, (w, own, memory) in enumerate(after):
        check(
            (library.first, library.last)[number],
            number + 1,
            model=w,
            personal=rows(own, library.w)[:, personal],
            memory=None if blank is None else rows(memory, blank),
            **server,
        )
