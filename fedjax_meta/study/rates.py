"""How a rate changes over the rounds of a study, by name: factors that a rate, tuned or not, is multiplied by."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from fedjax_meta import checks, rates
from fedjax_meta.asynchronous import Asynchronous
from fedjax_meta.contract import Method
from fedjax_meta.federation import Federation
from fedjax_meta.rates import Schedule
from fedjax_meta.task import Task
from fedjax_meta.types import Rate

SERVER = "server_lr"
"""The rate of a federation."""


def cosine(*, rounds: int, end: float = 0.01, warmup: int = 0) -> Schedule:
    """The rate falls along half a cosine, from all of it to a share of it.

    Args:
      rounds: in which it falls; a study gives its own where a system does not say them.
      end: that share, above 0: clients adapt in tests with what is left.
      warmup: rounds before, in which it rises: 1 / warmup of it in the first one. They count among `rounds`.
    """
    _check_falling(rounds, end, warmup)
    return _after(warmup, optax.cosine_decay_schedule(1.0, rounds - warmup, end))


def linear(*, rounds: int, end: float = 0.01, warmup: int = 0) -> Schedule:
    """The rate falls along a line, from all of it to a share of it.

    Args:
      rounds, end, warmup: as in `cosine`.
    """
    _check_falling(rounds, end, warmup)
    return _after(warmup, optax.linear_schedule(1.0, end, rounds - warmup))


def exponential(*, factor: float, every: int = 1) -> Schedule:
    """The rate is multiplied by a factor after every so many rounds.

    Args:
      factor: above 0, at most 1.
      every: rounds.
    """
    _check_factor("factor", factor)
    checks.count("every", every)
    return optax.exponential_decay(1.0, every, factor, staircase=True)


def steps(*, after: Sequence[int], factor: float = 0.1) -> Schedule:
    """The rate is multiplied by a factor after each of some rounds.

    Args:
      after: numbers of finished rounds, increasing.
      factor: above 0, at most 1.
    """
    if not isinstance(after, (list, tuple)) or not after:
        raise ValueError(f"after={checks.shown(after)} must be a list of numbers of rounds, e.g. [50, 75]")
    for number in after:
        checks.count("after", number)
    if any(one >= other for one, other in itertools.pairwise(after)):
        raise ValueError(f"after={list(after)} must increase")
    _check_factor("factor", factor)
    return optax.piecewise_constant_schedule(1.0, dict.fromkeys(after, factor))


def inverse(*, power: float = 1.0, half: float = 1.0) -> Schedule:
    """The rate is divided by (1 + r / half)^power after r rounds, as proofs of convergence have it.

    Args:
      power: above 0.
      half: after how many rounds it is divided by 2^power, above 0.
    """
    checks.positive("power", power)
    checks.positive("half", half)

    def divided(round_: Any) -> Any:
        return (1 + round_ / half) ** -power

    return divided


RATES: dict[str, Callable[..., Schedule]] = {
    "cosine": cosine,
    "linear": linear,
    "exponential": exponential,
    "steps": steps,
    "inverse": inverse,
}
"""By name, what makes a factor of the number of finished rounds."""


def of(build: Callable[..., Method]) -> list[str]:
    """The options of a builder that may change over the rounds: those annotated as `Rate`.

    A user's own builder may not say it. There, a default that is a whole number, a bool or text is taken for what cannot change.
    """
    taken = [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unsaid = [p for p in taken if p.annotation is p.empty or isinstance(p.annotation, str)]
    fixed = [p for p in unsaid if isinstance(p.default, (int, str))]
    return [p.name for p in taken if (p in unsaid or p.annotation in (Rate, Rate | None)) and p not in fixed]


def _check_falling(rounds: int, end: float, warmup: int) -> None:
    checks.count("rounds", rounds)
    _check_factor("end", end)
    checks.count("warmup", warmup, least=0)
    if warmup >= rounds:
        raise ValueError(f"warmup={warmup} must be below rounds={rounds}")


def _check_factor(name: str, factor: float) -> None:
    checks.positive(name, factor)
    checks.share(name, factor)


def _after(warmup: int, falling: Schedule) -> Schedule:
    if not warmup:
        return falling
    return optax.join_schedules([optax.linear_schedule(1 / warmup, 1 + 1 / warmup, warmup), falling], [warmup])


def method(build: Callable[..., Method], task: Task, factors: Mapping[str, Schedule], options: Mapping[str, Any]) -> Method:
    """The method of a builder, some of whose rates change over the rounds.

    Args:
      build, task: the builder and its task.
      factors: by the name of an option, the factor of its value.
      options: of the builder; values may be traced.

    Raises:
      ValueError: a rate without a value, and what `rates.scheduled` refuses.
    """
    if not factors:
        return build(task, **options)
    changing = {}
    for name, factor in factors.items():
        start = options.get(name, inspect.signature(build).parameters[name].default)
        if start is None or start is inspect.Parameter.empty:
            raise ValueError(f"rates: {name} has no value that could change over the rounds: give it one")
        checks.finite(name, start)
        changing[name] = times(start, factor)
    return rates.scheduled(build, task, rates=changing, **{key: value for key, value in options.items() if key not in factors})


def times(start: Any, factor: Schedule) -> Schedule:
    """The rate `start * factor(r)` after r rounds; `start` may be traced."""

    def rate(round_: Any) -> Any:
        # Optax divides whole numbers in 32 bits, also where the rest has 64.
        return start * factor(jnp.asarray(round_, jnp.result_type(float)))

    return rate


def federation(made: Federation, factor: Schedule | None, method: Method) -> Federation:
    """A federation whose server's rate changes over its steps: what its optimiser gives is multiplied by a factor.

    This equals a rate that changes, because every optimiser of a study multiplies by its rate last.

    Raises:
      ValueError: a method that takes no server optimiser or has one of its own; FedAsync, where the rate is a share of models
        that are mixed.
    """
    if factor is None:
        return made
    if method.server_optimizer is not None and made.server_optimizer is None:
        raise ValueError(
            f"rates: {SERVER} is the federation's, but {method.name} has a server optimiser of its own: give the federation "
            f"server_optimizer and {SERVER}"
        )
    if "server_optimizer" in method.refuses:
        raise ValueError(f"rates: {SERVER} of {method.name} cannot change: {method.refuses['server_optimizer']}")
    if isinstance(made.schedule, Asynchronous) and made.schedule.mixes_models:
        raise ValueError(
            f"rates: in {made.schedule.name}, {SERVER} is a share of models that are mixed: leave {SERVER} out of rates"
        )
    optimizer = optax.sgd if made.server_optimizer is None else made.server_optimizer
    rate = 1.0 if made.server_lr is None else made.server_lr

    def changing(rate: Any) -> optax.GradientTransformation:
        return optax.chain(optimizer(rate), optax.scale_by_schedule(times(1.0, factor)))

    return dataclasses.replace(made, server_optimizer=changing, server_lr=rate)
