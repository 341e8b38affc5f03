"""Per-FedAvg: in a round, each client takes tau meta-steps on batches of its train view, and the server averages the models.

Fallah, Mokhtari, Ozdaglar: "Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning
approach", NeurIPS 2020, arXiv 2002.07948, Algorithm 1. A step draws three independent batches and descends along
(I - alpha H(w; b2)) grad f(w - alpha grad f(w; b0); b1).

| paper | here | shape |
|---|---|---|
| alpha, beta | `inner_lr`, `outer_lr` | scalars |
| tau | `local_steps` | int |
| D, D', D'' | batches b0, b1, b2 of `batch_size` | `[B, ...]` |
| FO, HF | `estimator=meta.first_order`, `meta.hessian_free` | |

The default rates are those of pFedMe's reference code, which weights clients by their samples (`weighting="samples"`). Differs
from that code: no client adapts on its test samples. `statistics="reset"` and `test_batch_size=20` are what the authors of MTFL
(Mills, Hu, Min, arXiv 2007.09236) run as Per-FedAvg: their code puts a client's running statistics back after every step, so that
they stay as they were initialised, and a test takes its step on one batch of training samples, which moves them once.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks, meta
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Population, Received, Reduction, Trained
from fedjax_meta.data import Batches, ClientData, ClientView
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.keys import tagged
from fedjax_meta.methods.fedmeta import fedmeta
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, Mask, Rate, Variables


@described("MAML steps, then the mean", "Fallah et al. 2002.07948")
@method_builder
def perfedavg(
    task: Task,
    *,
    inner_lr: Rate = 0.01,
    outer_lr: Rate = 0.001,
    estimator: Callable[[meta.InnerOptimizer], meta.Estimator] = meta.hessian_free,
    outer_optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    outer_slots: str = "fresh",
    local_steps: int = 4,
    batch_size: int | None = 20,
    test_lr: Rate | None = None,
    test_steps: int = 1,
    test_batch_size: int | None = None,
    statistics: str = "adapted",
    learned_rates: bool = False,
    inner_optimizer: Callable[[Any], optax.GradientTransformation] | None = None,
    adapts: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    personal_rates: masks.MaskSpec | None = None,
    score: str = "online",
    weighting: str = "uniform",
) -> Method:
    """Per-FedAvg with any meta-gradient and any personal leaves; Hessian-free (HF) by default.

    Every client takes `test_steps` on its support view before it predicts. A client that never took part does so from the
    server's model; where leaves are personal, see `fedmeta`.

    Args:
      task, outer_optimizer, outer_slots, adapts, personal, personal_rates, score, weighting: as in `fedmeta`.
      inner_lr: alpha.
      outer_lr: beta.
      estimator: how the meta-gradient is found. `meta.exact` and `meta.first_order` do not read the third batch.
      local_steps: tau, meta-steps of a client in a round.
      batch_size: samples of each batch; `None` takes all samples of the train view for each of the three.
      test_lr: rate of the steps in a test; `inner_lr` when not given.
      test_steps: full-batch steps on a test client's support view; batch norm has the statistics of each of its chunks, see
        `ClientView.full`.
      test_batch_size: take them on so many random samples of the view, the same in all steps; on all when not given.
      statistics: how running statistics move. "adapted": by a pass of the adapted model over the query view after a round;
        "reset": not in a round, and by the steps of a test alone.
      learned_rates, inner_optimizer: as in `fedmeta`. Learned rates need an estimator that has a gradient for them.

    Raises:
      ValueError: an option out of range, options that exclude each other.
    """
    checks.one_of("statistics", statistics, ("adapted", "reset"))
    if test_batch_size is not None:
        checks.count("test_batch_size", test_batch_size)

    def draw(key: Key, data: ClientData, step: Any) -> tuple[meta.WithHessian, Batches]:
        b0, b1, b2 = independent_batches(jax.random.fold_in(key, step), data["train"], batch_size)
        return meta.WithHessian(b0, b2), b1

    method = fedmeta(
        task,
        inner_lr=inner_lr,
        outer_lr=outer_lr,
        estimator=estimator,
        outer_optimizer=outer_optimizer,
        outer_slots=outer_slots,
        batch_size=None,
        inner_steps=test_steps,
        meta_steps=local_steps,
        draw=draw,
        test_lr=test_lr,
        learned_rates=learned_rates,
        inner_optimizer=inner_optimizer,
        adapts=adapts,
        personal=personal,
        personal_rates=personal_rates,
        score=score,
        weighting=weighting,
    )
    if statistics == "reset":
        if learned_rates or inner_optimizer is not None or personal != "none":
            raise ValueError('statistics="reset" takes no learned_rates, inner_optimizer or personal leaves')
        optimizer = optax.sgd(inner_lr if test_lr is None else test_lr)
        method = _reset(method, task, optimizer, masks.resolve(adapts, task, name="adapts"), test_steps)
    return method if test_batch_size is None else _on_a_batch(method, test_batch_size)


def _reset(method: Method, task: Task, optimizer: optax.GradientTransformation, adapts: Mask, steps: int) -> Method:
    """Rounds that leave running statistics as they are, and tests whose steps move them.

    Raises:
      ValueError: a model without running statistics.
    """
    trainable = task.trainable(masks.variables_shape(task))
    if all(jax.tree.leaves(trainable)):
        raise ValueError('statistics="reset" needs a model with running statistics; this one has none')
    moving = masks.intersection(adapts, trainable)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        trained = method.client(key, received, data)
        kept = masks.split(received.model, trainable)[1]
        return trained._replace(model=masks.merge(masks.split(trained.model, trainable)[0], kept))

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        return local.train(tagged(key, "support"), task.loss, received.model, support.full(steps), optimizer, moving)[0]

    return dataclasses.replace(method, client=client, personalize=personalize)


def _on_a_batch(method: Method, size: int) -> Method:
    """Tests that read a random batch of the support view."""

    def batch_of(key: Key, view: ClientView) -> ClientView:
        keys, stored, whole = permutation_keys(tagged(key, "test batch")), view.order, view.size

        def order(index: jax.Array) -> jax.Array:
            index = permute(keys, index, whole)
            return index if stored is None else stored(index)

        return dataclasses.replace(view, size=jnp.minimum(whole, size), max_size=min(view.max_size, size), order=order)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        return method.personalize(key, received, batch_of(key, support))

    def new_client(key: Key, population: Population, support: ClientView) -> Variables:
        assert method.new_client is not None
        return method.new_client(key, population, batch_of(key, support))

    return dataclasses.replace(method, personalize=personalize, new_client=method.new_client and new_client)


@described("with first-order steps")
@variant(perfedavg, estimator=meta.first_order)
def perfedavg_fo(task: Task) -> Method:
    """Per-FedAvg (FO): the first-order meta-gradient, which leaves the Hessian out."""


@described("with Hessian products")
@variant(perfedavg, estimator=partial(meta.hessian_free, method="product"))
def perfedavg_exact(task: Task) -> Method:
    """Per-FedAvg with exact Hessian-vector products on the third batch, where HF takes differences of gradients."""


def independent_batches(key: Key, view: ClientView, batch_size: int | None, count: int = 3) -> list[Batches]:
    """`count` batches of one step each, from one shuffle of a view; they share no sample where the view has enough of them.

    In a smaller view the shuffled samples repeat, so that a batch is always full. `batch_size=None` gives the whole view each
    time. The key is consumed.
    """
    if batch_size is None:
        return [view.full()] * count
    keys, size = permutation_keys(key), jnp.maximum(jnp.asarray(view.size, jnp.int32), 1)

    def batch(number: int) -> Batch:
        index = (number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)) % size
        return view.take(permute(keys, index, size), jnp.ones(batch_size))

    def alone(number: int) -> Batches:
        return Batches(lambda step, chunk: batch(number), 1, 1)

    return [alone(number) for number in range(count)]


REDUCES_TO = (
    Reduction(
        "Per-FedAvg on full batches without adaptation is FedAvg on full batches",
        "perfedavg",
        {"inner_lr": 0.0, "outer_lr": 0.1, "local_steps": 2, "batch_size": None},
        "fedavg",
        {"lr": 0.1, "epochs": 2, "batch_size": 128, "weighting": "uniform"},
    ),
    Reduction(
        "without adaptation the Hessian does not matter",
        "perfedavg",
        {"inner_lr": 0.0, "outer_lr": 0.1},
        "perfedavg_fo",
        {"inner_lr": 0.0, "outer_lr": 0.1},
    ),
    Reduction(
        "on full batches, where the three batches are one, exact products give the exact meta-gradient",
        "perfedavg_exact",
        {"batch_size": None, "inner_lr": 0.1, "outer_lr": 0.1},
        "perfedavg",
        {"batch_size": None, "inner_lr": 0.1, "outer_lr": 0.1, "estimator": meta.exact},
    ),
)
