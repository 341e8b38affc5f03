"""MTFL: batch-norm leaves stay with their client as its patches, and the clients' optimiser may be federated too.

Mills, Hu, Min: "Multi-task federated learning for personalised deep neural networks in edge computing", arXiv 2007.09236 (S4),
Algorithm 1 with the optimisers of its Table 1. FedBN: Li et al., ICLR 2021, arXiv 2102.07623.

| paper | here | shape |
|---|---|---|
| Omega, P_k | leaves outside and inside `private` | |
| private gamma, beta / mu, sigma / both | `private="bn_affine"` / `"bn_stats"` / `"bn"`; `"none"` is FL | |
| FedAvg, FedAdam | `server_optimizer`, see `fedopt` | |
| FedAvg-Adam | `optimizer=adam, federated_slots=True` | slots like the parameters |
| E, B, steps of an epoch | `epochs`, `batch_size`; or `steps` of the cyclic feeder | |
| n_k / n | `weighting="samples"` | `[C]` |

Slots of private leaves are private. The step count is averaged with the rest; with a common number of steps it stays exact.
The user accuracy of the paper is `evaluate.with_user_accuracy`.

Differs from the authors' code: slots begin at 0 and no step on an all-zero batch is taken to create them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import Batches, ClientData, ClientView
from fedjax_meta.task import Key, Task, Variables


class Model(NamedTuple):
    """The task's variables and, where they are federated, the optimiser's slots (all floating-point)."""

    variables: Any
    slots: Any


class Feeder(NamedTuple):
    """Where a client's endless run of shuffled passes stands: the seed of the shuffles and the samples drawn so far."""

    seed: jax.Array
    drawn: jax.Array


def adam(lr: Any) -> optax.GradientTransformation:
    """The clients' Adam of MTFL."""
    return optax.adam(lr, eps=1e-7)


def mtfl(
    task: Task,
    *,
    lr: Any = 0.3,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    federated_slots: bool = False,
    private: masks.MaskSpec = "bn",
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 20,
    finetune_epochs: int = 0,
    statistics_epochs: int = 0,
    weighting: str = "samples",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Federated averaging with private patches and, if wanted, a federated optimiser.

    A client that never took part has the server's model, whose private leaves are as they were initialised (or an average, with
    `average_personal`), and nothing but `statistics_epochs` and `finetune_epochs` fits them to it.

    Args:
      task: what is learned.
      lr: learning rate of the clients; may be traced.
      optimizer: `lr -> optax transformation` of the clients.
      federated_slots: clients download the optimiser's slots, go on from them, and send them back to be averaged
        (FedAvg-Adam); else they start afresh in every round.
      private: mask of the leaves that stay with their client.
      epochs: passes over the train view in a round, each batch at most `batch_size`.
      steps: take this many full batches instead, from an endless run of passes that goes on where the client's last round
        stopped (the authors' feeder; `protocols.local_steps` gives the paper's number).
      batch_size: B.
      finetune_epochs: passes over the support view before a client predicts; 0 is the paper's test. With 1 and the train view
        as support, a client is tested after its local training.
      statistics_epochs: passes over the support view before those, which leave the parameters as they came and only move the
        running statistics: these then belong to the model that is tested. The paper has none.
      weighting: "samples", "query" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a rate, size or count out of range, a mask that selects nothing in this model (batch norms where it has
        none).
    """
    checks.positive("lr", lr)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.count("finetune_epochs", finetune_epochs, least=0)
    checks.count("statistics_epochs", statistics_epochs, least=0)
    if steps is not None:
        checks.count("steps", steps)
        if epochs != 1:
            raise ValueError(f"epochs={epochs} and steps={steps} cannot both be given: the steps are those of a round")
    shapes = masks.variables_shape(task)
    trainable, own = task.trainable(shapes), masks.resolve(private, task, name="private")
    rule = optimizer(lr)

    def empty_slots(variables: Variables) -> Any:
        if not federated_slots:
            return ()
        # Counts are averaged, so they are real numbers.
        slots = rule.init(masks.split(variables, trainable)[0])
        return jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(leaf.dtype, float)), slots)

    def init(key: Key) -> Model:
        variables = task.init(key)
        return Model(variables, empty_slots(variables))

    own_slots: Any = ()
    if federated_slots:
        own_slots = optax.tree.map_params(
            rule,
            lambda _, keep: keep,
            jax.eval_shape(empty_slots, shapes),
            masks.split(own, trainable)[0],
            transform_non_params=lambda _: False,
        )

    def descend(key: Key, model: Model, batches: Batches) -> tuple[Model, jax.Array]:
        if not federated_slots:
            variables, loss = local.train(key, task.loss, model.variables, batches, rule, trainable)
            return Model(variables, ()), loss
        variables, slots, loss = local.train_on(key, task.loss, *model, batches, rule, trainable)
        return Model(variables, slots), loss

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order_key, key = jax.random.split(key)
        memory = received.memory
        if steps is None:
            batches = data["train"].epochs(order_key, batch_size, epochs)
        else:
            seed = jnp.where(memory.drawn == 0, jax.random.bits(order_key, dtype=jnp.uint32), memory.seed)
            batches = data["train"].wrapped(jax.random.key(seed), batch_size, steps, memory.drawn)
            memory = Feeder(seed, memory.drawn + batches.steps * batch_size)
        model, loss = descend(key, received.model, batches)
        return Trained(model, client_weight(weighting, data), {"loss": loss}, memory)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        model, (order_key, key, statistics_key, still_key) = received.model, jax.random.split(key, 4)
        if statistics_epochs > 0:
            batches = support.epochs(statistics_key, batch_size, statistics_epochs)
            still = local.train(still_key, task.loss, model.variables, batches, optax.set_to_zero(), trainable)[0]
            model = model._replace(variables=still)
        if finetune_epochs > 0:
            model, _ = descend(key, model, support.epochs(order_key, batch_size, finetune_epochs))
        return model.variables

    return federated(
        init=init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=Model(own, own_slots),
        trainable=Model(trainable, jax.tree.map(lambda _: False, own_slots)),
        init_memory=lambda key, model, population: (
            () if steps is None else Feeder(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.int32))
        ),
        **options,
    )


fedavg_adam = partial(mtfl, lr=0.003, optimizer=adam, federated_slots=True)
"""MTFL with FedAvg-Adam; `private="none"` gives FedAvg-Adam by itself. Options are those of `mtfl`."""


def fedbn(task: Task, *, lr: Any = 0.01, batch_size: int = 32, weighting: str = "uniform", **options: Any) -> Algorithm:
    """FedBN: FedAvg whose batch norms stay with their clients. Defaults of its authors' code; options are those of `mtfl`.

    A client that never took part has batch norms as they were initialised, their running statistics too: see `mtfl`.
    """
    return mtfl(task, lr=lr, batch_size=batch_size, weighting=weighting, private="bn", **options)
