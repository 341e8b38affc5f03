"""What the figures of runs and of studies share: curves over seeds, marks of divergence, axes that end before blown-up scores."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_meta.report.records import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

READABLE = 20
"""An axis ends before values that would leave less than one part in so many of it to the better half of the systems."""


class Drawn(NamedTuple):
    """The numbers of one system in a panel.

    Attributes:
      x, y: `[E]`; for dots, y are the values `[N]`, and x is the row in which they stand.
      color: of the system.
    """

    x: Any
    y: np.ndarray
    color: str


@contextlib.contextmanager
def quiet_about_letters() -> Iterator[None]:
    """Without a warning for each letter of a name that the font of a figure lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def draw(axis: "Axes", x: np.ndarray, values: np.ndarray, kind: Kind, **line: Any) -> Drawn:
    """Draws the mean of scores `[seeds, E]` with a band of one sample standard deviation to each side.

    A point without a neighbour, which a line does not show, is a dot with a bar.

    Args:
      axis: to draw on.
      x: `[E]`.
      values: NaN where a run had diverged.
      kind: of the scores.
      **line: how matplotlib draws the line; with its `color`.

    Returns:
      The mean.
    """
    mean, color = values.mean(0), line["color"]
    axis.plot(x, mean, **line)
    alone = _alone(mean)
    if alone.any():
        axis.plot(x[alone], mean[alone], "o", color=color, markersize=5)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        low, high = mean - spread, mean + spread
        if kind.share:
            low, high = np.clip(low, 0, 100), np.clip(high, 0, 100)
        axis.fill_between(x, low, high, color=color, alpha=0.17, linewidth=0)
        if alone.any():
            axis.vlines(x[alone], low[alone], high[alone], color=color, alpha=0.5)
    return Drawn(x, mean, color)


def _alone(values: np.ndarray) -> np.ndarray:
    """Which of the values `[E]` are finite while their neighbours are not.

    Example:
      >>> _alone(np.array([1.0, np.nan, 2.0, 3.0])).tolist(), _alone(np.array([1.0])).tolist()
      ([True, False, False, False], [True])
    """
    there = np.pad(np.isfinite(values), 1)
    return np.asarray(there[1:-1] & ~there[:-2] & ~there[2:])


def crosses(axis: "Axes", ended: Sequence[Drawn]) -> None:
    """Marks the last finite point of curves that diverged; at the bottom where there is none. To be called when limits are final.

    Crosses that would hide each other stand side by side.
    """
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    taken: list[tuple[float, float]] = []
    for one in ended:
        finite = np.flatnonzero(np.isfinite(one.y))
        x, y = (one.x[finite[-1]], one.y[finite[-1]]) if finite.size else (one.x[0], low)
        # Limits leave out what is not finite, and what is far beyond the others.
        x, y = min(max(x, left), right), min(max(y, low), high)
        place = ((x - left) / (right - left), (y - low) / (high - low))
        hidden = sum(abs(place[0] - a) < 0.02 and abs(place[1] - b) < 0.03 for a, b in taken)
        taken.append(place)
        points = ScaledTranslation(9 * hidden / 72, 0, axis.figure.dpi_scale_trans)
        style: dict[str, Any] = {"markersize": 8, "markeredgewidth": 2, "clip_on": False, "zorder": 5}
        # Not `plot`, which would take the step aside into the limits.
        axis.add_artist(Line2D([x], [y], marker="x", color=one.color, transform=axis.transData + points, **style))


def limits(
    systems: Sequence[np.ndarray], kind: Kind, extent: Callable[[np.ndarray], Any] = np.max
) -> tuple[float, float] | None:
    """The limits of an axis without values that would squeeze the others onto one end; `None` where none does, and for shares.

    Args:
      systems: the scores of each.
      kind: of the scores.
      extent: how far from the best score a system needs the axis to go, from the distances of its scores.

    Example:
      >>> rmse = Kind("rmse", False, False)
      >>> blown_up = np.array([1.0, 3e15])
      >>> limits([np.array([2.0, 1.0]), blown_up], rmse), limits([np.array([2.0, 1.0])], rmse)
      ((0.95, 2.05), None)
    """
    found = [values[np.isfinite(values)] for values in systems]
    found = [values if kind.higher_is_better else -values for values in found if values.size]
    if kind.share or not found:
        return None
    everything = np.concatenate(found)
    best = float(everything.max())
    far = sorted(float(extent(best - values)) for values in found)
    typical = max(far[(len(far) - 1) // 2], abs(best))
    shown = everything[everything >= best - READABLE * typical]
    if typical == 0 or shown.size == everything.size:
        return None
    low, high = sorted(float(end) if kind.higher_is_better else -float(end) for end in (shown.min(), shown.max()))
    room = 0.05 * ((high - low) or typical)
    return low - room, high + room


def clip(axis: "Axes", drawn: Sequence[Drawn], kind: Kind, extent: Callable[[np.ndarray], Any] = np.max) -> None:
    """Ends the y axis of curves at their `limits`; an arrow and a number tell how far a curve goes beyond."""
    ends = limits([one.y for one in drawn], kind, extent)
    if ends is None:
        return
    axis.set_ylim(ends)
    edge, mark, inwards = (ends[0], "v", 1) if kind.higher_is_better else (ends[1], "^", -1)
    middle, said = sum(axis.get_xlim()) / 2, 0
    for one in drawn:
        beyond = _beyond(one.y, ends)
        if beyond.size:
            said += 1
            at = beyond[np.argmax(np.abs(one.y[beyond]))]
            right = one.x[at] > middle
            axis.plot(one.x[at], edge, mark, color=one.color, markersize=6, clip_on=False, zorder=5)
            # Below one another, since curves often blow up at the same round.
            where = (-8 if right else 8, inwards * 11 * said)
            _number(axis, one.y[at], (one.x[at], edge), where, one.color, "right" if right else "left")


def clip_dots(axis: "Axes", drawn: Sequence[Drawn], kind: Kind) -> None:
    """The same for rows of dots, along x; how many they are stands before the number."""
    ends = limits([one.y for one in drawn], kind, np.median)
    if ends is None:
        return
    axis.set_xlim(ends)
    edge, mark, inwards = (ends[0], "<", 1) if kind.higher_is_better else (ends[1], ">", -1)
    for one in drawn:
        beyond = _beyond(one.y, ends)
        if beyond.size:
            axis.plot(edge, one.x, mark, color=one.color, markersize=6, clip_on=False, zorder=5)
            worst = one.y[beyond[np.argmax(np.abs(one.y[beyond]))]]
            side = "left" if kind.higher_is_better else "right"
            words = f"{beyond.size} up to " if beyond.size > 1 else ""
            _number(axis, worst, (edge, one.x), (8 * inwards, 4), one.color, side, words)


def _beyond(values: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    return np.flatnonzero(np.isfinite(values) & ((values < ends[0]) | (values > ends[1])))


def _number(
    axis: "Axes", value: float, at: tuple[float, float], where: tuple[float, float], color: str, side: str, words: str = ""
) -> None:
    style: dict[str, Any] = {"color": color, "fontsize": 8, "ha": side, "va": "center", "annotation_clip": False}
    axis.annotate(f"{words}{value:.3g}", at, xytext=where, textcoords="offset points", **style)
