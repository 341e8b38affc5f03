"""What a paper says: a `Method`, made of pure functions for ONE client and for the server.

A method knows nothing of cohorts, lanes or devices, of clients that drop out, or of how uploads are compressed or made private.
That is a `Federation`. `rounds.federate` puts both together. Axis letters: N clients, C cohort, K classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.aggregate import WEIGHTINGS
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Roles, Scalar, Updates, Variables


class Received(NamedTuple):
    """What ONE client holds when its round, or its test, begins.

    Attributes:
      model: the server's model with the client's own personal leaves in place.
      memory: the client's memory; fresh from `Method.init_memory` for a client that has not taken part yet.
      extra: the server's extra state.
      round: int32 scalar, the number of finished rounds.
      seen: bool scalar, whether the client has taken part before.
      shared_key: the same for all clients of a round and for `collaborate`, for random draws that they share. In a test, the
        test's own key.
    """

    model: PyTree
    memory: PyTree
    extra: PyTree
    round: jax.Array
    seen: Any
    shared_key: Key


class Trained(NamedTuple):
    """What ONE client returns after its round.

    Attributes:
      model: the client's model, whole. Personal leaves stay with the client, shared leaves and buffers go to the server, frozen
        leaves are ignored.
      metrics: diagnostics, a dict of scalars.
      memory: the client's memory for its next round, in the structure of `Method.init_memory`.
      pseudo_gradient: what the server optimiser descends along, like `model`; the server's model minus `model` by default. A
        method whose clients send gradients gives them here. Only shared leaves are read.
      statistics: anything else that the server averages over the cohort.
      statistics_weight: how much the client counts in that average, a scalar or a prefix tree of `statistics`; the client's
        weight by default. Behind `uploads.mask` it is at most 1; a client with more is left out.
      stacked: what the server must see of each client separately; it arrives as `[C, ...]`. Upload transformations do not change
        it.
      weight: how much the client counts, a scalar. By default it follows from the weighting of the method or the federation; a
        rule gives it only where it depends on what happened in the round. With weight 0 the client did not take part.
    """

    model: PyTree
    metrics: dict[str, jax.Array]
    memory: PyTree = ()
    pseudo_gradient: Updates | None = None
    statistics: PyTree = ()
    statistics_weight: PyTree | None = None
    stacked: PyTree = ()
    weight: Scalar | None = None


class Cohort(NamedTuple):
    """What the server holds of a cohort after a round; leaves are `[C, ...]` in the order of `ids`.

    Attributes:
      ids: int32 `[C]`, client ids in the whole population.
      positions: int32 `[C]`, of these clients in the data at hand; differs from `ids` when the data are a subset.
      returned: bool `[C]`, whose results reached the server with a weight above 0.
      personal: personal leaves after training.
      memory: memories after training.
      stacked: what the clients sent separately.
      lanes: how many clients to process side by side, for `engine.map_clients`.
    """

    ids: jax.Array
    positions: jax.Array
    returned: jax.Array
    personal: PyTree
    memory: PyTree
    stacked: PyTree
    lanes: int | None = None


class Population(NamedTuple):
    """What the server could give to a new client, which is none of the N.

    Attributes:
      model: the server's model.
      extra: the server's extra state.
      personal: personal leaves of all N clients, `[N, ...]`.
      memory: memories of all clients, `[N, ...]`.
      seen: bool `[N]`; rows of clients that have not taken part are not trained.
      round: int32 scalar, the number of finished rounds.
      lanes: as in `Cohort`.
    """

    model: PyTree
    extra: PyTree
    personal: PyTree
    memory: PyTree
    seen: jax.Array
    round: jax.Array
    lanes: int | None = None


class Collaboration(NamedTuple):
    """How clients of a cohort get something of each other, e.g. through a client x client matrix (`aggregate.combine`).

    Attributes:
      mix: `(key, state, cohort, data) -> (personal, memory)`, both `[C, ...]`. `state` holds the new model and extra state; its
        rows of all clients are there only for a method with `whole_population`. A third result, if there is one, is a dict of
        diagnostics `[C]`, which join the clients' metrics.
      reads: "personal" or "memory" or both, joined by +, or "": what clients upload for it (beside `stacked`). With "" the mix
        may use a client's own rows for that client alone.
      gives: the same, what clients download afterwards.

    `costs.traffic` and the checks on noise use `reads` and `gives`. Nothing verifies that `mix` keeps to them.
    """

    mix: Callable[[Key, Any, Cohort, FederatedData], tuple[PyTree, PyTree] | tuple[PyTree, PyTree, dict[str, jax.Array]]]
    reads: str
    gives: str


def no_memory(key: Key, model: PyTree, num_clients: int) -> PyTree:
    """The memory of clients that keep nothing."""
    del key, model, num_clients
    return ()


def no_extra(model: PyTree, data: FederatedData) -> PyTree:
    """The extra state of a server that keeps nothing but its model."""
    del model, data
    return ()


REFUSABLE = {
    "weighting": "one other than the method's own",
    "server_optimizer": "any",
    "aggregator": "any but the mean",
    "an aggregator with a memory": "one whose result follows from earlier rounds, too",
    "an aggregator of changes": "one that bounds by how much uploads change (`Rule.differences`)",
    "clip without noise": "clip or adaptive_clip where no noise follows",
    "feedback": "transformations that add what they left out to the next upload",
    "participation": "clients that crash, are late or do less work",
    "attack": "any",
    "a part of the clients": "a cohort that may lack some of them",
}
"""What `Method.refuses` can name beside upload transformations, and what it stands for."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Method:
    """A federated learning method, independent of how its rounds are run.

    Attributes:
      init: `key -> model`, the tree that the functions below work on: the task's variables, or those and more.
      client: one client's round, `(key, received, data) -> Trained`.
      personalize: `(key, received, support) -> variables`, what a client does with its support view before it predicts.
      predict: `(variables, x [B, ...]) -> outputs [B, ...]`, as `Task.predict`.
      roles: `masks.Role` of each leaf of the model; see `masks.roles`.
      weighting: how much a client counts by default: "samples", "query" or "uniform" (`aggregate.WEIGHTINGS`).
      server_optimizer: what the server descends along the mean pseudo-gradient with; `optax.sgd(1.0)`, which
        replaces the model by the mean, when `None`.
      sums_pseudo_gradients: whether the server multiplies the mean pseudo-gradient by the number of clients that returned; with
        uniform weights that is their sum.
      init_memory: `(key, model, num_clients) -> memory` of one client, called when it first takes part, with the model that it
        receives then.
      memory_of_uploads: whether a memory changes only if the upload of that round arrives, because the server keeps what follows
        from the memories (SCAFFOLD's c is their mean).
      remember: `(memory, upload, statistics) -> memory`, the memory of a client whose upload was transformed (clipped, quantised)
        before it left, from the memory that it had and what it sent; `upload` has the shared leaves and buffers, each the value
        received minus the value after training. For methods whose server's state follows from the memories; by default
        `Trained.memory` in any case. Statistics are then changes of the memory, so that error feedback leaves them out: the next
        change has what was not sent.
      init_extra: `(model, data) -> extra`, the server's; it may read shapes of the data only. A host store gives it a part of the
        clients at a time: read `data.total_clients`, never `data.num_clients`.
      update_extra: `(state, mean statistics, summed statistics weight, N) -> extra`, after the model has moved: `state` has the
        new model and the old extra state. The mean is 0 where the weight is 0. N counts the clients that train: those that have
        rows. A store of one's own says it by `FederatedData.drawn`.
      divides_by_statistics: whether the server divides the mean pseudo-gradient by the mean statistics, a scalar or the leading
        axis of every shared leaf: clients count as much as these (IFCA, AFL). Other aggregators than the mean get the quotients
        of each client, with its statistics as weights; so they do for statistics that are an `aggregate.Ratio`.
      weighs_by_statistics: whether the statistics of a client are how much it counts (FedNova's number of steps). Attacks leave
        them honest, like those that a mean is divided by. Aggregators that bound changes are refused.
      separate_models: whether the shared leaves are M models `[M, ...]`, each with an optimiser of its own at the server (IFCA,
        CFL). Needs `divides_by_statistics`: the statistics are each model's share of the clients, `[M]`. A model whose share is 0
        does not move, and its optimiser takes no step. With noise on uploads no share is exactly 0.
      inherit: `(state before the round, state after it) -> int32 [M]`, for `separate_models` and `whole_population`: for each
        model the number of the one that it takes over, with the state of its optimiser; its own number where it stays.
      direction: `(state, mean pseudo-gradient, mean statistics, summed statistics weight, N) -> (pseudo-gradient, statistics)`,
        what the server descends along and what `update_extra` gets, for rules that no weighted mean expresses (FedNova, FedDyn);
        as they are when not given. `state` is the one before the step, without rows of clients; only shared leaves are there.
      collaborate: what clients get of each other after a round.
      new_client: `(key, population, support) -> variables` of a client that is not one of the N clients; by default `personalize`
        from the server's model and a fresh memory.
      new_client_reads: "personal" or "memory" or both, joined by +, or "": what `new_client` reads of the N clients' rows. Rules
        that read something are refused under `uploads.noise`, which does not cover these.
      statistics_renew_extra: whether the statistics are new values of the extra state, in its structure, so that clipping and
        sparsification act on how much these changed. `keep_mean` needs it.
      sends_extra: whether clients download the server's extra state in each round.
      sends_statistics: whether clients upload their statistics; not where the server computes them from what `collaborate` reads.
      travels: `model -> (down, up)`, trees of what travels in place of the model's shared leaves and buffers (pFedHN sends the
        weights that it generates); by default these leaves both ways.
      needs_classes: whether the method works only with one class label a sample; data with other targets are then refused.
      whole_population: whether `collaborate` reads the rows of clients outside the cohort. Such a method needs all rows on the
        device and cannot use a host store.
      refuses: what the method does not support of a federation, and why: names of upload transformations, or of `REFUSABLE`.
      task: what is learned, filled in by the builder, so that data that it cannot learn from are refused before the first round.
      config: the name and every hyper-parameter, filled in by the builder.

    Raises:
      ValueError: a field of another kind (of optional rules and flags, `federate` says it); `keep_mean` without
        `statistics_renew_extra`.
    """

    init: Callable[[Key], PyTree]
    client: Callable[[Key, Received, ClientData], Trained]
    personalize: Callable[[Key, Received, ClientView], Variables]
    predict: Callable[[Variables, Any], jax.Array]
    roles: Roles
    weighting: str = "samples"
    server_optimizer: optax.GradientTransformation | None = None
    sums_pseudo_gradients: bool = False
    init_memory: Callable[[Key, PyTree, int], PyTree] = no_memory
    memory_of_uploads: bool = False
    remember: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    init_extra: Callable[[PyTree, FederatedData], PyTree] = no_extra
    update_extra: Callable[[Any, PyTree, Any, int], PyTree] | None = None
    divides_by_statistics: bool = False
    weighs_by_statistics: bool = False
    separate_models: bool = False
    inherit: Callable[[Any, Any], jax.Array] | None = None
    direction: Callable[[Any, Updates, PyTree, Any, int], tuple[Updates, PyTree]] | None = None
    collaborate: Collaboration | None = None
    new_client: Callable[[Key, Population, ClientView], Variables] | None = None
    new_client_reads: str = "personal+memory"
    statistics_renew_extra: bool = False
    sends_extra: bool = True
    sends_statistics: bool = True
    travels: Callable[[PyTree], tuple[PyTree, PyTree]] | None = None
    needs_classes: bool = False
    whole_population: bool = False
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    task: Task | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("init", "client", "personalize", "predict", "init_memory", "init_extra"):
            if not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function, not {checks.shown(getattr(self, name))}")
        checks.one_of("weighting", self.weighting, WEIGHTINGS)
        made = self.server_optimizer
        if made is not None and not isinstance(made, optax.GradientTransformation):
            raise ValueError(
                f"server_optimizer must be an optimiser with its rate, e.g. optax.adam(0.1), not {checks.shown(made)}"
            )
        if self.collaborate is not None and not isinstance(self.collaborate, Collaboration):
            raise ValueError(
                f"collaborate must be fm.Collaboration(mix, reads=..., gives=...), not {checks.shown(self.collaborate)}"
            )
        if self.update_extra is keep_mean and not self.statistics_renew_extra:
            raise ValueError(
                "update_extra=keep_mean needs statistics_renew_extra=True: the statistics are new values of the extra"
            )

    @property
    def name(self) -> str:
        """The builder's name, or "method" for one that was put together by hand."""
        return self.config.get("method", "method")


def received_model(key: Key, received: Received, support: ClientView) -> Variables:
    """A `Method.personalize` that predicts with the model as it was received."""
    del key, support
    return received.model


def keep_mean(state: Any, mean: PyTree, weight: Any, num_clients: int) -> PyTree:
    """A `Method.update_extra` that holds the mean of the last cohort's statistics; the last one stays where nobody returned.

    Raises:
      ValueError: statistics of another form than the extra state.
    """
    del num_clients
    odd = checks.mismatch(mean, state.extra)
    if odd is not None:
        raise ValueError(f"with update_extra=keep_mean, statistics of clients must have the form of init_extra: {odd}")
    return jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), mean, state.extra)


class Reduction(NamedTuple):
    """An identity between two methods, declared in `REDUCES_TO` of a method's file and tested for all of them.

    Attributes:
      says: the identity in words, e.g. "FedProx with mu = 0 is FedAvg".
      method: registry name.
      options: of `method`.
      other: registry name of the method that it must equal.
      other_options: of `other`.
      tests_alike: whether known clients also test with the same model; else only the server's model is the same.
    """

    says: str
    method: str
    options: Mapping[str, Any]
    other: str
    other_options: Mapping[str, Any]
    tests_alike: bool = True
