"""Reports of a run: compact records of every client at every evaluation, tables and figures.

What is not finite counts as NaN in every score, and tables and figures mark it. matplotlib, pandas and rich are imported only
when they are needed. Axis letters: E evaluations, N clients, K classes.
"""

from fedjax_meta.report.figure import COLORS, GRID, INK, MUTED, save_figure
from fedjax_meta.report.frames import load, load_clients
from fedjax_meta.report.records import (
    Kind,
    MainScore,
    Spread,
    compact,
    difference,
    diverged,
    diverged_words,
    joined,
    main_score,
    mean_score,
    negative_curvature,
    no_number,
    numbers_again,
    over_seeds,
    score_names,
    strict,
    without_confusion,
    without_loss,
    without_loss_words,
)
from fedjax_meta.report.series import Series, common_rounds, places, series
from fedjax_meta.report.tables import Table, label, markdown_table, rich_table

__all__ = [
    "COLORS",
    "GRID",
    "INK",
    "MUTED",
    "Kind",
    "MainScore",
    "Series",
    "Spread",
    "Table",
    "common_rounds",
    "compact",
    "difference",
    "diverged",
    "diverged_words",
    "joined",
    "label",
    "load",
    "load_clients",
    "main_score",
    "markdown_table",
    "mean_score",
    "negative_curvature",
    "no_number",
    "numbers_again",
    "over_seeds",
    "places",
    "rich_table",
    "save_figure",
    "score_names",
    "series",
    "strict",
    "without_confusion",
    "without_loss",
    "without_loss_words",
]
