"""What an asynchronous schedule changes in a round: the model that a client was given, its weight, and the past models.

Without such a schedule, none of these functions adds anything to a compiled round.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import masks
from fedjax_meta.algorithm import State
from fedjax_meta.rounds.setting import Context, Setting
from fedjax_meta.types import PyTree


def begin(setting: Setting, model: PyTree) -> PyTree:
    """Past models before the first round, leaves `[most_stale + 1, ...]`: that of version v is at `v % (most_stale + 1)`."""
    schedule = setting.asynchronous
    if schedule is None:
        return ()
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * (schedule.most_stale + 1)), model)


def given(setting: Setting, context: Context, id_: jax.Array) -> tuple[State, Any]:
    """(the state with the model that a client was given, its staleness weight); in synchronous rounds the state and `None`."""
    schedule, state = setting.asynchronous, context.state
    if schedule is None:
        return state, None
    lag = schedule.lag(state.round, jnp.argmax(context.ids == id_))
    place = (state.round - lag) % (schedule.most_stale + 1)
    model = jax.tree.map(lambda leaf: leaf[place], state.aggregation.past)
    return state._replace(model=model), schedule.weight(lag)


def scaled(setting: Setting, upload: PyTree, weight: Any) -> PyTree:
    """The upload, with its change of shared leaves times the staleness weight."""
    if weight is None:
        return upload
    part, statistics = upload
    moving, held = masks.split(part, setting.shared)
    moving = jax.tree.map(lambda leaf: weight.astype(leaf.dtype) * leaf, moving)
    return masks.merge(moving, held), statistics


def pushed(setting: Setting, state: State, model: PyTree) -> PyTree:
    """The past models after a round, with the new one."""
    schedule, past = setting.asynchronous, state.aggregation.past
    if schedule is None:
        return past
    place = (state.round + 1) % (schedule.most_stale + 1)
    return jax.tree.map(lambda all_, leaf: all_.at[place].set(leaf), past, model)
