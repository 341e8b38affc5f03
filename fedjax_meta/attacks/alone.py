"""Attacks on what is sent, by each attacker for itself: flipped signs and noise."""

from collections.abc import Sequence

import jax

from fedjax_meta import checks
from fedjax_meta.attacks.attack import Attack, scaled
from fedjax_meta.types import Key, PyTree, Rate


def sign_flip(attackers: float | Sequence[int], *, scale: Rate = 1.0, seed: int = 0) -> Attack:
    """Attackers send their change times `-scale`.

    Li, Xu, Chen, Giannakis, Ling: "RSA: Byzantine-robust stochastic aggregation methods", AAAI 2019, section 5.

    Args:
      attackers, seed: as in `Attack`.
      scale: above 0.

    Raises:
      ValueError: a scale that is not above 0.
    """
    checks.positive("scale", scale)
    return Attack(name="sign_flip", attackers=attackers, seed=seed, lie=scaled(-1 * scale), config={"scale": scale})


def gaussian(attackers: float | Sequence[int], *, deviation: Rate = 1.0, seed: int = 0) -> Attack:
    """Attackers send Gaussian noise of mean 0 in place of their change.

    Blanchard et al., NIPS 2017, section 5, with a deviation of 200 in gradients.

    Args:
      attackers, seed: as in `Attack`.
      deviation: standard deviation of each number, above 0.

    Raises:
      ValueError: a deviation that is not above 0.
    """
    checks.positive("deviation", deviation)

    def lie(key: Key, change: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(change)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        noise = [deviation * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, noise)

    return Attack(name="gaussian", attackers=attackers, seed=seed, lie=lie, config={"deviation": deviation})
