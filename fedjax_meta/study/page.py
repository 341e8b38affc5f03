"""The report of a study as one HTML page that opens without a network, in light and in dark."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_meta import costs, escape
from fedjax_meta.report import COLORS
from fedjax_meta.study import results
from fedjax_meta.study.run import KNOWN, NEW, VALIDATION, Outcome, Trial
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study, to_yaml

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT, _LINE = "#010203", "#040506"
"""Colours that stand for the page's own, which differ in light and dark."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #6b7280; --line: #d9dde3; --page: #ffffff; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --muted: #9aa3af; --line: #3a404a; --page: #14171c; --card: #1c2027; }
}
body { margin: 0 auto; max-width: 1080px; padding: 24px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 28px; } h2 { font-size: 21px; margin-top: 40px; } h3 { font-size: 16px; margin: 24px 0 4px; }
p, li { max-width: 78ch; } .muted { color: var(--muted); }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
pre { background: var(--card); padding: 12px; overflow-x: auto; font-size: 13px; }
details { margin: 16px 0; } summary { cursor: pointer; }
"""


def write(path: Path, study: Study, built: Mapping[str, Clients], outcomes: Sequence[Outcome], command: str) -> None:
    """Writes the page.

    Raises:
      OSError: the file cannot be written.
    """
    from fedjax_meta import checkpoint

    body = [f"<h1>{_text(study.title)}</h1>", f'<p class="muted">{_text(results.explanation(study))}</p>']
    body += [f"<p>{_text(note)}</p>" for note in study.notes]
    for scenario, clients in built.items():
        mine = [outcome for outcome in outcomes if outcome.scenario == scenario]
        body += _scenario(study, scenario, clients, mine)
    body += _published(study, outcomes)
    body += ["<h2>How to run it again</h2>", f"<pre>{_text(command)}</pre>"]
    body += [f"<details><summary>The study, every field filled in</summary><pre>{_text(to_yaml(study))}</pre></details>"]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(study.title)}</title>'
    page = f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    checkpoint.write_text(path, page)


def _scenario(study: Study, scenario: str, clients: Clients, outcomes: Sequence[Outcome]) -> list[str]:
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(study.systems)}
    lines = results.lines(study, scenario, clients, outcomes)
    new = 0 if clients.new is None else clients.new.num_clients
    part = [f"<h2>{_text(scenario)}: {_text(clients.title)}</h2>"]
    part += [f"<p>{clients.train.num_clients} known clients train; {new} new ones never do. {_text(clients.note)}</p>"]
    part += [_table(results.HEADINGS, [results.words(line) for line in lines], list(colors.values()))]
    draw = [
        ("Accuracy by round", "Mean over clients; the band spans the seeds.", _by_round),
        ("Every client after the last round", "A dot is a client of one seed; the bar spans the quartiles.", _by_client),
        ("Who gains over training alone, and who loses", "Each known client's accuracy minus that by local training.", _gains),
        ("Accuracy against what travels and against time", "Of one client, both ways; time without compilation.", _against),
        ("How the hyper-parameters were chosen", "Score on held-back train samples by the value in the grid.", _tuning),
        ("Confusion of the known clients", "Rows are true classes, columns predicted ones; all seeds.", _confusion),
    ]
    for title, words, function in draw:
        drawn = function(study, clients, outcomes, colors)
        if drawn:
            part += [f"<h3>{title}</h3>", f'<p class="muted">{words}</p>', f'<div class="scroll">{drawn}</div>']
    return part


def _published(study: Study, outcomes: Sequence[Outcome]) -> list[str]:
    if not study.published:
        return []
    rows = []
    for row in study.published:
        found = [one for one in outcomes if (one.system, one.scenario) == (row.system, row.scenario)]
        values = [100 * _score(trial, row.clients, row.score) for one in found for trial in one.final]
        measured = f"{np.mean(values):.2f}" if values else "not run"
        rows.append([study.title_of(row.system), row.scenario, row.clients, row.score, f"{row.value:.2f}", measured, row.note])
    headings = ("system", "scenario", "clients", "score", "published", "measured", "note")
    return ["<h2>Published beside measured</h2>", _table(headings, rows)]


def _by_round(study: Study, clients: Clients, outcomes: Sequence[Outcome], colors: Mapping[str, str]) -> str:
    groups = [KNOWN, *([NEW] if clients.new is not None else [])]

    def draw(axes: Sequence["Axes"]) -> None:
        for axis, group in zip(axes, groups, strict=True):
            for one in outcomes:
                rounds = [row["round"] for row in one.final[0].rows]
                values = np.array([_scores(trial, group) for trial in one.final])
                axis.plot(rounds, values.mean(0), color=colors[one.system], label=study.title_of(one.system), linewidth=1.8)
                axis.fill_between(rounds, values.min(0), values.max(0), color=colors[one.system], alpha=0.18, linewidth=0)
            axis.set_title(f"{group} clients")
            axis.set_xlabel("round")
            axis.set_ylabel("accuracy, %")
        axes[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return _svg(draw, len(groups))


def _by_client(study: Study, clients: Clients, outcomes: Sequence[Outcome], colors: Mapping[str, str]) -> str:
    groups = [KNOWN, *([NEW] if clients.new is not None else [])]
    jitter = np.random.default_rng(0)

    def draw(axes: Sequence["Axes"]) -> None:
        for axis, group in zip(axes, groups, strict=True):
            for place, one in enumerate(outcomes):
                values = 100 * np.concatenate([_last(trial, group) for trial in one.final])
                values = values[np.isfinite(values)]
                y = place + jitter.uniform(-0.25, 0.25, values.size)
                axis.scatter(values, y, s=9, color=colors[one.system], alpha=0.45, linewidth=0)
                if values.size:
                    low, high = np.percentile(values, [25, 75])
                    axis.plot([low, high], [place, place], color=colors[one.system], linewidth=6, alpha=0.45)
            axis.set_yticks(range(len(outcomes)), [study.title_of(one.system) for one in outcomes])
            axis.set_ylim(len(outcomes) - 0.5, -0.5)
            axis.set_title(f"{group} clients")
            axis.set_xlabel("accuracy, %")

    return _svg(draw, len(groups), height=1.2 + 0.4 * len(outcomes))


def _gains(study: Study, clients: Clients, outcomes: Sequence[Outcome], colors: Mapping[str, str]) -> str:
    local = next((one for one in outcomes if study.systems[one.system].method == results.LOCAL), None)
    others = [one for one in outcomes if one is not local]
    if local is None or not others:
        return ""
    alone = np.mean([_last(trial, KNOWN) for trial in local.final], 0)

    def draw(axes: Sequence["Axes"]) -> None:
        for one in others:
            gain = 100 * np.sort(np.mean([_last(trial, KNOWN) for trial in one.final], 0) - alone)
            share = 100 * (np.arange(len(gain)) + 0.5) / len(gain)
            axes[0].plot(share, gain, color=colors[one.system], label=study.title_of(one.system), linewidth=1.8)
        axes[0].axhline(0, color=_LINE, linewidth=1)
        axes[0].set_xlabel("clients, from the greatest loss to the greatest gain, %")
        axes[0].set_ylabel("points of accuracy")
        axes[0].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return _svg(draw, 1)


def _against(study: Study, clients: Clients, outcomes: Sequence[Outcome], colors: Mapping[str, str]) -> str:
    def draw(axes: Sequence["Axes"]) -> None:
        for one in outcomes:
            rounds = np.array([row["round"] for row in one.final[0].rows])
            values = np.mean([_scores(trial, KNOWN) for trial in one.final], 0)
            traffic = costs.traffic(study.system(one.system).build(clients.task, **one.chosen), clients.train)
            seconds = np.mean([np.cumsum([row["seconds"] for row in trial.rows]) for trial in one.final], 0)
            style: dict[str, Any] = {"color": colors[one.system], "linewidth": 1.8, "label": study.title_of(one.system)}
            axes[0].plot(rounds * sum(traffic) / 1e6, values, **style)
            axes[1].plot(seconds, values, **style)
        axes[0].set_xlabel("MB of a client that takes part in every round")
        axes[1].set_xlabel("seconds of training and testing")
        axes[0].set_ylabel("accuracy, %")
        axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return _svg(draw, 2)


def _tuning(study: Study, clients: Clients, outcomes: Sequence[Outcome], colors: Mapping[str, str]) -> str:
    tuned = [one for one in outcomes if one.tuning]
    names = list(dict.fromkeys(name for one in tuned for name in study.systems[one.system].grid))
    if not names:
        return ""

    def draw(axes: Sequence["Axes"]) -> None:
        for axis, name in zip(axes, names, strict=True):
            for one in tuned:
                values = sorted({trial.numbers[name] for trial in one.tuning if name in trial.numbers})
                if not values:
                    continue
                # The best score that was found with each value of this number.
                score = [
                    max(_tuned(trial, study.tuning.metric) for trial in one.tuning if trial.numbers[name] == value)
                    for value in values
                ]
                axis.plot(values, score, color=colors[one.system], marker="o", markersize=3, label=study.title_of(one.system))
            axis.set_xlabel(name)
            if all(value > 0 for one in tuned for value in study.systems[one.system].grid.get(name, ())):
                axis.set_xscale("log")
        axes[0].set_ylabel(f"{study.tuning.metric}, %")
        axes[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return _svg(draw, len(names))


def _confusion(study: Study, clients: Clients, outcomes: Sequence[Outcome], colors: Mapping[str, str]) -> str:
    shown = outcomes[: min(4, len(outcomes))]

    def draw(axes: Sequence["Axes"]) -> None:
        for axis, one in zip(axes, shown, strict=True):
            matrices = [np.sum(trial.rows[-1]["tests"][KNOWN]["confusion"], 0) for trial in one.final]
            total = np.sum(matrices, 0)
            axis.imshow(total / np.maximum(total.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
            axis.set_title(study.title_of(one.system), fontsize=9)
            axis.set_xticks(range(0, len(total), max(1, len(total) // 10)))
            axis.set_yticks(range(0, len(total), max(1, len(total) // 10)))
            axis.grid(visible=False)

    return _svg(draw, len(shown), width=2.6, height=2.6)


def _svg(draw: Callable[[Sequence["Axes"]], None], columns: int, *, width: float = 4.6, height: float = 3.2) -> str:
    """A figure as SVG whose text and lines take the colours of the page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "axes.facecolor": "none",
        "axes.edgecolor": _LINE,
        "axes.labelcolor": _TEXT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _LINE,
        "grid.linewidth": 0.6,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "text.color": _TEXT,
        "svg.hashsalt": "fedjax_meta",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(width * columns + 1.4, height), layout="constrained", facecolor="none")
        axes = figure.subplots(1, columns, squeeze=False)[0]
        draw(list(axes))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(_TEXT, "var(--ink)").replace(_LINE, "var(--line)")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], swatches: Sequence[str] = ()) -> str:
    lines = ["".join(f"<th>{_text(heading)}</th>" for heading in headings)]
    for number, row in enumerate(rows):
        mark = f'<span class="swatch" style="background:{swatches[number]}"></span>' if number < len(swatches) else ""
        cells = [f"<td>{mark}{_text(row[0])}</td>", *(f"<td>{_text(cell)}</td>" for cell in row[1:])]
        lines.append("".join(cells))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _text(words: Any) -> str:
    return escape.html(words)


def _score(trial: Trial, group: str, name: str) -> float:
    return trial.rows[-1]["tests"].get(group, {}).get("scores", {}).get(name, float("nan"))


def _scores(trial: Trial, group: str) -> np.ndarray:
    """Mean accuracy over clients at each evaluation, in percent; NaN once a run diverged."""
    return 100 * np.array([row["tests"][group]["scores"]["accuracy_mean"] for row in trial.rows], float)


def _last(trial: Trial, group: str) -> np.ndarray:
    """Accuracy of each client at the last evaluation `[N]`."""
    return np.array(trial.rows[-1]["tests"][group]["accuracy"], float)


def _tuned(trial: Trial, metric: str) -> float:
    value = trial.rows[-1]["tests"][VALIDATION]["scores"][metric]
    return float("-inf") if np.isnan(value) else 100 * value
