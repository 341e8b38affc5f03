"""Studies as files: those of the package by name, their variants, values that stand for several entries, and overrides."""

import copy
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fedjax_meta import checks

DEEPEST = 20
"""Dots in the path of a field; no study has so many."""

DRAW = "@"
"""Between the name of a scenario and the seed of a draw of it."""

MAKES = {"scenarios": "dataset", "systems": "method"}
"""By the kind of an entry, the field that an override may make a new one with."""

Tree = dict[str, Any]
"""Nested mappings, lists and plain values, as YAML holds them."""


def packaged() -> dict[str, str]:
    """The studies that come with the package: the text of each file by its name."""
    folder = resources.files("fedjax_meta") / "studies"
    paths = {path.name.removesuffix(".yaml"): path for path in folder.iterdir() if path.name.endswith(".yaml")}
    return {name: paths[name].read_text(encoding="utf-8") for name in sorted(paths)}


def read(path: str | Path, extended_by: Sequence[str] = ()) -> Tree:
    """The tree of a file, or of a study of the package when there is no such file.

    A file that `extends` another, or a study of the package, is laid over it as a variant is, see `variants`. The path of the
    other file is seen from the folder of this one, or else from the current folder.

    Args:
      path: of the file, or the name.
      extended_by: the files that it is read for, which it may not extend in turn.

    Raises:
      OSError: the file cannot be read.
      ValueError: no YAML, or no mapping, a file that extends itself.
    """
    name, own, there = str(path), packaged(), Path(path).exists()
    if name in extended_by:
        raise ValueError(f"{path} extends itself")
    if not there and name not in own and (named := Path(f"{name}.yaml")).is_file():
        raise FileNotFoundError(f"No such file or directory: {name}; there is a file {named}")
    if not there and Path(name).name == name and "." not in name:
        checks.one_of("study", name, own)
    if not there and name in own:
        text = own[name]
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}; save it as UTF-8") from None
        except IsADirectoryError:
            raise IsADirectoryError(
                f"{path} is a folder: give a study file, e.g. {Path(path) / 'study.yaml'} of a run"
            ) from None
        except FileNotFoundError:
            raise FileNotFoundError(
                f"No such file or directory: {path}; `fedjax-meta list studies` has those of the package"
            ) from None
    try:
        tree = copy.deepcopy(_parsed_once(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where, what = "" if mark is None else f", line {mark.line + 1}", getattr(error, "problem", None) or str(error)
        raise ValueError(f"{path}{where} is no YAML: {' '.join(what.split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for a study") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a mapping with title, scenarios and systems")
    _check_entries("", tree)
    base = tree.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path}: extends={checks.shown(base)} must be a file, or the name of a study of the package")
    if base is None:
        return tree
    beside = os.path.normpath(Path(path).parent / base)
    return _merged(read(beside if Path(beside).is_file() else base, (*extended_by, name)), tree)


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number, and 010 and 1:30 as words, as YAML 1.2 does; refuses a field that stands there twice."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """A mapping of the file, before what it takes over by `<<` is in it."""
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    text = f"{key.value!r} stands there twice, first in line {seen[key.value]}"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
                seen[key.value] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as a number."""


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9_]*)(\.[0-9_]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parsed(text: str) -> Any:
    """The tree of a text in YAML.

    Example:
      >>> parsed("{lr: 1e-5, epochs: 3}")
      {'lr': 1e-05, 'epochs': 3}
    """
    return yaml.load(text, _Loader)


def text_of(tree: Any) -> str:
    """The text in YAML from which `parsed` reads the same tree; other readers of YAML do, too."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@functools.lru_cache(maxsize=64)
def _parsed_once(text: str) -> Any:
    """As `parsed`, for whole files, which take some hundredths of a second and are read again and again; to be copied."""
    return parsed(text)


def variants(tree: Tree, chosen: Sequence[str] = ()) -> Tree:
    """The tree with the changes of its chosen variants, in order, and without the field "variants".

    A variant is a mapping that is laid over the study: mappings are merged, other values replaced, and a field whose value is
    null is left out.

    Raises:
      ValueError: a variant that the study does not have; one that changes a scenario or system which an earlier one leaves out.

    Example:
      >>> study = {"rounds": 9, "systems": {"a": 1, "b": 2}, "variants": {"quick": {"rounds": 2, "systems": {"a": None}}}}
      >>> variants(study, ["quick"])
      {'rounds': 2, 'systems': {'b': 2}}
    """
    tree = copy.deepcopy(tree)
    known = tree.pop("variants", None) or {}
    if not isinstance(known, Mapping) or not all(isinstance(one or {}, Mapping) for one in known.values()):
        raise ValueError("variants must be a mapping of names to changes of the study")
    left_out: dict[tuple[str, str], str] = {}
    for name in chosen:
        if not known:
            raise ValueError(f"variant={name!r} is unknown; this study has no variants")
        checks.one_of("variant", name, known)
        changes = known[name] or {}
        _check_entries(f"variants.{name}.", changes)
        for kind in MAKES:
            for entry, value in (changes.get(kind) or {}).items():
                if value is None:
                    left_out.setdefault((kind, entry), name)
                elif (kind, entry) in left_out:
                    other = left_out[kind, entry]
                    raise ValueError(f"variant {name} changes {kind}.{entry}, which variant {other} leaves out")
        tree = _merged(tree, changes)
    return tree


def _check_entries(where: str, tree: Mapping[str, Any]) -> None:
    for kind in MAKES:
        entries = tree.get(kind)
        if entries is not None and not isinstance(entries, Mapping):
            raise ValueError(f"{where}{kind} must be a mapping of names, not {checks.shown(entries)}")
        for name, entry in (entries or {}).items():
            if entry is not None and not isinstance(entry, Mapping):
                raise ValueError(f"{where}{kind}.{name} must be a mapping, not {checks.shown(entry)}")


def _merged(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    result = dict(tree)
    for key, value in changes.items():
        old = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(old, Mapping) and not _another(old, value):
            result[key] = _merged(dict(old), value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _another(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a part is replaced by one of another name, which does not take the options of the old one."""
    return "name" in old and new.get("name", old["name"]) != old["name"]


def override(tree: Tree, text: str) -> None:
    """Sets one field, "systems.fedavg.options.epochs=5"; the value is read as YAML.

    An entry that is set to null, "systems.fedavg=null", is left out, as in `variants`. Below it null is a value, as in
    "systems.fedavg.options.batch_size=null".

    An entry that is not there is made by the field without which it is none: "systems.mine.method=fedavg".

    Raises:
      ValueError: no field, no value, a field of what is no mapping, or of an entry that is not there.
    """
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")) or path.count(".") > DEEPEST:
        raise ValueError(f"{checks.shown(text)} must read field.field=value, e.g. systems.fedavg.options.epochs=5")
    try:
        read = parsed(value)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{checks.shown(text)} has a value that is no YAML: {checks.first_line(error)}") from None
    kind, _, name = path.partition(".")
    if read is None and kind in ("scenarios", "systems") and name and "." not in name:
        checks.one_of(kind, name, tree.get(kind) or {})
        del tree[kind][name]
        if tree.get("published"):
            of = kind.removesuffix("s")
            rows = published(tree["published"])
            tree["published"] = [row for row in rows if not isinstance(row, Mapping) or row.get(of) != name]
        return
    entry, _, field = name.partition(".")
    known = tree.get(kind) or {}
    # An override may make an entry, but not by a slip.
    if kind in MAKES and field and entry not in known and (field != MAKES[kind] or checks.nearest(entry, known)):
        begin = f"; --set {kind}.{entry}.{MAKES[kind]}=... makes one"
        raise ValueError(f"{kind} has no {entry!r}{checks.nearest(entry, known) or begin}")
    if kind in MAKES and field.startswith("each."):
        # What follows is one key of `each`, dots and all.
        entries = tree[kind][entry]
        entries["each"] = {**(entries.get("each") or {}), field.removeprefix("each."): read}
        return
    if kind in MAKES:
        refuse_each(kind, entry, known.get(entry), field)
    put(tree, path, read)


def put(tree: Tree, path: str, value: Any) -> None:
    """Sets the field at a path with dots; a number is a place in a list, from 0 on.

    Raises:
      ValueError: a field of what is no mapping, a place that a list does not have.
    """
    *parents, last = path.split(".")
    node: Any = tree
    for name in parents:
        if isinstance(node, dict) and node.get(name) is None:
            node[name] = {}
        node = node[_key(path, node, name)]
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{path!r}: {name} is no mapping")
    node[_key(path, node, last)] = value


def _key(path: str, node: Any, name: str) -> Any:
    if isinstance(node, dict):
        return name
    if not name.isdecimal() or int(name) >= len(node):
        raise ValueError(f"{path!r}: {name} must be a place in a list, from 0 to {len(node) - 1}")
    return int(name)


def refuse_each(kind: str, name: str, entry: Any, field: str) -> None:
    """Raises `ValueError` for a field to which `each` gives several values, so that one more would do nothing."""
    each = entry.get("each") if isinstance(entry, Mapping) else None
    for path in each if isinstance(each, Mapping) else ():
        if field == path or field.startswith(f"{path}."):
            raise ValueError(
                f"{kind}.{name} has several values of {path}, under each: --set {kind}.{name}.each.{path}=[...] changes them"
            )


def expanded(kind: str, entries: Mapping[str, Any]) -> Tree:
    """Entries with `each` become one entry for every combination of its values.

    `{"maml": {"method": "fedmeta", "title": "MAML, E = {inner_steps}", "each": {"options.inner_steps": [1, 5]}}}` gives the
    entries "maml-1" and "maml-5". The title may name the last part of a path in braces. A value that is no number or word gets a
    name: `federation.attack: [{none: null}, {x10: {name: sign_flip, scale: 10}}]`.

    Raises:
      ValueError: `each` is no mapping of lists, or two entries get the same name.
    """
    made: Tree = {}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping) or "each" not in entry:
            if name in made:
                raise ValueError(f"{kind} has two entries {name!r}")
            made[name] = entry
            continue
        each, rest = entry["each"], {key: value for key, value in entry.items() if key != "each"}
        paths = isinstance(each, Mapping) and all(isinstance(path, str) for path in each)
        if not paths or not each or not all(isinstance(values, list) and values for values in each.values()):
            raise ValueError(f"{kind}.{name}: each must be a mapping of lists, e.g. options.epochs: [1, 5], not {each!r}")
        for values in itertools.product(*each.values()):
            one, words, called = copy.deepcopy(rest), {}, []
            for path, (word, value) in zip(each, map(_named, values), strict=True):
                put(one, path, copy.deepcopy(value))
                words[path.split(".")[-1]] = word
                called.append(word)
            if kind == "systems":
                title = one.get("title") or name
                if not isinstance(title, str):
                    raise ValueError(f"{kind}.{name}: title={checks.shown(title)} must be text")
                one["title"] = _filled(f"{kind}.{name}", title, words)
            label = "-".join([name, *(re.sub(r"[^A-Za-z0-9_]+", "_", word).strip("_") for word in called)])
            if label in made:
                raise ValueError(f"{kind} has two entries {label!r}")
            made[label] = one
    return made


def _named(value: Any) -> tuple[str, Any]:
    """(how a value is called, the value); a mapping of one key gives its value a name.

    Example:
      >>> _named(0.5), _named({"trimmed mean": {"name": "trimmed_mean", "share": 0.2}}), _named({"none": None})
      (('0.5', 0.5), ('trimmed mean', {'name': 'trimmed_mean', 'share': 0.2}), ('none', None))
    """
    if isinstance(value, Mapping) and len(value) == 1 and "name" not in value:
        ((name, value),) = value.items()
        return str(name), value
    return str(value), value


def _filled(where: str, title: str, words: Mapping[str, Any]) -> str:
    if "{" not in title:
        return f"{title}, {', '.join(f'{key} {value}' for key, value in words.items())}"
    names = re.findall(r"\{([^{}]*)\}", title)
    odd = [name for name in names if name not in words] or ["{"] * (len(names) != title.count("{"))
    if odd:
        raise ValueError(f"{where}: title {title!r} may name {', '.join(words)} in braces, not {odd[0]!r}")
    return re.sub(r"\{([^{}]*)\}", lambda found: str(words[found[1]]), title)


def published(rows: Iterable[Any]) -> list[Any]:
    """Tables of published numbers become one entry for each number.

    A table has the fields of `Published`, but `scores` (names) in place of `score`, and `rows`, a mapping of a system to its
    numbers in the same order; null where the paper has none. `notes` holds what is to be said of a system's numbers.

    Raises:
      ValueError: a row whose numbers are not as many as the scores.
    """
    made: list[Any] = []
    for table in rows:
        if not isinstance(table, Mapping) or "rows" not in table:
            made.append(table)
            continue
        rest = {key: value for key, value in table.items() if key not in ("rows", "scores", "notes")}
        scores, notes = table.get("scores", ["accuracy"]), table.get("notes") or {}
        if not isinstance(scores, list) or not isinstance(notes, Mapping) or not isinstance(table["rows"], Mapping):
            raise ValueError("published: a table has scores, a list, and rows (and notes), mappings of systems")
        for system, given in table["rows"].items():
            values = given if isinstance(given, list) else [given]
            if len(values) != len(scores):
                raise ValueError(
                    f"published: {system} has {len(values)} numbers for {len(scores)} scores ({', '.join(scores)})"
                )
            note = {"note": notes[system]} if system in notes else {}
            made += [
                {**rest, **note, "system": system, "score": score, "value": value}
                for score, value in zip(scores, values, strict=True)
                if value is not None
            ]
    return made


def notes(given: Iterable[Any], systems: Collection[str]) -> list[str]:
    """The lines of a report's notes.

    A note may be a mapping with its `text` and the `systems` that it is about; it is kept where the study has one of them.

    Raises:
      ValueError: a note that is neither.
    """
    lines = []
    for note in given:
        if isinstance(note, str):
            lines.append(note)
        elif isinstance(note, Mapping) and set(note) == {"text", "systems"}:
            if not isinstance(note["text"], str) or not isinstance(note["systems"], list):
                raise ValueError(f"notes: {checks.shown(note)} must have a text, and a list of systems")
            lines += [note["text"]] if any(name in systems for name in note["systems"]) else []
        else:
            raise ValueError(f"notes must be lines, or mappings with text and systems, not {checks.shown(note)}")
    return lines


def only(tree: Tree, systems: Sequence[str] | None = None, scenarios: Sequence[str] | None = None) -> Tree:
    """The tree of some systems and scenarios of a study, with the published numbers that concern them.

    Args:
      tree: of the study.
      systems: names, also of entries with `each` ("imaml", or "imaml-5" for the first of its values), which stand for all that
        they make; all when not given. Scenarios that none of them is run on are left out.
      scenarios: names, likewise. Systems that are run on none of them are left out.

    Raises:
      ValueError: a system or scenario that the study does not have, systems that are run on none of the scenarios.
    """
    for name in scenarios or ():
        if DRAW in name:
            raise ValueError(f"scenario {name}: give {name.partition(DRAW)[0]}; data_seeds says which draws of it there are")
    kept = _meant("system", expanded("systems", tree.get("systems") or {}), systems)
    places = _meant("scenario", expanded("scenarios", tree.get("scenarios") or {}), scenarios)
    if scenarios is not None:
        on = {name: _run_on(entry, places) for name, entry in kept.items()}
        if systems is not None and (idle := [name for name in kept if not on[name]]):
            raise ValueError(f"system {idle[0]} is run on none of the scenarios {', '.join(places)}")
        kept = {name: _without(entry, places) for name, entry in kept.items() if on[name]}
    used = {place for entry in kept.values() for place in _run_on(entry, places)}
    places = {name: entry for name, entry in places.items() if name in used}
    known = {"", *(name.partition(DRAW)[0] for name in places)}
    rows = published(tree.get("published") or ())
    rows = [
        row for row in rows if not isinstance(row, Mapping) or (row.get("system") in kept and row.get("scenario", "") in known)
    ]
    made = {**tree, "systems": kept, "scenarios": places, "published": rows}
    if isinstance(tree.get("user_accuracy"), Mapping):
        made["user_accuracy"] = {name: view for name, view in tree["user_accuracy"].items() if name in kept} or None
    return made


def _meant(kind: str, entries: Tree, names: Sequence[str] | None) -> Tree:
    """The entries that are meant by names; a name stands for itself, for what an entry with `each` makes, or for all draws."""

    def meant(entry: str, name: str) -> bool:
        return entry == name if name in entries else entry.partition(DRAW)[0] == name or entry.startswith(f"{name}-")

    for name in names or ():
        if not any(meant(entry, name) for entry in entries):
            checks.one_of(kind, name, entries)
    return {label: entry for label, entry in entries.items() if names is None or any(meant(label, name) for name in names)}


def _run_on(entry: Any, scenarios: Iterable[str]) -> list[str]:
    """Those of the scenarios that a system is run on, by its entry."""
    own = entry.get("scenarios") if isinstance(entry, Mapping) else None
    return [name for name in scenarios if not isinstance(own, list) or name.partition(DRAW)[0] in own]


def _without(entry: Any, scenarios: Collection[str]) -> Any:
    """The entry of a system whose list of scenarios, if it has one, names these alone."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("scenarios"), list):
        return entry
    names = {name.partition(DRAW)[0] for name in scenarios}
    return {**entry, "scenarios": [name for name in entry["scenarios"] if name in names]}
