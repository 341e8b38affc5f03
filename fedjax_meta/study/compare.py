"""Compares finished runs, of one study or of several, seed by seed and client by client.

Runs of the same seed share their initial model, cohorts and batches where their federations ask for the same cohorts, so that
differences are taken between pairs. ± is the sample standard deviation over seeds; intervals are written [low, high].
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_meta import checks, metrics, report
from fedjax_meta.federation import Federation
from fedjax_meta.report.records import rounding_of
from fedjax_meta.study import baselines, parts, results, targets
from fedjax_meta.study.result_files import read_final
from fedjax_meta.study.scenario import TESTED_ON
from fedjax_meta.study.study import Study, load
from fedjax_meta.study.targets import Target
from fedjax_meta.study.tuning import KNOWN, NEW, Trial, last_scores

NAN = float("nan")

EXACT = 50
"""Up to so many clients, the test over clients does without the normal distribution."""


class Finished(NamedTuple):
    """The final runs of a system, as a folder holds them.

    Attributes:
      title: of the system; with the names of the scenario and the folder where several that are compared have this title.
      scenario: its name in the study; with the folders' names where runs have other clients or models under this name.
      fingerprint: of the clients' data, and of what they are tested on where that is a part.
      trials: one for each seed.
      method: name in `METHODS`, or "module:name".
      cohorts: what the cohorts of a seed depend on.
      traffic: bytes of a client in a round, down and up; NaN where the folder does not say it.
      alone: the groups of clients that train by themselves with it.
      score: name of the score that is compared; that of `report.score_names` when not given.
      pooled: whether it is central training, which is no reference for others, see `System.pooled`.
      model: of the scenario, with its options.
    """

    title: str
    scenario: str
    fingerprint: str
    trials: list[Trial]
    method: str = ""
    cohorts: str = ""
    traffic: float = NAN
    alone: tuple[str, ...] = ()
    score: str | None = None
    pooled: bool = False
    model: str = ""

    @property
    def task(self) -> tuple[str, str]:
        """The clients and the model: only systems of one task are compared."""
        return self.fingerprint, self.model

    @property
    def kind(self) -> report.Kind:
        """What the score is."""
        return report.main_score(self.trials[0].rows[-1]["tests"][KNOWN], self.score).kind

    def by_client(self, group: str) -> dict[int, np.ndarray]:
        """The score of each client `[N]` after the last round, by seed; in percent if it is a share, NaN if the run diverged."""
        found = {}
        for trial in self.trials:
            test = trial.rows[-1]["tests"].get(group)
            if test is not None:
                found[trial.seed] = last_scores(trial, test, self.score)
        return found

    def ids(self, group: str) -> np.ndarray:
        """The clients of `by_client`, `[N]`: all of a group, but for attackers and noisy ones."""
        test = self.trials[0].rows[-1]["tests"][group]
        return np.asarray(test.get("ids", np.arange(report.main_score(test, self.score).values.size)))

    @property
    def rounds(self) -> int:
        """After which the clients were tested last."""
        return max(trial.rows[-1]["round"] for trial in self.trials)


class Difference(NamedTuple):
    """How a system compares with a reference on the same seeds, mean over clients.

    Attributes:
      mean: of the differences, its score minus that of the reference; where lower is better, a gain is negative.
      margin: half the 95 % confidence interval of the mean (Student's t over the paired seeds); NaN for one seed.
      seeds: how many seeds both have.
      better, worse: shares of the clients that do better and worse than with the reference, mean over seeds, in percent.
      p_seeds: of the paired t-test over seeds, two-sided; NaN for one seed.
      p_clients: of Wilcoxon's signed-rank test over clients (mean over seeds), two-sided. Clients share what the server sends,
        so that it speaks of these clients and not of other trainings.
    """

    mean: float
    margin: float
    seeds: int
    better: float
    worse: float
    p_seeds: float
    p_clients: float


class Reached(NamedTuple):
    """What each seed took until the known clients' mean score reached a target; infinity for one that never did.

    Attributes:
      target: what they should reach.
      kind: of the score.
      rounds, megabytes, seconds: `[seeds]`; bytes of a client that takes part in every round, both ways.
    """

    target: Target
    kind: report.Kind
    rounds: np.ndarray
    megabytes: np.ndarray
    seconds: np.ndarray


class Row(NamedTuple):
    """A system in a comparison; shares in percent, `known` and `new` by seed.

    Attributes:
      system: what is compared.
      reference: title of the system that all of a task are compared with.
      known, new: mean over clients, `[seeds]`; `new` is empty without new clients, and where none trains the model that it needs.
      worst: mean over the tenth of known clients with the worst scores, `[seeds]`.
      variance: of the score over known clients, `[seeds]`.
      against: the reference; `None` for itself and where no seed is common.
      against_new: the same for new clients.
      behind: by method, the share of known clients that do worse than with it.
      reached: `None` without a target.
    """

    system: Finished
    reference: str
    known: np.ndarray
    new: np.ndarray
    worst: np.ndarray
    variance: np.ndarray
    against: Difference | None
    against_new: Difference | None
    behind: dict[str, float]
    reached: Reached | None


def finished(folders: Sequence[str | Path], *, score: str | None = None) -> list[Finished]:
    """The systems of some runs, in order.

    Args:
      folders: of the runs.
      score: what is compared; when not given, the main score of the first study that names one, and each task's own where no
        study does.

    Raises:
      OSError: a folder that cannot be read.
      ValueError: one folder in place of several, a folder without a run, or without finished results, one that is named twice; a
        run without that score, a damaged file, F1 of two kinds.
    """
    if isinstance(folders, (str, Path)):
        raise ValueError(f"folders={str(folders)!r} must be several folders, e.g. [{str(folders)!r}]")
    found: list[tuple[Finished, str]] = []
    paths = [Path(folder).resolve() for folder in folders]
    for folder, label in zip(map(Path, folders), _labels(paths), strict=True):
        if paths.count(folder.resolve()) > 1:
            raise ValueError(f"{folder} is named twice: it would be compared with itself")
        for part in ("run.json", "study.yaml"):
            if not (folder / part).is_file():
                raise ValueError(f"{folder} holds no run (no {part})")
        study = load(folder / "study.yaml")
        score = study.score if score is None else score
        before = len(found)
        for scenario in study.scenarios:
            for name in study.systems_on(scenario):
                trials, content = read_final(folder, study, scenario, name)
                if trials:
                    traffic = float(content.get("traffic", NAN))
                    found.append((_finished(study, scenario, name, trials, content["config"]["data"], traffic), label))
        if len(found) == before:
            raise ValueError(f"{folder} has no finished results yet")
    found = [(one._replace(score=score), name) for one, name in found]
    for one, name in found:
        known = report.score_names(one.trials[0].rows[-1]["tests"][KNOWN])
        if score is not None and score not in known:
            raise ValueError(
                f"{name}: {one.title} was not measured by {score!r} in scenario {one.scenario}, but by {', '.join(known)}"
            )
    over_all = {"f1" in one.trials[0].rows[-1]["tests"][KNOWN].get("metrics", {}): name for one, name in found}
    if score == "f1" and len(over_all) > 1:
        raise ValueError(
            f"f1 of {over_all[True]} is over all classes, that of {over_all[False]} within the classes that a client has, as "
            "FedMeta-Per takes it: they are two scores. With metrics: [accuracy, f1] a study measures the first"
        )
    return [_named_apart(one, name, found) for one, name in found]


def _labels(paths: Sequence[Path]) -> list[str]:
    """Names of folders: their last parts, as many as tell them apart.

    Example:
      >>> _labels([Path("/a/first"), Path("/b/first"), Path("/b/second")])
      ['a/first', 'b/first', 'b/second']
    """
    for last in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-last:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _named_apart(one: Finished, name: str, found: Sequence[tuple[Finished, str]]) -> Finished:
    """The system with names behind what others have, too: its title, or the name of a scenario of another task."""
    alike = [(other.scenario, run) for other, run in found if (other.task, other.title) == (one.task, one.title)]
    there = [(other.task, run) for other, run in found if other.scenario == one.scenario]
    more = [one.scenario] if len({scenario for scenario, _ in alike}) > 1 else []
    more += [name] if [scenario for scenario, _ in alike].count(one.scenario) > 1 else []
    runs = dict.fromkeys(run for task, run in there if task == one.task)
    return one._replace(
        title=f"{one.title} ({', '.join(more)})" if more else one.title,
        scenario=f"{one.scenario} ({', '.join(runs)})" if len({task for task, _ in there}) > 1 else one.scenario,
    )


def _finished(study: Study, scenario: str, name: str, trials: list[Trial], data: str, traffic: float) -> Finished:
    federation = parts.at_point(study.system(name, scenario).federation, trials[0].numbers)
    cohorts = {key: federation.get(key, getattr(Federation, key)) for key in ("cohort_size", "participation")}
    cohorts["schedule"] = federation.get("schedule", Federation.schedule.__name__)
    settings = study.scenarios[scenario]
    tested = TESTED_ON[settings.adapt_on]
    return Finished(
        study.title_of(name),
        scenario,
        data + ("" if tested == "test" else f" ({tested})"),
        trials,
        study.systems[name].method,
        json.dumps(cohorts, sort_keys=True),
        traffic,
        baselines.alone(study, name),
        pooled=study.systems[name].pooled,
        model=json.dumps([settings.model, dict(settings.model_options)], sort_keys=True),
    )


def difference(one: Finished, reference: Finished, group: str) -> Difference | None:
    """`one` minus `reference` on the seeds and the clients that both have; `None` if there are none.

    There are none of a local model of clients that never trained it, as new clients do not unless they are given epochs.
    """
    if not baselines.trained(group, one.alone, reference.alone):
        return None
    mine, theirs = one.by_client(group), reference.by_client(group)
    seeds = sorted(set(mine) & set(theirs))
    if not seeds:
        return None
    common, *rows = np.intersect1d(one.ids(group), reference.ids(group), return_indices=True)
    if not common.size:
        return None
    scores = [np.array([kept[seed][where] for seed in seeds]) for kept, where in zip((mine, theirs), rows, strict=True)]
    by_seed, by_client = (report.difference(*(some.mean(axis) for some in scores)) for axis in (1, 0))
    gain = one.kind.gain(by_client, 0.0)
    known = not np.isnan(gain).any()
    better, worse = (100 * float(np.mean(hit)) if known else NAN for hit in (gain > 0, gain < 0))
    margin = metrics.confidence_margin(by_seed)
    mean = float(report.difference(*(some.mean() for some in scores)))
    rounding = rounding_of(*(some.mean(0) for some in scores))
    return Difference(mean, margin, len(seeds), better, worse, paired_t(by_seed), signed_rank(by_client, rounding))


def paired_t(differences: np.ndarray) -> float:
    """The two-sided p-value of Student's paired t-test for differences `[n]`; NaN for fewer than two, or a NaN."""
    from scipy import stats

    count = differences.size
    if count < 2 or not np.isfinite(differences).all():
        return NAN
    error = float(differences.std(ddof=1)) / np.sqrt(count)
    if error == 0:
        return 1.0 if differences[0] == 0 else 0.0
    return float(2 * stats.t.sf(abs(differences.mean()) / error, count - 1))


def signed_rank(differences: np.ndarray, rounding: float | np.ndarray = 0.0) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test for differences `[n]`, those that are 0 left out; 1 if all are 0.

    Infinite differences are the largest, and equally large. NaN for a NaN.

    It is exact up to `EXACT` differences, also where some are equally large, as accuracies on few samples often are.

    Args:
      differences: of pairs of scores.
      rounding: of each difference, by how much it may differ from another that is equally large, `[n]` or one for all.
    """
    from scipy import stats

    if np.isnan(differences).any():
        return NAN
    near = np.broadcast_to(rounding, differences.shape)[differences != 0]
    moved = differences[differences != 0]
    order = np.argsort(np.abs(moved))
    moved, near = moved[order], near[order]
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        larger = np.diff(np.abs(moved), prepend=-1.0) > np.minimum(near, np.roll(near, 1))
    # Twice the ranks are whole numbers: equal differences share the mean of their ranks.
    ranks = np.rint(2 * stats.rankdata(np.cumsum(larger))).astype(int)
    if moved.size > EXACT:
        return float(stats.wilcoxon(np.sign(moved) * ranks, method="asymptotic").pvalue)
    chance = np.ones(1)  # of each sum of the ranks of one sign, where every sign is a fair coin
    for rank in ranks:
        chance = (np.pad(chance, (0, rank)) + np.pad(chance, (rank, 0))) / 2
    smaller = min(ranks[moved > 0].sum(), ranks[moved < 0].sum())
    return float(min(1.0, 2 * chance[: smaller + 1].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests, adjusted for their number (Holm 1979); NaN stays, and does not count.

    Example:
      >>> [round(p, 3) for p in holm([0.01, 0.04, float("nan"), 0.03])]
      [0.03, 0.06, nan, 0.06]
    """
    order = [i for i in np.argsort(p_values) if np.isfinite(p_values[i])]
    adjusted, least = list(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def by_scenario(systems: Sequence[Finished], *, reference: str | None = None, target: Target | None = None) -> list[list[Row]]:
    """The numbers of systems, those of one task together; arguments as in `compared`.

    Raises:
      ValueError: no such reference, a target in a score that was not measured.
    """
    if reference is not None:
        checks.one_of("reference", reference, [one.title for one in systems])
    anybody = target is not None and any(_measured(one, target) for one in systems)
    groups = []
    for task in dict.fromkeys(one.task for one in systems):
        mine = [one for one in systems if one.task == task]
        here = reference if reference in [one.title for one in mine] else None
        goal = target if target is None or not anybody or any(_measured(one, target) for one in mine) else None
        groups.append(compared(mine, reference=here, target=goal))
    return groups


def compared(systems: Sequence[Finished], *, reference: str | None = None, target: Target | None = None) -> list[Row]:
    """The numbers of systems of one scenario.

    Args:
      systems: at least one, all of one task.
      reference: title of the one that the others are compared with; the first when not given.
      target: what the known clients' mean should reach. User accuracy may be recorded for some systems only.

    Raises:
      ValueError: no such reference, a target in a score that was not measured.
    """
    titles = [one.title for one in systems]
    if reference is not None:
        checks.one_of("reference", reference, titles)
    first = systems[0 if reference is None else titles.index(reference)]
    federated = [one for one in systems if not one.pooled]
    held = {method: next((one for one in federated if one.method == method), None) for method in results.REFERENCES}
    nobody = target is not None and not any(_measured(one, target) for one in systems)  # then the first one says so
    rows = []
    for one in systems:
        new = one.by_client(NEW) if baselines.trained(NEW, one.alone) else {}
        known = list(one.by_client(KNOWN).values())
        behind = {}
        for method, other in held.items():
            found = None if other is None or other is one else difference(one, other, KNOWN)
            if found is not None and np.isfinite(found.mean):
                behind[method] = found.worse
        rows.append(
            Row(
                one,
                first.title,
                np.array([scores.mean() for scores in known]),
                np.array([scores.mean() for scores in new.values()]),
                np.array([one.kind.worst_tenth(scores) for scores in known]),
                np.array([scores.var() for scores in known]),
                None if one is first else difference(one, first, KNOWN),
                None if one is first else difference(one, first, NEW),
                behind,
                reached(one, target) if target is not None and (nobody or _measured(one, target)) else None,
            )
        )
    return rows


def _measured(one: Finished, target: Target) -> bool:
    """Whether a target can be looked for; user accuracy is recorded of the systems that the study names."""
    return target.name != targets.USER_ACCURACY or any(row["train"].get(target.name) for row in one.trials[0].rows)


def reached(one: Finished, target: Target) -> Reached:
    """When the mean score of known clients was first at least as good as the target, seed by seed.

    User accuracy is known of every round; its seconds are those up to the next evaluation.

    Raises:
      ValueError: the score was not measured.
    """
    rounds, seconds = [], []
    for trial in one.trials:
        at, scores, kind = targets.curve(trial.rows, target.name or one.score)
        hits = np.flatnonzero(kind.reaches(scores, target.value))
        clock = np.cumsum([row["seconds"] for row in trial.rows])
        ends = np.array([row["round"] for row in trial.rows])
        rounds.append(float(at[hits[0]]) if hits.size else np.inf)
        seconds.append(float(clock[np.searchsorted(ends, at[hits[0]])]) if hits.size else np.inf)
    # Without the condition, a system that sends nothing would take infinity times 0.
    megabytes = [number * one.traffic / 1e6 if np.isfinite(number) else np.inf for number in rounds]
    return Reached(target, kind, np.array(rounds), np.array(megabytes), np.array(seconds))
