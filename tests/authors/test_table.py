"""docs/authors_code.md says what the tests were written from, and names only methods and options that exist."""

import importlib
import inspect
import re
from pathlib import Path

import fedjax_meta as fm
from fedjax_meta.federation import OPTIONS
from tests.authors.source import READ

PAGE = (Path(__file__).parents[2] / "docs" / "authors_code.md").read_text()
FILES = sorted(
    (folder, path.stem)
    for folder in ("authors", "whole_rounds")
    for path in (Path(__file__).parents[1] / folder).glob("test_*.py")
    if path.stem not in ("test_table", "test_torch")
)


def sources():
    """The rows of the table of sources."""
    for folder, file in FILES:
        module = importlib.import_module(f"tests.{folder}.{file}")
        for name, test in vars(module).items():
            for source in READ.get((module.__name__, name), []) if inspect.isfunction(test) else []:
                yield f"| `{folder}/{file}::{name}` | {source.repository} `{source.commit}` | {', '.join(source.places)} |"


def test_every_source_stands_in_the_table():
    expected = sorted(set(sources()))
    found = sorted(line for line in PAGE.splitlines() if line.startswith(("| `authors/", "| `whole_rounds/")))
    assert found == expected, "the table of sources should be:\n" + "\n".join(expected)


def rows():
    """(methods, what reproduces the code) of the table of methods."""
    table = PAGE.split("## Methods")[1].split("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            yield re.findall(r"`(\w+)`", cells[0]), cells[2]


def test_the_methods_that_are_compared_and_their_options_exist():
    compared = {name for names, _ in rows() for name in names}
    assert len(compared) >= 35
    for names, cell in rows():
        takes = set.intersection(*(set(inspect.signature(fm.METHODS[name]).parameters) for name in names))
        takes |= set(OPTIONS)
        for option in re.findall(r"`(\w+)=", cell):
            assert option in takes, f"{names} have no option {option}"
