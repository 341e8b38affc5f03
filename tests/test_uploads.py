"""Upload transformations against closed forms, and what they do to a federation of clients with known uploads."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedjax_meta as fm
from fedjax_meta import aggregate, models, uploads
from fedjax_meta.aggregate import weigh
from fedjax_meta.uploads.clip import clipped
from fedjax_meta.uploads.quantize import quantized
from fedjax_meta.uploads.secret import with_secret
from fedjax_meta.uploads.sparsify import kept
from fedjax_meta.uploads.transform import ServerContext
from tests import problems
from tests.test_rounds import DATA, START, N, _adds, _build, _gain, _run, _tested, _who

KEY = jax.random.key(2)
NOISE = (uploads.clip(1.0), dataclasses.replace(uploads.noise(1.0, reproducible=True), name="mine"))
MASK = (dataclasses.replace(uploads.mask(), name="mine"),)
BITS = (dataclasses.replace(uploads.adaptive_clip(1.0, reproducible=True), name="mine"),)
"""What a transformation does decides what it goes with, whatever its name is."""


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e15])
def test_a_tree_is_clipped_to_the_norm_and_keeps_its_direction(scale):
    tree = {"a": scale * jnp.array([[1.0, -2.0]]), "b": scale * jnp.array(2.0, jnp.float32)}
    cut = clipped(tree, 0.5)
    factor = min(1, 0.5 / (3 * scale))
    assert problems.distance(cut, jax.tree.map(lambda leaf: factor * leaf, tree)) < 1e-6 * min(scale, 1)
    assert problems.forms(cut) == problems.forms(tree)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tree_that_is_not_finite_is_clipped_to_zero(value):
    cut = clipped({"a": jnp.array([1.0, value]), "b": jnp.ones(())}, 1.0)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(cut))
    assert np.all(clipped({"a": jnp.zeros(2)}, 1.0)["a"] == 0)


def test_noise_has_the_requested_deviation_and_is_independent_between_leaves():
    tree = {"a": jnp.full(20_000, 3.0), "b": jnp.full(20_000, 3.0), "c": jnp.full(20_000, 3.0, jnp.float32)}
    context = ServerContext(divisor=4, clip_norm=2.0, ids=jnp.arange(4), returned=jnp.ones(4, bool))
    noised, _ = uploads.noise(1.4, reproducible=True).server(KEY, tree, context, (), ())
    added = jax.tree.map(lambda leaf: np.asarray(leaf, float) - 3, noised)
    for noise in added.values():
        assert abs(noise.mean()) < 5 * 0.7 / np.sqrt(20_000)
        low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], noise.size) * 0.7**2
        assert low < np.sum(noise**2) < high
    assert abs(np.corrcoef(added["a"], added["b"])[0, 1]) < 5 / np.sqrt(20_000)


def _lengths(norm):
    """Each client adds its gain to three shared numbers (two and the buffer): how much is left of that, [N]."""
    return np.minimum(1, norm / (np.sqrt(3) * _gain(np.arange(N)))) * _gain(np.arange(N))


def test_without_noise_the_server_moves_by_the_sum_of_clipped_uploads_over_c():
    """The divisor is C = 4, for clients of any size and when a client does not return."""
    state, _ = _run(_build(uploads=(uploads.clip(5.0), uploads.noise(0.0))))
    np.testing.assert_allclose(state.model["shared"], START["shared"] + _lengths(5.0).sum() / 4, rtol=1e-12)
    np.testing.assert_allclose(state.model["buffer"], 2 + _lengths(5.0).sum() / 4, rtol=1e-12)
    np.testing.assert_allclose(state.personal["own"], 5 + _gain(np.arange(N)), rtol=1e-12)
    client = _adds(weight=lambda data: jnp.where(_who(data) == 3, 0, data["train"].size))
    state, _ = _run(_build(client, uploads=(uploads.clip(5.0), uploads.noise(0.0))))
    np.testing.assert_allclose(state.model["buffer"], 2 + _lengths(5.0)[:3].sum() / 4, rtol=1e-12)


def test_statistics_share_the_norm_and_count_as_the_cohort():
    client = _adds(statistics=lambda received, data, model: jnp.full((), 100.0))
    extras = {
        "init_extra": lambda *_: jnp.zeros(2),
        "update_extra": lambda state, mean, weight, clients: jnp.stack([mean, weight]),
    }
    state, _ = _run(_build(client, uploads=(uploads.clip(5.0), uploads.noise(0.0)), **extras))
    factor = 5 / np.sqrt(3 * _gain(np.arange(N)) ** 2 + 100**2)
    np.testing.assert_allclose(state.extra, [100 * factor.mean(), 4], rtol=1e-12)
    np.testing.assert_allclose(state.model["buffer"], 2 + (factor * _gain(np.arange(N))).mean(), rtol=1e-12)


def test_one_client_moves_the_server_by_no_more_than_its_share():
    """Whatever client 2 sends: sensitivity S / C in the norm over all that is averaged."""

    def client(value):
        def rule(key, received, data):
            trained = _adds()(key, received, data)
            sent = jax.tree.map(lambda leaf: jnp.where(_who(data) == 2, value, leaf), trained.model)
            return trained._replace(model=sent)

        return rule

    def model(value):
        state, _ = _run(_build(client(value), uploads=(uploads.clip(2.0), uploads.noise(0.0))))
        return jnp.concatenate([state.model["shared"], state.model["buffer"][None]])

    moved = [float(jnp.linalg.norm(model(value) - model(jnp.nan))) for value in (-1e12, 0.5, 1e6)]
    assert max(moved) <= 2.0 / 4 * (1 + 1e-9) and max(moved) > 0.49


def test_the_mean_of_16_bit_models_gets_its_noise_before_it_is_rounded():
    """A rounded mean moves by a whole step of its type, which can be more than one client's clipped upload over C."""
    seen = []

    def server(key, average, context, kept, measured):
        seen.extend(jax.tree.leaves(jax.tree.map(lambda leaf: leaf.dtype, average)))
        return plain.server(key, average, context, kept, measured)

    plain = uploads.noise(0.0, reproducible=True)
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), START)
    options = {"init": lambda key: start, "client": _adds_in(jnp.bfloat16)}
    chain = (uploads.clip(5.0), dataclasses.replace(plain, server=server))
    state, _ = _run(_build(uploads=chain, **options))
    assert set(seen) == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.model)} == {jnp.dtype("bfloat16")}


def _adds_in(dtype):
    """The rule of `_adds` in another type."""
    client = _adds()

    def rule(key, received, data):
        trained = client(key, received, data)
        return trained._replace(model=jax.tree.map(lambda leaf: leaf.astype(dtype), trained.model))

    return rule


def test_a_round_adds_noise_even_when_nobody_returns_and_another_in_every_round():
    """Deviation z S / C = 3 * 2 / 4; the optimiser's step along it is as it is along a gradient."""
    options = {"init": lambda key: START | {"shared": jnp.zeros(20_000)}}
    options["uploads"] = (uploads.clip(2.0), uploads.noise(3.0, reproducible=True))
    algorithm = _build(_adds(weight=lambda data: 0), server_lr=0.5, **options)
    one, _ = _run(algorithm)
    two, _ = _run(algorithm, 2)
    first, second = np.asarray(one.model["shared"]), np.asarray(two.model["shared"] - one.model["shared"])
    for noise in (first, second):
        assert abs(noise.std() - 0.75) < 5 * 0.75 / np.sqrt(2 * 20_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)


@pytest.mark.parametrize(
    "name", problems.chosen([("scaffold",), ("fedmeta_per_metasgd",), ("apfl",)], lambda name: name == "scaffold")
)
def test_uploads_of_any_method_can_be_clipped_noised_and_stacked(name):
    """With a loose norm and without noise, the result is the plain mean of clients that count alike."""
    options = {"cohort_size": 7, "devices": 1, "lanes": 2, "new_client": "fresh"}
    choices = (
        {"uploads": (uploads.clip(1e9), uploads.noise(0.0))},
        {"aggregator": aggregate.trimmed_mean(0.0)},
        {"uploads": (uploads.clip(0.5), uploads.noise(0.1))},
    )
    loose, stacked, private = (_two_rounds(name, **options, **more) for more in choices)
    assert problems.distance(loose.model, stacked.model) < 1e-10
    assert problems.distance(loose.model, private.model) > 1e-6
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(private))


def _two_rounds(name, **options):
    algorithm, data = problems.build(name, **options), problems.data()
    state, step = jax.jit(algorithm.init)(KEY, data), jax.jit(algorithm.round)
    for r in range(2):
        state, _ = step(jax.random.fold_in(KEY, r), state, data)
    return state


UNIFORM = {"cohort_size": 5, "weighting": "uniform"}


@cache
def _plain(name):
    return _two_rounds(name, **UNIFORM, devices=1, lanes=1)


@pytest.mark.parametrize(
    ("name", "devices", "lanes"),
    problems.chosen(
        itertools.product(["fedavg", "scaffold", "fedmeta_per_metasgd"], [1, 2], [1, 2]),
        lambda name, devices, lanes: (devices, lanes) == (2, 2),
    ),
)
def test_masks_cancel_in_the_sum(name, devices, lanes):
    """The masked mean is the plain one up to rounding to multiples of 2^-24: a cohort of 5 errs by 5 * 2^-25 before division."""
    masked = _two_rounds(name, **UNIFORM, devices=devices, lanes=lanes, uploads=(uploads.mask(24),))
    plain = _plain(name)
    assert 0 < problems.distance(plain.model, masked.model) < 1e-5
    assert problems.leaves_equal(plain.seen, masked.seen)


def test_masks_of_clients_that_drop_out_are_removed():
    """Clients 1 and 2 do not return: the others' mean comes out, not a random number of the size of 2^31."""
    late = lambda key, id_: fm.Participation(returned=(id_ != 1) & (id_ != 2))  # noqa: E731
    chosen = {"participation": late, "weighting": "uniform"}
    plain, masked = (_run(_build(**chosen, **more))[0] for more in ({}, {"uploads": (uploads.mask(16),)}))
    np.testing.assert_allclose(masked.model["shared"], plain.model["shared"], atol=1e-4)
    np.testing.assert_allclose(masked.model["buffer"], 2 + np.mean([_gain(0), _gain(3)]), atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_upload_is_caught_at_its_client_before_it_is_masked(value):
    """Client 2 counts as one that dropped out: the others' mean comes out, and the fault is reported."""

    def client(key, received, data):
        trained = _adds()(key, received, data)
        broken = jax.tree.map(lambda leaf: jnp.where(_who(data) == 2, value, leaf), trained.model)
        return trained._replace(model=broken)

    state, info = _run(_build(client, weighting="uniform", uploads=(uploads.mask(16),)))
    np.testing.assert_allclose(state.model["buffer"], 2 + np.mean(_gain(np.array([0, 1, 3]))), atol=1e-4)
    assert np.flatnonzero(np.asarray(info.faults.clients) >= 0).tolist() == [2]


def test_what_a_client_sends_masked_has_the_bytes_that_costs_says():
    """One integer of 32 bits a number of the model; the weights that travel with them are scalars, which costs leave out."""
    sums = weigh((problems.task().init(KEY), ()), (jnp.ones(()), jnp.ones(())))
    sent = uploads.mask(16).encode(KEY, sums, 1.0, jnp.int32(0), jnp.arange(3, dtype=jnp.int32))
    algorithm = problems.build("fedavg", uploads=(uploads.mask(16),))
    assert fm.runtime.size_in_bytes(sent.total) == fm.costs.traffic(algorithm, problems.data()).up == 39 * 4
    assert {leaf.dtype for leaf in jax.tree.leaves(sent)} == {jnp.dtype("uint32")}


@pytest.mark.parametrize("norm", [0.5, 0.05])
def test_a_mask_beside_noise_is_as_fine_as_beside_equal_clients(norm):
    """All clients count as 1 there, whatever the weighting says; 20,000 samples were once the unit of what is sent."""
    sizes = np.array([20_000, 5, 20_000, 3])
    data = fm.from_partition(
        np.zeros((sizes.sum(), 2)), np.zeros(sizes.sum(), int), np.arange(sizes.sum()), sizes, num_classes=1
    )

    def client(key, received, data):
        return fm.Trained(jax.tree.map(lambda leaf: leaf + 0.1, received.model), {})

    clipped_and_noised = (uploads.clip(norm), uploads.noise(0.0, reproducible=True))
    found = [
        _run(_build(client, cohort_size=4, uploads=chain), data=data)[0].model
        for chain in (clipped_and_noised, (*clipped_and_noised, uploads.mask()))
    ]
    assert problems.distance(*found) < 4 * 2.0**-16


def test_what_is_masked_stays_within_the_norm_to_which_it_was_clipped():
    sums = weigh(({"w": jnp.full(10_000, 0.9e-5)}, ()), (jnp.ones(()), jnp.ones(())))
    for transforms in ((uploads.clip(1e-3), uploads.noise(1.0), uploads.mask()), (uploads.mask(),)):
        chain = uploads.Chain(transforms)
        ids = jnp.arange(1, dtype=jnp.int32)
        sent = chain.encode(KEY, sums, 1.0, ids[0], ids)
        got = chain.decode(KEY, sent, ids, jnp.ones(1, bool))
        assert (np.linalg.norm(got.total[0]["w"]) <= 0.9e-3) == chain.fixed_divisor


def test_a_leaf_without_numbers_is_quantised():
    sent, _ = uploads.quantize(4).client(KEY, {"none": jnp.zeros((0, 3)), "some": jnp.arange(3.0)}, (), ())
    assert sent["none"].shape == (0, 3)


def test_masks_hold_for_clients_of_any_size():
    """Weights of 20,000 samples each: their sum is beyond 2^31 / 2^16, and is not encoded in those units."""
    sizes = np.array([20_000, 5, 20_000, 3])
    data = fm.from_partition(
        np.zeros((sizes.sum(), 2)), np.zeros(sizes.sum(), int), np.arange(sizes.sum()), sizes, num_classes=1
    )

    def client(key, received, data):
        return fm.Trained(jax.tree.map(lambda leaf: leaf + 0.01 * data["train"].size / 20_000, received.model), {})

    plain, masked = (_run(_build(client, **more), data=data)[0] for more in ({}, {"uploads": (uploads.mask(16),)}))
    np.testing.assert_allclose(masked.model["shared"], plain.model["shared"], atol=2e-4)
    assert abs(float(plain.model["buffer"]) - 2) > 5e-3


def of_sizes(*sizes):
    """Clients with so many samples, drawn at random."""
    sizes, rng = np.array(sizes), np.random.default_rng(0)
    x, y = rng.normal(size=(sizes.sum(), 4)), rng.integers(0, 3, sizes.sum())
    return fm.from_partition(x, y, np.arange(sizes.sum()), sizes, num_classes=3)


def test_masked_bits_of_large_clients_move_the_clipping_norm():
    """A bit counts as 1, whatever a client weighs: everybody clips in each of five rounds."""
    chain = (uploads.adaptive_clip(1e-3, quantile=0.5, rate=0.2), uploads.mask())
    algorithm = fm.federate(
        fm.fedavg(models.logistic(4, 3), lr=0.5, batch_size=90_000), fm.Federation(cohort_size=3, uploads=chain)
    )
    state, _ = _run(algorithm, rounds=5, data=of_sizes(90_000, 70_000, 5))
    np.testing.assert_allclose(state.aggregation.uploads[0]["norm"], 1e-3 * np.exp(0.2 * 0.5 * 5), rtol=1e-6)


def test_a_clipping_norm_stays_in_a_round_from_which_nobody_returns():
    """Its quantile is 0.9, so that a share of bits around 1/2 moves it."""
    chain = (uploads.adaptive_clip(1.0, quantile=0.9, rate=0.2),)
    norms = []
    for weight in (0, 1):
        algorithm = _build(_adds(weight=lambda data, weight=weight: weight), uploads=chain)
        norms.append(float(_run(algorithm)[0].aggregation.uploads[0]["norm"]))
    assert norms[0] == 1 != norms[1]


def test_masked_statistics_that_count_equally_are_as_fine_as_beside_equal_clients():
    """SCAFFOLD's control variate is the mean of those of the clients, also where models are weighted by samples."""
    federation = fm.Federation(cohort_size=3, weighting="samples", uploads=(uploads.mask(),))
    algorithm = fm.federate(fm.scaffold(models.logistic(4, 3), lr=0.5, batch_size=6_000), federation)
    state, _ = _run(algorithm, rounds=3, data=of_sizes(6_000, 5_000, 7))
    mean = jax.tree.map(lambda leaf: np.asarray(leaf).mean(0), state.memory)
    assert problems.distance(mean, state.extra) < 10 * 2.0**-16


def test_one_masked_upload_looks_like_noise():
    """The integers of one client of a cohort of two say nothing of its upload: they are uniform over 32 bits."""
    encode = uploads.mask(16).encode
    ids = jnp.array([4, 9], jnp.int32)

    def upload(id_, value):
        sums = weigh({"w": jnp.full(50_000, value)}, 1.0)
        return np.asarray(encode(KEY, sums, 1.0, jnp.int32(id_), ids).total["w"])

    sent = upload(4, 3.0)
    assert sent.dtype == np.uint32
    assert abs(sent.mean() / 2**32 - 0.5) < 5 / np.sqrt(12 * 50_000)
    both = sent + upload(9, -1.0)
    np.testing.assert_array_equal(both.view(np.int32) / 2**16, 2.0)


def test_masks_belong_to_a_round_a_pair_and_a_leaf():
    encode = uploads.mask(16).encode

    def sent(key, *ids):
        sums = weigh({"a": jnp.zeros(100), "b": jnp.zeros(100)}, 1.0)
        return encode(key, sums, 1.0, jnp.int32(ids[0]), jnp.array(ids, jnp.int32)).total

    one = sent(KEY, 0, 1)
    for other in (sent(KEY, 0, 2)["a"], sent(jax.random.key(3), 0, 1)["a"], one["b"]):
        assert np.mean(one["a"] == other) < 0.05


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_beyond_the_range_of_masked_ones_are_cut(sign):
    mask, ids = uploads.mask(16), jnp.array([0], jnp.int32)
    sent = mask.encode(KEY, weigh({"a": sign * jnp.array([1e6, 1e30])}, 1.0), 1.0, ids[0], ids)
    found = mask.decode(KEY, sent, ids, jnp.ones(1, bool))
    np.testing.assert_allclose(found.total["a"], sign * 2.0**15, rtol=1e-6)


def test_error_feedback_sends_everything_in_the_end():
    """A constant upload of 10 numbers, of which 3 are sent: after r rounds all but the last residual has arrived.

    The sum of what was sent equals r times the upload minus the residual, exactly, and no number waits longer than 10 / 3
    rounds relative to its share.
    """
    sparse = uploads.sparsify(0.3)
    upload = {"w": jnp.arange(1.0, 11.0)}
    memory, total = sparse.init_memory(upload), np.zeros(10)
    for _ in range(50):
        sent, memory = sparse.client(KEY, upload, memory, ())
        assert np.count_nonzero(sent["w"]) == 3
        total += np.asarray(sent["w"])
    np.testing.assert_allclose(total + np.asarray(memory["w"]), 50 * np.arange(1.0, 11.0), rtol=1e-12)
    assert np.all(np.asarray(memory["w"]) < np.arange(1.0, 11.0).sum() * 2)
    largest, _ = uploads.sparsify(0.3, feedback=False).client(
        KEY, {"w": jnp.array([1.0, -9, 2, 3, 8, 0, 1, 1, 1, -4])}, (), ()
    )
    assert np.flatnonzero(largest["w"]).tolist() == [1, 4, 9]


def test_residuals_stay_with_their_client():
    state, info = _run(_build(cohort_size=2, uploads=(uploads.sparsify(0.5),)))
    kept = np.asarray(state.residual[0][0]["shared"])
    absent = np.setdiff1d(np.arange(N), np.asarray(info.ids))
    assert np.all(kept[absent] == 0) and kept.shape == (N, 2)
    # Both numbers moved by the gain, negated because the server descends; one of them was sent.
    for i in np.asarray(info.ids).tolist():
        assert sorted(kept[i].tolist()) == [-_gain(i), 0]


def test_a_lost_upload_stays_in_the_residual_whole():
    late = lambda key, id_: fm.Participation(returned=id_ != 2)  # noqa: E731
    state, _ = _run(_build(participation=late, uploads=(uploads.sparsify(0.5),)))
    kept = np.asarray(state.residual[0][0]["shared"])
    np.testing.assert_allclose(kept[2], -_gain(2))
    assert sorted(kept[1].tolist()) == [-_gain(1), 0]


def test_statistics_that_renew_the_servers_state_are_clipped_as_changes():
    """Adam's averaged step count goes up by one a round under clipping at a loose norm, and to where it went without."""
    options = {"cohort_size": 7, "devices": 1, "outer_slots": "averaged", "weighting": "uniform"}
    plain, loose = (_two_rounds("fedmeta", **options, **more) for more in ({}, {"uploads": (uploads.clip(1e9),)}))
    assert problems.distance(plain.extra, loose.extra) < 1e-12
    tight = _two_rounds("l2gd", cohort_size=7, devices=1, uploads=(uploads.clip(1e-6),))
    start = problems.build("l2gd").init(KEY, problems.data())
    # Two clipped changes of at most 1e-6 each: the mean stays where it was, and does not shrink to a norm of 1e-6.
    assert problems.distance(tight.extra, start.extra) < 3e-6


def test_a_chain_runs_client_halves_in_order_and_server_halves_in_reverse():
    def step(name, factor, shift):
        return uploads.UploadTransform(
            name=name,
            client=lambda key, upload, memory, kept: (jax.tree.map(lambda leaf: leaf * factor + shift, upload), memory),
            server=lambda key, average, context, kept, measured: (
                jax.tree.map(lambda leaf: (leaf - shift) / factor, average),
                kept,
            ),
        )

    chosen = {"uploads": (step("a", 2.0, 1.0), step("b", 3.0, -5.0))}
    plain, chained = (_run(_build(**more))[0] for more in ({}, chosen))
    assert problems.distance(plain.model, chained.model) < 1e-12


def test_two_of_one_name_draw_by_themselves():
    def added(key, upload, memory, kept):
        return upload + jax.random.normal(key, upload.shape), memory

    own = uploads.UploadTransform(name="own", client=added)
    one, two = (uploads.Chain([own] * n).client(KEY, jnp.zeros(5), ((),) * n, ((),) * n)[0] for n in (1, 2))
    assert np.all(np.abs(two - 2 * one) > 1e-3)


def test_draws_do_not_depend_on_which_other_transformations_are_on():
    """Participation in which all finish, and clipping at a loose norm, leave the run as it was, bit for bit or to rounding."""
    plain = _two_rounds("fedavg", cohort_size=4, devices=1)
    all_finish = _two_rounds("fedavg", cohort_size=4, devices=1, participation=lambda key, id_: fm.Participation())
    assert problems.leaves_equal(plain.model, all_finish.model)
    loose = _two_rounds("fedavg", cohort_size=4, devices=1, uploads=(uploads.clip(1e9),))
    assert problems.distance(plain.model, loose.model) < 1e-12
    # 24 bits round every number to within 2^-24 of its leaf's range.
    fine = _two_rounds("fedavg", cohort_size=4, devices=1, uploads=(uploads.quantize(24),))
    assert problems.distance(plain.model, fine.model) < 1e-6
    # A transformation in front changes no draw of those behind it.
    coarse, behind = (
        _two_rounds("fedavg", cohort_size=4, devices=1, uploads=chain)
        for chain in ((uploads.quantize(2),), (uploads.clip(1e9), uploads.quantize(2)))
    )
    assert problems.distance(coarse.model, behind.model) < 1e-12


def test_bytes_on_the_wire():
    """39 parameters: 24 in the body (20 + 4), 15 in the head (12 + 3); the tests run in float64."""
    data = problems.data()

    def up(**more):
        return fm.costs.traffic(problems.build("fedavg", cohort_size=5, **more), data).up

    assert up() == up(aggregator=aggregate.median) == up(uploads=(uploads.clip(1.0), uploads.noise(1.0))) == 39 * 8
    # 4 bits a number and two numbers of 64 bits a leaf, leaf by leaf in whole bytes.
    assert up(uploads=(uploads.quantize(4),)) == sum(-(-n * 4 // 8) + 16 for n in (20, 4, 12, 3))
    # A quarter of each leaf: 5, 1, 3 and 1 numbers with indices of 5, 2, 4 and 2 bits.
    assert up(uploads=(uploads.sparsify(0.25),)) == sum(-(-k * (64 + b) // 8) for k, b in ((5, 5), (1, 2), (3, 4), (1, 2)))
    assert up(uploads=(uploads.sparsify(1.0),)) == 39 * 8  # all of a leaf needs no indices
    assert up(uploads=(uploads.mask(),)) == 39 * 4
    # 5 numbers with indices of 5 bits and the two ends of their range, and so on.
    both = (uploads.sparsify(0.25), uploads.quantize(4))
    assert up(uploads=both) == sum(-(-k * (4 + b) // 8) + 16 for k, b in ((5, 5), (1, 2), (3, 4), (1, 2)))
    assert up(uploads=(uploads.quantize(4), uploads.mask())) == 39 * 4  # the range is not sent
    assert kept(100, 0.29) == 29 and kept(3, 0.01) == 1
    # A leaf without numbers has no range either.
    assert uploads.Chain((uploads.quantize(4),)).message(jnp.zeros((0, 3))).bytes == 0


U = uploads
ILLEGAL = {
    "noise without clip": ((U.noise(1.0),), r"\(noise\): noise needs a clip before it"),
    "noise before clip": ((U.noise(1.0), U.clip(1.0)), r"\(noise, clip\): noise needs a clip before it"),
    "quantize between clip and noise": (
        (U.clip(1.0), U.quantize(4), U.noise(1.0)),
        r"quantize must come before clip, because it could raise the norm again",
    ),
    "quantize after noise": ((U.clip(1.0), U.noise(1.0), U.quantize(4)), "quantize must come before clip"),
    "error feedback after clip": ((U.clip(1.0), U.sparsify(0.5)), "sparsify with error feedback must come before clip"),
    "quantize before sparsify": ((U.quantize(4), U.sparsify(0.5)), "sparsify must come before quantize"),
    "sparsify and mask": ((U.sparsify(0.5), U.mask()), "sparsify and mask exclude each other"),
    "a clip of one's own after noise": (
        (U.noise(1.0), U.UploadTransform(name="mine", clip_norm=1.0)),
        "noise needs a clip before it",
    ),
    "mask first": ((U.mask(), U.quantize(4)), "mask must come last"),
    "bits that spend more than the multiplier": (
        (U.adaptive_clip(1.0, bit_noise=0.4), U.noise(1.0)),
        "bit_noise must be above half the noise multiplier 1.0: the bits alone are less private",
    ),
    "bits without noise": ((U.adaptive_clip(1.0), U.noise(1.0)), "bit_noise must be above half the noise multiplier"),
    "two kinds of clip": ((U.clip(1.0), U.adaptive_clip(2.0)), "clip may stand there once"),
    "a rounding of one's own before sparsify": (
        (dataclasses.replace(U.quantize(4), name="mine"), U.sparsify(0.5)),
        "sparsify must come before mine",
    ),
    "two sparsifications": ((U.sparsify(0.5), U.sparsify(0.5)), "sparsify may stand there once"),
    "a sparsification of one's own and mask": (
        (dataclasses.replace(U.sparsify(0.5), name="mine"), U.mask()),
        "mine and mask exclude each other",
    ),
    "bits that spend as much as the multiplier": (
        (U.adaptive_clip(1.0, bit_noise=0.5), U.noise(1.0)),
        "bit_noise must be above half the noise multiplier",
    ),
    "two clips": ((U.clip(1.0), U.clip(2.0)), "clip may stand there once"),
    "no transformation": ((1.0,), r"must hold upload transformations such as fm.uploads.clip\(1.0\), not 1.0"),
}
LEGAL = [
    (),
    (U.adaptive_clip(1.0),),
    (U.quantize(8), U.adaptive_clip(1.0, bit_noise=2.0), U.noise(1.0), U.mask()),
    (U.sparsify(0.5), U.quantize(8), U.clip(1.0), U.noise(1.0)),
    (U.quantize(8), U.clip(1.0), U.noise(1.0), U.mask()),
    (U.clip(1.0), U.sparsify(0.5, feedback=False)),
    (U.clip(1.0), U.quantize(4)),
    (U.quantize(4), U.mask()),
]


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_order_is_refused_by_name(case):
    chain, message = ILLEGAL[case]
    with pytest.raises(ValueError, match=message):
        fm.Federation(uploads=chain)


@pytest.mark.parametrize("chain", LEGAL, ids=lambda chain: "-".join(step.name for step in chain) or "none")
def test_a_legal_order_runs(chain):
    state = _two_rounds("fedavg", cohort_size=4, devices=1, weighting="uniform", uploads=chain)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.model))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: uploads.clip(0.0), "norm=0.0 must be finite and above 0"),
        (lambda: uploads.noise(-1.0), "multiplier=-1.0 must be finite and at least 0"),
        (lambda: uploads.adaptive_clip(0.0), "norm=0.0 must be finite and above 0"),
        (lambda: uploads.adaptive_clip(1.0, quantile=2.0), r"quantile=2.0 must lie in \[0, 1\]"),
        (lambda: uploads.adaptive_clip(1.0, bit_noise=-1.0), "bit_noise=-1.0 must be finite and at least 0"),
        (
            lambda: fm.Federation(uploads=(uploads.adaptive_clip(1.0),), aggregator=aggregate.median),
            "adaptive_clip follows a mean over clients",
        ),
        (lambda: uploads.quantize(0), "bits=0 must be an integer of at least 1"),
        (lambda: uploads.quantize(32), "bits=32 must lie in"),
        (
            lambda: problems.build("pfedhn", uploads=(uploads.clip(1.0),)),
            "pfedhn sends other numbers than those that the simulation averages",
        ),
        (
            lambda: problems.build("ifca", uploads=(uploads.clip(1.0),)),
            "ifca divides a mean of changes by a mean of amounts; clip would shrink both and bound nothing",
        ),
        (
            lambda: problems.build("qfedavg", uploads=(uploads.adaptive_clip(1.0), uploads.mask())),
            "qfedavg divides a mean of changes by a mean of amounts; adaptive_clip would",
        ),
        (lambda: uploads.sparsify(1.5), "share=1.5 must lie between 0 and 1"),
        (lambda: uploads.mask(31), "fraction_bits=31 must lie in"),
        (
            lambda: problems.build("fedamp", uploads=(uploads.clip(1.0), uploads.noise(1.0))),
            "fedamp lets the server see what each client sends by itself, which noise cannot cover",
        ),
        (
            lambda: fm.Federation(uploads=(uploads.clip(1.0), uploads.noise(1.0)), aggregator=aggregate.median),
            "noise is scaled to the mean",
        ),
        (lambda: fm.Federation(uploads=(uploads.mask(),), aggregator=aggregate.median), "an aggregator must see every upload"),
        (
            lambda: fm.Federation(uploads=(uploads.mask(),), drop_nonfinite=False),
            "the server cannot see a broken upload that mask hides",
        ),
        (
            lambda: problems.build("fedfomo", uploads=(uploads.mask(),)),
            "fedfomo lets the server see what each client sends by itself, which mask cannot cover",
        ),
        (lambda: fm.Federation(uploads=uploads.clip(1.0)), r"uploads must be a tuple"),
        *(
            (lambda own=own, options=options: fm.Federation(uploads=own, **options), message)
            for own, options, message in (
                (NOISE, {"aggregator": aggregate.median}, "noise is scaled to the mean"),
                (NOISE, {"attack": fm.attacks.sign_flip(0.5)}, "which noise cannot stand"),
                (MASK, {"aggregator": aggregate.median}, "an aggregator must see every upload"),
                (MASK, {"drop_nonfinite": False}, "the server cannot see a broken upload that mask hides"),
                (MASK, {"attack": fm.attacks.sign_flip(0.5)}, "which mask cannot stand"),
                (BITS, {"aggregator": aggregate.median}, "adaptive_clip follows a mean"),
            )
        ),
        (
            lambda: problems.build("fedamp", uploads=NOISE, average_personal=True),
            "fedamp lets the server see what each client sends by itself, which noise cannot cover",
        ),
    ],
)
def test_what_a_transformation_cannot_do_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# ------------------------------------------------------------------------------------------------ the key of the noise


def test_half_of_the_bits_of_a_secret_do_not_make_its_key():
    keys = [jax.random.key_data(with_secret(KEY, jnp.array(bits, jnp.uint32))) for bits in ((1, 2), (1, 3), (0, 2))]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == 3


def _noised(algorithm, seed=0, rounds=1, state=None, data=DATA):
    """Rounds of an algorithm whose clients send nothing, so that the server moves by noise alone."""
    state = jax.jit(algorithm.init)(jax.random.key(seed), data) if state is None else state
    for r in range(int(state.round), rounds):
        state, _ = jax.jit(algorithm.round)(jax.random.fold_in(jax.random.key(seed), r), state, data)
    return state


def _only_noise(cohort_size=4, **options):
    return _build(
        _adds(weight=lambda data: 0), uploads=(uploads.clip(1.0), uploads.noise(1.0, **options)), cohort_size=cohort_size
    )


def test_the_noise_of_two_runs_of_one_seed_differs_unless_it_is_to_be_reproducible():
    one, two = (_noised(_only_noise()).model["shared"] for _ in range(2))
    assert np.all(one != two)
    one, two = (_noised(_only_noise(reproducible=True)).model["shared"] for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert _only_noise().config["federation"]["uploads"][1] == {"name": "noise", "multiplier": 1.0, "reproducible": False}


def test_a_run_goes_on_from_its_state_exactly_and_the_secret_never_changes():
    algorithm = _only_noise()
    one = _noised(algorithm, rounds=1)
    whole, resumed = _noised(algorithm, rounds=3, state=one), _noised(_only_noise(), rounds=3, state=one)
    assert problems.leaves_equal(whole.model, resumed.model)
    (_, secret), (_, after) = one.aggregation.uploads, whole.aggregation.uploads
    np.testing.assert_array_equal(secret, after)
    assert secret.dtype == jnp.uint32 and secret.shape == (2,)
    # Neither the round nor the seed decides alone.
    other = _noised(algorithm, rounds=1, seed=1, state=_noised(algorithm, rounds=0)._replace(aggregation=one.aggregation))
    assert np.all(other.model["shared"] != one.model["shared"])


def test_secrets_are_drawn_when_a_program_runs_and_are_in_no_program():
    algorithm = _only_noise()
    begin = jax.jit(algorithm.init).lower(KEY, DATA).compile()
    secrets = [np.asarray(begin(KEY, DATA).aggregation.uploads[1]) for _ in range(8)]
    assert len({tuple(secret) for secret in secrets}) == 8
    state = begin(KEY, DATA)
    text = jax.jit(algorithm.round).lower(KEY, state, DATA).as_text() + begin.as_text()
    assert not any(str(word) in text for secret in secrets for word in secret)
    # The words are uniform: 8 of them have about half of their 512 bits set.
    assert abs(int(np.unpackbits(np.array(secrets).view(np.uint8)).sum()) - 256) < 5 * np.sqrt(512 / 4)


def test_all_devices_have_the_same_secret():
    algorithm = problems.build("fedavg", cohort_size=4, devices=2, uploads=(uploads.clip(1.0), uploads.noise(1.0)))
    secret = jax.jit(algorithm.init)(KEY, problems.data()).aggregation.uploads[1]
    copies = [np.asarray(shard.data) for shard in secret.addressable_shards]
    assert len(copies) == 2 and np.array_equal(*copies) and copies[0].any()


def test_several_processes_are_refused_unless_the_noise_is_reproducible(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="needs a run of one process"):
        _only_noise().init(KEY, DATA)
    assert _only_noise(reproducible=True).init(KEY, DATA).aggregation.uploads[1] == ()


def test_a_sweep_may_be_over_the_noise_of_the_bits():
    def build(bit_noise):
        chain = (uploads.adaptive_clip(0.05, bit_noise=bit_noise, reproducible=True), uploads.noise(0.5, reproducible=True))
        return fm.fedavg(problems.task()), fm.Federation(cohort_size=3, devices=1, uploads=chain)

    members = fm.sweeps.members(fm.sweeps.grid(bit_noise=[2.0, 3.0]), [3])
    state, _ = fm.sweeps.sweep(build, members, problems.data(), rounds=2, eval_every=2)
    for place, rate in enumerate((2.0, 3.0)):
        method, federation = build(rate)
        alone, _ = fm.simulate(method, problems.data(), key=jax.random.key(3), rounds=2, federation=federation)
        assert problems.distance(problems.at(state.model, place), alone.model) < 1e-9


def test_members_of_a_sweep_have_noise_of_their_own():
    algorithm = _only_noise()

    def run(key):
        return algorithm.round(key, algorithm.init(key, DATA), DATA)[0].model["shared"]

    noise = jax.jit(jax.vmap(run))(jax.random.split(KEY, 3))
    assert len(np.unique(noise)) == noise.size


# -------------------------------------------------------------------------------------------------------- exact clipping


@pytest.mark.parametrize("form", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_clipping_is_exact_in_every_type(form, size):
    """The norm of the returned numbers, in float64, is at most the bound, and their direction is kept within their type."""
    rng, form = np.random.default_rng(size), jnp.dtype(form)
    for scale, norm in ((1.0, 0.5), (300.0, 1.0), (1e-3, 1e-4), (2e-7, 1e-6), (1.0, 1 / 3)):
        numbers = rng.uniform(0.9, 1.0, size) * scale if size > 7 else rng.normal(size=size) * scale
        tree = {"a": jnp.asarray(numbers[: size // 2 + 1], form), "b": jnp.asarray(numbers[size // 2 + 1 :], form)}
        given = np.concatenate([np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)])
        for cut in (clipped(tree, norm), jax.jit(clipped)(tree, norm)):
            sent = np.concatenate([np.asarray(leaf, float) for leaf in jax.tree.leaves(cut)])
            assert np.linalg.norm(sent) <= norm
            if np.linalg.norm(given) <= norm * (1 - 1e-3):
                np.testing.assert_array_equal(sent, given)
            elif form.itemsize > 2 or norm / np.sqrt(size) > 1e-3:
                wanted = given * min(1, norm / np.linalg.norm(given))
                np.testing.assert_allclose(sent, wanted, rtol=2 * float(jnp.finfo(form).eps) + 2e-4)


# ------------------------------------------------------------------------------------------------------ adaptive clipping


def _adaptive(norm, **options):
    return uploads.adaptive_clip(norm, **options, reproducible=True)


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.8])
def test_an_adaptive_norm_follows_the_papers_equation(quantile):
    """Algorithm 1 of Andrew et al. in NumPy, over 6 rounds in which all clients' uploads grow; every client sends 3 numbers of
    its gain, so that its norm is sqrt(3) times that, and the server moves by their clipped mean."""
    algorithm = _build(uploads=(_adaptive(3.0, quantile=quantile, rate=0.7),), weighting="uniform")
    state, norm, model = algorithm.init(KEY, DATA), 3.0, 2.0
    for r in range(6):
        state, _ = jax.jit(algorithm.round)(jax.random.fold_in(KEY, r), state, DATA)
        gains = _gain(np.arange(N), r)
        norms = np.sqrt(3) * gains
        model += np.mean(gains * np.minimum(1, norm / norms))
        norm *= np.exp(-0.7 * (np.mean(norms <= norm) - quantile))
        np.testing.assert_allclose(state.aggregation.uploads[0]["norm"], norm, rtol=1e-12)
        np.testing.assert_allclose(state.model["buffer"], model, rtol=1e-10)


def test_an_adaptive_norm_has_the_papers_defaults_and_a_norm_that_is_met_counts():
    given = uploads.adaptive_clip(5.0)
    assert (given.config["quantile"], given.config["rate"]) == (0.5, 0.2)
    assert [float(given.measure({"a": jnp.array([3.0, x])}, {"norm": jnp.array(5.0)})) for x in (4.0, 4.1)] == [0.5, -0.5]


def test_the_noise_of_the_bits_is_that_of_a_run():
    one, two = (
        _run(_build(uploads=(uploads.adaptive_clip(3.0, bit_noise=1.0),)))[0].aggregation.uploads[0]["norm"] for _ in range(2)
    )
    assert one != two


def test_no_noise_at_all_beside_bits_without_noise():
    chain = (_adaptive(1e6), uploads.noise(0.0))
    state, _ = _run(_build(uploads=chain))
    np.testing.assert_allclose(state.model["buffer"], 2 + np.mean(_gain(np.arange(N))), rtol=1e-12)


def test_an_adaptive_norm_reaches_the_quantile():
    """Norms are fixed: sqrt(3) (i + 1)^2 of clients 0 to 3. The norm of the quantile 1/2 settles between the second and third."""

    def client(key, received, data):
        return fm.Trained(jax.tree.map(lambda leaf: leaf + _gain(_who(data)), received.model), {})

    algorithm = _build(client, uploads=(_adaptive(0.1),), weighting="uniform")
    state = algorithm.init(KEY, DATA)
    step = jax.jit(algorithm.round)
    for r in range(80):
        state, _ = step(jax.random.fold_in(KEY, r), state, DATA)
    assert np.sqrt(3) * 4 * 0.8 < float(state.aggregation.uploads[0]["norm"]) < np.sqrt(3) * 9


def test_bits_and_uploads_share_the_budget():
    """1 / z^2 = 1 / z_up^2 + 1 / (2 sigma_b)^2, and both noises have the deviations that this says."""
    z, bits, size = 1.2, 0.9, 20_000
    chain = (_adaptive(2.0, bit_noise=bits, rate=1.0), uploads.noise(z, reproducible=True))
    init = {"init": lambda key: START | {"shared": jnp.zeros(size)}}
    algorithm = _build(_adds(weight=lambda data: 0), uploads=chain, **init)
    state = algorithm.init(KEY, DATA)
    step = jax.jit(jax.vmap(lambda key: algorithm.round(key, state, DATA)[0]))
    after = step(jax.random.split(KEY, 200))
    uploaded = np.asarray(after.model["shared"])[:20].reshape(-1) * 4 / 2
    wanted = (z**-2 - (2 * bits) ** -2) ** -0.5
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], uploaded.size) * wanted**2
    assert low < np.sum(uploaded**2) < high
    # No client returns: the share of bits is 1/2 by the shift of each, and what moves the norm is their noise alone.
    moved = -np.log(np.asarray(after.aggregation.uploads[0]["norm"]) / 2.0) * 4
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], moved.size) * bits**2
    assert low < np.sum(moved**2) < high


# ------------------------------------------------------------------------------------------------------ Poisson sampling


def test_a_private_sum_over_a_poisson_cohort_is_divided_by_its_expected_size():
    schedule = fm.schedules.poisson(0.5)
    algorithm = _build(schedule=schedule, uploads=(uploads.clip(5.0), uploads.noise(0.0)), cohort_size=4)
    state, sizes = algorithm.init(KEY, DATA), set()
    step = jax.jit(algorithm.round)
    for r in range(8):
        before = float(state.model["buffer"])
        state, info = step(jax.random.fold_in(KEY, r), state, DATA)
        here = np.asarray(info.ids)[np.asarray(info.ids) >= 0]
        gains = _gain(here, r)
        expected = np.sum(gains * np.minimum(1, 5 / (np.sqrt(3) * gains))) / 2
        np.testing.assert_allclose(float(state.model["buffer"]) - before, expected, rtol=1e-12, atol=1e-14)
        assert int(info.metrics["left_out"]) == 0
        sizes.add(len(here))
    assert len(sizes) > 2


def test_clients_left_out_are_in_the_metrics_of_the_round():
    algorithm = _build(schedule=fm.schedules.poisson(0.5), uploads=(uploads.clip(5.0), uploads.noise(0.0)), cohort_size=2)
    state, counts = algorithm.init(KEY, DATA), []
    step = jax.jit(algorithm.round)
    for r in range(12):
        key = jax.random.fold_in(KEY, r)
        _, info = step(key, state, DATA)
        drawn = int(jnp.sum(fm.schedules.poisson(0.5)(fm.keys.tagged(key, "cohort"), 0, N, N) >= 0))
        assert int(info.metrics["left_out"]) == max(drawn - 2, 0)
        counts.append(int(info.metrics["left_out"]))
    assert max(counts) > 0


# ---------------------------------------------------------------------------------------- what new clients may read


def test_new_clients_may_not_read_what_others_keep_where_there_is_noise():
    chain = (uploads.clip(1.0), uploads.noise(1.0))
    for name in ("fedmeta_per", "lg_fedavg"):
        with pytest.raises(ValueError, match=rf"new clients of {name} read what trained clients keep \(personal\)"):
            problems.build(name, uploads=chain)
        algorithm = problems.build(name, uploads=chain, new_client="fresh", cohort_size=4, devices=1)
        state = algorithm.init(KEY, problems.data())
        # Whatever the rows of trained clients hold, a new client tests with the same model.
        other = state._replace(personal=jax.tree.map(lambda leaf: leaf + 1, state.personal), seen=jnp.ones(7, bool))
        support = problems.data().client(0)["test_support"]
        one, two = (algorithm.personalize(KEY, s, support, None) for s in (state, other))
        assert problems.leaves_equal(one, two)
    rule = lambda key, population, support: population.personal["own"]  # noqa: E731
    with pytest.raises(TypeError, match="NoneType"):
        _tested(_build(new_client=rule, uploads=chain), _build(uploads=chain).init(KEY, DATA), None)
    with pytest.raises(ValueError, match="new_client='old' is unknown; allowed are fresh"):
        fm.Federation(new_client="old")


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.bfloat16, 4), (jnp.bfloat16, 8), (jnp.float16, 10), (jnp.float32, 8)])
def test_quantisation_is_unbiased_in_any_type(dtype, bits):
    """Means over 4,000 draws of 64 numbers, in steps between two levels; what is sent in 16 bits is rounded to these."""
    x = jnp.linspace(0.0, 0.9, 64).astype(dtype)
    keys = jax.random.split(jax.random.key(1), 4000)
    received = jax.vmap(lambda key: quantized(key, x, bits).astype(jnp.float32))(keys)
    step = float(x[-1]) / (2**bits - 1)
    bias = np.asarray(received.mean(0) - x.astype(jnp.float32)) / step
    rounding = float(jnp.finfo(dtype).eps) / step / 2
    assert abs(bias.mean()) < 0.01 + rounding / 8 and np.abs(bias).max() < 0.04 + rounding


def _with_own_weight(weight):
    def client(key, received, data):
        return fm.Trained(jax.tree.map(lambda leaf: leaf + 1, received.model), {}, weight=weight)

    task = problems.task()
    roles = fm.masks.roles(fm.masks.nothing(task), fm.masks.everything(task))
    return fm.Method(
        init=task.init,
        client=client,
        personalize=fm.received_model,
        predict=task.predict,
        roles=roles,
        weighting="uniform",
        task=task,
    )


@pytest.mark.parametrize(
    ("numbers", "bits"),
    [([1e-36, 2e-36, 0], 8), ([1e-33, 3e-33], 24), ([-3e38, 3e38, 1], 4), ([2e-38, 2e-38], 1), ([3e38], 2)],
)
def test_quantisation_keeps_numbers_of_any_size_finite_and_in_their_range(numbers, bits):
    leaf = jnp.array(numbers, jnp.float32)
    found = np.asarray(jax.jit(lambda leaf: quantized(KEY, leaf, bits))(leaf), float)
    assert np.isfinite(found).all() and found.min() >= leaf.min() and found.max() <= leaf.max()
    assert np.max(np.abs(found - np.asarray(leaf, float))) <= (float(leaf.max()) - float(leaf.min())) / (2**bits - 1) * 1.001


def test_a_zero_stays_a_zero():
    found = jax.vmap(lambda key: quantized(key, jnp.array([-1.0, 0.0, 2.0, 0.0]), 1))(jax.random.split(KEY, 20))
    assert not found[:, [1, 3]].any() and set(np.unique(found[:, [0, 2]])) == {-1.0, 2.0}


def test_masks_and_weights_of_the_client_rule_exclude_each_other():
    """Integers hold weights up to the largest possible one, which nobody knows of a client's own: they would wrap around."""
    data = problems.data()
    for chain in ((), (uploads.mask(),)):
        algorithm = fm.federate(_with_own_weight(5.0), fm.Federation(cohort_size=4, uploads=chain))
        state = algorithm.init(jax.random.key(0), data)
        if chain:
            with pytest.raises(ValueError, match="give their own weight, of which mask cannot know the largest"):
                algorithm.round(jax.random.key(0), state, data)
        else:
            after, _ = jax.jit(algorithm.round)(jax.random.key(0), state, data)
            assert problems.distance(after.model, jax.tree.map(lambda leaf: leaf + 1, state.model)) < 1e-6


def test_a_lost_upload_is_kept_once_by_two_that_have_feedback():
    own = dataclasses.replace(uploads.sparsify(0.25), name="own", leaves_out=False)
    chain = uploads.Chain((uploads.sparsify(0.5), own))
    upload, before = (
        jnp.array([4.0, 3.0, 2.0, 1.0]),
        ({"a": jnp.array([0.0, 0.0, 0.5, 0.25])}, {"a": jnp.array([0.0, 1.0, 0.0, 0.0])}),
    )
    sent, _, memory, lost = chain.client(jax.random.key(0), {"a": upload}, before, ((), ()))
    total = upload + before[0]["a"] + before[1]["a"]
    # Nothing is created or lost, whether the upload arrives or not.
    assert np.allclose(sent["a"] + memory[0]["a"] + memory[1]["a"], total)
    assert np.allclose(lost[0]["a"] + lost[1]["a"], total)


def _rounds(name, count, of=None, **options):
    algorithm, state = problems.build(name, of=of, cohort_size=7, devices=1, **options), None
    state, step = algorithm.init(jax.random.key(3), problems.data()), jax.jit(algorithm.round)
    for number in range(count):
        state, _ = step(jax.random.fold_in(KEY, number), state, problems.data())
    return state


def test_error_feedback_does_not_add_up_values():
    """What was left out of a buffer, a renewed statistic or an averaged own leaf is in its next value."""
    sparse = (uploads.sparsify(0.1),)
    state = _rounds("fedavg", 10, problems.normed_task(), uploads=sparse, lr=0.05, batch_size=10)
    residual, _ = state.residual[0]
    assert not np.any(jax.tree.leaves(residual["batch_stats"])[0]) and np.any(jax.tree.leaves(residual["params"])[0])
    assert all(np.all(np.asarray(leaf) > 0) for leaf in jax.tree.leaves(state.model["batch_stats"]["bn1"]["var"]))
    own = _rounds("fedper", 60, average_personal=True, weighting="uniform", lr=0.02, uploads=sparse)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), own.personal["head"])
    assert problems.distance(own.model["head"], mean) < 0.5 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(mean))
    kept = _rounds("l2gd", 3, uploads=sparse)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(kept.residual[0][1]))
    # Changes of a memory that follows what was sent have it, too; the pseudo-gradient is an increment.
    part, change = _rounds("scaffold", 3, uploads=sparse).residual[0]
    assert any(np.any(leaf) for leaf in jax.tree.leaves(part)) and not any(np.any(leaf) for leaf in jax.tree.leaves(change))


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_control_variates_become_the_gradients_under_error_feedback(late):
    """With a rate of nearly 0 the model rests, so that each client's control variate must come to its gradient and stay.

    Without transformations it is the gradient after a single round.
    """

    def variates(rounds, **options):
        algorithm = fm.federate(
            fm.scaffold(problems.task(), lr=1e-12, control="gradient", batch_size=8),
            fm.Federation(cohort_size=7, devices=1, **options),
        )
        state, step = algorithm.init(KEY, problems.data()), jax.jit(algorithm.round)
        for number in range(rounds):
            state, _ = step(jax.random.fold_in(KEY, number), state, problems.data())
        return state.memory

    gradients = variates(1)
    kept = variates(30, uploads=(uploads.sparsify(0.3),), participation=fm.participation.unreliable(late=late))
    assert problems.distance(kept, gradients) < 1e-6 < problems.distance(jax.tree.map(jnp.zeros_like, kept), gradients)


def test_an_amount_is_that_of_one_upload_under_error_feedback():
    """Two lost uploads come with the third. All steps are equally many, so that FedNova must move like FedAvg."""

    def moves(name):
        client = fm.participation.unreliable(late=0.5)
        federation = fm.Federation(cohort_size=7, devices=1, uploads=(uploads.sparsify(1.0),), participation=client)
        algorithm = fm.federate(getattr(fm, name)(problems.task(), lr=1e-3, epochs=1, batch_size=128), federation)
        state, step, lengths = algorithm.init(KEY, problems.data()), jax.jit(algorithm.round), []
        for number in range(6):
            before = state.model
            state, info = step(jax.random.fold_in(KEY, number), state, problems.data())
            lengths.append((int(info.returned.sum()), problems.distance(state.model, before)))
        return lengths

    assert {returned for returned, _ in moves("fedavg")} - {0, 7}
    np.testing.assert_allclose(moves("fednova"), moves("fedavg"), rtol=1e-9)


def test_a_method_whose_clients_keep_their_models_refuses_error_feedback():
    with pytest.raises(ValueError, match="pfedme cannot go with feedback: with keep_local, w_i holds what was left out"):
        problems.build("pfedme", keep_local=True, uploads=(uploads.sparsify(0.1),))
    problems.build("pfedme", keep_local=True, uploads=(uploads.sparsify(0.1, feedback=False),))
    problems.build("pfedme", uploads=(uploads.sparsify(0.1),))


@pytest.mark.parametrize("name", ["fedamp", "heur_fedamp", "fedcac", "fedfomo", "mocha"])
def test_a_method_that_sends_nothing_to_be_averaged_refuses_uploads(name):
    with pytest.raises(ValueError, match=f"{name} sends nothing that is averaged, so that uploads= would change nothing"):
        problems.build(name, uploads=(uploads.clip(1.0),))


def test_statistics_that_the_server_computes_itself_are_not_transformed():
    """FedAMP's server takes the mean of the models that it reads; averaged own leaves are clipped beside it."""
    state = _rounds("fedamp", 3, average_personal=True, uploads=(uploads.clip(1e-3),))
    weight = np.asarray(problems.data().sizes("train"), float)
    mean = jax.tree.map(lambda leaf: np.tensordot(weight / weight.sum(), leaf, 1), state.personal)
    assert problems.distance(state.extra, mean) < 1e-12 < problems.distance(state.model, mean)
