"""L2GD: every client has its own model, and a coin decides whether a round trains the models or pulls them to their mean.

Hanzely, Richtarik: "Federated learning of a mixture of global and local models", arXiv 2002.05516, Algorithm 1.

| paper | here | shape |
|---|---|---|
| x_i | personal leaves (all) | |
| xi | the coin; 1 with probability `probability` | |
| lambda | `pull` | scalar |
| alpha / (n (1 - p)) | `lr` times the steps of a round, or `lr` | scalar |
| alpha lambda / (n p) | that times `pull * (1 - p) / p` | scalar |

The step sizes of the table are as the method is commonly given. Here the step size is given as that of the local steps, and a
round that trains is `epochs` passes of minibatch SGD, as in other implementations, in place of one full gradient. A pull is
scaled to the T steps of its client's full round, so that both still balance where f_i + lambda/2 |x_i - mean|^2 is stationary;
unscaled it would be T times too weak (`pull_per="step"`). Where the federation's `participation` leaves clients fewer steps, a
pull is too strong by that factor: nobody trains in a round that pulls, so that the server has no other T. The mean is that of the
cohort, which can be all clients. Bytes are counted in every round, because new clients start from the last mean; without new
clients, only rounds that pull have to send something.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Reduction, Trained, keep_mean
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.numerics.axes import leading
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


@described("own models, sometimes a mean", "Hanzely et al. 2002.05516")
@method_builder
def l2gd(
    task: Task,
    *,
    lr: Rate = 0.01,
    pull: Rate = 0.5,
    probability: Rate = 0.5,
    pull_per: str = "round",
    epochs: int = 1,
    batch_size: int = 32,
    new_client_epochs: int = 1,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """L2GD; the paper's `cohort_size` is N.

    A round reports `pulled`, how much of the way to the mean a client's model was moved: 1 is the mean itself, where a larger
    `pull` changes nothing more, and 0 a round that trains.

    The paper has no rule for new clients: a client that never took part trains on its support set from the mean of the last
    cohort's models.

    Args:
      task, lr, batch_size, new_client_epochs, optimizer: as in `fedavg`.
      pull: lambda; 0 is local-only training in those rounds that train.
      probability: p, of a round that pulls models to their mean instead of training them.
      pull_per: whether a pull balances all steps of a client's full "round" (at most up to the mean itself) or one "step".
      epochs: passes over the train view in a round that trains.

    Raises:
      ValueError: an option out of range, a pull so strong that models would overshoot the mean.
    """
    checks.not_negative("pull", pull)
    checks.fraction("probability", probability)
    checks.one_of("pull_per", pull_per, ("round", "step"))
    share = lr * pull * (1 - probability) / probability
    if not isinstance(share, jax.core.Tracer) and np.any(np.asarray(share) > 1):
        raise ValueError(f"pull={pull} with lr={lr} and probability={probability} pulls by {share}, which must be at most 1")
    trainable = task.trainable(masks.variables_shape(task))

    def pulls(shared_key: Key) -> jax.Array:
        """The coin of a round, the same for all clients and the server."""
        return jax.random.bernoulli(tagged(shared_key, "coin"), probability)

    def train(key: Key, start: Variables, view: ClientView, passes: int, needed: jax.Array) -> tuple[Variables, jax.Array]:
        how: dict[str, Any] = {"epochs": passes, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, start, view, optimizer(lr), trainable, **how)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, loss = train(key, received.model, data["train"], epochs, ~pulls(received.shared_key))
        return Trained(model, {"loss": loss}, statistics=model)

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        """x_i ← x_i - αλ/(np) (x_i - x̄) in a round that pulls."""
        steps = jnp.ones(len(cohort.positions))
        if pull_per == "round":
            steps = epochs * -(-jnp.asarray(data.sizes("train"))[cohort.positions] // batch_size)
        amount = jnp.where(pulls(key), jnp.minimum(share * steps, 1), 0)

        def towards_mean(own: jax.Array, mean: jax.Array) -> jax.Array:
            return own - leading(amount.astype(own.dtype), own) * (own - mean[None])

        return jax.tree.map(towards_mean, cohort.personal, state.extra), cohort.memory, {"pulled": amount}

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen = received.seen
        start = jax.tree.map(lambda own, mean: jnp.where(seen, own, mean), received.model, received.extra)
        return train(key, start, support, new_client_epochs, ~seen)[0]

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.everything(task), trainable),
        weighting="uniform",
        init_extra=lambda model, data: model,
        update_extra=keep_mean,
        statistics_renew_extra=True,
        # The server needs the mean only, which arrives as a statistic.
        collaborate=Collaboration(mix, reads="", gives="personal"),
        sends_extra=False,
    )


REDUCES_TO = (
    Reduction(
        "L2GD that neither pulls nor leaves out a round is local-only training",
        "l2gd",
        {"pull": 0.0, "probability": 1e-12},
        "local_only",
        {},
    ),
)
