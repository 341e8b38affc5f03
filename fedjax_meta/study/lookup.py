"""The methods, models and partitions that a study names: the package's by name, a user's own by where they are, "module:name"."""

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

from fedjax_meta import checks
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
            f"{what} {name} must take classes and one of {', '.join(FORMS)}, or vocabulary and length, but it takes "
            f"{', '.join(inspect.signature(found).parameters) or 'nothing'}"
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
        raise ValueError(f"{what} {name} must be a function (labels, num_clients, *, seed, ...), not {checks.shown(found)}")
    return found


def is_own(name: Any) -> TypeGuard[str]:
    """Whether a name says where a thing of a user's own is."""
    return isinstance(name, str) and ":" in name
