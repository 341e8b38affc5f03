"""A system on a scenario: the trials of its grid, then its final runs with every seed."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import costs, schedules, sweeps
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.attacks import stamped
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData, pooled
from fedjax_meta.evaluation import Evaluation, evaluate, with_user_accuracy
from fedjax_meta.federation import Federation
from fedjax_meta.study import folder as folders
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.baselines import alone, trained
from fedjax_meta.study.parts import own_names, part
from fedjax_meta.study.phase import Phase, RunContext, results_path
from fedjax_meta.study.result_files import note_points
from fedjax_meta.study.scenario import TESTED_ON, Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.system import System
from fedjax_meta.study.train import check_phase, trials
from fedjax_meta.study.tuning import KNOWN, NEW, VALIDATION, VALIDATION_CLIENTS, Point, Trial, points_of
from fedjax_meta.sweeps import MemberEvaluator

BACKDOOR = "backdoor"
"""The group of tests of known clients whose samples carry the pattern of the attack of this name."""


class Outcome(NamedTuple):
    """A system's results on a scenario.

    Attributes:
      scenario, system: names in the study.
      tuning: the trials of the grid; empty without a grid of several points.
      chosen: the point that the final runs had.
      at_edge: names of the numbers that were chosen at the end of their grid; once for each draw of the clients.
      final: a trial for each seed.
      draws: of several draws that are shown as one, the point of each, see `draws.pooled`.
      draw_tunings: the trials of each.
      code_changed: whether a user's own code that it needs has changed since the run was begun.
      traffic: of a client in a round, with the chosen point; `None` for central training.
    """

    scenario: str
    system: str
    tuning: list[Trial]
    chosen: dict[str, float]
    at_edge: list[str]
    final: list[Trial]
    draws: tuple[Point, ...] = ()
    draw_tunings: tuple[list[Trial], ...] = ()
    code_changed: bool = False
    traffic: costs.Traffic | None = None

    @property
    def numbers(self) -> str:
        """What was chosen, in words; of several draws the range."""
        points = self.draws or (self.chosen,)
        ends = {name: (min(p[name] for p in points), max(p[name] for p in points)) for name in self.chosen}
        return ", ".join(f"{name}={a:g}" + (f" to {b:g}" if b != a else "") for name, (a, b) in ends.items())

    @property
    def seconds(self) -> tuple[float, float]:
        """Wall-clock of training and testing, and of compilation, of all trials."""
        rows = [row for trial in (*self.tuning, *self.final) for row in trial.rows]
        return sum(row["seconds"] for row in rows), sum(row["compile_seconds"] for row in rows)


class Job:
    """A system on a scenario: its trials and its final runs.

    Attributes:
      where: names of the scenario and the system.
    """

    def __init__(self, study: Study, scenario: str, name: str, clients: Clients) -> None:
        self.where = scenario, name
        self._study, self._scenario_name, self._name, self._clients = study, scenario, name, clients
        self._system, self._scenario = study.system(name, scenario), study.scenarios[scenario]
        self._points = points_of(self._system)
        self._chosen = self._points[0]

    def check(self, folder: Path) -> None:
        """Raises `ValueError` if a folder holds results or states of this job that were made with other options."""
        for phase in (self.tuning(), self.final()) if len(self._points) > 1 else (self.final(),):
            check_phase(phase, folder)

    def run(self, later: Sequence["Job"], context: RunContext) -> Outcome:
        """Tunes and trains, or reads what was found before; what comes later is compiled meanwhile."""
        found: list[Trial] = []
        points, moved = list(self._points), 0
        if len(points) > 1:
            tuning, coming = self.tuning(), [self.sweeps()[-1], *(pair for job in later for pair in job.sweeps())]
            self._prepare(coming, context)
            found = trials(tuning, sweeps.members(points, self._study.tuning.seeds), context)
            self._chosen = choice.best(found, self._study.tuned_by).point
            while moved < self._study.tuning.extend:
                more = choice.next_points(points, self._chosen, self._system, self._clients)
                if not more:
                    break
                points, moved = [*points, *more], moved + 1
                found += trials(tuning, sweeps.members(more, self._study.tuning.seeds), context)
                self._chosen = choice.best(found, self._study.tuned_by).point
            note_points(results_path(tuning, context.folder), points)
        self._prepare([pair for job in later for pair in job.sweeps()], context)
        final = self.final()
        ended = trials(final, sweeps.members([self._chosen], self._study.seeds), context)
        edges = choice.at_edge(points, self._chosen)
        needed = (self._system.method, self._scenario.model, *self._study.metrics, *own_names(self._system.federation))
        changed = folders.changed_code(context.folder, needed)
        traffic = None if final.traffic is None else final.traffic()
        return Outcome(*self.where, found, self._chosen, edges, ended, code_changed=changed, traffic=traffic)

    @staticmethod
    def _prepare(coming: list[tuple[Phase, list[sweeps.Member]]], context: RunContext) -> None:
        missing = [pair for pair in coming if not results_path(pair[0], context.folder).is_file()]
        for phase, members in missing[: context.ahead.depth]:
            context.ahead.start(phase, members)

    def sweeps(self) -> list[tuple[Phase, list[sweeps.Member]]]:
        """The phases with their members; before the tuning, the final members have the first point's numbers."""
        final = (self.final(), sweeps.members([self._chosen], self._study.seeds))
        if len(self._points) == 1:
            return [final]
        return [(self.tuning(), sweeps.members(self._points, self._study.tuning.seeds)), final]

    def _config(self, data: FederatedData) -> dict[str, Any]:
        model = [self._scenario.model, dict(self._scenario.model_options)]
        config = {"system": folders.options_of(self._system), "data": self._clients.fingerprint, "model": model}
        # Defaults are left out: an option that comes later leaves the config of all runs without it as it is.
        scored = scored_clients(self._study, self._scenario_name, self._clients, data)
        if scored is not None:
            # They depend on the other systems of the scenario.
            config["scored"] = hashlib.blake2b(scored.tobytes(), digest_size=8).hexdigest()
        if self._study.metrics:
            config["metrics"] = list(self._study.metrics)
        if self._study.store != "device":
            # Cohorts that devices share are summed in another order.
            config["store"] = "host or disk"
        if self._study.on_divergence != "continue":
            config["on_divergence"] = self._study.on_divergence
        return config

    def tuning(self) -> Phase:
        """The trials of the grid."""
        tuning = self._study.tuning
        data, held = choice.data_for(tuning, self._scenario, self._clients)
        tests = {VALIDATION: self._test(data)}
        config = self._config(data)
        if held is not None:
            noisy = choice.noisy_in(tuning, self._scenario, self._clients)[1]
            quiet = np.setdiff1d(np.arange(held.num_clients), noisy).astype(np.int32)
            if not quiet.size:
                raise ValueError(f"scenario {self._scenario_name}: all clients that validation holds out are noisy")
            tests[VALIDATION_CLIENTS] = _test_of_new(held, self._study.metrics, quiet if noisy.size else None)
            config["held out"] = tuning.clients
        if tuning.halving is not None:
            config["halving"] = tuning.halving
            if self._study.tuned_by.metric not in (None, "accuracy_mean"):
                config["halved by"] = self._study.tuned_by.metric  # decides which points end early
        rounds = tuning.rounds or self._study.rounds
        if choice.rungs(len(self._points), rounds, tuning.halving):
            # Points that were cut, by all of their seeds, cannot be compared with others later.
            grid = {name: list(values) for name, values in self._system.grid.items()}
            config["compared by halving"] = {"grid": grid, "seeds": list(tuning.seeds)}
        return self._phase("tuning", rounds, data, tests, config)._replace(tuning=self._study.tuned_by)

    def final(self) -> Phase:
        """The runs with every seed of the study."""
        clients, metrics = self._clients, self._study.metrics
        view = TESTED_ON[self._scenario.adapt_on]
        scored = scored_clients(self._study, self._scenario_name, clients, clients.train)
        sizes = np.asarray(clients.train.sizes(view))
        tests, samples = {KNOWN: self._test(clients.train)}, {KNOWN: sizes if scored is None else sizes[scored]}
        if clients.new is not None:
            tests[NEW] = _test_of_new(clients.new, metrics)
            if trained(NEW, alone(self._study, self._name)):
                samples[NEW] = np.asarray(clients.new.sizes("query"))
        only = {} if scored is None else {KNOWN: scored}
        known, new = clients.names
        names = {KNOWN: known if scored is None else [known[i] for i in scored], NEW: new} if known else {}
        attack = part("attack", self._system.federation.get("attack"))
        if attack is not None and attack.name == BACKDOOR:
            only |= {BACKDOOR: only[KNOWN]} if only else {}
            marked = stamped(clients.train, view, size=attack.config["size"], value=attack.config["value"])
            tests[BACKDOOR], samples[BACKDOOR] = self._test(marked), samples[KNOWN]
            names |= {BACKDOOR: names[KNOWN]} if names else {}
        watched, config = self._study.user_accuracy_of(self._name), self._config(clients.train)
        if watched is not None:
            # Its numbers are in the rows of the final runs, which therefore depend on it.
            config["user_accuracy"] = watched
        if self._study.goal is not None:
            config["stop_at"] = str(self._study.stop_at)
        phase = self._phase("final", self._study.rounds, clients.train, tests, config)
        traffic = None if self._system.pooled else functools.cache(partial(self._traffic, self._chosen))
        return phase._replace(samples=samples, scored=only, names=names, goal=self._study.goal, traffic=traffic)

    def _traffic(self, numbers: Mapping[str, float]) -> costs.Traffic:
        """Bytes of a client in a round; a method is traced for them."""
        return costs.traffic(self._system.build(self._clients, **numbers), self._clients.train)

    def _test(self, data: Any) -> MemberEvaluator:
        """Of the clients that train; those whose samples were pooled are strangers to the model."""
        support, query = self._scenario.adapt_on, TESTED_ON[self._scenario.adapt_on]
        known, metrics = not self._system.pooled, self._study.metrics or None
        ids = scored_clients(self._study, self._scenario_name, self._clients, data)
        measure = partial(_evaluate, support=support, query=query, known=known, ids=ids, metrics=metrics)
        return MemberEvaluator(measure, data)

    def _phase(
        self, name: str, rounds: int, data: Any, tests: Mapping[str, MemberEvaluator], config: Mapping[str, Any]
    ) -> Phase:
        build: sweeps.Build = partial(self._system.parts, self._clients)
        every = (self._study.tuning.eval_every if name == "tuning" else None) or self._study.eval_every
        if self._system.pooled:
            share = passes(self._system, self._clients, data)
            rounds, every = max(round(rounds * share), 1), max(round(every * share), 1)
            build, data = partial(_central, partial(self._system.parts, self._clients)), pooled(data)
        view = self._study.user_accuracy_of(self._name) if name == "final" else None
        if view is not None or self._system.tested_with:
            build = _Built(self._system, self._clients, view)
        return Phase(
            scenario=self._scenario_name,
            system=self._name,
            name=name,
            build=build,
            rounds=rounds,
            eval_every=every,
            data=data,
            tests=tests,
            config=config,
            shaping=choice.shaping(self._system),
            pooled=self._system.pooled,
            devices=self._study.devices,
            store=self._study.store,
            on_divergence=self._study.on_divergence,
            place=self._scenario,
        )


def final_phase(study: Study, scenario: str, name: str, clients: Clients) -> Phase:
    """The final runs of a system, as `run` trains them."""
    return Job(study, scenario, name, clients).final()


def scored_clients(study: Study, scenario: str, clients: Clients, data: FederatedData) -> np.ndarray | None:
    """The clients that are scored: those that attack in no system of the scenario, and whose inputs are not noisy.

    Args:
      study, scenario, clients: what is run.
      data: the clients that train: `clients.train`, or those of them that were not held out for trials.

    Returns:
      Ids; `None` for all clients.

    Raises:
      ValueError: nobody is left.
    """
    out = np.zeros(data.num_clients, bool)
    for name in study.systems_on(scenario):
        attack = part("attack", study.system(name, scenario).federation.get("attack"))
        if attack is not None:
            out |= attack.members(data.num_clients)
    everyone = data.num_clients == clients.train.num_clients
    out[clients.noisy if everyone else choice.noisy_in(study.tuning, study.scenarios[scenario], clients)[0]] = True
    if out.all():
        raise ValueError(f"scenario {scenario}: all {data.num_clients} clients attack or are noisy: none is left to score")
    return np.flatnonzero(~out).astype(np.int32) if out.any() else None


@dataclasses.dataclass(frozen=True)
class _Built:
    """Builds the algorithm of a system whose rounds are watched, or whose tests have options of their own.

    Attributes:
      system, clients: what is built.
      view: that clients adapt on before user accuracy is measured; `None` to measure none.
    """

    system: System
    clients: Clients
    view: str | None

    def __call__(self, **numbers: Any) -> Algorithm:
        algorithm = sweeps.alone(*self.system.parts(self.clients, **numbers))
        if self.view is not None:
            noisy = tuple(self.clients.noisy.tolist())
            algorithm = with_user_accuracy(algorithm, support=self.view, excluded=noisy, devices=1)
        if self.system.tested_with:
            tests = sweeps.alone(*self.system.tested_parts(self.clients, **numbers))
            algorithm = dataclasses.replace(algorithm, personalize=tests.personalize)
        return algorithm


def passes(system: System, clients: Clients, data: FederatedData) -> float:
    """The share of the clients that a round asks: how many rounds of central training stand for one."""
    _, federation = dataclasses.replace(system, pooled=False).parts(clients, **points_of(system)[0])
    sampled = federation.schedule
    return sampled.rate if isinstance(sampled, schedules.Poisson) else min(federation.cohort_size / data.num_clients, 1.0)


def _central(parts: Callable[..., tuple[Method, Federation]], **numbers: Any) -> tuple[Method, Federation]:
    """The method with the one client that holds all samples."""
    method, federation = parts(**numbers)
    return method, dataclasses.replace(federation, cohort_size=1)


def _test_of_new(data: Any, metrics: Sequence[str], ids: np.ndarray | None = None) -> MemberEvaluator:
    options: dict[str, Any] = {"support": "support", "query": "query", "known": False, "ids": ids, "metrics": metrics or None}
    return MemberEvaluator(partial(_evaluate, **options), data)


def _evaluate(algorithm: Any, key: Any, state: State, data: Any, **options: Any) -> Evaluation:
    return evaluate(algorithm, key, state, data, devices=1, **options)
