"""The server's half of a round: from the sum of the uploads to the next state."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, loops, masks
from fedjax_meta.aggregate import Rule, WeightedSum, mean, per_unit, sum_clients, weigh
from fedjax_meta.algorithm import Aggregation, State, training_size, with_metrics
from fedjax_meta.contract import Cohort
from fedjax_meta.data import FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import attacked, ratios, stale
from fedjax_meta.rounds.client import receive_fresh, train, upload_of
from fedjax_meta.rounds.setting import Kept, Outputs, Setting
from fedjax_meta.rounds.trees import must_fit, where, without_rows
from fedjax_meta.types import Key, PyTree
from fedjax_meta.uploads import ServerContext


def next_state(
    setting: Setting, key: Key, state: State, summed: Any, outputs: Outputs, ids: jax.Array, data: FederatedData
) -> State:
    """The state after the server's step, with the clients' old rows; unchanged if no upload came."""
    chain = setting.chain
    if setting.rule is None:
        found = _weighted_mean(setting, key, state, summed, outputs, ids, data)
    else:
        found = _by_rule(setting, setting.rule, key, state, outputs, data)
    average, statistics, measured = found.average
    kept, divisor = state.aggregation.uploads, setting.divisor(data.drawn_from)
    context = ServerContext(divisor, chain.clip_norm(kept), ids, outputs.returned, chain.spent)
    whole = (average, statistics)
    sent, kept = chain.server(tagged(key, "server uploads"), setting.sent(whole), context, kept, measured)
    average, statistics = setting.with_unsent(sent, whole)
    # Noise comes before the rounding to 16 bits: a rounded mean could move further than one client's clipped upload.
    average, statistics = jax.tree.map(lambda leaf, form: leaf.astype(form.dtype), (average, statistics), found.forms[:2])
    # Noise comes in every round: a round without it would tell that no client returned.
    some = jnp.any(outputs.returned) | chain.fixed_divisor
    if setting.method.sums_pseudo_gradients:
        count = divisor if chain.fixed_divisor else jnp.sum(outputs.returned)
        moving, held = masks.split(average, setting.shared)
        average = masks.merge(jax.tree.map(lambda leaf: leaf * jnp.asarray(count, leaf.dtype), moving), held)
    moved = _step(setting, state, average, statistics, found.weight, training_size(state, data), some)
    aggregation = where(some, Aggregation(kept, found.memory), state.aggregation._replace(past=()))
    return moved._replace(aggregation=aggregation._replace(past=stale.pushed(setting, state, moved.model)))


class _Aggregated(NamedTuple):
    """What becomes of a cohort's uploads.

    Attributes:
      average: of the model's part, of the statistics and of what was measured; where noise follows, not yet rounded to the types
        of uploads.
      forms: the same three with the types that uploads have.
      weight: summed weight of the statistics.
      memory: of the aggregation rule.
    """

    average: tuple[PyTree, PyTree, PyTree]
    forms: PyTree
    weight: PyTree
    memory: PyTree


def _weighted_mean(
    setting: Setting, key: Key, state: State, summed: Any, outputs: Outputs, ids: jax.Array, data: FederatedData
) -> _Aggregated:
    # Attackers that act together changed the stacked uploads after `summed` was made.
    summed = jax.tree.map(sum_clients, jax.vmap(weigh)(*outputs.upload)) if setting.stacks else summed
    summed = _total(setting, key, summed, outputs.returned, ids, data)
    average, forms = mean(summed, as_summed=setting.chain.fixed_divisor), jax.eval_shape(mean, summed)
    return _Aggregated(average, forms, summed.weight[1], state.aggregation.rule)


def _by_rule(setting: Setting, rule: Rule, key: Key, state: State, outputs: Outputs, data: FederatedData) -> _Aggregated:
    uploads, weights = outputs.upload
    split = partial(ratios.split, setting)
    separate, separate_weights = jax.vmap(split)(uploads, weights)
    parts, structure = jax.tree.leaves(separate_weights), cast(Any, jax.tree.structure(separate_weights))
    stacked = structure.flatten_up_to(separate)
    references: list[PyTree] = [None] * len(parts)
    if rule.root is not None:
        of_server = (*_reference(setting, key, state, data), ())
        one = jax.tree.map(lambda w: jnp.ones_like(w[0]), weights)
        references = structure.flatten_up_to(split(of_server, one)[0])
        references[-1] = None  # the server measures nothing
    inputs = zip(stacked, parts, state.aggregation.rule, references, strict=True)
    found = [_combined(rule, tagged(key, "aggregator", i), *given) for i, given in enumerate(inputs)]
    result = jax.tree.unflatten(structure, [combined for combined, _ in found])
    average = ratios.joined(setting, result, uploads, weights)
    total = jax.tree.map(lambda w: jnp.sum(w, where=w > 0), weights[1])
    return _Aggregated(average, average, total, tuple(memory for _, memory in found))


def _combined(
    rule: Rule, key: Key, upload: PyTree, weight: jax.Array, memory: PyTree, reference: PyTree
) -> tuple[PyTree, PyTree]:
    """(what a rule makes of one part of the uploads, `[C, ...]` at each leaf; the memory after it)."""
    if not jax.tree.leaves(upload):
        return upload, memory
    found = rule.combine(key, upload, weight, memory, reference)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"combine of aggregator {rule.name} must return (result, memory), not {checks.shown(found)}")
    combined, renewed = found
    must_fit(f"the memory of aggregator {rule.name}", renewed, memory)
    check_combined(rule.name, combined, upload)
    return combined, renewed


def check_combined(name: str, combined: PyTree, stacked: PyTree) -> None:
    """Raises `ValueError` unless a rule gave a tree like one upload."""
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    structures: list[Any] = [jax.tree.structure(combined), jax.tree.structure(wanted)]
    wrong = structures[0] != structures[1]
    if wrong or [jnp.shape(leaf) for leaf in jax.tree.leaves(combined)] != [leaf.shape for leaf in jax.tree.leaves(wanted)]:
        raise ValueError(f"aggregator {name} must give a tree like one client's upload: {checks.mismatch(combined, wanted)}")
    for leaf, like in zip(*map(jax.tree.leaves, (combined, wanted)), strict=True):
        if jnp.issubdtype(like.dtype, jnp.inexact) and not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(f"aggregator {name} gives {jnp.result_type(leaf)} for an upload of {like.dtype}, which cuts it")


def _reference(setting: Setting, key: Key, state: State, data: FederatedData) -> PyTree:
    """The upload of the server itself, from its root samples."""
    assert setting.rule is not None and setting.rule.root is not None
    view = next(iter(setting.rule.root.views.values()))
    mine, theirs = (jax.tree.map(lambda leaf: leaf.shape[1:], (one.x, one.y)) for one in (view, data))
    if mine != theirs:
        raise ValueError(
            f"{setting.rule.name}: samples of the server have the shape {mine[0]}, but those of clients {theirs[0]}"
        )
    key = tagged(key, "root")
    received = receive_fresh(setting, key, state.model, state.extra, state.round, data.total_clients)
    trained = train(setting, key, received, setting.rule.root)
    return upload_of(setting, state.model, state.extra, trained)


def _total(
    setting: Setting, key: Key, summed: WeightedSum, returned: jax.Array, ids: jax.Array, data: FederatedData
) -> WeightedSum:
    """The weighted sum over the cohort, without masks and with the divisor that the upload transformations ask for."""
    if setting.chain.masks_uploads:
        summed = setting.chain.decode(tagged(key, "masks"), summed, ids, returned)
    if setting.chain.fixed_divisor:
        # The weights that came in would tell which clients did not return.
        weight = jax.tree.map(lambda w: jnp.full_like(w, setting.divisor(data.drawn_from)), summed.weight)
        summed = dataclasses.replace(summed, weight=weight)
    return summed


def _step(
    setting: Setting, state: State, average: PyTree, statistics: PyTree, weight: PyTree, num_clients: int, some: jax.Array
) -> State:
    method = setting.method
    moving, rest = masks.split(state.model, setting.shared)
    descent, held = masks.split(average, setting.shared)
    if method.divides_by_statistics:
        descent = per_unit(descent, statistics)
    shares = statistics
    if method.direction is not None:
        descent, statistics = method.direction(without_rows(state), descent, statistics, weight, num_clients)
        must_fit(f"the pseudo-gradient that direction of {method.name} returns", descent, moving)
    updates, slots = setting.server.update(descent, state.optimizer, moving)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (updates, moving)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the server's optimiser must give updates like the model: {checks.mismatch(updates, moving)}")
    slots = loops.like(slots, state.optimizer)
    if method.separate_models:
        _check_one_each(f"the statistics of {method.name}, which has separate_models,", shares, moving, jnp.inexact)
        still = jax.tree.map(jnp.zeros_like, updates), state.optimizer
        updates, slots = where(shares > 0, (updates, slots), still)
    buffers, frozen = masks.split(rest, setting.buffers)
    if setting.sends_differences:
        held = jax.tree.map(jnp.subtract, buffers, held)
    model = masks.merge(optax.apply_updates(moving, updates), masks.merge(held, frozen))
    model, slots = where(some, (model, slots), (state.model, state.optimizer))
    state = state._replace(model=model, optimizer=slots)
    if method.update_extra is None:
        return state
    if setting.sends_differences and method.statistics_renew_extra:
        statistics = jax.tree.map(lambda change, old: old.astype(change.dtype) + change, statistics, state.extra)
    extra = method.update_extra(without_rows(state), statistics, weight, num_clients)
    must_fit(f"what update_extra of {method.name} returns", extra, state.extra)
    return state._replace(extra=where(some, extra, state.extra))


def _check_one_each(what: str, given: PyTree, models: PyTree, kind: type) -> None:
    """Raises `ValueError` unless there is a number of a kind for each of M models, whose leaves are `[M, ...]`."""
    count = len(jax.tree.leaves(models)[0])
    if not isinstance(given, jax.Array) or given.shape != (count,) or not jnp.issubdtype(given.dtype, kind):
        raise ValueError(
            f"{what} must be an array [{count}] of {kind.__name__} type, a number of each model: {checks.shown(given)}"
        )


def inherited(setting: Setting, before: State, after: State) -> State:
    """The state after a round, in which models go on as others, if the method has such."""
    if setting.method.inherit is None:
        return after
    source = setting.method.inherit(before, after)
    moving, rest = masks.split(after.model, setting.shared)
    _check_one_each(f"what inherit of {setting.method.name} returns", source, moving, jnp.integer)
    moving, slots = jax.tree.map(lambda leaf: leaf[source], (moving, after.optimizer))
    return after._replace(model=masks.merge(moving, rest), optimizer=slots)


def collaborate(
    setting: Setting,
    key: Key,
    state: State,
    kept: Kept,
    outputs: Outputs,
    ids: jax.Array,
    positions: jax.Array,
    data: FederatedData,
) -> tuple[Kept, dict[str, jax.Array]]:
    """(what clients keep after they got something of each other, unchanged for those that did not return; diagnostics)."""
    method = setting.method
    assert method.collaborate is not None
    personal, memory = attacked.as_read(setting, kept, outputs)
    cohort = Cohort(ids, positions, outputs.returned, personal, memory, outputs.stacked, setting.federation.lanes)
    visible = state if method.whole_population else without_rows(state)
    result = method.collaborate.mix(tagged(key, "shared"), visible, cohort, data)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(
            f"what collaborate of {method.name} returns must be (personal, memory) or (personal, memory, diagnostics), not "
            f"{checks.shown(result)}"
        )
    given, diagnostics = result[:2], result[2] if len(result) > 2 else {}
    with_metrics(f"collaborate of {method.name}", outputs.metrics, diagnostics)
    must_fit("what collaborate returns", given, (kept.personal, kept.memory))
    takers = attacked.takers(setting, outputs.returned, ids, data)
    personal, memory = where(takers, given, (kept.personal, kept.memory))
    return kept._replace(personal=personal, memory=memory), diagnostics
