"""FedAvgM, FedAdagrad, FedAdam and FedYogi: FedAvg whose server steps along the averaged pseudo-gradient with an optimiser.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295,
Algorithm 2. FedAvgM: Hsu, Qi, Brown, arXiv 1909.06335.

| paper | here | shape |
|---|---|---|
| Delta_t | minus the update that an optimiser is given | like the model |
| eta, eta_l | `server_lr`, `lr` | scalars |
| beta_1, beta_2, tau | `b1`, `b2`, `tau` | scalars |
| m_t, v_t | `Slots` | like the model |

m ← β₁m + (1-β₁)Δ;  x ← x + η m / (√v + τ);  v by rule.

There is no bias correction, so `optax.adam` and `optax.yogi`, which have it, are other algorithms (as are Keras's and those of
simulators built on it). They can be given as `server_optimizer` just as well. Buffers never go through a server optimiser.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.algorithms.fedavg import fedavg
from fedjax_meta.task import Task

SECOND_MOMENTS = {
    "adagrad": lambda v, square, b2: v + square,
    "adam": lambda v, square, b2: b2 * v + (1 - b2) * square,
    "yogi": lambda v, square, b2: v - (1 - b2) * square * jnp.sign(v - square),
}
"""The paper's three rules for v."""


class Slots(NamedTuple):
    """What an adaptive server keeps: the moments m and v, each like the model."""

    first: Any
    second: Any


def adaptive(
    rule: str, server_lr: Any, *, b1: Any = 0.9, b2: Any = 0.99, tau: Any = 1e-3, initial: Any = None
) -> optax.GradientTransformation:
    """An adaptive server optimiser, for `server_optimizer` of any algorithm.

    Args:
      rule: "adagrad", "adam" or "yogi".
      server_lr: eta.
      b1, b2: decay of the moments; the paper's FedAdagrad has b1 = 0, and b2 is not read there.
      tau: degree of adaptivity, what is added to the root of v.
      initial: where v begins; tau squared, the least that the paper allows, when not given. MTFL's and most code begins at 0.

    Raises:
      ValueError: an unknown rule, a rate or tau that is not above 0, a decay outside [0, 1].
    """
    checks.one_of("rule", rule, SECOND_MOMENTS)
    checks.positive("server_lr", server_lr)
    checks.positive("tau", tau)
    checks.share("b1", b1)
    checks.share("b2", b2)
    start = tau**2 if initial is None else initial
    checks.not_negative("initial", start)

    def init(params: Any) -> Slots:
        return Slots(jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda leaf: jnp.full_like(leaf, start), params))

    def update(descent: Any, slots: Slots, params: Any = None) -> tuple[Any, Slots]:
        del params
        first = jax.tree.map(lambda m, d: b1 * m + (1 - b1) * d, slots.first, descent)
        second = jax.tree.map(lambda v, d: SECOND_MOMENTS[rule](v, d**2, b2), slots.second, descent)
        return jax.tree.map(lambda m, v: -server_lr * m / (jnp.sqrt(v) + tau), first, second), Slots(first, second)

    return optax.GradientTransformation(init, update)


def fedavgm(task: Task, *, server_lr: Any = 1.0, momentum: Any = 0.9, **options: Any) -> Algorithm:
    """FedAvg with a server that has momentum; `options`, and what new clients do, are those of `fedavg`."""
    checks.positive("server_lr", server_lr)
    return fedavg(task, server_optimizer=optax.sgd(server_lr, momentum=momentum), **options)


def fedopt(
    task: Task,
    *,
    rule: str = "adam",
    server_lr: Any = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.99,
    tau: Any = 1e-3,
    initial: Any = None,
    **options: Any,
) -> Algorithm:
    """FedAvg with an adaptive server, see `adaptive`; `options` are those of `fedavg`.

    A client that never took part predicts with the server's model as it is, or fine-tuned for its `new_client_epochs`.
    """
    return fedavg(task, server_optimizer=adaptive(rule, server_lr, b1=b1, b2=b2, tau=tau, initial=initial), **options)


fedadagrad = partial(fedopt, rule="adagrad", b1=0.0)
fedadam = partial(fedopt, rule="adam")
fedyogi = partial(fedopt, rule="yogi")
