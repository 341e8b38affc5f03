"""What follows from a method and a federation together, and is the same in every round."""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import jax
import optax

from fedjax_meta import masks
from fedjax_meta.aggregate import Rule
from fedjax_meta.algorithm import State
from fedjax_meta.asynchronous import Asynchronous
from fedjax_meta.contract import Method, Trained
from fedjax_meta.data import FederatedData
from fedjax_meta.federation import Federation
from fedjax_meta.masks import Role
from fedjax_meta.rounds.refusals import refuse
from fedjax_meta.rounds.trees import parts
from fedjax_meta.schedules import Poisson
from fedjax_meta.types import Key, Mask, PyTree, Rate
from fedjax_meta.uploads import Chain


class CohortClient(NamedTuple):
    """A client of the cohort.

    Attributes:
      position: its position in the data; differs from its id when the data are a subset.
      seen: whether it has taken part before.
    """

    position: jax.Array
    seen: jax.Array


class Kept(NamedTuple):
    """What ONE client keeps from round to round: `personal`, `memory` and `residual` as in `State`."""

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
      read: what `collaborate` reads of it, where an attack may change that, else `()`. Where attackers act together, it is an
        `attacked.Conspirator` until `attacked.by_cohort`.
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
        refuse(self.method, self.federation)
        _ = self.chain  # made here, since a round reads it first inside of programs, whose tracers it must not keep

    @property
    def asynchronous(self) -> Asynchronous | None:
        """The schedule, if clients return to other models than they were given."""
        schedule = self.federation.schedule
        return schedule if isinstance(schedule, Asynchronous) else None

    @property
    def mixes_models(self) -> bool:
        """Whether the server moves towards a client's model rather than along its change."""
        return self.asynchronous is not None and self.asynchronous.mixes_models

    def check_mixture(self, trained: Trained) -> None:
        """Raises `ValueError` if models are mixed, but clients send none."""
        if self.asynchronous is not None and self.mixes_models and trained.pseudo_gradient is not None:
            raise ValueError(f"clients of {self.method.name} send gradients, but {self.asynchronous.name} mixes their models")

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
        """The server optimiser; of separate models, one for each, whose state has their axis first."""
        f = self.federation
        optimizer = optax.sgd(1.0) if self.method.server_optimizer is None else self.method.server_optimizer
        if f.server_lr is not None:
            optimizer = (optax.sgd if f.server_optimizer is None else f.server_optimizer)(f.server_lr)
        if self.method.separate_models:
            return optax.GradientTransformation(jax.vmap(optimizer.init), jax.vmap(optimizer.update))
        return optimizer

    @property
    def plain_server_lr(self) -> Rate:
        """The rate of the server's steps where these are plain gradient descent, else 1."""
        f = self.federation
        return 1.0 if f.server_lr is None or f.server_optimizer is not None else f.server_lr

    def divisor(self, num_clients: int) -> float:
        """What a sum is divided by where the divisor is fixed: C, or what the schedule draws on average."""
        schedule = self.federation.schedule
        return schedule.expected(num_clients) if isinstance(schedule, Poisson) else self.federation.cohort_size

    def sent(self, upload: PyTree) -> PyTree:
        """What upload transformations change of (the model's part, statistics): no statistics that the server computes itself."""
        return upload if self.method.sends_statistics else (upload[0], ())

    def with_unsent(self, sent: PyTree, upload: PyTree) -> PyTree:
        """A transformed upload, with the statistics that are not sent as they are in `upload`."""
        return sent if self.method.sends_statistics else (sent[0], upload[1])

    def carries(self, upload: PyTree) -> PyTree:
        """Which numbers of `sent` are increments, bools: what is left out of them is lost unless the next upload has it.

        Buffers, own leaves that are averaged and renewed statistics are values: the next upload has what was left out anyway.
        So it has where statistics are changes of a memory that follows what was sent. The amounts that a sum is divided by
        (numbers of samples or of steps) are no increments either: those of two rounds must not be added up.
        """
        part, statistics = self.sent(upload)
        increments = masks.merge(
            jax.tree.map(lambda leaf: True, masks.split(part, self.shared)[0]),
            jax.tree.map(lambda leaf: False, masks.split(part, self.buffers)[0]),
        )
        method = self.method
        adds_up = not (method.statistics_renew_extra or method.weighs_by_statistics) and method.remember is None
        return increments, jax.tree.map(lambda leaf: adds_up, statistics)

    def read(self, personal: PyTree, memory: PyTree) -> PyTree:
        """What the server reads of a client for `collaborate`."""
        collaborate = self.method.collaborate
        return () if collaborate is None else parts({"personal": personal, "memory": memory}, collaborate.reads)


def rows_of(state: State) -> Kept:
    """What the clients of a state keep, leaves `[N, ...]`."""
    return Kept(state.personal, state.memory, state.residual)
