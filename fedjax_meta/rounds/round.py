"""One round, from the cohort to what the round reports. Read this file first, then `client` and `server`."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.algorithm import Faults, RoundInfo, State, state_rows, with_metrics
from fedjax_meta.data import FederatedData
from fedjax_meta.engine import matmul_precision, run_cohort
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import attacked, server
from fedjax_meta.rounds.client import client_round
from fedjax_meta.rounds.setting import CohortClient, Context, Kept, Outputs, Setting, rows_of
from fedjax_meta.rounds.trees import first_broken, without_rows
from fedjax_meta.rows import put
from fedjax_meta.schedules import Poisson
from fedjax_meta.types import Key, PyTree


def one_round(setting: Setting, key: Key, state: State, data: FederatedData) -> tuple[State, RoundInfo]:
    """A round, as `Algorithm.round`.

    - `_draw`: the cohort.
    - `_train`: its clients train (`client.client_round`), and what they send is added up.
    - `server.next_state`: the server moves along the mean of that.
    - `_mix`: clients receive something from each other, if the method wants it (`server.collaborate`).
    - `_info`: what the round reports.
    - `server.inherited`: models take over others, if the method has such (a new cluster that of its parent).
    """
    f = setting.federation
    if len(state.residual) != len(f.uploads):
        raise ValueError(
            f"the state is of a federation with {len(state.residual)} upload transformations, not {len(f.uploads)}"
        )
    cohort = _draw(setting, key, state, data)
    state = jax.tree.map(jnp.asarray, state)
    summed, kept, outputs = _train(setting, key, state, data, cohort)
    with matmul_precision(f.precision):
        moved = server.next_state(setting, key, state, summed, outputs, cohort.ids, data)
        kept, diagnostics = _mix(setting, key, moved, data, cohort, kept, outputs)
    info = _info(setting, key, state, moved, data, cohort, outputs, diagnostics)
    seen = put(state.seen, cohort.target, cohort.drawn.seen | outputs.took_part)
    after = moved._replace(**kept._asdict(), seen=seen, round=state.round + 1)
    return server.inherited(setting, state, after), info


class _Cohort(NamedTuple):
    """The cohort of a round.

    Attributes:
      ids: int32 `[C]`, -1 for an empty place.
      drawn: leaves `[C]`.
      rows: int32 `[C]`, which rows of the state are theirs; any for an empty place.
      target: int32 `[C]`, where their new rows go; -1, which is nowhere, for an empty place.
      empty: bool `[C]`.
    """

    ids: jax.Array
    drawn: CohortClient
    rows: jax.Array
    target: jax.Array
    empty: jax.Array


def drawn_ids(setting: Setting, key: Key, round_: Any, num_clients: int) -> jax.Array:
    """The ids that the schedule draws, as `Algorithm.cohort`."""
    f = setting.federation
    ids = f.schedule(tagged(key, "cohort"), round_, num_clients, f.cohort_size)
    if not isinstance(ids, jax.Array):
        raise ValueError(f"schedule must return a JAX array of cohort_size={f.cohort_size} ids, not {checks.shown(ids)}")
    if ids.shape != (f.cohort_size,) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"schedule must return cohort_size={f.cohort_size} ids, not {ids.dtype}{list(ids.shape)}")
    return ids


def _draw(setting: Setting, key: Key, state: State, data: FederatedData) -> _Cohort:
    """The cohort; a host store has drawn it already."""
    if data.drawn is not None:
        positions = jnp.arange(setting.federation.cohort_size, dtype=jnp.int32)
        empty = jnp.asarray(data.ids) < 0
    else:
        positions = drawn_ids(setting, key, state.round, data.num_clients)
        empty = positions < 0
    ids, rows = jnp.where(empty, -1, data.ids_of(positions)), state_rows(state, data, positions)
    target = jnp.where(empty, -1, rows)
    return _Cohort(ids, CohortClient(positions, jnp.asarray(state.seen)[rows]), rows, target, empty)


def _train(setting: Setting, key: Key, state: State, data: FederatedData, cohort: _Cohort) -> tuple[Any, Kept, Outputs]:
    """(the sum of what the clients send, the population's rows with the new ones of the cohort, outputs of each client)."""
    f = setting.federation
    view = "train" if "train" in data.views else data.views[0]
    # With Poisson sampling, many places of a cohort stay empty, which cost nothing.
    equal = view in data.same_size and not isinstance(f.schedule, Poisson)
    sizes = None if equal else jnp.where(cohort.empty, 0, jnp.asarray(data.sizes(view))[cohort.drawn.position])
    # Rows of the whole population stay out of what every client gets.
    context = Context(without_rows(state), data, cohort.ids, key)
    summed, kept, outputs = run_cohort(
        partial(client_round, setting),
        tagged(key, "clients"),
        cohort.ids,
        sizes,
        cohort.drawn,
        rows_of(state),
        cohort.target,
        context,
        lanes=f.lanes,
        devices=f.devices,
        precision=f.precision,
    )
    return summed, kept, attacked.by_cohort(setting, context, outputs)


def _mix(
    setting: Setting, key: Key, moved: State, data: FederatedData, cohort: _Cohort, kept: Kept, outputs: Outputs
) -> tuple[Kept, dict[str, jax.Array]]:
    """(the population's rows after clients got something of each other, diagnostics of that)."""
    if setting.method.collaborate is None:
        return kept, {}
    mine = jax.tree.map(lambda leaf: leaf[cohort.rows], kept)
    new, diagnostics = server.collaborate(setting, key, moved, mine, outputs, cohort.ids, cohort.drawn.position, data)
    return put(kept, cohort.target, new), diagnostics


def _info(
    setting: Setting,
    key: Key,
    state: State,
    moved: State,
    data: FederatedData,
    cohort: _Cohort,
    outputs: Outputs,
    diagnostics: dict[str, jax.Array],
) -> RoundInfo:
    """What the round reports."""
    f, asynchronous = setting.federation, setting.asynchronous
    own = {}
    if isinstance(f.schedule, Poisson):
        own["left_out"] = f.schedule.left_out(tagged(key, "cohort"), data.drawn_from, f.cohort_size)
    if asynchronous is not None:
        own["staleness"] = asynchronous.lag(state.round, jnp.arange(f.cohort_size))
        own["virtual_seconds"] = asynchronous.seconds(state.round)
    metrics = with_metrics(f"a round of {setting.method.name}", outputs.metrics | diagnostics, own)
    positions = jnp.where(cohort.empty, -1, cohort.drawn.position)
    return RoundInfo(cohort.ids, metrics, outputs.returned, positions, _faults(f.max_dropped, outputs, moved))


def _faults(max_dropped: float, outputs: Outputs, moved: State) -> Faults:
    dropped, returned = jnp.sum(outputs.broken >= 0), jnp.sum(outputs.returned)
    many = dropped > max_dropped * (dropped + returned)
    broken = first_broken(of_server(moved))
    return Faults(outputs.broken, broken, many | (broken >= 0))


def of_server(state: State) -> dict[str, PyTree]:
    """What the server keeps that must be finite."""
    return {"model": state.model, "optimizer": state.optimizer, "extra": state.extra}
