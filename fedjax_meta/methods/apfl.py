"""APFL: FedAvg for the global model, and beside it a personal one that is trained as part of a mixture of both.

Deng, Kamani, Mahdavi: "Adaptive personalized federated learning", arXiv 2003.13461, Algorithm 1.

| paper | here | shape |
|---|---|---|
| w_i, v_i | client's model, `Own.model` | |
| alpha_i | `Own.share` | scalar |
| v bar = alpha v + (1 - alpha) w | `mixture` | like the model |
| eta | `lr`, `share_lr` (for alpha) | |

Differs from the paper: alpha adapts once a round, at its first batch. `mix="outputs"` joins the logits of both models instead
of their weights, as the authors' code does; for models that are linear in their weights it is the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Batch, Key, Task, Variables, cross_entropy


class Own(NamedTuple):
    """A client's memory: its personal model v and the share alpha that this has in the mixture."""

    model: Any
    share: jax.Array


class Mixture(NamedTuple):
    """What a client predicts with when outputs are mixed."""

    own: Any
    shared: Any
    share: jax.Array


def apfl(
    task: Task,
    *,
    lr: Any = 0.01,
    share: Any = 0.5,
    share_lr: Any = None,
    mix: str = "weights",
    epochs: int = 1,
    batch_size: int = 32,
    new_client_epochs: int = 1,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """APFL. A client that never took part trains a v from the global model on its support set, at the initial share.

    Args:
      task: what is learned.
      lr: learning rate of both models; may be traced, as `share` and `share_lr`.
      share: alpha before the first round, from 0 (the global model) to 1 (a personal one).
      share_lr: rate at which clients learn their alpha, 0 holds it; `lr` when not given.
      mix: "weights" (paper) or "outputs" (authors' code).
      epochs: passes over the train view.
      batch_size: samples a step.
      new_client_epochs: passes over the support view of a client that never took part.
      optimizer: `lr -> optax transformation`, started fresh in every round, for w and v each.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a rate, share or count out of range, an unknown mix; mixed outputs of a model with buffers.
    """
    share_lr = lr if share_lr is None else share_lr
    checks.positive("lr", lr)
    checks.not_negative("share_lr", share_lr)
    checks.between("share", share, 0, 1)
    checks.one_of("mix", mix, ("weights", "outputs"))
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.count("new_client_epochs", new_client_epochs, least=0)
    trainable = task.trainable(masks.variables_shape(task))
    if mix == "outputs":
        features.require_plain(task, "apfl with mix='outputs'")

    def mixture(own: Any, shared: Any, share: Any) -> Any:
        """v̄ = α v + (1 - α) w; buffers are those that go with v̄ and stand in v."""
        mixed = jax.tree.map(lambda v, w: share * v + (1 - share) * w, own, shared)
        return jax.tree.map(lambda mixes, a, v: a if mixes else v, trainable, mixed, own)

    def predict(variables: Any, x: Any) -> jax.Array:
        if not isinstance(variables, Mixture):
            return task.predict(variables, x)
        own, shared, share = variables
        return share * task.predict(own, x) + (1 - share) * task.predict(shared, x)

    def mixture_loss(own: Any, shared: Any, share: Any, batch: Batch, key: Key) -> tuple[jax.Array, Any]:
        """f(v̄) and v with its buffers moved on."""
        if mix == "outputs":
            return cross_entropy(predict(Mixture(own, shared, share), batch.x), batch), own
        value, moved_on = task.loss(mixture(own, shared, share), batch, key)
        return value, masks.merge(masks.split(own, trainable)[0], masks.split(moved_on, trainable)[1])

    def joint(share: Any) -> local.Loss:
        """f(w) + f(v̄), where v̄ gives w no gradient: one step of it is the paper's step of w and of v, at the same point."""

        def loss(pair: Any, batch: Batch, key: Key) -> tuple[jax.Array, Any]:
            shared, own = pair
            value, shared_on = task.loss(shared, batch, key)
            mixed, own_on = mixture_loss(own, jax.lax.stop_gradient(shared), share, batch, key)
            return value + mixed, (shared_on, own_on)

        return loss

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order_key, key = jax.random.split(key)
        batches = data["train"].epochs(order_key, batch_size, epochs)
        own, shared = received.memory, received.model
        # α ← clip(α - η ⟨v - w, ∇f(v̄)⟩), and that product is df(v̄)/dα.
        batch, batch_key = batches.keyed(key).get(0, 0)
        slope = jax.grad(lambda share: mixture_loss(own.model, shared, share, batch, batch_key)[0])(own.share)
        share = jnp.clip(own.share - share_lr * slope, 0, 1)
        start, moving = (shared, own.model), (trainable, trainable)
        (model, mine), loss = local.train(key, joint(share), start, batches, optimizer(lr), moving)
        return Trained(model, client_weight(weighting, data), {"loss": loss, "share": share}, memory=Own(mine, share))

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen, shared, (model, share) = received.seen, received.model, received.memory
        model = jax.tree.map(lambda v, w: jnp.where(seen, v, w), model, shared)
        moving = (jax.tree.map(lambda _: False, trainable), trainable)
        passes = {"epochs": new_client_epochs, "batch_size": batch_size, "needed": ~seen}
        pair, _ = local.train_epochs(key, joint(share), (shared, model), support, optimizer(lr), moving, **passes)
        return (Mixture if mix == "outputs" else mixture)(pair[1], shared, share)

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=predict,
        personal=masks.nothing(task),
        trainable=trainable,
        init_memory=lambda key, model, num_clients: Own(model, jnp.asarray(share, jnp.result_type(float))),
        **options,
    )
