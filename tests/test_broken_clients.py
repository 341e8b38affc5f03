"""Clients whose results hold NaN or infinity: the server leaves them out, they keep what they had, and nobody else notices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.algorithm import ROWS
from tests import problems
from tests.test_contract import KEY, build, run

N = len(problems.SIZES)
TRAINS_BY_COIN = {"l2gd"}
"""Methods in whose round a client may not train at all, so that it cannot break."""


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in fm.METHODS])
def name(request) -> str:
    return request.param


def broken(ids, value=np.nan) -> fm.FederatedData:
    """The data with inputs of some clients that are not finite."""
    data = problems.data()
    x = np.array(data.x)
    for i in ids:
        first = min(int(start[i]) for start in data.start.values())
        x[first : first + problems.SIZES[i]] = value
    return dataclasses.replace(data, x=jnp.asarray(x))


def without(ids) -> fm.FederatedData:
    """The data with no samples of some clients, who then cannot take part."""
    data = problems.data()
    size = {view: jnp.asarray(sizes).at[np.asarray(ids)].set(0) for view, sizes in data.size.items()}
    return dataclasses.replace(data, size=size)


def rows_of(state: fm.State, ids) -> list:
    return [jax.tree.map(lambda leaf: leaf[np.asarray(ids)], getattr(state, field)) for field in ROWS]


def finite(tree) -> bool:
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def test_one_broken_client_changes_for_the_others_no_more_than_its_absence(name):
    _, step, start = build(name)
    before = run(step, start, 1)
    _, info = step(jax.random.fold_in(KEY, before.round), before, problems.data())
    sick = [int(info.ids[0])]
    after, absent = (run(step, before, 3, data) for data in (broken(sick), without(sick)))
    others = np.setdiff1d(np.arange(N), sick)
    assert problems.distance(rows_of(after, others), rows_of(absent, others)) < 1e-9
    shared = lambda state: (state.model, state.extra, state.optimizer)  # noqa: E731
    assert problems.distance(shared(after), shared(absent)) < 1e-9
    assert finite(after)


def test_a_broken_client_is_named_and_keeps_what_it_had(name):
    algorithm, step, start = build(name)
    before = run(step, start, 2)
    cohort = np.asarray(algorithm.cohort(jax.random.fold_in(KEY, before.round), before.round, N))
    sick = cohort[1:3]
    after, info = step(jax.random.fold_in(KEY, before.round), before, broken(sick, np.inf))
    assert problems.leaves_equal(rows_of(after, sick), rows_of(before, sick))
    assert not info.faults.diverged and int(info.faults.server) == -1
    if name in TRAINS_BY_COIN:
        return
    assert set(cohort[np.asarray(info.faults.clients) >= 0]) == set(sick)
    assert not np.any(np.asarray(info.returned)[np.isin(cohort, sick)])
    names, _ = algorithm.checked(problems.data())
    assert all(0 <= leaf < len(names) for leaf in np.asarray(info.faults.clients)[np.isin(cohort, sick)])


def test_many_broken_clients_leave_everybody_finite_and_the_run_counts_as_diverged(name):
    _, step, start = build(name)
    state, info = step(KEY, start, broken(range(4)))
    assert finite(state)
    count = int(np.sum(np.asarray(info.ids) < 4))
    whole, everyone = step(KEY, start, broken(range(N)))
    assert finite(whole)
    if name in TRAINS_BY_COIN:
        return
    assert bool(info.faults.diverged) == (count > 2)
    assert bool(everyone.faults.diverged) and not np.any(np.asarray(everyone.returned))
    assert problems.leaves_equal(whole._replace(round=start.round), start)
