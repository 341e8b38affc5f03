"""What an attack is: who attacks, and what they do."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.aggregate.distances import along
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.task import Batch
from fedjax_meta.types import Key, PyTree, Rate

Poison = Callable[[Batch, jax.Array, ClientView, int], Batch]
"""`(batch, chances [B] in [0, 1), view, K) -> batch`. The chances are fixed for each sample of a view of a client."""

Lie = Callable[[Key, PyTree], PyTree]
"""`(key, change) -> change`, of one client by itself."""

Conspiracy = Callable[[PyTree, jax.Array, jax.Array], PyTree]
"""`(changes [C, ...], honest [C], attackers [C]) -> one change`, which all attackers send.

The changes are those that the clients would send; rows are 0 of clients that did not return, and of attackers that
are not finite, who are not among the attackers.
"""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Attack:
    """Who attacks, and how; build it with a function of this module, or with these fields.

    Attributes:
      name: for messages and records.
      attackers: ids, or a share of all clients in [0, 1], of whom `seed` chooses round(share * N).
      seed: fixes who they are and which samples they poison.
      poison: what they do to their data.
      lie: what they send, each by itself.
      conspire: what they send together; takes memory for C uploads.
      config: hyper-parameters, for the record of a run.

    Raises:
      ValueError: `attackers` that are no distinct ids and no share.
    """

    name: str
    attackers: float | Sequence[int]
    seed: int = 0
    poison: Poison | None = None
    lie: Lie | None = None
    conspire: Conspiracy | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.count("seed", self.seed, least=0)
        if isinstance(self.attackers, (float, np.floating)):
            checks.share("attackers", self.attackers)
        else:
            ids = np.asarray(self.attackers)
            whole = ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer))
            if not whole or ids.min(initial=0) < 0 or len(set(ids.tolist())) < ids.size:
                raise ValueError(
                    f"attackers={self.attackers!r} must be distinct client ids, e.g. (0, 3), or a share, e.g. 0.2"
                )
        object.__setattr__(self, "config", {"attackers": self.attackers, "seed": self.seed, **self.config})

    @property
    def changes_uploads(self) -> bool:
        """Whether attackers send something else than they should."""
        return self.lie is not None or self.conspire is not None

    @property
    def nobody(self) -> bool:
        """Whether there are no attackers, whatever N is."""
        return self.attackers == 0 if isinstance(self.attackers, (float, np.floating)) else len(self.attackers) == 0

    def members(self, num_clients: int) -> np.ndarray:
        """Bool `[N]`, who attacks.

        Raises:
          ValueError: an id that is not one of the N clients, a share above 0 that is less than half a client.
        """
        chosen = np.zeros(num_clients, bool)
        if isinstance(self.attackers, (float, np.floating)):
            count = round(self.attackers * num_clients)
            if count == 0 and not self.nobody:
                raise ValueError(
                    f"attackers={self.attackers:g} of the N={num_clients} clients is nobody: give a larger share, ids, or 0.0"
                )
            chosen[np.random.default_rng(self.seed).permutation(num_clients)[:count]] = True
            return chosen
        ids = np.asarray(self.attackers, np.int64)
        if ids.max(initial=-1) >= num_clients:
            raise ValueError(f"attackers={tuple(ids.tolist())} must be ids of the N={num_clients} clients, from 0 on")
        chosen[ids] = True
        return chosen

    def poisoned(self, client: ClientData, id_: jax.Array, attacks: jax.Array, num_classes: int) -> ClientData:
        """The data of one client as it trains on them; `attacks` says whether it is an attacker."""
        if self.poison is None:
            return client
        views: dict[str, ClientView] = {}
        for name, view in client.views.items():
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(name.encode())), id_)
            change = partial(_changed, self.poison, view, key, attacks, num_classes)
            views[name] = dataclasses.replace(view, change=change)
        return ClientData(views)

    def alone(self, key: Key, attacks: jax.Array, sent: PyTree, before: PyTree) -> PyTree:
        """What one client sends in place of `sent`, in the same types; `sent` itself unless it `attacks`.

        `before` is like `sent`: what the numbers are compared with.
        """
        lie = self.lie
        if lie is None:
            return sent

        def of_change(change: PyTree) -> PyTree:
            told = lie(key, change)
            _check_like("the lie of an attack must be like the change that it gets, a list of arrays", told, change)
            return told

        return _on_changes(of_change, lambda leaf: attacks, sent, before)

    def together(self, attackers: jax.Array, returned: jax.Array, sent: PyTree, before: PyTree) -> PyTree:
        """What the clients of a cohort send in place of `sent`, leaves `[C, ...]`.

        Args:
          attackers, returned: bool `[C]`.
          sent: of each client; that of a client that did not return is not read.
          before: like `sent`, what the numbers are compared with.
        """
        conspire = self.conspire
        if conspire is None:
            return sent
        honest, liars = returned & ~attackers, returned & attackers
        # If no honest client returned, attackers send their true change.
        active = liars & jnp.any(honest)

        def one_for_all(changes: PyTree) -> PyTree:
            # Of attackers that diverged, nothing is used.
            finite = [jnp.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in changes]
            able = liars & reduce(jnp.logical_and, finite)
            clean = jax.tree.map(lambda leaf: jnp.where(along(honest | able, leaf), leaf, 0), changes)
            told = conspire(clean, honest, able)
            _check_like(
                "conspire of an attack must give one change, like those that it gets", told, [leaf[0] for leaf in clean]
            )
            return jax.tree.map(lambda leaf: leaf[None], told)

        return _on_changes(one_for_all, lambda leaf: along(active, leaf), sent, before)


def _check_like(what: str, told: PyTree, given: PyTree) -> None:
    wrong = checks.mismatch(told, given)
    if wrong is not None:
        raise ValueError(f"{what}: {wrong}")


def _changed(
    poison: Poison, view: ClientView, key: Key, attacks: jax.Array, num_classes: int, batch: Batch, index: jax.Array
) -> Batch:
    """A batch as an attacker changes it; a sample is changed alike whenever it is taken."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    changed = poison(batch, jax.vmap(jax.random.uniform)(keys), view, num_classes)
    _check_like("poison of an attack must give a batch like the one that it gets", changed, batch)
    return jax.tree.map(lambda new, old: jnp.where(attacks, new, old), changed, batch)


def _on_changes(
    change: Callable[[PyTree], PyTree], chosen: Callable[[jax.Array], jax.Array], sent: PyTree, before: PyTree
) -> PyTree:
    """`before + change(sent - before)` where chosen, else `sent`; leaves that are not floating-point stay as they are."""
    leaves, structure = jax.tree.flatten(sent)
    old = jax.tree.leaves(before)
    real = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not real:  # nothing is sent that could be changed
        return sent
    wide = {i: jnp.promote_types(leaves[i].dtype, jnp.float32) for i in real}
    lies = change([leaves[i].astype(wide[i]) - old[i].astype(wide[i]) for i in real])
    for i, lie in zip(real, lies, strict=True):
        leaves[i] = jnp.where(chosen(leaves[i]), (old[i].astype(wide[i]) + lie).astype(leaves[i].dtype), leaves[i])
    return jax.tree.unflatten(structure, leaves)


def scaled(scale: Rate) -> Lie:
    """The lie that multiplies a change."""
    return lambda key, change: jax.tree.map(lambda leaf: jnp.asarray(scale, leaf.dtype) * leaf, change)
