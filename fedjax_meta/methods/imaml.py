"""iMAML in federated learning: FedMeta whose clients solve a proximal problem and send its implicit gradient.

Rajeswaran, Finn, Kakade, Levine: "Meta-learning with implicit gradients", NeurIPS 2019, arXiv 1909.04630, Algorithms 1 and 2;
in federated learning Nguyen, "Improving FL by meta-learning" (S1).

| paper | here | shape |
|---|---|---|
| lambda | `prox_weight` | scalar |
| phi_i | argmin of f(phi; support) + lambda/2 norm(phi - theta)^2, approximately | like the model |
| E (S1) | `inner_epochs` | int |
| CG steps | `cg_steps` | int |

Rates and lambda are those of S1's code, whose gradient was not this one: it took the Hessian of the query batches with the
proximal term inside, and the outer gradient of the last query batch alone; `FL_IMAML` holds the options that reproduce it.
"""

from functools import partial
from typing import Any

import jax

from fedjax_meta import checks, meta
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.algorithms.fedmeta import fedmeta, query_batches
from fedjax_meta.data.federated import Batches, ClientData
from fedjax_meta.implicit import implicit
from fedjax_meta.task import Key, Task

FL_IMAML = {"operator": "fl_imaml", "outer": "last_chunk", "warm_start": "gradient"}
"""Options of `imaml` with which its gradient is the one of S1's code, faults and all."""


def imaml(
    task: Task,
    *,
    inner_lr: Any = 0.001,
    outer_lr: Any = 1e-4,
    prox_weight: Any = 2.0,
    test_prox_weight: Any = None,
    inner_epochs: int = 5,
    batch_size: int | None = 32,
    cg_steps: int = 5,
    tolerance: Any = 1e-6,
    damping: Any = 0.0,
    warm_start: str = "zero",
    operator: str = "implicit",
    proximal: str = "each_step",
    outer: str = "query",
    **options: Any,
) -> Algorithm:
    """FedMeta with the implicit gradient; what a client holds does not grow with its inner steps.

    A client that never took part adapts the server's model to its support set, drawn back to it by `test_prox_weight`, as every
    client does before it predicts; where leaves are personal, see `fedmeta`.

    Args:
      task: what is learned.
      inner_lr, outer_lr: rates of adaptation and of the meta-update.
      prox_weight: lambda > 0.
      test_prox_weight: lambda of a test client's adaptation; `prox_weight` when not given, 0 adapts freely.
      inner_epochs: passes over the support view, or full-batch steps when `batch_size` is `None`.
      batch_size: samples of an inner step.
      cg_steps, tolerance, damping, warm_start, operator, proximal, outer: as in `implicit.implicit`. The Hessian is that of
        the whole support view, once, however many passes the inner loop makes.
      **options: those of `fedmeta`.

    Raises:
      ValueError: an argument out of range, learned rates (the implicit gradient does not depend on them).
    """
    checks.count("inner_epochs", inner_epochs)
    estimator = partial(
        implicit,
        prox_weight=prox_weight,
        cg_steps=cg_steps,
        tolerance=tolerance,
        damping=damping,
        warm_start=warm_start,
        operator=operator,
        proximal=proximal,
        outer=outer,
    )

    def draw(key: Key, data: ClientData, step: Any) -> tuple[meta.WithHessian, Batches]:
        support, key = data["support"], jax.random.fold_in(key, step)
        steps = support.full(inner_epochs) if batch_size is None else support.epochs(key, batch_size, inner_epochs)
        return meta.WithHessian(steps, support.full()), query_batches(data, batch_size)

    return fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=outer_lr,
        estimator=estimator,
        batch_size=batch_size,
        inner_steps=inner_epochs,
        test_prox_weight=prox_weight if test_prox_weight is None else test_prox_weight,
        draw=draw,
        **options,
    )
