"""Several draws of a scenario's clients as one, and several draws of its new clients, for reports."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_meta import report
from fedjax_meta.study.files import DRAW
from fedjax_meta.study.job import Outcome
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import NEW, last_scores


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
      `chosen` is the point of the first.
    """
    if not study.data_seeds:
        return dict(built), list(outcomes)
    clients: dict[str, Clients] = {}
    count = len(study.data_seeds)
    for name, one in built.items():
        clients.setdefault(
            name.partition(DRAW)[0], one._replace(title=f"{one.title} ({count} draw{'' if count == 1 else 's'})")
        )
    joined: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        key = outcome.scenario.partition(DRAW)[0], outcome.system
        had = joined.get(key)
        if had is None:
            joined[key] = outcome._replace(scenario=key[0], draws=(outcome.chosen,), draw_tunings=(outcome.tuning,))
        else:
            joined[key] = had._replace(
                tuning=had.tuning + outcome.tuning,
                final=had.final + outcome.final,
                at_edge=had.at_edge + outcome.at_edge,
                draws=(*had.draws, outcome.chosen),
                draw_tunings=(*had.draw_tunings, outcome.tuning),
            )
    return clients, list(joined.values())


def mean_over_seeds(values: np.ndarray, draws: int = 1) -> np.ndarray:
    """The mean over seeds of a number of each client.

    Args:
      values: `[draws seeds, N]`, in the order of `pooled`.
      draws: of the clients; each has N clients of its own.

    Returns:
      `[draws N]`.

    Example:
      >>> mean_over_seeds(np.array([[1.0, 2.0], [3.0, 4.0]])), mean_over_seeds(np.array([[1.0, 2.0], [3.0, 4.0]]), 2)
      (array([2., 3.]), array([1., 2., 3., 4.]))
    """
    return np.asarray(values.reshape(draws, -1, values.shape[1]).mean(1).reshape(-1))


def over_orders(outcome: Outcome, clients: Clients, score: str | None = None) -> np.ndarray:
    """Mean score of the new clients of each draw of them after the last round, `[seeds, orders]`; shares in percent.

    NaN for a seed that diverged.
    """
    values = np.array([last_scores(trial, trial.rows[-1]["tests"][NEW], score) for trial in outcome.final])
    return values.reshape(len(outcome.final), clients.orders, -1).mean(2)


def remarks(outcome: Outcome, clients: Clients, score: str | None = None) -> list[str]:
    """What a table says of the spread over the draws of new clients: the sample deviation of their means over seeds."""
    if clients.orders == 1 or clients.new is None:
        return []
    kind = report.main_score(outcome.final[0].rows[-1]["tests"][NEW], score).kind
    values = over_orders(outcome, clients, score).mean(0)
    if not np.isfinite(values).all():
        return []
    spread, least, most = (kind.text(float(value)) for value in (np.std(values, ddof=1), values.min(), values.max()))
    return [f"new ±{spread} over {clients.orders} orders ({least} to {most})"]
