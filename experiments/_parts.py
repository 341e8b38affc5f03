"""Parts of a composition as words of a command line: `KEY=VALUE` and `NAME:KEY=VALUE,KEY=VALUE`, checked against registries."""

import ast
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fedjax_meta as fm
from fedjax_meta import checks
from fedjax_meta.study import system

AGGREGATORS: dict[str, Callable[..., Any]] = {
    "mean": lambda: None,
    **system.AGGREGATORS,
    "trimmed_mean": functools.partial(fm.aggregate.trimmed_mean, share=0.1),
}
"""By name, what makes an aggregator from its options; the mean is what a federation takes when it has none."""

ATTACKS, SCHEDULES, PARTICIPATION = system.ATTACKS, system.SCHEDULES, system.PARTICIPATION

CLIPS: dict[str, Callable[..., Any]] = {"fixed": fm.uploads.clip, "adaptive": fm.uploads.adaptive_clip}
"""By name, what clips uploads."""


def value(text: str) -> Any:
    """A Python literal where `text` reads as one, and `text` otherwise.

    Example:
      >>> value("0.1"), value("head"), value("None"), value("[1, 2]")
      (0.1, 'head', None, [1, 2])
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of literals such as 1is
            return ast.literal_eval(text)
    # Nested too deeply, or an integer of too many digits.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def assignments(words: Sequence[str], name: str) -> dict[str, Any]:
    """Options written `key=value`; see `value`.

    Raises:
      ValueError: a word without `=`, or a key twice.

    Example:
      >>> assignments(["inner_lr=0.1", "adapts=head", "batch_size=None"], "--set")
      {'inner_lr': 0.1, 'adapts': 'head', 'batch_size': None}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (equals and key.isidentifier()) or key in found:
            raise ValueError(f"{name} {checks.shown(word)} must read key=value, each key once")
        found[key] = value(text)
    return found


def part(flag: str, text: str, registry: Mapping[str, Callable[..., Any]]) -> Any:
    """What a function of a registry makes from `NAME`, `NAME:VALUE` (its first option) or `NAME:KEY=VALUE,KEY=VALUE`.

    Args:
      flag: on the command line, for messages.
      text: what the user wrote. A comma inside brackets or quotes belongs to its value.
      registry: functions by name; their options are read from their signatures.

    Raises:
      ValueError: an unknown name or option, an option twice or missing, and what the function refuses.

    Example:
      >>> part("--participation", "stragglers:share=0.5,epochs=5", PARTICIPATION).keywords
      {'share': 0.5, 'epochs': 5}
      >>> part("--aggregator", "trimmed_mean:shear=0.2", AGGREGATORS)
      Traceback (most recent call last):
      ...
      ValueError: --aggregator trimmed_mean takes no 'shear' (did you mean 'share'?); it takes share
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    checks.one_of(flag, name, registry)
    options = inspect.signature(registry[name]).parameters
    what = f"{flag} {name}"
    words = _words(rest)
    if colon and not words:
        raise ValueError(f"{flag} {checks.shown(text)} must read {name}:key=value,key=value; {_takes(options)}")
    if len(words) == 1 and "=" not in words[0]:
        if not options:
            raise ValueError(f"{what} takes no options, not {checks.shown(rest)}")
        words = [f"{next(iter(options))}={words[0]}"]
    given = assignments(words, what)
    for key in given:
        if key not in options:
            raise ValueError(f"{what} takes no {checks.shown(key)}{checks.nearest(key, options)}; {_takes(options)}")
    missing = [key for key, parameter in options.items() if parameter.default is parameter.empty and key not in given]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}, e.g. {name}:{missing[0]}=VALUE")
    try:
        return registry[name](**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {checks.first_line(error)}") from error


def aggregator(flag: str, text: str) -> Any:
    """An aggregator from `NAME:KEY=VALUE,...`; wrappers such as `nearest_neighbours:f=2` come before it, joined by +.

    Raises:
      ValueError: see `part`.
    """
    if "+" not in text:
        return part(flag, text, AGGREGATORS)
    try:
        return fm.aggregate.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def clip(flag: str, text: str) -> fm.uploads.UploadTransform:
    """A clip from its norm, or from `adaptive:KEY=VALUE,...`.

    Raises:
      ValueError: see `part`.
    """
    try:
        norm = float(text)
    except ValueError:
        return part(flag, text, CLIPS)
    return fm.uploads.clip(norm)


def _takes(options: Mapping[str, Any]) -> str:
    return f"it takes {', '.join(options)}" if options else "it takes no options"


def _words(text: str) -> list[str]:
    """The parts of `text` between commas that are in no brackets and no quotes.

    Example:
      >>> _words("seconds=[1, 2],limit=2"), _words("name='a,b'"), _words("")
      (['seconds=[1, 2]', 'limit=2'], ["name='a,b'"], [])
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [one.strip() for one in parts if one.strip()]


def rated(flag: str, text: str, registry: Mapping[str, Any], default: float) -> tuple[str, float]:
    """The two parts of "NAME:RATE", a name of the registry and a rate above 0.

    Raises:
      ValueError: an unknown name, or a rate that is no number above 0.

    Example:
      >>> rated("--server-optimizer", "adam:0.01", {"adam": None}, 1.0), rated("--server-optimizer", "adam", {"adam": None}, 1.0)
      (('adam', 0.01), ('adam', 1.0))
    """
    name, colon, number = text.partition(":")
    checks.one_of(flag, name, registry)
    try:
        rate = float(number) if colon else default
    except ValueError:
        raise ValueError(f"{flag} {checks.shown(text)} must read {name}:RATE with a number, e.g. {name}:0.01") from None
    checks.positive(f"{flag} {name}: rate", rate)
    return name, rate
