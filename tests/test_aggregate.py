"""Weighted means and mixtures against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import aggregate
from tests import problems

RNG = np.random.default_rng(11)
UPLOADS = [{"a": RNG.normal(size=(2, 3)), "b": {"c": RNG.normal(size=4), "d": RNG.normal()}} for _ in range(5)]
WEIGHTS = np.array([3.0, 0.0, 1.0, 7.0, 2.5])


def _sum(uploads, weights):
    parts = [
        aggregate.weigh(jax.tree.map(jnp.asarray, upload), weight) for upload, weight in zip(uploads, weights, strict=True)
    ]
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


def _average(uploads, weights):
    return jax.tree.map(lambda *leaves: np.average(np.stack(leaves), axis=0, weights=weights), *uploads)


@pytest.mark.parametrize(
    "kind", [jnp.asarray, float, lambda w: jnp.asarray(w, jnp.float32)], ids=["array", "number", "float32"]
)
def test_the_mean_is_numpys_weighted_average(kind):
    summed = _sum(UPLOADS, [kind(w) for w in WEIGHTS])
    assert problems.distance(aggregate.mean(summed), _average(UPLOADS, WEIGHTS)) < 1e-14
    assert float(summed.weight) == WEIGHTS.sum()


def test_parts_of_an_upload_may_count_differently():
    others = WEIGHTS[::-1]
    summed = _sum(UPLOADS, [{"a": w, "b": v} for w, v in zip(WEIGHTS, others, strict=True)])
    expected = {"a": _average(UPLOADS, WEIGHTS)["a"], "b": _average(UPLOADS, others)["b"]}
    assert problems.distance(aggregate.mean(summed), expected) < 1e-14


@pytest.mark.parametrize("weight", [0.0, -2.0, np.nan])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_an_upload_that_does_not_count_leaves_no_trace(weight, value):
    spoilt = jax.tree.map(lambda leaf: np.full_like(leaf, value), UPLOADS[0])
    with_it, without = _sum([*UPLOADS, spoilt], [*WEIGHTS, weight]), _sum(UPLOADS, WEIGHTS)
    assert problems.leaves_equal(with_it, without)


def test_a_mean_of_nothing_is_zero():
    mean = aggregate.mean(_sum(UPLOADS, np.zeros(5)))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(mean))


def test_types_are_kept():
    upload = {"half": jnp.ones(2, jnp.bfloat16), "single": jnp.ones(2, jnp.float32)}
    mean = aggregate.mean(aggregate.weigh(upload, jnp.asarray(3.0, jnp.float64)))
    assert jax.tree.map(lambda leaf: leaf.dtype, mean) == jax.tree.map(lambda leaf: leaf.dtype, upload)


def test_integers_are_refused_for_their_mean_would_be_cut():
    with pytest.raises(ValueError, match=r"an upload of int32\[2\] cannot be averaged: it must be floating-point"):
        aggregate.weigh({"count": jnp.ones(2, jnp.int32)}, jnp.ones(()))


def test_a_client_counts_by_its_samples_or_not():
    data = problems.data().client(3)
    assert aggregate.client_weight("uniform", data) == 1
    assert aggregate.client_weight("samples", data) == 72  # three quarters of 97, rounded down
    assert aggregate.client_weight("query", data) == 58  # of which a fifth, rounded down, is support
    with pytest.raises(ValueError, match="weighting='size' is unknown; allowed are samples, query, uniform"):
        aggregate.client_weight("size", data)


def test_combine_gives_each_client_its_row_of_the_mixture():
    matrix = RNG.dirichlet(np.ones(5), 5)
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *UPLOADS)
    mixed = aggregate.combine(jnp.asarray(matrix), stacked)
    for i in range(5):
        assert problems.distance(jax.tree.map(lambda leaf, i=i: leaf[i], mixed), _average(UPLOADS, matrix[i])) < 1e-14


def test_combine_with_the_identity_changes_nothing_and_asks_for_full_precision():
    stacked = {"w": jnp.asarray(RNG.normal(size=(5, 3)), jnp.float32)}
    assert problems.leaves_equal(aggregate.combine(jnp.eye(5), stacked), stacked)
    # An accelerator rounds the factors of a product unless it is asked not to; a CPU cannot show it.
    text = str(jax.make_jaxpr(aggregate.combine)(jnp.eye(5), stacked))
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in text.replace("\n", " ").replace("  ", "")
