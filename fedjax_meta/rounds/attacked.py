"""Where attacks enter a round: what attackers train on, what they send, and what they take of a collaboration.

Without an attack, none of these functions adds anything to a compiled round.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, masks
from fedjax_meta.aggregate import Ratio, in_total, per_unit
from fedjax_meta.aggregate.distances import along
from fedjax_meta.algorithm import State
from fedjax_meta.attacks import Attack
from fedjax_meta.contract import Received
from fedjax_meta.data import ClientData, FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import stale
from fedjax_meta.rounds.setting import Context, Kept, Outputs, Setting
from fedjax_meta.rounds.trees import first_broken, zeros_unless
from fedjax_meta.types import Key, PyTree


class Message(NamedTuple):
    """Everything that ONE client sends.

    Attributes:
      upload: (the model's part, statistics), after the upload transformations.
      measured: what these measure.
      stacked: what the server sees separately.
      read: what `collaborate` reads.
    """

    upload: PyTree
    measured: PyTree
    stacked: PyTree
    read: PyTree


def poisoned(setting: Setting, client: ClientData, id_: jax.Array, data: FederatedData) -> ClientData:
    """The data that a client trains on."""
    found = _attack(setting, data)
    if found is None:
        return client
    attack, members = found
    return attack.poisoned(client, id_, _of(members, id_), data.num_classes)


class Conspirator(NamedTuple):
    """What `by_cohort` must know of each client, in `Outputs.read` until then.

    Attributes:
      read: what `collaborate` reads of it.
      before: the same, as the client began with it.
      own: its personal leaves where the server averages them, else `()`.
      first: of the leaves of its upload, the number of the first, see `algorithm.Faults`.
    """

    read: PyTree
    before: PyTree
    own: PyTree
    first: jax.Array


def by_client(
    setting: Setting,
    key: Key,
    id_: jax.Array,
    message: Message,
    received: Received,
    given: State,
    data: FederatedData,
    place: Callable[[], int],
) -> tuple[Message, PyTree, jax.Array | None]:
    """(what a client sends, what `Outputs.read` must hold, which leaf of what an attacker sends is not finite).

    `given` is the state with the model that the client was given. The leaf is -1 where all are finite, and `None` where nobody
    lies by itself; leaves of the upload count from `place()` on, and all others as that one.
    """
    found = _attack(setting, data)
    if found is None or not found[0].changes_uploads:
        return message, (), None
    attack, members = found
    before = setting.read(masks.split(received.model, setting.personal)[0], received.memory)
    unfit = None
    if attack.lie is not None:
        reference = _references(setting, message, before, received.model, given)
        attacks = _of(members, id_)
        lie = partial(attack.alone, tagged(key, "attack"), attacks)
        message = _falsified(setting, lie, lambda leaf: attacks, message, reference)
        message, unfit = _refused(setting, message, place())
    own = masks.split(received.model, setting.personal)[0] if setting.federation.average_personal else ()
    read = message.read if attack.conspire is None else Conspirator(message.read, before, own, jnp.int32(place()))
    return message, read, unfit


def by_cohort(setting: Setting, context: Context, outputs: Outputs) -> Outputs:
    """The outputs of a cohort whose attackers send what they agreed upon.

    Rows have been written by then: an attacker whose lie is left out keeps what it trained.
    """
    state, ids = context.state, context.ids
    found = _attack(setting, context.data)
    if found is None or found[0].conspire is None:
        return outputs
    attack, members = found
    (*upload, measured), weights = outputs.upload
    known: Conspirator = outputs.read
    message = Message(tuple(upload), measured, outputs.stacked, known.read)
    of_one = jax.tree.map(lambda leaf: leaf[0], message._replace(read=()))

    def unchanged(id_: jax.Array, mine: PyTree) -> Message:
        given, weight = stale.given(setting, context, id_)
        model = given.model
        if setting.federation.average_personal:
            model = masks.merge(mine, masks.split(model, setting.personal)[1])
        found = _references(setting, of_one, (), model, given)
        return found._replace(upload=stale.scaled(setting, state.model, given.model, found.upload, weight))

    if setting.federation.average_personal or setting.asynchronous is not None:
        reference = jax.vmap(unchanged)(ids, known.own)
    else:
        reference = jax.tree.map(lambda leaf: leaf[None], unchanged(ids[0], ()))
    reference = reference._replace(read=known.before)
    attacks = _of(members, ids)
    lie = partial(attack.together, attacks, outputs.returned)
    message = _falsified(setting, lie, partial(along, attacks), message, reference, each=jax.vmap)
    message, unfit = jax.vmap(partial(_refused, setting))(message, known.first)
    fits = unfit < 0
    weights = zeros_unless(fits, weights)
    broken = jnp.where(outputs.returned & ~fits, unfit, outputs.broken)
    sent = (*message.upload, message.measured)
    returned = outputs.returned & fits
    return outputs._replace(
        upload=(sent, weights), stacked=message.stacked, read=message.read, returned=returned, broken=broken
    )


def as_read(setting: Setting, kept: Kept, outputs: Outputs) -> tuple[PyTree, PyTree]:
    """(personal leaves, memories) of a cohort as the server gets to see them."""
    found = {"personal": kept.personal, "memory": kept.memory}
    if outputs.read and setting.method.collaborate is not None:
        found |= dict(zip(filter(None, setting.method.collaborate.reads.split("+")), outputs.read, strict=True))
    return found["personal"], found["memory"]


def takers(setting: Setting, returned: jax.Array, ids: jax.Array, data: FederatedData) -> jax.Array:
    """Bool `[C]`: who takes what a collaboration gives; those that returned and did not lie."""
    found = _attack(setting, data)
    return returned if found is None or not found[0].changes_uploads else returned & ~_of(found[1], ids)


def _attack(setting: Setting, data: FederatedData) -> tuple[Attack, np.ndarray] | None:
    """The attack and its members, bool `[N]`; `None` where nobody attacks."""
    attack = setting.federation.attack
    if attack is None:
        return None
    members = attack.members(data.total_clients)
    return (attack, members) if members.any() else None


def _of(members: np.ndarray, ids: jax.Array) -> jax.Array:
    return jnp.asarray(members)[ids] & (ids >= 0)


def _references(setting: Setting, message: Message, read: PyTree, model: PyTree, given: State) -> Message:
    """The message of a client that changes nothing: 0 for changes and statistics, and the numbers that it began with, `model`.

    Averaged personal leaves begin with the client's own, not with those that it was `given`.
    """
    zeros = partial(jax.tree.map, jnp.zeros_like)
    part, statistics = zeros(message.upload)
    moving, held = masks.split(part, setting.shared)
    begun, server = (masks.split(tree, setting.buffers)[0] for tree in (model, given.model))
    if setting.sends_differences:
        held = jax.tree.map(lambda leaf, new, old: (new - old).astype(leaf.dtype), held, server, begun)
    else:
        held = begun
        if setting.method.statistics_renew_extra:
            statistics = given.extra
    return Message((masks.merge(moving, held), statistics), zeros(message.measured), zeros(message.stacked), read)


def _falsified(
    setting: Setting,
    lie: Callable[[Message, Message], Message],
    attacks: Callable[[jax.Array], jax.Array],
    message: Message,
    before: Message,
    each: Callable[[Callable], Callable] = lambda of_client: of_client,
) -> Message:
    """`lie(message, before)`, of one client or, with `each=jax.vmap`, of a cohort; `attacks(leaf)` says who attacks."""
    method = setting.method
    amounts = method.divides_by_statistics or method.weighs_by_statistics or isinstance(message.upload[1], Ratio)
    if not amounts:
        return _consistent(setting, lie(message, before))
    values, with_values = each(partial(_values, setting)), each(partial(_with_values, setting))
    told = lie(message._replace(upload=values(message.upload)), before._replace(upload=values(before.upload)))
    changed = with_values(message.upload, told.upload)
    # Dividing by an amount and multiplying by it may round, which must change nothing for the honest.
    upload = jax.tree.map(lambda new, old: jnp.where(attacks(old), new, old), changed, message.upload)
    return _consistent(setting, told._replace(upload=upload))


def _refused(setting: Setting, message: Message, place: Any) -> tuple[Message, jax.Array]:
    """(zeros in place of a message that is not finite, which leaf that is, see `by_client`)."""
    if not setting.federation.drop_nonfinite:
        return message, jnp.full((), -1, jnp.int32)
    of_upload, other = first_broken(message.upload), first_broken((message.measured, message.stacked, message.read))
    unfit = jnp.where(of_upload >= 0, place + of_upload, jnp.where(other >= 0, place, -1)).astype(jnp.int32)
    return zeros_unless(unfit < 0, message), unfit


def _values(setting: Setting, upload: PyTree) -> PyTree:
    """What ONE client may lie about: quotients in place of sums, and no amounts, which say how much it counts."""
    part, statistics = upload
    if setting.method.divides_by_statistics:
        moving, held = masks.split(part, setting.shared)
        return masks.merge(per_unit(moving, statistics), held), ()
    if isinstance(statistics, Ratio):
        return part, per_unit(statistics.total, statistics.amount)
    return part, ()


def _with_values(setting: Setting, upload: PyTree, values: PyTree) -> PyTree:
    """The upload of ONE client with these in place of its `_values`."""
    statistics, (part, told) = upload[1], values
    if setting.method.divides_by_statistics:
        moving, held = masks.split(part, setting.shared)
        return masks.merge(in_total(moving, statistics), held), statistics
    if isinstance(statistics, Ratio):
        return part, Ratio(in_total(told, statistics.amount), statistics.amount)
    return part, statistics


def _consistent(setting: Setting, message: Message) -> Message:
    """Recomputes statistics (FedAMP) from the falsified values that the server reads, so that both agree."""
    part, statistics = message.upload
    if setting.method.sends_statistics or setting.sends_differences or not message.read:
        return message
    same = checks.misplaced_leaf(statistics, message.read[0]) is None
    return message._replace(upload=(part, message.read[0])) if same else message
