"""Which source of the package a program depends on, by what it imports by name; nothing is imported for that.

A module counts as a whole. Files that gather what others define, every `__init__` and the tables of data sets, count by the names
that are imported from them. A name that such a file has from elsewhere is followed to the module that defines it; code of its own
counts statement by statement, with the names that it reads. What runs whenever such a file is imported always counts. A table,
`MODELS` say, counts by the entries that are asked for.

It errs on one side: where a name is not found, or a gathering module is used as a value, the whole file counts with all that it
imports. What another module does just because a package imports it is not followed: no module of this package changes others.
"""

import ast
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_meta import syntax

TABLES = {
    "methods/__init__.py": ("METHODS",),
    "models/__init__.py": ("MODELS",),
    "data/registry.py": ("PARTITIONS", "PAPERS", "GENERATED"),
    "data/natural_sets.py": ("NATURAL",),
}
"""Tables from names to functions, of which a program uses some, by file; these files gather, as every `__init__` does."""

ALWAYS = ""
"""What runs whenever a gathering file is imported."""


class Part(NamedTuple):
    """A part of the source.

    Attributes:
      path: of the file.
      name: that a gathering file defines, `TABLE[entry]`, or `ALWAYS`; `None` for the whole file.
    """

    path: Path
    name: str | None = None


class Package:
    """The source of a package in a folder.

    Attributes:
      root: the folder, whose name is the package's.
      cut: the tables of which only the entries count that are asked for.
    """

    def __init__(self, root: Path, cut: Collection[str] = ()):
        self.root, self.cut = root, cut
        self._texts: dict[Path, str] = {}
        self._files: dict[str, Path | None] = {}
        self._found: dict[Part, list[Part]] = {}

    def parts(self, first: Iterable[Part]) -> set[Part]:
        """Some parts and all that they depend on."""
        found: set[Part] = set()
        left = list(first)
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                if one not in self._found:
                    self._found[one] = [*dict.fromkeys(self._needs(one)), *self._always(one.path)]
                left += self._found[one]
        return found

    def said(self, part: Part) -> str:
        """The lines of a part without docstrings, comments and empty lines, and without the imports of a gathering file."""
        text = self._text(part.path)
        if part.name is None:
            return code_of(text)
        return "\n".join(
            _words(text, one) for one in self._statements(part) if not isinstance(one, (ast.Import, ast.ImportFrom))
        )

    def entry(self, table: str, name: str) -> Part:
        """The part that is an entry of one of `TABLES`."""
        file = next(file for file, tables in TABLES.items() if table in tables)
        return Part(self.root / file, f"{table}[{name}]")

    def _text(self, path: Path) -> str:
        if path not in self._texts:
            self._texts[path] = path.read_text(encoding="utf-8")
        return self._texts[path]

    def _always(self, path: Path) -> list[Part]:
        """What runs before a file can be imported."""
        folders = [place for place in path.parents if place.is_relative_to(self.root)]
        return [Part(init, ALWAYS) for place in folders if (init := place / "__init__.py").is_file()]

    def _gathers(self, path: Path) -> bool:
        inside = path.is_relative_to(self.root)
        return inside and (path.name == "__init__.py" or path.relative_to(self.root).as_posix() in TABLES)

    def _file(self, module: str) -> Path | None:
        """The file of a module of the package; `None` for others."""
        if module not in self._files:
            first, *rest = module.split(".")
            place = self.root.joinpath(*rest)
            candidates = [place / "__init__.py", place.parent / f"{place.name}.py"] if first == self.root.name else []
            self._files[module] = next((path for path in candidates if path.is_file()), None)
        return self._files[module]

    def _bound(self, path: Path) -> Mapping[str, Sequence[tuple[str, str]]]:
        """What the imports of a file bind, see `bindings`."""
        inside = path.is_relative_to(self.root)
        package = path.relative_to(self.root.parent).parts[:-1] if inside else ()
        return bindings(self._text(path), package)

    def _follow(self, module: str, names: Sequence[str], *, as_value: bool = True) -> list[Part]:
        """What `module.a.b` stands for: the parts that hold it, and those that run when it is imported.

        Args:
          module, names: its words; with no names the module itself.
          as_value: whether a gathering module that is meant itself counts as a whole.
        """
        path = self._file(module)
        if path is None:
            return []
        gathers = self._gathers(path)
        found = [Part(path, ALWAYS) if gathers else Part(path)]
        if not names or names[0] == "*":
            return [*found, Part(path)] if as_value or names else found
        first, *rest = names
        is_module = self._file(f"{module}.{first}") is not None
        if is_module:
            found += self._follow(f"{module}.{first}", rest, as_value=as_value)
        bound = [one for one in self._bound(path).get(first, ()) if one != (module, first)]
        for source, name in bound:
            found += self._follow(source, [name, *rest] if name else rest, as_value=as_value)
        if gathers and first in _defined(self._text(path)):
            found.append(Part(path, first))
        elif gathers and not is_module and not bound:
            found.append(Part(path))
        return found

    def _needs(self, part: Part) -> list[Part]:
        path, name = part
        text = self._text(path)
        whole, gathers, bound = name is None, self._gathers(path), self._bound(path)
        found: list[Part] = []
        if whole:
            for source, of_it in (one for some in bound.values() for one in some):
                # Of a gathering module, the names that are used count.
                found += self._follow(source, [of_it] if of_it else [], as_value=gathers)
        nodes: Sequence[ast.AST] = [_tree(text)] if whole else self._statements(part)
        chains = _all_chains(text) if whole else tuple(chain for node in nodes for chain in _chains(node))
        for first, *rest in dict.fromkeys(chains):
            for source, of_it in bound.get(first, ()):
                found += self._follow(source, [of_it, *rest] if of_it else rest)
            if gathers and not whole and first in _defined(text):
                found.append(Part(path, first))
            if gathers and first in ("globals", "vars", "locals"):
                found.append(Part(path))
        for module in _all_imported_words(text) if whole else [word for node in nodes for word in _imported_words(node)]:
            found += self._follow(module, [])
        if whole and gathers:
            found += self._submodules(path)
        return found

    def _submodules(self, path: Path) -> list[Part]:
        """The modules beside a gathering file that a string in it names, as `__getattr__` and `__all__` have them."""
        nodes = ast.walk(_tree(self._text(path)))
        words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        module = ".".join(path.relative_to(self.root.parent).parts[:-1])
        if path.name != "__init__.py":
            return []
        return [Part(file) for word in sorted(words) if word.isidentifier() and (file := self._file(f"{module}.{word}"))]

    def _statements(self, part: Part) -> list[ast.stmt | ast.expr]:
        """The statements of a gathering file that define a name, or those that always run."""
        text, name = self._text(part.path), part.name
        assert name is not None
        if name == ALWAYS:
            return list(_effects(text))
        table, _, key = name.rstrip("]").partition("[")
        statements: list[ast.stmt | ast.expr] = list(_defined(text).get(table, ()))
        if not key:
            return [] if table in self.cut else statements
        values = [getattr(one, "value", None) for one in statements]
        for value in values:
            for word, entry in zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ():
                if isinstance(word, ast.Constant) and word.value == key:
                    return [entry]
        return statements  # a table that is made in another way


@functools.cache
def _tree(text: str) -> ast.Module:
    return syntax.parse(text)


@functools.cache
def bindings(text: str, package: tuple[str, ...]) -> dict[str, list[tuple[str, str]]]:
    """What the imports of a file of a package bind: by name, modules and what is taken of them, "" for the module itself."""
    found: dict[str, list[tuple[str, str]]] = {}
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Import):
            for one in node.names:
                found.setdefault(one.asname or one.name, []).append((one.name, ""))
                if not one.asname:
                    begin = one.name.partition(".")[0]
                    found.setdefault(begin, []).append((begin, ""))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for one in node.names:
                found.setdefault(one.asname or one.name, []).append((module, one.name))
    return found


def _own_names(statement: ast.AST) -> Iterator[str]:
    """The names that a statement at the top level of a file defines, but for imports."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    if isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    for one in ast.iter_child_nodes(statement):
        yield from _own_names(one)


@functools.cache
def _defined(text: str) -> Mapping[str, tuple[ast.stmt, ...]]:
    """The statements at the top level of a file by the names that they define; names that are imported are left out."""
    found: dict[str, tuple[ast.stmt, ...]] = {}
    for statement in _tree(text).body:
        for name in dict.fromkeys(_own_names(statement)):
            found[name] = (*found.get(name, ()), statement)
    return found


@functools.cache
def _effects(text: str) -> tuple[ast.stmt, ...]:
    """The statements at the top level of a file that do something else than define names by themselves."""
    plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)
    return tuple(one for one in _tree(text).body if not isinstance(one, plain) and not _only_names(one))


def _only_names(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, gives a value to a name, or imports for type checkers alone."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING" and not statement.orelse
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return all(isinstance(target, ast.Name) for target in targets)


@functools.cache
def _all_chains(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(_chains(_tree(text))))


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """The names that are read, with the attributes that are taken of them at once: `a`, `a.b.c`."""
    names, one = [], node
    while isinstance(one, ast.Attribute):
        names.append(one.attr)
        one = one.value
    if isinstance(one, ast.Name):
        if isinstance(one.ctx, ast.Load):
            yield (one.id, *reversed(names))
        return
    for inner in ast.iter_child_nodes(one):
        yield from _chains(inner)


@functools.cache
def _all_imported_words(text: str) -> tuple[str, ...]:
    return tuple(_imported_words(_tree(text)))


def _imported_words(node: ast.AST) -> Iterator[str]:
    """The modules that `import_module("...")` names."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and getattr(one.func, "attr", getattr(one.func, "id", "")) == "import_module":
            yield from (word.value for word in one.args[:1] if isinstance(word, ast.Constant) and isinstance(word.value, str))


@functools.cache
def _lines(text: str) -> tuple[str, ...]:
    """The lines of a file, those of docstrings and of comments empty."""
    lines = text.splitlines()
    for node in ast.walk(_tree(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                end = first.end_lineno or first.lineno
                lines[first.lineno - 1 : end] = [""] * (end - first.lineno + 1)
    return tuple("" if line.lstrip().startswith("#") else line.rstrip() for line in lines)


@functools.cache
def code_of(text: str) -> str:
    """The lines of a file without docstrings, comments and empty lines."""
    return _joined(_lines(text))


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line for line in lines if line)


def _words(text: str, node: ast.stmt | ast.expr) -> str:
    """What `_lines` has of a statement or an expression."""
    decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
    return _joined(_lines(text)[min([node.lineno, *decorators]) - 1 : node.end_lineno])
