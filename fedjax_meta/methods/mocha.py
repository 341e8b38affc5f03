"""MOCHA: every client has a linear model of its own, and a matrix of task relations, learned too, lets clients help each other.

Clients solve their part of the dual problem by coordinate ascent on their samples, as far as they get in a round; the server
turns the dual variables of all clients into primal models through the relations.

Smith, Chiang, Sanjabi, Talwalkar: "Federated multi-task learning", NeurIPS 2017, arXiv 1705.10467, Algorithm 1, with the hinge
loss and the relations of the authors' code (opt/run_mocha.m).

| paper, code | here | shape |
|---|---|---|
| w_t | `Model.weights`, personal | `[K, d + 1]` |
| alpha_t | `Own.dual` | `[capacity, K]` |
| X_t' alpha_t / n_t | `Own.map`, sent to the server | `[K, d + 1]` |
| Sigma = inverse of Omega | `Own.relation`, the client's row of it | `[N]` |
| rho Sigma_tt, rho = sigma' | `Own.step` | scalar |
| lambda | `regularisation` | scalar |
| W = map Sigma / lambda | `primal` of `related_tasks.py` | `[N, K, d + 1]` |

The problem is sum_t mean_i hinge(y_i w_t x_i) + lambda / 2 tr(W Omega W'). x are the features of the task's body, which stays
as it was initialised, with a 1 appended; classes are told apart one against the rest, with the same relations.

Differs from the code: W is recomputed when Sigma changes, so that it stays the primal model of the dual variables. With
`smoothing`, Sigma is mixed with the identity, without which a client whose model is 0 can never leave it. Where clients are
sampled (in the paper all take part), those outside a cohort keep their model and their row of Sigma until they take part again:
then Sigma is not symmetric, and its trace is not 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks, features, masks
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Trained
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.keys import tagged
from fedjax_meta.numerics.axes import leading
from fedjax_meta.numerics.related_tasks import ascend, hinge, primal, relations, safety
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Scalar, Variables


class Model(NamedTuple):
    """The task's variables, which never move, and the client's linear model on their features."""

    variables: Variables
    weights: jax.Array


class Own(NamedTuple):
    """A client's memory; see the table."""

    dual: jax.Array
    map: jax.Array
    relation: jax.Array
    step: jax.Array


def _related(state: State, cohort: Cohort, regularisation: Rate, smoothing: Rate, due: jax.Array) -> tuple[PyTree, PyTree]:
    """The models of a cohort from the maps of all clients, and, where it is due, their rows of the new relations."""
    count, related = len(state.seen), state.memory.relation.shape[1]
    if count != related:
        raise ValueError(f"mocha relates all {related} clients, but the state has rows of {count} of them")
    target = jnp.where(cohort.returned, cohort.ids, count)

    def of_all(kept: jax.Array, given: jax.Array) -> jax.Array:
        """Rows of all clients, 0 for those that have never taken part."""
        return jnp.where(leading(state.seen, kept), kept, 0).at[target].set(given.astype(kept.dtype), mode="drop")

    maps, rows = of_all(state.memory.map, cohort.stacked), of_all(state.memory.relation, cohort.memory.relation)
    # A client without a row yet is related to itself alone.
    fresh = of_all(jnp.zeros(count), jnp.ones(len(target))) * ~jnp.any(rows != 0, 1)
    rows = jnp.where(fresh[:, None] > 0, jnp.eye(count) / count, rows)
    renewed = relations(primal(rows, maps, regularisation), smoothing)
    rows = jnp.where(due, renewed, rows)
    mine = rows[cohort.ids]
    step = safety(rows) * mine[jnp.arange(len(mine)), cohort.ids]
    weights = primal(mine, maps, regularisation)
    personal = jax.tree.map(lambda old, new: new.astype(old.dtype), cohort.personal, cohort.personal._replace(weights=weights))
    memory = cohort.memory._replace(relation=mine.astype(rows.dtype), step=step.astype(cohort.memory.step.dtype))
    return personal, memory


def of_view(task: Task, variables: Variables, view: ClientView) -> tuple[jax.Array, jax.Array]:
    """(features of all samples of a view with a 1 appended, `[M, d + 1]`, their labels, `[M]`), in evaluation mode.

    M is the size of the largest client's view; rows of padding are 0.
    """
    extract, _ = features.require_features(task, "features of a view")
    places = jnp.arange(max(view.max_size, 1))
    real = places < view.size
    batch = view.take(places, real)
    z = extract(variables, batch.x)
    z = jnp.concatenate([z, jnp.ones((len(places), 1), z.dtype)], 1)
    return jnp.where(real[:, None], z, 0), batch.y


@described("own models, learned relations", "Smith et al. 1705.10467")
@method_builder
def mocha(
    task: Task,
    *,
    regularisation: Rate = 0.01,
    epochs: int = 1,
    relation_every: int = 10,
    smoothing: Rate = 0.01,
    capacity: int = 1000,
    new_client_epochs: int = 10,
) -> Method:
    """MOCHA. A known client tests its own model. One that never took part solves its own problem, unrelated, on its support set.

    With `participation`, a client performs a share of its steps, the paper's partial work. The server keeps what all clients
    have sent, so that a host store is refused. The task's head is not used, and nothing of the task is trained.

    Args:
      task: a classifier with features, without buffers.
      regularisation: lambda > 0.
      epochs: passes of coordinate ascent over the train view in a round.
      relation_every: rounds between two updates of the relations.
      smoothing: share of the identity in them.
      capacity: largest number of training samples of a client, whose dual variables it keeps.
      new_client_epochs: passes over the support view of a client that never took part.

    Raises:
      ValueError: a task without features, with buffers, or with a loss that augments samples or has a criterion of its own (MOCHA
        minimises a hinge loss), an option out of range; on `round`, a client of more samples than
        `capacity`.
    """
    extract, _ = features.require_features(task, "mocha", buffers=False)
    features.require_own_loss(task, "mocha", "a hinge loss")
    checks.positive("regularisation", regularisation)
    checks.count("relation_every", relation_every)
    checks.share("smoothing", smoothing)
    checks.count("capacity", capacity)
    classes, width = features.head_shape(task, "mocha")

    def solve(
        key: Key, weights: jax.Array, dual: jax.Array, view: ClientView, xy: Any, passes: int, step: Scalar, needed: Any = True
    ) -> tuple[jax.Array, jax.Array]:
        """(dual variables after `passes` over the samples of a view, their map)."""
        index = jnp.arange(len(dual), dtype=jnp.int32)
        order = permute(permutation_keys(tagged(key, "order")), index, view.size)
        steps = jnp.where(needed, view.epochs(tagged(key, "steps"), 1, passes).steps, 0)
        x, y = xy
        return ascend(dual, weights, x, y, view.size, order, steps, step / regularisation)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        view, model, own = data["train"], received.model, received.memory
        if view.max_size > capacity:
            raise ValueError(f"a client's train view has up to {view.max_size} samples, more than capacity={capacity}")
        x, y = of_view(task, model.variables, view)
        count = len(x)
        dual, mapped = solve(key, model.weights, own.dual[:count], view, (x, y), epochs, own.step)
        memory = own._replace(dual=own.dual.at[:count].set(dual), map=mapped)
        return Trained(model, {"loss": hinge(model.weights, x, y, view.size)}, memory=memory, stacked=mapped)

    def personalize(key: Key, received: Received, support: ClientView) -> Model:
        model, seen, scale = received.model, received.seen, received.memory.step
        xy, alone = of_view(task, model.variables, support), jnp.zeros_like(model.weights)
        start = jnp.zeros((len(xy[1]), classes), model.weights.dtype)
        mapped = solve(key, alone, start, support, xy, new_client_epochs, scale, ~jnp.asarray(seen))[1]
        return model._replace(weights=jnp.where(seen, model.weights, scale * mapped / regularisation))

    def predict(variables: Model, x: PyTree) -> jax.Array:
        z = extract(variables.variables, x)
        return z @ variables.weights[:, :-1].T + variables.weights[:, -1][None]

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree]:
        del key, data
        return _related(state, cohort, regularisation, smoothing, (state.round + 1) % relation_every == 0)

    def init(key: Key) -> Model:
        return Model(task.init(key), jnp.zeros((classes, width + 1)))

    def init_memory(key: Key, model: Model, num_clients: int) -> Own:
        dual, mapped = jnp.zeros((capacity, classes)), jnp.zeros((classes, width + 1))
        return Own(dual, mapped, jnp.zeros(num_clients), jnp.full((), 1 / num_clients))

    shape = jax.eval_shape(init, jax.random.key(0))
    own = Model(masks.nothing_like(shape.variables), True)  # type: ignore[arg-type]
    everything = masks.everything_like(shape)
    return Method(
        init=init,
        client=client,
        personalize=personalize,
        predict=predict,
        roles=masks.roles(own, everything, masks.complement(own)),
        # Nothing is averaged, so that a weight says only whether a client takes part.
        weighting="uniform",
        sends_statistics=False,
        init_memory=init_memory,
        memory_of_uploads=True,
        collaborate=Collaboration(mix, reads="", gives="personal"),
        whole_population=True,
        needs_classes=True,
    )
