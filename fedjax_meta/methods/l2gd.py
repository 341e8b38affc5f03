"""L2GD: every client has its own model, and a coin decides whether a round trains them or pulls them to their mean.

Hanzely, Richtarik: "Federated learning of a mixture of global and local models", arXiv 2002.05516, Algorithm 1.

| paper | here | shape |
|---|---|---|
| x_i | personal leaves (all) | |
| xi | heads with probability `probability` | |
| lambda | `pull` | scalar |
| alpha / (n (1 - p)) | `lr` | scalar |
| alpha lambda / (n p) | `lr * pull * (1 - p) / p` | scalar |

Differs from the paper: the step size is given as that of the local steps, and a round without the coin is `epochs` passes of
minibatch SGD (the paper has one full gradient; other implementations have passes). The mean is that of the cohort; the paper's
cohort is everybody.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.algorithm import Algorithm, Cohort, FederationOptions, Received, State, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView, FederatedData
from fedjax_meta.task import Key, Task, Variables


def l2gd(
    task: Task,
    *,
    lr: Any = 0.01,
    pull: Any = 0.5,
    probability: Any = 0.5,
    epochs: int = 1,
    batch_size: int = 32,
    new_client_epochs: int = 1,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """L2GD. The paper has no rule for new clients: one that never took part trains on its support set from the clients' mean.

    Args:
      task: what is learned.
      lr: learning rate of the local steps; may be traced, as the next two.
      pull: lambda; 0 is local-only training in those rounds that train.
      probability: p, of a round that pulls models to their mean instead of training them.
      epochs: passes over the train view in a round that trains.
      batch_size: samples a step.
      new_client_epochs: passes over the support view of a client that never took part.
      optimizer: `lr -> optax transformation`, started fresh in every round.
      **options: those of `federated`; the paper's `cohort_size` is N.

    Raises:
      ValueError: a rate, probability or count out of range, a pull so strong that it would leap over the mean.
    """
    checks.positive("lr", lr)
    checks.not_negative("pull", pull)
    checks.fraction("probability", probability)
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        checks.count(name, value)
    checks.count("new_client_epochs", new_client_epochs, least=0)
    share = lr * pull * (1 - probability) / probability
    if not isinstance(share, jax.core.Tracer) and np.any(np.asarray(share) > 1):
        raise ValueError(f"pull={pull} with lr={lr} and probability={probability} pulls by {share}, which must be at most 1")
    trainable = task.trainable(masks.variables_shape(task))

    def pulls(shared_key: Key) -> jax.Array:
        return jax.random.bernoulli(shared_key, probability)

    def train(key: Key, start: Any, view: ClientView, count: int, needed: Any) -> tuple[Variables, jax.Array]:
        passes = {"epochs": count, "batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, task.loss, start, view, optimizer(lr), trainable, **passes)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, loss = train(key, received.model, data["train"], epochs, ~pulls(received.shared_key))
        weight = jnp.where(data["train"].size > 0, 1.0, 0.0)
        return Trained(model, weight, {"loss": loss}, statistics=model)

    def exchange(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[Any, Any]:
        del data
        # x_i ← x_i - αλ/(np) (x_i - x̄)
        amount = jnp.where(pulls(key), share, 0)

        def towards_mean(own: jax.Array, mean: jax.Array) -> jax.Array:
            returned = cohort.returned.reshape(-1, *[1] * (own.ndim - 1))
            return jnp.where(returned, own - amount.astype(own.dtype) * (own - mean[None]), own)

        return jax.tree.map(towards_mean, cohort.personal, state.extra), cohort.memory

    def update_mean(state: State, mean: Any, weight: jax.Array, _: int) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), mean, state.extra)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen = received.seen
        start = jax.tree.map(lambda own, mean: jnp.where(seen, own, mean), received.model, received.extra)
        return train(key, start, support, new_client_epochs, ~seen)[0]

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.everything(task),
        trainable=trainable,
        init_extra=lambda model, data: model,
        update_extra=update_mean,
        collaborate=exchange,
        **options,
    )
