"""Metrics of class labels, tokens and several labels a sample."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.measures.metric import CONFUSION, Metric, mean, or_one
from fedjax_meta.task import Batch, Weighted, check_alike, check_labels, cross_entropy, entry_weights, targets


def accuracy(name: str = "accuracy") -> Metric:
    """The share of samples, or of tokens, whose largest logit is that of their label."""
    return mean(name, partial(_among_first, 1, name), share=True)


def token_accuracy() -> Metric:
    """`accuracy` over tokens: labels `[B, T]`, logits `[B, T, K]`."""
    return accuracy("token_accuracy")


def top_k(k: int) -> Metric:
    """The share of samples or tokens whose label is among the k largest logits; of equal logits the first count as larger."""
    checks.count("k", k)
    return mean(f"top_{k}", partial(_among_first, k, f"top_{k}"), share=True)


def _among_first(k: int, name: str, logits: jax.Array, labels: jax.Array) -> jax.Array:
    check_labels(name, logits, labels)
    if k == 1:
        return jnp.argmax(logits, -1) == labels
    if k > logits.shape[-1]:
        raise ValueError(f"top_{k} of K={logits.shape[-1]} outputs counts every sample as right")
    return jnp.any(jax.lax.top_k(logits, k)[1] == labels[..., None], -1)


def confusion(classes: int) -> Metric:
    """The confusion matrix `[K, K]` of true classes in rows and predicted ones in columns; `Evaluation.confusion` holds it.

    It has counts of samples or tokens, or the sums of their weights where targets have real weights (`Weighted`).
    """
    checks.count("classes", classes)

    def update(counts: jax.Array, logits: jax.Array, batch: Batch) -> jax.Array:
        labels = targets(batch)
        if logits.shape != (*labels.shape, classes):
            raise ValueError(
                f"predict gives {logits.shape} for B={len(batch.weight)} samples, but the data have K={classes} classes "
                "(num_classes is the largest label plus 1 where the data were built without it)"
            )
        cell = labels * classes + jnp.argmax(logits, -1)
        weight = entry_weights(batch, cell)
        if isinstance(batch.y, Weighted) and checks.is_real(batch.y.weight.dtype):
            return counts.astype(jnp.float32).at[cell].add(weight.astype(jnp.float32))  # fractions
        return counts.at[cell].add(weight.astype(jnp.int32))

    return Metric(
        name=CONFUSION,
        init=lambda: jnp.zeros(classes * classes, jnp.int32),
        update=update,
        result=lambda counts: counts.reshape(classes, classes),
    )


def f1(classes: int) -> Metric:
    """F1 averaged over the classes that a client holds or predicts, as `metrics.macro_f1`, from 3 K counts a client.

    For several labels a sample (`multi_label`), targets `[B, K]` of 0 and 1, an output above 0 predicts its label.

    Args:
      classes: K.
    """
    checks.count("classes", classes)

    def update(counts: Any, outputs: jax.Array, batch: Batch) -> Any:
        y = targets(batch)
        if getattr(y, "shape", None) == outputs.shape:
            held, predicted = y > 0.5, outputs > 0
        else:
            check_labels("f1", outputs, y)
            held, predicted = (jax.nn.one_hot(of, classes, dtype=bool) for of in (y, jnp.argmax(outputs, -1)))
        if held.shape[-1] != classes or outputs.shape[-1] != classes:
            raise ValueError(f"f1 of K={classes} classes does not fit outputs {list(outputs.shape)}")
        weight = entry_weights(batch, held) if held.shape == y.shape else entry_weights(batch, y)[..., None]
        return tuple(
            before + jnp.sum((here * weight).reshape(-1, classes), 0)
            for before, here in zip(counts, (held & predicted, held, predicted), strict=True)
        )

    def result(counts: Any) -> Any:
        correct, held, predicted = counts
        present = held + predicted > 0
        return jnp.sum(jnp.where(present, 2 * correct / or_one(held + predicted), 0)) / jnp.maximum(jnp.sum(present), 1)

    return Metric(name="f1", init=lambda: (jnp.zeros(classes),) * 3, update=update, result=result, share=True)


def perplexity() -> Metric:
    """The exponential of the mean cross-entropy over samples or tokens."""
    return mean("perplexity", cross_entropy.entries, higher_is_better=False, of_mean=jnp.exp)


def label_accuracy() -> Metric:
    """The share of right labels where a sample has several: targets `[B, L]` of 0 and 1, an output above 0 predicts its label."""

    def right(outputs: jax.Array, y: jax.Array) -> jax.Array:
        check_alike("label_accuracy", outputs, y)
        return (outputs > 0) == (y > 0.5)

    return mean("label_accuracy", right, share=True)


def auroc(classes: int, *, bins: int = 1024) -> Metric:
    """The area under the ROC curve: how often a sample of a class gets a higher score for it than one of another class.

    Each class against the others, averaged over the classes that some but not all samples of a client have; 0.5 without such a
    class. Scores s are log-odds of softmax outputs (labels `[B]`) or the outputs themselves (targets `[B, K]` of 0 and 1). They
    are counted in equal bins of s / (4 + |s|). Scores in one bin count as equal, which is half right: near 0 those closer than
    8/`bins`.

    Args:
      classes: K; of two classes both have the same area.
      bins: of the histogram; a client takes 2 K `bins` numbers.
    """
    checks.count("classes", classes)
    checks.count("bins", bins, least=2)

    def update(counts: jax.Array, outputs: jax.Array, batch: Batch) -> jax.Array:
        y = targets(batch)
        if getattr(y, "shape", None) == outputs.shape:
            scores, own, weight = outputs, y > 0.5, entry_weights(batch, y)
        else:
            check_labels("auroc", outputs, y)
            share = jax.nn.log_softmax(outputs)
            # log(p / (1 - p)), without a difference that could be 0.
            others = jax.nn.logsumexp(jnp.where(jnp.eye(outputs.shape[-1], dtype=bool), -jnp.inf, share[..., None, :]), -1)
            scores, own = share - others, jax.nn.one_hot(y, outputs.shape[-1], dtype=bool)
            weight = jnp.broadcast_to(entry_weights(batch, y)[..., None], own.shape)
        if outputs.shape[-1] != classes:
            raise ValueError(f"auroc of K={classes} classes does not fit outputs {list(outputs.shape)}")
        # Finite for any score, and fine where scores of a calibrated model are.
        squashed = jnp.where(jnp.isinf(scores), jnp.sign(scores), scores / (4 + jnp.abs(scores)))
        place = jnp.clip(jnp.floor((squashed + 1) * (bins / 2)), 0, bins - 1).astype(jnp.int32)
        column = jnp.broadcast_to(jnp.arange(classes), place.shape)
        return counts.at[own.astype(jnp.int32), column, place].add(weight)

    def result(counts: jax.Array) -> jax.Array:
        others, own = counts
        below = jnp.cumsum(others, -1) - others
        right = jnp.sum(own * (below + others / 2), -1)
        pairs = jnp.sum(own, -1) * jnp.sum(others, -1)
        known = pairs > 0
        area = jnp.sum(jnp.where(known, right / or_one(pairs), 0)) / jnp.maximum(jnp.sum(known), 1)
        return jnp.where(jnp.any(known), area, 0.5)

    return Metric(name="auroc", init=lambda: jnp.zeros((2, classes, bins)), update=update, result=result, share=True)


def calibration_error(*, bins: int = 15) -> Metric:
    """The expected calibration error (Guo et al. 2017): the mean distance of confidence and accuracy, over bins of confidence.

    Args:
      bins: of equal width, of the largest softmax output.
    """
    checks.count("bins", bins)

    def update(sums: Any, logits: jax.Array, batch: Batch) -> Any:
        right = _among_first(1, "calibration_error", logits, targets(batch))
        confidence = jnp.max(jax.nn.softmax(logits), -1)
        weight = entry_weights(batch, confidence)
        confidence = jnp.where(weight > 0, confidence, 0)  # what does not count may hold anything
        # A confidence on an edge belongs to the bin below, as in the paper.
        place = jnp.clip(jnp.ceil(confidence * bins) - 1, 0, bins - 1).astype(jnp.int32)
        gaps, total = sums
        return gaps.at[place].add((confidence - right) * weight), total + jnp.sum(weight)

    def result(sums: Any) -> Any:
        return jnp.sum(jnp.abs(sums[0])) / or_one(sums[1])

    return Metric(
        name="calibration_error",
        init=lambda: (jnp.zeros(bins), 0.0),
        update=update,
        result=result,
        higher_is_better=False,
        share=True,
    )
