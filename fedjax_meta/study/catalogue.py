"""What a study may name, in one line each, and its options: for `fedjax-meta list`."""

import functools
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_meta import checks
from fedjax_meta.builders import about
from fedjax_meta.data.registry import PAPERS, PARTITIONS, natural
from fedjax_meta.methods import METHODS
from fedjax_meta.models import MODELS
from fedjax_meta.study.parts import AGGREGATORS, ATTACKS, ESTIMATORS, OPTIMIZERS, PARTICIPATION, SCHEDULES, UPLOADS
from fedjax_meta.study.scenario import SHIFTS

WIDTH = 80

MASKS = {
    "all": "every leaf",
    "none": "no leaf",
    "head": "the last layer, as the model says it",
    "body": "all but the head",
    "last:DEPTH": "the last DEPTH layers, e.g. last:2",
    "first:DEPTH": "the first DEPTH layers",
    "bn": "batch norm: scales, shifts and statistics",
    "bn_affine": "batch norm: scales and shifts",
    "bn_stats": "batch norm: statistics",
    "path:REGEX": "leaves whose path a/b/c the expression is found in",
    "A+B": "the leaves of several masks",
}


FUNCTIONS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "methods": METHODS,
    "partitions": {**PARTITIONS, "natural": natural, **PAPERS},
    "models": MODELS,
    "shifts": SHIFTS,
    "parts": {
        f"{kind}: {name}": make
        for kind, registry in {
            "estimator": ESTIMATORS,
            "optimizer": OPTIMIZERS,
            "aggregator": AGGREGATORS,
            "attack": ATTACKS,
            "schedule": SCHEDULES,
            "participation": PARTICIPATION,
            "uploads": UPLOADS,
        }.items()
        for name, make in registry.items()
    },
}
"""What has options of its own, by name."""


_GIVEN: dict[str, tuple[str, ...]] = {
    "methods": ("task",),
    "partitions": ("labels", "source", "path", "num_clients", "seed"),
    "models": ("inputs", "image", "window", "vocabulary", "length", "items", "classes", "loss"),
    "shifts": ("data", "seed"),
    "parts": ("inner", "learning_rate"),
}
"""Parameters that come from elsewhere in a study."""


def options(what: str, name: str) -> list[str]:
    """What a method, a part or the like is, in a line, and its options with their defaults, one a line.

    Args:
      what: "methods", "partitions", ...
      name: of one of them; a part by its own name stands for all that have it.

    Raises:
      ValueError: no such name, or names without options.

    Example:
      >>> options("parts", "clip")
      ['uploads: clip: Clips uploads to `norm`', '  norm']
    """
    checks.one_of("what has options", what, FUNCTIONS)
    known = FUNCTIONS[what]
    found = [key for key in known if name in (key, key.rpartition(": ")[2])]
    if not found:
        checks.one_of(what.removesuffix("s"), name, known)
    made = []
    for key in found:
        made.append(f"{key}: {about(known[key]).words if what == 'methods' else summary(known[key])}")
        takes = inspect.signature(known[key]).parameters.values()
        made += [f"  {one.name}{_default(one.default)}" for one in takes if one.name not in _GIVEN[what]]
    return made


def _default(value: Any) -> str:
    """A default as a study writes it; nothing where an option must be given."""
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, functools.partial):
        value = {"name": value.func.__name__.lstrip("_"), **value.keywords}
    return f": {value.__name__ if callable(value) else json.dumps(value)}"


def summary(thing: Any) -> str:
    """The first sentence of a docstring."""
    text = inspect.getdoc(getattr(thing, "func", thing)) or ""
    return re.split(r"(?:[.:;]|, )\s+(?=[A-Z`a-z])", text.split("\n\n")[0].replace("\n", " "))[0].rstrip(".")


def lines(entries: dict[str, tuple[str, str]], *, width: int = WIDTH, wrap: bool = False) -> list[str]:
    """One line for each entry, (words, citation) by name.

    Args:
      entries: what to list.
      width: of the longest line.
      wrap: whether words that do not fit go on below; else they are cut after a whole word.
    """
    first = max(map(len, entries), default=0) + 2
    made = []
    for name, (words, source) in entries.items():
        room = width - first - (len(source) + 2 if source else 0)
        fitting = textwrap.wrap(words, room) if wrap else [textwrap.shorten(words, room, placeholder=" ...")]
        made.append(f"{name:<{first}}{fitting[0]:<{room}}{f'  {source}' if source else ''}".rstrip())
        made += [f"{'':<{first}}{more}" for more in fitting[1:]]
    return made
