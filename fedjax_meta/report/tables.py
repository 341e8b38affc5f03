"""Tables as Markdown, and for a terminal of any width."""

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_meta import escape

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement

_WORDS = re.compile(r"[A-Za-z]{2,}[,;:]? [A-Za-z0-9]|[A-Za-z0-9][,;] [A-Za-z]")
"""Two words: a cell that may be broken between them."""

_GAP = "  "


class Table(NamedTuple):
    """Headings and rows of text, and maybe a title."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def only(self, columns: Sequence[str]) -> "Table":
        """Some of the columns, those that it has."""
        return self._columns([self.headings.index(name) for name in columns if name in self.headings])

    def used(self) -> "Table":
        """The columns that hold something."""
        return self._columns([column for column in range(len(self.headings)) if any(row[column] for row in self.rows)])

    def _columns(self, places: Sequence[int]) -> "Table":
        return Table([self.headings[c] for c in places], [[row[c] for c in places] for row in self.rows], self.title)


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


def rich_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1
) -> "TerminalTable":
    """The same table as `markdown_table`, for rich's `Console.print`, which fits it into the terminal, see `TerminalTable`."""
    return TerminalTable(
        title, [" ".join(heading.split()) for heading in headings], [list(map(_plain, row)) for row in rows], text_columns
    )


def _plain(cell: str) -> str:
    """A cell whose lines are one."""
    return " ".join(cell.split())


class TerminalTable(NamedTuple):
    """A table that fits the terminal that it is printed on.

    Titles and other words wrap between words, or before a bracket where a word with brackets is too long for its column; numbers
    and words are never broken. Columns that do not fit beside the others follow below, with the first column again.

    Attributes:
      title: above it.
      headings, rows: text.
      text_columns: how many columns, the first ones, hold words and are aligned left; others that hold words are too.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    text_columns: int = 1

    def lines(self, width: int) -> list[str]:
        """The table without its title, as lines of at most `width` cells; more only where a word or number is longer."""
        words = [column < self.text_columns or self._holds_words(column) for column in range(len(self.headings))]
        least = [self._least(column, words[column]) for column in range(len(self.headings))]
        made: list[str] = []
        for columns in _parts(least, width):
            made += [""] * bool(made) + self._part(columns, words, least, width)
        return made

    def _column(self, column: int) -> Iterator[str]:
        return (row[column] for row in self.rows)

    def _holds_words(self, column: int) -> bool:
        return any(_WORDS.search(cell) for cell in self._column(column))

    def _least(self, column: int, words: bool) -> int:
        """The width below which a word or a number would be broken."""
        pieces = itertools.chain(_pieces(self.headings[column]), *(_pieces(c) if words else [c] for c in self._column(column)))
        return max(map(_cells, pieces), default=0)

    def _part(self, columns: Sequence[int], words: Sequence[bool], least: Sequence[int], width: int) -> list[str]:
        wanted = [max(map(_cells, [self.headings[c], *self._column(c)]), default=0) for c in columns]
        choices = _shared([least[c] for c in columns], wanted, width - len(_GAP) * (len(columns) - 1))
        made = [self._rows(columns, words, sizes) for sizes in choices]
        place = min(range(len(made)), key=lambda number: len(made[number]))
        sizes, body = choices[place], made[place]
        head = self._row([self.headings[c] for c in columns], sizes, [words[c] for c in columns], last=True)
        rule = "─" * (sum(sizes) + len(_GAP) * (len(columns) - 1))
        return [*head, rule, *body]

    def _rows(self, columns: Sequence[int], words: Sequence[bool], sizes: Sequence[int]) -> list[str]:
        left = [words[c] for c in columns]
        return [line for row in self.rows for line in self._row([row[c] for c in columns], sizes, left)]

    def _row(self, cells: Sequence[str], sizes: Sequence[int], words: Sequence[bool], *, last: bool = False) -> list[str]:
        """The lines of a row; cells begin on its first line, headings end on its `last`."""
        wrapped = [wrap(cell, size) for cell, size in zip(cells, sizes, strict=True)]
        height = max(map(len, wrapped))
        padded = [[""] * (height - len(cell)) + cell if last else cell + [""] * (height - len(cell)) for cell in wrapped]
        lines = []
        for number in range(height):
            shown = [
                cell[number] + _blank(size, cell[number]) if left else _blank(size, cell[number]) + cell[number]
                for cell, size, left in zip(padded, sizes, words, strict=True)
            ]
            lines.append(_GAP.join(shown).rstrip())
        return lines

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator[Any]:
        """What rich calls to print it."""
        from rich.text import Text

        # Text, so that nothing in it is taken for markup.
        for line in wrap(_plain(self.title), options.max_width) if self.title else ():
            yield Text(line, style="bold", no_wrap=True, overflow="ignore")
        for line in self.lines(options.max_width):
            yield Text(line, no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: "Console", options: "ConsoleOptions") -> "Measurement":
        """What rich calls to learn its width."""
        from rich.measure import Measurement

        whole = max(map(_cells, self.lines(10**6)), default=0)
        return Measurement(min(whole, options.max_width), min(whole, options.max_width))


def _cells(text: str) -> int:
    """How many cells of a terminal a text takes: two for each Chinese, Japanese or Korean letter, none for a combining accent."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "FW" else 1 for c in text)


def _blank(width: int, text: str) -> str:
    return " " * (width - _cells(text))


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken between words; a word that is too long, before its brackets; else not at all.

    Example:
      >>> wrap("FedMeta-Per(Meta-SGD) with a head", 12), wrap("unbreakable", 4)
      (['FedMeta-Per', '(Meta-SGD)', 'with a head'], ['unbreakable'])
    """
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        if _cells(lines[-1] + gap + word) <= width:
            lines[-1] += gap + word
            continue
        parts = [word] if _cells(word) <= width else _pieces(word)
        for number, part in enumerate(parts):
            gap = " " if lines[-1] and number == 0 else ""
            if not lines[-1] or _cells(lines[-1] + gap + part) <= width:
                lines[-1] += gap + part
            else:
                lines.append(part)
    return lines


def label(text: str, width: int, lines: int) -> str:
    """A name as a figure shows it: so many lines of about `width` characters, see `wrap`; "…" stands for what is left out.

    Example:
      >>> print(label("fedper(lr=0.01, batch_size=10, epochs=5)", 12, 2))
      fedper
      (lr=0.01,…
    """
    wrapped = wrap(text, width)
    kept = [line if len(line) <= 2 * width else f"{line[: 2 * width - 1]}…" for line in wrapped[:lines]]
    return escape.label("\n".join(kept) + ("…" if len(wrapped) > lines else ""))


def _pieces(text: str) -> list[str]:
    """What a line may be broken between: words, and parts of words that begin with a bracket."""
    return re.findall(r"[(\[]+[^\s(\[]*|[^\s(\[]+", text)


def _parts(least: Sequence[int], width: int) -> list[list[int]]:
    """Columns side by side, in as many tables as they need; each begins with the first column."""
    parts = [[0]]
    for column in range(1, len(least)):
        together = [*parts[-1], column]
        if len(parts[-1]) > 1 and sum(least[c] for c in together) + len(_GAP) * (len(together) - 1) > width:
            parts.append([0, column])
        else:
            parts[-1].append(column)
    return parts


def _shared(least: Sequence[int], wanted: Sequence[int], room: int) -> list[list[int]]:
    """Widths of columns to choose from: those that lack least have what they want, the others share the rest by what they lack.

    Returns:
      One choice for each number of columns that have what they want, as far as there is room.
    """
    lack = [max(high - low, 0) for low, high in zip(least, wanted, strict=True)]
    order, left = sorted(range(len(least)), key=lack.__getitem__), max(room - sum(least), 0)
    sizes, found = list(least), []
    for place in range(len(order) + 1):
        rest = order[place:]
        total = sum(lack[column] for column in rest)
        extra = {column: min(lack[column], left * lack[column] // max(total, 1)) for column in rest}
        found.append([size + extra.get(column, 0) for column, size in enumerate(sizes)])
        if place == len(order) or lack[order[place]] > left:
            return found
        sizes[order[place]] += lack[order[place]]
        left -= lack[order[place]]
    return found
