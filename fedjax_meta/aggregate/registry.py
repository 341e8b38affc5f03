"""Aggregators by name, for a command line."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_meta import checks, syntax
from fedjax_meta.aggregate.bounded import centered_clipping, norm_bounding
from fedjax_meta.aggregate.distances import bulyan, geometric_median, krum, multi_krum
from fedjax_meta.aggregate.pre_aggregation import bucketing, nearest_neighbours
from fedjax_meta.aggregate.ranks import median, trimmed_mean
from fedjax_meta.aggregate.rule import Aggregator, Rule

RULES: Mapping[str, Callable[..., Any]] = {
    "median": lambda: median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "bulyan": bulyan,
    "geometric_median": geometric_median,
    "norm_bounding": norm_bounding,
    "centered_clipping": centered_clipping,
}
"""Rules that need nothing but numbers; the arguments are the options."""

WRAPPERS: Mapping[str, Callable[..., Any]] = {"nearest_neighbours": nearest_neighbours, "bucketing": bucketing}
"""Wrappers of a rule, `make(rule, **options)`."""


def parse(text: str) -> Aggregator | Rule:
    """An aggregator from text: `NAME` or `NAME:OPTION=VALUE,...`, with wrappers before it, joined by +.

    `fltrust` needs the server's samples, so that this text cannot make it; code can, and a study with `server`.

    Raises:
      ValueError: an unknown name or option, a value that is refused.

    Example:
      >>> parse("krum:f=2").keywords
      {'f': 2, 'm': 1}
      >>> parse("nearest_neighbours:f=2+trimmed_mean:share=0.2").name
      'nearest_neighbours'
    """
    checks.word("aggregator", text)
    *outer, last = re.split(r"(?<![\d.][eE])\+", text)  # not the + of 1e+3
    name, options = name_and_options(last)
    checks.one_of("aggregator", name, RULES)
    rule = made(RULES[name], name, options)
    for word in reversed(outer):
        name, options = name_and_options(word)
        checks.one_of("wrapper of an aggregator", name, WRAPPERS)
        rule = made(WRAPPERS[name], name, options, rule)
    return rule


def name_and_options(text: str) -> tuple[str, dict[str, Any]]:
    """The parts of `NAME:OPTION=VALUE,...`; a value is a number, a tuple in parentheses or a word.

    Raises:
      ValueError: text of another form.

    Example:
      >>> name_and_options("sign_flip:scale=10,attackers=(1, 4)")
      ('sign_flip', {'scale': 10, 'attackers': (1, 4)})
    """
    name, _, rest = text.strip().partition(":")
    try:
        call = syntax.parse(f"f({rest})", "eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError
        found = {str(word.arg): _value(word.value) for word in call.keywords}
        if len(found) < len(call.keywords):
            raise ValueError
        return name, found
    except (SyntaxError, ValueError):
        raise ValueError(
            f"{text!r} must read NAME or NAME:OPTION=VALUE,OPTION=VALUE, each option once, e.g. krum:f=2"
        ) from None


def made(make: Callable[..., Any], name: str, options: Mapping[str, Any], *first: Any) -> Any:
    """`make(*first, **options)`.

    Raises:
      ValueError: an option that it does not take, one that is missing, a value that is refused.
    """
    takes = list(inspect.signature(make).parameters.items())[len(first) :]
    try:
        checks.options(name, options, [key for key, _ in takes], {})
    except TypeError as error:
        raise ValueError(str(error)) from None
    missing = [key for key, parameter in takes if parameter.default is parameter.empty and key not in options]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}: {name}:{missing[0]}=VALUE")
    try:
        return make(*first, **options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
