"""The client's half of a round: what it starts from, what becomes of its training, and what it sends."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks, masks
from fedjax_meta.aggregate import WEIGHTINGS, Ratio, client_weight, weigh
from fedjax_meta.algorithm import State
from fedjax_meta.builders import PRIVATE
from fedjax_meta.contract import Received, Trained, no_memory
from fedjax_meta.data import ClientData, FederatedData
from fedjax_meta.engine import ClientUpdate
from fedjax_meta.keys import tagged
from fedjax_meta.participation import Participation
from fedjax_meta.rounds import attacked, stale
from fedjax_meta.rounds.refusals import refuse_hiding_uploads
from fedjax_meta.rounds.setting import CohortClient, Context, Kept, Outputs, Setting
from fedjax_meta.rounds.trees import first_broken, leaf_names, must_fit, where, zeros_unless
from fedjax_meta.types import Key, PyTree, Scalar
from fedjax_meta.uploads import kinds


def client_round(
    setting: Setting, key: Key, id_: jax.Array, drawn: CohortClient, kept: Kept, context: Context
) -> ClientUpdate:
    """What the engine runs for each client.

    1. `_participation`: what it trains on, whether it works at all, whether its upload arrives.
    2. `receive`: what it starts from. Then the method's rule trains, and `_check_trained` looks at what it returned.
    3. `weights_of`, `upload_of`: what it would send. The upload transformations change that.
    4. `_broken`: a client whose result is not finite takes no part.
    5. `_kept_after`: what it keeps for its next round.
    6. `attacked.by_client`: what it sends if it is an attacker. If that is not finite, it takes no part either.
    7. `_added_up`: what it adds to the sum over the cohort, with its staleness weight.
    """
    state, data = context.state, context.data
    client, works, arrives = _participation(setting, key, id_, drawn.position, data)
    given, stale_weight = stale.given(setting, context, id_)
    received = receive(setting, key, given, drawn.seen, kept, data.total_clients, tagged(context.key, "shared"))
    trained = train(setting, key, received, client)
    _check_trained(setting, trained, received, kept.memory)
    weights = weights_of(setting, trained, client)
    # A client without samples has learned nothing, whatever its rule made of it.
    works = ~(weights[0] <= 0) & works
    weights = _within_masks(setting, trained, weights, data)
    setting.check_mixture(trained)
    upload = upload_of(setting, given.model, state.extra, trained)
    sent, measured, sent_residual, residual_if_lost = setting.chain.client(
        tagged(key, "uploads"), setting.sent(upload), kept.residual, state.aggregation.uploads, setting.carries(upload)
    )
    upload = setting.with_unsent(sent, upload)
    broken = jnp.where(works, _broken(setting, trained, weights, upload), -1)
    took_part = works & (broken < 0)
    returned = took_part & arrives
    residual = where(returned, sent_residual, residual_if_lost)
    after = _kept_after(setting, trained, received, kept, upload, residual, took_part, returned)
    stacked = zeros_unless(broken < 0, trained.stacked)
    message = attacked.Message(upload, measured, stacked, setting.read(after.personal, after.memory))
    place = partial(_place_of_upload, setting, trained, weights, upload)
    message, read, unfit = attacked.by_client(setting, key, id_, message, received, given, data, place)
    if unfit is not None:  # an attacker that sends what is not finite takes no part either
        broken = jnp.where(took_part & (unfit >= 0), unfit, broken)
        took_part, returned = took_part & (broken < 0), returned & (broken < 0)
        residual = where(returned, sent_residual, residual_if_lost)
        after = _kept_after(setting, trained, received, kept, upload, residual, took_part, returned)
    # A client that clips its upload cannot know how stale it will be; the server weighs what arrives.
    message = message._replace(upload=stale.scaled(setting, state.model, given.model, message.upload, stale_weight))
    sums, separate = _added_up(setting, trained, message, weights, returned, id_, context)
    outputs = Outputs(trained.metrics, message.stacked, took_part, returned, broken, separate, read)
    return ClientUpdate(sums, after, jax.tree.map(jnp.asarray, outputs))


def _participation(
    setting: Setting, key: Key, id_: jax.Array, position: jax.Array, data: FederatedData
) -> tuple[ClientData, Any, Any]:
    """(what the client trains on, whether it works at all, whether its upload would arrive)."""
    client, works, arrives = data.client(jnp.where(id_ < 0, -1, position)), id_ >= 0, True
    if setting.federation.participation is not None:
        part = setting.federation.participation(tagged(key, "participation"), id_)
        if not isinstance(part, Participation):
            raise ValueError(f"participation must return fm.participation.Participation(...), not {checks.shown(part)}")
        client, arrives = client.working(part.work), part.returned
        works = jnp.logical_not(part.crashed) & (part.work > 0) & works
    if PRIVATE in setting.method.config:
        client = client.counting_once()
    return attacked.poisoned(setting, client, id_, data), works, arrives


def receive(
    setting: Setting, key: Key, state: State, seen: jax.Array, kept: Kept, num_clients: int, shared_key: Key
) -> Received:
    """What a client starts from: its own leaves and memory if it has taken part, else the server's and fresh ones."""
    theirs, common = masks.split(state.model, setting.personal)
    model = masks.merge(where(seen, kept.personal, theirs), common)
    fresh = setting.method.init_memory(tagged(key, "memory"), model, num_clients)
    must_fit(f"the state's memory is not that of {setting.method.name}", kept.memory, fresh)
    fresh = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), fresh, kept.memory)
    memory = where(seen, kept.memory, fresh)
    return Received(model, memory, state.extra, state.round, seen, shared_key)


def _check_trained(setting: Setting, trained: Trained, received: Received, memory: PyTree) -> None:
    """Raises an error in one line for a client rule that returns something else than it should."""
    method = setting.method
    if not isinstance(trained.metrics, dict):
        raise TypeError(f"the client rule of {method.name} must return Trained(model, metrics), metrics being a dict")
    for name, value in trained.metrics.items():
        if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(value)):
            shape = jax.tree.map(jnp.shape, value)
            raise ValueError(f"metric {name!r} of a client of {method.name} must be a scalar, not of shape {shape}")
    must_fit("the model that a client returns", trained.model, received.model)
    if method.init_memory is no_memory and jax.tree.leaves(trained.memory):
        raise ValueError(f"clients of {method.name} keep a memory: give Method(init_memory=...) its first value")
    must_fit("a client's memory must keep the form of init_memory", trained.memory, memory)
    if trained.pseudo_gradient is not None:
        sent = (masks.split(tree, setting.shared)[0] for tree in (trained.pseudo_gradient, received.model))
        must_fit("the pseudo-gradient of a client", *sent)
    readers = (method.update_extra, method.direction, method.remember, method.divides_by_statistics or None)
    if jax.tree.leaves(trained.statistics) and all(reader is None for reader in readers):
        raise ValueError(f"clients of {method.name} send statistics that nothing reads: give Method(update_extra=...)")
    if jax.tree.leaves(trained.stacked):
        if method.collaborate is None:
            raise ValueError(f"clients of {method.name} send stacked values that nothing reads: give Method(collaborate=...)")
        refuse_hiding_uploads(method, setting.federation)


def weights_of(setting: Setting, trained: Trained, client: ClientData) -> tuple[jax.Array, PyTree]:
    """How much a client counts in the mean of models, and in that of statistics."""
    weight = weight_of(setting, trained, client)
    return weight, weight if trained.statistics_weight is None else jax.tree.map(_not_negative, trained.statistics_weight)


def weight_of(setting: Setting, trained: Trained, client: ClientData) -> jax.Array:
    """How much a client counts in the mean of models; 0 without train samples."""
    if trained.weight is not None:
        weight = _not_negative(trained.weight)
    else:
        weight = client_weight(setting.federation.weighting or setting.method.weighting, client)
    return weight if "train" not in client.views else jnp.where(client["train"].size > 0, weight, 0)


def _not_negative(weight: Scalar) -> jax.Array:
    """A weight below 0 is an error of the method, which is reported like one that is not a number."""
    return jnp.where(jnp.asarray(weight) < 0, jnp.nan, weight)


def largest_weights(setting: Setting, trained: Trained, data: FederatedData) -> tuple[float, float]:
    """The largest weights that a client can have in the mean of models, and in that of statistics."""
    view = WEIGHTINGS[setting.federation.weighting or setting.method.weighting]
    most = 1.0 if setting.chain.fixed_divisor or view is None else float(dict(data.max_size)[view])
    return most, most if trained.statistics_weight is None else 1.0


def _within_masks(
    setting: Setting, trained: Trained, weights: tuple[jax.Array, PyTree], data: FederatedData
) -> tuple[jax.Array, PyTree]:
    """The weights; NaN where uploads are masked and one is above the largest: the client's integers would wrap around.

    Raises:
      ValueError: a weight that the client rule gives, for which no largest is known.
    """
    if not setting.chain.masks_uploads or setting.chain.fixed_divisor:  # with which all count as 1
        return weights
    if trained.weight is not None:
        raise ValueError(
            f"clients of {setting.method.name} give their own weight, of which mask cannot know the largest: leave one of the "
            "two out, or count clients by the weighting of a method"
        )
    return jax.tree.map(
        lambda most, part: jax.tree.map(lambda w: jnp.where(w > most, jnp.nan, w), part),
        largest_weights(setting, trained, data),
        weights,
    )


def upload_of(setting: Setting, model: PyTree, extra: PyTree, trained: Trained) -> PyTree:
    """(the model's part, statistics): shared leaves as a pseudo-gradient, buffers as values or as differences."""

    def difference(of: PyTree) -> PyTree:
        # Only these leaves: others need no difference, and some have none, such as Booleans.
        return jax.tree.map(jnp.subtract, masks.split(model, of)[0], masks.split(trained.model, of)[0])

    given = trained.pseudo_gradient
    descent = difference(setting.shared) if given is None else masks.split(given, setting.shared)[0]
    held = difference(setting.buffers) if setting.sends_differences else masks.split(trained.model, setting.buffers)[0]
    statistics = trained.statistics
    if isinstance(statistics, Ratio) and "sparsify" in kinds(setting.federation.uploads):
        raise ValueError(
            f"{setting.method.name} sends each sum together with the number of its terms; sparsify could leave one of the two out"
        )
    rule = setting.rule
    if isinstance(statistics, Ratio) and rule is not None and rule.differences:
        raise ValueError(
            f"{setting.method.name} sends means, which are no changes: {rule.name} would bound how large they are"
        )
    if setting.sends_differences and setting.method.statistics_renew_extra:
        statistics = jax.tree.map(lambda new, old: new - old.astype(new.dtype), statistics, extra)
    return masks.merge(descent, held), statistics


def _broken(setting: Setting, trained: Trained, weights: PyTree, upload: PyTree) -> jax.Array:
    """The first leaf of a client's result that is not finite, see `first_broken`; -1 if there is none, or nobody asks."""
    if not setting.federation.drop_nonfinite:
        return jnp.full((), -1, jnp.int32)
    # Check the trained values: a transformation may hide NaN, and the upload may exist only inside the sum.
    learned = learned_of(setting, trained)
    return first_broken(result_of(setting, trained, weights, (learned, upload) if setting.federation.uploads else learned))


def _place_of_upload(setting: Setting, trained: Trained, weights: PyTree, upload: PyTree) -> int:
    """Where the leaves of the upload that is sent begin among those that `_broken` counts."""
    learned = learned_of(setting, trained) if setting.federation.uploads else ()
    names = leaf_names(result_of(setting, trained, weights, (learned, upload)))
    starts = ("['upload'][1]", "['stacked']", "['personal']")  # some methods average nothing
    return next((i for start in starts for i, name in enumerate(names) if name.startswith(start)), 0)


def learned_of(setting: Setting, trained: Trained) -> PyTree:
    """What the upload is made from, in the structure of `upload_of`. The upload is finite exactly when this tree is."""
    descent = trained.model if trained.pseudo_gradient is None else trained.pseudo_gradient
    part = masks.merge(masks.split(descent, setting.shared)[0], masks.split(trained.model, setting.buffers)[0])
    return part, trained.statistics


def result_of(setting: Setting, trained: Trained, weights: PyTree, upload: PyTree) -> dict[str, PyTree]:
    """Everything of a client's result that must be finite; its paths are the names in a report of faults."""
    return {
        "weight": weights,
        "upload": upload,
        "stacked": trained.stacked,
        "personal": masks.split(trained.model, setting.personal)[0],
        "memory": trained.memory,
    }


def _kept_after(
    setting: Setting,
    trained: Trained,
    received: Received,
    before: Kept,
    upload: PyTree,
    residual: PyTree,
    took_part: jax.Array,
    returned: jax.Array,
) -> Kept:
    """What a client keeps: what the round left it with if it took part, else what it had."""
    method, memory = setting.method, trained.memory
    if method.remember is not None and setting.federation.uploads:
        memory = method.remember(received.memory, *upload)
        must_fit("what remember returns", memory, before.memory)
    personal = masks.split(trained.model, setting.personal)[0]
    personal, residual = where(took_part, (personal, residual), (before.personal, before.residual))
    # A client whose first upload is lost keeps the memory that it began with.
    held = where(took_part, received.memory, before.memory) if method.memory_of_uploads else before.memory
    memory = where(returned if method.memory_of_uploads else took_part, memory, held)
    return Kept(personal, memory, residual)


def _added_up(
    setting: Setting,
    trained: Trained,
    message: attacked.Message,
    weights: tuple[jax.Array, PyTree],
    returned: jax.Array,
    id_: jax.Array,
    context: Context,
) -> tuple[PyTree, PyTree]:
    """(what is added up over the cohort, what an aggregator gets of each client)."""
    upload = (*message.upload, message.measured)
    # A measured number of a transformation says something of one client, so all count equally there.
    weight: Any = (*jax.tree.map(lambda w: jnp.where(returned, w, 0), weights), jnp.where(returned, 1.0, 0.0))
    if setting.chain.fixed_divisor:
        weight = jax.tree.map(lambda w: jnp.where(w > 0, 1.0, 0.0), weight)
    if setting.stacks:
        return (), (zeros_unless(returned, upload), weight)
    sums = weigh(upload, weight)
    if setting.chain.masks_uploads:
        bounds = (*largest_weights(setting, trained, context.data), 1.0)
        sums = setting.chain.encode(tagged(context.key, "masks"), sums, bounds, id_, context.ids)
        sums = jax.tree.map(lambda leaf: jnp.where(returned, leaf, 0), sums)
    return sums, ()


def receive_fresh(setting: Setting, key: Key, model: PyTree, extra: PyTree, round_: jax.Array, num_clients: int) -> Received:
    """What a client without a row in the state starts from: a new one, the root samples of the server, or one for its shapes."""
    memory = jax.tree.map(jnp.asarray, setting.method.init_memory(tagged(key, "memory"), model, num_clients))
    return Received(model, memory, extra, round_, jnp.zeros((), bool), tagged(key, "shared"))


def train(setting: Setting, key: Key, received: Received, data: ClientData) -> Trained:
    """What the method's client makes of what it received.

    Raises:
      ValueError: that is no `Trained`.
    """
    trained = setting.method.client(tagged(key, "train"), received, data)
    if not isinstance(trained, Trained):
        raise ValueError(
            f"client of {setting.method.name} must return fm.Trained(model, metrics), not {checks.shown(trained)}"
        )
    return trained


def train_first_client(setting: Setting, key: Key, model: PyTree, data: FederatedData) -> Trained:
    """The first round of the first client, for its shapes."""
    extra = setting.method.init_extra(model, data)
    received = receive_fresh(setting, key, model, extra, jnp.zeros((), jnp.int32), data.total_clients)
    return train(setting, key, received, data.client(0))
