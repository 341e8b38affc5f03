"""FedAvgM, FedAdagrad, FedAdam and FedYogi: FedAvg whose server steps along the averaged pseudo-gradient with an optimiser.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295,
Algorithm 2. FedAvgM: Hsu, Qi, Brown, arXiv 1909.06335.

| paper | here | shape |
|---|---|---|
| Delta_t | minus the pseudo-gradient that the server optimiser is given | like the model |
| eta, eta_l | `server_lr`, `lr` | scalars |
| beta_1, beta_2, tau | `b1`, `b2`, `tau` | scalars |
| m_t, v_t | `Slots` | like the model |

m ← β₁m + (1-β₁)Δ;  x ← x + η m / (√v + τ);  v by rule.

There is no bias correction. The authors' code runs Keras's optimisers, whose Adam and Yogi have one: `bias_correction=True` and
`initial=0.0`, their option for Yogi. `optax.adam` and `optax.yogi` correct the moments themselves and are further methods; a
federation takes them as `server_optimizer` just as well. Buffers never go through a server optimiser.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Reduction
from fedjax_meta.methods.fedavg import fedavg
from fedjax_meta.task import Task
from fedjax_meta.types import Params, Rate, Updates

SECOND_MOMENTS = {
    "adagrad": lambda v, square, b2: v + square,
    "adam": lambda v, square, b2: b2 * v + (1 - b2) * square,
    "yogi": lambda v, square, b2: v - (1 - b2) * square * jnp.sign(v - square),
}
"""The paper's three rules for v."""


class Slots(NamedTuple):
    """What an adaptive server keeps: the moments m and v, each like the model, and with bias correction the number of steps."""

    first: Params
    second: Params
    count: Any = ()


def adaptive(
    rule: str,
    server_lr: Rate,
    *,
    b1: Rate = 0.9,
    b2: Rate = 0.99,
    tau: Rate = 1e-3,
    initial: Rate | None = None,
    bias_correction: bool = False,
) -> optax.GradientTransformation:
    """An adaptive server optimiser; `partial(adaptive, "adam")` is a factory for `Federation(server_optimizer=...)`.

    Args:
      rule: "adagrad", "adam" or "yogi".
      server_lr: eta.
      b1, b2: decay of the moments; b1 = 0 turns momentum off, and "adagrad" does not read b2.
      tau: degree of adaptivity, added to the root of v.
      initial: initial value of v; tau squared when not given. The code of MTFL and most other code start at 0.
      bias_correction: whether the rate is multiplied by sqrt(1 - b2^t) / (1 - b1^t) in step t, as Keras does; for "adagrad",
        whose v is a sum, by 1 / (1 - b1^t). In the form of Adam's paper, tau would be multiplied by sqrt(1 - b2^t).

    Raises:
      ValueError: an unknown rule, a rate or tau that is not above 0, a decay outside [0, 1], a negative initial value.
    """
    checks.one_of("rule", rule, SECOND_MOMENTS)
    checks.positive("server_lr", server_lr)
    checks.positive("tau", tau)
    checks.share("b1", b1)
    checks.share("b2", b2)
    start = tau**2 if initial is None else initial
    checks.not_negative("initial", start)

    def init(params: Params) -> Slots:
        first, second = jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda leaf: jnp.full_like(leaf, start), params)
        return Slots(first, second, jnp.zeros((), jnp.int32) if bias_correction else ())

    def update(descent: Updates, slots: Slots, params: Params | None = None) -> tuple[Updates, Slots]:
        del params
        first = jax.tree.map(lambda m, d: b1 * m + (1 - b1) * d, slots.first, descent)
        second = jax.tree.map(lambda v, d: SECOND_MOMENTS[rule](v, d**2, b2), slots.second, descent)
        rate, count = server_lr, slots.count
        if bias_correction:
            count = count + 1
            rate = rate / (1 - jnp.power(b1, count))
            if rule != "adagrad":  # whose v is a sum
                rate = rate * jnp.sqrt(1 - jnp.power(b2, count))
        updates = jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + tau), first, second)
        return updates, Slots(first, second, count)

    return optax.GradientTransformation(init, update)


def fedavg_with(server: Callable[..., optax.GradientTransformation]) -> Callable[..., Method]:
    """Makes a builder of FedAvg with a server optimiser out of a function from options to that optimiser.

    The builder has the options of the function and those of `fedavg`, and the function's name and docstring.
    """
    own, (first, *clients) = inspect.signature(server).parameters, inspect.signature(fedavg).parameters.values()

    @functools.wraps(server)
    def build(task: Task, **options: Any) -> Method:
        given = {name: options.pop(name) for name in own if name in options}
        return dataclasses.replace(fedavg(task, **options), server_optimizer=server(**given))

    parameters = [first, *own.values(), *clients]
    build.__signature__ = inspect.Signature(parameters, return_annotation=Method)  # type: ignore[attr-defined]
    return method_builder(build)


@described("server steps with momentum", "Hsu et al. 1909.06335")
@fedavg_with
def fedavgm(*, server_lr: Rate = 1.0, momentum: Rate = 0.9) -> optax.GradientTransformation:
    """FedAvgM: FedAvg with momentum at the server.

    A client that never took part does what it does in `fedavg`.

    Args:
      server_lr: the server's rate.
      momentum: in [0, 1].
      The others: as in `fedavg`.

    Raises:
      ValueError: an option out of range.
    """
    checks.share("momentum", momentum)
    return optax.sgd(server_lr, momentum=momentum)


@fedavg_with
def fedopt(
    *,
    rule: str = "adam",
    server_lr: Rate = 0.1,
    b1: Rate = 0.9,
    b2: Rate = 0.99,
    tau: Rate = 1e-3,
    initial: Rate | None = None,
    bias_correction: bool = False,
) -> optax.GradientTransformation:
    """FedAvg with an adaptive server optimiser; what `fedadagrad`, `fedadam` and `fedyogi` have in common.

    A client that never took part does what it does in `fedavg`.

    Args:
      rule, server_lr, b1, b2, tau, initial, bias_correction: as in `adaptive`.
      The others: as in `fedavg`.

    Raises:
      ValueError: an option out of range.
    """
    return adaptive(rule, server_lr, b1=b1, b2=b2, tau=tau, initial=initial, bias_correction=bias_correction)


@described("server steps with Adagrad", "Reddi et al. 2003.00295")
@variant(fedopt, rule="adagrad", b1=0.0)
def fedadagrad(task: Task) -> Method:
    """FedAdagrad: v is the sum of all squared pseudo-gradients, and there is no momentum."""


@described("server steps with Adam", "Reddi et al. 2003.00295")
@variant(fedopt, rule="adam")
def fedadam(task: Task) -> Method:
    """FedAdam: v is a moving average of the squared pseudo-gradients."""


@described("server steps with Yogi", "Reddi et al. 2003.00295")
@variant(fedopt, rule="yogi")
def fedyogi(task: Task) -> Method:
    """FedYogi: v moves towards the squared pseudo-gradient by a step that does not depend on how far away it is."""


_FEDAVG = {"b1": 0.0, "b2": 1.0, "tau": 1.0, "initial": 0.0, "server_lr": 1.0}
"""v stays 0 and m is the pseudo-gradient, so that the server's step is the pseudo-gradient itself."""

REDUCES_TO = (
    Reduction("FedAvgM without momentum is FedAvg", "fedavgm", {"momentum": 0.0}, "fedavg", {}),
    Reduction("FedAdam without moments is FedAvg", "fedadam", _FEDAVG, "fedavg", {}),
    Reduction("FedYogi without moments is FedAvg", "fedyogi", _FEDAVG, "fedavg", {}),
)
