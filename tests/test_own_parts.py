"""Parts of one's own that return something else than they should: one line that says which part, before anything is trained."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import attacks, meta
from fedjax_meta.aggregate import Rule
from fedjax_meta.meta import InnerOptimizer, MetaGradient
from fedjax_meta.rounds import client as clients
from tests import problems
from tests.test_contract import method_of

KEY = jax.random.key(2)


def scalars(tree):
    return jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), tree)


def of_scalars(rate):
    """A server optimiser whose updates would be broadcast over the leaves."""
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (scalars(updates), state))


def estimator(change):
    def build(inner):
        estimate = meta.first_order(inner)
        return lambda *arguments: change(estimate(*arguments))

    return build


def rule(combine):
    return Rule(name="own", combine=combine)


def own_upload(**parts):
    return fm.uploads.UploadTransform(name="own", **parts)


FEDERATIONS = [
    ({"schedule": lambda key, round_, n, c: [0, 1, 2, 3]}, r"schedule must return a JAX array of cohort_size=4 ids"),
    ({"schedule": lambda key, round_, n, c: jnp.array([0, 1, 2, 99])}, r"that schedule draws for round 1=.*in \[0, 7\)"),
    ({"schedule": lambda key, round_, n, c: jnp.array([0, 1, 2, 2])}, "schedule draws a client twice in round 1"),
    ({"participation": lambda key, id_: True}, r"participation must return fm.participation.Participation\(...\), not True"),
    ({"server_optimizer": of_scalars, "server_lr": 1.0}, "the server's optimiser must give updates like the model"),
    (
        {"aggregator": lambda stacked, weight: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], jnp.int32), stacked)},
        "gives int32 for an upload of float64, which cuts it",
    ),
    (
        {"aggregator": rule(lambda key, stacked, weight, memory, reference: jax.tree.map(lambda leaf: leaf[0], stacked))},
        r"combine of aggregator own must return \(result, memory\)",
    ),
    (
        {"aggregator": rule(lambda key, stacked, *rest: (jax.tree.map(lambda leaf: leaf[0], stacked), jnp.zeros(3)))},
        "the memory of aggregator own",
    ),
    (
        {"attack": attacks.Attack(name="own", attackers=0.5, lie=lambda key, change: scalars(change))},
        "the lie of an attack must be like the change that it gets",
    ),
    ({"attack": attacks.Attack(name="own", attackers=0.5, lie=lambda key, change: None)}, "the lie of an attack must be like"),
    (
        {"attack": attacks.Attack(name="own", attackers=0.5, conspire=lambda changes, honest, able: scalars(changes))},
        r"conspire of an attack must give one change, like those that it gets: \[0\]",
    ),
    (
        {"attack": attacks.Attack(name="own", attackers=0.5, conspire=lambda changes, honest, able: changes)},
        "conspire of an attack must give one change, like those that it gets",
    ),
    (
        {"attack": attacks.Attack(name="own", attackers=0.5, poison=lambda batch, *_: batch._replace(y=batch.y[:1]))},
        "poison of an attack must give a batch like the one that it gets: .y is int32",
    ),
    (
        {"uploads": (own_upload(client=lambda key, upload, memory, kept: upload),)},
        r"client of the upload own must give \(upload, ",
    ),
    (
        {"uploads": (own_upload(client=lambda key, upload, memory, kept: (upload, upload)),)},
        r"client of the upload own must give \(upload, memory\) like what it gets: \[1\]\[0\]\[",
    ),
    (
        {"uploads": (own_upload(server=lambda key, average, context, kept, measured: average),)},
        r"server of the upload own must give \(average, what it keeps\)",
    ),
]


@pytest.mark.parametrize(("options", "words"), FEDERATIONS)
def test_parts_of_a_federation(options, words):
    federation = fm.Federation(cohort_size=4, devices=1, **options)
    with pytest.raises(ValueError, match=words) as error:
        fm.simulate(method_of("fedavg"), problems.data(), key=KEY, rounds=1, federation=federation)
    assert "\n" not in str(error.value)
    if "schedule" in options:
        members = fm.sweeps.members([{"lr": 0.1}], [0])
        with pytest.raises(ValueError, match=words):
            fm.sweep(partial(fm.fedavg, problems.task()), members, problems.data(), rounds=1, federation=federation)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found._replace(gradient=scalars(found.gradient)), "the gradient of an estimator must be like"),
        (lambda found: found._replace(gradient=None), "the gradient of an estimator must be like"),
        (lambda found: (found.adapted, found.gradient), r"an estimator must return fm.meta.MetaGradient\("),
        (lambda found: MetaGradient(*found[:2], {"query_loss": 0.0}), "the info of an estimator must be fm.meta.Info"),
    ],
)
def test_estimators(change, words):
    method = fm.fedmeta(problems.task(), estimator=estimator(change))
    with pytest.raises(ValueError, match=words) as error:
        fm.simulate(method, problems.data(), key=KEY, rounds=1, federation=fm.Federation(cohort_size=4, devices=1))
    assert "\n" not in str(error.value)


def test_roles_that_are_a_mask():
    method = method_of("fedavg")
    with pytest.raises(ValueError, match=r"the roles of fedavg must be masks.Role, not True"):
        fm.simulate(
            dataclasses.replace(method, roles=jax.tree.map(lambda _: True, method.roles)),
            problems.data(),
            key=KEY,
            rounds=1,
            federation=fm.Federation(cohort_size=4, devices=1),
        )


def test_a_weight_of_statistics_below_0_is_a_fault_like_one_of_the_model():
    """It would count as 0, without a word."""
    base = method_of("scaffold")

    def client(key, received, data):
        trained = base.client(key, received, data)
        return trained._replace(statistics_weight=jnp.where(data["train"].size > 50, -1.0, 1.0))

    method = dataclasses.replace(base, client=client)
    federation = fm.Federation(cohort_size=7, devices=1)
    _, (record,) = fm.simulate(method, problems.data(), key=KEY, rounds=1, federation=federation)
    (fault,) = record.faults
    assert fault.what == "clients left out"
    assert set(fault.clients) == set(np.flatnonzero(np.asarray(problems.data().sizes("train")) > 50).tolist()) != set()
    assert float(clients._not_negative(-1e-9)) != float(clients._not_negative(-1e-9))


def loss(w, batch):
    return jnp.sum((w - batch) ** 2) + jnp.sum(w**4)


def test_a_first_order_gradient_sees_what_the_first_state_takes_of_meta():
    """A rate that stands in the state: `update` does not read `meta`. Against the unrolled loop with constant inner gradients."""
    inner = InnerOptimizer(lambda m: m["w"], lambda m, phi: m["rate"], lambda m, g, rate, phi: (phi - rate * g, rate))
    point = {"w": jnp.array([0.5]), "rate": jnp.array(0.1)}
    support, query = jnp.array([0.1]), jnp.array([2.0])

    def unrolled(m):
        phi = m["w"]
        for _ in range(3):
            phi = phi - m["rate"] * jax.lax.stop_gradient(jax.grad(loss)(phi, support))
        return loss(phi, query)

    for one in (inner, inner._replace(learned=True)):
        found = meta.first_order(one, steps=3)(loss, point, support, query).gradient
        assert problems.distance(found, jax.grad(unrolled)(point)) < 1e-12
    # A pull towards phi_0, which the state keeps.
    pulled = InnerOptimizer(lambda m: m, lambda m, phi: phi, lambda m, g, start, phi: (phi - 0.1 * (g + phi - start), start))

    def by_hand(w):
        phi = w
        for _ in range(3):
            phi = phi - 0.1 * (jax.lax.stop_gradient(jax.grad(loss)(phi, support)) + phi - w)
        return loss(phi, query)

    found = meta.first_order(pulled, steps=3)(loss, point["w"], support, query).gradient
    assert problems.distance(found, jax.grad(by_hand)(point["w"])) < 1e-12


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (lambda m, g, s, phi: phi - g, r"update must return \(phi, state\)"),
        (lambda m, g, s, phi: (phi[0] - g[0], s), "update must keep the form of its phi"),
        (lambda m, g, s, phi: (phi - g, jnp.zeros(3)), "update must keep the form of its state"),
    ],
)
def test_inner_optimisers(update, words):
    inner = InnerOptimizer(lambda m: m, lambda m, phi: (), update)
    for estimate in (meta.first_order(inner, steps=2), meta.exact(inner, steps=2)):
        with pytest.raises(ValueError, match=words) as error:
            estimate(loss, jnp.ones(2), jnp.zeros(2), jnp.ones(2))
        assert "\n" not in str(error.value)


def test_an_inner_optimiser_keeps_to_its_mask():
    mask, point = {"a": False, "b": True}, {"a": jnp.array(0.7), "b": jnp.array(0.4)}

    def made(update):
        return meta.exact(InnerOptimizer(lambda m: m, lambda m, phi: (), update, mask=mask), steps=2)

    def of_pair(p, batch):
        return (p["a"] * p["b"] - batch) ** 2 + p["a"] ** 2 * p["b"] ** 4

    moves_all = made(lambda m, g, s, phi: (jax.tree.map(lambda p, d: p - 0.1 * d, phi, g), s))
    reads_all = made(lambda m, g, s, phi: ({"a": phi["a"], "b": phi["b"] - 0.1 * (g["a"] + g["b"])}, s))
    for estimate in (moves_all, reads_all):
        with pytest.raises(ValueError, match="gradient of leaves that its mask leaves out"):
            estimate(of_pair, point, jnp.array(0.3), jnp.array(1.0))
    keeps = made(lambda m, g, s, phi: ({"a": phi["a"], "b": phi["b"] - 0.1 * g["b"]}, s))
    stock = meta.exact(meta.sgd(0.1, mask=mask), steps=2)
    found = [estimate(of_pair, point, jnp.array(0.3), jnp.array(1.0)).gradient for estimate in (keeps, stock)]
    assert problems.distance(*found) < 1e-12


def test_reptile_starts_at_the_meta_parameters():
    for start in (jnp.tanh, lambda m: jnp.concatenate([m, m])):
        inner = InnerOptimizer(start, lambda m, phi: (), lambda m, g, s, phi: (phi - 0.1 * g, s))
        with pytest.raises(ValueError, match="starts at the meta-parameters themselves"):
            meta.reptile_gradient(inner)(loss, jnp.ones(2), jnp.zeros(()), None)


def test_targets_of_another_form_than_the_outputs_are_named():
    """Outputs that are a tree have no shape to compare."""
    with pytest.raises(ValueError, match=r"of one shape, not targets float64\[3\] and outputs PyTreeDef"):
        fm.task.check_alike("squared error", {"u": jnp.zeros(3)}, jnp.zeros(3))
