"""Two rounds of clustered federated learning.

IFCA (jichan3751/ifca, mnist/train_cluster_mnist.py 299-350, 370-402): client i takes s = argmin_j f_i(theta_j), trains theta_s,
and theta_j becomes the mean of the models of its clients; without any it stays.
"""

import jax
import numpy as np

import fedjax_meta as fm
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


def stacked(tree):
    """[M, 27]: the models of a tree whose leaves are [M, ...]."""
    return np.stack([flat(jax.tree.map(lambda leaf, j=j: leaf[j], tree)) for j in range(CLUSTERS)])


def library_order(models):
    """The flat order of a tree whose leaves are [M, ...]: leaf by leaf."""
    return np.concatenate([models[:, begin:end].ravel() for begin, end in ((0, 12), (12, 15), (15, 27))])


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
