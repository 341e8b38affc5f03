"""What a study names: methods, models and partitions by name, and a user's own things by where they are, "module:name"."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

from fedjax_meta import checks
from fedjax_meta.attacks import Attack
from fedjax_meta.builders import is_builder
from fedjax_meta.contract import Method
from fedjax_meta.data.registry import PAPERS, PARTITIONS, natural
from fedjax_meta.imports import imported
from fedjax_meta.methods import METHODS
from fedjax_meta.models import MODELS
from fedjax_meta.task import Task

_OWN = "module:name"
"""Ends the list of what is allowed."""

FORMS = ("inputs", "image", "window")
"""How a model may take the shape of one sample."""

FROM_DATA = (*FORMS, "classes", "vocabulary", "length", "loss")
"""Arguments of a model that come from the data of a scenario."""


def method(name: str, what: str = "method") -> Callable[..., Method]:
    """The builder of a method.

    Args:
      name: in `METHODS`, or "module:name".
      what: names it, for messages.

    Raises:
      ValueError: an unknown name, a module or a name in it that is not there, something that is no builder.
    """
    if not is_own(name):
        checks.one_of(what, name, [*METHODS, _OWN])
        return METHODS[name]
    found = imported(what, name)
    if not is_builder(found):
        raise ValueError(f"{what} {name} must be a builder, made with @fm.method_builder, not {checks.shown(found)}")
    return found


def model(name: str, what: str = "model") -> Callable[..., Task]:
    """The builder of a model; arguments and errors as in `method`.

    One of a user's own is a function as those of `MODELS` are: it takes a form of the data by its name, and returns a `Task`.
    """
    if not is_own(name):
        checks.one_of(what, name, [*MODELS, _OWN])
        return MODELS[name]
    found = imported(what, name)
    if not callable(found):
        raise ValueError(f"{what} {name} must be a function that returns a Task, not {checks.shown(found)}")
    takes = set(inspect.signature(found).parameters)
    if not {"vocabulary", "length"} <= takes and not ("classes" in takes and takes & {*FORMS}):
        raise ValueError(
            f"{what} {name} must take classes and one of {', '.join(FORMS)}, or vocabulary and length, {_unlike(found)}"
        )
    return found


def partition(name: str, what: str = "partition") -> Callable[..., Any]:
    """The rule of a partition; arguments and errors as in `method`.

    One of a user's own is a function as those of `PARTITIONS` are: `(labels, num_clients, *, seed, ...) -> Partition`.
    """
    if not is_own(name):
        rules: dict[str, Callable[..., Any]] = {**PARTITIONS, "natural": natural, **PAPERS}
        checks.one_of(what, name, [*rules, _OWN])
        return rules[name]
    found = imported(what, name)
    takes = inspect.signature(found).parameters.values() if callable(found) else ()
    options = {one.name for one in takes if one.kind is one.KEYWORD_ONLY}
    if len(takes) != len(options) + 2 or "seed" not in options:
        raise ValueError(f"{what} {name} must be a function (labels, num_clients, *, seed, ...), {_unlike(found)}")
    return found


def aggregator(name: str) -> Callable[..., Any]:
    """The builder of a user's own aggregator, "module:name"; its arguments are the options.

    It is an aggregator with options, `(stacked, weights, *, ...) -> tree`, or a function of the options alone, `(*, ...)`, that
    returns an aggregator or an `aggregate.Rule`.

    Raises:
      ValueError: a module or a name in it that is not there, a function of another form.
    """
    found = imported("aggregator", name)
    takes = list(inspect.signature(found).parameters.values()) if callable(found) else []
    options = [one for one in takes if one.kind is one.KEYWORD_ONLY]
    if not callable(found) or len(takes) - len(options) not in (0, 2):
        raise ValueError(
            f"aggregator {name} must be a function (stacked, weights, *, ...), or (*, ...) that returns a rule, {_unlike(found)}"
        )
    if len(takes) == len(options):
        return found

    @functools.wraps(found)
    def build(**given: Any) -> Any:
        return functools.partial(found, **given)

    vars(build)["__signature__"] = inspect.Signature(options)
    return build


def attack(name: str) -> Callable[..., Attack]:
    """The builder of a user's own attack, "module:name": `(attackers, ...) -> Attack`; its arguments are the options.

    Raises:
      ValueError: a module or a name in it that is not there, a function of another form, one that returns no `Attack`.
    """
    found = imported("attack", name)
    if not callable(found) or "attackers" not in inspect.signature(found).parameters:
        raise ValueError(f"attack {name} must be a function (attackers, ...) that returns an Attack, {_unlike(found)}")

    @functools.wraps(found)
    def build(**given: Any) -> Attack:
        made = found(**given)
        if not isinstance(made, Attack):
            raise ValueError(f"attack {name} must return an Attack, not {checks.shown(made)}")
        return made

    return build


def _unlike(found: Any) -> str:
    """Ends a message about a thing that is no function of the form that it must have."""
    if not callable(found):
        return f"not {checks.shown(found)}"
    takes = [
        f"{one.name}=..." if one.kind is one.KEYWORD_ONLY else one.name for one in inspect.signature(found).parameters.values()
    ]
    return f"but it takes {', '.join(takes) or 'nothing'}"


def rule(name: str) -> Callable[..., Any]:
    """The builder of a user's own aggregator or attack: an attack takes `attackers`."""
    found = imported("part", name)
    takes = inspect.signature(found).parameters if callable(found) else ()
    return attack(name) if "attackers" in takes else aggregator(name)


def is_own(name: Any) -> TypeGuard[str]:
    """Whether a name says where a thing of a user's own is."""
    return isinstance(name, str) and ":" in name
