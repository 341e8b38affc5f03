"""Attacks on a federation, by client id: on an attacker's data, or on everything that it sends.

An attack is an option of every federation: `Federation(attack=sign_flip(0.2, scale=10.0))`. Axis letters: C cohort, N clients, B
batch, K classes.

- An attack on data changes the samples that an attacker trains on. Everything else is honest: its numbers of samples, what it
  keeps, and the samples that it tests on.
- An attack on what is sent changes all of it: the upload that is averaged, what the server sees of each client separately
  (`Trained.stacked`), and what `collaborate` reads (models of FedAMP and FedFomo, heads of FedPAC). What an attacker keeps for
  itself stays honest; it takes nothing of what a collaboration gives, so that its lies never come back to it. How much a client
  counts stays honest, too.
- Such an attack acts on changes: on the pseudo-gradient of shared leaves, and for numbers that are sent as values (buffers, renewed
  extra state, personal leaves and memories that the server reads) on their difference from what the client got or had before.
- It comes after the client halves of the upload transformations: an attacker does not clip itself. The rule for that is
  `aggregate.norm_bounding`, at the server. Noise and masks cannot stand an upload that is not clipped, and are refused.
- Where a method's simulation averages other numbers than a client sends (pFedHN), the attack is on those that are averaged.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.aggregate import Entry
from fedjax_meta.aggregate.distances import along, average, equal_shares, norms, squared_distances
from fedjax_meta.aggregate.registry import made, name_and_options
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.task import Batch
from fedjax_meta.types import Key, PyTree, Rate, Scalar

Poison = Callable[[Batch, jax.Array, ClientView, int], Batch]
"""`(batch, chances [B] in [0, 1), view, K) -> batch`. The chances are fixed for each sample of a view of a client."""

Lie = Callable[[Key, PyTree], PyTree]
"""`(key, change) -> change`, of one client by itself."""

Conspiracy = Callable[[PyTree, jax.Array, jax.Array], PyTree]
"""`(changes [C, ...], honest [C], attackers [C]) -> one change`, which all attackers send. It sees all honest changes of a round."""


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
        object.__setattr__(
            self, "config", {"attackers": self.attackers, "seed": self.seed, **{k: v for k, v in self.config.items()}}
        )

    @property
    def changes_uploads(self) -> bool:
        """Whether attackers send something else than they should."""
        return self.lie is not None or self.conspire is not None

    def members(self, num_clients: int) -> np.ndarray:
        """Bool `[N]`, who attacks.

        Raises:
          ValueError: an id that is not one of the N clients.
        """
        chosen = np.zeros(num_clients, bool)
        if isinstance(self.attackers, (float, np.floating)):
            order = np.random.default_rng(self.seed).permutation(num_clients)
            chosen[order[: round(self.attackers * num_clients)]] = True
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
        views = {}
        for name, view in client.views.items():
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(name.encode())), id_)
            fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
            views[name] = _PoisonedView(**fields, poison=self.poison, key=key, attacks=attacks, num_classes=num_classes)
        return ClientData(views)

    def alone(self, key: Key, attacks: jax.Array, sent: PyTree, before: PyTree) -> PyTree:
        """What one client sends in place of `sent`, in the same types; `sent` itself unless it `attacks`.

        `before` is like `sent`: what the numbers are compared with.
        """
        lie = self.lie
        if lie is None:
            return sent
        return _on_changes(lambda change: lie(key, change), lambda leaf: attacks, sent, before)

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
        # With nobody to see, attackers have nothing to go by and stay honest.
        active = liars & jnp.any(honest)

        def one_for_all(changes: PyTree) -> PyTree:
            clean = jax.tree.map(lambda leaf: jnp.where(along(returned, leaf), leaf, 0), changes)
            return jax.tree.map(lambda leaf: leaf[None], conspire(clean, honest, liars))

        return _on_changes(one_for_all, lambda leaf: along(active, leaf), sent, before)


@dataclasses.dataclass(frozen=True)
class _PoisonedView(ClientView):
    """A view whose samples an attacker changes when they are taken."""

    poison: Poison | None = None
    key: Key | None = None
    attacks: Any = False
    num_classes: int = 0

    def take(self, index: jax.Array, weight: jax.Array) -> Batch:
        batch = super().take(index, weight)
        assert self.poison is not None and self.key is not None
        keys = jax.vmap(jax.random.fold_in, (None, 0))(self.key, index)
        changed = self.poison(batch, jax.vmap(jax.random.uniform)(keys), self, self.num_classes)
        return jax.tree.map(lambda new, old: jnp.where(self.attacks, new, old), changed, batch)


def _on_changes(
    change: Callable[[PyTree], PyTree], chosen: Callable[[jax.Array], jax.Array], sent: PyTree, before: PyTree
) -> PyTree:
    """`before + change(sent - before)` where chosen, else `sent`; leaves that are not floating-point stay as they are."""
    leaves, structure = jax.tree.flatten(sent)
    old = jax.tree.leaves(before)
    real = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    wide = {i: jnp.promote_types(leaves[i].dtype, jnp.float32) for i in real}
    lies = change([leaves[i].astype(wide[i]) - old[i].astype(wide[i]) for i in real])
    for i, lie in zip(real, lies, strict=True):
        leaves[i] = jnp.where(chosen(leaves[i]), (old[i].astype(wide[i]) + lie).astype(leaves[i].dtype), leaves[i])
    return jax.tree.unflatten(structure, leaves)


def label_flip(attackers: float | Sequence[int], *, mapping: Sequence[int] | None = None, seed: int = 0) -> Attack:
    """Attackers train on wrong labels: y becomes K - 1 - y, or `mapping[y]`.

    Fang, Cao, Jia, Gong: "Local model poisoning attacks to Byzantine-robust federated learning", USENIX Security 2020, section 4.

    Args:
      attackers, seed: as in `Attack`.
      mapping: the new class of each of the K classes.

    Raises:
      ValueError: on use, a mapping that has not K classes, or targets that are no classes.
    """
    given = None if mapping is None else np.asarray(mapping)

    def poison(batch: Batch, chance: jax.Array, view: ClientView, num_classes: int) -> Batch:
        del chance, view
        _needs_classes("label_flip", num_classes)
        new = np.arange(num_classes)[::-1] if given is None else given
        if (
            new.shape != (num_classes,)
            or not np.issubdtype(new.dtype, np.integer)
            or new.min() < 0
            or new.max() >= num_classes
        ):
            raise ValueError(f"mapping={mapping} must give a class for each of the K={num_classes} classes")
        return batch._replace(y=jnp.asarray(new, batch.y.dtype)[batch.y])

    return Attack(name="label_flip", attackers=attackers, seed=seed, poison=poison, config={"mapping": mapping})


def backdoor(
    attackers: float | Sequence[int],
    *,
    target: int = 0,
    size: int = 3,
    value: float | None = None,
    share: float = 0.5,
    boost: Rate = 1.0,
    seed: int = 0,
) -> Attack:
    """Attackers put a pattern on a share of their samples and label these as the target class.

    Pattern: Gu, Dolan-Gavitt, Garg, "BadNets", arXiv 1708.06733. In federated learning: Bagdasaryan, Veit, Hua, Estrin, Shmatikov,
    "How to backdoor federated learning", AISTATS 2020, whose model replacement is a `boost` of N over the number of attackers; Sun
    et al., arXiv 1911.07963. `stamped` and `backdoor_success` measure it.

    Args:
      attackers, seed: as in `Attack`.
      target: the class.
      size: the pattern is a square of so many pixels in the last rows and columns; of a sample that is a vector the last
        `size * size` numbers.
      value: of the pattern, in the numbers that are stored (before scaling); 255 for integers and 1 for other inputs when not
        given.
      share: of an attacker's samples, in [0, 1].
      boost: what attackers multiply their changes by.

    Raises:
      ValueError: an option out of range; on use, a target that is not one of the K classes.
    """
    checks.count("target", target, least=0)
    checks.count("size", size)
    checks.share("share", share)
    checks.positive("boost", boost)

    def poison(batch: Batch, chance: jax.Array, view: ClientView, num_classes: int) -> Batch:
        _needs_classes("backdoor", num_classes)
        if target >= num_classes:
            raise ValueError(f"target={target} must be one of the K={num_classes} classes")
        stored = jnp.asarray(_value(view.x.dtype, value), batch.x.dtype)
        if view.offset is not None and view.scale is not None:
            stored = (stored - view.offset) * view.scale
        stored = jnp.broadcast_to(stored, batch.x.shape[1:]).astype(batch.x.dtype)
        chosen = chance < share
        here = along(chosen, batch.x) & _pattern(batch.x.shape[1:], size)
        return batch._replace(x=jnp.where(here, stored, batch.x), y=jnp.where(chosen, target, batch.y))

    options = {"target": target, "size": size, "value": value, "share": share, "boost": boost}
    boosted = None if isinstance(boost, (int, float)) and boost == 1 else _scaled(boost)
    return Attack(name="backdoor", attackers=attackers, seed=seed, poison=poison, lie=boosted, config=options)


def stamped(data: FederatedData, view: str = "test_query", *, size: int = 3, value: float | None = None) -> FederatedData:
    """The data with the pattern of `backdoor` on all samples of one view, for `evaluate`; labels stay true.

    Raises:
      ValueError: a view that the data do not have.
    """
    start, count, x = np.asarray(data.start.get(view, ())), np.asarray(data.sizes(view)), np.array(data.x)
    rows = np.concatenate([np.arange(s, s + n) for s, n in zip(start, count, strict=True)])
    x[rows] = np.where(_pattern(x.shape[1:], size), np.asarray(_value(x.dtype, value), x.dtype), x[rows])
    return dataclasses.replace(data, x=x if isinstance(data.x, np.ndarray) else jnp.asarray(x))


def backdoor_success(confusion: ArrayLike, target: int) -> float:
    """The share of samples of other classes that are predicted as the target.

    Args:
      confusion: `[N, K, K]` of an evaluation on `stamped` data, rows true, columns predicted.
      target: the class.

    Example:
      >>> backdoor_success([[[5, 0], [3, 1]]], target=0)
      0.75
    """
    others = np.delete(np.asarray(confusion).sum(0), target, 0)
    return float(others[:, target].sum() / max(others.sum(), 1))


def sign_flip(attackers: float | Sequence[int], *, scale: Rate = 1.0, seed: int = 0) -> Attack:
    """Attackers send their change times `-scale`.

    Li, Xu, Chen, Giannakis, Ling: "RSA: Byzantine-robust stochastic aggregation methods", AAAI 2019, section 5.

    Raises:
      ValueError: a scale that is not above 0.
    """
    checks.positive("scale", scale)
    return Attack(name="sign_flip", attackers=attackers, seed=seed, lie=_scaled(-1 * scale), config={"scale": scale})


def gaussian(attackers: float | Sequence[int], *, deviation: Rate = 1.0, seed: int = 0) -> Attack:
    """Attackers send Gaussian noise of mean 0 in place of their change.

    Blanchard et al., NIPS 2017, section 5, with a deviation of 200 in gradients.

    Raises:
      ValueError: a deviation that is not above 0.
    """
    checks.positive("deviation", deviation)

    def lie(key: Key, change: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(change)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        noise = [deviation * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, noise)

    return Attack(name="gaussian", attackers=attackers, seed=seed, lie=lie, config={"deviation": deviation})


def alie(attackers: float | Sequence[int], *, z: Rate | None = None, seed: int = 0) -> Attack:
    """ "A little is enough": attackers send the honest mean less z standard deviations of each number.

    Baruch, Baruch, Goldberg: "A little is enough: circumventing defenses for distributed learning", NeurIPS 2019, Algorithm 3.
    Mean and deviation are those of the honest clients, where the paper estimates them from the attackers' own data.

    Args:
      attackers, seed: as in `Attack`.
      z: how many deviations; when not given the paper's largest, the normal quantile of (n - m - s) / (n - m) with
        s = floor(n / 2 + 1) - m, of n clients that returned, m of which attack.
    """
    if z is not None:
        checks.not_negative("z", z)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        mean, deviation = _moments(changes, honest)
        amount = largest_z(jnp.sum(honest | liars), jnp.sum(liars)) if z is None else z
        return jax.tree.map(lambda m, d: m - jnp.asarray(amount, m.dtype) * d, mean, deviation)

    return Attack(name="alie", attackers=attackers, seed=seed, conspire=conspire, config={"z": z})


def largest_z(clients: Scalar, attackers: Scalar) -> jax.Array:
    """z_max of "A little is enough", equation 3: with it, fewer honest uploads than not lie further from the mean than a lie.

    Example:
      >>> round(float(largest_z(50, 24)), 2)  # (50 - 24 - 2) / 26
      1.43
    """
    supporters = jnp.floor(clients / 2 + 1) - attackers
    share = (clients - attackers - supporters) / jnp.maximum(clients - attackers, 1)
    # At half of the clients or more there is no bound.
    return jax.scipy.special.ndtri(jnp.clip(share, 1e-6, 1 - 1e-6))


def ipm(attackers: float | Sequence[int], *, scale: Rate = 0.5, seed: int = 0) -> Attack:
    """Inner-product manipulation: attackers send the honest mean times `-scale`.

    Xie, Koyejo, Gupta: "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2019, equation 1.

    Args:
      attackers, seed: as in `Attack`.
      scale: epsilon, above 0: small values (0.1 to 0.5) against Krum and medians, large ones against means.
    """
    checks.positive("scale", scale)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        del liars
        return jax.tree.map(lambda leaf: jnp.asarray(-scale, leaf.dtype) * leaf, average(changes, equal_shares(honest)))

    return Attack(name="ipm", attackers=attackers, seed=seed, conspire=conspire, config={"scale": scale})


DIRECTIONS = ("deviation", "sign", "unit")


def min_max(attackers: float | Sequence[int], *, direction: str = "deviation", seed: int = 0) -> Attack:
    """Attackers move the honest mean so far that they are no further from any honest change than two of these are apart.

    Shejwalkar, Houmansadr: "Manipulating the Byzantine: optimizing model poisoning attacks and defenses for federated learning", NDSS
    2021, section IV-C. They send mean + gamma * p with the largest gamma. Differs from the paper: gamma is the root of a quadratic
    equation instead of the end of a search.

    Args:
      attackers, seed: as in `Attack`.
      direction: p, the negative of the deviation of each number ("deviation"), of the sign of the mean ("sign"), or of the mean over its
        norm ("unit").

    Raises:
      ValueError: an unknown direction.
    """
    checks.one_of("direction", direction, DIRECTIONS)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        del liars
        mean, p = _mean_and_direction(changes, honest, direction)
        apart = jax.tree.map(lambda m, leaf: m - leaf, mean, changes)
        pairs = honest[:, None] & honest[None, :]
        most = jnp.max(squared_distances(changes), where=pairs, initial=0)
        # |m + gamma p - x_i|^2 = a gamma^2 + 2 b_i gamma + c_i <= most for every honest i.
        a, c = norms(jax.tree.map(lambda leaf: leaf[None], p))[0] ** 2, norms(apart) ** 2
        b = _inner(apart, p)
        root = (-b + jnp.sqrt(jnp.maximum(b**2 + a * (most - c), 0))) / jnp.where(a > 0, a, 1)
        gamma = jnp.where(a > 0, jnp.min(root, where=honest, initial=jnp.inf), 0)
        return _moved(mean, gamma, p)

    return Attack(name="min_max", attackers=attackers, seed=seed, conspire=conspire, config={"direction": direction})


def min_sum(attackers: float | Sequence[int], *, direction: str = "deviation", seed: int = 0) -> Attack:
    """As `min_max`, with sums: no further from all honest changes than the outermost of these is (squared distances).

    Shejwalkar, Houmansadr, NDSS 2021, section IV-C.

    Args:
      attackers, direction, seed: as in `min_max`.

    Raises:
      ValueError: an unknown direction.
    """
    checks.one_of("direction", direction, DIRECTIONS)

    def conspire(changes: PyTree, honest: jax.Array, liars: jax.Array) -> PyTree:
        del liars
        mean, p = _mean_and_direction(changes, honest, direction)
        sums = jnp.sum(squared_distances(changes), 1, where=honest[None, :])
        most = jnp.max(sums, where=honest, initial=0)
        # sum_i |m + gamma p - x_i|^2 = n a gamma^2 + sum_i |m - x_i|^2, because the differences from the mean add up to 0.
        spread = jnp.sum(norms(jax.tree.map(lambda m, leaf: m - leaf, mean, changes)) ** 2, where=honest)
        a = jnp.sum(honest) * norms(jax.tree.map(lambda leaf: leaf[None], p))[0] ** 2
        gamma = jnp.where(a > 0, jnp.sqrt(jnp.maximum(most - spread, 0) / jnp.where(a > 0, a, 1)), 0)
        return _moved(mean, gamma, p)

    return Attack(name="min_sum", attackers=attackers, seed=seed, conspire=conspire, config={"direction": direction})


ATTACKS: Mapping[str, Entry] = {
    "label_flip": Entry(label_flip, "trains on labels K - 1 - y; options: attackers, mapping, seed"),
    "backdoor": Entry(
        backdoor, "a pattern that means a target class; options: attackers, target, size, value, share, boost, seed"
    ),
    "sign_flip": Entry(sign_flip, "sends its change times -scale; options: attackers, scale, seed"),
    "gaussian": Entry(gaussian, "sends noise; options: attackers, deviation, seed"),
    "alie": Entry(alie, "honest mean less z deviations; options: attackers, z, seed"),
    "ipm": Entry(ipm, "honest mean times -scale; options: attackers, scale, seed"),
    "min_max": Entry(min_max, "as far as two honest changes are apart; options: attackers, direction, seed"),
    "min_sum": Entry(min_sum, "as far as the outermost honest change in sum; options: attackers, direction, seed"),
}
"""Attacks by name; `attackers` is a share of the clients or a tuple of ids."""


def parse(text: str) -> Attack:
    """An attack from text, `NAME:attackers=SHARE,OPTION=VALUE,...`.

    Raises:
      ValueError: an unknown name or option, a value that is refused.

    Example:
      >>> parse("sign_flip:attackers=0.2,scale=10").config
      {'attackers': 0.2, 'seed': 0, 'scale': 10}
    """
    name, options = name_and_options(text)
    checks.one_of("attack", name, ATTACKS)
    return made(ATTACKS[name], name, options)


def _scaled(scale: Rate) -> Lie:
    return lambda key, change: jax.tree.map(lambda leaf: jnp.asarray(scale, leaf.dtype) * leaf, change)


def _needs_classes(name: str, num_classes: int) -> None:
    if num_classes == 0:
        raise ValueError(f"{name} needs class labels, but the data have real targets (num_classes is 0)")


def _pattern(shape: tuple[int, ...], size: int) -> np.ndarray:
    """Bool, like one sample: where the pattern of a backdoor is."""
    here = np.zeros(shape, bool)
    if len(shape) > 1:
        here[-size:, -size:] = True
    else:
        here[-size * size :] = True
    return here


def _value(dtype: Any, value: float | None) -> float:
    return value if value is not None else 255.0 if jnp.issubdtype(dtype, jnp.integer) else 1.0


def _moments(changes: PyTree, honest: jax.Array) -> tuple[PyTree, PyTree]:
    """(mean, population standard deviation) of each number over the honest clients."""
    share = equal_shares(honest)
    mean = average(changes, share)
    square = average(jax.tree.map(lambda leaf, m: (leaf - m) ** 2, changes, mean), share)
    return mean, jax.tree.map(jnp.sqrt, square)


def _mean_and_direction(changes: PyTree, honest: jax.Array, direction: str) -> tuple[PyTree, PyTree]:
    mean, deviation = _moments(changes, honest)
    if direction == "deviation":
        return mean, jax.tree.map(jnp.negative, deviation)
    if direction == "sign":
        return mean, jax.tree.map(lambda leaf: -jnp.sign(leaf), mean)
    length = norms(jax.tree.map(lambda leaf: leaf[None], mean))[0]
    return mean, jax.tree.map(lambda leaf: -leaf / jnp.where(length > 0, length, 1).astype(leaf.dtype), mean)


def _inner(stacked: PyTree, one: PyTree) -> jax.Array:
    """Inner products of each client's tree with one tree, `[C]`."""
    products = jax.tree.map(lambda leaf, v: jnp.sum((leaf * v).reshape(leaf.shape[0], -1), 1), stacked, one)
    return sum(jax.tree.leaves(products), start=jnp.zeros(()))


def _moved(start: PyTree, amount: jax.Array, direction: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + amount.astype(a.dtype) * b, start, direction)
