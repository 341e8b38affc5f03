"""What a study found: a table of systems, its text, and its reports."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import escape, placement, report
from fedjax_meta.report.frames import USER_ACCURACY
from fedjax_meta.study import baselines, draws, flags, guarantees, summary, targets, tuning
from fedjax_meta.study.baselines import LOCAL, alone, trained
from fedjax_meta.study.job import Job, Outcome, scored_clients
from fedjax_meta.study.scenario import TESTED_ON, Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import KNOWN, NEW, Trial, last_scores


class Line(NamedTuple):
    """A row of a scenario's table; scores each with their sample standard deviation over seeds (NaN for one seed).

    Attributes:
      title: of the system.
      kind: what the main score is; shares are in percent.
      numbers: the chosen hyper-parameters, in words.
      known: mean over known clients.
      worst: mean over the tenth of known clients with the worst scores.
      behind: share of the known clients that do worse than by local training alone, in percent; NaN without such a row.
      new: mean over new clients; NaN if there are none, or none of them trains a model that it needs.
      up: bytes that a client uploads in a round; NaN for a row without training.
      seconds: wall-clock of all trials, without compilation.
      remark: "diverged at round R", "worse than the untrained model", "no better than the majority class", "best at the end of
        its grid", or nothing.
      trials: how many runs its grid took.
      diverged: whether a seed did; else a score that is no number is not finite, or lacks a value for some client.
      others: the other scores, means over known and over new clients, by "NAME" and "NAME, new"; shares in percent.
    """

    title: str
    kind: report.Kind
    numbers: str
    known: report.Spread
    worst: report.Spread
    behind: float
    new: report.Spread
    up: float
    seconds: float
    remark: str
    trials: int = 0
    diverged: bool = False
    others: Mapping[str, tuple[report.Kind, report.Spread]] = {}


REFERENCES = (LOCAL, "fedavg")
"""The methods against which a report says who gains and who loses."""

NOTHING = (float("nan"), float("nan"))


def lines(study: Study, scenario: str, clients: Clients, outcomes: Sequence[Outcome]) -> list[Line]:
    """The table of a scenario: its systems in the order of the study, and what takes no training."""
    mine = [outcome for outcome in outcomes if outcome.scenario == scenario]
    local = next((one for one in mine if study.systems[one.system].method == LOCAL), None)
    base = None if local is None else by_client(local.final, KNOWN, study.score).values
    asked = TESTED_ON[study.scenario(scenario).adapt_on]
    still = "no training, first draw" if len(study.data_seeds) > 1 else "no training"
    scored = scored_clients(study, scenario, clients, clients.train)
    measured = baselines.measured(clients, study.seeds, study.metrics, asked, scored)
    # Of several draws only the first is measured without training, with which the mean over all cannot be compared.
    floors = (
        {}
        if len(study.data_seeds) > 1
        else {
            title: float(np.mean([report.main_score(test, study.score).mean for test in groups[KNOWN]]))
            for title, groups in measured.items()
        }
    )
    table = [_line(study, outcome, clients, base, floors) for outcome in mine]
    for title, groups in measured.items():
        known, nan = [report.main_score(test, study.score) for test in groups[KNOWN]], float("nan")
        new = [report.main_score(test, study.score).mean for test in groups.get(NEW, ())]
        kind = known[0].kind
        worst = report.over_seeds([kind.worst_tenth(one.values) for one in known])
        mean = report.over_seeds([one.mean for one in known])
        others = _others(study, groups)
        table.append(Line(title, kind, "", mean, worst, nan, report.over_seeds(new), nan, 0.0, still, others=others))
    return table


def _line(study: Study, outcome: Outcome, clients: Clients, base: np.ndarray | None, floors: Mapping[str, float]) -> Line:
    """The row of a system; `base` are the scores by local training, `floors` the means of what takes no training, by title."""
    known = by_client(outcome.final, KNOWN, study.score)
    system = study.system(outcome.system, outcome.scenario)
    algorithm = system.build(clients, **outcome.chosen)
    itself, has_new = system.method == LOCAL, clients.new is not None and trained(NEW, alone(study, outcome.system))
    behind = float("nan")
    if base is not None and not itself and np.isfinite(known.values).all() and np.isfinite(base).all():
        mine, by_local = (draws.mean_over_seeds(values, len(study.data_seeds) or 1) for values in (known.values, base))
        behind = 100 * float(np.mean(known.kind.gain(mine, by_local) < 0))
    up = float("nan") if outcome.traffic is None else float(outcome.traffic.up)
    mean = report.over_seeds(known.values.mean(1))
    worse = [
        f"{'worse' if title == baselines.UNTRAINED else 'no better'} than the {title}"
        + (_nowhere_better(study, outcome, clients) if title != baselines.UNTRAINED else "")
        for title, floor in floors.items()
        if (gain := known.kind.gain(mean[0], floor)) < 0 or (gain == 0 and title != baselines.UNTRAINED)
    ]
    shares_nothing = ["clients send nothing: no part of the model is trained together"] if up == 0 and not itself else []
    remarks = [
        *_remarks(study, outcome, clients),
        *worse,
        *shares_nothing,
        # Where nothing is sent, noise on uploads is nowhere, and an epsilon would be of nothing.
        *([] if up == 0 else guarantees.words(study, algorithm, clients.train.num_clients, tuned=bool(outcome.tuning))),
    ]
    remarks += summary.remarks(study, outcome)
    return Line(
        title=study.title_of(outcome.system),
        kind=known.kind,
        numbers=outcome.numbers,
        known=mean,
        worst=report.over_seeds(np.array([known.kind.worst_tenth(run) for run in known.values])),
        behind=behind,
        new=report.over_seeds(by_client(outcome.final, NEW, study.score).values.mean(1)) if has_new else NOTHING,
        up=up,
        seconds=outcome.seconds[0],
        remark="; ".join(remarks),
        trials=len(outcome.tuning),
        diverged=any(trial.diverged is not None for trial in outcome.final),
        others=_others(study, _last_tests(outcome.final, new=has_new), outcome.final),
    )


def _nowhere_better(study: Study, outcome: Outcome, clients: Clients) -> str:
    """What to add for a system whose search compared noise: no point of its grid beat the constant prediction in its trials."""
    if not outcome.tuning:
        return ""
    trials = Job(study, outcome.scenario, outcome.system, clients).tuning()
    constant = baselines.constant_in(clients, trials.data, trials.tests)
    if constant is None:
        return ""
    floor, judged = tuning.score(constant, study.tuned_by)[0], tuning.scores(outcome.tuning, study.tuned_by)
    if not math.isfinite(floor) or any(one.kind.gain(one.score, floor) > 0 for one in judged):
        return ""
    return ", nor was any point of its grid when it was tuned: begin the grid elsewhere"


def _remarks(study: Study, outcome: Outcome, clients: Clients) -> list[str]:
    system = study.system(outcome.system)
    diverged = report.diverged_words([trial.diverged for trial in outcome.final])
    lost = tuning.without_loss(outcome.final)
    remarks = [f"{diverged}: {lost}" if lost else diverged] if diverged else []
    remarks += ["its code changed during the run"] * outcome.code_changed
    remarks += _reached(study, outcome) + _unsolved(outcome)
    if outcome.tuning and all(trial.diverged is not None for trial in outcome.tuning):
        remarks.append("all points of its grid diverged")
    elif outcome.tuning and not tuning.told_apart(outcome.tuning, study.tuned_by):
        remarks.append("all points of its grid scored the same")
    else:
        remarks += [
            f"best {name} at the end of its grid{_why_there(study, outcome, clients, name)}"
            for name in dict.fromkeys(outcome.at_edge)
        ]
    searches = zip(outcome.draw_tunings or (outcome.tuning,), outcome.draws or (outcome.chosen,), strict=True)
    losses = [loss for trials, point in searches if (loss := tuning.exploded(trials, point, study.tuned_by)) is not None]
    remarks += [f"validation loss of {max(losses):.2g} at the chosen point"] if losses else []
    idle = clients.new is not None and not trained(NEW, alone(study, outcome.system))
    remarks += ["new clients do not train"] * idle
    remarks += [
        f"{name} changes over the rounds: {flags.as_call(part)}"
        for name, part in study.systems[outcome.system].changing.items()
    ]
    if system.pooled:
        remarks.append("central training on all clients' samples")
    if len(tuning.points_of(system)) < 2:
        remarks.append(f"preset {system.preset}" if system.preset else "not tuned")
    return remarks if idle else remarks + draws.remarks(outcome, clients, study.score)


def _why_there(study: Study, outcome: Outcome, clients: Clients, name: str) -> str:
    """What more there is to say of a number whose best value is at the end of its grid."""
    if len(outcome.draws) > 1:
        often = outcome.at_edge.count(name)
        return "" if often == len(outcome.draws) else f" in {often} of {len(outcome.draws)} draws"
    tried = list({tuple(trial.numbers.items()): trial.numbers for trial in outcome.tuning}.values())
    system = study.system(outcome.system, outcome.scenario)
    if study.tuning.extend and not tuning.next_points(tried, outcome.chosen, system, clients):
        return ", from which it cannot move on"
    return ""


def _reached(study: Study, outcome: Outcome) -> list[str]:
    """Where runs ended because they had reached the study's `stop_at`."""
    if study.goal is None:
        return []
    ends = [trial.rows[-1]["round"] for trial in outcome.final if targets.is_reached(trial.rows, study.goal)]
    some = "" if len(ends) == len(outcome.final) else f" in {len(ends)} of {len(outcome.final)} seeds"
    when = f"{min(ends)} to {max(ends)}" if len(set(ends)) > 1 else f"{ends[0]}" if ends else ""
    return [f"reached {study.stop_at}{some}, ended at round {when}"] if ends else [f"never reached {study.stop_at}"]


def _unsolved(outcome: Outcome) -> list[str]:
    """How often the linear systems of implicit gradients had no certain solution, where that happened."""
    percent = report.negative_curvature([row for trial in outcome.final for row in trial.rows])
    words = f"negative curvature in {percent:.0f} % of its linear systems (a larger prox_weight or damping helps)"
    return [words] if percent >= 0.5 else []


class ByClient(NamedTuple):
    """A score of each client after the last round.

    Attributes:
      kind: what it is.
      values: `[seeds, N]`, in percent if it is a share.
    """

    kind: report.Kind
    values: np.ndarray


def by_client(trials: Sequence[Trial], group: str, score: str | None) -> ByClient:
    """A score of each client of a group, see `report.main_score`; NaN for a run that diverged."""
    return ByClient(
        report.main_score(trials[0].rows[-1]["tests"][group], score).kind,
        np.array([last_scores(trial, trial.rows[-1]["tests"][group], score) for trial in trials]),
    )


def _last_tests(trials: Sequence[Trial], *, new: bool) -> dict[str, list[Mapping[str, Any]]]:
    """The last test of each trial, by group; with those of new clients or without."""
    groups = [group for group in trials[0].rows[-1]["tests"] if new or group != NEW]
    return {group: [trial.rows[-1]["tests"][group] for trial in trials] for group in groups}


def _others(
    study: Study, tests: Mapping[str, Sequence[Mapping[str, Any]]], trials: Sequence[Trial] = ()
) -> dict[str, tuple[report.Kind, report.Spread]]:
    """The metrics beside the main one, and user accuracy after the last round where it was recorded."""
    found, lost = {}, [trial.diverged is not None for trial in trials] or False
    for group, of_seeds in tests.items():
        main = report.main_score(of_seeds[0], study.score).kind.name
        for name in of_seeds[0].get("metrics", {}):
            if name != main:
                some = [report.main_score(test, name) for test in of_seeds]
                label = name if group == KNOWN else f"{name}, {group}"
                found[label] = some[0].kind, report.over_seeds(np.where(lost, np.nan, [one.mean for one in some]))
    if trials and USER_ACCURACY in trials[0].rows[-1]["train"]:
        last = [trial.rows[-1]["train"][USER_ACCURACY][-1] for trial in trials]
        found[USER_ACCURACY] = (
            report.Kind(USER_ACCURACY, True, True),
            report.over_seeds(np.where(lost, np.nan, 100 * np.array(last, float))),
        )
    return found


SCORES = ("system", "known", "worst 10 %", "new", "behind local")
"""The columns of scores; the others say how a system was run, in a table of their own on a terminal."""

HOW = ("system", "upload", "trials", "chosen", "remark")


def table(lines: Sequence[Line]) -> report.Table:
    """Lines as text; columns that would be empty are left out."""
    rows = [
        [
            line.title,
            line.kind.spread(*line.known) or report.no_number(line.diverged),
            line.kind.spread(*line.worst),
            line.kind.spread(*line.new),
            "" if np.isnan(line.behind) else f"{line.behind:.0f} %",
            "" if np.isnan(line.up) else placement.amount(line.up),
            str(line.trials or ""),
            line.numbers,
            line.remark,
        ]
        for line in lines
    ]
    return report.Table([*SCORES, *HOW[1:]], rows).used()


def other_scores(lines: Sequence[Line]) -> report.Table:
    """The other scores of each system, in columns; no rows if there are none."""
    names = list(dict.fromkeys(name for line in lines for name in line.others))
    kinds = {name: kind for line in lines for name, (kind, _) in line.others.items()}
    headings = [f"{name.replace('_', ' ')}{', %' if kinds[name].share else ''}{kinds[name].direction}" for name in names]
    rows = [
        [line.title, *(kinds[name].spread(*line.others[name][1]) if name in line.others else "" for name in names)]
        for line in lines
        if line.others
    ]
    return report.Table(["system", *headings], rows, "Other scores, mean over clients")


def tables(study: Study, built: Mapping[str, Clients], outcomes: Sequence[Outcome]) -> dict[str, list[Line]]:
    """The table of each scenario, see `lines`."""
    return {scenario: lines(study, scenario, clients, outcomes) for scenario, clients in built.items()}


GAIN_HEADINGS = ("system", "compared with", "clients", "lose", "median", "greatest loss", "greatest gain")


def gains(study: Study, outcomes: Sequence[Outcome], clients: Clients | None = None) -> list[list[str]]:
    """Who gains and who loses against local training and against FedAvg, where the study has them, in `GAIN_HEADINGS`.

    Args:
      study: what was run.
      outcomes: of one scenario.
      clients: of that scenario, who may have names.
    """
    rows = []
    called = {} if study.data_seeds or clients is None else dict(zip((KNOWN, NEW), clients.names, strict=True))
    federated = [one for one in outcomes if not study.systems[one.system].pooled]
    for method in REFERENCES:
        reference = next((one for one in federated if study.systems[one.system].method == method), None)
        for one in outcomes:
            if reference is None or one is reference:
                continue
            for group in (KNOWN, NEW):
                if not trained(group, *(alone(study, other.system) for other in (one, reference))):
                    continue
                if any(group not in trial.rows[-1]["tests"] for other in (one, reference) for trial in other.final):
                    continue
                mine, base = (by_client(other.final, group, study.score) for other in (one, reference))
                of_clients = (draws.mean_over_seeds(one.values, len(study.data_seeds) or 1) for one in (mine, base))
                gain = mine.kind.gain(*of_clients)
                if np.isnan(gain).any():
                    continue
                least, most = int(gain.argmin()), int(gain.argmax())
                digits = "+.1f" if mine.kind.share else "+.3g"
                names = _names(study, one, group, called.get(group, ()))
                ends = [
                    f"{gain[i]:{digits}} ({names[i]})" if there else "none"
                    for i, there in ((least, gain[least] < 0), (most, gain[most] > 0))
                ]
                share = f"{100 * np.mean(gain < 0):.0f} %"
                titles = study.title_of(one.system), study.title_of(reference.system)
                rows.append([*titles, group, share, f"{np.median(gain):{digits}}", *ends])
    return rows


def _names(study: Study, outcome: Outcome, group: str, called: Sequence[str]) -> list[str]:
    """What the clients of a group are called, those of all draws one after the other; `called` are their names, if known."""
    names = []
    for draw in study.data_seeds or (None,):
        # The clients that are scored differ from draw to draw where some of them are noisy.
        first = outcome.final[0 if draw is None else study.data_seeds.index(draw) * len(study.seeds)]
        test = first.rows[-1]["tests"][group]
        ids = test.get("ids", range(report.main_score(test, study.score).values.size))
        names += [f"client {called[i] if called else i}{'' if draw is None else f', draw {draw}'}" for i in ids]
    return names


PUBLISHED_HEADINGS = ("system", "scenario", "clients", "score", "published", "measured", "difference", "note")


def published(study: Study, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The published numbers beside the measured ones, in `PUBLISHED_HEADINGS`."""
    rows = []
    for row in study.published:
        found = [one for one in outcomes if (one.system, one.scenario) == (row.system, row.scenario)]
        tests = [trial.rows[-1]["tests"].get(row.clients, {}) for one in found for trial in one.final]
        kind = _kind_of(row.score, tests)
        scores = [test.get("scores", {}) for test in tests]
        # "accuracy" is over all samples, and other scores are means over clients: the one never stands for the other.
        other = row.score if row.score == "accuracy" else f"{row.score}_mean"
        values = np.array([one.get(row.score, one.get(other, np.nan)) for one in scores], float)
        diverged = [trial.diverged is not None for one in found for trial in one.final]
        values[diverged] = np.nan
        values *= 100 if kind.share else 1
        measured = difference = "not run"
        if values.size:
            measured = kind.spread(*report.over_seeds(values)) or ("diverged" if any(diverged) else "not measured")
            difference = kind.text(values.mean() - row.value, sign=True)
        told = [kind.text(row.value), measured, difference if np.isfinite(values).all() else "", row.note]
        rows.append([study.title_of(row.system), row.scenario, row.clients, _over(row.score), *told])
    return rows


def _over(score: str) -> str:
    """A name of `metrics.summary` and what its numbers are taken over.

    Example:
      >>> _over("accuracy"), _over("accuracy_mean"), _over("f1"), _over("f1_std")
      ('accuracy (over all samples)', 'accuracy (mean over clients)', 'f1 (mean over clients)', 'f1 (deviation over clients)')
    """
    if score == "accuracy":
        return f"{score} (over all samples)"
    if score.endswith("_std"):
        return f"{score.removesuffix('_std')} (deviation over clients)"
    return f"{score.removesuffix('_mean')} (mean over clients)"


def _kind_of(score: str, tests: Sequence[Mapping[str, Any]]) -> report.Kind:
    """What a name of `metrics.summary` is; a share where no test says it."""
    base = score.removesuffix("_mean").removesuffix("_std").removeprefix("raw_")
    known = [test for test in tests if test and base in report.score_names(test)]
    return report.main_score(known[0], base).kind if known else report.Kind(score, True, base != "loss")


def markdown(
    study: Study,
    built: Mapping[str, Clients],
    outcomes: Sequence[Outcome],
    command: str,
    *,
    found: Mapping[str, Sequence[Line]] | None = None,
    figures: Sequence[str] = (),
) -> str:
    """The report as Markdown.

    Args:
      study, built, outcomes: what was run, and what came of it.
      command: that was given.
      found: the `tables`, if they are at hand.
      figures: files to show, as paths from the report.
    """
    found = tables(study, built, outcomes) if found is None else found
    text = [f"# {escape.markdown(study.title)}", "", explanation(study, found), ""]
    for scenario, clients in built.items():
        text += [f"## {scenario}: {escape.markdown(clients.title)}", "", heading(found[scenario]), ""]
        text += [_markdown(table(found[scenario])), ""]
        others = other_scores(found[scenario])
        if others.rows:
            text += [f"{others.title}:", "", _markdown(others), ""]
        text += [escape.markdown(clients.note), ""] if clients.note else []
        changes = gains(study, [one for one in outcomes if one.scenario == scenario], clients)
        if changes:
            text += [f"{gains_words(found[scenario][0].kind)}:", ""]
            text += [report.markdown_table(GAIN_HEADINGS, changes, text_columns=3), ""]
    for one in summary.tables(study, outcomes):
        text += [f"## {one.title}", "", _markdown(one), ""]
    if study.published:
        rows = published(study, outcomes)
        text += ["## Published beside measured", "", report.markdown_table(PUBLISHED_HEADINGS, rows, text_columns=4), ""]
    text += [line for path in figures for line in (f"![{Path(path).stem}]({path})", "")]
    text += [line for note in study.notes for line in (note, "")] + [f"    {command}", ""]
    return "\n".join(text)


def _markdown(table: report.Table) -> str:
    return report.markdown_table(table.headings, table.rows)


def latex(study: Study, built: Mapping[str, Clients], found: Mapping[str, Sequence[Line]]) -> str:
    """The scores of each scenario as a LaTeX table; it needs the package booktabs."""
    parts = [r"% \usepackage{booktabs}"]
    for scenario, clients in built.items():
        shown = table(found[scenario]).only(SCORES)
        lines = [[escape.latex(cell) for cell in row] for row in (shown.headings, *shown.rows)]
        rows = [" & ".join(row) + r" \\" for row in lines]
        caption = f"{study.title}: {clients.title}. {heading(found[scenario])} {explanation(study, found)}"
        parts += [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape.latex(caption)}}}",
            rf"\label{{tab:{re.sub('[^A-Za-z0-9]+', '-', scenario)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(shown.headings) - 1)}}}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    return "\n".join(parts) + "\n"


def heading(found: Sequence[Line]) -> str:
    """What the scores of a scenario's table are.

    Example:
      >>> heading([Line("", report.Kind("rmse", False, False), "", NOTHING, NOTHING, 0.0, NOTHING, 0.0, 0.0, "")])
      'Rmse (lower is better), mean over clients.'
    """
    kind = found[0].kind
    return f"{kind.words.capitalize()}{' in percent' if kind.share else ''}{kind.direction}, mean over clients."


def gains_words(kind: report.Kind) -> str:
    """What the numbers of `gains` are."""
    return f"Gain in {kind.points}{'' if kind.higher_is_better else ' (how much lower)'}, mean over seeds"


def explanation(study: Study, found: Mapping[str, Sequence[Line]]) -> str:
    """What the numbers of the tables of a study mean, see `tables`; the one place that says what ± is."""
    text = (
        f"After round {study.rounds}{'' if study.goal is None else ', or the one at which the remark says that a run ended'}"
    )
    runs, of_draws = len(study.seeds) * max(len(study.data_seeds), 1), len(study.data_seeds) > 1
    over = f"{runs} runs ({len(study.data_seeds)} draws x {len(study.seeds)} seeds)" if of_draws else f"{runs} seeds"
    text += f"; ± is the sample standard deviation over {over}." if runs > 1 else " (one seed)."
    text += f" {tuning.words(study, [lines[0].kind.name for lines in found.values()])}".rstrip()
    kinds = [lines[0].kind for lines in found.values()]
    if study.goal is not None and 0 < study.goal.value <= 1 and any(kind.share for kind in kinds):
        text += f" Targets of shares are in percent: stop_at here is {study.goal.value:g} %."
    if any(system.method == LOCAL for system in study.systems.values()):
        text += ' "behind local": known clients that do worse than by local training alone.'
    return text
