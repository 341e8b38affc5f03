"""MOCHA: rounds by hand, the dual against solvers of the whole problem, partial work, wrong arguments."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.svm import LinearSVC

import fedjax_meta as fm
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.keys import tagged
from fedjax_meta.numerics import related_tasks
from fedjax_meta.numerics.related_tasks import relations, safety
from fedjax_meta.participation import stragglers
from tests import problems
from tests.methods.common import build
from tests.whole_rounds.world import CLASSES, COHORTS, KEY, TRAIN, N, client_key, data, features, flat, near, task, view

LAMBDA = 0.05


def one_round(method, **federation):
    federation = {"cohort_size": N, "devices": 1, "schedule": lambda *_: jnp.arange(N, dtype=jnp.int32)} | federation
    algorithm = fm.federate(method, fm.Federation(**federation))
    return algorithm, jax.jit(algorithm.init)(KEY, data()), jax.jit(algorithm.round)


@cache
def inputs(w, i):
    """(features with a 1 appended [n, d + 1], signs [n, K]) of a client; w is a tuple."""
    x, y = view(i, "train")
    return np.c_[features(np.array(w), x), np.ones(len(y))], np.where(y[:, None] == np.arange(CLASSES), 1.0, -1.0)


def order(key, size, count):
    keys = permutation_keys(tagged(key, "order"))
    return np.asarray(permute(keys, jnp.arange(size, dtype=jnp.int32), size))[np.arange(count) % size]


def hinge(weights, w):
    """sum_t mean_i hinge, over all classes; weights are [N, K, d + 1]."""
    return sum(np.mean(np.maximum(0, 1 - s * (x @ u.T)), 0).sum() for u, (x, s) in zip(weights, all_inputs(w), strict=True))


def all_inputs(w):
    return [inputs(tuple(w), i) for i in range(N)]


def test_the_hinge_loss_is_a_mean_over_the_samples_that_count():
    rng = np.random.default_rng(0)
    weights, x, y = rng.normal(size=(3, 5)), rng.normal(size=(8, 5)), rng.integers(0, 3, 8)
    wanted = 0.0
    for i in range(6):
        for k in range(3):
            wanted += max(0, 1 - (1 if y[i] == k else -1) * float(weights[k] @ x[i])) / 6
    found = related_tasks.hinge(jnp.asarray(weights), jnp.asarray(x), jnp.asarray(y), 6)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_four_rounds_written_out():
    """Local coordinate ascent as in opt/run_mocha.m of gingsmith/fmtl at 6ca7fb7, lines 62-97, for one class after the other.

    Sigma is renewed after the second and the fourth round (lines 101-114), and W with it.
    """
    smoothing, passes = 0.1, 2
    method = fm.mocha(task(), regularisation=LAMBDA, epochs=passes, relation_every=2, smoothing=smoothing, capacity=40)
    _, state, step = one_round(method)
    w = flat(state.model.variables)
    dual, sigma, rho = [np.zeros((n, CLASSES)) for n in TRAIN], np.eye(N) / N, 1.0
    weights = np.zeros((N, CLASSES, 5))
    for number in range(4):
        state, info = step(jax.random.fold_in(KEY, number), state, data())
        assert np.all(np.asarray(info.returned))
        maps = []
        for t, (x, sign) in enumerate(all_inputs(w)):
            n = len(x)
            for k in range(CLASSES):
                moved = np.zeros(5)
                for i in order(client_key(number, t), n, passes * n):
                    y, old = sign[i, k], dual[t][i, k]
                    update = y * x[i] @ (weights[t, k] + rho * moved)
                    grad = LAMBDA * n * (1 - update) / (sigma[t, t] * rho * x[i] @ x[i]) + old * y
                    dual[t][i, k] = y * min(1, max(0, grad))
                    moved = moved + sigma[t, t] * (dual[t][i, k] - old) * x[i] / (LAMBDA * n)
            maps.append(dual[t].T @ x / n)
        weights = np.einsum("ts,skd->tkd", sigma, maps) / LAMBDA
        if number % 2 == 1:
            joined = weights.reshape(N, -1).T
            values, vectors = np.linalg.eigh(joined.T @ joined)
            root = vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T
            sigma = (1 - smoothing) * root / np.trace(root) + smoothing * np.eye(N) / N
            weights = np.einsum("ts,skd->tkd", sigma, maps) / LAMBDA
        rho = max(np.abs(sigma).sum(1) / np.diag(sigma))
        near(state.personal.weights, weights)
        near(state.memory.relation, sigma)
        near(state.memory.step, rho * np.diag(sigma))
        for t, n in enumerate(TRAIN):
            near(state.memory.dual[t, :n], dual[t])
    near(flat(state.model.variables), w, 1e-15)


def test_rounds_of_a_part_of_the_clients_written_out():
    """Who is outside a cohort keeps model and relations, but what it sent last counts in the models of the others."""
    smoothing = 0.1
    method = fm.mocha(task(), regularisation=LAMBDA, relation_every=2, smoothing=smoothing, capacity=40)
    algorithm = fm.federate(method, fm.Federation(cohort_size=3, devices=1, schedule=fm.schedules.given(np.array(COHORTS))))
    state, step = algorithm.init(KEY, data()), jax.jit(algorithm.round)
    w = flat(state.model.variables)
    dual, maps, weights = [np.zeros((n, CLASSES)) for n in TRAIN], np.zeros((N, CLASSES, 5)), np.zeros((N, CLASSES, 5))
    relation, scale, seen = np.zeros((N, N)), np.full(N, 1 / N), set()
    for number in range(4):
        cohort = COHORTS[number % 2]
        state, info = step(jax.random.fold_in(KEY, number), state, data())
        assert info.ids.tolist() == list(cohort)
        for t in cohort:
            x, sign = inputs(tuple(w), t)
            for k in range(CLASSES):
                moved = np.zeros(5)
                for i in order(client_key(number, t), len(x), len(x)):
                    y, old = sign[i, k], dual[t][i, k]
                    margin = 1 - y * x[i] @ (weights[t, k] + moved)
                    dual[t][i, k] = y * min(1, max(0, LAMBDA * len(x) * margin / (scale[t] * x[i] @ x[i]) + old * y))
                    moved = moved + scale[t] * (dual[t][i, k] - old) * x[i] / (LAMBDA * len(x))
            maps[t] = dual[t].T @ x / len(x)
        seen |= set(cohort)
        rows = relation.copy()
        for t in seen:
            rows[t] = rows[t] if rows[t].any() else np.eye(N)[t] / N
        if number % 2 == 1:
            joined = (np.tensordot(rows, maps, 1) / LAMBDA).reshape(N, -1)
            values, vectors = np.linalg.eigh(joined @ joined.T)
            root = vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T
            rows = (1 - smoothing) * root / np.trace(root) + smoothing * np.eye(N) / N
        rho = max(np.abs(row).sum() / row[t] for t, row in enumerate(rows) if row[t] > 0)
        for t in cohort:
            relation[t], scale[t], weights[t] = rows[t], rho * rows[t, t], np.tensordot(rows[t], maps, 1) / LAMBDA
        near(state.personal.weights, weights)
        near(state.memory.relation, relation)
        near(np.asarray(state.memory.step)[sorted(seen)], scale[sorted(seen)])
        near(state.memory.map, maps)
    assert len(seen) == N - 1 and np.abs(relation[4, 0]) > 1e-3
    variables = algorithm.personalize(KEY, state, data().client(2)["test_support"], 2)
    x = view(2, "test")[0]
    near(algorithm.predict(variables, x), np.c_[features(w, x), np.ones(len(x))] @ weights[2].T)


def converged(method, rounds=150, sigma=None):
    algorithm, state, step = one_round(method)
    for number in range(rounds):
        if sigma is not None and number == 1:
            scale = np.float64(safety(jnp.asarray(sigma)))
            memory = state.memory._replace(relation=jnp.asarray(sigma), step=jnp.asarray(scale * np.diag(sigma)))
            state = state._replace(memory=memory)
        state, _ = step(jax.random.fold_in(KEY, number), state, data())
    return algorithm, state


def test_unrelated_clients_are_support_vector_machines():
    """With Sigma = 1/N the problem is one SVM a client and class: C = 1 / (n lambda N) sets the same trade-off."""
    _, state = converged(fm.mocha(task(), regularisation=LAMBDA, epochs=5, relation_every=10**6, capacity=40))
    w = flat(state.model.variables)
    for t, (x, sign) in enumerate(all_inputs(w)):
        for k in range(CLASSES):
            if len(set(sign[:, k])) == 1:
                continue
            svm = LinearSVC(C=1 / (len(x) * LAMBDA * N), loss="hinge", fit_intercept=False, tol=1e-10, max_iter=2_000_000)
            np.testing.assert_allclose(state.personal.weights[t, k], svm.fit(x, sign[:, k]).coef_[0], atol=2e-3)


def test_related_clients_reach_the_optimum_of_the_whole_problem():
    """Against the whole dual, maximised by L-BFGS-B; and the primal objective there equals the dual one."""
    mixed = np.random.default_rng(3).normal(size=(N, 3))
    sigma = mixed @ mixed.T + 0.5 * np.eye(N)
    sigma = sigma / np.trace(sigma)
    _, state = converged(fm.mocha(task(), regularisation=LAMBDA, epochs=5, relation_every=10**6, capacity=40), 300, sigma)
    w, ends = flat(state.model.variables), np.cumsum(TRAIN)[:-1]
    weights = np.asarray(state.personal.weights)
    dual_value = 0.0
    for k in range(CLASSES):
        # a_i = y_i alpha_i in [0, 1]: maximise sum_t mean a - tr(B Sigma B') / (2 lambda), B_t = sum a y x / n.
        blocks = [sign[:, k, None] * x / len(x) for x, sign in all_inputs(w)]

        def objective(a, blocks=blocks):
            parts = np.split(a, ends)
            maps = np.stack([part @ block for part, block in zip(parts, blocks, strict=True)])
            pulled = sigma @ maps / LAMBDA
            slopes = [1 / len(part) - block @ u for part, block, u in zip(parts, blocks, pulled, strict=True)]
            return np.sum(maps * pulled) / 2 - sum(part.mean() for part in parts), -np.concatenate(slopes)

        found = minimize(
            objective, np.zeros(sum(TRAIN)), jac=True, bounds=[(0, 1)] * sum(TRAIN), options={"maxiter": 20000, "ftol": 1e-14}
        )
        maps = np.stack([part @ block for part, block in zip(np.split(found.x, ends), blocks, strict=True)])
        np.testing.assert_allclose(weights[:, k], sigma @ maps / LAMBDA, atol=5e-3)
        dual_value -= found.fun
    omega = np.linalg.inv(sigma)
    penalty = LAMBDA / 2 * np.einsum("tkd,ts,skd->", weights, omega, weights)
    assert hinge(weights, w) + penalty == pytest.approx(dual_value, rel=2e-3)


def test_relations_of_orthogonal_models_are_their_lengths():
    weights = jnp.asarray(np.diag([3.0, 1.0, 0.0])[:, None])
    np.testing.assert_allclose(relations(weights, 0.0), np.diag([0.75, 0.25, 0]), atol=1e-12)
    np.testing.assert_allclose(relations(0 * weights, 0.0), np.eye(3) / 3)
    assert float(safety(jnp.asarray([[0.5, -0.25], [-0.25, 0.5]]))) == pytest.approx(1.5)


def test_partial_work_performs_a_share_of_the_steps():
    """A client that stops half-way goes through half of its samples, once."""
    method = fm.mocha(task(), regularisation=LAMBDA, relation_every=10**6, capacity=40)
    all_of_it, part = (one_round(method, **options)[1:] for options in ({}, {"participation": stragglers(1.0, epochs=2)}))
    moved = [np.asarray(step(KEY, state, data())[0].memory.dual != 0).any(2).sum(1) for state, step in (all_of_it, part)]
    assert np.all(moved[1] <= np.ceil(np.array(TRAIN) / 2)) and np.all(moved[1] > 0) and np.all(moved[0] >= moved[1])
    assert moved[0].sum() > 1.5 * moved[1].sum()


def test_a_new_client_solves_its_own_problem():
    """By its support set alone, at the scale of a client that nobody is related to yet."""
    method = fm.mocha(task(), regularisation=LAMBDA, capacity=40, new_client_epochs=5000)
    algorithm, state, _ = one_round(method)
    samples = data().client(3)["test_support"]
    fitted = algorithm.personalize(KEY, state, samples, None)
    x, y = view(3, "test_support")
    x = np.c_[features(flat(state.model.variables), x), np.ones(len(y))]
    for k in set(y.tolist()):
        if len(set(y.tolist())) > 1:
            sign = np.where(y == k, 1, -1)
            svm = LinearSVC(C=1 / (len(x) * LAMBDA * N), loss="hinge", fit_intercept=False, tol=1e-10, max_iter=2_000_000)
            least, found = svm.fit(x, sign).coef_[0], np.asarray(fitted.weights[k])
            value, best = (np.mean(np.maximum(0, 1 - sign * (x @ u))) + LAMBDA * N / 2 * u @ u for u in (found, least))
            # Coordinate ascent is slow along the flat directions of six samples; the objective is what it minimises.
            assert value == pytest.approx(best, rel=1e-4)
            np.testing.assert_allclose(found, least, atol=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regularisation": 0.0}, "regularisation=0.0"),
        ({"relation_every": 0}, "relation_every=0"),
        ({"smoothing": 1.5}, "smoothing=1.5"),
        ({"capacity": 0}, "capacity=0"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        fm.mocha(task(), **options)


def test_a_client_of_too_many_samples_is_refused():
    with pytest.raises(ValueError, match="more than capacity=20"):
        _, state, step = one_round(fm.mocha(task(), capacity=20))
        step(KEY, state, data())


def test_features_are_those_of_the_samples_and_not_of_the_capacity():
    """A round asks for the features of as many places as the largest client has, once, however large `capacity` is."""
    base, seen = task(), []

    def recorded(variables, x):
        seen.append(len(x))
        return base.features(variables, x)

    algorithm = fm.federate(fm.mocha(base._replace(features=recorded), capacity=700), fm.Federation(cohort_size=N, devices=1))
    state = jax.eval_shape(algorithm.init, KEY, data())
    seen.clear()
    jax.eval_shape(algorithm.round, KEY, state, data())
    assert set(seen) == {max(TRAIN)}


def test_steps_are_safe_for_all_clients_also_in_a_part_of_them():
    """A step of client t is max_s (sum |R_s| / R_ss) R_tt, the maximum over all clients."""
    samples, every = problems.data(), build("mocha", relation_every=2, cohort_size=7, devices=1)
    state = every.init(KEY, samples)
    for number in range(2):
        state, _ = jax.jit(every.round)(jax.random.fold_in(KEY, number), state, samples)
    r = np.asarray(state.memory.relation)
    ratio = np.abs(r).sum(1) / np.diag(r)
    asked = [client for client in range(7) if client != np.argmax(ratio)][:2]
    some = build("mocha", relation_every=2, cohort_size=2, devices=1, schedule=fm.schedules.given([asked]))
    after, _ = jax.jit(some.round)(jax.random.fold_in(KEY, 2), state, samples)
    np.testing.assert_allclose(np.asarray(after.memory.step)[asked], ratio.max() * np.diag(r)[asked], rtol=1e-6)
