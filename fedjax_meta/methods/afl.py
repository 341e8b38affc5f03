"""AFL: training for the worst mixture of clients; the server raises the weight of clients whose loss is high.

Mohri, Sivek, Suresh: "Agnostic federated learning", ICML 2019, arXiv 1902.00146; the steps are those of the code of q-FedAvg's
authors, litian96/fair_flearn, flearn/trainers/afl.py 38-60.

| paper | here | shape |
|---|---|---|
| w | server's model | |
| lambda_k | a client's memory, 1 / N at first | scalar |
| gamma_w, gamma_lambda | `lr`, `weight_lr` | scalars |

w <- w - gamma_w sum_k lambda_k g_k / sum_k lambda_k, then lambda <- projection on the simplex of lambda + gamma_lambda loss_k.
Differs from the paper: the members of a cohort that is a part of all clients share the weight that they had together, so that
lambda stays in the simplex; each may take more than one local step, and its loss is then the mean over these.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Reduction, Trained, no_extra
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


def projected(values: jax.Array, members: jax.Array, mass: jax.Array) -> jax.Array:
    """The nearest point of {x >= 0, sum x = mass} to the members' values, `[C]`; 0 for the others, bool `[C]`."""
    falling = -jnp.sort(jnp.where(members, -values, jnp.inf))
    there = jnp.isfinite(falling)
    count = jnp.arange(1, len(values) + 1)
    shift = (mass - jnp.cumsum(jnp.where(there, falling, 0))) / count
    kept = jnp.sum(there & (falling + shift > 0))
    return jnp.where(members, jnp.maximum(values + shift[jnp.maximum(kept - 1, 0)], 0), 0)


class Mean(NamedTuple):
    """The mean of the server's models after the rounds in which a client returned, and how many they are."""

    model: Variables
    rounds: jax.Array


@described("the worst mixture of clients", "Mohri et al. 1902.00146")
@method_builder
def afl(
    task: Task,
    *,
    lr: Rate = 0.1,
    weight_lr: Rate = 0.1,
    local_steps: int = 1,
    batch_size: int = 32,
    average: bool = True,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """AFL. Every client, known or new, tests with the mean of the server's models so far, or with the last one.

    Args:
      task, batch_size, optimizer: as in `fedavg`.
      lr: gamma_w; may be traced, as `weight_lr`.
      weight_lr: gamma_lambda >= 0; with 0 all clients count equally. A large one takes lambda of most clients to 0; the
        round of a cohort of such clients alone has no gradient, and moves no lambda. The lambda of all N clients of the data sum
        to 1; those of clients that `data.select` leaves out stay at 1 / N.
      local_steps: batches that a client goes through; 1 in the paper.
      average: whether clients test with the mean over rounds, as the paper's guarantee has it; it costs one more model.

    Raises:
      ValueError: an option out of range.
    """
    checks.not_negative("weight_lr", weight_lr)
    trainable = task.trainable(masks.variables_shape(task))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        batches, share = data["train"].endless(tagged(key, "order"), batch_size, local_steps), received.memory
        model, loss = local.train(tagged(key, "loss"), task.loss, received.model, batches, optimizer(lr), trainable)
        pseudo_gradient = jax.tree.map(lambda w, x: share.astype(w.dtype) * (w - x), received.model, model)
        return Trained(model, {"loss": loss}, memory=share, pseudo_gradient=pseudo_gradient, statistics=share, stacked=loss)

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree]:
        del key, state, data
        mass = jnp.sum(jnp.where(cohort.returned, cohort.memory, 0))
        renewed = projected(cohort.memory + weight_lr * cohort.stacked, cohort.returned, mass)
        return cohort.personal, renewed.astype(cohort.memory.dtype)

    def mean_model(state: State, share: PyTree, weight: Any, num_clients: int) -> Mean:
        del share, weight, num_clients
        count = state.extra.rounds + 1
        model = jax.tree.map(lambda mean, w: mean + (w - mean) / count.astype(w.dtype), state.extra.model, state.model)
        return Mean(model, count)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        del key, support
        return received.extra.model if average else received.model

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting="uniform",
        init_memory=lambda key, model, num_clients: jnp.full((), 1 / num_clients),
        init_extra=(lambda model, data: Mean(model, jnp.zeros((), jnp.int32))) if average else no_extra,
        update_extra=mean_model if average else None,
        sends_extra=False,
        divides_by_statistics=True,
        collaborate=Collaboration(mix, reads="memory", gives="memory"),
    )


REDUCES_TO = (
    Reduction("AFL without averaging is AFL for the server", "afl", {"average": False}, "afl", {}, tests_alike=False),
)
