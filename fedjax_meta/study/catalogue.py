"""What a study may name, in one line each, and its options: for `fedjax-meta list`."""

import functools
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_meta import checks
from fedjax_meta.builders import about
from fedjax_meta.data.registry import PAPERS, PARTITIONS, natural
from fedjax_meta.methods import METHODS
from fedjax_meta.models import MODELS
from fedjax_meta.study import lookup
from fedjax_meta.study.parts import (
    AGGREGATORS,
    ATTACKS,
    ESTIMATORS,
    OPTIMIZERS,
    PARTICIPATION,
    SCHEDULES,
    STEP_WEIGHTS,
    UPLOADS,
)
from fedjax_meta.study.rates import RATES
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
            "step_weights": STEP_WEIGHTS,
            "optimizer": OPTIMIZERS,
            "rates": RATES,
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


def options(what: str, name: str, *, width: int = WIDTH) -> list[str]:
    """What a method, a part or the like is, and its options: a line with the default, then what its docstring says.

    Args:
      what: "methods", "partitions", ...
      name: of one of them; a part by its own name stands for all that have it; "module:name" is one of a user's own.
      width: of the longest line.

    Raises:
      ValueError: no such name, or names without options.

    Example:
      >>> options("parts", "clip")
      ['uploads: clip: Clips uploads to `norm`', '  norm: required', '      S, above 0; may be traced.']
    """
    if what not in FUNCTIONS:
        raise ValueError(f"{what} have no options to list; {', '.join(FUNCTIONS)} have")
    known = FUNCTIONS[what]
    own: dict[str, Callable[[str], Any]] = {"methods": lookup.method, "models": lookup.model, "partitions": lookup.partition}
    own["parts"] = lookup.rule
    if lookup.is_own(name) and ": " not in name and what in own:
        known = {name: own[what](name)}
    found = [key for key in known if name in (key, key.rpartition(": ")[2])]
    if not found:
        checks.one_of(what.removesuffix("s"), name, known)
    made = []
    for key in found:
        made += textwrap.wrap(f"{key}: {about(known[key]).words or summary(known[key])}", width, subsequent_indent="  ")
        said = _said(known[key])
        for one in inspect.signature(known[key]).parameters.values():
            if one.name not in _GIVEN[what]:
                made.append(f"  {one.name}: {_default(one.default)}")
                made += textwrap.wrap(said.get(one.name, ""), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return made


_BASE = re.compile(r"(?:[Aa]rguments[\w, ]*:?|The others:) as (?:in|for) `(\w+)`")
_AS_IN = re.compile(r"(?:as in|see) `([\w.]+)`")


def _said(function: Callable[..., Any]) -> dict[str, str]:
    """What a docstring says of each argument. It may name another function that says it, of its own module or a method."""
    function = getattr(function, "func", function)
    text = inspect.getdoc(function) or ""

    def of(name: str) -> dict[str, str]:
        first, *rest = name.split(".")
        start = getattr(sys.modules.get(function.__module__), first, None) or METHODS.get(first)
        start = start or sys.modules.get(f"fedjax_meta.{first}")
        other = functools.reduce(lambda thing, word: getattr(thing, word, None), rest, start)
        return _said(other) if callable(other) and other is not function else {}

    base = _BASE.search(text)
    found = of(base[1]) if base else {}
    section = re.search(r"^(?:Args|Attributes):\n((?:  .*\n?)+)", text, re.MULTILINE)
    for names, entry in re.findall(r"^  ([\w, ]+): (.*(?:\n    .*)*)", section[1] if section else "", re.MULTILINE):
        words = " ".join(entry.split())
        link = _AS_IN.match(words)
        for name in names.split(", "):
            there = of(link[1]).get(name) if link else None
            found[name] = words if link is None or there is None else there.rstrip(".") + words[link.end() :]
    return found


def _default(value: Any) -> str:
    """A default as a study writes it."""
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, functools.partial):
        value = {"name": value.func.__name__.lstrip("_"), **value.keywords}
    # A default of a user's own may be anything.
    return value.__name__ if hasattr(value, "__name__") else json.dumps(value, default=checks.shown)


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
