"""Reptile in federated learning: the model moves towards what adaptation makes of it, and no gradient is differentiated.

`reptile`: a client adapts to its samples, and the server moves the model towards the mean of the results. Nichol, Achiam,
Schulman, arXiv 1803.02999, Algorithm 2; S1 (Nguyen, "Improving FL by meta-learning"). `perfedavg_reptile`: each client does so
itself, batch by batch, and the server averages the models. Xia, Cui, "Personalized federated learning algorithm based on
Reptile" (S3), its UserUpdate.

| paper | here | shape |
|---|---|---|
| epsilon (S1) | `outer_lr` | scalar |
| E (S1) | `inner_epochs` | int |
| alpha (S3) | `interpolation` | scalar |
| tau_out, tau_in (S3) | `outer_batches`, `inner_batches` | ints |
| eq. 5 (S3) | `inner_lr` | scalar |

Differs from the papers: S1 prints theta - epsilon sum(phi_i - theta), which moves away from the adapted models; here the sign
is that of Reptile, and the mean is a mean. S3 writes inner steps of length 1 and gives no rate for them; here the rate is an
argument of its own, to be tuned, because with alpha = 0.01 a small one makes a round a hundredth of FedAvg's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, meta
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.algorithms.fedmeta import fedmeta
from fedjax_meta.data.federated import Batches, ClientData, ClientView
from fedjax_meta.data.shuffle import permuted, round_keys
from fedjax_meta.task import Batch, Key, Task


def reptile(
    task: Task,
    *,
    inner_lr: Any = 0.01,
    outer_lr: Any = 0.1,
    inner_epochs: int = 1,
    batch_size: int = 32,
    weighting: str = "uniform",
    server_optimizer: optax.GradientTransformation | None = None,
    **options: Any,
) -> Algorithm:
    """Federated Reptile, theta + epsilon mean(phi_i - theta) at the server.

    A client that never took part adapts the server's model to its support set, as every client does before it predicts; where
    leaves are personal, see `fedmeta`.

    Args:
      task: what is learned.
      inner_lr: rate of adaptation.
      outer_lr: epsilon; personal leaves move by it too, at their client.
      inner_epochs: E, passes over a client's train view in a round, and over its support view in a test.
      batch_size: samples of an inner step.
      weighting: "uniform", "samples" or "query".
      server_optimizer: what descends along theta - mean phi_i; `optax.sgd(outer_lr)` when not given (momentum, Adam).
      **options: those of `fedmeta`.

    Raises:
      ValueError: a rate, size or count out of range, learned rates (Reptile has no gradient for them).
    """
    checks.positive("outer_lr", outer_lr)
    checks.count("inner_epochs", inner_epochs)
    checks.count("batch_size", batch_size)

    def draw(key: Key, data: ClientData, step: Any) -> tuple[Batches, None]:
        return data["train"].epochs(jax.random.fold_in(key, step), batch_size, inner_epochs), None

    return fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=outer_lr,
        outer_optimizer=optax.sgd,
        outer_at="server",
        server_optimizer=optax.sgd(outer_lr) if server_optimizer is None else server_optimizer,
        estimator=meta.reptile,
        batch_size=batch_size,
        inner_steps=inner_epochs,
        draw=draw,
        weighting=weighting,
        **options,
    )


def perfedavg_reptile(
    task: Task,
    *,
    inner_lr: Any = 0.1,
    interpolation: Any = 0.01,
    outer_batches: int = 4,
    inner_batches: int = 4,
    test_steps: int = 1,
    chunk_size: int = 64,
    weighting: str = "uniform",
    **options: Any,
) -> Algorithm:
    """Per-FedAvg-Reptile: a round is one epoch, in `outer_batches` batches of `inner_batches` minibatches each.

    A client that never took part takes its `test_steps` from the server's model, as every client does before it predicts; where
    leaves are personal, see `fedmeta`.

    Args:
      task: what is learned.
      inner_lr: rate of the minibatch steps, and of the step in a test.
      interpolation: alpha, how far the model moves towards what a batch made of it; 1 takes it over.
      outer_batches, inner_batches: tau_out and tau_in. Sizes that do not divide are cut as by `numpy.array_split`; the
        minibatches that a client has too few samples for move nothing.
      test_steps: full-batch steps on a test client's support view.
      chunk_size: a minibatch is gone through in chunks of at most this many samples, so that the padding of small clients is
        short.
      weighting: "uniform" as in the paper, "samples" or "query".
      **options: those of `fedmeta`.

    Raises:
      ValueError: a rate or count out of range, learned rates (Reptile has no gradient for them).
    """
    checks.positive("interpolation", interpolation)
    checks.count("outer_batches", outer_batches)
    checks.count("inner_batches", inner_batches)
    checks.count("test_steps", test_steps)
    checks.count("chunk_size", chunk_size)

    def draw(key: Key, data: ClientData, step: Any) -> tuple[Batches, None]:
        return part_of_epoch(key, data["train"], outer_batches, inner_batches, step, chunk_size=chunk_size), None

    return fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=interpolation,
        outer_optimizer=optax.sgd,
        estimator=meta.reptile,
        batch_size=None,
        inner_steps=test_steps,
        meta_steps=outer_batches,
        draw=draw,
        weighting=weighting,
        **options,
    )


def part_of_epoch(key: Key, view: ClientView, outer: int, inner: int, number: Any, *, chunk_size: int = 64) -> Batches:
    """The minibatches of one batch of a shuffled pass: `inner` steps on part `number` of the `outer` parts of a view.

    With the same key, the parts together hold every sample exactly once.
    """
    keys, size = round_keys(key), jnp.asarray(view.size, jnp.int32)
    first, length = _cut(size, outer, number)
    width = _ceil(_ceil(view.max_size, outer), inner)
    rows = min(chunk_size, width)

    def get(step: Any, chunk: Any = 0) -> Batch:
        begin, count = _cut(length, inner, step)
        offset = chunk * rows + jnp.arange(rows, dtype=jnp.int32)
        return view.take(permuted(keys, first + begin + offset, size), offset < count)

    chunks = 1 if width <= chunk_size else jnp.maximum(_ceil(_ceil(_ceil(size, outer), inner), rows), 1)
    return Batches(get, inner, inner, chunks)


def _cut(size: Any, parts: int, number: Any) -> tuple[Any, Any]:
    """(begin, length) of a part, as `numpy.array_split` cuts: the first ones are longer by 1."""
    length, longer = size // parts, size % parts
    return number * length + jnp.minimum(number, longer), length + (number < longer)


def _ceil(size: Any, parts: Any) -> Any:
    return -(-size // parts)
