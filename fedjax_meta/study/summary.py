"""Systems by scenarios: one table for each group of clients, where a study has several scenarios."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_meta import attacks
from fedjax_meta.study.parts import part
from fedjax_meta.study.run import BACKDOOR, KNOWN, NEW, Outcome
from fedjax_meta.study.study import Study


class Table(NamedTuple):
    """Systems in rows, scenarios in columns.

    Attributes:
      title: what the numbers are.
      headings: "system" and the scenarios.
      rows: text; empty where a system was not run.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(study: Study, outcomes: Sequence[Outcome]) -> list[Table]:
    """Accuracy of known and of new clients, and the success of backdoors; nothing where there is one scenario."""
    scenarios = list(dict.fromkeys(one.scenario for one in outcomes))
    if len(scenarios) < 2:
        return []
    found = []
    titles = {
        KNOWN: "Known clients in all scenarios",
        NEW: "New clients in all scenarios",
        BACKDOOR: "Success of the backdoor",
    }
    for group, title in titles.items():
        cells = {(one.system, one.scenario): values(study, one, group) for one in outcomes}
        used = [name for name in scenarios if any(cells.get((system, name)) is not None for system in study.systems)]
        rows = [
            [study.title_of(system), *(_text(cells.get((system, name))) for name in used)]
            for system in dict.fromkeys(one.system for one in outcomes)
        ]
        found += [Table(f"{title}, %", ["system", *used], rows)] if used else []
    return found


def values(study: Study, outcome: Outcome, group: str) -> np.ndarray | None:
    """The numbers of a table by seed, in percent, NaN for a seed that diverged; `None` if the group was not tested.

    Args:
      study, outcome: what was run.
      group: `KNOWN` or `NEW` for the mean accuracy over clients, `BACKDOOR` for the share of marked samples of other classes that
        are taken for the target.
    """
    tests = [trial.rows[-1]["tests"].get(group) for trial in outcome.final]
    if any(test is None for test in tests):
        return None
    if group != BACKDOOR:
        return 100 * np.array([test["scores"]["accuracy_mean"] for test in tests], float)
    attack = part("attack", study.system(outcome.system, outcome.scenario).federation["attack"])
    return 100 * np.array([attacks.backdoor_success(test["confusion"], attack.config["target"]) for test in tests])


def remarks(study: Study, outcome: Outcome) -> list[str]:
    """What the table of one scenario says of a backdoor."""
    found = values(study, outcome, BACKDOOR) if outcome.scenario in study.scenarios else None
    return [] if found is None else [f"backdoor succeeds on {_text(found)} %"]


def _text(found: np.ndarray | None) -> str:
    if found is None:
        return ""
    if not np.isfinite(found).all():
        return "diverged"
    return f"{found.mean():.1f}" + (f" ±{found.std(ddof=1):.1f}" if len(found) > 1 else "")
