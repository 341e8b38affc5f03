"""Two rounds of methods for even losses: q-FedAvg and AFL, as litian96/fair_flearn performs them.

q-FedAvg (flearn/trainers/qffedavg.py 48-65): F = f_k(w) + 1e-10, D = (w - w_k) / eta, h = q F^(q-1) |D|^2 + F^q / eta, and
w = w - sum F^q D / sum h. AFL (flearn/trainers/afl.py 38-60): w = w - eta sum l_k g_k / sum l_k, l = the point of the simplex
that is nearest to l + gamma loss; the members of a cohort share the mass that they had.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import fedjax_meta as fm
from fedjax_meta.methods.afl import projected
from tests.authors.source import written_from
from tests.whole_rounds.world import (
    COHORTS,
    KEY,
    KNOWN,
    LATE,
    NEW,
    Library,
    N,
    check,
    descend,
    endless,
    epochs,
    flat,
    gradient,
    loss,
    near,
    order_key,
    rows,
    task,
    view,
)

RATE, BATCH, SERVER = 0.15, 4, 0.7


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
@written_from("litian96/fair_flearn", "f097971", "flearn/trainers/qffedavg.py:48-65", "flearn/trainers/fedbase.py:170-187")
def test_two_rounds_of_qfedavg(q):
    library = Library(fm.qfedavg(task(), lr=RATE, q=q, epochs=2, batch_size=BATCH), server_lr=SERVER)
    w = library.w
    for number, cohort in enumerate(COHORTS):
        sent, steps = [], []
        for i in cohort:
            value = loss(w, view(i, "train")) + 1e-10
            slope = (w - descend(w, RATE, epochs(order_key(number, i), i, "train", BATCH, 2))) / RATE
            sent.append(value**q * slope)
            steps.append(q * value ** (q - 1) * slope @ slope + value**q / RATE)
        w = w - SERVER * np.sum(sent, 0) / np.sum(steps)
        check((library.first, library.last)[number], number + 1, model=w)
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), w)


@pytest.mark.parametrize("q", [0.5, 1.5])
def test_a_client_without_any_loss_moves_nothing(q):
    """F^(q - 1) would be infinite: this is what 1e-10 is added for. The first client's labels are those of a certain model."""
    certain = jax.tree.map(lambda leaf: 1e4 * leaf, task().init(KEY))
    exact = task()._replace(init=lambda key: certain)
    x = np.random.default_rng(0).normal(size=(2, 12, 3))
    y = [np.argmax(np.asarray(exact.predict(certain, part)), 1) for part in x]
    data = fm.from_clients([(x[0], y[0]), (x[1], (y[1] + 1) % 3)], num_classes=3)
    for client, moves in ((0, False), (1, True)):
        schedule = fm.schedules.given(np.array([[client]]))
        algorithm = fm.federate(fm.qfedavg(exact, lr=RATE, q=q), fm.Federation(cohort_size=1, devices=1, schedule=schedule))
        start = algorithm.init(KEY, data)
        after, info = jax.jit(algorithm.round)(KEY, start, data)
        assert np.all(info.returned) and np.all(np.isfinite(flat(after.model)))
        assert (np.abs(flat(after.model) - flat(start.model)).max() > 1e-6) == moves


def nearest(values, mass):
    """argmin |x - values|^2 over x >= 0, sum x = mass: the shift for which the sum fits, by a root finder."""
    root = optimize.brentq(lambda t: np.sum(np.maximum(values + t, 0)) - mass, -10, 10, xtol=1e-15)
    return np.maximum(values + root, 0)


@pytest.mark.parametrize(("average", "steps"), [(True, 1), (False, 3)])
@written_from("litian96/fair_flearn", "f097971", "flearn/trainers/afl.py:38-60", "flearn/trainers/fedbase.py:152-167")
def test_two_rounds_of_afl(average, steps):
    """With several local steps, a client's loss is the mean over these."""
    gamma = 0.9
    options = {"lr": RATE, "weight_lr": gamma, "batch_size": BATCH, "average": average, "local_steps": steps}
    library = Library(fm.afl(task(), **options), server_lr=SERVER)
    w, share, models = library.w, {}, []
    for number, cohort in enumerate(COHORTS):
        own = np.array([share.get(i, 1 / N) for i in cohort])
        models_of, losses = [], []
        for i in cohort:
            w_i, seen = w, []
            for batch in endless(order_key(number, i), i, "train", BATCH, steps):
                seen.append(loss(w_i, batch))
                w_i = w_i - RATE * gradient(w_i, batch)
            models_of.append(w_i)
            losses.append(np.mean(seen))
        share |= dict(zip(cohort, nearest(own + gamma * np.array(losses), own.sum()), strict=True))
        w = w - SERVER * (w - own @ np.array(models_of) / own.sum())
        models.append(w)
        extra = np.r_[np.mean(models, 0), number + 1] if average else ()
        memory = rows({i: [v] for i, v in share.items()}, [0.0])
        check((library.first, library.last)[number], number + 1, model=w, memory=memory, extra=extra)
    assert len({round(v, 6) for v in share.values()}) > 1
    for i in (KNOWN, LATE, NEW):
        near(library.tested(i), np.mean(models, 0) if average else w)


def test_a_projection_leaves_others_at_zero_and_takes_any_mass():
    rng = np.random.default_rng(0)
    for _ in range(20):
        values, members = rng.normal(size=6), rng.random(6) < 0.7
        members[0] = True
        found = np.asarray(projected(jnp.asarray(values), jnp.asarray(members), jnp.asarray(0.8)))
        near(found[members], nearest(values[members], 0.8))
        assert not found[~members].any()
    assert not np.asarray(projected(jnp.ones(3), jnp.zeros(3, bool), jnp.asarray(0.0))).any()
