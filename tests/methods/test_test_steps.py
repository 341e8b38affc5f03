"""Steps before a prediction: their own rate, the samples that they read, and what becomes of running statistics."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import masks
from tests import problems
from tests.methods.common import KEY, build, gradient, personalized, plus, run, start

CLIENT = 3
OWN_RATE = {
    "fedmeta": ("test_lr", {"inner_lr": 0.2, "batch_size": None}),
    "reptile": ("test_lr", {"inner_lr": 0.2}),
    "perfedavg": ("test_lr", {"inner_lr": 0.2}),
    "perfedavg_reptile": ("test_lr", {"inner_lr": 0.2}),
    "fedavg_one_step": ("finetune_lr", {"lr": 0.2}),
    "fedavg_meta": ("finetune_lr", {"lr": 0.2}),
    "fedprox": ("finetune_lr", {"lr": 0.2, "finetune_epochs": 1}),
    "scaffold": ("finetune_lr", {"lr": 0.2, "finetune_epochs": 1}),
    "moon": ("finetune_lr", {"lr": 0.2, "finetune_epochs": 1, "optimizer": optax.sgd}),
}


@pytest.mark.parametrize("name", OWN_RATE)
def test_a_test_step_has_a_rate_of_its_own(name):
    """w - rate * gradient of the whole support view; a round does not read the rate."""
    option, others = OWN_RATE[name]
    others = {"batch_size": 128, **others} if "batch_size" in inspect.signature(fm.METHODS[name]).parameters else others
    common = {**others, "cohort_size": 7, "devices": 1}
    states = [run(build(name, **common), 2), run(build(name, **common, **{option: 0.7}), 2)]
    assert problems.leaves_equal(*states)
    model = states[0].model
    descent = gradient(model, CLIENT, "test_support")
    for rate, options in ((0.2, {}), (0.7, {option: 0.7})):
        found = personalized(build(name, **common, **options), states[0], CLIENT)
        assert problems.distance(found, plus(model, -rate, descent)) < 1e-12


@pytest.mark.parametrize(
    ("name", "option", "others"),
    [
        ("fedmeta", "test_steps", {"batch_size": None}),
        ("reptile", "test_epochs", {"batch_size": 128}),
        ("imaml", "test_epochs", {"batch_size": 128, "inner_epochs": 1, "test_prox_weight": 0.0}),
        ("mamlpp", "test_steps", {"inner_steps": 2}),
    ],
)
def test_a_test_may_take_more_steps_than_a_round(name, option, others):
    """Three gradients of the whole support view; a round does not read their number."""
    common = {"inner_lr": 0.2, **others, "cohort_size": 7, "devices": 1}
    algorithm = build(name, **common, **{option: 3})
    state = run(build(name, **common), 1)
    assert problems.leaves_equal(state, run(algorithm, 1))
    model = state.model
    rates = [jax.tree.map(lambda leaf: 0.2, model)] * 3
    if name == "mamlpp":
        model, learned = state.model
        # Of two learned rates a leaf, the last one serves what follows.
        rates = [jax.tree.map(lambda leaf, step=step: leaf[step], learned) for step in (0, 1, 1)]
        assert min(float(jnp.abs(leaf[0] - leaf[1])) for leaf in jax.tree.leaves(learned)) > 0
    for rate in rates:
        descent = gradient(model, CLIENT, "test_support")
        model = jax.tree.map(lambda leaf, r, g: leaf - r * g, model, rate, descent)
    assert problems.distance(personalized(algorithm, state, CLIENT), model) < 1e-12


HEAD_MOVES = {
    "fedmeta": {"inner_lr": 0.2, "adapts": "head", "batch_size": 128},
    "imaml": {"inner_lr": 0.2, "adapts": "head", "batch_size": 128, "inner_epochs": 1},
    "reptile": {"inner_lr": 0.2, "adapts": "head", "batch_size": 128},
    "perfedavg": {"inner_lr": 0.2, "adapts": "head"},
    "perfedavg_reptile": {"inner_lr": 0.2, "adapts": "head"},
    "fedavg": {"lr": 0.2, "finetune": "head", "finetune_epochs": 1, "batch_size": 128},
    "fedprox": {"lr": 0.2, "finetune": "head", "finetune_epochs": 1, "batch_size": 128},
    "scaffold": {"lr": 0.2, "finetune": "head", "finetune_epochs": 1, "batch_size": 128},
    "moon": {"lr": 0.2, "finetune": "head", "finetune_epochs": 1, "batch_size": 128, "optimizer": optax.sgd},
}


@pytest.mark.parametrize("name", HEAD_MOVES)
def test_a_test_moves_the_leaves_that_it_may_move(name):
    """One step on the head, with the gradient of the whole support view; the body is the server's."""
    algorithm = build(name, cohort_size=7, devices=1, **HEAD_MOVES[name])
    state = run(algorithm, 1)
    model, descent = state.model, gradient(state.model, CLIENT, "test_support")
    expected = {"body": model["body"], "head": plus(model["head"], -0.2, descent["head"])}
    assert problems.distance(personalized(algorithm, state, CLIENT), expected) < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "moon"])
def test_fine_tuning_takes_the_optimizer_of_training(name):
    """Two gradients of the whole support view with momentum."""
    options = {"lr": 0.2, "epochs": 1, "batch_size": 128, "finetune_epochs": 2, "optimizer": partial(optax.sgd, momentum=0.9)}
    algorithm = build(name, cohort_size=7, devices=1, **options)
    state = run(algorithm, 1)
    model, velocity = state.model, jax.tree.map(jnp.zeros_like, state.model)
    for _ in range(2):
        velocity = plus(gradient(model, CLIENT, "test_support"), 0.9, velocity)
        model = plus(model, -0.2, velocity)
    assert problems.distance(personalized(algorithm, state, CLIENT), model) < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_full_batch_steps_are_as_many_as_asked_for_and_others_for_a_new_client(name):
    options = {"lr": 0.2, "finetune_full_batch": True, "finetune_epochs": 2, "new_client_epochs": 3, "batch_size": 4}
    algorithm = build(name, **options, cohort_size=7, devices=1)
    state = start(algorithm)._replace(seen=jnp.ones(7, bool))
    path = [state.model]
    for _ in range(3):
        path.append(plus(path[-1], -0.2, gradient(path[-1], CLIENT, "test_support")))
    assert problems.distance(personalized(algorithm, state, CLIENT), path[2]) < 1e-12
    assert problems.distance(personalized(algorithm, state, None, of_client=CLIENT), path[3]) < 1e-12


@pytest.mark.parametrize(("name", "option"), [("fedmeta", "test_lr"), ("perfedavg", "test_lr"), ("fedavg", "finetune_lr")])
def test_a_wrong_rate_is_refused(name, option):
    with pytest.raises(ValueError, match=f"{option}=-1"):
        fm.METHODS[name](problems.task(), **{option: -1})


def test_learned_rates_have_no_other_rate_in_tests():
    with pytest.raises(ValueError, match="test_lr and learned_rates=True exclude each other"):
        fm.fedmeta_metasgd(problems.task(), test_lr=0.1)


def test_a_test_may_read_one_batch_of_the_view():
    """With one sample the step is that of exactly one of the view's; with more than there are it is the whole view's."""
    model = start(build("perfedavg", **PER, batch_size=None)).model
    data, task = problems.data(), problems.task()
    first, size = (int(part["test_support"][CLIENT]) for part in (data.start, data.size))

    def tested(key, **options):
        algorithm = build("perfedavg", **PER, batch_size=None, **options)
        view = data.client(CLIENT)["test_support"]
        return algorithm.personalize(key, start(algorithm), view, CLIENT)

    seen = set()
    for number in range(6):
        found = tested(jax.random.fold_in(KEY, number), test_batch_size=1)
        near = []
        for i in range(first, first + size):
            sample = fm.task.Batch(jnp.asarray(data.x[i : i + 1]), jnp.asarray(data.y[i : i + 1]), jnp.ones(1))
            descent = jax.grad(lambda w, sample=sample: task.loss(w, sample, KEY)[0])(model)
            near += [i] if problems.distance(found, plus(model, -0.2, descent)) < 1e-12 else []
        assert len(near) == 1
        seen.update(near)
    assert len(seen) > 1
    assert problems.distance(tested(KEY, test_batch_size=size + 9), tested(KEY)) < 1e-12
    with pytest.raises(ValueError, match="test_batch_size=0"):
        build("perfedavg", **PER, test_batch_size=0)


def test_a_new_client_tries_personal_leaves_on_one_batch_of_the_view():
    """With one sample its model is a step along that of exactly one of the view's, from one of the trained heads."""
    algorithm = build("perfedavg", **PER, batch_size=None, personal="head", test_batch_size=1)
    state, data = run(algorithm, 1), problems.data()
    first, size = (int(part["test_support"][CLIENT]) for part in (data.start, data.size))
    found = personalized(algorithm, state, None, of_client=CLIENT)

    @jax.jit
    def tried(k, x, y):
        w = {"body": state.model["body"], "head": jax.tree.map(lambda leaf: leaf[k], state.personal["head"])}
        sample = fm.task.Batch(x[None], y[None], jnp.ones(1))
        return plus(w, -0.2, jax.grad(lambda w: problems.task().loss(w, sample, KEY)[0])(w))

    x, y = jnp.asarray(data.x[first : first + size]), jnp.asarray(data.y[first : first + size])
    near = [i for i in range(size) if any(problems.distance(found, tried(k, x[i], y[i])) < 1e-12 for k in range(7))]
    assert len(near) == 1


PER = {"inner_lr": 0.2, "outer_lr": 0.3, "local_steps": 2, "cohort_size": 7, "devices": 1}


def test_running_statistics_are_reset_in_rounds_and_moved_by_the_steps_of_a_test():
    task, data = problems.normed_task(), problems.data()
    make = partial(problems.build, "perfedavg_fo", task, **PER, batch_size=8, test_steps=2)
    algorithm, plain = make(statistics="reset"), make()
    before = jax.jit(algorithm.init)(KEY, data)
    after, other = before, before
    for _ in range(2):
        key = jax.random.fold_in(KEY, after.round)
        after, other = jax.jit(algorithm.round)(key, after, data)[0], jax.jit(plain.round)(key, other, data)[0]
    # Training normalises by the batch: parameters do not depend on running statistics.
    assert problems.distance(after.model["params"], other.model["params"]) < 1e-12
    assert problems.distance(after.model["batch_stats"], before.model["batch_stats"]) < 1e-12
    assert problems.distance(other.model["batch_stats"], before.model["batch_stats"]) > 1e-3
    view = data.client(CLIENT)["test_support"]
    batch = view.take(jnp.arange(view.max_size), jnp.arange(view.max_size) < view.size)
    variables = after.model
    for _ in range(2):
        value = jax.value_and_grad(lambda p, v=variables: task.loss({**v, "params": p}, batch, KEY), has_aux=True)
        (_, moved), descent = value(variables["params"])
        variables = {**moved, "params": plus(variables["params"], -0.2, descent)}
    found = algorithm.personalize(KEY, after, view, CLIENT)
    assert problems.distance(found, variables) < 1e-12
    assert not masks.split(found, task.trainable(found))[0]["batch_stats"]["bn1"]["mean"]
    assert float(np.max(np.abs(found["batch_stats"]["bn1"]["mean"]))) > 1e-3


def test_the_steps_of_a_reset_test_have_a_rate_and_leaves_of_their_own():
    task, data = problems.normed_task(), problems.data()
    options = {**PER, "batch_size": 8, "statistics": "reset", "test_lr": 0.7, "adapts": "head"}
    algorithm = problems.build("perfedavg_fo", task, **options)
    state, view = jax.jit(algorithm.init)(KEY, data), data.client(CLIENT)["test_support"]
    batch = view.take(jnp.arange(view.max_size), jnp.arange(view.max_size) < view.size)
    descent = jax.jit(jax.grad(lambda p: task.loss({**state.model, "params": p}, batch, KEY)[0]))(state.model["params"])
    head = masks.resolve("head", task)["params"]
    expected = jax.tree.map(lambda w, g, moves: w - 0.7 * g if moves else w, state.model["params"], descent, head)
    found = jax.jit(lambda state: algorithm.personalize(KEY, state, view, CLIENT))(state)
    assert problems.distance(found["params"], expected) < 1e-12


def test_reset_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="needs a model with running statistics"):
        fm.perfedavg(problems.task(), statistics="reset")
    with pytest.raises(ValueError, match="takes no learned_rates"):
        fm.perfedavg(problems.normed_task(), statistics="reset", personal="head")
    with pytest.raises(ValueError, match="statistics='kept' is unknown"):
        fm.perfedavg(problems.normed_task(), statistics="kept")
