"""Two rounds of clustered federated learning.

IFCA (jichan3751/ifca, mnist/train_cluster_mnist.py 299-350, 370-402): client i takes s = argmin_j f_i(theta_j), trains theta_s,
and theta_j becomes the mean of the models of its clients; without any it stays.
CFL (felisat/clustered-federated-learning, fl_devices.py 62-151): models become means over clusters; complete linkage of the
cosines of updates splits a cluster in two. A part that is new has its parent's model from then on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.cluster import hierarchy

import fedjax_meta as fm
from fedjax_meta.methods.cfl import Place, Pull, bipartition, split_all
from fedjax_meta.methods.fedcac import overlaps
from tests import problems
from tests.authors.source import written_from
from tests.methods.common import FULL, build, mean, of, run, step
from tests.methods.common import gradient as problem_gradient
from tests.methods.common import start as begin
from tests.whole_rounds.world import (
    COHORTS,
    KNOWN,
    LATE,
    NEW,
    Library,
    check,
    descend,
    epochs,
    flat,
    loss,
    near,
    order_key,
    rows,
    task,
    view,
)

RATE, BATCH, SERVER, CLUSTERS = 0.15, 4, 0.7, 3


def test_overlaps_of_marks_of_any_size():
    """As FedCAC writes them, one pair after the other; a client without marks shares nothing."""
    marks = np.random.default_rng(0).random((6, 40)) < np.array([[0.1], [0.3], [0.5], [0.9], [1.0], [0.0]])
    wanted = np.zeros((6, 6))
    for i in range(5):
        for j in range(6):
            wanted[i, j] = 1 - np.abs(marks[i].astype(int) - marks[j]).sum() / (2 * marks[i].sum())
    np.testing.assert_allclose(overlaps(jnp.asarray(marks)), wanted, atol=1e-6)


@pytest.mark.parametrize("option", ["mean_norm", "client_norm"])
def test_bounds_of_cfl_are_not_negative(option):
    with pytest.raises(ValueError, match=f"{option}=-0.1"):
        fm.cfl(task(), clusters=2, **{option: -0.1})


def stacked(tree):
    """[M, 27]: the models of a tree whose leaves are [M, ...]."""
    return np.stack([flat(jax.tree.map(lambda leaf, j=j: leaf[j], tree)) for j in range(CLUSTERS)])


def library_order(models):
    """The flat order of a tree whose leaves are [M, ...]: leaf by leaf."""
    return np.concatenate([models[:, begin:end].ravel() for begin, end in ((0, 12), (12, 15), (15, 27))])


@written_from("jichan3751/ifca", "61e44b8", "mnist/train_cluster_mnist.py:299-350", "mnist/train_cluster_mnist.py:370-402")
def test_two_rounds_of_ifca():
    library = Library(fm.ifca(task(), clusters=CLUSTERS, lr=RATE, epochs=2, batch_size=BATCH), server_lr=SERVER)
    models, own, visited = stacked(library.start.model), {}, set()
    for number, cohort in enumerate(COHORTS):
        trained = {}
        for i in cohort:
            own[i] = int(np.argmin([loss(theta, view(i, "train")) for theta in models]))
            trained[i] = descend(models[own[i]], RATE, epochs(order_key(number, i), i, "train", BATCH, 2))
        visited |= {own[i] for i in cohort}
        for j in {own[i] for i in cohort}:
            mean = np.mean([trained[i] for i in cohort if own[i] == j], 0)
            models[j] += SERVER * (mean - models[j])
        memory = rows({i: [float(j)] for i, j in own.items()}, [0.0])
        check((library.first, library.last)[number], number + 1, model=library_order(models), memory=memory)
    assert len(visited) > 1
    for i in (KNOWN, LATE):
        near(library.tested(i), models[own[i]])
    best = np.argmin([loss(theta, view(NEW, "test_support")) for theta in models])
    near(library.tested(NEW), models[best])


MOMENTUM = 0.9
"""Of the server's optimiser, which is each cluster's own."""


def momentum(rate):
    return optax.sgd(rate, MOMENTUM)


def _is_trace(node):
    return isinstance(node, optax.TraceState)


def test_a_server_optimizer_is_each_clusters_own_and_rests_without_clients():
    """IFCA; v_j = momentum v_j + (theta_j - mean_j), theta_j = theta_j - server v_j, only of clusters with clients."""
    method = fm.ifca(task(), clusters=CLUSTERS, lr=RATE, epochs=2, batch_size=BATCH)
    library = Library(method, server_lr=SERVER, server_optimizer=momentum)
    models, velocity, visited = stacked(library.start.model), np.zeros((CLUSTERS, 27)), []
    for number, cohort in enumerate(COHORTS):
        nearest = {i: int(np.argmin([loss(theta, view(i, "train")) for theta in models])) for i in cohort}
        trained = {i: descend(models[j], RATE, epochs(order_key(number, i), i, "train", BATCH, 2)) for i, j in nearest.items()}
        for j in set(nearest.values()):
            velocity[j] = MOMENTUM * velocity[j] + models[j] - np.mean([trained[i] for i in cohort if nearest[i] == j], 0)
            models[j] -= SERVER * velocity[j]
        near(library_order(stacked((library.first, library.last)[number].model)), library_order(models))
        visited.append(set(nearest.values()))
    (slots,) = [leaf for leaf in jax.tree.leaves(library.last.optimizer, is_leaf=_is_trace) if _is_trace(leaf)]
    near(library_order(stacked(slots.trace)), library_order(velocity))
    assert visited[0] - visited[1], "a cluster that has momentum must rest in the second round"


def apart(updates):
    """Which of the updates complete linkage of -cosine puts apart from the first, by SciPy."""
    unit = np.array(updates) / np.linalg.norm(updates, axis=1, keepdims=True)
    distance = 1 - unit @ unit.T
    label = hierarchy.fcluster(hierarchy.complete(distance[np.triu_indices(len(unit), 1)]), 2, "maxclust")
    return label != label[0]


@pytest.mark.parametrize("server", [{}, {"server_lr": SERVER, "server_optimizer": momentum}], ids=["mean", "momentum"])
@pytest.mark.parametrize("splits", [True, False])
@written_from(
    "felisat/clustered-federated-learning", "23a1c38", "fl_devices.py:62-151", "clustered_federated_learning.ipynb:221-266"
)
def test_two_rounds_of_cfl(splits, server):
    """With these thresholds a cluster of three is split after its first round, or never.

    A new cluster inherits the velocity of its parent at the server: v = momentum v + (theta - mean), theta = theta - rate v.
    """
    rate, share = (SERVER, MOMENTUM) if server else (1.0, 0.0)
    bounds = {"mean_norm": 1e3 if splits else 1e-9, "client_norm": 1e-3, "first_split": 0}
    library = Library(fm.cfl(task(), clusters=CLUSTERS, lr=RATE, epochs=2, batch_size=BATCH, **bounds), **server)
    models, alive, place = stacked(library.start.model), [True, False, False], {}
    velocity = np.zeros_like(models)
    near(models[1], models[0])
    for number, cohort in enumerate(COHORTS):
        trained, updates = {}, {}
        for i in cohort:
            live = [j for j in range(CLUSTERS) if alive[j]]
            nearest = live[int(np.argmin([loss(models[j], view(i, "train")) for j in live]))]
            cluster = place.setdefault(i, (nearest, nearest))[0]
            start = models[cluster]
            trained[i] = descend(start, RATE, epochs(order_key(number, i), i, "train", BATCH, 2))
            updates[i] = trained[i] - start
        for j in {place[i][0] for i in cohort}:
            mean = np.mean([trained[i] for i in cohort if place[i][0] == j], 0)
            velocity[j], alive[j] = share * velocity[j] + models[j] - mean, True
            models[j] -= rate * velocity[j]
        for j in range(CLUSTERS):
            members = [i for i in cohort if place[i][0] == j]
            if splits and len(members) >= 3:
                free = 1 + max(cluster for cluster, _ in place.values())
                far = apart([updates[i] for i in members])
                place |= {i: (free, j) for i, moved in zip(members, far, strict=True) if moved}
                models[free], velocity[free] = models[j], velocity[j]
        memory = rows({i: np.array(pair, float) for i, pair in place.items()}, np.zeros(2))
        state = (library.first, library.last)[number]
        slots = library_order(velocity) if server else ()
        check(state, number + 1, model=library_order(models), memory=memory, extra=np.array(alive, float), optimizer=slots)
    assert any(cluster > 0 for cluster, _ in place.values()) == splits
    for i in (KNOWN, LATE):
        near(library.tested(i), models[place[i][0]])
    live = [j for j in range(CLUSTERS) if alive[j]]
    near(library.tested(NEW), models[live[int(np.argmin([loss(models[j], view(NEW, "test_support")) for j in live]))]])


def test_a_bipartition_is_that_of_scipy():
    rng = np.random.default_rng(0)
    for count in (3, 4, 7, 9):
        updates, members = rng.normal(size=(count, 3)), np.ones(count, bool)
        members[1] = count == 3
        unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
        found = np.asarray(bipartition(jnp.asarray(unit @ unit.T), jnp.asarray(members)))
        assert found[members].tolist() == apart(updates[members]).tolist() and not found[~members].any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("mean_factor", "client_factor"), [(1.01, 0.99), (0.99, 0.99), (1.01, 1.01)])
def test_clusters_split_as_written_out(seed, mean_factor, client_factor):
    """Two clusters of four members and a client that did not return, with updates of unlike sizes.

    eps_1 and eps_2 lie a hundredth beside the norm of the mean and the largest norm of cluster 0.
    """
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=(10, 4)) * np.exp(rng.uniform(-2, 2, (10, 1)))
    cluster, valid = np.array([0, 1] * 5), np.arange(10) < 8
    first = updates[valid & (cluster == 0)]
    limits = mean_factor * np.linalg.norm(first.mean(0)), client_factor * np.linalg.norm(first, axis=1).max()
    expected, parent, free = cluster.copy(), cluster.copy(), 2
    for number in (0, 1):
        members = np.flatnonzero(valid & (cluster == number))
        mine = updates[members]
        if np.linalg.norm(mine.mean(0)) < limits[0] and np.linalg.norm(mine, axis=1).max() > limits[1]:
            far = members[apart(mine)]
            expected[far], parent[far], free = free, number, free + 1
    assert (expected[valid & (cluster == 0)] == 0).all() == (mean_factor < 1 or client_factor > 1)
    place, pull = Place(jnp.asarray(cluster), jnp.asarray(cluster)), Pull(*limits, least_size=3)
    found = split_all(place, jnp.asarray(updates), jnp.asarray(valid), jnp.int32(2), jnp.bool(True), pull, 5)
    assert found.cluster.tolist() == expected.tolist() and found.parent.tolist() == parent.tolist()


def test_two_clusters_that_split_in_one_round_get_numbers_of_their_own():
    updates = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)))
    place = Place(jnp.arange(8) % 2, jnp.arange(8) % 2)
    found = split_all(place, updates, jnp.ones(8, bool), jnp.int32(2), jnp.bool(True), Pull(1e3, 0.0, 3), 5)
    assert {(int(c), int(p)) for c, p in zip(found.cluster, found.parent, strict=True)} == {(0, 0), (1, 1), (2, 0), (3, 1)}


def test_a_client_of_ifca_goes_to_another_cluster_once_that_is_nearer():
    """The models of two clusters are exchanged between rounds: every client follows its own."""
    algorithm = build("ifca", **FULL, clusters=2, lr=0.1)
    first = run(algorithm, 1)
    exchanged = first._replace(model=jax.tree.map(lambda leaf: leaf[::-1], first.model))
    stay, follow = run(algorithm, 1, first).memory, run(algorithm, 1, exchanged).memory
    assert set(np.asarray(stay).tolist()) == {0, 1} and follow.tolist() == (1 - stay).tolist()


def test_a_new_cluster_starts_from_its_parents_model_and_then_has_its_own():
    """Full gradients and all clients: in round 1 one cluster is split; in round 2 each part takes its own mean step."""
    options = {**FULL, "clusters": 2, "lr": 0.1, "mean_norm": 1e3, "client_norm": 0.0, "first_split": 0}
    algorithm = build("cfl", **options)
    first = run(algorithm, 1)
    where = np.asarray(first.memory.cluster)
    start = jax.tree.map(lambda leaf: leaf[0], first.model)
    initial = of(begin(algorithm).model, 0)
    expected = mean([step(initial, 0.1, problem_gradient(initial, i)) for i in range(7)])
    assert problems.distance(start, expected) < 1e-12 and set(where) == {0, 1}
    second = run(algorithm, 1, first)
    for number in (0, 1):
        members = [step(start, 0.1, problem_gradient(start, i)) for i in np.flatnonzero(where == number)]
        assert problems.distance(of(second.model, number), mean(members)) < 1e-12
    assert np.asarray(second.memory.cluster).tolist() == where.tolist() and np.asarray(second.extra).tolist() == [True, True]
    assert algorithm.needs_all_rows
