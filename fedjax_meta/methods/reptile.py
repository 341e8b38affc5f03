"""Reptile in federated learning: the model moves towards the adapted models, and no gradient is differentiated.

`reptile`: each client adapts to its samples, and the server moves the model towards the mean of the results. Nichol, Achiam,
Schulman, arXiv 1803.02999, Algorithm 2; in federated learning the FL-MAML/iMAML study (Nguyen et al., "Improving federated
learning by meta-learning"). `perfedavg_reptile`: each client does so itself, batch by batch, and the server averages the
models. Xia and Cui, "Personalized federated learning algorithm based on Reptile" (Per-FedAvg-Reptile), UserUpdate.

| paper | here | shape |
|---|---|---|
| epsilon (Nguyen et al.) | `outer_lr` | scalar |
| E (Nguyen et al.) | `inner_epochs` | int |
| alpha (Xia and Cui) | `interpolation` | scalar |
| tau_out, tau_in (Xia and Cui) | `outer_batches`, `inner_batches` | ints |
| eq. 5 (Xia and Cui) | `inner_lr` | scalar |

Differs from the papers: Nguyen et al. print theta - epsilon sum(phi_i - theta), which moves away from the adapted models. Here
the sign is that of Reptile, and the server takes a mean instead of a sum. Xia and Cui write inner steps of length 1 and give
no rate for them. Here the rate is an argument of its own and must be tuned: with alpha = 0.01, a small rate makes a round move
a hundredth as far as one of FedAvg.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, masks, meta
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Reduction
from fedjax_meta.data import Batches, ClientData, ClientView
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.methods.fedmeta import fedmeta
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, Rate


@described("towards adapted models", "Nichol et al. 1803.02999")
@method_builder
def reptile(
    task: Task,
    *,
    inner_lr: Rate = 0.01,
    outer_lr: Rate = 0.1,
    inner_optimizer: Callable[[Any], optax.GradientTransformation] | None = None,
    inner_epochs: int = 1,
    test_lr: Rate | None = None,
    test_epochs: int | None = None,
    batch_size: int = 32,
    view: str = "train",
    adapts: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    score: str = "online",
    weighting: str = "uniform",
) -> Method:
    """Federated Reptile: theta + epsilon mean(phi_i - theta) at the server.

    Every client adapts to its support set before it predicts. A client that never took part does so from the server's model;
    where leaves are personal, see `fedmeta`. For server momentum or Adam along theta - mean phi_i, give the federation a
    `server_optimizer`, which replaces epsilon there.

    Args:
      task, inner_lr, inner_optimizer, test_lr, personal, score, weighting: as in `fedmeta`.
      adapts: as in `fedmeta`, which for Reptile are the only leaves that learn: the others stay as `task.init` made them.
      outer_lr: epsilon; personal leaves move by it too, at their client.
      inner_epochs: E, passes over a client's `view` in a round.
      test_epochs: passes over its support view in a test; E when not given.
      batch_size: samples of an inner step.
      view: what a client trains on, "train" or "support"; the methods that need a query set adapt to "support" alone, a fifth
        of "train".

    Raises:
      ValueError: an option out of range.
    """
    checks.count("inner_epochs", inner_epochs)
    checks.one_of("view", view, ("train", "support"))

    def draw(key: Key, data: ClientData, step: Any) -> tuple[Batches, None]:
        return data[view].epochs(jax.random.fold_in(key, step), batch_size, inner_epochs), None

    return fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=outer_lr,
        inner_optimizer=inner_optimizer,
        outer_optimizer=optax.sgd,
        outer_at="server",
        estimator=meta.reptile_gradient,
        batch_size=batch_size,
        inner_steps=inner_epochs,
        test_steps=test_epochs,
        draw=draw,
        test_lr=test_lr,
        adapts=adapts,
        personal=personal,
        score=score,
        weighting=weighting,
    )


@described("Reptile steps, then the mean", "Xia, Cui (Per-FedAvg-Reptile)")
@method_builder
def perfedavg_reptile(
    task: Task,
    *,
    inner_lr: Rate = 0.1,
    interpolation: Rate = 0.01,
    inner_optimizer: Callable[[Any], optax.GradientTransformation] | None = None,
    outer_batches: int = 4,
    inner_batches: int = 4,
    test_lr: Rate | None = None,
    test_steps: int = 1,
    chunk_size: int = 64,
    adapts: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    score: str = "online",
    weighting: str = "uniform",
) -> Method:
    """Per-FedAvg-Reptile: a round is one epoch, in `outer_batches` batches of `inner_batches` minibatches each.

    Every client takes `test_steps` on its support view before it predicts. A client that never took part does so from the
    server's model; where leaves are personal, see `fedmeta`.

    Args:
      task, inner_optimizer, adapts, personal, score: as in `fedmeta`; the inner optimiser starts afresh in each batch.
      inner_lr: rate of the minibatch steps.
      test_lr: rate of the steps in a test; `inner_lr` when not given.
      interpolation: alpha, how far the model moves towards the result of a batch; 1 moves it all the way.
      outer_batches, inner_batches: tau_out and tau_in. Samples are divided as by `numpy.array_split`; minibatches that get no
        sample, because the client has too few, have a gradient of 0 (momentum and weight decay go on).
      test_steps: full-batch steps on a test client's support view.
      chunk_size: a minibatch is processed in chunks of at most this many samples, so that small clients need little padding.
      weighting: as in `fedmeta`; "uniform" is the paper's.

    Raises:
      ValueError: an option out of range.
    """
    checks.positive("interpolation", interpolation)
    checks.count("outer_batches", outer_batches)
    checks.count("inner_batches", inner_batches)
    checks.count("chunk_size", chunk_size)

    def draw(key: Key, data: ClientData, step: Any) -> tuple[Batches, None]:
        # One permutation for all steps of a round, which go through its parts one after the other.
        return part_of_epoch(key, data["train"], outer_batches, inner_batches, step, chunk_size=chunk_size), None

    return fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=interpolation,
        inner_optimizer=inner_optimizer,
        outer_optimizer=optax.sgd,
        estimator=meta.reptile_gradient,
        batch_size=None,
        inner_steps=test_steps,
        meta_steps=outer_batches,
        draw=draw,
        test_lr=test_lr,
        adapts=adapts,
        personal=personal,
        score=score,
        weighting=weighting,
    )


def part_of_epoch(key: Key, view: ClientView, outer: int, inner: int, number: Any, *, chunk_size: int = 64) -> Batches:
    """The minibatches of one batch of a shuffled pass: `inner` steps on part `number` of the `outer` parts of a view.

    With the same key, the parts together hold every sample exactly once; the key is not consumed.
    """
    keys, size = permutation_keys(jax.random.clone(key)), jnp.asarray(view.size, jnp.int32)
    first, length = _cut(size, outer, number)
    width = _ceil(_ceil(view.max_size, outer), inner)
    rows = min(chunk_size, width)

    def get(step: Any, chunk: Any = 0) -> Batch:
        begin, count = _cut(length, inner, step)
        offset = chunk * rows + jnp.arange(rows, dtype=jnp.int32)
        return view.take(permute(keys, first + begin + offset, size), offset < count)

    chunks = 1 if width <= chunk_size else jnp.maximum(_ceil(_ceil(_ceil(size, outer), inner), rows), 1)
    return Batches(get, inner, inner, chunks)


def _cut(size: Any, parts: int, number: Any) -> tuple[Any, Any]:
    """(begin, length) of a part, as `numpy.array_split` cuts: the first ones are longer by 1."""
    length, longer = size // parts, size % parts
    return number * length + jnp.minimum(number, longer), length + (number < longer)


def _ceil(size: Any, parts: Any) -> Any:
    return -(-size // parts)


REDUCES_TO = (
    Reduction(
        "Reptile whose server takes the whole step is FedAvg",
        "reptile",
        {"outer_lr": 1.0, "inner_lr": 0.2, "batch_size": 128, "weighting": "samples"},
        "fedavg",
        {"lr": 0.2, "batch_size": 128, "epochs": 1},
        tests_alike=False,
    ),
    Reduction(
        "Per-FedAvg-Reptile with alpha = 1 and one minibatch is an epoch of FedAvg on full batches with equal weights",
        "perfedavg_reptile",
        {"interpolation": 1.0, "outer_batches": 1, "inner_batches": 1, "inner_lr": 0.2},
        "fedavg",
        {"lr": 0.2, "batch_size": 128, "epochs": 1, "weighting": "uniform"},
        tests_alike=False,
    ),
)
