"""What a user's own module holds, by where it is: "module:name"; and where in such modules an error came from."""

import importlib
import re
import traceback
from pathlib import Path
from typing import Any

from fedjax_meta import checks

_files: set[str] = set()
"""Of the users' modules that were imported."""


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
        module = importlib.import_module(name)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        hint = "; start in the folder that has it, or install it" if absent else ""
        raise ValueError(f"{what} {place}: {checks.first_line(error)}{hint}") from error
    # The user's own code may raise anything.
    except Exception as error:
        said = f"{type(error).__name__}: {checks.first_line(error)}"
        raise ValueError(f"{what} {place}: importing {name} raises {said}") from error
    if module.__name__.partition(".")[0] != __package__:
        _files.add(getattr(module, "__file__", None) or "")
    if not hasattr(module, attribute):
        hint = checks.nearest(attribute, [word for word in vars(module) if not word.startswith("_")])
        raise ValueError(f"{what} {place}: module {name!r} has no attribute {attribute!r}{hint}")
    return getattr(module, attribute)


def place_of(error: BaseException | None) -> str | None:
    """Where in a user's own module an error, or what it was raised from, came from: "my_method.py, line 7"; else `None`."""
    found = None
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename in _files:
                found = f"{Path(frame.filename).name}, line {frame.lineno}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found
