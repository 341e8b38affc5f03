"""One picture of a run: the main score by round, and of every client at the end."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_meta import disk, escape
from fedjax_meta.report import curves
from fedjax_meta.report.records import diverged_words, over_seeds
from fedjax_meta.report.series import Series, common_rounds, places
from fedjax_meta.report.tables import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLORS = (
    "#6f7782",
    "#3b6ea8",
    "#d1495b",
    "#2a9d8f",
    "#e08e0b",
    "#7b4fa3",
    "#5b8c3a",
    "#00a6c8",
    "#b5651d",
    "#d65da8",
    "#1f3b63",
    "#8a1c2f",
    "#0b6e4f",
    "#111111",
)
"""Line colours. Colour-blind readers can tell the first few apart."""

MANY = 4
"""With fewer evaluations, the axis of curves begins below the first of them, too."""


def save_figure(path: str | Path, all_series: Sequence[Series], *, title: str) -> None:
    """Draws, for each group of clients, a score by round (above) and its spread over clients at the last round (below).

    The upper part shows means over clients. The lower part shows every client of all seeds as a dot, the quartiles as a bar, and
    the mean as a line across it. The names of the methods beside it are the legend of both parts.

    Args:
      path: .png, .pdf or .svg.
      all_series: at least one; several seeds of a method are drawn as their mean and a band of one sample standard
        deviation to each side.
      title: of the figure.

    Raises:
      OSError: the file cannot be written.
      ValueError: two series of the same title, clients and seed, or of different scores.
    """
    names = [(one.title, one.clients, one.seed) for one in all_series]
    for name, clients, seed in names:
        if names.count((name, clients, seed)) > 1:
            raise ValueError(f"two systems have the title {name!r} ({clients}, seed {seed}): give them titles of their own")
    if not all_series:
        raise ValueError("a figure needs a series at least")
    scores = list(dict.fromkeys(one.kind.name for one in all_series))
    if len(scores) > 1:
        raise ValueError(f"one figure shows one score, not {' and '.join(scores)}")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(one.clients for one in all_series))
    titles = list(dict.fromkeys(one.title for one in all_series))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(titles)}
    style: dict[Any, Any] = {
        "font.size": 9.5,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "text.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
    }
    with mpl.rc_context(style):
        height = 3.6 + 1.0 + 0.42 * len(titles)
        width = max(6.2 * len(groups), 8.0)
        # An inch holds at least seven letters of this size, but for wide capitals.
        lines = textwrap.wrap(title, int(7 * width), max_lines=3, placeholder=" …") or [""]
        figure = Figure(figsize=(width, height + 0.25 * (len(lines) - 1)), layout="constrained")
        axes = figure.subplots(2, len(groups), squeeze=False, height_ratios=[3.4, 0.8 + 0.42 * len(titles)])
        # Every method starts near chance level; including that first of many evaluations would flatten the curves.
        low = _least([one.means[1:] if len(one.means) >= MANY else one.means for one in all_series])
        worst = _least([one.by_client for one in all_series])
        for column, clients in enumerate(groups):
            mine = [one for one in all_series if one.clients == clients]
            _draw_curves(axes[0, column], mine, colors, f"{clients} clients", low)
            if all_series[0].kind.share:
                axes[1, column].set_xlim(10 * np.floor(worst / 10) - 1, 101)
            _draw_spread(axes[1, column], mine, colors, names=column == 0)
        figure.suptitle(escape.label("\n".join(lines)), fontsize=13, fontweight="bold", x=0.01, ha="left")
        drawn = io.BytesIO()
        with curves.quiet_about_letters():
            figure.savefig(drawn, dpi=150, format=Path(path).suffix[1:] or "png")
        disk.write_bytes(path, drawn.getvalue())


def _least(values: Sequence[np.ndarray]) -> float:
    """The smallest of the finite values; 0 if there are none."""
    found = np.concatenate(values)
    return float(min(found[np.isfinite(found)], default=0.0))


def _draw_curves(axis: "Axes", runs: Sequence[Series], colors: Mapping[str, str], title: str, low: float) -> None:
    from matplotlib.ticker import MaxNLocator

    kind, drawn, ended = runs[0].kind, [], []
    for name, color in colors.items():
        mine = [one for one in runs if one.title == name]
        if not mine:
            continue
        rounds = common_rounds([one.rounds for one in mine])
        # NaN, which is not drawn, where a run had diverged.
        lines = np.stack([one.means[places(one.rounds, rounds)] for one in mine])
        drawn.append(curves.draw(axis, rounds, lines, kind, color=color, linewidth=1.8, solid_capstyle="round"))
        ended += [curves.Drawn(one.rounds, one.means, color) for one in mine if one.diverged is not None]
    axis.set_title(escape.label(title), fontsize=11, loc="left", fontweight="bold")
    axis.set_xlabel("round")
    axis.set_ylabel(escape.label(f"{kind.label}, mean over clients"))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if kind.share:
        axis.set_ylim(max(low - 4, 0), 101)
    axis.set_xlim(0, 1.04 * max(float(one.rounds[-1]) for one in runs))
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    curves.clip(axis, drawn, kind)
    curves.crosses(axis, ended)


def _draw_spread(axis: "Axes", runs: Sequence[Series], colors: Mapping[str, str], *, names: bool) -> None:
    jitter, kind, drawn = np.random.default_rng(0), runs[0].kind, []
    titles = list(colors)
    for place, (name, color) in enumerate(colors.items()):
        mine = [one for one in runs if one.title == name]
        if not mine:
            middle = sum(axis.get_xlim()) / 2
            axis.text(middle, place, "not measured", color=MUTED, fontsize=8, ha="center", va="center", style="italic")
            continue
        values = np.concatenate([one.by_client for one in mine])
        values = values[np.isfinite(values)]
        axis.text(
            1.02,
            place + 0.36,
            diverged_words([one.diverged for one in mine]),
            transform=axis.get_yaxis_transform(),
            color=INK,
            fontsize=7,
            style="italic",
            ha="right",
        )
        if not values.size:
            continue
        drawn.append(curves.Drawn(place, values, color))
        axis.scatter(
            values, place + jitter.uniform(-0.24, 0.24, values.size), s=11, color=color, alpha=0.4, linewidth=0, zorder=2
        )
        first, third = np.percentile(values, [25, 75])
        axis.plot([first, third], [place, place], color=color, linewidth=6, alpha=0.45, solid_capstyle="butt", zorder=3)
        mean = over_seeds([one.means[-1] for one in mine])[0]
        axis.plot([mean, mean], [place - 0.34, place + 0.34], color=INK, linewidth=1.8, zorder=4)
        axis.text(
            1.02,
            place,
            (f"{mean:.1f}" if kind.share else f"{mean:.3g}") if np.isfinite(mean) else "–",
            transform=axis.get_yaxis_transform(),
            color=INK,
            fontsize=9,
            va="center",
            ha="left",
            clip_on=False,
        )
    curves.clip_dots(axis, drawn, kind)
    axis.set_ylim(len(titles) - 0.45, -0.6)
    axis.set_yticks(range(len(titles)), [label(title, 26, 2) if names else "" for title in titles])
    if names:
        for shown, name in zip(axis.get_yticklabels(), titles, strict=True):
            shown.set_color(colors[name])
            shown.set_fontweight("bold")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_xlabel(escape.label(f"{kind.label}, of each client at the last round (bar: quartiles; line: mean)"), fontsize=8.5)
