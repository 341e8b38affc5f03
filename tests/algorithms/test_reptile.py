"""Reptile and Per-FedAvg-Reptile against loops written out, and against FedAvg where they are the same."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fedjax_meta.algorithms.reptile import part_of_epoch

import fedjax_meta as fm
from tests import problems
from tests.algorithms.test_perfedavg import gradient, plus
from tests.test_contract import rounds

KEY = jax.random.key(3)
ALL = {"cohort_size": 7, "devices": 1}


@cache
def alike(sizes=(24, 61, 30, 97, 44, 33, 70)):
    """Clients whose own samples are all the same, so that no order of them matters, and that differ among each other."""
    rng = np.random.default_rng(1)
    return fm.from_clients(
        [(np.tile(rng.normal(size=5), (size, 1)), np.full(size, i % 3)) for i, size in enumerate(sizes)], num_classes=3
    )


def one_round(algorithm, data):
    start = algorithm.init(KEY, data)
    return start.model, jax.jit(algorithm.round)(KEY, start, data)[0].model


def mean(models):
    return jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), 0), *models)


def test_whole_interpolation_of_one_batch_is_fedavg_with_equal_weights():
    reptile = fm.perfedavg_reptile(problems.task(), interpolation=1.0, outer_batches=1, inner_batches=1, inner_lr=0.2, **ALL)
    full = int(problems.SIZES.max())
    fedavg = fm.fedavg(problems.task(), lr=0.2, epochs=1, batch_size=full, weighting="uniform", **ALL)
    assert problems.distance(rounds(reptile, 3).model, rounds(fedavg, 3).model) < 1e-12


def test_whole_interpolation_of_four_minibatches_is_an_epoch_of_fedavg():
    data = alike((32,) * 7)  # 24 samples train: 4 minibatches of 6
    reptile = fm.perfedavg_reptile(problems.task(), interpolation=1.0, outer_batches=1, inner_batches=4, inner_lr=0.2, **ALL)
    fedavg = fm.fedavg(problems.task(), lr=0.2, epochs=1, batch_size=6, weighting="uniform", **ALL)
    assert problems.distance(one_round(reptile, data)[1], one_round(fedavg, data)[1]) < 1e-12


def test_a_round_is_the_user_update_of_the_paper():
    data = alike()
    algorithm = fm.perfedavg_reptile(
        problems.task(), interpolation=0.3, outer_batches=3, inner_batches=2, inner_lr=0.2, chunk_size=4, **ALL
    )
    start, after = one_round(algorithm, data)
    users = []
    for i in range(data.num_clients):
        task_model = start
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
    algorithm = fm.reptile(problems.task(), outer_lr=0.4, inner_lr=0.2, inner_epochs=3, batch_size=100, **ALL)
    start, after = one_round(algorithm, data)
    adapted = []
    for i in range(data.num_clients):
        phi = start
        for _ in range(3):
            phi = plus(phi, -0.2, gradient(phi, data.client(i)["train"]))
        adapted.append(phi)
    assert problems.distance(after, plus(start, 0.4, plus(mean(adapted), -1, start))) < 1e-12


def test_a_server_that_takes_the_whole_step_is_fedavg():
    # One full batch, for which no order of samples is drawn.
    reptile = fm.reptile(problems.task(), outer_lr=1.0, inner_lr=0.2, batch_size=100, weighting="samples", **ALL)
    fedavg = fm.fedavg(problems.task(), lr=0.2, batch_size=100, **ALL)
    assert problems.distance(rounds(reptile, 2).model, rounds(fedavg, 2).model) < 1e-12


def test_reptile_takes_server_momentum_sample_weights_and_a_private_head():
    algorithm = fm.reptile(
        problems.task(),
        server_optimizer=optax.sgd(0.5, momentum=0.9),
        personal="head",
        weighting="samples",
        outer_lr=0.5,
        **ALL,
    )
    start = algorithm.init(KEY, problems.data())
    after = rounds(algorithm, 1, start)
    assert problems.leaves_equal(after.model["head"], start.model["head"])
    heads = after.personal["head"]["w"]
    assert float(jnp.min(jnp.max(jnp.abs(heads - start.personal["head"]["w"]), (1, 2)))) > 1e-4
    assert problems.distance(after.model["body"], start.model["body"]) > 1e-4
    assert problems.distance(after.optimizer, start.optimizer) > 1e-4


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (fm.perfedavg_reptile, {"outer_batches": 0}, "outer_batches=0"),
        (fm.perfedavg_reptile, {"inner_batches": 1.5}, "inner_batches=1.5"),
        (fm.perfedavg_reptile, {"interpolation": 0}, "interpolation=0"),
        (fm.perfedavg_reptile, {"test_steps": 0}, "test_steps=0"),
        (fm.perfedavg_reptile, {"chunk_size": 0}, "chunk_size=0"),
        (fm.perfedavg_reptile, {"learned_rates": True}, "reptile has no gradient for learned rates"),
        (fm.reptile, {"outer_lr": -1}, "outer_lr=-1"),
        (fm.reptile, {"inner_epochs": 0}, "inner_epochs=0"),
        (fm.reptile, {"batch_size": None}, "batch_size=None"),
        (fm.reptile, {"learned_rates": True}, "reptile has no gradient for learned rates"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_algorithm_is_built(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(problems.task(), **options)
