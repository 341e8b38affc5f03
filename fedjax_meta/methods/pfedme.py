"""pFedMe: the server's model is the centre of a Moreau envelope, and clients move it towards their personal models.

Dinh, Tran, Nguyen: "Personalized federated learning with Moreau envelopes", NeurIPS 2020, arXiv 2006.08848, Algorithm 1.

| paper | here | shape |
|---|---|---|
| w, w_i,r | server's and client's model | |
| theta_i | found anew for each batch, not kept | like the model |
| lambda, eta | `prox_weight`, `outer_lr` | scalars |
| R, K | `local_rounds`, `inner_steps` | |
| mu | `weight_decay` | scalar |
| beta | `server_optimizer=optax.sgd(beta)` | |

Differs from the paper: the personal model of a client is found at test time, from the server's model and its support set, as
the definition of theta has it; the authors test the last theta of training. Within a round theta goes on from one batch to the
next, as in their code; their `weight_decay` of 0.001 is left out by default. Their code also trains the clients that are not
sampled.

`keep_local=True` is another algorithm, the one that MTFL's authors (arXiv 2007.09236) ran under this name: w_i stays with its
client from round to round and never goes back to the server's model, which only theta begins at; running statistics move like
parameters; a client tests w_i as it left it. They also took one inner step, `lr` and `outer_lr` alike, and the weight decay.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import Batches, ClientData, ClientView
from fedjax_meta.task import Batch, Key, Task, Variables


def pfedme(
    task: Task,
    *,
    lr: Any = 0.09,
    outer_lr: Any = 0.005,
    prox_weight: Any = 15.0,
    inner_steps: int = 5,
    local_rounds: int = 20,
    batch_size: int = 20,
    test_epochs: int = 1,
    weight_decay: Any = 0.0,
    keep_local: bool = False,
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """pFedMe. Every client, known or new, finds its personal model around the server's from its support set.

    Args:
      task: what is learned.
      lr: rate of the steps that find theta; may be traced, as the next two.
      outer_lr: eta, rate of the local model.
      prox_weight: lambda.
      inner_steps: K, steps towards theta on each batch.
      local_rounds: R, batches a round.
      batch_size: samples in a batch.
      test_epochs: passes over the support view, `inner_steps` steps a batch, before a client predicts.
      weight_decay: mu, of the steps that find theta.
      keep_local: let w_i stay with its client, as MTFL's authors did; a client then tests it, and a new one the server's model.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a rate or weight that is not positive, a count out of range.
    """
    checks.positive("lr", lr)
    checks.positive("outer_lr", outer_lr)
    checks.positive("prox_weight", prox_weight)
    checks.not_negative("weight_decay", weight_decay)
    counts = {"inner_steps": inner_steps, "local_rounds": local_rounds, "batch_size": batch_size, "test_epochs": test_epochs}
    for name, value in counts.items():
        checks.count(name, value)
    trainable = task.trainable(masks.variables_shape(task))
    interpolated = masks.everything_like(trainable) if keep_local else trainable
    descent = optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr))

    def towards_theta(theta: Any, centre: Any, sample: tuple[Batch, Key]) -> tuple[Variables, jax.Array]:
        """K steps θ ← θ - η_p (∇f(θ) + λ (θ - w) + μ θ) on one batch."""
        batch, key = sample
        again = Batches(lambda step, chunk: batch, inner_steps, inner_steps)
        return local.train(key, local.proximal(task.loss, centre, prox_weight), theta, again, descent, trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order_key, key = jax.random.split(key)
        batches = data["train"].wrapped(order_key, batch_size, local_rounds).keyed(key)

        def step(r: Any, carry: Any) -> Any:
            theta, own, total = carry
            theta, loss = towards_theta(theta, own, batches.get(r, 0))
            # w_i ← w_i - η λ (w_i - θ): λ (w - θ) is the gradient of the envelope. Buffers follow θ.
            moved = jax.tree.map(lambda w, t: w - outer_lr * prox_weight * (w - t), own, theta)
            own = jax.tree.map(lambda move, new, follow: new if move else follow, interpolated, moved, theta)
            return theta, own, total + loss

        start = (received.model, received.memory if keep_local else received.model, jnp.zeros(()))
        _, own, total = jax.lax.fori_loop(0, local_rounds, step, start)
        return Trained(own, client_weight(weighting, data), {"loss": total / local_rounds}, own if keep_local else ())

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        if keep_local:
            return received.memory
        order_key, key = jax.random.split(key)
        batches = support.epochs(order_key, batch_size, test_epochs).keyed(key)

        def step(t: Any, theta: Variables) -> Variables:
            return towards_theta(theta, received.model, batches.get(t, 0))[0]

        return jax.lax.fori_loop(0, batches.steps, step, received.model)

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.nothing(task),
        trainable=trainable,
        init_memory=lambda key, model, num_clients: model if keep_local else (),
        **options,
    )
