"""Options that count passes over a client's samples where a paper counts batches."""

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from tests import problems
from tests.methods.common import KEY

METHODS = {"pfedme": ("local_rounds", {}), "pfedhn": ("local_steps", {"width": 4, "hidden": 1, "embedding_size": 2})}


def alone(client):
    """The data of one client."""
    start, size = (int(part["train"][client]) for part in (problems.data().start, problems.data().size))
    x, y = np.asarray(problems.data().x)[start : start + size], np.asarray(problems.data().y)[start : start + size]
    return fm.from_clients([(x, y)], num_classes=3, views={"train": (np.array([0]), np.array([size]))}), size


@pytest.mark.parametrize("name", METHODS)
def test_passes_take_as_many_batches_as_the_client_has(name):
    """Two passes in one batch are two batches of all samples, whose order does not matter."""
    batches, options = METHODS[name]
    for client in (0, 3):
        data, size = alone(client)
        models = []
        for count in ({batches: 2}, {"epochs": 2}, {"epochs": 3}):
            algorithm = problems.build(name, batch_size=size, cohort_size=1, devices=1, **options, **count)
            models.append(jax.jit(algorithm.round)(KEY, algorithm.init(KEY, data), data)[0].model)
        assert problems.distance(models[0], models[1]) < 1e-12
        assert problems.distance(models[0], models[2]) > 1e-6


def test_an_embedding_has_the_papers_size():
    def size(**options):
        method = fm.pfedhn(problems.task(), **options)
        return jax.eval_shape(method.init_memory, KEY, jax.eval_shape(method.init, KEY), 7).value.shape[0]

    assert [size(), size(num_clients=100), size(num_clients=3), size(num_clients=100, embedding_size=5)] == [13, 26, 1, 5]
    with pytest.raises(ValueError, match="num_clients=0"):
        size(num_clients=0)
