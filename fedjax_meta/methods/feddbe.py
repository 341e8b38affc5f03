"""FedDBE: FedAvg of models whose features have a common mean, with a shift of the features that each client keeps.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: "Eliminating domain bias for federated learning in representation space", NeurIPS
2023, arXiv 2311.14975; the steps are those of the authors' code, TsingZ0/DBE, system/flcore/clients/clientDBE.py 39-98 and
servers/serverDBE.py 14-35.

| paper | here | shape |
|---|---|---|
| bar z_i^p, the personalized representation bias memory | a client's memory, `Local.shift` in training | `[d]` |
| bar z_i^g | `Local.mean`, a running mean of features in a round | `[d]` |
| bar z^g | the server's extra state, fixed after the first round | `[d]` |
| kappa, mu | `regularisation`, `momentum` | scalars |

After the first round, which is one of FedAvg, the head sees features plus shift, and kappa / 2 times the mean squared distance of
the running mean from the global one is added to the loss; its gradient goes through the last batch alone. Differs from the code:
the models of the first round are averaged (there thrown away: `first_round="mean"`), and the global mean is that of its cohort
(there of all clients). Every upload has the feature mean, which the server needs in the first round only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.task import Batch, Task, require_parts
from fedjax_meta.types import Key, Mask, Rate, Variables


class Local(NamedTuple):
    """What a client trains: the model, its shift of the features `[d]`, and the running mean of a round `[d]`, a buffer."""

    model: Variables
    shift: jax.Array
    mean: jax.Array


class Common(NamedTuple):
    """The server's extra state: the global mean of features `[d]`, and whether there is one yet."""

    mean: jax.Array
    known: jax.Array


def keep_first(state: State, mean: jax.Array, weight: Any, num_clients: int) -> Common:
    """A `Method.update_extra`: the mean of the first round stays."""
    del num_clients
    return Common(jnp.where(state.extra.known, state.extra.mean, mean), state.extra.known | (weight > 0))


@described("a shift of features as one's own", "Zhang et al. 2311.14975")
@method_builder
def feddbe(
    task: Task,
    *,
    lr: Rate = 0.005,
    regularisation: Rate = 50.0,
    momentum: Rate = 1.0,
    first_round: str = "fedavg",
    epochs: int = 1,
    batch_size: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
) -> Method:
    """FedDBE. A known client tests with its shift; one that never took part has none and tests with the server's model.

    Args:
      task: a classifier with features and head, without buffers and dropout.
      regularisation: kappa >= 0; may be traced, as `momentum`.
      momentum: mu in [0, 1], share of a batch in the running mean.
      first_round: "fedavg", or "mean" (the authors' code): it finds the global mean, and the model stays as it is.
      lr, epochs, batch_size, optimizer, weighting: as in `fedavg`; the shift is trained with the model, at the same rate.

    Raises:
      ValueError: a task without features, with buffers, dropout or an opaque loss, an option out of range.
    """
    extract, head = features.require_features(task, "feddbe", buffers=False)
    parts = require_parts(task, "feddbe", as_predicted=True)
    checks.not_negative("regularisation", regularisation)
    checks.share("momentum", momentum)
    checks.one_of("first_round", first_round, ("fedavg", "mean"))
    width = features.head_shape(task, "feddbe")[1]
    everything = masks.everything(task)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        common, known = received.extra.mean, received.extra.known

        def loss(variables: Local, batch: Batch, key: Key) -> tuple[jax.Array, Local]:
            batch, key = parts.prepare(batch, key)
            z = extract(variables.model, batch.x)
            here = jnp.sum(jnp.where(batch.weight[:, None] > 0, z, 0), 0) / jnp.maximum(jnp.sum(batch.weight), 1)
            mean = (1 - momentum) * variables.mean + momentum * here
            away = jnp.where(known, regularisation, 0) * jnp.mean((mean - common) ** 2) / 2
            value = parts.criterion(head(variables.model, z + jnp.where(known, variables.shift, 0)), batch)
            return value + away, variables._replace(mean=mean)

        start = Local(received.model, received.memory, jnp.zeros(width))
        moves: Mask = Local(everything, True, False)  # type: ignore[arg-type]
        passes = {"epochs": epochs, "batch_size": batch_size}
        trained, value = local.train_epochs(key, loss, start, data["train"], optimizer(lr), moves, **passes)
        model = trained.model
        if first_round == "mean":
            model = jax.tree.map(lambda new, old: jnp.where(known, new, old), model, received.model)
        return Trained(model, {"loss": value}, memory=trained.shift, statistics=trained.mean)

    def personalize(key: Key, received: Received, support: ClientView) -> tuple[Variables, jax.Array]:
        del key, support
        return received.model, received.memory

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=lambda variables, x: head(variables[0], extract(variables[0], x) + variables[1]),
        roles=masks.roles(masks.nothing(task), everything),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: jnp.zeros(width),
        init_extra=lambda model, data: Common(jnp.zeros(width), jnp.zeros((), bool)),
        update_extra=keep_first,
        needs_classes=True,
        refuses={
            "sparsify": "the mean of features is sent once, so that what is left out never arrives",
            **dict.fromkeys(
                ("clip without noise", "an aggregator of changes"), "it would shrink the mean of features, which is no change"
            ),
        },
    )
