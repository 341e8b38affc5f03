"""iMAML in federated learning: FedMeta whose clients solve a proximal problem and follow its implicit gradient.

Rajeswaran, Finn, Kakade, Levine: "Meta-learning with implicit gradients", NeurIPS 2019, arXiv 1909.04630, Algorithms 1 and 2;
in federated learning the FL-MAML/iMAML study (Nguyen et al., "Improving federated learning by meta-learning").

| paper | here | shape |
|---|---|---|
| lambda | `prox_weight` | scalar |
| phi_i | argmin of f(phi; support) + lambda/2 norm(phi - theta)^2, approximately | like the model |
| E (Nguyen et al.) | `inner_epochs` | int |
| CG steps | `cg_steps` | int |

Rates and lambda are those of the code of Nguyen et al. Differs from that code, whose gradient is another one. Until their commit
858f10a, behind all their logs, the inner optimiser is Adam, and the proximal term is inside the Hessian, which then counts each
support batch, and inside the outer gradient, and the solver goes on at negative curvature (the options of the study `imaml`).
From April 2023 on, without logs, the Hessian is that of the query batches (`operator="fl_imaml"`), and the outer gradient that of
the last query batch alone (`outer="last_chunk"`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from fedjax_meta import checks, masks, meta
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Reduction
from fedjax_meta.data import Batches, ClientData
from fedjax_meta.implicit import implicit_gradient
from fedjax_meta.methods.fedmeta import fedmeta, query_batches
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Rate


@described("FedMeta, implicit gradient", "Rajeswaran et al. 1909.04630")
@method_builder
def imaml(
    task: Task,
    *,
    inner_lr: Rate = 0.001,
    outer_lr: Rate = 1e-4,
    prox_weight: Rate = 2.0,
    test_prox_weight: Rate | None = None,
    inner_epochs: int = 5,
    test_epochs: int | None = None,
    batch_size: int | None = 32,
    cg_steps: int = 5,
    tolerance: Rate = 1e-6,
    damping: Rate = 0.0,
    warm_start: str = "zero",
    operator: str = "implicit",
    proximal: str = "each_step",
    outer: str = "query",
    negative_curvature: str = "stop",
    inner_optimizer: Callable[[Any], optax.GradientTransformation] | None = None,
    outer_optimizer: Callable[[Any], optax.GradientTransformation] = optax.adam,
    outer_slots: str = "fresh",
    outer_at: str = "client",
    server_sum: bool = False,
    adapts: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    score: str = "online",
    weighting: str = "query",
) -> Method:
    """FedMeta with the implicit gradient, whose memory does not grow with the number of inner steps.

    The Hessian is that of the support view, taken once, however many passes the inner loop makes.

    Each round reports how the linear systems fared: the metrics `cg_steps`, `residual` and `negative_curvature`, which is 1 for
    clients whose I + H / lambda is not positive. There the solver stops early, unless `negative_curvature="continue"`, and the
    gradient may be no better than that of the query loss alone. A larger `prox_weight`, or `damping`, makes the systems positive.

    Every client adapts to its support set before it predicts, pulled back to its starting point by `test_prox_weight`. A
    client that never took part starts from the server's model; where leaves are personal, see `fedmeta`.

    Args:
      task, inner_lr, outer_lr: as in `fedmeta`.
      prox_weight: lambda > 0.
      test_prox_weight: lambda of a test client's adaptation; `prox_weight` when not given, 0 adapts freely.
      inner_epochs: passes over the support view, or full-batch steps when `batch_size` is `None`.
      test_epochs: those in a test; `inner_epochs` when not given.
      batch_size: samples of an inner step.
      cg_steps, tolerance, damping, warm_start, operator, proximal, outer, negative_curvature: as in
        `implicit.implicit_gradient`.
      inner_optimizer, outer_optimizer, outer_slots, outer_at, server_sum, adapts, personal, score, weighting: as in `fedmeta`.

    Raises:
      ValueError: an option out of range, options that exclude each other.
    """
    checks.positive("prox_weight", prox_weight)
    checks.count("inner_epochs", inner_epochs)
    if batch_size is None and (str(operator).startswith("fl_imaml") or outer == "last_chunk"):
        counted = "outer='last_chunk'" if outer == "last_chunk" else f"operator={operator!r}"
        raise ValueError(f"{counted} goes by batches: give it a batch_size")
    estimator = partial(
        implicit_gradient,
        prox_weight=prox_weight,
        cg_steps=cg_steps,
        tolerance=tolerance,
        damping=damping,
        warm_start=warm_start,
        operator=operator,
        proximal=proximal,
        outer=outer,
        negative_curvature=negative_curvature,
    )

    return fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=outer_lr,
        inner_optimizer=inner_optimizer,
        estimator=estimator,
        outer_optimizer=outer_optimizer,
        outer_slots=outer_slots,
        outer_at=outer_at,
        server_sum=server_sum,
        batch_size=batch_size,
        inner_steps=inner_epochs,
        test_steps=test_epochs,
        draw=partial(_draw, batch_size=batch_size, inner_epochs=inner_epochs, batched=operator == "fl_imaml_march"),
        test_prox_weight=prox_weight if test_prox_weight is None else test_prox_weight,
        adapts=adapts,
        personal=personal,
        score=score,
        weighting=weighting,
    )


def _draw(
    key: Key, data: ClientData, step: Any, *, batch_size: int | None, inner_epochs: int, batched: bool
) -> tuple[meta.WithHessian, Batches]:
    support, key = data["support"], jax.random.fold_in(key, step)
    steps = support.full(inner_epochs) if batch_size is None else support.epochs(key, batch_size, inner_epochs)
    hessian = support.in_order(batch_size).as_one_step() if batched and batch_size is not None else support.full()
    return meta.WithHessian(steps, hessian), query_batches(data, batch_size)


REDUCES_TO = (
    Reduction(
        "iMAML with an infinite proximal weight is FedMeta without adaptation",
        "imaml",
        {"prox_weight": 1e15, "inner_lr": 0.0, "outer_lr": 0.01},
        "fedmeta",
        {"inner_lr": 0.0, "outer_lr": 0.01},
    ),
)
