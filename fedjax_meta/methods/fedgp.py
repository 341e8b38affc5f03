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
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import method_builder
from fedjax_meta.class_tree import Tree, build_tree
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import Batches, ClientData, ClientView, FederatedData
from fedjax_meta.gaussian_process import chance, gibbs, kernel, mean_field, posterior
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, PyTree, Rate, Variables

JITTER = 1e-3
"""Added to the variance of every function value."""


def fedgp_sgd(rate: Rate) -> optax.GradientTransformation:
    """The code's local optimiser: clipping at norm 50, weight decay 1e-3, momentum 0.9."""
    return optax.chain(optax.clip_by_global_norm(50), optax.add_decayed_weights(1e-3), optax.sgd(rate, momentum=0.9))


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
