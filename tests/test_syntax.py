"""Parsing in several threads."""

import ast
import gc
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

from fedjax_meta import data, syntax


def test_threads_may_parse_while_garbage_is_collected():
    """A callback in Python, as JAX has one, lets other threads run in the middle of a parse. Python 3.11's `ast.parse` fails here."""
    text, interval, often = inspect.getsource(data.partition), sys.getswitchinterval(), gc.get_threshold()
    wanted = ast.dump(ast.parse(text))

    def callback(*_):
        sum(range(200))

    sys.setswitchinterval(1e-5)
    gc.callbacks.append(callback)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(syntax.parse, [text] * 60))
    finally:
        gc.callbacks.remove(callback)
        sys.setswitchinterval(interval)
        gc.set_threshold(*often)
    assert all(ast.dump(tree) == wanted for tree in found[::20])
