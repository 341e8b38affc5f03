"""Two rounds of methods that share means of features: FedProto, FedDBE and FedAS, as their authors' code performs them.

FedProto (yuetan031/FedProto, lib/update.py 137-205, lib/utils.py 221-240): SGD with momentum 0.5 on the loss plus lambda times
the mean of |z - C_y|^2 / d; C_k is the mean over clients of their class means after training, by samples in the paper.
FedDBE (TsingZ0/DBE, clientDBE.py 62-85): m = (1 - mu) m + mu mean(z), and from the second round on the head sees z + s and the
loss has kappa mean((m - m*)^2) / 2; s is trained with the model. m* is the mean of m after the first round.
FedAS (xiyuanyang45/FedAS, clientas.py 94-114, 171-232, serveras.py 52-59): the body takes SGD steps on the sum over the classes
of a batch of mean (z - p_k)^2, p_k from the client's last body; clients count by sum over batches of |grad|^2 after training.
"""

from functools import partial

import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.features import Centroids
from fedjax_meta.keys import tagged
from fedjax_meta.methods.fedproto import Predictor
from tests.authors.source import written_from
from tests.whole_rounds.test_fedpac import class_means
from tests.whole_rounds.world import (
    BODY,
    CLASSES,
    COHORTS,
    HEAD,
    KNOWN,
    LATE,
    NEW,
    TRAIN,
    WIDTH,
    Library,
    check,
    client_key,
    cut,
    data,
    epochs,
    features,
    flat,
    gradient,
    momentum_sgd,
    near,
    order_key,
    pack,
    rows,
    task,
    test_key,
    unpack,
    view,
)

RATE, BATCH, SERVER = 0.1, 4, 0.7
EVERY = np.ones_like(BODY)


def through_features(w, x, dz):
    """The gradient of a loss whose derivative by the features is dz."""
    z = features(w, x)
    return pack(x.T @ (dz * (1 - z**2)), np.zeros(CLASSES), np.zeros((WIDTH, CLASSES)))


@pytest.mark.parametrize("by_samples", [True, False])
@written_from("yuetan031/FedProto", "97e42e2", "lib/update.py:137-205", "lib/utils.py:205-240")
def test_two_rounds_of_fedproto(by_samples):
    pull = 0.8
    options = {"lr": RATE, "prototype_weight": pull, "by_samples": by_samples, "epochs": 2, "batch_size": BATCH}
    library = Library(fm.fedproto(task(), **options, new_client_epochs=3), server_lr=SERVER)
    w, own, prototypes, known = library.w, {}, np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES, bool)

    def slope(w, batch):
        x, y = batch
        dz = 2 * pull * np.where(known[y][:, None], features(w, x) - prototypes[y], 0) / (WIDTH * len(y))
        return gradient(w, batch) + through_features(w, x, dz)

    for number, cohort in enumerate(COHORTS):
        counts, totals = np.zeros(CLASSES), np.zeros((CLASSES, WIDTH))
        trained = {}
        for i in cohort:
            batches = epochs(order_key(number, i), i, "train", BATCH, 2)
            trained[i] = momentum_sgd(own.get(i, w), RATE, batches, EVERY, slope)
            count, mean, _ = class_means(trained[i], view(i, "train"))
            share = count if by_samples else (count > 0).astype(float)
            counts, totals = counts + share, totals + share[:, None] * mean
        held = counts > 0
        prototypes[held], known, own = totals[held] / counts[held, None], known | held, own | trained
        extra = np.r_[prototypes.ravel(), known]
        check((library.first, library.last)[number], number + 1, model=w, personal=rows(own, w), extra=extra)
    for i in (KNOWN, LATE):
        near(library.tested(i), np.r_[own[i], prototypes.ravel(), known])
    batches = epochs(tagged(test_key(), "order"), NEW, "test_support", BATCH, 3)
    near(library.tested(NEW), np.r_[momentum_sgd(w, RATE, batches, EVERY, slope), prototypes.ravel(), known])
    # The nearest prototype is the class.
    variables = library.algorithm.personalize(test_key(), library.last, data().client(KNOWN)["test_support"], KNOWN)
    x = view(KNOWN, "test")[0]
    logits = np.asarray(library.algorithm.predict(variables, x))
    near(logits, -np.sum((features(own[KNOWN], x)[:, None] - prototypes) ** 2, -1))


def test_prototypes_of_fedproto_do_not_follow_the_weighting_of_the_federation():
    equal, by_samples = (Library(fm.fedproto(task(), lr=RATE), weighting=weighting) for weighting in ("uniform", "samples"))
    near(flat(equal.last.extra), flat(by_samples.last.extra))


def test_fedproto_may_predict_with_its_heads():
    """Then it does so, although there are prototypes, by which it predicts if nothing is said."""
    x, variables = view(0, "train")[0], task().init(client_key(0, 0))
    known = Predictor(variables, Centroids(np.ones((CLASSES, WIDTH)), np.ones(CLASSES, bool)))
    near(fm.fedproto(task(), predicts_with="head").predict(known, x), task().predict(variables, x))
    square = np.sum((features(flat(variables), x) - 1) ** 2, -1, keepdims=True)
    near(fm.fedproto(task()).predict(known, x), -np.repeat(square, CLASSES, 1))


def test_a_class_without_prototype_is_the_least_likely_and_without_any_the_head_decides():
    method = fm.fedproto(task())
    variables = task().init(client_key(0, 0))
    x = view(0, "train")[0]
    centroids = Centroids(np.ones((CLASSES, WIDTH)), np.array([True, False, True]))
    logits = np.asarray(method.predict(Predictor(variables, centroids), x))
    assert np.all(np.isfinite(logits)) and np.all(logits[:, 1] < logits[:, [0, 2]].min(1))
    none = centroids._replace(known=np.zeros(CLASSES, bool))
    near(method.predict(Predictor(variables, none), x), task().predict(variables, x))


@pytest.mark.parametrize(("momentum", "first_round"), [(1.0, "fedavg"), (0.3, "fedavg"), (0.3, "mean")])
@written_from("TsingZ0/DBE", "193f435", "system/flcore/clients/clientDBE.py:39-98", "system/flcore/servers/serverDBE.py:14-35")
def test_two_rounds_of_feddbe(momentum, first_round):
    """Clients of the code train once for the global mean alone, before the rounds: its first round is our second."""
    kappa = 5.0
    options = {"lr": RATE, "regularisation": kappa, "momentum": momentum, "first_round": first_round, "epochs": 2}
    options |= {"batch_size": BATCH}
    library = Library(fm.feddbe(task(), **options), server_lr=SERVER)
    w, shift, common, known = library.w, {}, np.zeros(WIDTH), False
    for number, cohort in enumerate(COHORTS):
        models, means = [], []
        for i in cohort:
            theta, s, m = w, shift.get(i, np.zeros(WIDTH)), np.zeros(WIDTH)
            for x, y in epochs(order_key(number, i), i, "train", BATCH, 2):
                z = features(theta, x)
                m = (1 - momentum) * m + momentum * z.mean(0)
                _, bias, head = unpack(theta)
                used = s if known else 0 * s
                logits = (z + used) @ head + bias
                p = np.exp(logits - logits.max(1, keepdims=True))
                dl = (p / p.sum(1, keepdims=True) - np.eye(CLASSES)[y]) / len(y)
                dz = dl @ head.T
                ds = dz.sum(0) if known else 0
                if known:
                    dz = dz + kappa * (m - common) * momentum / (WIDTH * len(y))
                slope = pack(x.T @ (dz * (1 - z**2)), dl.sum(0), (z + used).T @ dl)
                theta, s = theta - RATE * slope, s - RATE * ds
            models.append(theta)
            means.append(m)
            shift[i] = s
        weights = [TRAIN[i] for i in cohort]
        if known or first_round == "fedavg":
            w = w + SERVER * (np.average(models, 0, weights) - w)
        common, known = common if known else np.average(means, 0, weights), True
        memory = rows(shift, np.zeros(WIDTH))
        check((library.first, library.last)[number], number + 1, model=w, memory=memory, extra=np.r_[common, 1.0])
    assert np.abs(shift[KNOWN]).max() > 1e-4
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), np.r_[w, shift.get(i, np.zeros(WIDTH))])
    # The head sees the shifted features in a test too.
    variables = library.algorithm.personalize(test_key(), library.last, data().client(KNOWN)["test_support"], KNOWN)
    (x, _), (_, bias, head) = view(KNOWN, "test"), unpack(w)
    near(library.algorithm.predict(variables, x), (features(w, x) + shift[KNOWN]) @ head + bias)


@pytest.mark.parametrize(("fisher", "momentum"), [(True, 0.0), (False, 0.6)])
@written_from(
    "xiyuanyang45/FedAS",
    "1a4f5fd",
    "system/flcore/clients/clientas.py:48-120",
    "system/flcore/clients/clientas.py:171-232",
    "system/flcore/servers/serveras.py:44-59",
)
def test_two_rounds_of_fedas(fisher, momentum):
    """The optimiser is that of training, also of a new client's head; the alignment is plain SGD whatever it is."""
    sgd = partial(optax.sgd, momentum=momentum or None)
    options = {"lr": RATE, "align_lr": 0.4, "align_epochs": 2, "align_batch_size": 6, "epochs": 2, "batch_size": BATCH}
    library = Library(fm.fedas(task(), **options, new_client_epochs=3, fisher=fisher, optimizer=sgd), server_lr=SERVER)
    w, own, bodies = library.w, {}, {}
    for number, cohort in enumerate(COHORTS):
        trained, amounts = {}, []
        for i in cohort:
            theta, samples = np.where(HEAD, own.get(i, w), w), view(i, "train")
            if i in bodies:
                wanted = class_means(np.where(BODY, bodies[i], theta), samples)[1]
                for x, y in epochs(tagged(tagged(client_key(number, i), "align"), "order"), i, "train", 6, 2):
                    number_of = np.bincount(y, minlength=CLASSES)[y]
                    dz = 2 * (features(theta, x) - wanted[y]) / (WIDTH * number_of[:, None])
                    theta = theta - 0.4 * through_features(theta, x, dz)
            batches = epochs(order_key(number, i), i, "train", BATCH, 2)
            trained[i] = momentum_sgd(theta, RATE, batches, EVERY, momentum=momentum)
            amounts.append(sum(np.sum(gradient(trained[i], batch) ** 2) for batch in cut(samples, BATCH)) if fisher else 1)
        mean = np.average([trained[i] for i in cohort], 0, amounts)
        w = np.where(HEAD, w, w + SERVER * (mean - w))
        own, bodies = own | trained, bodies | trained
        personal, memory = rows(own, library.w)[:, HEAD], rows(bodies, 0 * w)[:, BODY]
        check((library.first, library.last)[number], number + 1, model=w, personal=personal, memory=memory)
    for i in (KNOWN, LATE):
        near(library.tested(i), np.where(HEAD, own[i], w))
    batches = epochs(tagged(test_key(), "order"), NEW, "test_support", BATCH, 3)
    near(library.tested(NEW), momentum_sgd(w, RATE, batches, HEAD, momentum=momentum))
