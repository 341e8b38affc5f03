"""FedNova: FedAvg whose clients send their update per local step, so that those who take more steps do not count for more.

Wang, Liu, Liang, Joshi, Poor: "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS
2020, arXiv 2007.07481; the steps are those of the authors' code, JYWa/FedNova, distoptim/FedNova.py 104-210.

| paper | here | shape |
|---|---|---|
| p_i | `weighting`, as a share of the cohort | |
| eta d_i = (x - x_i) / |a_i|_1 | the pseudo-gradient | like the model |
| |a_i|_1 | `normaliser` | scalar |
| tau_eff | the mean of `statistics` | scalar |
| rho, mu, eta | `momentum`, `prox_weight`, `lr` | scalars |

x <- x - tau_eff sum_i p_i (eta d_i). tau_eff is the mean of |a_i|, or with `prox_weight` that of the steps.
Differs from the paper: nothing. Differs from the authors' code, with momentum and a proximal term together alone: there the pull
goes into the momentum too (line 139 writes into its buffer), and a step makes |a_i| (a + c)(1 - eta mu) + 1 of a (lines 152-159),
here the sum of the weights that gradients have in an update. The server's momentum is `Federation(server_optimizer=...)`.
Buffers are averaged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained, received_model
from fedjax_meta.data import ClientData
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Params, Rate, Scalar, Updates


def normaliser(steps: Scalar, lr: Rate, momentum: Rate, prox_weight: Rate) -> jax.Array:
    """|a|_1: the sum of the weights of the gradients of `steps` steps in (x - x_i) / eta; `steps` for plain SGD."""

    def step(_: Any, carry: Any) -> Any:
        total, weight = carry
        weight = momentum * weight + 1
        return total * (1 - lr * prox_weight) + weight, weight

    zero = jnp.zeros((), jnp.result_type(float))
    return jax.lax.fori_loop(0, steps, step, (zero, zero))[0]


@described("updates per local step", "Wang et al. 2007.07481")
@method_builder
def fednova(
    task: Task,
    *,
    lr: Rate = 0.02,
    momentum: Rate | None = None,
    prox_weight: Rate | None = None,
    epochs: int = 2,
    batch_size: int = 32,
    weighting: str = "samples",
) -> Method:
    """FedNova. Every client, known or new, tests with the server's model; one that did no step changes nothing.

    Args:
      task, epochs, batch_size, weighting: as in `fedavg`.
      lr: rate of the local solver, above 0; may be traced, as the next two.
      momentum: rho in [0, 1] of the local solver; none when not given.
      prox_weight: mu >= 0, how strongly local models are pulled back to the server's; not at all when not given.

    Raises:
      ValueError: an option out of range, `lr * prox_weight` of 1 or more: a step would pull a model beyond the server's.
    """
    if momentum is not None:
        checks.share("momentum", momentum)
    rho, mu = (0.0 if rate is None else rate for rate in (momentum, prox_weight))
    checks.below_one("lr * prox_weight", lr, mu)
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        start = masks.split(received.model, trainable)[0]

        def pull(gradient: Updates, x: Params) -> Updates:
            return jax.tree.map(lambda g, w, w0: g + mu * (w - w0), gradient, x, start)

        parts = [] if momentum is None else [optax.trace(momentum)]
        parts += [] if prox_weight is None else [optax.stateless(pull)]
        batches = data["train"].epochs(tagged(key, "order"), batch_size, epochs)
        solver = optax.chain(*parts, optax.sgd(lr))
        model, loss = local.train(tagged(key, "loss"), task.loss, received.model, batches, solver, trainable)
        amount = normaliser(batches.steps, lr, rho, mu)
        pseudo_gradient = jax.tree.map(lambda w, x: (w - x) / jnp.maximum(amount, 1).astype(w.dtype), received.model, model)
        effective = amount if prox_weight is None else jnp.asarray(batches.steps, amount.dtype)
        return Trained(model, {"loss": loss, "normaliser": amount}, pseudo_gradient=pseudo_gradient, statistics=effective)

    return Method(
        init=task.init,
        client=client,
        personalize=received_model,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        weighs_by_statistics=True,
        direction=lambda state, pseudo_gradient, tau, weight, num_clients: (
            jax.tree.map(lambda leaf: tau.astype(leaf.dtype) * leaf, pseudo_gradient),
            (),
        ),
        refuses=dict.fromkeys(
            ("clip", "adaptive_clip"), "it would shrink changes and the numbers of steps, whose product counts"
        ),
    )


REDUCES_TO = (
    Reduction("FedNova with equally many steps is FedAvg", "fednova", {"batch_size": 128}, "fedavg", {"batch_size": 128}),
)
