"""What clients of a system with noise are promised, for tables and the record, and checked before anything is trained."""

from collections.abc import Mapping

from fedjax_meta import privacy
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.tuning import points_of


def guarantee(study: Study, algorithm: Algorithm, num_clients: int, rounds: int | None = None) -> privacy.Guarantee | None:
    """What some rounds guarantee, those of the study when not given; `None` for a system without noise on uploads.

    Delta is N^-1.1 where the study names none.

    Raises:
      ValueError: a delta that does not cover what the sampling may do.
      ImportError: dp-accounting is not installed.
    """
    if not any(step["name"] == "noise" for step in algorithm.config["federation"]["uploads"]):
        return None
    delta = num_clients**-1.1 if study.delta is None else study.delta
    return privacy.spent(algorithm.config, study.rounds if rounds is None else rounds, num_clients, delta)


def text(guarantee: privacy.Guarantee) -> str:
    """Formats epsilon and delta with the neighbouring relation and sampling assumption that give them meaning.

    Example:
      >>> text(privacy.epsilon(4.0, 5, 1e-5, privacy.Everyone()))
      'epsilon 2.26, delta 1e-05 (one client, present or sending zeros; no credit for sampling)'
    """
    return f"epsilon {guarantee.epsilon:.3g}, delta {guarantee.delta:.2g} ({guarantee.relation}; {guarantee.sampling})"


def words(study: Study, algorithm: Algorithm, num_clients: int, *, tuned: bool = False) -> list[str]:
    """The guarantee of all rounds of a study, as a table says it; empty for a system without noise.

    It is that of one final run. If the system was `tuned`, its trials saw the same data, which the words say. Where runs may end
    before, they say that it is of all rounds.

    Raises:
      ValueError: a delta that does not cover what the sampling may do.
    """
    try:
        found = guarantee(study, algorithm, num_clients)
    except ImportError as error:
        return [f"epsilon unknown: {error}"]
    if found is None:
        return []
    rounds = f"; of all {study.rounds} rounds" if study.stop_at else ""
    return [text(found) + rounds + ("; the trials of its grid are not counted" if tuned else "")]


def of_system(
    study: Study, scenario: str, name: str, clients: Clients, rounds: int | None = None
) -> privacy.Guarantee | str | None:
    """The guarantee of a system before its grid is searched, see `guarantee`; words where there is no one number."""
    system = study.system(name, scenario)
    steps = system.federation.get("uploads") or ()
    if "noise" not in [step.get("name") if isinstance(step, Mapping) else step for step in steps]:
        return None
    try:
        found = [
            guarantee(study, system.build(clients, **point), clients.train.num_clients, rounds) for point in points_of(system)
        ]
    except ImportError as error:
        return f"epsilon unknown: {error}"
    return found[0] if len(set(found)) == 1 else "epsilon depends on the point of the grid; the table has that of the best one"


def said(study: Study, scenario: str, name: str, clients: Clients, rounds: int) -> str:
    """The guarantee after some rounds in words, or nothing."""
    found = of_system(study, scenario, name, clients, rounds)
    return "" if found is None else found if isinstance(found, str) else text(found)
