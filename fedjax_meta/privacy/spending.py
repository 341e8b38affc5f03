"""What a run spends: the guarantee of its central noise, from its config."""

from collections.abc import Mapping
from typing import Any

from fedjax_meta import checks
from fedjax_meta.privacy.accounting import Everyone, FixedSize, Guarantee, Poisson, Sampling, Trees, epsilon


def spent(
    config: Mapping[str, Any], rounds: int, num_clients: int, delta: float, *, accountant: str = "pld"
) -> Guarantee | None:
    """The guarantee for one client after `rounds` rounds, or `None` for a run without `uploads.noise`.

    Args:
      config: of an `Algorithm` or a `Federation`.
      rounds: R; with 1, what a round costs by itself.
      num_clients: N.
      delta: in (0, 1), below 1 / N to mean anything.
      accountant: see `epsilon`.

    Raises:
      ValueError: a value out of range; a noise multiplier that is not one number; a tree of noise in which a client may take
        part twice.
      ImportError: dp-accounting is not installed.

    Example:
      >>> from fedjax_meta import Federation, uploads
      >>> chain = (uploads.clip(1.0), uploads.noise(4.0))
      >>> found = spent(Federation(cohort_size=10, uploads=chain).config, 5, 10, 1e-5)
      >>> round(found.epsilon, 3), found.relation
      (2.258, 'one client, present or sending zeros')
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config={checks.shown(config)} must be that of an algorithm or a federation, e.g. algorithm.config")
    federation = config.get("federation", config)
    if "uploads" not in federation:
        raise ValueError("config must be that of an algorithm or a federation, but it names no uploads")
    noises = [step for step in federation["uploads"] if step["name"] == "noise"]
    if not noises:
        return None
    multiplier = noises[0].get("multiplier")
    if isinstance(multiplier, bool) or not isinstance(multiplier, (int, float)):
        raise ValueError(f"the noise multiplier of a run must be one number to be accounted for, not {multiplier!r}")
    return epsilon(multiplier, rounds, delta, sampling_of(federation, num_clients), accountant=accountant)


def sampling_of(federation: Mapping[str, Any], num_clients: int) -> Sampling:
    """How a federation draws cohorts, from its config. No credit is given for a schedule that has no accountant, and for cohorts
    of all clients.

    Raises:
      ValueError: a cohort larger than the population; a tree of noise in which a client may take part twice.
    """
    checks.count("num_clients", num_clients)
    schedule, cohort_size = federation["schedule"], federation["cohort_size"]
    trees = [step["tree"] for step in federation["uploads"] if "tree" in step]
    if trees:
        in_a_pass = num_clients // cohort_size
        if not isinstance(schedule, Mapping) or schedule.get("name") != "passes" or in_a_pass % trees[0]:
            raise ValueError(
                f"noise by trees of {trees[0]} rounds is accounted for under schedules.passes alone, where a pass (N / C, here "
                f"{in_a_pass} rounds) is a multiple of a tree: a client could be in a tree twice"
            )
        return Trees(trees[0])
    if isinstance(schedule, Mapping) and schedule.get("name") == "poisson":
        return Poisson(schedule["rate"], num_clients, cohort_size)
    if schedule == "fedjax_meta.schedules.uniform" and cohort_size != num_clients:
        return FixedSize(num_clients, cohort_size)
    return Everyone()
