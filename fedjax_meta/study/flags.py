"""A study from the words of a command line: `--systems "fedper(lr=0.1), fedavg" --partition "quantity_skew(concentration=1)"`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fedjax_meta import checks
from fedjax_meta import federation as federations
from fedjax_meta.methods import METHODS
from fedjax_meta.study import files, lookup, parts
from fedjax_meta.study.files import Tree
from fedjax_meta.study.system import keywords

_CALL = re.compile(r"\s*([^\s(),=]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_LISTS = {"--systems": "methods", "--partition": "partitions", "--model": "models"}
"""By the flag, what `fedjax-meta list` calls the names that it takes."""

ROUNDS = 40
"""Of a study that no file describes."""


def words(text: str) -> list[str]:
    """The parts of a text between commas that are in no brackets and no quotes.

    Example:
      >>> words("fedavg(lr=[0.1, 0.2], epochs=2), local_only")
      ['fedavg(lr=[0.1, 0.2], epochs=2)', 'local_only']
    """
    found, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0 and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found if one.strip()]


def called(flag: str, text: str) -> tuple[str, Tree]:
    """The name and the options of `NAME` or `NAME(KEY=VALUE, KEY=VALUE)`.

    A value is read as YAML, but that of an option that names a part, or holds parts, may be of this form too.

    Raises:
      ValueError: text of another form, an option twice.

    Example:
      >>> called("--partition", "dirichlet_classes(concentration=0.3, min_samples=20)")
      ('dirichlet_classes', {'concentration': 0.3, 'min_samples': 20})
      >>> called("--systems", "fedper(aggregator=krum(f=2))")
      ('fedper', {'aggregator': {'name': 'krum', 'f': 2}})
    """
    found = _CALL.fullmatch(text)
    if found is None:
        raise ValueError(f"{flag} {checks.shown(text)} must read NAME or NAME(KEY=VALUE, KEY=VALUE)")
    options: Tree = {}
    for word in words(found[2] or ""):
        key, equals, value = word.partition("=")
        key = key.strip()
        if not equals or key in options or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            listed = f"; `fedjax-meta list {_LISTS[flag]} {found[1]}` shows the keys" if flag in _LISTS and not equals else ""
            raise ValueError(f"{flag} {found[1]}: {checks.shown(word)} must read KEY=VALUE, each key once{listed}")
        is_part = key in (*parts.PARTS, "uploads", "rates", "tested_with")
        options[key] = (_part if is_part else _yaml)(f"{flag} {found[1]}: {key}", value.strip())
    return found[1], options


def _yaml(option: str, text: str) -> Any:
    try:
        return files.parsed(text)
    except (yaml.YAMLError, ValueError):  # an integer of thousands of digits, for one
        raise ValueError(f"{option}={checks.shown(text)} is no YAML") from None


def _part(option: str, text: str) -> Any:
    """A part, or a list or a mapping of parts, of which each is a call or YAML."""
    if several := re.fullmatch(r"\[(.*)\]", text, re.DOTALL):
        return [_part(option, one) for one in words(several[1])]
    named = re.fullmatch(r"\{(.*)\}", text, re.DOTALL)
    entries = [one.partition(":") for one in words(named[1])] if named else []
    if any(_is_call(value.strip()) for _, _, value in entries):
        found = {key.strip(): _part(f"{option}: {key.strip()}", value.strip()) for key, _, value in entries}
        if len(found) < len(entries):
            raise ValueError(f"{option}={checks.shown(text)} must have each key once")
        return found
    if not _is_call(text):
        return _yaml(option, text)
    name, options = called(option, text)
    return {"name": name, **options}


def _is_call(text: str) -> bool:
    call = _CALL.fullmatch(text)
    return call is not None and call[2] is not None


def as_call(value: Any) -> str:
    """A value of an option as a command may have it."""
    if isinstance(value, Mapping) and "name" in value:
        return f"{value['name']}({', '.join(f'{key}={as_call(one)}' for key, one in value.items() if key != 'name')})"
    if isinstance(value, list):
        return f"[{', '.join(map(as_call, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_call(one)}' for key, one in value.items())}}}"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def study(text: str) -> Tree:
    """The tree of a study that compares methods, each with the options of a call.

    A list of numbers is a grid. An option of the federation (`aggregator=median`) is one of this system alone; a part is a name,
    or a call, `estimator=implicit(prox_weight=2)`; `{name: implicit, prox_weight: 2}` says the same.

    Raises:
      ValueError: an unknown method, no method, and what `called` refuses; options are checked by `System`.

    Example:
      >>> study("fedper(lr=[0.1, 0.2]), fedavg(cohort_size=3)")["systems"]["fedper"]
      {'method': 'fedper', 'title': 'fedper', 'options': {}, 'federation': {}, 'grid': {'lr': [0.1, 0.2]}}
    """
    systems: Tree = {}
    for word in words(text):
        method, options = called("--systems", word)
        takes = keywords(lookup.method(method, "--systems"))
        name = method.rpartition(":")[2]
        alike = [one["method"] for one in systems.values() if one["method"].rpartition(":")[2] == name]
        title = name if name not in METHODS and {*alike} <= {method} else method
        systems[f"{name}-{len(alike) + 1}" if alike else name] = _system(method, title, takes, options)
    if not systems:
        raise ValueError("give a study, or --systems with methods to compare, e.g. --systems fedper,fedavg")
    titles: list[str] = []
    grids: dict[str, list[Any]] = {}
    for one in systems.values():
        # Grids are no part of a title, so that systems with others may have the same.
        title, before = one["title"], grids.setdefault(one["title"], [])
        if before and one["grid"] not in before:
            one["title"] += f" ({len(before) + 1})"
        titles.append(title)
        before.append(one["grid"])
    return {"title": ", ".join(titles), "scenarios": {"clients": {}}, "systems": systems, "rounds": ROUNDS}


def _system(method: str, title: str, takes: Sequence[str], options: Mapping[str, Any]) -> Tree:
    own: Tree = {"method": method, "title": title, "options": {}, "federation": {}, "grid": {}}
    said = []
    for key, value in options.items():
        numbers = isinstance(value, list) and value and all(type(one) in (int, float) for one in value)
        if key in ("projection", "preset", "pooled", "rates", "tested_with") and key not in takes:
            own[key] = value
        elif numbers:
            own["grid"][key] = value
            continue  # tables name the value that was chosen
        else:
            own["federation" if key in federations.OPTIONS and key not in takes else "options"][key] = value
        said.append(f"{key}={as_call(value)}")
    return {**own, "title": f"{title}({', '.join(said)})" if said else title}


def scenario(
    *, dataset: str | None = None, partition: str | None = None, clients: int | None = None, model: str | None = None
) -> Tree:
    """Fields of a scenario, those that were given.

    Raises:
      ValueError: see `called`.
    """
    found: Tree = {}
    if dataset is not None:
        found["dataset"] = dataset
    if partition is not None:
        found["partition"], found["options"] = called("--partition", partition)
    if clients is not None:
        found["clients"] = clients
    if model is not None:
        found["model"], found["model_options"] = called("--model", model)
    return found


def everywhere(tree: Tree, fields: Mapping[str, Any]) -> None:
    """Sets fields of all scenarios of a study. Another data set drops how images of the old one were augmented."""
    for name, scenario in (tree.get("scenarios") or {}).items():
        if scenario is not None:
            for field in fields:
                files.refuse_each("scenarios", name, scenario, field)
            changed = {**scenario, **fields}
            if changed.get("dataset") != scenario.get("dataset"):
                changed.pop("augment", None)
            tree["scenarios"][name] = changed
