"""What a user's own module holds, by where it is: "module:name"."""

import importlib
import re
from typing import Any

from fedjax_meta import checks


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
    if not hasattr(module, attribute):
        hint = checks.nearest(attribute, [word for word in vars(module) if not word.startswith("_")])
        raise ValueError(f"{what} {place}: module {name!r} has no attribute {attribute!r}{hint}")
    return getattr(module, attribute)
