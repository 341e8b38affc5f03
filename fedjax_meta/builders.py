"""What every builder of a method has in common: its arguments are checked at the call and recorded in the method.

`@method_builder` marks a function `(task, *, options) -> Method`. `@variant(builder, option=value)` makes a builder of another
name, whose defaults differ. `@described(words, paper)` says in a line what it builds.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, get_args

from fedjax_meta import checks, federation
from fedjax_meta.aggregate import WEIGHTINGS
from fedjax_meta.config import plain
from fedjax_meta.contract import Method
from fedjax_meta.task import require_task

P = ParamSpec("P")

_BELONGS = dict.fromkeys(federation.OPTIONS, "Federation")
"""Where an option belongs that no builder takes."""

SHARED = ("weighting", "server_lr")
"""Options of `Federation` whose names a method may give to its own: the paper's weighting, and the rate of the paper's server."""


def _weighting(name: str, value: Any) -> None:
    checks.one_of(name, value, WEIGHTINGS)


_or_zero = functools.partial(checks.count, least=0)

PRIVATE = "private_task"
"""Where the config of a method says that the gradients of its task are private, see `privacy.private_task`."""

USUAL: dict[str, Callable[[str, Any], None]] = {
    "lr": checks.positive,
    "head_lr": checks.positive,
    "personal_lr": checks.positive,
    "outer_lr": checks.positive,
    "server_lr": checks.positive,
    "inner_lr": checks.not_negative,
    "prox_weight": checks.not_negative,
    "epochs": checks.count,
    "batch_size": checks.count,
    "inner_steps": checks.count,
    "local_steps": checks.count,
    "test_steps": checks.count,
    "test_epochs": checks.count,
    "finetune_epochs": _or_zero,
    "new_client_epochs": _or_zero,
    "optimizer": checks.optimizer_factory,
    "inner_optimizer": checks.optimizer_factory,
    "outer_optimizer": checks.optimizer_factory,
    "weighting": _weighting,
    "train_view": checks.word,
    "validation_view": checks.word,
}
"""Checks of options that many builders have; `None`, where a builder allows it, passes."""


def method_builder(function: Callable[P, Method]) -> Callable[P, Method]:
    """Marks a builder of methods.

    The first argument must be a `Task`. A keyword that the builder does not take is refused under the builder's name, with the
    nearest name that it takes. Options with the names of `USUAL`, and bools, are checked; a builder checks only what is its own.
    The method's `task` is the first argument, and its `config` holds the builder's name and every option, defaults included.

    Raises:
      TypeError: options that are not keyword-only, or that have the name of one of `Federation`, but for `SHARED`.

    Raises (the builder, when called):
      TypeError: an unknown option, an option that belongs to `Federation`, one that is missing.
      ValueError: a first argument that is no task, a usual option out of range.
    """
    name, signature = function.__name__, _signature(function)
    others = list(signature.parameters.values())[1:]
    by_place = [p.name for p in others if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if by_place:
        raise TypeError(f"{name}: options are given by name: write def {name}(task, *, {', '.join(by_place)}, ...)")
    taken = [p.name for p in others if p.name in _BELONGS and p.name not in SHARED]
    if taken:
        raise TypeError(f"{name}: {taken[0]} is the name of an option of Federation: give the method's option another one")
    allowed = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    flags = {p.name for p in signature.parameters.values() if p.annotation is bool}
    may_be_none = {p.name for p in signature.parameters.values() if p.default is None or type(None) in get_args(p.annotation)}

    @functools.wraps(function)
    def build(*args: P.args, **options: P.kwargs) -> Method:
        given: dict[str, Any] = dict(options)
        if len(args) > 1:
            raise TypeError(f"{name} takes a task and, by name, {', '.join(allowed)}; write {name}(task, {allowed[0]}=...)")
        task: Any = args[0] if args else given.pop("task", None)
        require_task(name, task)
        checks.options(name, given, allowed, {key: where for key, where in _BELONGS.items() if key not in allowed})
        try:
            bound = signature.bind(task, **given)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        bound.apply_defaults()
        for option, value in bound.arguments.items():
            check = checks.flag if option in flags else USUAL.get(option)
            if check is not None and not (value is None and option in may_be_none):
                check(option, value)
        recorded = {key: plain(bound.arguments[key]) for key in allowed}
        private = getattr(task, "private", None)
        if private is not None:
            recorded[PRIVATE] = plain(private)
        made = function(*args, **options)
        if not isinstance(made, Method):
            raise TypeError(f"{name} must return an fm.Method, not {checks.shown(made)}")
        return dataclasses.replace(made, task=task, config={"method": name, **recorded})

    build.is_method_builder = True  # type: ignore[attr-defined]
    build.__signature__ = signature  # type: ignore[attr-defined]
    return build


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """A signature with annotations as types, also where a file has them as text (`from __future__ import annotations`)."""
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # a type that is imported for type checkers alone, say; annotations may be any text
        return inspect.signature(function)


def is_builder(thing: Any) -> bool:
    """Whether a thing was marked with `method_builder`."""
    return getattr(thing, "is_method_builder", False) is True


def variant(base: Callable[P, Method], **defaults: Any) -> Callable[[Callable[..., Any]], Callable[P, Method]]:
    """A builder with the options of `base` and other defaults; decorates an empty function that gives its name and docstring.

    Raises:
      TypeError: a default that `base` does not take.

    Example:
      @variant(fedavg, personal="head")
      def fedper(task):
          "FedPer: FedAvg whose last layers stay with their client."
    """
    signature = inspect.signature(base)
    parameters = list(signature.parameters.values())
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    checks.options(base.__name__, defaults, allowed, {})
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in parameters]

    def decorate(named: Callable[..., Any]) -> Callable[P, Method]:
        def build(*args: P.args, **options: P.kwargs) -> Method:
            given: Any = {**defaults, **options}
            return base(*args, **given)

        build.__name__, build.__qualname__, build.__module__ = named.__name__, named.__qualname__, named.__module__
        changed = ", ".join(f"{key}={plain(value)!r}" for key, value in defaults.items())
        build.__doc__ = (
            f"{inspect.cleandoc(named.__doc__ or '')}\n\nArguments, errors: as in `{base.__name__}`, with {changed}.\n"
        )
        build.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return _say(method_builder(build), About(paper=about(base).paper))

    return decorate


class About(NamedTuple):
    """What lists of methods say of a builder.

    Attributes:
      words: what its method does, in few words.
      paper: "Huang et al. 2007.03797", of arXiv, or "Yang et al. (CVPR 2024)"; empty where there is none.
    """

    words: str = ""
    paper: str = ""


def described(words: str, paper: str | None = None) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Says what a builder's method does, for `fedjax-meta list methods` and the gallery; stands above the other decorators.

    Args:
      words: about 30 characters, because name, words and paper share a line of 80.
      paper: see `About`; when not given, that of the builder which a variant varies.

    Example:
      @described("a mixture of models for each", "Huang et al. 2007.03797")
      @method_builder
      def fedamp(task, *, lr=0.01): ...
    """

    def mark(build: Callable[P, Method]) -> Callable[P, Method]:
        return _say(build, About(words, about(build).paper if paper is None else paper))

    return mark


def about(build: Callable[..., Method]) -> About:
    """What `described` says of a builder; empty where it says nothing."""
    found: About = getattr(build, "about", About())
    return found


def _say(build: Callable[P, Method], said: About) -> Callable[P, Method]:
    build.about = said  # type: ignore[attr-defined]
    return build
