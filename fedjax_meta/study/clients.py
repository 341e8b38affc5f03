"""What the clients of a scenario hold: a table of sizes and classes, and pictures of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_meta import escape, report
from fedjax_meta.data import FederatedData
from fedjax_meta.study import figures
from fedjax_meta.study.figures import Figure, Panel
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.tuning import KNOWN, NEW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {KNOWN: ("train", "test"), NEW: ("support", "query")}
"""The views that together are all samples of a client."""

HEADINGS = ("clients", "view", "N", "samples", "min", "mean", "std", "max", "classes each")

ROWS, COLUMNS = 6, 16
"""Clients in a picture of samples, and samples of each."""


def table(scenario: str, clients: Clients) -> report.Table:
    """Sizes and numbers of classes, a row for each view; without classes where the targets are none."""
    rows = []
    for group, data in _groups(clients).items():
        for number, view in enumerate(data.views):
            size = np.asarray(data.sizes(view))
            row = ["" if number else group, view, str(len(size)), f"{size.sum():,}", f"{size.min():,}"]
            row += [f"{size.mean():,.1f}", f"{size.std():,.1f}", f"{size.max():,}"]
            rows.append([*row, _few_to_many((class_counts(data, [view]) > 0).sum(1)) if data.labelled else ""])
    return report.Table(HEADINGS, rows, f"{scenario}: {clients.title}").used()


def figure(clients: Clients) -> Figure:
    """The samples of each client, and of which classes they are."""
    words = "Bars are samples of a client; dashed is the mean."
    if clients.train.labelled:
        words += " In the other picture, a row is a class: the darker, the more samples a client has, on a log scale."
    panels = [panel for row in _rows(clients) for panel in row]
    return Figure("samples", "Who has which samples", words, panels)


def save(path: Path, clients: Clients, *, images: bool = False) -> None:
    """Draws sizes and classes; a row for each group of clients.

    Args:
      path: .png, .pdf or .svg.
      clients: of a scenario.
      images: whether to draw samples of a few clients too, where samples are images. Not for a report that others may see.

    Raises:
      OSError: the file cannot be written.
    """
    rows = _rows(clients)
    if images and np.ndim(clients.train.x) == 4:
        for row, (group, data) in zip(rows, _groups(clients).items(), strict=True):
            row.append(_samples(clients, group, data))
    figures.picture(path, rows, clients.title)


def class_counts(data: FederatedData, views: Sequence[str]) -> np.ndarray:
    """int64 `[N, K]`: the number of samples of each class that each client has in some views together.

    Args:
      data: with class labels.
      views: without samples in common.
    """
    counts = np.zeros((data.num_clients, data.num_classes), np.int64)
    for view in views:
        size = np.asarray(data.sizes(view), np.int64)
        first = np.asarray(data.start[view], np.int64) - (np.cumsum(size) - size)
        labels = np.asarray(data.y)[np.repeat(first, size) + np.arange(size.sum())]
        np.add.at(counts, (np.repeat(np.arange(len(size)), size), labels), 1)
    return counts


def _groups(clients: Clients) -> dict[str, FederatedData]:
    return {KNOWN: clients.train} | ({} if clients.new is None else {NEW: clients.new})


def _rows(clients: Clients) -> list[list[Panel]]:
    """The panels of each group of clients."""
    return [
        [_sizes(group, data)] + ([_classes(group, data)] if data.labelled else []) for group, data in _groups(clients).items()
    ]


def _sizes(group: str, data: FederatedData) -> Panel:
    def draw(axis: "Axes") -> None:
        total = np.zeros(data.num_clients, np.int64)
        edges = np.arange(data.num_clients + 1) - 0.5
        for number, view in enumerate(PARTS[group]):
            above = total + np.asarray(data.sizes(view))
            axis.stairs(
                above, edges, baseline=total, fill=True, color=figures.color_of(1), alpha=(0.9, 0.45)[number], label=view
            )
            total = above
        axis.axhline(total.mean(), color=figures.TEXT, linewidth=0.8, linestyle="--")
        axis.set_xlim(edges[0], edges[-1])
        axis.set_ylim(0, 1.25 * total.max())  # with room for the legend
        _number(axis)
        axis.grid(visible=False)
        axis.set_title(f"{group} clients: {data.num_clients:,} with {total.sum():,} samples", fontsize=9)
        axis.set_ylabel("samples")
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")

    return Panel(draw, width=4.6, height=2.6)


def _classes(group: str, data: FederatedData) -> Panel:
    def draw(axis: "Axes") -> None:
        from matplotlib.colors import to_rgb

        counts = class_counts(data, PARTS[group]).T
        # Opacity instead of a colour map, so that 0 is the page in light and in dark.
        image = np.empty((*counts.shape, 4))
        image[..., :3] = to_rgb(figures.color_of(1))
        # On a linear scale, a single large cell would make all others look alike.
        image[..., 3] = np.where(counts, 0.15 + 0.85 * np.log1p(counts) / np.log1p(counts.max()), 0)
        axis.imshow(image, aspect="auto", interpolation="none")
        axis.set_title(f"{group} clients: at most {counts.max():,} samples of a class", fontsize=9)
        axis.set_ylabel("class")
        axis.set_yticks(range(0, len(counts), -(-len(counts) // 10)))
        _number(axis)
        axis.grid(visible=False)

    return Panel(draw, width=4.6, height=2.6)


def _number(axis: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("client")


def _samples(clients: Clients, group: str, data: FederatedData) -> Panel:
    """Rows of images: a few clients, spread over all, each with its first samples."""
    shown = np.unique(np.linspace(0, data.num_clients - 1, ROWS).round().astype(int))
    view = PARTS[group][0]

    def draw(axis: "Axes") -> None:
        strips = [np.asarray(data.x[start : start + min(size, COLUMNS)]) for start, size in _bounds(data, view, shown)]
        height, width, channels = data.x.shape[1:]
        kept = channels if channels == 3 else 1  # of others, the first channel
        pixels = np.concatenate(strips)[..., :kept]
        low, high = (0, 255) if pixels.dtype == np.uint8 else (float(pixels.min()), float(pixels.max()))
        wall = np.zeros((len(shown), height + 1, COLUMNS, width + 1, 4))  # a pixel between images stays empty
        for row, strip in enumerate(strips):
            drawn = (strip[..., :kept] - low) / max(high - low, 1e-12)
            wall[row, :height, : len(strip), :width, :3] = np.moveaxis(drawn, 0, 1)
            wall[row, :height, : len(strip), :width, 3] = 1
        axis.imshow(wall.reshape(len(shown) * (height + 1), COLUMNS * (width + 1), 4), interpolation="none")
        names = [_label(clients, group, client) for client in shown]
        axis.set_yticks((np.arange(len(shown)) + 0.5) * (height + 1), names, fontsize=7)
        axis.set_xticks([])
        axis.spines[:].set_visible(False)
        axis.grid(visible=False)
        axis.set_title(f"{group} clients: first samples of “{view}”", fontsize=9)

    return Panel(draw, width=6.4, height=2.6)


def _bounds(data: FederatedData, view: str, clients: np.ndarray) -> list[tuple[int, int]]:
    start, size = np.asarray(data.start[view]), np.asarray(data.sizes(view))
    return [(int(start[client]), int(size[client])) for client in clients]


def _label(clients: Clients, group: str, client: int) -> str:
    names: Any = clients.names[(KNOWN, NEW).index(group)]
    said = escape.label(names[client]) if names else f"client {client}"
    return f"{said}, noisy" if group == KNOWN and client in clients.noisy else said


def _few_to_many(counts: np.ndarray) -> str:
    least, most = counts.min(), counts.max()
    return str(least) if least == most else f"{least} to {most}"
