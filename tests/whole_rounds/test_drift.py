"""Two rounds of methods against the drift of clients: FedDyn and FedNova, as their authors' code performs them.

FedDyn (alpemreacar/FedDyn, utils_methods.py 373-401, utils_general.py 190-225): steps along grad f_k(theta) + alpha (h_k +
theta - theta^t); then h_k = h_k + theta_k - theta^t, and theta^{t+1} = mean of theta_k over the cohort + mean of h_k over all N.
FedNova (JYWa/FedNova, distoptim/FedNova.py 104-205): m = rho m + g, x = x - eta (m + mu (x - x^t)); c = rho c + 1, a = a (1 -
eta mu) + c; then x^{t+1} = x^t - tau sum_i p_i (x^t - x_i) / a_i, tau = sum_i p_i a_i, or with mu > 0 sum_i p_i steps_i.
"""

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import participation
from fedjax_meta.methods.fednova import normaliser
from tests import problems
from tests.authors.source import written_from
from tests.whole_rounds.world import (
    COHORTS,
    KEY,
    KNOWN,
    LATE,
    NEW,
    TRAIN,
    Library,
    N,
    check,
    epochs,
    gradient,
    near,
    order_key,
    rows,
    task,
)

RATE, BATCH, SERVER = 0.15, 4, 0.7


@pytest.mark.parametrize(("mean_samples", "clip"), [(None, None), (17.0, None), (None, 1.9), (17.0, 1.9)])
@written_from("alpemreacar/FedDyn", "48a19fa", "utils_methods.py:373-401", "utils_general.py:190-225")
def test_two_rounds_of_feddyn(mean_samples, clip):
    """alpha over a client's share n / mean n, and g + alpha (h - theta^t) clipped before alpha theta comes, are the code's."""
    options = {"alpha": 0.3, "mean_samples": mean_samples, "clip": clip}
    library = Library(fm.feddyn(task(), lr=RATE, **options, epochs=2, batch_size=BATCH), server_lr=SERVER)
    w, memory, clipped = library.w, {}, set()
    for number, cohort in enumerate(COHORTS):
        models = []
        for i in cohort:
            theta, h = w, memory.get(i, 0 * w)
            alpha = 0.3 if mean_samples is None else 0.3 / (TRAIN[i] / mean_samples)
            for batch in epochs(order_key(number, i), i, "train", BATCH, 2):
                linear = gradient(theta, batch) + alpha * (h - w)
                if clip is not None:
                    clipped.add(bool(np.linalg.norm(linear) > clip))
                    linear = linear * min(1, clip / np.linalg.norm(linear))
                theta = theta - RATE * (linear + alpha * theta)
            memory[i] = h + theta - w
            models.append(theta)
        extra = sum(memory.values()) / N
        w = w + SERVER * (np.mean(models, 0) + extra - w)
        check((library.first, library.last)[number], number + 1, model=w, memory=rows(memory, 0 * w), extra=extra)
    assert clip is None or clipped == {True, False}
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), w)


@pytest.mark.parametrize(("momentum", "pull"), [(None, None), (0.6, None), (None, 0.8), (0.6, 0.8)])
@written_from("JYWa/FedNova", "47b4e09", "distoptim/FedNova.py:104-210")
def test_two_rounds_of_fednova(momentum, pull):
    rho, mu = momentum or 0.0, pull or 0.0
    options = {"lr": RATE, "momentum": momentum, "prox_weight": pull, "epochs": 2, "batch_size": BATCH}
    library = Library(fm.fednova(task(), **options), server_lr=SERVER)
    w = library.w
    for number, cohort in enumerate(COHORTS):
        per_step, effective = [], []
        for i in cohort:
            x, m, c, a = w, 0 * w, 0.0, 0.0
            batches = epochs(order_key(number, i), i, "train", BATCH, 2)
            for batch in batches:
                m = rho * m + gradient(x, batch)
                x = x - RATE * (m + mu * (x - w))
                c = rho * c + 1
                a = a * (1 - RATE * mu) + c
            per_step.append((w - x) / a)
            effective.append(len(batches) if mu else a)
        share = np.array([TRAIN[i] for i in cohort]) / sum(TRAIN[i] for i in cohort)
        w = w - SERVER * (share @ effective) * (share @ np.array(per_step))
        check((library.first, library.last)[number], number + 1, model=w)
    assert len(set(effective)) > 1
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), w)


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5), (0.9, 0.5)])
def test_the_normaliser_is_the_weight_of_a_constant_gradient_in_an_update(rho, mu):
    x, m = 0.0, 0.0
    for _ in range(7):
        m = rho * m + 1
        x = x - 0.1 * (m + mu * x)
    near(normaliser(7, 0.1, rho, mu), -x / 0.1)


def test_a_client_that_stops_at_once_changes_nothing_in_fednova():
    rule = participation.deadline(np.where(np.arange(7) == 2, 1e12, 1.0), limit=1.0, partial=True)
    algorithm = problems.build("fednova", batch_size=8, cohort_size=7, devices=1, participation=rule)
    state, info = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), problems.data())
    assert np.all(np.isfinite(np.concatenate([np.ravel(leaf) for leaf in state.model["head"].values()])))
    assert float(info.metrics["normaliser"][list(info.ids).index(2)]) <= 1


@pytest.mark.parametrize(("momentum", "pull"), [(None, None), (0.6, 0.8)])
def test_one_step_of_every_client_is_the_same_in_fednova_and_fedavg(momentum, pull):
    """The least normaliser, 1; in a first step there is neither a velocity nor a pull."""
    states = []
    for name, own in (("fednova", {"momentum": momentum, "prox_weight": pull}), ("fedavg", {})):
        algorithm = problems.build(name, lr=0.1, epochs=1, batch_size=128, cohort_size=7, devices=1, **own)
        states.append(jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), problems.data())[0].model)
    assert problems.distance(*states) < 1e-12
