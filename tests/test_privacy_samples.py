"""Private gradients of single samples: against loops over samples, and with every method."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import fedjax_meta as fm
from fedjax_meta import masks, meta, privacy
from fedjax_meta.privacy.leaks import marks_of
from fedjax_meta.task import Batch
from tests import problems
from tests.methods import common

KEY = jax.random.key(5)
CLIP = 1.2


def _batch(rows=6, real=4, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, 5)), rng.integers(0, 3, rows)
    x[real:] = np.nan
    return Batch(jnp.asarray(x), jnp.asarray(y, jnp.int32), jnp.asarray(np.arange(rows) < real, float))


def _gradient(task, variables, batch, key=KEY):
    return jax.grad(lambda variables: task.loss(variables, batch, key)[0])(variables)


def _flat(tree):
    return np.concatenate([np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("batch_size", [None, 6])
def test_without_noise_it_is_the_mean_of_clipped_gradients_of_samples(batch_size):
    """A loop over samples, one gradient each. Rows of weight 0 hold NaN and have no effect."""
    task, variables, batch = problems.task(), problems.task().init(KEY), _batch()
    private = privacy.private_task(task, clip=CLIP, noise=0.0, batch_size=batch_size)
    each = [_flat(_gradient(task, variables, jax.tree.map(lambda a, i=i: a[i : i + 1], batch))) for i in range(4)]
    norms = [np.linalg.norm(one) for one in each]
    assert min(norms) < CLIP < max(norms)
    expected = sum(one * min(1, CLIP / norm) for one, norm in zip(each, norms, strict=True)) / (4 if batch_size is None else 6)
    np.testing.assert_allclose(_flat(jax.jit(_gradient, static_argnums=0)(private, variables, batch)), expected, rtol=1e-9)
    real = jax.tree.map(lambda leaf: leaf[:4], batch)
    assert private.loss(variables, real, KEY)[0] == task.loss(variables, real, KEY)[0]
    assert problems.leaves_equal(private.predict(variables, real.x), task.predict(variables, real.x))


def test_a_penalty_counts_for_real_samples_alone():
    """Its gradient, unlike that of a mean, is not 0 for rows of weight 0."""

    def penalised(variables, batch, key):
        return problems.task().loss(variables, batch, key)[0] + optax.tree.norm(variables, squared=True), variables

    task, variables, batch = problems.task()._replace(loss=penalised), problems.task().init(KEY), _batch()
    batch = batch._replace(x=jnp.nan_to_num(batch.x))
    private, real = privacy.private_task(task, clip=1e9, noise=0.0), jax.tree.map(lambda leaf: leaf[:4], batch)
    found, expected = (
        jax.jit(_gradient, static_argnums=0)(*of) for of in ((private, variables, batch), (task, variables, real))
    )
    np.testing.assert_allclose(_flat(found), _flat(expected), rtol=1e-9, atol=1e-12)


def test_a_multiple_of_a_loss_has_the_multiple_of_its_gradient():
    private, variables, batch = (
        privacy.private_task(problems.task(), clip=CLIP, noise=0.0),
        problems.task().init(KEY),
        _batch(),
    )
    tripled = jax.grad(lambda variables: 3 * private.loss(variables, batch, KEY)[0])(variables)
    np.testing.assert_allclose(_flat(tripled), 3 * _flat(_gradient(private, variables, batch)), rtol=1e-12)


def test_samples_of_a_batch_draw_by_themselves_and_16_bit_gradients_are_summed_in_32():
    def drawn(variables, batch, key):
        scale = jax.random.normal(key) if batch.y is not None else 1.0
        return jnp.sum(batch.x @ variables["w"]) * scale, variables

    task = fm.from_loss(lambda key: {"w": jnp.zeros(2)}, lambda variables, batch, key: drawn(variables, batch, key)[0])
    batch = Batch(jnp.eye(2), jnp.zeros(2, jnp.int32), jnp.ones(2))
    one, two = _flat(_gradient(privacy.private_task(task, clip=1e9, noise=0.0), {"w": jnp.zeros(2)}, batch))
    assert abs(one - two) > 1e-3
    many = Batch(jnp.ones((1000, 1), jnp.bfloat16), jnp.zeros(1000, jnp.int32), jnp.ones(1000))
    plain = fm.from_loss(
        lambda key: {"w": jnp.zeros(1, jnp.bfloat16)}, lambda variables, batch, key: jnp.sum(batch.x @ variables["w"])
    )
    private = privacy.private_task(plain, clip=2.0, noise=0.0, batch_size=1000)
    assert abs(float(_flat(_gradient(private, {"w": jnp.zeros(1, jnp.bfloat16)}, many))[0]) - 1) < 0.01


def test_a_batch_without_real_samples_has_gradient_zero():
    private = privacy.private_task(problems.task(), clip=CLIP, noise=3.0)
    assert not _flat(_gradient(private, problems.task().init(KEY), _batch(real=0))).any()


def test_one_sample_moves_the_sum_by_no_more_than_twice_the_norm():
    task, variables, batch = problems.task(), problems.task().init(KEY), _batch()
    private = privacy.private_task(task, clip=CLIP, noise=0.0)
    gradient, moved = jax.jit(lambda batch: _gradient(private, variables, batch)), []
    for i, value in enumerate((1e9, -1e9, 0.0, np.inf, np.nan, 3.0)):
        other = batch._replace(x=batch.x.at[1].set(value), y=batch.y.at[1].set(i % 3))
        moved.append(np.linalg.norm(4 * (_flat(gradient(batch)) - _flat(gradient(other)))))
    assert 0.1 * CLIP < max(moved) <= 2 * CLIP


def test_the_noise_has_its_deviation_and_no_two_gradients_share_it():
    """Deviation z S / B of each number. One key at other variables, or on other samples, is other noise: methods reuse keys."""
    task, batch = problems.task(), _batch()
    variables = task.init(KEY)
    noisy, plain = (privacy.private_task(task, clip=CLIP, noise=z) for z in (2.0, 0.0))

    def noise(key, variables, batch):
        return jax.tree.map(jnp.subtract, _gradient(noisy, variables, batch, key), _gradient(plain, variables, batch, key))

    found = jax.jit(jax.vmap(noise, (0, None, None)))(jax.random.split(KEY, 300), variables, batch)
    added = _flat(found) / (2.0 * CLIP / 4)
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], added.size)
    assert low < np.sum(added**2) < high
    near = jax.tree.map(lambda leaf: leaf + 1e-12, variables)
    inputs = batch._replace(x=batch.x.at[0, 0].add(1e-9))
    turned = jax.tree.map(lambda leaf: leaf[jnp.array([1, 0, 2, 3, 4, 5])], batch)
    others = ((near, batch), (variables, _batch(seed=1)), (variables, inputs), (variables, turned))
    draws = [_flat(noise(KEY, v, b)) for v, b in ((variables, batch), *others)]
    assert all(np.all(np.abs(draws[0] - other) > 1e-9) for other in draws[1:])
    np.testing.assert_array_equal(draws[0], _flat(noise(KEY, variables, batch)))


@pytest.mark.parametrize("name", ["scaffold", "fedmeta_fomaml"])
def test_a_method_with_a_loose_norm_and_no_noise_is_the_method(name):
    loose = privacy.private_task(problems.task(), clip=1e9, noise=0.0)
    options = {"cohort_size": 7, "devices": 1}
    plain, private = (common.run(common.build(name, task, **options), 2) for task in (None, loose))
    for part in ("model", "personal", "memory", "extra"):
        assert problems.distance(getattr(plain, part), getattr(private, part)) < 1e-10


ESTIMATORS = {
    "exact": meta.exact(meta.sgd(0.1)),
    "two exact steps": meta.exact(meta.sgd(0.1), steps=2),
    "difference": meta.hessian_free(meta.sgd(0.1)),
    "product": meta.hessian_free(meta.sgd(0.1), method="product"),
    "implicit": fm.implicit.implicit_gradient(meta.sgd(0.1), prox_weight=1.0),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_that_need_second_derivatives_are_refused(name):
    private, variables = privacy.private_task(problems.task(), clip=CLIP, noise=1.0), problems.task().init(KEY)
    with pytest.raises(ValueError, match="a private task has first derivatives only: exact, hessian_free and implicit"):
        ESTIMATORS[name](fm.local.parameter_loss(private, variables), variables, (_batch(), KEY), (_batch(), KEY))


def test_second_derivatives_taken_by_hand_are_refused_too():
    private, variables = privacy.private_task(problems.task(), clip=CLIP, noise=1.0), problems.task().init(KEY)
    gradient = lambda variables: _gradient(private, variables, _batch())  # noqa: E731
    for second in (lambda: jax.jvp(gradient, (variables,), (variables,)), lambda: jax.vjp(gradient, variables)):
        with pytest.raises(ValueError, match="first derivatives only"):
            second()


SECOND_ORDER = "a private task has first derivatives only"
REFUSED = {
    **dict.fromkeys(
        (
            "anil",
            "fedmeta",
            "fedmeta_metasgd",
            "fedmeta_per",
            "fedmeta_per_metasgd",
            "fedmeta_server",
            "imaml",
            "mamlpp",
            "perfedavg",
            "perfedavg_exact",
        ),
        SECOND_ORDER,
    ),
    "fedala": r"lets out what depends on samples without noise \(\['upload'\]",  # stops by losses
    "fedfomo": r"lets out .* \(\['collaborate'\]",  # validation losses
    **dict.fromkeys(("afl", "cfl", "fedas", "ifca", "qfedavg"), "lets out what depends on samples without noise"),  # losses
    **dict.fromkeys(
        ("apfl_outputs", "feddbe", "fedem", "fedgp", "fedpac", "fedproto", "fedrod", "gpfl", "mocha", "moon"),
        "takes gradients of the model's logits",
    ),
}
"""Methods that would let something out without noise, or cannot be learned from first derivatives."""


# A private task cannot have batch norms.
@pytest.mark.parametrize("name", [name for name in fm.METHODS if name not in problems.NEED_BATCH_NORM])
def test_every_method_is_private_or_refused(name):
    private, data = privacy.private_task(problems.task(), clip=CLIP, noise=1.0), problems.data()

    def begin():
        algorithm = problems.build(name, private, cohort_size=3, devices=1)
        state = jax.eval_shape(algorithm.init, KEY, data)
        return algorithm, jax.eval_shape(algorithm.round, KEY, state, data)

    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            begin()
        return
    algorithm, _ = begin()
    assert algorithm.config["private_task"] == {"name": "private_task", "clip": CLIP, "noise": 1.0, "batch_size": None}


def test_an_own_method_that_sends_statistics_of_samples_is_refused_by_the_name_of_the_leaf():
    private, data = privacy.private_task(problems.task(), clip=CLIP, noise=1.0), problems.data()

    def method(send=None, leaks=lambda batch, trained: {}, **more):
        @fm.method_builder
        def own(task):
            base = fm.fedavg(task, lr=0.1, batch_size=8)

            def client(key, received, data):
                trained, batch = base.client(key, received, data), data["train"].full().get(0, 0)
                sent = {} if send is None else {"statistics": {"sent": send(batch, trained)}}
                return trained._replace(**sent, **leaks(batch, trained))

            return fm.Method(
                init=base.init, client=client, personalize=base.personalize, predict=base.predict, roles=base.roles, **more
            )

        return fm.federate(own(private), fm.Federation(cohort_size=3, devices=1))

    for send in (lambda batch, trained: jnp.mean(batch.x), lambda batch, trained: trained.metrics["loss"]):
        with pytest.raises(ValueError, match=r"own lets out .* \(\['upload'\]\[1\]\['sent'\]\)"):
            method(send).init(KEY, data)
    method(lambda batch, trained: jnp.sum(batch.weight) + trained.model["head"]["b"][0]).init(KEY, data)
    mean = lambda batch, trained: jnp.abs(jnp.mean(batch.x))  # noqa: E731
    kept = {"init_memory": lambda key, model, count: jnp.zeros(())}
    tried = lambda key, population, support: population.model  # noqa: E731
    for words, refused in {
        r"\['weight'\]": {"leaks": lambda *given: {"weight": mean(*given)}},
        r"\['statistics_weight'\]": {
            "send": lambda batch, trained: jnp.zeros(()),
            "leaks": lambda *given: {"statistics_weight": {"sent": mean(*given)}},
        },
        r"\['init_extra'\]": {"init_extra": lambda model, data: jnp.mean(data.x)},
        r"\['new_client'\]\['memory'\]": {
            "leaks": lambda *given: {"memory": mean(*given)},
            **kept,
            "new_client": tried,
            "new_client_reads": "memory",
        },
    }.items():
        with pytest.raises(ValueError, match=rf"own lets out .* \({words}"):
            method(**refused).init(KEY, data)
    method(leaks=lambda *given: {"memory": mean(*given)}, **kept).init(KEY, data)  # which nobody reads


def test_a_private_gradient_covers_its_batch_alone():
    """Not where it is taken, nor which samples count."""
    private, variables, batch = (
        privacy.private_task(problems.task(), clip=CLIP, noise=1.0),
        problems.task().init(KEY),
        _batch(),
    )

    def gradient(x, at, weight):
        given = batch._replace(x=x, weight=weight)
        return jax.grad(lambda variables: private.loss(variables, given, KEY)[0])(at)

    for marked in ((True, False, False), (False, True, False), (False, False, True)):
        marks = tuple(
            jax.tree.map(lambda _, m=m: m, tree) for m, tree in zip(marked, (batch.x, variables, batch.weight), strict=True)
        )
        found = marks_of(gradient, marks, batch.x, variables, batch.weight)
        assert set(jax.tree.leaves(found)) == {not marked[0]}


def test_dependence_is_followed_through_loops_conditions_and_calls():
    def function(secret, public):
        looped = jax.lax.fori_loop(0, 3, lambda i, c: (c[1], c[2], c[2] + 1), (public, public, secret))
        counted = jax.lax.while_loop(lambda c: c[0] < secret, lambda c: (c[0] + 1, c[1] + 1), (public, public))
        scanned = jax.lax.scan(lambda c, x: (c + x, c), public, jnp.stack([secret, public]))
        chosen = jax.lax.cond(secret > 0, lambda: public, lambda: public + 1)
        called = jax.jit(lambda a, b: (a + 1, b * 2))(secret, public)
        kept = jax.lax.fori_loop(0, 3, lambda i, c: (c[0] + 1, c[1] * 2), (public, secret))
        return looped, counted, scanned[1], chosen, called, kept, jax.checkpoint(jnp.sin)(public)

    found = marks_of(function, (True, False), 1.0, 2.0)
    assert found == ((True,) * 3, (True,) * 2, True, True, (True, False), (False, True), False)


@pytest.mark.parametrize(("noise", "passes", "delta"), [(2.0, 1, 1e-5), (10.0, 60, 1e-6)])
def test_epsilon_of_a_sample_is_that_of_gaussian_mechanisms_of_twice_the_sensitivity(noise, passes, delta):
    found = privacy.sample_epsilon(noise, passes, delta)
    exact = privacy.gaussian_delta(found.epsilon, noise / 2 / np.sqrt(passes))
    assert exact == pytest.approx(delta, rel=1e-6)
    assert found.relation.startswith("replace one sample") and "no credit" in found.sampling
    assert privacy.sample_epsilon(noise, 0, delta).epsilon == 0 and privacy.sample_epsilon(0.0, 1, delta).epsilon == np.inf


def test_what_a_private_task_cannot_be_is_refused():
    task = problems.task()
    cases = {
        "clip=0.0 must be finite and above 0": lambda: privacy.private_task(task, clip=0.0, noise=1.0),
        "noise=-1.0 must be finite and at least 0": lambda: privacy.private_task(task, clip=1.0, noise=-1.0),
        "batch_size=0 must be an integer": lambda: privacy.private_task(task, clip=1.0, noise=1.0, batch_size=0),
        "private_task is for models without buffers": lambda: privacy.private_task(
            problems.normed_task(), clip=1.0, noise=1.0
        ),
        "the task is private already": lambda: privacy.private_task(
            privacy.private_task(task, clip=1.0, noise=1.0), clip=1.0, noise=1.0
        ),
        "first argument must be a Task": lambda: privacy.private_task(len, clip=1.0, noise=1.0),
    }
    for message, build in cases.items():
        with pytest.raises(ValueError, match=message):
            build()
    assert not all(jax.tree.leaves(problems.normed_task().trainable(masks.variables_shape(problems.normed_task()))))


REPEATS = {
    "mtfl": {"private": "none", "steps": 3, "batch_size": 40, "lr": 1.0},
    "pfedme": {"local_rounds": 3, "inner_steps": 1, "batch_size": 40, "lr": 1.0, "outer_lr": 0.1, "prox_weight": 10.0},
    "perfedavg_fo": {"inner_lr": 0.0, "outer_lr": 1.0, "local_steps": 3, "batch_size": 40},
}


@pytest.mark.parametrize("name", REPEATS)
def test_batches_that_repeat_samples_count_each_once(name):
    """A client of fewer samples than its batches hold: one replaced sample moves each sum by 2 S at most.

    The model is linear with a loss that is linear in it, so that a gradient depends on nothing but its sample.
    """
    loss = lambda variables, batch, key: jnp.sum(batch.weight * (2 * batch.y - 1) * (batch.x @ variables["w"]))  # noqa: E731
    task = fm.from_loss(lambda key: {"w": jnp.zeros(2)}, loss, predict=lambda variables, x: x @ variables["w"])
    private = privacy.private_task(task, clip=CLIP, noise=0.0, batch_size=1)
    found = []
    for label in (0, 1):
        x = np.array([[100.0, 0], [0, 100], [0, 100], [0, 100], [0, 100]])
        client = (x, np.array([label, 0, 1, 0, 1]))
        data = fm.from_clients([client, client], num_classes=2)
        assert int(data.sizes("train")[0]) == 3
        run = fm.federate(fm.METHODS[name](private, **REPEATS[name]), fm.Federation(cohort_size=2))
        state, _ = run.round(KEY, run.init(KEY, data), data)
        found.append(_flat(state.model))
    assert np.abs(found[0] - found[1]).max() == pytest.approx(3 * 2 * CLIP, rel=1e-6)  # three gradients
