"""FedGP: whole rounds and tests by hand, and clients of one class."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from fedjax_meta.methods.fedgp import fedgp_sgd
from fedjax_meta.numerics.class_tree import at_most, level_of, tree_of
from fedjax_meta.numerics.gaussian_classifier import JITTER, Process, halves_of, predictive_loss
from tests.whole_rounds.world import (
    BODY,
    CLASSES,
    COHORTS,
    KEY,
    KNOWN,
    NEW,
    Library,
    batches_of,
    client_key,
    data,
    features,
    flat,
    near,
    task,
    view,
)


def normal(z):
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def gram(a, b, scale=8.0, length=1.0):
    square = ((normal(a)[:, None] - normal(b)[None]) ** 2).sum(-1)
    return scale * np.exp(-square / (2 * length**2))


# ----------------------------------------------------------------------------------------------------------- a whole round

OPTIONS = {"lr": 0.1, "inference": "mean_field", "gibbs_steps": 6, "capacity": 40, "draws": 2, "test_draws": 2}


def sgd(rate):
    return optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(rate, momentum=0.9))


def by_hand_mean_field(covariance, signs):
    """omega, and the regression of one binary classifier at all of its samples, masked."""
    used = signs != 0
    omega = np.full(len(signs), 0.25)
    for _ in range(OPTIONS["gibbs_steps"]):
        mean, variance = regression(covariance, signs, omega, used)
        c = np.sqrt(mean**2 + variance)
        omega = np.tanh(c / 2) / (2 * c)
    return omega


def regression(covariance, signs, omega, used):
    inverse = np.linalg.inv(covariance[np.ix_(used, used)] + np.diag(1 / omega[used]))
    cross = covariance[used]
    return cross.T @ inverse @ (signs / omega)[used], np.diag(covariance) - np.einsum("ij,ik,kj->j", cross, inverse, cross)


def probability(mean, variance):
    points, weights = np.polynomial.hermite.hermgauss(20)
    return (weights / (1 + np.exp(-(mean[:, None] + np.sqrt(2 * variance)[:, None] * points)))).sum(1) / np.sqrt(np.pi)


def nodes(z, y):
    """[(classes, left classes)]: the two classes that are farthest apart, and the third with the nearer one."""
    present = sorted(set(y.tolist()))
    means = {k: z[y == k].mean(0) for k in present}
    if len(present) < 2:
        return []
    if len(present) == 2:
        return [(set(present), {present[0]})]
    pairs = [(np.sum((means[a] - means[b]) ** 2), a, b) for a in present for b in present if a < b]
    _, a, b = max(pairs)
    (c,) = set(present) - {a, b}
    left = {a, c} if np.sum((means[c] - means[a]) ** 2) < np.sum((means[c] - means[b]) ** 2) else {a}
    inner = left if len(left) == 2 else {b, c}
    return [(set(present), left), (inner, {min(inner)})]


def objective(w, x, y, tree, asked, omegas):
    total, covariance = 0.0, gram(features(w, x), features(w, x)) + JITTER * np.eye(len(y))
    for (member, left), omega in zip(tree, omegas, strict=True):
        here, sides = np.isin(y, list(member)), np.isin(y, list(left))
        signs = np.where(here & ~asked, np.where(sides, 0.5, -0.5), 0)
        p = probability(*regression(covariance, signs, omega, signs != 0))
        value = np.log(np.where(sides, p, 1 - p) + 1e-12)[here & asked]
        total -= value.mean() if len(value) else 0
    return total


def test_two_rounds_by_hand():
    """Each client takes one step of the extractor along the slope of the predictive loss, omega held; slopes by differences."""
    library = Library(fm.fedgp(task(), **OPTIONS, optimizer=sgd))
    w = library.w
    for number, cohort in enumerate(COHORTS):
        trained = []
        for i in cohort:
            key = tagged(client_key(number, i), "order")
            x, y = batches_of(key, i, "train", _shuffled)[0]
            tree = nodes(features(w, x), y)
            if not tree:
                # A client of one class.
                trained.append(w)
                continue
            asked = np.zeros(len(y), bool)
            for k in set(y.tolist()):
                places = np.flatnonzero(y == k)
                asked[places[: len(places) // 2]] = True
            covariance = gram(features(w, x), features(w, x)) + JITTER * np.eye(len(y))
            omegas = []
            for member, left in tree:
                fit = np.isin(y, list(member)) & ~asked
                omegas.append(by_hand_mean_field(covariance, np.where(fit, np.where(np.isin(y, list(left)), 0.5, -0.5), 0)))
            slope = np.array(
                [
                    (objective(w + 1e-5 * e, x, y, tree, asked, omegas) - objective(w - 1e-5 * e, x, y, tree, asked, omegas))
                    / 2e-5
                    for e in np.eye(len(w))
                ]
            )
            trained.append(w - 0.1 * np.where(BODY, slope + 1e-3 * w, 0))
        w = np.mean(trained, 0)
        near(flat((library.first, library.last)[number].model), w, 1e-7)


def _shuffled(view, key):
    return view.epochs(key, min(OPTIONS["capacity"], view.max_size))


@pytest.mark.parametrize("who", [KNOWN, NEW])
def test_clients_test_with_the_process_of_their_support_set(who):
    library = Library(fm.fedgp(task(), **OPTIONS, optimizer=sgd))
    algorithm, w = library.algorithm, flat(library.last.model)
    classifier = algorithm.personalize(KEY, library.last, data().client(who)["train"], who if who == KNOWN else None)
    (x, y), (queries, _) = view(who, "train"), view(who, "test_support")
    z, asked = features(w, x), features(w, queries)
    expected = np.where(np.isin(np.arange(CLASSES), y), 1.0, 1e-12)[None] * np.ones((len(queries), 1))
    joint = gram(np.r_[z, asked], np.r_[z, asked]) + JITTER * np.eye(len(y) + len(queries))
    for member, left in nodes(z, y):
        signs = np.where(np.isin(y, list(member)), np.where(np.isin(y, list(left)), 0.5, -0.5), 0)
        omega = by_hand_mean_field(joint[: len(y), : len(y)], signs)
        padded = [np.r_[part, fill] for part, fill in ((signs, 0 * asked[:, 0]), (omega, 1 + 0 * asked[:, 0]))]
        p = probability(*regression(joint, *padded, padded[0] != 0))[len(y) :]
        for k in member:
            expected[:, k] *= p if k in left else 1 - p
    near(np.exp(algorithm.predict(classifier, queries)), expected, 1e-7)


def test_the_loss_of_six_classes_is_that_of_each_node_by_itself():
    """-log of the mean probability over the draws of omega, which are the library's; a level of the tree has several nodes."""
    rng = np.random.default_rng(3)
    y = rng.permutation(np.arange(48) % 6)
    z = rng.normal(size=(48, 3)) + 2 * np.random.default_rng(5).normal(size=(6, 3))[y]
    real = jnp.ones(48, bool)
    tree, number = tree_of(jnp.asarray(z), jnp.asarray(y), real, 6)
    halves, process, key = halves_of(jnp.asarray(y), real, number, 0.5), Process(8.0, 1.0, True, 3), jax.random.key(0)
    found = predictive_loss(process, key, tree, jnp.asarray(z), jnp.asarray(y), halves, 4)

    fit, ask = (np.asarray(places)[np.asarray(there)] for places, there in zip(halves[::2], halves[1::2], strict=True))
    joint = np.r_[fit, ask]
    covariance = gram(z[joint], z[joint]) + JITTER * np.eye(len(joint))
    given = process.covariance(jnp.asarray(z)[halves.fit])
    expected, most = 0.0, 0
    for level in range(int(tree.depth)):
        node, left = np.asarray(tree.node[level]), np.asarray(tree.left[level])
        draws = process.omega(
            key, level_of(tree, level), given, process.root(given), jnp.asarray(y)[halves.fit], halves.fits, 4
        )
        draws = np.where(draws > 0, draws, 1)[:, np.asarray(halves.fits)]  # 0 for samples that are at no node
        omegas = np.hstack([draws, np.ones((4, len(ask)))])
        numbers = set(node[node < at_most(6)].tolist())
        most = max(most, len(numbers))
        for here in (node[y[joint]] == number for number in numbers):
            sides, asked = left[y[joint]], np.arange(len(joint)) >= len(fit)
            signs = np.where(here & ~asked, np.where(sides, 0.5, -0.5), 0)
            p = [probability(*regression(covariance, signs, omega, signs != 0)) for omega in omegas]
            expected -= np.log(np.where(sides, np.mean(p, 0), 1 - np.mean(p, 0)) + 1e-12)[here & asked].mean()
    assert most > 1
    near(found, expected, 1e-6)


def test_a_client_tests_with_as_many_draws_as_the_option_says():
    library = Library(fm.fedgp(task(), capacity=40, gibbs_steps=1, draws=2, test_draws=3, optimizer=optax.sgd))
    classifier = library.algorithm.personalize(KEY, library.last, data().client(NEW)["train"], None)[1]
    assert classifier.omega.shape[1] == 3


def test_the_default_optimiser_clips_at_50_and_then_decays_weights():
    """v = 0.9 v + g + 0.001 w, where g has a norm of at most 50; w -= 0.1 v."""
    w, v, optimizer = np.array([3000.0, -4000.0]), np.zeros(2), fedgp_sgd(0.1)
    found, slots = jnp.asarray(w), optimizer.init(jnp.asarray(w))
    for gradient in (np.array([60.0, 80.0]), np.array([3.0, -1.0])):
        updates, slots = optimizer.update(jnp.asarray(gradient), slots, found)
        found = optax.apply_updates(found, updates)
        v = 0.9 * v + gradient * min(1, 50 / np.linalg.norm(gradient)) + 1e-3 * w
        w = w - 0.1 * v
    near(found, w, 1e-9)


@pytest.mark.parametrize("held_out", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("classes", [2, 7])
def test_halves_lose_no_sample(held_out, classes):
    """The first of each class are asked, rounded down, the rest fitted; short halves hold all of them, as long ones do."""
    rng = np.random.default_rng(classes)
    for real in (np.ones(30, bool), rng.random(30) < 0.6, np.arange(30) < 1):
        label = rng.integers(0, classes, 30)
        asked = np.zeros(30, bool)
        for k in range(classes):
            places = np.flatnonzero((label == k) & real)
            asked[places[: int(held_out * len(places) + 1e-9)]] = True
        number = np.bincount(label[real], minlength=classes)
        given = jnp.asarray(label), jnp.asarray(real), jnp.asarray(number)
        for halves in (halves_of(*given, held_out), jax.jit(halves_of)(*given, held_out)):
            assert sorted(np.asarray(halves.fit)[np.asarray(halves.fits)]) == np.flatnonzero(real & ~asked).tolist()
            assert sorted(np.asarray(halves.ask)[np.asarray(halves.asks)]) == np.flatnonzero(asked).tolist()
        assert len(halves_of(*given, held_out).ask) <= held_out * 30 + 1


def test_a_client_of_one_class_predicts_it_and_trains_nothing(rng):
    x = rng.normal(size=(10, 3))
    zero, ten = np.array([0]), np.array([10])
    alone = fm.from_clients(
        [(x, np.full(10, 1))], num_classes=CLASSES, views={"train": (zero, ten), "test_support": (zero, ten)}
    )
    algorithm = fm.federate(fm.fedgp(task(), **OPTIONS), fm.Federation(cohort_size=1, devices=1))
    state = algorithm.init(KEY, alone)
    after, info = jax.jit(algorithm.round)(KEY, state, alone)
    near(flat(after.model), flat(state.model), 1e-15)
    assert bool(info.returned[0])
    classifier = algorithm.personalize(KEY, after, alone.client(0)["train"], 0)
    assert np.all(np.argmax(algorithm.predict(classifier, x), 1) == 1)


def test_a_task_of_one_class_is_refused():
    def init(key):
        return {"body": {"w": jnp.ones((3, 2))}, "head": {"w": jnp.ones((2, 1))}}

    base = fm.classification(init, lambda v, x: jnp.tanh(x @ v["body"]["w"]) @ v["head"]["w"], layers=("body", "head"))
    one = base._replace(features=lambda v, x: jnp.tanh(x @ v["body"]["w"]), head=lambda v, z: z @ v["head"]["w"])
    zero, five = np.array([0]), np.array([5])
    samples = fm.from_clients([(np.ones((5, 3)), np.zeros(5, int))], num_classes=1, views={"train": (zero, five)})
    with pytest.raises(ValueError, match="at least 2 classes"):
        fm.federate(fm.fedgp(one), fm.Federation(cohort_size=1, devices=1)).init(KEY, samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 1.0}, "held_out=1.0"),
        ({"length_scale": 0.0}, "length_scale=0.0"),
        ({"inference": "laplace"}, "inference"),
        ({"draws": 0}, "draws=0"),
        ({"capacity": 1}, "capacity=1"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        fm.fedgp(task(), **options)
