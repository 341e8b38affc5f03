"""Several draws of a scenario's clients as one, for reports."""

from collections.abc import Mapping, Sequence

from fedjax_meta.study.run import Outcome
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import DRAW, Study


def pooled(
    study: Study, built: Mapping[str, Clients], outcomes: Sequence[Outcome]
) -> tuple[dict[str, Clients], list[Outcome]]:
    """What reports are made of: the draws of a scenario as one, with the trials of all of them.

    Args:
      study: with or without `data_seeds`.
      built: the clients of every draw, see `run.build`.
      outcomes: of every draw, see `run.run`.

    Returns:
      (the clients of the first draw of each scenario, an outcome for each scenario and system). Every draw is tuned on its own;
      the outcome names the point of the first.
    """
    if not study.data_seeds:
        return dict(built), list(outcomes)
    clients: dict[str, Clients] = {}
    for name, one in built.items():
        clients.setdefault(name.partition(DRAW)[0], one._replace(title=f"{one.title} ({len(study.data_seeds)} draws)"))
    joined: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        key = outcome.scenario.partition(DRAW)[0], outcome.system
        had = joined.get(key)
        if had is None:
            joined[key] = outcome._replace(scenario=key[0])
        else:
            edges = list(dict.fromkeys([*had.at_edge, *outcome.at_edge]))
            joined[key] = had._replace(tuning=had.tuning + outcome.tuning, final=had.final + outcome.final, at_edge=edges)
    return clients, list(joined.values())
