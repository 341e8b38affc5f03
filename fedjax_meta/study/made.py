"""By which code results were made: the commit, and digests of the source that they may depend on.

A digest is of the lines of files without docstrings and comments, so that words change nothing. It errs on one side: a change may
leave the numbers as they are, but what changes them changes a digest, as long as it is in this package.
"""

import ast
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedjax_meta import syntax
from fedjax_meta.methods import METHODS
from fedjax_meta.study.folder import package_commit, processor

ROOT = Path(__file__).resolve().parents[1]
REGISTRY = ROOT / "methods" / "__init__.py"
"""Imports every method, and is no part of any."""


def made(method: str) -> dict[str, Any]:
    """What the results of a method are made by, for their file.

    Returns:
      "commit": of the package, `None` outside of a repository; "dirty": whether tracked files differ from it; "method" and
      "runner": digests of what the method's file imports within the package, itself included, and of the rest that a study does;
      "processor": the kind that computed them.
    """
    found = _commit() or {"commit": None, "dirty": None}
    return {**found, **digests(method), "processor": processor()}


_commit = functools.cache(package_commit)


@functools.cache
def digests(method: str) -> dict[str, str]:
    """The digests of a method and of the rest, see `made`; 16 hexadecimal digits each."""
    own = imported(_files(METHODS[method]))
    rest = imported([Path(__file__).with_name("run.py")]) - own
    return {"method": _digest(own), "runner": _digest(rest)}


def _files(function: Callable[..., Any]) -> list[Path]:
    """The file that a function is from; none for one of a notebook."""
    while isinstance(function, functools.partial):
        function = function.func
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    return [] if path is None else [Path(path).resolve()]


def imported(first: Iterable[Path]) -> set[Path]:
    """Files of the package that some of its files import, directly or by others; they themselves included."""
    found: set[Path] = set()
    left = list(first)
    while left:
        path = left.pop()
        if path in found or path == REGISTRY:
            continue
        found.add(path)
        left += _imports(path)
    return found


@functools.cache
def _tree(path: Path) -> ast.AST:
    return syntax.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _imports(path: Path) -> tuple[Path, ...]:
    found: list[Path] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [file for one in node.names if (file := _source(one.name)) is not None]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                # A name is a module, or something that one holds.
                file = _source(f"{node.module}.{one.name}") or _source(node.module)
                found += [] if file is None else [file]
    return tuple(found)


def _source(module: str) -> Path | None:
    """The file of a module of the package; `None` for others."""
    first, *rest = module.split(".")
    if first != ROOT.name:
        return None
    place = ROOT.joinpath(*rest)
    candidates = [place / "__init__.py", place.with_suffix(".py")]
    return next((path for path in candidates if path.is_file()), None)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files):
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        digest.update(f"{name}\n{_said(path)}\n".encode())
    return digest.hexdigest()


@functools.cache
def _said(path: Path) -> str:
    """The lines of a file without docstrings, comments on lines of their own, and empty lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                end = first.end_lineno or first.lineno
                lines[first.lineno - 1 : end] = [""] * (end - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
