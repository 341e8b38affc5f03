"""MTFL: batch-norm leaves stay with their client as its patches, and the clients' optimiser may be federated too.

Mills, Hu, Min: "Multi-task federated learning for personalised deep neural networks in edge computing", arXiv 2007.09236 (the
MTFL paper), Algorithm 1 with the optimisers of its Table 1. FedBN: Li et al., ICLR 2021, arXiv 2102.07623.

| paper | here | shape |
|---|---|---|
| Omega, P_k | leaves outside and inside `private` | |
| private gamma, beta / mu, sigma / both | `private="bn_affine"` / `"bn_stats"` / `"bn"`; `"none"` is FL | |
| FedAvg, FedAdam | the federation's `server_optimizer`, see `fedopt` | |
| FedAvg-Adam | `optimizer=adam, federated_slots=True` | slots like the parameters |
| E, B, steps of an epoch | `epochs`, `batch_size`; or `steps` of the cyclic feeder | |
| n_k / n | `weighting="samples"` | `[C]` |

Slots of private leaves are private. The step count is averaged with the rest; with a common number of steps it stays exact.
The user accuracy of the paper is `evaluation.with_user_accuracy`.

Differs from the authors' code: slots start at 0, and no step on an all-zero batch is taken to create them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import Batches, ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


class Model(NamedTuple):
    """What is federated.

    Attributes:
      variables: the task's.
      slots: the optimiser's where they are federated, all floating-point; else ().
    """

    variables: Variables
    slots: PyTree


class Feeder(NamedTuple):
    """Where a client's endless run of shuffled passes stands.

    Attributes:
      seed: of the shuffles.
      drawn: samples drawn so far.
    """

    seed: jax.Array
    drawn: jax.Array


def adam(rate: Rate) -> optax.GradientTransformation:
    """The clients' Adam of MTFL."""
    return optax.adam(rate, eps=1e-7)


@described("own batch norm as patches", "Mills et al. 2007.09236")
@method_builder
def mtfl(  # over 80 lines: the rules share ten options
    task: Task,
    *,
    lr: Rate = 0.3,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    federated_slots: bool = False,
    private: masks.MaskSpec = "bn",
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 20,
    finetune_epochs: int = 0,
    statistics_epochs: int = 0,
    weighting: str = "samples",
) -> Method:
    """Federated averaging with private patches and, if wanted, a federated optimiser.

    A client that never took part has the server's model, whose private leaves are as they were initialised (or an average,
    with the federation's `average_personal`). Only `statistics_epochs` and `finetune_epochs` fit them to it.

    Args:
      task, lr, optimizer, weighting: as in `fedavg`.
      federated_slots: clients download the optimiser's slots, continue from them, and send them back to be averaged
        (FedAvg-Adam); else they start afresh in each round.
      private: mask of the leaves that stay with their client.
      epochs: passes over the train view in a round, each batch at most `batch_size`.
      steps: take this many full batches instead, from an endless run of passes that continues where the client's last round
        stopped (the authors' feeder; `protocols.local_steps` gives the paper's number).
      batch_size: B.
      finetune_epochs: passes over the support view before a client predicts; 0 is the paper's test. With 1 and the train view
        as support, a client is tested after its local training.
      statistics_epochs: passes over the support view before the fine-tuning. They move only the running statistics and no
        parameter, so that the statistics belong to the model that is tested. The paper has none.

    Raises:
      ValueError: an option out of range, a mask that selects nothing in this model (batch norms where it has none).
    """
    checks.count("statistics_epochs", statistics_epochs, least=0)
    if steps is not None:
        checks.count("steps", steps)
        if epochs != 1:
            raise ValueError(f"epochs={epochs} and steps={steps} cannot both be given: the steps are those of a round")
    descent = optimizer(lr)
    trainable = task.trainable(masks.variables_shape(task))
    own = masks.resolve(private, task, name="private")

    def fresh_slots(variables: Variables) -> PyTree:
        if not federated_slots:
            return ()
        slots = descent.init(masks.split(variables, trainable)[0])
        # Step counts are averaged, so they are floating-point numbers here.
        return jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(leaf.dtype, float)), slots)

    def roles() -> Model:
        """Slots are buffers; those of private leaves stay with their client."""
        own_slots: Any = ()
        if federated_slots:
            own_slots = optax.tree.map_params(
                descent,
                lambda _, keep: keep,
                jax.eval_shape(fresh_slots, masks.variables_shape(task)),
                masks.split(own, trainable)[0],
                transform_non_params=lambda _: False,
            )
        return masks.roles(Model(own, own_slots), Model(trainable, masks.nothing_like(own_slots)))

    def init(key: Key) -> Model:
        variables = task.init(key)
        return Model(variables, fresh_slots(variables))

    def init_memory(key: Key, model: Model, num_clients: int) -> Feeder | tuple[()]:
        del model, num_clients
        return () if steps is None else Feeder(jax.random.bits(key, dtype=jnp.uint32), jnp.zeros((), jnp.int32))

    def descend(key: Key, model: Model, batches: Batches) -> tuple[Model, jax.Array]:
        if not federated_slots:
            variables, loss = local.train(key, task.loss, model.variables, batches, descent, trainable)
            return Model(variables, ()), loss
        variables, slots, loss = local.train_on(key, task.loss, *model, batches, descent, trainable)
        return Model(variables, slots), loss

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        memory = received.memory
        if steps is None:
            batches = data["train"].epochs(tagged(key, "order"), batch_size, epochs)
        else:
            batches = data["train"].endless(jax.random.key(memory.seed), batch_size, steps, memory.drawn)
            memory = memory._replace(drawn=memory.drawn + batches.steps * batch_size)
        model, loss = descend(tagged(key, "loss"), received.model, batches)
        return Trained(model, {"loss": loss}, memory)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        start, passes = received.model.variables, {"epochs": statistics_epochs, "batch_size": batch_size}
        no_step, statistics_key = optax.set_to_zero(), tagged(key, "statistics")
        variables, _ = local.train_epochs(statistics_key, task.loss, start, support, no_step, trainable, **passes)
        model = received.model._replace(variables=variables)
        if finetune_epochs > 0:
            batches = support.epochs(tagged(key, "order"), batch_size, finetune_epochs)
            model, _ = descend(tagged(key, "loss"), model, batches)
        return model.variables

    return Method(
        init=init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=roles(),
        weighting=weighting,
        init_memory=init_memory,
    )


@described("MTFL with averaged Adam")
@variant(mtfl, lr=0.003, optimizer=adam, federated_slots=True)
def mtfl_fedavg_adam(task: Task) -> Method:
    """MTFL with FedAvg-Adam: the clients' Adam is federated too, apart from the slots of private leaves.

    A client that never took part has private leaves as they were initialised.
    """


@described("FedAvg with averaged Adam")
@variant(mtfl_fedavg_adam, private="none")
def fedavg_adam(task: Task) -> Method:
    """FedAvg-Adam, the optimiser of the MTFL paper with nothing private: moments are averaged together with the parameters.

    All clients, known or new, test with the server's model.
    """


@described("own batch norm", "Li et al. 2102.07623")
@variant(mtfl, lr=0.01, batch_size=32, weighting="uniform")
def fedbn(task: Task) -> Method:
    """FedBN: FedAvg whose batch norms stay with their clients; defaults of its authors' code.

    A client that never took part has batch norms as they were initialised, their running statistics too.
    """


REDUCES_TO = (
    Reduction("MTFL with nothing private is FedAvg", "mtfl", {"private": "none"}, "fedavg", {}),
    Reduction("FedAvg-Adam is MTFL's with nothing private", "mtfl_fedavg_adam", {"private": "none"}, "fedavg_adam", {}),
    Reduction("FedAvg-Adam whose optimiser is SGD is FedAvg", "fedavg_adam", {"optimizer": optax.sgd}, "fedavg", {}),
)
