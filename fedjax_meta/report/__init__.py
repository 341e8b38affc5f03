"""Reports of a run: compact records of every client at every evaluation, tables and figures.

What is not finite counts as NaN in every score, and tables and figures mark it. matplotlib, pandas and rich are imported only
when they are needed. Axis letters: E evaluations, N clients, K classes.
"""

from fedjax_meta.report.figure import COLORS, GRID, INK, MUTED, save_figure
from fedjax_meta.report.frames import load, load_clients
from fedjax_meta.report.records import (
    Kind,
    MainScore,
    compact,
    difference,
    diverged,
    joined,
    main_score,
    mean_score,
    numbers_again,
    score_names,
    strict,
    without_confusion,
)
from fedjax_meta.report.series import Series, check_titles, marked, over_seeds, series, with_spread
from fedjax_meta.report.tables import markdown_table, rich_table

__all__ = [
    "COLORS",
    "GRID",
    "INK",
    "MUTED",
    "Kind",
    "MainScore",
    "Series",
    "check_titles",
    "compact",
    "difference",
    "diverged",
    "joined",
    "load",
    "load_clients",
    "main_score",
    "markdown_table",
    "marked",
    "mean_score",
    "numbers_again",
    "over_seeds",
    "rich_table",
    "save_figure",
    "score_names",
    "series",
    "strict",
    "with_spread",
    "without_confusion",
]
