"""Refuses a study before anything is trained: scores that are not measured, systems and points that a scenario refuses."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import host_store as stores
from fedjax_meta import imports, measures, report
from fedjax_meta.aggregate import as_rule
from fedjax_meta.algorithm import State
from fedjax_meta.asynchronous import Asynchronous
from fedjax_meta.checks import mismatch
from fedjax_meta.data import FederatedData
from fedjax_meta.data.views import check_view
from fedjax_meta.engine import client_mesh
from fedjax_meta.evaluation import with_user_accuracy
from fedjax_meta.federation import Federation, check_values
from fedjax_meta.report.frames import USER_ACCURACY
from fedjax_meta.rounds import federate
from fedjax_meta.rounds.server import check_combined
from fedjax_meta.study import baselines, guarantees, lookup
from fedjax_meta.study import tuning as choice
from fedjax_meta.study.files import DRAW
from fedjax_meta.study.job import scored_clients
from fedjax_meta.study.parts import own_names, part
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.study import Study
from fedjax_meta.study.system import System
from fedjax_meta.study.tuning import NEW, points_of


def check(study: Study, built: Mapping[str, Clients]) -> None:
    """Raises `ValueError` where a scenario refuses a score, a system or a point of its grid; trains and writes nothing."""
    _check_draws(study, built)
    for scenario, clients in built.items():
        _check_metrics(study, scenario, clients)
        for name in study.systems_on(scenario):
            with named(study, scenario, name):
                part("attack", study.system(name, scenario).federation.get("attack"))
        for name in study.systems_on(scenario):
            with named(study, scenario, name):
                _check_system(study, scenario, name, clients)


def _check_draws(study: Study, built: Mapping[str, Clients]) -> None:
    """Raises where draws of a scenario, which a report shows as one, score different numbers of clients."""
    sizes: dict[str, dict[tuple[int, int], str]] = {}
    for name, clients in built.items() if study.data_seeds else ():
        ids = scored_clients(study, name, clients, clients.train)
        known = clients.train.num_clients if ids is None else len(ids)
        new = 0 if clients.new is None else clients.new.num_clients
        sizes.setdefault(name.partition(DRAW)[0], {})[known, new] = name
    for of_draws in sizes.values():
        if len(of_draws) > 1:
            ((one, first), (other, second), *_) = of_draws.items()
            raise ValueError(
                f"{first} scores {one[0]} known and {one[1]} new clients, but {second} {other[0]} and {other[1]}: draws that are "
                "shown as one need equally many; leave data_seeds out, or take other ones"
            )


@contextlib.contextmanager
def named(study: Study, scenario: str, name: str) -> Iterator[None]:
    """Errors begin with the scenario and the system, where a study has several or an error is of a user's own code."""
    try:
        yield
    except Exception as error:
        own = imports.place_of(error) is not None
        if not (own or isinstance(error, ValueError)):
            raise
        said = imports.said(error)
        many = len(study.systems) > 1 or len(study.scenarios) > 1
        raise ValueError(f"{scenario}, {name}: {said}" if many or own else said) from error


def _check_metrics(study: Study, scenario: str, clients: Clients) -> None:
    """Raises where a scenario's task has no such scores, or where it has no new clients of which a number is published."""
    try:
        test = baselines.scored(clients, study.metrics, baselines.untrained(clients))
    except ValueError as error:
        if not study.metrics:
            raise
        form = "class labels" if clients.train.labelled else "other targets than one class label a sample"
        raise ValueError(f"scenario {scenario}: metrics={list(study.metrics)}, but the data have {form}: {error}") from None
    found = report.score_names(test)
    published = [row for row in study.published if row.scenario == scenario.partition(DRAW)[0]]
    said = [row.score.removeprefix("raw_").removesuffix("_std") for row in published]
    goal = study.goal
    wanted = None if goal is None or goal.name == USER_ACCURACY else goal.name  # checked when a study is read
    for name in (study.score, study.tuned_by.metric, wanted, *said):
        base = None if name is None else name.removesuffix("_mean")
        if base is not None and base not in found:
            raise ValueError(f"scenario {scenario}: the score {base!r} is not measured; there are {', '.join(found)}")
    for where, asked in (("tuning.metric", [study.tuned_by.metric]), ("published", [row.score for row in published])):
        if "accuracy" in asked and "accuracy" not in test:
            raise ValueError(
                f"scenario {scenario}: {where} asks for accuracy, which is over all samples and needs confusion matrices: add "
                "confusion to metrics, or take accuracy_mean, which is over clients"
            )
    if goal is not None and _is_high_share(study, goal.name or found[0]):
        if 0 < goal.value < 1:
            raise ValueError(f"stop_at={study.stop_at!r} is below 1 %: shares are in percent, so write {100 * goal.value:g}")
        if goal.value > 100:
            raise ValueError(f"stop_at={study.stop_at!r} is never reached: shares are in percent, at most 100")
    if clients.new is None and any(row.clients == NEW for row in published):
        raise ValueError(f"scenario {scenario}: a published number is of new clients, but there are none")


def _is_high_share(study: Study, score: str) -> bool:
    """Whether a score that is measured is a share, which reports show in percent, and a higher one is better."""
    names = [score] if score in measures.METRICS else study.metrics
    of_name = [metric for metric in measures.resolve(names, classes=2) if metric.name == score]
    return score in ("accuracy", "f1", USER_ACCURACY) or any(metric.share and metric.higher_is_better for metric in of_name)


def _check_system(study: Study, scenario: str, name: str, clients: Clients) -> None:
    system, view = study.system(name, scenario), study.user_accuracy_of(name)
    client_mesh(study.devices)
    points = points_of(system)
    training = [clients.train]
    if len(points) > 1:
        training.append(choice.data_for(study.tuning, study.scenarios[scenario], clients)[0])
    check_values(clients.task, clients.train)
    scored = [scored_clients(study, scenario, clients, data) for data in training]
    if study.store != "device" and system.tested_with:
        raise ValueError(f"store={study.store!r} cannot go with tested_with: keep the clients on the device (store: device)")
    if study.store != "device" and any(ids is not None for ids in scored):
        raise ValueError(
            f"store={study.store!r} tests all clients, but those that attack or are noisy are not scored: keep the clients on "
            "the device (store: device)"
        )
    own = any(map(lookup.is_own, (system.method, *own_names(system.federation))))
    traced: set[tuple[Any, ...]] = set()
    for point in points:
        method, federation = system.parts(clients, **point)
        algorithm = federate(method, federation)
        if study.store != "device":
            stores.check_algorithm(algorithm)
        guarantees.words(study, algorithm, clients.train.num_clients)
        shape = tuple(point[name] for name in choice.shaping(system))
        if shape in traced:
            continue
        # Points of one shape are one program. Cohorts are traced, since each that is drawn would be compiled.
        traced.add(shape)
        _check_cohort(study, federation.cohort_size, training)
        for data in training:
            jax.eval_shape(lambda key, a=algorithm, n=data.num_clients: a.cohort(key, 0, n), jax.random.key(0))
        state = jax.eval_shape(algorithm.init, jax.random.key(0), clients.train)
        _check_tested(system, point, state, clients)
        _check_defence(federation, state.model, clients.train)
        if own or isinstance(federation.schedule, Asynchronous):
            # Only the trace of a round tells what is wrong in own code, what clients send, and whether there is a user accuracy.
            watched = algorithm if view is None else with_user_accuracy(algorithm, support=view)
            jax.eval_shape(watched.round, jax.random.key(0), state, clients.train)
    if system.pooled and jax.tree.leaves((state.personal, state.memory)):
        raise ValueError("pooled needs a method whose clients keep nothing, e.g. fedavg")
    if system.pooled and view is not None:
        raise ValueError(
            "central training knows no clients, so that there is no user accuracy: name the systems of which it is recorded, "
            "e.g. user_accuracy: {fedavg: train}"
        )
    if view is not None:
        check_view(view, clients.train.views)
        if not clients.train.labelled:
            raise ValueError("user accuracy is of class labels, one a sample, which the data do not have")
        if len(clients.noisy) == clients.train.num_clients:
            raise ValueError(f"scenario {scenario}: all clients are noisy, so that there is no user accuracy")


def _check_cohort(study: Study, size: int, training: Sequence[FederatedData]) -> None:
    """Raises where a cohort has more clients than train, in the final runs or in the trials, which may hold some out."""
    known, least = training[0].num_clients, training[-1].num_clients
    if size > least:
        held = f"; {known} known clients, {least} of them in trials (tuning.clients={study.tuning.clients})"
        raise ValueError(
            f"cohort_size={size} is more than the N={least} clients there are{held if least < known else ''}: "
            f"federation.cohort_size is at most {least}; on the command line, --set federation.cohort_size={least}"
        )


def _check_tested(system: System, point: Mapping[str, float], state: State, clients: Clients) -> None:
    """Raises where the options of tests make another model, so that what was trained could not be tested."""
    if system.tested_with:
        tested = federate(*system.tested_parts(clients, **point))
        odd = mismatch(state, jax.eval_shape(tested.init, jax.random.key(0), clients.train))
        if odd is not None:
            raise ValueError(f"tested_with={dict(system.tested_with)} makes another model than is trained: {odd}")


def _check_defence(federation: Federation, model: Any, data: FederatedData) -> None:
    """Raises what a rule says only in a round, of too many attackers, and an attack, of samples that it cannot change."""
    if federation.aggregator is not None:
        rule, cohort = as_rule(federation.aggregator), federation.cohort_size
        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((cohort, *leaf.shape), leaf.dtype), model)
        given = (jax.random.key(0), stacked, jax.ShapeDtypeStruct((cohort,), np.float32), jax.eval_shape(rule.init, model))
        combined, _ = jax.eval_shape(rule.combine, *given, None if rule.root is None else model)
        check_combined(rule.name, combined, stacked)
    attack = federation.attack
    if attack is not None and attack.poison is not None:
        poisoned = attack.poisoned(data.client(0), jnp.zeros((), jnp.int32), jnp.array(True), data.num_classes)
        jax.eval_shape(next(iter(poisoned.views.values())).take, jnp.zeros(1, jnp.int32), jnp.ones(1))
