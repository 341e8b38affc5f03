"""By which code results were made: the commit, and digests of the source that they may depend on.

A digest is of the lines of files without docstrings and comments, so that words change nothing. It errs on one side: a change may
leave the numbers as they are, but what changes them changes a digest, as long as it is in this package.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedjax_meta.data.natural_sets import NATURAL
from fedjax_meta.data.registry import GENERATED, PAPERS, PARTITIONS
from fedjax_meta.study import lookup, own_code
from fedjax_meta.study.depends import TABLES, Package, Part
from fedjax_meta.study.environment import package_commit, processor
from fedjax_meta.study.scenario import Scenario

ROOT = Path(__file__).resolve().parents[1]


def made(method: str, place: Scenario | None = None, rules: Sequence[str] = ()) -> dict[str, Any]:
    """What the results of a method on a scenario are made by, for their file.

    Args:
      method, place, rules: as in `digests`.

    Returns:
      "commit": of the package, `None` outside of a repository; "dirty": whether tracked files differ from it; "method" and
      "runner": see `digests`; "processor": the kind that computed them.
    """
    found = _commit() or {"commit": None, "dirty": None}
    return {**found, **digests(method, place, rules=rules), "processor": processor()}


_commit = functools.cache(package_commit)


def digests(
    method: str, place: Scenario | None = None, root: Path | None = None, *, rules: Sequence[str] = ()
) -> dict[str, str]:
    """Digests of what a method's results on a scenario depend on, 16 hexadecimal digits each.

    Args:
      method: name in `METHODS`, or "module:name".
      place: the scenario; without one, all data sets and models count.
      root: a folder with the source of the package at another commit; this package when not given.
      rules: a user's own aggregator and attack, "module:name".

    Returns:
      "method": of what the method's file and the scenario import within the package, themselves included; "runner": of the rest
      that a study does.

    Raises:
      FileNotFoundError: the source of another commit has no such method or tables.
    """
    used = None if place is None else tuple(_entries(place))
    files = _files(lookup.method(method))
    if place is not None and lookup.is_own(place.model):
        files += _files(lookup.model(place.model))
    if place is not None and lookup.is_own(place.rule):
        files += _files(lookup.partition(place.rule))
    for name in rules:
        files += own_code.files(name.partition(":")[0])
    return dict(_digests(tuple(dict.fromkeys(files)), used, root or ROOT))


@functools.cache
def _digests(files: tuple[Path, ...], used: tuple[tuple[str, str], ...] | None, root: Path) -> dict[str, str]:
    package = _package(root, cut=used is not None)
    there = [root / path.relative_to(ROOT) if path.is_relative_to(ROOT) else path for path in files]
    entries = [package.entry(table, name) for table, name in used or ()]
    own = package.parts([*map(Part, [*there, root / "study" / "scenario.py"]), *entries])
    rest = package.parts([Part(root / "study" / "run.py"), *entries]) - own
    return {"method": _digest(package, own), "runner": _digest(package, rest)}


@functools.cache
def _package(root: Path, *, cut: bool) -> Package:
    tables = [table for some in TABLES.values() for table in some]
    return Package(root, cut=tables if cut else ["METHODS"])


def _entries(place: Scenario) -> list[tuple[str, str]]:
    """What a scenario takes of the tables of data sets and models."""
    drawn = {"GENERATED": place.dataset in GENERATED, "NATURAL": place.dataset in NATURAL}
    cut = {"PAPERS": place.rule in PAPERS, "PARTITIONS": place.rule in PARTITIONS}
    found = [(table, place.dataset) for table, there in drawn.items() if there]
    found = found or [(table, place.rule) for table, there in cut.items() if there]
    if lookup.is_own(place.model):
        return found
    # Without a name, the shape of the data says which of two it is.
    return [*found, *(("MODELS", name) for name in ((place.model,) if place.model else ("lenet", "mlp")))]


def _files(function: Callable[..., Any]) -> list[Path]:
    """The file that a function is from, see `own_code.files`."""
    while isinstance(function, functools.partial):
        function = function.func
    return own_code.files(function.__module__)


def _digest(package: Package, parts: Iterable[Part]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in sorted(parts, key=lambda one: (one.path, one.name or "", one.name is None)):
        inside = part.path.is_relative_to(package.root)
        name = part.path.relative_to(package.root).as_posix() if inside else part.path.name
        digest.update(f"{name}{'' if part.name is None else f':{part.name}'}\n{package.said(part)}\n".encode())
    return digest.hexdigest()
