"""Reports of a run: compact records of every client at every evaluation, tables and figures.

What is not finite counts as NaN in every score, and tables and figures mark it. matplotlib and rich are imported only when they
are needed. Axis letters: E evaluations, N clients, K classes.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import escape, metrics
from fedjax_meta.evaluation import Evaluation
from fedjax_meta.measures import Score
from fedjax_meta.simulation import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

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


def compact(record: Record) -> dict[str, Any]:
    """A record as JSON values: the scores of every client, and the confusion matrices that they are computed from.

    Returns:
      `round`, `seconds`, `compile_seconds`, `train` (each training metric by round), and `tests`: for each evaluator
      `accuracy`, `f1` (as FedMeta-Per takes it, see `metrics.within_own_classes`) and `loss` of each client `[N]`, `scores` as
      in `metrics.summary`, and `confusion [N, K, K]`. Without a confusion matrix, and for metrics beside it, `metrics` holds for
      each its `values [N]`, `higher_is_better` and `share`. `faults` lists what was not finite since the record before, see
      `simulation.Fault`. Scores are NaN where the loss is not finite.
    """
    return {
        "round": record.round,
        "seconds": round(record.seconds, 4),
        "compile_seconds": round(record.compile_seconds, 4),
        "train": {name: _numbers(values) for name, values in record.metrics.items()},
        "tests": {name: _test(evaluation) for name, evaluation in record.evaluations.items()},
        "faults": [fault._asdict() for fault in record.faults],
    }


def joined(first: Mapping[str, Any] | None, then: dict[str, Any]) -> dict[str, Any]:
    """A row of `compact`, preceded by that of a record which ended between evaluations (`should_stop` of `simulate`)."""
    if first is None:
        return then
    sums = {name: round(first[name] + then[name], 4) for name in ("seconds", "compile_seconds")}
    train = {name: [*first["train"][name], *values] for name, values in then["train"].items()}
    return {**then, **sums, "train": train, "faults": [*first["faults"], *then["faults"]]}


def without_confusion(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `compact` without its confusion matrices, for all evaluations of a run but the last."""
    tests = {name: {key: value for key, value in test.items() if key != "confusion"} for name, test in row["tests"].items()}
    return {**row, "tests": tests}


def _test(evaluation: Evaluation) -> dict[str, Any]:
    loss: Any = None if evaluation.loss is None else np.asarray(evaluation.loss)
    found: dict[str, Any] = {}
    if evaluation.confusion is not None:
        confusion = np.asarray(evaluation.confusion)
        found["accuracy"] = _numbers(metrics.where_finite(metrics.accuracy(confusion), loss))
        found["f1"] = _numbers(metrics.where_finite(metrics.macro_f1(metrics.within_own_classes(confusion)), loss))
    if loss is not None:
        found["loss"] = _numbers(loss)
    found["scores"] = evaluation.summary()
    if evaluation.confusion is not None:
        found["confusion"] = confusion.tolist()
    if evaluation.metrics:
        found["metrics"] = {name: _score(score, loss) for name, score in evaluation.metrics.items()}
    return found


def _score(score: Score, loss: np.ndarray | None) -> dict[str, Any]:
    values = np.asarray(score.values)
    shown = values if loss is None else metrics.where_finite(values, loss)
    return {"values": _numbers(shown), "higher_is_better": score.higher_is_better, "share": score.share}


class MainScore(NamedTuple):
    """The score of a test that tables, figures and comparisons show: accuracy where there is a confusion matrix, else the first
    metric, else the loss.

    Attributes:
      name: of the metric.
      values: `[N]`, of each client; in percent if it is a share.
      overall: in percent if it is a share: over the samples of all clients for accuracy from a confusion matrix, else the mean
        over clients.
      mean: over clients, in percent if it is a share.
      higher_is_better, share: as in `measures.Metric`.
    """

    name: str
    values: np.ndarray
    overall: float
    mean: float
    higher_is_better: bool
    share: bool

    @property
    def label(self) -> str:
        """With its unit, for an axis."""
        return f"{self.name.replace('_', ' ')}{', %' if self.share else ''}"


def main_score(test: Mapping[str, Any]) -> MainScore:
    """The main score of a test in a row of `compact`.

    Raises:
      ValueError: nothing was measured.
    """
    scores = test["scores"]
    if "accuracy" in test:
        values = 100 * np.array(test["accuracy"], float)
        return MainScore("accuracy", values, 100 * scores["accuracy"], 100 * scores["accuracy_mean"], True, True)
    for name, one in test.get("metrics", {}).items():
        unit = 100 if one["share"] else 1
        mean = unit * scores[f"{name}_mean"]
        return MainScore(name, unit * np.array(one["values"], float), mean, mean, one["higher_is_better"], one["share"])
    if "loss" not in test:
        raise ValueError("a test without metrics and without a loss has no score to report")
    return MainScore("loss", np.array(test["loss"], float), scores["loss"], scores["loss"], False, False)


def _numbers(values: ArrayLike) -> list[float]:
    """float32 values `[n]` as the shortest decimals that round to the same float32."""
    # A loss of float64 that float32 cannot hold is infinite there.
    with np.errstate(over="ignore"):
        return [float(str(value)) for value in np.asarray(values, np.float32)]


def diverged(rows: Sequence[Mapping[str, Any]], test: str) -> int | None:
    """The round from which on a run has diverged, `None` if it has not.

    A run has diverged when its last evaluation is not finite, or when a round since the evaluation before counts as diverged (see
    `algorithm.Faults`). It has diverged since the first of the evaluations, up to the last, of which that is true. A run that
    recovers has not diverged.

    Args:
      rows: one for each evaluation, in order (see `compact`).
      test: name of the evaluator.
    """
    since = None
    for row in rows:
        rounds = [fault["round"] for fault in row.get("faults", ()) if fault["diverged"]]
        if rounds or not all(math.isfinite(value) for value in row["tests"][test]["scores"].values()):
            since = min([*rounds, row["round"]]) if since is None else since
        else:
            since = None
    return since


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def strict(value: Any) -> Any:
    """A JSON value without numbers that are not finite, which JSON does not know: they become strings, as `load` reads them.

    Example:
      >>> strict({"loss": [0.5, float("nan"), float("-inf")]})
      {'loss': [0.5, 'NaN', '-Infinity']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return next(text for text, number in _NOT_FINITE.items() if str(number) == str(value))
    if isinstance(value, Mapping):
        return {name: strict(part) for name, part in value.items()}
    return [strict(part) for part in value] if isinstance(value, list | tuple) else value


def load(path: str | Path) -> list[dict[str, Any]]:
    """The parts of a `metrics.json`: for each its `name`, `config` and `result`, the rows of `compact` for a training run.

    The file is strict JSON. Its strings "NaN", "Infinity" and "-Infinity" are numbers, and become numbers here.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no such file.
    """
    try:
        return numbers_again(json.loads(Path(path).read_text(encoding="utf-8"))["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no metrics file: {error}") from error


def numbers_again(value: Any) -> Any:
    """The inverse of `strict`."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: numbers_again(part) for name, part in value.items()}
    return [numbers_again(part) for part in value] if isinstance(value, list) else value


class Series(NamedTuple):
    """The scores of one method on one group of clients, in one training run.

    Attributes:
      title: name of the method.
      clients: which clients, e.g. "local" or "new".
      seed: of the run.
      rounds: int `[E]`.
      accuracy: the main score `[E]`, in percent if it is a share; accuracy over all samples where there are confusion matrices.
      by_client: each client's main score at the last evaluation `[N]`, in percent if it is a share.
      scores: `Evaluation.summary` of the last evaluation, shares in percent.
      diverged: the round from which on the run has diverged, `None` if it has not; see `diverged`.
      score: name of the main score, see `MainScore`.
      share: whether it is one.
      higher_is_better: whether a larger one is better.
    """

    title: str
    clients: str
    seed: int
    rounds: np.ndarray
    accuracy: np.ndarray
    by_client: np.ndarray
    scores: dict[str, float]
    diverged: int | None = None
    score: str = "accuracy"
    share: bool = True
    higher_is_better: bool = True


def series(title: str, clients: str, seed: int, rows: Sequence[Mapping[str, Any]], test: str) -> Series:
    """The series of one evaluator in the rows of a run (see `compact`).

    Args:
      title: name of the method.
      clients: which clients the evaluator tested, e.g. "local" or "new".
      seed: of the run.
      rows: one for each evaluation, in order.
      test: name of the evaluator.

    Raises:
      ValueError: `rows` is empty or has no such test.
    """
    if not rows:
        raise ValueError(f"rows is empty: there is no evaluation of {title} to report")
    if test not in rows[-1]["tests"]:
        raise ValueError(f"test={test!r} is not a test of this run; it has {', '.join(rows[-1]['tests'])}")
    tests = [row["tests"][test] for row in rows]
    last, main = tests[-1]["scores"], main_score(tests[-1])
    whole = {
        f"{name}_{what}" for name, one in tests[-1].get("metrics", {}).items() if not one["share"] for what in ("mean", "std")
    }
    whole.add("loss")
    return Series(
        title,
        clients,
        seed,
        np.array([row["round"] for row in rows]),
        np.array([main_score(one).overall for one in tests]),
        main.values,
        {name: value if name in whole else 100 * value for name, value in last.items()},
        diverged(rows, test),
        main.name,
        main.share,
        main.higher_is_better,
    )


def marked(runs: Sequence[Series]) -> str:
    """The title of a method's runs, with a mark if some of them diverged.

    Example:
      >>> one = Series("FedAvg", "local", 1, [1, 20], [9.0, math.nan], [math.nan], {})
      >>> marked([one]), marked([one._replace(diverged=20)]), marked([one._replace(diverged=20), one._replace(seed=2)])
      ('FedAvg', 'FedAvg (diverged at round 20)', 'FedAvg (1 of 2 seeds diverged at round 20)')
    """
    rounds = sorted(run.diverged for run in runs if run.diverged is not None)
    if not rounds:
        return runs[0].title
    who = f"{len(rounds)} of {len(runs)} seeds " if len(runs) > 1 else ""
    when = f"{rounds[0]}" if rounds[0] == rounds[-1] else f"{rounds[0]} to {rounds[-1]}"
    return f"{runs[0].title} ({who}diverged at round {when})"


def check_titles(titles: Sequence[tuple[Any, ...]]) -> None:
    """Refuses two runs that a table or a figure could not tell apart.

    Args:
      titles: of each run its title, its clients and its seed.

    Raises:
      ValueError: two of them are equal.
    """
    for number, one in enumerate(titles):
        if one in titles[:number]:
            raise ValueError(
                f"two systems have the title {one[0]!r} ({', '.join(map(str, one[1:]))}): a table could not tell them apart; "
                "leave one out, or give them titles of their own"
            )


def over_seeds(runs: Sequence[Series]) -> dict[str, tuple[float, float]]:
    """Mean and sample standard deviation (NaN for one seed) of every score over the seeds of a method on a group of clients."""
    return {
        name: (float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan)
        for name in runs[0].scores
        for values in [[run.scores[name] for run in runs]]
    }


def with_spread(value: tuple[float, float], runs: int) -> str:
    """A mean as text, with its sample standard deviation if there are several runs.

    Example:
      >>> with_spread((97.456, 0.21), 3), with_spread((97.456, 0.0), 1)
      ('97.46 ±0.21', '97.46')
    """
    return f"{value[0]:.2f} ±{value[1]:.2f}" if runs > 1 else f"{value[0]:.2f}"


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
            low_, high = np.maximum(mean - spread, 0), np.minimum(mean + spread, 100)
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
    legend = "bar: quartiles; line: over samples" + ("; diamond: published" if shown else "")
    axis.set_xlabel(_axis_label(runs[0], f"of each client at the last round ({legend})"), fontsize=8.5)


def _axis_label(one: Series, what: str) -> str:
    """E.g. "accuracy over samples, %"; scores other than accuracy are means over clients."""
    what = "mean over clients" if what == "over samples" and one.score != "accuracy" else what
    return f"{one.score.replace('_', ' ')} {what}{', %' if one.share else ''}"
