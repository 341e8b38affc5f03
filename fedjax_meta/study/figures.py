"""The figures of studies and comparisons, as SVG: inside a page, whose colours they take, or as files.

A system has one colour in all figures. A line is the mean over seeds; its band is one sample standard deviation to each side.
"""

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_meta import disk, escape, report
from fedjax_meta.report import COLORS, curves
from fedjax_meta.study import draws
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.study import Tuning
from fedjax_meta.study.tuning import KNOWN, NEW, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT, _LINE = "#010203", "#040506"
"""Colours that stand for the page's own, which differ in light and dark."""

_ON_WHITE = "#1f2430", "#c5cad3"
"""The same in files."""

ON_DARK = {"#3b6ea8": "#6aa0e0", "#7b4fa3": "#b088d8", "#1f3b63": "#8fb3e8", "#8a1c2f": "#e58a98", "#0b6e4f": "#5fc9a4"} | {
    "#111111": "#f2f2f2"
}
"""What takes the place of a line colour that is hard to see on a dark page."""


ON_PAGE = 12
"""On a page of more systems, only so many have a picture of their own, and dots of clients are left to the files of a run."""

_ELSEWHERE = "in the files of the folder figures of each run."


class Shown(NamedTuple):
    """A system as figures show it.

    Attributes:
      title: for legends.
      color: its number among all systems, from which its colour follows.
      final: its trials, one for each seed.
      tuning: the trials of its grid, if there was one.
      grid: the values that were tried, by name.
      chosen: the point that each draw of the clients chose.
      score: name of the main score; that of `report.score_names` when not given.
      tuned_by: how they were chosen.
      traffic: bytes that a client downloads and uploads in a round; NaN where it is not known.
      alone: the groups whose clients train by themselves with it, so that others can be compared with it.
      draws: how many draws of the clients the trials are of, see `draws.pooled`.
    """

    title: str
    color: int
    final: Sequence[Trial]
    tuning: Sequence[Trial] = ()
    grid: Mapping[str, Sequence[float]] = {}
    chosen: Sequence[Mapping[str, float]] = ()
    score: str | None = None
    tuned_by: Tuning = Tuning()
    traffic: float = float("nan")
    alone: Sequence[str] = ()
    draws: int = 1


class Panel(NamedTuple):
    """One pair of axes; width and height in inches."""

    draw: Callable[["Axes"], None]
    width: float = 5.1
    height: float = 3.2


class Figure(NamedTuple):
    """Panels that belong together.

    Attributes:
      name: of the file.
      title, words: what is shown, and how to read it.
      panels: side by side, or one below the other where a page is narrow.
      legend: the systems that have a line.
    """

    name: str
    title: str
    words: str
    panels: list[Panel]
    legend: Sequence[Shown] = ()


def color_of(number: int) -> str:
    """The line colour of system `number`; from the 15th on they repeat, with dashed lines."""
    return COLORS[number % len(COLORS)]


def all_of(systems: Sequence[Shown], *, of_page: bool = False) -> list[Figure]:
    """Every figure that these systems have the numbers for; those of a page are smaller where the systems are many."""
    few = not of_page or len(systems) <= ON_PAGE
    made = [by_round(systems), by_client(systems, dots=few), gains(systems), against(systems), tuning(systems)]
    made.append(confusion(systems, most=None if few else ON_PAGE))
    return [figure for figure in made if figure.panels]


def by_round(systems: Sequence[Shown]) -> Figure:
    """The main score by round of known and of new clients."""
    kind = _kind(systems)

    def panel(group: str) -> Panel:
        def draw(axis: "Axes") -> None:
            from matplotlib.ticker import MaxNLocator

            _curves(axis, [(one, _rounds(one), _scores(one, group)) for one in systems if _tested(one, group)])
            axis.set_title(f"{group} clients")
            axis.set_xlabel("round")
            axis.set_ylabel(kind.label)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))

        return Panel(draw)

    words = "Mean over clients" + ("; the band is one standard deviation over seeds to each side." if _seeds(systems) else ".")
    title = f"{kind.words.capitalize()} by round{kind.direction}"
    return Figure("rounds", title, words, [panel(group) for group in _groups(systems)], systems)


def by_client(systems: Sequence[Shown], *, dots: bool = True) -> Figure:
    """The distribution of the main score over clients after the last round, with a dot for each client or without."""
    kind = _kind(systems)

    def panel(group: str) -> Panel:
        mine = [one for one in systems if _tested(one, group)]

        def draw(axis: "Axes") -> None:
            jitter, drawn = np.random.default_rng(0), []
            for place, one in enumerate(mine):
                values = _last(one, group).ravel()
                values = values[np.isfinite(values)]
                drawn.append(curves.Drawn(place, values, color_of(one.color)))
                y = place + jitter.uniform(-0.26, 0.26, values.size)
                # Many dots are a picture, which keeps the page small.
                many = values.size > 2000
                if dots:
                    axis.scatter(values, y, s=9, color=color_of(one.color), alpha=0.5, linewidth=0, rasterized=many)
                elif values.size:
                    axis.plot([values.min(), values.max()], [place, place], color=color_of(one.color), linewidth=1)
                if values.size:
                    low, middle, high = np.percentile(values, [25, 50, 75])
                    axis.plot(
                        [low, high], [place, place], color=color_of(one.color), linewidth=7, alpha=0.4, solid_capstyle="butt"
                    )
                    axis.plot([middle, middle], [place - 0.3, place + 0.3], color=TEXT, linewidth=1.6)
                else:
                    axis.text(0.02, place, "diverged", transform=axis.get_yaxis_transform(), va="center", fontsize=8)
            curves.clip_dots(axis, drawn, kind)
            names = [report.label(one.title, 18, 2) for one in mine]
            axis.set_yticks(range(len(mine)), names)
            axis.set_ylim(len(mine) - 0.4, -0.6)
            axis.grid(visible=False, axis="y")
            axis.set_title(f"{group} clients")
            axis.set_xlabel(kind.label)

        return Panel(draw, height=1.0 + 0.42 * len(mine))

    all_ = "A dot is a client of one seed" if dots else f"A line spans all clients and seeds, whose dots are {_ELSEWHERE[:-1]}"
    words = f"{all_}; the bar spans the quartiles, the stroke is the median."
    return Figure("clients", "Every client after the last round", words, [panel(group) for group in _groups(systems)])


def gains(systems: Sequence[Shown]) -> Figure:
    """By how much each client is better than by local training, sorted."""
    kind = _kind(systems)
    alone = next((one for one in systems if one.alone), None)
    others = [one for one in systems if one is not alone]
    groups = [] if alone is None or not others else [group for group in alone.alone if _tested(alone, group)]

    def panel(group: str) -> Panel:
        def draw(axis: "Axes") -> None:
            assert alone is not None
            base, drawn = draws.mean_over_seeds(_last(alone, group), alone.draws), []
            for one in others:
                mine = draws.mean_over_seeds(_last(one, group), one.draws) if _tested(one, group) else base[:0]
                if mine.shape == base.shape:
                    gain = np.sort(kind.gain(mine, base))
                    share = 100 * (np.arange(len(gain)) + 0.5) / len(gain)
                    axis.plot(share, gain, **_line(one))
                    drawn.append(curves.Drawn(share, gain, color_of(one.color)))
            axis.axhline(0, color=TEXT, linewidth=1)
            axis.set_xlim(0, 100)
            curves.clip(axis, drawn, kind._replace(higher_is_better=True), np.median)
            axis.set_title(f"{group} clients")
            axis.set_xlabel("share of clients, from the greatest loss on, %")
            axis.set_ylabel(f"gain in {kind.points}")

        return Panel(draw)

    own = f"Each client's {kind.words} minus that by local training"
    own = own if kind.higher_is_better else f"Each client's {kind.words} by local training minus that with the system"
    words = f"{own}, mean over seeds. Clients below the line lose."
    return Figure("gains", "Who gains over training alone, and who loses", words, [panel(group) for group in groups], others)


def against(systems: Sequence[Shown]) -> Figure:
    """The main score of known clients against bytes and against time."""
    kind = _kind(systems)
    known = [one for one in systems if np.isfinite(one.traffic)]

    def by_bytes(axis: "Axes") -> None:
        _curves(axis, [(one, _rounds(one) * one.traffic / 1e6, _scores(one, KNOWN)) for one in known])
        axis.set_xlabel("MB down and up, of a client in every round")
        axis.set_ylabel(kind.label)

    def clock(one: Shown) -> np.ndarray:
        rounds = _rounds(one)
        whole = [trial for trial in one.final if trial.rows[-1]["round"] == rounds[-1]]
        clocks = [np.cumsum([row["seconds"] for row in trial.rows])[_places(trial, rounds)] for trial in whole]
        return np.asarray(np.mean(clocks, 0))

    def by_time(axis: "Axes") -> None:
        _curves(axis, [(one, clock(one), _scores(one, KNOWN)) for one in systems])
        axis.set_xlabel("seconds of training and testing")
        axis.set_ylabel(kind.label)

    panels = [*([Panel(by_bytes)] if known else []), Panel(by_time)]
    words = (
        "Known clients. Time is wall-clock without compilation, shared by the seeds that trained side by side. It depends on "
        "what else the machine did."
    )
    title = f"{kind.words.capitalize()} against what travels and against time{kind.direction}"
    return Figure("costs", title, words, panels, systems)


def tuning(systems: Sequence[Shown]) -> Figure:
    """The best score that was found with each value of a grid."""
    tuned = [one for one in systems if one.tuning]
    names = list(dict.fromkeys(name for one in tuned for name in one.grid))

    def panel(name: str) -> Panel:
        def draw(axis: "Axes") -> None:
            mine = [one for one in tuned if len({trial.numbers.get(name) for trial in one.tuning}) > 1]
            kind, drawn = choice.scores(tuned[0].tuning, tuned[0].tuned_by)[0].kind, []
            every = sorted({trial.numbers[name] for one in mine for trial in one.tuning})
            for one in mine:
                values = sorted({trial.numbers[name] for trial in one.tuning})
                score = [_best(one, name, value) for value in values]
                cut = _ended_early(one, name)
                hollow: dict[str, Any] = {"color": color_of(one.color), "markerfacecolor": "none", "linestyle": "none"}
                for ended, style in ((False, _line(one)), (True, hollow)):
                    place = [i for i, value in enumerate(values) if (value in cut) == ended]
                    if place:
                        x, y = [values[i] for i in place], [score[i] for i in place]
                        axis.plot(x, y, marker="o", markersize=3.5, **style)
                drawn.append(curves.Drawn(values, np.array(score), color_of(one.color)))
                for value in {point[name] for point in one.chosen if point.get(name) in values}:
                    i = values.index(value)
                    ring: dict[str, Any] = {"markeredgecolor": color_of(one.color), "markerfacecolor": "none"}
                    axis.plot(values[i], score[i], "o", markersize=9, markeredgewidth=1.6, **ring)
            if every and every[0] > 0:
                axis.set_xscale("log")
            shown = every if len(every) <= 7 else every[:: -(-len(every) // 7)]
            axis.set_xticks(shown, [f"{value:g}" for value in shown])
            axis.minorticks_off()
            axis.set_xlabel(escape.label(name))
            axis.set_ylabel(kind.label)
            curves.clip(axis, drawn, kind)

        return Panel(draw)

    where = {"samples": "train samples", "clients": "clients", "both": "train samples and clients"}
    held = where[tuned[0].tuned_by.validation] if tuned else ""
    if any(one.draws > 1 for one in tuned):
        marked = "mean over the draws that tried it. Each draw of the clients chose for itself; rings mark what was chosen."
    else:
        marked = "a ring marks the value that was chosen."
    words = f"Best score on held-back {held} with each value of the grid; {marked}"
    if any(_ended_early(one, name) for one in tuned for name in one.grid):
        words += " Hollow: halving ended all points with this value, and the score is that of fewer rounds."
    return Figure("tuning", "How the hyper-parameters were chosen", words, [panel(name) for name in names], tuned)


def confusion(systems: Sequence[Shown], *, most: int | None = None) -> Figure:
    """Confusion matrices of the known clients, all clients and seeds together; of the first `most` systems, or of all."""

    def panel(one: Shown) -> Panel:
        def draw(axis: "Axes") -> None:
            from matplotlib.colors import to_rgb

            total = np.sum([np.sum(trial.rows[-1]["tests"][KNOWN]["confusion"], 0) for trial in one.final], 0)
            # Opacity instead of a colour map, so that 0 is the page in light and in dark.
            image = np.empty((*total.shape, 4))
            image[..., :3] = to_rgb(color_of(one.color))
            image[..., 3] = total / np.maximum(total.sum(1, keepdims=True), 1)
            axis.imshow(image, interpolation="none")
            axis.set_title(escape.label(textwrap.shorten(one.title, 28, placeholder="…")), fontsize=9)
            ticks = range(0, len(total), -(-len(total) // 10))
            axis.set_xticks(ticks)
            axis.set_yticks(ticks)
            axis.set_xlabel("predicted", fontsize=8)
            axis.set_ylabel("true", fontsize=8)
            axis.spines[["top", "right"]].set_visible(True)
            axis.grid(visible=False)

        return Panel(draw, 2.5, 2.6)

    shown = [one for one in systems if one.final and all("confusion" in trial.rows[-1]["tests"][KNOWN] for trial in one.final)]
    words = "Known clients, all seeds. Rows are true classes, columns predicted ones; full colour is all samples of a class."
    if most is not None:
        shown, words = shown[:most], f"{words} Of the first {most} systems; the others are {_ELSEWHERE}"
    return Figure("confusion", "Confusion by class", words, [panel(one) for one in shown])


def svg(panels: Sequence[Panel], label: str, *, of_page: bool = True, legend: Sequence[Shown] = ()) -> str:
    """Panels as one SVG.

    Args:
      panels: from left to right.
      label: what a screen reader says.
      of_page: whether text and lines take the colours of the page around, see `variables`; else they are dark on white.
      legend: systems to name beside the panels.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

    text, line = (TEXT, _LINE) if of_page else _ON_WHITE
    with mpl.rc_context(_style(text, line)):
        ratios = [panel.width for panel in panels]
        size = (sum(ratios) + (1.6 if legend else 0), max(panel.height for panel in panels))
        canvas = Canvas(figsize=size, layout="constrained", facecolor="none" if of_page else "white")
        axes = canvas.subplots(1, len(panels), squeeze=False, width_ratios=ratios)[0]
        for panel, axis in zip(panels, axes, strict=True):
            panel.draw(axis)
        if legend:
            lines = [Line2D([], [], **_line(one)) for one in legend]
            names = [report.label(one.title, 20, 4) for one in legend]
            canvas.legend(lines, names, frameon=False, fontsize=8, loc="outside right center")
        file = io.StringIO()
        with curves.quiet_about_letters():  # a browser has its own fonts
            canvas.savefig(file, format="svg", dpi=200, metadata={"Date": None})
    drawn = file.getvalue()
    if not of_page:
        return drawn.replace(TEXT, text).replace(_LINE, line)
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    # Names of groups repeat from figure to figure, which a page does not allow; those that are referred to differ.
    drawn = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", drawn)
    # Matplotlib repeats a long list of fonts with every word, and writes points to a millionth.
    drawn = re.sub(r"font-family: [^;\"]*sans-serif", "font-family: sans-serif", drawn)
    drawn = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace("\n", ""), drawn)
    drawn = drawn.replace(TEXT, "var(--ink)").replace(_LINE, "var(--line)")
    for number, color in enumerate(COLORS):
        drawn = drawn.replace(color, f"var(--s{number})")
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape.html(label)}" ', 1)


def picture(path: Path, rows: Sequence[Sequence[Panel]], title: str) -> None:
    """Draws rows of as many panels each into one file, dark on white.

    Args:
      path: .png, .pdf or .svg.
      rows: from top to bottom; panels of a column have the width of the first.
      title: above them.

    Raises:
      OSError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_style(*_ON_WHITE)):
        widths, heights = [panel.width for panel in rows[0]], [row[0].height for row in rows]
        canvas = Canvas(figsize=(sum(widths), sum(heights) + 0.4), layout="constrained", facecolor="white")
        axes = canvas.subplots(len(rows), len(widths), squeeze=False, width_ratios=widths, height_ratios=heights)
        for row, of_row in zip(rows, axes, strict=True):
            for panel, axis in zip(row, of_row, strict=True):
                panel.draw(axis)
        canvas.suptitle(escape.label(title), fontweight="bold", x=0.01, ha="left")
        file = io.BytesIO()
        with curves.quiet_about_letters():
            canvas.savefig(file, format=path.suffix[1:], dpi=150)
    disk.write_bytes(path, file.getvalue())


def variables(*, dark: bool) -> str:
    """The line colours as CSS variables, which figures of a page refer to."""
    return " ".join(f"--s{i}: {ON_DARK.get(color, color) if dark else color};" for i, color in enumerate(COLORS))


def save(folder: Path, prefix: str, systems: Sequence[Shown]) -> list[Path]:
    """Writes every figure as an SVG file; returns the paths.

    Raises:
      OSError: a file cannot be written.
    """
    paths = []
    for figure in all_of(systems):
        paths.append(folder / f"{prefix}{figure.name}.svg")
        disk.write_text(paths[-1], svg(figure.panels, figure.title, of_page=False, legend=figure.legend))
    return paths


def _style(text: str, line: str) -> dict[Any, Any]:
    return {
        "font.size": 9,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "axes.facecolor": "none",
        "axes.edgecolor": line,
        "axes.labelcolor": text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": line,
        "grid.linewidth": 0.6,
        "xtick.color": text,
        "ytick.color": text,
        "text.color": text,
        "svg.hashsalt": "fedjax_meta",
    }


def _line(one: Shown) -> dict[str, Any]:
    dashes = "-" if one.color < len(COLORS) else "--"
    return {"color": color_of(one.color), "linewidth": 1.8, "linestyle": dashes}


def _curves(axis: "Axes", shown: Sequence[tuple[Shown, np.ndarray, np.ndarray]]) -> None:
    """Systems, each with x `[E]` and scores `[seeds, E]`: means with their bands, and crosses where one has diverged."""
    kind = _kind([one for one, *_ in shown])
    drawn = [curves.draw(axis, x, values, kind, **_line(one)) for one, x, values in shown]
    curves.clip(axis, drawn, kind)
    lost = [any(trial.diverged is not None for trial in one.final) for one, *_ in shown]
    curves.crosses(axis, [line for line, diverged in zip(drawn, lost, strict=True) if diverged])


def _groups(systems: Sequence[Shown]) -> list[str]:
    return [group for group in (KNOWN, NEW) if any(_tested(one, group) for one in systems)]


def _seeds(systems: Sequence[Shown]) -> bool:
    return any(len(one.final) > 1 for one in systems)


def _tested(one: Shown, group: str) -> bool:
    """Whether a group was tested, and, where its clients train by themselves, did."""
    there = bool(one.final) and all(group in trial.rows[-1]["tests"] for trial in one.final)
    return there and (not one.alone or group in one.alone)


def _kind(systems: Sequence[Shown]) -> report.Kind:
    """What the main score is."""
    rows = next(one.final[0].rows for one in systems if one.final)
    return report.main_score(rows[-1]["tests"][KNOWN], systems[0].score).kind


def _rounds(one: Shown) -> np.ndarray:
    """The rounds after which every seed was tested `[E]`; one that ended early counts at all later ones."""
    return report.common_rounds([[row["round"] for row in trial.rows] for trial in one.final])


def _scores(one: Shown, group: str) -> np.ndarray:
    """Mean of the main score over clients `[seeds, E]` after `_rounds`; a run that ended early stays where it was.

    NaN where a run had diverged.
    """
    found = []
    for trial in one.final:
        values = [report.mean_score(row, group, one.score, test=KNOWN) for row in trial.rows]
        found.append(np.array(values)[_places(trial, _rounds(one))])
    return np.array(found, float)


def _places(trial: Trial, rounds: np.ndarray) -> np.ndarray:
    """Which of a trial's rows hold after some of its rounds `[E]`: the last one of those up to there."""
    return report.places([row["round"] for row in trial.rows], rounds)


def _last(one: Shown, group: str) -> np.ndarray:
    """The main score of each client at the last evaluation `[seeds, N]`; NaN for a run that diverged."""
    return np.array([choice.last_scores(trial, trial.rows[-1]["tests"][group], one.score) for trial in one.final], float)


def _ended_early(one: Shown, name: str) -> set[float]:
    """The values of a number all of whose points were ended by halving."""
    last = max(trial.rows[-1]["round"] for trial in one.tuning)
    whole = {trial.numbers[name] for trial in one.tuning if trial.rows[-1]["round"] == last or trial.diverged is not None}
    return {trial.numbers[name] for trial in one.tuning} - whole


def _best(one: Shown, name: str, value: float) -> float:
    """The best mean score over seeds of the points that have this value; NaN if all of them diverged.

    Points that halving ended count with the last score that they had, if there are no others.
    """
    trials = [trial for trial in one.tuning if trial.numbers[name] == value]
    if value in _ended_early(one, name):
        trials = [trial._replace(rows=[{**trial.rows[-1], "round": 0}]) for trial in trials]
    return choice.best(trials, one.tuned_by).score
