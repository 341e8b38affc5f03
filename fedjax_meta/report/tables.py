"""Tables as Markdown, and for a terminal."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjax_meta import escape

if TYPE_CHECKING:
    from rich.table import Table

_WORDS = re.compile(r"[A-Za-z]{2,}[,;:]? [A-Za-z0-9]")
"""Two words: a cell that may be broken between them."""


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """A Markdown table; the first `text_columns` columns are aligned left, the others right.

    Example:
      >>> print(markdown_table(["system", "accuracy"], [["FedAvg", "82.1"]]))
      | system | accuracy |
      |:---|---:|
      | FedAvg | 82.1 |
    """
    marks = [":---" if column < text_columns else "---:" for column in range(len(headings))]
    cells = [[escape.markdown(cell) for cell in row] for row in (headings, *rows)]
    lines = [" | ".join(cells[0]), "|".join(marks), *(" | ".join(row) for row in cells[1:])]
    return "\n".join(f"|{line}|" if number == 1 else f"| {line} |" for number, line in enumerate(lines))


def rich_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> "Table":
    """The same table as `markdown_table`, for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Text, so that nothing in it is taken for markup.
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, heading in enumerate(headings):
        words = any(_WORDS.search(row[column]) for row in rows)
        side: Any = "left" if column < text_columns or words else "right"
        # Columns of words wrap where the terminal is narrow; numbers stay on one line.
        table.add_column(Text(heading), justify=side, no_wrap=not words, overflow="fold", vertical="bottom")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
