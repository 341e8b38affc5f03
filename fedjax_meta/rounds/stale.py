"""What an asynchronous schedule changes in a round: the model that a client was given, its weight, and the past models.

Without such a schedule, none of these functions adds anything to a compiled round.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import masks
from fedjax_meta.algorithm import State
from fedjax_meta.masks import Role
from fedjax_meta.rounds.setting import Context, Setting
from fedjax_meta.types import Mask, PyTree


def begin(setting: Setting, model: PyTree) -> PyTree:
    """Past models before the first round, leaves `[most_stale + 1, ...]`: that of version v is at `v % (most_stale + 1)`.

    Frozen leaves, and what the server has of personal ones, are the same in all versions and are not kept.
    """
    schedule = setting.asynchronous
    if schedule is None:
        return ()
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * (schedule.most_stale + 1)), _moving(setting, model)[0])


def _moving(setting: Setting, model: PyTree) -> tuple[PyTree, PyTree]:
    """(the leaves that the server changes, the others)."""
    return masks.split(model, masks.having(setting.method.roles, Role.SHARED, Role.BUFFER))


def given(setting: Setting, context: Context, id_: jax.Array) -> tuple[State, Any]:
    """(the state with the model and the round that a client was given, its staleness weight); in synchronous rounds the state and
    `None`."""
    schedule, state = setting.asynchronous, context.state
    if schedule is None:
        return state, None
    lag = schedule.lag(state.round, jnp.argmax(context.ids == id_))
    begun = state.round - lag
    then = jax.tree.map(lambda leaf: leaf[begun % (schedule.most_stale + 1)], state.aggregation.past)
    model = masks.merge(then, _moving(setting, state.model)[1])
    return state._replace(model=model, round=begun), schedule.weight(lag)


def scaled(setting: Setting, model: PyTree, begun: PyTree, upload: PyTree, weight: Any) -> PyTree:
    """What arrives of a client as the server takes it: the change of shared leaves times the staleness weight.

    A client sends changes from the model that it was given, `begun`. Where models are mixed, the server needs those from its own,
    `model`, and so it does for differences of buffers. Buffers that are sent as values are averaged as they come.

    Where models are mixed, the client's buffers are mixed with those of `model`. Their weight is s(tau) times the server's rate
    if it takes plain steps. The rate of another optimiser is no share of a mixture, so the weight is s(tau) then.
    """
    if weight is None:
        return upload

    def from_now(changes: PyTree, of: Mask) -> PyTree:
        now, then = (masks.split(tree, of)[0] for tree in (model, begun))
        return jax.tree.map(lambda change, new, old: change + (new - old).astype(change.dtype), changes, now, then)

    part, statistics = upload
    moving, held = masks.split(part, setting.shared)
    if setting.mixes_models:
        moving = from_now(moving, setting.shared)
    if setting.sends_differences:
        held = from_now(held, setting.buffers)
    moving = jax.tree.map(lambda leaf: weight.astype(leaf.dtype) * leaf, moving)
    if setting.mixes_models:
        share = weight * setting.plain_server_lr
        old = masks.split(model, setting.buffers)[0]
        if setting.sends_differences:
            old = jax.tree.map(jnp.zeros_like, old)
        held = jax.tree.map(lambda b, b_i: _mixed(b, b_i, share), old, held)
    return masks.merge(moving, held), statistics


def _mixed(old: jax.Array, new: jax.Array, share: Any) -> jax.Array:
    """`(1 - share) old + share new`; numbers that are no floats, such as counts, are the new ones."""
    if not jnp.issubdtype(new.dtype, jnp.floating):
        return new
    return old.astype(new.dtype) + share.astype(new.dtype) * (new - old.astype(new.dtype))


def pushed(setting: Setting, state: State, model: PyTree) -> PyTree:
    """The past models after a round, with the new one."""
    schedule, past = setting.asynchronous, state.aggregation.past
    if schedule is None:
        return past
    place = (state.round + 1) % (schedule.most_stale + 1)
    return jax.tree.map(lambda all_, leaf: all_.at[place].set(leaf), past, _moving(setting, model)[0])
