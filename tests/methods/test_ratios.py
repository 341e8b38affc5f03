"""Means that are divided by means, under aggregators that are no mean: the rule combines what the clients of a unit say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import aggregate
from tests import problems
from tests.methods.common import FULL, KEY, build, gradient, loss, run, start, step
from tests.problems import SIZES

RULES = {
    "median": (aggregate.median, np.median),
    "trimmed mean": (aggregate.trimmed_mean(0.34), lambda rows, axis: np.mean(np.sort(rows, axis)[cut(rows)], axis)),
}


def cut(rows):
    """The rows that a trimmed mean of a share of 0.34 keeps."""
    out = int(0.34 * len(rows))
    return slice(out, len(rows) - out)


def combined(trees, of):
    return jax.tree.map(lambda *leaves: jnp.asarray(of(np.stack(leaves), axis=0)), *trees)


@pytest.mark.parametrize("rule", RULES)
def test_ifca_combines_the_clients_of_a_cluster(rule):
    algorithm = build("ifca", clusters=2, lr=0.3, epochs=1, aggregator=RULES[rule][0], **FULL)
    before = start(algorithm)
    models = [jax.tree.map(lambda leaf, m=m: leaf[m], before.model) for m in range(2)]
    nearest = np.array([np.argmin([loss(model, client) for model in models]) for client in range(7)])
    assert min(np.bincount(nearest)) == 3  # of 7: a minority, which the median of all would leave alone
    after = run(algorithm, 1, before)
    for m, model in enumerate(models):
        moved = [step(model, 0.3, gradient(model, client)) for client in np.flatnonzero(nearest == m)]
        expected = combined(moved, RULES[rule][1])
        assert problems.distance(jax.tree.map(lambda leaf, m=m: leaf[m], after.model), expected) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_q_fedavg_combines_the_quotients_of_clients(rule):
    algorithm = build("qfedavg", lr=0.3, q=1.0, epochs=1, aggregator=RULES[rule][0], **FULL)
    before = start(algorithm)
    quotients = []
    for client in range(7):
        value, slope = loss(before.model, client) + 1e-10, gradient(before.model, client)
        amount = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(slope)) + value / 0.3
        quotients.append(jax.tree.map(lambda leaf, v=value, a=amount: v * leaf / a, slope))
    expected = step(before.model, 1.0, combined(quotients, RULES[rule][1]))
    assert problems.distance(run(algorithm, 1, before).model, expected) < 1e-12


@pytest.mark.parametrize("name", ["fedpac", "fedproto"])
def test_a_centroid_is_combined_over_the_clients_that_hold_its_class(name):
    """Each class is held by 3 of 7 clients: a median over all would be 0 of 0 samples."""
    held = [(0, 1), (1, 2), (2, 0), (0,), (1,), (2,), (0, 1, 2)]
    rng, clients = np.random.default_rng(0), []
    for size, classes in zip(SIZES, held, strict=True):
        clients.append((rng.normal(size=(size, 5)), rng.choice(classes, size)))
    data = fm.from_clients(clients, num_classes=3)
    rates = {"fedpac": {"lr": 1e-12, "head_lr": 1e-12}, "fedproto": {"lr": 1e-12}}[name]
    algorithm = build(name, aggregator=aggregate.median, **rates, **FULL)
    before = algorithm.init(KEY, data)
    after, _ = jax.jit(algorithm.round)(KEY, before, data)
    assert np.all(after.extra.known)
    for k in range(3):
        means = []
        for client in range(7):
            begin, size = int(data.start["train"][client]), int(data.size["train"][client])
            x, y = (np.asarray(part[begin : begin + size]) for part in (data.x, data.y))
            if (y == k).any():
                means.append(np.mean(problems.task().features(before.model, x[y == k]), 0))
        assert 3 <= len(means) <= 4
        np.testing.assert_allclose(after.extra.mean[k], np.median(means, 0), atol=1e-9)


@pytest.mark.parametrize("name", ["ifca", "cfl", "afl", "qfedavg", "fedas", "fedpac", "fedproto"])
def test_a_rule_that_is_the_mean_is_the_mean(name):
    def mean(stacked, weight):
        share = jnp.where(weight > 0, weight, 0)
        share /= jnp.maximum(jnp.sum(share), 1e-300)
        return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1), stacked)

    plain, ruled = (build(name, aggregator=rule, cohort_size=5, devices=1) for rule in (None, mean))
    a, b = (run(algorithm, 2) for algorithm in (plain, ruled))
    assert problems.distance((a.model, a.extra), (b.model, b.extra)) < 1e-10
