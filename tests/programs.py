"""The programs of experiments/ and benchmarks/: each is a file, or a folder with `__main__.py`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def programs(folder: str) -> dict[str, Path]:
    """The source of every public module of a folder by name, that of a package being its `__main__.py`."""
    files = {path.stem: path for path in (ROOT / folder).glob("[a-z]*.py")}
    return dict(sorted((files | {path.parent.name: path for path in (ROOT / folder).glob("[a-z]*/__main__.py")}).items()))


def module_of(name: str) -> str:
    """The module that `python -m experiments.NAME` runs."""
    path = programs("experiments")[name]
    return f"experiments.{name}.__main__" if path.stem == "__main__" else f"experiments.{name}"
