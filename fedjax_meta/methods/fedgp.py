"""FedGP (pFedGP): clients train a shared feature extractor through Gaussian-process classifiers of their own, which never leave.

Only the extractor is averaged. A client's classifier is the posterior of a Gaussian process on the features of its samples, so
that a new client has one as soon as it has samples.

Achituve, Shamsian, Navon, Chechik, Fetaya: "Personalized federated learning with Gaussian processes", NeurIPS 2021, arXiv
2106.15482; the full-data variant, whose classes are arranged in a tree of binary classifiers, after the authors' code.

| code | here | shape |
|---|---|---|
| K, outputscale, lengthscale, jitter | `kernel`, `output_scale`, `length_scale`, `JITTER` | `[M, M]` |
| kappa = y - 1/2 | `signs_at` of `gaussian_classifier.py` | `[M]` |
| omega, Polya-Gamma variables | `Classifier.omega` | `[D, M]` |
| predict_ratio | `held_out` | |
| num_gibbs_steps, num_gibbs_draws | `gibbs_steps`, `draws`, `test_draws` | |

A round splits a client's samples, class by class: those that are held out are predicted from the others, at each node of the tree
by sigma(f) under the Gaussian that omega leaves, and cross-entropy goes back through the kernel to the extractor, omega held.

Differs from the code: Polya-Gamma variables are sums of 8 exponential variables and the mean of the rest; chains of the nodes of
a level start from, and are moved by, the same draws of the prior; k-means of the class means starts from the two that are
farthest apart, once; a client's samples are split once a round, not in each inner step; at most `capacity` of them take part. A
node's chance is E[sigma(f)]; the code has exp(E[log sigma(f)]), which is less the wider the Gaussian is, and gives the rest to
the other side. With `inference="mean_field"` one omega, the fixed point of E[omega] under the posterior of f, stands for all
draws.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import Batches, ClientData, ClientView, FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.numerics.class_tree import Tree, tree_of
from fedjax_meta.numerics.gaussian_classifier import Classifier, Process, fit, halves_of, log_chances, predictive_loss
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


def fedgp_sgd(rate: Rate) -> optax.GradientTransformation:
    """The code's local optimiser: clipping at norm 50, weight decay 1e-3, momentum 0.9."""
    return optax.chain(optax.clip_by_global_norm(50), optax.add_decayed_weights(1e-3), optax.sgd(rate, momentum=0.9))


@described("own Gaussian-process classifier", "Achituve et al. 2106.15482")
@method_builder
def fedgp(  # over 80 lines: half of them explain twelve options
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
    process = Process(output_scale, length_scale, inference == "gibbs", gibbs_steps)

    def z_of(model: Variables, batch: Batch) -> jax.Array:
        """The features of a batch, 0 for padding."""
        return jnp.where(batch.weight[:, None] > 0, extract(model, batch.x), 0)

    def samples_of(key: Key, model: Variables, view: ClientView) -> tuple[Batch, Tree, jax.Array]:
        """(shuffled samples, the tree of their classes, how many each class has)."""
        batch = view.epochs(key, capacity).get(0, 0)
        classes = features.feature_shape(task, model, view)[0]
        return batch, *tree_of(z_of(model, batch), batch.y, batch.weight > 0, classes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        batch, tree, number = samples_of(tagged(key, "order"), received.model, data["train"])
        halves = halves_of(batch.y, batch.weight > 0, number, held_out)

        def loss(model: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
            return predictive_loss(process, key, tree, z_of(model, batch), batch.y, halves, draws), model

        steps = Batches(lambda step, chunk: batch, inner_steps, inner_steps).only_if(jnp.sum(number > 0) > 1)
        model, value = local.train(tagged(key, "loss"), loss, received.model, steps, optimizer(lr), body)
        return Trained(model, {"loss": value})

    def personalize(key: Key, received: Received, support: ClientView) -> tuple[Variables, Classifier]:
        model = received.model
        batch, tree, _ = samples_of(tagged(key, "order"), model, support)
        return model, fit(process, tagged(key, "omega"), tree, z_of(model, batch), batch.y, batch.weight > 0, test_draws)

    def predict(variables: tuple[Variables, Classifier], x: PyTree) -> jax.Array:
        """The logarithm of the classes' probabilities, `[B, K]`."""
        return log_chances(process, variables[1], extract(variables[0], x))

    def init_extra(model: Variables, data: FederatedData) -> PyTree:
        if features.shape_in(task, model, data)[0] < 2:
            raise ValueError("fedgp: a Gaussian-process classifier needs at least 2 classes, but the task has one output")
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
