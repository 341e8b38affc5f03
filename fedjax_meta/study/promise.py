"""What clients of a system with noise are promised, for tables, and checked before anything is trained."""

from fedjax_meta import privacy
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.study.study import Study


def words(study: Study, algorithm: Algorithm, num_clients: int) -> list[str]:
    """Epsilon and delta after the rounds of a study, where uploads have noise; delta is N^-1.1 where the study names none.

    Raises:
      ValueError: a delta that does not cover what the sampling may do.
    """
    if not any(step["name"] == "noise" for step in algorithm.config["federation"]["uploads"]):
        return []
    delta = num_clients**-1.1 if study.delta is None else study.delta
    try:
        found = privacy.spent(algorithm.config, study.rounds, num_clients, delta)
    except ImportError as error:
        return [f"epsilon unknown: {error}"]
    return [] if found is None else [f"epsilon {found.epsilon:.3g}, delta {found.delta:.2g}"]
