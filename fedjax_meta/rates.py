"""Rates that change over rounds: any rate of any method as a function of the round."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.config import plain
from fedjax_meta.contract import Method, no_extra, no_memory
from fedjax_meta.dependence import marks_of
from fedjax_meta.types import Scalar

Schedule = Callable[[Scalar], Scalar]
"""`finished rounds -> rate`, traceable; those of optax are such functions."""


def scheduled(build: Callable[..., Method], task: Any, *, rates: Mapping[str, Schedule], **options: Any) -> Method:
    """A method with rates that change from round to round.

    The rules of round r work as those of `build(task, lr=schedule(r))` would, and so does a client that adapts after r rounds. A
    server optimiser's rate is scheduled by optax instead: `Federation(server_optimizer=lambda rate:
    optax.sgd(optax.cosine_decay_schedule(rate, 100)), server_lr=1.0)` counts the rounds in its own state.

    Args:
      build: a builder of methods, e.g. `fm.fedavg`.
      task: its task.
      rates: by name of an option a function of the number of finished rounds, e.g.
        `{"lr": optax.cosine_decay_schedule(0.1, 100)}`.
      **options: other options of the builder.

    Raises:
      ValueError: an option that is no rate, a function that gives no number, a rate of the method's own server optimiser. From
        the method: a rule that reads a rate and knows no round (`init`, `predict`, `init_memory`, `init_extra`, `remember`).

    Example:
      >>> import fedjax_meta as fm, optax
      >>> task = fm.classification(lambda key: jnp.zeros((4, 3)), lambda p, x: x @ p)
      >>> method = scheduled(fm.fedavg, task, rates={"lr": optax.exponential_decay(0.1, 10, 0.5)}, epochs=2)
      >>> method.config["lr"].partition("(")[0], "init_value=0.1" in method.config["lr"], method.config["epochs"]
      ('optax.schedules._schedule.exponential_decay.<locals>.schedule', True, 2)
    """
    checks.function("build", build, ("task",), "fm.fedavg")
    if not isinstance(rates, Mapping) or not rates:
        raise ValueError(f"rates={checks.shown(rates)} must be a dict, e.g. {{'lr': optax.cosine_decay_schedule(0.1, 100)}}")
    for name, schedule in rates.items():
        checks.function(f"rates[{name!r}]", schedule, ("round",), "optax.cosine_decay_schedule(0.1, 100)")

    def at(round_: Scalar) -> Method:
        # A schedule may give an integer, or a Python number for any round.
        now = {name: jnp.asarray(schedule(round_), jnp.result_type(float)) for name, schedule in rates.items()}
        return build(task, **options, **now)

    first = {name: jnp.asarray(schedule(jnp.zeros((), jnp.int32)), jnp.result_type(float)) for name, schedule in rates.items()}
    odd = next((name for name, value in first.items() if value.shape != ()), None)
    if odd is not None:
        raise ValueError(f"rates[{odd!r}] must give one number for a round, not an array {list(first[odd].shape)}")
    # In a sweep, the start of a schedule may be traced, as any rate.
    known = {name: value if isinstance(value, jax.core.Tracer) else float(value) for name, value in first.items()}
    base = build(task, **options, **known)
    try:
        _check_server(base, at)
    except jax.errors.ConcretizationTypeError:
        names = ", ".join(rates)
        raise ValueError(f"{base.name} must know {names} before the run: it cannot change from round to round") from None

    def client(key: Any, received: Any, data: Any) -> Any:
        return at(received.round).client(key, received, data)

    def personalize(key: Any, received: Any, support: Any) -> Any:
        return at(received.round).personalize(key, received, support)

    changes: dict[str, Any] = {"client": client, "personalize": personalize}
    plain_rules = (None, task.init, task.predict, no_memory, no_extra)
    changes |= {part: _same_in_all_rounds(base, at, part) for part in _WITHOUT_ROUND if getattr(base, part) not in plain_rules}
    if base.new_client is not None:
        changes["new_client"] = lambda key, population, support: _of(at(population.round), "new_client")(
            key, population, support
        )
    if base.update_extra is not None:
        changes["update_extra"] = lambda state, *given: _of(at(state.round), "update_extra")(state, *given)
    if base.direction is not None:
        changes["direction"] = lambda state, *given: _of(at(state.round), "direction")(state, *given)
    if base.inherit is not None:
        changes["inherit"] = lambda before, after: _of(at(before.round), "inherit")(before, after)
    if base.collaborate is not None:
        mix = lambda key, state, cohort, data: _of(at(state.round), "collaborate").mix(key, state, cohort, data)  # noqa: E731
        changes["collaborate"] = base.collaborate._replace(mix=mix)
    config = {**base.config, **{name: plain(schedule) for name, schedule in rates.items()}}
    return dataclasses.replace(base, **changes, config=config)


_WITHOUT_ROUND = ("init", "predict", "init_memory", "init_extra", "remember")
"""The rules of a method that do not know which round it is."""


def _same_in_all_rounds(base: Method, at: Callable[[Scalar], Method], part: str) -> Callable[..., Any]:
    """A rule that refuses to be traced if it reads a rate, which would stay that of round 0."""
    rule = getattr(base, part)

    def checked(*given: Any) -> Any:
        if any(jax.tree.leaves(marks_of(lambda round_: getattr(at(round_), part)(*given), True, jnp.zeros((), jnp.int32)))):
            raise ValueError(f"{base.name} reads a rate in {part}, which does not know the round: it cannot change")
        return rule(*given)

    return checked


def _of(method: Method, part: str) -> Any:
    return getattr(method, part)


def _check_server(base: Method, at: Callable[[Scalar], Method]) -> None:
    """Raises `ValueError` if the method's own server optimiser reads a rate, which would stay that of round 0."""

    def step(round_: Scalar) -> Any:
        optimizer = at(round_).server_optimizer
        if optimizer is None:
            return ()
        weight = jnp.ones(2)
        return optimizer.update(weight, optimizer.init(weight), weight)[0]

    jaxpr = jax.make_jaxpr(step)(jnp.zeros((), jnp.int32)).jaxpr
    # If the update does not depend on the round, removing dead code removes that input.
    _, used = jax.interpreters.partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    if any(used):
        raise ValueError(
            f"{base.name} gives this rate to its own server optimiser, which counts rounds itself: give it an optax schedule as "
            "Federation(server_optimizer=lambda rate: optax.sgd(schedule), server_lr=...)"
        )
