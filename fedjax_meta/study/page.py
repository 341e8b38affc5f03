"""The report of a study as one HTML page that opens without a network, in light and in dark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_meta import disk, escape, report
from fedjax_meta.study import baselines, figures, results, summary
from fedjax_meta.study import clients as holdings
from fedjax_meta.study.figures import Shown
from fedjax_meta.study.job import Outcome
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study, to_yaml
from fedjax_meta.study.tuning import KNOWN, NEW

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #6b7280; --line: #d9dde3; --page: #ffffff; --card: #f6f7f9; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --muted: #9aa3af; --line: #3a404a; --page: #14171c; --card: #1c2027; DARK }
}
body { margin: 0 auto; max-width: 1080px; padding: 24px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 28px; line-height: 1.25; } h2 { font-size: 21px; margin-top: 44px; } h3 { font-size: 16px; margin: 28px 0 2px; }
p, li { max-width: 78ch; margin: 6px 0; } .muted { color: var(--muted); font-size: 14px; }
.scroll { overflow-x: auto; margin: 12px 0; }
.panels { display: flex; flex-wrap: wrap; gap: 8px 24px; margin: 8px 0; } .panels svg { max-width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 14px; max-width: none; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 0 5px 18px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
th { vertical-align: bottom; font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { white-space: normal; min-width: 9em; } .text { text-align: left; }
td.text { white-space: normal; min-width: 5em; max-width: 26em; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
pre { background: var(--card); padding: 12px; overflow-x: auto; font-size: 13px; }
details { margin: 16px 0; } summary { cursor: pointer; }
@media (max-width: 600px) { body { padding: 14px; } h1 { font-size: 23px; } h2 { font-size: 18px; } }
@media print { details { display: none; } }
"""

_WORDS = {"chosen", "remark", "note", "scenario", "clients", "score", "compared with", "view"}
"""Headings of columns that hold words, which are aligned left and may wrap."""


def write(
    path: Path,
    study: Study,
    built: Mapping[str, Clients],
    outcomes: Sequence[Outcome],
    command: str,
    *,
    found: Mapping[str, Sequence[results.Line]] | None = None,
) -> None:
    """Writes the page.

    Args:
      path: of the file.
      study, built, outcomes: what was run, and what came of it.
      command: that was given.
      found: the `results.tables`, if they are at hand.

    Raises:
      OSError: the file cannot be written.
    """
    found = results.tables(study, built, outcomes) if found is None else found
    body = [f'<p class="muted">{text(results.explanation(study, found))}</p>']
    body += [f"<p>{text(note)}</p>" for note in study.notes]
    for one in summary.tables(study, outcomes):
        body += [f"<h2>{text(one.title)}</h2>", table(one, _numbers(study))]
    for scenario, clients in built.items():
        mine = [outcome for outcome in outcomes if outcome.scenario == scenario]
        body += _scenario(study, scenario, clients, mine, found[scenario])
    if study.published:
        body += ["<h2>Published beside measured</h2>"]
        body += [table(report.Table(results.PUBLISHED_HEADINGS, results.published(study, outcomes)), _numbers(study))]
    body += ["<h2>How to run it again</h2>", f"<pre>{text(command)}</pre>"]
    body += [f"<details><summary>The study, with all its fields</summary><pre>{text(to_yaml(study))}</pre></details>"]
    disk.write_text(path, document(study.title, body))


def write_all(
    folder: str | Path,
    study: Study,
    built: Mapping[str, Clients],
    outcomes: Sequence[Outcome],
    command: str,
    *,
    found: Mapping[str, Sequence[results.Line]] | None = None,
) -> None:
    """Writes `report.html`, `report.md`, `report.tex`, a figure for each score and `figures/SCENARIO-NAME.svg` into a folder.

    Figures of an earlier report that this one does not have are removed.

    Args:
      folder: of the run.
      study, built, outcomes, command, found: as in `write`.

    Raises:
      OSError: a file cannot be written.
    """
    folder, found = Path(folder), results.tables(study, built, outcomes) if found is None else found
    paths: list[Path] = []
    for scenario, clients in built.items():
        shown = systems(study, [one for one in outcomes if one.scenario == scenario])
        paths += figures.save(folder / "figures", f"{scenario}-", shown)
        paths.append(folder / "figures" / f"{scenario}-samples.svg")
        holdings.save(paths[-1], clients)
    names = [path.relative_to(folder).as_posix() for path in paths]
    text = results.markdown(study, built, outcomes, command, found=found, figures=names)
    disk.write_text(folder / "report.md", text)
    disk.write_text(folder / "report.tex", results.latex(study, built, found))
    write(folder / "report.html", study, built, outcomes, command, found=found)
    series = _series(study, outcomes)
    scores = list(dict.fromkeys(one.kind.name for one in series))
    for score in scores:
        paths.append(folder / ("figure.png" if len(scores) == 1 else f"figure-{score}.png"))
        report.save_figure(paths[-1], [one for one in series if one.kind.name == score], title=study.title)
    for old in {*folder.glob("figures/*.svg"), folder / "figure.png", *folder.glob("figure-*.png")} - set(paths):
        old.unlink(missing_ok=True)  # of a report of other scenarios or systems


def _series(study: Study, outcomes: Sequence[Outcome]) -> list[report.Series]:
    """For the figure: the final runs, one scenario after the other."""
    many = len(study.scenarios) > 1
    return [
        report.series(
            study.title_of(one.system),
            f"{one.scenario}, {group}" if many else group,
            # Draws have the same seeds: their runs are numbered.
            number if study.data_seeds else trial.seed,
            trial.rows,
            group,
            study.score,
            run=KNOWN,
        )
        for one in outcomes
        for number, trial in enumerate(one.final)
        for group in (KNOWN, NEW)
        if group in trial.rows[-1]["tests"] and baselines.trained(group, baselines.alone(study, one.system))
    ]


def systems(study: Study, outcomes: Sequence[Outcome]) -> list[Shown]:
    """The systems of one scenario as figures show them; each has the colour of its place in the study."""
    numbers = _numbers(study)
    return [
        Shown(
            title=study.title_of(one.system),
            color=numbers[study.title_of(one.system)],
            final=one.final,
            tuning=one.tuning,
            grid=study.systems[one.system].grid,
            chosen=one.draws or (one.chosen,),
            score=study.score,
            tuned_by=study.tuned_by,
            traffic=float("nan") if one.traffic is None else float(sum(one.traffic)),
            alone=baselines.alone(study, one.system),
            draws=max(len(study.data_seeds), 1),
        )
        for one in outcomes
    ]


def document(title: str, body: Sequence[str]) -> str:
    """A page with a heading, and nothing that is loaded from elsewhere."""
    style = _STYLE.replace("LIGHT", figures.variables(dark=False)).replace("DARK", figures.variables(dark=True))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{text(title)}</title><style>{style}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{text(title)}</h1>{''.join(body)}</body></html>\n"


def table(shown: report.Table, colors: Mapping[str, int] | None = None) -> str:
    """A table, without its title, that scrolls by itself where the page is narrow.

    Args:
      shown: the table.
      colors: numbers of systems by title, for a mark beside the first column.
    """
    classes = [' class="text"' if heading in _WORDS else "" for heading in shown.headings]
    lines = ["".join(f"<th{kind}>{text(heading)}</th>" for heading, kind in zip(shown.headings, classes, strict=True))]
    for row in shown.rows:
        mark = _swatch(colors[row[0]]) if colors and row[0] in colors else ""
        cells = [f"<td>{mark}{text(row[0])}</td>"]
        cells += [f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(row[1:], classes[1:], strict=True)]
        lines.append("".join(cells))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def drawn(shown: Sequence[Shown]) -> list[str]:
    """Every figure of some systems as HTML, each panel by itself so that a narrow page shows them one below the other."""
    parts = []
    for figure in figures.all_of(shown, of_page=True):
        parts += [f"<h3>{text(figure.title)}</h3>", f'<p class="muted">{text(figure.words)}</p>']
        names = "".join(f"<span>{_swatch(one.color)}{text(one.title)}</span>" for one in figure.legend)
        parts += [f'<p class="legend">{names}</p>'] if names else []
        parts += [f'<div class="panels">{"".join(figures.svg([panel], figure.title) for panel in figure.panels)}</div>']
    return parts


def _scenario(
    study: Study, scenario: str, clients: Clients, outcomes: Sequence[Outcome], lines: Sequence[results.Line]
) -> list[str]:
    new = 0 if clients.new is None else clients.new.num_clients
    part = [f"<h2>{text(scenario)}: {text(clients.title)}</h2>"]
    part += [f"<p>{clients.train.num_clients} known clients train; {new} new ones never do. {text(clients.note)}</p>"]
    part += [f'<p class="muted">{text(results.heading(lines))}</p>', table(results.table(lines), _numbers(study))]
    others = results.other_scores(lines)
    if others.rows:
        part += [f"<details open><summary>{text(others.title)}</summary>"]
        part += [table(others, _numbers(study)), "</details>"]
    changes = results.gains(study, outcomes, clients)
    if changes:
        kind = lines[0].kind
        part += [f"<details><summary>Who gains and who loses: {text(results.gains_words(kind))}</summary>"]
        part += [table(report.Table(results.GAIN_HEADINGS, changes), _numbers(study)), "</details>"]
    return part + drawn(systems(study, outcomes)) + _who_has_what(scenario, clients)


def _who_has_what(scenario: str, clients: Clients) -> list[str]:
    """The samples of the clients, folded: a reader looks for scores first."""
    figure = holdings.figure(clients)
    part = [f"<details><summary>{text(figure.title)}</summary>", f'<p class="muted">{text(figure.words)}</p>']
    part += [f'<div class="panels">{"".join(figures.svg([panel], figure.title) for panel in figure.panels)}</div>']
    return [*part, table(holdings.table(scenario, clients)), "</details>"]


def _numbers(study: Study) -> dict[str, int]:
    """The number of each system, by title."""
    return {study.title_of(name): number for number, name in enumerate(study.systems)}


def _swatch(number: int) -> str:
    return f'<span class="swatch" style="background:var(--s{number % len(report.COLORS)})"></span>'


def text(words: Any) -> str:
    """Words as a page shows them."""
    return escape.html(words)
