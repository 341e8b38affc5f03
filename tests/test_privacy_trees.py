"""Noise by binary trees (DP-FTRL): its variance and covariance, who is in a tree how often, and epsilon."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedjax_meta as fm
from fedjax_meta import privacy, schedules, uploads
from fedjax_meta.uploads import ServerContext
from tests import problems

SIZE, ROUNDS, DEVIATION = 20_000, 8, 1.5 * 2.0 / 4
CONTEXT = ServerContext(4, 2.0, jnp.arange(4), jnp.ones(4, bool))


def nodes(t):
    """The nodes (level, number) whose sum is that of rounds 1 to t."""
    return {(level, t >> level) for level in range(t.bit_length()) if (t >> level) % 2}


def sums_of_noise(rounds, tree=ROUNDS, seed=0):
    """The noise in the sum of all averages after each round, `[rounds, SIZE]`."""
    transform = uploads.noise(1.5, reproducible=True, tree=tree)
    zeros = {"w": jnp.zeros(SIZE)}

    def step(kept, key):
        noised, kept = transform.server(key, zeros, CONTEXT, kept, ())
        return kept, noised["w"]

    start = transform.init_server(jax.random.key(seed), zeros)
    _, added = jax.lax.scan(step, start, jax.random.split(jax.random.key(1), rounds))
    return np.cumsum(np.asarray(added), 0)


def test_sums_share_the_noise_of_their_common_nodes():
    """Variance and covariance count nodes; all z scores of the 2 * 8 rounds' products together, in two trees."""
    noise = sums_of_noise(2 * ROUNDS) / DEVIATION
    noise[ROUNDS:] -= noise[ROUNDS - 1]  # the second tree by itself
    tree = [(t // ROUNDS, nodes(t % ROUNDS + 1)) for t in range(2 * ROUNDS)]
    common = np.array([[len(one & other) * (a == b) for b, other in tree] for a, one in tree])
    found = noise @ noise.T / SIZE
    size = np.diag(common)
    scores = (found - common) / np.sqrt((size[:, None] * size[None, :] + common**2) / SIZE)
    assert np.abs(scores).max() < stats.norm.isf(1e-3 / scores.size)
    assert np.abs(noise.mean(1) * np.sqrt(SIZE / size)).max() < 5
    assert size.max() == 3 and size[ROUNDS - 1] == 1  # t = 7 has three nodes, t = 8 one; independent noise would have 7 and 8


def test_each_round_is_in_no_more_nodes_than_the_depth_says():
    for rounds in range(1, 40):
        closed = set().union(*(nodes(t) for t in range(1, rounds + 1)))
        inside = [sum((number - 1) << level < t <= number << level for level, number in closed) for t in range(1, rounds + 1)]
        assert max(inside) == privacy.Trees(rounds).depth == math.ceil(math.log2(rounds + 1))


@pytest.mark.parametrize(("noise", "tree", "rounds"), [(3.0, 8, 8), (8.0, 10, 35), (20.0, 1, 50)])
def test_epsilon_is_that_of_one_gaussian_mechanism_a_tree(noise, tree, rounds):
    found = privacy.epsilon(noise, rounds, 1e-5, privacy.Trees(tree)).epsilon
    trees, depth = math.ceil(rounds / tree), math.ceil(math.log2(tree + 1))
    assert privacy.gaussian_delta(found, noise / math.sqrt(trees * depth)) == pytest.approx(1e-5, rel=1e-8)
    dp = pytest.importorskip("dp_accounting")
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp.SingleEpochTreeAggregationDpEvent(noise, tree), trees)
    renyi = accountant.get_epsilon(1e-5)
    assert 0.8 * renyi < found < renyi


def test_passes_give_each_client_one_round_in_a_pass_and_other_orders_later():
    drawn = np.array([schedules.passes(3)(jax.random.key(0), jnp.int32(t), 11, 3) for t in range(9)]).reshape(3, -1)
    assert [len(set(row.tolist())) for row in drawn] == [9, 9, 9]
    assert drawn.min() == 0 and drawn.max() == 10
    assert not (drawn[0] == drawn[1]).all()
    with pytest.raises(ValueError, match="cohort_size=12 is more than the N=11"):
        schedules.passes()(jax.random.key(0), 0, 11, 12)


def build(schedule, **options):
    chain = (uploads.clip(0.5), uploads.noise(2.0, tree=2, **options))
    return fm.federate(fm.fedavg(problems.task()), fm.Federation(cohort_size=3, devices=1, schedule=schedule, uploads=chain))


def test_a_run_says_its_epsilon_and_goes_on_from_its_state():
    """Nothing but the state says which noise comes next: rounds 3 and 4 from a copy of it are those of the whole run."""
    run, data = build(schedules.passes(1)), problems.data()
    found = privacy.spent(run.config, 4, 7, 1e-3)
    assert found.epsilon == privacy.epsilon(2.0, 4, 1e-3, privacy.Trees(2)).epsilon
    assert "each tree of 2 rounds" in str(found)
    step = jax.jit(run.round)
    state = first = jax.jit(run.init)(jax.random.key(0), data)
    for number in range(4):
        state = step(jax.random.key(number), state, data)[0]
        first = jax.tree.map(np.array, state) if number == 1 else first
    for number in (2, 3):
        first = step(jax.random.key(number), first, data)[0]
    assert all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(state)))
    # The secret is the operating system's: another run of the same seed has other noise.
    other = step(jax.random.key(0), jax.jit(run.init)(jax.random.key(0), data), data)[0]
    again = step(jax.random.key(0), jax.jit(run.init)(jax.random.key(0), data), data)[0]
    assert problems.distance(other.model, again.model) > 0.01


def test_what_trees_cannot_cover_is_refused():
    with pytest.raises(ValueError, match="trees of 2 rounds is accounted for under schedules.passes alone"):
        privacy.spent(build(schedules.uniform).config, 4, 7, 1e-3)
    with pytest.raises(ValueError, match=r"a pass \(N / C, here 3 rounds\) is a multiple of a tree"):
        privacy.spent(build(schedules.passes()).config, 4, 10, 1e-3)
    with pytest.raises(ValueError, match="a tree of noise needs one norm for all rounds, which adaptive_clip changes"):
        fm.Federation(uploads=(uploads.adaptive_clip(1.0, bit_noise=9.0), uploads.noise(1.0, tree=4)))
    for rounds in (0, 2.5):
        with pytest.raises(ValueError, match=f"tree={rounds} must be an integer of at least 1"):
            uploads.noise(1.0, tree=rounds)
