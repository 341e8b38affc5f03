"""FedGP (pFedGP): clients train a shared feature extractor through Gaussian-process classifiers of their own, which never leave.

Only the extractor is averaged. A client's classifier is the posterior of a Gaussian process on the features of its samples, so
that a new client has one as soon as it has samples.

Achituve, Shamsian, Navon, Chechik, Fetaya: "Personalized federated learning with Gaussian processes", NeurIPS 2021, arXiv
2106.15482; the full-data variant, whose classes are arranged in a tree of binary classifiers, after the authors' code.

| code | here | shape |
|---|---|---|
| K, outputscale, lengthscale, jitter | `kernel`, `output_scale`, `length_scale`, `JITTER` | `[M, M]` |
| kappa = y - 1/2 | `signs_at` | `[M]` |
| omega, Polya-Gamma variables | `draw_omega` | `[D, M]` |
| predict_ratio | `held_out` | |
| num_gibbs_steps, num_gibbs_draws | `gibbs_steps`, `draws`, `test_draws` | |

A round splits a client's samples, class by class: those that are held out are predicted from the others, at each node of the tree
by sigma(f) under the Gaussian that omega leaves, and cross-entropy goes back through the kernel to the extractor, omega held.
Nodes of one level share no sample, so that one Gram matrix with zeros between them serves all, and a step takes as many passes
as the client's tree has levels.

Differs from the code: Polya-Gamma variables are sums of 8 exponential variables and the mean of the rest; chains of the nodes of
a level start from, and are moved by, the same draws of the prior; k-means of the class
means starts from the two that are farthest apart, once; at most `capacity` samples of a client take part. With
`inference="mean_field"` one omega, the fixed point of E[omega] under the posterior of f, stands for all draws.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, linalg, local, masks
from fedjax_meta.builders import method_builder
from fedjax_meta.class_tree import Tree, at_most, build_tree
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import Batches, ClientData, ClientView, FederatedData
from fedjax_meta.gaussian_process import chance, gibbs, kernel, mean_field, posterior, posterior_of_parts
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, PyTree, Rate, Variables

JITTER = 1e-3
"""Added to the variance of every function value."""
_ROUNDING = 1e-3
"""Added to a share of samples before it is rounded down."""


def fedgp_sgd(rate: Rate) -> optax.GradientTransformation:
    """The code's local optimiser: clipping at norm 50, weight decay 1e-3, momentum 0.9."""
    return optax.chain(optax.clip_by_global_norm(50), optax.add_decayed_weights(1e-3), optax.sgd(rate, momentum=0.9))


class Classifier(NamedTuple):
    """What a client predicts with: the model, its samples' features `[M, d]` and labels `[M]`, the tree, omega.

    omega is `[K - 1, D, M]`, by level of the tree.
    """

    model: Variables
    key: jax.Array
    label: jax.Array
    tree: Tree
    omega: jax.Array


class Level(NamedTuple):
    """One level of a tree: the node and the branch of each class, `[K]`, and the number of the level."""

    node: jax.Array
    left: jax.Array
    number: jax.Array


def level_of(tree: Tree, number: Any) -> Level:
    """A level; beyond the last one it has no nodes."""
    return Level(tree.node[number], tree.left[number], jnp.asarray(number))


def signs_at(level: Level, label: jax.Array, real: jax.Array) -> jax.Array:
    """kappa of each sample at its node: 1/2 in the left branch, -1/2 in the right one, 0 for a sample at no node; `[M]`."""
    at_node = level.node[label] < at_most(len(level.node))
    return jnp.where(at_node & real, jnp.where(level.left[label], 0.5, -0.5), 0)


def between(matrix: jax.Array, level: Level, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """A covariance of samples with these labels, 0 where they are not at one node."""
    return jnp.where(level.node[rows][:, None] == level.node[columns][None], matrix, 0)


class Halves(NamedTuple):
    """Places of the samples in a batch that a step learns from, and of those that it predicts, with whether they are real."""

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


@method_builder
def fedgp(  # over 80 lines: its rules share twelve options, which closures keep short
    task: Task,
    *,
    lr: Rate = 0.05,
    inner_steps: int = 1,
    output_scale: Rate = 8.0,
    length_scale: Rate = 1.0,
    held_out: Rate = 0.5,
    inference: str = "gibbs",
    gibbs_steps: int = 5,
    draws: int = 20,
    test_draws: int = 30,
    capacity: int = 256,
    optimizer: Callable[[Any], optax.GradientTransformation] = fedgp_sgd,
    weighting: str = "uniform",
) -> Method:
    """FedGP. Every client, known or new, tests with the Gaussian process of its support set.

    The evaluation should be given all of a client's training samples as its support view. A class that the support set lacks
    is never predicted, a client of one class always predicts it, and does not train the extractor. A round always takes its
    `inner_steps`, whatever `participation` says. The task's head is not used, and not sent.

    Args:
      task: a classifier of at least two classes with features, without buffers.
      lr, optimizer, weighting: as in `fedavg`.
      inner_steps: steps of a client in a round, each on all of its samples.
      output_scale, length_scale: of the kernel.
      held_out: share of each class that is predicted from the rest, rounded down.
      inference: "gibbs" (the paper) or "mean_field".
      gibbs_steps: sweeps, or steps of the mean field.
      draws, test_draws: chains in training and in a test; the mean field has none.
      capacity: at most so many samples of a client, drawn anew in each round; time grows with its cube. On a CPU, start
        with OPENBLAS_NUM_THREADS=1 in the environment: LAPACK's threads get in the way of XLA's.

    Raises:
      ValueError: a task without features, with buffers, or with a loss that augments samples or has a criterion of its own (the
        process has a predictive loss), an option out of range; before the first round, a task of one class.
    """
    extract, _ = features.require_features(task, "fedgp", buffers=False)
    features.require_own_loss(task, "fedgp", "a predictive loss")
    checks.count("inner_steps", inner_steps)
    checks.positive("output_scale", output_scale)
    checks.positive("length_scale", length_scale)
    checks.fraction("held_out", held_out)
    checks.one_of("inference", inference, ("gibbs", "mean_field"))
    for name, value in (("gibbs_steps", gibbs_steps), ("draws", draws), ("test_draws", test_draws)):
        checks.count(name, value)
    checks.count("capacity", capacity, least=2)
    trainable, head = task.trainable(masks.variables_shape(task)), masks.resolve("head", task)
    body = masks.intersection(masks.complement(head), trainable)
    gram = partial(kernel, output_scale=output_scale, length_scale=length_scale)

    def with_jitter(z: jax.Array) -> jax.Array:
        return gram(z, z) + JITTER * jnp.eye(len(z))

    def inferred(
        key: Key, level: Level, covariance: jax.Array, root: jax.Array, label: jax.Array, real: jax.Array, count: int
    ) -> jax.Array:
        """omega of the samples at their nodes, `[D, M]`."""
        signs, covariance = signs_at(level, label, real), between(covariance, level, label, label)
        if inference == "mean_field":
            return mean_field(covariance, signs, gibbs_steps)
        return gibbs(jax.random.fold_in(key, level.number), covariance, signs, gibbs_steps, count, root)

    def root_of(covariance: jax.Array) -> jax.Array:
        # The mean field draws nothing.
        return covariance if inference == "mean_field" else linalg.cholesky(covariance)

    def samples_of(key: Key, model: Variables, view: ClientView) -> tuple[Batch, jax.Array, Tree]:
        """(shuffled samples, of each class how many, the tree of their class means)."""
        batch = view.epochs(key, max(1, min(capacity, view.max_size))).get(0, 0)
        classes = features.feature_shape(task, model, view)[0]
        member = jax.nn.one_hot(batch.y, classes) * (batch.weight > 0)[:, None]
        number = jnp.sum(member, 0)
        z = jnp.where(batch.weight[:, None] > 0, extract(model, batch.x), 0)
        return batch, number, build_tree(member.T @ z / jnp.maximum(number, 1)[:, None], number > 0)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        batch, number, tree = samples_of(tagged(key, "order"), received.model, data["train"])
        real = batch.weight > 0
        halves = halves_of(batch.y, real, number, held_out)
        y_fit, y_ask = batch.y[halves.fit], batch.y[halves.ask]

        def of_level(covariance: jax.Array, cross: jax.Array, root: jax.Array, level: Level, key: Key) -> jax.Array:
            signs = signs_at(level, y_fit, halves.fits)
            omega = inferred(key, level, jax.lax.stop_gradient(covariance), root, y_fit, halves.fits, draws)
            within, cross = between(covariance, level, y_fit, y_fit), between(cross, level, y_fit, y_ask)
            variance = jnp.full(len(y_ask), output_scale + JITTER, cross.dtype)
            p = jnp.mean(chance(*jax.vmap(lambda drawn: posterior(within, signs, drawn, cross, variance))(omega)), 0)
            here = jax.nn.one_hot(level.node[y_ask], at_most(len(number))) * halves.asks[:, None]
            value = jnp.log(jnp.where(level.left[y_ask], p, 1 - p) + 1e-12)
            return -jnp.sum(value @ here / jnp.maximum(jnp.sum(here, 0), 1))

        def loss(model: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
            z = jnp.where(real[:, None], extract(model, batch.x), 0)
            given = with_jitter(z[halves.fit]), gram(z[halves.fit], z[halves.ask])
            at = jax.lax.stop_gradient(given)
            root = root_of(at[0])

            def add(number: Any, total: PyTree) -> PyTree:
                found = jax.value_and_grad(of_level, (0, 1))(*at, root, level_of(tree, number), key)
                return jax.tree.map(jnp.add, total, found)

            # A loop over as many levels as there are has no derivative; the value and slopes that it adds up make one.
            zero = jnp.zeros((), at[0].dtype), jax.tree.map(jnp.zeros_like, at)
            value, slopes = jax.lax.stop_gradient(jax.lax.fori_loop(0, tree.depth, add, zero))
            moved = jax.tree.map(lambda slope, now, then: jnp.sum(slope * (now - then)), slopes, given, at)
            return value + sum(moved), model

        steps = Batches(lambda step, chunk: batch, inner_steps, inner_steps).only_if(jnp.sum(number > 0) > 1)
        model, value = local.train(tagged(key, "loss"), loss, received.model, steps, optimizer(lr), body)
        return Trained(model, {"loss": value})

    def personalize(key: Key, received: Received, support: ClientView) -> Classifier:
        model = received.model
        batch, _, tree = samples_of(tagged(key, "order"), model, support)
        real = batch.weight > 0
        z = jnp.where(real[:, None], extract(model, batch.x), 0)
        covariance = with_jitter(z)
        root, shown = root_of(covariance), 1 if inference == "mean_field" else test_draws

        def at_level(number: Any, omega: jax.Array) -> jax.Array:
            level, mine = level_of(tree, number), tagged(key, "omega")
            return omega.at[number].set(inferred(mine, level, covariance, root, batch.y, real, test_draws))

        empty = jnp.zeros((len(tree.left), shown, len(z)), covariance.dtype)
        omega = jax.lax.fori_loop(0, tree.depth, at_level, empty)
        # Samples of no class are those of padding.
        label = jnp.where(real, batch.y, -1)
        return Classifier(model, z, label, tree, omega)

    def predict(variables: Classifier, x: PyTree) -> jax.Array:
        """The logarithm of the classes' probabilities, `[B, K]`."""
        model, stored, label, tree, omega = variables
        z = extract(model, x)
        cross, covariance = gram(stored, z), with_jitter(stored)
        variance = jnp.full(len(z), output_scale + JITTER, z.dtype)

        classes = tree.left.shape[1]
        nodes = jnp.arange(at_most(classes))
        known = jnp.maximum(label, 0)

        def at_level(number: Any, total: jax.Array) -> jax.Array:
            level = level_of(tree, number)
            signs, within = signs_at(level, known, label >= 0), between(covariance, level, known, known)
            part = (nodes[:, None] == level.node[known][None]).astype(z.dtype)
            at = lambda drawn: posterior_of_parts(within, signs, drawn, cross, variance, part)  # noqa: E731
            p = jnp.mean(chance(*jax.vmap(at)(omega[number])), 0)[jnp.minimum(level.node, len(nodes) - 1)].T
            branch = jnp.log(jnp.where(level.left[None], p, 1 - p) + 1e-12)
            return total + jnp.where(level.node[None] < len(nodes), branch, 0)

        present = jnp.any(label[:, None] == jnp.arange(classes)[None], 0) | jnp.all(label < 0)
        start = jnp.broadcast_to(jnp.where(present, 0.0, jnp.log(1e-12))[None], (len(z), classes)).astype(z.dtype)
        return jax.lax.fori_loop(0, tree.depth, at_level, start)

    def init_extra(model: Variables, data: FederatedData) -> PyTree:
        if features.shape_in(task, model, data)[0] < 2:
            raise ValueError("fedgp: a Gaussian-process classifier needs at least 2 classes, and the task has one")
        return ()

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=predict,
        roles=masks.roles(masks.nothing(task), trainable, head),
        weighting=weighting,
        init_extra=init_extra,
        needs_classes=True,
    )
