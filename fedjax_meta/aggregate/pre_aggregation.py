"""Pre-aggregation, for clients with unlike data: uploads are mixed with others before an aggregator sees them.

Robust rules that compare uploads take honest clients with rare data for attackers. Mixed uploads are more alike. Conventions as
in `distances`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.aggregate.distances import along, cleaned, like, present, squared_distances
from fedjax_meta.aggregate.mixtures import combine as combined
from fedjax_meta.aggregate.rule import Aggregator, Rule, as_rule
from fedjax_meta.config import plain
from fedjax_meta.keys import tagged
from fedjax_meta.types import Key, PyTree


def nearest_neighbours(rule: Aggregator | Rule, f: int) -> Rule:
    """Replaces each upload by the mean of the n - f uploads that are nearest to it, itself included, and applies the rule.

    NNM: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan: "Fixing by mixing: a recipe for optimal Byzantine ML under
    heterogeneity", AISTATS 2023, Algorithm 2. With it, Krum, the geometric median and the trimmed mean are optimal in order for
    f < n / 2.

    Args:
      rule: an aggregator.
      f: attackers, at least 0.

    Raises:
      ValueError: a negative f; on use, f >= C / 2.
    """
    checks.count("f", f, least=0)
    inner = as_rule(rule)

    def combine(key: Key, stacked: PyTree, weight: jax.Array, memory: PyTree, reference: PyTree) -> tuple[PyTree, PyTree]:
        clients = len(weight)
        if 2 * f >= clients:
            raise ValueError(f"f={f} is too many for nearest_neighbours with C={clients} clients: it must be below C / 2")
        there = present(stacked, weight)
        clean = cleaned(stacked, there)
        square = jnp.where(there[None, :], squared_distances(clean), jnp.inf)
        rank = jnp.argsort(jnp.argsort(square, 1, stable=True), 1)
        near = (rank < jnp.maximum(jnp.sum(there) - f, 1)) & there[None, :]
        matrix = near / jnp.maximum(jnp.sum(near, 1, keepdims=True), 1)
        mixtures = like(combined(matrix, clean), stacked)
        return inner.combine(key, mixtures, there.astype(jnp.float32), memory, reference)

    return _around(rule, "nearest_neighbours", {"f": f}, combine)


def bucketing(rule: Aggregator | Rule, size: int = 2) -> Rule:
    """Averages the uploads in random buckets of `size`, and applies the rule to the ceil(n / size) means.

    Karimireddy, He, Jaggi: "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, Algorithm 1. Each
    attacker spoils at most one bucket, so that the rule must withstand f of n / size.

    Args:
      rule: an aggregator; it gets ceil(C / size) uploads.
      size: s, at least 1.

    Raises:
      ValueError: a size below 1, or, on use, above C; what the rule refuses.
    """
    checks.count("size", size)
    inner = as_rule(rule)

    def combine(key: Key, stacked: PyTree, weight: jax.Array, memory: PyTree, reference: PyTree) -> tuple[PyTree, PyTree]:
        clients = len(weight)
        if size > clients > 1:
            raise ValueError(f"size={size} of a bucket is more than the C={clients} clients of a cohort")
        there = present(stacked, weight)
        clean, buckets = cleaned(stacked, there), -(-clients // size)
        # Those that returned come first, in random order, so that their buckets are full.
        order = jnp.lexsort((jax.random.uniform(tagged(key, "buckets"), (clients,)), ~there))
        order = jnp.pad(order, (0, buckets * size - clients), constant_values=clients)

        def total(leaf: jax.Array) -> jax.Array:
            """The sum of each bucket."""
            members = leaf.at[order].get(mode="fill", fill_value=0)
            return jnp.sum(members.reshape(buckets, size, *leaf.shape[1:]), 1)

        count = total(there.astype(jnp.float32))

        def means(leaf: jax.Array) -> jax.Array:
            return total(leaf) / along(jnp.maximum(count, 1), leaf).astype(leaf.dtype)

        averaged = like(jax.tree.map(means, clean), stacked)
        return inner.combine(tagged(key, "rule"), averaged, (count > 0).astype(jnp.float32), memory, reference)

    return _around(rule, "bucketing", {"size": size}, combine)


def _around(rule: Aggregator | Rule, name: str, options: dict[str, Any], combine: Callable[..., Any]) -> Rule:
    """A rule that keeps the memory and the reference of the one inside."""
    config = {**options, "rule": plain(rule)}
    inner = as_rule(rule)
    return Rule(name=name, combine=combine, init=inner.init, root=inner.root, differences=inner.differences, config=config)
