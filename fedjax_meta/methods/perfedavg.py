"""Per-FedAvg: in a round, each client takes K meta-steps on batches of all its samples, and the server averages the models.

Fallah, Mokhtari, Ozdaglar: "Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning
approach", NeurIPS 2020, arXiv 2002.07948, Algorithm 1. A step draws three independent batches and descends along
(I - alpha H(w; b2)) grad f(w - alpha grad f(w; b0); b1).

| paper | here | shape |
|---|---|---|
| alpha, beta | `inner_lr`, `outer_lr` | scalars |
| tau | `local_steps` | int |
| D, D', D'' | batches b0, b1, b2 of `batch_size` | `[B, ...]` |
| FO, HF | `estimator=meta.first_order`, `meta.hessian_free` | |

`partial(meta.hessian_free, method="product")` multiplies by the Hessian itself. Rates and a mean that counts samples
(`weighting="samples"`) are those of pFedMe's reference code. Differs from it: nobody adapts on test samples.
"""

from collections.abc import Callable
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


def perfedavg(
    task: Task,
    *,
    inner_lr: Any = 0.01,
    outer_lr: Any = 0.001,
    estimator: Callable[[meta.Inner], meta.Estimator] = meta.hessian_free,
    outer_optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    local_steps: int = 4,
    batch_size: int | None = 20,
    test_steps: int = 1,
    weighting: str = "uniform",
    **options: Any,
) -> Algorithm:
    """Per-FedAvg with any meta-gradient, any personal leaves, and rates that are learned where the estimator has a gradient.

    A client that never took part takes its `test_steps` from the server's model, as every client does before it predicts; where
    leaves are personal, see `fedmeta`.

    Args:
      task: what is learned.
      inner_lr, outer_lr: alpha and beta.
      estimator: how the meta-gradient is found. `meta.exact` and `meta.first_order` do not read the third batch.
      outer_optimizer: `outer_lr -> optax transformation` of the local meta-steps, started fresh in every round.
      local_steps: K, meta-steps of a client in a round.
      batch_size: samples of each batch; `None` takes all of a client's samples, three times the same.
      test_steps: full-batch steps on a test client's support view.
      weighting: "uniform", "samples" or "query".
      **options: those of `fedmeta`.

    Raises:
      ValueError: a rate, size or count out of range, and whatever `fedmeta` refuses.
    """
    checks.count("local_steps", local_steps)
    checks.count("test_steps", test_steps)
    if batch_size is not None:
        checks.count("batch_size", batch_size)

    def draw(key: Key, data: ClientData, step: Any) -> tuple[meta.WithHessian, Batches]:
        b0, b1, b2 = independent_batches(jax.random.fold_in(key, step), data["train"], batch_size)
        return meta.WithHessian(b0, b2), b1

    return fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=outer_lr,
        estimator=estimator,
        outer_optimizer=outer_optimizer,
        batch_size=None,
        inner_steps=test_steps,
        meta_steps=local_steps,
        draw=draw,
        weighting=weighting,
        **options,
    )


def independent_batches(key: Key, view: ClientView, batch_size: int | None, count: int = 3) -> list[Batches]:
    """`count` batches of one step each, from one shuffle of a view: they share no sample where the view has enough of them.

    A smaller view is gone through again, so that a batch is always full; `batch_size=None` gives the whole view each time.
    """
    if batch_size is None:
        return [view.full()] * count
    keys, size = round_keys(key), jnp.maximum(jnp.asarray(view.size, jnp.int32), 1)

    def batch(number: int) -> Batch:
        index = (number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)) % size
        return view.take(permuted(keys, index, size), jnp.ones(batch_size))

    def alone(number: int) -> Batches:
        return Batches(lambda step, chunk: batch(number), 1, 1)

    return [alone(number) for number in range(count)]
