"""Membership inference: its bounds and intervals, and what it finds with and without privacy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedjax_meta as fm
from fedjax_meta import privacy, schedules, uploads

KEY = jax.random.key(6)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.1), (3.0, 1e-3)])
def test_the_bounds_are_met_by_the_worst_mechanism(epsilon, delta):
    """Four outputs: one that only a member gives and one that only another gives, each with probability delta, and randomised
    response on the rest. It is (epsilon, delta)-private, and its best test reaches both bounds."""
    likely = (1 - delta) / (1 + math.exp(-epsilon))
    member = np.array([delta, likely, 1 - delta - likely, 0.0])
    other = member[::-1]
    assert np.sum(np.maximum(member - math.exp(epsilon) * other, 0)) == pytest.approx(delta)
    advantage = np.sum(np.maximum(member - other, 0))
    assert privacy.largest_advantage(epsilon, delta) == pytest.approx(advantage, rel=1e-12)
    # Calling the first output, or the first two, a member.
    for calls in (1, 2):
        bound = privacy.largest_true_positives(other[:calls].sum(), epsilon, delta)
        assert bound == pytest.approx(member[:calls].sum(), rel=1e-12)
    assert privacy.largest_advantage(math.inf, 0.0) == privacy.largest_true_positives(0.5, 800.0, 0.0) == 1


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_measured_advantage_of_shifted_normals_and_its_interval(shift):
    """The best threshold is in the middle, where the advantage is `2 Phi(shift / 2) - 1`. Few of 200 intervals miss it."""
    rng, truth = np.random.default_rng(0), 2 * stats.norm.cdf(shift / 2) - 1
    found = [privacy.membership_attack(rng.normal(shift, 1, 400), rng.normal(0, 1, 400)) for _ in range(200)]
    # A threshold from 200 scores of each kind is a little worse than the best.
    assert truth - 0.03 < np.mean([one.advantage for one in found]) < truth + 0.01
    assert np.mean([one.advantage_range[0] <= truth for one in found]) > 0.97
    at = privacy.membership_attack(rng.normal(shift, 1, 40_000), rng.normal(0, 1, 40_000), false_positives=0.1)
    assert at.false_positives == pytest.approx(0.1, abs=0.01)
    assert at.true_positives == pytest.approx(stats.norm.sf(stats.norm.isf(0.1) - shift), abs=0.015)


def test_each_of_two_ranges_misses_with_half_of_what_is_allowed():
    """Clopper and Pearson: of k hits in n, the ends are quantiles of beta distributions."""
    found = privacy.membership_attack(np.arange(40) + 20.0, np.arange(40.0), confidence=0.9)
    for share, ends in (
        (found.true_positives, found.true_positives_range),
        (found.false_positives, found.false_positives_range),
    ):
        k = round(20 * share)
        wanted = [stats.beta.ppf(0.025, k, 21 - k) if k else 0.0, stats.beta.ppf(0.975, k + 1, 20 - k) if k < 20 else 1.0]
        np.testing.assert_allclose(ends, wanted, rtol=1e-9)


def test_a_threshold_lets_no_more_pass_than_allowed_and_no_tie_passes():
    """Both halves of the scores, of which the first gives the threshold, are alike."""
    others = np.repeat(np.arange(10.0), 2)
    found = privacy.membership_attack(others + 100, others, false_positives=0.15)
    assert (found.true_positives, found.false_positives) == (1.0, 0.1)
    for share in (None, 0.15):
        tied = privacy.membership_attack(np.ones(20), np.ones(20), false_positives=share)
        assert tied.advantage == 0 and (share is None or tied.false_positives == 0)


def test_the_likelihood_ratio_is_that_of_normal_distributions():
    rng = np.random.default_rng(1)
    with_, without = rng.normal(2, 1, (4000, 1)), rng.normal(0, 2, (4000, 1))
    for score in (-1.0, 0.5, 3.0):
        exact = stats.norm.logpdf(score, 2, 1) - stats.norm.logpdf(score, 0, 2)
        assert privacy.likelihood_ratio([score], with_, without)[0] == pytest.approx(exact, abs=0.15)
    two, other = rng.normal(size=(2, 3)), rng.normal(size=(2, 3))
    wanted = [stats.norm.logpdf(0.3, models.mean(0), models.std(0, ddof=1)) for models in (two, other)]
    np.testing.assert_allclose(privacy.likelihood_ratio(np.full(3, 0.3), two, other), wanted[0] - wanted[1], rtol=1e-9)
    p = np.array([1e-6, 0.3, 0.999])
    np.testing.assert_allclose(privacy.logit_of_loss(-np.log(p)), np.log(p / (1 - p)), rtol=1e-9)
    assert np.isfinite(privacy.logit_of_loss([0.0, 900.0])).all()


def _task(dimension):
    def init(key):
        return {"w": 0.1 * jax.random.normal(key, (dimension, 2)), "b": jnp.zeros(2)}

    return fm.classification(init, lambda v, x: x @ v["w"] + v["b"][None])


def _advantage(task, epochs, members, others):
    """Of an attack on the final model of 2 clients, by the loss of single samples."""
    clients = [(members[0][half], members[1][half]) for half in (slice(0, 200), slice(200, 400))]
    views = {"train": (np.zeros(2, int), np.full(2, 200))}
    data = fm.from_clients(clients, views=views, num_classes=2)
    algorithm = fm.federate(fm.fedavg(task, lr=0.5, epochs=1, batch_size=200), fm.Federation(cohort_size=2, devices=1))
    run = jax.jit(lambda key: fm.blocks.run_rounds(algorithm, key, algorithm.init(key, data), data, epochs, most=epochs)[0])
    model = run(KEY).model

    def losses(samples):
        logits = task.predict(model, jnp.asarray(samples[0]))
        return -jax.nn.log_softmax(logits)[jnp.arange(len(samples[1])), samples[1]]

    return privacy.membership_attack(-losses(members), -losses(others))


def test_an_attack_that_succeeds_without_privacy_stays_below_what_epsilon_allows_with_it():
    """400 samples of random labels in 800 dimensions can only be learned by heart. 40 rounds of one full gradient each."""
    rng = np.random.default_rng(3)
    members, others = ((rng.normal(size=(400, 800)), rng.integers(0, 2, 400)) for _ in range(2))
    plain = _advantage(_task(800), 40, members, others)
    assert plain.advantage_range[0] > 0.5
    noise, delta = 40.0, 1e-3
    guarantee = privacy.sample_epsilon(noise, 40, delta)
    bound = privacy.largest_advantage(guarantee.epsilon, delta)
    assert 0.3 < bound < 0.5 < plain.advantage_range[0]
    private = _advantage(privacy.private_task(_task(800), clip=30.0, noise=noise), 40, members, others)
    assert private.advantage < bound
    # Clipped gradients without noise still give the samples away: it is the noise that protects.
    clipped = _advantage(privacy.private_task(_task(800), clip=30.0, noise=0.0), 40, members, others)
    assert clipped.advantage_range[0] > bound


POISSON = {"cohort_size": 30, "schedule": schedules.poisson(0.1)}


@pytest.mark.parametrize(
    ("options", "clients", "sampling"),
    [
        ({"cohort_size": 5}, 50, privacy.FixedSize(50, 5)),
        ({"cohort_size": 50}, 50, privacy.Everyone()),
        (POISSON, 100, privacy.Poisson(0.1, 100, 30)),
        ({"cohort_size": 2, "schedule": schedules.given([[0, 1]])}, 9, privacy.Everyone()),
    ],
)
def test_what_a_run_spends_follows_from_its_config(options, clients, sampling):
    pytest.importorskip("dp_accounting")
    federation = fm.Federation(uploads=(uploads.clip(1.0), uploads.noise(3.0)), **options)
    algorithm = fm.federate(fm.fedavg(_task(3)), federation)
    expected = privacy.epsilon(3.0, 20, 1e-3, sampling)
    assert (
        privacy.spent(algorithm.config, 20, clients, 1e-3) == expected == privacy.spent(federation.config, 20, clients, 1e-3)
    )
    assert privacy.spent(algorithm.config, 1, clients, 1e-3).epsilon < expected.epsilon
    masked = fm.Federation(uploads=(uploads.clip(1.0), uploads.noise(3.0), uploads.mask()), **options)
    assert privacy.spent(masked.config, 20, clients, 1e-3) == expected
    looser = privacy.spent(algorithm.config, 20, clients, 1e-3, accountant="rdp")
    assert looser == privacy.epsilon(3.0, 20, 1e-3, sampling, accountant="rdp") and looser.epsilon >= expected.epsilon


def test_a_run_without_noise_spends_nothing_that_could_be_named_and_odd_noise_is_refused():
    assert privacy.spent(fm.Federation(uploads=(uploads.clip(1.0),)).config, 5, 50, 1e-5) is None
    odd = {"uploads": [{"name": "clip", "norm": 1.0}, {"name": "noise", "multiplier": [1.0, 2.0]}]}
    with pytest.raises(ValueError, match=r"must be one number to be accounted for, not \[1.0, 2.0\]"):
        privacy.spent(fm.Federation().config | odd, 5, 50, 1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: privacy.membership_attack([1, 2], [1, 2, 3, 4]), r"members must be at least 4 scores \[n\] without NaN"),
        (lambda: privacy.membership_attack([1, 2, 3, 4], [1, 2, 3, math.nan]), "others must be at least 4 scores"),
        (lambda: privacy.membership_attack([1] * 4, [2] * 4, false_positives=1.5), "false_positives=1.5 must lie strictly"),
        (lambda: privacy.likelihood_ratio([1.0], [[1.0]], [[1.0], [2.0]]), r"trained_with must be scores \[k, 1\]"),
        (lambda: privacy.largest_advantage(-1.0, 0.0), "epsilon=-1.0 must be at least 0"),
        (lambda: privacy.largest_true_positives(0.1, math.nan, 0.0), "epsilon=nan must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
