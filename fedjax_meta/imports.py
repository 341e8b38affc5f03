"""What a user's own module holds, by where it is: "module:name"; and where in such modules an error came from."""

import importlib
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from fedjax_meta import checks

_folders: set[Path] = set()
"""Where users' modules are that were asked for."""


def imported(what: str, place: str) -> Any:
    """The thing at "module:name". The commands also find modules in the folder where they start.

    Args:
      what: it is, for messages.
      place: where it is.

    Raises:
      ValueError: text of another form, no such module, no such name in it, a module that fails when it is imported.

    Example:
      >>> imported("constant", "math:pi")
      3.141592653589793
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", place):
        raise ValueError(f"{what} {checks.shown(place)} must read module:name, e.g. my_package.my_module:my_name")
    name, _, attribute = place.partition(":")
    try:
        _note_folder(name)
        module = importlib.import_module(name)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        hint = "; start in the folder that has it, or install it" if absent else ""
        raise ValueError(f"{what} {place}: {checks.first_line(error)}{hint}") from error
    # The user's own code may raise anything.
    except Exception as error:
        raise ValueError(
            f"{what} {place}: importing {name} raises {type(error).__name__}: {checks.first_line(error)}"
        ) from error
    if not hasattr(module, attribute):
        hint = checks.nearest(attribute, [word for word in vars(module) if not word.startswith("_")])
        raise ValueError(f"{what} {place}: module {name!r} has no attribute {attribute!r}{hint}")
    return getattr(module, attribute)


def place_of(error: BaseException | None) -> str | None:
    """Where in a user's own module an error, or what it was raised from, came from: "my_method.py, line 7"; else `None`.

    A module beside or below the named one is the user's own, too, but no installed one.
    """
    found = None
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if is_own(frame.filename):
                found = f"{Path(frame.filename).name}, line {frame.lineno}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def is_own(file: str | Path) -> bool:
    """Whether a file is of a user's own module, or stands beside or below one, and is not installed."""
    return any(Path(file).is_relative_to(folder) for folder in _folders) and not _installed(file)


def said(error: BaseException) -> str:
    """An error of a user's own code as one line: with its type, unless that is `ValueError`."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, ValueError) and line:
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _installed(file: str | Path) -> bool:
    """Whether a file is this package's, or one of the environment."""
    return any(Path(file).is_relative_to(root) for root in (Path(__file__).parent, sys.prefix, sys.base_prefix))


def _note_folder(name: str) -> None:
    """Remembers the folder of a user's module, or of its package."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is not None and spec.origin is not None and not _installed(spec.origin):
        _folders.add(Path(spec.origin).parent)
