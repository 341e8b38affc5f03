"""A classifier of K classes: a Gaussian process of two classes at each node of a tree of classes.

A client's classifier of `methods/fedgp.py`, whose citation names the source. Nodes of one level of the tree share no sample, so
that one Gram matrix with zeros between them serves all, and what is learned or predicted takes as many passes as the tree has
levels. M is the number of samples, B that of other inputs, D that of draws, d that of features, K that of classes.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta.numerics import linalg
from fedjax_meta.numerics.class_tree import Level, Tree, at_most, level_of
from fedjax_meta.numerics.gaussian_process import chance, gibbs, kernel, mean_field, posterior, posterior_of_parts
from fedjax_meta.types import Key, PyTree, Rate

JITTER = 1e-3
"""Added to the variance of every function value."""
_ROUNDING = 1e-3
"""Added to a share of samples before it is rounded down."""


class Process(NamedTuple):
    """The processes at all nodes: their kernel, and how omega is found.

    Attributes:
      output_scale, length_scale: of the kernel.
      by_gibbs: whether omega is drawn by Gibbs sampling; by the mean field without.
      steps: sweeps of the one, or steps of the other.
    """

    output_scale: Rate
    length_scale: Rate
    by_gibbs: bool
    steps: int

    def gram(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The kernel of features `[A, d]` and `[B, d]`."""
        return kernel(a, b, self.output_scale, self.length_scale)

    def covariance(self, z: jax.Array) -> jax.Array:
        """That of function values at features, with jitter, `[M, M]`."""
        gram = self.gram(z, z)
        return gram + JITTER * jnp.eye(len(z), dtype=gram.dtype)

    def variance(self, count: int, dtype: Any) -> jax.Array:
        """The diagonal of `covariance` of that many inputs."""
        return jnp.full(count, self.output_scale + JITTER, dtype)

    def root(self, covariance: jax.Array) -> jax.Array:
        """What `gibbs` draws the prior of all nodes with; the mean field draws nothing."""
        return linalg.cholesky(covariance) if self.by_gibbs else covariance

    def draws(self, number: int) -> int:
        """D: that number of chains, or the one omega of the mean field."""
        return number if self.by_gibbs else 1

    def omega(
        self, key: Key, level: Level, covariance: jax.Array, root: jax.Array, label: jax.Array, real: jax.Array, count: int
    ) -> jax.Array:
        """omega of the samples at their nodes of a level, `[D, M]`."""
        signs, covariance = signs_at(level, label, real, covariance.dtype), between(covariance, level, label, label)
        if not self.by_gibbs:
            return mean_field(covariance, signs, self.steps)
        return gibbs(jax.random.fold_in(key, level.number), covariance, signs, self.steps, count, root)


def signs_at(level: Level, label: jax.Array, real: jax.Array, dtype: Any) -> jax.Array:
    """kappa of each sample at its node: 1/2 in the left branch, -1/2 in the right one, 0 for a sample at no node; `[M]`."""
    at_node = level.node[label] < at_most(len(level.node))
    return jnp.where(at_node & real, jnp.where(level.left[label], 0.5, -0.5), 0).astype(dtype)


def between(matrix: jax.Array, level: Level, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """A covariance of samples with these labels, 0 where they are not at one node."""
    return jnp.where(level.node[rows][:, None] == level.node[columns][None], matrix, 0)


class Halves(NamedTuple):
    """Places of the samples in a batch that are learned from, and of those that are predicted, with whether they are real."""

    fit: jax.Array
    fits: jax.Array
    ask: jax.Array
    asks: jax.Array


def halves_of(label: jax.Array, real: jax.Array, number: jax.Array, held_out: Rate) -> Halves:
    """The first `held_out` of each class, rounded down, are asked; a batch is shuffled, so that these are a random share.

    Args:
      label, real: `[M]`.
      number: `[K]`, samples of each class.
      held_out: the share; unless it is traced, halves are no longer than they can get.
    """
    count, classes = len(label), len(number)
    member = jax.nn.one_hot(label, classes) * real[:, None]
    rank = jnp.sum(jnp.cumsum(member, 0) * member, 1) - 1
    asks = real & (rank < jnp.floor(held_out * number + _ROUNDING)[label])
    most_fit = most_asked = count
    if not isinstance(held_out, jax.core.Tracer):
        most_fit = min(count, math.ceil((1 - held_out) * count) + classes)
        most_asked = max(1, min(count, math.floor(held_out * count + _ROUNDING * classes)))
    fit, ask = jnp.argsort(~(real & ~asks))[:most_fit], jnp.argsort(~asks)[:most_asked]
    return Halves(fit, (real & ~asks)[fit], ask, asks[ask])


def predictive_loss(
    process: Process, key: Key, tree: Tree, z: jax.Array, label: jax.Array, halves: Halves, draws: int
) -> jax.Array:
    """Cross-entropy of the asked samples at their nodes, given the others: means over the samples of a node, summed.

    Its gradient by the features holds omega.

    Args:
      process, tree: see there.
      key: consumed.
      z, label: features and labels of a batch, `[M, d]` and `[M]`.
      halves: which of them are asked.
      draws: chains of omega.
    """
    y_fit, y_ask = label[halves.fit], label[halves.ask]

    def of_level(covariance: jax.Array, cross: jax.Array, root: jax.Array, level: Level) -> jax.Array:
        signs = signs_at(level, y_fit, halves.fits, covariance.dtype)
        omega = process.omega(key, level, jax.lax.stop_gradient(covariance), root, y_fit, halves.fits, draws)
        within, cross = between(covariance, level, y_fit, y_fit), between(cross, level, y_fit, y_ask)
        variance = process.variance(len(y_ask), cross.dtype)
        p = jnp.mean(chance(*jax.vmap(lambda drawn: posterior(within, signs, drawn, cross, variance))(omega)), 0)
        here = jax.nn.one_hot(level.node[y_ask], at_most(tree.left.shape[1]), dtype=p.dtype) * halves.asks[:, None]
        value = jnp.log(jnp.where(level.left[y_ask], p, 1 - p) + 1e-12)
        return -jnp.sum(value @ here / jnp.maximum(jnp.sum(here, 0), 1))

    given = process.covariance(z[halves.fit]), process.gram(z[halves.fit], z[halves.ask])
    at = jax.lax.stop_gradient(given)
    root = process.root(at[0])

    def add(number: Any, total: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(of_level, (0, 1))(*at, root, level_of(tree, number)))

    # A loop over as many levels as there are has no derivative; the value and slopes that it adds up make one.
    zero = jnp.zeros((), at[0].dtype), jax.tree.map(jnp.zeros_like, at)
    value, slopes = jax.lax.stop_gradient(jax.lax.fori_loop(0, tree.depth, add, zero))
    moved = jax.tree.map(lambda slope, now, then: jnp.sum(slope * (now - then)), slopes, given, at)
    return value + sum(moved)


class Classifier(NamedTuple):
    """What a client predicts with.

    Attributes:
      z, label: features and labels of its samples, `[M, d]` and `[M]`; a label of -1 is padding.
      tree: of the classes.
      omega: of its samples at each level of the tree, `[K - 1, D, M]`.
    """

    z: jax.Array
    label: jax.Array
    tree: Tree
    omega: jax.Array


def fit(process: Process, key: Key, tree: Tree, z: jax.Array, label: jax.Array, real: jax.Array, draws: int) -> Classifier:
    """The classifier of samples; arguments as in `predictive_loss`, real as in `halves_of`."""
    covariance = process.covariance(z)
    root = process.root(covariance)

    def at_level(number: Any, omega: jax.Array) -> jax.Array:
        return omega.at[number].set(process.omega(key, level_of(tree, number), covariance, root, label, real, draws))

    empty = jnp.zeros((len(tree.left), process.draws(draws), len(z)), covariance.dtype)
    return Classifier(z, jnp.where(real, label, -1), tree, jax.lax.fori_loop(0, tree.depth, at_level, empty))


def log_chances(process: Process, classifier: Classifier, z: jax.Array) -> jax.Array:
    """The logarithms of the classes' probabilities at inputs with features `[B, d]`: `[B, K]`.

    A class without samples is never predicted.
    """
    stored, label, tree, omega = classifier
    cross, covariance = process.gram(stored, z), process.covariance(stored)
    variance, classes = process.variance(len(z), cross.dtype), tree.left.shape[1]
    nodes, known = jnp.arange(at_most(classes)), jnp.maximum(label, 0)

    def at_level(number: Any, total: jax.Array) -> jax.Array:
        level = level_of(tree, number)
        signs = signs_at(level, known, label >= 0, covariance.dtype)
        within = between(covariance, level, known, known)
        part = (nodes[:, None] == level.node[known][None]).astype(cross.dtype)
        at = lambda drawn: posterior_of_parts(within, signs, drawn, cross, variance, part)  # noqa: E731
        p = jnp.mean(chance(*jax.vmap(at)(omega[number])), 0)[jnp.minimum(level.node, len(nodes) - 1)].T
        branch = jnp.log(jnp.where(level.left[None], p, 1 - p) + 1e-12)
        return total + jnp.where(level.node[None] < len(nodes), branch, 0)

    present = jnp.any(label[:, None] == jnp.arange(classes)[None], 0) | jnp.all(label < 0)
    start = jnp.broadcast_to(jnp.where(present, 0.0, jnp.log(1e-12))[None], (len(z), classes)).astype(cross.dtype)
    return jax.lax.fori_loop(0, tree.depth, at_level, start)
