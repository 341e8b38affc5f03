"""The code of a user's own that a study names as "module:name", e.g. methods and metrics: the files that it is from."""

import hashlib
import sys
from pathlib import Path

from fedjax_meta import imports
from fedjax_meta.study import lookup, parts
from fedjax_meta.study.depends import bindings, code_of
from fedjax_meta.study.study import Study


def digests(study: Study) -> dict[str, str]:
    """A digest of the code of everything that a study names of a user's own, by name; docstrings and comments do not count."""
    places = [system.method for system in study.systems.values()]
    places += [place for scenario in study.scenarios.values() for place in (scenario.model, scenario.partition) if place]
    federations = [study.federation, *(one.federation for one in study.scenarios.values())]
    federations += [one.federation for one in study.systems.values()]
    rules = [name for federation in federations for name in parts.own_names(federation)]
    return {name: _digest(name) for name in dict.fromkeys([*places, *study.metrics, *rules]) if lookup.is_own(name)}


def files(module: str) -> list[Path]:
    """The file of an imported module and, where that is a user's own, the files that it imports of its folder and below.

    There is none of a notebook.
    """
    left, found = [module], list[Path]()
    while left:
        one = sys.modules.get(left.pop(0))
        place = getattr(one, "__file__", None)
        path = None if place is None else Path(place).resolve()
        if path is None or path in found or (found and not path.is_relative_to(found[0].parent)):
            continue
        found.append(path)
        if imports.is_own(path):
            package = tuple(filter(None, (getattr(one, "__package__", None) or "").split(".")))
            pairs = [pair for some in bindings(path.read_text(encoding="utf-8"), package).values() for pair in some]
            left += [name for source, part in pairs for name in (source, f"{source}.{part}")]
    return found


def _digest(name: str) -> str:
    imports.imported("the code", name)
    found = hashlib.blake2b(digest_size=8)
    for path in files(name.partition(":")[0]):
        found.update(f"{path.name}\n{code_of(path.read_text(encoding='utf-8'))}\n".encode())
    return found.hexdigest()
