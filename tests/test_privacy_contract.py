"""What one client can do to the server under clipping and noise, for every method: the premise of every accountant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import uploads
from tests import problems

KEY, CLIP, WHO = jax.random.key(4), 0.05, 2

REFUSED = {
    **dict.fromkeys(
        ("afl", "cfl", "fedamp", "fedcac", "fedfomo", "fedpac", "heur_fedamp"),
        "lets the server see what each client sends by itself",
    ),
    "fednova": "fednova cannot go with clip",
    "mocha": "sends nothing that is averaged",
    **dict.fromkeys(("pfedhn", "pfedhn_pc", "pfedsim"), "sends other numbers than those that the simulation averages"),
}
"""Methods that noise cannot cover."""


def probe():
    """In place of noise: the average is kept aside, and the server goes on with zeros."""

    def server(key, average, context, kept, measured):
        return jax.tree.map(jnp.zeros_like, average), average

    return uploads.UploadTransform(
        name="noise",
        fixed_divisor=True,
        init_server=lambda key, upload: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), upload),
        server=server,
    )


def with_samples(value):
    """The data in which client `WHO` has other samples, as many as before."""
    data = problems.data()
    start, size = (min(int(part[view][WHO]) for view in part) for part in (data.start, data.size))
    size = max(int(data.start[view][WHO] + data.size[view][WHO]) for view in data.start) - start
    x, y = np.array(data.x), np.array(data.y)
    x[start : start + size] = value * (1 + np.arange(size)[:, None])
    y[start : start + size] = np.arange(size) % 2
    return dataclasses.replace(data, x=x, y=y)


def _distance(a, b):
    gaps = jax.tree.map(lambda x, y: np.sum((np.asarray(x, float) - np.asarray(y, float)) ** 2), a, b)
    return float(np.sqrt(sum(jax.tree.leaves(gaps))))


@pytest.mark.parametrize("name", problems.sampled())
def test_one_client_moves_the_sum_by_its_bound_and_nothing_else_of_the_server(name):
    """Two runs of a round differ in all samples of one client. Before the noise, the sum of everything that clients send,
    statistics and buffers included, moves by at most 2 S (S where the other's is not finite and so left out). What the server
    keeps follows from that sum alone: with zeros in its place, it is the same bit for bit."""
    task = problems.task_of(name)
    options = {"uploads": (uploads.clip(CLIP), probe()), "new_client": "fresh", "cohort_size": 7, "devices": 1}
    data = problems.data()
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            algorithm = problems.build(name, task, **options)
            jax.eval_shape(algorithm.round, KEY, jax.eval_shape(algorithm.init, KEY, data), data)
        return
    algorithm = problems.build(name, task, **options)
    state = jax.jit(algorithm.init)(KEY, data)
    run = jax.jit(algorithm.round).lower(KEY, state, data).compile({"xla_backend_optimization_level": 0})
    found = {value: run(KEY, state, with_samples(value))[0] for value in (0.3, -40.0, np.nan)}
    sums = {value: jax.tree.map(lambda leaf: 7 * leaf, after.aggregation.uploads[1]) for value, after in found.items()}
    moved = _distance(sums[0.3], sums[-40.0])
    assert moved <= 2 * CLIP * (1 + 1e-6)
    assert max(moved, _distance(sums[0.3], sums[np.nan])) > 0.01 * CLIP or name == "local_only"
    assert _distance(sums[0.3], sums[np.nan]) <= CLIP * (1 + 1e-6)
    for part in ("model", "optimizer", "extra"):
        one, two, broken = (getattr(after, part) for after in found.values())
        assert problems.leaves_equal(one, two) and problems.leaves_equal(one, broken), part
