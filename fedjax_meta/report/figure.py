"""One picture of a run: the main score by round, and of every client at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_meta import escape
from fedjax_meta.report.series import Series, check_titles, marked

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


def save_figure(
    path: str | Path,
    all_series: Sequence[Series],
    *,
    title: str,
    published: Mapping[tuple[str, str], float] | None = None,
) -> None:
    """Draws, for each group of clients, the main score by round (above) and its spread over clients at the last round (below).

    The lower part shows every client of all seeds as a dot, the quartiles as a bar, and the accuracy over samples as a line
    across it. The names of the methods beside it are the legend of both parts.

    Args:
      path: .png, .pdf or .svg.
      all_series: at least one; several seeds of a method are drawn as their mean and a band of one sample standard
        deviation to each side.
      title: of the figure.
      published: published accuracy over samples, in percent, by (title of the method, clients); drawn as a diamond.

    Raises:
      ValueError: two series of the same title, clients and seed, or of different scores.
    """
    check_titles([(one.title, one.clients, f"seed {one.seed}") for one in all_series])
    scores = list(dict.fromkeys(one.score for one in all_series))
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
        figure = Figure(figsize=(max(6.2 * len(groups), 8.0), height), layout="constrained")
        axes = figure.subplots(2, len(groups), squeeze=False, height_ratios=[3.4, 0.8 + 0.42 * len(titles)])
        # Every method starts near chance level; including that first evaluation would flatten the curves.
        low = _least([one.accuracy[1:] if len(one.accuracy) > 1 else one.accuracy for one in all_series])
        worst = _least([*(one.by_client for one in all_series), np.array(list((published or {}).values()))])
        for column, clients in enumerate(groups):
            mine = [one for one in all_series if one.clients == clients]
            _draw_curves(axes[0, column], mine, colors, f"{clients} clients", low)
            if all_series[0].share:
                axes[1, column].set_xlim(10 * np.floor(worst / 10) - 1, 101)
            _draw_spread(axes[1, column], mine, colors, published or {}, names=column == 0)
        figure.suptitle(escape.label(title), fontsize=13, fontweight="bold", x=0.01, ha="left")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _least(values: Sequence[np.ndarray]) -> float:
    """The smallest of the finite values; 0 if there are none."""
    found = np.concatenate(values)
    return float(min(found[np.isfinite(found)], default=0.0))


def _draw_curves(axis: "Axes", runs: Sequence[Series], colors: Mapping[str, str], title: str, low: float) -> None:
    for name, color in colors.items():
        mine = [one for one in runs if one.title == name]
        if not mine:
            continue
        rounds = max((one.rounds for one in mine), key=len)
        # NaN, which is not drawn, where a run diverged, or was stopped because it did.
        lines = np.stack([np.pad(one.accuracy, (0, len(rounds) - len(one.rounds)), constant_values=np.nan) for one in mine])
        axis.plot(rounds, lines.mean(0), color=color, linewidth=1.8, solid_capstyle="round")
        if len(mine) > 1:
            mean, spread = lines.mean(0), lines.std(0, ddof=1)
            low_, high = mean - spread, mean + spread
            if mine[0].share:
                low_, high = np.maximum(low_, 0), np.minimum(high, 100)
            axis.fill_between(rounds, low_, high, color=color, alpha=0.18, linewidth=0)
        for one in mine:
            if one.diverged is not None:
                drawn = np.flatnonzero(np.isfinite(one.accuracy))
                place = (one.rounds[drawn[-1]], one.accuracy[drawn[-1]]) if drawn.size else (one.diverged, max(low, 0))
                axis.plot(*place, "x", color=color, markersize=9, markeredgewidth=2.2, clip_on=False)
    axis.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axis.set_xlabel("round")
    axis.set_ylabel(_axis_label(runs[0], "over samples"))
    if runs[0].share:
        axis.set_ylim(max(low - 4, 0), 101)
    axis.set_xlim(left=0)
    axis.grid(axis="y", color=GRID, linewidth=0.8)


def _draw_spread(
    axis: "Axes",
    runs: Sequence[Series],
    colors: Mapping[str, str],
    published: Mapping[tuple[str, str], float],
    *,
    names: bool,
) -> None:
    jitter = np.random.default_rng(0)
    shown = False
    titles = list(colors)
    for place, (name, color) in enumerate(colors.items()):
        mine = [one for one in runs if one.title == name]
        if not mine:
            middle = sum(axis.get_xlim()) / 2
            axis.text(middle, place, "not measured", color=MUTED, fontsize=8, ha="center", va="center", style="italic")
            continue
        values = np.concatenate([one.by_client for one in mine])
        values = values[np.isfinite(values)]
        if any(one.diverged is not None for one in mine):
            axis.text(
                1.02,
                place + 0.36,
                marked(mine)[len(name) + 2 : -1],
                transform=axis.get_yaxis_transform(),
                color=INK,
                fontsize=7,
                style="italic",
                ha="right",
            )
        if not values.size:
            continue
        axis.scatter(
            values, place + jitter.uniform(-0.24, 0.24, values.size), s=11, color=color, alpha=0.4, linewidth=0, zorder=2
        )
        first, third = np.percentile(values, [25, 75])
        axis.plot([first, third], [place, place], color=color, linewidth=6, alpha=0.45, solid_capstyle="butt", zorder=3)
        accuracy = float(np.mean([one.accuracy[-1] for one in mine]))
        axis.plot([accuracy, accuracy], [place - 0.34, place + 0.34], color=INK, linewidth=1.8, zorder=4)
        axis.text(
            1.02,
            place,
            (f"{accuracy:.1f}" if mine[0].share else f"{accuracy:.3g}") if np.isfinite(accuracy) else "–",
            transform=axis.get_yaxis_transform(),
            color=INK,
            fontsize=9,
            va="center",
            ha="left",
            clip_on=False,
        )
        if (name, mine[0].clients) in published:
            shown = True
            axis.scatter(
                [published[name, mine[0].clients]],
                [place],
                marker="D",
                s=26,
                facecolor="white",
                edgecolor=INK,
                linewidth=1.2,
                zorder=5,
            )
    axis.set_ylim(len(titles) - 0.45, -0.6)
    axis.set_yticks(range(len(titles)), titles if names else [""] * len(titles))
    if names:
        for label, name in zip(axis.get_yticklabels(), titles, strict=True):
            label.set_color(colors[name])
            label.set_fontweight("bold")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    legend = f"bar: quartiles; line: {'over samples' if runs[0].over_samples else 'mean'}" + (
        "; diamond: published" if shown else ""
    )
    axis.set_xlabel(_axis_label(runs[0], f"of each client at the last round ({legend})"), fontsize=8.5)


def _axis_label(one: Series, what: str) -> str:
    """E.g. "accuracy over samples, %"."""
    what = "mean over clients" if what == "over samples" and not one.over_samples else what
    return f"{one.score.replace('_', ' ')} {what}{', %' if one.share else ''}"
