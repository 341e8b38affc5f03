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

Differs from the code: Polya-Gamma variables are sums of 100 exponential variables and the mean of the rest; k-means of the class
means starts from the two that are farthest apart, once; at most `capacity` samples of a client take part. With
`inference="mean_field"` one omega, the fixed point of E[omega] under the posterior of f, stands for all draws.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import method_builder
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import Batches, ClientData, ClientView, FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, PyTree, Rate, Scalar, Variables

JITTER = 1e-3
"""Added to the variance of every function value."""
_POINTS, _WEIGHTS = (part for part in np.polynomial.hermite.hermgauss(20))
_TERMS = 100


def fedgp_sgd(rate: Rate) -> optax.GradientTransformation:
    """The code's local optimiser: clipping at norm 50, weight decay 1e-3, momentum 0.9."""
    return optax.chain(optax.clip_by_global_norm(50), optax.add_decayed_weights(1e-3), optax.sgd(rate, momentum=0.9))


# -------------------------------------------------------------------------------------------------- one binary classifier


def kernel(a: jax.Array, b: jax.Array, output_scale: Scalar, length_scale: Scalar) -> jax.Array:
    """The squared-exponential kernel of features on the unit sphere, `[A, B]` from `[A, d]` and `[B, d]`."""
    a, b = (z / jnp.sqrt(jnp.maximum(jnp.sum(z**2, -1, keepdims=True), 1e-24)) for z in (a, b))
    square = jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1)[None, :] - 2 * a @ b.T
    return output_scale * jnp.exp(-jnp.maximum(square, 0) / (2 * length_scale**2))


def mean_omega(c: jax.Array) -> jax.Array:
    """E of a Polya-Gamma variable PG(1, c): tanh(c / 2) / (2 c)."""
    c = jnp.maximum(jnp.abs(c), 1e-4)
    return jnp.tanh(c / 2) / (2 * c)


def draw_omega(key: Key, c: jax.Array) -> jax.Array:
    """PG(1, c) for each entry: sum_k e_k / ((k - 1/2)^2 + c^2 / (4 pi^2)) / (2 pi^2), e_k exponential; key consumed."""
    scale = 1 / (2 * jnp.pi**2) / ((jnp.arange(_TERMS) + 0.5) ** 2 + (c[..., None] / (2 * jnp.pi)) ** 2)
    rest = jnp.maximum(mean_omega(c) - jnp.sum(scale, -1), 0)
    return jnp.sum(jax.random.exponential(key, scale.shape, scale.dtype) * scale, -1) + rest


def _factor(gram: jax.Array, omega: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(s, Cholesky factor of I + s K s), s the root of omega; an omega of 0 leaves a sample out."""
    s = jnp.sqrt(omega)
    return s, jnp.linalg.cholesky(jnp.eye(len(s)) + s[:, None] * gram * s[None, :])


def _solve(lower: jax.Array, b: jax.Array) -> jax.Array:
    return jax.scipy.linalg.cho_solve((lower, True), b)


def posterior(
    gram: jax.Array, signs: jax.Array, omega: jax.Array, cross: jax.Array, variance: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of f at other inputs, given omega: the regression on signs / omega with noise 1 / omega.

    Args:
      gram: `[M, M]`, the kernel of the samples with jitter.
      signs: `[M]`, 1/2 or -1/2, 0 for a sample that does not take part.
      omega: `[M]`, 0 for these.
      cross: `[M, B]`, the kernel between samples and inputs.
      variance: `[B]`, prior variance there.

    Returns:
      two arrays `[B]`.
    """
    s, lower = _factor(gram, omega)
    weights = signs - s * _solve(lower, s * (gram @ signs))
    seen = s[:, None] * cross
    return cross.T @ weights, jnp.maximum(variance - jnp.sum(seen * _solve(lower, seen), 0), 1e-10)


def chance(mean: jax.Array, variance: jax.Array) -> jax.Array:
    """E sigma(f) for Gaussian f, by Gauss-Hermite quadrature; like `mean`."""
    f = mean[..., None] + jnp.sqrt(2 * variance)[..., None] * jnp.asarray(_POINTS, mean.dtype)
    return jnp.sum(jax.nn.sigmoid(f) * jnp.asarray(_WEIGHTS / np.sqrt(np.pi), mean.dtype), -1)


def gibbs(key: Key, gram: jax.Array, signs: jax.Array, steps: int, draws: int) -> jax.Array:
    """omega after `steps` sweeps of f | omega and omega | f, from f drawn from the prior: `[D, M]`; key consumed."""
    takes_part, root = jnp.abs(signs) > 0, jnp.linalg.cholesky(gram)

    def omega_of(key: Key, f: jax.Array) -> jax.Array:
        return jnp.where(takes_part, draw_omega(key, f), 0)

    def sweep(t: Any, carry: tuple[jax.Array, Key]) -> tuple[jax.Array, Key]:
        omega, key = carry
        # A draw of the prior, corrected by the regression of signs / omega on it.
        mine = jax.random.fold_in(key, t)
        prior = root @ jax.random.normal(tagged(mine, "prior"), signs.shape, signs.dtype)
        s, lower = _factor(gram, omega)
        noise = jax.random.normal(tagged(mine, "noise"), signs.shape, signs.dtype)
        gap = jnp.where(takes_part, signs / jnp.where(takes_part, s, 1) - s * prior - noise, 0)
        return omega_of(tagged(mine, "omega"), prior + gram @ (s * _solve(lower, gap))), key

    def chain(key: Key) -> jax.Array:
        f = root @ jax.random.normal(tagged(key, "start"), signs.shape, signs.dtype)
        return jax.lax.fori_loop(0, steps, sweep, (omega_of(tagged(key, "first"), f), tagged(key, "sweeps")))[0]

    return jax.vmap(chain)(jax.random.split(key, draws))


def mean_field(gram: jax.Array, signs: jax.Array, steps: int) -> jax.Array:
    """omega <- E PG(1, c), c^2 = E f^2 under the posterior that omega gives, `steps` times from c = 0: `[1, M]`."""

    def step(_: Any, omega: jax.Array) -> jax.Array:
        mean, variance = posterior(gram, signs, omega, gram, jnp.diagonal(gram))
        return jnp.where(jnp.abs(signs) > 0, mean_omega(jnp.sqrt(mean**2 + variance)), 0)

    start = jnp.where(jnp.abs(signs) > 0, 0.25, 0).astype(gram.dtype)
    return jax.lax.fori_loop(0, steps, step, start)[None]


# ------------------------------------------------------------------------------------------------------------ the tree


class Tree(NamedTuple):
    """K - 1 nodes in no particular order; a node of no classes is not used.

    Attributes:
      member: bool `[K - 1, K]`, the classes of a node.
      left: bool `[K - 1, K]`, those of its left branch.
    """

    member: jax.Array
    left: jax.Array


def build_tree(means: jax.Array, present: jax.Array) -> Tree:
    """Splits the classes that are present, again and again, by two-means of their mean features.

    Args:
      means: `[K, d]`.
      present: bool `[K]`.
    """
    count = len(present)
    apart = jnp.sum((means[:, None] - means[None]) ** 2, -1)

    def halves(member: jax.Array) -> jax.Array:
        """The left half of a set of at least two classes; the two that are farthest apart are never together."""
        pairs = jnp.where(member[:, None] & member[None] & ~jnp.eye(count, dtype=bool), apart, -1.0)
        one, other = jnp.unravel_index(jnp.argmax(pairs), pairs.shape)
        places = jnp.arange(count)

        def lloyd(_: Any, left: jax.Array) -> jax.Array:
            centres = [jnp.sum(means * side[:, None], 0) / jnp.maximum(jnp.sum(side), 1) for side in (left, member & ~left)]
            near, far = (jnp.sum((means - centre[None]) ** 2, -1) for centre in centres)
            return member & ((near <= far) | (places == one)) & (places != other)

        return jax.lax.fori_loop(0, 10, lloyd, member & (apart[one] <= apart[other]) & (places != other))

    def split(group: jax.Array, number: jax.Array) -> tuple[jax.Array, Tree]:
        sizes = jnp.sum((group[None] == jnp.arange(count)[:, None]) & present[None], 1)
        member = present & (group == jnp.argmax(sizes)) & (jnp.max(sizes) > 1)
        left = halves(member) & member
        return jnp.where(member & ~left, number, group), Tree(member, left)

    return jax.lax.scan(split, jnp.zeros(count, jnp.int32), jnp.arange(1, count, dtype=jnp.int32))[1]


class Classifier(NamedTuple):
    """What a client predicts with: the model, its samples' features `[M, d]` and labels `[M]`, the tree, omega `[K-1, D, M]`."""

    model: Variables
    key: jax.Array
    label: jax.Array
    tree: Tree
    omega: jax.Array


def signs_at(node: Tree, label: jax.Array, real: jax.Array) -> jax.Array:
    """kappa of each sample at a node: 1/2 in its left branch, -1/2 in its right one, 0 elsewhere; `[M]`."""
    return jnp.where(node.member[label] & real, jnp.where(node.left[label], 0.5, -0.5), 0)


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
      capacity: at most so many samples of a client, drawn anew in each round; time grows with its cube.

    Raises:
      ValueError: a task without features, or with buffers, an option out of range; before the first round, a task of one class.
    """
    extract, _ = features.require_features(task, "fedgp", buffers=False)
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

    def inferred(key: Key, covariance: jax.Array, signs: jax.Array, count: int) -> jax.Array:
        if inference == "mean_field":
            return mean_field(covariance, signs, gibbs_steps)
        return gibbs(key, covariance, signs, gibbs_steps, count)

    def with_jitter(z: jax.Array) -> jax.Array:
        return gram(z, z) + JITTER * jnp.eye(len(z))

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
        member = jax.nn.one_hot(batch.y, len(number)) * real[:, None]
        # The batch is shuffled, so that the first ones of each class are a random share of it.
        rank = jnp.sum(jnp.cumsum(member, 0) * member, 1) - 1
        asked = real & (rank < jnp.floor(held_out * number + 1e-3)[batch.y])

        def loss(model: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
            covariance = with_jitter(jnp.where(real[:, None], extract(model, batch.x), 0))

            def of_node(entry: tuple[Tree, jax.Array]) -> jax.Array:
                node, number = entry
                signs = signs_at(node, batch.y, real & ~asked)
                omega = jax.lax.stop_gradient(inferred(jax.random.fold_in(key, number), covariance, signs, draws))
                at = lambda drawn: posterior(covariance, signs, drawn, covariance, jnp.diagonal(covariance))  # noqa: E731
                p = jnp.mean(chance(*jax.vmap(at)(omega)), 0)
                here = node.member[batch.y] & asked
                value = jnp.where(here, jnp.log(jnp.where(node.left[batch.y], p, 1 - p) + 1e-12), 0)
                return -jnp.sum(value) / jnp.maximum(jnp.sum(here), 1)

            return jnp.sum(jax.lax.map(of_node, (tree, jnp.arange(len(tree.left))))), model

        steps = Batches(lambda step, chunk: batch, inner_steps, inner_steps).only_if(jnp.sum(number > 0) > 1)
        model, value = local.train(tagged(key, "loss"), loss, received.model, steps, optimizer(lr), body)
        return Trained(model, {"loss": value})

    def personalize(key: Key, received: Received, support: ClientView) -> Classifier:
        model = received.model
        batch, _, tree = samples_of(tagged(key, "order"), model, support)
        real = batch.weight > 0
        z = jnp.where(real[:, None], extract(model, batch.x), 0)
        covariance = with_jitter(z)

        def of_node(entry: tuple[Tree, jax.Array]) -> jax.Array:
            node, number = entry
            signs = signs_at(node, batch.y, real)
            return inferred(jax.random.fold_in(tagged(key, "omega"), number), covariance, signs, test_draws)

        omega = jax.lax.map(of_node, (tree, jnp.arange(len(tree.left))))
        # Samples of no class are those of padding.
        label = jnp.where(real, batch.y, -1)
        return Classifier(model, z, label, tree, omega)

    def predict(variables: Classifier, x: PyTree) -> jax.Array:
        """The logarithm of the classes' probabilities, `[B, K]`."""
        model, stored, label, tree, omega = variables
        z = extract(model, x)
        cross, covariance = gram(stored, z), with_jitter(stored)
        variance = jnp.full(len(z), output_scale + JITTER, z.dtype)

        def at_node(total: jax.Array, entry: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
            node, drawn = entry
            signs = signs_at(node, jnp.maximum(label, 0), label >= 0)
            p = jnp.mean(chance(*jax.vmap(lambda one: posterior(covariance, signs, one, cross, variance))(drawn)), 0)
            branch = jnp.where(node.left[None], jnp.log(p + 1e-12)[:, None], jnp.log(1 - p + 1e-12)[:, None])
            return total + jnp.where(node.member[None], branch, 0), None

        classes = jnp.arange(tree.left.shape[1])
        present = jnp.any((label[:, None] == classes[None]), 0) | jnp.all(label < 0)
        start = jnp.broadcast_to(jnp.where(present, 0.0, jnp.log(1e-12))[None], (len(z), len(classes))).astype(z.dtype)
        return jax.lax.scan(at_node, start, (tree, omega))[0]

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
