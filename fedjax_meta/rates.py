"""Rates that change over rounds: any rate of any method as a function of the round."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
      ValueError: an option that is no rate, a function that gives no number or takes no traced round, a rate of the method's own
        server optimiser. From the method: an option that must be known before the run, and a rule that reads a rate and knows no
        round (`init`, `predict`, `init_memory`, `init_extra`, `remember`).

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

    first = {name: _at_start(name, schedule) for name, schedule in rates.items()}
    names = " or ".join(rates)

    def at(round_: Scalar) -> Method:
        # A schedule may give an integer, or a Python number for any round.
        now = {name: jnp.asarray(schedule(round_), jnp.result_type(float)) for name, schedule in rates.items()}
        return build(task, **options, **now)

    base = build(task, **options, **first)
    with _known_before(base, names):
        _check_server(base, at, names)

    def in_round(part: str) -> Callable[..., Any]:
        def rule(*given: Any) -> Any:
            with _known_before(base, names, partial(getattr(base, part), *given)):
                return getattr(at(given[_WITH_ROUND[part]].round), part)(*given)

        return rule

    def mix(key: Any, state: Any, cohort: Any, data: Any) -> Any:
        assert base.collaborate is not None
        with _known_before(base, names, partial(base.collaborate.mix, key, state, cohort, data)):
            now = at(state.round).collaborate
            assert now is not None
            return now.mix(key, state, cohort, data)

    plain_rules = (None, task.init, task.predict, no_memory, no_extra)
    changes: dict[str, Any] = {part: in_round(part) for part in _WITH_ROUND if getattr(base, part) is not None}
    changes |= {
        part: _same_in_all_rounds(base, at, names, part) for part in _WITHOUT_ROUND if getattr(base, part) not in plain_rules
    }
    if base.collaborate is not None:
        changes["collaborate"] = base.collaborate._replace(mix=mix)
    config = {**base.config, **{name: plain(schedule) for name, schedule in rates.items()}}
    return dataclasses.replace(base, **changes, config=config)


_WITH_ROUND = {"client": 1, "personalize": 1, "new_client": 1, "update_extra": 0, "direction": 0, "inherit": 0}
"""The rules of a method that know which round it is, and which of their arguments does. `collaborate` is another one."""

_WITHOUT_ROUND = ("init", "predict", "init_memory", "init_extra", "remember")
"""Those that do not know it."""

_NEEDS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where a program needs a number that it only traces."""


def _at_start(name: str, schedule: Schedule) -> Any:
    """The rate before the first round; traced in a sweep, as any rate may be."""
    try:
        shape = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except _NEEDS_NUMBERS:
        raise ValueError(
            f"rates[{name!r}] must take a traced round: jnp.where(round < 9, 0.1, 0.01) in place of `if`"
        ) from None
    except TypeError as error:
        raise ValueError(f"rates[{name!r}] must give one number for a round: {checks.first_line(error)}") from error
    if getattr(shape, "shape", None) != ():
        raise ValueError(f"rates[{name!r}] must give one number for a round, not {checks.shown(shape)}")
    value = jnp.asarray(schedule(jnp.zeros((), jnp.int32)), jnp.result_type(float))
    return value if isinstance(value, jax.core.Tracer) else float(value)


@contextlib.contextmanager
def _known_before(method: Method, names: str, plainly: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Raises `ValueError` where code needs a rate as a number. If `plainly`, without changes, fails too, that is its error."""
    try:
        yield
    except _NEEDS_NUMBERS as error:
        plainly()
        raise ValueError(f"{method.name} must know {names} before the run: it cannot change from round to round") from error


def _same_in_all_rounds(base: Method, at: Callable[[Scalar], Method], names: str, part: str) -> Callable[..., Any]:
    """A rule that refuses to be traced if it reads a rate, which would stay that of round 0."""
    rule = getattr(base, part)

    def checked(*given: Any) -> Any:
        if any(jax.tree.leaves(marks_of(lambda round_: getattr(at(round_), part)(*given), True, jnp.zeros((), jnp.int32)))):
            raise ValueError(f"{base.name} reads {names} in {part}, which does not know the round: it cannot change")
        return rule(*given)

    return checked


def _check_server(base: Method, at: Callable[[Scalar], Method], names: str) -> None:
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
            f"{base.name} gives {names} to its own server optimiser, which counts rounds itself: give the federation one, "
            "Federation(server_optimizer=lambda rate: optax.sgd(schedule), server_lr=1.0), or in a study server_optimizer: sgd, "
            "server_lr: 1.0, rates: {server_lr: cosine}"
        )
