"""Per-FedAvg against its pseudo-code written out, and what its three batches are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.methods.perfedavg import independent_batches
from tests import problems
from tests.methods.common import KEY, build, gradient_on, mean, plus, run, start

PRODUCT = partial(fm.meta.hessian_free, method="product")
ALL = {"cohort_size": 7, "devices": 1, "inner_lr": 0.2, "outer_lr": 0.3}


def gradient(w, view):
    """Gradient of the problem's loss over a whole view."""
    index = jnp.arange(view.max_size)
    return gradient_on(w, view.take(index, index < view.size))


def written_out(w, view, second_order, alpha, beta, steps):
    for _ in range(steps):
        g = gradient(plus(w, -alpha, gradient(w, view)), view)
        descent = plus(g, -alpha, second_order(w, g, view))
        w = plus(w, -beta, descent)
    return w


def no_hessian(w, g, view):
    return jax.tree.map(jnp.zeros_like, g)


def difference(w, g, view, delta=1e-3):
    ahead, behind = gradient(plus(w, delta, g), view), gradient(plus(w, -delta, g), view)
    return jax.tree.map(lambda a, b: (a - b) / (2 * delta), ahead, behind)


def product(w, g, view):
    return jax.jvp(lambda w: gradient(w, view), (w,), (g,))[1]


@pytest.mark.parametrize(
    ("estimator", "second_order"),
    [(fm.meta.first_order, no_hessian), (fm.meta.hessian_free, difference), (PRODUCT, product), (fm.meta.exact, product)],
    ids=["FO", "HF", "product", "exact"],
)
def test_a_round_of_several_local_steps_is_the_pseudo_code(estimator, second_order):
    algorithm = build("perfedavg", estimator=estimator, local_steps=3, batch_size=None, **ALL)
    model = start(algorithm).model
    clients = [
        written_out(model, problems.data().client(i)["train"], second_order, 0.2, 0.3, 3) for i in range(len(problems.SIZES))
    ]
    assert problems.distance(run(algorithm, 1).model, mean(clients)) < 1e-10


def test_hessian_free_tends_to_the_product_as_the_square_of_its_step():
    options = {**ALL, "local_steps": 2, "batch_size": 8}
    reference = run(build("perfedavg", estimator=PRODUCT, **options), 1).model
    estimators = [partial(fm.meta.hessian_free, delta=delta) for delta in (1e-1, 1e-2)]
    gaps = [problems.distance(run(build("perfedavg", estimator=e, **options), 1).model, reference) for e in estimators]
    assert 50 < gaps[0] / gaps[1] < 200


def test_first_order_is_exact_where_the_loss_is_linear():
    def loss(w, batch, key):
        return jnp.sum(batch.weight * (batch.x @ w)) / jnp.maximum(jnp.sum(batch.weight), 1), w

    init = lambda key: jax.random.normal(key, (5,))  # noqa: E731
    task = fm.Task(init, loss, lambda w, x: (x @ w)[:, None] * jnp.ones((1, 3)))
    algorithms = [build("perfedavg", task, estimator=e, batch_size=8, **ALL) for e in (fm.meta.first_order, PRODUCT)]
    results = [run(algorithm, 2).model for algorithm in algorithms]
    assert problems.distance(*results) < 1e-12
    assert problems.distance(results[0], start(algorithms[0]).model) > 1e-2


def test_a_test_client_takes_one_step_on_all_of_its_support_view():
    algorithm = build("perfedavg_fo", **ALL)
    state = start(algorithm)
    support = problems.data().client(3)["test_support"]
    expected = plus(state.model, -0.2, gradient(state.model, support))
    assert problems.distance(algorithm.personalize(KEY, state, support, 3), expected) < 1e-12


@pytest.mark.parametrize(("size", "times"), [(33, [0, 1]), (4, [4, 5])])
def test_three_batches_share_no_sample_unless_the_client_has_too_few(size, times):
    # 3 x 6 = 18 rows: of 33 samples none comes twice, and of 4 each comes 4 or 5 times.
    data = fm.from_clients(
        [(np.arange(size)[:, None] / 1.0, np.zeros(size, int))], num_classes=1, views={"train": ([0], [size])}
    )
    batches = independent_batches(KEY, data.client(0)["train"], 6)
    drawn = np.concatenate([np.asarray(b.get(0, 0).x)[:, 0].astype(int) for b in batches])
    assert drawn.size == 18
    assert set(np.bincount(drawn, minlength=size)) <= set(times)


def test_every_local_step_draws_afresh_and_gives_each_batch_its_role():
    # The "gradient" of this estimator counts the samples in b0, b1 and b2, so that the model after a round lists them.
    size = 40
    data = fm.from_clients(
        [(np.arange(size)[:, None] / 1.0, np.zeros(size, int))], num_classes=1, views={"train": ([0], [size])}
    )

    def counting(inner):
        def estimate(loss, meta, support, query):
            def count(batches):
                return jnp.sum(jax.nn.one_hot(batches.get(0, 0)[0].x[:, 0].astype(int), size), 0)

            seen = jnp.stack([count(support.support), count(query), count(support.hessian)])
            zero = jnp.zeros(())
            return fm.meta.MetaGradient(meta, -seen, fm.meta.Info(zero, zero, zero, zero))

        return estimate

    task = fm.Task(lambda key: jnp.zeros((3, size)), lambda w, batch, key: (jnp.sum(w), w), lambda w, x: x)
    options = {"estimator": counting, "outer_lr": 1.0, "batch_size": 6, "cohort_size": 1, "devices": 1}
    once, thrice = (run(build("perfedavg", task, local_steps=n, **options), 1, data=data).model for n in (1, 3))
    assert np.array_equal(jnp.sum(once, 1), [6, 6, 6])
    assert int(jnp.max(jnp.sum(once, 0))) == 1
    assert np.array_equal(jnp.sum(thrice, 1), [18, 18, 18])
    assert not np.array_equal(thrice, 3 * once)


def test_rates_that_are_learned_may_stay_with_their_client():
    algorithm = build(
        "perfedavg_exact", learned_rates=True, personal_rates="all", outer_optimizer=optax.adam, batch_size=8, **ALL
    )
    after = run(algorithm, 1)
    assert set(map(len, jax.tree.leaves(after.personal.rates))) == {7}
    assert (
        problems.distance(after.personal.rates, jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.2), after.personal.rates))
        > 0.01
    )
    assert not jax.tree.leaves(after.personal.params)


def test_moments_of_the_clients_optimiser_start_anew_or_are_averaged():
    options = {"outer_optimizer": optax.adam, "batch_size": 8, **ALL}
    fresh, averaged = (run(build("perfedavg_exact", outer_slots=slots, **options), 2) for slots in ("fresh", "averaged"))
    assert problems.distance(fresh.model, averaged.model) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_slots": "sometimes"}, "outer_slots='sometimes'"),
        ({"local_steps": 0}, "local_steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"test_steps": 0}, "test_steps=0"),
        ({"inner_lr": -0.1}, "inner_lr=-0.1"),
        ({"outer_lr": 0.0}, "outer_lr=0.0"),
        ({"learned_rates": True, "estimator": fm.meta.reptile_gradient}, "reptile_gradient has no gradient for learned rates"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_method_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        fm.perfedavg(problems.task(), **options)


def test_the_step_at_the_server_belongs_to_the_federation():
    with pytest.raises(TypeError, match=r"perfedavg\(\) takes no 'outer_at'"):
        fm.perfedavg(problems.task(), outer_at="server")
