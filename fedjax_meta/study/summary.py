"""Systems by scenarios: one table for each group of clients, where a study has several scenarios."""

from collections.abc import Sequence

import numpy as np

from fedjax_meta import attacks, report
from fedjax_meta.study.baselines import alone, trained
from fedjax_meta.study.job import BACKDOOR, Outcome
from fedjax_meta.study.parts import part
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import KNOWN, NEW


def tables(study: Study, outcomes: Sequence[Outcome]) -> list[report.Table]:
    """Systems in rows, scenarios in columns: the main score of known and of new clients, and the success of backdoors.

    Nothing where there is one scenario.
    """
    scenarios = list(dict.fromkeys(one.scenario for one in outcomes))
    if len(scenarios) < 2:
        return []
    found = []
    for group, words in ((KNOWN, "Known clients"), (NEW, "New clients"), (BACKDOOR, "Success of the backdoor")):
        mine = {
            (one.system, one.scenario): one
            for one in outcomes
            if group in one.final[0].rows[-1]["tests"] and (group != NEW or trained(NEW, alone(study, one.system)))
        }
        labels = {scenario: _kind(study, one, group) for (_, scenario), one in mine.items()}
        used = [name for name in scenarios if name in labels]
        same = len(set(labels.values())) == 1
        rows = [
            [
                study.title_of(system),
                *(_text(study, mine[system, name], group) if (system, name) in mine else "" for name in used),
            ]
            for system in dict.fromkeys(one.system for one in outcomes)
        ]
        headings = ["system", *(name if same else f"{name}: {_label(labels[name])}" for name in used)]
        title = f"{words} in all scenarios" + (f": {_label(labels[used[0]])}" if same else "")
        found += [report.Table(headings, rows, title)] if used else []
    return found


def _label(kind: report.Kind) -> str:
    return kind.label + kind.direction


def values(study: Study, outcome: Outcome, group: str) -> np.ndarray:
    """The numbers of a table by seed, shares in percent, NaN for a seed that diverged.

    Args:
      study, outcome: what was run.
      group: `KNOWN` or `NEW` for the mean of the main score over clients, `BACKDOOR` for the share of marked samples of other
        classes that are taken for the target.
    """
    tests = [trial.rows[-1]["tests"][group] for trial in outcome.final]
    if group != BACKDOOR:
        found = np.array([report.main_score(test, study.score).mean for test in tests], float)
    else:
        attack = part("attack", study.system(outcome.system, outcome.scenario).federation["attack"])
        found = 100 * np.array([attacks.backdoor_success(test["confusion"], attack.config["target"]) for test in tests])
    return np.where([trial.diverged is None for trial in outcome.final], found, np.nan)


def remarks(study: Study, outcome: Outcome) -> list[str]:
    """What the table of one scenario says of a backdoor."""
    there = BACKDOOR in outcome.final[0].rows[-1]["tests"]
    return [f"backdoor succeeds on {_text(study, outcome, BACKDOOR)} %"] if there else []


def _kind(study: Study, outcome: Outcome, group: str) -> report.Kind:
    if group == BACKDOOR:
        return report.Kind("share of marked samples", higher_is_better=False, share=True)
    return report.main_score(outcome.final[0].rows[-1]["tests"][group], study.score).kind


def _text(study: Study, outcome: Outcome, group: str) -> str:
    words = _kind(study, outcome, group).spread(*report.over_seeds(values(study, outcome, group)))
    return words or report.no_number(any(trial.diverged is not None for trial in outcome.final))
