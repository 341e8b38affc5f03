"""pFedMe: the server's model is the centre of a Moreau envelope, and clients move it towards their personal models.

Dinh, Tran, Nguyen: "Personalized federated learning with Moreau envelopes", NeurIPS 2020, arXiv 2006.08848, Algorithm 1.

| paper | here | shape |
|---|---|---|
| w, w_i,r | server's and client's model | |
| theta_i | recomputed for each batch, not kept | like the model |
| lambda, eta | `prox_weight`, `outer_lr` | scalars |
| R, K | `local_rounds`, `inner_steps` | |
| mu | `weight_decay` | scalar |
| beta | the federation's `server_lr` | scalar |
| 1 / S | `weighting="uniform"` | `[C]` |

Differs from the paper: the personal model of a client is found at test time, from the server's model and its support set, as
in the definition of theta. Within a round theta continues from one batch to the next, as in their code. That code also has a
`weight_decay` of 0.001, here 0 by default, weighs clients by their samples (`weighting="samples"`), and trains the clients that
are not sampled. What it tests as the personal model is w_i at the end of the round (`tests="local"`), because its list of
theta's tensors is that of the model, into which w_i is copied first.

`keep_local=True` is another algorithm, the one that MTFL's authors (arXiv 2007.09236) ran under this name: w_i stays with its
client from round to round and is never reset to the server's model, where only theta starts; running statistics are
interpolated like parameters; a client tests w_i as it left it. They also took one inner step, equal `lr` and `outer_lr`, and
the weight decay. There all clients start from w^0; here w_i starts, when its client first takes part, from the server's
current model.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, loops, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import Batches, ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, Rate, Variables


@described("Moreau envelopes", "Dinh et al. 2006.08848")
@method_builder
def pfedme(
    task: Task,
    *,
    lr: Rate = 0.09,
    outer_lr: Rate = 0.005,
    prox_weight: Rate = 15.0,
    inner_steps: int = 5,
    local_rounds: int = 20,
    epochs: int | None = None,
    batch_size: int = 20,
    test_epochs: int = 1,
    weight_decay: Rate = 0.0,
    keep_local: bool = False,
    tests: str = "theta",
    weighting: str = "uniform",
) -> Method:
    """pFedMe. Every client, known or new, finds its personal model around the server's from its support set.

    Args:
      task, batch_size, weighting: as in `fedavg`; "uniform" is the paper's.
      lr: learning rate of the steps that find theta.
      outer_lr: eta, rate of the local model.
      prox_weight: lambda > 0.
      inner_steps: K, steps towards theta on each batch.
      local_rounds: R, batches per round, whatever the size of a client; K gradients each.
      epochs: passes over a client's train view in place of R batches. With `inner_steps=1` as many gradients as
        `fedavg(epochs=...)`, with K as many as K times that.
      test_epochs: passes over the support view, `inner_steps` steps per batch, before a client predicts; none with `keep_local`
        or `tests="local"`.
      weight_decay: mu, of the steps that find theta.
      keep_local: let w_i stay with its client, as MTFL's authors did. A known client then tests w_i, a new one the server's
        model.
      tests: what a known client predicts with, "theta" as above, or "local", its w_i of the last round that it took part in, as
        in the authors' code. A new client then tests the server's model.

    Raises:
      ValueError: an option out of range.
    """
    checks.one_of("tests", tests, ("theta", "local"))
    remembers = keep_local or tests == "local"
    checks.positive("prox_weight", prox_weight)
    checks.not_negative("weight_decay", weight_decay)
    checks.count("local_rounds", local_rounds)
    step_size = outer_lr * prox_weight
    trainable = task.trainable(masks.variables_shape(task))
    interpolated = masks.everything_like(trainable) if keep_local else trainable
    optimizer = optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr))

    def towards_theta(theta: Variables, centre: Variables, sample: tuple[Batch, Key]) -> tuple[Variables, jax.Array]:
        """K steps θ ← θ - η_p (∇f(θ) + λ (θ - w) + μ θ) on one batch."""
        batch, key = sample
        again = Batches(lambda step, chunk: batch, inner_steps, inner_steps)
        return local.train(key, local.proximal(task.loss, centre, prox_weight), theta, again, optimizer, trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order = tagged(key, "order")
        if epochs is None:
            batches = data["train"].endless(order, batch_size, local_rounds)
        else:
            batches = data["train"].epochs(order, batch_size, epochs)
        batches = batches.keyed(tagged(key, "loss"))

        def step(r: Any, carry: Any) -> Any:
            theta, own, total = carry
            theta, loss = towards_theta(theta, own, batches.get(r, 0))
            # w_i ← w_i - η λ (w_i - θ): λ (w - θ) is the gradient of the envelope. Buffers follow θ.
            new = jax.tree.map(lambda move, w, t: w - step_size * (w - t) if move else t, interpolated, own, theta)
            return theta, loops.like(new, own), total + loss

        start = (received.model, received.memory if keep_local else received.model, jnp.zeros(()))
        _, own, total = loops.fori_loop(batches.steps, step, start)
        return Trained(own, {"loss": total / jnp.maximum(batches.steps, 1)}, memory=own if remembers else ())

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        if remembers:
            return received.memory
        batches = support.epochs(tagged(key, "order"), batch_size, test_epochs).keyed(tagged(key, "loss"))

        def step(t: Any, theta: Variables) -> Variables:
            return towards_theta(theta, received.model, batches.get(t, 0))[0]

        return loops.fori_loop(batches.steps, step, received.model)

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: model if remembers else (),
        refuses={"feedback": "with keep_local, w_i holds what was left out of its last upload"} if keep_local else {},
    )
