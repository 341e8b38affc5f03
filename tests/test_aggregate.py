"""Weighted means, robust aggregators and mixtures against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import aggregate
from fedjax_meta.aggregate import per_unit
from tests import problems

UPLOADS = [
    {"a": rng.normal(size=(2, 3)), "b": {"c": rng.normal(size=4), "d": rng.normal()}}
    for rng in map(np.random.default_rng, range(5))
]
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


def test_parts_of_an_upload_may_have_different_weights():
    others = WEIGHTS[::-1]
    summed = _sum(UPLOADS, [{"a": w, "b": v} for w, v in zip(WEIGHTS, others, strict=True)])
    expected = {"a": _average(UPLOADS, WEIGHTS)["a"], "b": _average(UPLOADS, others)["b"]}
    assert problems.distance(aggregate.mean(summed), expected) < 1e-14


@pytest.mark.parametrize("weight", [0.0, -2.0, np.nan])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_an_upload_without_weight_has_no_effect(weight, value):
    diverged = jax.tree.map(lambda leaf: np.full_like(leaf, value), UPLOADS[0])
    with_it, without = _sum([*UPLOADS, diverged], [*WEIGHTS, weight]), _sum(UPLOADS, WEIGHTS)
    assert problems.leaves_equal(with_it, without)


def test_a_mean_of_nothing_is_zero():
    mean = aggregate.mean(_sum(UPLOADS, np.zeros(5)))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(mean))


def test_what_is_divided_by_nothing_is_nothing():
    total = {"a": jnp.ones((3, 2)), "b": jnp.array([1.0, 2.0, 3.0])}
    found = per_unit(total, jnp.array([0.0, 4.0, -1.0]))
    np.testing.assert_array_equal(found["a"], [[0, 0], [0.25, 0.25], [0, 0]])
    np.testing.assert_array_equal(found["b"], [0, 0.5, 0])


def test_dtypes_are_kept():
    upload = {"half": jnp.ones(2, jnp.bfloat16), "single": jnp.ones(2, jnp.float32)}
    mean = aggregate.mean(aggregate.weigh(upload, jnp.asarray(3.0, jnp.float64)))
    assert jax.tree.map(lambda leaf: leaf.dtype, mean) == jax.tree.map(lambda leaf: leaf.dtype, upload)


def test_16_bit_numbers_are_summed_in_32_bits():
    # 1 + 2^-9 is not a bfloat16 number: a sum in bfloat16 would stay at 256, and the largest float16 is 65504.
    one = aggregate.weigh({"b": jnp.ones((), jnp.bfloat16), "h": jnp.ones((), jnp.float16)}, jnp.ones(()))
    total = jax.lax.fori_loop(0, 1000, lambda _, total: jax.tree.map(jnp.add, total, one), jax.tree.map(jnp.zeros_like, one))
    assert float(total.total["b"]) == 1000
    many = aggregate.weigh({"b": jnp.full((), 3.0, jnp.bfloat16), "h": jnp.full((), 3.0, jnp.float16)}, jnp.asarray(1e6))
    mean = aggregate.mean(many)
    assert (mean["b"].dtype, mean["h"].dtype) == (jnp.bfloat16, jnp.float16)
    assert float(mean["b"]) == float(mean["h"]) == 3


def test_a_mixture_of_16_bit_numbers_is_rounded_once():
    # 0.3 in bfloat16 is 0.30078, so that rows would not sum to 1.
    stacked = {"w": jnp.full((3, 2), 255.0, jnp.bfloat16)}
    mixed = aggregate.combine(jnp.asarray([[0.3, 0.3, 0.4]] * 3, jnp.float32), stacked)
    assert mixed["w"].dtype == jnp.bfloat16 and np.all(np.asarray(mixed["w"], float) == 255)


def test_integers_are_refused_because_their_mean_would_be_truncated():
    with pytest.raises(ValueError, match=r"an upload of int32\[2\] cannot be averaged: it must be floating-point"):
        aggregate.weigh({"count": jnp.ones(2, jnp.int32)}, jnp.ones(()))


def test_a_clients_weight_follows_the_weighting():
    data = problems.data().client(3)
    assert aggregate.client_weight("uniform", data) == 1
    assert aggregate.client_weight("samples", data) == 72  # three quarters of 97, rounded down
    assert aggregate.client_weight("query", data) == 58  # of which a fifth, rounded down, is support
    with pytest.raises(ValueError, match="weighting='size' is unknown; allowed are samples, query, uniform"):
        aggregate.client_weight("size", data)


def test_combine_gives_each_client_the_mixture_of_its_row(rng):
    matrix = rng.dirichlet(np.ones(5), 5)
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *UPLOADS)
    mixed = aggregate.combine(jnp.asarray(matrix), stacked)
    for i in range(5):
        assert problems.distance(jax.tree.map(lambda leaf, i=i: leaf[i], mixed), _average(UPLOADS, matrix[i])) < 1e-14


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_diverged_client_affects_only_the_rows_that_weigh_it(value, rng):
    matrix = rng.dirichlet(np.ones(5), 5)
    matrix[:3, 2] = 0
    stacked = {"a": rng.normal(size=(5, 2, 3)), "b": rng.normal(size=5)}
    whole = aggregate.combine(jnp.asarray(matrix), jax.tree.map(jnp.asarray, stacked))
    stacked["a"][2, 1, 0] = value
    mixed = aggregate.combine(jnp.asarray(matrix), jax.tree.map(jnp.asarray, stacked))
    assert problems.leaves_equal(mixed["a"][:3], jnp.einsum("ij,jab->iab", matrix[:3], np.nan_to_num(stacked["a"], posinf=0)))
    assert np.all(np.isnan(mixed["a"][3:]))
    assert problems.leaves_equal(mixed["b"], whole["b"])


@pytest.mark.parametrize("returned", [[1, 1, 1, 1, 1, 1, 1], [3, 0, 2, 9, 1, -1, np.nan], [0, 0, 1, 0, 0, 0, 0]], ids=str)
def test_robust_aggregators_are_numpys_over_the_clients_that_returned(returned, rng):
    weights, stacked = np.array(returned, float), {"a": rng.normal(size=(7, 3)), "b": rng.normal(size=7)}
    there = weights > 0
    inside = jax.tree.map(lambda leaf: leaf[there], stacked)
    # Uploads of clients that did not return may hold anything.
    sent = jax.tree.map(lambda leaf: jnp.where(there.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.inf), stacked)
    median = aggregate.median(sent, jnp.asarray(weights))
    assert problems.distance(median, jax.tree.map(lambda leaf: np.median(leaf, 0), inside)) < 1e-14
    cut = int(0.3 * there.sum())
    trimmed = aggregate.trimmed_mean(0.3)(sent, jnp.asarray(weights))
    middle = jax.tree.map(lambda leaf: np.sort(leaf, 0)[cut : there.sum() - cut].mean(0), inside)
    assert problems.distance(trimmed, middle) < 1e-14


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("aggregator", [aggregate.median, aggregate.trimmed_mean(0.4)], ids=["median", "trimmed"])
def test_two_of_five_clients_cannot_move_the_result_beyond_the_range_of_the_others(aggregator, value, rng):
    honest = rng.normal(size=(3, 4)).astype(np.float32)
    got = aggregator(jnp.asarray(np.vstack([np.full((2, 4), value, np.float32), honest])), jnp.ones(5))
    assert got.dtype == jnp.float32
    assert np.all((honest.min(0) <= got) & (got <= honest.max(0)))


def test_robust_aggregators_of_no_client_are_zero_and_bad_arguments_are_refused():
    for aggregator in (aggregate.median, aggregate.trimmed_mean(0.2)):
        assert aggregator(jnp.full((4, 2), jnp.nan), jnp.zeros(4)).tolist() == [0, 0]
        with pytest.raises(ValueError, match="cannot be averaged"):
            aggregator(jnp.ones((4, 2), int), jnp.ones(4))
    for share, message in ((-0.1, "share=-0.1 must lie in"), (0.5, "below 1/2"), (0.6, "share=0.6 must lie in")):
        with pytest.raises(ValueError, match=message):
            aggregate.trimmed_mean(share)


def test_combine_with_the_identity_changes_nothing_and_uses_full_precision(rng):
    stacked = {"w": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)}
    assert problems.leaves_equal(aggregate.combine(jnp.eye(5), stacked), stacked)
    # Accelerators round the factors of a product by default. A CPU does not, so the test reads the program.
    text = str(jax.make_jaxpr(aggregate.combine)(jnp.eye(5), stacked))
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in text.replace("\n", " ").replace("  ", "")


def test_a_mixture_reads_models_with_negative_weights():
    mixed = aggregate.combine(jnp.array([[2.0, -1.0], [0.0, 1.0]]), jnp.array([[1.0], [np.nan]]))
    assert np.isnan(mixed).all()
    mixed = aggregate.combine(jnp.array([[2.0, -1.0], [1.0, 0.0]]), jnp.array([[1.0], [3.0]]))
    np.testing.assert_allclose(mixed, [[-1.0], [1.0]])
