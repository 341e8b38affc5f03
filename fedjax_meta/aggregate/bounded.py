"""Aggregation of uploads whose norms the server bounds: norm bounding, centred clipping, and FLTrust.

Conventions as in `distances`. These rules are about how large an upload is, so that buffers (batch-norm statistics) are sent by
how much they moved.
"""

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.aggregate.distances import along, average, cleaned, equal_shares, in_units, like, norms, present, products
from fedjax_meta.aggregate.means import wide
from fedjax_meta.aggregate.ranks import median
from fedjax_meta.aggregate.rule import Rule
from fedjax_meta.data import ClientData
from fedjax_meta.types import Key, PyTree, Rate


def norm_bounding(bound: Rate | None = None) -> Rule:
    """The mean of the uploads, each scaled down to a norm of at most `bound`.

    Sun, Kairouz, Suresh, McMahan: "Can you really backdoor federated learning?", arXiv 1911.07963, section 4. An upload
    adds at most bound / n to the mean, whatever it holds, so that an attacker moves it by at most 2 bound / n. No share of
    attackers is excluded, and none is withstood altogether. With the median as the bound, attackers move the bound, too.

    Args:
      bound: M, above 0; when not given, the median of the norms in each round (as in FLAME: Nguyen et al., "FLAME: taming
        backdoors in federated learning", USENIX Security 2022, Algorithm 1).

    Raises:
      ValueError: a bound that is not above 0.
    """
    if bound is not None:
        checks.positive("bound", bound)

    def combine(key: Key, stacked: PyTree, weight: jax.Array, memory: PyTree, reference: PyTree) -> tuple[PyTree, PyTree]:
        del key, reference
        there = present(stacked, weight)
        clean = cleaned(stacked, there)
        return like(average(clean, equal_shares(there) * _factor(norms(clean), bound, there)), stacked), memory

    return Rule(name="norm_bounding", combine=combine, differences=True, config={"bound": bound})


def centered_clipping(radius: Rate | None = None, iterations: int = 1) -> Rule:
    """Starts from the last aggregate v and moves by the mean of the differences to it, each clipped to `radius`.

    Karimireddy, He, Jaggi: "Learning from history for Byzantine robust optimization", ICML 2021, Algorithm 2:
    v <- v + 1/n sum_i (x_i - v) min(1, radius / |x_i - v|), `iterations` times. With few attackers (below about a tenth) the
    error shrinks with their share. Differs from the paper: uploads take the place of its workers' momenta. The first v is 0. A
    single client is its own aggregate only where it lies within `radius` of v.

    Args:
      radius: tau, above 0; when not given, the median distance to v.
      iterations: at least 1.

    Raises:
      ValueError: an option out of range.
    """
    if radius is not None:
        checks.positive("radius", radius)
    checks.count("iterations", iterations)

    def combine(key: Key, stacked: PyTree, weight: jax.Array, memory: PyTree, reference: PyTree) -> tuple[PyTree, PyTree]:
        del key, reference
        there = present(stacked, weight)
        clean, centre = cleaned(stacked, there), memory
        for _ in range(iterations):
            apart = jax.tree.map(lambda leaf, v: jnp.where(along(there, leaf), _finite(leaf - v), 0), clean, centre)
            share = equal_shares(there) * _factor(norms(apart), radius, there)
            centre = jax.tree.map(lambda v, move: _finite(v + move), centre, average(apart, share))
        some = jnp.any(there)
        return like(jax.tree.map(lambda leaf: jnp.where(some, leaf, 0), centre), stacked), centre

    return Rule(
        name="centered_clipping",
        combine=combine,
        init=lambda upload: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), upload
        ),
        differences=True,
        config={"radius": radius, "iterations": iterations},
    )


def fltrust(root: ClientData) -> Rule:
    """The mean of the uploads by trust: the cosine with what the server's own samples give, and 0 where that is negative.

    Cao, Fang, Liu, Gong: "FLTrust: Byzantine-robust federated learning via trust bootstrapping", NDSS 2021, Algorithm 2: each
    upload is scaled to the norm of the server's, and weighs ReLU(cosine). The result is 0 where no upload has a positive cosine.
    Parts without a reference are averaged. It withstands any number of attackers if the server's samples resemble the clients'.

    Args:
      root: the server's samples, with the views that the method trains on, e.g. `data.client(0)` of data of the server's own.

    Raises:
      ValueError: a `root` that is not a client's data.
    """
    if not isinstance(root, ClientData):
        raise ValueError(f"root must be the data of the server, e.g. data.client(0), not {type(root).__name__}")
    return Rule(name="fltrust", combine=_by_trust, root=root, differences=True)


def _by_trust(key: Key, stacked: PyTree, weight: jax.Array, memory: PyTree, reference: PyTree) -> tuple[PyTree, PyTree]:
    del key
    there = present(stacked, weight)
    if reference is None:
        return like(average(cleaned(stacked, there), equal_shares(there)), stacked), memory
    # Each in units of its own: it is scaled to the server's norm anyway, and the squares of huge numbers stay finite.
    (clean, _), reference = in_units(cleaned(stacked, there)), jax.tree.map(wide, reference)
    inner = products(clean, jax.tree.map(lambda leaf, r: jnp.broadcast_to(r, leaf.shape), clean, reference))
    size, target = norms(clean), norms(jax.tree.map(lambda leaf: leaf[None], reference))[0]
    usable = there & (size > 0) & (target > 0)
    scale = jnp.where(usable, target / jnp.where(usable, size, 1), 0)
    cosine = inner / jnp.where(usable, size * target, 1)
    trust = jnp.where(usable, jnp.maximum(cosine, 0), 0)
    total = jnp.sum(trust)
    return like(average(clean, jnp.where(total > 0, trust * scale / jnp.where(total > 0, total, 1), 0)), stacked), memory


def _finite(leaf: jax.Array) -> jax.Array:
    """Numbers of at most the largest finite one: a difference of two may be larger, and would stay in the memory for ever."""
    most = jnp.finfo(leaf.dtype).max
    return jnp.clip(leaf, -most, most)


def _factor(size: jax.Array, bound: Rate | None, there: jax.Array) -> jax.Array:
    """By how much each upload of norm `size` `[C]` is scaled down; `bound` is the median norm when not given."""
    most = median(size, there) if bound is None else bound
    return jnp.minimum(1, most / jnp.maximum(size, jnp.finfo(size.dtype).tiny))
