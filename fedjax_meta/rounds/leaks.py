"""Refuses methods with private gradients that send un-noised client data, before the first round."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import masks
from fedjax_meta.algorithm import State
from fedjax_meta.contract import Cohort, Received
from fedjax_meta.data import FederatedData
from fedjax_meta.privacy.leaks import marks_of
from fedjax_meta.rounds.client import train_first_client, upload_of, weight_of
from fedjax_meta.rounds.setting import Setting
from fedjax_meta.rounds.trees import parts, without_rows
from fedjax_meta.types import Key, PyTree


def refuse_leaks(setting: Setting, state: State, data: FederatedData) -> None:
    """Raises `ValueError` if anything that leaves a client depends on its samples, but for private gradients of the task.

    That is: its upload with statistics and weights, what the server sees of it by itself, what the server begins with
    (`init_extra`), what `collaborate` and a rule for new clients read of its rows. Metrics and faults are not looked at. Nothing
    is computed.
    """
    method = setting.method
    kept = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (state.personal, state.memory))
    marked = _everywhere(False, kept)
    while True:
        sent, after = _client_marks(setting, state, data, kept, marked)
        if method.collaborate is not None:
            after = _or(after, _mix_marks(setting, state, data, after, sent["stacked"]))
        after = _or(after, marked)
        if after == marked:
            break
        marked = after
    started = (_everywhere(False, state.model), _samples(data))
    sent["init_extra"] = marks_of(method.init_extra, started, state.model, data)
    rows = dict(zip(("personal", "memory"), marked, strict=True))
    if method.collaborate is not None:
        sent["collaborate"] = dict(
            zip(method.collaborate.reads.split("+"), parts(rows, method.collaborate.reads), strict=False)
        )
    if method.new_client is not None and setting.federation.new_client is None:
        sent["new_client"] = dict(zip(method.new_client_reads.split("+"), parts(rows, method.new_client_reads), strict=False))
    leaks = [jax.tree_util.keystr(path) for path, mark in jax.tree_util.tree_leaves_with_path(sent) if mark]
    if leaks:
        more = f" and {len(leaks) - 1} more" if len(leaks) > 1 else ""
        raise ValueError(
            f"{method.name} lets out what depends on samples without noise ({leaks[0]}{more}): a private task covers "
            "gradients of its loss alone"
        )


def _client_marks(
    setting: Setting, state: State, data: FederatedData, kept: PyTree, marked: PyTree
) -> tuple[dict[str, Any], PyTree]:
    """(marks of what a client sends, marks of what it keeps) from marks of what it kept before."""
    method = setting.method

    def client(key: Key, state: State, data: FederatedData, kept: PyTree, seen: jax.Array) -> tuple[PyTree, PyTree]:
        personal, memory = kept
        model = masks.merge(personal, masks.split(state.model, setting.personal)[1])
        received = Received(model, memory, state.extra, state.round, seen, key)
        one = data.client(0)
        trained = method.client(key, received, one)
        sent = {
            "upload": upload_of(setting, state.model, state.extra, trained),
            "weight": weight_of(setting, trained, one),
            "statistics_weight": () if trained.statistics_weight is None else trained.statistics_weight,
            "stacked": trained.stacked,
        }
        return sent, (masks.split(trained.model, setting.personal)[0], trained.memory)

    arguments = (jax.random.key(0), without_rows(state), data, kept, jnp.zeros((), bool))
    marks = (False, _everywhere(False, arguments[1]), _samples(data), marked, False)
    return marks_of(client, marks, *arguments)


def _mix_marks(setting: Setting, state: State, data: FederatedData, kept: PyTree, stacked: PyTree) -> PyTree:
    """Marks of what clients get of each other, from marks of what they keep and send."""
    method, count = setting.method, setting.federation.cohort_size
    assert method.collaborate is not None
    mix = method.collaborate.mix
    like = jax.eval_shape(partial(train_first_client, setting, data=data), jax.random.key(0), state.model).stacked
    grown = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), like)
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), (state.personal, state.memory)
    )
    ids = jnp.arange(count, dtype=jnp.int32)
    cohort = Cohort(ids, ids, jnp.ones(count, bool), rows[0], rows[1], grown)
    cohort_marks = cohort._replace(**_everywhere(False, {"ids": 0, "positions": 0, "returned": 0}))
    cohort_marks = cohort_marks._replace(personal=kept[0], memory=kept[1], stacked=stacked)
    visible, marks = without_rows(state), _everywhere(False, without_rows(state))
    if method.whole_population:
        residual, seen = _everywhere(False, state.residual), False
        visible, marks = state, marks._replace(personal=kept[0], memory=kept[1], residual=residual, seen=seen, ids=False)

    def mixed(key: Key, visible: State, cohort: Cohort, data: FederatedData) -> PyTree:
        return mix(key, visible, cohort._replace(lanes=setting.federation.lanes), data)[:2]

    return marks_of(mixed, (False, marks, cohort_marks, _samples(data)), jax.random.key(0), visible, cohort, data)


def _samples(data: FederatedData) -> FederatedData:
    """Marks of inputs and labels."""
    leaves, structure = jax.tree.flatten(data)
    given = {id(leaf) for leaf in (*jax.tree.leaves(data.x), *jax.tree.leaves(data.y))}
    marks: Any = jax.tree.unflatten(structure, [id(leaf) in given for leaf in leaves])
    return marks


def _everywhere(mark: bool, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda _: mark, tree)


def _or(one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a or b, one, other)
