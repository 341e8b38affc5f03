"""Attacks that see what honest clients send, and send one lie: ALIE, inner-product manipulation, min-max and min-sum."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.aggregate.distances import average, equal_shares, norms, products, squared_distances
from fedjax_meta.attacks.attack import Attack
from fedjax_meta.types import PyTree, Rate, Scalar


def alie(attackers: float | Sequence[int], *, z: Rate | None = None, seed: int = 0) -> Attack:
    """ "A little is enough": attackers send the honest mean less z standard deviations of each number.

    Baruch, Baruch, Goldberg: "A little is enough: circumventing defenses for distributed learning", NeurIPS 2019, Algorithm 3.
    Mean and deviation are those of the honest clients, where the paper estimates them from the attackers' own data.

    Args:
      attackers, seed: as in `Attack`.
      z: how many deviations; when not given the paper's largest, the normal quantile of (n - m - s) / (n - m) with
        s = floor(n / 2 + 1) - m, of n clients that returned, m of which attack.
    """
    if z is not None:
        checks.not_negative("z", z)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        mean, deviation = _moments(changes, honest)
        amount = largest_z(jnp.sum(honest | liars), jnp.sum(liars)) if z is None else z
        return jax.tree.map(lambda m, d: m - jnp.asarray(amount, m.dtype) * d, mean, deviation)

    return Attack(name="alie", attackers=attackers, seed=seed, conspire=conspire, config={"z": z})


def largest_z(clients: Scalar, attackers: Scalar) -> jax.Array:
    """z_max of "A little is enough", equation 3.

    With it, fewer than half of the honest uploads are further from the mean than the attack.

    Example:
      >>> round(float(largest_z(50, 24)), 2)  # (50 - 24 - 2) / 26
      1.43
    """
    supporters = jnp.floor(clients / 2 + 1) - attackers
    share = (clients - attackers - supporters) / jnp.maximum(clients - attackers, 1)
    # At half of the clients or more there is no bound.
    return jax.scipy.special.ndtri(jnp.clip(share, 1e-6, 1 - 1e-6))


def ipm(attackers: float | Sequence[int], *, scale: Rate = 0.5, seed: int = 0) -> Attack:
    """Inner-product manipulation: attackers send the honest mean times `-scale`.

    Xie, Koyejo, Gupta: "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2019, equation 1.

    Args:
      attackers, seed: as in `Attack`.
      scale: epsilon, above 0: small values (0.1 to 0.5) against Krum and medians, large ones against means.
    """
    checks.positive("scale", scale)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        del liars
        return jax.tree.map(lambda leaf: jnp.asarray(-scale, leaf.dtype) * leaf, average(changes, equal_shares(honest)))

    return Attack(name="ipm", attackers=attackers, seed=seed, conspire=conspire, config={"scale": scale})


DIRECTIONS = ("deviation", "sign", "unit")
"""What attackers of `min_max` move along, see there."""


def min_max(attackers: float | Sequence[int], *, direction: str = "deviation", seed: int = 0) -> Attack:
    """Attackers move the honest mean so far that they are no further from any honest change than two of these are apart.

    Shejwalkar, Houmansadr: "Manipulating the Byzantine: optimizing model poisoning attacks and defenses for federated learning",
    NDSS 2021, section IV-C. They send mean + gamma * p with the largest gamma. Differs from the paper: gamma is the root of a
    quadratic equation instead of the end of a search.

    Args:
      attackers, seed: as in `Attack`.
      direction: p, the negative of the deviation of each number ("deviation"), of the sign of the mean ("sign"), or of the mean
        over its norm ("unit").

    Raises:
      ValueError: an unknown direction.
    """
    checks.one_of("direction", direction, DIRECTIONS)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        del liars
        mean, p = _mean_and_direction(changes, honest, direction)
        apart = jax.tree.map(lambda m, leaf: m - leaf, mean, changes)
        pairs = honest[:, None] & honest[None, :]
        most = jnp.max(squared_distances(changes), where=pairs, initial=0)
        # |m + gamma p - x_i|^2 = a gamma^2 + 2 b_i gamma + c_i <= most for every honest i.
        a, c = norms(jax.tree.map(lambda leaf: leaf[None], p))[0] ** 2, norms(apart) ** 2
        b = products(apart, jax.tree.map(lambda leaf, v: jnp.broadcast_to(v, leaf.shape), apart, p))
        root = (-b + jnp.sqrt(jnp.maximum(b**2 + a * (most - c), 0))) / jnp.where(a > 0, a, 1)
        gamma = jnp.where(a > 0, jnp.min(root, where=honest, initial=jnp.inf), 0)
        return _moved(mean, gamma, p)

    return Attack(name="min_max", attackers=attackers, seed=seed, conspire=conspire, config={"direction": direction})


def min_sum(attackers: float | Sequence[int], *, direction: str = "deviation", seed: int = 0) -> Attack:
    """As `min_max`, with sums: no further from all honest changes than the outermost of these is (squared distances).

    Shejwalkar, Houmansadr, NDSS 2021, section IV-C.

    Args:
      attackers, direction, seed: as in `min_max`.

    Raises:
      ValueError: an unknown direction.
    """
    checks.one_of("direction", direction, DIRECTIONS)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        del liars
        mean, p = _mean_and_direction(changes, honest, direction)
        sums = jnp.sum(squared_distances(changes), 1, where=honest[None, :])
        most = jnp.max(sums, where=honest, initial=0)
        # sum_i |m + gamma p - x_i|^2 = n a gamma^2 + sum_i |m - x_i|^2, because the differences from the mean add up to 0.
        spread = jnp.sum(norms(jax.tree.map(lambda m, leaf: m - leaf, mean, changes)) ** 2, where=honest)
        a = jnp.sum(honest) * norms(jax.tree.map(lambda leaf: leaf[None], p))[0] ** 2
        gamma = jnp.where(a > 0, jnp.sqrt(jnp.maximum(most - spread, 0) / jnp.where(a > 0, a, 1)), 0)
        return _moved(mean, gamma, p)

    return Attack(name="min_sum", attackers=attackers, seed=seed, conspire=conspire, config={"direction": direction})


def _moments(changes: PyTree, honest: jax.Array) -> tuple[PyTree, PyTree]:
    """(mean, population standard deviation) of each number over the honest clients."""
    share = equal_shares(honest)
    mean = average(changes, share)
    square = average(jax.tree.map(lambda leaf, m: (leaf - m) ** 2, changes, mean), share)
    return mean, jax.tree.map(jnp.sqrt, square)


def _mean_and_direction(changes: PyTree, honest: jax.Array, direction: str) -> tuple[PyTree, PyTree]:
    mean, deviation = _moments(changes, honest)
    if direction == "deviation":
        return mean, jax.tree.map(jnp.negative, deviation)
    if direction == "sign":
        return mean, jax.tree.map(lambda leaf: -jnp.sign(leaf), mean)
    length = norms(jax.tree.map(lambda leaf: leaf[None], mean))[0]
    return mean, jax.tree.map(lambda leaf: -leaf / jnp.where(length > 0, length, 1).astype(leaf.dtype), mean)


def _moved(start: PyTree, amount: jax.Array, direction: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + amount.astype(a.dtype) * b, start, direction)
