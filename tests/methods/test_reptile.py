"""Reptile and Per-FedAvg-Reptile against loops written out, and against FedAvg where they are the same."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.methods.reptile import part_of_epoch
from tests import problems
from tests.methods.common import KEY, build, mean, plus, run, start
from tests.methods.test_perfedavg import gradient

ALL = {"cohort_size": 7, "devices": 1}


@cache
def alike(sizes=(24, 61, 30, 97, 44, 33, 70)):
    """Clients that differ, each with copies of one sample, so that the order of its samples does not matter."""
    rng = np.random.default_rng(1)
    return fm.from_clients(
        [(np.tile(rng.normal(size=5), (size, 1)), np.full(size, i % 3)) for i, size in enumerate(sizes)], num_classes=3
    )


def one_round(algorithm, data):
    """(the server's model before a round, after it)."""
    state = algorithm.init(KEY, data)
    return state.model, run(algorithm, 1, state, data).model


def test_whole_interpolation_of_one_batch_is_fedavg_with_equal_weights():
    reptile = build("perfedavg_reptile", interpolation=1.0, outer_batches=1, inner_batches=1, inner_lr=0.2, **ALL)
    full = int(problems.SIZES.max())
    fedavg = build("fedavg", lr=0.2, epochs=1, batch_size=full, weighting="uniform", **ALL)
    assert problems.distance(run(reptile, 3).model, run(fedavg, 3).model) < 1e-12


def test_whole_interpolation_of_four_minibatches_is_an_epoch_of_fedavg():
    data = alike((32,) * 7)  # 24 samples train: 4 minibatches of 6
    reptile = build("perfedavg_reptile", interpolation=1.0, outer_batches=1, inner_batches=4, inner_lr=0.2, **ALL)
    fedavg = build("fedavg", lr=0.2, epochs=1, batch_size=6, weighting="uniform", **ALL)
    assert problems.distance(one_round(reptile, data)[1], one_round(fedavg, data)[1]) < 1e-12


def test_a_round_is_the_user_update_of_the_paper():
    data = alike()
    algorithm = build(
        "perfedavg_reptile", interpolation=0.3, outer_batches=3, inner_batches=2, inner_lr=0.2, chunk_size=4, **ALL
    )
    before, after = one_round(algorithm, data)
    users = []
    for i in range(data.num_clients):
        task_model = before
        for _ in range(3):
            moving = task_model
            for _ in range(2):
                moving = plus(moving, -0.2, gradient(moving, data.client(i)["train"]))
            task_model = plus(task_model, 0.3, plus(moving, -1, task_model))
        users.append(task_model)
    assert problems.distance(after, mean(users)) < 1e-12


@pytest.mark.parametrize("size", [1, 5, 37, 48])
@pytest.mark.parametrize("chunk_size", [2, 64])
def test_parts_of_an_epoch_hold_every_sample_once_and_are_cut_as_numpy_cuts(size, chunk_size):
    sizes = [size, 48]  # the other client sets the static width
    data = fm.from_clients(
        [(np.arange(n)[:, None] / 1.0, np.zeros(n, int)) for n in sizes], num_classes=2, views={"train": ([0, 0], sizes)}
    )
    found = []
    for number in range(4):
        batches = part_of_epoch(KEY, data.client(0)["train"], 4, 3, number, chunk_size=chunk_size)
        assert batches.steps == 3
        for step in range(3):
            chunks = [batches.get(step, chunk) for chunk in range(int(batches.chunks))]
            found.append(np.concatenate([np.asarray(b.x)[np.asarray(b.weight) > 0, 0] for b in chunks]))
    expected = [len(part) for outer in np.array_split(np.arange(size), 4) for part in np.array_split(outer, 3)]
    assert [len(part) for part in found] == expected
    assert sorted(np.concatenate(found).astype(int)) == list(range(size))


def test_the_server_moves_towards_the_adapted_models():
    data = alike()
    algorithm = build("reptile", outer_lr=0.4, inner_lr=0.2, inner_epochs=3, batch_size=100, **ALL)
    before, after = one_round(algorithm, data)
    adapted = []
    for i in range(data.num_clients):
        phi = before
        for _ in range(3):
            phi = plus(phi, -0.2, gradient(phi, data.client(i)["train"]))
        adapted.append(phi)
    assert problems.distance(after, plus(before, 0.4, plus(mean(adapted), -1, before))) < 1e-12


def test_on_the_support_view_it_sees_no_other_sample():
    """One epoch in one batch is a step along the gradient of the support set, however the rest of the client looks."""
    algorithm = build("reptile", inner_lr=0.2, outer_lr=1.0, batch_size=100, view="support", **ALL)
    model = start(algorithm).model
    expected = mean([plus(model, -0.2, gradient(model, problems.data().client(i)["support"])) for i in range(7)])
    assert problems.distance(run(algorithm, 1).model, expected) < 1e-12


def test_a_server_that_takes_the_whole_step_is_fedavg():
    # One full batch, for which no order of samples is drawn.
    reptile = build("reptile", outer_lr=1.0, inner_lr=0.2, batch_size=100, weighting="samples", **ALL)
    fedavg = build("fedavg", lr=0.2, batch_size=100, **ALL)
    assert problems.distance(run(reptile, 2).model, run(fedavg, 2).model) < 1e-12


def momentum(rate):
    return optax.sgd(rate, momentum=0.9)


def test_reptile_takes_server_momentum_sample_weights_and_a_personal_head():
    server = {"server_optimizer": momentum, "server_lr": 0.5}
    algorithm = build("reptile", personal="head", weighting="samples", outer_lr=0.5, **server, **ALL)
    before, after = start(algorithm), run(algorithm, 1)
    assert problems.leaves_equal(after.model["head"], before.model["head"])
    heads = after.personal["head"]["w"]
    assert float(jnp.min(jnp.max(jnp.abs(heads - before.personal["head"]["w"]), (1, 2)))) > 1e-4
    assert problems.distance(after.model["body"], before.model["body"]) > 1e-4
    assert problems.distance(after.optimizer, before.optimizer) > 1e-4


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (fm.perfedavg_reptile, {"outer_batches": 0}, "outer_batches=0"),
        (fm.perfedavg_reptile, {"inner_batches": 1.5}, "inner_batches=1.5"),
        (fm.perfedavg_reptile, {"interpolation": 0}, "interpolation=0"),
        (fm.perfedavg_reptile, {"test_steps": 0}, "test_steps=0"),
        (fm.perfedavg_reptile, {"chunk_size": 0}, "chunk_size=0"),
        (fm.reptile, {"outer_lr": -1}, "outer_lr=-1"),
        (fm.reptile, {"inner_epochs": 0}, "inner_epochs=0"),
        (fm.reptile, {"batch_size": None}, "batch_size=None"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_method_is_built(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(problems.task(), **options)


@pytest.mark.parametrize("build", [fm.reptile, fm.perfedavg_reptile])
def test_it_has_no_learned_rates(build):
    with pytest.raises(TypeError, match=r"\(\) takes no 'learned_rates'"):
        build(problems.task(), learned_rates=True)
