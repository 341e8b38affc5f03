"""Central noise: the server adds Gaussian noise to the average of clipped uploads, for differential privacy of clients.

DP-FedAvg: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018, arXiv
1710.06963, with a fixed divisor (their estimator f_f) and clients that count alike.

The option `tree` is after DP-FTRL: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning without
sampling or shuffling", ICML 2021, arXiv 2103.00039. The noise of all sums up to a round comes from the nodes of a binary tree, so
that its variance grows with the logarithm of the rounds. Each node's noise follows from a key, and no node is kept: a round adds
the noise of the node that it closes and takes back that of the nodes which this one replaces.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.types import Key, PyTree, Scalar
from fedjax_meta.uploads.secret import init_secret, with_secret
from fedjax_meta.uploads.transform import ServerContext, UploadTransform, per_leaf


def noise(multiplier: Scalar, *, reproducible: bool = False, tree: int | None = None) -> UploadTransform:
    """Adds noise of deviation `multiplier * S / m` to each number of the average; S is the norm of the `clip` before it.

    The divisor m is fixed: the cohort size C, or q N under `schedules.poisson`, even if some clients do not return; all clients
    count equally. One client moves the sum by at most S, or by 2 S where it is replaced. What that guarantees depends on how
    cohorts are drawn: `privacy.epsilon`, and docs/privacy.md.

    The guarantee covers the server's state, which all clients see. It does not cover personal leaves and memories, which stay
    with their client (a method whose new clients read those of others is refused), nor metrics and faults, which a deployment
    would not send. Buffers and averaged optimiser slots that must be positive (a variance) may turn negative under noise: let
    clients keep these.

    Args:
      multiplier: z, at least 0; may be traced.
      reproducible: whether the noise follows from the run's seed, for studies. Otherwise its key also holds 64 bits of the
        operating system's randomness, drawn once at `init` and kept in `State.aggregation`. A run that is resumed from a
        checkpoint goes on exactly; the checkpoint is a secret as long as the guarantee is to hold.
      tree: T, the rounds of a tree, for DP-FTRL. The sum of the averages of t rounds of a tree then has noise of variance b times
        that of one round, b being how many ones t has as a binary number, instead of t times; after T rounds a new tree
        begins. Every node has the deviation above. Each client may take part once in a tree, as under
        `schedules.passes`: `privacy.Trees`. The server's rate should be constant. Not with `adaptive_clip`.

    Raises:
      ValueError: a negative multiplier; on `init`, several processes without `reproducible`.
    """
    checks.not_negative("multiplier", multiplier)
    checks.flag("reproducible", reproducible)
    if tree is not None:
        checks.count("tree", tree)

    def server(key: Key, average: PyTree, context: ServerContext, kept: PyTree, measured: PyTree) -> tuple[PyTree, PyTree]:
        del measured
        draw = jax.random.normal
        if tree is not None:
            words, done = kept
            key = jax.random.fold_in(jax.random.wrap_key_data(words), done // tree)
            draw, kept = partial(_closed, done % tree + 1), (words, done + 1)
        elif not reproducible:
            key = with_secret(key, kept)
        # 1 / z^2 is what all releases together may spend, 1 / deviation^2 each.
        effective: Any = jnp.where(multiplier > 0, multiplier / jnp.sqrt(1 - multiplier**2 * context.spent), 0)
        deviation = effective * context.clip_norm / context.divisor

        def noisy(key: Key, leaf: jax.Array) -> jax.Array:
            wide = jnp.promote_types(leaf.dtype, jnp.float32)
            return (leaf.astype(wide) + deviation * draw(key, leaf.shape, wide)).astype(leaf.dtype)

        return per_leaf(noisy, key, average), kept

    def begin_trees(key: Key, upload: PyTree) -> tuple[jax.Array, jax.Array]:
        """What the noise of all nodes follows from, and how many rounds are done."""
        key = key if reproducible else with_secret(key, init_secret(key, upload))
        return jax.random.key_data(key), jnp.zeros((), jnp.int32)

    plain = (lambda key, upload: ()) if reproducible else init_secret
    return UploadTransform(
        name="noise",
        server=server,
        init_server=plain if tree is None else begin_trees,
        fixed_divisor=True,
        config={"multiplier": multiplier, "reproducible": reproducible} | ({} if tree is None else {"tree": tree}),
    )


def _closed(t: jax.Array, key: Key, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Noise added in round t: noise of the tree node that ends at t, minus noise of the nodes inside it."""

    def add(level: jax.Array, total: jax.Array) -> jax.Array:
        top = (t >> level) % 2 == 1
        node = jnp.where(top, t, t - 1) >> level
        drawn = jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, level), node), shape, dtype)
        return total + jnp.where(top, drawn, -drawn)

    # The node of round t has as many levels as t has zeros at its end.
    zeros = jax.lax.population_count((t & -t) - 1)
    return jax.lax.fori_loop(0, zeros + 1, add, jnp.zeros(shape, dtype))
