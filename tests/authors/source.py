"""Where the equations of a test come from: a file of a public repository at a commit, and lines of it."""

from typing import NamedTuple

READ = {}
"""Sources by (module, name) of the test that was written from them."""


class Source(NamedTuple):
    """A repository at a commit, and lines of its files."""

    repository: str
    commit: str
    places: tuple[str, ...]


def written_from(repository, commit, *places):
    """Decorator of a test; `places` are "file:first-last". The tables in docs/authors_code.md must name every source."""

    def note(test):
        READ.setdefault((test.__module__, test.__name__), []).append(Source(repository, commit, places))
        return test

    return note


def differs(a, b, least):
    """Raises unless two arrays differ by at least `least` somewhere: the difference that a table names is there."""
    gap = abs(a - b).max()
    assert gap >= least, f"the largest difference is {gap:.3g}"
