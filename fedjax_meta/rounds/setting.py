"""What follows from a method and a federation together, and is the same in every round."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, masks, runtime
from fedjax_meta.aggregate import Rule
from fedjax_meta.algorithm import ROWS, State
from fedjax_meta.asynchronous import Asynchronous
from fedjax_meta.contract import Method, Trained
from fedjax_meta.data import FederatedData
from fedjax_meta.federation import Federation
from fedjax_meta.masks import Role
from fedjax_meta.schedules import Poisson
from fedjax_meta.types import Key, Mask, PyTree
from fedjax_meta.uploads import Chain

_SMALL = 1024
"""Number of entries up to which it costs more to start a loop over a leaf than to run it."""


class Kept(NamedTuple):
    """What ONE client keeps from round to round, and where.

    Attributes:
      place: its position in the data.
      seen: whether it has taken part.
      personal, memory, residual: as in `State`.
    """

    place: jax.Array
    seen: jax.Array
    personal: PyTree
    memory: PyTree
    residual: PyTree


class Outputs(NamedTuple):
    """What the server sees of each client, stacked to `[C, ...]` by the engine.

    Attributes:
      metrics, stacked: as in `Trained`.
      took_part: whether the client did any of its round.
      returned: whether its upload reached the server and counts.
      broken: int32, which leaf of what it returned is not finite, see `algorithm.Faults`.
      upload: its upload and weights, for an aggregator that needs all of them at once.
      read: what `collaborate` reads of it, where an attack may change that, else `()`.
    """

    metrics: dict[str, jax.Array]
    stacked: PyTree
    took_part: jax.Array
    returned: jax.Array
    broken: jax.Array
    upload: PyTree
    read: PyTree = ()


class Context(NamedTuple):
    """What every client of a cohort reads: the server's state, the data, the cohort's ids, the round's key."""

    state: State
    data: FederatedData
    ids: jax.Array
    key: Key


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """A method in a federation.

    Raises:
      ValueError: a federation that the method cannot run in.
    """

    method: Method
    federation: Federation

    def __post_init__(self) -> None:
        if self.method.collaborate is not None:
            for words in (self.method.collaborate.reads, self.method.collaborate.gives):
                parts({"personal": (), "memory": ()}, words)
            if self.method.collaborate.reads:
                self.refuse_hiding_uploads()
        self._refuse_what_the_method_does()
        self._refuse_handing_out_rows()
        self._refuse_asynchronous()
        if self.method.travels is not None and self.federation.uploads:
            raise ValueError(
                f"{self.method.name} sends other numbers than those that the simulation averages: uploads= cannot change them"
            )
        f = self.federation
        if self.method.server_optimizer is not None and f.server_lr is not None and f.server_optimizer is None:
            raise ValueError(
                f"{self.method.name} has a server optimiser of its own: server_lr={f.server_lr} alone would replace it by "
                "SGD; give server_optimizer too, or set the rate in the method"
            )

    @property
    def asynchronous(self) -> Asynchronous | None:
        """The schedule, if clients return to other models than they were given."""
        schedule = self.federation.schedule
        return schedule if isinstance(schedule, Asynchronous) else None

    def mixes_models(self, trained: Trained) -> bool:
        """Whether the server moves towards a client's model rather than along its change.

        Raises:
          ValueError: it does, but clients send no models.
        """
        if self.asynchronous is None or not self.asynchronous.mixes_models:
            return False
        if trained.pseudo_gradient is not None:
            raise ValueError(f"clients of {self.method.name} send gradients, but {self.asynchronous.name} mixes their models")
        return True

    @cached_property
    def personal(self) -> Mask:
        """The leaves that stay with their client."""
        return masks.having(self.method.roles, Role.PERSONAL)

    @cached_property
    def shared(self) -> Mask:
        """The leaves that the server optimiser moves."""
        return masks.having(self.method.roles, Role.SHARED)

    @cached_property
    def buffers(self) -> Mask:
        """The leaves that the server replaces by their average."""
        averaged = (Role.BUFFER, Role.PERSONAL) if self.federation.average_personal else (Role.BUFFER,)
        return masks.having(self.method.roles, *averaged)

    @cached_property
    def chain(self) -> Chain:
        """The upload transformations."""
        return Chain(self.federation.uploads)

    @cached_property
    def rule(self) -> Rule | None:
        """How stacked uploads become one; `None` for the weighted mean, which stacks nothing."""
        given = self.federation.aggregator
        return given if given is None or isinstance(given, Rule) else Rule.plain(given)

    @cached_property
    def stacks(self) -> bool:
        """Whether all uploads of a cohort are needed at once."""
        attack = self.federation.attack
        return self.rule is not None or (attack is not None and attack.conspire is not None and not attack.nobody)

    @cached_property
    def sends_differences(self) -> bool:
        """Whether clients send by how much buffers moved instead of their values."""
        return self.chain.sends_differences or (self.rule is not None and self.rule.differences)

    @cached_property
    def server(self) -> optax.GradientTransformation:
        """The server optimiser."""
        f = self.federation
        optimizer = optax.sgd(1.0) if self.method.server_optimizer is None else self.method.server_optimizer
        if f.server_lr is not None:
            optimizer = (optax.sgd if f.server_optimizer is None else f.server_optimizer)(f.server_lr)
        return optimizer

    def divisor(self, num_clients: int) -> float:
        """What a sum is divided by where the divisor is fixed: C, or what the schedule draws on average."""
        schedule = self.federation.schedule
        return schedule.expected(num_clients) if isinstance(schedule, Poisson) else self.federation.cohort_size

    @property
    def noisy(self) -> bool:
        """Whether uploads are noised for differential privacy, which does not cover what clients keep."""
        return self.chain.fixed_divisor

    def _refuse_asynchronous(self) -> None:
        """Raises `ValueError` under an asynchronous schedule for what more than changes of shared parameters would make stale."""
        if self.asynchronous is None:
            return
        method, name = self.method, self.asynchronous.name
        more = {
            "reads what clients keep after a round (collaborate)": method.collaborate is not None,
            "keeps more at the server than its model (update_extra)": method.update_extra is not None,
            "steps along more than a mean of changes (direction)": method.direction is not None,
            "divides a mean of changes by another mean (divides_by_statistics)": method.divides_by_statistics,
            "sends other numbers than those that the simulation averages (travels)": method.travels is not None,
        }
        for what, is_so in more.items():
            if is_so:
                raise ValueError(
                    f"{method.name} {what}: {name} takes methods whose uploads are changes of shared leaves alone"
                )
        if self.noisy:
            raise ValueError(f"{name} draws no cohorts at random, which noise needs: leave one of them out")
        if self.federation.average_personal:
            raise ValueError(f"average_personal takes means of whole leaves, which {name} cannot weigh: leave one of them out")

    def _refuse_what_the_method_does(self) -> None:
        method, f = self.method, self.federation
        given = {transform.name for transform in f.uploads}
        given |= {"weighting"} if f.weighting not in (None, method.weighting) else set()
        given |= {"server_optimizer"} if f.server_optimizer is not None else set()
        remembers = self.rule is not None and jax.tree.leaves(self.rule.init(jnp.zeros(1)))
        given |= {"an aggregator with a memory"} if remembers else set()
        for name, why in method.refuses.items():
            if name in given:
                raise ValueError(f"{method.name} cannot go with {name}: {why}")

    def _refuse_handing_out_rows(self) -> None:
        method = self.method
        parts({"personal": (), "memory": ()}, method.new_client_reads)
        if self.noisy and self.federation.new_client is None and method.new_client is not None and method.new_client_reads:
            raise ValueError(
                f"new clients of {method.name} read what trained clients keep ({method.new_client_reads}), which noise does not "
                'cover: give Federation(new_client="fresh"), with which they start from the server\'s model'
            )

    def refuse_hiding_uploads(self) -> None:
        """Raises `ValueError` where uploads are hidden from the server; for a method whose server must see them."""
        hiding = sorted({"noise", "mask"} & {transform.name for transform in self.federation.uploads})
        if hiding:
            raise ValueError(
                f"{self.method.name} lets the server see what each client sends by itself, which {' and '.join(hiding)} "
                "cannot cover"
            )

    def read(self, personal: PyTree, memory: PyTree) -> PyTree:
        """What the server reads of a client for `collaborate`."""
        collaborate = self.method.collaborate
        return () if collaborate is None else parts({"personal": personal, "memory": memory}, collaborate.reads)


def parts(kept: Mapping[str, PyTree], names: str) -> tuple[PyTree, ...]:
    """The parts that a `Collaboration` names, e.g. "personal+memory"."""
    chosen = [name for name in names.split("+") if name]
    for name in chosen:
        checks.one_of("what a collaboration reads or gives", name, kept)
    return tuple(kept[name] for name in chosen)


def without_rows(state: State) -> State:
    """The state without what clients keep."""
    nothing: dict[str, Any] = dict.fromkeys(ROWS)
    return state._replace(**nothing)


def must_fit(what: str, given: PyTree, wanted: PyTree) -> None:
    """Raises `ValueError` unless two trees have the same structure, shapes and types."""
    odd = checks.mismatch(given, wanted)
    if odd is not None:
        raise ValueError(f"{what}: {odd}")


def where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the condition, whose axes are the leading ones of every leaf, holds."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        shape = jnp.shape(condition)
        return jnp.where(jnp.reshape(condition, shape + (1,) * (jnp.ndim(a) - len(shape))), a, b)

    return jax.tree.map(choose, new, old)


def zeros_unless(condition: jax.Array, tree: PyTree) -> PyTree:
    """The tree, its floating-point leaves 0 unless the condition holds: NaN times a weight of 0 would stay NaN."""

    def choose(leaf: Any) -> Any:
        return where(condition, leaf, jnp.zeros_like(leaf)) if _is_float(leaf) else leaf

    return jax.tree.map(choose, tree)


def first_broken(tree: PyTree) -> jax.Array:
    """Which leaf of a tree, counted as by `leaf_names`, is the first that holds NaN or infinity; -1 if there is none. int32."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if _is_float(leaf)]

    def exact() -> jax.Array:
        flags = jnp.stack([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves])
        return jnp.where(jnp.any(flags), jnp.argmax(flags), -1).astype(jnp.int32)

    def none() -> jax.Array:
        return jnp.full((), -1, jnp.int32)

    if not leaves:
        return none()
    if not runtime.on_cpu() or sum(leaf.size for leaf in leaves) < _SMALL:
        return exact()
    # XLA's product of vectors is faster on a CPU than its reductions, and one number says it of all leaves. Only where it is not
    # finite, which an overflow may be, too, each leaf is looked at.
    return jax.lax.cond(jnp.isfinite(_sum_of_squares(leaves)), none, exact)


def _sum_of_squares(leaves: Sequence[jax.Array]) -> jax.Array:
    """Of all entries; small leaves are put together first, so that they cost one product."""
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)).reshape(-1) for leaf in leaves]
    small = [leaf for leaf in wide if leaf.size < _SMALL]
    vectors = [leaf for leaf in wide if leaf.size >= _SMALL] + ([jnp.concatenate(small)] if small else [])
    return sum((jnp.vdot(vector, vector).real for vector in vectors), jnp.zeros(()))


def leaf_names(tree: PyTree) -> list[str]:
    """Paths of the floating-point leaves of a tree, e.g. `model['head']['kernel']`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, leaf in leaves if _is_float(leaf)]


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact))
