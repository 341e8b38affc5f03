"""Python's parser for programs with several threads."""

import ast
import threading
from typing import Any, Literal

_LOCK = threading.Lock()


def parse(text: str, mode: Literal["exec", "eval"] = "exec") -> Any:
    """`ast.parse(text, mode=mode)`, one thread at a time.

    The depth that Python 3.11's parser counts belongs to all threads: where a garbage collection lets another thread parse in the
    middle, both end with a `SystemError`. Studies parse rules on the threads that compile.
    """
    with _LOCK:
        return ast.parse(text, mode=mode)
