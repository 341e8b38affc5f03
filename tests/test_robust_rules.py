"""Robust aggregation rules against brute force in NumPy, their properties, and the breakdown that each is known for."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedjax_meta import aggregate
from fedjax_meta.aggregate import Rule, as_rule
from tests import problems

KEY = jax.random.key(4)


@cache
def compiled(aggregator):
    return jax.jit(as_rule(aggregator).combine)


def use(aggregator, stacked, weight, memory=None, reference=None, key=KEY):
    """(result, memory) of an aggregator on arrays of any kind."""
    rule = as_rule(aggregator)
    stacked = jax.tree.map(jnp.asarray, stacked)
    memory = rule.init(jax.tree.map(lambda leaf: leaf[0], stacked)) if memory is None else memory
    return compiled(aggregator)(key, stacked, jnp.asarray(weight, float), memory, reference)


def flat(stacked):
    return np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(stacked)], 1)


def of_norm(vector, most):
    return vector * min(1, most / max(np.linalg.norm(vector), 1e-300))


# One rule a function: a list of the uploads that returned, as vectors -> their aggregate.


def krum_scores(uploads, f):
    """(score, sum of all distances) of each; the second breaks ties."""
    near = min(max(len(uploads) - f - 2, 1), len(uploads) - 1)
    lists = [sorted(((x - y) ** 2).sum() for j, y in enumerate(uploads) if j != i) for i, x in enumerate(uploads)]
    return [(sum(distances[:near]), sum(distances)) for distances in lists]


def numpy_multi_krum(uploads, f, m=None):
    scores = krum_scores(uploads, f)
    best = sorted(range(len(uploads)), key=lambda i: scores[i])[: max(len(uploads) - f - 2, 1) if m is None else m]
    return np.mean([uploads[i] for i in best], 0)


def numpy_bulyan(uploads, f):
    left, selected = list(uploads), []
    for _ in range(max(len(uploads) - 2 * f, 1)):
        scores = krum_scores(left, f)
        selected.append(left.pop(scores.index(min(scores))))
    kept, columns = max(len(selected) - 2 * f, 1 if len(selected) % 2 else 2), []
    for column in np.array(selected).T:
        nearest = np.argsort(np.abs(column - np.median(column)))[:kept]
        columns.append(np.mean(column[nearest]))
    return np.array(columns)


def numpy_geometric_median(uploads, iterations):
    """Vardi and Zhang 2000, equations 2.5 and 2.6."""
    centre = np.median(uploads, 0)
    for _ in range(iterations):
        away = [x for x in uploads if np.linalg.norm(x - centre) > 1e-6]
        if not away:
            return centre
        shares = np.array([1 / np.linalg.norm(x - centre) for x in away])
        there = sum(share * x for share, x in zip(shares / shares.sum(), away, strict=True))
        force = np.linalg.norm(sum(share * (x - centre) for share, x in zip(shares, away, strict=True)))
        stay = min(1, (len(uploads) - len(away)) / force)
        centre = (1 - stay) * there + stay * centre
    return centre


def numpy_norm_bounding(uploads, bound=None):
    most = np.median([np.linalg.norm(x) for x in uploads]) if bound is None else bound
    return np.mean([of_norm(x, most) for x in uploads], 0)


def numpy_nearest_neighbours(uploads, f):
    count = max(len(uploads) - f, 1)
    return [np.mean(sorted(uploads, key=lambda y, x=x: ((x - y) ** 2).sum())[:count], 0) for x in uploads]


def tied(uploads):
    """Whether Krum may choose among unlike means of neighbours: two pairs of twins, say, are as near to each other."""
    mixed = numpy_nearest_neighbours(uploads, 2)
    scores = krum_scores(mixed, 2)
    best = [x for x, score in zip(mixed, scores, strict=True) if np.allclose(score, min(scores), rtol=1e-9)]
    return not np.allclose(best, best[0])


RULES = {
    "krum": (aggregate.krum(2), lambda uploads: numpy_multi_krum(uploads, 2, 1)),
    "multi_krum": (aggregate.multi_krum(2), lambda uploads: numpy_multi_krum(uploads, 2)),
    "multi_krum_of_4": (aggregate.multi_krum(1, m=4), lambda uploads: numpy_multi_krum(uploads, 1, 4)),
    "bulyan": (aggregate.bulyan(2), lambda uploads: numpy_bulyan(uploads, 2)),
    "geometric_median": (aggregate.geometric_median(7), lambda uploads: numpy_geometric_median(uploads, 7)),
    "geometric_median_by_default": (aggregate.geometric_median(), lambda uploads: numpy_geometric_median(uploads, 10)),
    "norm_bounding": (aggregate.norm_bounding(2.5), lambda uploads: numpy_norm_bounding(uploads, 2.5)),
    "norm_bounding_median": (aggregate.norm_bounding(), numpy_norm_bounding),
    "nearest_neighbours_median": (
        aggregate.nearest_neighbours(aggregate.median, 3),
        lambda uploads: np.median(numpy_nearest_neighbours(uploads, 3), 0),
    ),
    "nearest_neighbours_krum": (
        aggregate.nearest_neighbours(aggregate.krum(2), 2),
        lambda uploads: numpy_multi_krum(numpy_nearest_neighbours(uploads, 2), 2, 1),
    ),
}
EQUIVARIANT = [name for name in RULES if not name.startswith("norm_bounding")]


@pytest.mark.parametrize("build", [aggregate.krum, aggregate.multi_krum, aggregate.bulyan])
def test_a_negative_number_of_attackers_is_refused(build):
    with pytest.raises(ValueError, match="f=-1"):
        build(-1)


@pytest.fixture(params=list(RULES))
def rule(request):
    return RULES[request.param]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("missing", [(), (3,), (0, 4, 5, 9), tuple(range(10))], ids=str)
def test_a_rule_is_that_of_brute_force_over_the_clients_that_returned(rule, missing, seed):
    rng = np.random.default_rng([seed, len(missing)])
    stacked = {"a": rng.normal(size=(11, 2, 3)), "b": {"c": rng.normal(size=(11, 4)), "d": rng.normal(size=11)}}
    weight = rng.uniform(1, 9, 11)
    weight[list(missing)] = rng.choice([0, -1, np.nan], len(missing))
    expected = rule[1]([row for i, row in enumerate(flat(stacked)) if i not in missing])
    spoilt = jax.tree.map(np.copy, stacked)
    for leaf in jax.tree.leaves(spoilt):
        leaf[list(missing)] = rng.choice([np.nan, np.inf, 1e300])
    got = use(rule[0], spoilt, weight)[0]
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(lambda leaf: leaf.shape[1:], stacked)
    np.testing.assert_allclose(flat(jax.tree.map(lambda leaf: leaf[None], got))[0], expected, rtol=1e-10, atol=1e-12)


def test_an_upload_that_is_not_finite_counts_as_one_that_did_not_return(rule, rng):
    uploads, weight = rng.normal(size=(11, 5)), np.ones(11)
    uploads[2, 3], uploads[7] = np.nan, np.inf
    expected = rule[1]([row for row in uploads if np.isfinite(row).all()])
    np.testing.assert_allclose(use(rule[0], uploads, weight)[0], expected, rtol=1e-10)


def test_no_client_gives_zero_and_one_client_gives_itself(rule):
    uploads, name = (
        jnp.full((11, 3), jnp.nan).at[4].set(jnp.array([0.1, 0.2, -0.3])),
        next(k for k in RULES if RULES[k] is rule),
    )
    assert use(rule[0], uploads, np.zeros(11))[0].tolist() == [0, 0, 0]
    alone = use(rule[0], uploads, np.arange(11) == 4)[0]
    np.testing.assert_allclose(alone, uploads[4], rtol=1e-12, err_msg=name)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_order_of_clients_and_the_size_of_weights_do_not_matter(data):
    name = data.draw(st.sampled_from(list(RULES)))
    seed, order = data.draw(st.integers(0, 999)), np.array(data.draw(st.permutations(range(11))))
    rng = np.random.default_rng(seed)
    uploads, weight = rng.normal(size=(11, 4)), rng.uniform(0.1, 5, 11) * (rng.uniform(size=11) < 0.8)
    assume(name != "nearest_neighbours_krum" or not np.any(weight) or not tied(uploads[weight > 0]))
    one, two = use(RULES[name][0], uploads, weight)[0], use(RULES[name][0], uploads[order], (weight > 0)[order])[0]
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(EQUIVARIANT), st.integers(0, 999), st.floats(-50, 50), st.floats(0.01, 100))
def test_a_common_shift_and_scale_of_the_uploads_is_one_of_the_result(name, seed, shift, scale):
    # Smoothing is an absolute distance, which 1e-6 makes unimportant here.
    rng = np.random.default_rng(seed)
    uploads, weight = rng.normal(size=(11, 4)), rng.uniform(size=11) < 0.8
    assume(name != "nearest_neighbours_krum" or not np.any(weight) or not tied(uploads[weight]))
    one, two = use(RULES[name][0], uploads, weight)[0], use(RULES[name][0], scale * uploads + shift, weight)[0]
    np.testing.assert_allclose(two, scale * np.asarray(one) + (shift if weight.any() else 0), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("value", [-1e3, 1e10, 3e38])
@pytest.mark.parametrize("name", [name for name in RULES if not name.startswith("norm_bounding") and "of_4" not in name])
def test_two_of_eleven_attackers_cannot_move_the_result_far_from_the_others(name, value, rng):
    honest = rng.normal(size=(9, 6)).astype(np.float32)
    uploads = np.vstack([np.full((2, 6), value, np.float32), honest])
    got = use(RULES[name][0], uploads, np.ones(11))[0]
    spread = max(np.linalg.norm(a - b) for a, b in itertools.combinations(honest, 2))
    assert got.dtype == jnp.float32
    assert np.linalg.norm(got - honest.mean(0)) < spread


def test_bulyan_withstands_the_hidden_vulnerability_of_krum(rng):
    """El Mhamdi et al. 2018, section 3: one coordinate can be moved by about the distance of two honest uploads.

    The attacker sends the honest mean but for one coordinate, in which it is off by less than honest uploads are apart in high
    dimension, so that Krum takes it.
    """
    honest = rng.normal(size=(9, 400))
    lie = honest.mean(0)
    lie[17] += 15
    uploads = np.vstack([honest, lie, lie])
    by_krum, by_bulyan = (use(rule, uploads, np.ones(11))[0][17] for rule in (aggregate.krum(2), aggregate.bulyan(2)))
    assert by_krum == lie[17]
    assert honest[:, 17].min() <= by_bulyan <= honest[:, 17].max()


def test_krum_and_bulyan_have_the_breakdown_that_their_bounds_say(rng):
    def result(rule, attackers):
        uploads = np.vstack([np.full((attackers, 2), 1e6), rng.normal(size=(11 - attackers, 2))])
        return np.abs(use(rule, uploads, np.ones(11))[0]).max()

    assert result(aggregate.krum(4), 4) < 10 and result(aggregate.krum(4), 7) == 1e6
    assert result(aggregate.bulyan(2), 2) < 10 and result(aggregate.bulyan(2), 8) > 1e5


def test_the_geometric_median_has_the_least_sum_of_distances(rng):
    uploads = np.vstack([rng.normal(size=(7, 3)), [[40, 0, 0], [0, -60, 2]]])
    total = lambda point: np.linalg.norm(uploads - point, axis=1).sum()  # noqa: E731
    best = scipy.optimize.minimize(total, uploads.mean(0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    got = use(aggregate.geometric_median(300), uploads, np.ones(9))[0]
    np.testing.assert_allclose(got, best.x, atol=1e-5)
    few = use(aggregate.geometric_median(), uploads, np.ones(9))[0]
    assert total(np.asarray(few)) < 1.001 * best.fun


def test_the_geometric_median_leaves_an_upload_at_which_it_starts():
    """The median of each number is the first upload, where the optimum is not."""
    uploads = np.array([[0, 0], [10, 1], [10, 1.2], [-0.1, -10], [-0.12, -10]])
    total = lambda point: np.linalg.norm(uploads - point, axis=1).sum()  # noqa: E731
    best = scipy.optimize.minimize(total, uploads.mean(0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    assert total(np.zeros(2)) > 1.1 * best.fun
    got = use(aggregate.geometric_median(), uploads, np.ones(5))[0]
    assert total(np.asarray(got)) < 1.001 * best.fun
    # Three of five uploads at one point are the optimum.
    most = np.array([[1, 2], [1, 2], [1, 2], [5, 5], [-3, 8]], float)
    np.testing.assert_array_equal(use(aggregate.geometric_median(), most, np.ones(5))[0], [1, 2])


@pytest.mark.parametrize("radius", [None, 1.5])
def test_centered_clipping_follows_its_recursion_from_the_last_aggregate(radius, rng):
    """v <- v + 1/n sum_i (x_i - v) min(1, radius / |x_i - v|), two steps a round, over rounds with missing clients."""
    rule, memory, centre = aggregate.centered_clipping(radius, iterations=2), None, np.zeros(5)
    for t in range(4):
        uploads, there = 3 * rng.normal(size=(6, 5)), np.arange(6) != t
        for _ in range(2):
            apart = uploads[there] - centre
            most = np.median(np.linalg.norm(apart, axis=1)) if radius is None else radius
            centre = centre + np.mean([of_norm(x, most) for x in apart], 0)
        got, memory = use(rule, np.where(there[:, None], uploads, np.nan), there, memory)
        np.testing.assert_allclose(got, centre, rtol=1e-12)
    nobody, after = use(rule, np.full((6, 5), np.nan), np.zeros(6), memory)
    assert nobody.tolist() == [0] * 5 and problems.leaves_equal(after, memory)


def test_norm_bounding_and_centered_clipping_move_by_no_more_than_an_attackers_share_of_the_bound(rng):
    honest = rng.normal(size=(8, 3))
    for rule in (aggregate.norm_bounding(0.5), aggregate.centered_clipping(0.5)):
        got = [use(rule, np.vstack([honest, attack * np.ones((2, 3))]), np.ones(10))[0] for attack in (0, 1e9)]
        assert 0 < np.linalg.norm(got[1] - got[0]) <= 0.5 * 2 / 10 + 1e-12


def test_fltrust_is_the_mean_by_trust_of_uploads_of_the_servers_norm(rng):
    """Cao et al., Algorithm 2: sum_i TS_i |g_0| / |g_i| g_i / sum_i TS_i with TS_i = max(0, cos(g_i, g_0))."""
    uploads, reference = rng.normal(size=(7, 6)), rng.normal(size=6)
    uploads[:2] *= np.sign(uploads[:2] @ reference)[:, None] * [[1], [-1]]  # one that is trusted and one that is not
    there = np.arange(7) != 2
    cosine = uploads @ reference / np.linalg.norm(uploads, axis=1) / np.linalg.norm(reference)
    trust = np.maximum(cosine, 0) * there
    assert 0 < (trust > 0).sum() < 6
    scaled = uploads * (np.linalg.norm(reference) / np.linalg.norm(uploads, axis=1))[:, None]
    rule = aggregate.fltrust(problems.data().client(0))
    tree = {"a": np.where(there[:, None], uploads, np.nan)[:, :2], "b": uploads[:, 2:]}
    got = use(rule, tree, there, reference={"a": jnp.asarray(reference[:2]), "b": jnp.asarray(reference[2:])})[0]
    np.testing.assert_allclose(np.concatenate([got["a"], got["b"]]), trust @ scaled / trust.sum(), rtol=1e-12)


@pytest.mark.parametrize("reference", [[0.0, 0.0], [1.0, 1.0]], ids=["no direction", "all against it"])
def test_fltrust_stands_still_when_it_trusts_nobody(reference):
    rule = aggregate.fltrust(problems.data().client(0))
    assert use(rule, -np.ones((4, 2)), np.ones(4), reference=jnp.array(reference))[0].tolist() == [0, 0]


def test_fltrust_withstands_a_huge_upload():
    """Its squares are no numbers in single precision; it is trusted as the others are and has their norm."""
    rule = aggregate.fltrust(problems.data().client(0))
    for huge in (1e30, 9e37, 3e38):
        uploads = np.array([[1, 0], [huge, huge]], np.float32)
        got = use(rule, uploads, np.ones(2), reference=jnp.array([1.0, 1.0], jnp.float32))[0]
        # Both get the norm sqrt(2) of the server's, and weights by cosines of 1/sqrt(2) and 1.
        np.testing.assert_allclose(got, np.array([2, 1]) / (1 + np.sqrt(0.5)), rtol=1e-6)


def test_fltrust_averages_parts_without_a_reference_over_those_that_returned():
    rule = aggregate.fltrust(problems.data().client(0))
    got = use(rule, np.array([[1.0, 2], [3, 4], [9, 9]]), np.array([1, 2, 0]), reference=None)[0]
    np.testing.assert_allclose(got, [2, 3])


HUGE = [np.array([[1, 0], [1e25, 0]]), np.array([[1, 0], [0, 2], [3e38, 3e38], [-3e38, 3e38]]), np.full((3, 2), 3e38)]


@pytest.mark.parametrize("uploads", HUGE, ids=["one of two", "half", "all"])
@pytest.mark.parametrize(
    "rule", [aggregate.norm_bounding(), aggregate.centered_clipping(), aggregate.centered_clipping(1.0, 3)]
)
def test_finite_uploads_of_any_size_leave_a_finite_model_and_memory(uploads, rule):
    """Their norms, and differences of them, are beyond single precision; the round after is an honest one."""
    memory = jnp.zeros(2, jnp.float32)
    for sent in (uploads, -uploads, np.ones((2, 2))):
        got, memory = use(rule, np.asarray(sent, np.float32), np.ones(len(sent)), memory)
        assert np.isfinite(got).all() and np.isfinite(jax.tree.leaves(memory)).all()
    if rule.name == "norm_bounding":
        np.testing.assert_allclose(got, [1, 1], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_norms_are_bounded_whatever_their_size(size):
    """Norms 1, 3 and 5, of which the median is 3: (1 + 3 + 3) / 3. The squares of these numbers have no place in float32."""
    uploads = np.array([[1, 0], [3, 0], [5, 0]], np.float32) * np.float32(size)
    np.testing.assert_allclose(use(aggregate.norm_bounding(), uploads, np.ones(3))[0] / size, [7 / 3, 0], rtol=1e-6)


def test_the_median_of_two_large_numbers_is_finite():
    assert use(aggregate.median, np.float32([3e38, 3e38]), np.ones(2))[0] == np.float32(3e38)


def test_a_trimmed_mean_keeps_the_middle_two_of_four_and_its_share_may_be_traced(rng):
    values = rng.normal(size=(4, 3))
    middle = np.sort(values, 0)[1:3].mean(0)
    np.testing.assert_allclose(use(aggregate.trimmed_mean(0.4999999), values, np.ones(4))[0], middle, rtol=1e-12)
    traced = jax.jit(lambda share: aggregate.trimmed_mean(share)(jnp.asarray(values), jnp.ones(4)))(0.25)
    np.testing.assert_allclose(traced, middle, rtol=1e-12)


def test_clients_that_did_not_return_do_not_hold_the_geometric_median_back():
    uploads = np.array([[0.0, 0], [10, 1], [10, 1.2], [-0.1, -10], [-0.12, -10]])
    with_absent = use(aggregate.geometric_median(), np.vstack([uploads, np.full((6, 2), np.nan)]), np.arange(11) < 5)[0]
    np.testing.assert_allclose(with_absent, use(aggregate.geometric_median(), uploads, np.ones(5))[0], rtol=1e-9)


def test_bucketing_hands_over_means_of_random_buckets_that_hold_each_client_once():
    seen = []

    def spy(stacked, weight):
        jax.debug.callback(lambda *arrays: seen.append([*map(np.asarray, arrays)]), stacked, weight)
        return stacked[0]

    uploads, there, rule = 2.0 ** np.arange(8), np.arange(8) != 6, aggregate.bucketing(spy, 3)
    for number in range(20):
        use(rule, np.where(there, uploads, np.nan), there, key=jax.random.key(number))
    jax.effects_barrier()
    for means, weight in seen:
        assert weight.tolist() == [1, 1, 1]
        # Buckets of 3, 3 and 1 of the seven that returned; powers of 2 tell who is in which.
        parts = [round(mean * count) for mean, count in zip(means, (3, 3, 1), strict=True)]
        assert [part.bit_count() for part in parts] == [3, 3, 1] and sum(parts) == uploads[there].sum()
    assert len({tuple(means) for means, _ in seen}) > 10
    assert use(aggregate.bucketing(aggregate.median, 2), np.full(5, np.nan), np.zeros(5))[0] == 0


def test_a_bucket_of_one_and_no_attackers_to_mix_out_change_nothing_or_everything(rng):
    uploads, weight = rng.normal(size=(9, 4)), np.array([1, 1, 0, 1, 1, 1, 1, 0, 1])
    mean = uploads[weight > 0].mean(0)
    np.testing.assert_allclose(
        use(aggregate.bucketing(aggregate.median, 1), uploads, weight)[0], np.median(uploads[weight > 0], 0), rtol=1e-12
    )
    np.testing.assert_allclose(use(aggregate.nearest_neighbours(aggregate.krum(1), 0), uploads, weight)[0], mean, rtol=1e-12)


def test_wrappers_keep_the_memory_and_the_reference_of_the_rule_inside():
    rule = aggregate.nearest_neighbours(aggregate.bucketing(aggregate.centered_clipping(0.5)), 1)
    first, memory = use(rule, np.ones((4, 2)), np.ones(4))
    second, _ = use(rule, np.ones((4, 2)), np.ones(4), memory)
    assert np.linalg.norm(first) == pytest.approx(0.5) and np.linalg.norm(second) == pytest.approx(1)
    root = problems.data().client(0)
    trusting = aggregate.bucketing(aggregate.fltrust(root))
    assert trusting.root is root and trusting.differences
    assert use(trusting, np.ones((4, 2)), np.ones(4), reference=jnp.ones(2))[0].tolist() == [1, 1]


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7, 20, 33, 64, 65])
def test_the_sorting_network_sorts(clients, rng):
    values = rng.normal(size=(clients, 40)).round(1)
    values[rng.uniform(size=values.shape) < 0.1] = np.nan
    expected = np.sort(np.nan_to_num(values, nan=np.inf), 0)
    np.testing.assert_array_equal(aggregate.ranks.sort_clients(jnp.asarray(values)), expected)
    # Every row of zeros and ones, where there are few: a network that sorts these sorts everything (0-1 principle).
    if clients <= 7:
        rows = np.array(list(itertools.product([0.0, 1.0], repeat=clients))).T
        np.testing.assert_array_equal(aggregate.ranks.sort_clients(jnp.asarray(rows)), np.sort(rows, 0))


def test_types_are_kept_and_a_rule_compiles_once_for_any_number_of_clients():
    stacked = {"a": jnp.ones((11, 2), jnp.bfloat16), "b": jnp.ones((11, 3), jnp.float32)}
    for aggregator, _ in RULES.values():
        rule = as_rule(aggregator)
        step = jax.jit(lambda *arguments, rule=rule: rule.combine(*arguments))
        for there in (np.ones(11), 1.0 * (np.arange(11) < 4)):
            got = step(KEY, stacked, jnp.asarray(there), rule.init(stacked), None)[0]
            assert problems.forms(got) == {"a": ((2,), jnp.bfloat16), "b": ((3,), jnp.float32)}
            assert problems.distance(got, jax.tree.map(jnp.ones_like, got)) < 1e-6
        assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aggregate.krum(-1), "f=-1 must be an integer of at least 0"),
        (lambda: aggregate.multi_krum(1, m=0), "m=0 must be an integer of at least 1"),
        (
            lambda: use(aggregate.krum(2), np.ones((6, 2)), np.ones(6)),
            r"f=2 is too many for krum with C=6 .* below \(C - 2\) / 2",
        ),
        (lambda: use(aggregate.multi_krum(1, m=8), np.ones((7, 2)), np.ones(7)), "m=8 is more than the C=7"),
        (lambda: use(aggregate.bulyan(2), np.ones((10, 2)), np.ones(10)), r"f=2 .* C=10 .* at least 4 f \+ 3 = 11"),
        (lambda: aggregate.geometric_median(0), "iterations=0 must be an integer"),
        (lambda: aggregate.geometric_median(smoothing=0), "smoothing=0 must be finite and above 0"),
        (lambda: aggregate.norm_bounding(-1.0), "bound=-1.0 must be finite and above 0"),
        (lambda: aggregate.centered_clipping(0.0), "radius=0.0 must be finite and above 0"),
        (lambda: aggregate.centered_clipping(iterations=0), "iterations=0"),
        (lambda: aggregate.fltrust(problems.data()), "root must be the data of the server, .* not FederatedData"),
        (lambda: aggregate.bucketing(aggregate.median, 0), "size=0 must be an integer"),
        (
            lambda: use(aggregate.nearest_neighbours(aggregate.median, 2), np.ones((4, 2)), np.ones(4)),
            r"f=2 .* C=4 .* below C / 2",
        ),
        (lambda: use(aggregate.krum(0), np.ones((4, 2), int), np.ones(4)), "cannot be averaged"),
        (lambda: aggregate.parse("krom:f=1"), "aggregator='krom' is unknown .did you mean 'krum'"),
        (lambda: aggregate.parse("krum:g=1"), "krum.. takes no 'g'"),
        (lambda: aggregate.parse("krum"), "krum needs f: krum:f=VALUE"),
        (lambda: aggregate.parse("krum:2"), "'krum:2' must read NAME or NAME:OPTION=VALUE"),
        (lambda: aggregate.parse("krum:f=two"), "f='two' must be an integer"),
        (lambda: aggregate.parse("mixing:f=1+median"), "wrapper of an aggregator='mixing' is unknown"),
    ],
)
def test_what_a_rule_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "rule",
    [aggregate.median, aggregate.trimmed_mean(0.1), aggregate.krum(0), aggregate.bulyan(0), aggregate.geometric_median()],
    ids=["median", "trimmed_mean", "krum", "bulyan", "geometric_median"],
)
def test_weights_are_one_for_each_upload(rule):
    uploads = jnp.array([1.0, 2.0, 3.0])
    for weights, message in [
        (jnp.ones(()), r"weights must be \[C\].* not of shape \(\)"),
        (jnp.ones(1), r"C=1, as many as there are weights, but the tree is of shape \(3,\)"),
        (jnp.ones((3, 1)), r"not of shape \(3, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            rule(uploads, weights)
    assert rule(uploads, [1.0, 1.0, 1.0]) == pytest.approx(rule(uploads, jnp.ones(3)))


def test_every_registered_rule_can_be_made_from_text(rng):
    options = {"trimmed_mean": ":share=0.2", "krum": ":f=1", "multi_krum": ":f=1,m=3", "bulyan": ":f=1"}
    uploads = rng.normal(size=(9, 3))
    for name in aggregate.RULES:
        rule = aggregate.parse(name + options.get(name, ""))
        assert np.isfinite(use(rule, uploads, np.ones(9))[0]).all()
    rule = aggregate.parse("nearest_neighbours:f=1 + bucketing:size=3+geometric_median:iterations=3")
    assert isinstance(rule, Rule) and [rule.name, rule.config["rule"]["name"]] == ["nearest_neighbours", "bucketing"]
    assert "iterations=3" in rule.config["rule"]["rule"]


@pytest.mark.parametrize(("share", "count"), [(0.4999, 2), (0.4999, 10), (0.499999, 4), (0.3333, 3), (0.29, 100), (1 / 3, 9)])
def test_a_trimmed_mean_cuts_the_whole_clients_of_its_share_and_leaves_some(share, count):
    values = np.random.default_rng(count).normal(size=(count, 3))
    cut = int(share * count + 1e-9)
    expected = np.sort(values, 0)[cut : count - cut].mean(0)
    np.testing.assert_allclose(use(aggregate.trimmed_mean(share), values, np.ones(count))[0], expected, rtol=1e-12)
