"""SCAFFOLD: FedAvg whose local steps are corrected by control variates, so that clients do not drift apart.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020,
arXiv 1910.06378, Algorithm 1.

| paper | here | shape |
|---|---|---|
| x, y_i | server's and client's model | |
| c | server's extra state | like the trainable leaves |
| c_i | a client's memory | like the trainable leaves |
| eta_l, eta_g | `lr`, `server_optimizer=optax.sgd(eta_g)` | |
| K | steps of `epochs` passes | |
| option I, II | `control="gradient"`, `"path"` | |

Differs from the paper: nothing but that buffers, which have no control variate, are averaged.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, State, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Key, Task, Variables


def scaffold(
    task: Task,
    *,
    lr: Any = 0.01,
    epochs: int = 1,
    batch_size: int = 32,
    control: str = "path",
    finetune_epochs: int = 0,
    finetune: masks.MaskSpec = "all",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """SCAFFOLD. All clients, new ones too, test with the server's model, after fine-tuning if there is any.

    Local training is plain SGD and clients count equally: both are what makes the control variates average gradients.

    Args:
      task: what is learned.
      lr: local learning rate; may be traced.
      epochs: passes over the train view.
      batch_size: samples a step.
      control: how a client renews its control variate: "path", from the way that it went (option II), or "gradient", the full
        gradient at the server's model (option I).
      finetune_epochs: passes over the support view before a client predicts.
      finetune: mask of the leaves that fine-tuning moves.
      **options: those of `federated`.

    Raises:
      ValueError: a rate or count out of range, an unknown option.
    """
    checks.positive("lr", lr)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.count("finetune_epochs", finetune_epochs, least=0)
    checks.one_of("control", control, ("path", "gradient"))
    trainable = task.trainable(masks.variables_shape(task))
    moves_at_test = masks.intersection(masks.resolve(finetune, task, name="finetune"), trainable)

    def corrected(correction: Any) -> optax.GradientTransformation:
        add = optax.stateless(lambda gradient, _: optax.tree.add(gradient, correction))
        return optax.chain(add, optax.sgd(lr))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order_key, key = jax.random.split(key)
        c, own = received.extra, received.memory
        batches = data["train"].epochs(order_key, batch_size, epochs)
        # y ← y - η (g(y) + c - c_i)
        model, loss = local.train(key, task.loss, received.model, batches, corrected(optax.tree.sub(c, own)), trainable)
        start, buffers = masks.split(received.model, trainable)
        if control == "path":
            # c_i ← c_i - c + (x - y) / (K η)
            way = optax.tree.sub(start, masks.split(model, trainable)[0])
            renewed = optax.tree.add(optax.tree.sub(own, c), optax.tree.scale(1 / (jnp.maximum(batches.steps, 1) * lr), way))
        else:
            gradient = jax.grad(local.parameter_loss(task, buffers))
            renewed = data["train"].full().keyed(key).mean(lambda pair: gradient(start, pair), 0)
        renewed = jax.tree.map(lambda new, old: new.astype(old.dtype), renewed, own)
        weight = jnp.ones(())
        return Trained(model, weight, {"loss": loss}, memory=renewed, statistics=optax.tree.sub(renewed, own))

    def update_control(state: State, change: Any, returned: jax.Array, num_clients: int) -> Any:
        # c ← c + 1/N Σ (c_i⁺ - c_i), the sum over the cohort.
        return optax.tree.add(state.extra, optax.tree.scale(returned / num_clients, change))

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        passes = {"epochs": finetune_epochs, "batch_size": batch_size}
        return local.train_epochs(key, task.loss, received.model, support, optax.sgd(lr), moves_at_test, **passes)[0]

    def zeros(model: Any) -> Any:
        return optax.tree.zeros_like(masks.split(model, trainable)[0])

    return federated(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=masks.nothing(task),
        trainable=trainable,
        init_memory=lambda key, model, num_clients: zeros(model),
        init_extra=lambda model, data: zeros(model),
        update_extra=update_control,
        **options,
    )
