"""Robust aggregation by the distances between whole uploads: Krum, Bulyan and the geometric median.

Every rule takes stacked uploads (leaves `[C, ...]`) and weights `[C]`. C is static; n, how many clients returned, is traced. A
client whose weight is not above 0 did not return. An upload that is not finite counts as one that did not return, too. Clients
that returned count equally, because a client could lie about its number of samples. The result is exactly 0 when no client
returned, and a client's own upload when it alone did. f is the number of attackers that a rule shall withstand. Its guarantee
needs n as large as the rule says; with fewer, a rule still gives a number, without the guarantee.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.aggregate.means import sum_clients, weights_of, wide
from fedjax_meta.aggregate.ranks import median, sort_clients
from fedjax_meta.aggregate.rule import Aggregator
from fedjax_meta.numerics.units import power_of_two
from fedjax_meta.types import PyTree, Rate


def krum(f: int) -> Aggregator:
    """The one upload that lies nearest to its n - f - 2 nearest neighbours.

    Blanchard, El Mhamdi, Guerraoui, Stainer: "Machine learning with adversaries: Byzantine tolerant gradient descent", NIPS 2017,
    section 4: the score of client i is the sum of its squared distances to its n - f - 2 nearest others, and the upload of the
    least score is taken; of equals that with the least distances to all, then the first. It withstands f of n attackers for
    2 f + 2 < n.

    Args:
      f: attackers, at least 0.

    Raises:
      ValueError: a negative f; on use, f >= (C - 2) / 2.

    Example:
      >>> krum(1)(jnp.array([1.0, 1.1, 9.0, 1.3, 0.9]), jnp.ones(5)).round(1).tolist()
      1.0
    """
    checks.count("f", f, least=0)
    return partial(_multi_krum, f=f, m=1)


def multi_krum(f: int, m: int | None = None) -> Aggregator:
    """The mean of the m uploads with the least scores of `krum` (Blanchard et al. 2017, section 4, "Multi-Krum").

    m = 1 is Krum, and m = n the plain mean. It withstands f of n attackers for 2 f + 2 < n and m <= n - f - 2 (El Mhamdi,
    Guerraoui, Rouault 2018).

    Args:
      f: attackers, at least 0.
      m: uploads in the mean, at most all that returned; n - f - 2 when not given.

    Raises:
      ValueError: a negative f, m below 1; on use, f >= (C - 2) / 2 or m > C.
    """
    checks.count("f", f, least=0)
    if m is not None:
        checks.count("m", m)
    return partial(_multi_krum, f=f, m=m)


def bulyan(f: int) -> Aggregator:
    """Selects n - 2 f uploads by repeated Krum, and averages for each number the n - 4 f values nearest to their median.

    El Mhamdi, Guerraoui, Rouault: "The hidden vulnerability of distributed learning in Byzantium", ICML 2018, section 4. Each
    step takes Krum's choice among the uploads that are left, and scores these anew, by one neighbour at least. It withstands f of
    n attackers for n >= 4 f + 3, in every coordinate.

    Args:
      f: attackers, at least 0.

    Raises:
      ValueError: a negative f; on use, C < 4 f + 3.
    """
    checks.count("f", f, least=0)
    return partial(_bulyan, f=f)


def geometric_median(iterations: int = 10, smoothing: Rate = 1e-6) -> Aggregator:
    """The point with the least sum of distances to the uploads, by Weiszfeld steps.

    RFA: Pillutla, Kakade, Harchaoui: "Robust aggregation for federated learning", IEEE Transactions on Signal Processing 2022,
    arXiv 1912.13445. It withstands fewer than half of the clients. Differs from the paper: clients count equally; the steps start
    from the median of each number, which is robust already, so that few are enough; and at an upload they are those of Vardi and
    Zhang ("The multivariate L1-median and associated data depth", PNAS 2000), where the paper's smoothed ones hardly move.

    Args:
      iterations: Weiszfeld steps, at least 1.
      smoothing: nu, above 0: the distance within which the point counts as being at an upload. It is in the units of the
        uploads: where they lie no further apart than this, the result stays near the median of each number.

    Raises:
      ValueError: an option out of range.
    """
    checks.count("iterations", iterations)
    checks.positive("smoothing", smoothing)
    return partial(_geometric_median, iterations=iterations, smoothing=smoothing)


def present(stacked: PyTree, weight: jax.Array) -> jax.Array:
    """Bool `[C]`: whose uploads returned and are finite."""
    weight = weights_of(stacked, weight)
    finite = [jnp.all(jnp.isfinite(wide(leaf)), tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(stacked)]
    return jnp.all(jnp.stack([weight > 0, *finite]), 0)


def cleaned(stacked: PyTree, there: jax.Array) -> PyTree:
    """Leaves `[C, ...]` in at least 32 bits, with zeros for the clients that are not `there`."""
    return jax.tree.map(lambda leaf: jnp.where(along(there, leaf), wide(leaf), 0), stacked)


def along(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """`values` `[C]` in a shape that broadcasts against a leaf `[C, ...]`."""
    return values.reshape(-1, *[1] * (leaf.ndim - 1))


def norms(stacked: PyTree) -> jax.Array:
    """The Euclidean norm of each upload over all leaves, `[C]`; the largest finite number where it is larger."""
    scaled, unit = in_units(stacked)
    return jnp.minimum(jnp.sqrt(products(scaled, scaled)) * unit, jnp.finfo(unit.dtype).max)


def in_units(stacked: PyTree) -> tuple[PyTree, jax.Array]:
    """(the uploads, each divided by a power of 2 near its largest number, these powers `[C]`)."""
    sizes = jax.tree.map(lambda leaf: jnp.max(jnp.abs(leaf), tuple(range(1, leaf.ndim)), initial=0), stacked)
    unit = power_of_two(jnp.max(jnp.stack(jax.tree.leaves(sizes)), 0))
    return jax.tree.map(lambda leaf: leaf / along(unit, leaf).astype(leaf.dtype), stacked), unit


def products(a: PyTree, b: PyTree) -> jax.Array:
    """The inner product of each client's trees over all leaves, `[C]`."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.reshape(x.shape[0], -1), y.reshape(y.shape[0], -1)
        return jnp.einsum("cd,cd->c", x, y, precision=jax.lax.Precision.HIGHEST)

    return sum(jax.tree.leaves(jax.tree.map(one, a, b)), start=jnp.zeros(()))


def average(stacked: PyTree, share: jax.Array) -> PyTree:
    """The sum over clients of `share` `[C]` times leaf `[C, ...]`; exactly 0 where the shares are."""
    return jax.tree.map(lambda leaf: sum_clients(leaf, share), stacked)


def equal_shares(there: jax.Array) -> jax.Array:
    """Shares `[C]` that are equal for the clients that are `there`, and 0 for the others."""
    return there / jnp.maximum(jnp.sum(there), 1)


def like(tree: PyTree, stacked: PyTree) -> PyTree:
    """The tree in the types of the uploads."""
    return jax.tree.map(lambda leaf, of: leaf.astype(of.dtype), tree, stacked)


def squared_distances(stacked: PyTree) -> jax.Array:
    """Between every two uploads, over all leaves, `[C, C]`."""

    # Differences rather than inner products of uploads: an attacker's large numbers would cost the others' all digits.
    def from_one(i: jax.Array) -> jax.Array:
        apart = jax.tree.map(lambda leaf: leaf - leaf[i], stacked)
        return products(apart, apart)

    return jax.lax.map(from_one, jnp.arange(jax.tree.leaves(stacked)[0].shape[0]))


def _order(square: jax.Array, there: jax.Array, f: int) -> jax.Array:
    """Clients by their score of Krum, the least first and those that are not there last, int `[C]`."""
    others = there[:, None] & there[None, :] & ~jnp.eye(len(there), dtype=bool)
    count = jnp.sum(there)
    near = jnp.clip(count - f - 2, 1, jnp.maximum(count - 1, 0))
    ordered = jnp.sort(jnp.where(others, square, jnp.inf), 1)
    score = jnp.sum(ordered, 1, where=jnp.arange(len(there)) < near)
    # With one neighbour, two uploads that are each other's nearest have equal scores.
    return jnp.lexsort((jnp.sum(square, 1, where=others), score, ~there))


def _multi_krum(stacked: PyTree, weight: jax.Array, *, f: int, m: int | None) -> PyTree:
    there = present(stacked, weight)
    clients = len(there)
    if 2 * f + 2 >= clients:
        raise ValueError(f"f={f} is too many for krum with C={clients} clients: it must be below (C - 2) / 2")
    if m is not None and m > clients:
        raise ValueError(f"m={m} is more than the C={clients} clients of a cohort")
    clean = cleaned(stacked, there)
    best = _order(squared_distances(clean), there, f)
    wanted = jnp.maximum(jnp.sum(there) - f - 2, 1) if m is None else m
    chosen = jnp.zeros(clients, bool).at[best].set(jnp.arange(clients) < wanted) & there
    return like(average(clean, equal_shares(chosen)), stacked)


def _bulyan(stacked: PyTree, weight: jax.Array, *, f: int) -> PyTree:
    there = present(stacked, weight)
    clients = len(there)
    if clients < 4 * f + 3:
        raise ValueError(f"f={f} is too many for bulyan with C={clients} clients: C must be at least 4 f + 3 = {4 * f + 3}")
    clean = cleaned(stacked, there)
    square, selected = squared_distances(clean), jnp.maximum(jnp.sum(there) - 2 * f, jnp.minimum(jnp.sum(there), 1))

    def step(t: Any, taken: jax.Array) -> jax.Array:
        best = _order(square, there & ~taken, f)[0]
        return taken.at[best].set(taken[best] | (t < selected))

    taken = jax.lax.fori_loop(0, clients - 2 * f, step, jnp.zeros(clients, bool)) & there
    # Of an even number the two in the middle are equally near to the median.
    kept = jnp.maximum(selected - 2 * f, 2 - selected % 2)
    centre = median(clean, taken.astype(jnp.float32))

    def nearest(leaf: jax.Array, middle: jax.Array) -> jax.Array:
        # Of sorted values, those nearest to a point follow each other: the window whose further end is nearest has them.
        ordered = sort_clients(jnp.where(along(taken, leaf), leaf, jnp.inf))
        first = jnp.arange(clients)
        end = jnp.take(ordered, jnp.minimum(first + kept - 1, clients - 1), 0)
        reach = jnp.where(along(first + kept <= selected, leaf), jnp.maximum(middle - ordered, end - middle), jnp.inf)
        begin = jnp.argmin(reach, 0)
        inside = (along(first, leaf) >= begin) & (along(first, leaf) < begin + jnp.minimum(kept, selected))
        return sum_clients(jnp.where(inside, ordered, 0)) / kept.astype(leaf.dtype)

    return like(jax.tree.map(nearest, clean, centre), stacked)


def _geometric_median(stacked: PyTree, weight: jax.Array, *, iterations: int, smoothing: Rate) -> PyTree:
    there = present(stacked, weight)
    clean = cleaned(stacked, there)

    def step(_: Any, centre: PyTree) -> PyTree:
        distance = norms(jax.tree.map(jnp.subtract, clean, centre))
        at = there & (distance <= smoothing)
        share = jnp.where(there & ~at, 1 / jnp.maximum(distance, smoothing), 0)
        tiny = jnp.finfo(share.dtype).tiny
        total = jnp.maximum(jnp.sum(share), tiny)
        way = jax.tree.map(jnp.subtract, average(clean, share / total), centre)
        # Each upload at the point holds it back with a force of 1, against the sum of the unit vectors to the others.
        held = jnp.minimum(jnp.sum(at) / jnp.maximum(total * optax.tree.norm(way), tiny), 1)
        return jax.tree.map(lambda leaf, by: leaf + (1 - held).astype(leaf.dtype) * by, centre, way)

    return like(jax.lax.fori_loop(0, iterations, step, median(clean, there.astype(jnp.float32))), stacked)
