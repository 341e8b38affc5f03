"""FedALA: FedAvg whose clients blend their last local model with the global one, leaf by leaf, by weights that they learn.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: "FedALA: adaptive local aggregation for personalized federated learning", AAAI 2023,
arXiv 2212.01197, Algorithm 1.

| paper | here | shape |
|---|---|---|
| Theta^{t-1} | `received.model` | like the model |
| Theta_i^{t-1}, W_i | `Own.model`, `Own.weights` | the higher layers of the model |
| hat Theta_i^t | what `initialise` makes | like the model |
| p (higher layers) | `adapts` | mask |
| eta, s % | `weight_lr`, `sample_share` | |
| alpha | `lr` | |

Differs from the paper: "until convergence" means that the mean losses of the last `window` passes have a standard deviation
below `tolerance`, or `most_passes` passes. All passes of a round go over the same random samples. The first round of a client,
in which it has no local model, is the paper's round 1, whenever it comes. Lower layers take all of the global model, buffers
too. Differs from the authors' code (system/utils/ALA.py of TsingZ0/FedALA and TsingZ0/PFLlib): there all clients are initialised
in each round and tested with that model, here those of the cohort, and those that are tested fit their weights to the support
view instead of train samples; convergence is judged by the last batch of a pass (`converged_by="last_batch"`). Lines, and what
the two repositories do differently, are in docs/authors_code.md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, loops, masks
from fedjax_meta.builders import described, method_builder
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, PyTree, Rate, Variables


class Own(NamedTuple):
    """A client's memory: the higher layers of its local model, their weights W in [0, 1], whether W has converged once."""

    model: PyTree
    weights: PyTree
    converged: jax.Array


def clipped_sgd(rate: Rate) -> optax.GradientTransformation:
    """w ← clip(w - rate * gradient, 0, 1)."""
    inside = optax.stateless(lambda change, w: jax.tree.map(lambda c, w: jnp.clip(w + c, 0, 1) - w, change, w))
    return optax.chain(optax.sgd(rate), inside)


@described("blends own and shared model", "Zhang et al. 2212.01197")
@method_builder
def fedala(  # over 80 lines: its rules share ten options, which closures keep short
    task: Task,
    *,
    lr: Rate = 0.005,
    weight_lr: Rate = 1.0,
    sample_share: Rate = 0.8,
    adapts: masks.MaskSpec = "head",
    window: int = 10,
    tolerance: Rate = 0.1,
    most_passes: int = 100,
    converged_by: str = "mean",
    epochs: int = 1,
    batch_size: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "samples",
) -> Method:
    """FedALA. A known client tests with its initialised model, weights fitted to its support set; a new one with the server's.

    Args:
      task: what is learned.
      lr: learning rate of local training; may be traced, as the next two and `tolerance`.
      weight_lr: eta, learning rate of the weights W; 0 keeps them at 1 and is FedAvg.
      sample_share: share of the samples that the weights are learned on.
      adapts: mask of the higher layers, which have weights; "last:2" is p = 2.
      window: how many passes the test of convergence looks at.
      tolerance: standard deviation of their losses below which the weights have converged.
      most_passes: passes after which a client stops in any case.
      converged_by: which loss of a pass the test looks at, the "mean" of its batches or the "last_batch", as in the authors'
        code, which also wants one pass more than `window`.
      epochs, batch_size, optimizer, weighting: as in `fedavg`; the weights are learned in batches of this size too.

    Raises:
      ValueError: a rate, share or count out of range, an unknown mask.
    """
    checks.not_negative("weight_lr", weight_lr)
    checks.share("sample_share", sample_share)
    checks.positive("sample_share", sample_share)
    checks.count("window", window, least=2)
    checks.not_negative("tolerance", tolerance)
    checks.count("most_passes", most_passes)
    checks.one_of("converged_by", converged_by, ("mean", "last_batch"))
    by_last = converged_by == "last_batch"
    trainable = task.trainable(masks.variables_shape(task))
    higher = masks.intersection(masks.resolve(adapts, task, name="adapts"), trainable)

    def initialise(key: Key, received: Received, view: ClientView) -> tuple[Variables, PyTree, jax.Array]:
        """(initialised model, W, passes over the samples); the model as received for a client without a local one."""
        own = received.memory
        sent, lower = masks.split(received.model, higher)

        def blend(weights: PyTree) -> Variables:
            return masks.merge(jax.tree.map(lambda v, g, w: v + (g - v) * w, own.model, sent, weights), lower)

        def loss(state: Any, batch: Batch, key: Key) -> tuple[jax.Array, Any]:
            value = task.loss(blend(state[0]), batch, key)[0]
            return value, (state[0], value) if by_last else state

        batches, loss_key = view.epochs(tagged(key, "ala"), batch_size, share=sample_share), tagged(key, "ala loss")
        last = (jnp.zeros(()),) if by_last else ()
        moves = (jax.tree.map(lambda _: True, own.weights), *(False for _ in last))
        most = jnp.where(received.seen, jnp.where(own.converged, 1, most_passes), 0)

        def one_pass(number: jax.Array, weights: PyTree) -> tuple[PyTree, jax.Array]:
            key = jax.random.fold_in(loss_key, number)
            (weights, *final), mean = local.train(key, loss, (weights, *last), batches, clipped_sgd(weight_lr), moves)
            return weights, final[0] if by_last else mean

        steady = {"least": window + by_last, "window": window, "tolerance": tolerance}
        weights, passes = loops.until_steady(one_pass, own.weights, most=most, **steady)
        return blend(weights), weights, passes

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, weights, passes = initialise(key, received, data["train"])
        times = {"epochs": epochs, "batch_size": batch_size}
        model, value = local.train_epochs(key, task.loss, model, data["train"], optimizer(lr), trainable, **times)
        own = Own(masks.split(model, higher)[0], weights, jnp.asarray(received.seen))
        return Trained(model, {"loss": value, "ala_passes": passes}, memory=own)

    def init_memory(key: Key, model: PyTree, num_clients: int) -> Own:
        mine = masks.split(model, higher)[0]
        return Own(mine, jax.tree.map(jnp.ones_like, mine), jnp.zeros((), bool))

    return Method(
        init=task.init,
        client=client,
        personalize=lambda key, received, support: initialise(key, received, support)[0],
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        init_memory=init_memory,
    )


REDUCES_TO = (
    Reduction("FedALA whose weights stay at 1 is FedAvg", "fedala", {"weight_lr": 0.0}, "fedavg", {}),
    Reduction("FedALA without higher layers is FedAvg", "fedala", {"adapts": "none"}, "fedavg", {}),
)
